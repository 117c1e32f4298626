"""Quantised matmuls of few tokens as CUDA kernels: each weight is read once, for all tokens together.

For fewer than 8 tokens MLX's CUDA backend computes vector products, which read the weights once for each token.
Measured (H200, MLX 0.32.4, bfloat16, 4 bits in groups of 64), the matmuls of one layer of a 27B model, in ms:

    tokens        1      2      8      16     24     32     64
    MLX, flat     0.222  0.427  0.192  0.194  0.301  0.305  0.361
    this kernel   0.122  0.122  0.128  0.182  0.205  0.205  0.379

A block of four warps computes 16 (or 32) outputs of up to 8 (or 32) tokens. The warps take turns along the
inputs, and their sums are added in a fixed order. So a token's result does not depend on the other tokens: it is
the same to the last bit for 1 to MAX_TOKENS tokens.

The tensor cores multiply [16 outputs, 16 inputs] by [16 inputs, 8 tokens], and the four lanes of a row hold four
of the 16 inputs each. Which inputs these are is free, as long as weights and tokens agree:

    inputs of a group   0 ............ G/4 | ............ G/2 | ............ 3G/4 | ............ G
    read by lane        0                  | 1                | 2                 | 3

So a lane reads its weights and its inputs as whole vectors. Weights stay integers: with w = scale * q + bias the
sum over a group is scale * sum(q * x) + bias * sum(x), and sum(x) is one more product, with weights of 1.
"""

from __future__ import annotations

import math
from functools import cache

import mlx.core as mx
import mlx.nn as nn

from outrider.models import gpu_kernels
from outrider.models.gpu_kernels import GpuKernel

MAX_TOKENS = 32  # measured: for 64 tokens MLX's kernel is as fast
WARPS = 4  # of a block, as in gpu_kernels; measured: 8 are slower
STEP_BITS = 1024  # of weights of an output that a warp reads at once
FORMATS = {(4, 32), (4, 64), (4, 128), (8, 32), (8, 64)}  # bits and group size
_TOLERANCE = {mx.bfloat16: 2e-2, mx.float16: 2e-3}  # absolute, for results around 1: rounding to this type

_PTX = """
    auto multiply = [](float (&sums)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
        if constexpr (IS_BFLOAT)
            asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
                "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
                : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
        else
            asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
                "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
                : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
    };
    auto start_copy = [](void* to, const void* from) {  // of 16 bytes of weights: nobody reads them again
        const uint32_t at = (uint32_t)__cvta_generic_to_shared(to);
        asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" ::"r"(at), "l"(from) : "memory");
    };
    auto start_copy_of_factors = [](void* to, const void* from) {
        const uint32_t at = (uint32_t)__cvta_generic_to_shared(to);
        asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(at), "l"(from), "n"(2 * GROUPS) : "memory");
    };
    auto end_of_copies = []() { asm volatile("cp.async.commit_group;" ::: "memory"); };
    auto wait_for_oldest_copies = []() {
        asm volatile("cp.async.wait_group %0;" ::"n"(STAGES - 1) : "memory");
        __syncwarp();
    };
"""

