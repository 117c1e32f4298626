"""Whether the engine works: for /health and /metrics."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Protocol

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric


class Liveness(Protocol):
    """Implemented in cli/watchdog.py."""

    @property
    def restarts(self) -> Mapping[str, int]:
        """Worker processes that ended before this one, by reason."""
        ...

    @property
    def heartbeat_age_s(self) -> float:
        """Seconds since the engine's last sign of life; 0 while it has nothing to do."""
        ...

    def fault(self) -> str | None:
        """Why the engine does not work; None if it does."""
        ...


RESTART_REASONS = ("signal", "engine_failed", "hung", "exit")


class LivenessMetrics:
    """A Prometheus collector."""

    def __init__(self, liveness: Liveness) -> None:
        self._liveness = liveness

    def collect(self) -> Iterator[Metric]:
        is_alive = self._liveness.fault() is None
        yield GaugeMetricFamily("outrider_engine_alive", "1 while the engine works", value=int(is_alive))
        text = "Seconds since the engine's last sign of life; 0 while it has nothing to do"
        age_s = self._liveness.heartbeat_age_s
        yield GaugeMetricFamily("outrider_engine_heartbeat_age_seconds", text, value=age_s)
        text = "Worker processes that ended and were replaced, by reason"
        restarts = CounterMetricFamily("outrider_worker_restarts", text, labels=["reason"])
        for reason in RESTART_REASONS:
            restarts.add_metric([reason], self._liveness.restarts.get(reason, 0))
        yield restarts
