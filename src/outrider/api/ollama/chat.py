"""POST /api/chat and /api/generate: start the answer and send it, as lines or whole."""

from __future__ import annotations

from functools import partial

from fastapi import APIRouter, Request, Response

from outrider.api import sse
from outrider.api.answer_streams import stream_answers
from outrider.api.answers import Prepare, PromptsFor
from outrider.api.body import check_extra, json_router
from outrider.api.context import ServerContext
from outrider.api.ollama import generate_request as generate
from outrider.api.ollama import served_models
from outrider.api.ollama.answer_lines import AnswerLines, Render, chat_fields, failure_lines, generate_fields
from outrider.api.ollama.answer_models import OllamaChat, OllamaChatLine, OllamaGenerated, OllamaGeneratedLine
from outrider.api.ollama.chat_request import (
    REFUSED,
    AnswerFields,
    OllamaChatRequest,
    chat_request,
    check_thinks,
)
from outrider.api.ollama.options import note_context
from outrider.api.ollama.route import OllamaRoute
from outrider.api.openapi import NDJSON, OllamaError, answer
from outrider.api.served_model import RequestedModel, ServedModel
from outrider.chat.json_text import dumps


class OllamaAnswers:
    def __init__(self, context: ServerContext) -> None:
        self._context = context

    async def chat(self, body: OllamaChatRequest, request: Request) -> Response:
        """Continue a conversation, as a stream of lines or whole."""
        check_extra(body, REFUSED)
        model = self._find(body)
        chat = chat_request(body, *model.defaults)

        def prompts(served: ServedModel) -> list[Prepare]:
            check_thinks(body.think, body.model, served.card.thinks)
            exact = chat if served.defaults == model.defaults else chat_request(body, *served.defaults)
            return [partial(served.backend.prepare, exact)]

        prompts_for = prompts if body.messages else None
        return await self._answer("ollama_chat", body, model, request, chat_fields, prompts_for)

    async def generate(self, body: generate.OllamaGenerateRequest, request: Request) -> Response:
        """Answer a prompt, or with raw: true continue it; as a stream of lines or whole."""
        check_extra(body, generate.REFUSED)
        generate.check_fields(body)
        model, prompt = self._find(body), body.prompt or ""
        generate.raw_params(body, *model.defaults)  # a bad request is refused before a load

        def prompts(served: ServedModel) -> list[Prepare]:
            check_thinks(body.think, body.model, served.card.thinks)
            if body.raw:
                params = generate.raw_params(body, *served.defaults)
                return [partial(served.backend.prepare_text, prompt, params)]
            return [partial(served.backend.prepare, generate.generate_request(body, *served.defaults))]

        prompts_for = prompts if prompt else None
        return await self._answer("ollama_generate", body, model, request, generate_fields, prompts_for)

    def _find(self, body: AnswerFields) -> RequestedModel:
        return served_models.find(self._context, body.model, body.keep_alive, body.adapter)

    async def _answer(
        self,
        api: str,
        body: AnswerFields,
        model: RequestedModel,
        request: Request,
        render: Render,
        prompts_for: PromptsFor | None,
    ) -> Response:
        """`prompts_for`: None if there is nothing to answer."""
        context = self._context
        note_context(body.options, context.expected_of(model.entry).max_context)
        lines = AnswerLines(body.model, context.now_s, render, bool(body.logprobs))
        if prompts_for is None:
            return _json(lines.empty(await served_models.load_or_unload(context, model, request.receive)))
        starting = context.live.start(api, model, 1, prompts_for, request.receive)
        if body.stream is False:
            return _json(await sse.until_disconnected(request.receive, lines.whole(await starting)))
        return await stream_answers(
            starting, lines.lines, failure_lines, context.settings.keep_alive_s, lines.keep_alive(), NDJSON
        )


def _json(value: dict[str, object]) -> Response:
    return Response(dumps(value), media_type="application/json")


def ollama_chat_router(context: ServerContext) -> APIRouter:
    api = OllamaAnswers(context)
    chat = answer(OllamaChat, line=OllamaChatLine | OllamaError)
    generated = answer(OllamaGenerated, line=OllamaGeneratedLine | OllamaError)
    return json_router(
        "Ollama",
        ("POST", "/api/chat", api.chat, "Chat", chat),
        ("POST", "/api/generate", api.generate, "Answer or continue a prompt", generated),
        route_class=OllamaRoute,
    )
