// The kernels for CPUs with AVX-512 and VNNI.
#if defined(__x86_64__)

#include "quantized_avx512.h"

namespace outrider {
namespace {

AVX512 INLINE __m128i evens_first(__m128i bytes) {
    return _mm_shuffle_epi8(bytes, _mm_setr_epi8(0, 2, 4, 6, 1, 3, 5, 7, 8, 10, 12, 14, 9, 11, 13, 15));
}

// Rounds half a block, whose scale is 1. Returns its codes.
AVX512 INLINE __m512i quantize_half(__m512 scaled, int8_t *codes) {
    __m512i high = _mm512_cvtps_epi32(scaled);  // rounds to the nearest, ties to even
    __m512 rest = _mm512_sub_ps(scaled, _mm512_cvtepi32_ps(high));
    __m512i low = _mm512_cvtps_epi32(_mm512_mul_ps(rest, _mm512_set1_ps(1 << LOW_BITS)));
    _mm_storeu_si128(reinterpret_cast<__m128i *>(codes), evens_first(_mm512_cvtepi32_epi8(high)));
    _mm_storeu_si128(reinterpret_cast<__m128i *>(codes + BLOCK), evens_first(_mm512_cvtepi32_epi8(low)));
    return _mm512_add_epi32(_mm512_slli_epi32(high, LOW_BITS), low);
}

// As quantize_blocks, 16 elements at a time.
AVX512 void avx512_quantize(const float *x, int num_blocks, const QuantizedTokens &to) {
    int8_t *codes = to.codes;
    const __m512 largest = _mm512_set1_ps(std::numeric_limits<float>::max());
    for (int b = 0; b < num_blocks; b++, x += BLOCK, codes += PAIR) {
        __m512 first = _mm512_loadu_ps(x), second = _mm512_loadu_ps(x + 16);
        __m512 size = _mm512_max_ps(_mm512_abs_ps(first), _mm512_abs_ps(second));
        __mmask16 finite = _mm512_cmp_ps_mask(_mm512_abs_ps(first), largest, _CMP_LE_OQ) &
                           _mm512_cmp_ps_mask(_mm512_abs_ps(second), largest, _CMP_LE_OQ);
        bool is_finite = finite == 0xffff;
        float amax = is_finite ? _mm512_reduce_max_ps(size) : 0;
        float inverse = amax > TINY ? 127.0f / amax : 0.0f;
        if (inverse == 0)
            first = second = _mm512_setzero_ps();
        int first_sum = _mm512_reduce_add_epi32(quantize_half(_mm512_mul_ps(first, _mm512_set1_ps(inverse)), codes));
        int second_sum =
            _mm512_reduce_add_epi32(quantize_half(_mm512_mul_ps(second, _mm512_set1_ps(inverse)), codes + HALF));
        float scale = !is_finite ? std::numeric_limits<float>::quiet_NaN() : inverse == 0 ? 0 : amax / MAX_CODE;
        to.scales[b] = scale;
        to.sums[b] = scale * static_cast<float>(first_sum + second_sum);
        to.half_sums[2 * b] = scale * static_cast<float>(first_sum);
        to.half_sums[2 * b + 1] = scale * static_cast<float>(second_sum);
    }
}

// Four 16-byte pieces of rows r, r + 4, r + 8 and r + 12, side by side.
AVX512 INLINE __m512i four_rows(const uint8_t *const rows[TILE_ROWS], int r, ptrdiff_t offset) {
    __m512i found = _mm512_castsi128_si512(_mm_loadu_si128(reinterpret_cast<const __m128i *>(rows[r] + offset)));
    found = _mm512_inserti32x4(found, _mm_loadu_si128(reinterpret_cast<const __m128i *>(rows[r + 4] + offset)), 1);
    found = _mm512_inserti32x4(found, _mm_loadu_si128(reinterpret_cast<const __m128i *>(rows[r + 8] + offset)), 2);
    return _mm512_inserti32x4(found, _mm_loadu_si128(reinterpret_cast<const __m128i *>(rows[r + 12] + offset)), 3);
}

// in[i]: 16-byte pieces of four rows, as four_rows has them. out[i]: bytes 4i to 4i + 3 of the pieces of all rows.
AVX512 INLINE void transpose(const __m512i in[4], __m512i out[4]) {
    __m512i low = _mm512_unpacklo_epi32(in[0], in[1]), high = _mm512_unpackhi_epi32(in[0], in[1]);
    __m512i other_low = _mm512_unpacklo_epi32(in[2], in[3]), other_high = _mm512_unpackhi_epi32(in[2], in[3]);
    out[0] = _mm512_unpacklo_epi64(low, other_low);
    out[1] = _mm512_unpackhi_epi64(low, other_low);
    out[2] = _mm512_unpacklo_epi64(high, other_high);
    out[3] = _mm512_unpackhi_epi64(high, other_high);
}

// How codes of 2, 3, 5 or 6 bits are spread: eight of them, which take `bits` bytes, in each 128-bit lane. The lane gets
// the double words that hold them, each code gets two bytes, and a shift takes it to their end.
struct alignas(64) Spread {
    uint32_t words[16];
    uint8_t bytes[64];
    uint16_t shifts[32];
};

constexpr Spread spread_of(int bits) {
    Spread spread = {};
    for (int lane = 0; lane < 4; lane++) {
        int first = lane * bits, skipped = first % 4;  // bytes
        for (int i = 0; i < 4; i++)
            spread.words[lane * 4 + i] = first / 4 + i;
        for (int i = 0; i < 8; i++) {
            int bit = element(i) * bits;
            spread.bytes[lane * 16 + 2 * i] = skipped + bit / 8;
            spread.bytes[lane * 16 + 2 * i + 1] = skipped + bit / 8 + 1;
            spread.shifts[lane * 8 + i] = bit % 8;
        }
    }
    return spread;
}

constexpr Spread SPREADS[] = {spread_of(0), spread_of(1), spread_of(2), spread_of(3),
                              spread_of(4), spread_of(5), spread_of(6)};

// The 32 codes of a block of each row, a byte each, in the order of QuantizedTokens::codes.
AVX512 INLINE void avx512_spread(
    const uint8_t *const rows[TILE_ROWS], ptrdiff_t offset, int bits, uint8_t out[TILE_ROWS][BLOCK]) {
    const Spread &spread = SPREADS[bits];
    const __m512i words = _mm512_load_si512(spread.words), bytes = _mm512_load_si512(spread.bytes);
    const __m512i shifts = _mm512_load_si512(spread.shifts), low = _mm512_set1_epi16((1 << bits) - 1);
    auto mask = static_cast<__mmask32>((1ull << BLOCK / 8 * bits) - 1);
    for (int r = 0; r < TILE_ROWS; r++) {
        __m512i block = _mm512_castsi256_si512(_mm256_maskz_loadu_epi8(mask, rows[r] + offset));
        __m512i pairs = _mm512_shuffle_epi8(_mm512_permutexvar_epi32(words, block), bytes);
        __m512i codes = _mm512_and_si512(_mm512_srlv_epi16(pairs, shifts), low);
        _mm256_store_si256(reinterpret_cast<__m256i *>(out[r]), _mm512_cvtepi16_epi8(codes));
    }
}

// Four pieces of `mask` bytes each, as four_rows has them.
AVX512 INLINE __m512i four_pieces(const uint8_t *const rows[TILE_ROWS], int r, __mmask16 mask) {
    __m512i found = _mm512_castsi128_si512(_mm_maskz_loadu_epi8(mask, rows[r]));
    found = _mm512_inserti32x4(found, _mm_maskz_loadu_epi8(mask, rows[r + 4]), 1);
    found = _mm512_inserti32x4(found, _mm_maskz_loadu_epi8(mask, rows[r + 8]), 2);
    return _mm512_inserti32x4(found, _mm_maskz_loadu_epi8(mask, rows[r + 12]), 3);
}

// out[group][row] from 16-bit numbers, which begin at offsets[row].
AVX512 INLINE void fill_halves(
    const void *values, ScaleType type, const ptrdiff_t offsets[TILE_ROWS], int num_groups,
    float out[MAX_GROUPS][TILE_ROWS]) {
    constexpr int AT_ONCE = 8;  // numbers in 16 bytes
    const __m512i low = _mm512_set1_epi32(0xffff);
    for (int group = 0; group < num_groups; group += AT_ONCE) {
        int num = std::min(AT_ONCE, num_groups - group);
        const uint8_t *rows[TILE_ROWS];
        for (int r = 0; r < TILE_ROWS; r++)
            rows[r] = static_cast<const uint8_t *>(values) + 2 * (offsets[r] + group);
        auto mask = static_cast<__mmask16>((1u << 2 * num) - 1);
        __m512i pieces[4] = {four_pieces(rows, 0, mask), four_pieces(rows, 1, mask), four_pieces(rows, 2, mask),
                             four_pieces(rows, 3, mask)};
        __m512i pairs[4];
        transpose(pieces, pairs);
        for (int i = 0; i < num; i++) {
            __m512i halves = i % 2 ? _mm512_srli_epi32(pairs[i / 2], 16) : _mm512_and_si512(pairs[i / 2], low);
            _mm512_store_ps(out[group + i], widened(halves, type));
        }
    }
}

// out[group][row] from 8-bit numbers, which begin at offsets[row], times `factor`.
AVX512 INLINE void fill_bytes(
    const void *values, ScaleType type, float factor, const ptrdiff_t offsets[TILE_ROWS], int num_groups,
    float (*out)[TILE_ROWS]) {
    constexpr int AT_ONCE = 16;  // numbers in 16 bytes
    const __m512i low = _mm512_set1_epi32(0xff);
    for (int group = 0; group < num_groups; group += AT_ONCE) {
        int num = std::min(AT_ONCE, num_groups - group);
        const uint8_t *rows[TILE_ROWS];
        for (int r = 0; r < TILE_ROWS; r++)
            rows[r] = static_cast<const uint8_t *>(values) + offsets[r] + group;
        auto mask = static_cast<__mmask16>((1u << num) - 1);
        __m512i pieces[4] = {four_pieces(rows, 0, mask), four_pieces(rows, 1, mask), four_pieces(rows, 2, mask),
                             four_pieces(rows, 3, mask)};
        __m512i quads[4];
        transpose(pieces, quads);
        for (int i = 0; i < num; i++) {
            __m512i codes = _mm512_and_si512(_mm512_srli_epi32(quads[i / 4], i % 4 * 8), low);
            _mm512_store_ps(out[group + i], _mm512_mul_ps(from_bytes(codes, type), _mm512_set1_ps(factor)));
        }
    }
}

AVX512 INLINE void avx512_fill_scales(const QuantizedMatrix &w, int row, int first, int size, Tile &tile) {
    if (w.type == ScaleType::float32)
        return fill_scales(w, row, first, size, tile);
    ptrdiff_t offsets[TILE_ROWS];
    int num_groups = size / w.group_size;
    for (int r = 0; r < TILE_ROWS; r++)
        offsets[r] = first_group(w, row + r, first);
    if (w.type == ScaleType::e8m0 || w.type == ScaleType::e4m3)
        fill_bytes(w.scales, w.type, unit(w), offsets, num_groups, tile.scales);
    else
        fill_halves(w.scales, w.type, offsets, num_groups, tile.scales);
    if (w.biases)
        fill_halves(w.biases, w.type, offsets, num_groups, tile.biases);
    else
        for (int group = 0; group < num_groups; group++)
            _mm512_store_ps(
                tile.biases[group],
                _mm512_mul_ps(_mm512_load_ps(tile.scales[group]), _mm512_set1_ps(-middle(w))));
    set_sizes(w, size, tile);
}

AVX512 void avx512_fill(const QuantizedMatrix &w, int row, int first, int size, Tile &tile) {
    avx512_fill_scales(w, row, first, size, tile);
    const uint8_t *rows[TILE_ROWS];
    for (int r = 0; r < TILE_ROWS; r++)
        rows[r] = row_of(w, row + r) + first / 8 * w.bits;
    const __m512i order =
        _mm512_broadcast_i32x4(_mm_setr_epi8(0, 2, 4, 6, 1, 3, 5, 7, 8, 10, 12, 14, 9, 11, 13, 15));
    const __m512i low = _mm512_set1_epi8(15);
    const __m512i e2m1 = _mm512_broadcast_i32x4(_mm_loadu_si128(reinterpret_cast<const __m128i *>(E2M1_CODES)));
    bool is_e2m1 = w.elements == Elements::e2m1;
    alignas(64) uint8_t bytes[TILE_ROWS][BLOCK];
    const uint8_t *spread[TILE_ROWS];
    for (int r = 0; r < TILE_ROWS; r++)
        spread[r] = bytes[r];
    int block_bytes = BLOCK / 8 * w.bits;
    // The rows of the next tile follow those of this one. They are fetched in the order in which they lie.
    const uint8_t *ahead = row_of(w, row) + (static_cast<ptrdiff_t>(w.size) + first) / 8 * w.bits * TILE_ROWS;
    __m512i pieces[4], found[4];
    for (int b = 0; b < tile.num_blocks; b++) {
        ptrdiff_t offset = static_cast<ptrdiff_t>(b) * block_bytes;
        for (int line = 0; line < TILE_ROWS * block_bytes; line += 64)
            __builtin_prefetch(ahead + offset * TILE_ROWS + line, 0, 2);
        if (w.bits == 4) {
            for (int r = 0; r < 4; r++)
                pieces[r] = four_rows(rows, r, offset);
            transpose(pieces, found);
            for (int i = 0; i < 4; i++) {  // elements 8i to 8i + 7: even ones in the low halves of bytes
                __m512i evens = _mm512_and_si512(found[i], low);
                __m512i odds = _mm512_and_si512(_mm512_srli_epi16(found[i], 4), low);
                if (is_e2m1) {
                    evens = _mm512_shuffle_epi8(e2m1, evens);
                    odds = _mm512_shuffle_epi8(e2m1, odds);
                }
                _mm512_store_si512(tile.codes[b][2 * i], evens);
                _mm512_store_si512(tile.codes[b][2 * i + 1], odds);
            }
            continue;
        }
        if (w.bits != 8)
            avx512_spread(rows, offset, w.bits, bytes);
        for (int half = 0; half < 2; half++) {
            for (int r = 0; r < 4; r++)
                pieces[r] = w.bits == 8 ? _mm512_shuffle_epi8(four_rows(rows, r, offset + half * HALF), order)
                                        : four_rows(spread, r, half * HALF);
            transpose(pieces, found);
            for (int i = 0; i < 4; i++)
                _mm512_store_si512(tile.codes[b][half * 4 + i], found[i]);
        }
    }
}

template <int N, bool HALVES>
AVX512 void avx512_add_tokens(const Tile &tile, const TokenBlock &tokens, Sums &sums) {
    constexpr int CHAINS = N == 1 ? 2 : 1;           // sums that do not wait for each other; integers: exact
    constexpr int PARTS = HALVES ? 2 : 1;            // of a block that have a scale of their own
    __m512 sum[N];
#pragma GCC unroll 8
    for (int t = 0; t < N; t++)
        sum[t] = _mm512_loadu_ps(sums[t]);
    const float *part_sums = HALVES ? tokens.half_sums : tokens.sums;
    for (int part = 0; part < tile.num_blocks * PARTS; part++) {
        int b = part / PARTS, first = part % PARTS * (QUADS / PARTS);
        const int8_t *x = tokens.codes + b * PAIR;
        __m512i high[N][CHAINS], low[N][CHAINS];
#pragma GCC unroll 8
        for (int t = 0; t < N; t++)
#pragma GCC unroll 4
            for (int chain = 0; chain < CHAINS; chain++)
                high[t][chain] = low[t][chain] = _mm512_setzero_si512();
#pragma GCC unroll 8
        for (int i = 0; i < QUADS / PARTS; i++) {
            int q = first + i;
            __m512i codes = _mm512_load_si512(tile.codes[b][q]);
#pragma GCC unroll 8
            for (int t = 0; t < N; t++) {
                __m512i &four_high = high[t][i % CHAINS], &four_low = low[t][i % CHAINS];
                const int8_t *four = x + t * tokens.code_stride + q * 4;
                add_products(four_high, codes, four);
                add_products(four_low, codes, four + BLOCK);
            }
        }
        int group = HALVES ? part : b / tile.blocks_per_group;
        __m512 scales = _mm512_load_ps(tile.scales[group]), biases = _mm512_load_ps(tile.biases[group]);
#pragma GCC unroll 8
        for (int t = 0; t < N; t++) {
            if (CHAINS == 2) {
                high[t][0] = _mm512_add_epi32(high[t][0], high[t][CHAINS - 1]);
                low[t][0] = _mm512_add_epi32(low[t][0], low[t][CHAINS - 1]);
            }
            ptrdiff_t at = t * tokens.block_stride;
            __m512i all = _mm512_add_epi32(_mm512_slli_epi32(high[t][0], LOW_BITS), low[t][0]);
            __m512 factor = _mm512_mul_ps(scales, _mm512_set1_ps(tokens.scales[at + b]));
            sum[t] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(all), factor, sum[t]);
            sum[t] = _mm512_fmadd_ps(biases, _mm512_set1_ps(part_sums[at * PARTS + part]), sum[t]);
        }
    }
#pragma GCC unroll 8
    for (int t = 0; t < N; t++)
        _mm512_storeu_ps(sums[t], sum[t]);
}

template <bool HALVES>
void avx512_add_all(const Tile &tile, const TokenBlock &tokens, int num_tokens, Sums &sums) {
    switch (num_tokens) {
    case 1: return avx512_add_tokens<1, HALVES>(tile, tokens, sums);
    case 2: return avx512_add_tokens<2, HALVES>(tile, tokens, sums);
    case 3: return avx512_add_tokens<3, HALVES>(tile, tokens, sums);
    case 4: return avx512_add_tokens<4, HALVES>(tile, tokens, sums);
    case 5: return avx512_add_tokens<5, HALVES>(tile, tokens, sums);
    case 6: return avx512_add_tokens<6, HALVES>(tile, tokens, sums);
    case 7: return avx512_add_tokens<7, HALVES>(tile, tokens, sums);
    default: return avx512_add_tokens<8, HALVES>(tile, tokens, sums);
    }
}

void avx512_add(const Tile &tile, const TokenBlock &tokens, int num_tokens, Sums &sums) {
    (tile.blocks_per_group ? avx512_add_all<false> : avx512_add_all<true>)(tile, tokens, num_tokens, sums);
}

// Four E4M3 numbers of each row, one after the other. As the exponent and mantissa of a float, the seven bits after the
// sign are a number that is 2^120 times as small.
AVX512 INLINE void store_four(__m512i codes, float (*out)[TILE_ROWS]) {
    const __m512i size = _mm512_set1_epi8(0x7f);
    bool has_nan = _mm512_cmpeq_epi8_mask(_mm512_and_si512(codes, size), size);
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
        __m512i at_top = _mm512_slli_epi32(codes, 24 - 8 * i);
        __m512i bits = _mm512_and_si512(_mm512_srai_epi32(at_top, 4), _mm512_set1_epi32(0x87f00000));
        __m512 numbers = _mm512_mul_ps(_mm512_castsi512_ps(bits), _mm512_set1_ps(0x1p120f));
        if (has_nan)
            numbers = from_bytes(_mm512_srli_epi32(at_top, 24), ScaleType::e4m3);
        _mm512_store_ps(out[i], numbers);
    }
}

