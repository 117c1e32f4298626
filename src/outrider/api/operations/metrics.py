"""Prometheus metrics of requests. Those of the engine's steps are in `step_metrics`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from fastapi import APIRouter, Response
from prometheus_client import (
    CONTENT_TYPE_LATEST,
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    generate_latest,
)
from starlette.responses import PlainTextResponse

from outrider.api.operations.step_metrics import StepMetrics
from outrider.chat.events import Finished

# Histogram buckets in seconds, chosen by hand: waiting times, time between deltas, whole answers.
LATENCY_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
TOKEN_S = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56)
TOTAL_S = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)


class Metrics:
    """The event loop writes the metrics of requests; the engine thread writes `steps`."""

    def __init__(self, steps: StepMetrics | None = None) -> None:
        self.steps = steps or StepMetrics()
        self.registry = registry = CollectorRegistry(auto_describe=False)
        registry.register(self.steps)
        counter, histogram = partial(Counter, registry=registry), partial(Histogram, registry=registry)
        self.http = counter("outrider_http_requests", "HTTP requests", ["route", "method", "status"])
        text = "Requests and connections that were refused or cut off, by reason"
        self.refusals = counter("outrider_refusals", text, ["reason"])
        text = "From the request to the last byte of its response"
        self.http_s = histogram("outrider_http_seconds", text, ["route"], buckets=TOTAL_S)
        self.finished = counter("outrider_requests", "Answers, by API and finish reason", ["api", "finish"])
        self.tokens = counter("outrider_tokens", "Tokens of finished answers", ["kind"])
        text = "Inputs of embeddings and rerank requests that were answered"
        self.embedding_inputs = counter("outrider_embedding_inputs", text, ["api"])
        text = "From the request to its first delta"
        self.first_token_s = histogram(
            "outrider_time_to_first_token_seconds", text, ["api"], buckets=LATENCY_S
        )
        text = "Between two deltas of an answer; a delta is a stride of tokens"
        self.inter_token_s = histogram("outrider_inter_token_seconds", text, ["api"], buckets=TOKEN_S)
        text = "From the request to its first step"
        self.queue_s = histogram("outrider_queue_seconds", text, buckets=LATENCY_S)
        text = "From the request to the end of its answer"
        self.total_s = histogram("outrider_answer_seconds", text, ["api"], buckets=TOTAL_S)

    def count_answer(self, api: str, finished: Finished | None) -> None:
        """Count one choice that ended. None: its client disconnected before the end."""
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

    def count_embeddings(self, api: str, num_inputs: int, num_tokens: int, seconds: float) -> None:
        """Count an embeddings or rerank request that was answered."""
        self.finished.labels(api, "stop").inc()
        self.embedding_inputs.labels(api).inc(num_inputs)
        self.tokens.labels("prompt").inc(num_tokens)
        self.total_s.labels(api).observe(seconds)

    def watch_connections(self, num_open: Callable[[], int]) -> None:
        """Read the number of open connections at each scrape."""
        gauge = Gauge("outrider_connections", "Open client connections", registry=self.registry)
        gauge.set_function(num_open)

    def watch_live_requests(self, num_live: Callable[[], int]) -> None:
        """Read the number of live requests at each scrape. At 0, the rows of the last step are outdated."""
        live = Gauge("outrider_live_requests", "Requests that run or wait", registry=self.registry)
        live.set_function(num_live)
        self.steps.is_idle = lambda: num_live() == 0


def metrics_router(metrics: Metrics) -> APIRouter:
    router = APIRouter(tags=["operations"])

    @router.get("/metrics", summary="Prometheus metrics", response_class=PlainTextResponse)
    async def scrape() -> Response:
        return Response(generate_latest(metrics.registry), media_type=CONTENT_TYPE_LATEST)

    return router
