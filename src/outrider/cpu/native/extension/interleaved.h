// What the kernels for interleaved weights have in common.
#pragma once
#include "quantized_kernels.h"

namespace outrider {

constexpr int AHEAD = 8;  // blocks by which codes are fetched before they are used; with 4 bits, 16 blocks were slower

enum class Codes { four_bits, e2m1, eight_bits };

constexpr int bytes_of_eight(Codes codes) { return TILE_ROWS * (codes == Codes::eight_bits ? 8 : 4); }  // of each row

// Where the scales and biases of TILE_ROWS rows are, group after group.
struct GroupScales {
    const char *scales, *biases;  // biases: null if there are none
    ptrdiff_t bytes, ahead;       // of a group; from a group to the one that is fetched
    ScaleType type;
    float unit, no_bias;

    INLINE GroupScales(const QuantizedMatrix &w, int row) {
        int size = w.type == ScaleType::float32 ? 4 : w.type == ScaleType::e8m0 || w.type == ScaleType::e4m3 ? 1 : 2;
        ptrdiff_t first = static_cast<ptrdiff_t>(row) * (w.size / w.group_size) * size;
        scales = static_cast<const char *>(w.scales) + first;
        biases = w.biases ? static_cast<const char *>(w.biases) + first : nullptr;
        bytes = TILE_ROWS * size;
        ahead = bytes * AHEAD * BLOCK / w.group_size;
        type = w.type, unit = outrider::unit(w), no_bias = -middle(w);
    }

    INLINE void advance() {
        __builtin_prefetch(scales + ahead);
        scales += bytes;
        if (!biases)
            return;
        __builtin_prefetch(biases + ahead);
        biases += bytes;
    }
};

}  // namespace outrider
