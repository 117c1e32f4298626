// Decoder layers of the common form as two MLX primitives, and several layers as one:
//
//     attention   x + o(attend(rope(q(norm(x))), rope(k(norm(x))), v(norm(x)))), with optional norms of queries and keys
//     mlp         x + down(silu(gate(norm(x))) * up(norm(x)))
//
// Weights are quantised (quantized.h), everything else is float32. A token's result is the same to the bit whatever
// tokens and rows are beside it, and whatever the number of threads. Tokens that are padding are not computed: their
// output is their input. Rows may have adapters (low_rank.h): `adapters` [rows] int32 are their ids, and `terms` has the
// low-rank terms of each linear layer, in the order of the weights below. Both may be left out.
//
// A rank has a part of the heads and of the MLP's columns (`is_part`). Its outputs are its parts of o(..) and down(..):
// without x, and zeros for padding. The caller sums the parts of all ranks and adds x.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "low_rank.h"
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
    bool is_part;

    static constexpr int NUM_LINEARS = 4;

    int head_dim() const { return q.matrix.num_rows / num_heads; }
    std::vector<const Linear *> linears() const { return {&q, &k, &v, &o}; }
    void check() const;
};

class Attention {
public:
    explicit Attention(AttentionWeights weights);

    // x [rows, width, hidden]; buffers [slots, heads, capacity + 1, ..] of keys and values (cell_arrays.h); angles
    // [rows, 1, width, dim]: of every token the cosines, then the sines; starts, num_fed [rows] int32; places [rows, 1]
    // int32: the rows' slots. A window of 0 is none. With blocks: buffers [blocks, heads, 64, ..]; places [rows, blocks +
    // 1]: the rows' blocks, 0 past the last one. Block 0 is never written. adapters, terms: see low_rank.h.
    // Returns the new x (or a part of the output), then the new buffers. The buffers are written in place if nothing
    // else holds them. All tokens read keys and values as they are stored: quantised ones too, in the pass that writes
    // them.
    std::vector<mlx::core::array> operator()(
        const mlx::core::array &x, const std::vector<mlx::core::array> &buffers, const mlx::core::array &angles,
        const mlx::core::array &starts, const mlx::core::array &num_fed, const mlx::core::array &places,
        bool has_blocks, int window, const std::optional<mlx::core::array> &adapters,
        const std::vector<LowRank> &terms) const;

    // Only writes the cells: no queries, no attention. Returns the new buffers.
    std::vector<mlx::core::array> write_cells(
        const mlx::core::array &x, const std::vector<mlx::core::array> &buffers, const mlx::core::array &angles,
        const mlx::core::array &starts, const mlx::core::array &num_fed, const mlx::core::array &places,
        bool has_blocks, const std::optional<mlx::core::array> &adapters, const std::vector<LowRank> &terms) const;

private:
    friend class Layers;
    friend class DraftHead;
    void check(const mlx::core::array &x, const std::vector<mlx::core::array> &buffers, const mlx::core::array &angles,
               const mlx::core::array &starts, const mlx::core::array &num_fed, const mlx::core::array &places,
               bool has_blocks, int window, const std::optional<mlx::core::array> &adapters,
               const std::vector<LowRank> &terms) const;

    std::shared_ptr<const AttentionWeights> weights;
};

struct MLPWeights {
    RMSNorm norm;
    Linear gate, up, down;
    bool is_part;

    static constexpr int NUM_LINEARS = 3;

    std::vector<const Linear *> linears() const { return {&gate, &up, &down}; }
    void check() const;
};

class MLP {
public:
    explicit MLP(MLPWeights weights);

    // x [rows, width, hidden]; num_fed [rows] int32
    mlx::core::array operator()(const mlx::core::array &x, const mlx::core::array &num_fed,
                                const std::optional<mlx::core::array> &adapters,
                                const std::vector<LowRank> &terms) const;

private:
    friend class Layers;
    friend class DraftHead;
    std::shared_ptr<const MLPWeights> weights;
};

struct LayerWeights {
    std::shared_ptr<const AttentionWeights> attention;
    std::shared_ptr<const MLPWeights> mlp;

    static constexpr int NUM_LINEARS = AttentionWeights::NUM_LINEARS + MLPWeights::NUM_LINEARS;
};

// Consecutive decoder layers with the same rope, as one primitive: to the bit what the layers give one by one. MLX has
// one operation to build, allocate and hand over, and the threads stay awake from layer to layer.
class Layers {
public:
    explicit Layers(const std::vector<std::pair<Attention, MLP>> &layers);

    // As Attention, with the buffers of all layers, layer by layer, and a window for each. `terms`: of the attention and
    // the MLP of each layer.
    std::vector<mlx::core::array> operator()(
        const mlx::core::array &x, const std::vector<mlx::core::array> &buffers, const mlx::core::array &angles,
        const mlx::core::array &starts, const mlx::core::array &num_fed, const mlx::core::array &places,
        bool has_blocks, const std::vector<int> &windows, const std::optional<mlx::core::array> &adapters,
        const std::vector<LowRank> &terms) const;

private:
    std::shared_ptr<const std::vector<LayerWeights>> layers;
};

// The angles of a pass, for attention.
class RopeAngles {
public:
    // frequencies [rope dims / 2]; positions are multiplied by `scale`, cosines and sines by `magnitude`.
    RopeAngles(const mlx::core::array &frequencies, float scale, float magnitude);

    // positions [rows] int32: of the first token of each row -> [rows, 1, width, rope dims]
    mlx::core::array operator()(const mlx::core::array &positions, int width) const;

    int dims() const { return int(2 * frequencies->size()); }
    // Of one token, `column` tokens after `position`.  angles [dims()]
    void fill(int position, int column, float *angles) const;

private:
    std::shared_ptr<const std::vector<float>> frequencies;
    float scale, magnitude;
};

}  // namespace outrider
