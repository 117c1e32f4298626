// Recurrent layers, token after token: the gated delta rule and state space models.
//
//     S <- G_t S         d_t = b_t (v_t - S k_t), or b_t v_t         S <- S + d_t k_t^T         y_t = S q_t
//
// Each row of a state is computed alone, from its first token to its last, with sums in one order: a token's result is
// the same to the bit whatever tokens are fed with it, on one thread or several.
#pragma once

#include <optional>
#include <vector>

#include "mlx/mlx.h"

namespace outrider {

// queries, keys [rows, tokens, key_heads, key_dim]; values [rows, tokens, heads, value_dim];
// gates [rows, tokens, heads, 1 or key_dim]; betas [rows, tokens, heads]; state [rows, heads, value_dim, key_dim];
// counts [rows]. Returns what is wanted: with queries the outputs [rows, tokens, heads, value_dim], with counts the
// states after the first counts[row] tokens.
std::vector<mlx::core::array> recurrence(
    const std::optional<mlx::core::array> &queries, const mlx::core::array &keys, const mlx::core::array &values,
    const mlx::core::array &gates, const mlx::core::array &betas, const mlx::core::array &state,
    const std::optional<mlx::core::array> &counts, bool is_delta_rule);

}  // namespace outrider
