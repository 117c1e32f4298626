"""/v1/models, in a form that OpenAI's and Anthropic's clients both read; /v1/embeddings, which is a 404."""

from __future__ import annotations

from dataclasses import fields
from datetime import UTC, datetime
from typing import Any

from fastapi import APIRouter, Response
from starlette.responses import JSONResponse

from outrider.api.context import ServerContext
from outrider.api.errors import ApiError
from outrider.api.openai.answer_models import Model, ModelList
from outrider.api.openapi import AnthropicError, OpenAIError, answer
from outrider.request import SamplingDefaults


def _model(context: ServerContext, name: str) -> dict[str, Any]:
    created = datetime.fromtimestamp(int(context.started_s), tz=UTC)
    return {
        "id": name,
        "object": "model",
        "created": int(context.started_s),
        "owned_by": "outrider",
        "max_model_len": context.facts.max_context,
        "default_sampling_params": _default_sampling(context),
        # Anthropic's names
        "type": "model",
        "display_name": name,
        "created_at": created.isoformat().replace("+00:00", "Z"),
        "max_input_tokens": context.facts.max_context,
        "input_modalities": ["text", "image"] if context.facts.reads_images else ["text"],
    }


def _default_sampling(context: ServerContext) -> dict[str, float]:
    """The values of a request that leaves them out."""
    params = context.settings.sampling.params()
    return {field.name: getattr(params, field.name) for field in fields(SamplingDefaults)}


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
