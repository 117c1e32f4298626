"""The answers of the Python API: `Completion`, and `CompletionStream` while an answer grows."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from outrider.chat.conversation import ToolCall
from outrider.chat.events import (
    FinishedReason,
    ReasoningDelta,
    TextDelta,
    ToolCallEnded,
    ToolCallStarted,
)
from outrider.chat.output_parser import finish_reason
from outrider.chat.renderer import ChatPrompt
from outrider.engine.engine import Engine
from outrider.engine.sequence import Stats, TokenOrigin
from outrider.engine.validation import ValidatedRequest
from outrider.plan import TokenLogprobs


class GenerationFailed(RuntimeError):
    """The engine could not finish a request. The message is the engine's."""


@dataclass(frozen=True)
class Completion:
    """The answer to one prompt or conversation."""

    request_id: str
    prompt_token_ids: list[int]
    token_ids: list[int]
    text: str
    finish_reason: FinishedReason
    logprobs: list[TokenLogprobs] | None  # one per token, if requested
    stats: Stats
    reasoning: str | None = None  # chat only: the reasoning, separate from the text
    tool_calls: list[ToolCall] = field(default_factory=list)  # chat only
    token_origins: list[TokenOrigin] | None = None  # one per token, if requested
    prompt_logprobs: list[TokenLogprobs | None] | None = None  # if requested; None for the first token


@dataclass(frozen=True)
class CompletionDelta:
    """What an answer gained since the last delta."""

    token_ids: tuple[int, ...] = ()
    text: str = ""
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()  # calls that are complete now
    logprobs: tuple[TokenLogprobs, ...] = ()
    finish_reason: FinishedReason | None = None  # only in the last delta
    stats: Stats | None = None  # only in the last delta
    stop_string: str | None = None  # the stop string that ended the answer, only in the last delta
    token_origins: tuple[TokenOrigin, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()  # in one delta, if requested; NaN for the first


class CompletionStream(Iterator[CompletionDelta]):
    """An answer as it grows. Closing or dropping the stream stops the request."""

    def __init__(self, engine: Engine, prompt: ChatPrompt, validated: ValidatedRequest) -> None:
        self.request_id = validated.id
        self._engine = engine
        self._prompt = prompt
        self._parser = prompt.new_parser()
        self._finished = False
        self._is_stopped = False
        self._open_calls: dict[int, ToolCall] = {}  # by index
        self._outbox = engine.submit(validated)

    def __next__(self) -> CompletionDelta:
        if self._finished:
            raise StopIteration
        delta = self._outbox.take()
        assert delta is not None
        self._finished = delta.finish_reason is not None
        if delta.error is not None:
            raise GenerationFailed(delta.error)
        parser, with_logprobs = self._parser, self._prompt.params.logprobs is not None
        text, reasoning = "", ""
        calls: list[ToolCall] = []
        for event in parser.read(delta, with_logprobs):
            match event:
                case TextDelta(more):
                    text += more
                case ReasoningDelta(more):
                    reasoning += more
                case ToolCallStarted(index, id, name):
                    self._open_calls[index] = ToolCall(id, name, "")
                case ToolCallEnded(index, arguments):
                    call = self._open_calls.pop(index)
                    calls.append(ToolCall(call.id, call.name, arguments))
        if parser.is_complete and not self._finished and not self._is_stopped:
            self._is_stopped = True  # the last delta, with the statistics, is still read
            self._engine.cancel(self.request_id, self._outbox)
        return CompletionDelta(
            delta.token_ids,
            text,
            reasoning,
            tuple(calls),
            delta.logprobs if with_logprobs else (),
            finish_reason(delta, parser) if self._finished else None,
            delta.stats,
            delta.stop_string,
            delta.origins,
            delta.prompt_logprobs,
        )

    def completion(self) -> Completion:
        """Wait for the end. The whole answer, if the stream has not been read before."""
        deltas = list(self)
        logprobs = [one for delta in deltas for one in delta.logprobs]
        origins = [one for delta in deltas for one in delta.token_origins]
        of_prompt = [one for delta in deltas for one in delta.prompt_logprobs]
        last = deltas[-1]
        assert last.finish_reason is not None
        return Completion(
            request_id=self.request_id,
            prompt_token_ids=list(self._prompt.ids),
            token_ids=[token_id for delta in deltas for token_id in delta.token_ids],
            text="".join(delta.text for delta in deltas),
            finish_reason=last.finish_reason,
            logprobs=logprobs if self._prompt.params.logprobs is not None else None,
            stats=last.stats or Stats(),
            reasoning="".join(delta.reasoning for delta in deltas) or None,
            tool_calls=[call for delta in deltas for call in delta.tool_calls],
            token_origins=origins if self._prompt.params.token_origins else None,
            prompt_logprobs=[None, *of_prompt[1:]] if of_prompt else None,
        )

    def close(self) -> None:
        if not self._finished:
            self._finished = True
            self._engine.cancel(self.request_id, self._outbox)

    def __del__(self) -> None:
        if hasattr(self, "_outbox"):  # not there if the engine refused the request
            self.close()
