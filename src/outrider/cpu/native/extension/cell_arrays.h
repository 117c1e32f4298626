// Cache buffers as MLX arrays: of the keys, then of the values, [slots or blocks, heads, cells, elements] each.
//
//     float32    one array
//     quantised  three arrays: codes (uint32), scales, biases (float32)
#pragma once

#include <functional>
#include <vector>

#include "cells.h"
#include "mlx/mlx.h"

namespace outrider {

// Throws std::invalid_argument unless the buffers hold `num_heads` heads of `dim` elements.
void check_buffers(const std::vector<mlx::core::array> &buffers, int num_heads, int dim);

// Throws std::invalid_argument unless these are int32 [rows], int32 [rows], and int32 [rows, 1] (slots) or [rows, blocks + 1].
void check_places(int rows, const mlx::core::array &starts, const mlx::core::array &num_fed,
                  const mlx::core::array &places, bool has_blocks);

// The same for attention, which reads CELLS cells of a block at once.
void check_attended_places(int rows, const mlx::core::array &buffer, const mlx::core::array &starts,
                           const mlx::core::array &num_fed, const mlx::core::array &places, bool has_blocks);

struct KeysAndValues {
    Cells keys, values;
};

// Buffers that were checked: the last arrays of `arrays`, from `first` on. `data` gives an array's elements in order.
KeysAndValues cells_of(const std::vector<mlx::core::array> &arrays, size_t first, int dim,
                       const std::function<const void *(const mlx::core::array &)> &data);

}  // namespace outrider
