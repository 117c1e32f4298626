#include "quantized.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "threads.h"

#if defined(__x86_64__)
#include <immintrin.h>
#define AVX512 __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,bmi2,f16c,fma,avx2")))
#define AVX2 __attribute__((target("avx2,f16c,fma")))
#endif
#define INLINE inline __attribute__((always_inline))

namespace outrider {
namespace {

constexpr int MAX_SIZE = 768;  // elements of a row in a tile: it stays in the L1 cache
constexpr int MAX_BLOCKS = MAX_SIZE / BLOCK;
constexpr int QUADS = BLOCK / 4;           // four codes of a row are multiplied by one instruction
constexpr int MAX_TOKENS = 8;              // that are computed together: three registers each for their sums
constexpr int LOW_BITS = 7;                // a token's code is high * 2^LOW_BITS + low
constexpr int PAIR = 2 * BLOCK;            // bytes of a token's block
constexpr int CHUNKS_PER_THREAD = 8;       // at least; the last thread to finish is late by one chunk at most
constexpr long MAX_CHUNK = 500'000;        // products of weights and tokens, beyond the first tokens
constexpr long MIN_SHARED = 100'000;       // elements of the weights from which several threads pay
constexpr int FREE_TOKENS = 8;             // tokens that are computed in the time that the weights take to arrive

constexpr float MAX_CODE = 127 << LOW_BITS;
constexpr float TINY = 1e-30f;  // smaller elements count as zero: the inverse of their scale would overflow

// TILE_ROWS rows of the weights by up to MAX_SIZE elements, arranged for the kernels.
struct alignas(64) Tile {
    uint8_t codes[MAX_BLOCKS][QUADS][TILE_ROWS][4];  // elements in the order of QuantizedTokens::codes
    float scales[MAX_BLOCKS][TILE_ROWS];             // by group
    float biases[MAX_BLOCKS][TILE_ROWS];
    int num_blocks, blocks_per_group, bits;
};

// Up to MAX_TOKENS tokens, from the tile's first element on.
struct TokenBlock {
    const int8_t *codes;
    const float *scales, *sums;
    ptrdiff_t code_stride, block_stride;  // from one token to the next
};

using Sums = float[MAX_TOKENS][TILE_ROWS];

struct Kernels {
    const char *name;
    void (*quantize)(const float *x, int num_blocks, int8_t *codes, float *scales, float *sums);
    void (*fill)(const QuantizedMatrix &w, int row, int first, int size, Tile &tile);
    void (*add)(const Tile &tile, const TokenBlock &tokens, int num_tokens, Sums &sums);
};

// -- floats ----------------------------------------------------------------------------------------------------------

INLINE float from_bits(uint32_t bits) {
    float value;
    std::memcpy(&value, &bits, 4);
    return value;
}

INLINE float from_half(uint16_t half) {
    uint32_t sign = (half & 0x8000u) << 16, rest = half & 0x7fffu;
    if (rest >= 0x7c00u)  // infinity or NaN
        return from_bits(sign | 0x7f800000u | (rest & 0x3ffu) << 13);
    // The exponent is rebiased by a multiplication, which is exact for subnormal numbers too.
    return from_bits(sign | (rest << 13)) * 0x1p112f;
}

INLINE float load(const void *values, FloatType type, ptrdiff_t i) {
    switch (type) {
    case FloatType::float32: return static_cast<const float *>(values)[i];
    case FloatType::float16: return from_half(static_cast<const uint16_t *>(values)[i]);
    default: return from_bits(static_cast<uint32_t>(static_cast<const uint16_t *>(values)[i]) << 16);
    }
}

// -- any CPU ---------------------------------------------------------------------------------------------------------

// Position of element i of eight in QuantizedTokens::codes.
constexpr int position(int i) { return i / 2 + i % 2 * 4; }

INLINE int code_at(const uint8_t *row, int bits, int k) {
    int bit = k * bits, byte = bit / 8, shift = bit % 8;
    int two = row[byte];
    if (shift + bits > 8)
        two |= row[byte + 1] << 8;
    return two >> shift & ((1 << bits) - 1);
}

// To the nearest integer, ties to even: numbers of the size of 1.5 * 2^23 are integers.
INLINE float rounded(float x) { return (x + 12582912.0f) - 12582912.0f; }

INLINE void quantize_blocks(const float *x, int num_blocks, int8_t *codes, float *scales, float *sums) {
    for (int b = 0; b < num_blocks; b++, x += BLOCK, codes += PAIR) {
        float most[8] = {}, odd[8] = {};
        for (int i = 0; i < BLOCK; i += 8)
            for (int lane = 0; lane < 8; lane++) {
                float size = std::fabs(x[i + lane]);
                most[lane] = size > most[lane] ? size : most[lane];
                odd[lane] += x[i + lane] * 0.0f;  // NaN if the element is NaN or infinite
            }
        float amax = 0, nan = 0;
        for (int lane = 0; lane < 8; lane++) {
            amax = most[lane] > amax ? most[lane] : amax;
            nan += odd[lane];
        }
        float inverse = amax > TINY ? 127.0f / amax : 0.0f;
        if (nan != nan)
            inverse = 0;
        int32_t high[BLOCK], low[BLOCK], sum = 0;
        for (int i = 0; i < BLOCK; i++) {
            float scaled = inverse == 0 ? 0 : x[i] * inverse, whole = rounded(scaled);
            high[i] = static_cast<int32_t>(whole);
            low[i] = static_cast<int32_t>(rounded((scaled - whole) * (1 << LOW_BITS)));
        }
        for (int i = 0; i < BLOCK; i++)
            sum += (high[i] << LOW_BITS) + low[i];
        for (int i = 0; i < BLOCK; i++) {
            codes[i / 8 * 8 + position(i % 8)] = static_cast<int8_t>(high[i]);
            codes[BLOCK + i / 8 * 8 + position(i % 8)] = static_cast<int8_t>(low[i]);
        }
        scales[b] = nan != nan ? std::numeric_limits<float>::quiet_NaN() : inverse == 0 ? 0 : amax / MAX_CODE;
        sums[b] = scales[b] * static_cast<float>(sum);
    }
}

const uint8_t *row_of(const QuantizedMatrix &w, int row) {
    row = std::min(row, w.num_rows - 1);  // a tile may have more rows than the weights: their results are not used
    return reinterpret_cast<const uint8_t *>(w.codes) + static_cast<ptrdiff_t>(row) * w.size / 8 * w.bits;
}

INLINE void fill_scales(const QuantizedMatrix &w, int row, int first, int size, Tile &tile) {
    int per_row = w.size / w.group_size, begin = first / w.group_size, end = (first + size - 1) / w.group_size + 1;
    for (int r = 0; r < TILE_ROWS; r++) {
        ptrdiff_t at = static_cast<ptrdiff_t>(std::min(row + r, w.num_rows - 1)) * per_row + begin;
        for (int group = 0; group < end - begin; group++) {
            tile.scales[group][r] = load(w.scales, w.type, at + group);
            tile.biases[group][r] = load(w.biases, w.type, at + group);
        }
    }
    tile.num_blocks = size / BLOCK;
    tile.blocks_per_group = w.group_size / BLOCK;
    tile.bits = w.bits;
}

void portable_quantize(const float *x, int num_blocks, int8_t *codes, float *scales, float *sums) {
    quantize_blocks(x, num_blocks, codes, scales, sums);
}

void portable_fill(const QuantizedMatrix &w, int row, int first, int size, Tile &tile) {
    fill_scales(w, row, first, size, tile);
    for (int r = 0; r < TILE_ROWS; r++) {
        const uint8_t *codes = row_of(w, row + r);
        for (int k = 0; k < size; k++) {
            int at = k % BLOCK / 8 * 8 + position(k % 8);
            tile.codes[k / BLOCK][at / 4][r][at % 4] = static_cast<uint8_t>(code_at(codes, w.bits, first + k));
        }
    }
}

void portable_add(const Tile &tile, const TokenBlock &tokens, int num_tokens, Sums &sums) {
    for (int t = 0; t < num_tokens; t++)
        for (int b = 0; b < tile.num_blocks; b++) {
            const int8_t *x = tokens.codes + t * tokens.code_stride + b * PAIR;
            float scale = tokens.scales[t * tokens.block_stride + b], sum = tokens.sums[t * tokens.block_stride + b];
            int group = b / tile.blocks_per_group;
            for (int r = 0; r < TILE_ROWS; r++) {
                int32_t total = 0;
                for (int q = 0; q < QUADS; q++)
                    for (int i = 0; i < 4; i++)
                        total += tile.codes[b][q][r][i] * ((x[q * 4 + i] << LOW_BITS) + x[BLOCK + q * 4 + i]);
                float added = std::fma(static_cast<float>(total), tile.scales[group][r] * scale, sums[t][r]);
                sums[t][r] = std::fma(tile.biases[group][r], sum, added);
            }
        }
}

constexpr Kernels PORTABLE = {"portable", portable_quantize, portable_fill, portable_add};

#if defined(__x86_64__)

// -- x86: both instruction sets --------------------------------------------------------------------------------------

// Eight codes, which take `bits` bytes.
INLINE uint64_t load_eight(const uint8_t *codes, int bits) {
    uint64_t packed = 0;
    std::memcpy(&packed, codes, bits);
    return packed;
}

AVX2 INLINE __m128i evens_first(__m128i bytes) {
    return _mm_shuffle_epi8(bytes, _mm_setr_epi8(0, 2, 4, 6, 1, 3, 5, 7, 8, 10, 12, 14, 9, 11, 13, 15));
}

AVX2 INLINE void fill_half_scales(const QuantizedMatrix &w, int row, int first, int size, Tile &tile) {
    if (w.type != FloatType::float16)
        return fill_scales(w, row, first, size, tile);
    int per_row = w.size / w.group_size, begin = first / w.group_size, end = (first + size - 1) / w.group_size + 1;
    for (int r = 0; r < TILE_ROWS; r++) {
        ptrdiff_t at = static_cast<ptrdiff_t>(std::min(row + r, w.num_rows - 1)) * per_row + begin;
        const uint16_t *scales = static_cast<const uint16_t *>(w.scales) + at;
        const uint16_t *biases = static_cast<const uint16_t *>(w.biases) + at;
        for (int group = 0; group < end - begin; group++) {
            tile.scales[group][r] = _cvtsh_ss(scales[group]);
            tile.biases[group][r] = _cvtsh_ss(biases[group]);
        }
    }
    tile.num_blocks = size / BLOCK;
    tile.blocks_per_group = w.group_size / BLOCK;
    tile.bits = w.bits;
}

// -- AVX-512 with VNNI -----------------------------------------------------------------------------------------------

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
AVX512 void avx512_quantize(const float *x, int num_blocks, int8_t *codes, float *scales, float *sums) {
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
        __m512i first_sum = quantize_half(_mm512_mul_ps(first, _mm512_set1_ps(inverse)), codes);
        __m512i second_sum = quantize_half(_mm512_mul_ps(second, _mm512_set1_ps(inverse)), codes + 16);
        scales[b] = !is_finite ? std::numeric_limits<float>::quiet_NaN() : inverse == 0 ? 0 : amax / MAX_CODE;
        sums[b] = scales[b] * static_cast<float>(_mm512_reduce_add_epi32(_mm512_add_epi32(first_sum, second_sum)));
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

// The 32 codes of a block of one row, a byte each.
AVX512 INLINE void avx512_spread(const uint8_t *block, int bits, uint8_t out[BLOCK]) {
    uint64_t mask = 0x0101010101010101u * ((1u << bits) - 1);
    for (int i = 0; i < BLOCK / 8; i++) {
        uint64_t bytes = _pdep_u64(load_eight(block + i * bits, bits), mask);
        std::memcpy(out + i * 8, &bytes, 8);
    }
}

// Four pieces of `mask` bytes each, as four_rows has them.
AVX512 INLINE __m512i four_pieces(const uint8_t *const rows[TILE_ROWS], int r, __mmask16 mask) {
    __m512i found = _mm512_castsi128_si512(_mm_maskz_loadu_epi8(mask, rows[r]));
    found = _mm512_inserti32x4(found, _mm_maskz_loadu_epi8(mask, rows[r + 4]), 1);
    found = _mm512_inserti32x4(found, _mm_maskz_loadu_epi8(mask, rows[r + 8]), 2);
    return _mm512_inserti32x4(found, _mm_maskz_loadu_epi8(mask, rows[r + 12]), 3);
}

AVX512 INLINE __m512 widened(__m512i halves, FloatType type) {  // 16 numbers of 16 bits, in the low bits of lanes
    if (type == FloatType::bfloat16)
        return _mm512_castsi512_ps(_mm512_slli_epi32(halves, 16));
    return _mm512_cvtph_ps(_mm512_cvtepi32_epi16(halves));
}

// out[group][row] from 16-bit numbers, which begin at offsets[row].
AVX512 INLINE void fill_halves(
    const void *values, FloatType type, const ptrdiff_t offsets[TILE_ROWS], int num_groups,
    float out[MAX_BLOCKS][TILE_ROWS]) {
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

AVX512 INLINE void avx512_fill_scales(const QuantizedMatrix &w, int row, int first, int size, Tile &tile) {
    if (w.type == FloatType::float32)
        return fill_scales(w, row, first, size, tile);
    ptrdiff_t offsets[TILE_ROWS], per_row = w.size / w.group_size;
    for (int r = 0; r < TILE_ROWS; r++)
        offsets[r] = std::min(row + r, w.num_rows - 1) * per_row + first / w.group_size;
    fill_halves(w.scales, w.type, offsets, size / w.group_size, tile.scales);
    fill_halves(w.biases, w.type, offsets, size / w.group_size, tile.biases);
    tile.num_blocks = size / BLOCK;
    tile.blocks_per_group = w.group_size / BLOCK;
    tile.bits = w.bits;
}

AVX512 void avx512_fill(const QuantizedMatrix &w, int row, int first, int size, Tile &tile) {
    avx512_fill_scales(w, row, first, size, tile);
    const uint8_t *rows[TILE_ROWS];
    for (int r = 0; r < TILE_ROWS; r++)
        rows[r] = row_of(w, row + r) + first / 8 * w.bits;
    const __m512i order =
        _mm512_broadcast_i32x4(_mm_setr_epi8(0, 2, 4, 6, 1, 3, 5, 7, 8, 10, 12, 14, 9, 11, 13, 15));
    const __m512i low = _mm512_set1_epi8(15);
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
                _mm512_store_si512(tile.codes[b][2 * i], _mm512_and_si512(found[i], low));
                _mm512_store_si512(tile.codes[b][2 * i + 1], _mm512_and_si512(_mm512_srli_epi16(found[i], 4), low));
            }
            continue;
        }
        if (w.bits != 8)
            for (int r = 0; r < TILE_ROWS; r++)
                avx512_spread(rows[r] + offset, w.bits, bytes[r]);
        for (int half = 0; half < 2; half++) {
            for (int r = 0; r < 4; r++)
                pieces[r] = _mm512_shuffle_epi8(
                    w.bits == 8 ? four_rows(rows, r, offset + half * 16) : four_rows(spread, r, half * 16), order);
            transpose(pieces, found);
            for (int i = 0; i < 4; i++)
                _mm512_store_si512(tile.codes[b][half * 4 + i], found[i]);
        }
    }
}

INLINE int32_t load_four(const int8_t *codes) {
    int32_t four;
    std::memcpy(&four, codes, 4);
    return four;
}

template <int N>
AVX512 void avx512_add_tokens(const Tile &tile, const TokenBlock &tokens, Sums &sums) {
    constexpr int PARTS = N == 1 ? 2 : 1;  // sums that do not wait for each other; integers: exact
    __m512 sum[N];
#pragma GCC unroll 8
    for (int t = 0; t < N; t++)
        sum[t] = _mm512_loadu_ps(sums[t]);
    const int8_t *x = tokens.codes;
    for (int b = 0; b < tile.num_blocks; b++, x += PAIR) {
        __m512i high[N][PARTS], low[N][PARTS];
#pragma GCC unroll 8
        for (int t = 0; t < N; t++)
#pragma GCC unroll 4
            for (int part = 0; part < PARTS; part++)
                high[t][part] = low[t][part] = _mm512_setzero_si512();
#pragma GCC unroll 8
        for (int q = 0; q < QUADS; q++) {
            __m512i codes = _mm512_load_si512(tile.codes[b][q]);
#pragma GCC unroll 8
            for (int t = 0; t < N; t++) {
                __m512i &four_high = high[t][q % PARTS], &four_low = low[t][q % PARTS];
                const int8_t *four = x + t * tokens.code_stride + q * 4;
                four_high = _mm512_dpbusd_epi32(four_high, codes, _mm512_set1_epi32(load_four(four)));
                four_low = _mm512_dpbusd_epi32(four_low, codes, _mm512_set1_epi32(load_four(four + BLOCK)));
            }
        }
        int group = b / tile.blocks_per_group;
        __m512 scales = _mm512_load_ps(tile.scales[group]), biases = _mm512_load_ps(tile.biases[group]);
#pragma GCC unroll 8
        for (int t = 0; t < N; t++) {
            if (PARTS == 2) {
                high[t][0] = _mm512_add_epi32(high[t][0], high[t][PARTS - 1]);
                low[t][0] = _mm512_add_epi32(low[t][0], low[t][PARTS - 1]);
            }
            __m512i all = _mm512_add_epi32(_mm512_slli_epi32(high[t][0], LOW_BITS), low[t][0]);
            __m512 factor = _mm512_mul_ps(scales, _mm512_set1_ps(tokens.scales[t * tokens.block_stride + b]));
            sum[t] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(all), factor, sum[t]);
            sum[t] = _mm512_fmadd_ps(biases, _mm512_set1_ps(tokens.sums[t * tokens.block_stride + b]), sum[t]);
        }
    }
#pragma GCC unroll 8
    for (int t = 0; t < N; t++)
        _mm512_storeu_ps(sums[t], sum[t]);
}

