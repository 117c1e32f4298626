#include "matmul.h"

#include <algorithm>
#include <memory>
#include <numeric>
#include <stdexcept>
#include <string>
#include <vector>

#include "primitive.h"
#include "quantized.h"
#include "scratch.h"
#include "threads.h"
#include "weights.h"

namespace outrider {
namespace {

namespace mx = mlx::core;

void check(bool is_valid, const std::string &what) {
    if (!is_valid)
        throw std::invalid_argument("quantized_matmul: " + what);
}

struct Weights {
    const mx::array &weight, &scales;
    const Biases &biases;
    WeightFormat format;
};

// A primitive whose first input is followed by codes, scales and its own inputs; the biases are last, if there are some.
class QuantizedPrimitive : public CpuPrimitive {
  public:
    QuantizedPrimitive(mx::Stream stream, const WeightFormat &format, bool has_biases)
        : CpuPrimitive(stream), format_(format), has_biases_(has_biases) {}

    bool is_equivalent(const mx::Primitive &other) const override {  // MLX compares primitives of one class only
        auto &same = static_cast<const QuantizedPrimitive &>(other);
        return same.format_ == format_ && same.has_biases_ == has_biases_;
    }

  protected:
    // Of several experts, the weights of this one.
    QuantizedMatrix weights(const std::vector<mx::array> &in, ptrdiff_t expert = 0) const {
        return matrix_of(format_, in[1], in[2], has_biases_ ? &in.back() : nullptr, expert);
    }

  private:
    WeightFormat format_;
    bool has_biases_;
};

class QuantizedMatmul : public QuantizedPrimitive {
  public:
    using QuantizedPrimitive::QuantizedPrimitive;

    void eval_cpu(const std::vector<mx::array> &in, std::vector<mx::array> &out) override {
        QuantizedMatrix w = weights(in);
        int num_tokens = static_cast<int>(in[0].size() / w.size);
        auto &encoder = begin(in, out);
        encoder.dispatch([w, num_tokens, x = in[0].data<float>(), y = out[0].data<float>()]() {
            static thread_local Scratch codes;
            void *memory = codes.bytes(token_bytes(num_tokens, w.size));
            Product product = {w, y, w.num_rows};
            multiply(&product, 1, quantize(x, num_tokens, w.size, w.size, memory));
        });
    }

    const char *name() const override { return "OutriderQuantizedMatmul"; }
};

// The tokens of one expert are multiplied together, so that its weights are read once.
void multiply_by_expert(
    const std::vector<QuantizedMatrix> &weights, int num_tokens, const float *x, const int32_t *experts, float *y) {
    static thread_local Scratch codes, inputs, outputs;
    size_t size = weights[0].size, num_rows = weights[0].num_rows;
    std::vector<int> order(num_tokens);
    std::iota(order.begin(), order.end(), 0);
    std::stable_sort(order.begin(), order.end(), [=](int a, int b) { return experts[a] < experts[b]; });
    if (num_tokens > 0)
        check(experts[order.front()] >= 0 && experts[order.back()] < static_cast<int>(weights.size()),
              "there is no such expert");
    float *sorted = inputs.floats(num_tokens * size), *products = outputs.floats(num_tokens * num_rows);
    for (int i = 0; i < num_tokens; i++)
        std::copy_n(x + order[i] * size, size, sorted + i * size);
    QuantizedTokens all = quantize(sorted, num_tokens, size, size, codes.bytes(token_bytes(num_tokens, size)));
    for (int first = 0, last; first < num_tokens; first = last) {
        int expert = experts[order[first]];
        for (last = first; last < num_tokens && experts[order[last]] == expert; last++) {
        }
        Product product = {weights[expert], products + first * num_rows, static_cast<ptrdiff_t>(num_rows)};
        multiply(&product, 1, all.part(first, last - first));
    }
    for (int i = 0; i < num_tokens; i++)
        std::copy_n(products + i * num_rows, num_rows, y + order[i] * num_rows);
}

class GatherQuantizedMatmul : public QuantizedPrimitive {
  public:
    using QuantizedPrimitive::QuantizedPrimitive;

    void eval_cpu(const std::vector<mx::array> &in, std::vector<mx::array> &out) override {
        std::vector<QuantizedMatrix> by_expert;
        for (int expert = 0; expert < in[1].shape(0); expert++)
            by_expert.push_back(weights(in, expert));
        auto &encoder = begin(in, out);
        encoder.dispatch([by_expert = std::move(by_expert), num_tokens = in[0].shape(0), x = in[0].data<float>(),
                          experts = in[3].data<int32_t>(), y = out[0].data<float>()]() {
            multiply_by_expert(by_expert, num_tokens, x, experts, y);
        });
    }

