// Products of interleaved weights and tokens with 256 bits. Included for each set of instructions, with
//
//     TARGET       attribute of functions that use the instructions
//     multiply     a token's block times the codes of a block, or half a block: sums of products with its high bytes and
//                  with its low bytes

// The codes of a block of eight rows are unpacked once and stay in registers for all tokens. The tokens' sums are in memory.
template <bool HALVES, Codes CODES>
TARGET void add_interleaved_codes(
    const QuantizedMatrix &w, int row, const TokenBlock &tokens, int num_tokens, RowSums *sums) {
    constexpr int PARTS = HALVES ? 2 : 1;      // of a block that have a scale of their own
    constexpr int EIGHTS = BLOCK / 8 / PARTS;  // of codes, in a part
    constexpr int BYTES = bytes_of_eight(CODES);
    const int num_parts = w.size / BLOCK * PARTS, parts_per_group = HALVES ? 1 : w.group_size / BLOCK;
    auto *words = reinterpret_cast<const uint8_t *>(w.codes) + static_cast<ptrdiff_t>(row) * w.size / 8 * w.bits;
    const float *part_sums = HALVES ? tokens.half_sums : tokens.sums;
    GroupScales of_groups(w, row);
    __m256 scale[2] = {}, bias[2] = {};  // of the first and of the last eight rows
    for (int t = 0; t < num_tokens; t++)
        std::memset(sums[t], 0, sizeof(sums[t]));
    for (int part = 0, left = 0; part < num_parts; part++, words += EIGHTS * BYTES) {
        if (left-- == 0) {
            for (int side = 0; side < 2; side++) {
                __m256 found = load_eight_rows(of_groups.scales, of_groups.type, side);
                scale[side] = _mm256_mul_ps(found, _mm256_set1_ps(of_groups.unit));
                bias[side] = of_groups.biases ? load_eight_rows(of_groups.biases, of_groups.type, side)
                                              : _mm256_mul_ps(scale[side], _mm256_set1_ps(of_groups.no_bias));
            }
            of_groups.advance();
            left = parts_per_group - 1;
        }
        for (int line = 0; line < EIGHTS * BYTES; line += 64)
            __builtin_prefetch(words + AHEAD * PARTS * EIGHTS * BYTES + line);
        const int block = part / PARTS;
        for (int side = 0; side < 2; side++) {
            __m256i codes[2 * EIGHTS];
#pragma GCC unroll 4
            for (int i = 0; i < EIGHTS; i++)
                unpack_eight_rows<CODES>(words + i * BYTES + side * 32, codes[2 * i], codes[2 * i + 1]);
            const int8_t *fours = tokens.codes + block * PAIR + part % PARTS * EIGHTS * 8;
            const float *token_scale = tokens.scales + block, *part_sum = part_sums + part;
            for (int t = 0; t < num_tokens; t++) {
                float *own = sums[t] + 8 * side;
                __m256i high, low;
                multiply<CODES, 2 * EIGHTS>(codes, fours, high, low);
                __m256i all = _mm256_add_epi32(_mm256_slli_epi32(high, LOW_BITS), low);
                __m256 factor = _mm256_mul_ps(scale[side], _mm256_set1_ps(*token_scale));
                __m256 sum = _mm256_fmadd_ps(_mm256_cvtepi32_ps(all), factor, _mm256_load_ps(own));
                _mm256_store_ps(own, _mm256_fmadd_ps(bias[side], _mm256_set1_ps(*part_sum), sum));
                fours += tokens.code_stride;
                token_scale += tokens.block_stride;
                part_sum += tokens.block_stride * PARTS;
            }
        }
    }
}

template <Codes CODES>
void add_interleaved_tile(
    const QuantizedMatrix &w, int row, const TokenBlock &tokens, int num_tokens, RowSums *sums) {
    (w.group_size == HALF ? add_interleaved_codes<true, CODES> : add_interleaved_codes<false, CODES>)(
        w, row, tokens, num_tokens, sums);
}

int add_interleaved(
    const QuantizedMatrix &w, int row, int, const TokenBlock &tokens, int num_tokens, RowSums *sums) {
    auto *of_format = w.bits == 8                     ? add_interleaved_tile<Codes::eight_bits>
                      : w.elements == Elements::e2m1 ? add_interleaved_tile<Codes::e2m1>
                                                     : add_interleaved_tile<Codes::four_bits>;
    of_format(w, row, tokens, num_tokens, sums);
    return 1;
}

#undef TARGET
