"""Markdown in the terminal: how it looks, that no text is lost, and that it does not depend on the chunks."""

from __future__ import annotations

import io
import re

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from rich.console import Console

from outrider.cli import markdown
from outrider.cli.markdown import MarkdownStream
from outrider.terminal import printable

STYLE = re.compile(r"\x1b\[[0-9;]*m")
CURSOR = re.compile(r"\x1b\[\?25[hl]")  # hidden while a block is redrawn


@pytest.fixture(autouse=True)
def draws_at_every_push(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(markdown, "REDRAW_EVERY_S", 0.0)
    monkeypatch.setattr(markdown, "MAX_DRAWING_SHARE", 1e9)


def rendered(*pieces: str, width: int = 60) -> str:
    """The lines that stay on the screen, with styles; the block that is being redrawn is not among them."""
    out = io.StringIO()
    console = Console(
        file=out, force_terminal=True, force_interactive=False, color_system="standard", width=width
    )
    stream = MarkdownStream(console)
    for piece in pieces:
        stream.push(piece)
    stream.finish()
    return CURSOR.sub("", out.getvalue())


def visible(text: str) -> str:
    return STYLE.sub("", text)


@pytest.mark.parametrize(
    ("source", "shown"),
    [
        ("# Title\n", "\x1b[1;4mTitle\x1b[0m\n"),
        ("a **bold** b", "a \x1b[1mbold\x1b[0m b\n"),
        ("*it* _it_", "\x1b[3mit\x1b[0m \x1b[3mit\x1b[0m\n"),
        ("- one\n  * two\n", " • one\n    • two\n"),
        ("1. one\n\n2. two\n", " 1 one\n 2 two\n"),
        ("3. three\n", " 3 three\n"),
        ("```python\nx = *y*\n```\nz", " x = *y*\n\nz\n"),
        ("中文**粗体**中文", "中文\x1b[1m粗体\x1b[0m中文\n"),
        ("one\ntwo\n\nthree", "one\ntwo\n\nthree\n"),
        ("[text](http://x.y)", "text (http://x.y)\n"),
    ],
)
def test_markdown_becomes_styles(source: str, shown: str) -> None:
    found = rendered(source)
    assert (found if "\x1b" in shown else visible(found)) == shown


@pytest.mark.parametrize(
    "source",
    [
        "2 * 3 * 4, 2*3*4, 2**3**4",
        "snake_case_name and x__init__y",
        "an *open mark\n\nand **another\n\nand `a third",
        "#hashtag, C#",
        "-5 degrees\n\n1.5 is 3/2\n\n2024 was",
        "if a < b: use <b>bold</b> &amp; &#27;[2J",
        "[1]: http://example.com",
        "a verse\nof two lines",
    ],
)
def test_text_that_only_looks_like_markup_is_shown(source: str) -> None:
    assert rendered(source) == f"{source}\n"


def test_control_characters_do_not_reach_the_terminal() -> None:
    assert printable("a\x1b[2J\x07\x9b1mb\r\n\tc") == "a[2J1mb\n\tc"
    source = 'a &#27;[2J `\x1b[2J`\n\n```\x1b]0;t\x07\n\x1b[2J\n```\n[x](http://\x1b[2J "\x9b")'
    assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f-\x9f]", visible(rendered(source)))


def test_an_unfinished_block_is_drawn_while_it_grows_and_never_higher_than_the_terminal() -> None:
    out = io.StringIO()
    console = Console(
        file=out, force_terminal=True, force_interactive=True, width=40, height=10, _environ={"TERM": "xterm"}
    )
    stream = MarkdownStream(console)
    stream.push("```\n")
    for number in range(30):
        out.seek(0)
        out.truncate()
        stream.push(f"line {number}\n")
        assert visible(out.getvalue()).endswith(f"line {number}")
        assert out.getvalue().count("\n") < 10
    stream.finish()
    lines = visible(out.getvalue()).split("\n")
    assert [line.split(" ", 1)[1] for line in lines[-31:-1]] == [f"line {number}" for number in range(30)]


# Marks, words and line starts, mixed so that markup of every kind comes up, whole, broken and nested.
SCRAPS = [
    "*",
    "**",
    "_",
    "`",
    "```",
    "~~~",
    "\\",
    "# ",
    "- ",
    "1. ",
    "> ",
    "|",
    "---",
    "\n",
    "\n",
    "\n\n",
    " ",
]
WORDS = [
    "a",
    "word",
    "python",
    "é",
    "中",
    "2",
    "x" * 60,
    ".",
    "#",
    "-",
    "+ ",
    "    ",
    "<b>",
    "&lt;",
    "[a]: b",
]
SOURCES = st.lists(st.sampled_from(SCRAPS + WORDS), max_size=20).map("".join)


@given(SOURCES, st.data())
@example("1. a\n\n2. b\n\n3. c", None)
@example("a\n***\nb", None)
@example("Title\n---\ntext\n- item", None)
@example("| a | b |\n|---|---|\n| 1 | 2 |\n\nend", None)
def test_the_chunks_in_which_the_text_comes_make_no_difference(
    source: str, data: st.DataObject | None
) -> None:
    whole = rendered(source)
    assert rendered(*source) == whole
    if data is not None:
        cuts = sorted(data.draw(st.lists(st.integers(0, len(source)), max_size=8)))
        assert (
            rendered(*(source[a:b] for a, b in zip([0, *cuts], [*cuts, len(source)], strict=True))) == whole
        )


@given(SOURCES)
def test_no_letter_is_lost(source: str) -> None:
    """But for the language of a code block, and cells of a table that have no heading."""
    source = re.sub(r"```|~~~|\|", "", source)

    def letters(text: str) -> list[str]:
        return sorted(character for character in text if character.isalpha())

    assert letters(visible(rendered(source, width=2000))) == letters(source)
