"""Divides a model whose weights are still on the disk: a rank reads only its own part of the weight files.

MLX reads a tensor whole, also if only a part of it is used. So the model is divided (models/sharding.py) with
row numbers in the place of its weights. The numbers that a rank keeps name the rows that it has to read,
whatever the family's way of dividing is.

    tensor in a file     row numbers     on rank 1 of 2     what rank 1 reads
    [4, columns]         1 2             5 6                rows 2 and 3
                         3 4             7 8
                         5 6
                         7 8

A row of numbers is as short as the ranks can divide it. A part by columns (here 2, 4, 6, 8) is a short run of
bytes in every row. Runs of two pages or more are read one by one. Shorter ones have bytes in almost every
page of the tensor: they are cut from the whole tensor, which MLX reads. Tensors that `sanitize` has changed
are divided as they are.
"""

from __future__ import annotations

import math
import os
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten

from outrider.files.safetensors import InvalidSafetensors, read_header

NUMBERED = ("weight", "scales", "biases")  # parameters of a layer that are numbered; the others are small
NUMBERS = mx.int64
TENSOR_BIT = 40  # a number is (tensor << TENSOR_BIT) + place in the tensor, counted from 1; 0: a row of zeros
WORD_BITS = 32  # quantised weights are packed into words of this size
MIN_RUN_BYTES = 2 * os.sysconf("SC_PAGE_SIZE")  # of a row that are read alone; measured: docs/DEPLOYMENT.md
NUM_READERS = 4  # threads, as many as MLX has for whole tensors: a disk serves several reads at once


@dataclass(frozen=True)
class StoredTensor:
    """A tensor of a safetensors file."""

    file: Path
    begin: int  # byte of the file
    array: mx.array  # as mx.load gives it; not read yet

    @property
    def num_rows(self) -> int:
        return math.prod(self.array.shape[:-1])

    @property
    def row_bytes(self) -> int:
        return self.array.shape[-1] * self.array.itemsize


@dataclass(frozen=True)
class RowPart:
    """Some rows of a tensor."""

    tensor: StoredTensor
    rows: np.ndarray[Any, Any]  # [...]; -1: a row of zeros

    @property
    def shape(self) -> tuple[int, ...]:
        """Without the columns."""
        return self.rows.shape

    @property
    def num_bytes_read(self) -> int:
        return int((self.rows >= 0).sum()) * self.tensor.row_bytes

    def read(self) -> np.ndarray[Any, Any]:
        """As unsigned integers (NumPy has no bfloat16).  [rows, columns]"""
        row_bytes = self.tensor.row_bytes
        data = np.zeros((self.rows.size, row_bytes), np.uint8)
        with self.tensor.file.open("rb") as file:
            for begin, end in self._runs():
                file.seek(self.tensor.begin + int(self.rows.flat[begin]) * row_bytes)
                if file.readinto(data[begin:end].data) < (end - begin) * row_bytes:
                    raise InvalidSafetensors(f"{self.tensor.file.name} is cut short")
        return data.view(f"u{self.tensor.array.itemsize}")

    def _runs(self) -> Iterator[tuple[int, int]]:
        """Where rows that follow each other in the file begin and end."""
        rows = self.rows.ravel()
        edges = [0, *(np.flatnonzero(np.diff(rows) != 1) + 1).tolist(), rows.size]
        return ((begin, end) for begin, end in pairwise(edges) if rows[begin] >= 0)


@dataclass(frozen=True)
class ColumnPart:
    """The same columns of all rows of a tensor."""

    tensor: StoredTensor
    begin: int  # byte of a row
    num_bytes: int  # of a row

    @property
    def shape(self) -> tuple[int, ...]:
        """Without the columns."""
        return self.tensor.array.shape[:-1]

    @property
    def num_bytes_read(self) -> int:
        return self.tensor.num_rows * self.num_bytes

    def read(self) -> np.ndarray[Any, Any]:
        """As `RowPart.read`."""
        data = np.empty((self.tensor.num_rows, self.num_bytes), np.uint8)
        with self.tensor.file.open("rb", buffering=0) as file:
            if hasattr(os, "posix_fadvise"):  # else the kernel reads the bytes between two runs too
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_RANDOM)
            for row, run in enumerate(data):
                begin = self.tensor.begin + row * self.tensor.row_bytes + self.begin
                if os.preadv(file.fileno(), [run.data], begin) < self.num_bytes:
                    raise InvalidSafetensors(f"{self.tensor.file.name} is cut short")
        return data.view(f"u{self.tensor.array.itemsize}")


@dataclass(frozen=True)
class _Read:
    layer: nn.Module
    name: str
    part: RowPart | ColumnPart
    data: Future[np.ndarray[Any, Any]]

    def finish(self) -> None:
        array = mx.array(self.data.result()).view(self.part.tensor.array.dtype)
        self.layer[self.name] = array.reshape(*self.part.shape, -1)


