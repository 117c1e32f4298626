"""Prometheus metrics of the engine's steps.

`on_step` runs on the engine thread between two forward passes, so it must be cheap: a few additions per row,
no locks. A scrape on another thread may read a step that is half counted; the next scrape has all of it.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)

from outrider.plan import RowPlan, StepPlan, StepResult
from outrider.request import MAX_DEPTH

RowKind = Literal["plain", "speculating", "prefill"]
ROW_KINDS: tuple[RowKind, ...] = ("plain", "speculating", "prefill")
# Histogram buckets in seconds, chosen by hand.
STEP_BUCKETS_S = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)
MAX_WATCHED_STEPS = 1024  # steps that wait for the reader of `watch`; chosen by hand
STRIDES = tuple(range(1, MAX_DEPTH + 2))


def row_kind(row: RowPlan) -> RowKind:
    """A row decodes if it feeds drafts, or one token behind its prompt. Any other row is in prefill."""
    if row.num_drafts:
        return "speculating"
    return "plain" if row.num_fed == 1 and row.start >= row.num_prompt else "prefill"


def decode_kind(kinds: set[RowKind]) -> str:
    """The label of a step in the counter of steps."""
    plain, speculating = "plain" in kinds, "speculating" in kinds
    if plain and speculating:
        return "plain_and_speculating"
    return "speculating" if speculating else "plain" if plain else "prefill_only"


class StepHistogram:
    """Counts per bucket, for one writer thread. prometheus_client's own takes a lock per observation."""

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    @property
    def count(self) -> int:
        return sum(self._counts)

    def family(self, name: str, text: str) -> HistogramMetricFamily:
        total, buckets = 0, []
        for bound, count in zip((*map(str, self._bounds), "+Inf"), list(self._counts), strict=True):
            total += count
            buckets.append((bound, total))
        return HistogramMetricFamily(name, text, buckets=buckets, sum_value=self._sum)


@dataclass(frozen=True)
class LiveRow:
    """A row of the last step."""

    sequence_id: int
    kind: RowKind
    num_cells: int
    num_drafts: int
    num_committed: int
    num_prompt: int
    has_images: bool = False

    @property
    def num_accepted(self) -> int:
        return max(0, min(self.num_drafts, self.num_committed - 1))


@dataclass
class ModelSteps:
    """The observer of one model's engine: counts for all models together, and its own figures."""

    total: StepMetrics
    is_idle: Callable[[], bool]  # True: no row of the model runs, its last step is outdated
    rows: tuple[LiveRow, ...] = ()
    num_waiting: int = 0
    cache_bytes: int = 0
    num_committed: int = 0
    seconds: float = 0.0

    def on_step(
        self, plan: StepPlan, result: StepResult, seconds: float, num_waiting: int, cache_bytes: int
    ) -> None:
        self.rows = self.total.count_step(plan, result, seconds)
        self.num_waiting, self.cache_bytes = num_waiting, cache_bytes
        self.num_committed += sum(row.num_committed for row in self.rows)
        self.seconds += seconds

    def on_encode(self, seconds: float) -> None:
        self.total.on_encode(seconds)

    def on_embedding_cache(self, num_hits: int, num_bytes: int) -> None:
        self.total.on_embedding_cache(num_hits, num_bytes)


