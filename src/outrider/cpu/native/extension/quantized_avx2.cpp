// The kernels for CPUs with AVX2, and for those that have AVX-VNNI too: one instruction there multiplies what takes three.
#if defined(__x86_64__)

#include "quantized_avx2.h"

namespace outrider {
namespace {

AVX2 INLINE __m128i evens_first(__m128i bytes) {
    return _mm_shuffle_epi8(bytes, _mm_setr_epi8(0, 2, 4, 6, 1, 3, 5, 7, 8, 10, 12, 14, 9, 11, 13, 15));
}

AVX2 INLINE void avx2_fill_scales(const QuantizedMatrix &w, int row, int first, int size, Tile &tile) {
    if (w.type != ScaleType::float16)
        return fill_scales(w, row, first, size, tile);
    for (int r = 0; r < TILE_ROWS; r++) {
        ptrdiff_t at = first_group(w, row + r, first);
        const uint16_t *scales = static_cast<const uint16_t *>(w.scales) + at;
        const uint16_t *biases = w.biases ? static_cast<const uint16_t *>(w.biases) + at : nullptr;
        for (int group = 0; group < size / w.group_size; group++) {
            float scale = _cvtsh_ss(scales[group]);
            tile.scales[group][r] = scale;
            tile.biases[group][r] = biases ? _cvtsh_ss(biases[group]) : -middle(w) * scale;
        }
    }
    set_sizes(w, size, tile);
}

AVX2 void avx2_quantize(const float *x, int num_blocks, const QuantizedTokens &to) {
    quantize_blocks(x, num_blocks, to);
}

// Where the codes of eight that take BITS bytes are: each gets two bytes, and is then shifted to their top.
template <int BITS>
struct alignas(32) Spread {
    uint8_t bytes[32] = {};
    uint16_t factors[16] = {};

