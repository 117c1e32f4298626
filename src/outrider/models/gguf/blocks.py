"""Reads one tensor of a GGUF file into arrays in MLX's formats.

Owns the block layouts of the types that stay quantised. Must not know names or models. mx.load also reads
GGUF files, but MLX 0.32 reads Q4_K wrongly and leaves out types that it does not know, both without an error.

| stored as                    | becomes                                                                    |
|------------------------------|----------------------------------------------------------------------------|
| F32, F16, BF16               | the same dtype                                                             |
| Q4_0, Q4_1, Q5_0, Q5_1, Q8_0 | MLX affine quantisation, groups of 32: w = scale * code + bias, every bit  |
| Q4_K, Q5_K                   | the same; their scales are products, which are rounded to float16          |
| Q2_K, Q3_K, Q6_K             | the same with groups of 16, which MLX does not have: see                   |
|                              | models/groups_of_16.py. Q3_K and Q6_K have no biases: the middle code is 0 |
| MXFP4                        | MLX's mxfp4, every bit                                                     |
| other types                  | float16: the gguf package dequantises them, and MLX has no such quantised  |
|                              | format (IQ types have codebooks)                                           |

The gguf package offers only dequantised floats, so the codes and scales of these types are read here.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from outrider.models.errors import UnreadableGGUF
from outrider.models.gguf.header import TensorInfo

GROUP_SIZE = 32  # weights that share a scale and a bias
SMALL_GROUP_SIZE = 16  # of Q2_K, Q3_K and Q6_K
ROWS_AT_ONCE = 1024  # rows dequantised at a time: the float32 copy stays small; chosen by hand

Bytes = NDArray[Any]  # uint8 [blocks, bytes of a block]
Floats = NDArray[Any]  # float32


@dataclass(frozen=True)
class Groups:
    """Groups of weights: w = scale * code + bias. Without biases: w = scale * (code - 2^(bits - 1)).

    Of MXFP4, codes and scales are small floats, as MLX has them.
    """

    codes: Bytes  # [..., group size]
    scales: Floats | Bytes  # [...]
    biases: Floats | None  # [...]


@dataclass(frozen=True)
class QuantizedType:
    bits: int
    block_bytes: int
    read: Callable[[Bytes], Groups]
    group_size: int = GROUP_SIZE
    mode: str = "affine"  # MLX's name


@cache
def readable_types() -> tuple[str, ...]:
    """Return the names of all types that can be read.

    The gguf package has no such list, so the function tries to dequantise one block of each type.
    """
    from gguf import GGML_QUANT_SIZES
    from gguf.quants import dequantize

    names = list(PLAIN_TYPES)
    for kind, (_, block_bytes) in GGML_QUANT_SIZES.items():
        if kind.name in PLAIN_TYPES:
            continue
        try:
            dequantize(np.zeros((1, block_bytes), np.uint8), kind)
        except NotImplementedError:
            continue
        names.append(kind.name)
    return tuple(names)


def quantized_type(info: TensorInfo) -> QuantizedType | None:
    """Return the type of a tensor that stays quantised, else None. MLX quantises matrices only."""
    return QUANTIZED_TYPES.get(info.type_name) if len(info.shape) == 2 else None


@np.errstate(all="ignore")  # _half refuses numbers that overflow
def read_tensor(path: Path, info: TensorInfo) -> dict[str, mx.array]:
    """Return the tensor's parts: `weight`; if it stays quantised, `scales` and, of most types, `biases`."""
    raw = np.memmap(path, dtype=np.uint8, mode="r", offset=info.position, shape=(info.num_bytes,))
    if info.type_name in PLAIN_TYPES:
        return {"weight": PLAIN_TYPES[info.type_name](raw).reshape(info.shape)}
    kind = quantized_type(info)
    if kind is None:
        return {"weight": _dequantise(raw, info)}
    groups = kind.read(raw.reshape(-1, kind.block_bytes))
    num_rows = info.shape[0]
    scales = _half(groups.scales, info) if kind.mode == "affine" else np.ascontiguousarray(groups.scales)
    parts = {
        "weight": mx.array(pack(groups.codes, kind.bits).reshape(num_rows, -1)),
        "scales": mx.array(scales.reshape(num_rows, -1)),
    }
    if groups.biases is not None:
        parts["biases"] = mx.array(_half(groups.biases, info).reshape(num_rows, -1))
    return parts