void avx512_add(const Tile &tile, const TokenBlock &tokens, int num_tokens, Sums &sums) {
    switch (num_tokens) {
    case 1: return avx512_add_tokens<1>(tile, tokens, sums);
    case 2: return avx512_add_tokens<2>(tile, tokens, sums);
    case 3: return avx512_add_tokens<3>(tile, tokens, sums);
    case 4: return avx512_add_tokens<4>(tile, tokens, sums);
    case 5: return avx512_add_tokens<5>(tile, tokens, sums);
    case 6: return avx512_add_tokens<6>(tile, tokens, sums);
    case 7: return avx512_add_tokens<7>(tile, tokens, sums);
    default: return avx512_add_tokens<8>(tile, tokens, sums);
    }
}

constexpr Kernels AVX512_VNNI = {"avx512vnni", avx512_quantize, avx512_fill, avx512_add};

// -- AVX2 ------------------------------------------------------------------------------------------------------------

AVX2 void avx2_quantize(const float *x, int num_blocks, int8_t *codes, float *scales, float *sums) {
    quantize_blocks(x, num_blocks, codes, scales, sums);
}

// The same. Some CPUs with AVX2 take hundreds of cycles for pdep.
AVX2 INLINE void avx2_spread(const uint8_t *block, int bits, uint8_t out[BLOCK]) {
    if (bits == 8) {
        std::memcpy(out, block, BLOCK);
    } else if (bits == 4) {
        __m128i packed = _mm_loadu_si128(reinterpret_cast<const __m128i *>(block)), low = _mm_set1_epi8(15);
        __m128i evens = _mm_and_si128(packed, low), odds = _mm_and_si128(_mm_srli_epi16(packed, 4), low);
        _mm_store_si128(reinterpret_cast<__m128i *>(out), _mm_unpacklo_epi8(evens, odds));
        _mm_store_si128(reinterpret_cast<__m128i *>(out + 16), _mm_unpackhi_epi8(evens, odds));
    } else {
        for (int i = 0; i < BLOCK; i += 8) {
            uint64_t packed = load_eight(block + i / 8 * bits, bits);
            for (int k = 0; k < 8; k++)
                out[i + k] = packed >> k * bits & ((1u << bits) - 1);
        }
    }
}

