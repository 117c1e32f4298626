// What the kernels with AVX2 have in common.
#pragma once
#if defined(__x86_64__)

#include <immintrin.h>

#include "quantized_kernels.h"

#define AVX2 __attribute__((target("avx2,f16c,fma")))
#define AVX_VNNI __attribute__((target("avx2,f16c,fma,avxvnni")))

namespace outrider {

int avx2_add_interleaved(
    const QuantizedMatrix &w, int row, int num_tiles, const TokenBlock &tokens, int num_tokens, RowSums *sums);
int avxvnni_add_interleaved(
    const QuantizedMatrix &w, int row, int num_tiles, const TokenBlock &tokens, int num_tokens, RowSums *sums);

// Sums of four products of unsigned and signed bytes. Sums of two of them fit in 16 bits if codes have seven bits.
AVX2 INLINE __m256i add_products(__m256i total, __m256i codes, __m256i x, bool has_eighth_bit) {
    const __m256i ones = _mm256_set1_epi16(1);
    if (!has_eighth_bit)
        return _mm256_add_epi32(total, _mm256_madd_epi16(_mm256_maddubs_epi16(codes, x), ones));
    __m256i low = _mm256_and_si256(codes, _mm256_set1_epi8(127));
    __m256i high = _mm256_and_si256(_mm256_srli_epi16(codes, 7), _mm256_set1_epi8(1));
    total = _mm256_add_epi32(total, _mm256_madd_epi16(_mm256_maddubs_epi16(low, x), ones));
    return _mm256_add_epi32(total, _mm256_madd_epi16(_mm256_maddubs_epi16(high, x), _mm256_set1_epi16(128)));
}

}  // namespace outrider

#endif
