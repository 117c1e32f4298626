// Copies of cells that rows keep by blocks, for cached prefixes.
#pragma once

#include <tuple>
#include <vector>

#include "mlx/mlx.h"

namespace outrider {

// buffers [blocks, heads, cells, ..] of one shape and type; ranges: a block, its first cell, and the one after the last.
// Returns [buffers, heads, cells of the range, ..] for each range.
std::vector<mlx::core::array> copy_cells(const std::vector<mlx::core::array> &buffers,
                                         const std::vector<std::tuple<int, int, int>> &ranges);

}  // namespace outrider