AVX2 void avx2_fill(const QuantizedMatrix &w, int row, int first, int size, Tile &tile) {
    fill_half_scales(w, row, first, size, tile);
    const uint8_t *rows[TILE_ROWS];
    for (int r = 0; r < TILE_ROWS; r++)
        rows[r] = row_of(w, row + r) + first / 8 * w.bits;
    alignas(32) uint8_t bytes[BLOCK];
    for (int b = 0; b < tile.num_blocks; b++)
        for (int r = 0; r < TILE_ROWS; r++) {
            avx2_spread(rows[r] + static_cast<ptrdiff_t>(b) * (BLOCK / 8) * w.bits, w.bits, bytes);
            for (int half = 0; half < 2; half++) {
                alignas(16) uint32_t quads[4];
                _mm_store_si128(reinterpret_cast<__m128i *>(quads),
                                evens_first(_mm_load_si128(reinterpret_cast<__m128i *>(bytes + half * 16))));
                for (int q = 0; q < 4; q++)
                    std::memcpy(tile.codes[b][half * 4 + q][r], &quads[q], 4);
            }
        }
}

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

template <int N, bool HAS_EIGHTH_BIT>
AVX2 void avx2_add_tokens(const Tile &tile, const TokenBlock &tokens, int first, Sums &sums) {
    for (int half = 0; half < TILE_ROWS; half += 8) {
        __m256 sum[N];
        for (int t = 0; t < N; t++)
            sum[t] = _mm256_loadu_ps(sums[first + t] + half);
        for (int b = 0; b < tile.num_blocks; b++) {
            __m256i high[N], low[N];
            for (int t = 0; t < N; t++)
                high[t] = low[t] = _mm256_setzero_si256();
#pragma GCC unroll 8
            for (int q = 0; q < QUADS; q++) {
                __m256i codes = _mm256_load_si256(reinterpret_cast<const __m256i *>(tile.codes[b][q][half]));
#pragma GCC unroll 4
                for (int t = 0; t < N; t++) {
                    const int8_t *four = tokens.codes + (first + t) * tokens.code_stride + b * PAIR + q * 4;
                    high[t] = add_products(high[t], codes, _mm256_set1_epi32(load_four(four)), HAS_EIGHTH_BIT);
                    low[t] = add_products(low[t], codes, _mm256_set1_epi32(load_four(four + BLOCK)), HAS_EIGHTH_BIT);
                }
            }
            int group = b / tile.blocks_per_group;
            __m256 scales = _mm256_load_ps(tile.scales[group] + half);
            __m256 biases = _mm256_load_ps(tile.biases[group] + half);
#pragma GCC unroll 4
            for (int t = 0; t < N; t++) {
                ptrdiff_t at = (first + t) * tokens.block_stride + b;
                __m256i all = _mm256_add_epi32(_mm256_slli_epi32(high[t], LOW_BITS), low[t]);
                __m256 factor = _mm256_mul_ps(scales, _mm256_set1_ps(tokens.scales[at]));
                sum[t] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(all), factor, sum[t]);
                sum[t] = _mm256_fmadd_ps(biases, _mm256_set1_ps(tokens.sums[at]), sum[t]);
            }
        }
        for (int t = 0; t < N; t++)
            _mm256_storeu_ps(sums[first + t] + half, sum[t]);
    }
}

