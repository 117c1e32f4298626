"""POST /v1/messages and /v1/messages/count_tokens: Anthropic's API.

message_start, ping
  content_block_start, (content_block_delta ...), content_block_stop    for each: thinking, text, tool_use
message_delta, message_stop                                             or: error
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from functools import partial
from typing import Any

from fastapi import APIRouter, Request, Response
from starlette.responses import JSONResponse

from outrider.api import sse
from outrider.api.answer_streams import stream_answers
from outrider.api.answers import Answers, Prepare, failure_of
from outrider.api.anthropic.answer_models import MessageAnswer, MessageEvent, TokenCount
from outrider.api.anthropic.messages_request import (
    CountTokensRequest,
    MessagesRequest,
    asks_for_caching,
    messages_request,
)
from outrider.api.body import check_extra, json_router
from outrider.api.context import ServerContext
from outrider.api.errors import ApiError, anthropic_error
from outrider.api.openapi import answer
from outrider.api.request_fields import UNSUPPORTED_IN_CHAT
from outrider.api.served_model import ServedModel
from outrider.chat.events import (
    ChatEvent,
    Finished,
    ReasoningDelta,
    TextDelta,
    ToolCallArguments,
    ToolCallEnded,
    ToolCallStarted,
    Usage,
)
from outrider.chat.json_text import dumps, loads

REFUSED = UNSUPPORTED_IN_CHAT | {
    "container": "not supported: this server executes no code",
    "mcp_servers": "not supported: this server connects to no other server. Give the model tools",
    "fallback": "not supported: the model that the request names answers",
}
PING: dict[str, Any] = {"type": "ping"}
SIGNATURE = "outrider"  # of thinking blocks; clients send it back, and this server does not verify it


class Messages:
    def __init__(self, context: ServerContext) -> None:
        self._context = context

    async def create(self, body: MessagesRequest, request: Request) -> Response:
        """Answer a conversation, whole or as a stream of events."""
        _check_fields(body)
        model = self._context.find_model(body.model, body.keep_alive, body.adapter)
        chat = messages_request(body, model.defaults.sampling)

        def prompts(served: ServedModel) -> list[Prepare]:
            sampling = served.defaults.sampling
            exact = chat if sampling == model.defaults.sampling else messages_request(body, sampling)
            return [partial(served.backend.prepare, exact)]

        starting = self._context.live.start("messages", model, 1, prompts, request.receive, body.timeout)
        if body.stream:
            keep_alive_s = self._context.settings.keep_alive_s
            frames = partial(self._frames, body, model.name)
            return await stream_answers(starting, frames, _failure, keep_alive_s, sse.named(PING))
        answers = await starting
        builder = self._new_builder(body, model.name, answers)
        whole = answers.feed_all(lambda _, event: builder.feed(event))
        await sse.until_disconnected(request.receive, whole)
        return Response(dumps(builder.message), media_type="application/json")

    def _frames(self, body: MessagesRequest, model: str, answers: Answers) -> AsyncIterator[bytes]:
        return sse.named_frames(self._new_builder(body, model, answers), answers.events())

    async def count(self, body: CountTokensRequest, request: Request) -> Response:
        """Count the tokens of a conversation."""
        _check_fields(body)
        model = self._context.find_model(body.model, body.keep_alive, body.adapter)
        counting = model.count_tokens(messages_request(body))
        async with self._context.live.time_limits(body.timeout).preparing():
            num_tokens = await sse.until_disconnected(request.receive, counting)
        return JSONResponse({"input_tokens": num_tokens})

    def _new_builder(self, body: MessagesRequest, model: str, answers: Answers) -> MessageBuilder:
        return MessageBuilder(
            self._context.new_id("msg_"),
            model,
            answers.choices[0].num_prompt,
            body.max_tokens,
            shows_thinking=not (body.thinking and body.thinking.display == "omitted"),
            asks_for_caching=asks_for_caching(body),
        )


def _failure(error: ApiError) -> list[bytes]:
    """The stream of a message that could not be started."""
    return [sse.named(anthropic_error(error))]


def _check_fields(body: CountTokensRequest) -> None:
    """On these details, Anthropic's SDK sends the whole conversation again, without `thread`."""
    if (body.model_extra or {}).get("thread") not in (None, False):
        raise ApiError(
            400,
            "thread: not supported: this server stores no conversations. Send the whole conversation.",
            param="thread",
            code="unsupported_parameter",
            details={"error_code": "thread_unsupported_request", "unsupported": ["thread"]},
        )
    check_extra(body, REFUSED)


