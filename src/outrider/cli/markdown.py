"""Markdown on its way to a terminal: headings, lists and code blocks by line, the rest in inline.py.

Only ever appends. Without moves of the cursor it need not know how wide the terminal or its characters are.
"""

from __future__ import annotations

import re
from typing import Literal

from outrider.cli.inline import read_inline
from outrider.cli.terminal import BOLD, CYAN, DIM, UNDERLINE, Styles, paint

_HEADING = re.compile(r" {0,3}(#{1,6}) ")
_BULLET = re.compile(r"(\s*)[-*+] ")
_NUMBER = re.compile(r"(\s*)(\d{1,9}[.)]) ")
_FENCE = re.compile(r"\s*(`{3,}|~{3,})(.*)")
_UNDECIDED = re.compile(r"\s*(#{1,6}|[-*+]|\d{1,9}[.)]?|`{1,2}|~{1,2}|`{3,}[^`]*|~{3,}.*)?")

Kind = Literal["text", "code", "fence"]


class Markdown:
    """Push text as it comes and show what is returned; `finish` returns what still waited."""

    def __init__(self) -> None:
        self._line = ""  # of the current line, what is not shown yet
        self._kind: Kind | None = None  # of the current line; None: its start does not tell yet
        self._styles: Styles = ()
        self._before = ""  # the character before self._line
        self._fence = ""  # the marks that opened the code block we are in
        self._hides_newline = False

    def push(self, text: str) -> str:
        first, *others = text.split("\n")
        shown = [self._more(first)]
        for line in others:
            shown += [self._end_line(), self._more(line)]
        return "".join(shown)

    def finish(self) -> str:
        return self._show(is_last=True)

    def _more(self, text: str) -> str:
        self._line += text
        return self._show(is_last=False)

    def _end_line(self) -> str:
        shown = self._show(is_last=True)
        newline = "" if self._hides_newline else "\n"
        self._line, self._kind, self._styles, self._before = "", None, (), ""
        self._hides_newline = False
        return shown + newline

    def _show(self, is_last: bool) -> str:
        opening = self._begin(is_last) if self._kind is None else ""
        if self._kind is None:
            return ""
        if self._kind == "text":
            rest, num_read = read_inline(self._line, self._before, is_last, self._styles)
        else:
            rest, num_read = paint(self._line, CYAN), len(self._line)
        self._skip(num_read)
        return opening + rest

    def _skip(self, num: int) -> None:
        if num:
            self._before = self._line[num - 1]
            self._line = self._line[num:]

    def _begin(self, is_last: bool) -> str:
        """Decide what kind of line this is, if its start tells; what is shown in place of its marks."""
        return self._begin_code(is_last) if self._fence else self._begin_text(is_last)

    def _begin_code(self, is_last: bool) -> str:
        marks = self._line.strip()
        could_close = marks == self._fence[0] * len(marks)
        if could_close and not is_last:
            return ""
        if could_close and len(marks) >= len(self._fence):
            self._fence = ""
            return self._hide_line("")
        self._kind = "code"
        return ""

    def _begin_text(self, is_last: bool) -> str:
        if not is_last and _UNDECIDED.fullmatch(self._line):
            return ""
        fence = _FENCE.fullmatch(self._line) if is_last else None
        if fence and not (fence[1][0] == "`" and "`" in fence[2]):
            self._fence = fence[1]
            return self._hide_line(fence[2].strip())
        self._kind = "text"
        if heading := _HEADING.match(self._line):
            self._styles = BOLD + UNDERLINE if len(heading[1]) == 1 else BOLD
            self._skip(heading.end())
        elif bullet := _BULLET.match(self._line):
            self._skip(bullet.end())
            return bullet[1] + paint("• ", DIM)
        elif number := _NUMBER.match(self._line):
            self._skip(number.end())
            return number[1] + paint(f"{number[2]} ", DIM)
        return ""

    def _hide_line(self, label: str) -> str:
        """A fence: at most its language is shown."""
        self._kind, self._line = "fence", ""
        self._hides_newline = not label
        return paint(label, DIM)