template <bool HAS_EIGHTH_BIT>
AVX2 void avx2_add_all(const Tile &tile, const TokenBlock &tokens, int num_tokens, Sums &sums) {
    int t = 0;
    for (; t + 2 <= num_tokens; t += 2)
        avx2_add_tokens<2, HAS_EIGHTH_BIT>(tile, tokens, t, sums);
    for (; t < num_tokens; t++)
        avx2_add_tokens<1, HAS_EIGHTH_BIT>(tile, tokens, t, sums);
}

void avx2_add(const Tile &tile, const TokenBlock &tokens, int num_tokens, Sums &sums) {
    (tile.bits == 8 ? avx2_add_all<true> : avx2_add_all<false>)(tile, tokens, num_tokens, sums);
}

constexpr Kernels AVX2_ONLY = {"avx2", avx2_quantize, avx2_fill, avx2_add};

#endif

// -- choice of the instructions --------------------------------------------------------------------------------------

bool has(const Kernels &kernels) {
#if defined(__x86_64__)
    __builtin_cpu_init();
    bool has_avx2 =
        __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
    if (&kernels == &AVX2_ONLY)
        return has_avx2;
    if (&kernels == &AVX512_VNNI)
        return has_avx2 && __builtin_cpu_supports("bmi2") && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
               __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
               __builtin_cpu_supports("avx512vnni");
#endif
    return &kernels == &PORTABLE;
}

