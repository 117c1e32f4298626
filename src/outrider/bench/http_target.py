"""A server with OpenAI's API as a target. An Outrider also reports its steps and drafts."""

from __future__ import annotations

import json
import re
import time
import uuid
from collections import defaultdict
from contextlib import aclosing
from typing import Any

from outrider.bench.answer import Answer, DraftCounts
from outrider.bench.errors import BenchFailed
from outrider.bench.memory import MemoryWatch
from outrider.bench.streamed_answer import read_answer
from outrider.bench.target import RequestOptions
from outrider.bench.workloads import Task
from outrider.chat_client import ChatClient, ServerError, ServerUnreachable
from outrider.server_address import ServerAddress

METRIC = re.compile(r'^outrider_(\w+?)(?:\{position="(\d+)"\})? (\S+)$', re.MULTILINE)
NO_FILTERS = {"top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}  # an Outrider's defaults may differ


class HttpTarget:
    def __init__(
        self,
        name: str,
        client: ChatClient,
        model: str,
        status: dict[str, Any] | None,  # an Outrider's /v1/status; None for other servers
        memory: MemoryWatch | None = None,
    ) -> None:
        self.name = name
        self.model = model
        self.can_draft = status is not None
        self.memory_source = None if memory is None else "the server's process"
        self._client = client
        self._status = status
        self._memory = memory

    def facts(self) -> dict[str, Any]:
        facts: dict[str, Any] = {"kind": "server", "url": str(self._client.address), "model": self.model}
        if self._status is not None:
            facts |= {"server": self._status.get("server")} | dict(self._status.get("model") or {})
        return facts

    async def ask(self, task: Task, options: RequestOptions) -> Answer:
        body = request_body(self.model, task, options)
        if self.can_draft:  # an Outrider: its prefix cache must not answer for the model
            body |= NO_FILTERS | {"cache_salt": uuid.uuid4().hex}
        started_s = time.perf_counter()
        try:
            async with aclosing(self._client.stream_chat(body)) as chunks:
                return await read_answer(task, started_s, chunks)
        except ServerError as error:
            return Answer(task.kind, started_s, time.perf_counter(), error=str(error))

    async def draft_counts(self) -> DraftCounts | None:
        if self._status is None:
            return None
        try:
            return parse_metrics((await self._client.get("/metrics")).decode())
        except ServerError:
            return None

    def reset_peak(self) -> None:
        if self._memory is not None:
            self._memory.reset()

    def peak_bytes(self) -> int | None:
        return None if self._memory is None else self._memory.peak_bytes()


async def connect(
    name: str | None, address: ServerAddress, model: str | None, timeout_s: float, pid: int | None = None
) -> HttpTarget:
    """Finds out which server answers. Raises BenchFailed if no server does, or if it names no model."""
    memory = None if pid is None else MemoryWatch(pid)
    if memory is not None and not memory.works:
        raise BenchFailed(
            f"--pid {pid}: the memory of this process cannot be read (this works on Linux only)"
        )
    client = ChatClient(address, "outrider-bench", timeout_s)
    first = await _first_model(client)  # also if a model is given: shows whether the server can be reached
    chosen = model or first
    if chosen is None:
        raise BenchFailed(f"{address} lists no model at /v1/models: give its name as MODEL")
    status = await _status(client)
    default_name = "outrider" if status is not None else address.netloc
    return HttpTarget(name or default_name, client, chosen, status, memory)


def request_body(model: str, task: Task, options: RequestOptions) -> dict[str, Any]:
    """Every parameter is given for which servers have different defaults."""
    body: dict[str, Any] = {
        "model": model,
        "messages": task.messages,
        "stream": True,
        "stream_options": {"include_usage": True},
        "max_tokens": options.max_tokens,
        "temperature": options.temperature,
        "top_p": 1.0,
    }
    if options.temperature > 0:  # greedy needs no seed, and mlx_lm.server never batches seeded requests
        body["seed"] = options.seed
    if task.schema is not None:
        schema = {"name": "answer", "schema": task.schema, "strict": True}
        body["response_format"] = {"type": "json_schema", "json_schema": schema}
    if options.depth is not None:
        body["draft_depth"] = options.depth
    return body


def parse_metrics(text: str) -> DraftCounts:
    """From an Outrider's /metrics."""
    totals: dict[str, float] = {}
    by_position: dict[str, dict[int, int]] = defaultdict(dict)
    for name, position, value in METRIC.findall(text):
        if position:
            by_position[name][int(position)] = int(float(value))
        else:
            totals[name] = float(value)

    def counts(name: str) -> tuple[int, ...]:
        return tuple(count for _, count in sorted(by_position[name].items()))

    return DraftCounts(
        int(totals.get("stride_tokens_count", 0)),
        int(totals.get("stride_tokens_sum", 0)),
        counts("drafted_tokens_total"),
        counts("accepted_tokens_total"),
    )


async def _first_model(client: ChatClient) -> str | None:
    try:
        return await client.first_model()
    except ServerUnreachable as error:
        raise BenchFailed(
            f"{error}. Start a server there, or leave out --url to load a model here."
        ) from None
    except ServerError:
        return None


async def _status(client: ChatClient) -> dict[str, Any] | None:
    try:
        status = json.loads(await client.get("/v1/status"))
    except ServerError as error:
        if "an operator's key" in str(error):  # an Outrider that would not report its drafts
            raise BenchFailed(f"{error}. Give an operator's key with --api-key.") from None
        return None
    except ValueError:
        return None
    is_outrider = isinstance(status, dict) and str(status.get("server", "")).startswith("outrider")
    return status if is_outrider else None
