"""Markdown within a line: bold, italic, code. Owns which marks are markup and which are text.

Nothing that was shown is ever taken back: from an opening mark on, text waits until the closing one comes.
Where the line ends before, or MAX_SPAN characters have come, the mark was text. Every decision depends on the
characters alone, never on the pieces in which they came.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from outrider.cli.terminal import BOLD, CYAN, ITALIC, Styles, paint

MAX_SPAN = 400

_TOKEN = re.compile(r"\\[*_`]|\\|(?P<run>`+|\*+|_+)|[^\\*_`]+")
_EMPHASIS = {1: ITALIC, 2: BOLD, 3: BOLD + ITALIC}


@dataclass(frozen=True)
class _Window:
    """What may belong to a span: its text from the opening run on, at most MAX_SPAN characters."""

    text: str
    ends_line: bool

    @property
    def is_whole(self) -> bool:
        """Whether no further character could change a decision."""
        return self.ends_line or len(self.text) == MAX_SPAN

    def is_certain(self, end: int) -> bool:
        """Whether a run that ends here could not be longer."""
        return end < len(self.text) or self.ends_line


def read_inline(text: str, before: str, is_last: bool, styles: Styles = ()) -> tuple[str, int]:
    """The painted text, and how many characters of the source it stands for; the others must wait.

    `before` is the character before the text, `is_last` whether the line ends after it.
    """
    painted, at = [], 0
    while at < len(text):
        step = _next(text, at, text[at - 1] if at else before, is_last, styles)
        if step is None:
            break
        painted.append(step[0])
        at = step[1]
    return "".join(painted), at


def _next(text: str, at: int, before: str, is_last: bool, styles: Styles) -> tuple[str, int] | None:
    token = _TOKEN.match(text, at)
    assert token is not None
    run, end = token["run"], token.end()
    if end == len(text) and not is_last and (run or token[0] == "\\"):
        return None
    if not run:
        shown = token[0][1:] if token[0][0] == "\\" and len(token[0]) > 1 else token[0]
        return paint(shown, styles), end
    if run[0] != "`" and not _opens(run, before, text[end : end + 1]):
        return paint(run, styles), end
    window_text = text[at : at + MAX_SPAN]
    window = _Window(window_text, is_last and len(window_text) < MAX_SPAN)
    close = _code_close(window, 0, len(run)) if run[0] == "`" else _emphasis_close(window, run)
    if close is not None:
        return _span(window.text[len(run) : close], run, styles), at + close + len(run)
    return (paint(run, styles), end) if window.is_whole else None


def _span(inner: str, run: str, styles: Styles) -> str:
    if run[0] == "`":
        return paint(inner, styles + CYAN)
    return read_inline(inner, run[0], True, styles + _EMPHASIS[len(run)])[0]


def _opens(run: str, before: str, after: str) -> bool:
    if len(run) not in _EMPHASIS or not after or after.isspace():
        return False
    if run[0] == "_":
        return not before.isalnum()
    return not (_is_ascii_word(before) and _is_ascii_word(after))  # 2*3*4; other scripts have no spaces


def _closes(run: str, before: str, after: str) -> bool:
    return not before.isspace() and not (run[0] == "_" and after.isalnum())


def _is_ascii_word(character: str) -> bool:
    return character.isascii() and character.isalnum()


def _code_close(window: _Window, at: int, size: int) -> int | None:
    """Where the run of as many backticks begins that closes the one at `at`; None: not there, so far."""
    for run in re.compile("`+").finditer(window.text, at + size):
        if len(run[0]) == size and window.is_certain(run.end()):
            return run.start()
    return None


def _emphasis_close(window: _Window, opening: str) -> int | None:
    """Where the run begins that closes the opening one; runs of another size may open and close within."""
    size, text = len(opening), window.text
    at, inner = size, 0
    while (token := _TOKEN.match(text, at)) is not None:
        run, start, at = token["run"] or "", token.start(), token.end()
        if run and not window.is_certain(at):
            return None
        if run.startswith("`"):
            close = _code_close(window, start, len(run))
            if close is None and not window.is_whole:
                return None
            at = at if close is None else close + len(run)
        elif run.startswith(opening[0]):
            before, after = text[start - 1], text[at : at + 1]
            closes = _closes(run, before, after)
            if closes and inner and len(run) == inner:
                inner = 0
            elif closes and len(run) in (size, size + inner):
                return at - size
            elif _opens(run, before, after):
                inner = len(run)
    return None
