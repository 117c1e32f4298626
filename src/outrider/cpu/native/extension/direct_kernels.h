// Attention of few rows over blocks of bfloat16 numbers or codes: they are multiplied as they are unpacked, without a copy
// in float32. Each number is computed as from a copy, in the same order. Included by decoder_kernels.h, within its
// namespace.

constexpr int ROWS_AT_ONCE = 6;      // whose sums fit into the registers
constexpr int MAX_DIRECT_ROWS = 12;  // with more, the copy is worth its while; chosen by hand

// Asks for the bytes of the next block that belong to this step. Into the L2 cache: with those that may be on their way
// to L1, attention over a long row took 1.4 times as long.
INLINE void prefetch_step(const char *next, int step, int bytes) {
    if (next)
        for (int i = 0; i < bytes; i += 64)
            __builtin_prefetch(next + step * bytes + i, 0, 2);
}

// scores [ROWS, CELLS] = queries [ROWS, dim] @ keys of CELLS cells, of which the first num_cells count
template <int ROWS, int BITS>
TARGET static void score_rows(const float *queries, const Cells &keys, int num_cells, float *scores, const char *next) {
    constexpr int PER_WORD = 32 / BITS;
    const int dim = keys.dim, num_words = keys.num_words(), groups = keys.groups;
    const int group_words = BITS == BFLOAT16_BITS ? num_words : num_words / groups;
    int step = 0;
    for (int cell = 0; cell < num_cells; cell += LANES) {
        Vec sums[ROWS] = {}, scale = {}, bias = {};
        for (int word = 0; word < num_words; word += 4, step++) {
            prefetch_step(next, step, 4 * LANES * sizeof(uint32_t));
            if (BITS != BFLOAT16_BITS && word % group_words == 0) {
                ptrdiff_t at = ptrdiff_t(cell) * groups + word / group_words;
                scale = load_strided(keys.scales + at, groups);
                bias = load_strided(keys.biases + at, groups);
            }
            Vec words[4];
            transpose_tile(keys.floats() + cell * num_words + word, num_words, words);
#pragma GCC unroll 4
            for (int i = 0; i < 4; i++)
#pragma GCC unroll 8
                for (int k = 0; k < PER_WORD; k++) {
                    Ints bits = reinterpret_cast<Ints>(words[i]);
                    Vec column;
                    if constexpr (BITS == BFLOAT16_BITS)
                        column = reinterpret_cast<Vec>(k == 0 ? bits << 16 : bits & -65536);
                    else
                        column = to_floats(bits >> (k * BITS) & ((1 << BITS) - 1)) * scale + bias;
                    const float *x = queries + (word + i) * PER_WORD + k;
#pragma GCC unroll 6
                    for (int r = 0; r < ROWS; r++)
                        sums[r] = fma(all(x[r * dim]), column, sums[r]);
                }
        }
#pragma GCC unroll 6
        for (int r = 0; r < ROWS; r++)
            store(scores + r * CELLS + cell, sums[r]);
    }
}

struct CellRange {
    int first, end;
};

// out [ROWS, dim] += weights [ROWS, CELLS] @ values of these cells of the block, for the dimensions from `first` on
template <int ROWS, int BITS, int VECTORS>
INLINE void add_values(const float *weights, const Cells &values, CellRange cells, int first, float *out, const char *next) {
    const int dim = values.dim, num_words = values.num_words(), groups = values.groups;
    Vec sums[ROWS][VECTORS];
#pragma GCC unroll 6
    for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 4
        for (int v = 0; v < VECTORS; v++)
            sums[r][v] = load(out + r * dim + first + v * LANES);
    for (int cell = cells.first; cell < cells.end; cell++) {
        if (first == 0)
            prefetch_step(next, cell, num_words * sizeof(uint32_t));
        Vec loaded[VECTORS];
#pragma GCC unroll 4
        for (int v = 0; v < VECTORS; v++) {
            int d = first + v * LANES;
            if constexpr (BITS == BFLOAT16_BITS) {
                loaded[v] = numbers_at(values.words + cell * num_words, d);
            } else {
                int group = cell * groups + d / (dim / groups);
                loaded[v] = to_floats(codes_at<BITS>(values.words + cell * num_words, d)) * values.scales[group] +
                            values.biases[group];
            }
        }
#pragma GCC unroll 6
        for (int r = 0; r < ROWS; r++) {
            Vec weight = all(weights[r * CELLS + cell]);
#pragma GCC unroll 4
            for (int v = 0; v < VECTORS; v++)
                sums[r][v] = fma(weight, loaded[v], sums[r][v]);
        }
    }
#pragma GCC unroll 6
    for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 4
        for (int v = 0; v < VECTORS; v++)
            store(out + r * dim + first + v * LANES, sums[r][v]);
}

template <int ROWS, int BITS>
TARGET static void sum_rows(const float *weights, const Cells &values, CellRange cells, float *out, const char *next) {
    int d = 0;
    for (; d + MAX_VECTORS * LANES <= values.dim; d += MAX_VECTORS * LANES)
        add_values<ROWS, BITS, MAX_VECTORS>(weights, values, cells, d, out, next);
    for (; d < values.dim; d += LANES)
        add_values<ROWS, BITS, 1>(weights, values, cells, d, out, next);
}

// Calls f<ROWS, BITS>() with these numbers as constants.
template <int ROWS = ROWS_AT_ONCE, class F>
static void with_constants(int rows, int bits, const F &f) {
    if constexpr (ROWS > 1)
        if (rows < ROWS)
            return with_constants<ROWS - 1>(rows, bits, f);
    if (bits == BFLOAT16_BITS)
        f.template operator()<ROWS, BFLOAT16_BITS>();
    else if (bits == 8)
        f.template operator()<ROWS, 8>();
    else
        f.template operator()<ROWS, 4>();
}

// One block, for the tokens that attend to cells in it: token `first` and later ones. next: the keys of the next block, or
// null. Token i attends to the cells [0, to(i)) of the block. The values of [0, to(first)) are added for all of these
// tokens, those of [to(i - 1), to(i)) for token i and later ones.
TARGET static void attend_block(const Queries &p, int cell, const float *queries, float *scores, const Partial &result,
                                const char *next) {
    const Cells keys = p.keys.from(p.at(cell)), values = p.values.from(p.at(cell));
    const int first = Range(p, cell, cell + CELLS).first, rows = p.num * p.group;
    auto to = [&](int i) { return std::min(p.end_cell(i) - cell, int(CELLS)); };
    const char *awaited = reinterpret_cast<const char *>(values.words);
    for (int row = first * p.group; row < rows; row += ROWS_AT_ONCE, awaited = nullptr)
        with_constants(std::min(ROWS_AT_ONCE, rows - row), keys.bits, [&]<int ROWS, int BITS>() {
            score_rows<ROWS, BITS>(queries + row * p.dim, keys, to(p.num - 1), scores + row * CELLS, awaited);
        });
    for (int row = first * p.group; row < rows; row++)
        weigh(scores + row * CELLS, 0, to(row / p.group), result.states[row], result.out + row * p.dim, p.dim);
    for (int i = first; i < p.num; i++) {
        CellRange cells = {i == first ? 0 : to(i - 1), to(i)};
        if (cells.first == cells.end)
            continue;
        for (int row = i * p.group; row < rows; row += ROWS_AT_ONCE, next = nullptr)
            with_constants(std::min(ROWS_AT_ONCE, rows - row), values.bits, [&]<int ROWS, int BITS>() {
                sum_rows<ROWS, BITS>(scores + row * CELLS, values, cells, result.out + row * p.dim, next);
            });
    }
}
