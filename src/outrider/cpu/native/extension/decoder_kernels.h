// Arithmetic of a decoder layer, for one set of instructions. decoder_math.cpp includes this file once for each set,
// with NAME (a namespace), TARGET (a function attribute), LANES (floats of a register), MAX_ROWS and MAX_VECTORS (of a
// product's registers) defined.
//
// Every number is computed by the same operations in the same order whatever LANES is, so all sets give the same bits.

namespace NAME {

typedef float Vec __attribute__((vector_size(4 * LANES)));
typedef float Unaligned __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef int32_t Ints __attribute__((vector_size(4 * LANES)));

#define INLINE static inline __attribute__((always_inline)) TARGET

INLINE Vec load(const float *from) { return *reinterpret_cast<const Unaligned *>(from); }
INLINE void store(float *to, Vec v) { *reinterpret_cast<Unaligned *>(to) = v; }
INLINE Vec all(float x) { return x - Vec{}; }

INLINE Vec fma(Vec a, Vec b, Vec c) {
#if LANES == 16
    return reinterpret_cast<Vec>(_mm512_fmadd_ps(a, b, c));
#elif LANES == 8
    return reinterpret_cast<Vec>(_mm256_fmadd_ps(a, b, c));
#elif defined(__aarch64__)
    return vfmaq_f32(c, a, b);
#else
    Vec sums;
    for (int i = 0; i < LANES; i++)
        sums[i] = __builtin_fmaf(a[i], b[i], c[i]);
    return sums;
#endif
}

INLINE float fma(float a, float b, float c) { return __builtin_fmaf(a, b, c); }

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

INLINE float max(Vec v) {
#if LANES == 16
    return _mm512_reduce_max_ps(v);
#else
    float most = v[0];
    for (int i = 1; i < LANES; i++)
        most = v[i] > most ? v[i] : most;
    return most;
#endif
}

// 2^x for x up to 126, within 1 ulp; 0 below -126. NaN stays NaN.
INLINE Vec power_of_two(Vec x) {
    const float rounder = 12582912;  // 1.5 * 2^23: a float of this size has no fraction
    Vec bounded = x < -126.f ? all(-126) : x;
    Vec shifted = bounded + rounder;
    Vec fraction = bounded - (shifted - rounder);  // in [-0.5, 0.5]
    Vec power = all(1.5345809e-4f);  // a polynomial with the least relative error there: 2e-9
    power = fma(power, fraction, all(1.3399931e-3f));
    power = fma(power, fraction, all(9.6184890e-3f));
    power = fma(power, fraction, all(5.5503288e-2f));
    power = fma(power, fraction, all(2.4022647e-1f));
    power = fma(power, fraction, all(6.9314721e-1f));
    power = fma(power, fraction, all(1));
    Ints exponent = (reinterpret_cast<Ints>(shifted) << 23) + (127 << 23);
    return x < -126.f ? Vec{} : power * reinterpret_cast<Vec>(exponent);
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
};

template <int ROWS, int VECTORS>
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
        product_tile<ROWS, MAX_VECTORS>(p, row, column);
    for (; column < columns; column += LANES)
        product_tile<ROWS, 1>(p, row, column);
}

template <int ROWS>
TARGET static void product(const Factors &p, int row, int rows, int columns) {
    for (; row + ROWS <= rows; row += ROWS)
        product_rows<ROWS>(p, row, columns);
    if constexpr (ROWS > 1)
        product<ROWS - 1>(p, row, rows, columns);
}

TARGET static void product(const Factors &p, int rows, int columns) { product<MAX_ROWS>(p, 0, rows, columns); }

// The first halves (FROM = 0) or the second halves (FROM = LANES / 2) of a and b, interleaved.
template <int FROM, int... I>
INLINE Vec interleave(Vec a, Vec b, std::integer_sequence<int, I...>) {
    return __builtin_shufflevector(a, b, ((I % 2) * LANES + FROM + I / 2)...);
}

