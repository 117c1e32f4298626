"""GPU kernels for attention that reads every row's blocks where they are, each row as far as it has cells.

For the few queries of a decode pass. On CUDA, 16-bit cells have kernels of their own
(models/cuda_attention.py); these are for Metal, and for float32.

    block of threads    a row, a key head, SPLIT cells, and up to TILE of the queries that share the key head
    group of lanes      64 of these cells. For the scores each lane has a cell of its own. For the weighted
                        sum of the values each lane has some dimensions of all cells
    merge               the splits of each row, if a row of the pass has more than SPLIT cells

A query's result is the same to the last bit, whatever else is in the pass: cells are always divided in the
same way, and the parts are added in the same order.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import cache

import mlx.core as mx

from outrider import gpu_kernels
from outrider.cache.placement import Placement
from outrider.cache.ragged_kv import KVSpec
from outrider.gpu_kernels import GpuKernel
from outrider.models import cuda_attention
from outrider.models.attention_check import largest_error
from outrider.models.cuda_attention import GROUPS, SPLIT
from outrider.plan import BLOCK_SIZE

DIMS = (64, 96, 128, 192, 256)  # of a head: each lane has the same number of dimensions
QUANTIZED_DIMS = (64, 128, 256)  # a lane's codes begin at a byte
MAX_TILE_NUMBERS = 1024  # of the queries of a tile; Metal has 32 KB of memory for a block of threads
_LOG2_E = math.log2(math.e)
TOLERANCE = {mx.float32: 1e-4, mx.float16: 5e-3, mx.bfloat16: 3e-2}

_CONSTANTS = f"""
    constexpr int GROUPS = {GROUPS}, CELLS = {BLOCK_SIZE}, SPLIT = {SPLIT};
    constexpr int OWN = DIM / 32;  // dimensions of a lane
    constexpr float LOWEST = -3.0e38f;
