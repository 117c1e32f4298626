// Quantised weights as MLX stores them, and as quantized.h takes them.
#pragma once

#include <optional>
#include <string>

#include "mlx/mlx.h"
#include "quantized.h"

namespace outrider {

// How weights are quantised: MLX's mode, group size and bits.
//
//     affine          2, 3, 4, 5, 6 or 8 bits; groups of 16, 32, 64 or 128 (MLX: from 32 on); with or without biases
//                     (MLX: with)
//     mxfp4, mxfp8    4 and 8 bits; groups of 32; scales uint8 (E8M0); no biases
//     nvfp4           4 bits; groups of 16; scales uint8 (E4M3); no biases
//
// Interleaved (quantized.h), codes, scales and biases [.., rows, n] are [.., rows / TILE_ROWS, n, TILE_ROWS].
struct WeightFormat {
    int group_size, bits;
    std::string mode;
    bool is_interleaved;

    bool operator==(const WeightFormat &) const = default;
    Elements elements() const;
    int num_rows(const mlx::core::array &weight) const;
    int num_in_row(const mlx::core::array &one) const;  // of a row's words, scales or biases
};

// Raises std::invalid_argument if the format is not known, or if the arrays are not of this format. `size`: elements of
// a row. weight [.., rows, size * bits / 32]; scales, biases [.., rows, size / group_size]
void check_weights(
    const WeightFormat &format, int size, const mlx::core::array &weight, const mlx::core::array &scales,
    const std::optional<mlx::core::array> &biases);

// Weights that have been checked, evaluated and lie in order. Of several experts, the weights of this one.
QuantizedMatrix matrix_of(
    const WeightFormat &format, const mlx::core::array &weight, const mlx::core::array &scales,
    const mlx::core::array *biases, ptrdiff_t expert = 0);

}  // namespace outrider