    const char *name() const override { return "OutriderGatherQuantizedMatmul"; }
};

class QuantizedEmbedding : public QuantizedPrimitive {
  public:
    using QuantizedPrimitive::QuantizedPrimitive;

    void eval_cpu(const std::vector<mx::array> &in, std::vector<mx::array> &out) override {
        QuantizedMatrix w = weights(in);
        int num_tokens = static_cast<int>(in[0].size());
        auto &encoder = begin(in, out);
        encoder.dispatch([w, num_tokens, token_ids = in[0].data<int32_t>(), y = out[0].data<float>()]() {
            constexpr int TOKENS_PER_CHUNK = 32;
            parallel((num_tokens + TOKENS_PER_CHUNK - 1) / TOKENS_PER_CHUNK, [=](int chunk) {
                int end = std::min(num_tokens, (chunk + 1) * TOKENS_PER_CHUNK);
                for (int t = chunk * TOKENS_PER_CHUNK; t < end; t++) {
                    // The engine checks ids. A wrong one must not read other memory.
                    int row = std::clamp(token_ids[t], 0, w.num_rows - 1);
                    dequantize_row(w, row, y + static_cast<ptrdiff_t>(t) * w.size);
                }
            });
        });
    }

    const char *name() const override { return "OutriderQuantizedEmbedding"; }
};

bool is_matrix(const mx::array &weight) { return weight.ndim() == 2 || weight.ndim() == 3; }

// Without an operation for weights that are there already and lie as they should.
mx::array contiguous(const mx::array &one, mx::Stream stream) {
    bool is_there = one.status() == mx::array::Status::available && one.flags().row_contiguous;
    return is_there ? one : mx::contiguous(one, false, stream);
}

// An operation on `first`, weights and `others`.
template <class PRIMITIVE>
mx::array operation(
    const mx::Shape &shape, const mx::array &first, const Weights &w, const std::vector<mx::array> &others = {}) {
    auto stream = mx::default_stream(mx::Device::cpu);
    std::vector<mx::array> inputs;
    for (const mx::array &one : {first, w.weight, w.scales})
        inputs.push_back(contiguous(one, stream));
    for (const mx::array &one : others)
        inputs.push_back(contiguous(one, stream));
    if (w.biases)
        inputs.push_back(contiguous(*w.biases, stream));
    return mx::array(shape, mx::float32, std::make_shared<PRIMITIVE>(stream, w.format, w.biases.has_value()), inputs);
}

}  // namespace

mx::array quantized_embedding(
    const mx::array &token_ids, const mx::array &weight, const mx::array &scales, const Biases &biases, int group_size,
    int bits, const std::string &mode) {
    Weights w = {weight, scales, biases, {group_size, bits, mode, weight.ndim() == 3}};
    check(is_matrix(weight) && weight.shape(0) > 0 && weight.ndim() == scales.ndim(), "the weights are not a matrix");
    check(token_ids.dtype() == mx::int32 || token_ids.dtype() == mx::uint32, "token ids are integers of 32 bits");
    mx::Shape shape(token_ids.shape());
    shape.push_back(w.format.num_in_row(scales) * group_size);
    check_weights(w.format, shape.back(), weight, scales, biases);
    return operation<QuantizedEmbedding>(shape, token_ids, w);
}

mx::array quantized_matmul(
    const mx::array &x, const mx::array &weight, const mx::array &scales, const Biases &biases, int group_size,
    int bits, const std::string &mode) {
    Weights w = {weight, scales, biases, {group_size, bits, mode, weight.ndim() == 3}};
    check(is_matrix(weight) && x.ndim() > 0, "the weights are not a matrix");
    check(x.dtype() == mx::float32, "tokens must be float32");
    check_weights(w.format, x.shape(-1), weight, scales, biases);
    mx::Shape shape(x.shape());
    shape.back() = w.format.num_rows(weight);
    return operation<QuantizedMatmul>(shape, x, w);
}

mx::array gather_quantized_matmul(
    const mx::array &x, const mx::array &weight, const mx::array &scales, const Biases &biases,
    const mx::array &experts, int group_size, int bits, const std::string &mode) {
    Weights w = {weight, scales, biases, {group_size, bits, mode, weight.ndim() == 4}};
    check((weight.ndim() == 3 || weight.ndim() == 4) && weight.shape(0) > 0 && x.ndim() == 2,
          "the weights are not a matrix for each expert");
    check(experts.dtype() == mx::int32 && experts.shape() == mx::Shape{x.shape(0)}, "each token needs an expert");
    check(x.dtype() == mx::float32, "tokens must be float32");
    check_weights(w.format, x.shape(-1), weight, scales, biases);
    return operation<GatherQuantizedMatmul>({x.shape(0), w.format.num_rows(weight)}, x, w, {experts});
}

}  // namespace outrider
