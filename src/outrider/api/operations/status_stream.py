"""GET /v1/status/stream: what the batch does, as server-sent events, at most ten a second.

One task makes one snapshot for all readers, and runs only while there is a reader. Meanwhile the engine
thread appends the rows of each step to a queue (StepMetrics.watch); without a reader it appends nothing.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections import deque
from collections.abc import AsyncIterator, Iterable, Sequence
from pathlib import Path
from typing import Any

from fastapi import APIRouter, Response

from outrider.api import sse
from outrider.api.context import ServerContext
from outrider.api.errors import ApiError
from outrider.api.openapi import answer
from outrider.api.operations.all_models import AllPrefixes
from outrider.api.operations.answer_models import StatusEvent
from outrider.api.operations.health import readiness
from outrider.api.operations.prefix_cache import status_of
from outrider.api.operations.step_metrics import LiveRow

INTERVAL_S = 0.1  # between two events while steps run
IDLE_INTERVAL_S = 1.0  # between two events while nothing happens; chosen by hand
RATE_S = 2.0  # tokens per second are an average over this time; chosen by hand
MAX_READERS = 32  # streams at once; chosen by hand
MAX_STEPS = 32  # newest steps of a row in one event; chosen by hand: an event stays below 10 kB
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


def status_stream_router(context: ServerContext) -> APIRouter:
    router = APIRouter(tags=["operations"])
    broadcast = StatusBroadcast(context)
    keep_alive_s = context.settings.keep_alive_s

    @router.get(
        "/v1/status/stream",
        summary="What the batch does, as a stream of events",
        response_class=Response,
        response_model=None,
        responses=answer(None, event=StatusEvent),
    )
    async def stream() -> Response:
        reader = broadcast.join()
        return sse.EventStreamResponse(reader.frames(), lambda: broadcast.leave(reader), keep_alive_s)

    return router


class Reader:
    """The newest frame for one client: a client that reads slowly skips the frames in between."""

    def __init__(self) -> None:
        self._newest: bytes | None = None
        self._is_closed = False
        self._changed = asyncio.Event()

    def put(self, frame: bytes) -> None:
        self._newest = frame
        self._changed.set()

    def close(self) -> None:
        """No more frames come. The newest one is still given out."""
        self._is_closed = True
        self._changed.set()

    async def frames(self) -> AsyncIterator[bytes]:
        while True:
            await self._changed.wait()
            self._changed.clear()
            frame, self._newest = self._newest, None
            if frame is not None:
                yield frame
            if self._is_closed:
                return


class StatusBroadcast:
    """Sends every snapshot to all readers. Used from the event loop only."""

    def __init__(self, context: ServerContext) -> None:
        self._context = context
        self._readers: set[Reader] = set()
        self._task: asyncio.Task[None] | None = None
        self._newest: bytes | None = None

    def join(self) -> Reader:
        """Raises a 429 if there are too many readers, and a 503 during a shutdown."""
        if self._context.live.is_draining:
            raise ApiError(503, "the server is shutting down", headers={"Retry-After": "5"})
        if len(self._readers) >= MAX_READERS:
            raise ApiError(
                429,
                f"{MAX_READERS} clients read this stream already, the most that this server allows",
                headers={"Retry-After": str(self._context.settings.retry_after_s)},
                reason="status_streams",
            )
        reader = Reader()
        self._readers.add(reader)
        if self._newest is not None:
            reader.put(self._newest)
        if self._task is None:
            self._task = asyncio.create_task(self._run())
        return reader

    def leave(self, reader: Reader) -> None:
        self._readers.discard(reader)

    async def _run(self) -> None:
        """Until the last reader has left, or until the server shuts down."""
        metrics, live = self._context.live.metrics.steps, self._context.live
        snapshots, watched = Snapshots(self._context), metrics.watch()
        last_s, last_counts = -IDLE_INTERVAL_S, (-1, -1)
        try:
            while self._readers and not live.is_draining:
                steps = [watched.popleft() for _ in range(len(watched))]
                counts = (metrics.num_waiting, live.num_live)
                if steps or counts != last_counts or time.monotonic() - last_s >= IDLE_INTERVAL_S:
                    last_s, last_counts = time.monotonic(), counts
                    self._send(snapshots.take(steps))
                await asyncio.sleep(INTERVAL_S)
            self._send(snapshots.take([]))
        finally:
            self._task = self._newest = None
            metrics.unwatch(watched)
            for reader in self._readers:
                reader.close()

    def _send(self, snapshot: dict[str, Any]) -> None:
        self._newest = frame = sse.data(snapshot)
        for reader in self._readers:
            reader.put(frame)


class Snapshots:
    """Makes the events: the steps since the last one, and the state now."""

    def __init__(self, context: ServerContext) -> None:
        self._context = context
        self._counts: deque[tuple[float, int, int]] = deque()  # (time, committed, prefilled), of RATE_S

    def take(self, steps: Iterable[tuple[LiveRow, ...]]) -> dict[str, Any]:
        context, live = self._context, self._context.live
        metrics = live.metrics.steps
        committed_per_s, prefilled_per_s = self._rates(metrics.num_committed, metrics.num_prefilled)
        drafted, accepted = metrics.acceptance
        return {
            "time_s": round(context.now_s(), 3),
            "status": readiness(context),
            "rows": _rows(steps, metrics.rows),
            "max_rows": _sum_of(context, "max_rows") or context.settings.max_rows,
            "waiting": metrics.num_waiting,
            "live_requests": live.num_live,
            "steps": metrics.num_steps,
            "tokens_per_s": committed_per_s,
            "prompt_tokens_per_s": prefilled_per_s,
            "committed_tokens": metrics.num_committed,
            "prefilled_tokens": metrics.num_prefilled,
            "drafted_by_position": drafted,
            "accepted_by_position": accepted,
            "cache_bytes": metrics.cache_bytes,
            "cache_budget_bytes": _sum_of(context, "cache_budget_bytes"),
            "prefix_cache": status_of(AllPrefixes(context.models)),
            "memory_bytes": _resident_bytes(),
        }

    def _rates(self, num_committed: int, num_prefilled: int) -> tuple[float, float]:
        """Tokens committed and prompt tokens computed, per second."""
        now_s = time.monotonic()
        self._counts.append((now_s, num_committed, num_prefilled))
        while len(self._counts) > 2 and now_s - self._counts[1][0] >= RATE_S:
            self._counts.popleft()
        then_s, committed, prefilled = self._counts[0]
        seconds = max(now_s - then_s, INTERVAL_S)
        gained = (num_committed - committed, num_prefilled - prefilled)
        return round(gained[0] / seconds, 1), round(gained[1] / seconds, 1)


def _sum_of(context: ServerContext, name: str) -> int | None:
    """Over the loaded models; None if none of them knows the value."""
    values = [getattr(entry.model, name) for entry in context.models.loaded]
    known = [value for value in values if value is not None]
    return sum(known) if known else None


def _rows(steps: Iterable[tuple[LiveRow, ...]], now: Iterable[LiveRow]) -> list[dict[str, Any]]:
    """The rows that ran since the last event, and those that still run a step that is not read yet."""
    found: dict[int, list[LiveRow]] = {}
    for rows in steps:
        for row in rows:
            found.setdefault(row.sequence_id, []).append(row)
    waiting = {row.sequence_id: row for row in now if row.sequence_id not in found}
    rendered = [_row(ran[-1], ran) for ran in found.values()] + [_row(row, ()) for row in waiting.values()]
    return sorted(rendered, key=lambda row: row["sequence"])


def _row(last: LiveRow, ran: Sequence[LiveRow]) -> dict[str, Any]:
    decoded = [row for row in ran if row.kind != "prefill"]
    accepted = sum(row.num_accepted for row in decoded)
    return {
        "sequence": last.sequence_id,
        "state": "prompt" if last.kind == "prefill" else "decode",
        "prompt_tokens": last.num_prompt,
        "cells": last.num_cells,
        "depth": last.num_drafts,
        "committed": sum(row.num_committed for row in ran),
        "accepted": accepted,
        "rejected": sum(row.num_drafts for row in decoded) - accepted,
        "images": last.has_images,
        "strides": [[row.num_drafts, row.num_committed] for row in decoded[-MAX_STEPS:]],
    }


def _resident_bytes() -> int | None:
    """Memory of this process. None where the system does not tell it, such as on macOS."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * PAGE_BYTES
    except OSError:
        return None
