"""Images in a forward pass: embeddings in place of image tokens, and positions that are not cell numbers.

Runs nothing and stores nothing.
"""

from __future__ import annotations

import mlx.core as mx
import numpy as np

from outrider.cache.embedding_cache import EmbeddingCache, ImageInputs
from outrider.cache.placement import GridPositions, Positions
from outrider.step.batch import Batch


def image_inputs(
    batch: Batch, image_embeddings: EmbeddingCache | None, offset: int = 0
) -> ImageInputs | None:
    """The image embeddings among the fed tokens; with offset 1, among the tokens after each fed token."""
    rows: list[np.ndarray] = []
    columns: list[np.ndarray] = []
    parts: list[mx.array] = []
    for i, row in enumerate(batch):
        if row.media is None or image_embeddings is None:
            continue
        start = row.start + offset
        end = start + row.num_fed
        for piece in row.media.within(start, end):
            first, last = np.searchsorted(piece.cells, [start, end]).tolist()
            columns.append(piece.cells[first:last] - start)
            rows.append(np.full(last - first, i, np.int32))
            parts.append(image_embeddings.get(piece.key)[first:last])
    if not parts:
        return None
    row_index, column_index = (mx.array(np.concatenate(found)) for found in (rows, columns))
    return ImageInputs(row_index, column_index, mx.concatenate(parts))


def positions_of(
    batch: Batch,
    starts: mx.array,
    width: int,
    position_deltas: mx.array | None,
    head_lag: np.ndarray | None = None,
) -> Positions | None:
    """Positions for rope: None (cell numbers), one offset for each row, or a grid while an image prefills.

    `head_lag` [rows]: the pass begins so many cells before its rows' own starts.
    """
    if any(row.media is not None and row.media.positions is not None for row in batch):
        grid = np.zeros((3, len(batch), width), np.int32)
        for i, row in enumerate(batch):
            first = row.start - (0 if head_lag is None else int(head_lag[i]))
            if row.media is not None:
                end = row.start + row.num_fed
                grid[:, i, : end - first] = row.media.positions_of(first, end)
            else:
                grid[:, i] = np.arange(first, first + width) + row.position_delta
        return GridPositions(mx.array(grid))
    return None if position_deltas is None else starts + position_deltas
