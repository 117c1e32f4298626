"""Log-probabilities of picked tokens, for the rows that ask: by the model alone, at temperature 1."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from outrider.plan import RowPlan, TokenLogprobs

FEW_TOP = 32  # as many as hardly anybody asks for


@dataclass(frozen=True)
class AskedLogprobs:
    """Whose log-probabilities are computed, and how many of the best beside the picked token's."""

    rows: tuple[int, ...] | None  # indices into the picking rows; None: all of them
    num_top: int

    @classmethod
    def of(cls, rows: Sequence[RowPlan], vocab: int, merged: bool = False) -> AskedLogprobs | None:
        """None if nobody asks. `merged`: of all rows, so that it does not matter who asks, in few sizes."""
        asking = [i for i, row in enumerate(rows) if row.params.logprobs is not None]
        if not asking:
            return None
        num_top = max(rows[i].params.logprobs or 0 for i in asking)
        if not merged:
            return cls(tuple(asking), min(num_top, vocab))
        return cls(None, min(-(-num_top // FEW_TOP) * FEW_TOP, vocab))

    @property
    def key(self) -> Hashable:
        return self.rows, self.num_top


@dataclass(frozen=True)
class LogprobArrays:
    """What the device computes; `rows` are indices into the picking rows."""

    rows: tuple[int, ...]
    picked: mx.array  # [rows, width]
    top_ids: mx.array  # [rows, width, num_top]
    top: mx.array  # [rows, width, num_top]

    @property
    def arrays(self) -> tuple[mx.array, ...]:
        return self.picked, self.top_ids, self.top


def compute_logprobs(logits: mx.array, targets: mx.array, asked: AskedLogprobs) -> LogprobArrays:
    """logits [rows, width, vocab] as the model gave them, targets [rows, width]."""
    rows = tuple(range(len(targets))) if asked.rows is None else asked.rows
    if len(rows) < len(targets):
        some = mx.array(rows)
        logits, targets = logits[some], targets[some]
    logprobs = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
    picked = mx.take_along_axis(logprobs, targets[..., None], axis=-1)[..., 0]
    if asked.num_top == 0:
        empty = mx.zeros((*targets.shape, 0))
        return LogprobArrays(rows, picked, empty.astype(mx.int32), empty)
    top_ids = mx.argpartition(-logprobs, asked.num_top - 1, axis=-1)[..., : asked.num_top]
    return LogprobArrays(rows, picked, top_ids, mx.take_along_axis(logprobs, top_ids, axis=-1))


def read_logprobs(
    found: LogprobArrays | None, rows: Sequence[RowPlan], tokens: Sequence[Sequence[int]]
) -> dict[int, tuple[TokenLogprobs, ...]]:
    """Per picking row that asked: one entry for each of its committed tokens."""
    if found is None:
        return {}
    picked, top_ids, top = (np.array(array) for array in found.arrays)
    return {
        row: tuple(
            TokenLogprobs(
                token_id,
                float(picked[i, j]),
                _best_first(top_ids[i, j], top[i, j], rows[row].params.logprobs),
            )
            for j, token_id in enumerate(tokens[row])
        )
        for i, row in enumerate(found.rows)
        if row < len(rows) and rows[row].params.logprobs is not None
    }


def _best_first(ids: np.ndarray, values: np.ndarray, num: int | None) -> tuple[tuple[int, float], ...]:
    order = np.lexsort((ids, -values))[: num or 0]
    return tuple((int(ids[k]), float(values[k])) for k in order)
