"""Reads the header of a GGUF file: the metadata and the list of tensors, checked against the file's length.

Owns the container format. Must not know models or MLX. Every count and offset is checked here, so code that
reads tensors afterwards reads a complete file.

The table of tensor types comes from the gguf package. The package's own reader (gguf 0.19) is not used:

- It does not check lengths. A file of 49 bytes that claims an array of 2**40 numbers is read without end, and
  memory grows by about 30 MB a second. A string that the file cuts short is returned short, without an error.
- It makes several NumPy arrays for every array element. A vocabulary of 152,000 tokens takes 8 s and 508 MB;
  this module takes 0.4 s and 27 MB.
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
DEFAULT_ALIGNMENT = 32  # bytes; the format's default
MAX_DIMENSIONS = 8  # GGUF itself allows 4; a larger count means a damaged file

# Types of metadata values: the struct codes of numbers, then the two types that begin with a length.
NUMBER_CODES = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
STRING = 8
ARRAY = 9

Value = bool | int | float | str | list


@dataclass(frozen=True)
class TensorInfo:
    name: str
    shape: tuple[int, ...]  # row-major: the reverse of the order in the file
    type_name: str  # as the gguf package names the type; "type 99" for an unknown type
    position: int  # offset of the first byte from the start of the file
    num_bytes: int  # 0 for an unknown type


@dataclass(frozen=True)
class Header:
    metadata: Mapping[str, Value]
    tensors: Mapping[str, TensorInfo]

    @property
    def architecture(self) -> str:
        return str(self.metadata.get("general.architecture", ""))


def read_header(path: Path) -> Header:
    """Read and check the header. Raises UnreadableGGUF with the reason."""
    try:
        with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _HeaderReader(path, data).header()
    except (ValueError, RecursionError) as error:  # empty file, text that is not UTF-8, deeply nested arrays
        raise UnreadableGGUF(f"{path} is not a readable GGUF file: {error}.") from error
    except OSError as error:
        raise UnreadableGGUF(f"{path} cannot be opened: {error.strerror}.") from error


class _HeaderReader:
    """A cursor over the file that never reads past the end."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self._path = path
        self._data = data
        self._at = 0

    def header(self) -> Header:
        if self._data[:4] != MAGIC:
            raise UnreadableGGUF(f"{self._path} is not a GGUF file: it does not begin with the letters GGUF.")
        self._at = 4
        version = self._number("I")
        if version not in VERSIONS:
            raise UnreadableGGUF(
                f"{self._path} has GGUF version {version} or is big-endian. "
                "Outrider reads versions 2 and 3, little-endian."
            )
        num_tensors, num_entries = self._count(), self._count()
        metadata = {self._string(): self._value(self._number("I")) for _ in range(num_entries)}
        entries = [self._tensor_entry() for _ in range(num_tensors)]
        alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
        if not isinstance(alignment, int) or alignment < 1:
            raise self._damaged(f"an alignment of {alignment}")
        start = math.ceil(self._at / alignment) * alignment
        return Header(metadata, {entry[0]: self._tensor_info(start, *entry) for entry in entries})

    def _value(self, kind: int) -> Value:
        if kind in NUMBER_CODES:
            return self._number(NUMBER_CODES[kind])
        if kind == STRING:
            return self._string()
        if kind != ARRAY:
            raise self._damaged(f"a metadata value of unknown type {kind}")
        element_kind, length = self._number("I"), self._count()
        if element_kind in NUMBER_CODES:
            return list(self._numbers(length, NUMBER_CODES[element_kind]))
        return [self._value(element_kind) for _ in range(length)]

    def _tensor_entry(self) -> tuple[str, tuple[int, ...], int, int]:
        """Return name, shape, type id, and offset from the start of the data."""
        name, num_dimensions = self._string(), self._number("I")
        if num_dimensions > MAX_DIMENSIONS:
            raise self._damaged(f"a tensor of {num_dimensions} dimensions")
        shape = self._numbers(num_dimensions, "Q")[::-1]
        return name, shape, self._number("I"), self._number("Q")

    def _tensor_info(
        self, start: int, name: str, shape: tuple[int, ...], type_id: int, offset: int
    ) -> TensorInfo:
        from gguf import GGML_QUANT_SIZES, GGMLQuantizationType  # imported late: 0.2 s

        try:
            kind = GGMLQuantizationType(type_id)
        except ValueError:
            return TensorInfo(name, shape, f"type {type_id}", start + offset, num_bytes=0)
        block, block_bytes = GGML_QUANT_SIZES[kind]
        if not shape or 0 in shape or shape[-1] % block:
            raise self._damaged(
                f"a tensor {name} of shape {list(shape)} that does not fill {kind.name} blocks"
            )
        num_bytes = math.prod(shape) // block * block_bytes
        if start + offset + num_bytes > len(self._data):
            raise self._truncated()
        return TensorInfo(name, shape, kind.name, start + offset, num_bytes)

    def _string(self) -> str:
        return self._take(self._count()).decode("utf-8")

    def _count(self) -> int:
        """Read a count of items that take at least one byte each."""
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
            "the download is incomplete or damaged. Download the file again."
        )

    def _damaged(self, what: str) -> UnreadableGGUF:
        return UnreadableGGUF(f"{self._path} is damaged or of an unknown kind: it has {what}.")
