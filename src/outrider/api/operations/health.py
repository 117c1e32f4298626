"""/health: does the engine work, and does the server accept requests? /v1/status: what runs now?"""

from __future__ import annotations

import time
from dataclasses import asdict
from typing import Any

from fastapi import APIRouter, Response
from starlette.responses import JSONResponse

from outrider import fallbacks
from outrider.api.answers import Answers, ChoiceState
from outrider.api.context import FINGERPRINT, ServerContext
from outrider.api.openapi import answer
from outrider.api.operations.all_models import AllMemory, AllPrefixes
from outrider.api.operations.answer_models import Health, Status
from outrider.api.operations.memory import memory_status
from outrider.api.operations.model_control import model_state
from outrider.api.operations.prefix_cache import status_of

LIVE = "200 while the engine works, 503 if it has failed or hangs"
READY = "200 while new requests are accepted, 503 during a shutdown or if the engine does not work"
# A load balancer that asks again gets a new connection, perhaps to another server.
NOT_READY_HEADERS = {"Retry-After": "5", "Connection": "close"}


def health_router(context: ServerContext) -> APIRouter:
    router = APIRouter(tags=["operations"])
    not_working = {"model": Health, "description": "The engine does not work, or the server stops"}
    working_or_not = answer(Health) | {503: not_working}

    @router.get("/health/live", summary=LIVE, response_model=None, responses=working_or_not)
    async def live() -> Response:
        if (fault := context.fault()) is not None:
            return JSONResponse({"status": fault}, 503, NOT_READY_HEADERS)
        return JSONResponse({"status": "live"})

    @router.get("/health", summary=READY, response_model=None, responses=working_or_not)
    @router.get("/health/ready", summary=READY, response_model=None, responses=working_or_not)
    async def ready() -> Response:
        status = readiness(context)
        if status != "ready":
            return JSONResponse({"status": status}, 503, NOT_READY_HEADERS)
        return JSONResponse({"status": status})

    @router.get("/v1/status", summary="What runs now", response_model=None, responses=answer(Status))
    async def status() -> Response:
        return JSONResponse(_status(context))

    return router


def readiness(context: ServerContext) -> str:
    return context.fault() or ("shutting down" if context.live.is_draining else "ready")


def _status(context: ServerContext) -> dict[str, Any]:
    live, steps = context.live, context.live.metrics.steps
    drafted, accepted = steps.acceptance
    return {
        "server": FINGERPRINT,
        "status": readiness(context),
        "up_s": round(context.now_s() - context.started_s, 3),
        "model": _first_model(context),
        "models": [model_state(entry) for entry in context.models.entries],
        "fallbacks": [asdict(one) for one in fallbacks.noted()],
        "live_requests": live.num_live,
        "capacity": live.admission.limit.num_requests,
        "live_bytes": live.admission.held.num_bytes,
        "live_tokens": live.admission.held.num_tokens,
        "waiting": steps.num_waiting,
        "cache_bytes": steps.cache_bytes,
        "prefix_cache": status_of(AllPrefixes(context.models)),
        "memory": memory_status(AllMemory(context.models)),
        "steps": steps.num_steps,
        "since_last_step_s": steps.since_last_step_s,
        "drafted_by_position": drafted,
        "accepted_by_position": accepted,
        "rows": [
            {
                "sequence": row.sequence_id,
                "kind": row.kind,
                "cells": row.num_cells,
                "drafts": row.num_drafts,
                "prompt_tokens": row.num_prompt,
                "images": row.has_images,
            }
            for row in steps.rows
        ],
        "requests": [request for answers in live.answers.values() for request in _requests(answers)],
    }


def _first_model(context: ServerContext) -> dict[str, Any] | None:
    entry = context.models.default
    if entry.model is None:
        return None
    facts = entry.model.facts
    return {
        "name": entry.name,
        "path": facts.name,
        "dtype": facts.dtype,
        "kv_bits": facts.kv_bits,
        "device": facts.device,
        "max_context": facts.max_context,
        "drafter": facts.drafter,
        "head": facts.head,
        "rank_head": facts.rank_head,
        "rank_head_reason": facts.rank_head_reason,
        "draft_model": facts.draft_model,
    }


def _requests(answers: Answers) -> list[dict[str, Any]]:
    now_s = time.perf_counter()
    return [
        {
            "request_id": answers.request_id,
            "engine_id": choice.engine_id,
            "api": answers.api,
            "model": answers.model,
            "state": _state(choice, answers.num_prefilled(i)),
            "age_s": round(now_s - answers.started_s, 3),
            "prompt_tokens": choice.num_prompt,
            "prompt_tokens_done": answers.num_prefilled(i),
            "images": answers.num_images,
            "deltas": choice.num_events,
        }
        for i, choice in enumerate(answers.choices)
    ]


def _state(choice: ChoiceState, num_prefilled: int) -> str:
    if choice.finished is not None:
        return "finished"
    if choice.first_s is not None:
        return "answering"
    return "prompt" if num_prefilled else "waiting"