const Kernels *const ALL_KERNELS[] = {
#if defined(__x86_64__)
    &AVX512_VNNI, &AVX2_ONLY,
#endif
    &PORTABLE};

const Kernels *find_kernels(const char *wanted) {
    for (const Kernels *kernels : ALL_KERNELS)
        if (has(*kernels) && (!*wanted || !std::strcmp(wanted, kernels->name)))
            return kernels;
    return nullptr;
}

const Kernels *kernels = find_kernels("");

// -- matmuls ---------------------------------------------------------------------------------------------------------

// Rows [row, row + TILE_ROWS) of the weights times all tokens.
void multiply_tile(const Product &product, int row, const QuantizedTokens &tokens) {
    const QuantizedMatrix &w = product.weights;
    Tile tile;
    int num_rows = std::min(TILE_ROWS, w.num_rows - row), num_blocks = tokens.size / BLOCK;
    // Tiles of about the same size, which depends on the weights alone. They begin and end with a group.
    int num_parts = (w.size + MAX_SIZE - 1) / MAX_SIZE, groups = w.size / w.group_size;
    int most = (groups + num_parts - 1) / num_parts * w.group_size;
    for (int k = 0; k < w.size; k += most) {
        kernels->fill(w, row, k, std::min(most, w.size - k), tile);
        for (int t = 0; t < tokens.num_tokens; t += MAX_TOKENS) {
            int count = std::min(MAX_TOKENS, tokens.num_tokens - t);
            TokenBlock block = {
                tokens.codes + 2 * (static_cast<ptrdiff_t>(t) * tokens.size + k),
                tokens.scales + static_cast<ptrdiff_t>(t) * num_blocks + k / BLOCK,
                tokens.sums + static_cast<ptrdiff_t>(t) * num_blocks + k / BLOCK,
                2 * static_cast<ptrdiff_t>(tokens.size),
                num_blocks,
            };
            alignas(64) Sums sums = {};
            float *y = product.y + t * product.stride + row;
            if (k > 0)
                for (int i = 0; i < count; i++)
                    std::memcpy(sums[i], y + i * product.stride, num_rows * sizeof(float));
            kernels->add(tile, block, count, sums);
            for (int i = 0; i < count; i++)
                std::memcpy(y + i * product.stride, sums[i], num_rows * sizeof(float));
        }
    }
}

