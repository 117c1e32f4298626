"""POST /v1/chat/completions: from OpenAI's request to the canonical one, and its events back to chunks."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace
from functools import partial
from typing import Any

from fastapi import APIRouter, Request, Response
from starlette.responses import JSONResponse

from outrider.api import sse
from outrider.api.answers import Answers, failure_message, is_failure, raise_if_failed
from outrider.api.backend import EventStream
from outrider.api.body import JsonRoute, check_extra
from outrider.api.context import ServerContext
from outrider.api.errors import openai_error
from outrider.api.openai.chat_input import chat_request
from outrider.api.openai.chat_schema import ChatCompletionRequest
from outrider.api.openai.usage import FINISH_REASONS, chat_logprobs, usage_of
from outrider.api.operations.version import FINGERPRINT
from outrider.api.params import UNSUPPORTED_IN_CHAT
from outrider.chat.conversation import ChatRequest
from outrider.chat.events import (
    ChatEvent,
    Finished,
    Logprobs,
    ReasoningDelta,
    TextDelta,
    ToolCallArguments,
    ToolCallEnded,
    ToolCallStarted,
    Usage,
)

REFUSED = UNSUPPORTED_IN_CHAT | {
    "functions": "the legacy form is not supported: use tools",
    "function_call": "the legacy form is not supported: use tool_choice",
    "audio": "this server makes no sound",
    "web_search_options": "this server searches nothing: give the model a tool",
    "moderation": "this server does not moderate",
}


class ChatCompletions:
    def __init__(self, context: ServerContext) -> None:
        self._context = context

    async def create(self, body: ChatCompletionRequest, request: Request) -> Response:
        """Continue a conversation: one answer, or n of them; whole, or as a stream of chunks."""
        check_extra(body, REFUSED)
        self._context.check_model(body.model)
        answers = await self._start(body)
        envelope = self._envelope(body)
        if body.stream:
            stream = _ChunkStream(self._context, body, envelope, answers)
            return sse.EventStreamResponse(
                stream.frames(), answers.close, self._context.settings.keep_alive_s
            )
        whole = self._whole(body, envelope, answers)
        return JSONResponse(await sse.until_disconnected(request.receive, whole))

    async def _start(self, body: ChatCompletionRequest) -> Answers:
        request = chat_request(body, self._context.settings.max_tokens)
        backend = self._context.backend
        loaded: list[ChatRequest] = []  # once for all choices, which start one after the other

        async def start(choice: int) -> EventStream:
            if not loaded:
                loaded.append(await backend.with_images(request))
            return await backend.start(_choice_request(loaded[0], choice))

        return await self._context.desk.start("chat", [partial(start, i) for i in range(body.n or 1)])

    def _envelope(self, body: ChatCompletionRequest) -> dict[str, Any]:
        envelope: dict[str, Any] = {
            "id": self._context.new_id("chatcmpl-"),
            "object": "chat.completion.chunk" if body.stream else "chat.completion",
            "created": int(self._context.now_s()),
            "model": body.model or self._context.settings.model_name,
            "service_tier": "default",
            "system_fingerprint": FINGERPRINT,
        }
        if body.metadata is not None and not body.stream:
            envelope["metadata"] = body.metadata
        return envelope

    async def _whole(
        self, body: ChatCompletionRequest, envelope: dict[str, Any], answers: Answers
    ) -> dict[str, Any]:
        choices = [_WholeChoice(i) for i in range(len(answers.choices))]
        try:
            async for choice, event in answers.events():
                choices[choice].take(event)
        finally:
            answers.close()
        usages = [choice.finished.usage for choice in choices]
        rendered = [choice.render(self._context, bool(body.logprobs)) for choice in choices]
        return envelope | {"choices": rendered, "usage": usage_of(usages, usages[0].num_prompt)}


def _choice_request(request: ChatRequest, choice: int) -> ChatRequest:
    """The same conversation for the n-th time; a given seed counts up, so that choices differ and repeat."""
    if choice == 0 or request.params.seed is None:
        return request
    return replace(request, params=replace(request.params, seed=request.params.seed + choice))


class _WholeChoice:
    """One choice of an answer that is sent whole."""

    def __init__(self, index: int) -> None:
        self._index = index
        self._text: list[str] = []
        self._reasoning: list[str] = []
        self._calls: dict[int, dict[str, Any]] = {}
        self._logprobs: list[Any] = []
        self.finished = Finished("error", Usage())

    def take(self, event: ChatEvent) -> None:
        match event:
            case TextDelta(text):
                self._text.append(text)
            case ReasoningDelta(text):
                self._reasoning.append(text)
            case ToolCallStarted(index, call_id, name):
                function = {"name": name, "arguments": ""}
                self._calls[index] = {"id": call_id, "type": "function", "function": function}
            case ToolCallArguments(index, fragment):
                self._calls[index]["function"]["arguments"] += fragment
            case ToolCallEnded(index, arguments):
                self._calls[index]["function"]["arguments"] = arguments
            case Logprobs(tokens):
                self._logprobs.extend(tokens)
            case Finished():
                raise_if_failed(event)
                self.finished = event

    def render(self, context: ServerContext, with_logprobs: bool) -> dict[str, Any]:
        text = "".join(self._text)
        message: dict[str, Any] = {
            "role": "assistant",
            "content": None if self._calls and not text else text,
            "refusal": None,
        }
        if self._reasoning:
            message["reasoning_content"] = "".join(self._reasoning)
        if self._calls:
            message["tool_calls"] = list(self._calls.values())
        logprobs = {"content": chat_logprobs(self._logprobs, context.tokens), "refusal": None}
        return {
            "index": self._index,
            "message": message,
            "logprobs": logprobs if with_logprobs else None,
            "finish_reason": FINISH_REASONS[self.finished.reason],
        }


class _ChunkStream:
    """The chunks of all choices, in the order in which their tokens come."""

    def __init__(
        self,
        context: ServerContext,
        body: ChatCompletionRequest,
        envelope: dict[str, Any],
        answers: Answers,
    ) -> None:
        self._context = context
        self._envelope = envelope
        self._answers = answers
        self._with_logprobs = bool(body.logprobs)
        self._with_usage = bool(body.stream_options and body.stream_options.include_usage)
        self._unsent: dict[int, list[Any]] = {}  # logprobs whose text has not come yet, by choice
        self._usages: list[Usage] = []

    async def frames(self) -> AsyncIterator[bytes]:
        for choice in range(len(self._answers.choices)):
            yield self._chunk(choice, {"role": "assistant", "content": ""})
        async for choice, event in self._answers.events(self._with_logprobs):
            if isinstance(event, Finished) and is_failure(event):
                yield sse.data(openai_error(500 if event.reason == "error" else 503, failure_message(event)))
                break
            for frame in self._frames_of(choice, event):
                yield frame
        else:
            if self._with_usage:
                usage = usage_of(self._usages, self._usages[0].num_prompt)
                yield sse.data(self._envelope | {"choices": [], "usage": usage})
        yield sse.DONE

    def _frames_of(self, choice: int, event: ChatEvent) -> list[bytes]:
        if isinstance(event, Logprobs):
            self._unsent.setdefault(choice, []).extend(event.tokens)
            return []
        if isinstance(event, Finished):
            self._usages.append(event.usage)
            rest = [self._chunk(choice, {"content": ""})] if self._unsent.get(choice) else []
            return [*rest, self._chunk(choice, {}, FINISH_REASONS[event.reason])]
        delta = _delta(event)
        return [self._chunk(choice, delta)] if delta is not None else []

    def _chunk(self, choice: int, delta: dict[str, Any], finish_reason: str | None = None) -> bytes:
        logprobs = None
        if self._with_logprobs and (tokens := self._unsent.pop(choice, None)):
            logprobs = {"content": chat_logprobs(tokens, self._context.tokens), "refusal": None}
        rendered = {"index": choice, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}
        chunk = self._envelope | {"choices": [rendered]}
        return sse.data(chunk | {"usage": None} if self._with_usage else chunk)


def _delta(event: ChatEvent) -> dict[str, Any] | None:
    match event:
        case TextDelta(text):
            return {"content": text}
        case ReasoningDelta(text):
            return {"reasoning_content": text}
        case ToolCallStarted(index, call_id, name):
            function = {"name": name, "arguments": ""}
            return {"tool_calls": [{"index": index, "id": call_id, "type": "function", "function": function}]}
        case ToolCallArguments(index, fragment):
            return {"tool_calls": [{"index": index, "function": {"arguments": fragment}}]}
        case _:
            return None


def chat_router(context: ServerContext) -> APIRouter:
    router = APIRouter(tags=["OpenAI"], route_class=JsonRoute)
    api = ChatCompletions(context)
    router.add_api_route(
        "/v1/chat/completions", api.create, methods=["POST"], summary="Chat completion", response_model=None
    )
    return router
