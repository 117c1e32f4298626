// Cells of bfloat16 numbers and of codes: how they are written, and how attention reads them. Included by decoder_kernels.h,
// within its namespace. Elements are the same to the bit as those of mx.array.astype, mx.quantize and mx.dequantize.

// To the nearest integer, ties to even: for numbers below 2^22.
INLINE Vec rounded(Vec x) { return (x + 12582912.f) - 12582912.f; }

INLINE Vec to_floats(Ints codes) { return __builtin_convertvector(codes, Vec); }

// LANES codes of a cell, from element d on, a multiple of LANES.
template <int BITS>
INLINE Ints codes_at(const uint32_t *words, int d) {
    Ints codes;
    if constexpr (BITS == 8) {
        const uint8_t *bytes = reinterpret_cast<const uint8_t *>(words) + d;
#if LANES == 16
        codes = reinterpret_cast<Ints>(_mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i *>(bytes))));
#elif LANES == 8
        codes = reinterpret_cast<Ints>(_mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i *>(bytes))));
#else
        for (int i = 0; i < LANES; i++)
            codes[i] = bytes[i];
#endif
        return codes;
    }
    words += d / 8;
#if LANES == 16
    __m256i low = _mm256_set1_epi32(words[0]), high = _mm256_set1_epi32(words[1]);
    codes = reinterpret_cast<Ints>(_mm512_inserti64x4(_mm512_castsi256_si512(low), high, 1));
    const Ints shifts = {0, 4, 8, 12, 16, 20, 24, 28, 0, 4, 8, 12, 16, 20, 24, 28};
#elif LANES == 8
    codes = reinterpret_cast<Ints>(_mm256_set1_epi32(words[0]));
    const Ints shifts = {0, 4, 8, 12, 16, 20, 24, 28};
#else
    codes = int32_t(words[0] >> d % 8 * 4) - Ints{};
    const Ints shifts = {0, 4, 8, 12};
#endif
    return codes >> shifts & 15;
}

// LANES bfloat16 numbers of cells, from element d on.
INLINE Vec numbers_at(const uint32_t *words, int d) {
    const uint16_t *halves = reinterpret_cast<const uint16_t *>(words) + d;
    Ints bits;
#if LANES == 16
    bits = reinterpret_cast<Ints>(_mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i *>(halves))));
#elif LANES == 8
    bits = reinterpret_cast<Ints>(_mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i *>(halves))));
#else
    for (int i = 0; i < LANES; i++)
        bits[i] = halves[i];
#endif
    return reinterpret_cast<Vec>(bits << 16);
}

// values [num_cells] -> rows [num_cells, dim]
TARGET static void unpack_number_rows(const Cells &values, int num_cells, float *rows) {
    for (int d = 0; d < num_cells * values.dim; d += LANES)
        store(rows + d, numbers_at(values.words, d));
}

template <int BITS>
TARGET static void unpack_code_rows(const Cells &values, int num_cells, float *rows) {
    const int dim = values.dim, groups = values.groups, group_size = dim / groups, num_words = values.num_words();
    for (int cell = 0; cell < num_cells; cell++)
        for (int group = 0; group < groups; group++) {
            Vec scale = all(values.scales[cell * groups + group]), bias = all(values.biases[cell * groups + group]);
            for (int d = group * group_size; d < (group + 1) * group_size; d += LANES) {
                Vec codes = to_floats(codes_at<BITS>(values.words + cell * num_words, d));
                store(rows + cell * dim + d, codes * scale + bias);
            }
        }
}

// LANES floats, `stride` apart.
INLINE Vec load_strided(const float *from, int stride) {
    if (stride == 1)
        return load(from);
    float floats[LANES];
    for (int i = 0; i < LANES; i++)
        floats[i] = from[i * stride];
    return load(floats);
}

// LANES cells of bfloat16 numbers -> their columns; the columns of a dimension are CELLS floats apart.
INLINE void unpack_number_tile(const Cells &keys, float *columns) {
    const int num_words = keys.num_words();
    for (int word = 0; word < num_words; word += 4) {
        Vec words[4];
        transpose_tile(keys.floats() + word, num_words, words);
#pragma GCC unroll 4
        for (int i = 0; i < 4; i++) {
            Ints pairs = reinterpret_cast<Ints>(words[i]);
            store(columns + 2 * (word + i) * CELLS, reinterpret_cast<Vec>(pairs << 16));
            store(columns + (2 * (word + i) + 1) * CELLS, reinterpret_cast<Vec>(pairs & -65536));
        }
    }
}

