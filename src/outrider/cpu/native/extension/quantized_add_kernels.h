// Products of a tile and tokens with 256 bits. Included for each set of instructions, with
//
//     TARGET           attribute of functions that use the instructions
//     add_products     total + sums of four products of unsigned and signed bytes; codes with eight bits have their own form
template <int N, bool HAS_EIGHTH_BIT, bool HALVES>
TARGET void add_tokens(const Tile &tile, const TokenBlock &tokens, int first, Sums &sums) {
    constexpr int PARTS = HALVES ? 2 : 1;  // of a block that have a scale of their own
    const float *part_sums = HALVES ? tokens.half_sums : tokens.sums;
    for (int side = 0; side < TILE_ROWS; side += 8) {
        __m256 sum[N];
        for (int t = 0; t < N; t++)
            sum[t] = _mm256_loadu_ps(sums[first + t] + side);
        for (int part = 0; part < tile.num_blocks * PARTS; part++) {
            int b = part / PARTS, begin = part % PARTS * (QUADS / PARTS);
            __m256i high[N], low[N];
            for (int t = 0; t < N; t++)
                high[t] = low[t] = _mm256_setzero_si256();
#pragma GCC unroll 8
            for (int i = 0; i < QUADS / PARTS; i++) {
                int q = begin + i;
                __m256i codes = _mm256_load_si256(reinterpret_cast<const __m256i *>(tile.codes[b][q][side]));
#pragma GCC unroll 4
                for (int t = 0; t < N; t++) {
                    const int8_t *four = tokens.codes + (first + t) * tokens.code_stride + b * PAIR + q * 4;
                    high[t] = add_products(high[t], codes, _mm256_set1_epi32(load_four(four)), HAS_EIGHTH_BIT);
                    low[t] = add_products(low[t], codes, _mm256_set1_epi32(load_four(four + BLOCK)), HAS_EIGHTH_BIT);
                }
            }
            int group = HALVES ? part : b / tile.blocks_per_group;
            __m256 scales = _mm256_load_ps(tile.scales[group] + side);
            __m256 biases = _mm256_load_ps(tile.biases[group] + side);
#pragma GCC unroll 4
            for (int t = 0; t < N; t++) {
                ptrdiff_t at = (first + t) * tokens.block_stride;
                __m256i all = _mm256_add_epi32(_mm256_slli_epi32(high[t], LOW_BITS), low[t]);
                __m256 factor = _mm256_mul_ps(scales, _mm256_set1_ps(tokens.scales[at + b]));
                sum[t] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(all), factor, sum[t]);
                sum[t] = _mm256_fmadd_ps(biases, _mm256_set1_ps(part_sums[at * PARTS + part]), sum[t]);
            }
        }
        for (int t = 0; t < N; t++)
            _mm256_storeu_ps(sums[first + t] + side, sum[t]);
    }
}

template <bool HAS_EIGHTH_BIT, bool HALVES>
TARGET void add_all(const Tile &tile, const TokenBlock &tokens, int num_tokens, Sums &sums) {
    int t = 0;
    for (; t + 2 <= num_tokens; t += 2)
        add_tokens<2, HAS_EIGHTH_BIT, HALVES>(tile, tokens, t, sums);
    for (; t < num_tokens; t++)
        add_tokens<1, HAS_EIGHTH_BIT, HALVES>(tile, tokens, t, sums);
}

void add(const Tile &tile, const TokenBlock &tokens, int num_tokens, Sums &sums) {
    if (tile.blocks_per_group)
        (tile.bits == 8 ? add_all<true, false> : add_all<false, false>)(tile, tokens, num_tokens, sums);
    else
        (tile.bits == 8 ? add_all<true, true> : add_all<false, true>)(tile, tokens, num_tokens, sums);
}

#undef TARGET
