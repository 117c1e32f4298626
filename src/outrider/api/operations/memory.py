"""What the parts of the server take of the memory, and what they may take: for /v1/status and /metrics."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

from prometheus_client.core import GaugeMetricFamily, Metric


class MemoryFigures(Protocol):
    """Implemented in engine/memory_plan.py."""

    @property
    def limit_bytes(self) -> int: ...

    @property
    def used(self) -> dict[str, int]: ...  # by part

    @property
    def budgets(self) -> dict[str, int]: ...  # by part


class MemoryReport(Protocol):
    """The part of the engine that the routes use."""

    def memory_use(self) -> MemoryFigures | None: ...


def memory_status(report: MemoryReport | None) -> dict[str, Any] | None:
    figures = report.memory_use() if report is not None else None
    if figures is None:
        return None
    used, budgets = figures.used, figures.budgets
    parts = {name: {"bytes": used[name], "budget_bytes": budgets[name]} for name in budgets}
    return {"limit_bytes": figures.limit_bytes, **parts}


class MemoryMetrics:
    """A Prometheus collector."""

    def __init__(self, report: MemoryReport) -> None:
        self._report = report

    def collect(self) -> Iterator[Metric]:
        figures = self._report.memory_use()
        if figures is None:
            return
        for name, text, values in (
            ("outrider_memory_bytes", "Memory that a part of the server takes", figures.used),
            ("outrider_memory_budget_bytes", "Memory that a part of the server may take", figures.budgets),
        ):
            family = GaugeMetricFamily(name, text, labels=["part"])
            for part, value in values.items():
                family.add_metric([part], value)
            yield family
        text = "Memory that this process may take, by the device, the machine and its container"
        yield GaugeMetricFamily("outrider_memory_limit_bytes", text, value=figures.limit_bytes)