// LANES cells of codes -> their columns.
template <int BITS>
INLINE void unpack_code_tile(const Cells &keys, float *columns) {
    constexpr int PER_WORD = 32 / BITS;
    const int groups = keys.groups, num_words = keys.num_words(), group_words = num_words / groups;
    for (int group = 0; group < groups; group++) {
        Vec scale = load_strided(keys.scales + group, groups), bias = load_strided(keys.biases + group, groups);
        for (int word = group * group_words; word < (group + 1) * group_words; word += 4) {
            Vec words[4];
            transpose_tile(keys.floats() + word, num_words, words);
#pragma GCC unroll 4
            for (int i = 0; i < 4; i++)
#pragma GCC unroll 8
                for (int k = 0; k < PER_WORD; k++) {
                    Ints codes = reinterpret_cast<Ints>(words[i]) >> (k * BITS) & ((1 << BITS) - 1);
                    store(columns + ((word + i) * PER_WORD + k) * CELLS, to_floats(codes) * scale + bias);
                }
        }
    }
}

template <int BITS>
INLINE void unpack_tile(const Cells &keys, float *columns) {
    if constexpr (BITS == BFLOAT16_BITS)
        unpack_number_tile(keys, columns);
    else
        unpack_code_tile<BITS>(keys, columns);
}

// keys [num_cells] -> columns [dim, CELLS], zero after num_cells. `spare`: room for LANES cells.
template <int BITS>
TARGET static void unpack_columns(const Cells &keys, int num_cells, float *columns, float *spare) {
    int cell = 0;
    for (; cell + LANES <= num_cells; cell += LANES)
        unpack_tile<BITS>(keys.from(cell), columns + cell);
    if (int rest = num_cells - cell; rest > 0) {  // beside cells of zeros: there may be no memory behind the buffer
        const int num_words = keys.num_words(), groups = keys.groups;
        const Cells from = keys.from(cell);
        Cells last = keys;
        last.words = reinterpret_cast<uint32_t *>(spare);
        last.scales = spare + LANES * num_words;
        last.biases = last.scales + LANES * groups;
        std::memset(spare, 0, sizeof(float) * LANES * (num_words + 2 * groups));
        std::memcpy(last.words, from.words, sizeof(uint32_t) * rest * num_words);
        if (keys.has_codes()) {
            std::memcpy(last.scales, from.scales, sizeof(float) * rest * groups);
            std::memcpy(last.biases, from.biases, sizeof(float) * rest * groups);
        }
        unpack_tile<BITS>(last, columns + cell);
        cell += LANES;
    }
    for (; cell < CELLS; cell += LANES)
        for (int d = 0; d < keys.dim; d++)
            store(columns + d * CELLS + cell, Vec{});
}

// x [dim] into one cell of bfloat16 numbers: to the nearest one, ties to even. NaN stays NaN.
TARGET static void round_cell(const float *x, const Cells &to) {
    uint16_t *numbers = reinterpret_cast<uint16_t *>(to.words);
    for (int i = 0; i < to.dim; i++) {
        uint32_t bits;
        std::memcpy(&bits, x + i, sizeof(bits));
        numbers[i] = x[i] != x[i] ? 0x7fc0 : (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
    }
}

// x [dim] into one cell of codes. A group with NaN or infinity stays NaN.
TARGET static void quantize_cell(const float *x, const Cells &to) {
    const int group_size = to.dim / to.groups, max_code = (1 << to.bits) - 1;
    uint8_t *bytes = reinterpret_cast<uint8_t *>(to.words);
    for (int group = 0; group < to.groups; group++, x += group_size) {
        float least = x[0], most = x[0], zero = x[0] * 0;  // NaN if an element is NaN or infinite
        for (int i = 1; i < group_size; i++) {
            zero += x[i] * 0;
            least = x[i] < least ? x[i] : least;
            most = x[i] > most ? x[i] : most;
        }
        bool is_negative = std::fabs(least) > std::fabs(most);
        float scale = std::max((most - least) / max_code, 1e-7f), bias = 0, edge = is_negative ? least : most;
        scale = is_negative ? scale : -scale;
        float steps = std::rint(edge / scale);
        if (steps != 0) {  // zero, or the edge, is exact
            scale = edge / steps;
            bias = edge;
        }
        to.scales[group] = scale;
        to.biases[group] = bias + zero;
        for (int i = 0; i < group_size; i += LANES) {
            Vec code = rounded((load(x + i) - bias) / scale);
            code = code < 0.f ? Vec{} : code;
            code = code > float(max_code) ? all(max_code) : code;
            Ints codes = __builtin_convertvector(code, Ints);
            for (int lane = 0; lane < LANES; lane += 8 / to.bits)
                *bytes++ = to.bits == 8 ? codes[lane] : codes[lane] | codes[lane + 1] << 4;
        }
    }
}

// x [dim] into one cell, whatever its format.
TARGET static void write_cell(const float *x, const Cells &to) {
    if (to.is_float32())
        std::memcpy(to.words, x, to.dim * sizeof(float));
    else if (to.has_codes())
        quantize_cell(x, to);
    else
        round_cell(x, to);
}
