// Operations on the cells of rows, for layers that are no decoder layers of the common form, and for an MTP head's inputs.
//
//     buffers         of keys and values: cell_arrays.h
//     starts, num_fed [rows] int32
//     places          [rows, 1] int32: the rows' slots; with blocks [rows, blocks + 1]: their blocks, 0 past the last one
#pragma once

#include <vector>

#include "mlx/mlx.h"

namespace outrider {

// Writes keys and values [rows, heads, width, dim] float32 into the cells of their tokens, all in one operation. Padding is
// not written, nor is a token past its row's blocks. Returns the new buffers: written in place if nothing else holds them.
std::vector<mlx::core::array> write_cells(const mlx::core::array &keys, const mlx::core::array &values,
                                          const std::vector<mlx::core::array> &buffers,
                                          const mlx::core::array &starts, const mlx::core::array &num_fed,
                                          const mlx::core::array &places, bool has_blocks);

// Attention of queries [rows, width, heads, dim] float32 over the rows' cells, which hold the tokens' own already: the
// same shape, zeros for padding. A window of 0 is none.
mlx::core::array attend_cells(const mlx::core::array &queries, const std::vector<mlx::core::array> &buffers,
                              const mlx::core::array &starts, const mlx::core::array &num_fed,
                              const mlx::core::array &places, bool has_blocks, int window, float scale);

}  // namespace outrider
