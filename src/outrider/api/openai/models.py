"""/v1/models, in a form that OpenAI's and Anthropic's clients both read."""

from __future__ import annotations

from dataclasses import fields
from datetime import UTC, datetime
from typing import Any

from fastapi import APIRouter, Response
from starlette.responses import JSONResponse

from outrider.api.context import ServerContext
from outrider.api.errors import ApiError
from outrider.api.openai.answer_models import Model, ModelList
from outrider.api.openapi import answer
from outrider.api.served_model import Entry, ExpectedModel
from outrider.request import SamplingDefaults

OUTPUTS = {None: "text", "embedding": "embeddings", "reranker": "rerank"}


def _model(context: ServerContext, entry: Entry, name: str, adapter: str | None = None) -> dict[str, Any]:
    """`adapter`: of the model, if `name` is base:adapter."""
    created = datetime.fromtimestamp(int(context.started_s), tz=UTC)
    known = context.expected_of(entry)
    return {
        "id": name,
        "object": "model",
        "created": int(context.started_s),
        "owned_by": "outrider",
        "state": entry.state,
        "max_model_len": known.max_context,
        "default_sampling_params": _default_sampling(known),
        # Anthropic's names
        "type": "model",
        "display_name": name,
        "created_at": created.isoformat().replace("+00:00", "Z"),
        "max_input_tokens": known.max_context,
        "max_tokens": known.max_context,
        "lifecycle": "active",
        "input_modalities": ["text", "image"] if known.reads_images else ["text"],
        "output_modalities": [OUTPUTS[known.kind]],
        **({} if adapter is None else {"parent": entry.name}),
    }


def _default_sampling(known: ExpectedModel) -> dict[str, float]:
    """The values of a request that leaves them out."""
    params = known.defaults.sampling.params()
    return {field.name: getattr(params, field.name) for field in fields(SamplingDefaults)}


def _models(context: ServerContext, entry: Entry) -> list[dict[str, Any]]:
    adapters = context.adapters_of(entry) or ()
    named = [_model(context, entry, name) for name in entry.names]
    return named + [_model(context, entry, f"{entry.name}:{adapter}", adapter) for adapter in adapters]


def models_router(context: ServerContext) -> APIRouter:
    router = APIRouter(tags=["OpenAI"])
    summary = "The models, once for each name, and their adapters"

    @router.get("/v1/models", summary=summary, response_model=None, responses=answer(ModelList))
    async def list_models() -> Response:
        models = [one for entry in context.models.entries for one in _models(context, entry)]
        page = {"has_more": False, "first_id": models[0]["id"], "last_id": models[-1]["id"]}
        return JSONResponse({"object": "list", "data": models, **page})

    @router.get("/v1/models/{name:path}", summary="A model", response_model=None, responses=answer(Model))
    async def retrieve_model(name: str) -> Response:
        model = context.find_model(name)
        adapter = model.adapter
        if adapter is not None and adapter not in (context.adapters_of(model.entry) or ()):
            raise ApiError(404, f"there is no adapter {adapter[:64]!r}", code="adapter_not_found")
        return JSONResponse(_model(context, model.entry, name, adapter))

    return router