// LANES rows of `from` become columns of `to`.
INLINE void transpose_tile(const float *from, ptrdiff_t from_stride, float *to, ptrdiff_t to_stride) {
    constexpr auto lanes = std::make_integer_sequence<int, LANES>();
    Vec rows[LANES];
#pragma GCC unroll 16
    for (int i = 0; i < LANES; i++)
        rows[i] = load(from + i * from_stride);
#pragma GCC unroll 4
    for (int step = 1; step < LANES; step *= 2) {
        Vec next[LANES];
#pragma GCC unroll 8
        for (int i = 0; i < LANES / 2; i++) {
            next[2 * i] = interleave<0>(rows[i], rows[i + LANES / 2], lanes);
            next[2 * i + 1] = interleave<LANES / 2>(rows[i], rows[i + LANES / 2], lanes);
        }
#pragma GCC unroll 16
        for (int i = 0; i < LANES; i++)
            rows[i] = next[i];
    }
#pragma GCC unroll 16
    for (int i = 0; i < LANES; i++)
        store(to + i * to_stride, rows[i]);
}

// keys [num_cells, dim] -> columns [dim, CELLS], zero after num_cells.
TARGET static void transpose(const float *keys, int num_cells, int dim, float *columns) {
    int cell = 0;
    for (; cell + LANES <= num_cells; cell += LANES)
        for (int d = 0; d < dim; d += LANES)
            transpose_tile(keys + cell * dim + d, dim, columns + d * CELLS + cell, CELLS);
    for (int d = 0; d < dim; d++)
        for (int i = cell; i < CELLS; i++)
            columns[d * CELLS + i] = i < num_cells ? keys[i * dim + d] : 0;
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

TARGET static void attend_segment(const Queries &p, int segment, float *scratch, const Partial &result) {
    const int group = p.group, dim = p.dim, rows = p.num * group;
    float *queries = scratch, *scores = queries + rows * dim, *columns = scores + rows * CELLS;
    Vec scale = all(p.scale * 1.44269504f);  // weights are powers of two
    for (int i = 0; i < p.num; i++)
        for (int d = 0; d < group * dim; d += LANES)
            store(queries + i * group * dim + d, load(p.queries + i * p.stride + d) * scale);
    clear(result, rows, dim);
    const int begin = std::max(segment * SEGMENT, p.first_cell(0) / CELLS * CELLS);
    const int end = std::min((segment + 1) * SEGMENT, p.end_cell(p.num - 1));
    for (int cell = begin; cell < end; cell += CELLS) {
        Range tokens(p, cell, cell + CELLS);
        int first = tokens.first, last = tokens.last;
        auto from = [&](int i) { return std::max(p.first_cell(i) - cell, 0); };
        auto to = [&](int i) { return std::min(p.end_cell(i) - cell, int(CELLS)); };
        transpose(p.keys + ptrdiff_t(cell) * dim, std::min(end - cell, int(CELLS)), dim, columns);
        float *block = scores + first * group * CELLS;
        product({queries + first * group * dim, dim, columns, CELLS, block, CELLS, dim, false},
                (last - first) * group, CELLS);
        for (int i = first; i < last; i++)
            for (int row = i * group; row < (i + 1) * group; row++)
                weigh(scores + row * CELLS, from(i), to(i), result.states[row], result.out + row * dim, dim);
        for (int i = first, next; i < last; i = next) {
            for (next = i + 1; next < last && from(next) == from(i) && to(next) == to(i);)
                next++;
            const float *values = p.values + ptrdiff_t(cell + from(i)) * dim;
            product({scores + i * group * CELLS + from(i), CELLS, values, dim, result.out + i * group * dim, dim,
                     to(i) - from(i), true},
                    (next - i) * group, dim);
        }
    }
}

TARGET static void merge(const Queries &p, int segment, const Partial &part, const Partial &sum) {
    Range tokens(p, segment * SEGMENT, (segment + 1) * SEGMENT);
    for (int row = tokens.first * p.group; row < tokens.last * p.group; row++) {
        Softmax &own = part.states[row], &all_cells = sum.states[row];
        float most = own.most > all_cells.most ? own.most : all_cells.most;
        Vec before = power_of_two(all(all_cells.most - most)), now = power_of_two(all(own.most - most));
        auto add_to = [&](const float *x, float *y) TARGET { store(y, fma(load(x), now, load(y) * before)); };
        for (int lane = 0; lane < 16; lane += LANES)
            add_to(own.total + lane, all_cells.total + lane);
        for (int d = row * p.dim; d < (row + 1) * p.dim; d += LANES)
            add_to(part.out + d, sum.out + d);
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

const Math math = {rms_norm, rope, swiglu, add, attend_segment, merge, finish};

#undef INLINE

}  // namespace NAME
