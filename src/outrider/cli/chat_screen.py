"""How an answer looks in the terminal: rendered markdown, dimmed reasoning, a line of figures after it."""

from __future__ import annotations

from typing import TextIO

from outrider.chat.events import ChatEvent, Finished, ReasoningDelta, TextDelta
from outrider.cli.markdown import Markdown
from outrider.cli.terminal import DIM, paint, printable


class ChatScreen:
    """Writes to a terminal with styles, or to anything else the text as it is."""

    def __init__(self, out: TextIO, has_styles: bool) -> None:
        self._out = out
        self._has_styles = has_styles
        self._markdown = Markdown()
        self._is_thinking = False
        self._is_at_margin = True

    def show(self, event: ChatEvent) -> None:
        match event:
            case ReasoningDelta(text):
                self._is_thinking = True
                self._write(self._dim(printable(text)))
            case TextDelta(text):
                self._end_thinking()
                text = printable(text)
                self._write(self._markdown.push(text) if self._has_styles else text)
            case Finished():
                self.end_answer()
                if figures := summary(event):
                    self.note(figures)

    def end_answer(self) -> None:
        """Show what still waited, and go to a fresh line."""
        self._write(self._markdown.finish())
        self._markdown = Markdown()
        self._is_thinking = False
        self._to_margin()

    def note(self, text: str) -> None:
        self._write(self._dim(text) + "\n")

    def _end_thinking(self) -> None:
        if self._is_thinking:
            self._is_thinking = False
            self._to_margin()

    def _to_margin(self) -> None:
        if not self._is_at_margin:
            self._write("\n")

    def _dim(self, text: str) -> str:
        """Line by line, so that newlines stay outside the styles."""
        return "\n".join(paint(line, DIM) for line in text.split("\n")) if self._has_styles else text

    def _write(self, text: str) -> None:
        if text:
            self._out.write(text)
            self._out.flush()
            self._is_at_margin = text.endswith("\n")


def summary(finished: Finished) -> str:
    stats, usage = finished.stats, finished.usage
    parts = []
    if stats.num_generated and stats.total_s:
        rate = stats.num_generated / stats.total_s
        parts.append(f"{stats.num_generated} tokens, {rate:.1f} tokens/s")
    if stats.ttft_s is not None:
        parts.append(f"first after {stats.ttft_s * 1000:.0f} ms")
    if stats.drafted:
        accepted = ", ".join(f"{a}/{d}" for a, d in zip(stats.accepted, stats.drafted, strict=True))
        parts.append(f"accepted {accepted} by position, {stats.stride:.2f} tokens a step")
    elif num_drafted := usage.num_accepted + usage.num_rejected:
        parts.append(f"accepted {usage.num_accepted}/{num_drafted} drafts")
    if finished.reason == "length":
        parts.append("cut at the token limit")
    return "; ".join(parts)
