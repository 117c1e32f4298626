// Tokens that grammars forbid.
#pragma once

#include "mlx/mlx.h"

namespace outrider {

// A copy of logits [rows, n, vocab] float32 with -inf where a mask has no bit: words [masked rows, n, words] uint32, of
// the rows `rows` [masked rows] int32. Tokens past the last word stay as they are.
mlx::core::array mask_logits(
    const mlx::core::array &logits, const mlx::core::array &words, const mlx::core::array &rows);

}  // namespace outrider