int num_tiles(const Product &product) { return (product.weights.num_rows + TILE_ROWS - 1) / TILE_ROWS; }

}  // namespace

size_t token_bytes(int num_tokens, int size) {
    size_t num_codes = static_cast<size_t>(num_tokens) * size;
    return 2 * num_codes + 2 * sizeof(float) * (num_codes / BLOCK);
}

QuantizedTokens quantize(const float *x, int num_tokens, int size, ptrdiff_t stride, void *memory) {
    int num_blocks = size / BLOCK;
    auto *codes = static_cast<int8_t *>(memory);
    auto *scales = reinterpret_cast<float *>(codes + 2 * static_cast<ptrdiff_t>(num_tokens) * size);
    float *sums = scales + static_cast<ptrdiff_t>(num_tokens) * num_blocks;
    constexpr int TOKENS_PER_CHUNK = 16;
    int num_chunks = (num_tokens + TOKENS_PER_CHUNK - 1) / TOKENS_PER_CHUNK;
    parallel(num_chunks, [=](int chunk) {
        int end = std::min(num_tokens, (chunk + 1) * TOKENS_PER_CHUNK);
        for (ptrdiff_t t = chunk * TOKENS_PER_CHUNK; t < end; t++)
            kernels->quantize(
                x + t * stride, num_blocks, codes + 2 * t * size, scales + t * num_blocks, sums + t * num_blocks);
    });
    return {num_tokens, size, codes, scales, sums};
}

