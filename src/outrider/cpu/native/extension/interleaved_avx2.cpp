// Matmuls with interleaved weights for CPUs with AVX2, and with AVX-VNNI.
#include "interleaved.h"
#if defined(__x86_64__)

#include "quantized_avx2.h"

namespace outrider {
namespace {

// Eight codes of each of eight rows, a byte each: those at even places, then the others. A lane belongs to one row.
template <Codes CODES>
AVX2 INLINE void unpack_eight_rows(const uint8_t *words, __m256i &evens, __m256i &odds) {
    auto *found = reinterpret_cast<const __m256i *>(words);
    if (CODES == Codes::eight_bits) {
        const __m256i order =
            _mm256_broadcastsi128_si256(_mm_setr_epi8(0, 2, 1, 3, 4, 6, 5, 7, 8, 10, 9, 11, 12, 14, 13, 15));
        const __m256i low = _mm256_set1_epi32(0xffff);
        __m256i first = _mm256_shuffle_epi8(_mm256_loadu_si256(found), order);
        __m256i second = _mm256_shuffle_epi8(_mm256_loadu_si256(found + 2), order);  // 64 bytes on: of 16 rows
        evens = _mm256_or_si256(_mm256_and_si256(first, low), _mm256_slli_epi32(second, 16));
        odds = _mm256_or_si256(_mm256_srli_epi32(first, 16), _mm256_andnot_si256(low, second));
        return;
    }
    const __m256i low = _mm256_set1_epi8(15);
    __m256i packed = _mm256_loadu_si256(found);
    evens = _mm256_and_si256(packed, low);
    odds = _mm256_and_si256(_mm256_srli_epi16(packed, 4), low);
    if (CODES == Codes::e2m1) {
        const __m256i numbers =
            _mm256_broadcastsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i *>(E2M1_CODES)));
        evens = _mm256_shuffle_epi8(numbers, evens);
        odds = _mm256_shuffle_epi8(numbers, odds);
    }
}

// Of the first eight rows of a tile (side 0), or the last.
AVX2 INLINE __m256 load_eight_rows(const char *numbers, ScaleType type, int side) {
    switch (type) {
    case ScaleType::float32: return _mm256_loadu_ps(reinterpret_cast<const float *>(numbers) + 8 * side);
    case ScaleType::float16:
        return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i *>(numbers) + side));
    case ScaleType::bfloat16: {
        __m128i halves = _mm_loadu_si128(reinterpret_cast<const __m128i *>(numbers) + side);
        return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(halves), 16));
    }
    default:
        alignas(32) float found[8];
        for (int i = 0; i < 8; i++)
            found[i] = load(numbers, type, 8 * side + i);
        return _mm256_load_ps(found);
    }
}

AVX2 INLINE __m256i four_codes(const int8_t *four) { return _mm256_set1_epi32(load_four(four)); }

namespace avx2 {

// Sums of products of two bytes have 16 bits. Those of four instructions, of eight with codes of four bits, can be added
// before they need more.
template <Codes CODES, int NUM>
AVX2 INLINE __m256i sums_of(const __m256i (&codes)[NUM], const int8_t *fours) {
    constexpr int AT_ONCE = CODES == Codes::four_bits ? NUM : NUM < 4 ? NUM : 4;
    __m256i total = _mm256_setzero_si256();
#pragma GCC unroll 8
    for (int first = 0; first < NUM; first += AT_ONCE) {
        __m256i pairs = _mm256_setzero_si256();
#pragma GCC unroll 8
        for (int i = first; i < first + AT_ONCE; i++) {
            if (CODES == Codes::eight_bits)
                total = add_products(total, codes[i], four_codes(fours + i * 4), true);
            else
                pairs = _mm256_add_epi16(pairs, _mm256_maddubs_epi16(codes[i], four_codes(fours + i * 4)));
        }
        if (CODES != Codes::eight_bits)
            total = _mm256_add_epi32(total, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
    }
    return total;
}

template <Codes CODES, int NUM>
AVX2 INLINE void multiply(const __m256i (&codes)[NUM], const int8_t *fours, __m256i &high, __m256i &low) {
    high = sums_of<CODES, NUM>(codes, fours);
    low = sums_of<CODES, NUM>(codes, fours + BLOCK);
}

#define TARGET AVX2
#include "interleaved_add_kernels.h"

}  // namespace avx2

#if HAS_AVX_VNNI
namespace avxvnni {

template <Codes CODES, int NUM>
AVX_VNNI INLINE void multiply(const __m256i (&codes)[NUM], const int8_t *fours, __m256i &high, __m256i &low) {
    __m256i sums[4] = {};  // the odd ones do not wait for the even ones
#pragma GCC unroll 8
    for (int i = 0; i < NUM; i++) {
        int odd = i % 2;
        sums[odd] = _mm256_dpbusd_avx_epi32(sums[odd], codes[i], four_codes(fours + i * 4));
        sums[2 + odd] = _mm256_dpbusd_avx_epi32(sums[2 + odd], codes[i], four_codes(fours + i * 4 + BLOCK));
    }
    high = _mm256_add_epi32(sums[0], sums[1]);
    low = _mm256_add_epi32(sums[2], sums[3]);
}

#define TARGET AVX_VNNI
#include "interleaved_add_kernels.h"

}  // namespace avxvnni
#endif

}  // namespace

int avx2_add_interleaved(
    const QuantizedMatrix &w, int row, int num_tiles, const TokenBlock &tokens, int num_tokens, RowSums *sums) {
    return avx2::add_interleaved(w, row, num_tiles, tokens, num_tokens, sums);
}

#if HAS_AVX_VNNI
int avxvnni_add_interleaved(
    const QuantizedMatrix &w, int row, int num_tiles, const TokenBlock &tokens, int num_tokens, RowSums *sums) {
    return avxvnni::add_interleaved(w, row, num_tiles, tokens, num_tokens, sums);
}
#endif

}  // namespace outrider

#endif
