"""Grammar masks on logits: for the rows that have them, tokens whose bit is not set cannot be picked."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from outrider.plan import RowPlan

ALL = np.uint32(0xFFFFFFFF)


@dataclass(frozen=True)
class Masks:
    """What grammars allow, as arrays."""

    rows: tuple[int, ...] | None  # that have one; None: all are given one
    words: mx.array  # [rows that have one, width, words] a bit for each token

    @classmethod
    def of(cls, rows: Sequence[RowPlan], width: int, merged: bool = False) -> Masks | None:
        """None if no row has one. `merged`: those that have none are given one that allows everything."""
        having = [i for i, row in enumerate(rows) if row.masks is not None]
        if not having:
            return None
        chosen = range(len(rows)) if merged else having
        num_words = max(masks.shape[1] for row in rows if (masks := row.masks) is not None)
        words = np.full((len(chosen), width, num_words), ALL)
        for place, i in enumerate(chosen):
            if (masks := rows[i].masks) is not None:
                words[place, : len(masks)] = masks  # past the row's own window nobody reads
        return cls(None if merged else tuple(having), mx.array(words))

    @property
    def key(self) -> Hashable:
        return self.rows, self.words.shape

    def apply(self, logits: mx.array) -> mx.array:
        """Logits, -inf where a grammar forbids the token.  [rows, width, vocab] -> the same, anew"""
        bits = (self.words[..., None] >> mx.arange(32, dtype=mx.uint32)) & 1
        allowed = bits.reshape(*self.words.shape[:2], -1)[..., : logits.shape[-1]].astype(mx.bool_)
        if self.rows is None:
            return mx.where(allowed, logits, -mx.inf)
        index = mx.array(self.rows)
        scores = logits[:]  # the caller's own stay as they are
        scores[index] = mx.where(allowed, logits[index], -mx.inf)
        return scores
