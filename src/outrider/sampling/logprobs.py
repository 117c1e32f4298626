"""Log-probabilities of picked tokens, for the rows that ask: by the model alone, at temperature 1."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from outrider.plan import RowPlan, TokenLogprobs


@dataclass(frozen=True)
class LogprobArrays:
    """What the device computes; `rows` are indices into the picking rows."""

    rows: list[int]
    picked: mx.array  # [rows, width]
    top_ids: mx.array  # [rows, width, num_top]
    top: mx.array  # [rows, width, num_top]

    @property
    def arrays(self) -> tuple[mx.array, ...]:
        return self.picked, self.top_ids, self.top


def compute_logprobs(logits: mx.array, targets: mx.array, rows: Sequence[RowPlan]) -> LogprobArrays | None:
    """logits [rows, width, vocab] as the model gave them, targets [rows, width]."""
    asking = [i for i, row in enumerate(rows) if row.params.logprobs is not None]
    if not asking:
        return None
    logits, targets = logits[mx.array(asking)], targets[mx.array(asking)]
    logprobs = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
    picked = mx.take_along_axis(logprobs, targets[..., None], axis=-1)[..., 0]
    num_top = min(max(rows[i].params.logprobs or 0 for i in asking), logits.shape[-1])
    if num_top == 0:
        empty = mx.zeros((*targets.shape, 0))
        return LogprobArrays(asking, picked, empty.astype(mx.int32), empty)
    top_ids = mx.argpartition(-logprobs, num_top - 1, axis=-1)[..., :num_top]
    top = mx.take_along_axis(logprobs, top_ids, axis=-1)
    return LogprobArrays(asking, picked, top_ids, top)


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
    }


def _best_first(ids: np.ndarray, values: np.ndarray, num: int | None) -> tuple[tuple[int, float], ...]:
    order = np.lexsort((ids, -values))[: num or 0]
    return tuple((int(ids[k]), float(values[k])) for k in order)
