"""The safetensors format, as far as whole arrays are not enough: which tensors a file holds, and where.

    8 bytes    length of the header, little-endian
    header     JSON: name -> dtype, shape, data_offsets; "__metadata__" -> strings; padded with spaces
    data       the tensors, one after the other

mx.load and mx.save_safetensors read and write whole arrays. This module serves callers that need only headers
(which head is in this checkpoint?), that copy tensors as bytes, or that must not import mlx.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, BinaryIO

MAX_HEADER_BYTES = 100_000_000  # the limit of the safetensors package

METADATA = "__metadata__"


class InvalidSafetensors(ValueError):
    """The file does not follow the format; the message names the place."""


@dataclass(frozen=True)
class TensorEntry:
    dtype: str  # by the format's names: F32, BF16, F8_E4M3, U32, ...
    shape: tuple[int, ...]
    begin: int  # bytes from the start of the data
    end: int

    @property
    def num_bytes(self) -> int:
        return self.end - self.begin


@dataclass(frozen=True)
class SafetensorsHeader:
    tensors: Mapping[str, TensorEntry]
    metadata: Mapping[str, str]
    data_begin: int = 0  # where the data starts in the file; 0: the header was not read from a file

    def as_json(self) -> dict[str, Any]:
        entries: dict[str, Any] = {METADATA: dict(self.metadata)}
        for name, info in self.tensors.items():
            offsets = [info.begin, info.end]
            entries[name] = {"dtype": info.dtype, "shape": list(info.shape), "data_offsets": offsets}
        return entries

    def encode(self) -> bytes:
        """Everything in the file before the data."""
        text = json.dumps(self.as_json()).encode()
        text += b" " * (-len(text) % 8)
        return len(text).to_bytes(8, "little") + text


def lay_out(tensors: Iterable[tuple[str, str, Sequence[int], int]]) -> dict[str, TensorEntry]:
    """Places one after the other, for tensors given as (name, dtype, shape, bytes)."""
    entries: dict[str, TensorEntry] = {}
    begin = 0
    for name, dtype, shape, num_bytes in tensors:
        entries[name] = TensorEntry(dtype, tuple(shape), begin, begin + num_bytes)
        begin += num_bytes
    return entries


def read_header(file: BinaryIO, max_bytes: int = MAX_HEADER_BYTES) -> SafetensorsHeader:
    """Read the header of an open file and leave the file at the start of the data.

    Raises InvalidSafetensors, also when the file is too short for the tensors that the header names.
    """
    file_bytes = os.fstat(file.fileno()).st_size
    length = int.from_bytes(file.read(8), "little")
    if not 0 < length <= max_bytes:
        raise InvalidSafetensors(f"the header would have {length} bytes")
    if file_bytes < 8 + length:
        raise InvalidSafetensors("the file is cut short")
    try:
        entries = json.loads(file.read(length))
        metadata = dict(entries.pop(METADATA, None) or {})
        tensors = {}
        for name, entry in entries.items():
            begin, end = (int(offset) for offset in entry["data_offsets"])
            shape = tuple(int(size) for size in entry["shape"])
            tensors[name] = TensorEntry(str(entry["dtype"]), shape, begin, end)
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise InvalidSafetensors(f"the header cannot be read ({type(error).__name__}: {error})") from error
    num_bytes = file_bytes - 8 - length
    for name, info in tensors.items():
        if not 0 <= info.begin <= info.end:
            raise InvalidSafetensors(f"the place of tensor {name} is invalid")
        if info.end > num_bytes:
            raise InvalidSafetensors("the file is cut short")
    return SafetensorsHeader(tensors, metadata, 8 + length)
