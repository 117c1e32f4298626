// Arithmetic of decoder layers on float32, for the instructions that quantized.h reports. Sizes are multiples of 16.
#pragma once

#include <algorithm>
#include <cstddef>

namespace outrider {

constexpr int CELLS = 64;  // cells that attention takes at once, counted from cell 0; chosen by hand

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
    const float *keys, *values;    // [cells, dim]

    int end_cell(int i) const { return std::min(cell + i, max_cell) + 1; }
    int first_cell(int i) const { return window ? std::max(end_cell(i) - window, 0) : 0; }
};

struct Math {
    void (*rms_norm)(const float *x, const float *weight, int size, float eps, float *y);
    // Rotates the pairs (x[i], x[i + dims / 2]). angles: dims / 2 cosines, then as many sines.
    void (*rope)(float *x, const float *angles, int dims);
    // gate = silu(gate) * up
    void (*swiglu)(float *gate, const float *up, int size);
    // y += x
    void (*add)(const float *x, int size, float *y);
    // scratch: attention_scratch(...) floats
    void (*attend)(const Queries &queries, float *scratch);
};

const Math &math();

inline size_t attention_scratch(int num_tokens, int group, int dim) {
    size_t rows = size_t(num_tokens) * group;
    return rows * (2 * dim + CELLS + 17) + size_t(dim) * CELLS;
}

}  // namespace outrider