_BODY = """
    constexpr int PAIRS = GROUP_SIZE / 8;  // of inputs of a group that one lane reads
    constexpr int WORD_PAIRS = 16 / BITS;  // of weights in a word
    constexpr int ROWS = 16 * ROW_TILES, TOKENS = 8 * TOKEN_TILES;  // of a block
    // Numbers in pairs of 16 bits. OFFSET + q is MAGIC with the bits of q in its last places; 8 bits of a
    // bfloat16 are too few for an offset.
    constexpr uint32_t ONES = IS_BFLOAT ? 0x3f803f80 : 0x3c003c00, MAGIC = IS_BFLOAT ? 0x43004300 : 0x64006400;
    constexpr float OFFSET = !IS_BFLOAT ? 1024 : BITS == 4 ? 128 : 0;
    const int warp = group_y % WARPS, first_row = group_y / WARPS * ROWS;
    const int num_inputs = x_shape[1], num_groups = num_inputs / GROUP_SIZE;
    const int num_steps = num_groups / GROUPS;
    const int eighth = lane / 4, quarter = lane % 4;

    alignas(16) __shared__ unsigned char memory[WARPS * STAGES * ROWS * PITCH];
    unsigned char* const own_memory = memory + warp * STAGES * ROWS * PITCH;
    auto of_row = [&](int row) {
        return expert * num_rows + (first_row + row < num_rows ? first_row + row : num_rows - 1);
    };
    auto copy_step = [&](int step, int stage) {
        unsigned char* const to = own_memory + stage * ROWS * PITCH;
        if (step < num_steps) {
            #pragma unroll
            for (int j = lane; j < 8 * ROWS; j += 32) {
                const int64_t at = of_row(j / 8) * num_steps + step;
                start_copy(to + j / 8 * PITCH + j % 8 * 16, (const unsigned char*)weight + at * STEP_BYTES + j % 8 * 16);
            }
            #pragma unroll
            for (int j = lane; j < 2 * ROWS; j += 32) {
                const int64_t at = of_row(j % ROWS) * num_groups + step * GROUPS;
                const bool is_scale = j < ROWS;
                start_copy_of_factors(
                    to + j % ROWS * PITCH + (is_scale ? SCALES : BIASES), is_scale ? scales + at : biases + at);
            }
        }
        end_of_copies();
    };
    struct alignas(4 * WORDS) Words { uint32_t word[WORDS]; };

    float sums[ROW_TILES][TOKEN_TILES][4] = {};
    for (int stage = 0; stage < STAGES; ++stage) copy_step(warp + stage * WARPS, stage);
    int stage = 0;
    for (int step = warp; step < num_steps; step += WARPS) {
        wait_for_oldest_copies();
        const unsigned char* const own_rows = own_memory + (stage * ROWS + eighth) * PITCH;
        #pragma unroll UNROLL
        for (int i = 0; i < GROUPS; ++i) {
            Words words[2 * ROW_TILES];
            #pragma unroll
            for (int r = 0; r < 2 * ROW_TILES; ++r)
                words[r] = ((const Words*)(own_rows + 8 * r * PITCH))[4 * i + quarter];
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
                    if constexpr (BITS == 4) {  // pairs as they come out of a word: 0 and 4, 1 and 5, 2 and 6, 3 and 7
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
                            } else {  // a float32 of 2**23 + q has q in its last byte; q itself fits into the upper half
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
                            multiply(
                                dots[r][n], {a[0][p], a[1][p], a[0][p + 1], a[1][p + 1]}, b[n][p], b[n][p + 1]);
                }
            }
            #pragma unroll
            for (int r = 0; r < 2 * ROW_TILES; ++r) {
                const unsigned char* const factors = own_rows + 8 * r * PITCH;
                const float by = (float)((const X_TYPE*)(factors + SCALES))[i];
                const float plus = (float)((const X_TYPE*)(factors + BIASES))[i];
                #pragma unroll
                for (int n = 0; n < TOKEN_TILES; ++n)
                    #pragma unroll
                    for (int t = 0; t < 2; ++t) {
                        float& sum = sums[r / 2][n][2 * (r % 2) + t];
                        const float dot = fmaf(-OFFSET, totals[n][t], dots[r / 2][n][2 * (r % 2) + t]);
                        sum = fmaf(by, dot, fmaf(plus, totals[n][t], sum));
                    }
            }
        }
        __syncwarp();  // all lanes have read the stage
        copy_step(step + STAGES * WARPS, stage);
        stage = stage + 1 < STAGES ? stage + 1 : 0;
    }

    __syncthreads();  // the sums of the warps take the place of the weights
    auto of_warp = (float (*)[TOKENS][ROWS + 4])memory;  // four more: no two lanes write to one bank
    #pragma unroll
    for (int r = 0; r < ROW_TILES; ++r)
        #pragma unroll
        for (int n = 0; n < TOKEN_TILES; ++n)
            #pragma unroll
            for (int i = 0; i < 4; ++i)
                of_warp[warp][8 * n + 2 * quarter + i % 2][16 * r + eighth + 8 * (i / 2)] = sums[r][n][i];
    __syncthreads();
    for (int i = lane; i < ROWS * TOKENS && warp == WARPS - 1; i += 32) {
        const int row = i % ROWS, token = i / ROWS;
        if (token < num_tokens && first_row + row < num_rows) {
            float total = 0;
            for (int w = 0; w < WARPS; ++w) total += of_warp[w][token][row];
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
_CONSTANTS = """
    constexpr int WORDS = GROUP_SIZE * BITS / 128;  // of weights of a group that one lane reads
    constexpr int STEP_BYTES = 128;  // of weights of a row that a warp reads at once
    constexpr int GROUPS = 8 / WORDS;  // in so many bytes
    constexpr int SCALES = STEP_BYTES, BIASES = SCALES + 16;  // where they are in a row in shared memory
    constexpr int PITCH = BIASES + 16;  // of these rows: the lanes that read them at once use different banks
