"""Quantised matmuls of few tokens as CUDA kernels: each weight is read once, for all tokens together.

For fewer than 8 tokens MLX's CUDA backend reads the weights once for each token. For more tokens, it uses few
of the processors if a layer has few outputs. Measured (H200, MLX 0.32.4, bfloat16, 4 bits in groups of 64,
each kernel alone, in us; the inputs of MLX's kernels were flat, [tokens, inputs]):

    inputs -> outputs      5120 -> 34816           17408 -> 5120
    tokens              1    8    16   64       1    8    16   64
    MLX                 100  119  119  262      56   225  229  339
    this module         54   58   76   179      32   34   50   101

A block of eight (or four) warps computes 16 or 32 outputs of up to 8, 16 or 32 tokens. The inputs are divided
into eight parts, and the sums of the parts are added in a fixed order. So a token's result is the same to the
last bit, whatever the number of tokens.

The tensor cores multiply [16 outputs, 16 inputs] by [16 inputs, 8 tokens], and the four lanes of an output
hold four of the 16 inputs each. Which inputs these are is free, as long as weights and tokens agree:

    inputs of a group   0 ............ G/4 | ............ G/2 | ............ 3G/4 | ............ G
    read by lane        0                  | 1                | 2                 | 3

So a lane reads its weights and its inputs as whole vectors. Weights stay integers: with w = scale * q + bias
the sum over a group is scale * sum(q * x) + bias * sum(x), and sum(x) is one more product, with weights of 1.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache

import mlx.core as mx
import mlx.nn as nn

from outrider import gpu_kernels
from outrider.gpu_kernels import GpuKernel
from outrider.models.tensor_cores import MULTIPLY

MAX_TOKENS = 128  # measured: for 256 tokens MLX's kernels are as fast
FORMATS = {(4, 32), (4, 64), (4, 128), (8, 32), (8, 64)}  # bits and group size
STEP_BYTES = 128  # of weights of an output that a warp reads at once
ROW_BYTES = STEP_BYTES + 32  # the same in shared memory, with scales and biases: lanes use different banks
PARTS = 8  # of the inputs, each added up by itself
STAGES = 2  # steps whose weights are being copied; measured: 3 and 4 are not faster
_TOLERANCE = {mx.bfloat16: 2e-2, mx.float16: 5e-3}  # absolute, for results up to 4: rounding to this type

_PTX = (
    MULTIPLY
    + """
    extern __shared__ __align__(16) unsigned char memory[];
    auto start_copy = [](void* to, const void* from) {  // of 16 bytes of weights: no other block reads them
        const uint32_t at = (uint32_t)__cvta_generic_to_shared(to);
        asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" ::"r"(at), "l"(from) : "memory");
    };
    auto start_copy_of_factors = [](void* to, const void* from) {
        const uint32_t at = (uint32_t)__cvta_generic_to_shared(to);
        asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(at), "l"(from), "n"(2 * GROUPS)
                     : "memory");
    };
    auto end_of_copies = []() { asm volatile("cp.async.commit_group;" ::: "memory"); };
    auto wait_for_oldest_copies = []() {
        asm volatile("cp.async.wait_group %0;" ::"n"(STAGES - 1) : "memory");
        __syncwarp();
    };
