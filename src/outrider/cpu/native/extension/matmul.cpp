#include "matmul.h"

#include <algorithm>
#include <memory>
#include <numeric>
#include <stdexcept>
#include <string>
#include <vector>

#include "primitive.h"
#include "quantized.h"
#include "threads.h"

namespace outrider {
namespace {

namespace mx = mlx::core;

void check(bool is_valid, const std::string &what) {
    if (!is_valid)
        throw std::invalid_argument("quantized_matmul: " + what);
}

void check_weights(
    const mx::array &x, const mx::array &weight, const mx::array &scales, const mx::array &biases, int group_size,
    int bits) {
    check(bits == 2 || bits == 3 || bits == 4 || bits == 5 || bits == 6 || bits == 8,
          "there are no weights of " + std::to_string(bits) + " bits");
    check(group_size == 32 || group_size == 64 || group_size == 128,
          "groups have 32, 64 or 128 elements, not " + std::to_string(group_size));
    int size = x.shape(-1);
    check(size > 0 && size % group_size == 0,
          "groups of " + std::to_string(group_size) + " do not divide rows of " + std::to_string(size));
    check(x.dtype() == mx::float32, "tokens must be float32");
    check(weight.dtype() == mx::uint32, "codes must be uint32");
    check(scales.dtype() == biases.dtype() &&
              (scales.dtype() == mx::float32 || scales.dtype() == mx::float16 || scales.dtype() == mx::bfloat16),
          "scales and biases must both be float32, float16 or bfloat16");
    mx::Shape expected(weight.shape());
    expected.back() = size / group_size;
    check(weight.shape(-1) == size / 32 * bits && scales.shape() == expected && biases.shape() == expected,
          "the shapes of codes, scales and biases do not belong together");
}

// Expert `expert` of the weights; 0 if there is one matrix only.
QuantizedMatrix matrix_of(const std::vector<mx::array> &in, int group_size, int bits, ptrdiff_t expert = 0) {
    const mx::array &codes = in[1], &scales = in[2], &biases = in[3];
    int rows = codes.shape(-2), words = codes.shape(-1), groups = scales.shape(-1);
    ptrdiff_t skipped = expert * rows * groups * static_cast<ptrdiff_t>(scales.itemsize());
    return {rows, groups * group_size, bits, group_size, codes.data<uint32_t>() + expert * rows * words,
            scales.data<char>() + skipped, biases.data<char>() + skipped, float_type(scales)};
}

// Memory that a thread keeps from one call to the next, unless it is large.
class Scratch {
  public:
    explicit Scratch(size_t num_bytes) {
        thread_local std::vector<char> kept;
        constexpr size_t MAX_KEPT = 16 << 20;
        std::vector<char> &bytes = num_bytes <= MAX_KEPT ? kept : own_;
        if (bytes.size() < num_bytes + TOKEN_ALIGNMENT)
            bytes.resize(num_bytes + TOKEN_ALIGNMENT);
        auto address = reinterpret_cast<uintptr_t>(bytes.data());
        data_ = reinterpret_cast<void *>((address + TOKEN_ALIGNMENT - 1) / TOKEN_ALIGNMENT * TOKEN_ALIGNMENT);
    }
    void *data() { return data_; }

  private:
    std::vector<char> own_;
    void *data_;
};

class QuantizedMatmul : public CpuPrimitive {
  public:
    QuantizedMatmul(mx::Stream stream, int group_size, int bits)
        : CpuPrimitive(stream), group_size_(group_size), bits_(bits) {}

    void eval_cpu(const std::vector<mx::array> &in, std::vector<mx::array> &out) override {
        out[0].set_data(mx::allocator::malloc(out[0].nbytes()));
        auto &encoder = mx::cpu::get_command_encoder(stream());
        for (const mx::array &one : in)
            encoder.set_input_array(one);
        encoder.set_output_array(out[0]);
        QuantizedMatrix weights = matrix_of(in, group_size_, bits_);
        int num_tokens = static_cast<int>(in[0].size() / weights.size);
        encoder.dispatch([weights, num_tokens, x = in[0].data<float>(), y = out[0].data<float>()]() {
            Scratch scratch(token_bytes(num_tokens, weights.size));
            QuantizedTokens tokens = quantize(x, num_tokens, weights.size, weights.size, scratch.data());
            Product product = {weights, y, weights.num_rows};
            multiply(&product, 1, tokens);
        });
    }

