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
from typing import Protocol

import mlx.core as mx
import numpy as np

from outrider.cache.block_file import HostArray
from outrider.cache.ragged_kv import RaggedKV
from outrider.plan import BlockPiece

NAMES = {mx.float32: "F32", mx.float16: "F16", mx.bfloat16: "BF16"}  # as safetensors writes them
TYPES = {name: dtype for dtype, name in NAMES.items()}


class RowStates(Protocol):
    """State that a layer keeps for each slot and that has no cells (recurrent layers)."""

    def read_row(self, slot: int) -> list[mx.array]:
        """A slot's state, as arrays."""
        ...

    def write_row(self, slot: int, arrays: Sequence[mx.array]) -> None: ...


@dataclass(frozen=True)
class _Group:
    """Buffers whose cells have one shape."""

    members: tuple[tuple[RaggedKV, str], ...]  # layer, "keys" or "values"

    def read(self, slot: int, start: int, end: int) -> mx.array:
        """A copy: a mere slice would keep the whole buffer, and the next write would copy that instead."""
        cells = [getattr(kv, name)[slot : slot + 1, :, start:end] for kv, name in self.members]
        return mx.concatenate([*cells, cells[0][:0]], axis=0)

    def write(self, slot: int, start: int, pieces: Sequence[mx.array]) -> None:
        for i, (kv, name) in enumerate(self.members):
            cells = mx.concatenate([piece[i] for piece in pieces], axis=1)  # [heads, cells, dim]
            getattr(kv, name)[slot, :, start : start + cells.shape[1]] = cells


class PrefixStore:
    """Owns the blocks and states of one runner's caches."""

    def __init__(self, buffers: Sequence[RaggedKV], states: Sequence[RowStates] = ()) -> None:
        self._groups = _grouped(buffers)
        self._states = states
        self._held: dict[int, tuple[mx.array, ...]] = {}

    @property
    def num_bytes(self) -> int:
        return sum(array.nbytes for arrays in self._held.values() for array in arrays)

    def save_block(self, block_id: int, slot: int, start: int, end: int) -> None:
        """Copy a slot's cells; made real by `settle`."""
        self._held[block_id] = tuple(group.read(slot, start, end) for group in self._groups)

    def save_state(self, state_id: int, slot: int) -> None:
        arrays = [array for states in self._states for array in states.read_row(slot)]
        self._held[state_id] = tuple(mx.concatenate([array[None], array[None][:0]]) for array in arrays)

    def settle(self, ids: Iterable[int]) -> None:
        """Make copies before anything writes into the buffers again."""
        mx.eval([self._held[i] for i in ids])

    def load_blocks(self, slot: int, start: int, pieces: Sequence[BlockPiece]) -> None:
        """Fill a slot's cells from `start` on."""
        for number, group in enumerate(self._groups):
            cells = [self._held[p.block_id][number][:, :, p.first : p.last] for p in pieces]
            group.write(slot, start, cells)

    def load_state(self, slot: int, state_id: int) -> None:
        arrays = iter(self._held[state_id])
        for states in self._states:
            num = len(states.read_row(slot))
            states.write_row(slot, [next(arrays)[0] for _ in range(num)])

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
