"""Grammar masks on logits: for the rows that have them, tokens whose bit is not set cannot be picked."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx
import numpy as np

from outrider.plan import RowPlan


def apply_masks(logits: mx.array, rows: Sequence[RowPlan]) -> mx.array:
    """Logits, -inf where a row's grammar forbids the token.  [rows, width, vocab] -> the same, anew"""
    masked = [(i, row.masks) for i, row in enumerate(rows) if row.masks is not None]
    if not masked:
        return logits
    index = mx.array([i for i, _ in masked])
    width, vocab = logits.shape[1:]
    words = mx.array(np.stack([_padded(masks, width) for _, masks in masked]))  # [masked, width, words]
    bits = (words[..., None] >> mx.arange(32, dtype=mx.uint32)) & 1
    allowed = bits.reshape(*words.shape[:2], -1)[..., :vocab].astype(mx.bool_)
    scores = logits[:]  # the caller's own stay as they are
    scores[index] = mx.where(allowed, logits[index], -mx.inf)
    return scores


def _padded(masks: np.ndarray, width: int) -> np.ndarray:
    """Columns past the row's own window allow everything; nobody reads them."""
    missing = width - len(masks)
    if missing == 0:
        return masks
    return np.concatenate([masks, np.full((missing, masks.shape[1]), 0xFFFFFFFF, np.uint32)])
