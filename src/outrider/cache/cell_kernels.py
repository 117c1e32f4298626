"""A GPU kernel that quantises keys and values: one launch for both, where MLX's operations take a dozen.

    a vector of DIM numbers -> its codes, then the scales and the biases of its groups  (cell_format.py)

A group of lanes has one vector, and each lane one word of codes or several. The bias is the lowest number of
its group, and the steps reach its highest one, although they are rounded: a number is off by half a step at
most. Numbers that are not finite make their group's bias NaN.
"""

from __future__ import annotations

from functools import cache

import mlx.core as mx

from outrider import gpu_kernels
from outrider.gpu_kernels import LANES, GpuKernel

PRECISION = {mx.bfloat16: 7, mx.float16: 10, mx.float32: 23}  # bits of a number after its first one

# The vector that a group of lanes has, and its number `d`: of `first` if group_z is 0, else of `second`.
PLACE = """
    const int num_heads = first_shape[1], width = first_shape[2];
    const int row = group_y / (num_heads * width), head = group_y / width % num_heads;
    const int token = group_y % width;
"""
NUMBER = """(group_z == 0 ? (float)first[row * first_strides[0] + head * first_strides[1]
                                 + token * first_strides[2] + d * first_strides[3]]
                  : (float)second[row * second_strides[0] + head * second_strides[1]
                                  + token * second_strides[2] + d * second_strides[3]])"""
SIZES = """
    constexpr int IN_WORD = 32 / BITS, WORDS = DIM / IN_WORD, PER_LANE = WORDS > 32 ? WORDS / 32 : 1;
    constexpr int NUMBERS = PER_LANE * IN_WORD, LANES_OF_GROUP = GROUP_SIZE / NUMBERS;
    constexpr int NUM_GROUPS = DIM / GROUP_SIZE, ROW_WORDS = WORDS + NUM_GROUPS * sizeof(FIRST_TYPE) / 2;
    constexpr float MOST = (1 << BITS) - 1, ROUNDING = 1.0f / (1 << PRECISION);
"""
# Quantises the vector into the words from `to` on, if `is_written`.
QUANTISE = """
    const bool is_used = lane * PER_LANE < WORDS;
    float x[NUMBERS];
    #pragma unroll
    for (int i = 0; i < NUMBERS; ++i) {
        const int d = is_used ? lane * NUMBERS + i : 0;
        x[i] = NUMBER_D;
    }
    float lowest = x[0], highest = x[0], not_finite = 0;
    #pragma unroll
    for (int i = 0; i < NUMBERS; ++i) {
        lowest = x[i] < lowest ? x[i] : lowest;
        highest = x[i] > highest ? x[i] : highest;
        not_finite += x[i] * 0.0f;
    }
    #pragma unroll
    for (int step = 1; step < LANES_OF_GROUP; step *= 2) {
        const float low = SHUFFLE(lowest, lane ^ step), high = SHUFFLE(highest, lane ^ step);
        lowest = low < lowest ? low : lowest;
        highest = high > highest ? high : highest;
        not_finite += SHUFFLE(not_finite, lane ^ step);
    }
    const float scale = (float)(FIRST_TYPE)((highest - lowest) / MOST * (1.0f + ROUNDING));
    if (is_used && is_written) {
        #pragma unroll
        for (int w = 0; w < PER_LANE; ++w) {
            uint32_t word = 0;
            #pragma unroll
            for (int i = 0; i < IN_WORD; ++i) {
                const float found = scale > 0 ? (x[w * IN_WORD + i] - lowest) / scale + 0.5f : 0.0f;
                word |= (uint32_t)(found < MOST ? found : MOST) << (BITS * i);
            }
            to[lane * PER_LANE + w] = word;
        }
        if (lane % LANES_OF_GROUP == 0) {
            DEVICE FIRST_TYPE* numbers = (DEVICE FIRST_TYPE*)(to + WORDS);
            numbers[lane / LANES_OF_GROUP] = (FIRST_TYPE)scale;
            numbers[NUM_GROUPS + lane / LANES_OF_GROUP] = (FIRST_TYPE)(lowest + not_finite);
        }
    }
""".replace("NUMBER_D", NUMBER)
_TO_OUTPUTS = """
    constexpr bool is_written = true;
    DEVICE uint32_t* to = (group_z == 0 ? first_out : second_out) + (size_t)group_y * ROW_WORDS;
"""
ENCODE = GpuKernel(
    "encode_cells",
    ("first", "second"),
    ("first_out", "second_out"),
    PLACE + SIZES + _TO_OUTPUTS + QUANTISE,
    strided=("first", "second"),
)


