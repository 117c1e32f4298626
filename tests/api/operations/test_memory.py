"""/v1/status and /metrics show what each part takes of the memory."""

from __future__ import annotations

from fake_backend import FACTS, Client, FakeBackend, FakeTokenizer, settings

from outrider.api.app import create_server
from outrider.engine.memory_plan import MemoryPlan, MemoryUse

PLAN = MemoryPlan(limit=100, weights=40, rows=30, prefixes=10, images=5, steps=15)


class _Engine:
    def __init__(self, use: MemoryUse | None) -> None:
        self._use = use

    def memory_use(self) -> MemoryUse | None:
        return self._use


def client(use: MemoryUse | None) -> Client:
    return Client(create_server(FakeBackend(), FACTS, FakeTokenizer(), settings(), memory=_Engine(use)))


def test_status_and_metrics_show_every_part() -> None:
    made = client(MemoryUse(PLAN, rows=12, prefixes=3, images=1, held=60))
    memory = made.request("GET", "/v1/status").json()["memory"]
    assert memory["limit_bytes"] == 100
    assert memory["rows"] == {"bytes": 12, "budget_bytes": 30}
    assert memory["steps"] == {"bytes": 4, "budget_bytes": 15}
    assert sum(memory[part]["budget_bytes"] for part in memory if part != "limit_bytes") == 100
    metrics = made.request("GET", "/metrics").text
    for part, used, budget in (("weights", 40, 40), ("rows", 12, 30), ("prefixes", 3, 10), ("images", 1, 5)):
        assert f'outrider_memory_bytes{{part="{part}"}} {used}.0' in metrics
        assert f'outrider_memory_budget_bytes{{part="{part}"}} {budget}.0' in metrics
    assert "outrider_memory_limit_bytes 100.0" in metrics


def test_an_engine_that_is_shut_down_has_no_figures() -> None:
    made = client(None)
    assert made.request("GET", "/v1/status").json()["memory"] is None
    assert "outrider_memory" not in made.request("GET", "/metrics").text
