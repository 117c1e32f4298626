"""/v1/responses: create, look up, delete. Kept in memory so that the next request can build on one."""

from __future__ import annotations

from collections.abc import AsyncIterator
from functools import partial
from typing import Any

from fastapi import APIRouter, Request, Response
from pydantic import TypeAdapter
from starlette.responses import JSONResponse

from outrider.api import sse
from outrider.api.answers import Answers, raise_if_failed
from outrider.api.body import JsonRoute, check_extra
from outrider.api.context import ServerContext
from outrider.api.errors import ApiError
from outrider.api.openai.response_store import ResponseStore, StoredResponse
from outrider.api.openai.responses_events import ResponseBuilder
from outrider.api.openai.responses_input import input_items, input_messages, response_request
from outrider.api.openai.responses_schema import InputItem, ResponsesRequest
from outrider.api.params import UNSUPPORTED_IN_CHAT
from outrider.chat.conversation import ChatRequest, Message
from outrider.chat.events import ChatEvent, Finished

ITEMS: TypeAdapter[list[InputItem]] = TypeAdapter(list[InputItem])
REFUSED = UNSUPPORTED_IN_CHAT | {
    "background": "responses are made while the client waits",
    "conversation": "conversations are not kept here: use previous_response_id",
    "prompt": "there are no stored prompts here",
    "context_management": "prompts are never compacted here",
    "moderation": "this server does not moderate",
    "image": "not supported",
    "access_programs": "not supported",
    "prediction": "not a parameter of responses: use chat completions",
}


class Responses:
    def __init__(self, context: ServerContext) -> None:
        self._context = context
        settings = context.settings
        self.store = ResponseStore(settings.max_stored_responses, settings.max_stored_bytes)

    async def create(self, body: ResponsesRequest, request: Request) -> Response:
        """Answer an input, whole or as a stream of events."""
        messages, chat = self._read(body)
        answers = await self._context.desk.start("responses", [partial(self._context.backend.start, chat)])
        job = _Job(self, body, messages, self._new_builder(body, chat), answers)
        if body.stream:
            return sse.EventStreamResponse(job.frames(), answers.close, self._context.settings.keep_alive_s)
        return JSONResponse(await sse.until_disconnected(request.receive, job.whole()))

    async def count(self, body: ResponsesRequest) -> Response:
        """How many tokens the input is."""
        _, chat = self._read(body)
        num_tokens = await self._context.backend.count_tokens(chat)
        return JSONResponse({"object": "response.input_tokens", "input_tokens": num_tokens})

    async def retrieve(self, response_id: str) -> Response:
        return JSONResponse(self._find(response_id).response)

    async def list_input(self, response_id: str) -> Response:
        items = self._find(response_id).input_items
        ids = [item.get("id") for item in items]
        ends = {"first_id": ids[0] if ids else None, "last_id": ids[-1] if ids else None}
        return JSONResponse({"object": "list", "data": items, "has_more": False, **ends})

    async def delete(self, response_id: str) -> Response:
        self._find(response_id)
        self.store.delete(response_id)
        return JSONResponse({"id": response_id, "object": "response", "deleted": True})

    def _read(self, body: ResponsesRequest) -> tuple[list[Message], ChatRequest]:
        check_extra(body, REFUSED)
        self._context.check_model(body.model)
        messages = [*self._earlier(body.previous_response_id), *input_messages(body.input)]
        return messages, response_request(body, messages, self._context.settings.max_tokens)

    def _earlier(self, response_id: str | None) -> tuple[Message, ...]:
        if response_id is None:
            return ()
        found = self.store.get(response_id)
        if found is None:
            raise ApiError(
                400,
                f"previous response {response_id[:100]!r} is not known here: never stored, or forgotten",
                param="previous_response_id",
                code="previous_response_not_found",
            )
        return found.messages

    def _find(self, response_id: str) -> StoredResponse:
        found = self.store.get(response_id)
        if found is None:
            raise ApiError(404, f"response {response_id[:100]!r} is not known here", code="not_found")
        return found

    def _new_builder(self, body: ResponsesRequest, chat: ChatRequest) -> ResponseBuilder:
        context = self._context
        response = _new_response(context, body, chat)
        with_logprobs = chat.params.logprobs is not None
        return ResponseBuilder(response, context.tokens, with_logprobs, context.new_id, context.now_s)


