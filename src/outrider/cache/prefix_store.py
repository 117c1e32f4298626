"""The data of cached prefixes: blocks of cells copied out of a row's slot, and back into another's.

A block holds the cells of all layers, the head's among them, that hold keys or values of one shape stacked:

    buffer   [slots, heads, capacity + 1, dim]   one for the keys and one for the values of each layer
    block    [buffers of one shape, heads, cells, dim]   a few arrays, each a copy of its own

A block never changes, so any number of rows may take copies of it. What is kept and what goes is decided
elsewhere (`prefix_index`): here an id leads to data.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from outrider.cache.ragged_kv import RaggedKV
from outrider.cache.recurrent import RecurrentState
from outrider.host_array import HostArray
from outrider.plan import BlockPiece, SaveCells

NAMES = {mx.float32: "F32", mx.float16: "F16", mx.bfloat16: "BF16"}  # as safetensors writes them
TYPES = {name: dtype for dtype, name in NAMES.items()}


@dataclass(frozen=True)
class _Group:
    """Buffers whose cells have one shape."""

    members: tuple[tuple[RaggedKV, str], ...]  # layer, "keys" or "values"

    def read(self, slot: int, start: int, end: int) -> mx.array:
        """A copy: a mere slice would keep the whole buffer, and the next write would copy that instead."""
        return _copied(*(getattr(kv, name)[slot : slot + 1, :, start:end] for kv, name in self.members))

    def write(self, slot: int, start: int, pieces: Sequence[mx.array]) -> None:
        for i, (kv, name) in enumerate(self.members):
            cells = mx.concatenate([piece[i] for piece in pieces], axis=1)  # [heads, cells, dim]
            getattr(kv, name)[slot, :, start : start + cells.shape[1]] = cells


class PrefixStore:
    """Owns the blocks and states of one runner's caches."""

    def __init__(self, buffers: Iterable[RaggedKV | RecurrentState]) -> None:
        buffers = list(buffers)
        self._groups = _grouped([one for one in buffers if isinstance(one, RaggedKV)])
        self._states = [one for one in buffers if isinstance(one, RecurrentState)]
        self._held: dict[int, tuple[mx.array, ...]] = {}

    @property
    def num_bytes(self) -> int:
        return sum(array.nbytes for arrays in self._held.values() for array in arrays)

    def save_blocks(self, saves: Sequence[SaveCells]) -> None:
        """Copy a slot's cells, blocks that follow each other; made real by `settle`.

        All layers are read once for all blocks: many small copies are what costs.
        """
        slot, start = saves[0].slot, saves[0].start
        whole = [group.read(slot, start, saves[-1].end) for group in self._groups]
        for save in saves:
            first, last = save.start - start, save.end - start
            parts = whole if len(saves) == 1 else [_copied(cells[:, :, first:last]) for cells in whole]
            self._held[save.block_id] = tuple(parts)

    def save_state(self, state_id: int, slot: int) -> None:
        parts = [part for layer in self._states for part in layer.parts]
        self._held[state_id] = tuple(_copied(part[slot : slot + 1]) for part in parts)

    def settle(self, ids: Iterable[int]) -> None:
        """Make copies before anything writes into the buffers again."""
        mx.eval([self._held[i] for i in ids])

    def load_blocks(self, slot: int, start: int, pieces: Sequence[BlockPiece]) -> None:
        """Fill a slot's cells from `start` on."""
        for number, group in enumerate(self._groups):
            cells = [self._held[p.block_id][number][:, :, p.first : p.last] for p in pieces]
            group.write(slot, start, cells)

    def load_state(self, state_id: int, slot: int) -> None:
        saved = iter(self._held[state_id])
        for layer in self._states:
            for part in layer.parts:
                part[slot : slot + 1] = next(saved)

    def drop(self, ids: Iterable[int]) -> None:
        for i in ids:
            self._held.pop(i, None)

    def clear(self) -> None:
        self._held.clear()

    def to_host(self, i: int) -> dict[str, HostArray]:
        """A copy that needs no MLX, for another thread."""
        return {f"{number}": _to_host(array) for number, array in enumerate(self._held[i])}

    def from_host(self, i: int, arrays: Mapping[str, HostArray]) -> None:
        self._held[i] = tuple(_from_host(arrays[f"{number}"]) for number in range(len(arrays)))


def _copied(*arrays: mx.array) -> mx.array:
    """One behind the other in memory of their own. One alone would be handed through: hence the empty one."""
    return mx.concatenate([*arrays, arrays[0][:0]], axis=0)


def _grouped(buffers: Sequence[RaggedKV]) -> list[_Group]:
    groups: dict[tuple[int, int, mx.Dtype], list[tuple[RaggedKV, str]]] = {}
    for kv in buffers:
        spec = kv.spec
        groups.setdefault((spec.num_heads, spec.key_dim, spec.dtype), []).append((kv, "keys"))
        groups.setdefault((spec.num_heads, spec.value_dim, spec.dtype), []).append((kv, "values"))
    return [_Group(tuple(members)) for members in groups.values()]


def _to_host(array: mx.array) -> HostArray:
    name = NAMES[array.dtype]
    bits = array.view(mx.uint16) if name == "BF16" else array  # numpy has no bfloat16
    return HostArray(name, np.array(bits))


def _from_host(array: HostArray) -> mx.array:
    data = mx.array(array.data)
    return data.view(mx.bfloat16) if array.dtype == "BF16" else data
