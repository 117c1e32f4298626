"""Owns the splitting of answers that are lists of messages, each with a header that tells its kind.

    to=self<|message|>I think.<|eom|><|start|>assistant to=user<|message|>Hello.<|eot|>
    ^ the prompt wrote the start of the first header

Harmony has a splitter of its own: there a header also has the name of the function that is called.
"""

from __future__ import annotations

from collections.abc import Iterator

from outrider.chat.formats.reasoning_format import Framing, MessageKind
from outrider.chat.formats.tool_format import Region
from outrider.chat.splitters import (
    MarkerSearch,
    ReasoningSegment,
    Segment,
    Splitter,
    StateSplitter,
    TextSegment,
)

MAX_HEADER = 256  # characters; longer text without a marker is no header; chosen by hand


class MessageSplitter(StateSplitter):
    """The content of calls goes on to the next splitter. Headers are removed."""

    def __init__(self, framing: Framing, calls: Splitter, region: Region | None, starts_inside: bool) -> None:
        """`region`: of calls; None: calls are not looked for, and their messages are text."""
        super().__init__(self._in_content if starts_inside else self._in_header)
        self._framing = framing
        self._calls = calls
        self._closings = region.closing if region is not None else ()
        self._call_starts = (*region.before, *region.opening) if region is not None else ()
        self._kind: MessageKind = "reasoning"
        self._header = ""
        self._has_start = False  # a start marker opened the header
        self._in_headers = MarkerSearch(
            (*framing.starts, *framing.contents, *framing.ends, *self._call_starts)
        )
        self._in_contents = MarkerSearch((*framing.starts, *framing.ends))

    def finish(self) -> Iterator[Segment]:
        yield from super().finish()
        yield from self._calls.finish()

    def _in_header(self) -> Iterator[Segment]:
        found = self._in_headers.find(self._held, self._is_final)
        num_before = found.start if found is not None else self._num_safe(self._in_headers)
        if num_before > MAX_HEADER or (found is None and self._is_final and not self._has_start):
            self._kind, self._state = "text", self._in_content
            return
        if found is None:
            self._held = "" if self._is_final else self._held
            return
        self._header += self._take(found.start)
        marker = found.marker
        if marker in self._framing.contents:
            self._kind = self._framing.kind(self._header + marker)
            self._state = self._in_content
            if marker not in self._call_starts:  # else it is a part of the call
                self._take(len(marker))
        elif marker in self._call_starts:  # a call without a header
            self._kind, self._state = "calls", self._in_content
        else:
            self._take(len(marker))
            self._start_header(marker)
        yield from ()

    def _in_content(self) -> Iterator[Segment]:
        found = self._in_contents.find(self._held, self._is_final)
        text = self._take(found.start if found is not None else self._num_safe(self._in_contents))
        if found is not None:
            marker = self._take(len(found.marker))
            text += marker if self._kind == "calls" and marker in self._closings else ""
            self._start_header(marker)
        if not text:
            return
        if self._kind == "calls":
            yield from self._calls.push(text)
        else:
            yield ReasoningSegment(text) if self._kind == "reasoning" else TextSegment(text)

    def _start_header(self, marker: str) -> None:
        self._state = self._in_header
        self._header = ""
        self._has_start = marker in self._framing.starts

    def _take(self, num: int) -> str:
        taken, self._held = self._held[:num], self._held[num:]
        return taken
