"""POST /v1/chat/completions: starts the answers and renders their events, whole or as a stream of chunks."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from functools import partial
from typing import Any

from fastapi import APIRouter, Request, Response
from starlette.responses import JSONResponse

from outrider.api import sse
from outrider.api.answer_streams import stream_answers
from outrider.api.answers import Answers, Prepare, failure_of
from outrider.api.body import check_extra, json_router
from outrider.api.context import FINGERPRINT, ServerContext
from outrider.api.errors import ApiError, openai_error
from outrider.api.logprobs import TokenText, chat_logprobs, token_origins
from outrider.api.openai.answer_models import ChatCompletion, ChatCompletionChunk
from outrider.api.openai.chat_request import ChatCompletionRequest, chat_request
from outrider.api.openapi import OpenAIError, answer
from outrider.api.request_fields import UNSUPPORTED_IN_CHAT
from outrider.api.served_model import RequestedModel, ServedModel
from outrider.chat.events import (
    ChatEvent,
    Finished,
    Logprobs,
    PromptProgress,
    ReasoningDelta,
    TextDelta,
    TokenDetail,
    TokenOrigins,
    ToolCallArguments,
    ToolCallEnded,
    ToolCallStarted,
    Usage,
)

REFUSED = UNSUPPORTED_IN_CHAT | {
    "functions": "the legacy form is not supported: use tools",
    "function_call": "the legacy form is not supported: use tool_choice",
    "audio": "not supported: this server answers in text only",
    "web_search_options": "not supported: give the model a search tool",
    "moderation": "not supported",
}
FINISH_REASONS = {"stop": "stop", "length": "length", "tool_calls": "tool_calls"}


class ChatCompletions:
    def __init__(self, context: ServerContext) -> None:
        self._context = context

    async def create(self, body: ChatCompletionRequest, request: Request) -> Response:
        """Continue a conversation: one answer or n answers, whole or as a stream of chunks."""
        check_extra(body, REFUSED)
        model = self._context.find_model(body.model, body.keep_alive, body.adapter)
        starting = self._start(body, model, request)
        envelope = self._envelope(body, model.name)
        if body.stream:
            frames = partial(_frames, body, envelope)
            return await stream_answers(starting, frames, openai_failure, self._context.settings.keep_alive_s)
        whole = self._whole(body, envelope, await starting)
        return JSONResponse(await sse.until_disconnected(request.receive, whole))

    async def _start(self, body: ChatCompletionRequest, model: RequestedModel, request: Request) -> Answers:
        chat = chat_request(body, *model.defaults)
        num_answers = body.n or 1

        def prompts(served: ServedModel) -> list[Prepare]:
            exact = chat if served.defaults == model.defaults else chat_request(body, *served.defaults)
            return [partial(served.backend.prepare, exact, num_answers)]

        return await self._context.live.start(
            "chat", model, num_answers, prompts, request.receive, body.timeout
        )

    def _envelope(self, body: ChatCompletionRequest, model: str) -> dict[str, Any]:
        """The fields that an answer and all its chunks have in common."""
        envelope: dict[str, Any] = {
            "id": self._context.new_id("chatcmpl-"),
            "object": "chat.completion.chunk" if body.stream else "chat.completion",
            "created": int(self._context.now_s()),
            "model": model,
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
        await answers.feed_all(lambda choice, event: choices[choice].feed(event))
        usages = [choice.finished.usage for choice in choices]
        options = bool(body.logprobs), bool(body.return_token_origins)
        rendered = [choice.render(answers.served.tokens, *options) for choice in choices]
        return envelope | {"choices": rendered, "usage": usage_of(usages, usages[0].num_prompt)}


def usage_of(usages: Sequence[Usage], num_prompt: int) -> dict[str, Any]:
    """The sum over all choices. Choices of one prompt count it once, so `num_prompt` is given."""
    generated = sum(usage.num_generated for usage in usages)
    details = {"cached_tokens": min(num_prompt, sum(u.num_cached for u in usages))}
    if skipped := sum(usage.num_skipped for usage in usages):  # all choices of a prompt skip the same tokens
        details["skipped_tokens"] = skipped * num_prompt // sum(usage.num_prompt for usage in usages)
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": generated,
        "total_tokens": num_prompt + generated,
        "prompt_tokens_details": details,
        "completion_tokens_details": {
            "reasoning_tokens": sum(usage.num_reasoning for usage in usages),
            "accepted_prediction_tokens": sum(usage.num_accepted for usage in usages),
            "rejected_prediction_tokens": sum(usage.num_rejected for usage in usages),
        },
    }


class _WholeChoice:
    """One choice of an answer that is not streamed."""

    def __init__(self, index: int) -> None:
        self._index = index
        self._text: list[str] = []
        self._reasoning: list[str] = []
        self._calls: dict[int, dict[str, Any]] = {}
        self._logprobs: list[Any] = []
        self._origins: list[TokenDetail] = []
        self.finished = Finished("error", Usage())

    def feed(self, event: ChatEvent) -> None:
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
            case TokenOrigins(details):
                self._origins.extend(details)
            case Finished():
                self.finished = event

    def render(self, text_of: TokenText, with_logprobs: bool, with_origins: bool) -> dict[str, Any]:
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
        logprobs = {"content": chat_logprobs(self._logprobs, text_of), "refusal": None}
        choice = {
            "index": self._index,
            "message": message,
            "logprobs": logprobs if with_logprobs else None,
            "finish_reason": FINISH_REASONS[self.finished.reason],
        }
        if with_origins:
            choice["token_origins"] = token_origins(self._origins, text_of)
        return choice


def openai_failure(error: ApiError) -> list[bytes]:
    """The end of a stream that fails."""
    return [sse.data(openai_error(error)), sse.DONE]


def _frames(body: ChatCompletionRequest, envelope: dict[str, Any], answers: Answers) -> AsyncIterator[bytes]:
    return _ChunkStream(body, envelope, answers).frames()


class _ChunkStream:
    """The chunks of all choices, in order of arrival."""

    def __init__(
        self,
        body: ChatCompletionRequest,
        envelope: dict[str, Any],
        answers: Answers,
    ) -> None:
        self._envelope = envelope
        self._answers = answers
        self._with_logprobs = bool(body.logprobs)
        self._with_usage = bool(body.stream_options and body.stream_options.include_usage)
        # By choice: logprobs and origins of tokens that wait for the chunk of their text.
        self._unsent: dict[int, list[Any]] = {}
        self._unsent_origins: dict[int, list[TokenDetail]] = {}
        self._usages: list[Usage] = []

    async def frames(self) -> AsyncIterator[bytes]:
        for choice in range(len(self._answers.choices)):
            yield self._chunk(choice, {"role": "assistant", "content": ""})
        async for choice, event in self._answers.events(self._with_logprobs):
            if isinstance(event, Finished) and (error := failure_of(event)):
                yield sse.data(openai_error(error))
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
        if isinstance(event, TokenOrigins):
            self._unsent_origins.setdefault(choice, []).extend(event.tokens)
            return []
        if isinstance(event, Finished):
            self._usages.append(event.usage)
            has_rest = self._unsent.get(choice) or self._unsent_origins.get(choice)
            rest = [self._chunk(choice, {"content": ""})] if has_rest else []
            return [*rest, self._chunk(choice, {}, FINISH_REASONS[event.reason])]
        if isinstance(event, PromptProgress):
            progress = {"prompt_progress": _progress(event)}
            return [sse.data(self._rendered(choice, {}, None) | progress)]
        delta = _delta(event)
        return [self._chunk(choice, delta)] if delta is not None else []

    def _chunk(self, choice: int, delta: dict[str, Any], finish_reason: str | None = None) -> bytes:
        return sse.data(self._rendered(choice, delta, finish_reason))

    def _rendered(self, choice: int, delta: dict[str, Any], finish_reason: str | None) -> dict[str, Any]:
        logprobs = None
        if self._with_logprobs and (tokens := self._unsent.pop(choice, None)):
            logprobs = {"content": chat_logprobs(tokens, self._answers.served.tokens), "refusal": None}
        rendered: dict[str, Any] = {"index": choice, "delta": delta, "logprobs": logprobs}
        rendered["finish_reason"] = finish_reason
        if details := self._unsent_origins.pop(choice, None):
            rendered["token_origins"] = token_origins(details, self._answers.served.tokens)
        chunk = self._envelope | {"choices": [rendered]}
        return chunk | {"usage": None} if self._with_usage else chunk


def _progress(progress: PromptProgress) -> dict[str, int]:
    """As llama.cpp has it."""
    return {
        "total": progress.num_total,
        "cache": progress.num_cached,
        "processed": progress.num_done,
        "time_ms": round(progress.seconds * 1000),
    }


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
    create = ChatCompletions(context).create
    answers = answer(ChatCompletion, event=ChatCompletionChunk | OpenAIError, ends_with_done=True)
    return json_router("OpenAI", ("POST", "/v1/chat/completions", create, "Chat completion", answers))