"""
# Cells as they are, and quantised and packed (cache/cell_format.py). A key k = scale * codes + bias gives
# q * k = scale * (q * codes) + bias * sum(q), group by group.
_PLAIN_CELLS = {
    "CELL_TYPES": """
    constexpr int STEP = 16 / sizeof(KEYS_TYPE);
    struct alignas(16) Keys { KEYS_TYPE x[STEP]; };
    constexpr int BYTES = OWN * sizeof(VALUES_TYPE);
    struct alignas(BYTES % 16 == 0 ? 16 : BYTES % 8 == 0 ? 8 : BYTES % 4 == 0 ? 4 : 2) Values {
        VALUES_TYPE x[OWN];
    };
    """,
    "ADD_SCORES": """
            #pragma unroll 4
            for (int d = 0; d < DIM; d += STEP) {
                const Keys k = VECTOR(Keys, keys + (first + lane) * DIM + d);
                #pragma unroll
                for (int j = 0; j < TILE; ++j)
                    #pragma unroll
                    for (int i = 0; i < STEP; ++i)
                        weights[j] = FMA((float)k.x[i], queries[query[j] * DIM + d + i], weights[j]);
            }
    """,
    "READ_VALUES": """
                const Values v = VECTOR(Values, values + at * DIM + lane * OWN);
                #pragma unroll
                for (int i = 0; i < OWN; ++i) value[i] = (float)v.x[i];
    """,
}
_QUANTIZED_CELLS = {
    "CELL_TYPES": """
    constexpr int IN_WORD = 32 / BITS, WORDS = DIM / IN_WORD, NUM_GROUPS = DIM / GROUP_SIZE;
    constexpr int ROW_WORDS = WORDS + NUM_GROUPS * sizeof(NUMBER) / 2;
    constexpr uint32_t CODE = (1 << BITS) - 1;
    struct alignas(ROW_WORDS % 4 == 0 ? 16 : ROW_WORDS % 2 == 0 ? 8 : 4) Codes { uint32_t x[4]; };
    struct alignas(4) Factors { NUMBER scale[NUM_GROUPS], bias[NUM_GROUPS]; };
    """,
    "ADD_SCORES": """
            for (int g = 0; g < NUM_GROUPS; ++g) {
                float dots[TILE];
                #pragma unroll
                for (int j = 0; j < TILE; ++j) dots[j] = 0;
                #pragma unroll 2
                for (int w = g * GROUP_SIZE / IN_WORD; w < (g + 1) * GROUP_SIZE / IN_WORD; w += 4) {
                    const Codes k = VECTOR(Codes, keys + (first + lane) * ROW_WORDS + w);
                    #pragma unroll
                    for (int v = 0; v < 4; ++v)
                        #pragma unroll
                        for (int i = 0; i < IN_WORD; ++i) {
                            const float code = (float)((k.x[v] >> (BITS * i)) & CODE);
                            const int d = (w + v) * IN_WORD + i;
                            #pragma unroll
                            for (int j = 0; j < TILE; ++j)
                                dots[j] = FMA(code, queries[query[j] * DIM + d], dots[j]);
                        }
                }
                const Factors factors = VECTOR(Factors, keys + (first + lane) * ROW_WORDS + WORDS);
                const float scale = (float)factors.scale[g], bias = (float)factors.bias[g];
                #pragma unroll
                for (int j = 0; j < TILE; ++j)
                    weights[j] =
                        FMA(scale, dots[j], FMA(bias, query_sums[query[j] * NUM_GROUPS + g], weights[j]));
            }
    """,
    "READ_VALUES": """
                const Factors factors = VECTOR(Factors, values + at * ROW_WORDS + WORDS);
                const float scale = (float)factors.scale[lane * OWN / GROUP_SIZE];
                const float bias = (float)factors.bias[lane * OWN / GROUP_SIZE];
                #pragma unroll
                for (int i = 0; i < OWN; ++i) {
                    const int d = lane * OWN + i;
                    const uint32_t word = values[at * ROW_WORDS + d / IN_WORD];
                    value[i] = FMA(scale, (float)((word >> (BITS * (d % IN_WORD))) & CODE), bias);
                }
    """,
}
_SPLIT = """
    const int num_heads = keys_shape[1], num_columns = tables_shape[1], width = queries_shape[2];
    const int num_queries = queries_shape[1] / num_heads * width;  // that share a key head
    const int num_tiles = (num_queries + TILE - 1) / TILE;
    const int row = group_z / num_heads, head = group_z % num_heads;
    const int group = group_y % GROUPS, tile = group_y / GROUPS % num_tiles;
    const int split = group_y / GROUPS / num_tiles;
    const int start = starts[row], end = start + num_fed[row];
    const int first_query = tile * TILE;
    SHARED float shared_highest[GROUPS][TILE], shared_total[GROUPS][TILE], shared_sums[GROUPS][TILE][DIM];

    CELL_TYPES

    if (split == 0 || split * SPLIT < end) {
        float highest[TILE], total[TILE], sums[TILE][OWN];
        int last_cell[TILE];  // that the query attends to
        size_t query[TILE];
        #pragma unroll
        for (int j = 0; j < TILE; ++j) {
            const int own = first_query + j < num_queries ? first_query + j : num_queries - 1;
            query[j] = (size_t)group_z * num_queries + own;
            last_cell[j] = start + own % width < end ? start + own % width : end - 1;
            highest[j] = LOWEST;
            total[j] = 0;
            #pragma unroll
            for (int i = 0; i < OWN; ++i) sums[j][i] = 0;
        }
        const int first_cell = split * SPLIT + group * CELLS;
        for (int cell = first_cell; cell < first_cell + CELLS && cell < end; cell += 32) {
            if (WINDOW > 0 && cell + 32 + WINDOW <= start) continue;  // all queries are past these cells
            const size_t block = tables[row * num_columns + cell / CELLS];
            const size_t first = (block * num_heads + head) * CELLS + cell % CELLS;
            float weights[TILE];
            #pragma unroll
            for (int j = 0; j < TILE; ++j) weights[j] = 0;
            ADD_SCORES
            #pragma unroll
            for (int j = 0; j < TILE; ++j) {
                const int own = cell + lane;
                const bool is_seen = own <= last_cell[j] && (WINDOW == 0 || own + WINDOW > last_cell[j]);
                const float found = GROUP_MAX(is_seen ? weights[j] : LOWEST);
                const float before = highest[j];
                highest[j] = found > before ? found : before;
                const float factor = EXP2(before - highest[j]);
                weights[j] = is_seen ? EXP2(weights[j] - highest[j]) : 0.0f;
                total[j] = FMA(total[j], factor, weights[j]);
                #pragma unroll
                for (int i = 0; i < OWN; ++i) sums[j][i] *= factor;
            }
            const int last = end - cell < 32 ? end - cell - 1 : 31;
            #pragma unroll 8
            for (int c = 0; c < 32; ++c) {  // cells past the last one have weights of 0
                const size_t at = first + (c < last ? c : last);
                float value[OWN];
                READ_VALUES
                #pragma unroll
                for (int j = 0; j < TILE; ++j) {
                    const float weight = SHUFFLE(weights[j], c);
                    #pragma unroll
                    for (int i = 0; i < OWN; ++i) sums[j][i] = FMA(weight, value[i], sums[j][i]);
                }
            }
        }
        #pragma unroll
        for (int j = 0; j < TILE; ++j) {
            const float whole = GROUP_SUM(total[j]);
            if (lane == 0) {
                shared_highest[group][j] = highest[j];
                shared_total[group][j] = whole;
            }
            #pragma unroll
            for (int i = 0; i < OWN; ++i) shared_sums[group][j][lane * OWN + i] = sums[j][i];
        }
        BARRIER();
        for (int j = 0; j < TILE && first_query + j < num_queries && group == GROUPS - 1; ++j) {
            float top = LOWEST, whole = 0, own[OWN];
            for (int g = 0; g < GROUPS; ++g) top = shared_highest[g][j] > top ? shared_highest[g][j] : top;
            for (int i = 0; i < OWN; ++i) own[i] = 0;
            for (int g = 0; g < GROUPS; ++g) {
                const float factor = EXP2(shared_highest[g][j] - top);
                whole = FMA(shared_total[g][j], factor, whole);
                for (int i = 0; i < OWN; ++i)
                    own[i] = FMA(shared_sums[g][j][lane * OWN + i], factor, own[i]);
            }
            const size_t at = (size_t)group_z * num_queries + first_query + j;
"""
_WHOLE = """
            if (HAS_SINKS) {
                const float sink = sinks[at / width % queries_shape[1]];
                const float higher = sink > top ? sink : top;
                const float factor = EXP2(top - higher);
                whole = FMA(whole, factor, EXP2(sink - higher));
                for (int i = 0; i < OWN; ++i) own[i] *= factor;
            }
            for (int i = 0; i < OWN; ++i)
                out[at * DIM + lane * OWN + i] = (OUT_TYPE)(whole > 0 ? own[i] / whole : 0.0f);
        }
    }
