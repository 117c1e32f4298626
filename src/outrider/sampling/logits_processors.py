"""Changes to a few logits of a row: penalties, bias, bans. Sparse, and right at every position of a window.

The history at a position is what it would be in plain decoding: the committed tokens and the drafts before
it. The host builds small arrays with NumPy; the device applies them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from outrider.plan import RowPlan

FEW_IDS = 64  # for how many a pass that is to repeat has room, at least


def needs_processors(row: RowPlan) -> bool:
    return row.params.has_penalties or bool(row.params.logit_bias) or _is_banning(row)


@dataclass(frozen=True)
class LogitsProcessors:
    """What rows change, as arrays: whoever has them needs to know nothing else of the rows."""

    ids: mx.array  # [rows, 1, ids]
    counts: mx.array  # [rows, width, ids] how often each has been said; so all below
    seen: mx.array  # whether it has been, or asked
    bias: mx.array
    strengths: mx.array  # [3, rows, 1, 1] of the penalties: repetition, frequency, presence

    @classmethod
    def of(
        cls, rows: Sequence[RowPlan], width: int, vocab: int, merged: bool = False
    ) -> LogitsProcessors | None:
        """None if they change nothing. `merged`: in few sizes, with room to spare."""
        if not any(needs_processors(row) for row in rows):
            return None
        tables = [_TokenTable(row, width, vocab) for row in rows]
        num_ids = max(len(table.ids) for table in tables)
        if merged:
            num_ids = max(FEW_IDS, 1 << (num_ids - 1).bit_length())

        def stacked(name: str) -> mx.array:
            return mx.array(np.stack([_pad(getattr(table, name), num_ids) for table in tables]))

        params = [row.params for row in rows]
        strengths = [[p.repetition_penalty, p.frequency_penalty, p.presence_penalty] for p in params]
        columns = mx.array(np.array(strengths, np.float32).T[..., None, None])
        return cls(stacked("ids")[:, None, :], stacked("counts"), stacked("seen"), stacked("bias"), columns)

    @property
    def key(self) -> Hashable:
        return self.counts.shape

    @property
    def arrays(self) -> list[mx.array]:
        return [self.ids, self.counts, self.seen, self.bias, self.strengths]

    def apply(self, logits: mx.array) -> mx.array:
        """[rows, width, vocab] -> the same, anew"""
        ids = mx.broadcast_to(self.ids, self.counts.shape)
        repetition, frequency, presence = self.strengths
        old = mx.take_along_axis(logits, ids, axis=-1)
        new = mx.where(self.seen, mx.where(old > 0, old / repetition, old * repetition), old)
        new = new - frequency * self.counts - presence * (self.counts > 0)
        return mx.put_along_axis(logits, ids, new + self.bias, axis=-1)


class _TokenTable:
    """The ids that a row's processors touch, and for each position of its window what happens to them.

    A row that processors nothing here touches token 0 and leaves it as it is.
    """

    def __init__(self, row: RowPlan, width: int, vocab: int) -> None:
        params = row.params
        banned = [token_id for token_id in row.banned_ids if token_id < vocab] if _is_banning(row) else []
        drafts = list(row.token_ids[len(row.token_ids) - row.num_drafts :])
        answer = Counter(row.history[row.num_prompt :]) if params.has_penalties else Counter()
        prompt = set(row.history[: row.num_prompt]) if params.repetition_penalty != 1 else set()
        touched: dict[int, None] = dict.fromkeys(params.logit_bias)
        if params.has_penalties:
            touched.update(dict.fromkeys((*answer, *prompt, *drafts)))
        touched.update(dict.fromkeys(banned))
        if not touched:
            touched = {0: None}
        self.ids = np.fromiter(touched, np.int32, len(touched))
        place = {token_id: i for i, token_id in enumerate(touched)}

        first = np.array([answer[token_id] for token_id in touched], np.float32)
        self.counts = np.repeat(first[None], width, axis=0)  # [width, ids]
        if params.has_penalties:
            for i, draft in enumerate(drafts):
                self.counts[i + 1 :, place[draft]] += 1
        self.seen = self.counts > 0
        for token_id in prompt:
            self.seen[:, place[token_id]] = True

        self.bias = np.zeros((width, len(touched)), np.float32)
        for token_id, value in params.logit_bias.items():
            self.bias[:, place[token_id]] = value
        length = len(row.history) - row.num_prompt
        banned_columns = max(0, min(width, params.min_tokens - length))
        for token_id in banned:
            self.bias[:banned_columns, place[token_id]] = -np.inf


def _is_banning(row: RowPlan) -> bool:
    return bool(row.banned_ids) and len(row.history) - row.num_prompt < row.params.min_tokens


def _pad(array: np.ndarray, size: int) -> np.ndarray:
    """Widen the last axis by repeating its first entry: writing the same value to the same place again."""
    missing = size - array.shape[-1]
    if missing == 0:
        return array
    return np.concatenate([array, np.repeat(array[..., :1], missing, axis=-1)], axis=-1)
