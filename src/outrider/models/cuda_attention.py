"""Attention over blocks on CUDA's tensor cores, for cells of 16-bit numbers, plain or quantised.

    block of threads    a row, a key head, SPLIT cells, and QUERIES of the queries that share the key head
    warp                one block of 64 cells

The tensor cores multiply [16 queries, 16 numbers] by [16 numbers, 8 columns]. The four lanes of a query or
column hold four of the 16 numbers each. Which numbers these are, and which column is which, is free, as long
as both sides agree, so every lane reads 16 bytes at once:

    scores    8 columns are 8 cells. Lane q of a cell reads the dimensions 32 t + 8 q .. + 7: two products
    sums      8 columns are 8 dimensions, each 8 apart. A lane reads 8 dimensions of four cells: 8 products

The weights of the values are split in two 16-bit numbers, whose products are added: nothing is lost by their
rounding. A query's result is the same to the last bit, whatever else is in the pass.
"""

from __future__ import annotations

import mlx.core as mx

from outrider import gpu_kernels
from outrider.gpu_kernels import GpuKernel
from outrider.models.tensor_cores import MULTIPLY
from outrider.plan import BLOCK_SIZE

GROUPS = 4  # warps of a block of threads
SPLIT = GROUPS * BLOCK_SIZE  # cells of a block of threads
DIMS = (64, 128, 192, 256)
DTYPES = (mx.bfloat16, mx.float16)

