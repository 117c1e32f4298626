"""A server with OpenAI's API as a target; of an Outrider it also reads what the steps did."""

from __future__ import annotations

import json
import re
import time
import uuid
from collections import defaultdict
from typing import Any

from outrider.bench.answer import Answer, DraftCounts
from outrider.bench.errors import BenchFailed
from outrider.bench.http_stream import HttpFailed, HttpResponse, Unreachable, request
from outrider.bench.memory import MemoryWatch
from outrider.bench.sse_answer import AnswerReader, error_message
from outrider.bench.target import Asking
from outrider.bench.workloads import Task
from outrider.server_address import ServerAddress

METRIC = re.compile(r'^outrider_(\w+?)(?:\{position="(\d+)"\})? (\S+)$', re.MULTILINE)


class HttpTarget:
    def __init__(
        self,
        name: str,
        address: ServerAddress,
        model: str,
        status: dict[str, Any] | None,  # what an Outrider says at /v1/status; None: another server
        timeout_s: float,
        memory: MemoryWatch | None = None,
    ) -> None:
        self.name = name
        self.address = address
        self.model = model
        self.can_draft = status is not None
        self.memory_source = None if memory is None else "the server's process"
        self._status = status
        self._timeout_s = timeout_s
        self._memory = memory

    def facts(self) -> dict[str, Any]:
        facts: dict[str, Any] = {"kind": "server", "url": str(self.address), "model": self.model}
        if self._status is not None:
            facts |= {"server": self._status.get("server")} | dict(self._status.get("model") or {})
        return facts

    async def ask(self, task: Task, asking: Asking) -> Answer:
        started_s = time.perf_counter()
        reader = AnswerReader(task, started_s)
        body = request_body(self.model, task, asking)
        if self.can_draft:  # an Outrider: every prompt is computed, however often it was asked
            body["cache_salt"] = uuid.uuid4().hex
        try:
            asked = request(self.address, "POST", "/v1/chat/completions", body, self._timeout_s)
            async with asked as response:
                await _refuse_unless_stream(response)
                ended_s = started_s
                async for read in response.reads():
                    reader.take(read)
                    ended_s = read.at_s
                    if reader.is_done:
                        break
                return reader.answer(ended_s)
        except HttpFailed as error:
            return Answer(task.kind, started_s, time.perf_counter(), error=str(error))

    async def draft_counts(self) -> DraftCounts | None:
        if self._status is None:
            return None
        try:
            return parse_metrics((await _get(self.address, "/metrics")).decode())
        except HttpFailed:
            return None

    def reset_peak(self) -> None:
        if self._memory is not None:
            self._memory.reset()

    def peak_bytes(self) -> int | None:
        return None if self._memory is None else self._memory.peak_bytes()


async def connect(
    name: str | None, address: ServerAddress, model: str | None, timeout_s: float, pid: int | None = None
) -> HttpTarget:
    """Find out who answers there. BenchFailed if nobody does, or nobody with a model."""
    memory = None if pid is None else MemoryWatch(pid)
    if memory is not None and not memory.works:
        raise BenchFailed(
            f"--pid {pid}: the memory of this process cannot be read (this works on Linux only)"
        )
    first = await _first_model(address)
    chosen = model or first
    if chosen is None:
        raise BenchFailed(f"{address} names no model at /v1/models: give its name as MODEL")
    status = await _status(address)
    usual = "outrider" if status is not None else address.netloc
    return HttpTarget(name or usual, address, chosen, status, timeout_s, memory)


def request_body(model: str, task: Task, asking: Asking) -> dict[str, Any]:
    """Every parameter that servers have different defaults for is given."""
    body: dict[str, Any] = {
        "model": model,
        "messages": task.messages,
        "stream": True,
        "stream_options": {"include_usage": True},
        "max_tokens": asking.max_tokens,
        "temperature": asking.temperature,
        "top_p": 1.0,
    }
    if asking.temperature > 0:  # greedy answers need none, and mlx_lm.server batches only requests without
        body["seed"] = asking.seed
    if task.schema is not None:
        schema = {"name": "answer", "schema": task.schema, "strict": True}
        body["response_format"] = {"type": "json_schema", "json_schema": schema}
    if asking.depth is not None:
        body["draft_depth"] = asking.depth
    return body


def parse_metrics(text: str) -> DraftCounts:
    """From an Outrider's /metrics."""
    plain: dict[str, float] = {}
    places: dict[str, dict[int, int]] = defaultdict(dict)
    for name, place, value in METRIC.findall(text):
        if place:
            places[name][int(place)] = int(float(value))
        else:
            plain[name] = float(value)

    def by_place(name: str) -> tuple[int, ...]:
        return tuple(count for _, count in sorted(places[name].items()))

    return DraftCounts(
        int(plain.get("stride_tokens_count", 0)),
        int(plain.get("stride_tokens_sum", 0)),
        by_place("drafted_tokens_total"),
        by_place("accepted_tokens_total"),
    )


async def _first_model(address: ServerAddress) -> str | None:
    """None: it does not tell."""
    try:
        models = json.loads(await _get(address, "/v1/models"))
        return str(models["data"][0]["id"])
    except Unreachable as error:
        raise BenchFailed(
            f"{error}. Start a server there, or leave --url out to measure in process."
        ) from None
    except (HttpFailed, ValueError, LookupError, TypeError):
        return None


async def _status(address: ServerAddress) -> dict[str, Any] | None:
    try:
        status = json.loads(await _get(address, "/v1/status"))
    except (HttpFailed, ValueError):
        return None
    is_ours = isinstance(status, dict) and str(status.get("server", "")).startswith("outrider")
    return status if is_ours else None


async def _get(address: ServerAddress, route: str) -> bytes:
    async with request(address, "GET", route) as response:
        if response.status != 200:
            raise HttpFailed(f"{address}{route} says {response.status}")
        return await response.body()


async def _refuse_unless_stream(response: HttpResponse) -> None:
    if response.status != 200:
        try:
            message = error_message(json.loads(await response.body()))
        except (HttpFailed, ValueError):
            message = "no reason given"
        raise HttpFailed(f"the server says {response.status}: {message}")
    if response.content_type != "text/event-stream":
        raise HttpFailed(f"the server answered with {response.content_type or 'no type'}, not with a stream")