"""
_PART = """
            const size_t part = (size_t)split * queries_shape[0] * queries_shape[1] * width + at;
            if (lane == 0) {
                stats[2 * part] = top;
                stats[2 * part + 1] = whole;
            }
            for (int i = 0; i < OWN; ++i) parts[part * DIM + lane * OWN + i] = own[i];
        }
    }
"""
_MERGE = """
    const int num_all = parts_shape[1], num_queries = num_all / starts_shape[0];  // of all rows, of a row
    const int row = group_y / num_queries;
    const int num_splits = (starts[row] + num_fed[row] + SPLIT - 1) / SPLIT;
    float top = LOWEST, whole = 0, own[OWN];
    for (int s = lane; s < num_splits; s += 32) {
        const float found = stats[2 * ((size_t)s * num_all + group_y)];
        top = found > top ? found : top;
    }
    top = GROUP_MAX(top);
    if (HAS_SINKS) {
        const float sink = sinks[group_y % num_queries / (num_queries / sinks_shape[0])];
        top = sink > top ? sink : top;
        whole = EXP2(sink - top);
    }
    for (int i = 0; i < OWN; ++i) own[i] = 0;
    #pragma unroll 4
    for (int s = 0; s < num_splits; ++s) {
        const size_t part = (size_t)s * num_all + group_y;
        const float factor = EXP2(stats[2 * part] - top);
        whole = FMA(stats[2 * part + 1], factor, whole);
        for (int i = 0; i < OWN; ++i) own[i] = FMA(parts[part * DIM + lane * OWN + i], factor, own[i]);
    }
    for (int i = 0; i < OWN; ++i)
        out[(size_t)group_y * DIM + lane * OWN + i] = (OUT_TYPE)(whole > 0 ? own[i] / whole : 0.0f);
