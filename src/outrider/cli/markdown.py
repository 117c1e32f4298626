"""Markdown in the terminal while it is being generated.

Finished blocks (paragraphs, lists, code blocks) are printed once and stay. The last block may still change
with the next token, so rich prints that block again and again below the finished ones.
"""

from __future__ import annotations

import time
from itertools import pairwise

from markdown_it import MarkdownIt
from markdown_it.rules_inline import StateInline
from markdown_it.token import Token
from rich.console import Console, ConsoleOptions, RenderResult
from rich.live import Live
from rich.markdown import Heading, Markdown
from rich.segment import Segment

from outrider.terminal import printable

REDRAW_EVERY_S = 0.08  # seconds; chosen by hand: text seems to flow, and slow terminals keep up
MAX_DRAWING_SHARE = 0.1  # of the time may be spent on drawing; chosen by hand
CODE_THEME = "ansi_dark"  # the terminal's own colours and background


def _asterisks_in_words(state: StateInline, silent: bool) -> bool:
    """Asterisks between ASCII letters or digits are text: 2*3*4 is arithmetic, not emphasis."""
    text, end = state.src, state.pos
    while end < len(text) and text[end] == "*":
        end += 1
    around = text[state.pos - 1 : state.pos] + text[end : end + 1]
    if end == state.pos or len(around) < 2 or not (around.isascii() and around.isalnum()):
        return False
    if not silent:
        state.pending += text[state.pos : end]
    state.pos = end
    return True


# All that a model writes stays visible: HTML, link definitions and character references are text.
_PARSER = MarkdownIt("commonmark", {"html": False}).enable(["strikethrough", "table"])
_PARSER.disable(["reference", "entity", "image"])
_PARSER.inline.ruler.before("emphasis", "asterisks_in_words", _asterisks_in_words)


class MarkdownStream:
    """Push text as it comes; `finish` prints the rest."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._text = ""  # of the blocks that are not printed yet
        self._is_first = True  # no block is printed yet
        self._live: Live | None = None
        self._next_draw_s = 0.0

    def push(self, text: str) -> None:
        self._text += text
        started_s = time.monotonic()
        if started_s >= self._next_draw_s:
            self._draw()
            took_s = time.monotonic() - started_s
            self._next_draw_s = started_s + max(REDRAW_EVERY_S, took_s / MAX_DRAWING_SHARE)

    def finish(self) -> None:
        if self._live is not None:
            self._live.update("")
            self._live.stop()
        self._print(_parse(self._text))
        self._text, self._is_first, self._live = "", True, None

    def _draw(self) -> None:
        """A block is finished once the first line of the next block is complete."""
        tokens, num_lines = _parse(self._text), self._text.count("\n")
        starts = [i for i in _block_starts(tokens) if _line(tokens[i]) < num_lines]
        last = starts[-1] if starts else 0
        if self._live is None:
            self._live = _new_live(self._console)
            self._live.start()
        self._live.update(_Blocks(tokens[last:], not self._is_first or last > 0, is_tail=True))
        self._print(tokens[:last])
        self._live.refresh()
        if last:
            self._text = "\n".join(self._text.split("\n")[_line(tokens[last]) :])

    def _print(self, tokens: list[Token]) -> None:
        starts = [*_block_starts(tokens), len(tokens)]
        for start, end in pairwise(starts):
            self._console.print(_Blocks(tokens[start:end], not self._is_first))
            self._is_first = False


class _LeftHeading(Heading):
    LEVEL_ALIGN = {}  # noqa: RUF012  (all levels start at the left)


class _AnswerMarkdown(Markdown):
    elements = Markdown.elements | {"heading_open": _LeftHeading}


class _Blocks:
    """Parsed markdown as a rich renderable that lets no control character through."""

    def __init__(self, tokens: list[Token], has_margin: bool, is_tail: bool = False) -> None:
        self._markdown = _AnswerMarkdown("", code_theme=CODE_THEME, hyperlinks=False)
        self._markdown.parsed = tokens
        self._has_margin = has_margin  # a blank line above
        self._is_tail = is_tail  # only as many of the last lines as the terminal can show

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        lines = [_safe(line) for line in console.render_lines(self._markdown, options, pad=False)]
        while lines and not lines[0]:
            del lines[0]
        while lines and not lines[-1]:
            del lines[-1]
        if self._has_margin and lines:
            lines.insert(0, [])
        if self._is_tail:
            lines = lines[-max(1, console.height - 2) :]
        for line in lines:
            yield from line
            yield Segment.line()


def _safe(line: list[Segment]) -> list[Segment]:
    """Without control characters, which rich does not remove, and without spaces at the end."""
    parts = [Segment(printable(part.text), part.style) for part in line if not part.control]
    while parts and not parts[-1].text.strip():
        parts.pop()
    if parts:
        parts[-1] = Segment(parts[-1].text.rstrip(), parts[-1].style)
    return parts


def _new_live(console: Console) -> Live:
    return Live(
        console=console,
        auto_refresh=False,
        transient=True,
        vertical_overflow="visible",
        redirect_stdout=False,
        redirect_stderr=False,
    )


def _parse(text: str) -> list[Token]:
    """Line breaks stay line breaks: models write addresses and verses without markdown's two spaces."""
    tokens = _PARSER.parse(text)
    for token in tokens:
        for child in token.children or ():
            if child.type == "softbreak":
                child.type = "hardbreak"
    return tokens


def _block_starts(tokens: list[Token]) -> list[int]:
    return [i for i, token in enumerate(tokens) if token.level == 0 and token.nesting >= 0]


def _line(token: Token) -> int:
    """Number of the line on which a block begins."""
    assert token.map is not None
    return token.map[0]