class StepMetrics:
    """The figures of all engines, as a Prometheus collector. Each engine has an observer: `of_model`.

    Engines take turns (engine/device_turns.py), so that no two of them count at once.
    """

    def __init__(self) -> None:
        self.is_idle: Callable[[], bool] = lambda: False  # True: no row runs, the last step is outdated
        self._models: dict[str, ModelSteps] = {}
        self._steps = dict.fromkeys(("plain", "speculating", "plain_and_speculating", "prefill_only"), 0)
        self._row_steps: dict[str, int] = dict.fromkeys(ROW_KINDS, 0)
        self._drafted = [0] * MAX_DEPTH
        self._accepted = [0] * MAX_DEPTH
        self._num_prefilled = 0
        self._num_committed = 0
        self._seconds = StepHistogram(STEP_BUCKETS_S)
        self._stride = StepHistogram(tuple(float(stride) for stride in STRIDES))
        self._last_step_s: float | None = None
        self._encode_seconds = StepHistogram(STEP_BUCKETS_S)
        self._embedding_hits = 0
        self._watched: deque[tuple[LiveRow, ...]] | None = None
        self._embedding_bytes = 0

    def of_model(self, name: str, is_idle: Callable[[], bool] = lambda: False) -> ModelSteps:
        """The observer of a model's engine. A model that is loaded again goes on counting."""
        before = self._models.get(name)
        own = ModelSteps(self, is_idle)
        if before is not None:
            own.num_committed, own.seconds = before.num_committed, before.seconds
        self._models[name] = own
        return own

    # -- on the engine thread ----------------------------------------------------------------------------

    def on_step(
        self, plan: StepPlan, result: StepResult, seconds: float, num_waiting: int, cache_bytes: int
    ) -> None:
        """For an engine without a name."""
        own = self._models.get("") or self.of_model("")
        own.on_step(plan, result, seconds, num_waiting, cache_bytes)

    def count_step(self, plan: StepPlan, result: StepResult, seconds: float) -> tuple[LiveRow, ...]:
        committed = {row.sequence_id: len(row.token_ids) for row in result.rows}
        rows = tuple(self._count_row(row, committed) for batch in plan.batches for row in batch)
        self._steps[decode_kind({row.kind for row in rows})] += 1
        self._seconds.observe(seconds)
        self._last_step_s = time.monotonic()
        if (watched := self._watched) is not None:
            watched.append(rows)
        return rows

    def on_encode(self, seconds: float) -> None:
        self._encode_seconds.observe(seconds)

    def on_embedding_cache(self, num_hits: int, num_bytes: int) -> None:
        self._embedding_hits, self._embedding_bytes = num_hits, num_bytes

    def _count_row(self, row: RowPlan, committed: dict[int, int]) -> LiveRow:
        kind = row_kind(row)
        num_committed = committed.get(row.sequence_id, 0)
        self._row_steps[kind] += 1
        self._num_committed += num_committed
        if kind == "prefill":
            self._num_prefilled += row.num_fed
        else:
            self._stride.observe(num_committed)
            for position in range(row.num_drafts):
                self._drafted[position] += 1
            for position in range(min(row.num_drafts, num_committed - 1)):
                self._accepted[position] += 1
        num_cells = row.start + row.num_fed
        return LiveRow(
            row.sequence_id,
            kind,
            num_cells,
            row.num_drafts,
            num_committed,
            row.num_prompt,
            row.has_images,
        )

    # -- for any thread ----------------------------------------------------------------------------------

    def watch(self) -> deque[tuple[LiveRow, ...]]:
        """A queue that gets the rows of each step from now on, until `unwatch`. Unread steps are dropped."""
        self._watched = deque(maxlen=MAX_WATCHED_STEPS)
        return self._watched

    def unwatch(self, watched: deque[tuple[LiveRow, ...]]) -> None:
        if self._watched is watched:
            self._watched = None

    @property
    def rows(self) -> tuple[LiveRow, ...]:
        return tuple(row for model in self._busy_models() for row in model.rows)

    @property
    def committed_by_model(self) -> dict[str, int]:
        return {name: model.num_committed for name, model in self._models.items() if name}

    @property
    def seconds_by_model(self) -> dict[str, float]:
        return {name: model.seconds for name, model in self._models.items() if name}

    def _busy_models(self) -> list[ModelSteps]:
        return [] if self.is_idle() else [one for one in list(self._models.values()) if not one.is_idle()]

    @property
    def depth(self) -> float:
        """Mean number of drafts over the decoding rows of the last step."""
        depths = [row.num_drafts for row in self.rows if row.kind != "prefill"]
        return sum(depths) / len(depths) if depths else 0.0

    @property
    def num_waiting(self) -> int:
        return sum(model.num_waiting for model in self._busy_models())

    @property
    def cache_bytes(self) -> int:
        return sum(model.cache_bytes for model in self._busy_models())

    @property
    def num_committed(self) -> int:
        return self._num_committed

    @property
    def num_prefilled(self) -> int:
        """Prompt tokens computed."""
        return self._num_prefilled

    @property
    def num_steps(self) -> int:
        return sum(self._steps.values())

    @property
    def since_last_step_s(self) -> float | None:
        return None if self._last_step_s is None else time.monotonic() - self._last_step_s

    @property
    def acceptance(self) -> tuple[list[int], list[int]]:
        """(drafted, accepted) tokens by position in the draft."""
        return list(self._drafted), list(self._accepted)

    def collect(self) -> Iterator[Metric]:
        counter = partial(_labelled, CounterMetricFamily)
        yield counter("outrider_steps", "Steps, by the kinds of their decoding rows", "rows", self._steps)
        yield counter("outrider_row_steps", "Rows over all steps, by kind", "kind", self._row_steps)
        by_position = enumerate(self._drafted, 1), enumerate(self._accepted, 1)
        drafted, accepted = ({str(position): n for position, n in pairs} for pairs in by_position)
        yield counter("outrider_drafted_tokens", "Drafts verified, by position", "position", drafted)
        yield counter("outrider_accepted_tokens", "Drafts accepted, by position", "position", accepted)
        prefilled, committed = self._num_prefilled, self._num_committed
        yield CounterMetricFamily("outrider_prefilled_tokens", "Prompt tokens computed", value=prefilled)
        yield CounterMetricFamily("outrider_committed_tokens", "Tokens committed", value=committed)
        yield self._seconds.family("outrider_step_seconds", "Duration of a step")
        yield self._stride.family("outrider_stride_tokens", "Tokens that a decoding row committed in a step")
        kinds = [row.kind for row in self.rows]
        rows = {str(kind): kinds.count(kind) for kind in ROW_KINDS}
        yield _labelled(GaugeMetricFamily, "outrider_rows", "Rows of the last step, by kind", "kind", rows)
        yield GaugeMetricFamily("outrider_depth", "Drafts per decoding row, last step", value=self.depth)
        yield GaugeMetricFamily("outrider_waiting_requests", "Requests that wait", value=self.num_waiting)
        yield GaugeMetricFamily("outrider_cache_bytes", "Bytes of the KV caches", value=self.cache_bytes)
        yield from self._images()

    def _images(self) -> Iterator[Metric]:
        """A piece is the input of one call of the vision encoder: an image, or a few tiles of an image."""
        num_encoded, num_hits = self._encode_seconds.count, self._embedding_hits
        yield CounterMetricFamily("outrider_image_pieces_encoded", "Image pieces encoded", value=num_encoded)
        yield self._encode_seconds.family("outrider_image_encode_seconds", "Duration of encoding a piece")
        yield CounterMetricFamily("outrider_image_cache_hits", "Pieces already cached", value=num_hits)
        yield GaugeMetricFamily(
            "outrider_image_cache_bytes", "Bytes of cached image embeddings", value=self._embedding_bytes
        )


def _labelled(kind: Any, name: str, text: str, label: str, counts: Mapping[str, int]) -> Metric:
    family: CounterMetricFamily | GaugeMetricFamily = kind(name, text, labels=[label])
    for value, count in counts.items():
        family.add_metric([value], count)
    return family
