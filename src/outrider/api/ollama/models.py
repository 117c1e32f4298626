"""/api/tags, /api/ps, /api/show, /api/version; /api/pull and /api/delete, which change nothing here."""

from __future__ import annotations

from dataclasses import fields
from datetime import UTC, datetime
from typing import Annotated, Any

from fastapi import APIRouter, Response
from pydantic import ConfigDict, Field
from starlette.responses import JSONResponse

from outrider import __version__
from outrider.api.body import json_router
from outrider.api.context import ServerContext
from outrider.api.errors import ApiError
from outrider.api.limits import Word
from outrider.api.model_card import ModelCard
from outrider.api.ollama import served_models
from outrider.api.ollama.answer_lines import line, timestamp
from outrider.api.ollama.answer_models import (
    OllamaLoadedModels,
    OllamaModelInfo,
    OllamaModels,
    OllamaStatus,
    OllamaVersion,
)
from outrider.api.ollama.route import OllamaRoute
from outrider.api.openapi import NDJSON, OllamaError, answer
from outrider.api.request_fields import NOT_NULL, RequestModel
from outrider.api.served_model import Entry
from outrider.engine.validation import ModelFacts
from outrider.request import SamplingDefaults

API_VERSION = "0.32.0"  # the release of Ollama whose API this is: clients ask for a least version
NEVER = datetime(2300, 1, 1, tzinfo=UTC).timestamp()  # when a model that stays loaded is unloaded
DTYPE_NAMES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}
OPTION_NAMES = {"repetition_penalty": "repeat_penalty"}  # Ollama's, where they differ from ours

_NAMED = Annotated[Word, Field(json_schema_extra={"minLength": 1})]


class NamedModel(RequestModel):
    model_config = ConfigDict(
        json_schema_extra={
            "anyOf": [{"required": [name], "properties": {name: NOT_NULL}} for name in ("model", "name")]
        }
    )

    model: _NAMED | None = None
    name: _NAMED | None = Field(None, description="The deprecated name of model")

    @property
    def requested(self) -> str:
        if not (self.model or self.name):
            raise ApiError(400, "model is required", param="model")
        return self.model or self.name or ""


class ShowRequest(NamedModel):
    verbose: bool | None = Field(None, description="No effect")


class PullRequest(NamedModel):
    stream: bool | None = Field(None, description="Default: true")


class OllamaModelRoutes:
    def __init__(self, context: ServerContext) -> None:
        self._context = context

    async def version(self) -> Response:
        """The version of Ollama's API, and of this server."""
        return JSONResponse({"version": API_VERSION, "outrider": __version__})

    async def tags(self) -> Response:
        """The models, once for each of their names."""
        listed = served_models.listed(self._context).items()
        return JSONResponse({"models": [self._listed(name, entry) for name, entry in listed]})

    def _listed(self, name: str, entry: Entry) -> dict[str, Any]:
        facts, card = served_models.known(self._context, entry)
        return {
            "name": name,
            "model": name,
            "modified_at": timestamp(card.modified_s or self._context.started_s),
            "size": card.num_bytes,
            "digest": card.digest,
            "details": _details(facts),
            "capabilities": _capabilities(facts, card),
        }

    async def ps(self) -> Response:
        """The loaded models."""
        return JSONResponse({"models": [self._loaded(entry) for entry in self._context.models.loaded]})

    def _loaded(self, entry: Entry) -> dict[str, Any]:
        facts, card = served_models.known(self._context, entry)
        name, num_bytes, left_s = served_models.tagged(entry.name), _loaded_bytes(entry), entry.seconds_left
        return {
            "name": name,
            "model": name,
            "size": num_bytes,
            "size_vram": 0 if facts.device == "cpu" else num_bytes,
            "digest": card.digest,
            "details": _details(facts),
            "expires_at": timestamp(NEVER if left_s is None else self._context.now_s() + left_s),
            "context_length": facts.max_context,
        }

    async def show(self, body: ShowRequest) -> Response:
        """What is known of a model."""
        context = self._context
        entry = served_models.find(context, body.requested).entry
        facts, card = served_models.known(context, entry)
        family = facts.family or "unknown"
        defaults = _defaults(context.defaults_of(entry).sampling)
        info = {
            "general.architecture": family,
            "general.basename": entry.name,
            "general.parameter_count": facts.num_parameters,
            f"{family}.context_length": facts.max_context,
            f"{family}.embedding_length": facts.hidden_size,
            f"{family}.vocab_size": facts.vocab_size,
        }
        return JSONResponse(
            {
                "modelfile": f"FROM {entry.name}\n",
                "parameters": "\n".join(f"{option:<30} {value}" for option, value in defaults.items()),
                "template": card.template,
                "details": _details(facts),
                "model_info": info,
                "capabilities": _capabilities(facts, card),
                "modified_at": timestamp(card.modified_s or context.started_s),
            }
        )

    async def pull(self, body: PullRequest) -> Response:
        """Says that a model is there. This server downloads none."""
        try:
            served_models.find(self._context, body.requested)
        except ApiError as error:
            if error.status_code != 404:
                raise
            hint = "This server downloads no models: run `outrider models pull NAME`, then serve that model"
            raise ApiError(404, f"{error.detail}. {hint}", param="model", code="model_not_found") from None
        success = {"status": "success"}
        return JSONResponse(success) if body.stream is False else Response(line(success), media_type=NDJSON)

    async def delete(self, body: NamedModel) -> Response:
        """Refused: this server deletes no models."""
        name = served_models.find(self._context, body.requested).entry.name
        message = f"{name!r} is not deleted: this server deletes no models. Run `outrider models rm NAME`"
        raise ApiError(403, message, param="model")


