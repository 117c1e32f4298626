"""The data of cached prefixes: cells are copied from a row's slot into a block, and from blocks into a slot.

A block holds the cells of all layers and of the head. Buffers of one shape are stacked into one array:

    buffer   [slots, heads, capacity + 1, dim]           one for the keys and one for the values of each layer
             [blocks, heads, cells, dim]                 or three if quantised (cache/cell_buffer.py)
    block    [buffers of one shape, heads, cells, dim]   a few arrays

A block never changes, so any number of rows may load it. A state holds what the recurrent layers have for
one row. The store knows blocks and states by id; `prefix_index` decides which of them exist.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import mlx.core as mx
import numpy as np

from outrider.cache.cell_buffer import CellBuffer
from outrider.cache.ragged_kv import RaggedKV
from outrider.cache.recurrent import RecurrentState
from outrider.host_array import HostArray
from outrider.plan import BLOCK_SIZE, BlockPiece, SaveCells

T = TypeVar("T")
# Buffers of one shape [blocks, heads, cells, ..] and ranges of cells (block, first cell, the one after the
# last) -> the cells of each range [buffers, heads, cells, ..]
CopyCells = Callable[[Sequence[mx.array], Sequence[tuple[int, int, int]]], Sequence[mx.array]]

MAX_GATHERED_BLOCKS = (
    32  # blocks of rows that are copied at once: bounds the memory in between; chosen by hand
)
DTYPE_NAMES = {  # as in safetensors files
    mx.float32: "F32",
    mx.float16: "F16",
    mx.bfloat16: "BF16",
    mx.uint32: "U32",
}


@dataclass(frozen=True)
class _BufferGroup:
    """Buffers whose cells have one shape."""

    members: tuple[tuple[CellBuffer, int], ...]  # keys or values of a layer, and which of its arrays

    def buffers(self) -> list[mx.array]:
        return [cells.arrays[number] for cells, number in self.members]

    def read(self, slot: int, start: int, end: int) -> mx.array:
        """A copy. A slice would refer to the whole buffer, and the next write would copy that buffer."""
        return _copied(*(buffer[slot : slot + 1, :, start:end] for buffer in self.buffers()))

    def write(self, slot: int, start: int, pieces: Sequence[mx.array]) -> None:
        for i, buffer in enumerate(self.buffers()):
            cells = mx.concatenate([piece[i] for piece in pieces], axis=1)  # [heads, cells, dim]
            buffer[slot, :, start : start + cells.shape[1]] = cells

    def read_blocks(self, blocks: Sequence[int]) -> mx.array:
        """Whole blocks of rows.  [blocks, buffers, heads, cells, dim]"""
        index = mx.array(list(blocks))
        return mx.stack([buffer[index] for buffer in self.buffers()], axis=1)

    def write_blocks(self, blocks: Sequence[int], pieces: Sequence[mx.array]) -> None:
        index = mx.array(list(blocks))
        for i, buffer in enumerate(self.buffers()):
            buffer[index] = mx.stack([piece[i] for piece in pieces])


class PrefixStore:
    """Owns the cached blocks and states of one runner."""

    def __init__(
        self,
        buffers: Iterable[RaggedKV | RecurrentState],
        block_size: int | None = BLOCK_SIZE,
        copy_cells: CopyCells | None = None,
    ) -> None:
        """`block_size`: of the rows' blocks; None: rows keep their cells by slots.

        `copy_cells`: copies out of rows' blocks, faster than MLX does.
        """
        buffers = list(buffers)
        self._groups = _grouped([one for one in buffers if isinstance(one, RaggedKV)])
        self._states = [one for one in buffers if isinstance(one, RecurrentState)]
        self._arrays: dict[int, tuple[mx.array, ...]] = {}
        self._block_size = block_size
        self._copy_cells = copy_cells

    @property
    def num_bytes(self) -> int:
        return sum(array.nbytes for arrays in self._arrays.values() for array in arrays)

    def save_blocks(self, saves: Sequence[SaveCells]) -> None:
        """Copy cells of one slot into consecutive blocks. `settle` performs the copies.

        All layers are read once for all blocks: many small copies cost more than one large one.
        """
        slot, start = saves[0].slot, saves[0].start
        whole = [group.read(slot, start, saves[-1].end) for group in self._groups]
        for save in saves:
            first, last = save.start - start, save.end - start
            parts = whole if len(saves) == 1 else [_copied(cells[:, :, first:last]) for cells in whole]
            self._arrays[save.block_id] = tuple(parts)

    def save_row_blocks(self, saves: Sequence[SaveCells]) -> None:
        """`save_blocks` where rows keep their cells by blocks, for all rows. `settle` performs the copies."""
        size = self._block_size
        assert size is not None
        ranges: dict[int, tuple[int, int, int]] = {}  # by cached block: the row's block and cells
        for save in saves:
            assert save.row_block is not None
            ranges[save.block_id] = save.row_block, save.start % size, (save.end - 1) % size + 1
        if self._copy_cells is None:
            self._gather(ranges, size)
        else:
            copied = [self._copy_cells(group.buffers(), list(ranges.values())) for group in self._groups]
            for number, block_id in enumerate(ranges):
                self._arrays[block_id] = tuple(of_group[number] for of_group in copied)

    def _gather(self, ranges: Mapping[int, tuple[int, int, int]], size: int) -> None:
        """Copy with MLX's operations."""
        whole: list[tuple[int, int]] = []  # a cached block and the row's
        for block_id, (row_block, first, last) in ranges.items():
            if last - first == size:
                whole.append((block_id, row_block))
            else:
                parts = [group.read(row_block, first, last) for group in self._groups]
                self._arrays[block_id] = tuple(parts)
        for some in _in_parts(whole):
            read = [group.read_blocks([row_block for _, row_block in some]) for group in self._groups]
            for i, (block_id, _) in enumerate(some):
                self._arrays[block_id] = tuple(
                    blocks[0] if len(some) == 1 else _copied(blocks[i]) for blocks in read
                )

    def save_state(self, state_id: int, slot: int) -> None:
        parts = [part for layer in self._states for part in layer.parts]
        self._arrays[state_id] = tuple(_copied(part[slot : slot + 1]) for part in parts)

    def settle(self, ids: Iterable[int]) -> None:
        """Perform the copies, before the next write into the buffers."""
        mx.eval([self._arrays[i] for i in ids])

    def load_blocks(self, slot: int, start: int, pieces: Sequence[BlockPiece]) -> None:
        """Copy parts of blocks into a slot's cells from `start` on."""
        for number, group in enumerate(self._groups):
            cells = [self._arrays[p.block_id][number][:, :, p.first : p.last] for p in pieces]
            group.write(slot, start, cells)

    def load_into_blocks(self, row_blocks: Sequence[int], pieces: Sequence[BlockPiece]) -> None:
        """Copy parts of cached blocks into a row's blocks: each cell to the same place in its block."""
        pairs = list(zip(row_blocks, pieces, strict=True))
        size = self._block_size
        whole = [(block, piece) for block, piece in pairs if piece.last - piece.first == size]
        for number, group in enumerate(self._groups):
            for some in _in_parts(whole):
                blocks, arrays = [b for b, _ in some], [self._arrays[p.block_id][number] for _, p in some]
                group.write_blocks(blocks, arrays)
            for block, piece in pairs:
                if piece.last - piece.first != size:
                    cells = self._arrays[piece.block_id][number][:, :, piece.first : piece.last]
                    group.write(block, piece.first, [cells])

    def load_state(self, state_id: int, slot: int) -> None:
        saved = iter(self._arrays[state_id])
        for layer in self._states:
            for part in layer.parts:
                part[slot : slot + 1] = next(saved)

    def drop(self, ids: Iterable[int]) -> None:
        for i in ids:
            self._arrays.pop(i, None)

    def clear(self) -> None:
        self._arrays.clear()

    def to_host(self, i: int) -> dict[str, HostArray]:
        """A copy in host memory, for threads that must not use MLX."""
        return {f"{number}": _to_host(array) for number, array in enumerate(self._arrays[i])}

    def from_host(self, i: int, arrays: Mapping[str, HostArray]) -> None:
        self._arrays[i] = tuple(_from_host(arrays[f"{number}"]) for number in range(len(arrays)))


