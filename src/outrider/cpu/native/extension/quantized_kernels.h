// What the kernels of quantized.cpp have in common. Each instruction set has a file of its own.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "quantized.h"

#define INLINE inline __attribute__((always_inline))

// The build passes 0 for both if it fails: an assembler may be older than the compiler's headers.
#if !defined(HAS_AMX) && defined(__x86_64__) && \
    (__has_include(<amxint8intrin.h>) || __has_include(<amxintrin.h>))  // of GCC or of Clang
#define HAS_AMX 1
#endif

#if !defined(HAS_AVX_VNNI) && defined(__x86_64__) && __has_include(<avxvnniintrin.h>)
#define HAS_AVX_VNNI 1
#endif

namespace outrider {

constexpr int MAX_SIZE = 768;  // elements of a row in a tile: it stays in the L1 cache
constexpr int MAX_BLOCKS = MAX_SIZE / BLOCK;
constexpr int MAX_GROUPS = MAX_SIZE / HALF;
constexpr int MAX_FLOATS = 256;            // elements of a row in a tile of floats, for the same reason
constexpr int QUADS = BLOCK / 4;           // four codes of a row are multiplied by one instruction
constexpr int MAX_TOKENS = 8;              // that are computed together: three registers each for their sums
constexpr int MAX_INTERLEAVED = 16;        // the same for interleaved weights: their sums are in memory
constexpr int LOW_BITS = 7;                // a token's code is high * 2^LOW_BITS + low
constexpr int PAIR = 2 * BLOCK;            // bytes of a token's block

constexpr float MAX_CODE = 127 << LOW_BITS;
constexpr float TINY = 1e-30f;  // smaller elements count as zero: the inverse of their scale would overflow

// Of E2M1: twice the number that a code stands for, plus 12.
constexpr int E2M1_MIDDLE = 12;
constexpr uint8_t E2M1_CODES[16] = {12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0};
constexpr int E2M1_BITS = 5;

// TILE_ROWS rows of the weights by up to MAX_SIZE elements, arranged for the kernels: w = scale * code + bias.
struct alignas(64) Tile {
    uint8_t codes[MAX_BLOCKS][QUADS][TILE_ROWS][4];  // elements in the order of QuantizedTokens::codes
    float scales[MAX_GROUPS][TILE_ROWS];             // by group
    float biases[MAX_GROUPS][TILE_ROWS];
    int num_blocks, bits;
    int blocks_per_group;  // 0: a block has two groups
};

// The same of weights that are no integers: w = scale * weight.
struct alignas(64) FloatTile {
    float weights[MAX_FLOATS][TILE_ROWS];  // elements in the order of QuantizedTokens::codes
    float scales[MAX_FLOATS / BLOCK][TILE_ROWS];
    int num_blocks;
};

// Up to MAX_TOKENS tokens, from the tile's first element on.
struct TokenBlock {
    const int8_t *codes;
    const float *scales, *sums, *half_sums;
    ptrdiff_t code_stride, block_stride;  // from one token to the next
};

using RowSums = float[TILE_ROWS];  // of one token
using Sums = RowSums[MAX_TOKENS];

struct Kernels {
    const char *name;
    void (*quantize)(const float *x, int num_blocks, const QuantizedTokens &to);  // one token
    void (*fill)(const QuantizedMatrix &w, int row, int first, int size, Tile &tile);
    void (*add)(const Tile &tile, const TokenBlock &tokens, int num_tokens, Sums &sums);
    void (*fill_floats)(const QuantizedMatrix &w, int row, int first, int size, FloatTile &tile);
    void (*add_floats)(const FloatTile &tile, const TokenBlock &tokens, int num_tokens, Sums &sums);
    // The tiles of interleaved weights that begin with `row`, as many as are best computed together: at least one, at
    // most two and `num_tiles`. Returns how many. sums: MAX_INTERLEAVED tokens of each. null: interleaved weights are slow
    int (*add_interleaved)(const QuantizedMatrix &w, int row, int num_tiles, const TokenBlock &tokens, int num_tokens,
                           RowSums *sums);
    // Called by each thread before add_interleaved, with the same number of tokens. null: no need. If it has returned true,
    // the thread calls `release` at the end.
    bool (*configure)(int num_tokens);
    void (*release)();
};

extern const Kernels PORTABLE;
#if defined(__x86_64__)
extern const Kernels AVX2_ONLY, AVX512_VNNI;
#endif
#if HAS_AVX_VNNI
extern const Kernels AVX2_VNNI;
#endif
#if HAS_AMX
extern const Kernels AVX512_AMX;
#endif

// -- numbers ---------------------------------------------------------------------------------------------------------

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

INLINE float from_e8m0(uint8_t code) { return from_bits(std::max<uint32_t>(code << 23, 0x400000)); }

INLINE float from_e4m3(uint8_t code) {
    if ((code & 0x7f) == 0x7f)
        return std::numeric_limits<float>::quiet_NaN();
    return from_half(static_cast<uint16_t>((code & 0x80) << 8 | (code & 0x7f) << 7)) * 0x1p8f;
}

INLINE float load(const void *values, ScaleType type, ptrdiff_t i) {
    switch (type) {
    case ScaleType::float32: return static_cast<const float *>(values)[i];
    case ScaleType::float16: return from_half(static_cast<const uint16_t *>(values)[i]);
    case ScaleType::bfloat16: return from_bits(static_cast<uint32_t>(static_cast<const uint16_t *>(values)[i]) << 16);
    case ScaleType::e8m0: return from_e8m0(static_cast<const uint8_t *>(values)[i]);
    default: return from_e4m3(static_cast<const uint8_t *>(values)[i]);
    }
}

// What the scales of a tile are multiplied by, and the code that stands for zero if there are no biases.
INLINE float unit(const QuantizedMatrix &w) { return w.elements == Elements::e2m1 ? 0.5f : 1.0f; }
INLINE float middle(const QuantizedMatrix &w) {
    return w.elements == Elements::e2m1 ? E2M1_MIDDLE : 1 << (w.bits - 1);
}

// -- any CPU ---------------------------------------------------------------------------------------------------------

// Position of element i of eight in QuantizedTokens::codes.
constexpr int position(int i) { return i / 2 + i % 2 * 4; }

// The element of eight at such a position.
constexpr int element(int position) { return position % 4 * 2 + position / 4; }

INLINE const uint8_t *row_of(const QuantizedMatrix &w, int row) {
    row = std::min(row, w.num_rows - 1);  // a tile may have more rows than the weights: their results are not used
    return reinterpret_cast<const uint8_t *>(w.codes) + static_cast<ptrdiff_t>(row) * w.size / 8 * w.bits;
}

// The index of number `i` of a row that has `count` of them, if rows are interleaved.
INLINE ptrdiff_t interleaved(int row, int i, int count) {
    return (static_cast<ptrdiff_t>(row / TILE_ROWS) * count + i) * TILE_ROWS + row % TILE_ROWS;
}

// The index of the first scale of a row in a tile that begins with element `first`.
INLINE ptrdiff_t first_group(const QuantizedMatrix &w, int row, int first) {
    return static_cast<ptrdiff_t>(std::min(row, w.num_rows - 1)) * (w.size / w.group_size) + first / w.group_size;
}

// The index of a row's scale.
INLINE ptrdiff_t group_of(const QuantizedMatrix &w, int row, int group) {
    row = std::min(row, w.num_rows - 1);
    int count = w.size / w.group_size;
    return w.is_interleaved ? interleaved(row, group, count) : static_cast<ptrdiff_t>(row) * count + group;
}

INLINE int code_at(const uint8_t *row, int bits, int k) {
    int bit = k * bits, byte = bit / 8, shift = bit % 8;
    int two = row[byte];
    if (shift + bits > 8)
        two |= row[byte + 1] << 8;
    return two >> shift & ((1 << bits) - 1);
}

// The code of element k of a row.
INLINE int code_of(const QuantizedMatrix &w, int row, int k) {
    row = std::min(row, w.num_rows - 1);
    if (!w.is_interleaved)
        return code_at(row_of(w, row), w.bits, k);
    int in_word = 32 / w.bits;
    uint32_t word = w.codes[interleaved(row, k / in_word, w.size / in_word)];
    return word >> k % in_word * w.bits & ((1 << w.bits) - 1);
}

// To the nearest integer, ties to even: numbers of the size of 1.5 * 2^23 are integers.
INLINE float rounded(float x) { return (x + 12582912.0f) - 12582912.0f; }
INLINE void quantize_blocks(const float *x, int num_blocks, const QuantizedTokens &to) {
    int8_t *codes = to.codes;
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
        int32_t high[BLOCK], low[BLOCK], sums[2] = {};
        for (int i = 0; i < BLOCK; i++) {
            float scaled = inverse == 0 ? 0 : x[i] * inverse, whole = rounded(scaled);
            high[i] = static_cast<int32_t>(whole);
            low[i] = static_cast<int32_t>(rounded((scaled - whole) * (1 << LOW_BITS)));
        }
        for (int half = 0; half < 2; half++)
            for (int i = 0; i < HALF; i++)
                sums[half] += (high[half * HALF + i] << LOW_BITS) + low[half * HALF + i];
        for (int i = 0; i < BLOCK; i++) {
            codes[i / 8 * 8 + position(i % 8)] = static_cast<int8_t>(high[i]);
            codes[BLOCK + i / 8 * 8 + position(i % 8)] = static_cast<int8_t>(low[i]);
        }
        float scale = nan != nan ? std::numeric_limits<float>::quiet_NaN() : inverse == 0 ? 0 : amax / MAX_CODE;
        to.scales[b] = scale;
        to.sums[b] = scale * static_cast<float>(sums[0] + sums[1]);
        to.half_sums[2 * b] = scale * static_cast<float>(sums[0]);
        to.half_sums[2 * b + 1] = scale * static_cast<float>(sums[1]);
    }
}