class _Job:
    """One response being made."""

    def __init__(
        self,
        api: Responses,
        body: ResponsesRequest,
        messages: list[Message],
        builder: ResponseBuilder,
        answers: Answers,
    ) -> None:
        self._api = api
        self._body = body
        self._messages = messages
        self._builder = builder
        self._answers = answers

    async def whole(self) -> dict[str, Any]:
        try:
            async for _, event in self._answers.events(self._builder.with_logprobs):
                if isinstance(event, Finished):
                    raise_if_failed(event)
                self._feed(event)
        finally:
            self._answers.close()
        return self._builder.response

    async def frames(self) -> AsyncIterator[bytes]:
        for made in self._builder.start():
            yield sse.named(made)
        async for _, event in self._answers.events(self._builder.with_logprobs):
            for made in self._feed(event):
                yield sse.named(made)

    def _feed(self, event: ChatEvent) -> list[dict[str, Any]]:
        made = self._builder.feed(event)
        response = self._builder.response
        if isinstance(event, Finished) and self._body.store is not False and response["status"] != "failed":
            answer = _answer_messages(response["output"])
            self._api.store.put(
                StoredResponse(response, input_items(self._body.input), (*self._messages, *answer))
            )
        return made


def _answer_messages(output: list[dict[str, Any]]) -> list[Message]:
    """A response's own items, read as if a client had sent them back."""
    return input_messages(ITEMS.validate_python(output))


def _new_response(context: ServerContext, body: ResponsesRequest, chat: ChatRequest) -> dict[str, Any]:
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
        "model": body.model or context.settings.model_name,
        "output": [],
        "parallel_tool_calls": chat.parallel_tool_calls,
        "previous_response_id": body.previous_response_id,
        "prompt_cache_key": body.prompt_cache_key,
        "reasoning": {"effort": reasoning.effort if reasoning else None, "summary": None},
        "safety_identifier": body.safety_identifier,
        "service_tier": "default",
        "store": body.store is not False,
        "temperature": chat.params.temperature,
        "text": {"format": _format(text.format if text else None), "verbosity": "medium"},
        "tool_choice": _plain(body.tool_choice) or "auto",
        "tools": [_rendered_tool(tool) for tool in chat.tools],
        "top_logprobs": body.top_logprobs or 0,
        "top_p": chat.params.top_p,
        "truncation": "disabled",
        "usage": None,
        "user": body.user,
    }


def _format(given: Any) -> dict[str, Any]:
    if given is None:
        return {"type": "text"}
    rendered: dict[str, Any] = given.model_dump(by_alias=True, exclude_none=True)
    return rendered


def _rendered_tool(tool: Any) -> dict[str, Any]:
    return {
        "type": "function",
        "name": tool.name,
        "description": tool.description or None,
        "parameters": dict(tool.parameters),
        "strict": tool.strict,
    }


def _plain(value: Any) -> Any:
    return value.model_dump(exclude_none=True) if hasattr(value, "model_dump") else value


def responses_router(context: ServerContext) -> APIRouter:
    router = APIRouter(tags=["OpenAI"], route_class=JsonRoute)
    api = Responses(context)

    def add(path: str, endpoint: Any, method: str, summary: str) -> None:
        router.add_api_route(path, endpoint, methods=[method], summary=summary, response_model=None)

    add("/v1/responses", api.create, "POST", "Response")
    add("/v1/responses/input_tokens", api.count, "POST", "Count an input's tokens")
    add("/v1/responses/{response_id}", api.retrieve, "GET", "A response made before")
    add("/v1/responses/{response_id}/input_items", api.list_input, "GET", "What it answered")
    add("/v1/responses/{response_id}", api.delete, "DELETE", "Forget a response")
    return router
