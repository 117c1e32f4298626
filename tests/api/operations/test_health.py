"""/health says the truth: it follows the engine, not the process."""

from __future__ import annotations

from dataclasses import dataclass, field

import httpx
import pytest
from fake_backend import FACTS, Client, FakeBackend
from fake_backend import server as make_server

from outrider import fallbacks
from outrider.api.app import Server, create_server


@dataclass
class FakeLiveness:
    now: str | None = None
    heartbeat_age_s: float = 0.0
    restarts: dict[str, int] = field(default_factory=dict)

    def fault(self) -> str | None:
        return self.now


@pytest.fixture
def liveness() -> FakeLiveness:
    return FakeLiveness(restarts={"hung": 2})


@pytest.fixture
def made(liveness: FakeLiveness) -> Server:
    plain = make_server(FakeBackend())
    context = plain.context
    return create_server(FakeBackend(), FACTS, None, context.settings, liveness=liveness)


def answers(made: Server) -> list[httpx.Response]:
    client = Client(made)
    return [client.get(path) for path in ("/health/live", "/health/ready", "/health")]


def test_engine_that_works(made: Server) -> None:
    assert [response.status_code for response in answers(made)] == [200, 200, 200]
    assert Client(made).get("/v1/status").json()["status"] == "ready"


def test_status_lists_what_is_switched_off(made: Server) -> None:
    fallbacks.clear()
    assert Client(made).get("/v1/status").json()["fallbacks"] == []
    fallbacks.note("quick kernels", "they are off by 2", "slow operations")
    try:
        assert Client(made).get("/v1/status").json()["fallbacks"] == [
            {"part": "quick kernels", "reason": "they are off by 2", "instead": "slow operations"}
        ]
    finally:
        fallbacks.clear()


def test_engine_that_does_not_work(made: Server, liveness: FakeLiveness) -> None:
    liveness.now = "the engine hangs: decode step for 75 s"
    for response in answers(made):
        assert response.status_code == 503
        assert response.json() == {"status": liveness.now}
        assert response.headers["retry-after"]
    assert Client(made).get("/v1/status").json()["status"] == liveness.now


def test_draining_server_is_alive_and_not_ready(made: Server) -> None:
    made.context.live.drain()
    live, ready, _ = answers(made)
    assert (live.status_code, ready.status_code) == (200, 503)
    assert ready.headers["connection"] == "close"


def test_metrics(made: Server, liveness: FakeLiveness) -> None:
    liveness.now, liveness.heartbeat_age_s = "the engine has failed", 7.5
    text = Client(made).get("/metrics").text
    assert "outrider_engine_alive 0.0\n" in text
    assert "outrider_engine_heartbeat_age_seconds 7.5\n" in text
    assert 'outrider_worker_restarts_total{reason="hung"} 2.0\n' in text
    assert 'outrider_worker_restarts_total{reason="signal"} 0.0\n' in text
