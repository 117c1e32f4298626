"""Pictures in a forward pass: embeddings in place of image tokens, and positions that are not cell numbers.

Knows rows and encoded pieces; must not know caches or heads. Without media it costs one look at the rows.
"""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx
import numpy as np

from outrider.cache.embedding_cache import EmbeddingCache, ImageInputs
from outrider.cache.ragged_kv import GridPositions, Positions
from outrider.plan import RowPlan


def image_inputs(
    batch: Sequence[RowPlan], image_embeddings: EmbeddingCache | None, ahead: int = 0
) -> ImageInputs | None:
    """The pieces among the fed tokens; with `ahead` 1, among the tokens after each of them."""
    rows: list[np.ndarray] = []
    columns: list[np.ndarray] = []
    parts: list[mx.array] = []
    for i, row in enumerate(batch):
        if row.media is None or image_embeddings is None:
            continue
        start = row.start + ahead
        end = start + row.num_fed
        for piece in row.media.within(start, end):
            first, last = np.searchsorted(piece.cells, [start, end]).tolist()
            columns.append(piece.cells[first:last] - start)
            rows.append(np.full(last - first, i, np.int32))
            parts.append(image_embeddings.get(piece.key)[first:last])
    if not parts:
        return None
    return ImageInputs(
        mx.array(np.concatenate(rows)), mx.array(np.concatenate(columns)), mx.concatenate(parts)
    )


def deltas_of(batch: Sequence[RowPlan]) -> mx.array | None:
    """From cells' numbers to positions, after the prompt.  [rows]"""
    if not any(row.position_delta for row in batch):
        return None
    return mx.array([row.position_delta for row in batch])


def positions_of(
    batch: Sequence[RowPlan],
    starts: mx.array,
    width: int,
    deltas: mx.array | None,
    behind: np.ndarray | None = None,
) -> Positions | None:
    """What rope is given: nothing new, an offset a row, or a grid where a prompt with pictures is read.

    `behind` [rows]: for a pass that begins so many cells before its rows' own starts, at `starts`.
    """
    if any(row.media is not None and row.media.positions is not None for row in batch):
        grid = np.zeros((3, len(batch), width), np.int32)
        for i, row in enumerate(batch):
            first = row.start - (0 if behind is None else int(behind[i]))
            if row.media is not None:
                end = row.start + row.num_fed
                grid[:, i, : end - first] = row.media.positions_of(first, end)
            else:
                grid[:, i] = np.arange(first, first + width) + row.position_delta
        return GridPositions(mx.array(grid))
    return None if deltas is None else starts + deltas