    bool is_equivalent(const mx::Primitive &other) const override {
        auto &same = static_cast<const QuantizedMatmul &>(other);
        return same.group_size_ == group_size_ && same.bits_ == bits_;
    }

    const char *name() const override { return "OutriderQuantizedMatmul"; }

  private:
    int group_size_, bits_;
};

class GatherQuantizedMatmul : public CpuPrimitive {
  public:
    GatherQuantizedMatmul(mx::Stream stream, int group_size, int bits)
        : CpuPrimitive(stream), group_size_(group_size), bits_(bits) {}

    void eval_cpu(const std::vector<mx::array> &in, std::vector<mx::array> &out) override {
        out[0].set_data(mx::allocator::malloc(out[0].nbytes()));
        auto &encoder = mx::cpu::get_command_encoder(stream());
        for (const mx::array &one : in)
            encoder.set_input_array(one);
        encoder.set_output_array(out[0]);
        std::vector<QuantizedMatrix> weights;
        for (int expert = 0; expert < in[1].shape(0); expert++)
            weights.push_back(matrix_of(in, group_size_, bits_, expert));
        encoder.dispatch([weights = std::move(weights), num_tokens = in[0].shape(0), x = in[0].data<float>(),
                          experts = in[4].data<int32_t>(), y = out[0].data<float>()]() {
            multiply_by_expert(weights, num_tokens, x, experts, y);
        });
    }

    bool is_equivalent(const mx::Primitive &other) const override {
        auto &same = static_cast<const GatherQuantizedMatmul &>(other);
        return same.group_size_ == group_size_ && same.bits_ == bits_;
    }

    const char *name() const override { return "OutriderGatherQuantizedMatmul"; }

  private:
    // The tokens of one expert are multiplied together, so that its weights are read once.
    static void multiply_by_expert(
        const std::vector<QuantizedMatrix> &weights, int num_tokens, const float *x, const int32_t *experts,
        float *y) {
        int size = weights[0].size, num_rows = weights[0].num_rows;
        std::vector<int> order(num_tokens);
        std::iota(order.begin(), order.end(), 0);
        std::stable_sort(order.begin(), order.end(), [=](int a, int b) { return experts[a] < experts[b]; });
        if (num_tokens > 0)
            check(experts[order.front()] >= 0 && experts[order.back()] < static_cast<int>(weights.size()),
                  "there is no such expert");
        size_t num_bytes = token_bytes(num_tokens, size);
        Scratch scratch(num_bytes + sizeof(float) * num_tokens * (static_cast<size_t>(num_rows) + size) + 64);
        auto *products = reinterpret_cast<float *>(static_cast<char *>(scratch.data()) + (num_bytes + 63) / 64 * 64);
        float *sorted = products + static_cast<size_t>(num_tokens) * num_rows;
        for (int i = 0; i < num_tokens; i++)
            std::copy_n(x + static_cast<size_t>(order[i]) * size, size, sorted + static_cast<size_t>(i) * size);
        QuantizedTokens all = quantize(sorted, num_tokens, size, size, scratch.data());
        for (int first = 0, last; first < num_tokens; first = last) {
            int expert = experts[order[first]];
            for (last = first; last < num_tokens && experts[order[last]] == expert; last++) {
            }
            ptrdiff_t codes = static_cast<ptrdiff_t>(first) * size, blocks = codes / BLOCK;
            QuantizedTokens some = {
                last - first, size, all.codes + 2 * codes, all.scales + blocks, all.sums + blocks};
            Product product = {weights[expert], products + static_cast<size_t>(first) * num_rows, num_rows};
            multiply(&product, 1, some);
        }
        for (int i = 0; i < num_tokens; i++)
            std::copy_n(products + static_cast<size_t>(i) * num_rows, num_rows,
                        y + static_cast<size_t>(order[i]) * num_rows);
    }

    int group_size_, bits_;
};

class QuantizedEmbedding : public CpuPrimitive {
  public:
    QuantizedEmbedding(mx::Stream stream, int group_size, int bits)
        : CpuPrimitive(stream), group_size_(group_size), bits_(bits) {}

