"""/v1/models, in a form that OpenAI's and Anthropic's clients both read; /v1/embeddings, which is a 404."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from fastapi import APIRouter, Response
from starlette.responses import JSONResponse

from outrider.api.context import ServerContext
from outrider.api.errors import ApiError
from outrider.api.openai.answer_models import Model, ModelList
from outrider.api.openapi import AnthropicError, OpenAIError, answer


def _model(context: ServerContext, name: str) -> dict[str, Any]:
    created = datetime.fromtimestamp(int(context.started_s), tz=UTC)
    return {
        "id": name,
        "object": "model",
        "created": int(context.started_s),
        "owned_by": "outrider",
        "max_model_len": context.facts.max_context,
        # Anthropic's names
        "type": "model",
        "display_name": name,
        "created_at": created.isoformat().replace("+00:00", "Z"),
        "max_input_tokens": context.facts.max_context,
    }


def models_router(context: ServerContext) -> APIRouter:
    router = APIRouter(tags=["OpenAI"])
    names = context.settings.served_model_names

    summary = "The model, once for each of its served names"

    @router.get("/v1/models", summary=summary, response_model=None, responses=answer(ModelList))
    async def list_models() -> Response:
        models = [_model(context, name) for name in names]
        page = {"has_more": False, "first_id": names[0], "last_id": names[-1]}
        return JSONResponse({"object": "list", "data": models, **page})

    @router.get("/v1/models/{name:path}", summary="The model", response_model=None, responses=answer(Model))
    async def retrieve_model(name: str) -> Response:
        return JSONResponse(_model(context, context.resolve_model(name)))

    # Not a 501: the SDKs would repeat the request.
    @router.post(
        "/v1/embeddings",
        summary="Not served: 404",
        status_code=404,
        response_model=None,
        responses={404: {"model": OpenAIError | AnthropicError}},
    )
    async def embed() -> Response:
        raise ApiError(
            404,
            f"{context.settings.model_name} generates text; this server has no embedding model",
            code="not_supported",
        )

    return router
