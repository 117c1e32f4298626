"""How the vector of one head and one cell is stored: in the dtype of the layer, or quantised.

Quantised vectors have MLX's affine format, along the head's elements:

    vector   [..., dim]
    codes    [..., dim * bits / 32] uint32: several codes in a word
    scales   [..., dim / group size], as the biases: element = scale * code + bias

On GPUs these are packed in one array, so that one operation writes them:

    packed   [..., words] uint32: the codes, then all scales, then all biases

A vector is quantised when it is written, by `mx.quantize`, by native code that gives the same bits, or on
GPUs by a kernel (cell_kernels.py). All reads see the quantised vector, also those of the pass that wrote it.
So an answer does not depend on the pass in which a cell was written.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx

from outrider import gpu_kernels
from outrider.cache import cell_kernels

GROUP_SIZES = (64, 32)  # elements that share a scale; the first one that divides a vector is used


@dataclass(frozen=True, slots=True)
class CellFormat:
    dim: int  # elements of a vector
    dtype: mx.Dtype  # of vectors, scales and biases
    bits: int | None = None  # of a code; None: vectors are stored as they are

    @property
    def group_size(self) -> int:
        return next(size for size in GROUP_SIZES if self.dim % size == 0)

    @property
    def is_packed(self) -> bool:
        return self.bits is not None and gpu_kernels.is_available()

    @property
    def parts(self) -> tuple[tuple[int, mx.Dtype], ...]:
        """The elements and the dtype of each array: the vector; or its codes, scales and biases; packed."""
        if self.bits is None:
            return ((self.dim, self.dtype),)
        num_words, num_groups = self.dim * self.bits // 32, self.dim // self.group_size
        if self.is_packed:
            return ((num_words + 2 * num_groups * self.dtype.size // 4, mx.uint32),)
        return ((num_words, mx.uint32), (num_groups, self.dtype), (num_groups, self.dtype))

    @property
    def num_bytes(self) -> int:
        """Of one vector."""
        return sum(size * dtype.size for size, dtype in self.parts)

    def encode(self, vectors: mx.array) -> tuple[mx.array, ...]:
        if self.bits is None:
            return (vectors,)
        vectors = vectors.astype(self.dtype)
        if self._has_kernel(vectors):
            return (cell_kernels.encode(vectors, vectors, self.bits, self.group_size)[0],)
        codes, scales, biases = mx.quantize(vectors, group_size=self.group_size, bits=self.bits)
        # A group with NaN or infinity stays NaN: a step that fails must not become a wrong answer.
        zeros = (vectors * 0).reshape(*scales.shape, self.group_size).sum(axis=-1)
        biases = biases + zeros
        if not self.is_packed:
            return codes, scales, biases
        numbers = mx.concatenate([scales, biases], axis=-1).view(mx.uint32)
        return (mx.concatenate([codes, numbers], axis=-1),)

    def encode_both(self, first: mx.array, second: mx.array) -> tuple[tuple[mx.array, ...], ...]:
        """Two arrays of one shape."""
        if self.bits is None or not self._has_kernel(first):
            return self.encode(first), self.encode(second)
        both = first.astype(self.dtype), second.astype(self.dtype)
        found = cell_kernels.encode(*both, self.bits, self.group_size)
        return (found[0],), (found[1],)

    def decode(self, parts: Sequence[mx.array]) -> mx.array:
        if self.bits is None:
            return parts[0]
        if self.is_packed:
            parts = cell_kernels.unpacked(parts[0], self.dim, self.bits, self.group_size, self.dtype)
        codes, scales, biases = parts
        return mx.dequantize(codes, scales, biases, group_size=self.group_size, bits=self.bits)

    def _has_kernel(self, vectors: mx.array) -> bool:
        assert self.bits is not None
        return (
            self.is_packed
            and vectors.ndim == 4
            and cell_kernels.supports(self.dim, self.bits, self.group_size, self.dtype)
        )
