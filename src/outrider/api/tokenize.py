"""POST /tokenize and /detokenize: vLLM's routes between texts and token ids."""

from __future__ import annotations

import asyncio
from typing import Annotated, Any

from fastapi import APIRouter, Request, Response
from pydantic import ConfigDict, Field
from starlette.responses import JSONResponse
from typing_extensions import TypedDict

from outrider.api.admission import current_reservation
from outrider.api.body import check_extra, json_router
from outrider.api.context import ServerContext
from outrider.api.errors import invalid, refused
from outrider.api.limits import MESSAGES, TOOLS, AtMost, JsonObject, Word
from outrider.api.openai.chat_request import ChatCompletionRequest, ChatMessage, ToolSpec, chat_request
from outrider.api.openai.completions import PromptIds
from outrider.api.openapi import answer
from outrider.api.request_fields import NOT_NULL, RequestModel
from outrider.api.served_model import RequestedModel
from outrider.api.sse import until_disconnected
from outrider.chat.conversation import ChatRequest

CHAT_FIELDS = ("messages", "tools", "chat_template_kwargs", "add_generation_prompt", "continue_final_message")
REFUSED = {
    "chat_template": "not supported: the model's own chat template is used",
    "mm_processor_kwargs": "not supported",
}
NULL: dict[str, Any] = {"type": "null"}


TEXT_FORM: dict[str, Any] = {
    "required": ["prompt"],
    "properties": {"prompt": NOT_NULL} | dict.fromkeys(CHAT_FIELDS, NULL),
}
CHAT_FORM: dict[str, Any] = {
    "required": ["messages"],
    "properties": {
        "messages": NOT_NULL,
        "prompt": NULL,
        "add_special_tokens": {"enum": [False, None]},
    },
}


class TokenizeRequest(RequestModel):
    """A text or a conversation."""

    model_config = ConfigDict(json_schema_extra={"oneOf": [TEXT_FORM, CHAT_FORM]})

    model: Word | None = None
    prompt: str | None = None
    add_special_tokens: bool | None = Field(
        None, description="Of a prompt: with the tokens that the tokenizer adds, such as BOS (default: true)"
    )
    return_token_strs: bool | None = Field(None, description="Also the tokens as the vocabulary writes them")
    messages: Annotated[list[ChatMessage], AtMost(MESSAGES), Field(min_length=1)] | None = None
    tools: Annotated[list[ToolSpec], AtMost(TOOLS)] | None = None
    chat_template_kwargs: JsonObject | None = None
    add_generation_prompt: bool | None = Field(None, description="Default: true")
    continue_final_message: bool | None = None


class DetokenizeRequest(RequestModel):
    model: Word | None = None
    tokens: PromptIds


class TokenizeAnswer(TypedDict):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class DetokenizeAnswer(TypedDict):
    prompt: str


class Tokenize:
    def __init__(self, context: ServerContext) -> None:
        self._context = context

    async def tokenize(self, body: TokenizeRequest, request: Request) -> Response:
        """The token ids of a text, or of a conversation as the chat template renders it."""
        check_extra(body, REFUSED)
        model, prompt = self._context.find_model(body.model), _prompt(body)
        reading = _read(model, prompt, body)
        async with self._context.live.time_limits(None).preparing():
            return JSONResponse(await until_disconnected(request.receive, reading))

    async def detokenize(self, body: DetokenizeRequest, request: Request) -> Response:
        """The text of token ids, special tokens included."""
        check_extra(body, {})
        writing = _written(self._context.find_model(body.model), body.tokens)
        async with self._context.live.time_limits(None).preparing():
            return JSONResponse({"prompt": await until_disconnected(request.receive, writing)})


async def _read(model: RequestedModel, prompt: ChatRequest | str, body: TokenizeRequest) -> dict[str, Any]:
    async with model.use() as served:
        ids = list(await served.backend.prompt_ids(prompt, body.add_special_tokens is not False))
        current_reservation.get().add(num_tokens=len(ids))
        symbols = await asyncio.to_thread(served.tokens.symbols, ids) if body.return_token_strs else None
        found = {"count": len(ids), "max_model_len": served.facts.max_context, "tokens": ids}
        return found | {"token_strs": symbols}


async def _written(model: RequestedModel, token_ids: list[int]) -> str:
    async with model.use() as served:
        size = served.facts.vocab_size
        outside = next((i for i in token_ids if i >= size), None)
        if outside is not None:
            raise invalid("tokens", f"has the id {outside}, outside the vocabulary of {size}")
        current_reservation.get().add(num_tokens=len(token_ids))
        return await asyncio.to_thread(served.tokens.decode, token_ids)


def _prompt(body: TokenizeRequest) -> ChatRequest | str:
    if body.messages is None:
        if body.prompt is None:
            raise invalid("prompt", "is missing: send a prompt or messages")
        given = [name for name in CHAT_FIELDS if getattr(body, name) is not None]
        if given:
            raise invalid(given[0], "belongs to messages, and the request has a prompt")
        return body.prompt
    if body.prompt is not None:
        raise invalid("prompt", "cannot be combined with messages: send one of them")
    if body.add_special_tokens:
        raise refused("add_special_tokens", "the chat template writes the special tokens of a conversation")
    fields = {name: getattr(body, name) for name in CHAT_FIELDS}
    return chat_request(ChatCompletionRequest.model_construct(**fields))


def tokenize_router(context: ServerContext) -> APIRouter:
    api = Tokenize(context)
    return json_router(
        "tokens",
        ("POST", "/tokenize", api.tokenize, "Token ids of a text or conversation", answer(TokenizeAnswer)),
        ("POST", "/detokenize", api.detokenize, "Text of token ids", answer(DetokenizeAnswer)),
    )
