"""Owns the search for tool calls in an answer's text, for every format that writes calls in regions.

Must not know any particular format. A region without a valid call is text, markers included.

    outside ──before──> near ──opening──> inside ──end──> outside
       └────────opening────────────────────^ └──header──> arguments ──> tail ──end──> outside   (streaming)
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from outrider.chat.formats.tool_format import ToolFormat, ToolsByName
from outrider.chat.json_text import JsonEnd
from outrider.chat.splitters import (
    CallClosed,
    CallFragment,
    CallOpened,
    CallsSegment,
    MarkerSearch,
    Segment,
    StateSplitter,
    TextSegment,
)


class CallSplitter(StateSplitter):
    """`streams_calls`: a grammar guarantees the form of calls, so arguments are passed on as they arrive."""

    def __init__(self, format: ToolFormat, tools: ToolsByName, streams_calls: bool = False) -> None:
        super().__init__(self._outside)
        self._format = format
        self._region = format.region
        self._tools = tools
        self._header = format.header if streams_calls else None
        self._is_fresh = True  # only blanks have come since the start of the answer or the end of a call
        self._follows_call = False
        self._raw = ""  # the text of the region before the held text
        self._end: _RegionEnd | None = None
        self._arguments = JsonEnd()
        self._anywhere = MarkerSearch(
            self._region.before + (() if self._region.opens_answer_only else self._region.opening)
        )
        self._after = MarkerSearch(self._region.after)

    # -- states -------------------------------------------------------------------------------------------

    def _outside(self) -> Iterator[Segment]:
        if self._is_fresh and (self._region.opens_answer_only or self._region.after):
            blank = self._held[: len(self._held) - len(self._held.lstrip())]
            yield from self._take_text(len(blank))
            if self._follows_call and self._take_after():
                return
            if self._may_start_with(self._region.after if self._follows_call else ()):
                return
            if self._region.opens_answer_only and self._open_here():
                return
        found = self._anywhere.find(self._held, self._is_final)
        if found is None:
            yield from self._take_text(self._num_safe(self._anywhere))
            return
        yield from self._take_text(found.start)
        self._enter(found.marker)

    def _near(self) -> Iterator[Segment]:
        """After a `before` marker: either a region follows, or the marker is text."""
        stripped = self._held.lstrip()
        blank = self._held[: len(self._held) - len(stripped)]
        if any(stripped.startswith(opening) for opening in self._region.opening):
            self._raw += blank
            self._held = stripped
            self._open_here()
        elif self._is_final or not any(opening.startswith(stripped) for opening in self._region.opening):
            raw, self._raw = self._raw, ""
            self._state = self._outside
            self._is_fresh = self._follows_call = False
            yield TextSegment(raw)

    def _inside(self) -> Iterator[Segment]:
        header = self._header.match(self._held) if self._header is not None else None
        if header is not None and header["name"] in self._tools:
            self._held = self._held[header.end() :]
            self._arguments = JsonEnd()
            self._state = self._in_arguments
            yield CallOpened(header["name"])
            return
        assert self._end is not None
        if (end := self._end.find(self._held)) is not None:
            yield self._read(*end)
        elif self._is_final:
            yield self._read(len(self._held), len(self._held))

    def _in_arguments(self) -> Iterator[Segment]:
        end = self._arguments.feed(self._held)
        fragment = self._held[:end]
        self._held = self._held[len(fragment) :]
        if fragment:
            yield CallFragment(fragment)
        if end is not None or self._is_final:
            self._end = _RegionEnd(self._format)
            self._state = self._tail
            yield CallClosed()

    def _tail(self) -> Iterator[Segment]:
        """After streamed arguments: the rest of the region carries no information."""
        if (end := self._tail_end()) is not None:
            self._leave(end)
        yield from ()

    # -- moves ---------------------------------------------------------------------------------------------

    def _tail_end(self) -> int | None:
        if self._region.closing:
            assert self._end is not None
            found = self._end.find(self._held)
            end = found[1] if found is not None else len(self._held)
        else:
            found = None
            end = len(self._held) - len(self._held.lstrip(" \n}"))
        is_certain = found is not None or end < len(self._held) or self._is_final
        return end if is_certain else None

    def _take_text(self, num: int) -> Iterator[Segment]:
        text, self._held = self._held[:num], self._held[num:]
        if text:
            if not text.isspace():
                self._is_fresh = self._follows_call = False
            yield TextSegment(text)

    def _enter(self, marker: str) -> None:
        if marker in self._region.opening:
            self._open_here()
            return
        self._raw = marker
        self._held = self._held[len(marker) :]
        self._state = self._near

    def _open_here(self) -> bool:
        """Enter a region if the held text starts with an opening."""
        for opening in self._region.opening:
            if self._held.startswith(opening):
                if not self._region.keeps_opening:
                    self._raw += opening
                    self._held = self._held[len(opening) :]
                self._end = _RegionEnd(self._format)
                self._state = self._inside
                return True
        return False

    def _take_after(self) -> bool:
        found = self._after.find(self._held, self._is_final)
        if found is None or found.start > 0:
            return False
        self._held = self._held[found.end :]
        return True

    def _may_start_with(self, markers: tuple[str, ...]) -> bool:
        """True if more text may complete one of these markers at the start of the held text."""
        if self._is_final:
            return False
        return any(marker != self._held and marker.startswith(self._held) for marker in markers)

    def _read(self, body_end: int, region_end: int) -> Segment:
        """The segment of a complete region: its calls, or text if it has none."""
        body, raw = self._held[:body_end], self._raw + self._held[:region_end]
        self._leave(region_end)
        try:
            return CallsSegment(tuple(self._format.parse(body, self._tools)), raw)
        except ValueError:
            self._is_fresh = self._follows_call = False
            return TextSegment(raw)

    def _leave(self, region_end: int) -> None:
        self._held = self._held[region_end:]
        self._raw = ""
        self._state = self._outside
        self._is_fresh = self._follows_call = True


class _RegionEnd:
    """Finds the end of one region in a growing body. Each character is searched once."""

    def __init__(self, format: ToolFormat) -> None:
        self._region = format.region
        closings = "|".join(map(re.escape, self._region.closing))
        openings = "|".join(map(re.escape, self._region.opening))
        self._closing = re.compile(f"{closings}|(?={openings})") if self._region.closing else None
        self._overlap = max(map(len, self._region.closing + self._region.opening)) - 1
        self._num_searched = 0
        self._value: JsonEnd | None = None

    def find(self, body: str) -> tuple[int, int] | None:
        """The ends of the body and of the region; None until the end has arrived."""
        return self._find_closing(body) if self._closing is not None else self._find_value_end(body)

    def _find_closing(self, body: str) -> tuple[int, int] | None:
        assert self._closing is not None
        for match in self._closing.finditer(body, self._num_searched):
            if not self._region.is_open(body[: match.start()]):
                return match.start(), match.end()
            self._num_searched = match.start() + 1
        self._num_searched = max(self._num_searched, len(body) - self._overlap)
        return None

    def _find_value_end(self, body: str) -> tuple[int, int] | None:
        if self._value is None:
            assert self._region.value_start is not None
            start = self._region.value_start.match(body)
            if start is None:
                return None
            self._value = JsonEnd(self._region.is_python)
            self._num_searched = start.end()
        end = self._value.feed(body[self._num_searched :])
        if end is None:
            self._num_searched = len(body)
            return None
        return self._num_searched + end, self._num_searched + end
