"""Turns an answer's text into events: call indices and ids, which calls are valid, blank space.

Must not know any format. The events do not depend on where the text was cut, except that neighbouring deltas
may be joined. A call that is broken, of an unknown tool or against a strict schema is given out as text.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable, Collection, Iterable, Iterator

from outrider.chat.call_splitter import CallSplitter
from outrider.chat.events import (
    ChatEvent,
    Finished,
    FinishedReason,
    Logprobs,
    PromptLogprobs,
    ReasoningDelta,
    TextDelta,
    TokenDetail,
    TokenOrigins,
    ToolCallArguments,
    ToolCallEnded,
    ToolCallStarted,
    Usage,
)
from outrider.chat.formats import harmony
from outrider.chat.formats.reasoning_format import ReasoningFormat
from outrider.chat.formats.tool_format import ParsedCall, ToolFormat, ToolsByName
from outrider.chat.harmony_splitter import HarmonySplitter
from outrider.chat.json_text import loads
from outrider.chat.message_splitter import MessageSplitter
from outrider.chat.schema import problem
from outrider.chat.splitters import (
    CallClosed,
    CallFragment,
    CallOpened,
    CallsSegment,
    MarkerSearch,
    ReasoningSegment,
    ReasoningSplitter,
    Segment,
    Splitter,
    TextSegment,
)
from outrider.engine.sequence import Delta, Stats

log = logging.getLogger(__name__)

BLANK = " \t\r\n"


class PlainSplitter:
    """Looks for nothing: all text is answer text."""

    def push(self, text: str) -> Iterable[Segment]:
        return [TextSegment(text)] if text else []

    def finish(self) -> Iterable[Segment]:
        return []


def new_splitter(
    tool_format: ToolFormat | None,
    reasoning_format: ReasoningFormat | None,
    tools: ToolsByName,
    *,
    starts_inside: bool = False,
    streams_calls: bool = False,
    interrupting: Collection[str] = (),
) -> Splitter:
    """The splitter for answers in these formats. Calls are looked for only if there are tools.

    `starts_inside`: the prompt has opened the reasoning. `streams_calls`: a grammar guarantees the form of
    calls, so their arguments are passed on while they arrive. `interrupting`: markers of calls that end the
    reasoning.
    """
    if reasoning_format is harmony.REASONING:
        return HarmonySplitter(tools, starts_inside, streams_calls)
    answer: Splitter = PlainSplitter()
    if tools and tool_format is not None:
        answer = CallSplitter(tool_format, tools, streams_calls)
    if reasoning_format is None:
        return answer
    if reasoning_format.framing is not None:
        region = tool_format.region if tools and tool_format is not None else None
        return MessageSplitter(reasoning_format.framing, answer, region, starts_inside)
    return ReasoningSplitter(reasoning_format, answer, starts_inside, interrupting if tools else ())


def new_call_id() -> str:
    return f"call_{secrets.token_hex(12)}"


class OutputParser:
    """Text in, events out. `is_complete` is True once the rest of the answer cannot matter."""

    def __init__(
        self,
        splitter: Splitter,
        tools: ToolsByName,
        *,
        is_parallel: bool = True,
        hidden: Collection[str] = (),
        new_id: Callable[[], str] = new_call_id,
    ) -> None:
        """`hidden`: special tokens that are removed from the text."""
        self._splitter = splitter
        self._tools = tools
        self._is_parallel = is_parallel
        self._filter = _TokenFilter(hidden) if hidden else None
        self._new_id = new_id
        self._text = _BlankTrimmer(holds_blanks=bool(tools))
        self._reasoning = _BlankTrimmer(holds_blanks=True, skips_blanks=True)
        self._reasoning_texts: list[str] = []
        self._open_call: list[str] = []  # fragments of the call that is still open
        self.num_calls = 0

    @property
    def is_complete(self) -> bool:
        return self.num_calls > 0 and not self._open_call and not self._is_parallel

    @property
    def reasoning(self) -> str:
        """All reasoning so far."""
        return "".join(self._reasoning_texts)

    def read(self, delta: Delta, with_logprobs: bool) -> Iterator[ChatEvent]:
        """The events of one engine delta, except for Finished: see `finished_event`."""
        if delta.prompt_progress is not None:
            yield delta.prompt_progress
        if delta.prompt_logprobs:
            yield PromptLogprobs(delta.prompt_logprobs)
        if delta.origins:
            yield TokenOrigins(token_details(delta))
        yield from self.push(delta.text)
        if with_logprobs and delta.logprobs:
            yield Logprobs(delta.logprobs)
        if delta.finish_reason is not None:
            yield from self.finish()

    def push(self, text: str) -> list[ChatEvent]:
        if self._filter is not None:
            text = self._filter.push(text)
        return self._events(self._splitter.push(text))

    def finish(self) -> list[ChatEvent]:
        """The events of the text that was held back: the answer is over."""
        events: list[ChatEvent] = []
        if self._filter is not None:
            events += self._events(self._splitter.push(self._filter.push("", is_final=True)))
        events += self._events(self._splitter.finish())
        if not self.is_complete:
            events += _deltas(ReasoningDelta, self._reasoning.flush())
            events += _deltas(TextDelta, self._text.flush())
        return events

    def _events(self, segments: Iterable[Segment]) -> list[ChatEvent]:
        events: list[ChatEvent] = []
        for segment in segments:
            if not self.is_complete:
                events += self._take(segment)
        return events

    def _take(self, segment: Segment) -> Iterator[ChatEvent]:
        match segment:
            case TextSegment(text):
                yield from self._take_text(text)
            case ReasoningSegment(text):
                events = _deltas(ReasoningDelta, self._reasoning.push(text))
                self._reasoning_texts += [event.text for event in events if isinstance(event, ReasoningDelta)]
                yield from events
            case CallsSegment(calls, text) if all(map(self._is_valid, calls)):
                for call in calls if self._is_parallel else calls[:1]:
                    yield self._start_call(call.name, call.id)
                    yield ToolCallArguments(self.num_calls - 1, call.arguments)
                    yield ToolCallEnded(self.num_calls - 1, call.arguments)
            case CallsSegment(_, text):
                yield from self._take_text(text)
            case CallOpened(name):
                self._open_call = [""]
                yield self._start_call(name, None)
            case CallFragment(fragment):
                self._open_call.append(fragment)
                yield ToolCallArguments(self.num_calls - 1, fragment)
            case CallClosed():
                arguments, self._open_call = "".join(self._open_call), []
                yield ToolCallEnded(self.num_calls - 1, arguments)

    def _take_text(self, text: str) -> list[ChatEvent]:
        if not self._reasoning.is_new:
            self._reasoning.restart()
            self._text.restart()
        return _deltas(TextDelta, self._text.push(text))

    def _start_call(self, name: str, id: str | None) -> ChatEvent:
        self._text.restart()
        self._reasoning.restart()
        self.num_calls += 1
        return ToolCallStarted(self.num_calls - 1, id or self._new_id(), name)

    def _is_valid(self, call: ParsedCall) -> bool:
        """True if the call may be given out. Without `strict`, the client judges the arguments."""
        tool = self._tools.get(call.name)
        if tool is None:
            log.info("a call of %r, which is not among the tools, is given out as text", call.name)
            return False
        found = problem(loads(call.arguments), tool.parameters)
        if found is None:
            return True
        log.info("a call of %r does not fit its schema: %s", call.name, found)
        return not tool.strict


def token_details(delta: Delta) -> tuple[TokenDetail, ...]:
    if not delta.logprobs:
        return tuple(map(TokenDetail, delta.token_ids, delta.origins))
    return tuple(map(TokenDetail, delta.token_ids, delta.origins, (one.logprob for one in delta.logprobs)))


def finish_reason(delta: Delta, parser: OutputParser) -> FinishedReason:
    """The reason of the whole answer, from its last delta."""
    assert delta.finish_reason is not None
    # An answer that was cut off keeps its reason, even after a call. An answer that is complete after its
    # first call was cancelled by its reader.
    if parser.num_calls and (delta.finish_reason == "stop" or parser.is_complete):
        return "tool_calls"
    return delta.finish_reason


def finished_event(delta: Delta, parser: OutputParser, num_reasoning: int) -> Finished:
    """The last event of an answer, from its last delta. `num_reasoning`: tokens of `parser.reasoning`."""
    stats = delta.stats or Stats()
    num_accepted = sum(stats.accepted)
    usage = Usage(
        num_prompt=stats.num_prompt,
        num_cached=stats.num_cached,
        num_stored=stats.num_stored,
        num_skipped=stats.num_skipped,
        num_generated=stats.num_generated,
        num_reasoning=min(num_reasoning, stats.num_generated),
        num_accepted=num_accepted,
        num_rejected=sum(stats.drafted) - num_accepted,
    )
    return Finished(
        finish_reason(delta, parser), usage, stats, delta.stop_string, delta.error, delta.is_client_error
    )


class _TokenFilter:
    """Passes text on without the given tokens' texts."""

    def __init__(self, hidden: Iterable[str]) -> None:
        self._search = MarkerSearch(hidden)
        self._held = ""

    def push(self, text: str, is_final: bool = False) -> str:
        self._held += text
        passed = []
        while found := self._search.find(self._held, is_final):
            passed.append(self._held[: found.start])
            self._held = self._held[found.end :]
        num_safe = len(self._held) if is_final else self._search.num_safe(self._held)
        passed.append(self._held[:num_safe])
        self._held = self._held[num_safe:]
        return "".join(passed)


class _BlankTrimmer:
    """Passes text on without the blanks between the text and reasoning or calls: such blanks are layout.

    With `holds_blanks`, blanks at the end are held until more text follows.
    """

    def __init__(self, holds_blanks: bool, skips_blanks: bool = False) -> None:
        self._holds_blanks = holds_blanks
        self._skips_blanks = skips_blanks
        self._held = ""
        self.is_new = True  # no text has come since the start or since `restart`

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
        """A segment of another kind came: the held blanks, and the blanks that follow, are layout."""
        self._held = ""
        self._skips_blanks = True
        self.is_new = True


def _deltas(kind: type[TextDelta] | type[ReasoningDelta], text: str) -> list[ChatEvent]:
    return [kind(text)] if text else []