"""
)

_BODY = """
    constexpr int PAIRS = GROUP_SIZE / 8;  // of inputs of a group that one lane reads
    constexpr int WORD_PAIRS = 16 / BITS;  // of weights in a word
    constexpr int ROWS = 16 * ROW_TILES, TOKENS = 8 * TOKEN_TILES;  // of a block
    // Numbers in pairs of 16 bits. MAGIC with the bits of a weight q in its last places is OFFSET + q. (A
    // bfloat16 has no place for an offset and a q of 8 bits.)
    constexpr uint32_t ONES = IS_BFLOAT ? 0x3f803f80 : 0x3c003c00;
    constexpr uint32_t MAGIC = IS_BFLOAT ? 0x43004300 : 0x64006400;
    constexpr float OFFSET = !IS_BFLOAT ? 1024 : BITS == 4 ? 128 : 0;
    const int warp = group_y % WARPS, first_row = group_y / WARPS * ROWS;
    const int num_inputs = x_shape[1], num_groups = num_inputs / GROUP_SIZE, num_steps = num_groups / GROUPS;
    const int eighth = lane / 4, quarter = lane % 4;

    // Part p of the inputs: the steps p, p + PARTS, ... A warp computes one part, or one after the other two.
    auto num_steps_of = [&](int part) { return (num_steps - part + PARTS - 1) / PARTS; };
    const int num_first = num_steps_of(warp);
    const int num_all = num_first + (WARPS < PARTS ? num_steps_of(warp + WARPS) : 0);
    auto step_of = [&](int k) {
        return k < num_first ? warp + k * PARTS : warp + WARPS + (k - num_first) * PARTS;
    };

    unsigned char* const own_memory = memory + warp * STAGES * ROWS * ROW_BYTES;
    auto of_row = [&](int row) {
        return expert * num_rows + (first_row + row < num_rows ? first_row + row : num_rows - 1);
    };
    auto copy_step = [&](int k, int stage) {
        unsigned char* const to = own_memory + stage * ROWS * ROW_BYTES;
        if (k < num_all) {
            const int step = step_of(k);
            #pragma unroll
            for (int j = lane; j < 8 * ROWS; j += 32) {
                const int64_t at = (of_row(j / 8) * num_steps + step) * STEP_BYTES + j % 8 * 16;
                start_copy(to + j / 8 * ROW_BYTES + j % 8 * 16, (const unsigned char*)weight + at);
            }
            #pragma unroll
            for (int j = lane; j < 2 * ROWS; j += 32) {
                const int64_t at = of_row(j % ROWS) * num_groups + step * GROUPS;
                unsigned char* const row = to + j % ROWS * ROW_BYTES;
                start_copy_of_factors(row + (j < ROWS ? SCALES : BIASES), (j < ROWS ? scales : biases) + at);
            }
        }
        end_of_copies();
    };
    struct alignas(4 * WORDS) Words { uint32_t word[WORDS]; };

    using Sums = float[TOKENS][ROWS + 4];  // four more: lanes write to different banks
    Sums* const last_sums = (Sums*)memory;  // of the last WARPS parts, when no weights are in the memory
    Sums* const first_sums = (Sums*)(memory + WARPS * STAGES * ROWS * ROW_BYTES);  // of the parts before
    float sums[ROW_TILES][TOKEN_TILES][4] = {};
    auto put_sums = [&](Sums& to) {
        #pragma unroll
        for (int r = 0; r < ROW_TILES; ++r)
            #pragma unroll
            for (int n = 0; n < TOKEN_TILES; ++n)
                #pragma unroll
                for (int i = 0; i < 4; ++i) {
                    to[8 * n + 2 * quarter + i % 2][16 * r + eighth + 8 * (i / 2)] = sums[r][n][i];
                    sums[r][n][i] = 0;
                }
    };
    for (int stage = 0; stage < STAGES; ++stage) copy_step(stage, stage);
    int stage = 0;
    for (int k = 0; k < num_all; ++k) {
        if (WARPS < PARTS && k == num_first) put_sums(first_sums[warp]);
        const int step = step_of(k);
        wait_for_oldest_copies();
        const unsigned char* const own_rows = own_memory + (stage * ROWS + eighth) * ROW_BYTES;
        #pragma unroll 1
        for (int i = 0; i < GROUPS; ++i) {
            Words words[2 * ROW_TILES];
            #pragma unroll
            for (int r = 0; r < 2 * ROW_TILES; ++r)
                words[r] = ((const Words*)(own_rows + 8 * r * ROW_BYTES))[4 * i + quarter];
            uint32_t inputs[TOKEN_TILES][PAIRS];
            #pragma unroll
            for (int n = 0; n < TOKEN_TILES; ++n) {
                const int token = 8 * n + eighth;
                const int at = (step * GROUPS + i) * GROUP_SIZE + quarter * (GROUP_SIZE / 4);
                const uint4* from = (const uint4*)(x + (int64_t)(first_input + token) * num_inputs + at);
                #pragma unroll
                for (int j = 0; j < PAIRS / 4; ++j) {
                    const uint4 some = token < num_tokens ? from[j] : uint4{0, 0, 0, 0};
                    inputs[n][4 * j] = some.x;
                    inputs[n][4 * j + 1] = some.y;
                    inputs[n][4 * j + 2] = some.z;
                    inputs[n][4 * j + 3] = some.w;
                }
            }
            float dots[ROW_TILES][TOKEN_TILES][4] = {}, totals[TOKEN_TILES][4] = {};
            #pragma unroll
            for (int word = 0; word < WORDS; ++word) {
                uint32_t b[TOKEN_TILES][WORD_PAIRS];
                #pragma unroll
                for (int n = 0; n < TOKEN_TILES; ++n) {
                    const uint32_t* own = inputs[n] + word * WORD_PAIRS;
                    if constexpr (BITS == 4) {  // paired as in a word: 0 and 4, 1 and 5, 2 and 6, 3 and 7
                        b[n][0] = __byte_perm(own[0], own[2], 0x5410);
                        b[n][1] = __byte_perm(own[0], own[2], 0x7632);
                        b[n][2] = __byte_perm(own[1], own[3], 0x5410);
                        b[n][3] = __byte_perm(own[1], own[3], 0x7632);
                    } else {
                        b[n][0] = own[0];
                        b[n][1] = own[1];
                    }
                    #pragma unroll
                    for (int p = 0; p < WORD_PAIRS; p += 2)
                        multiply(totals[n], {ONES, ONES, ONES, ONES}, b[n][p], b[n][p + 1]);
                }
                #pragma unroll
                for (int r = 0; r < ROW_TILES; ++r) {
                    uint32_t a[2][WORD_PAIRS];
                    #pragma unroll
                    for (int half = 0; half < 2; ++half) {
                        const uint32_t packed = words[2 * r + half].word[word];
                        #pragma unroll
                        for (int p = 0; p < WORD_PAIRS; ++p) {
                            if constexpr (BITS == 4) {
                                a[half][p] = ((packed >> (4 * p)) & 0x000f000f) | MAGIC;
                            } else if constexpr (!IS_BFLOAT) {
                                a[half][p] = __byte_perm(packed, MAGIC, p ? 0x7372 : 0x7170);
                            } else {  // the last byte of 2**23 + q is q; the upper half of q has all of q
                                const uint32_t low = __byte_perm(packed, 0x4b000000, 0x7440 + 2 * p);
                                const uint32_t high = __byte_perm(packed, 0x4b000000, 0x7441 + 2 * p);
                                a[half][p] = __byte_perm(
                                    __float_as_uint(__uint_as_float(low) - 8388608.0f),
                                    __float_as_uint(__uint_as_float(high) - 8388608.0f), 0x7632);
                            }
                        }
                    }
                    #pragma unroll
                    for (int p = 0; p < WORD_PAIRS; p += 2)
                        #pragma unroll
                        for (int n = 0; n < TOKEN_TILES; ++n)
                            multiply(dots[r][n], {a[0][p], a[1][p], a[0][p + 1], a[1][p + 1]}, b[n][p],
                                     b[n][p + 1]);
                }
            }
            #pragma unroll
            for (int r = 0; r < 2 * ROW_TILES; ++r) {
                const unsigned char* const row = own_rows + 8 * r * ROW_BYTES;
                const float scale = (float)((const X_TYPE*)(row + SCALES))[i];
                const float bias = (float)((const X_TYPE*)(row + BIASES))[i];
                #pragma unroll
                for (int n = 0; n < TOKEN_TILES; ++n)
                    #pragma unroll
                    for (int t = 0; t < 2; ++t) {
                        float& sum = sums[r / 2][n][2 * (r % 2) + t];
                        const float dot = fmaf(-OFFSET, totals[n][t], dots[r / 2][n][2 * (r % 2) + t]);
                        sum = fmaf(scale, dot, fmaf(bias, totals[n][t], sum));
                    }
            }
        }
        __syncwarp();  // all lanes have read the stage
        copy_step(k + STAGES, stage);
        stage = stage + 1 < STAGES ? stage + 1 : 0;
    }

    if (WARPS < PARTS && num_all == num_first) put_sums(first_sums[warp]);
    __syncthreads();
    put_sums(last_sums[warp]);
    __syncthreads();
    for (int i = lane; i < ROWS * TOKENS && warp == WARPS - 1; i += 32) {
        const int row = i % ROWS, token = i / ROWS;
        if (token < num_tokens && first_row + row < num_rows) {
            float total = 0;
            for (int p = 0; p < PARTS - WARPS; ++p) total += first_sums[p][token][row];
            for (int p = 0; p < WARPS; ++p) total += last_sums[p][token][row];
            out[(int64_t)(first_output + token) * num_rows + first_row + row] = (OUT_TYPE)total;
        }
    }