    void eval_cpu(const std::vector<mx::array> &in, std::vector<mx::array> &out) override {
        out[0].set_data(mx::allocator::malloc(out[0].nbytes()));
        auto &encoder = mx::cpu::get_command_encoder(stream());
        QuantizedMatrix weights = matrix_of(in, group_size_, bits_);
        encoder.dispatch([weights, token_ids = in[0].data<int32_t>(), y = out[0].data<float>(),
                          num_tokens = static_cast<int>(in[0].size())]() {
            constexpr int TOKENS_PER_CHUNK = 32;
            parallel((num_tokens + TOKENS_PER_CHUNK - 1) / TOKENS_PER_CHUNK, [=](int chunk) {
                int end = std::min(num_tokens, (chunk + 1) * TOKENS_PER_CHUNK);
                for (int t = chunk * TOKENS_PER_CHUNK; t < end; t++) {
                    int row = std::clamp(token_ids[t], 0, weights.num_rows - 1);
                    dequantize_row(weights, row, y + static_cast<ptrdiff_t>(t) * weights.size);
                }
            });
        });
    }

    bool is_equivalent(const mx::Primitive &other) const override {
        auto &same = static_cast<const QuantizedEmbedding &>(other);
        return same.group_size_ == group_size_ && same.bits_ == bits_;
    }

    const char *name() const override { return "OutriderQuantizedEmbedding"; }

  private:
    int group_size_, bits_;
};

// Without an operation for weights that are there already and lie as they should.
mx::array contiguous(const mx::array &one, mx::Stream stream) {
    bool is_there = one.status() == mx::array::Status::available && one.flags().row_contiguous;
    return is_there ? one : mx::contiguous(one, false, stream);
}

}  // namespace

mx::array quantized_embedding(
    const mx::array &token_ids, const mx::array &weight, const mx::array &scales, const mx::array &biases,
    int group_size, int bits) {
    check(weight.ndim() == 2 && weight.shape(0) > 0, "the weights are not a matrix");
    check(token_ids.dtype() == mx::int32 || token_ids.dtype() == mx::uint32, "token ids are integers of 32 bits");
    mx::Shape shape(token_ids.shape());
    shape.push_back(scales.shape(-1) * group_size);
    check_weights(mx::zeros(shape), weight, scales, biases, group_size, bits);
    auto stream = mx::default_stream(mx::Device::cpu);
    std::vector<mx::array> inputs;
    for (const mx::array &one : {token_ids, weight, scales, biases})
        inputs.push_back(contiguous(one, stream));
    return mx::array(shape, mx::float32, std::make_shared<QuantizedEmbedding>(stream, group_size, bits), inputs);
}

mx::array quantized_matmul(
    const mx::array &x, const mx::array &weight, const mx::array &scales, const mx::array &biases, int group_size,
    int bits) {
    check(weight.ndim() == 2, "the weights are not a matrix");
    check_weights(x, weight, scales, biases, group_size, bits);
    mx::Shape shape(x.shape());
    shape.back() = weight.shape(0);
    auto stream = mx::default_stream(mx::Device::cpu);
    std::vector<mx::array> inputs = {contiguous(x, stream)};
    for (const mx::array &one : {weight, scales, biases})
        inputs.push_back(contiguous(one, stream));
    return mx::array(shape, mx::float32, std::make_shared<QuantizedMatmul>(stream, group_size, bits), inputs);
}

mx::array gather_quantized_matmul(
    const mx::array &x, const mx::array &weight, const mx::array &scales, const mx::array &biases,
    const mx::array &experts, int group_size, int bits) {
    check(weight.ndim() == 3 && weight.shape(0) > 0 && x.ndim() == 2, "the weights are not a matrix for each expert");
    check(experts.dtype() == mx::int32 && experts.shape() == mx::Shape{x.shape(0)}, "each token needs an expert");
    check_weights(x, weight, scales, biases, group_size, bits);
    auto stream = mx::default_stream(mx::Device::cpu);
    std::vector<mx::array> inputs;
    for (const mx::array &one : {x, weight, scales, biases, experts})
        inputs.push_back(contiguous(one, stream));
    mx::Shape shape = {x.shape(0), weight.shape(1)};
    return mx::array(shape, mx::float32, std::make_shared<GatherQuantizedMatmul>(stream, group_size, bits), inputs);
}

}  // namespace outrider
