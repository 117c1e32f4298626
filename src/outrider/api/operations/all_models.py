"""Figures over all loaded models: cached prefixes, memory, and metrics with the label `model`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from outrider.api.operations.memory import MemoryFigures
from outrider.api.operations.prefix_cache import PrefixControl, PrefixFigures
from outrider.api.operations.step_metrics import StepMetrics
from outrider.api.served_model import Models


@dataclass(frozen=True)
class _Prefixes:
    parts: list[PrefixFigures]

    def gauges(self) -> Mapping[str, int]:
        return _sum(part.gauges() for part in self.parts)

    def counts(self) -> Mapping[str, int]:
        return _sum(part.counts() for part in self.parts)


def _sum(parts: Iterator[Mapping[str, int]]) -> dict[str, int]:
    total: Counter[str] = Counter()
    for part in parts:
        for name, value in part.items():
            total[name] += value
    return dict(total)


class AllPrefixes:
    """The prefix caches of all loaded models, as one."""

    def __init__(self, models: Models) -> None:
        self._models = models

    def prefix_status(self) -> PrefixFigures | None:
        found = [control.prefix_status() for control in self._controls()]
        parts = [figures for figures in found if figures is not None]
        return _Prefixes(parts) if parts else None

    def clear_prefix_cache(self) -> int:
        return sum(control.clear_prefix_cache() for control in self._controls())

    def _controls(self) -> list[PrefixControl]:
        models = (entry.model for entry in self._models.loaded)
        return [
            model.prefix_cache for model in models if model is not None and model.prefix_cache is not None
        ]


@dataclass(frozen=True)
class _Memory:
    limit_bytes: int
    used: dict[str, int]
    budgets: dict[str, int]


class AllMemory:
    """The memory of all loaded models, by part."""

    def __init__(self, models: Models) -> None:
        self._models = models

    def memory_use(self) -> MemoryFigures | None:
        reports = (entry.model.memory for entry in self._models.loaded if entry.model is not None)
        found = [report.memory_use() for report in reports if report is not None]
        figures = [one for one in found if one is not None]
        if not figures:
            return None
        # Each model counts as "steps" what its other parts do not explain of all memory that is held.
        held = max(sum(one.used.values()) for one in figures)
        used = _sum(one.used for one in figures)
        used["steps"] = max(0, held - sum(value for part, value in used.items() if part != "steps"))
        budgets = _sum(one.budgets for one in figures)
        budgets["steps"] = max(one.budgets["steps"] for one in figures)  # steps take turns
        limit = self._models.limit_bytes or max(one.limit_bytes for one in figures)
        return _Memory(limit, used, budgets)


class ModelMetrics:
    """A Prometheus collector."""

    def __init__(self, models: Models, steps: StepMetrics) -> None:
        self._models = models
        self._steps = steps

    def collect(self) -> Iterator[Metric]:
        entries = self._models.entries
        loaded = {entry.name: int(entry.model is not None) for entry in entries}
        yield _gauge("outrider_model_loaded", "1 while the model is loaded", loaded)
        text = "Memory that is reserved for the model"
        yield _gauge("outrider_model_reserved_bytes", text, {one.name: one.reserved_bytes for one in entries})
        text = "Requests that use the model or wait for it"
        yield _gauge("outrider_model_requests", text, {one.name: one.num_leases for one in entries})
        for name, text, values in (
            (
                "outrider_model_loads",
                "How often the model was loaded",
                {e.name: e.num_loads for e in entries},
            ),
            (
                "outrider_model_committed_tokens",
                "Tokens committed by the model",
                self._steps.committed_by_model,
            ),
            ("outrider_model_step_seconds", "Seconds of the model's steps", self._steps.seconds_by_model),
        ):
            family = CounterMetricFamily(name, text, labels=["model"])
            for model, value in values.items():
                family.add_metric([model], value)
            yield family


def _gauge(name: str, text: str, values: Mapping[str, float]) -> GaugeMetricFamily:
    family = GaugeMetricFamily(name, text, labels=["model"])
    for model, value in values.items():
        family.add_metric([model], value)
    return family