def _dequantise(raw: Bytes, info: TensorInfo) -> mx.array:
    from gguf import GGMLQuantizationType
    from gguf.quants import dequantize

    kind = GGMLQuantizationType[info.type_name]
    rows = raw.reshape(math.prod(info.shape[:-1]), -1)
    half = np.empty((len(rows), info.shape[-1]), np.float16)
    for first in range(0, len(rows), ROWS_AT_ONCE):
        some = slice(first, first + ROWS_AT_ONCE)
        half[some] = _half(dequantize(rows[some], kind), info)
    return mx.array(half.reshape(info.shape))


def pack(codes: Bytes, bits: int) -> NDArray[np.uint32]:
    """Pack codes as MLX does: one stream of bits, beginning with the lowest bit of the first code."""
    if bits == 8:
        stream = np.ascontiguousarray(codes)
    elif bits == 4:
        stream = codes[..., ::2] | (codes[..., 1::2] << 4)
    else:
        stream = np.packbits(_bits_of(codes, bits), axis=-1, bitorder="little")
    return stream.reshape(-1).view(np.uint32)


def _bits_of(codes: Bytes, bits: int) -> Bytes:
    spread = np.unpackbits(codes[..., None], axis=-1, bitorder="little", count=bits)
    return spread.reshape(*codes.shape[:-1], -1)


def _half(values: Floats, info: TensorInfo) -> NDArray[np.float16]:
    half = values.astype(np.float16)
    if not np.isfinite(half).all():
        raise UnreadableGGUF(f"Tensor {info.name} has numbers that float16 cannot hold: the file is damaged.")
    return half


def _floats(raw: Bytes) -> Floats:
    """Convert float16 bytes [blocks, 2n] to numbers [blocks, n]."""
    return np.ascontiguousarray(raw).view(np.float16).astype(np.float32)


def _nibbles(raw: Bytes) -> Bytes:
    """Return all low nibbles, then all high nibbles: the order of the weights in every 4-bit type."""
    return np.concatenate([raw & 15, raw >> 4], axis=-1)


def _q4_0(raw: Bytes) -> Groups:
    scales = _floats(raw[:, :2])
    return Groups(_nibbles(raw[:, 2:]), scales, -8 * scales)


def _q4_1(raw: Bytes) -> Groups:
    return Groups(_nibbles(raw[:, 4:]), _floats(raw[:, :2]), _floats(raw[:, 2:4]))


def _q5_0(raw: Bytes) -> Groups:
    scales = _floats(raw[:, :2])
    return Groups(_fifth_bits(raw[:, 2:6]) | _nibbles(raw[:, 6:]), scales, -16 * scales)


def _q5_1(raw: Bytes) -> Groups:
    return Groups(_fifth_bits(raw[:, 4:8]) | _nibbles(raw[:, 8:]), _floats(raw[:, :2]), _floats(raw[:, 2:4]))


def _fifth_bits(raw: Bytes) -> Bytes:
    """Bit i of the four bytes is the fifth bit of weight i."""
    return np.unpackbits(raw, axis=-1, bitorder="little") << 4


def _q8_0(raw: Bytes) -> Groups:
    scales = _floats(raw[:, :2])
    return Groups(raw[:, 2:] ^ 128, scales, -128 * scales)  # code = signed byte + 128


def _q4_k(raw: Bytes) -> Groups:
    codes = _nibbles(raw[:, 16:].reshape(-1, 4, 32))
    return _k_groups(raw, codes.reshape(-1, 8, 32))


def _q5_k(raw: Bytes) -> Groups:
    """Byte i of the 32 bytes of fifth bits holds one bit of weight i of each of the eight groups."""
    codes = _nibbles(raw[:, 48:].reshape(-1, 4, 32)).reshape(-1, 8, 32)
    fifth = np.unpackbits(raw[:, None, 16:48], axis=1, bitorder="little")
    return _k_groups(raw, codes | (fifth << 4))


def _k_groups(raw: Bytes, codes: Bytes) -> Groups:
    """Eight groups share two float16 factors: one for their 6-bit scales, one for their 6-bit minima."""
    factors = _floats(raw[:, :4])
    scales, minima = _six_bit_pairs(raw[:, 4:16])
    return Groups(codes, factors[:, :1] * scales, -factors[:, 1:] * minima)