"""


# For cells of one kind: a kernel for rows of up to SPLIT cells; one for longer rows, which MERGE follows.
Kernels = tuple[GpuKernel, GpuKernel]
# The kernels, the queries of a block of threads, the first inputs and the sizes.
Launch = tuple[Kernels, int, list[mx.array], dict[str, int | mx.Dtype]]


def _kernels(name: str, cells: Mapping[str, str], cell_inputs: tuple[str, ...]) -> Kernels:
    body = _CONSTANTS + _SPLIT
    for piece, code in cells.items():
        body = body.replace(piece, code)
    inputs = ("queries", *cell_inputs, "tables", "starts", "num_fed")
    return (
        GpuKernel(name, (*inputs, "sinks"), ("out",), body + _WHOLE, groups_per_block=GROUPS),
        GpuKernel(f"{name}_parts", inputs, ("parts", "stats"), body + _PART, groups_per_block=GROUPS),
    )


PLAIN = _kernels("attention", _PLAIN_CELLS, ("keys", "values"))
QUANTIZED = _kernels("quantized_attention", _QUANTIZED_CELLS, ("query_sums", "keys", "values"))
MERGE = GpuKernel(
    "attention_merge", ("parts", "stats", "starts", "num_fed", "sinks"), ("out",), _CONSTANTS + _MERGE
)


def attend(
    queries: mx.array,
    cells: Sequence[mx.array],
    spec: KVSpec,
    place: Placement,
    scale: float,
    window: int,
    sinks: mx.array | None,
) -> mx.array:
    """queries [rows, heads, width, dim]; cells: `RaggedKV.arrays` of a layer in blocks; sinks [heads]

    `window`: cells that a query attends to; 0 for all.
    """
    rows, num_heads, width, dim = queries.shape
    num_queries = num_heads // spec.num_heads * width
    if cuda_attention.supports(dim, spec.dtype):
        kernels, tile, inputs, sizes = _on_tensor_cores(queries, num_queries, spec, scale)
    else:
        kernels, tile, inputs, sizes = _on_all_devices(queries, num_queries, spec, scale)
    bounds = [place.starts, place.num_fed]
    assert place.tables is not None
    inputs += [*cells, place.tables, *bounds]
    sizes |= {"DIM": dim, "WINDOW": window}
    if spec.bits is not None:
        sizes |= {"BITS": spec.bits, "GROUP_SIZE": spec.key_format.group_size, "NUMBER": spec.dtype}
    own_sinks = mx.zeros(num_heads) if sinks is None else sinks.astype(mx.float32) * _LOG2_E
    with_sinks = {"HAS_SINKS": int(sinks is not None)}
    num_splits = -(-place.num_attended // SPLIT)
    groups = num_splits * -(-num_queries // tile) * GROUPS, rows * spec.num_heads
    out = [(queries.shape, queries.dtype)]
    whole, part = kernels
    if num_splits == 1:
        return gpu_kernels.run(whole, [*inputs, own_sinks], sizes | with_sinks, groups, out)[0]
    num_all = rows * num_heads * width
    outputs = [((num_splits, num_all, dim), mx.float32), ((num_splits, num_all, 2), mx.float32)]
    parts = gpu_kernels.run(part, inputs, sizes, groups, outputs)
    merged = [*parts, *bounds, own_sinks]
    return gpu_kernels.run(MERGE, merged, {"DIM": dim} | with_sinks, (num_all, 1), out)[0]


def _on_tensor_cores(queries: mx.array, num_queries: int, spec: KVSpec, scale: float) -> Launch:
    kernels = cuda_attention.PLAIN if spec.bits is None else cuda_attention.QUANTIZED
    num_tiles = 1 if num_queries <= 16 else 2
    inputs = [queries.astype(spec.dtype), mx.array([scale * _LOG2_E])]
    return kernels, 16 * num_tiles, inputs, {"TILES": num_tiles, "IS_BFLOAT": int(spec.dtype == mx.bfloat16)}


def _on_all_devices(queries: mx.array, num_queries: int, spec: KVSpec, scale: float) -> Launch:
    dim = queries.shape[-1]
    tile = 2 if num_queries <= 2 else min(8, MAX_TILE_NUMBERS // dim)
    scaled = queries.astype(mx.float32) * (scale * _LOG2_E)
    if spec.bits is None:
        return PLAIN, tile, [scaled], {"TILE": tile}
    group_size = spec.key_format.group_size
    sums = scaled.reshape(-1, dim // group_size, group_size).sum(axis=-1)
    return QUANTIZED, tile, [scaled, sums], {"TILE": tile}


@cache
def agrees(dim: int, dtype: mx.Dtype, bits: int | None) -> bool:
    """True if the kernels give what MLX's operations give, for cells of this kind, on this device."""
    return gpu_kernels.is_available() and gpu_kernels.is_close(
        lambda: largest_error(attend, KVSpec(2, dim, dim, dtype, bits=bits)), "attention", TOLERANCE[dtype]
    )
