"""Grammar masks on the device: a grammar allows a set of tokens at each position of a row's window."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from outrider.cpu import sampling as cpu_sampling
from outrider.plan import RowPlan

ALLOW_ALL = np.uint32(0xFFFFFFFF)  # a mask word in which every token is allowed


@dataclass(frozen=True)
class Masks:
    rows: tuple[int, ...] | None  # the rows that have a mask; None: every row has one
    words: mx.array  # [masked rows, width, words] one bit for each token

    @classmethod
    def of(cls, rows: Sequence[RowPlan], width: int, for_trace: bool = False) -> Masks:
        """`for_trace`: rows without a grammar get a mask that allows all tokens."""
        constrained = [i for i, row in enumerate(rows) if row.masks is not None]
        masked = range(len(rows)) if for_trace else constrained
        num_words = max(masks.shape[1] for row in rows if (masks := row.masks) is not None)
        words = np.full((len(masked), width, num_words), ALLOW_ALL)
        for place, i in enumerate(masked):
            if (masks := rows[i].masks) is not None:
                # Columns past the row's own window are never read, nor are bits past the vocabulary.
                words[place, : len(masks), : masks.shape[1]] = masks
        return cls(None if for_trace else tuple(constrained), mx.array(words))

    @property
    def key(self) -> Hashable:
        return self.rows, self.words.shape

    def apply(self, logits: mx.array) -> mx.array:
        """A copy of the logits with -inf where a grammar forbids the token.  [rows, width, vocab]"""
        if self.rows is not None:
            masked = cpu_sampling.mask(logits, self.words, self.rows)
            if masked is not None:
                return masked
        bits = (self.words[..., None] >> mx.arange(32, dtype=mx.uint32)) & 1
        allowed = bits.reshape(*self.words.shape[:2], -1)[..., : logits.shape[-1]].astype(mx.bool_)
        if self.rows is None:
            return mx.where(allowed, logits, -mx.inf)
        index = mx.array(self.rows)
        scores = logits[:]  # a copy: the caller still needs the logits
        scores[index] = mx.where(allowed, logits[index], -mx.inf)
        return scores
