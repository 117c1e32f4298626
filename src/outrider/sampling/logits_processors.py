"""Logits processors: penalties, bias, bad words, banned tokens. They change a few logits of a row, sparsely.

At each position of a row's window the history is what plain decoding would have there: the committed tokens
and the drafts before that position. The host builds small arrays with NumPy; the device applies them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import mlx.core as mx
import numpy as np

from outrider.plan import RowPlan

MIN_TRACED_IDS = 64  # changed tokens in a traced row, at least; then powers of 2. Chosen by hand.


@dataclass(frozen=True)
class LogitsProcessors:
    """The changes of all rows as arrays. They use no other data of the rows, so a trace can hold them."""

    ids: mx.array  # [rows, 1, ids] the tokens whose logits change
    counts: mx.array  # [rows, width, ids] how often the answer holds each token
    occurs: mx.array  # [rows, width, ids] whether prompt or answer hold it: the repetition penalty applies
    bias: mx.array  # [rows, width, ids]
    penalties: mx.array  # [3, rows, 1, 1] repetition, frequency, presence

    @classmethod
    def of(cls, rows: Sequence[RowPlan], width: int, vocab: int, for_trace: bool = False) -> LogitsProcessors:
        """`for_trace`: in few sizes, so that few traces serve all."""
        tables = [_TokenTable(row, width, vocab) for row in rows]
        num_ids = max(len(table.ids) for table in tables)
        if for_trace:
            num_ids = max(MIN_TRACED_IDS, 1 << (num_ids - 1).bit_length())

        def stacked(name: str) -> mx.array:
            return mx.array(np.stack([_pad(getattr(table, name), num_ids) for table in tables]))

        params = [row.params for row in rows]
        penalties = [[p.repetition_penalty, p.frequency_penalty, p.presence_penalty] for p in params]
        columns = mx.array(np.array(penalties, np.float32).T[..., None, None])
        return cls(stacked("ids")[:, None, :], stacked("counts"), stacked("occurs"), stacked("bias"), columns)

    @property
    def key(self) -> Hashable:
        return self.counts.shape

    @property
    def arrays(self) -> dict[str, mx.array]:
        return {
            "ids": self.ids,
            "counts": self.counts,
            "occurs": self.occurs,
            "bias": self.bias,
            "penalties": self.penalties,
        }

    def apply(self, logits: mx.array) -> mx.array:
        """A changed copy of the logits.  [rows, width, vocab]"""
        ids = mx.broadcast_to(self.ids, self.counts.shape)
        repetition, frequency, presence = self.penalties
        old = mx.take_along_axis(logits, ids, axis=-1)
        new = mx.where(self.occurs, mx.where(old > 0, old / repetition, old * repetition), old)
        new = new - frequency * self.counts - presence * (self.counts > 0)
        return mx.put_along_axis(logits, ids, new + self.bias, axis=-1)


class _TokenTable:
    """The tokens whose logits one row changes, and the changes at each position of its window.

    A row without changes lists token 0 and leaves its logit as it is.
    """

    def __init__(self, row: RowPlan, width: int, vocab: int) -> None:
        params = row.params
        banned = [token_id for token_id in row.banned_ids if token_id < vocab] if row.bans_tokens else []
        drafts = list(row.token_ids[len(row.token_ids) - row.num_drafts :])
        answer = Counter(row.history[row.num_prompt :]) if params.has_penalties else Counter()
        prompt = set(row.history[: row.num_prompt]) if params.repetition_penalty != 1 else set()
        changed: dict[int, None] = dict.fromkeys(params.logit_bias)
        if params.has_penalties:
            changed.update(dict.fromkeys((*answer, *prompt, *drafts)))
        bad_at = _ends_of_bad_words(row, drafts)
        changed.update(dict.fromkeys((*banned, *(token_id for ends in bad_at for token_id in ends))))
        if not changed:
            changed = {0: None}
        self.ids = np.fromiter(changed, np.int32, len(changed))
        place = {token_id: i for i, token_id in enumerate(changed)}

        first = np.array([answer[token_id] for token_id in changed], np.float32)
        self.counts = np.repeat(first[None], width, axis=0)  # [width, ids]
        if params.has_penalties:
            for i, draft in enumerate(drafts):
                self.counts[i + 1 :, place[draft]] += 1
        self.occurs = self.counts > 0
        for token_id in prompt:
            self.occurs[:, place[token_id]] = True

        self.bias = np.zeros((width, len(changed)), np.float32)
        for token_id, value in params.logit_bias.items():
            self.bias[:, place[token_id]] = value
        length = len(row.history) - row.num_prompt
        banned_columns = max(0, min(width, params.min_tokens - length))
        for token_id in banned:
            self.bias[:banned_columns, place[token_id]] = -np.inf
        for column, ends in enumerate(bad_at):
            for token_id in ends:
                self.bias[column, place[token_id]] = -np.inf


def _ends_of_bad_words(row: RowPlan, drafts: Sequence[int]) -> list[list[int]]:
    """At each position of the row's window, the tokens that would complete a bad word of the answer."""
    if not row.params.bad_word_ids:
        return []
    by_start = _by_start(tuple(map(tuple, row.params.bad_word_ids)))
    sizes = sorted(set(map(len, by_start)))
    answer = [*row.history[max(row.num_prompt, len(row.history) - sizes[-1]) :], *drafts]
    num_before = len(answer) - len(drafts)
    found = []
    for end in range(num_before, len(answer) + 1):
        starts = (tuple(answer[end - size : end]) for size in sizes if size <= end)
        found.append([token_id for start in starts for token_id in by_start.get(start, ())])
    return found


@lru_cache(maxsize=256)  # of rows at once; chosen by hand
def _by_start(bad_word_ids: tuple[tuple[int, ...], ...]) -> dict[tuple[int, ...], list[int]]:
    """The last tokens of bad words, by the tokens before them."""
    found: dict[tuple[int, ...], list[int]] = {}
    for token_ids in bad_word_ids:
        found.setdefault(token_ids[:-1], []).append(token_ids[-1])
    return found


def _pad(array: np.ndarray, size: int) -> np.ndarray:
    """Widen the last axis by repeating its first entry: the device then writes one logit twice, unchanged."""
    missing = size - array.shape[-1]
    if missing == 0:
        return array
    return np.concatenate([array, np.repeat(array[..., :1], missing, axis=-1)], axis=-1)
