"""How an answer looks in the terminal: rendered markdown, dimmed reasoning, a line of figures after it."""

from __future__ import annotations

from typing import TextIO

from rich.text import Text

from outrider.chat.events import ChatEvent, Finished, ReasoningDelta, TextDelta
from outrider.cli.markdown import MarkdownStream
from outrider.terminal import console_for, printable


class ChatScreen:
    """With styles, markdown is rendered; without styles, the text is written as it is."""

    def __init__(self, out: TextIO, has_styles: bool) -> None:
        self._out = out
        self._console = console_for(out)
        self._has_styles = has_styles
        self._markdown = MarkdownStream(self._console)
        self._is_reasoning = False
        self._is_line_open = False  # text was written after the last newline

    def show(self, event: ChatEvent) -> None:
        match event:
            case ReasoningDelta(text):
                self._is_reasoning = True
                self._write(printable(text), is_dim=True)
            case TextDelta(text):
                if self._is_reasoning:
                    self._is_reasoning = False
                    self._end_line()
                if self._has_styles:
                    self._markdown.push(printable(text))
                else:
                    self._write(printable(text))
            case Finished():
                self.end_answer()
                if figures := summary(event):
                    self.note(figures)

    def end_answer(self) -> None:
        """Shows the text that still waits, and begins a new line."""
        self._markdown.finish()
        self._is_reasoning = False
        self._end_line()

    def note(self, text: str) -> None:
        self._write(f"{text}\n", is_dim=True)

    def _end_line(self) -> None:
        if self._is_line_open:
            self._write("\n")

    def _write(self, text: str, is_dim: bool = False) -> None:
        if not text:
            return
        if is_dim and self._has_styles:
            self._console.print(Text(text, style="dim"), end="", soft_wrap=True)
        else:
            self._out.write(text)
            self._out.flush()
        self._is_line_open = not text.endswith("\n")


def summary(finished: Finished) -> str:
    stats, usage = finished.stats, finished.usage
    parts = []
    if stats.num_generated and stats.total_s:
        rate = stats.num_generated / stats.total_s
        parts.append(f"{stats.num_generated} tokens, {rate:.1f} tokens/s")
    if stats.ttft_s is not None:
        parts.append(f"first token after {stats.ttft_s * 1000:.0f} ms")
    if stats.drafted:
        accepted = ", ".join(f"{a}/{d}" for a, d in zip(stats.accepted, stats.drafted, strict=True))
        parts.append(f"drafts accepted {accepted} by position, {stats.stride:.2f} tokens per step")
    elif num_drafted := usage.num_accepted + usage.num_rejected:
        parts.append(f"drafts accepted {usage.num_accepted}/{num_drafted}")
    if finished.reason == "length":
        parts.append("cut at --max-tokens")
    return "; ".join(parts)
