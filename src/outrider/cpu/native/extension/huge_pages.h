#pragma once

#include <vector>

#include "mlx/mlx.h"

namespace outrider {

// Moves the memory of arrays into huge pages, as far as the system gives them. Returns how many bytes are in such pages
// now: of the arrays, and of what else is in the same pages.
size_t use_huge_pages(const std::vector<mlx::core::array> &arrays);

}  // namespace outrider