AVX512 void avx512_fill_floats(const QuantizedMatrix &w, int row, int first, int size, FloatTile &tile) {
    ptrdiff_t offsets[TILE_ROWS];
    const uint8_t *rows[TILE_ROWS];
    for (int r = 0; r < TILE_ROWS; r++) {
        offsets[r] = first_group(w, row + r, first);
        rows[r] = row_of(w, row + r) + first;
    }
    fill_bytes(w.scales, w.type, 1, offsets, size / w.group_size, tile.scales);
    tile.num_blocks = size / BLOCK;
    const __m512i order =
        _mm512_broadcast_i32x4(_mm_setr_epi8(0, 2, 4, 6, 1, 3, 5, 7, 8, 10, 12, 14, 9, 11, 13, 15));
    __m512i pieces[4], found[4];
    for (int k = 0; k < size; k += 16) {
        for (int r = 0; r < 4; r++)
            pieces[r] = _mm512_shuffle_epi8(four_rows(rows, r, k), order);
        transpose(pieces, found);
        for (int i = 0; i < 4; i++)
            store_four(found[i], &tile.weights[k + 4 * i]);
    }
}

template <int N>
AVX512 void avx512_add_float_tokens(const FloatTile &tile, const TokenBlock &tokens, int first, Sums &sums) {
    __m512 sum[N];
    for (int t = 0; t < N; t++)
        sum[t] = _mm512_loadu_ps(sums[first + t]);
    for (int b = 0; b < tile.num_blocks; b++) {
        float x[N][BLOCK];
        __m512 parts[N][4];
        for (int t = 0; t < N; t++) {
            load_floats(tokens.codes + (first + t) * tokens.code_stride + b * PAIR, x[t]);
            for (int i = 0; i < 4; i++)
                parts[t][i] = _mm512_setzero_ps();
        }
#pragma GCC unroll 8
        for (int q = 0; q < QUADS; q++)
#pragma GCC unroll 4
            for (int i = 0; i < 4; i++) {
                __m512 weights = _mm512_load_ps(tile.weights[b * BLOCK + q * 4 + i]);
#pragma GCC unroll 4
                for (int t = 0; t < N; t++)
                    parts[t][i] = _mm512_fmadd_ps(weights, _mm512_set1_ps(x[t][q * 4 + i]), parts[t][i]);
            }
        __m512 scales = _mm512_load_ps(tile.scales[b]);
        for (int t = 0; t < N; t++) {
            __m512 total = _mm512_add_ps(
                _mm512_add_ps(parts[t][0], parts[t][1]), _mm512_add_ps(parts[t][2], parts[t][3]));
            float scale = tokens.scales[(first + t) * tokens.block_stride + b];
            sum[t] = _mm512_fmadd_ps(total, _mm512_mul_ps(scales, _mm512_set1_ps(scale)), sum[t]);
        }
    }
    for (int t = 0; t < N; t++)
        _mm512_storeu_ps(sums[first + t], sum[t]);
}

void avx512_add_floats(const FloatTile &tile, const TokenBlock &tokens, int num_tokens, Sums &sums) {
    int t = 0;
    for (; t + 4 <= num_tokens; t += 4)
        avx512_add_float_tokens<4>(tile, tokens, t, sums);
    if (t + 2 <= num_tokens) {
        avx512_add_float_tokens<2>(tile, tokens, t, sums);
        t += 2;
    }
    if (t < num_tokens)
        avx512_add_float_tokens<1>(tile, tokens, t, sums);
}

}  // namespace

const Kernels AVX512_VNNI = {"avx512vnni", avx512_quantize,    avx512_fill,
                             avx512_add,   avx512_fill_floats, avx512_add_floats,
                             avx512_add_interleaved, nullptr, nullptr};
#if HAS_AMX
const Kernels AVX512_AMX = {"avx512amx", avx512_quantize,    avx512_fill,
                            avx512_add,  avx512_fill_floats, avx512_add_floats,
                            amx_add_interleaved, amx_configure, amx_release};
#endif

}  // namespace outrider

#endif