void multiply(const Product *products, int num_products, const QuantizedTokens &tokens) {
    int total = 0;
    long work = 0;
    for (int i = 0; i < num_products; i++) {
        total += num_tiles(products[i]);
        work += static_cast<long>(products[i].weights.num_rows) * tokens.size;
    }
    work *= std::max(1, tokens.num_tokens / FREE_TOKENS);
    long wanted = std::max<long>(CHUNKS_PER_THREAD * num_threads(), work / MAX_CHUNK);
    int num_chunks = work < MIN_SHARED ? 1 : static_cast<int>(std::min<long>(total, wanted));
    parallel(num_chunks, [&](int chunk) {
        int first = static_cast<int>(static_cast<long>(total) * chunk / num_chunks);
        int last = static_cast<int>(static_cast<long>(total) * (chunk + 1) / num_chunks);
        for (int i = 0, before = 0; i < num_products; before += num_tiles(products[i++]))
            for (int n = std::max(first, before); n < std::min(last, before + num_tiles(products[i])); n++)
                multiply_tile(products[i], (n - before) * TILE_ROWS, tokens);
    });
}

void dequantize_row(const QuantizedMatrix &w, int row, float *out) {
    const uint8_t *codes = row_of(w, row);
    ptrdiff_t per_row = w.size / w.group_size;
    for (int k = 0; k < w.size; k++) {
        ptrdiff_t group = row * per_row + k / w.group_size;
        float scale = load(w.scales, w.type, group), bias = load(w.biases, w.type, group);
        out[k] = scale * static_cast<float>(code_at(codes, w.bits, k)) + bias;
    }
}

const char *instructions() { return kernels->name; }

bool use(const char *wanted) {
    const Kernels *found = find_kernels(wanted);
    if (found)
        kernels = found;
    return found != nullptr;
}

}  // namespace outrider
