"""Markdown in the terminal: what is shown how, and that the pieces in which it comes make no difference."""

from __future__ import annotations

import re

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from outrider.cli.inline import MAX_SPAN

from outrider.cli.markdown import Markdown
from outrider.terminal import printable

STYLE = re.compile(r"\x1b\[([0-9;]*)m")


def rendered(*pieces: str) -> str:
    markdown = Markdown()
    return "".join([*map(markdown.push, pieces), markdown.finish()])


def visible(text: str) -> str:
    return STYLE.sub("", text)


def cells(text: str) -> list[tuple[str, str]]:
    """The screen: each character with the styles it was written in."""
    found, style, at = [], "", 0
    for mark in STYLE.finditer(text):
        found += [(character, style) for character in text[at : mark.start()]]
        style = "" if mark[1] == "0" else mark[1]
        at = mark.end()
    return found + [(character, style) for character in text[at:]]


def spans(text: str) -> list[tuple[str, str]]:
    """Runs of one style that are not plain: (style, text)."""
    runs: list[tuple[str, str]] = []
    for character, style in cells(text):
        if runs and runs[-1][0] == style:
            runs[-1] = (style, runs[-1][1] + character)
        else:
            runs.append((style, character))
    return [run for run in runs if run[0]]


@pytest.mark.parametrize(
    ("source", "shown", "styled"),
    [
        ("# Title\n", "Title\n", [("1;4", "Title")]),
        ("### A *b*\n", "A b\n", [("1", "A "), ("1;3", "b")]),
        ("a **bold** b", "a bold b", [("1", "bold")]),
        ("a __bold__ b", "a bold b", [("1", "bold")]),
        ("*it* _it_", "it it", [("3", "it"), ("3", "it")]),
        ("***both***", "both", [("1;3", "both")]),
        ("**a *b* c**", "a b c", [("1", "a "), ("1;3", "b"), ("1", " c")]),
        ("**a *b***", "a b", [("1", "a "), ("1;3", "b")]),
        ("use `x * y * z`!", "use x * y * z!", [("36", "x * y * z")]),
        ("``a`b``", "a`b", [("36", "a`b")]),
        ("**a `b** c` d**", "a b** c d", [("1", "a "), ("1;36", "b** c"), ("1", " d")]),
        ("- one\n  * two\n", "• one\n  • two\n", [("2", "• "), ("2", "• ")]),
        ("1. **one**\n", "1. one\n", [("2", "1. "), ("1", "one")]),
        ("```python\nx = *y*\n```\nz", "python\nx = *y*\nz", [("2", "python"), ("36", "x = *y*")]),
        ("~~~\n```\n~~~~\nz", "```\nz", [("36", "```")]),
        ("中文**粗体**中文", "中文粗体中文", [("1", "粗体")]),
    ],
)
def test_markup_becomes_style(source: str, shown: str, styled: list[tuple[str, str]]) -> None:
    assert visible(rendered(source)) == shown
    assert spans(rendered(source)) == styled


@pytest.mark.parametrize(
    "source",
    [
        "2 * 3 * 4, 2*3*4, 2**3**4",
        "snake_case_name and x__init__y",
        "an *open mark\nand **another\nand `a third",
        "#hashtag, #### \\# C#",
        "-5 degrees\n--- \n1.5 is 3/2\n2024 was",
        "\\(x\\) \\frac{a}{b}",
        "****four****",
        "``` no fence` here",
        "",
        "\n\n",
    ],
)
def test_text_that_only_looks_like_markup_is_kept(source: str) -> None:
    assert rendered(source) == source


def test_escaped_marks_are_text() -> None:
    assert rendered(r"\*a\* \_b\_ \`c\`") == "*a* _b_ `c`"


def test_a_mark_that_is_never_closed_holds_up_no_more_than_a_span() -> None:
    markdown = Markdown()
    shown = "".join(markdown.push(character) for character in "**" + "a b " * MAX_SPAN)
    assert len(shown) >= 4 * MAX_SPAN - MAX_SPAN


def test_plain_text_and_code_are_shown_as_they_come() -> None:
    markdown = Markdown()
    assert [markdown.push(piece) for piece in ("Hel", "lo ", "you")] == ["Hel", "lo ", "you"]
    markdown.push("\n```\n")
    assert visible(markdown.push("for")) == "for"


def test_control_characters_do_not_reach_the_terminal() -> None:
    assert printable("a\x1b[2J\x07\x9b1mb\r\n\tc") == "a[2J1mb\n\tc"


# Marks, words and line starts, mixed so that markup of every kind comes up, whole, broken and nested.
SCRAPS = ["*", "**", "***", "_", "__", "`", "``", "```", "~~~", "\\", "# ", "- ", "1. ", "\n", "\n", " "]
WORDS = ["a", "word", "python", "é", "中", "2", "x" * 60, ".", "#", "-", "+ ", "    "]
SOURCES = st.lists(st.sampled_from(SCRAPS + WORDS), max_size=40).map("".join)


@given(SOURCES, st.data())
@example("**" + "a" * (MAX_SPAN - 4) + "** b", None)
@example("**" + "a" * (MAX_SPAN - 3) + "** b", None)
@example("`" + "a" * (MAX_SPAN - 2) + "`\nb", None)
@example("*" + "`" * MAX_SPAN + "a*", None)
def test_any_chunking_gives_the_same_screen(source: str, data: st.DataObject | None) -> None:
    whole = cells(rendered(source))
    assert cells(rendered(*source)) == whole
    if data is not None:
        cuts = sorted(data.draw(st.lists(st.integers(0, len(source)), max_size=8)))
        pieces = [source[a:b] for a, b in zip([0, *cuts], [*cuts, len(source)], strict=True)]
        assert cells(rendered(*pieces)) == whole


@given(SOURCES)
def test_nothing_but_markup_is_lost(source: str) -> None:
    """What is shown is the source less some marks, in order; a bullet stands for its mark."""
    lost, rest = [], iter(source)
    for shown in visible(rendered(source)):
        for character in rest:
            if character == shown or (shown == "•" and character in "-*+"):
                break
            lost.append(character)
        else:
            raise AssertionError(f"{shown!r} is not in the source here")
    assert set(lost) | set(rest) <= set("*_`~\\# \n")


@given(st.text(st.characters(exclude_characters="*_`~\\#-+", exclude_categories=["Cc", "Cs"])))
def test_text_without_marks_is_shown_as_it_is(source: str) -> None:
    assert visible(rendered(source)) == source
