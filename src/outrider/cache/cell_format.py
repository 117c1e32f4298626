"""How the vector of one head and one cell is stored: in the dtype of the layer, or quantised.

Quantised vectors have MLX's affine format, along the head's elements:

    vector   [..., dim]
    codes    [..., dim * bits / 32] uint32: several codes in a word
    scales   [..., dim / group size], as the biases: element = scale * code + bias

A vector is quantised when it is written, by `mx.quantize` or by native code that gives the same bits. All
reads see the quantised vector, also those of the pass that wrote it. So an answer does not depend on the pass
in which a cell was written.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx

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
    def parts(self) -> tuple[tuple[int, mx.Dtype], ...]:
        """The elements and the dtype of each array: the vector; or its codes, scales and biases."""
        if self.bits is None:
            return ((self.dim, self.dtype),)
        num_groups = self.dim // self.group_size
        return ((self.dim * self.bits // 32, mx.uint32), (num_groups, self.dtype), (num_groups, self.dtype))

    @property
    def num_bytes(self) -> int:
        """Of one vector."""
        return sum(size * dtype.size for size, dtype in self.parts)

    def encode(self, vectors: mx.array) -> tuple[mx.array, ...]:
        if self.bits is None:
            return (vectors,)
        vectors = vectors.astype(self.dtype)
        codes, scales, biases = mx.quantize(vectors, group_size=self.group_size, bits=self.bits)
        # A group with NaN or infinity stays NaN: a step that fails must not become a wrong answer.
        zeros = (vectors * 0).reshape(*scales.shape, self.group_size).sum(axis=-1)
        return codes, scales, biases + zeros

    def decode(self, parts: Sequence[mx.array]) -> mx.array:
        if self.bits is None:
            return parts[0]
        codes, scales, biases = parts
        return mx.dequantize(codes, scales, biases, group_size=self.group_size, bits=self.bits)
