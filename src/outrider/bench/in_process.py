"""Owns the benchmark target that runs the engine in this process: no server is between."""

from __future__ import annotations

import json
import time
from typing import Any

import mlx.core as mx

from outrider.answer_form import Grammar
from outrider.bench.answer import Answer, DraftCounts, TokenArrival
from outrider.bench.errors import BenchFailed
from outrider.bench.target import RequestOptions
from outrider.bench.workloads import Task
from outrider.chat.conversation import ChatRequest
from outrider.chat.events import TextDelta
from outrider.chat.message_dicts import messages_from_dicts
from outrider.engine.sequence import Delta, Stats
from outrider.llm import LLM
from outrider.request import InvalidRequest, SamplingParams


class EngineTarget:
    """An LLM, used through its asyncio engine. An answer's clock starts when the engine gets the request."""

    name = "outrider"
    can_draft = True
    memory_source = "MLX"

    def __init__(self, llm: LLM) -> None:
        if not llm.renderer.has_template:
            raise BenchFailed(
                "this model has no chat template, and the benchmark needs one: use another model"
            )
        self._llm = llm
        self._engine = llm.async_engine
        self._counts = DraftCounts()

    def facts(self) -> dict[str, Any]:
        facts = self._llm.engine.facts
        return {
            "kind": "engine",
            "model": facts.name,
            "dtype": facts.dtype,
            "kv_bits": facts.kv_bits,
            "device": facts.device,
            "drafter": facts.drafter,
            "head": facts.head,
            "draft_model": facts.draft_model,
            "max_context": facts.max_context,
        }

    async def ask(self, task: Task, options: RequestOptions) -> Answer:
        started_s = time.perf_counter()
        try:
            prompt = self._llm.renderer.render(
                ChatRequest(messages_from_dicts(task.messages), _params(task, options))
            )
            validated = self._llm.engine.validate(prompt.ids, prompt.params, continues_prompt=False)
        except InvalidRequest as error:
            return Answer(task.kind, started_s, time.perf_counter(), error=str(error))
        started_s = time.perf_counter()
        stream = self._engine.submit(validated)
        arrivals, texts, last = [], [], Delta("")
        async for last in stream:
            texts.append(last.text)
            if last.token_ids:
                arrivals.append(TokenArrival(time.perf_counter() - started_s, len(last.token_ids)))
        parser = prompt.new_parser()
        events = [*parser.push("".join(texts)), *parser.finish()]
        stats = last.stats or Stats()
        self._counts += _counts(stats)
        return Answer(
            kind=task.kind,
            started_s=started_s,
            ended_s=time.perf_counter(),
            arrivals=tuple(arrivals),
            num_tokens=stats.num_generated,
            finish_reason=last.finish_reason,
            text="".join(event.text for event in events if isinstance(event, TextDelta)),
            num_prompt=stats.num_prompt,
            num_cached=stats.num_cached,
            error=last.error,
        )

    async def draft_counts(self) -> DraftCounts:
        return self._counts

    def reset_peak(self) -> None:
        mx.reset_peak_memory()

    def peak_bytes(self) -> int:
        return mx.get_peak_memory()


def _params(task: Task, options: RequestOptions) -> SamplingParams:
    return SamplingParams(
        max_tokens=options.max_tokens,
        temperature=options.temperature,
        seed=options.seed,
        draft_depth="auto" if options.depth is None else options.depth,
        cache_salt=options.cache_salt,
        grammar=None if task.schema is None else Grammar("json_schema", json.dumps(task.schema)),
    )


def _counts(stats: Stats) -> DraftCounts:
    """Without the first token: the last prefill step samples it."""
    return DraftCounts(
        max(0, stats.steps - 1),
        max(0, stats.num_generated - 1),
        tuple(stats.drafted),
        tuple(stats.accepted),
    )
