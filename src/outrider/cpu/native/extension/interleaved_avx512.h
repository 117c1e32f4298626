// How kernels with AVX-512 read interleaved weights: codes and scales, as they arrive from memory.
#pragma once
#include "interleaved.h"
#include "quantized_avx512.h"
#if defined(__x86_64__)

namespace outrider {

// Eight codes of each row, a byte each: those at even places, then the others. A lane of the words belongs to one row.
template <Codes CODES>
AVX512 INLINE void unpack(const uint8_t *words, __m512i &evens, __m512i &odds) {
    if (CODES == Codes::eight_bits) {
        const __m512i order =
            _mm512_broadcast_i32x4(_mm_setr_epi8(0, 2, 1, 3, 4, 6, 5, 7, 8, 10, 9, 11, 12, 14, 13, 15));
        const __m512i low = _mm512_set1_epi32(0xffff);
        __m512i first = _mm512_shuffle_epi8(_mm512_loadu_si512(words), order);
        __m512i second = _mm512_shuffle_epi8(_mm512_loadu_si512(words + 64), order);
        evens = _mm512_or_si512(_mm512_and_si512(first, low), _mm512_slli_epi32(second, 16));
        odds = _mm512_or_si512(_mm512_srli_epi32(first, 16), _mm512_andnot_si512(low, second));
        return;
    }
    const __m512i low = _mm512_set1_epi8(15);
    __m512i found = _mm512_loadu_si512(words);
    evens = _mm512_and_si512(found, low);
    odds = _mm512_and_si512(_mm512_srli_epi16(found, 4), low);
    if (CODES == Codes::e2m1) {
        const __m512i numbers =
            _mm512_broadcast_i32x4(_mm_loadu_si128(reinterpret_cast<const __m128i *>(E2M1_CODES)));
        evens = _mm512_shuffle_epi8(numbers, evens);
        odds = _mm512_shuffle_epi8(numbers, odds);
    }
}

// TILE_ROWS numbers.
AVX512 INLINE __m512 load_rows(const char *numbers, ScaleType type) {
    switch (type) {
    case ScaleType::float32: return _mm512_loadu_ps(numbers);
    case ScaleType::float16: return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i *>(numbers)));
    case ScaleType::bfloat16: {
        __m256i halves = _mm256_loadu_si256(reinterpret_cast<const __m256i *>(numbers));
        return widened(_mm512_cvtepu16_epi32(halves), type);
    }
    default:
        return from_bytes(_mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i *>(numbers))), type);
    }
}

// The scales and biases of TILE_ROWS rows, group after group.
struct Scales : GroupScales {
    using GroupScales::GroupScales;

    AVX512 INLINE void next(__m512 &scale, __m512 &bias) {
        scale = _mm512_mul_ps(load_rows(scales, type), _mm512_set1_ps(unit));
        bias = biases ? load_rows(biases, type) : _mm512_mul_ps(scale, _mm512_set1_ps(no_bias));
        advance();
    }
};

}  // namespace outrider

#endif
