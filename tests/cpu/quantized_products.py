"""Quantised weights in every format, and their products in NumPy as native/extension/quantized.h has them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from types import ModuleType

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from outrider.cpu.quantized import FLOAT_MODES

Floats = NDArray[np.float32]


@dataclass(frozen=True)
class Weights:
    """Quantised weights in one of MLX's formats, or with groups of 16 or without biases, which are ours."""

    weight: mx.array
    scales: mx.array
    biases: mx.array | None
    group_size: int
    bits: int
    mode: str = "affine"

    @property
    def arrays(self) -> tuple[mx.array, mx.array, mx.array | None]:
        return self.weight, self.scales, self.biases

    @property
    def format(self) -> tuple[int, int, str]:
        return self.group_size, self.bits, self.mode

    def each(self, change: Callable[[mx.array], mx.array]) -> Weights:
        weight, scales, biases = (None if array is None else change(array) for array in self.arrays)
        assert weight is not None
        assert scales is not None
        return replace(self, weight=weight, scales=scales, biases=biases)

    def codes(self) -> NDArray[np.int64]:
        """[rows, size]: one stream of bits, beginning with the lowest bit of the first code."""
        stream = np.unpackbits(np.array(self.weight).view(np.uint8), axis=-1, bitorder="little")
        bits = stream.reshape(len(stream), -1, self.bits).astype(np.int64)
        return bits @ (1 << np.arange(self.bits))

    def dense(self) -> NDArray[np.float64]:
        """[rows, size]"""
        if self.mode == "mxfp8":
            numbers = e4m3(self.codes())
        elif self.mode in FLOAT_MODES:
            numbers = E2M1[self.codes()]
        else:
            numbers = self.codes() - (0 if self.biases is not None else 2.0 ** (self.bits - 1))
        scales = np.repeat(self.scale_numbers().astype(np.float64), self.group_size, axis=1)
        biases = 0.0 if self.biases is None else np.repeat(floats(self.biases), self.group_size, axis=1)
        return np.asarray(numbers * scales + biases)

    def scale_numbers(self) -> Floats:
        if self.mode == "affine":
            return floats(self.scales)
        codes = np.array(self.scales).astype(np.int64)
        return (e4m3(codes) if self.mode == "nvfp4" else 2.0 ** (codes - 127)).astype(np.float32)


E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6])


def e4m3(codes: NDArray[np.int64]) -> NDArray[np.float64]:
    """A sign, four bits of exponent, three of mantissa; no infinities, 127 and 255 are NaN."""
    exponent, mantissa = codes >> 3 & 15, codes & 7
    size = np.where(exponent > 0, (8 + mantissa) * 2.0 ** (exponent - 10), mantissa * 2.0**-9)
    return np.where(codes & 127 == 127, np.nan, np.where(codes & 128, -size, size))


def floats(array: mx.array) -> Floats:
    return np.array(array.astype(mx.float32))


def weights(
    num_rows: int,
    size: int,
    bits: int,
    group_size: int,
    dtype: mx.Dtype = mx.float16,
    seed: int = 0,
    mode: str = "affine",
    has_biases: bool = True,
) -> Weights:
    rng = np.random.default_rng(seed)
    if mode != "affine":
        dense = rng.standard_normal((num_rows, size)) * np.exp(rng.uniform(-4, 4, (num_rows, 1)))
        codes, scales = mx.quantize(mx.array(dense.astype(np.float32)), group_size, bits, mode)
        return Weights(codes, scales, None, group_size, bits, mode)
    words = rng.integers(0, 2**32, (num_rows, size * bits // 32), np.uint32)
    shape = num_rows, size // group_size
    scales, biases = (mx.array(rng.standard_normal(shape).astype(np.float32)).astype(dtype) for _ in "sb")
    return Weights(mx.array(words), scales, biases if has_biases else None, group_size, bits)


def tokens(num_tokens: int, size: int, seed: int = 1) -> Floats:
    """Numbers whose sizes differ from block to block."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((num_tokens, size)) * np.exp(rng.uniform(-3, 3, (1, size)))
    return x.astype(np.float32)


def fma(a: Floats, b: Floats, c: Floats) -> Floats:
    """a * b + c with one rounding. The product is exact in float64; the sum rounds twice in rare cases."""
    return np.asarray(a.astype(np.float64) * b + c, np.float32)


def rounded_tokens(x: Floats) -> tuple[NDArray[np.int64], Floats]:
    """Codes of 15 bits [tokens, blocks, 32], and the scales of their blocks."""
    blocks = x.reshape(len(x), -1, 32)
    largest = np.abs(blocks).max(-1)
    inverse = np.where(
        largest > 1e-30, np.float32(127) / np.maximum(largest, np.float32(1e-30)), np.float32(0)
    )
    scaled = blocks * inverse[..., None].astype(np.float32)
    high = np.rint(scaled)
    codes = (high * 128 + np.rint((scaled - high) * 128)).astype(np.int64)
    scales = np.where(inverse > 0, largest / np.float32(127 * 128), np.float32(0)).astype(np.float32)
    return codes, scales


def expected_product(x: Floats, w: Weights) -> Floats:
    return _float_product(x, w) if w.mode == "mxfp8" else _integer_product(x, w)


def _integer_product(x: Floats, w: Weights) -> Floats:
    """Products are added as integers in each part of a block that has one scale."""
    rounded, token_scale = rounded_tokens(x)
    codes, scale = w.codes(), w.scale_numbers()
    middle = np.float32(2 ** (w.bits - 1))
    if w.mode != "affine":
        codes, scale, middle = (2 * E2M1[codes] + 12).astype(np.int64), scale / 2, np.float32(12)
    bias = floats(w.biases) if w.biases is not None else -middle * scale
    part_size = min(w.group_size, 32)
    y = np.zeros((len(x), len(codes)), np.float32)
    for part in range(codes.shape[1] // part_size):
        columns = slice(part * part_size, part * part_size + part_size)
        block, group = columns.start // 32, columns.start // w.group_size
        own = rounded[:, block, columns.start % 32 :][:, :part_size]
        total = (own @ codes[:, columns].T).astype(np.float32)
        token_sum = token_scale[:, block] * own.sum(-1).astype(np.float32)
        y = fma(total, scale[None, :, group] * token_scale[:, block, None], y)
        y = fma(bias[None, :, group], token_sum[:, None], y)
    return y


def _float_product(x: Floats, w: Weights) -> Floats:
    """Products of a block are added in four parts: of eight elements the even ones first, then the others."""
    rounded, token_scale = rounded_tokens(x)
    order = [8 * eight + i for eight in range(4) for i in (0, 2, 4, 6, 1, 3, 5, 7)]
    numbers, scale = e4m3(w.codes()).astype(np.float32), w.scale_numbers()
    y = np.zeros((len(x), len(numbers)), np.float32)
    for block in range(rounded.shape[1]):
        parts = [np.zeros_like(y) for _ in range(4)]
        for place, k in enumerate(order):
            own = rounded[:, block, k].astype(np.float32)
            parts[place % 4] = fma(numbers[None, :, block * 32 + k], own[:, None], parts[place % 4])
        total = (parts[0] + parts[1]) + (parts[2] + parts[3])
        y = fma(total, scale[None, :, block] * token_scale[:, block, None], y)
    return y


def product(native: ModuleType, x: Floats, w: Weights) -> Floats:
    return np.array(native.quantized_matmul(mx.array(x), *w.arrays, *w.format))