def _six_bit_pairs(packed: Bytes) -> tuple[Bytes, Bytes]:
    """Unpack the scales and minima of eight groups from twelve bytes: four bytes each of s, m and h.

    groups 0 to 3:  scale = low 6 bits of s                       minimum = low 6 bits of m
    groups 4 to 7:  scale = top 2 bits of s, then low 4 bits of h  minimum = top 2 of m, then top 4 of h
    """
    s, m, h = packed[:, :4], packed[:, 4:8], packed[:, 8:]
    scales = np.concatenate([s & 63, (h & 15) | (s >> 6 << 4)], axis=-1)
    minima = np.concatenate([m & 63, (h >> 4) | (m >> 6 << 4)], axis=-1)
    return scales, minima


def _q2_k(raw: Bytes) -> Groups:
    """A byte for each of the 16 groups: its scale in the low bits, its minimum in the high bits."""
    factors = _floats(raw[:, 80:84])
    scales, minima = factors[:, :1] * (raw[:, :16] & 15), -factors[:, 1:] * (raw[:, :16] >> 4)
    return Groups(_bit_pairs(raw[:, 16:80]).reshape(-1, 16, 16), scales, minima)


def _q3_k(raw: Bytes) -> Groups:
    """Bit i of byte j of the first 32 bytes is the third bit of weight 32 i + j."""
    third = np.unpackbits(raw[:, None, :32], axis=1, bitorder="little")  # [blocks, 8, 32]
    codes = _bit_pairs(raw[:, 32:96]).reshape(-1, 8, 32) | (third << 2)
    scales = _nibbles(raw[:, 96:104]) | (_shifted_pairs(raw[:, 104:108]) << 4)
    scales = scales.astype(np.float32) - 32
    return Groups(codes.reshape(-1, 16, 16), _floats(raw[:, 108:110]) * scales, None)


def _q6_k(raw: Bytes) -> Groups:
    """Halves of 128 weights: 64 bytes with four bits of two weights each, 32 bytes with two bits of four."""
    low = _nibbles(raw[:, :128].reshape(-1, 2, 64))
    codes = low | (_bit_pairs(raw[:, 128:192]).reshape(-1, 2, 128) << 4)
    scales = _floats(raw[:, 208:210]) * raw[:, 192:208].view(np.int8)
    return Groups(codes.reshape(-1, 16, 16), scales, None)


def _mxfp4(raw: Bytes) -> Groups:
    return Groups(_nibbles(raw[:, 1:]), raw[:, 0], None)


def _bit_pairs(raw: Bytes) -> Bytes:
    """Two bits of each of 256 weights. Byte j of 32 bytes: of weights j, j + 32, j + 64 and j + 96."""
    return _shifted_pairs(raw.reshape(-1, 2, 32)).reshape(-1, 256)


def _shifted_pairs(raw: Bytes) -> Bytes:
    """The lowest two bits of all bytes, then the next two, and so on."""
    return np.concatenate([raw >> shift & 3 for shift in (0, 2, 4, 6)], axis=-1)


PLAIN_TYPES: Mapping[str, Callable[[Bytes], mx.array]] = {
    "F32": lambda raw: mx.array(raw.view(np.float32)),
    "F16": lambda raw: mx.array(raw.view(np.float16)),
    "BF16": lambda raw: mx.array(raw.view(np.uint16)).view(mx.bfloat16),
}
QUANTIZED_TYPES: Mapping[str, QuantizedType] = {
    "Q4_0": QuantizedType(4, 18, _q4_0),
    "Q4_1": QuantizedType(4, 20, _q4_1),
    "Q5_0": QuantizedType(5, 22, _q5_0),
    "Q5_1": QuantizedType(5, 24, _q5_1),
    "Q8_0": QuantizedType(8, 34, _q8_0),
    "Q4_K": QuantizedType(4, 144, _q4_k),
    "Q5_K": QuantizedType(5, 176, _q5_k),
    "Q2_K": QuantizedType(2, 84, _q2_k, SMALL_GROUP_SIZE),
    "Q3_K": QuantizedType(3, 110, _q3_k, SMALL_GROUP_SIZE),
    "Q6_K": QuantizedType(6, 210, _q6_k, SMALL_GROUP_SIZE),
    "MXFP4": QuantizedType(4, 17, _mxfp4, mode="mxfp4"),
}
