"""The prefix cache as operators see it: figures for /metrics and /v1/status, and DELETE /v1/cache."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

from fastapi import APIRouter, Response
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from starlette.responses import JSONResponse

from outrider.api.errors import ApiError

TEXTS = {
    "bytes": "Bytes of cached prefixes",
    "budget_bytes": "Bytes that cached prefixes may take",
    "blocks": "Cached blocks",
    "disk_bytes": "Bytes of cached prefixes on disk",
    "hit_tokens": "Tokens that were taken from the prefix cache instead of computed",
    "evictions": "Blocks that gave way to others",
    "disk_reads": "Blocks read from disk",
    "disk_writes": "Blocks written to disk",
    "disk_evictions": "Files that gave way to others",
    "disk_refused": "Files that were damaged or foreign, and were removed",
    "disk_failures": "Writes that went wrong",
    "disk_skipped": "Blocks that were not written: too many at once, or writing was paused",
}


class PrefixNumbers(Protocol):
    """What it holds and what it has done: engine/prefix/status.py."""

    def gauges(self) -> Mapping[str, int]: ...

    def counts(self) -> Mapping[str, int]: ...


class PrefixControl(Protocol):
    """What is needed of the engine."""

    def prefix_status(self) -> PrefixNumbers | None: ...

    def clear_prefix_cache(self) -> int: ...


def status_of(control: PrefixControl | None) -> dict[str, Any] | None:
    numbers = control.prefix_status() if control is not None else None
    return None if numbers is None else {**numbers.gauges(), **numbers.counts()}


class PrefixMetrics:
    """A Prometheus collector."""

    def __init__(self, control: PrefixControl) -> None:
        self._control = control

    def collect(self) -> Iterator[Metric]:
        numbers = self._control.prefix_status()
        if numbers is None:
            return
        for name, value in numbers.gauges().items():
            yield GaugeMetricFamily(f"outrider_prefix_cache_{name}", TEXTS[name], value=value)
        for name, value in numbers.counts().items():
            yield CounterMetricFamily(f"outrider_prefix_cache_{name}", TEXTS[name], value=value)


def prefix_cache_router(control: Callable[[], PrefixControl | None]) -> APIRouter:
    router = APIRouter(tags=["operations"])

    @router.delete("/v1/cache", summary="Forget all cached prefixes", response_model=None)
    async def clear() -> Response:
        engine = control()
        if engine is None or engine.prefix_status() is None:
            raise ApiError(404, "this server runs without a prefix cache", code="no_prefix_cache")
        loop = asyncio.get_running_loop()
        freed = await loop.run_in_executor(None, engine.clear_prefix_cache)
        return JSONResponse({"object": "cache.deleted", "deleted": True, "freed_bytes": freed})

    return router
