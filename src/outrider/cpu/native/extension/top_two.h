// The best of many scores, and by how much it exceeds the second best.
#pragma once

#include <cstdint>
#include <utility>

#include "mlx/mlx.h"

namespace outrider {

// scores [..., n] float32 -> the first place of the greatest score [...] int32, and its margin [...] float32. With a
// single score the margin is infinite. Scores that are NaN never win.
std::pair<mlx::core::array, mlx::core::array> top_two(const mlx::core::array &scores);

// The same for one row of `num` scores.
void find_top_two(const float *scores, int num, int32_t *place, float *margin);

}  // namespace outrider