class RowNumbers:
    """Puts row numbers in the place of a network's weights, and reads the rows that `shard` has left."""

    def __init__(self, network: nn.Module, stored: Mapping[int, StoredTensor], num_ranks: int) -> None:
        """`stored`: from `stored_tensors`."""
        self.num_bytes_read = 0  # without the tensors that MLX reads whole
        self._numbered: list[tuple[StoredTensor, int]] = []  # tensor, numbers in a row
        arrays = cast(list[tuple[str, mx.array]], tree_flatten(network.parameters()))
        if any(array.dtype == NUMBERS for _, array in arrays):
            return  # weights that could not be told from numbers: they are divided as they are
        for _, layer in network.named_modules():
            for name in NUMBERED:
                tensor = stored.get(id(layer.get(name)))
                if tensor is not None and tensor.array.ndim > 1:
                    layer[name] = self._number(tensor, _width(layer, tensor.array, num_ranks))

    def _number(self, tensor: StoredTensor, width: int) -> mx.array:
        places = mx.arange(1, tensor.num_rows * width + 1, dtype=NUMBERS)
        numbers = places + mx.array(len(self._numbered) << TENSOR_BIT, NUMBERS)
        self._numbered.append((tensor, width))
        return numbers.reshape(*tensor.array.shape[:-1], width)

    def read(self, network: nn.Module, check_wanted: Callable[[], None] = lambda: None) -> None:
        """Put weights in the place of the numbers. Raises InvalidSafetensors if a file is too short."""
        num_parts, reads = 0, deque[_Read]()
        with ThreadPoolExecutor(NUM_READERS) as pool:
            for layer, name in self._numbers_in(network):
                num_parts += 1
                part = self._part(np.array(layer[name]))
                if isinstance(part, mx.array):
                    layer[name] = part
                    continue
                self.num_bytes_read += part.num_bytes_read
                reads.append(_Read(layer, name, part, pool.submit(part.read)))
                if len(reads) > NUM_READERS:
                    reads.popleft().finish()
                    check_wanted()
            while reads:
                reads.popleft().finish()
        assert num_parts == len(self._numbered), "`shard` has used weights in another way than to divide them"

    def _numbers_in(self, network: nn.Module) -> Iterator[tuple[nn.Module, str]]:
        for _, layer in network.named_modules() if self._numbered else ():
            for name in NUMBERED:
                array = layer.get(name)
                if isinstance(array, mx.array) and array.dtype == NUMBERS:
                    yield layer, name

    def _part(self, numbers: np.ndarray[Any, Any]) -> RowPart | ColumnPart | mx.array:
        """What numbers [..., rows, numbers of a row] stand for. An array: MLX reads the tensor whole."""
        tensor, width = self._numbered[int(numbers.max()) >> TENSOR_BIT]
        places = (numbers & ((1 << TENSOR_BIT) - 1)) - 1
        own_width, rows = numbers.shape[-1], places[..., 0] // width
        if not np.array_equal(rows.ravel(), np.arange(tensor.num_rows)):
            assert own_width == width, "a part of the columns of a part of the rows"
            return RowPart(tensor, rows)
        if own_width == width:
            return tensor.array
        scale, first = tensor.array.shape[-1] // width, int(places.flat[0])
        itemsize = tensor.array.itemsize
        if own_width * scale * itemsize >= MIN_RUN_BYTES:
            return ColumnPart(tensor, first * scale * itemsize, own_width * scale * itemsize)
        return mx.contiguous(tensor.array[..., first * scale : (first + own_width) * scale])


def stored_tensors(folder: Path, arrays: Mapping[str, mx.array]) -> dict[int, StoredTensor]:
    """The tensors of a folder's weight files, by the id of the array that mx.load has given for them.

    A name that several files have is left out. Raises InvalidSafetensors.
    """
    found: dict[str, StoredTensor | None] = {}
    for path in folder.glob("model*.safetensors"):
        with path.open("rb") as file:
            header = read_header(file)
        for name, entry in header.tensors.items():
            array = arrays.get(name)
            if array is not None and array.shape == entry.shape and array.nbytes == entry.num_bytes:
                tensor = StoredTensor(path, header.data_begin + entry.begin, array)
                found[name] = None if name in found else tensor
    return {id(tensor.array): tensor for tensor in found.values() if tensor is not None}


def _width(layer: nn.Module, array: mx.array, num_ranks: int) -> int:
    """How many numbers stand for a row: the fewest that are divided as the whole row would be."""
    width = num_ranks
    if array.ndim == 2 and "scales" in layer and array is layer["weight"]:  # MLX wants parts of whole groups
        width *= max(1, layer.group_size * layer.bits // WORD_BITS)
    num_columns = array.shape[-1]
    return width if num_columns % width == 0 else num_columns
