// Matmuls with interleaved weights, for CPUs with AMX: one instruction multiplies a block of several tokens by a block of
// 16 rows of the weights. Its sums are integers, and floats are added in the order of interleaved_avx512.cpp: results are
// the same to the bit. Few tokens leave most of a tile register empty; they are multiplied as there.
#include "interleaved_avx512.h"
#if HAS_AMX

#define AMX __attribute__((target("amx-tile,amx-int8,avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,f16c,fma,avx2")))

namespace outrider {
namespace {

constexpr int MIN_TOKENS = 6;       // fewer take longer than with VNNI
constexpr int AT_ONCE = 2;          // blocks whose sums are added together: the tokens' sums are loaded and stored once
constexpr int REGISTER_BYTES = 64;  // of a row of a tile register

// What `ldtilecfg` loads: the sizes of the tile registers. Registers 0 to 3 have sums of products: those of two tiles of the
// weights with the tokens' high bytes, then with their low bytes. 4 and 5 have these bytes, 6 and 7 the tiles' codes.
struct alignas(64) RegisterSizes {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t row_bytes[16] = {};
    uint8_t rows[16] = {};

    explicit RegisterSizes(int num_tokens) {
        for (int i = 0; i < 8; i++) {
            rows[i] = static_cast<uint8_t>(i < 6 ? num_tokens : QUADS);
            row_bytes[i] = static_cast<uint16_t>(i == 4 || i == 5 ? BLOCK : REGISTER_BYTES);
        }
    }
};

// Sums of products of a block with the high and the low bytes of the tokens.
struct alignas(64) BlockSums {
    int32_t high[MAX_INTERLEAVED][TILE_ROWS], low[MAX_INTERLEAVED][TILE_ROWS];
};

// The codes of a block, as tile registers want them.
using BlockCodes = uint8_t[QUADS][REGISTER_BYTES];

template <int TILES, Codes CODES>
AMX INLINE void unpack_block(const uint8_t *words, ptrdiff_t tile_bytes, BlockCodes (&to)[TILES]) {
    constexpr int BYTES = bytes_of_eight(CODES);
#pragma GCC unroll 4
    for (int i = 0; i < BLOCK / 8; i++, words += BYTES)
#pragma GCC unroll 2
        for (int tile = 0; tile < TILES; tile++) {
            const uint8_t *own = words + tile * tile_bytes;
            __m512i evens, odds;
            unpack<CODES>(own, evens, odds);
            _mm512_store_si512(to[tile][2 * i], evens);
            _mm512_store_si512(to[tile][2 * i + 1], odds);
            __builtin_prefetch(own + AHEAD * (BLOCK / 8) * BYTES);
            if (CODES == Codes::eight_bits)
                __builtin_prefetch(own + AHEAD * (BLOCK / 8) * BYTES + 64);
        }
}

template <int TILES>
AMX INLINE void store_sums(BlockSums (&to)[TILES]) {
    _tile_stored(0, to[0].high, REGISTER_BYTES);
    _tile_stored(1, to[0].low, REGISTER_BYTES);
    if (TILES > 1) {
        _tile_stored(2, to[TILES - 1].high, REGISTER_BYTES);
        _tile_stored(3, to[TILES - 1].low, REGISTER_BYTES);
    }
}

// Multiplies a block. The sums of the block before are stored first, each just before its register is needed: by then they
// are ready.
template <int TILES>
AMX INLINE void multiply_block(
    const BlockCodes (&codes)[TILES], const int8_t *bytes, ptrdiff_t stride, BlockSums (&before)[TILES]) {
    // The intrinsics of g++ do not say that they read memory: stores to `codes` could be moved behind them.
    asm volatile("" : : : "memory");
    _tile_loadd(4, bytes, stride);
    _tile_loadd(5, bytes + BLOCK, stride);
    _tile_loadd(6, codes[0], REGISTER_BYTES);
    _tile_stored(0, before[0].high, REGISTER_BYTES);
    _tile_zero(0);
    _tile_dpbsud(0, 4, 6);
    _tile_stored(1, before[0].low, REGISTER_BYTES);
    _tile_zero(1);
    _tile_dpbsud(1, 5, 6);
    if (TILES > 1) {
        _tile_loadd(7, codes[TILES - 1], REGISTER_BYTES);
        _tile_stored(2, before[TILES - 1].high, REGISTER_BYTES);
        _tile_zero(2);
        _tile_dpbsud(2, 4, 7);
        _tile_stored(3, before[TILES - 1].low, REGISTER_BYTES);
        _tile_zero(3);
        _tile_dpbsud(3, 5, 7);
    }
}

// Adds the sums of NUM blocks, the first of which is `first`, to those of the tokens.
template <int TILES>
AMX INLINE void add_blocks(
    const BlockSums (&found)[AT_ONCE][TILES], const __m512 (&scale)[AT_ONCE][TILES],
    const __m512 (&bias)[AT_ONCE][TILES], int num, int first,
    const TokenBlock &tokens, int num_tokens, RowSums *sums) {
    const float *token_scale = tokens.scales + first, *token_sum = tokens.sums + first;
    const ptrdiff_t stride = tokens.block_stride;
    for (int t = 0; t < num_tokens; t++, token_scale += stride, token_sum += stride) {
#pragma GCC unroll 2
        for (int tile = 0; tile < TILES; tile++) {
            float *own = sums[tile * MAX_INTERLEAVED + t];
            __m512 sum = _mm512_load_ps(own);
#pragma GCC unroll 8
            for (int i = 0; i < num; i++) {
                __m512i high = _mm512_load_si512(found[i][tile].high[t]), low = _mm512_load_si512(found[i][tile].low[t]);
                __m512i all = _mm512_add_epi32(_mm512_slli_epi32(high, LOW_BITS), low);
                __m512 factor = _mm512_mul_ps(scale[i][tile], _mm512_set1_ps(token_scale[i]));
                sum = _mm512_fmadd_ps(_mm512_cvtepi32_ps(all), factor, sum);
                sum = _mm512_fmadd_ps(bias[i][tile], _mm512_set1_ps(token_sum[i]), sum);
            }
            _mm512_store_ps(own, sum);
        }
    }
}

// A block is unpacked, the block before it multiplied, and every second time the two before that are added: each of these
// works while the others wait. Numbers of blocks count modulo two.
template <int TILES, Codes CODES>
AMX void add(const QuantizedMatrix &w, int row, const TokenBlock &tokens, int num_tokens, RowSums *sums) {
    const int num_blocks = w.size / BLOCK, blocks_per_group = w.group_size / BLOCK;
    const ptrdiff_t tile_bytes = static_cast<ptrdiff_t>(TILE_ROWS) * w.size / 8 * w.bits;
    const ptrdiff_t block_bytes = TILE_ROWS * BLOCK / 8 * w.bits;
    auto *words = reinterpret_cast<const uint8_t *>(w.codes) + row / TILE_ROWS * tile_bytes;
    Scales of_groups[] = {Scales(w, row), Scales(w, row + (TILES - 1) * TILE_ROWS)};
    __m512 scale[AT_ONCE][TILES] = {}, bias[AT_ONCE][TILES] = {}, next_scale[TILES] = {}, next_bias[TILES] = {};
    alignas(64) BlockCodes codes[2][TILES];
    BlockSums found[AT_ONCE][TILES];
    for (int tile = 0; tile < TILES; tile++)
        for (int t = 0; t < num_tokens; t++)
            _mm512_store_ps(sums[tile * MAX_INTERLEAVED + t], _mm512_setzero_ps());
    unpack_block<TILES, CODES>(words, tile_bytes, codes[0]);
    for (int b = 0, left = 0; b < num_blocks; b++) {
        if (b + 1 < num_blocks)
            unpack_block<TILES, CODES>(words + (b + 1) * block_bytes, tile_bytes, codes[(b + 1) % 2]);
        multiply_block<TILES>(codes[b % 2], tokens.codes + b * PAIR, tokens.code_stride, found[(b + AT_ONCE - 1) % AT_ONCE]);
        if (b > 0 && b % AT_ONCE == 0)
            add_blocks<TILES>(found, scale, bias, AT_ONCE, b - AT_ONCE, tokens, num_tokens, sums);
        if (left-- == 0) {
            for (int tile = 0; tile < TILES; tile++)
                of_groups[tile].next(next_scale[tile], next_bias[tile]);
            left = blocks_per_group - 1;
        }
        for (int tile = 0; tile < TILES; tile++)
            scale[b % AT_ONCE][tile] = next_scale[tile], bias[b % AT_ONCE][tile] = next_bias[tile];
    }
    store_sums<TILES>(found[(num_blocks - 1) % AT_ONCE]);
    int num = (num_blocks - 1) % AT_ONCE + 1;
    add_blocks<TILES>(found, scale, bias, num, num_blocks - num, tokens, num_tokens, sums);
}

template <int TILES>
void add_tiles(const QuantizedMatrix &w, int row, const TokenBlock &tokens, int num_tokens, RowSums *sums) {
    auto *of_format = w.bits == 8                     ? add<TILES, Codes::eight_bits>
                      : w.elements == Elements::e2m1 ? add<TILES, Codes::e2m1>
                                                     : add<TILES, Codes::four_bits>;
    of_format(w, row, tokens, num_tokens, sums);
}

}  // namespace

int amx_add_interleaved(
    const QuantizedMatrix &w, int row, int num_tiles, const TokenBlock &tokens, int num_tokens, RowSums *sums) {
    if (num_tokens < MIN_TOKENS || w.group_size == HALF)
        return avx512_add_interleaved(w, row, num_tiles, tokens, num_tokens, sums);
    if (num_tiles == 1 || w.bits == 8) {  // with 8 bits, two tiles at once are slower
        add_tiles<1>(w, row, tokens, num_tokens, sums);
        return 1;
    }
    add_tiles<2>(w, row, tokens, num_tokens, sums);
    return 2;
}

AMX bool amx_configure(int num_tokens) {
    if (num_tokens < MIN_TOKENS)
        return false;
    RegisterSizes sizes(num_tokens);
    // The intrinsic of g++ before 12.4 claims to read 8 bytes: compilers would drop the stores to all others.
    asm volatile("" : : "m"(sizes));
    _tile_loadconfig(&sizes);
    return true;
}

AMX void amx_release() { _tile_release(); }

}  // namespace outrider

#endif
