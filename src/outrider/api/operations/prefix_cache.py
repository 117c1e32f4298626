"""The prefix cache for operators: figures for /metrics and /v1/status, and DELETE /v1/cache."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping
from typing import Any, Protocol

from fastapi import APIRouter, Response
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from starlette.responses import JSONResponse

from outrider.api.errors import ApiError
from outrider.api.openapi import answer
from outrider.api.operations.answer_models import ClearedCache

DESCRIPTIONS = {
    "bytes": "Bytes of cached prefixes",
    "budget_bytes": "Bytes that cached prefixes may take",
    "blocks": "Cached blocks",
    "disk_bytes": "Bytes of cached prefixes on disk",
    "hit_tokens": "Prompt tokens copied from the prefix cache instead of computed",
    "evictions": "Blocks dropped from memory to make room",
    "disk_reads": "Blocks read from disk",
    "disk_writes": "Blocks written to disk",
    "disk_evictions": "Files deleted to make room",
    "disk_refused": "Files deleted because they were damaged or of another model",
    "disk_failures": "Writes that failed",
    "disk_skipped": "Blocks not written: too many at once, or writing was paused",
}


class PrefixFigures(Protocol):
    """Implemented in engine/prefix/status.py."""

    def gauges(self) -> Mapping[str, int]: ...

    def counts(self) -> Mapping[str, int]: ...


class PrefixControl(Protocol):
    """The part of the engine that the routes use. The status is None without a prefix cache."""

    def prefix_status(self) -> PrefixFigures | None: ...

    def clear_prefix_cache(self) -> int: ...


def status_of(control: PrefixControl | None) -> dict[str, Any] | None:
    figures = control.prefix_status() if control is not None else None
    return None if figures is None else {**figures.gauges(), **figures.counts()}


class PrefixMetrics:
    """A Prometheus collector."""

    def __init__(self, control: PrefixControl) -> None:
        self._control = control

    def collect(self) -> Iterator[Metric]:
        figures = self._control.prefix_status()
        if figures is None:
            return
        for name, value in figures.gauges().items():
            yield GaugeMetricFamily(f"outrider_prefix_cache_{name}", DESCRIPTIONS[name], value=value)
        for name, value in figures.counts().items():
            yield CounterMetricFamily(f"outrider_prefix_cache_{name}", DESCRIPTIONS[name], value=value)


def prefix_cache_router(engine: PrefixControl | None) -> APIRouter:
    router = APIRouter(tags=["operations"])

    summary = "Delete all cached prefixes"

    @router.delete("/v1/cache", summary=summary, response_model=None, responses=answer(ClearedCache))
    async def clear() -> Response:
        if engine is None or engine.prefix_status() is None:
            raise ApiError(404, "this server runs without a prefix cache", code="no_prefix_cache")
        loop = asyncio.get_running_loop()
        freed = await loop.run_in_executor(None, engine.clear_prefix_cache)
        return JSONResponse({"object": "cache.deleted", "deleted": True, "freed_bytes": freed})

    return router