def _copied(*arrays: mx.array) -> mx.array:
    """The arrays, concatenated in new memory. MLX copies a single array only if an empty one joins it."""
    return mx.concatenate([*arrays, arrays[0][:0]], axis=0)


def _in_parts(items: Sequence[T]) -> Iterator[Sequence[T]]:
    return (items[i : i + MAX_GATHERED_BLOCKS] for i in range(0, len(items), MAX_GATHERED_BLOCKS))


def _grouped(buffers: Sequence[RaggedKV]) -> list[_BufferGroup]:
    groups: dict[tuple[int, int, mx.Dtype], list[tuple[CellBuffer, int]]] = {}
    for kv in buffers:
        for cells in kv.cells:
            for number, (size, dtype) in enumerate(cells.format.parts):
                groups.setdefault((kv.spec.num_heads, size, dtype), []).append((cells, number))
    return [_BufferGroup(tuple(members)) for members in groups.values()]


def _to_host(array: mx.array) -> HostArray:
    name = DTYPE_NAMES[array.dtype]
    bits = array.view(mx.uint16) if name == "BF16" else array  # numpy has no bfloat16
    return HostArray(name, np.array(bits))


def _from_host(array: HostArray) -> mx.array:
    data = mx.array(array.data)
    return data.view(mx.bfloat16) if array.dtype == "BF16" else data
