"""How the vector of one head and one cell is stored: in the dtype of the layer, in bfloat16, or as codes.

Codes of 8 or 4 bits have MLX's affine format, along the head's elements:

    vector   [..., dim]
    codes    [..., dim * bits / 32] uint32: several codes in a word
    scales   [..., dim / group size], as the biases: element = scale * code + bias

On GPUs these are packed in one array, so that one operation writes them:

    packed   [..., words] uint32: the codes, then all scales, then all biases

A vector is rounded when it is written, by `astype` or `mx.quantize`, by native code that gives the same bits,
or on GPUs by a kernel (cell_kernels.py). All reads see the rounded vector, also those of the pass that wrote
it. So an answer does not depend on the pass in which a cell was written.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx

from outrider import gpu_kernels
from outrider.cache import cell_kernels

GROUP_SIZES = (64, 32)  # elements that share a scale; the first one that divides a vector is used
BFLOAT16_BITS = 16


@dataclass(frozen=True, slots=True)
class CellFormat:
    dim: int  # elements of a vector
    dtype: mx.Dtype  # of vectors, scales and biases
    bits: int | None = None  # of a code; 16: elements are bfloat16; None: vectors are stored as they are

    @property
    def code_bits(self) -> int | None:
        """Of a code; None: there are no codes."""
        return None if self.bits == BFLOAT16_BITS else self.bits

    @property
    def group_size(self) -> int:
        return next(size for size in GROUP_SIZES if self.dim % size == 0)

    @property
    def is_packed(self) -> bool:
        return self.code_bits is not None and gpu_kernels.is_available()

    @property
    def parts(self) -> tuple[tuple[int, mx.Dtype], ...]:
        """The elements and the dtype of each array: the vector; or its codes, scales and biases; packed."""
        if (bits := self.code_bits) is None:
            return ((self.dim, self.dtype if self.bits is None else mx.bfloat16),)
        num_words, num_groups = self.dim * bits // 32, self.dim // self.group_size
        if self.is_packed:
            return ((num_words + 2 * num_groups * self.dtype.size // 4, mx.uint32),)
        return ((num_words, mx.uint32), (num_groups, self.dtype), (num_groups, self.dtype))

    @property
    def num_bytes(self) -> int:
        """Of one vector."""
        return sum(size * dtype.size for size, dtype in self.parts)

    def encode(self, vectors: mx.array) -> tuple[mx.array, ...]:
        if (bits := self.code_bits) is None:
            return (vectors if self.bits is None else vectors.astype(mx.bfloat16),)
        vectors = vectors.astype(self.dtype)
        if self._has_kernel(vectors, bits):
            return (cell_kernels.encode(vectors, vectors, bits, self.group_size)[0],)
        codes, scales, biases = mx.quantize(vectors, group_size=self.group_size, bits=bits)
        # A group with NaN or infinity stays NaN: a step that fails must not become a wrong answer.
        zeros = (vectors * 0).reshape(*scales.shape, self.group_size).sum(axis=-1)
        biases = biases + zeros
        if not self.is_packed:
            return codes, scales, biases
        numbers = mx.concatenate([scales, biases], axis=-1).view(mx.uint32)
        return (mx.concatenate([codes, numbers], axis=-1),)

    def encode_both(self, first: mx.array, second: mx.array) -> tuple[tuple[mx.array, ...], ...]:
        """Two arrays of one shape."""
        bits = self.code_bits
        if bits is None or not self._has_kernel(first, bits):
            return self.encode(first), self.encode(second)
        both = first.astype(self.dtype), second.astype(self.dtype)
        found = cell_kernels.encode(*both, bits, self.group_size)
        return (found[0],), (found[1],)

    def decode(self, parts: Sequence[mx.array]) -> mx.array:
        if (bits := self.code_bits) is None:
            return parts[0] if self.bits is None else parts[0].astype(self.dtype)
        if self.is_packed:
            parts = cell_kernels.unpacked(parts[0], self.dim, bits, self.group_size, self.dtype)
        codes, scales, biases = parts
        return mx.dequantize(codes, scales, biases, group_size=self.group_size, bits=bits)

    def _has_kernel(self, vectors: mx.array, bits: int) -> bool:
        return (
            self.is_packed
            and vectors.ndim == 4
            and cell_kernels.supports(self.dim, bits, self.group_size, self.dtype)
        )
