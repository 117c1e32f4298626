"""Reading one tensor of a GGUF file: its stored blocks become arrays in MLX's own forms.

Owns the block layouts. Must not know names or models. MLX can load GGUF files itself, but release 0.32
reads Q4_K wrongly and drops types it does not know, both without a word; so the bytes are read here.

Most types are affine in groups of 32, w = scale * code + bias, which is MLX's quantised form. Those whose
scales are float16 in the file (Q4_0 to Q8_0) keep every bit. The scales of K-quants are products; they are
rounded to float16. Q6_K has groups of 16, which MLX lacks, and becomes plain float16.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from outrider.models.errors import UnreadableGGUF
from outrider.models.gguf.header import TENSOR_TYPES, TensorInfo

GROUP_SIZE = 32

Bytes = NDArray[Any]  # uint8 [blocks, bytes of a block]
Floats = NDArray[Any]  # float32


@dataclass(frozen=True)
class Groups:
    """Groups of 32 weights: w = scale * code + bias."""

    codes: Bytes  # [..., 32]
    scales: Floats  # [...]
    biases: Floats  # [...]


@dataclass(frozen=True)
class AffineType:
    bits: int
    read: Callable[[Bytes], Groups]


def read_tensor(path: Path, info: TensorInfo) -> dict[str, mx.array]:
    """The parts of a tensor as a module names them: `weight`; if quantised, `scales` and `biases` too."""
    raw = np.memmap(path, dtype=np.uint8, mode="r", offset=info.position, shape=(info.num_bytes,))
    if info.type_name in PLAIN_TYPES:
        return {"weight": PLAIN_TYPES[info.type_name](raw).reshape(info.shape)}
    blocks = raw.reshape(-1, TENSOR_TYPES[info.type_id].block_bytes)
    if info.type_name == "Q6_K":
        return {"weight": mx.array(_half(_q6_k(blocks), info)).reshape(info.shape)}
    kind = AFFINE_TYPES[info.type_name]
    groups = kind.read(blocks)
    num_rows = info.shape[0]
    return {
        "weight": mx.array(pack(groups.codes, kind.bits).reshape(num_rows, -1)),
        "scales": mx.array(_half(groups.scales, info).reshape(num_rows, -1)),
        "biases": mx.array(_half(groups.biases, info).reshape(num_rows, -1)),
    }


def pack(codes: Bytes, bits: int) -> NDArray[np.uint32]:
    """MLX's packing: one stream of bits, the lowest bit of the first code first."""
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
        raise UnreadableGGUF(
            f"Tensor {info.name} has numbers that do not fit into float16; the file is damaged."
        )
    return half


def _floats(raw: Bytes) -> Floats:
    """[blocks, 2n] bytes of float16 as [blocks, n] numbers."""
    return np.ascontiguousarray(raw).view(np.float16).astype(np.float32)


def _nibbles(raw: Bytes) -> Bytes:
    """All low halves, then all high halves: the order of the weights in every 4-bit type."""
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
    """Bit i of four bytes belongs to weight i."""
    return np.unpackbits(raw, axis=-1, bitorder="little") << 4


def _q8_0(raw: Bytes) -> Groups:
    scales = _floats(raw[:, :2])
    return Groups(raw[:, 2:] ^ 128, scales, -128 * scales)  # a signed byte plus 128


def _q4_k(raw: Bytes) -> Groups:
    codes = _nibbles(raw[:, 16:].reshape(-1, 4, 32))
    return _k_groups(raw, codes.reshape(-1, 8, 32))


def _q5_k(raw: Bytes) -> Groups:
    """Byte l of 32 holds the fifth bits of weight l in each of the eight groups."""
    codes = _nibbles(raw[:, 48:].reshape(-1, 4, 32)).reshape(-1, 8, 32)
    fifth = np.unpackbits(raw[:, None, 16:48], axis=1, bitorder="little")
    return _k_groups(raw, codes | (fifth << 4))


def _k_groups(raw: Bytes, codes: Bytes) -> Groups:
    """Eight groups share two float16 factors, for their 6-bit scales and for their 6-bit minima."""
    factors = _floats(raw[:, :4])
    scales, minima = _six_bit_pairs(raw[:, 4:16])
    return Groups(codes, factors[:, :1] * scales, -factors[:, 1:] * minima)


def _six_bit_pairs(packed: Bytes) -> tuple[Bytes, Bytes]:
    """Twelve bytes s m h of four: six bits of s and m are groups 0 to 3; groups 4 to 7 have their
    low four bits in h (scale low, minimum high) and their top two in the top of s and m."""
    s, m, h = packed[:, :4], packed[:, 4:8], packed[:, 8:]
    scales = np.concatenate([s & 63, (h & 15) | (s >> 6 << 4)], axis=-1)
    minima = np.concatenate([m & 63, (h >> 4) | (m >> 6 << 4)], axis=-1)
    return scales, minima


def _q6_k(raw: Bytes) -> Floats:
    """Two halves of 128 weights: 64 bytes of low nibbles, 32 bytes of four 2-bit tops; 16 signed scales."""
    low = _nibbles(raw[:, :128].reshape(-1, 2, 64)).reshape(-1, 2, 4, 32)
    tops = raw[:, 128:192].reshape(-1, 2, 1, 32) >> np.array([0, 2, 4, 6], np.uint8).reshape(4, 1)
    codes = (low | ((tops & 3) << 4)).reshape(-1, 16, 16).astype(np.float32) - 32
    scales = _floats(raw[:, 208:210]) * np.ascontiguousarray(raw[:, 192:208]).view(np.int8)
    return codes * scales[..., None]


PLAIN_TYPES: Mapping[str, Callable[[Bytes], mx.array]] = {
    "F32": lambda raw: mx.array(raw.view(np.float32)),
    "F16": lambda raw: mx.array(raw.view(np.float16)),
    "BF16": lambda raw: mx.array(raw.view(np.uint16)).view(mx.bfloat16),
}
AFFINE_TYPES: Mapping[str, AffineType] = {
    "Q4_0": AffineType(4, _q4_0),
    "Q4_1": AffineType(4, _q4_1),
    "Q5_0": AffineType(5, _q5_0),
    "Q5_1": AffineType(5, _q5_1),
    "Q8_0": AffineType(8, _q8_0),
    "Q4_K": AffineType(4, _q4_k),
    "Q5_K": AffineType(5, _q5_k),
}
READ_TYPES = (*PLAIN_TYPES, *AFFINE_TYPES, "Q6_K")
