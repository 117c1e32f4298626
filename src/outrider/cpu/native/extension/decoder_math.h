// Arithmetic of decoder layers on float32, for the instructions that quantized.h reports. Sizes are multiples of 16.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>

#include "cells.h"

namespace outrider {

constexpr int CELLS = 64;     // cells that attention takes at once, counted from cell 0; chosen by hand
constexpr int SEGMENT = 512;  // cells that are attended to on their own, counted likewise: a thread's share of a long row

// Consecutive tokens of one row, and the heads that share one head of the keys and values. Token i attends to the
// cells [first_cell(i), end_cell(i)).
struct Queries {
    int num, group, dim;           // tokens, heads, elements of a head
    int cell, max_cell;            // of the first token; no token's cell is taken to be greater than max_cell
    int window;                    // cells that a token attends to; 0: all up to its own
    float scale;
    const float *queries;          // [num, group * dim], `stride` floats apart
    float *out;                    // the same
    ptrdiff_t stride;
    Cells keys, values;            // of the head that they share; with blocks: of block 0, the others `block_stride` cells apart
    const int *blocks;             // the row's block of every CELLS cells; null: the cells follow each other
    ptrdiff_t block_stride;

    // The place of `cell`, a multiple of CELLS, in the buffers: the next ones follow it.
    ptrdiff_t at(int cell) const { return blocks ? blocks[cell / CELLS] * block_stride : cell; }
    int end_cell(int i) const { return std::min(cell + i, max_cell) + 1; }
    int first_cell(int i) const { return window ? std::max(end_cell(i) - window, 0) : 0; }
    int first_segment() const { return first_cell(0) / SEGMENT; }
    int end_segment() const { return (end_cell(num - 1) + SEGMENT - 1) / SEGMENT; }
};

// The softmax of one query's head over some cells.
struct Softmax {
    float most;       // the greatest score
    float total[16];  // of the weights, in 16 parts
};

// Attention over some cells, before the division by the total. A row is one head of one token.
struct Partial {
    float *out;       // [rows, dim]
    Softmax *states;  // [rows]

    static size_t num_floats(const Queries &queries) { return size_t(queries.num) * queries.group * (queries.dim + 17); }
    static Partial in(const Queries &queries, float *memory) {
        return {memory, reinterpret_cast<Softmax *>(memory + size_t(queries.num) * queries.group * queries.dim)};
    }
};

inline void clear(const Partial &partial, int rows, int dim) {
    std::fill_n(partial.out, size_t(rows) * dim, 0.0f);
    std::fill_n(partial.states, rows, Softmax{-INFINITY, {}});
}

struct Math {
    void (*rms_norm)(const float *x, const float *weight, int size, float eps, float *y);
    // Rotates the pairs (x[i], x[i + dims / 2]). angles: dims / 2 cosines, then as many sines.
    void (*rope)(float *x, const float *angles, int dims);
    // gate = silu(gate) * up
    void (*swiglu)(float *gate, const float *up, int size);
    // y += x
    void (*add)(const float *x, int size, float *y);
    // y *= x
    void (*multiply)(const float *x, int size, float *y);
    // y = a @ x; a [rows, size]
    void (*dots)(const float *x, const float *a, int rows, int size, float *y);
    // y += x @ b; x [rows, size], b [size, columns], y [rows, columns]
    void (*add_product)(const float *x, int rows, int size, const float *b, int columns, float *y);
    // x [dim] into one cell
    void (*write_cell)(const float *x, const Cells &to);
    // Attention: of each segment, merged in order, and the division at the end. scratch: attention_scratch(...) floats
    void (*attend_segment)(const Queries &queries, int segment, float *scratch, const Partial &result);
    void (*merge)(const Queries &queries, int segment, const Partial &part, const Partial &sum);
    void (*finish)(const Queries &queries, const Partial &result);
};

const Math &math();

inline size_t attention_scratch(const Queries &queries) {
    return size_t(queries.num) * queries.group * (queries.dim + CELLS) + size_t(2) * queries.dim * CELLS;
}

}  // namespace outrider
