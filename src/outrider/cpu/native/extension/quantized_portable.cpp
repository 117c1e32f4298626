// The kernels for CPUs of any kind.
#include "quantized_kernels.h"

namespace outrider {
namespace {

void portable_quantize(const float *x, int num_blocks, const QuantizedTokens &to) {
    quantize_blocks(x, num_blocks, to);
}

void portable_fill(const QuantizedMatrix &w, int row, int first, int size, Tile &tile) {
    fill_scales(w, row, first, size, tile);
    for (int r = 0; r < TILE_ROWS; r++)
        for (int k = 0; k < size; k++) {
            int at = k % BLOCK / 8 * 8 + position(k % 8), code = code_of(w, row + r, first + k);
            tile.codes[k / BLOCK][at / 4][r][at % 4] =
                static_cast<uint8_t>(w.elements == Elements::e2m1 ? E2M1_CODES[code] : code);
        }
}

void portable_add(const Tile &tile, const TokenBlock &tokens, int num_tokens, Sums &sums) {
    int parts = tile.blocks_per_group ? 1 : 2, quads = QUADS / parts;  // parts of a block with a scale of their own
    const float *part_sums = parts == 2 ? tokens.half_sums : tokens.sums;
    for (int t = 0; t < num_tokens; t++)
        for (int part = 0; part < tile.num_blocks * parts; part++) {
            int b = part / parts, group = parts == 2 ? part : b / tile.blocks_per_group;
            const int8_t *x = tokens.codes + t * tokens.code_stride + b * PAIR;
            float scale = tokens.scales[t * tokens.block_stride + b];
            float sum = part_sums[t * tokens.block_stride * parts + part];
            for (int r = 0; r < TILE_ROWS; r++) {
                int32_t total = 0;
                for (int q = part % parts * quads, end = q + quads; q < end; q++)
                    for (int i = 0; i < 4; i++)
                        total += tile.codes[b][q][r][i] * ((x[q * 4 + i] << LOW_BITS) + x[BLOCK + q * 4 + i]);
                float added = std::fma(static_cast<float>(total), tile.scales[group][r] * scale, sums[t][r]);
                sums[t][r] = std::fma(tile.biases[group][r], sum, added);
            }
        }
}

void portable_fill_floats(const QuantizedMatrix &w, int row, int first, int size, FloatTile &tile) {
    fill_float_scales(w, row, first, size, tile);
    for (int r = 0; r < TILE_ROWS; r++) {
        const uint8_t *codes = row_of(w, row + r) + first;
        for (int k = 0; k < size; k++)
            tile.weights[k / 8 * 8 + position(k % 8)][r] = from_e4m3(codes[k]);
    }
}

void portable_add_floats(const FloatTile &tile, const TokenBlock &tokens, int num_tokens, Sums &sums) {
    for (int t = 0; t < num_tokens; t++)
        for (int b = 0; b < tile.num_blocks; b++) {
            float x[BLOCK], scale = tokens.scales[t * tokens.block_stride + b];
            load_floats(tokens.codes + t * tokens.code_stride + b * PAIR, x);
            for (int r = 0; r < TILE_ROWS; r++) {
                float parts[4] = {};
                for (int k = 0; k < BLOCK; k++)
                    parts[k % 4] = std::fma(tile.weights[b * BLOCK + k][r], x[k], parts[k % 4]);
                float total = (parts[0] + parts[1]) + (parts[2] + parts[3]);
                sums[t][r] = std::fma(total, tile.scales[b][r] * scale, sums[t][r]);
            }
        }
}

}  // namespace

const Kernels PORTABLE = {"portable",   portable_quantize,    portable_fill,
                          portable_add, portable_fill_floats, portable_add_floats, nullptr, nullptr, nullptr};

}  // namespace outrider
