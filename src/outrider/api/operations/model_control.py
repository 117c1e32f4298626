"""POST /v1/models/{name}/load and /unload, for operators; the state of each model, for /v1/status."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request, Response
from starlette.responses import JSONResponse

from outrider.api import sse
from outrider.api.context import ServerContext
from outrider.api.errors import ApiError
from outrider.api.openapi import answer
from outrider.api.operations.answer_models import ModelState
from outrider.api.served_model import Entry


def model_state(entry: Entry) -> dict[str, Any]:
    progress = entry.progress
    return {
        "name": entry.name,
        "aliases": list(entry.aliases),
        "path": entry.path,
        "state": entry.state,
        "stage": entry.stage,
        "progress": None if progress is None else round(progress, 3),
        "failure": entry.failure,
        "pinned": entry.is_pinned,
        "requests": entry.num_leases,
        "reserved_bytes": entry.reserved_bytes,
        "loads": entry.num_loads,
        "unloads_in_s": entry.seconds_left,
    }


def model_control_router(context: ServerContext) -> APIRouter:
    router = APIRouter(tags=["operations"])
    changed = answer(ModelState)

    @router.post(
        "/v1/models/{name:path}/load",
        summary="Load a model; the answer comes when it is loaded, and it is loaded also if nobody waits",
        response_model=None,
        responses=changed,
    )
    async def load(name: str, request: Request) -> Response:
        model = context.find_model(name)
        await sse.until_disconnected(request.receive, context.models.load(model.entry))
        return JSONResponse(model_state(model.entry))

    @router.post(
        "/v1/models/{name:path}/unload",
        summary="Unload a model: now, or when its last request has ended",
        response_model=None,
        responses=changed,
    )
    async def unload(name: str) -> Response:
        model = context.find_model(name)
        if model.adapter is not None:
            message = f"{name[:200]!r} is an adapter: unload it with DELETE /v1/adapters/NAME"
            raise ApiError(400, message, param="model")
        entry = model.entry
        await context.models.unload(entry)
        return JSONResponse(model_state(entry))

    return router
