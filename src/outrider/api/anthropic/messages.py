"""/v1/messages and /v1/messages/count_tokens: Anthropic's API."""

from __future__ import annotations

from collections.abc import AsyncIterator
from functools import partial
from typing import Any

from fastapi import APIRouter, Request, Response
from starlette.responses import JSONResponse

from outrider.api import sse
from outrider.api.answers import Answers, failure_message, is_failure, raise_if_failed
from outrider.api.anthropic.events import PING, MessageBuilder
from outrider.api.anthropic.messages_input import messages_request
from outrider.api.anthropic.messages_schema import CountTokensRequest, MessagesRequest
from outrider.api.body import JsonRoute, check_extra
from outrider.api.context import ServerContext
from outrider.api.errors import anthropic_error
from outrider.api.params import UNSUPPORTED_IN_CHAT
from outrider.chat.events import Finished

REFUSED = UNSUPPORTED_IN_CHAT | {
    "container": "nothing is executed here",
    "mcp_servers": "this server calls no other: give the model tools",
    "fallback": "there is one model here",
}


class Messages:
    def __init__(self, context: ServerContext) -> None:
        self._context = context

    async def create(self, body: MessagesRequest, request: Request) -> Response:
        """Answer a conversation, whole or as a stream of events."""
        check_extra(body, REFUSED)
        self._context.check_model(body.model)
        chat = messages_request(body)
        answers = await self._context.desk.start("messages", [partial(self._context.backend.start, chat)])
        builder = self._new_builder(body, answers)
        if body.stream:
            keep_alive_s = self._context.settings.keep_alive_s
            frames = _frames(builder, answers)
            return sse.EventStreamResponse(frames, answers.close, keep_alive_s, sse.named(PING))
        return JSONResponse(await sse.until_disconnected(request.receive, _whole(builder, answers)))

    async def count(self, body: CountTokensRequest) -> Response:
        """How many tokens the conversation is."""
        check_extra(body, REFUSED)
        self._context.check_model(body.model)
        num_tokens = await self._context.backend.count_tokens(messages_request(body))
        return JSONResponse({"input_tokens": num_tokens})

    def _new_builder(self, body: MessagesRequest, answers: Answers) -> MessageBuilder:
        return MessageBuilder(
            self._context.new_id("msg_"),
            body.model or self._context.settings.model_name,
            answers.choices[0].num_prompt,
            body.max_tokens,
            shows_thinking=not (body.thinking and body.thinking.display == "omitted"),
            asks_for_caching='"cache_control":' in body.model_dump_json(exclude_none=True),
        )


async def _whole(builder: MessageBuilder, answers: Answers) -> dict[str, Any]:
    try:
        async for _, event in answers.events():
            if isinstance(event, Finished):
                raise_if_failed(event)
            builder.feed(event)
    finally:
        answers.close()
    return builder.message


async def _frames(builder: MessageBuilder, answers: Answers) -> AsyncIterator[bytes]:
    for made in builder.start():
        yield sse.named(made)
    async for _, event in answers.events():
        if isinstance(event, Finished) and is_failure(event):
            status = 500 if event.reason == "error" else 529
            yield sse.named(anthropic_error(status, failure_message(event)))
            return
        for made in builder.feed(event):
            yield sse.named(made)


def messages_router(context: ServerContext) -> APIRouter:
    router = APIRouter(tags=["Anthropic"], route_class=JsonRoute)
    api = Messages(context)
    router.add_api_route("/v1/messages", api.create, methods=["POST"], summary="Message", response_model=None)
    router.add_api_route(
        "/v1/messages/count_tokens",
        api.count,
        methods=["POST"],
        summary="Count a conversation's tokens",
        response_model=None,
    )
    return router
