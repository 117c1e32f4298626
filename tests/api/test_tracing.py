"""Traces: the spans of a request, their times and parents, and what they must not contain."""

from __future__ import annotations

import gzip
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
from fake_backend import FACTS, FAILED, USER, Client, FakeBackend, FakeTokenizer, settings
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from fresh_process import in_fresh_process
from outrider.api.app import create_server
from outrider.api.tracing import Tracing, otlp_provider
from outrider.chat.events import Finished, TextDelta, Usage
from outrider.cli.main import main
from outrider.cli.tracing import is_tracing_on
from outrider.config import InvalidConfig
from outrider.engine.sequence import SequenceCounters

TRACEPARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
SECRET = "a secret plan"


def answered() -> tuple[Any, ...]:
    """An answer with the engine's times: submitted, first step, first token, in this order."""
    counters = SequenceCounters(steps=3, num_loaded=2)
    counters.started_s = counters.submitted_s + 0.25
    counters.first_token_s = counters.submitted_s + 0.5
    counters.add_drafts(2, 1)
    stats = counters.stats(num_prompt=7, num_generated=5)
    return (TextDelta(SECRET), Finished("stop", Usage(7, 2, 5, 1), stats))


class Traced:
    """An application whose spans stay in memory."""

    def __init__(self, backend: FakeBackend) -> None:
        self._exporter = InMemorySpanExporter()
        provider = TracerProvider()
        provider.add_span_processor(SimpleSpanProcessor(self._exporter))
        tracing = Tracing(provider)
        server = create_server(backend, FACTS, FakeTokenizer(), settings(), tracing=tracing)
        self.client = Client(server, traceparent=TRACEPARENT)

    def spans(self) -> dict[str, ReadableSpan]:
        return {span.name: span for span in self._exporter.get_finished_spans()}

    def chat(self, **fields: Any) -> int:
        body = {"model": "other", "messages": [{"role": "user", "content": SECRET}], **fields}
        return self.client.post("/v1/chat/completions", body).status_code


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_is_a_trace_below_the_clients_span(stream: bool) -> None:
    traced = Traced(FakeBackend(answer=lambda _: answered()))
    assert traced.chat(stream=stream) == 200
    spans = traced.spans()
    request, answer = spans["POST /v1/chat/completions"], spans["chat other"]
    assert request.kind is SpanKind.SERVER
    assert f"{request.parent.trace_id:032x}-{request.parent.span_id:016x}" in TRACEPARENT
    assert {f"{span.context.trace_id:032x}" for span in spans.values()} == {TRACEPARENT.split("-")[1]}
    assert request.attributes["http.response.status_code"] == 200
    assert answer.parent.span_id == request.context.span_id
    assert answer.attributes["gen_ai.operation.name"] == "chat"
    assert answer.attributes["gen_ai.request.model"] == "other"
    assert answer.attributes["gen_ai.usage.input_tokens"] == 7
    assert answer.attributes["gen_ai.usage.output_tokens"] == 5
    assert answer.attributes["gen_ai.response.finish_reasons"] == ("stop",)
    assert [event.name for event in answer.events] == ["first_token"]


def test_the_phases_follow_each_other_and_have_the_engines_times() -> None:
    traced = Traced(FakeBackend(answer=lambda _: answered()))
    traced.chat()
    spans = traced.spans()
    render, queue, prefill, decode = phases = [
        spans[name] for name in ("render", "queue", "prefill", "decode")
    ]
    for phase in phases:
        assert phase.parent.span_id == spans["chat other"].context.span_id
    assert [phase.end_time for phase in phases[:-1]] == [phase.start_time for phase in phases[1:]]
    assert queue.end_time - queue.start_time == pytest.approx(0.25e9, rel=0.01)
    assert prefill.end_time - prefill.start_time == pytest.approx(0.25e9, rel=0.01)
    assert render.start_time >= spans["POST /v1/chat/completions"].start_time
    assert decode.attributes["outrider.steps"] == 3
    assert decode.attributes["outrider.accepted_tokens"] == 1
    assert prefill.attributes["outrider.prefilled_tokens"] == 5


def test_no_span_has_text() -> None:
    traced = Traced(FakeBackend(answer=lambda _: answered()))
    traced.chat()
    traced.client.post("/v1/chat/completions", {"messages": USER, "stop": [SECRET] * 5})
    broken = Traced(FakeBackend(failure=RuntimeError(SECRET)))
    assert broken.chat() == 500
    written = [span.to_json() for one in (traced, broken) for span in one.spans().values()]
    assert len(written) > 6
    assert not [text for text in written if SECRET in text]


