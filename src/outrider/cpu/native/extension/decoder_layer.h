// Decoder layers of the common form as two MLX primitives:
//
//     attention   x + o(attend(rope(q(norm(x))), rope(k(norm(x))), v(norm(x)))), with optional norms of queries and keys
//     mlp         x + down(silu(gate(norm(x))) * up(norm(x)))
//
// Weights are quantised (quantized.h), everything else is float32. A token's result is the same to the bit whatever
// tokens and rows are beside it, and whatever the number of threads. Tokens that are padding are not computed: their
// output is their input.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "mlx/mlx.h"
#include "quantized.h"

namespace outrider {

// All arrays given to constructors are evaluated there and held.

struct Linear {
    Linear(const mlx::core::array &weight, const mlx::core::array &scales,
           const std::optional<mlx::core::array> &biases, int group_size, int bits, const std::string &mode,
           const std::optional<mlx::core::array> &bias);

    QuantizedMatrix matrix;
    std::vector<float> bias;  // empty: none

private:
    std::vector<mlx::core::array> held;
};

struct RMSNorm {
    RMSNorm(const mlx::core::array &weight, float eps);

    // x [..., size] float32
    mlx::core::array operator()(const mlx::core::array &x) const;

    size_t size() const { return weight->size(); }
    const float *data() const { return weight->data(); }
    float eps;

private:
    std::shared_ptr<const std::vector<float>> weight;
};

struct AttentionWeights {
    RMSNorm norm;
    Linear q, k, v, o;
    std::optional<RMSNorm> q_norm, k_norm;  // of each head
    int num_heads, num_kv_heads, rope_dims;
    float scale;

    int head_dim() const { return q.matrix.num_rows / num_heads; }
    void check() const;
};

class Attention {
public:
    explicit Attention(AttentionWeights weights);

    // x [rows, width, hidden]; keys, values [slots, heads, capacity + 1, dim]; angles [rows, 1, width, dim]: of every
    // token the cosines, then the sines; starts, num_fed [rows] int32; places [rows, 1] int32: the rows' slots. A window
    // of 0 is none. With blocks: keys, values [blocks, heads, 64, dim]; places [rows, blocks + 1]: the rows' blocks, 0
    // past the last one. Block 0 is never written.
    // Returns the new x, keys and values. The buffers are written in place if nothing else holds them.
    std::tuple<mlx::core::array, mlx::core::array, mlx::core::array> operator()(
        const mlx::core::array &x, const mlx::core::array &keys, const mlx::core::array &values,
        const mlx::core::array &angles, const mlx::core::array &starts, const mlx::core::array &num_fed,
        const mlx::core::array &places, bool has_blocks, int window) const;

private:
    std::shared_ptr<const AttentionWeights> weights;
};

// Attention alone, for layers of other forms. queries [rows, width, heads, dim] -> the same, zeros for padding; keys and
// values hold the tokens' cells already; the rest as above.
mlx::core::array attend_cells(const mlx::core::array &queries, const mlx::core::array &keys,
                              const mlx::core::array &values, const mlx::core::array &starts,
                              const mlx::core::array &num_fed, const mlx::core::array &places, bool has_blocks,
                              int window, float scale);

struct MLPWeights {
    RMSNorm norm;
    Linear gate, up, down;

    void check() const;
};

class MLP {
public:
    explicit MLP(MLPWeights weights);

    // x [rows, width, hidden]; num_fed [rows] int32
    mlx::core::array operator()(const mlx::core::array &x, const mlx::core::array &num_fed) const;

private:
    std::shared_ptr<const MLPWeights> weights;
};

// The angles of a pass, for attention.
class RopeAngles {
public:
    // frequencies [rope dims / 2]; positions are multiplied by `scale`, cosines and sines by `magnitude`.
    RopeAngles(const mlx::core::array &frequencies, float scale, float magnitude);

    // positions [rows] int32: of the first token of each row -> [rows, 1, width, rope dims]
    mlx::core::array operator()(const mlx::core::array &positions, int width) const;

private:
    std::shared_ptr<const std::vector<float>> frequencies;
    float scale, magnitude;
};

}  // namespace outrider
