"""Owns the way from an answer's text to events: indices and ids of calls, which calls stand, layout.

Must not know tokens, nor any format. The events are the same however the text was cut, but for neighbouring
deltas; a call that cannot stand (broken, of an unknown tool, against a strict schema) is text.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable, Iterable, Iterator

from outrider.chat.call_splitter import CallSplitter
from outrider.chat.events import (
    ChatEvent,
    ReasoningDelta,
    TextDelta,
    ToolCallArguments,
    ToolCallEnded,
    ToolCallStarted,
)
from outrider.chat.formats import harmony
from outrider.chat.formats.reasoning_format import ReasoningFormat
from outrider.chat.formats.tool_format import ParsedCall, Toolbox, ToolFormat
from outrider.chat.harmony_splitter import HarmonySplitter
from outrider.chat.json_text import loads
from outrider.chat.markers import Silencer
from outrider.chat.pieces import (
    CallClosed,
    Called,
    CallGrew,
    CallOpened,
    Piece,
    PlainSplitter,
    Said,
    Splitter,
    Thought,
)
from outrider.chat.reasoning_splitter import ReasoningSplitter
from outrider.chat.schema import problem

log = logging.getLogger(__name__)

BLANK = " \t\r\n"


def new_splitter(
    tool_format: ToolFormat | None,
    reasoning_format: ReasoningFormat | None,
    tools: Toolbox,
    *,
    is_inside: bool = False,
    streams: bool = False,
) -> Splitter:
    """What reads an answer in these formats. Calls are looked for only if there are tools.

    `is_inside`: the prompt has opened the thinking. `streams`: a grammar sees to the form of calls.
    """
    if reasoning_format is harmony.REASONING:
        return HarmonySplitter(tools, is_inside, streams)
    answer: Splitter = PlainSplitter()
    if tools and tool_format is not None:
        answer = CallSplitter(tool_format, tools, streams)
    return ReasoningSplitter(reasoning_format, answer, is_inside) if reasoning_format is not None else answer


def new_call_id() -> str:
    return f"call_{secrets.token_hex(12)}"


class OutputParser:
    """Text in, events out. `is_complete` once nothing that follows can matter."""

    def __init__(
        self,
        splitter: Splitter,
        tools: Toolbox,
        *,
        is_parallel: bool = True,
        silenced: Iterable[str] = (),
        new_id: Callable[[], str] = new_call_id,
    ) -> None:
        self._splitter = splitter
        self._tools = tools
        self._is_parallel = is_parallel
        self._silencer = Silencer(silenced)
        self._new_id = new_id
        self._said = _Trimmed(holds_blanks=bool(tools))
        self._thought = _Trimmed(holds_blanks=True, skips_blanks=True)
        self._thoughts: list[str] = []
        self._open_call: list[str] = []  # fragments of the call that is growing
        self.num_calls = 0

    @property
    def is_complete(self) -> bool:
        return self.num_calls > 0 and not self._open_call and not self._is_parallel

    @property
    def reasoning(self) -> str:
        """All thinking so far."""
        return "".join(self._thoughts)

    def push(self, text: str) -> list[ChatEvent]:
        return self._events(self._splitter.push(self._silencer.push(text)))

    def finish(self) -> list[ChatEvent]:
        """What was held back: the answer is over."""
        events = self._events(self._splitter.push(self._silencer.push("", is_final=True)))
        events += self._events(self._splitter.finish())
        if not self.is_complete:
            events += _deltas(ReasoningDelta, self._thought.flush()) + _deltas(TextDelta, self._said.flush())
        return events

    def _events(self, pieces: Iterable[Piece]) -> list[ChatEvent]:
        events: list[ChatEvent] = []
        for piece in pieces:
            if not self.is_complete:
                events += self._take(piece)
        return events

    def _take(self, piece: Piece) -> Iterator[ChatEvent]:
        match piece:
            case Said(text):
                yield from self._say(text)
            case Thought(text):
                yield from self._think(text)
            case Called(calls, text) if all(map(self._stands, calls)):
                for call in calls if self._is_parallel else calls[:1]:
                    yield from self._call(call)
            case Called(_, text):
                yield from self._say(text)
            case CallOpened(name):
                self._open_call = [""]
                yield self._start_call(name, None)
            case CallGrew(fragment):
                self._open_call.append(fragment)
                yield ToolCallArguments(self.num_calls - 1, fragment)
            case CallClosed():
                arguments, self._open_call = "".join(self._open_call), []
                yield ToolCallEnded(self.num_calls - 1, arguments)

    def _say(self, text: str) -> list[ChatEvent]:
        if not self._thought.is_new:
            self._thought.restart()
            self._said.restart()
        return _deltas(TextDelta, self._said.push(text))

    def _think(self, text: str) -> list[ChatEvent]:
        events = _deltas(ReasoningDelta, self._thought.push(text))
        self._thoughts += [event.text for event in events if isinstance(event, ReasoningDelta)]
        return events

    def _call(self, call: ParsedCall) -> Iterator[ChatEvent]:
        yield self._start_call(call.name, call.id)
        yield ToolCallArguments(self.num_calls - 1, call.arguments)
        yield ToolCallEnded(self.num_calls - 1, call.arguments)

    def _start_call(self, name: str, id: str | None) -> ChatEvent:
        self._said.restart()
        self._thought.restart()
        self.num_calls += 1
        return ToolCallStarted(self.num_calls - 1, id or self._new_id(), name)

    def _stands(self, call: ParsedCall) -> bool:
        """Whether a call may be given out. A strict tool's schema is a promise; others the client judges."""
        tool = self._tools.get(call.name)
        if tool is None:
            log.info("a call of %r, which is not among the tools, is given out as text", call.name)
            return False
        found = problem(loads(call.arguments), tool.parameters)
        if found is None:
            return True
        log.info("a call of %r does not fit its schema: %s", call.name, found)
        return not tool.strict


class _Trimmed:
    """Passes text on without the blanks between it and what is not text: they are layout.

    Blanks at the end are held until something follows, where it is known that something may.
    """

    def __init__(self, holds_blanks: bool, skips_blanks: bool = False) -> None:
        self._holds_blanks = holds_blanks
        self._skips_blanks = skips_blanks
        self._held = ""
        self.is_new = True  # nothing has come since the start

    def push(self, text: str) -> str:
        self.is_new = False
        text = self._held + text
        if self._skips_blanks:
            text = text.lstrip(BLANK)
            self._skips_blanks = not text
        passed = text.rstrip(BLANK) if self._holds_blanks else text
        self._held = text[len(passed) :]
        return passed

    def flush(self) -> str:
        held, self._held = self._held, ""
        return held

    def restart(self) -> None:
        """Something else came: what is held was layout, and so are the blanks that follow."""
        self._held = ""
        self._skips_blanks = True
        self.is_new = True


def _deltas(kind: type[TextDelta] | type[ReasoningDelta], text: str) -> list[ChatEvent]:
    return [kind(text)] if text else []