# Eight numbers of a cell from dimension d on.
_PLAIN = """
    using Number = KEYS_TYPE;
    auto keys_of = [&](size_t cell, int d) { return VECTOR(uint4, keys + cell * DIM + d); };
    auto values_of = [&](size_t cell, int d) { return VECTOR(uint4, values + cell * DIM + d); };
"""
_QUANTIZED = """
    using Number = QUERIES_TYPE;
    constexpr int IN_WORD = 32 / BITS, WORDS = DIM / IN_WORD, NUM_GROUPS = DIM / GROUP_SIZE;
    constexpr int ROW_WORDS = WORDS + NUM_GROUPS;  // packed as in cache/cell_format.py
    struct alignas(ROW_WORDS % 2 == 0 ? BITS : 4) Codes { uint32_t word[BITS / 4]; };
    struct alignas(4) Factors { Number scale[NUM_GROUPS], bias[NUM_GROUPS]; };
    struct alignas(16) Numbers { Number x[8]; };
    auto decoded = [](const uint32_t* packed, int d) {
        const Codes codes = VECTOR(Codes, packed + d / IN_WORD);
        const Factors& factors = VECTOR(Factors, packed + WORDS);
        const float scale = (float)factors.scale[d / GROUP_SIZE], bias = (float)factors.bias[d / GROUP_SIZE];
        Numbers found;
        #pragma unroll
        for (int i = 0; i < 8; ++i) {
            const uint32_t code = (codes.word[i / IN_WORD] >> (BITS * (i % IN_WORD))) & ((1 << BITS) - 1);
            found.x[i] = (Number)FMA(scale, (float)code, bias);
        }
        return VECTOR(uint4, &found);
    };
    auto keys_of = [&](size_t cell, int d) { return decoded(keys + cell * ROW_WORDS, d); };
    auto values_of = [&](size_t cell, int d) { return decoded(values + cell * ROW_WORDS, d); };
"""
_BODY = """
    auto of_quarters_max = [](float x) {
        x = fmaxf(x, __shfl_xor_sync(0xffffffff, x, 1));
        return fmaxf(x, __shfl_xor_sync(0xffffffff, x, 2));
    };
    auto of_quarters_sum = [](float x) {
        x += __shfl_xor_sync(0xffffffff, x, 1);
        return x + __shfl_xor_sync(0xffffffff, x, 2);
    };
    const int num_heads = keys_shape[1], num_columns = tables_shape[1], width = queries_shape[2];
    const int num_queries = queries_shape[1] / num_heads * width;  // that share a key head
    const int num_tiles = (num_queries + QUERIES - 1) / QUERIES;
    const int row = group_z / num_heads, head = group_z % num_heads;
    const int group = group_y % GROUPS, tile = group_y / GROUPS % num_tiles;
    const int split = group_y / GROUPS / num_tiles;
    const int start = starts[row], end = start + num_fed[row];
    const int first_query = tile * QUERIES, eighth = lane / 4, quarter = lane % 4;
    SHARED float shared_highest[GROUPS][QUERIES], shared_total[GROUPS][QUERIES];
    SHARED float shared_sums[GROUPS][QUERIES][64 + 4];  // four more: lanes write to different banks

    // The queries of a lane: eighth and eighth + 8 of each tile of 16.
    auto query_of = [&](int m, int half) {
        const int own = first_query + 16 * m + 8 * half + eighth;
        return own < num_queries ? own : num_queries - 1;
    };
    if (split == 0 || split * SPLIT < end) {
        const int first_cell = split * SPLIT + group * CELLS;
        const bool has_cells = first_cell < end && (WINDOW == 0 || first_cell + CELLS + WINDOW > start);
        const int last = end - first_cell < CELLS ? end - first_cell - 1 : CELLS - 1;
        const size_t block = has_cells ? tables[row * num_columns + first_cell / CELLS] : 0;
        const size_t first = (block * num_heads + head) * CELLS;
        auto cell_at = [&](int cell) { return first + (cell < last ? cell : last); };  // none past the row

        float scores[TILES][8][4] = {};
        #pragma unroll 2
        for (int d = 8 * quarter; has_cells && d < DIM; d += 32) {
            uint32_t a[TILES][2][4];
            #pragma unroll
            for (int m = 0; m < TILES; ++m)
                #pragma unroll
                for (int half = 0; half < 2; ++half) {
                    const size_t at = (size_t)group_z * num_queries + query_of(m, half);
                    const uint4 some = VECTOR(uint4, queries + at * DIM + d);
                    a[m][0][half] = some.x;
                    a[m][0][2 + half] = some.y;
                    a[m][1][half] = some.z;
                    a[m][1][2 + half] = some.w;
                }
            uint4 b[8];
            #pragma unroll
            for (int n = 0; n < 8; ++n) b[n] = keys_of(cell_at(8 * n + eighth), d);
            #pragma unroll
            for (int n = 0; n < 8; ++n)
                #pragma unroll
                for (int m = 0; m < TILES; ++m) {
                    multiply(scores[m][n], a[m][0], b[n].x, b[n].y);
                    multiply(scores[m][n], a[m][1], b[n].z, b[n].w);
                }
        }

        // The weights of 16 cells, as the first factor of a product: their rounded values, and the rest.
        uint32_t weights[TILES][4][2][4];
        struct alignas(4) Pair { Number x[2]; };
        #pragma unroll
        for (int m = 0; m < TILES; ++m)
            #pragma unroll
            for (int half = 0; half < 2; ++half) {
                const int at = start + query_of(m, half) % width;
                const int last_cell = at < end ? at : end - 1;  // that the query attends to
                float highest = LOWEST, total = 0;
                #pragma unroll
                for (int i = 0; i < 16; ++i) {
                    float& score = scores[m][i / 2][2 * half + i % 2];
                    const int cell = first_cell + 8 * (i / 2) + 2 * quarter + i % 2;
                    const bool is_seen =
                        has_cells && cell <= last_cell && (WINDOW == 0 || cell + WINDOW > last_cell);
                    score = is_seen ? score * factor[0] : LOWEST;
                    highest = fmaxf(highest, score);
                }
                highest = of_quarters_max(highest);
                #pragma unroll
                for (int i = 0; i < 8; ++i) {  // a pair of cells: 8 i + 2 quarter and the next one
                    Pair rounded, rest;
                    #pragma unroll
                    for (int j = 0; j < 2; ++j) {
                        const float score = scores[m][i][2 * half + j];
                        const float weight = score > LOWEST ? EXP2(score - highest) : 0.0f;
                        total += weight;
                        rounded.x[j] = (Number)weight;
                        rest.x[j] = (Number)(weight - (float)rounded.x[j]);
                    }
                    weights[m][i / 2][0][2 * (i % 2) + half] = VECTOR(uint32_t, &rounded);
                    weights[m][i / 2][1][2 * (i % 2) + half] = VECTOR(uint32_t, &rest);
                }
                total = of_quarters_sum(total);
                if (quarter == 0) {
                    shared_highest[group][16 * m + 8 * half + eighth] = highest;
                    shared_total[group][16 * m + 8 * half + eighth] = total;
                }
            }

        for (int d = 0; d < DIM; d += 64) {
            float sums[TILES][8][4] = {};
            #pragma unroll
            for (int k = 0; k < 4; ++k) {
                if (!has_cells) break;
                uint4 v[4];
                #pragma unroll
                for (int i = 0; i < 4; ++i)
                    v[i] = values_of(cell_at(16 * k + 2 * quarter + i % 2 + 8 * (i / 2)), d + 8 * eighth);
                #pragma unroll
                for (int i = 0; i < 8; ++i) {
                    auto of_pair = [&](const uint4& x, const uint4& y) {
                        const uint32_t low = i < 2 ? x.x : i < 4 ? x.y : i < 6 ? x.z : x.w;
                        const uint32_t high = i < 2 ? y.x : i < 4 ? y.y : i < 6 ? y.z : y.w;
                        return __byte_perm(low, high, i % 2 ? 0x7632 : 0x5410);
                    };
                    const uint32_t b0 = of_pair(v[0], v[1]), b1 = of_pair(v[2], v[3]);
                    #pragma unroll
                    for (int m = 0; m < TILES; ++m) {
                        multiply(sums[m][i], weights[m][k][0], b0, b1);
                        multiply(sums[m][i], weights[m][k][1], b0, b1);
                    }
                }
            }
            #pragma unroll
            for (int m = 0; m < TILES; ++m)
                #pragma unroll
                for (int i = 0; i < 8; ++i)
                    #pragma unroll
                    for (int c = 0; c < 4; ++c)
                        shared_sums[group][16 * m + 8 * (c / 2) + eighth][16 * quarter + 8 * (c % 2) + i] =
                            sums[m][i][c];
            BARRIER();
            for (int j = group; j < QUERIES && first_query + j < num_queries; j += GROUPS) {
                float top = LOWEST, whole = 0, own[2] = {};
                for (int g = 0; g < GROUPS; ++g) top = fmaxf(top, shared_highest[g][j]);
                for (int g = 0; g < GROUPS; ++g) {
                    const float share = EXP2(shared_highest[g][j] - top);
                    whole = FMA(shared_total[g][j], share, whole);
                    for (int i = 0; i < 2; ++i) own[i] = FMA(shared_sums[g][j][2 * lane + i], share, own[i]);
                }
                const size_t at = (size_t)group_z * num_queries + first_query + j;
                const size_t place = at * DIM + d + 2 * lane;
"""
_WHOLE = """
                if (HAS_SINKS) {
                    const float sink = sinks[at / width % queries_shape[1]];
                    const float higher = fmaxf(sink, top), share = EXP2(top - higher);
                    whole = FMA(whole, share, EXP2(sink - higher));
                    for (int i = 0; i < 2; ++i) own[i] *= share;
                }
                for (int i = 0; i < 2; ++i) out[place + i] = (OUT_TYPE)(whole > 0 ? own[i] / whole : 0.0f);
            }
            BARRIER();  // all have read shared_sums
        }
    }
"""
_PART = """
                const size_t num_all = (size_t)queries_shape[0] * queries_shape[1] * width;
                if (lane == 0 && d == 0) {
                    stats[2 * (split * num_all + at)] = top;
                    stats[2 * (split * num_all + at) + 1] = whole;
                }
                for (int i = 0; i < 2; ++i) parts[split * num_all * DIM + place + i] = own[i];
            }
            BARRIER();  // all have read shared_sums
        }
    }
"""


def _kernels(name: str, cells: str) -> tuple[GpuKernel, GpuKernel]:
    constants = f"""
    constexpr int GROUPS = {GROUPS}, CELLS = {BLOCK_SIZE}, SPLIT = {SPLIT}, QUERIES = 16 * TILES;
    constexpr float LOWEST = -3.0e38f;
    """
    body = MULTIPLY + constants + cells + _BODY
    inputs = ("queries", "factor", "keys", "values", "tables", "starts", "num_fed")
    return (
        GpuKernel(name, (*inputs, "sinks"), ("out",), body + _WHOLE, groups_per_block=GROUPS),
        GpuKernel(f"{name}_parts", inputs, ("parts", "stats"), body + _PART, groups_per_block=GROUPS),
    )


PLAIN = _kernels("tensor_attention", _PLAIN)
QUANTIZED = _kernels("tensor_quantized_attention", _QUANTIZED)


def supports(dim: int, dtype: mx.Dtype) -> bool:
    return dim in DIMS and dtype in DTYPES and gpu_kernels.is_available() and mx.cuda.is_available()
