"""Owns the splitting of harmony answers: a list of messages, each with a header that names its kind.

header <|message|> content <|end|>     analysis: reasoning; to=functions.f: a call; anything else: text
"""

from __future__ import annotations

from collections.abc import Iterator

from outrider.chat.formats import harmony
from outrider.chat.formats.tool_format import ToolsByName
from outrider.chat.json_text import JsonEnd
from outrider.chat.splitters import (
    CallClosed,
    CallFragment,
    CallOpened,
    CallsSegment,
    MarkerSearch,
    ReasoningSegment,
    Segment,
    StateSplitter,
    TextSegment,
)

_ENDING = (*harmony.STARTS, *harmony.ENDS)  # markers that end a message's content


class HarmonySplitter(StateSplitter):
    """The answer starts in a header, or in the reasoning if the prompt has written the header.

    Calls are looked for only if there are tools.
    """

    def __init__(self, tools: ToolsByName, starts_inside: bool = False, streams_calls: bool = False) -> None:
        super().__init__(self._in_content if starts_inside else self._in_header)
        self._tools = tools
        self._streams_calls = streams_calls
        self._in_headers = MarkerSearch((harmony.MESSAGE, *_ENDING))
        self._in_contents = MarkerSearch(_ENDING)
        self._header = harmony.REASONING.opening if starts_inside else ""
        self._call = ""  # the content of a call that is parsed when it is complete
        self._arguments = JsonEnd()

    def finish(self) -> Iterator[Segment]:
        yield from super().finish()
        if self._state == self._in_call:
            yield self._read_call()
        elif self._state == self._in_arguments:
            yield CallClosed()

    def _in_header(self) -> Iterator[Segment]:
        """Collect a header. Text before the first marker is answer text."""
        found = self._in_headers.find(self._held, self._is_final)
        text = self._take(found.start if found is not None else self._num_safe(self._in_headers))
        if self._header:
            self._header += text
        elif text:
            yield TextSegment(text)
        if found is None:
            return
        marker = self._take(len(found.marker))
        if marker == harmony.MESSAGE:
            yield from self._start_content()
        else:
            self._header = "" if marker in harmony.ENDS else self._header + marker

    def _start_content(self) -> Iterator[Segment]:
        name = harmony.called_function(self._header) if self._tools else None
        if name is None:
            self._state = self._in_content
        elif self._streams_calls and name in self._tools and self._is_under_grammar():
            self._arguments = JsonEnd()
            self._state = self._in_arguments
            yield CallOpened(name)
        else:
            self._call = ""
            self._state = self._in_call

    def _is_under_grammar(self) -> bool:
        return any(start in self._header for start in harmony.CALL_STARTS)

    def _in_content(self) -> Iterator[Segment]:
        found, text = self._take_content()
        if text:
            is_reasoning = harmony.message_kind(self._header) == "reasoning"
            yield ReasoningSegment(text) if is_reasoning else TextSegment(text)
        if found is not None:
            self._end_message(found)

    def _in_call(self) -> Iterator[Segment]:
        found, text = self._take_content()
        self._call += text
        if found is not None:
            yield self._read_call()
            self._end_message(found)

    def _in_arguments(self) -> Iterator[Segment]:
        found, text = self._take_content()
        end = self._arguments.feed(text)
        fragment = text[:end]
        if fragment:
            yield CallFragment(fragment)
        if end is not None or found is not None:
            yield CallClosed()
            self._state = self._past_arguments
        if found is not None:
            self._end_message(found)

    def _past_arguments(self) -> Iterator[Segment]:
        found, _ = self._take_content()
        if found is not None:
            self._end_message(found)
        yield from ()

    def _take_content(self) -> tuple[str | None, str]:
        """The marker that ends the message, once it has arrived, and the content before it."""
        found = self._in_contents.find(self._held, self._is_final)
        text = self._take(found.start if found is not None else self._num_safe(self._in_contents))
        if found is None:
            return None, text
        return self._take(len(found.marker)), text

    def _end_message(self, marker: str) -> None:
        self._header = marker if marker in harmony.STARTS else ""
        self._state = self._in_header

    def _read_call(self) -> Segment:
        whole = f"{self._header}{harmony.MESSAGE}{self._call}"
        try:
            return CallsSegment(tuple(harmony.parse(whole, self._tools)), self._call)
        except ValueError:
            return TextSegment(self._call)

    def _take(self, num: int) -> str:
        taken, self._held = self._held[:num], self._held[num:]
        return taken