def test_a_failed_answer_is_an_error_and_a_refused_one_is_not() -> None:
    traced = Traced(FakeBackend(FAILED))
    assert traced.chat() == 500
    assert traced.spans()["chat other"].status.status_code is StatusCode.ERROR
    assert traced.spans()["POST /v1/chat/completions"].status.status_code is StatusCode.ERROR
    refused = Traced(FakeBackend())
    assert refused.chat(n=0) == 400
    assert refused.spans()["POST /v1/chat/completions"].status.status_code is StatusCode.UNSET
    assert list(refused.spans()) == ["POST /v1/chat/completions"]


def test_probes_are_not_traced() -> None:
    traced = Traced(FakeBackend())
    assert traced.client.get("/health").status_code == 200
    assert traced.client.get("/metrics").status_code == 200
    assert traced.spans() == {}


def test_spans_are_sent_to_the_collector_at_the_latest_at_the_end() -> None:
    received: list[tuple[str, bytes]] = []

    class Collector(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            received.append((self.path, gzip.decompress(body) if body[:2] == b"\x1f\x8b" else body))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Collector) as collector:
        threading.Thread(target=collector.serve_forever, args=(0.01,), daemon=True).start()
        tracing = Tracing(otlp_provider(f"http://127.0.0.1:{collector.server_port}/"))
        backend = FakeBackend(answer=lambda _: answered())
        server = create_server(backend, FACTS, FakeTokenizer(), settings(), tracing=tracing)
        Client(server).post("/v1/chat/completions", {"messages": USER})
        tracing.close()
        collector.shutdown()
    assert [path for path, _ in received] == ["/v1/traces"]
    for word in (b"outrider", b"gen_ai.usage.input_tokens", b"prefill", b"decode"):
        assert word in received[0][1]


# -- turning it on ---------------------------------------------------------------------------------------


def test_without_tracing_no_sdk_is_imported() -> None:
    code = """
import gzip
import sys
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
sys.path.insert(0, FOLDER)
from fake_backend import Client, FakeBackend, USER, server
assert Client(server(FakeBackend())).post("/v1/chat/completions", {"messages": USER}).status_code == 200
import outrider.cli.serve
import json
unwanted = "opentelemetry.sdk", "opentelemetry.exporter"
found = {"imported": [name for name in sys.modules if name.startswith(unwanted)]}
""".replace("FOLDER", repr(str(Path(__file__).parent)))
    assert in_fresh_process(code)["imported"] == []


@pytest.mark.parametrize(
    ("endpoint", "environ", "is_on"),
    [
        (None, {}, False),
        ("http://localhost:4318", {}, True),
        (None, {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://collector:4318"}, True),
        (None, {"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "https://collector/v1/traces"}, True),
        (None, {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:4318", "OTEL_SDK_DISABLED": "true"}, False),
        (None, {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:4318", "OTEL_TRACES_EXPORTER": "none"}, False),
    ],
)
def test_an_endpoint_turns_tracing_on(endpoint: str | None, environ: dict[str, str], is_on: bool) -> None:
    assert is_tracing_on(endpoint, environ) is is_on


@pytest.mark.parametrize(
    ("endpoint", "environ", "message"),
    [
        ("localhost:4318", {}, "--otlp-endpoint: 'localhost:4318' is not a URL"),
        (None, {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://"}, "OTEL_EXPORTER_OTLP_ENDPOINT: "),
        ("http://c:4318", {"OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"}, "only http/protobuf"),
        ("http://c:4318", {"OTEL_SDK_DISABLED": "true"}, "contradicts"),
    ],
)
def test_bad_settings_are_refused(endpoint: str | None, environ: dict[str, str], message: str) -> None:
    with pytest.raises(InvalidConfig, match=message):
        is_tracing_on(endpoint, environ)


def test_without_the_extra_the_server_refuses_to_start_before_it_loads_a_model(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delitem(sys.modules, "outrider.api.tracing")
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)  # as if it were not installed
    assert main(["serve", "no/such/model", "--otlp-endpoint", "http://localhost:4318"]) != 0
    assert "pip install 'outrider[otel]'" in capsys.readouterr().err
