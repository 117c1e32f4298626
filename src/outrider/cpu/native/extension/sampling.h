// Draws tokens: of each row's filtered tokens the one with the greatest logit / temperature + noise. And how likely tokens
// are.
#pragma once

#include <cstdint>
#include <optional>
#include <tuple>
#include <utility>
#include <vector>

#include "mlx/mlx.h"

namespace outrider {

// logits [rows, n, vocab] float32, positions [rows, n]; numbers of each row: inverse_temperature [rows] float32,
// seeds [rows, 2] uint32; filters: none, or top_k [rows] int32 (0: off), top_p [rows] float32 (1: off) and log_min_p
// [rows] float32 (-inf: off); token_ids [vocab] int32: the ids of the columns, if these are others than 0, 1, ..
//
// Returns the tokens [rows, n] int32, and with `wants_margins` by how much each one's score exceeds the second best one
// [rows, n] float32; else no margin is of use. Of equal scores the first column's wins. The rule is that of
// sampling/sampler.py, and the noise that of sampling/noise.py, except for the last bits of logarithms and exponentials.
// The results are the same for all instructions and any number of threads. A NaN never wins.
std::pair<mlx::core::array, mlx::core::array> sample(
    const mlx::core::array &logits, const mlx::core::array &positions, const mlx::core::array &inverse_temperature,
    const mlx::core::array &seeds, const std::vector<mlx::core::array> &filters,
    const std::optional<mlx::core::array> &token_ids, bool wants_margins);

// The numbers of all rows on plain memory. top_k may be null: then there are no filters.
struct SamplingNumbers {
    const float *inverse_temperature;
    const uint32_t *seeds;
    const int32_t *top_k;
    const float *top_p, *log_min_p;
};

struct Drawn {
    int32_t token_id;
    float margin;
};

// Draws one token of `row`. token_ids may be null: 0, 1, ..
Drawn draw(const SamplingNumbers &numbers, int row, uint32_t position, const float *logits, int vocab,
           const int32_t *token_ids, bool wants_margin);

// The numbers as inputs of a primitive, of the types above. Throws std::invalid_argument if they do not fit.
std::vector<mlx::core::array> sampling_inputs(
    int rows, const mlx::core::array &inverse_temperature, const mlx::core::array &seeds,
    const std::vector<mlx::core::array> &filters, mlx::core::Stream stream);

// Log-probabilities of logits [rows, n, vocab] float32: of the tokens `targets` [rows, n] int32, as [rows, n]; and the
// ids [rows, n, num_top] int32 and log-probabilities of the `num_top` most likely tokens, in any order. A target outside
// the vocabulary has a log-probability of -inf.
std::tuple<mlx::core::array, mlx::core::array, mlx::core::array> logprobs(
    const mlx::core::array &logits, const mlx::core::array &targets, int num_top);

}  // namespace outrider
