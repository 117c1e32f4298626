// Matmuls with quantised weights.
//
// Weights stay as MLX stores them:
//
//     affine         w = scale * code + bias; without biases w = scale * (code - 2^(bits - 1))
//     mxfp4, nvfp4   w = scale * E2M1 number. Twice such a number is an integer between -12 and 12.
//     mxfp8          w = scale * E4M3 number
//
// or interleaved: word i of TILE_ROWS rows lies side by side, then word i + 1, and so on; scales and biases likewise. That
// is the order in which they are used. (Only codes of 4 and 8 bits.)
//
// Tokens are rounded to 15 bits in blocks of 32 elements, each block with a scale of its own: code = 128 * high + low,
// two bytes with signs. (With 8 bits, as in llama.cpp, the answers of small models change: docs/LOG.md.) Products of
// codes are added as integers, exactly, within a block, or half a block if groups have 16 elements. E4M3 numbers are too
// wide for that: their products are added in float32, in a fixed order. The blocks are added in float32, in order. So a
// token's result is the same to the bit whatever tokens are beside it, whatever the number of threads, and whatever
// instructions the CPU has.
#pragma once

#include <cstddef>
#include <cstdint>

namespace outrider {

constexpr int BLOCK = 32;      // elements of a token that share a scale
constexpr int HALF = 16;       // elements of half a block: the smallest group
constexpr int TILE_ROWS = 16;  // rows of the weights that are computed together

enum class ScaleType { float32, float16, bfloat16, e8m0, e4m3 };
enum class Elements { integers, e2m1, e4m3 };  // what a code stands for

struct QuantizedMatrix {
    int num_rows, size;      // size: elements of a row, a multiple of group_size and of BLOCK
    int bits, group_size;    // bits: 2, 3, 4, 5, 6 or 8; group_size: HALF, or a multiple of BLOCK
    const uint32_t *codes;   // [num_rows, size * bits / 32]
    const void *scales;      // [num_rows, size / group_size]
    const void *biases;      // the same; may be null
    ScaleType type;          // of scales and biases
    Elements elements;
    bool is_interleaved;     // codes [num_rows / TILE_ROWS, size * bits / 32, TILE_ROWS]; scales and biases likewise
};

struct QuantizedTokens {
    int num_tokens, size;  // size: a multiple of BLOCK
    int8_t *codes;         // [num_tokens, size / BLOCK, 2, BLOCK]: the high bytes of a block, then its low bytes; of every
                           // eight elements first those with even numbers, then the others
    float *scales;         // [num_tokens, size / BLOCK]
    float *sums;           // the same: the sum of a block's codes, times its scale
    float *half_sums;      // [num_tokens, size / HALF]: of the halves of the blocks

    // `num` of the tokens, from `first` on
    QuantizedTokens part(int first, int num) const {
        ptrdiff_t elements = static_cast<ptrdiff_t>(first) * size, blocks = elements / BLOCK;
        return {num, size, codes + 2 * elements, scales + blocks, sums + blocks, half_sums + 2 * blocks};
    }
};

// Bytes of memory that `quantize` needs, and alignment of that memory.
size_t token_bytes(int num_tokens, int size);
constexpr size_t TOKEN_ALIGNMENT = 64;

// Tokens in this memory, and one of them rounded. A block with a NaN or an infinity becomes NaN.
QuantizedTokens tokens_in(void *memory, int num_tokens, int size);
void quantize_token(const float *x, const QuantizedTokens &tokens, int number);

// Rounds tokens x [num_tokens, size], `stride` floats apart.
QuantizedTokens quantize(const float *x, int num_tokens, int size, ptrdiff_t stride, void *memory);

// y = x @ w^T: y [num_tokens, num_rows], `stride` floats apart.
struct Product {
    QuantizedMatrix weights;
    float *y;
    ptrdiff_t stride;
};

// Computes products of the same tokens, on several threads.
void multiply(const Product *products, int num_products, const QuantizedTokens &tokens);

// Rows of the weights as float32, each `size` floats.
void dequantize_row(const QuantizedMatrix &weights, int row, float *out);

// The instructions in use: "avx512amx", "avx512vnni", "avxvnni", "avx2" or "portable", which are in use until `use` chooses
// others ("" for the best that the CPU has); false: the CPU does not have them.
const char *instructions();
bool use(const char *wanted);

// Whether these instructions compute faster with interleaved weights.
bool interleaves();

}  // namespace outrider
