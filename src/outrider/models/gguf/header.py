"""The head of a GGUF file: its metadata and the list of its tensors, checked against the file's length.

Owns the container format. Must not know what a model is, nor touch MLX: every offset is checked here,
so that whoever reads tensors afterwards reads a file that is whole.
"""

import math
import mmap
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from outrider.models.errors import UnreadableGGUF

MAGIC = b"GGUF"
VERSIONS = (2, 3)
DEFAULT_ALIGNMENT = 32
MAX_DIMENSIONS = 8

Value = bool | int | float | str | list


@dataclass(frozen=True)
class TensorType:
    """How numbers are stored: blocks of `block` weights in `block_bytes` bytes."""

    name: str
    block: int
    block_bytes: int


TENSOR_TYPES: Mapping[int, TensorType] = {
    0: TensorType("F32", 1, 4),
    1: TensorType("F16", 1, 2),
    2: TensorType("Q4_0", 32, 18),
    3: TensorType("Q4_1", 32, 20),
    6: TensorType("Q5_0", 32, 22),
    7: TensorType("Q5_1", 32, 24),
    8: TensorType("Q8_0", 32, 34),
    9: TensorType("Q8_1", 32, 36),
    10: TensorType("Q2_K", 256, 84),
    11: TensorType("Q3_K", 256, 110),
    12: TensorType("Q4_K", 256, 144),
    13: TensorType("Q5_K", 256, 176),
    14: TensorType("Q6_K", 256, 210),
    15: TensorType("Q8_K", 256, 292),
    16: TensorType("IQ2_XXS", 256, 66),
    17: TensorType("IQ2_XS", 256, 74),
    18: TensorType("IQ3_XXS", 256, 98),
    19: TensorType("IQ1_S", 256, 50),
    20: TensorType("IQ4_NL", 32, 18),
    21: TensorType("IQ3_S", 256, 110),
    22: TensorType("IQ2_S", 256, 82),
    23: TensorType("IQ4_XS", 256, 136),
    24: TensorType("I8", 1, 1),
    25: TensorType("I16", 1, 2),
    26: TensorType("I32", 1, 4),
    27: TensorType("I64", 1, 8),
    28: TensorType("F64", 1, 8),
    29: TensorType("IQ1_M", 256, 56),
    30: TensorType("BF16", 1, 2),
    34: TensorType("TQ1_0", 256, 54),
    35: TensorType("TQ2_0", 256, 66),
    39: TensorType("MXFP4", 32, 17),
}

# Metadata value types: struct codes of the fixed-size ones, then the two that have a length.
SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
STRING = 8
ARRAY = 9


@dataclass(frozen=True)
class TensorInfo:
    name: str
    shape: tuple[int, ...]  # row-major: the reverse of the order in the file
    type_id: int
    position: int  # of the first byte, from the start of the file
    num_bytes: int  # 0 for a type that is not in the table

    @property
    def type_name(self) -> str:
        known = TENSOR_TYPES.get(self.type_id)
        return known.name if known else f"type {self.type_id}"


@dataclass(frozen=True)
class Header:
    metadata: Mapping[str, Value]
    tensors: Mapping[str, TensorInfo]

    @property
    def architecture(self) -> str:
        return str(self.metadata.get("general.architecture", ""))


def read_header(path: Path) -> Header:
    """Read and check the head of the file. Raises UnreadableGGUF with the reason."""
    try:
        with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _HeaderReader(path, data).header()
    except ValueError as error:  # an empty file cannot be mapped; text that is not UTF-8
        raise UnreadableGGUF(f"{path} is not a readable GGUF file: {error}.") from error
    except OSError as error:
        raise UnreadableGGUF(f"{path} cannot be opened: {error.strerror}.") from error


class _HeaderReader:
    """A cursor over the file that never reads past its end."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self._path = path
        self._data = data
        self._at = 0

    def header(self) -> Header:
        num_tensors, num_entries = self._preamble()
        metadata = dict(self._entry() for _ in range(num_entries))
        infos = [self._tensor_info() for _ in range(num_tensors)]
        alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
        if not isinstance(alignment, int) or alignment < 1:
            raise self._damaged(f"an alignment of {alignment}")
        start = math.ceil(self._at / alignment) * alignment
        tensors = {info.name: info for info in (self._placed(start, *fields) for fields in infos)}
        return Header(metadata, tensors)

    def _preamble(self) -> tuple[int, int]:
        if self._data[:4] != MAGIC:
            raise UnreadableGGUF(f"{self._path} is not a GGUF file: it does not begin with the letters GGUF.")
        self._at = 4
        version = self._number("I")
        if version not in VERSIONS:
            raise UnreadableGGUF(
                f"{self._path} has GGUF version {version} or is big-endian; "
                "versions 2 and 3, little-endian, are read."
            )
        return self._count(), self._count()

    def _entry(self) -> tuple[str, Value]:
        key = self._string()
        return key, self._value(self._number("I"))

    def _value(self, kind: int) -> Value:
        if kind in SCALARS:
            return self._number(SCALARS[kind])
        if kind == STRING:
            return self._string()
        if kind == ARRAY:
            return self._array()
        raise self._damaged(f"a metadata value of unknown type {kind}")

    def _array(self) -> list:
        kind = self._number("I")
        length = self._count()
        if kind in SCALARS:
            return list(self._numbers(length, SCALARS[kind]))
        return [self._value(kind) for _ in range(length)]

    def _tensor_info(self) -> tuple[str, tuple[int, ...], int, int]:
        name = self._string()
        num_dimensions = self._number("I")
        if num_dimensions > MAX_DIMENSIONS:
            raise self._damaged(f"a tensor of {num_dimensions} dimensions")
        shape = self._numbers(num_dimensions, "Q")[::-1]
        return name, shape, self._number("I"), self._number("Q")

    def _placed(self, start: int, name: str, shape: tuple[int, ...], kind: int, offset: int) -> TensorInfo:
        stored_as = TENSOR_TYPES.get(kind)
        if stored_as is None:
            return TensorInfo(name, shape, kind, start + offset, num_bytes=0)
        if shape and shape[-1] % stored_as.block:
            raise self._damaged(
                f"a tensor {name} whose rows of {shape[-1]} do not fill {stored_as.name} blocks"
            )
        num_bytes = math.prod(shape) // stored_as.block * stored_as.block_bytes
        if start + offset + num_bytes > len(self._data):
            raise self._truncated()
        return TensorInfo(name, shape, kind, start + offset, num_bytes)

    def _string(self) -> str:
        return self._take(self._count()).decode("utf-8")

    def _count(self) -> int:
        """A count of things that take at least a byte each: more than the file has left is no count."""
        count = self._number("Q")
        if count > len(self._data) - self._at:
            raise self._truncated()
        return count

    def _number(self, code: str) -> int:
        return self._numbers(1, code)[0]

    def _numbers(self, length: int, code: str) -> tuple:
        layout = struct.Struct(f"<{length}{code}")
        return layout.unpack(self._take(layout.size))

    def _take(self, length: int) -> bytes:
        end = self._at + length
        if end > len(self._data):
            raise self._truncated()
        taken = self._data[self._at : end]
        self._at = end
        return taken

    def _truncated(self) -> UnreadableGGUF:
        return UnreadableGGUF(
            f"{self._path} ends too early ({len(self._data):,} bytes): "
            "the download is incomplete or damaged. Fetch it again."
        )

    def _damaged(self, what: str) -> UnreadableGGUF:
        return UnreadableGGUF(f"{self._path} is damaged or of an unknown kind: it has {what}.")
