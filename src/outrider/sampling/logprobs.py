"""Log-probabilities of target tokens, for rows that request them: by the model alone, at temperature 1."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from outrider.cpu import sampling as cpu_sampling
from outrider.plan import RowPlan, TokenLogprobs

TOP_STEP = 32  # traced passes compute a multiple of this many alternatives: above MAX_TOP_LOGPROBS


@dataclass(frozen=True)
class LogprobRequest:
    """The rows whose log-probabilities are computed, and how many alternatives beside the target token."""

    rows: tuple[int, ...] | None  # indices into the sampling rows; None: all of them
    num_top: int

    @classmethod
    def of(cls, rows: Sequence[RowPlan], vocab: int, for_trace: bool = False) -> LogprobRequest:
        """`for_trace`: for all rows and in few sizes, so that one trace serves all."""
        wanted = [i for i, row in enumerate(rows) if row.params.logprobs is not None]
        num_top = max(rows[i].params.logprobs or 0 for i in wanted)
        if not for_trace:
            return cls(tuple(wanted), min(num_top, vocab))
        return cls(None, min(-(-num_top // TOP_STEP) * TOP_STEP, vocab))

    @property
    def key(self) -> Hashable:
        return self.rows, self.num_top


@dataclass(frozen=True)
class LogprobArrays:
    """Log-probabilities on the device. `rows` are indices into the sampling rows."""

    rows: tuple[int, ...]
    of_targets: mx.array  # [rows, width]
    top_ids: mx.array  # [rows, width, num_top]
    top: mx.array  # [rows, width, num_top]

    @property
    def arrays(self) -> dict[str, mx.array]:
        return {"of_targets": self.of_targets, "top_ids": self.top_ids, "top": self.top}


def compute_logprobs(logits: mx.array, targets: mx.array, request: LogprobRequest) -> LogprobArrays:
    """logits [rows, width, vocab] as the model gave them, targets [rows, width]."""
    rows = tuple(range(len(targets))) if request.rows is None else request.rows
    if len(rows) < len(targets):
        index = mx.array(rows)
        logits, targets = logits[index], targets[index]
    if (found := cpu_sampling.logprobs(logits, targets, request.num_top)) is not None:
        return LogprobArrays(rows, *found)
    logprobs = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
    of_targets = mx.take_along_axis(logprobs, targets[..., None], axis=-1)[..., 0]
    if request.num_top == 0:
        empty = mx.zeros((*targets.shape, 0))
        return LogprobArrays(rows, of_targets, empty.astype(mx.int32), empty)
    top_ids = mx.argpartition(-logprobs, request.num_top - 1, axis=-1)[..., : request.num_top]
    return LogprobArrays(rows, of_targets, top_ids, mx.take_along_axis(logprobs, top_ids, axis=-1))


def read_logprobs(
    logprobs: LogprobArrays, rows: Sequence[RowPlan], tokens: Sequence[Sequence[int]]
) -> dict[int, tuple[TokenLogprobs, ...]]:
    """By sampling row with logprobs: one entry for each committed token. Padding rows are left out."""
    of_targets, top_ids, top = map(np.array, (logprobs.of_targets, logprobs.top_ids, logprobs.top))
    return {
        row: tuple(
            TokenLogprobs(
                token_id,
                float(of_targets[i, j]),
                best_first(top_ids[i, j], top[i, j], rows[row].params.logprobs),
            )
            for j, token_id in enumerate(tokens[row])
        )
        for i, row in enumerate(logprobs.rows)
        if row < len(rows) and rows[row].params.logprobs is not None
    }


def best_first(ids: np.ndarray, values: np.ndarray, num: int | None) -> tuple[tuple[int, float], ...]:
    order = np.lexsort((ids, -values))[: num or 0]
    return tuple((int(ids[k]), float(values[k])) for k in order)