class MessageBuilder:
    """Renders chat events as Anthropic's events, and collects them in `message`, the whole answer."""

    def __init__(
        self,
        message_id: str,
        model: str,
        num_prompt: int,
        max_tokens: int,
        shows_thinking: bool = True,
        asks_for_caching: bool = False,
    ) -> None:
        self.message: dict[str, Any] = {
            "id": message_id,
            "type": "message",
            "role": "assistant",
            "model": model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": _usage(Usage(num_prompt=num_prompt), asks_for_caching),
        }
        self._max_tokens = max_tokens
        self._asks_for_caching = asks_for_caching
        self._shows_thinking = shows_thinking
        self._open: str | None = None  # the type of the current content block
        self._arguments = ""

    def start(self) -> list[dict[str, Any]]:
        return [{"type": "message_start", "message": self.message | {"content": []}}, PING]

    def feed(self, event: ChatEvent) -> list[dict[str, Any]]:
        match event:
            case TextDelta(text):
                started = self._enter({"type": "text", "text": ""})
                self.message["content"][-1]["text"] += text
                return [*started, self._delta({"type": "text_delta", "text": text})]
            case ReasoningDelta(text):
                started = self._enter({"type": "thinking", "thinking": "", "signature": ""})
                if not self._shows_thinking:
                    return started
                self.message["content"][-1]["thinking"] += text
                return [*started, self._delta({"type": "thinking_delta", "thinking": text})]
            case ToolCallStarted(_, call_id, name):
                stopped = self._leave()
                block = {"type": "tool_use", "id": call_id, "name": name, "input": {}}
                return [*stopped, *self._enter(block)]
            case ToolCallArguments(_, fragment):
                self._arguments += fragment
                return [self._delta({"type": "input_json_delta", "partial_json": fragment})]
            case ToolCallEnded(_, arguments):
                self._arguments = arguments
                return self._leave()
            case Finished():
                error = failure_of(event)
                return self._finish(event) if error is None else [anthropic_error(error)]
            case _:
                return []

    @property
    def _index(self) -> int:
        return len(self.message["content"]) - 1

    def _enter(self, block: dict[str, Any]) -> list[dict[str, Any]]:
        """Start the block, unless the current block has the same type."""
        if self._open == block["type"]:
            return []
        stopped = self._leave()
        self._open = block["type"]
        self._arguments = ""
        self.message["content"].append(block)
        return [*stopped, {"type": "content_block_start", "index": self._index, "content_block": dict(block)}]

    def _delta(self, delta: dict[str, Any]) -> dict[str, Any]:
        return {"type": "content_block_delta", "index": self._index, "delta": delta}

    def _leave(self) -> list[dict[str, Any]]:
        """Stop the current block, if there is one."""
        kind, self._open = self._open, None
        if kind is None:
            return []
        block = self.message["content"][-1]
        events = []
        if kind == "thinking":
            block["signature"] = SIGNATURE
            events.append(self._delta({"type": "signature_delta", "signature": SIGNATURE}))
        elif kind == "tool_use":
            block["input"] = _parse_arguments(self._arguments)
        return [*events, {"type": "content_block_stop", "index": self._index}]

    def _finish(self, finished: Finished) -> list[dict[str, Any]]:
        stopped = self._leave()
        reason = stop_reason(finished, self._max_tokens)
        sequence = finished.stop_string if reason == "stop_sequence" else None
        usage = _usage(finished.usage, self._asks_for_caching)
        self.message |= {"stop_reason": reason, "stop_sequence": sequence, "usage": usage}
        delta = {"stop_reason": reason, "stop_sequence": sequence}
        return [*stopped, {"type": "message_delta", "delta": delta, "usage": usage}, {"type": "message_stop"}]


def stop_reason(finished: Finished, max_tokens: int) -> str:
    match finished.reason:
        case "tool_calls":
            return "tool_use"
        case "length":
            is_context_full = finished.usage.num_generated < max_tokens
            return "model_context_window_exceeded" if is_context_full else "max_tokens"
        case _:
            return "stop_sequence" if finished.stop_string is not None else "end_turn"


def _usage(usage: Usage, asks_for_caching: bool) -> dict[str, Any]:
    """Anthropic splits a prompt into tokens read from the cache, tokens written to it, and the rest.

    All prompts are cached. Writes are reported only to a request with cache_control, as Anthropic does.
    """
    num_written = usage.num_stored if asks_for_caching else 0
    skipped = {"skipped_input_tokens": usage.num_skipped} if usage.num_skipped else {}
    return {
        "input_tokens": usage.num_prompt - usage.num_cached - num_written,
        "cache_creation_input_tokens": num_written,
        "cache_read_input_tokens": usage.num_cached,
        "output_tokens": usage.num_generated,
        "output_tokens_details": {"thinking_tokens": usage.num_reasoning},
        **skipped,
    }


def _parse_arguments(arguments: str) -> dict[str, Any]:
    """The call's input; {} if its JSON is cut off by max_tokens or cannot be written again, such as 1e999."""
    try:
        found = loads(arguments) if arguments else {}
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def messages_router(context: ServerContext) -> APIRouter:
    api = Messages(context)
    return json_router(
        "Anthropic",
        ("POST", "/v1/messages", api.create, "Message", answer(MessageAnswer, event=MessageEvent)),
        ("POST", "/v1/messages/count_tokens", api.count, "Count a conversation's tokens", answer(TokenCount)),
    )
