"""Owns the reading of harmony: an answer that is a row of messages, each with a header that says what it is.

header <|message|> content <|end|>     analysis: thinking; to=functions.f: a call; all else is said
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from outrider.chat.formats import harmony
from outrider.chat.formats.tool_format import Toolbox
from outrider.chat.json_text import JsonEnd
from outrider.chat.markers import MarkerSearch
from outrider.chat.pieces import CallClosed, Called, CallGrew, CallOpened, Piece, Said, Thought

_ENDING = (*harmony.STARTS, *harmony.ENDS)  # what ends a message's content


class HarmonySplitter:
    """The answer begins in a header, or in the thinking where the prompt has written that header.

    `tools` are those that may be called; a call is looked for only if there are some.
    """

    def __init__(self, tools: Toolbox, is_inside: bool = False, streams: bool = False) -> None:
        self._tools = tools
        self._streams = streams
        self._in_headers = MarkerSearch((harmony.MESSAGE, *_ENDING))
        self._in_contents = MarkerSearch(_ENDING)
        self._held = ""
        self._is_final = False
        self._header = harmony.REASONING.opening if is_inside else ""
        self._call = ""  # the content of a call that is read whole
        self._arguments = JsonEnd()
        self._state: Callable[[], Iterator[Piece]] = self._in_content if is_inside else self._in_header

    def push(self, text: str) -> Iterator[Piece]:
        self._held += text
        yield from self._run()

    def finish(self) -> Iterator[Piece]:
        self._is_final = True
        yield from self._run()
        if self._state == self._in_call:
            yield self._read_call()
        elif self._state == self._in_arguments:
            yield CallClosed()

    def _run(self) -> Iterator[Piece]:
        while True:
            before = (self._state, len(self._held))
            yield from self._state()
            if (self._state, len(self._held)) == before:
                return

    def _in_header(self) -> Iterator[Piece]:
        """Collect a header. Text that no marker has made part of one is said as it is."""
        found = self._in_headers.find(self._held, self._is_final)
        text = self._take(found.start if found is not None else self._num_safe(self._in_headers))
        if self._header:
            self._header += text
        elif text:
            yield Said(text)
        if found is None:
            return
        marker = self._take(len(found.marker))
        if marker == harmony.MESSAGE:
            yield from self._start_content()
        else:
            self._header = "" if marker in harmony.ENDS else self._header + marker

    def _start_content(self) -> Iterator[Piece]:
        name = harmony.called_function(self._header) if self._tools else None
        if name is None:
            self._state = self._in_content
        elif self._streams:
            self._arguments = JsonEnd()
            self._state = self._in_arguments
            yield CallOpened(name)
        else:
            self._call = ""
            self._state = self._in_call

    def _in_content(self) -> Iterator[Piece]:
        found, text = self._take_content()
        if text:
            yield Thought(text) if "<|channel|>analysis" in self._header else Said(text)
        if found is not None:
            self._end_message(found)

    def _in_call(self) -> Iterator[Piece]:
        found, text = self._take_content()
        self._call += text
        if found is not None:
            yield self._read_call()
            self._end_message(found)

    def _in_arguments(self) -> Iterator[Piece]:
        found, text = self._take_content()
        end = self._arguments.feed(text)
        fragment = text[:end]
        if fragment:
            yield CallGrew(fragment)
        if end is not None or found is not None:
            yield CallClosed()
            self._state = self._past_arguments
        if found is not None:
            self._end_message(found)

    def _past_arguments(self) -> Iterator[Piece]:
        found, _ = self._take_content()
        if found is not None:
            self._end_message(found)
        yield from ()

    def _take_content(self) -> tuple[str | None, str]:
        """The content up to the marker that ends the message, and that marker once it has come."""
        found = self._in_contents.find(self._held, self._is_final)
        text = self._take(found.start if found is not None else self._num_safe(self._in_contents))
        if found is None:
            return None, text
        return self._take(len(found.marker)), text

    def _end_message(self, marker: str) -> None:
        self._header = marker if marker in harmony.STARTS else ""
        self._state = self._in_header

    def _read_call(self) -> Piece:
        whole = f"{self._header}{harmony.MESSAGE}{self._call}"
        try:
            return Called(tuple(harmony.parse(whole, self._tools)), self._call)
        except ValueError:
            return Said(self._call)

    def _num_safe(self, search: MarkerSearch) -> int:
        return len(self._held) if self._is_final else search.num_safe(self._held)

    def _take(self, num: int) -> str:
        taken, self._held = self._held[:num], self._held[num:]
        return taken
