"""The head's forward pass over whole sequences, with the recursion that it does when it drafts.

A chain starts at every pair t and guesses x_(t+2), x_(t+3), ... The text's own tokens are fed back (teacher
forcing), because the engine uses a guess only if all guesses before it were right. The pairs of a chain are

    depth 1   (h_t, x_(t+1))            a committed pair, at position t
    depth d   (fed back, x_(t+d))       tentative, at position t + d - 1

A pair attends to the committed pairs 0..t and to its own chain, never to another chain:

                   keys of depth 1     of depth 2     of depth 3
    query t        causal: 0..t        only t         only t

All chains of a depth run at once, through the unchanged decoder layer. ChainView looks like a cache to the
layer and gives it the keys of all depths so far, and the mask above.
"""

from __future__ import annotations

import mlx.core as mx

from outrider.cache.ragged_kv import LayerView
from outrider.models.heads import MTPHead


class ChainCells:
    """The keys and values of all depths so far."""

    def __init__(self) -> None:
        self.keys: list[mx.array] = []  # for each depth: [rows, heads, width, dim]
        self.values: list[mx.array] = []


class ChainView(LayerView):
    """The cache of the head's layer while the chains of one depth run (mlx-lm's cache interface)."""

    def __init__(self, cells: ChainCells, depth: int) -> None:
        self._cells = cells
        self._depth = depth
        self.offset = depth - 1  # type: ignore[assignment]  # query t has position t + depth - 1

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        cells = self._cells
        cells.keys.append(keys)
        cells.values.append(values)
        return mx.concatenate(cells.keys, axis=2), mx.concatenate(cells.values, axis=2)

    def make_mask(
        self, width: int, return_array: bool = True, window_size: int | None = None, **_: object
    ) -> mx.array:
        """[1, 1, width, depth * width]"""
        own = mx.arange(width)
        causal = own[None, :] <= own[:, None]
        itself = own[None, :] == own[:, None]
        return mx.concatenate([causal] + [itself] * (self._depth - 1), axis=1)[None, None]


def chain_outputs(head: MTPHead, hidden: mx.array, embedded: mx.array, depths: int) -> list[mx.array]:
    """For each depth d the outputs [rows, width, H]: column t is the guess of x_(t+d+1).

    hidden, embedded: hidden states and embeddings of all tokens [rows, width, H]. The last d columns of depth
    d have no token to feed; their outputs must not be used.
    """
    cells = ChainCells()
    outputs = []
    fed = hidden
    for depth in range(1, depths + 1):
        out, fed = head(fed, _shifted(embedded, depth), ChainView(cells, depth))
        outputs.append(out)
    return outputs


def _shifted(embedded: mx.array, by: int) -> mx.array:
    """Column t of the result is column t + by of `embedded`, or zeros past the end."""
    by = min(by, embedded.shape[1])
    return mx.concatenate([embedded[:, by:], mx.zeros_like(embedded[:, :by])], axis=1)
