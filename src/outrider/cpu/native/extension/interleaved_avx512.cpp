// Matmuls with interleaved weights, for CPUs with AVX-512 and VNNI. Codes are used as they arrive, without a tile in
// between, and the next ones are fetched meanwhile: memory and arithmetic overlap.
#include "interleaved_avx512.h"
#if defined(__x86_64__)

namespace outrider {
namespace {

// A token's block times the codes of a block, or half a block, of TILES tiles: sums of products with its high bytes and
// with its low bytes. Integers: exact in any order.
template <int TILES, int NUM>
AVX512 INLINE void multiply(
    const __m512i (&codes)[TILES][NUM], const int8_t *fours, __m512i (&high)[TILES], __m512i (&low)[TILES]) {
    if constexpr (TILES == 1) {
        __m512i high_odds = _mm512_setzero_si512(), low_odds = high_odds;  // sums that do not wait for the others
        high[0] = low[0] = high_odds;
#pragma GCC unroll 8
        for (int quad = 0; quad < NUM; quad++) {
            add_products(quad % 2 ? high_odds : high[0], codes[0][quad], fours + quad * 4);
            add_products(quad % 2 ? low_odds : low[0], codes[0][quad], fours + quad * 4 + BLOCK);
        }
        high[0] = _mm512_add_epi32(high[0], high_odds);
        low[0] = _mm512_add_epi32(low[0], low_odds);
        return;
    }
    for (int tile = 0; tile < TILES; tile++)
        high[tile] = low[tile] = _mm512_setzero_si512();
#pragma GCC unroll 8
    for (int quad = 0; quad < NUM; quad++) {
        __m512i four = four_codes(fours + quad * 4), low_four = four_codes(fours + quad * 4 + BLOCK);
#pragma GCC unroll 2
        for (int tile = 0; tile < TILES; tile++) {
            high[tile] = _mm512_dpbusd_epi32(high[tile], codes[tile][quad], four);
            low[tile] = _mm512_dpbusd_epi32(low[tile], codes[tile][quad], low_four);
        }
    }
}

// The codes of a block are unpacked once and stay in registers for all tokens. The sums of the tokens are in memory: a
// block of a tile has sixteen multiplications for each load and store of them. Two tiles at once share what is loaded of
// a token. sums: those of the first tile, then those of the second one, MAX_INTERLEAVED tokens each.
template <int TILES, bool HALVES, Codes CODES>
AVX512 void add(const QuantizedMatrix &w, int row, const TokenBlock &tokens, int num_tokens, RowSums *sums) {
    constexpr int PARTS = HALVES ? 2 : 1;      // of a block that have a scale of their own
    constexpr int EIGHTS = BLOCK / 8 / PARTS;  // of codes, in a part
    constexpr int BYTES = bytes_of_eight(CODES);
    const int num_blocks = w.size / BLOCK, blocks_per_group = HALVES ? 1 : w.group_size / BLOCK;
    const ptrdiff_t tile_bytes = static_cast<ptrdiff_t>(TILE_ROWS) * w.size / 8 * w.bits;
    auto *words = reinterpret_cast<const uint8_t *>(w.codes) + row / TILE_ROWS * tile_bytes;
    const float *part_sums = HALVES ? tokens.half_sums : tokens.sums;
    Scales of_groups[] = {Scales(w, row), Scales(w, row + (TILES - 1) * TILE_ROWS)};
    __m512 scale[TILES] = {}, bias[TILES] = {};
    for (int tile = 0; tile < TILES; tile++)
        for (int t = 0; t < num_tokens; t++)
            _mm512_store_ps(sums[tile * MAX_INTERLEAVED + t], _mm512_setzero_ps());
    for (int b = 0, left = 0; b < num_blocks; b++) {
#pragma GCC unroll 2
        for (int part = 0; part < PARTS; part++) {
            __m512i codes[TILES][2 * EIGHTS];
#pragma GCC unroll 4
            for (int i = 0; i < EIGHTS; i++, words += BYTES) {
#pragma GCC unroll 2
                for (int tile = 0; tile < TILES; tile++) {
                    const uint8_t *own = words + tile * tile_bytes;
                    unpack<CODES>(own, codes[tile][2 * i], codes[tile][2 * i + 1]);
                    __builtin_prefetch(own + AHEAD * (BLOCK / 8) * BYTES);
                    if (CODES == Codes::eight_bits)
                        __builtin_prefetch(own + AHEAD * (BLOCK / 8) * BYTES + 64);
                }
            }
            if (left-- == 0) {
                for (int tile = 0; tile < TILES; tile++)
                    of_groups[tile].next(scale[tile], bias[tile]);
                left = blocks_per_group - 1;
            }
            const int8_t *fours = tokens.codes + b * PAIR + part * EIGHTS * 8;
            const float *token_scale = tokens.scales + b, *part_sum = part_sums + b * PARTS + part;
            for (int t = 0; t < num_tokens; t++) {
                __m512i high[TILES], low[TILES];
                multiply<TILES, 2 * EIGHTS>(codes, fours, high, low);
#pragma GCC unroll 2
                for (int tile = 0; tile < TILES; tile++) {
                    float *own = sums[tile * MAX_INTERLEAVED + t];
                    __m512i all = _mm512_add_epi32(_mm512_slli_epi32(high[tile], LOW_BITS), low[tile]);
                    __m512 factor = _mm512_mul_ps(scale[tile], _mm512_set1_ps(*token_scale));
                    __m512 sum = _mm512_fmadd_ps(_mm512_cvtepi32_ps(all), factor, _mm512_load_ps(own));
                    sum = _mm512_fmadd_ps(bias[tile], _mm512_set1_ps(*part_sum), sum);
                    _mm512_store_ps(own, sum);
                }
                fours += tokens.code_stride;
                token_scale += tokens.block_stride;
                part_sum += tokens.block_stride * PARTS;
            }
        }
    }
}

template <int TILES, Codes CODES>
void add_codes(const QuantizedMatrix &w, int row, const TokenBlock &tokens, int num_tokens, RowSums *sums) {
    (w.group_size == HALF ? add<TILES, true, CODES> : add<TILES, false, CODES>)(w, row, tokens, num_tokens, sums);
}

template <int TILES>
void add_four_bits(const QuantizedMatrix &w, int row, const TokenBlock &tokens, int num_tokens, RowSums *sums) {
    (w.elements == Elements::e2m1 ? add_codes<TILES, Codes::e2m1> : add_codes<TILES, Codes::four_bits>)(
        w, row, tokens, num_tokens, sums);
}

}  // namespace

int avx512_add_interleaved(
    const QuantizedMatrix &w, int row, int num_tiles, const TokenBlock &tokens, int num_tokens, RowSums *sums) {
    if (w.bits == 8) {  // two tiles at once take a fifth longer from memory, and a tenth less from a cache
        add_codes<1, Codes::eight_bits>(w, row, tokens, num_tokens, sums);
        return 1;
    }
    (num_tiles > 1 ? add_four_bits<2> : add_four_bits<1>)(w, row, tokens, num_tokens, sums);
    return num_tiles > 1 ? 2 : 1;
}

}  // namespace outrider

#endif
