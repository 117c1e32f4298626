// What the kernels with AVX-512 have in common.
#pragma once
#if defined(__x86_64__)

#include <immintrin.h>

#include "quantized_kernels.h"

#define AVX512 __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,f16c,fma,avx2")))

namespace outrider {

int avx512_add_interleaved(
    const QuantizedMatrix &w, int row, int num_tiles, const TokenBlock &tokens, int num_tokens, RowSums *sums);
int amx_add_interleaved(
    const QuantizedMatrix &w, int row, int num_tiles, const TokenBlock &tokens, int num_tokens, RowSums *sums);
bool amx_configure(int num_tokens);
void amx_release();

// Adds the products of four codes of each row with four codes of a token. The token's codes are an operand in memory:
// compilers load and broadcast them by an instruction of its own, and matmuls then take a third longer on Intel's CPUs.
AVX512 INLINE void add_products(__m512i &sums, __m512i weights, const int8_t *four) {
    using Four = int32_t __attribute__((may_alias, aligned(1)));
    asm("vpdpbusd %2%{1to16%}, %1, %0" : "+v"(sums) : "v"(weights), "m"(*reinterpret_cast<const Four *>(four)));
}

// Four codes of a token, in every lane.
AVX512 INLINE __m512i four_codes(const int8_t *four) {
    using Four = int32_t __attribute__((may_alias, aligned(1)));
    __m512i found;
    asm("vpbroadcastd %1, %0" : "=v"(found) : "m"(*reinterpret_cast<const Four *>(four)));
    return found;
}

AVX512 INLINE __m512 widened(__m512i halves, ScaleType type) {  // 16 numbers of 16 bits, in the low bits of lanes
    if (type == ScaleType::bfloat16)
        return _mm512_castsi512_ps(_mm512_slli_epi32(halves, 16));
    return _mm512_cvtph_ps(_mm512_cvtepi32_epi16(halves));
}

// Numbers of 8 bits, in the low bits of lanes.
AVX512 INLINE __m512 from_bytes(__m512i codes, ScaleType type) {
    if (type == ScaleType::e8m0)  // a float with this exponent; 0 is the subnormal number 2^-127
        return _mm512_castsi512_ps(_mm512_max_epi32(_mm512_slli_epi32(codes, 23), _mm512_set1_epi32(0x400000)));
    __m512i size = _mm512_and_si512(codes, _mm512_set1_epi32(0x7f));
    __m512i sign = _mm512_and_si512(codes, _mm512_set1_epi32(0x80));
    __m512i half = _mm512_or_si512(_mm512_slli_epi32(sign, 8), _mm512_slli_epi32(size, 7));
    __m512 numbers = _mm512_mul_ps(widened(half, ScaleType::float16), _mm512_set1_ps(0x1p8f));
    __mmask16 nan = _mm512_cmpeq_epi32_mask(size, _mm512_set1_epi32(0x7f));
    return _mm512_mask_mov_ps(numbers, nan, _mm512_set1_ps(std::numeric_limits<float>::quiet_NaN()));
}

}  // namespace outrider

#endif
