// MLX operations with quantised weights: see weights.h for their formats, quantized.h for the arithmetic.
#pragma once

#include <optional>
#include <string>

#include "mlx/mlx.h"

namespace outrider {

using Biases = std::optional<mlx::core::array>;

// x @ w^T in float32.  x [..., size] float32; weight [rows, size * bits / 32]; scales, biases [rows, size / group_size]
mlx::core::array quantized_matmul(
    const mlx::core::array &x, const mlx::core::array &weight, const mlx::core::array &scales, const Biases &biases,
    int group_size, int bits, const std::string &mode);

// The same with weights of several experts: row i of x is multiplied by the weights of expert experts[i].
// x [n, size]; experts [n] int32; weight [experts, rows, ...], scales and biases alike -> [n, rows]
mlx::core::array gather_quantized_matmul(
    const mlx::core::array &x, const mlx::core::array &weight, const mlx::core::array &scales, const Biases &biases,
    const mlx::core::array &experts, int group_size, int bits, const std::string &mode);

// Rows of the weights in float32.  token_ids [...] int32 or uint32 -> [..., size]
mlx::core::array quantized_embedding(
    const mlx::core::array &token_ids, const mlx::core::array &weight, const mlx::core::array &scales,
    const Biases &biases, int group_size, int bits, const std::string &mode);

}  // namespace outrider
