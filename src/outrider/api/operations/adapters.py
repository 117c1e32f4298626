"""LoRA and DoRA adapters over HTTP: GET and POST /v1/adapters, DELETE /v1/adapters/{name}; for operators.

A path over HTTP must lie inside the folder that the operator has allowed (--adapters-dir).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request, Response
from pydantic import Field
from starlette.responses import JSONResponse

from outrider.api import sse
from outrider.api.adapter_control import AdapterControl
from outrider.api.body import JsonRoute, check_extra
from outrider.api.context import ServerContext
from outrider.api.errors import ApiError, invalid
from outrider.api.limits import Word
from outrider.api.openapi import answer
from outrider.api.operations.answer_models import Adapter, AdapterList, DeletedAdapter
from outrider.api.request_fields import RequestModel
from outrider.api.served_model import Entry, ServedModel
from outrider.engine.adapters import AdapterConflict, AdapterRefused, UnknownAdapter
from outrider.plan import AdapterInfo

AdapterName = Annotated[str, Field(min_length=1, max_length=64, pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]
OF_MODEL = "The model of the adapter. Default: the first one"


class LoadAdapter(RequestModel):
    name: AdapterName
    path: Word = Field(description="A folder inside --adapters-dir: relative to it, or absolute")
    model: Word | None = Field(None, description=OF_MODEL)


class Adapters:
    def __init__(self, context: ServerContext) -> None:
        self._context = context

    async def list(self) -> Response:
        """The adapters of the loaded models."""
        found = [
            _adapter(entry, info) for entry in self._context.models.loaded for info in _loaded(entry.model)
        ]
        return JSONResponse({"object": "list", "data": found})

    async def load(self, body: LoadAdapter, request: Request) -> Response:
        """Load an adapter, and its model if that is not loaded."""
        check_extra(body, {})
        folder, entry = self._allowed(body.path), self._entry(body.model)
        model = self._context.find_model(entry.name)

        async def load_it() -> AdapterInfo:
            async with model.use() as served:
                control = _control(entry, served)
                return await _off_loop(lambda: control.load_adapter(body.name, folder))

        return JSONResponse(_adapter(entry, await sse.until_disconnected(request.receive, load_it())))

    async def unload(
        self, name: str, model: Annotated[str | None, Query(description=OF_MODEL)] = None
    ) -> Response:
        """Unload an adapter that no request uses."""
        entry = self._entry(model)
        if entry.model is None:
            raise ApiError(404, f"the model {entry.name!r} is not loaded", code="adapter_not_found")
        control = _control(entry, entry.model)
        info = await _off_loop(lambda: control.unload_adapter(name))
        return JSONResponse(
            {"id": name, "object": "adapter.deleted", "deleted": True, "freed_bytes": info.num_bytes}
        )

    def _entry(self, name: str | None) -> Entry:
        found = self._context.find_model(name)
        if found.adapter is not None:
            raise invalid("model", f"{found.name[:200]!r} is an adapter: name the model {found.entry.name!r}")
        return found.entry

    def _allowed(self, path: str) -> Path:
        """The folder without links in it. Raises a 403 if it lies outside of the allowed one."""
        allowed = self._context.adapters_folder
        if allowed is None:
            raise ApiError(
                403,
                "this server loads no adapters over HTTP. Name them when it starts (--adapters NAME=DIR). Or "
                "start it with --adapters-dir DIR, if its model runs on one rank.",
                param="path",
                code="adapters_not_allowed",
            )
        try:
            found = (allowed / path).resolve()
        except (OSError, ValueError, RuntimeError):  # a link that leads to itself, or a null byte
            raise invalid("path", "it is not the path of a folder") from None
        if not found.is_relative_to(allowed):
            raise ApiError(
                403,
                "path: it lies outside of the folder that the operator has allowed (--adapters-dir)",
                param="path",
                code="adapters_not_allowed",
            )
        return found


def adapters_router(context: ServerContext) -> APIRouter:
    router, api = APIRouter(tags=["operations"], route_class=JsonRoute), Adapters(context)
    for method, path, endpoint, summary, shape in (
        ("GET", "/v1/adapters", api.list, "The adapters of the loaded models", AdapterList),
        ("POST", "/v1/adapters", api.load, "Load an adapter", Adapter),
        (
            "DELETE",
            "/v1/adapters/{name}",
            api.unload,
            "Unload an adapter that no request uses",
            DeletedAdapter,
        ),
    ):
        router.add_api_route(
            path, endpoint, methods=[method], summary=summary, response_model=None, responses=answer(shape)
        )
    return router


def _loaded(served: ServedModel | None) -> list[AdapterInfo]:
    return [] if served is None or served.adapters is None else list(served.adapters.adapters.values())


def _control(entry: Entry, served: ServedModel) -> AdapterControl:
    if served.adapters is None:
        raise ApiError(404, f"the model {entry.name!r} takes no adapters", code="adapter_not_found")
    return served.adapters


async def _off_loop(work: Callable[[], AdapterInfo]) -> AdapterInfo:
    """The engine's errors as those of HTTP. The engine thread does the work between two steps."""
    try:
        return await asyncio.get_running_loop().run_in_executor(None, work)
    except UnknownAdapter as error:
        raise ApiError(404, str(error), code="adapter_not_found") from None
    except AdapterConflict as error:
        raise ApiError(409, str(error), code="adapter_conflict") from None
    except AdapterRefused as error:
        raise ApiError(400, str(error), code="adapter_refused") from None


def _adapter(entry: Entry, info: AdapterInfo) -> dict[str, Any]:
    return {
        "id": info.name,
        "object": "adapter",
        "model": entry.name,
        "path": info.path,
        "kind": info.kind,
        "rank": info.rank,
        "layers": info.num_layers,
        "bytes": info.num_bytes,
        "fingerprint": info.fingerprint,
    }
