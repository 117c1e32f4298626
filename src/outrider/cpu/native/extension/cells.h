// Keys or values of cells, of one head or of all: float32 numbers; bfloat16 numbers; or codes of 8 or 4 bits with a scale
// and a bias for each group of elements (MLX's affine format, as mx.quantize writes it): element = scale * code + bias.
#pragma once

#include <cstddef>
#include <cstdint>

namespace outrider {

constexpr int FLOAT32_BITS = 32, BFLOAT16_BITS = 16;

struct Cells {
    uint32_t *words;         // [cells, dim * bits / 32]: the numbers or codes
    float *scales, *biases;  // [cells, groups]; null for numbers
    int dim, bits, groups;

    bool is_float32() const { return bits == FLOAT32_BITS; }
    bool has_codes() const { return bits < BFLOAT16_BITS; }
    int num_words() const { return dim * bits / 32; }
    const float *floats() const { return reinterpret_cast<const float *>(words); }

    // The cells from this one on.
    Cells from(ptrdiff_t cell) const {
        Cells rest = *this;
        rest.words += cell * num_words();
        if (has_codes()) {
            rest.scales += cell * groups;
            rest.biases += cell * groups;
        }
        return rest;
    }
};

}  // namespace outrider
