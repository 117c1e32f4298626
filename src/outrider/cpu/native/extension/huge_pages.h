#pragma once

#include <vector>

#include "mlx/mlx.h"

namespace outrider {

// Moves arrays that do not change into huge pages, as far as the system gives them. Returns how many bytes of memory are
// in such pages now.
size_t use_huge_pages(const std::vector<mlx::core::array> &arrays);

}  // namespace outrider
