// What one pass through decoder layers computes, on plain memory. decoder_layer.cpp makes MLX primitives of it.
#pragma once

#include <algorithm>
#include <vector>

#include "cell_arrays.h"
#include "decoder_layer.h"

namespace outrider {

struct Token {
    int row, column;
    size_t index;  // row * width + column
};

// The tokens of a pass that are not padding.
std::vector<Token> fed_tokens(const int *num_fed, int rows, int width);

struct Heads {
    int num, num_kv, dim;
    float scale;
};

struct AttentionCall {
    int rows, width, window;
    const float *x, *angles;
    const int *starts, *num_fed;
    const int *places;  // [rows, columns]: the slot of each row; with blocks: the blocks of each row, 0 past its own
    int columns;
    bool has_blocks;
    int num_cells;  // of a slot, or of a block
    float *out;                     // null: only the cells are written
    KeysAndValues cells;            // all of the buffers
    const int *adapters = nullptr;  // [rows]; null: no row has one

    // The part that is a layer's own. `buffers`: its arrays, keys first.
    void add_cells(int window, const std::vector<mlx::core::array> &buffers, int head_dim);

    // The cell of a token for the first head: those of the other heads follow `num_cells` apart. -1: past the row's blocks.
    ptrdiff_t cell_of(const Token &token, int num_heads) const {
        int cell = starts[token.row] + token.column, place = places[token.row];
        if (has_blocks) {
            place = blocks(token.row)[std::min(cell / num_cells, columns - 1)];
            cell %= num_cells;
        } else {
            cell = std::min(cell, num_cells - 1);
        }
        return has_blocks && place == 0 ? -1 : ptrdiff_t(place) * num_heads * num_cells + cell;
    }

    int max_cell() const { return has_blocks ? (columns - 1) * num_cells - 1 : std::max(num_cells - 2, 0); }
    const int *blocks(int row) const { return has_blocks ? places + size_t(row) * columns : nullptr; }
};

struct MLPCall {
    int rows, width;
    const float *x;
    const int *num_fed;
    float *out;
    const int *adapters;  // [rows]; null: no row has one
};

// Attention of tokens [num, heads * dim], `q`, over the cells of their rows. If `has_padding`, `q` and `out` have places
// for padding too.
void attend(const Heads &heads, const AttentionCall &call, const Token *tokens, int num, const float *q, float *out,
            bool has_padding);

// One half of a layer. `all`: the tokens of the pass. `terms` may be null: then no row has an adapter. call.out may be
// call.x.
void run(const AttentionWeights &w, const LowRank *terms, const AttentionCall &call, const std::vector<Token> &all);
void run(const MLPWeights &w, const LowRank *terms, const MLPCall &call, const std::vector<Token> &all);

}  // namespace outrider