def encode(first: mx.array, second: mx.array, bits: int, group_size: int) -> tuple[mx.array, mx.array]:
    """Two arrays of one shape and dtype.  [rows, heads, width, dim] -> [rows, heads, width, words]"""
    *outer, dim = first.shape
    words = dim * bits // 32 + dim // group_size * first.dtype.size // 2
    num = outer[0] * outer[1] * outer[2]
    sizes = constants(dim, bits, group_size, first.dtype)
    out = ((*outer, words), mx.uint32)
    found = gpu_kernels.run(ENCODE, [first, second], sizes, (num, 2), [out, out])
    return found[0], found[1]


def constants(dim: int, bits: int, group_size: int, dtype: mx.Dtype) -> dict[str, int | mx.Dtype]:
    """What `SIZES` and `QUANTISE` need."""
    return {"DIM": dim, "BITS": bits, "GROUP_SIZE": group_size, "PRECISION": PRECISION[dtype]}


def supports(dim: int, bits: int, group_size: int, dtype: mx.Dtype) -> bool:
    words = dim * bits // 32
    return (words <= LANES or words in (2 * LANES, 4 * LANES)) and _agrees(dim, bits, group_size, dtype)


@cache
def _agrees(dim: int, bits: int, group_size: int, dtype: mx.Dtype) -> bool:
    """True if the kernel can be built on this device and its numbers are off by half a step at most."""
    return gpu_kernels.is_close(lambda: _largest_error(dim, bits, group_size, dtype), "cell-quantising", 0.51)


def _largest_error(dim: int, bits: int, group_size: int, dtype: mx.Dtype) -> float:
    """In steps. Infinite if a group with infinity is not made NaN, or another one is."""
    keys = mx.random.split(mx.random.key(0), 2)
    first = (mx.random.normal((2, 3, 2, dim), key=keys[0]) + 5).astype(dtype)
    second = mx.random.normal((2, 2, 3, dim), key=keys[1]).astype(dtype).swapaxes(1, 2)
    second[1, 1, 1, -1] = mx.inf
    errors = []
    for vectors, packed in zip((first, second), encode(first, second, bits, group_size), strict=True):
        codes, scales, biases = unpacked(packed, dim, bits, group_size, dtype)
        want = mx.zeros(biases.shape, mx.bool_)
        if vectors is second:
            want[1, 1, 1, -1] = True
        if not mx.array_equal(mx.isnan(biases), want):
            return float("inf")
        scales, biases = scales.astype(mx.float32), biases.astype(mx.float32)
        decoded = mx.dequantize(codes, scales, biases, group_size=group_size, bits=bits)
        off = mx.abs(decoded - vectors.astype(mx.float32)).reshape(*scales.shape, group_size).max(axis=-1)
        errors.append(mx.where(want, 0, off / scales).max())
    return float(mx.stack(errors).max())


def unpacked(
    packed: mx.array, dim: int, bits: int, group_size: int, dtype: mx.Dtype
) -> tuple[mx.array, mx.array, mx.array]:
    """Codes, scales and biases."""
    num_words, num_groups = dim * bits // 32, dim // group_size
    numbers = mx.contiguous(packed[..., num_words:]).view(dtype)
    return mx.contiguous(packed[..., :num_words]), numbers[..., :num_groups], numbers[..., num_groups:]