INLINE void set_sizes(const QuantizedMatrix &w, int size, Tile &tile) {
    tile.num_blocks = size / BLOCK;
    tile.blocks_per_group = w.group_size / BLOCK;
    tile.bits = w.elements == Elements::e2m1 ? E2M1_BITS : w.bits;
}

INLINE void fill_scales(const QuantizedMatrix &w, int row, int first, int size, Tile &tile) {
    for (int r = 0; r < TILE_ROWS; r++)
        for (int group = 0; group < size / w.group_size; group++) {
            ptrdiff_t at = group_of(w, row + r, first / w.group_size + group);
            float scale = load(w.scales, w.type, at) * unit(w);
            tile.scales[group][r] = scale;
            tile.biases[group][r] = w.biases ? load(w.biases, w.type, at) : -middle(w) * scale;
        }
    set_sizes(w, size, tile);
}

INLINE void fill_float_scales(const QuantizedMatrix &w, int row, int first, int size, FloatTile &tile) {
    for (int r = 0; r < TILE_ROWS; r++) {
        ptrdiff_t at = first_group(w, row + r, first);
        for (int group = 0; group < size / w.group_size; group++)
            tile.scales[group][r] = load(w.scales, w.type, at + group);
    }
    tile.num_blocks = size / BLOCK;
}

INLINE int32_t load_four(const int8_t *codes) {
    int32_t four;
    std::memcpy(&four, codes, 4);
    return four;
}

// A token's codes in a block, as floats, in their order.
INLINE void load_floats(const int8_t *codes, float out[BLOCK]) {
    for (int i = 0; i < BLOCK; i++)
        out[i] = static_cast<float>(codes[i] * (1 << LOW_BITS) + codes[BLOCK + i]);
}

}  // namespace outrider