"""

_ALL_TOKENS = """
    const int num_rows = weight_shape[0], first_input = group_z * 8 * TOKEN_TILES, first_output = first_input;
    const int num_left = x_shape[0] - first_input;
    const int num_tokens = num_left < 8 * TOKEN_TILES ? num_left : 8 * TOKEN_TILES;
    const int64_t expert = 0;
"""
_ONE_TOKEN_OF_AN_EXPERT = """
    const int num_rows = weight_shape[1], num_tokens = 1, first_output = group_z;
    const int first_input = group_z / (experts_shape[0] / x_shape[0]);
    const int64_t expert = experts[group_z];
"""


@dataclass(frozen=True)
class Variant:
    """A kernel whose blocks compute `rows` outputs of `tokens` tokens."""

    kernel: GpuKernel
    rows: int
    tokens: int


def _variant(name: str, which: str, tokens: int, rows: int, warps: int, parts: int = PARTS) -> Variant:
    constants = f"""
    constexpr int ROW_TILES = {rows // 16}, TOKEN_TILES = {tokens // 8};
    constexpr int WARPS = {warps}, PARTS = {parts}, STAGES = {STAGES};
    constexpr int STEP_BYTES = {STEP_BYTES}, ROW_BYTES = {ROW_BYTES};
    constexpr int SCALES = STEP_BYTES, BIASES = SCALES + 16;  // where they are in a row in shared memory
    constexpr int WORDS = GROUP_SIZE * BITS / 128;  // of weights of a group that one lane reads
    constexpr int GROUPS = STEP_BYTES / (16 * WORDS);  // of a step
    """
    inputs = ("x", "weight", "scales", "biases")
    kernel = GpuKernel(
        name,
        (*inputs, "experts") if "experts" in which else inputs,
        ("out",),
        constants + _PTX + which + _BODY,
        groups_per_block=warps,
        shared_bytes=warps * STAGES * rows * ROW_BYTES + (parts - warps) * tokens * (rows + 4) * 4,
    )
    return Variant(kernel, rows, tokens)


# Rows and warps: the fastest of those that were measured. Layers with few outputs need many warps in a block.
DENSE = (
    _variant("qmm_8", _ALL_TOKENS, tokens=8, rows=16, warps=8),
    _variant("qmm_16", _ALL_TOKENS, tokens=16, rows=32, warps=8),
    _variant("qmm_32", _ALL_TOKENS, tokens=32, rows=32, warps=4),
)
GATHERED = _variant("gather_qmm", _ONE_TOKEN_OF_AN_EXPERT, tokens=8, rows=32, warps=4, parts=4)


def supports(layer: nn.Module) -> bool:
    """True if the kernels can compute with the weights of a quantised layer on this device.

    Otherwise, for instance for 5 or 6 bits, MLX's own kernels are used.
    """
    return (
        is_available()
        and layer.mode == "affine"
        and (layer.bits, layer.group_size) in FORMATS
        and layer.scales.dtype in _TOLERANCE
        and layer.scales.shape[-1] * layer.group_size * layer.bits % (8 * STEP_BYTES) == 0
        and _agrees(layer.bits, layer.group_size, layer.scales.dtype, layer.weight.ndim == 3)
    )


def is_available() -> bool:
    return gpu_kernels.is_available() and mx.cuda.is_available()


def matmul(x: mx.array, layer: nn.Module) -> mx.array:
    """x [tokens, inputs] -> [tokens, outputs]"""
    num = len(x)
    variant = next((one for one in DENSE if num <= one.tokens), DENSE[-1])
    return _run(variant, [x, *_weights(layer)], layer, -(-num // variant.tokens), num)


def gather_matmul(x: mx.array, experts: mx.array, layer: nn.Module) -> mx.array:
    """Each token times the weights of its n experts, in their order.

    x [tokens, inputs], experts [tokens * n] -> [tokens * n, outputs]
    """
    num = len(experts)
    return _run(GATHERED, [x, *_weights(layer), experts], layer, num, num)


def _run(
    variant: Variant, inputs: list[mx.array], layer: nn.Module, num_blocks: int, num_results: int
) -> mx.array:
    """`num_blocks`: blocks for the same outputs and other tokens."""
    kernel, x, num_rows = variant.kernel, inputs[0], layer.weight.shape[-2]
    constants = {
        "BITS": layer.bits,
        "GROUP_SIZE": layer.group_size,
        "IS_BFLOAT": int(x.dtype == mx.bfloat16),
    }
    groups = -(-num_rows // variant.rows) * kernel.groups_per_block, num_blocks
    (out,) = gpu_kernels.run(kernel, inputs, constants, groups, [((num_results, num_rows), x.dtype)])
    return out


def _weights(layer: nn.Module) -> tuple[mx.array, mx.array, mx.array]:
    return layer.weight, layer.scales, layer.biases


@cache
def _agrees(bits: int, group_size: int, dtype: mx.Dtype, has_experts: bool) -> bool:
    """True if the kernels give what the dequantised weights give, for this format, on this device."""
    return gpu_kernels.is_close(
        lambda: _largest_error(bits, group_size, dtype, has_experts), "quantised-matmul", _TOLERANCE[dtype]
    )


def _largest_error(bits: int, group_size: int, dtype: mx.Dtype, has_experts: bool) -> float:
    """Of all variants, on a small layer. Infinite if a token's result depends on the others."""
    num_inputs = (PARTS + 1) * 8 * STEP_BYTES // bits  # two steps of the first part, one of the others
    keys = mx.random.split(mx.random.key(0), 2)
    x = mx.random.normal((40, num_inputs), key=keys[0]).astype(dtype)
    shape = (3, 40, num_inputs) if has_experts else (40, num_inputs)
    layer = _random_layer(shape, bits, group_size, dtype, keys[1])
    exact = x.astype(mx.float32) @ _dequantized(layer).swapaxes(-1, -2)  # [tokens, outputs] of each expert
    if has_experts:
        experts = mx.array([2, 0, 1, 1, 0, 2, 2, 1], mx.uint32)
        got, want = gather_matmul(x[:4], experts, layer), exact[experts, mx.arange(8) // 2]
        return float(mx.abs(got - want).max())
    outputs = [matmul(x[:num], layer) for num in (1, 8, 11, 40)]
    if not all(mx.array_equal(some, outputs[-1][: len(some)]) for some in outputs):
        return math.inf
    return float(mx.abs(outputs[-1] - exact).max())


def _random_layer(
    shape: tuple[int, ...], bits: int, group_size: int, dtype: mx.Dtype, key: mx.array
) -> nn.Module:
    layer = nn.Module()
    layer.bits, layer.group_size, layer.mode = bits, group_size, "affine"
    weight = mx.random.normal(shape, key=key, scale=shape[-1] ** -0.5).astype(dtype)
    layer.weight, layer.scales, layer.biases = mx.quantize(weight, group_size, bits)
    return layer


def _dequantized(layer: nn.Module) -> mx.array:
    weight, *others = _weights(layer)
    scales, biases = (one.astype(mx.float32) for one in others)
    return mx.dequantize(weight, scales, biases, layer.group_size, layer.bits)
