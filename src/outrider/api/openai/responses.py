"""/v1/responses: create, retrieve and delete responses. They are stored in memory for the next request."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Coroutine
from functools import partial
from typing import Any

from fastapi import APIRouter, Request, Response
from pydantic import TypeAdapter
from starlette.responses import JSONResponse

from outrider.api import sse
from outrider.api.answer_streams import stream_answers
from outrider.api.answers import Answers, Prepare
from outrider.api.body import check_extra, json_router
from outrider.api.context import ServerContext
from outrider.api.errors import ApiError, context_exceeded
from outrider.api.middleware import current_tenant, note_refusal
from outrider.api.openai.response_store import ResponseStore, StoredResponse
from outrider.api.openai.responses_answer_models import (
    DeletedResponse,
    InputItems,
    InputTokens,
    ResponseEvent,
    ResponseObject,
)
from outrider.api.openai.responses_events import ResponseBuilder
from outrider.api.openai.responses_request import (
    InputItem,
    ItemReference,
    ResponsesRequest,
    input_items,
    input_messages,
    response_request,
)
from outrider.api.openai.responses_tools import namespaces_of
from outrider.api.openapi import answer
from outrider.api.request_fields import UNSUPPORTED_IN_CHAT
from outrider.api.served_model import RequestedModel, ServedModel
from outrider.chat.conversation import ChatRequest, Message
from outrider.request import PromptTooLong

# Reads the output items of a response as input items, as if a client had sent them back.
OUTPUT_ITEMS: TypeAdapter[list[InputItem]] = TypeAdapter(list[InputItem])
REFUSED = UNSUPPORTED_IN_CHAT | {
    "background": "not supported: the client has to wait for the response",
    "conversation": "not supported: use previous_response_id",
    "prompt": "not supported: this server stores no prompts",
    "context_management": "not supported: prompts are never compacted",
    "moderation": "not supported",
    "image": "not supported",
    "access_programs": "not supported",
    "prediction": "not supported in responses: use /v1/chat/completions",
}


class Responses:
    def __init__(self, context: ServerContext) -> None:
        self._context = context
        settings = context.settings
        self._store = ResponseStore(settings.max_stored_responses, settings.max_stored_bytes)

    async def create(self, body: ResponsesRequest, request: Request) -> Response:
        """Answer an input, whole or as a stream of events."""
        body = self._with_items(body)
        model, messages, chat = self._read(body)
        context = self._context
        builder = ResponseBuilder(
            _new_response(context, body, model.name, chat),
            chat.params.logprobs is not None,
            context.new_id,
            context.now_s,
            partial(self._put, current_tenant.get(), body, messages),
            namespaces_of(body.tools),
        )

        def prompts(served: ServedModel) -> list[Prepare]:
            exact = chat
            if served.defaults != model.defaults:
                exact = response_request(body, messages, *served.defaults)
                values = {"temperature": exact.params.temperature, "top_p": exact.params.top_p}
                builder.response |= values
            return [partial(served.backend.prepare, exact)]

        starting = context.live.start("responses", model, 1, prompts, request.receive, body.timeout)
        if body.stream:
            return await self._stream(starting, builder)
        answers = await starting
        builder.tokens = answers.served.tokens
        whole = answers.feed_all(lambda _, event: builder.feed(event), builder.with_logprobs)
        await sse.until_disconnected(request.receive, whole)
        return JSONResponse(builder.response)

    async def _stream(self, starting: Coroutine[Any, Any, Answers], builder: ResponseBuilder) -> Response:
        def frames(answers: Answers) -> AsyncIterator[bytes]:
            builder.tokens = answers.served.tokens
            return sse.named_frames(builder, answers.events(builder.with_logprobs))

        failure = partial(_failure, builder)
        try:
            return await stream_answers(starting, frames, failure, self._context.settings.keep_alive_s)
        except PromptTooLong as error:  # Codex looks for it in a stream only
            exceeded = context_exceeded(error)
            note_refusal(exceeded.reason)
            return Response(b"".join(failure(exceeded)), headers=sse.HEADERS)

    async def count(self, body: ResponsesRequest, request: Request) -> Response:
        """Count the tokens of an input."""
        model, _, chat = self._read(self._with_items(body))
        async with self._context.live.time_limits(body.timeout).preparing():
            num_tokens = await sse.until_disconnected(request.receive, model.count_tokens(chat))
        return JSONResponse({"object": "response.input_tokens", "input_tokens": num_tokens})

    async def retrieve(self, response_id: str) -> Response:
        return Response(self._find(response_id).response, media_type="application/json")

    async def list_input(self, response_id: str) -> Response:
        return Response(self._find(response_id).input_items, media_type="application/json")

    async def delete(self, response_id: str) -> Response:
        self._find(response_id)
        self._store.delete(current_tenant.get(), response_id)
        return JSONResponse({"id": response_id, "object": "response", "deleted": True})

    def _read(self, body: ResponsesRequest) -> tuple[RequestedModel, list[Message], ChatRequest]:
        """(model, conversation without instructions, request to the chat service)."""
        check_extra(body, REFUSED)
        model = self._context.find_model(body.model, body.keep_alive, body.adapter)
        messages = [*self._earlier(body.previous_response_id), *input_messages(body.input)]
        return model, messages, response_request(body, messages, *model.defaults)

    def _put(
        self, tenant: str, body: ResponsesRequest, messages: list[Message], response: dict[str, Any]
    ) -> None:
        """Store a response that has ended, unless the request has store: false."""
        if body.store is not False:
            answer = input_messages(OUTPUT_ITEMS.validate_python(response["output"]))
            listed = sse.to_json(_page(input_items(body.input))).encode()
            rendered = sse.to_json(response).encode()
            ids = tuple(item["id"] for item in response["output"])
            stored = StoredResponse(response["id"], rendered, listed, (*messages, *answer), ids)
            self._store.put(tenant, stored)

    def _with_items(self, body: ResponsesRequest) -> ResponsesRequest:
        """The request with items in the place of references to them. Each response is read once."""
        if isinstance(body.input, str) or not any(isinstance(item, ItemReference) for item in body.input):
            return body
        found: dict[str, Any] = {}
        for i, item in enumerate(body.input):
            if isinstance(item, ItemReference) and item.id not in found:
                found |= self._output_items(item.id, f"input[{i}]")
        items = [found[item.id] if isinstance(item, ItemReference) else item for item in body.input]
        return body.model_copy(update={"input": items})

    def _output_items(self, item_id: str, where: str) -> dict[str, Any]:
        """By their ids: the items of the answer to which an item belongs."""
        stored = self._store.with_item(current_tenant.get(), item_id)
        if stored is None:
            raise ApiError(
                400,
                f"the item {item_id[:100]!r} is not stored here: it was never stored, or it was dropped or "
                "deleted. Send the item itself instead.",
                param=where,
                code="item_not_found",
            )
        output = OUTPUT_ITEMS.validate_python(json.loads(stored.response)["output"])
        return dict(zip(stored.output_ids, output, strict=True))

    def _earlier(self, response_id: str | None) -> tuple[Message, ...]:
        if response_id is None:
            return ()
        found = self._store.get(current_tenant.get(), response_id)
        if found is None:
            raise ApiError(
                400,
                f"the previous response {response_id[:100]!r} is not stored here: it was never stored, or it "
                "was dropped or deleted. Send the whole conversation as input instead.",
                param="previous_response_id",
                code="previous_response_not_found",
            )
        return found.messages

    def _find(self, response_id: str) -> StoredResponse:
        found = self._store.get(current_tenant.get(), response_id)
        if found is None:
            raise ApiError(404, f"the response {response_id[:100]!r} is not stored here", code="not_found")
        return found


def _failure(builder: ResponseBuilder, error: ApiError) -> list[bytes]:
    """The stream of a response that could not be started."""
    events = [*builder.start(), *builder.fail(error.code or "server_error", error.detail)]
    return [sse.named(event) for event in events]


def _new_response(
    context: ServerContext, body: ResponsesRequest, model: str, chat: ChatRequest
) -> dict[str, Any]:
    """The response object before its first token. It echoes most fields of the request."""
    reasoning, text = body.reasoning, body.text
    return {
        "id": context.new_id("resp_"),
        "object": "response",
        "created_at": int(context.now_s()),
        "status": "in_progress",
        "background": False,
        "error": None,
        "incomplete_details": None,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "max_tool_calls": body.max_tool_calls,
        "metadata": body.metadata or {},
        "model": model,
        "output": [],
        "parallel_tool_calls": chat.parallel_tool_calls,
        "previous_response_id": body.previous_response_id,
        "prompt_cache_key": body.prompt_cache_key,
        "reasoning": {"effort": reasoning.effort if reasoning else None, "summary": None},
        "safety_identifier": body.safety_identifier,
        "service_tier": "default",
        "store": body.store is not False,
        "temperature": chat.params.temperature,
        "text": {
            "format": _plain(text.format if text else None) or {"type": "text"},
            "verbosity": "medium",
        },
        "tool_choice": _plain(body.tool_choice) or "auto",
        "tools": [_rendered_tool(tool) for tool in chat.tools],
        "top_logprobs": body.top_logprobs or 0,
        "top_p": chat.params.top_p,
        "truncation": "disabled",
        "usage": None,
        "user": body.user,
    }


def _page(items: list[dict[str, Any]]) -> dict[str, Any]:
    ids = [item.get("id") for item in items]
    ends = {"first_id": ids[0] if ids else None, "last_id": ids[-1] if ids else None}
    return {"object": "list", "data": items, "has_more": False, **ends}


def _rendered_tool(tool: Any) -> dict[str, Any]:
    return {
        "type": "function",
        "name": tool.name,
        "description": tool.description or None,
        "parameters": dict(tool.parameters),
        "strict": bool(tool.strict),
    }


def _plain(value: Any) -> Any:
    return value.model_dump(by_alias=True, exclude_none=True) if hasattr(value, "model_dump") else value


def responses_router(context: ServerContext) -> APIRouter:
    api, path = Responses(context), "/v1/responses/{response_id}"
    return json_router(
        "OpenAI",
        ("POST", "/v1/responses", api.create, "Response", answer(ResponseObject, event=ResponseEvent)),
        ("POST", "/v1/responses/input_tokens", api.count, "Count an input's tokens", answer(InputTokens)),
        ("GET", path, api.retrieve, "A stored response", answer(ResponseObject)),
        ("GET", f"{path}/input_items", api.list_input, "The input of a stored response", answer(InputItems)),
        ("DELETE", path, api.delete, "Delete a stored response", answer(DeletedResponse)),
    )