"""
QMM = GpuKernel("qmm", ("x", "weight", "scales", "biases"), ("out",), _CONSTANTS + _PTX + _ALL_TOKENS + _BODY)
GATHER_QMM = GpuKernel(
    "gather_qmm",
    ("x", "weight", "scales", "biases", "experts"),
    ("out",),
    _CONSTANTS + _PTX + _ONE_TOKEN_OF_AN_EXPERT + _BODY,
)


def supports(layer: nn.Module) -> bool:
    """True if the kernels can compute with the weights of a quantised layer on this device.

    Otherwise, for instance for 5 or 6 bits, MLX's own kernels are used.
    """
    return (
        is_available()
        and layer.mode == "affine"
        and (layer.bits, layer.group_size) in FORMATS
        and layer.scales.dtype in _TOLERANCE
        and layer.scales.shape[-1] * layer.group_size * layer.bits % STEP_BITS == 0
        and _agrees(layer.bits, layer.group_size, layer.scales.dtype, layer.weight.ndim == 3)
    )


def is_available() -> bool:
    return gpu_kernels.is_available() and mx.cuda.is_available()


def matmul(x: mx.array, layer: nn.Module) -> mx.array:
    """x [tokens, inputs] -> [tokens, outputs]"""
    num_tiles = next(num for num in (1, 2, 4) if 8 * num >= min(len(x), MAX_TOKENS))
    row_tiles = 1 if num_tiles == 1 else 2  # measured
    return _run(
        QMM, [x, *_weights(layer)], layer, row_tiles, num_tiles, -(-len(x) // (8 * num_tiles)), len(x)
    )


def gather_matmul(x: mx.array, experts: mx.array, layer: nn.Module) -> mx.array:
    """Each input times the weights of its experts.  x [tokens, inputs], experts [tokens * n] -> [tokens * n, outputs]"""
    num_pairs = len(experts)
    return _run(GATHER_QMM, [x, *_weights(layer), experts], layer, 1, 1, num_pairs, num_pairs)


def _run(
    kernel: GpuKernel,
    inputs: list[mx.array],
    layer: nn.Module,
    row_tiles: int,
    token_tiles: int,
    num_blocks: int,
    num_outputs: int,
) -> mx.array:
    x, num_rows = inputs[0], layer.weight.shape[-2]
    constants = {
        "BITS": layer.bits,
        "GROUP_SIZE": layer.group_size,
        "IS_BFLOAT": int(x.dtype == mx.bfloat16),
        "ROW_TILES": row_tiles,
        "TOKEN_TILES": token_tiles,
        "WARPS": WARPS,
        "UNROLL": 1,
        "STAGES": 4 - row_tiles,  # steps whose weights are on their way, as many as fit into the shared memory
    }
    row_blocks = -(-num_rows // (16 * row_tiles))
    outputs = [((num_outputs, num_rows), x.dtype)]
    (out,) = gpu_kernels.run(kernel, inputs, constants, (row_blocks * WARPS, num_blocks), outputs)
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
    """Of all variants of the kernels, on a small layer. Infinite if a token's result depends on the others."""
    num_inputs = 5 * STEP_BITS // bits
    keys = mx.random.split(mx.random.key(0), 2)
    x = mx.random.normal((MAX_TOKENS, num_inputs), key=keys[0]).astype(dtype)
    layer = _random_layer(
        (3, 40, num_inputs) if has_experts else (40, num_inputs), bits, group_size, dtype, keys[1]
    )
    exact = x.astype(mx.float32) @ _dequantized(layer).swapaxes(-1, -2)  # [tokens, outputs] of each expert
    if has_experts:
        experts = mx.array([2, 0, 1, 1, 0, 2, 2, 1], mx.uint32)
        got, want = gather_matmul(x[:4], experts, layer), exact[experts, mx.arange(8) // 2]
        return float(mx.abs(got - want).max())
    outputs = [matmul(x[:num], layer) for num in (1, 8, 11, MAX_TOKENS)]
    if not all(mx.array_equal(some, outputs[-1][: len(some)]) for some in outputs):
        return math.inf
    return float(mx.abs(outputs[-1] - exact).max())


def _random_layer(
    shape: tuple[int, ...], bits: int, group_size: int, dtype: mx.Dtype, key: mx.array
) -> nn.Module:
    layer = nn.Module()
    layer.bits, layer.group_size = bits, group_size
    weight = mx.random.normal(shape, key=key, scale=shape[-1] ** -0.5).astype(dtype)
    layer.weight, layer.scales, layer.biases = mx.quantize(weight, group_size, bits)
    return layer


def _dequantized(layer: nn.Module) -> mx.array:
    weight, *others = _weights(layer)
    scales, biases = (one.astype(mx.float32) for one in others)
    return mx.dequantize(weight, scales, biases, layer.group_size, layer.bits)
