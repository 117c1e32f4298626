// The low-rank terms of adapters (LoRA, DoRA), of one linear layer:
//
//     y = gain * y + (x @ a^T) @ b + shift
//
// for the tokens of rows with an adapter. Tokens without one keep their y as it is, to the bit. A token's result is the
// same to the bit whatever tokens and adapters are beside it, and whatever the number of threads.
#pragma once

#include <memory>
#include <optional>
#include <vector>

#include "mlx/mlx.h"

namespace outrider {

// The terms of one linear layer, by the id of the adapter. Copies share the arrays.
class LowRank {
public:
    struct Factors {
        int rank = 0;                  // 0: the adapter does not change this layer
        int size = 0, num_rows = 0;    // inputs and outputs of the layer
        const float *a = nullptr;      // [rank, size]
        const float *b = nullptr;      // [rank, num_rows]
        const float *gain = nullptr;   // [num_rows]; null: 1
        const float *shift = nullptr;  // [num_rows]; null: 0
    };
    using Arrays = std::vector<std::optional<mlx::core::array>>;

    LowRank() = default;  // of a layer that no adapter changes

    // Entry i of each list is adapter i's: float32, or none. Entry 0 is none. The arrays are evaluated here and held.
    LowRank(const Arrays &a, const Arrays &b, const Arrays &gains, const Arrays &shifts);

    // y [rows, width, num_rows], x [rows, width, size] float32; ids [rows] int32 -> y with the terms
    mlx::core::array operator()(const mlx::core::array &y, const mlx::core::array &x,
                                const mlx::core::array &ids) const;

    const Factors *find(int id) const {
        if (!held || id <= 0 || size_t(id) >= held->by_id.size() || !held->by_id[id].rank)
            return nullptr;
        return &held->by_id[id];
    }
    bool fits(int size, int num_rows) const;

private:
    struct Held {
        std::vector<Factors> by_id;
        std::vector<mlx::core::array> arrays;  // that the factors point into
    };
    std::shared_ptr<const Held> held;
};

// Adds the terms of one layer to y [tokens, num_rows].
struct LowRankProduct {
    const LowRank *terms;
    float *y;
};

// Adds terms to layers that read the same tokens, x [num_tokens, size]. ids: of each token. `has_bias`: y has the
// layer's bias already, so the shift is added; else y gets the bias later.
void add_low_rank(const LowRankProduct *products, int num_products, const float *x, int size, const int *ids,
                  int num_tokens, bool has_bias);

}  // namespace outrider
