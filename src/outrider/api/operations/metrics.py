"""Prometheus metrics of requests, in a registry of their own, beside those of the engine's steps."""

from __future__ import annotations

from fastapi import APIRouter, Response
from prometheus_client import (
    CONTENT_TYPE_LATEST,
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    generate_latest,
)

from outrider.api.admission import Admission
from outrider.api.operations.step_metrics import StepMetrics
from outrider.chat.events import Finished

LATENCY_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
TOKEN_S = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56)
TOTAL_S = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)


class Metrics:
    """Request figures are kept from the event loop only; `steps` is the engine's to write."""

    def __init__(self, steps: StepMetrics | None = None) -> None:
        self.steps = steps or StepMetrics()
        self.registry = registry = CollectorRegistry(auto_describe=False)
        registry.register(self.steps)
        self.http = Counter(
            "outrider_http_requests", "HTTP requests", ["route", "method", "status"], registry=registry
        )
        self.http_s = Histogram(
            "outrider_http_seconds",
            "From request to last byte",
            ["route"],
            buckets=TOTAL_S,
            registry=registry,
        )
        self.finished = Counter(
            "outrider_requests", "Answers, by API and how they ended", ["api", "finish"], registry=registry
        )
        self.tokens = Counter("outrider_tokens", "Tokens of finished answers", ["kind"], registry=registry)
        self.first_token_s = Histogram(
            "outrider_time_to_first_token_seconds",
            "From request to first delta",
            ["api"],
            buckets=LATENCY_S,
            registry=registry,
        )
        self.inter_token_s = Histogram(
            "outrider_inter_token_seconds",
            "Between two deltas of an answer; a delta is a stride of tokens",
            ["api"],
            buckets=TOKEN_S,
            registry=registry,
        )
        self.queue_s = Histogram(
            "outrider_queue_seconds", "From request to first step", buckets=LATENCY_S, registry=registry
        )
        self.total_s = Histogram(
            "outrider_answer_seconds", "From request to end", ["api"], buckets=TOTAL_S, registry=registry
        )

    def answered(self, api: str, finished: Finished | None) -> None:
        """Count one choice that ended; None: its client left first."""
        self.finished.labels(api, "abandoned" if finished is None else finished.reason).inc()
        if finished is None:
            return
        usage = finished.usage
        counts = {
            "prompt": usage.num_prompt,
            "cached": usage.num_cached,
            "generated": usage.num_generated,
            "reasoning": usage.num_reasoning,
        }
        for kind, count in counts.items():
            self.tokens.labels(kind).inc(count)
        if finished.stats.queue_s is not None:
            self.queue_s.observe(finished.stats.queue_s)
        if finished.stats.total_s is not None:
            self.total_s.labels(api).observe(finished.stats.total_s)

    def watch_admission(self, admission: Admission) -> None:
        """How many are in is read when scraped; with nobody in, the last step's rows are gone."""
        live = Gauge("outrider_live_requests", "Decoding or waiting", registry=self.registry)
        live.set_function(lambda: admission.num_live)
        self.steps.is_idle = lambda: admission.num_live == 0


def metrics_router(metrics: Metrics) -> APIRouter:
    router = APIRouter(tags=["operations"])

    @router.get("/metrics", summary="Prometheus metrics")
    async def scrape() -> Response:
        return Response(generate_latest(metrics.registry), media_type=CONTENT_TYPE_LATEST)

    return router
