"""The head's forward pass over whole sequences, with the recursion that it does when it drafts.

A chain starts at every pair t and guesses x_(t+2), x_(t+3), ... with the text's own tokens fed back (teacher
forcing: a guess counts only where those before it stood). Its pairs are

    depth 1   (h_t, x_(t+1))            a committed pair, at position t
    depth d   (fed back, x_(t+d))       tentative, at position t + d - 1

and a pair sees the committed pairs 0..t and its own chain, never another's:

                   keys of depth 1     of depth 2     of depth 3
    query t        causal: 0..t        its own: t     its own: t

All chains of a depth run at once, through the decoder layer as it is: a cache-like view hands it the keys of
every depth so far, and the mask above.
"""

from __future__ import annotations

import mlx.core as mx

from outrider.cache.ragged_kv import LayerView
from outrider.models.heads import MTPHead


class ChainCells:
    """The keys and values of all depths so far, side by side."""

    def __init__(self) -> None:
        self.keys: list[mx.array] = []  # one a depth: [rows, heads, width, dim]
        self.values: list[mx.array] = []


class ChainView(LayerView):
    """What the head's layer sees while the chains of one depth run (mlx-lm's cache interface)."""

    def __init__(self, cells: ChainCells, depth: int) -> None:
        self._cells = cells
        self._depth = depth
        self.offset = depth - 1  # type: ignore[assignment]  # query t stands at position t + depth - 1

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
    """For each depth d the outputs [rows, width, H]: at t the guess of x_(t+d+1).

    hidden and embedded [rows, width, H]: of each token. The last d columns of depth d have no token to feed
    and mean nothing.
    """
    cells = ChainCells()
    outputs = []
    fed = hidden
    for depth in range(1, depths + 1):
        out, fed = head(fed, _shifted(embedded, depth), ChainView(cells, depth))
        outputs.append(out)
    return outputs


def _shifted(embedded: mx.array, by: int) -> mx.array:
    """Column t becomes column t + by; zeros where there is none."""
    by = min(by, embedded.shape[1])
    return mx.concatenate([embedded[:, by:], mx.zeros_like(embedded[:, :by])], axis=1)