    constexpr Spread() {
        for (int i = 0; i < 16; i++) {
            int bit = element(i % 8) * BITS;
            bytes[2 * i] = bit / 8;
            bytes[2 * i + 1] = bit / 8 + 1;
            factors[i] = 1 << (16 - BITS - bit % 8);
        }
    }
};

// In two loads: a copy of BITS bytes to the stack, read as eight, would wait for the stores.
template <int BITS>
AVX2 INLINE __m128i load_eight(const uint8_t *codes) {
    constexpr int FIRST = BITS > 4 ? 4 : 2;
    uint32_t first = 0, rest = 0;
    std::memcpy(&first, codes, FIRST);
    std::memcpy(&rest, codes + FIRST, BITS - FIRST);
    return _mm_cvtsi64_si128(static_cast<long long>(first | static_cast<uint64_t>(rest) << 8 * FIRST));
}

// 16 codes of 16 bits each, in the order of QuantizedTokens::codes.
template <int BITS>
AVX2 INLINE __m256i spread_sixteen(const uint8_t *codes) {
    static constexpr Spread<BITS> SPREAD;
    __m256i packed = _mm256_set_m128i(load_eight<BITS>(codes + BITS), load_eight<BITS>(codes));
    __m256i pairs = _mm256_shuffle_epi8(packed, _mm256_load_si256(reinterpret_cast<const __m256i *>(SPREAD.bytes)));
    __m256i factors = _mm256_load_si256(reinterpret_cast<const __m256i *>(SPREAD.factors));
    return _mm256_srli_epi16(_mm256_mullo_epi16(pairs, factors), 16 - BITS);
}

template <int BITS>
AVX2 INLINE __m256i spread_block(const uint8_t *block) {
    __m256i both = _mm256_packus_epi16(spread_sixteen<BITS>(block), spread_sixteen<BITS>(block + 2 * BITS));
    return _mm256_permute4x64_epi64(both, 0xd8);  // packus takes the lanes in turn
}

// The 32 codes of a block of one row, a byte each, in the order of QuantizedTokens::codes.
AVX2 INLINE __m256i avx2_spread(const uint8_t *block, const QuantizedMatrix &w) {
    auto *halves = reinterpret_cast<const __m128i *>(block);
    switch (w.bits) {
    case 2: return spread_block<2>(block);
    case 3: return spread_block<3>(block);
    case 5: return spread_block<5>(block);
    case 6: return spread_block<6>(block);
    case 8: return _mm256_set_m128i(evens_first(_mm_loadu_si128(halves + 1)), evens_first(_mm_loadu_si128(halves)));
    }
    __m128i packed = _mm_loadu_si128(halves), low = _mm_set1_epi8(15);
    __m128i evens = _mm_and_si128(packed, low), odds = _mm_and_si128(_mm_srli_epi16(packed, 4), low);
    if (w.elements == Elements::e2m1) {
        const __m128i e2m1 = _mm_loadu_si128(reinterpret_cast<const __m128i *>(E2M1_CODES));
        evens = _mm_shuffle_epi8(e2m1, evens);
        odds = _mm_shuffle_epi8(e2m1, odds);
    }
    return _mm256_set_m128i(_mm_unpackhi_epi32(evens, odds), _mm_unpacklo_epi32(evens, odds));
}

AVX2 void avx2_fill(const QuantizedMatrix &w, int row, int first, int size, Tile &tile) {
    avx2_fill_scales(w, row, first, size, tile);
    const uint8_t *rows[TILE_ROWS];
    for (int r = 0; r < TILE_ROWS; r++)
        rows[r] = row_of(w, row + r) + first / 8 * w.bits;
    for (int b = 0; b < tile.num_blocks; b++)
        for (int r = 0; r < TILE_ROWS; r++) {
            alignas(32) uint32_t quads[QUADS];
            ptrdiff_t offset = static_cast<ptrdiff_t>(b) * (BLOCK / 8) * w.bits;
            _mm256_store_si256(reinterpret_cast<__m256i *>(quads), avx2_spread(rows[r] + offset, w));
            for (int q = 0; q < QUADS; q++)
                std::memcpy(tile.codes[b][q][r], &quads[q], 4);
        }
}

namespace avx2 {

#define TARGET AVX2
#include "quantized_add_kernels.h"

}  // namespace avx2

#if HAS_AVX_VNNI
namespace avxvnni {

AVX_VNNI INLINE __m256i add_products(__m256i total, __m256i codes, __m256i x, bool) {
    return _mm256_dpbusd_avx_epi32(total, codes, x);
}

#define TARGET AVX_VNNI
#include "quantized_add_kernels.h"

}  // namespace avxvnni
#endif

AVX2 void avx2_fill_floats(const QuantizedMatrix &w, int row, int first, int size, FloatTile &tile) {
    fill_float_scales(w, row, first, size, tile);
    const __m128i magnitude = _mm_set1_epi16(0x7f), sign = _mm_set1_epi16(0x80);
    const __m256 nan = _mm256_set1_ps(std::numeric_limits<float>::quiet_NaN());
    for (int r = 0; r < TILE_ROWS; r++) {
        const uint8_t *codes = row_of(w, row + r) + first;
        for (int k = 0; k < size; k += 8) {
            __m128i wide = _mm_cvtepu8_epi16(_mm_loadl_epi64(reinterpret_cast<const __m128i *>(codes + k)));
            __m128i number = _mm_and_si128(wide, magnitude);
            __m128i half = _mm_or_si128(_mm_slli_epi16(_mm_and_si128(wide, sign), 8), _mm_slli_epi16(number, 7));
            __m256 found = _mm256_mul_ps(_mm256_cvtph_ps(half), _mm256_set1_ps(0x1p8f));
            __m256i is_nan = _mm256_cvtepi16_epi32(_mm_cmpeq_epi16(number, magnitude));
            alignas(32) float eight[8];
            _mm256_store_ps(eight, _mm256_blendv_ps(found, nan, _mm256_castsi256_ps(is_nan)));
            for (int i = 0; i < 8; i++)
                tile.weights[k + position(i)][r] = eight[i];
        }
    }
}

template <int N>
AVX2 void avx2_add_float_tokens(const FloatTile &tile, const TokenBlock &tokens, int first, Sums &sums) {
    for (int b = 0; b < tile.num_blocks; b++) {
        float x[N][BLOCK];
        for (int t = 0; t < N; t++)
            load_floats(tokens.codes + (first + t) * tokens.code_stride + b * PAIR, x[t]);
        for (int side = 0; side < TILE_ROWS; side += 8) {
            __m256 parts[N][4];
            for (int t = 0; t < N; t++)
                for (int i = 0; i < 4; i++)
                    parts[t][i] = _mm256_setzero_ps();
#pragma GCC unroll 8
            for (int q = 0; q < QUADS; q++)
#pragma GCC unroll 4
                for (int i = 0; i < 4; i++) {
                    __m256 weights = _mm256_load_ps(tile.weights[b * BLOCK + q * 4 + i] + side);
#pragma GCC unroll 2
                    for (int t = 0; t < N; t++)
                        parts[t][i] = _mm256_fmadd_ps(weights, _mm256_set1_ps(x[t][q * 4 + i]), parts[t][i]);
                }
            __m256 scales = _mm256_load_ps(tile.scales[b] + side);
            for (int t = 0; t < N; t++) {
                __m256 total = _mm256_add_ps(
                    _mm256_add_ps(parts[t][0], parts[t][1]), _mm256_add_ps(parts[t][2], parts[t][3]));
                float scale = tokens.scales[(first + t) * tokens.block_stride + b];
                float *sum = sums[first + t] + side;
                __m256 factor = _mm256_mul_ps(scales, _mm256_set1_ps(scale));
                _mm256_storeu_ps(sum, _mm256_fmadd_ps(total, factor, _mm256_loadu_ps(sum)));
            }
        }
    }
}

void avx2_add_floats(const FloatTile &tile, const TokenBlock &tokens, int num_tokens, Sums &sums) {
    int t = 0;
    for (; t + 2 <= num_tokens; t += 2)
        avx2_add_float_tokens<2>(tile, tokens, t, sums);
    if (t < num_tokens)
        avx2_add_float_tokens<1>(tile, tokens, t, sums);
}

}  // namespace

const Kernels AVX2_ONLY = {"avx2",    avx2_quantize,    avx2_fill,
                           avx2::add, avx2_fill_floats, avx2_add_floats, avx2_add_interleaved, nullptr, nullptr};
#if HAS_AVX_VNNI
const Kernels AVX2_VNNI = {"avxvnni",    avx2_quantize,    avx2_fill,
                           avxvnni::add, avx2_fill_floats, avx2_add_floats, avxvnni_add_interleaved, nullptr, nullptr};
#endif

}  // namespace outrider

#endif