def _details(facts: ModelFacts) -> dict[str, Any]:
    return {
        "parent_model": "",
        "format": "safetensors",
        "family": facts.family,
        "families": [facts.family] if facts.family else [],
        "parameter_size": _human(facts.num_parameters),
        "quantization_level": _quantization(facts),
        "context_length": facts.max_context,
        "embedding_length": facts.hidden_size,
    }


def _capabilities(facts: ModelFacts, card: ModelCard) -> list[str]:
    """Of every model: completion and tools (where the template has none, they are part of the prompt)."""
    thinking, vision = (["thinking"] if card.thinks else []), (["vision"] if facts.reads_images else [])
    return ["completion", "tools", *thinking, *vision]


def _defaults(sampling: SamplingDefaults) -> dict[str, float]:
    """The values of a request that leaves them out, under Ollama's names."""
    params = sampling.params()
    names = [field.name for field in fields(SamplingDefaults)]
    return {OPTION_NAMES.get(name, name): getattr(params, name) for name in names}


def _loaded_bytes(entry: Entry) -> int:
    assert entry.model is not None
    memory = entry.model.memory
    figures = None if memory is None else memory.memory_use()
    return entry.model.card.num_bytes if figures is None else figures.used["weights"]


def _human(number: int) -> str:
    """As 134M or 8.03B; empty if it is not known."""
    for unit, scale in (("B", 1e9), ("M", 1e6), ("K", 1e3)):
        if number >= scale:
            return f"{number / scale:.3g}{unit}"
    return str(number or "")


def _quantization(facts: ModelFacts) -> str:
    if facts.weight_bits:
        return "/".join(f"{bits}-bit" for bits in facts.weight_bits)
    return DTYPE_NAMES.get(facts.dtype, facts.dtype)


def ollama_models_router(context: ServerContext) -> APIRouter:
    api = OllamaModelRoutes(context)
    router = json_router(
        "Ollama",
        ("GET", "/api/version", api.version, "The version", answer(OllamaVersion)),
        ("GET", "/api/tags", api.tags, "The models", answer(OllamaModels)),
        ("GET", "/api/ps", api.ps, "The loaded models", answer(OllamaLoadedModels)),
        ("POST", "/api/show", api.show, "What is known of a model", answer(OllamaModelInfo)),
        ("POST", "/api/pull", api.pull, "Whether a model is there", answer(OllamaStatus, line=OllamaStatus)),
        route_class=OllamaRoute,
    )
    router.add_api_route(
        "/api/delete",
        api.delete,
        methods=["DELETE"],
        summary="Refused: 403",
        status_code=403,
        response_model=None,
        responses={403: {"model": OllamaError}},
    )
    for path, endpoint in (("/api/version", api.version), ("/api/tags", api.tags)):
        router.add_api_route(path, endpoint, methods=["HEAD"], response_model=None, include_in_schema=False)
    return router
