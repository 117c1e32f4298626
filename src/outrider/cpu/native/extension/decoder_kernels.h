// Arithmetic of a decoder layer, for one set of instructions. decoder_math.cpp includes this file once for each set,
// with NAME (a namespace), TARGET (a function attribute), LANES (floats of a register), MAX_ROWS and MAX_VECTORS (of a
// product's registers) defined.

#include "vectors.h"

namespace NAME {

// Asks for floats from memory, a moment before they are needed. Into the L2 cache: more of them can be on their way.
INLINE void prefetch(const float *from, int num) {
    for (int i = 0; i < num; i += 16)
        __builtin_prefetch(from + i, 0, 2);
}

// The sum of 16 floats. The order does not depend on LANES.
INLINE float sum(const float *parts) {
    float left[8];
    for (int i = 0; i < 8; i++)
        left[i] = parts[i] + parts[i + 8];
    for (int n = 4; n; n /= 2)
        for (int i = 0; i < n; i++)
            left[i] += left[i + n];
    return left[0];
}

// Sizes are multiples of 16.

TARGET static void rms_norm(const float *x, const float *weight, int size, float eps, float *y) {
    float parts[16];
    for (int lane = 0; lane < 16; lane += LANES) {
        Vec squares = {};
        for (int i = lane; i < size; i += 16)
            squares = fma(load(x + i), load(x + i), squares);
        store(parts + lane, squares);
    }
    Vec factor = all(1 / __builtin_sqrtf(sum(parts) / size + eps));
    for (int i = 0; i < size; i += LANES)
        store(y + i, load(x + i) * factor * load(weight + i));
}

// Rotates the pairs (x[i], x[i + dims / 2]). angles: dims / 2 cosines, then as many sines.
TARGET static void rope(float *x, const float *angles, int dims) {
    int half = dims / 2;
    for (int i = 0; i < half; i++) {
        float a = x[i], b = x[i + half], cos = angles[i], sin = angles[i + half];
        x[i] = fma(a, cos, -(b * sin));
        x[i + half] = fma(a, sin, b * cos);
    }
}

TARGET static void swiglu(float *gate, const float *up, int size) {
    for (int i = 0; i < size; i += LANES) {
        Vec x = load(gate + i), exponent = x * -1.44269504f;
        exponent = exponent > 126.f ? all(126) : exponent;
        store(gate + i, x / (1.f + power_of_two(exponent)) * load(up + i));
    }
}

TARGET static void add(const float *x, int size, float *y) {
    for (int i = 0; i < size; i += LANES)
        store(y + i, load(y + i) + load(x + i));
}

TARGET static void multiply(const float *x, int size, float *y) {
    for (int i = 0; i < size; i += LANES)
        store(y + i, load(y + i) * load(x + i));
}

template <int ROWS>
INLINE void dot_rows(const float *x, const float *a, int size, float *y) {
    float parts[ROWS][16];
    for (int lane = 0; lane < 16; lane += LANES) {
        Vec sums[ROWS] = {};
        for (int i = lane; i < size; i += 16) {
            Vec own = load(x + i);
#pragma GCC unroll 4
            for (int r = 0; r < ROWS; r++)
                sums[r] = fma(own, load(a + size_t(r) * size + i), sums[r]);
        }
#pragma GCC unroll 4
        for (int r = 0; r < ROWS; r++)
            store(parts[r] + lane, sums[r]);
    }
    for (int r = 0; r < ROWS; r++)
        y[r] = sum(parts[r]);
}

// y = a @ x; a [rows, size]. Four rows at once, so that their sums do not wait for each other.
TARGET static void dots(const float *x, const float *a, int rows, int size, float *y) {
    int row = 0;
    for (; row + 4 <= rows; row += 4)
        dot_rows<4>(x, a + size_t(row) * size, size, y + row);
    for (; row < rows; row++)
        dot_rows<1>(x, a + size_t(row) * size, size, y + row);
}

// c = a @ b, or c += a @ b if `adds`; a [rows, size], b [size, columns]. Each element of c is one sum over b's rows in
// order, so it depends on nothing but its own row and column.
struct Factors {
    const float *a;
    ptrdiff_t a_stride;
    const float *b;
    ptrdiff_t b_stride;
    float *c;
    ptrdiff_t c_stride;
    int size;
    bool adds;
    const float *next;  // as large as b: is asked for from memory meanwhile; or null
};

template <int ROWS, int VECTORS, bool HAS_NEXT>
INLINE void product_tile(const Factors &p, int row, int column) {
    Vec sums[ROWS][VECTORS];
    const float *a = p.a + row * p.a_stride, *b = p.b + column;
    float *c = p.c + row * p.c_stride + column;
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 4
        for (int v = 0; v < VECTORS; v++)
            sums[r][v] = p.adds ? load(c + r * p.c_stride + v * LANES) : Vec{};
    for (int k = 0; k < p.size; k++, b += p.b_stride) {
        Vec loaded[VECTORS];
#pragma GCC unroll 4
        for (int v = 0; v < VECTORS; v++)
            loaded[v] = load(b + v * LANES);
        if constexpr (HAS_NEXT)
            prefetch(p.next + k * p.b_stride + column, VECTORS * LANES);
#pragma GCC unroll 8
        for (int r = 0; r < ROWS; r++) {
            Vec x = all(a[r * p.a_stride + k]);
#pragma GCC unroll 4
            for (int v = 0; v < VECTORS; v++)
                sums[r][v] = fma(x, loaded[v], sums[r][v]);
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 4
        for (int v = 0; v < VECTORS; v++)
            store(c + r * p.c_stride + v * LANES, sums[r][v]);
}

template <int ROWS>
TARGET static void product_rows(const Factors &p, int row, int columns) {
    int column = 0;
    for (; column + MAX_VECTORS * LANES <= columns; column += MAX_VECTORS * LANES)
        if (p.next && row == 0)
            product_tile<ROWS, MAX_VECTORS, true>(p, row, column);
        else
            product_tile<ROWS, MAX_VECTORS, false>(p, row, column);
    for (; column < columns; column += LANES)
        product_tile<ROWS, 1, false>(p, row, column);
}

template <int ROWS>
TARGET static void product(const Factors &p, int row, int rows, int columns) {
    for (; row + ROWS <= rows; row += ROWS)
        product_rows<ROWS>(p, row, columns);
    if constexpr (ROWS > 1)
        product<ROWS - 1>(p, row, rows, columns);
}

TARGET static void product(const Factors &p, int rows, int columns) { product<MAX_ROWS>(p, 0, rows, columns); }

TARGET static void add_product(const float *x, int rows, int size, const float *b, int columns, float *y) {
    product({x, size, b, columns, y, columns, size, true, nullptr}, rows, columns);
}

typedef float Four __attribute__((vector_size(16)));
typedef float UnalignedFour __attribute__((vector_size(16), aligned(4), may_alias));

// Four floats of each of LANES / 4 rows, side by side.
INLINE Vec load_fours(const float *from, ptrdiff_t stride) {
#define FOUR(i) Four(*reinterpret_cast<const UnalignedFour *>(from + i * stride))
#define EIGHT(i) __builtin_shufflevector(FOUR(i), FOUR((i + 1)), 0, 1, 2, 3, 4, 5, 6, 7)
#if LANES == 16
    return __builtin_shufflevector(EIGHT(0), EIGHT(2), 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
#elif LANES == 8
    return EIGHT(0);
#else
    return FOUR(0);
#endif
#undef FOUR
#undef EIGHT
}

// In every four lanes: elements of a and b in turn, one by one or in pairs, from the first (HALF = 0) or second half.
template <int HALF, bool PAIRS, int... I>
INLINE Vec interleave(Vec a, Vec b, std::integer_sequence<int, I...>) {
    return __builtin_shufflevector(
        a, b, (I / 4 * 4 + 2 * HALF + (PAIRS ? I % 2 + I % 4 / 2 * LANES : I % 4 / 2 + I % 2 * LANES))...);
}

// LANES rows of `from`, four floats of each, become four rows of LANES floats.
INLINE void transpose_tile(const float *from, ptrdiff_t stride, Vec to[4]) {
    constexpr auto lanes = std::make_integer_sequence<int, LANES>();
    Vec rows[4], pairs[4];
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++)
        rows[i] = load_fours(from + i * stride, 4 * stride);
#pragma GCC unroll 2
    for (int i = 0; i < 4; i += 2) {
        pairs[i] = interleave<0, false>(rows[i], rows[i + 1], lanes);
        pairs[i + 1] = interleave<1, false>(rows[i], rows[i + 1], lanes);
    }
#pragma GCC unroll 2
    for (int i = 0; i < 2; i++) {
        to[2 * i] = interleave<0, true>(pairs[i], pairs[i + 2], lanes);
        to[2 * i + 1] = interleave<1, true>(pairs[i], pairs[i + 2], lanes);
    }
}

// keys [num_cells, dim] -> columns [dim, CELLS], zero after num_cells. The values are asked for from memory meanwhile.
TARGET static void transpose(const float *keys, const float *values, int num_cells, int dim, float *columns) {
    int cell = 0;
    for (; cell + LANES <= num_cells; cell += LANES)
        for (int d = 0; d < dim; d += 4) {
            prefetch(values + cell * dim + d * LANES, 4 * LANES);
            Vec rows[4];
            transpose_tile(keys + cell * dim + d, dim, rows);
#pragma GCC unroll 4
            for (int i = 0; i < 4; i++)
                store(columns + (d + i) * CELLS + cell, rows[i]);
        }
    for (int d = 0; d < dim; d++)
        for (int i = cell; i < CELLS; i++)
            columns[d * CELLS + i] = i < num_cells ? keys[i * dim + d] : 0;
}

#include "cell_kernels.h"

// Keys as columns [dim, CELLS], whatever their format. The values are asked for from memory meanwhile.
INLINE void load_columns(const Cells &keys, const Cells &values, int num_cells, float *columns, float *spare) {
    if (keys.is_float32())
        return transpose(keys.floats(), values.floats(), num_cells, keys.dim, columns);
    prefetch(values.floats(), num_cells * values.num_words());
    if (keys.bits == BFLOAT16_BITS)
        unpack_columns<BFLOAT16_BITS>(keys, num_cells, columns, spare);
    else if (keys.bits == 8)
        unpack_columns<8>(keys, num_cells, columns, spare);
    else
        unpack_columns<4>(keys, num_cells, columns, spare);
}

// Values as rows [num_cells, dim]: the cells themselves, or unpacked ones in `rows`.
INLINE const float *load_rows(const Cells &values, int num_cells, float *rows) {
    if (values.is_float32())
        return values.floats();
    if (values.bits == BFLOAT16_BITS)
        unpack_number_rows(values, num_cells, rows);
    else if (values.bits == 8)
        unpack_code_rows<8>(values, num_cells, rows);
    else
        unpack_code_rows<4>(values, num_cells, rows);
    return rows;
}

// Scores in [from, to) become weights; all others become 0. `out` [dim] and the total are rescaled to the new maximum.
INLINE void weigh(float *scores, int from, int to, Softmax &state, float *out, int dim) {
    if (to - from < CELLS)
        for (int i = 0; i < CELLS; i++)
            scores[i] = i < from || i >= to ? -INFINITY : scores[i];
    Vec most = load(scores);
    for (int i = LANES; i < CELLS; i += LANES) {
        Vec next = load(scores + i);
        most = next > most ? next : most;
    }
    float before = state.most, now = max(most);
    if (now > before) {
        state.most = now;
        Vec factor = power_of_two(all(before - now));
        for (int d = 0; d < dim; d += LANES)
            store(out + d, load(out + d) * factor);
        for (int lane = 0; lane < 16; lane += LANES)
            store(state.total + lane, load(state.total + lane) * factor);
    }
    Vec shift = all(state.most);
    for (int i = 0; i < CELLS; i += 16)
        for (int lane = 0; lane < 16; lane += LANES) {
            Vec weight = power_of_two(load(scores + i + lane) - shift);
            store(scores + i + lane, weight);
            store(state.total + lane, load(state.total + lane) + weight);
        }
}

// The tokens that have cells in [cell, end): from `first` to `last`.
struct Range {
    int first = 0, last;
    Range(const Queries &p, int cell, int end) : last(p.num) {
        while (first < last && p.end_cell(first) <= cell)
            first++;
        while (first < last && p.first_cell(last - 1) >= end)
            last--;
    }
};

#include "direct_kernels.h"

TARGET static void attend_segment(const Queries &p, int segment, float *scratch, const Partial &result) {
    const int group = p.group, dim = p.dim, rows = p.num * group;
    float *queries = scratch, *scores = queries + rows * dim, *columns = scores + rows * CELLS;
    float *unpacked = columns + dim * CELLS;
    Vec scale = all(p.scale * 1.44269504f);  // weights are powers of two
    for (int i = 0; i < p.num; i++)
        for (int d = 0; d < group * dim; d += LANES)
            store(queries + i * group * dim + d, load(p.queries + i * p.stride + d) * scale);
    clear(result, rows, dim);
    const int begin = std::max(segment * SEGMENT, p.first_cell(0) / CELLS * CELLS);
    const int end = std::min((segment + 1) * SEGMENT, p.end_cell(p.num - 1));
    const int num_words = p.keys.num_words();
    prefetch(p.keys.from(p.at(begin)).floats(), std::min(end - begin, int(CELLS)) * num_words);
    for (int cell = begin; cell < end; cell += CELLS) {
        Range tokens(p, cell, cell + CELLS);
        int first = tokens.first, last = tokens.last;
        auto from = [&](int i) { return std::max(p.first_cell(i) - cell, 0); };
        auto to = [&](int i) { return std::min(p.end_cell(i) - cell, int(CELLS)); };
        const int num_cells = std::min(end - cell, int(CELLS));
        // A block may be read to its end, whatever is in it. Cells that follow each other may end before that.
        bool is_readable = p.blocks || to(0) == CELLS, begins_inside = from(p.num - 1) > 0;
        if (is_readable && !begins_inside && rows <= MAX_DIRECT_ROWS && !p.keys.is_float32()) {
            const bool is_last = cell + CELLS >= end;
            attend_block(p, cell, queries, scores, result,
                         is_last ? nullptr : reinterpret_cast<const char *>(p.keys.from(p.at(cell + CELLS)).words));
            continue;
        }
        const Cells own_values = p.values.from(p.at(cell));
        load_columns(p.keys.from(p.at(cell)), own_values, num_cells, columns, unpacked);
        const float *next = cell + CELLS < end ? p.keys.from(p.at(cell + CELLS)).floats() : nullptr;
        if (next && !p.keys.is_float32()) {  // they take less memory than the columns
            prefetch(next, CELLS * num_words);
            next = nullptr;
        }
        float *block = scores + first * group * CELLS;
        product({queries + first * group * dim, dim, columns, CELLS, block, CELLS, dim, false, next},
                (last - first) * group, CELLS);
        for (int i = first; i < last; i++)
            for (int row = i * group; row < (i + 1) * group; row++)
                weigh(scores + row * CELLS, from(i), to(i), result.states[row], result.out + row * dim, dim);
        const float *all_values = load_rows(own_values, num_cells, unpacked);
        for (int i = first, after; i < last; i = after) {
            for (after = i + 1; after < last && from(after) == from(i) && to(after) == to(i);)
                after++;
            const float *values = all_values + from(i) * dim;
            product({scores + i * group * CELLS + from(i), CELLS, values, dim, result.out + i * group * dim, dim,
                     to(i) - from(i), true, nullptr},
                    (after - i) * group, dim);
        }
    }
}

TARGET static void merge(const Queries &p, int segment, const Partial &part, const Partial &sum) {
    Range tokens(p, segment * SEGMENT, (segment + 1) * SEGMENT);
    for (int row = tokens.first * p.group; row < tokens.last * p.group; row++) {
        Softmax &own = part.states[row], &all_cells = sum.states[row];
        float most = own.most > all_cells.most ? own.most : all_cells.most;
        Vec before = power_of_two(all(all_cells.most - most)), now = power_of_two(all(own.most - most));
        for (int lane = 0; lane < 16; lane += LANES) {
            float *total = all_cells.total + lane;
            store(total, fma(load(own.total + lane), now, load(total) * before));
        }
        for (int d = row * p.dim; d < (row + 1) * p.dim; d += LANES)
            store(sum.out + d, fma(load(part.out + d), now, load(sum.out + d) * before));
        all_cells.most = most;
    }
}

TARGET static void finish(const Queries &p, const Partial &result) {
    for (int i = 0; i < p.num; i++)
        for (int head = 0; head < p.group; head++) {
            int row = i * p.group + head;
            Vec total = all(sum(result.states[row].total));
            for (int d = 0; d < p.dim; d += LANES)
                store(p.out + i * p.stride + head * p.dim + d, load(result.out + row * p.dim + d) / total);
        }
}

const Math math = {rms_norm,      rope,           swiglu, add,   multiply, dots, add_product,
                   write_cell,    attend_segment, merge,  finish};

#undef INLINE

}  // namespace NAME
