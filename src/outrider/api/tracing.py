"""OpenTelemetry traces, an extra: `pip install 'outrider[otel]'`. Imported only if tracing is on.

FastAPI makes the span of an HTTP request; its parent is the client's `traceparent`. Each answer is a span
below it, with a span for each phase. They are made when the answer ends, from the times that the engine has
measured. No span has text of a prompt or an answer.

    POST /v1/chat/completions
      chat NAME                      gen_ai.*; events: first_token
        render | queue | prefill | decode
"""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING

from opentelemetry import trace
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from starlette.types import Scope

from outrider import __version__

if TYPE_CHECKING:
    from outrider.api.answers import Answers, ChoiceState
    from outrider.engine.sequence import Stats

UNTRACED = ("/health", "/health/live", "/health/ready", "/metrics")  # asked every few seconds
OPERATIONS = {"completions": "text_completion"}  # gen_ai.operation.name, by API; the others are "chat"
GOOD_ENDS = ("stop", "length", "tool_calls")
TRACES_PATH = "/v1/traces"  # below the endpoint, by the OTLP specification
TIMEOUTS = ("OTEL_EXPORTER_OTLP_TIMEOUT", "OTEL_EXPORTER_OTLP_TRACES_TIMEOUT")
TIMEOUT_S = 5.0  # of an export; a shutdown waits so long for a collector that is gone. Chosen by hand


def otlp_provider(endpoint: str | None) -> TracerProvider:
    """Exports over HTTP, in batches, from its own thread. None: the OTEL_* variables name the endpoint."""
    exporter = OTLPSpanExporter(
        endpoint=endpoint.rstrip("/") + TRACES_PATH if endpoint else None,
        timeout=None if any(name in os.environ for name in TIMEOUTS) else TIMEOUT_S,
    )
    is_named = "service.name=" in os.getenv("OTEL_RESOURCE_ATTRIBUTES", "")
    name = {} if is_named or "OTEL_SERVICE_NAME" in os.environ else {"service.name": "outrider"}
    provider = TracerProvider(resource=Resource.create({"service.version": __version__, **name}))
    provider.add_span_processor(BatchSpanProcessor(exporter))
    return provider


class Tracing:
    def __init__(self, provider: TracerProvider) -> None:
        self.provider = provider
        self._tracer = provider.get_tracer("outrider", __version__)

    @staticmethod
    def is_untraced(scope: Scope) -> bool:
        return scope["path"] in UNTRACED

    def record(self, answers: Answers) -> None:
        """The spans of answers that have ended, below the current span."""
        # The span of a stream ends with its last byte, before this call.
        if trace.get_current_span().get_span_context().trace_flags.sampled:
            clock = _WallClock()
            for state in answers.choices:
                self._record_choice(answers, state, clock)

    def close(self) -> None:
        """Send the spans that wait."""
        self.provider.shutdown()

    def _record_choice(self, answers: Answers, state: ChoiceState, clock: _WallClock) -> None:
        operation = OPERATIONS.get(answers.api, "chat")
        start_s = answers.arrived_s
        span = self._tracer.start_span(
            f"{operation} {answers.model}",
            attributes={
                "gen_ai.operation.name": operation,
                "gen_ai.provider.name": "outrider",
                "gen_ai.request.model": answers.model,
                "gen_ai.response.model": answers.model,
                "outrider.request_id": answers.request_id,
                "outrider.engine_id": state.engine_id,
            },
            start_time=clock.ns(start_s),
        )
        finished = state.finished
        if finished is None:
            span.set_attributes({"gen_ai.usage.input_tokens": state.num_prompt, "error.type": "abandoned"})
            span.set_status(trace.StatusCode.ERROR, "the client disconnected")
        else:
            usage = finished.usage
            span.set_attributes(
                {
                    "gen_ai.usage.input_tokens": usage.num_prompt,
                    "gen_ai.usage.output_tokens": usage.num_generated,
                    "gen_ai.usage.cache_read.input_tokens": usage.num_cached,
                    "gen_ai.usage.reasoning.output_tokens": usage.num_reasoning,
                    "gen_ai.response.finish_reasons": [finished.reason],
                }
            )
            if finished.reason not in GOOD_ENDS:
                span.set_attribute("error.type", finished.reason)
                span.set_status(trace.StatusCode.ERROR)
        if state.first_s is not None:
            span.add_event("first_token", timestamp=clock.ns(state.first_s))
        if finished is not None and finished.stats.submitted_s is not None:
            self._record_phases(trace.set_span_in_context(span), start_s, finished.stats, clock)
        span.end()

    def _record_phases(self, parent: trace.Context, start_s: float, stats: Stats, clock: _WallClock) -> None:
        """The phases that the answer has reached; the last one ends with the answer."""
        assert stats.submitted_s is not None
        end_s = stats.submitted_s + (stats.total_s or 0.0)
        drafts = {
            "outrider.steps": stats.steps,
            "outrider.drafted_tokens": sum(stats.drafted),
            "outrider.accepted_tokens": sum(stats.accepted),
        }
        prompt = {
            "outrider.prefilled_tokens": stats.num_prompt - stats.num_cached,
            "outrider.cached_tokens": stats.num_cached,
        }
        queue = {"outrider.preemptions": stats.preemptions}
        begins: list[tuple[str, float, dict[str, int]]] = [
            ("render", start_s, {}),
            ("queue", stats.submitted_s, queue),
        ]
        if stats.queue_s is not None:
            begins.append(("prefill", stats.submitted_s + stats.queue_s, prompt))
        if stats.ttft_s is not None:
            begins.append(("decode", stats.submitted_s + stats.ttft_s, drafts))
        ends = [begin_s for _, begin_s, _ in begins[1:]] + [end_s]
        for (name, begin_s, attributes), phase_end_s in zip(begins, ends, strict=True):
            span = self._tracer.start_span(name, parent, start_time=clock.ns(begin_s), attributes=attributes)
            span.end(clock.ns(phase_end_s))


class _WallClock:
    """Turns times of `time.perf_counter` into nanoseconds since 1970."""

    def __init__(self) -> None:
        self._offset_ns = time.time_ns() - time.perf_counter_ns()

    def ns(self, perf_counter_s: float) -> int:
        return int(perf_counter_s * 1e9) + self._offset_ns
