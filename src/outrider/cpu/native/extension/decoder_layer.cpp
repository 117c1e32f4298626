#include "decoder_layer.h"

#include <cstring>

#include "decoder_math.h"
#include "decoder_pass.h"
#include "mlx/backend/cpu/simd/simd.h"
#include "primitive.h"
#include "threads.h"
#include "weights.h"

namespace mx = mlx::core;

namespace outrider {
namespace {

// The ids of the rows' adapters, if they are among the inputs.
const int *adapters_of(mx::cpu::CommandEncoder &encoder, const std::vector<mx::array> &inputs, size_t index) {
    return index < inputs.size() ? elements<int>(encoder, inputs[index]) : nullptr;
}

constexpr size_t NUM_OTHERS = 5;  // inputs of a layer before its buffers; the adapters are after them

// What all layers of a pass have in common. Their inputs are those of Attention and Layers. `out`: null if only cells
// are written.
AttentionCall call_of(mx::cpu::CommandEncoder &encoder, const std::vector<mx::array> &inputs, size_t num_buffers,
                      const float *x, float *out, bool has_blocks) {
    return {.rows = inputs[0].shape(0),
            .width = inputs[0].shape(1),
            .x = x,
            .angles = elements<float>(encoder, inputs[1]),
            .starts = elements<int>(encoder, inputs[2]),
            .num_fed = elements<int>(encoder, inputs[3]),
            .places = elements<int>(encoder, inputs[4]),
            .columns = inputs[4].shape(1),
            .has_blocks = has_blocks,
            .out = out,
            .adapters = adapters_of(encoder, inputs, NUM_OTHERS + num_buffers)};
}

// Outputs: the new x, then the buffers; with `only_cells` the buffers.
class AttentionPrimitive : public CpuPrimitive {
public:
    AttentionPrimitive(mx::Stream stream, std::shared_ptr<const AttentionWeights> weights, int window, bool has_blocks,
                       bool only_cells, const std::vector<LowRank> &terms)
        : CpuPrimitive(stream),
          weights(std::move(weights)),
          window(window),
          has_blocks(has_blocks),
          only_cells(only_cells),
          terms(terms) {}

    const char *name() const override { return "OutriderAttention"; }

    void eval_cpu(const std::vector<mx::array> &inputs, std::vector<mx::array> &outputs) override {
        auto &encoder = mx::cpu::get_command_encoder(stream());
        size_t first = only_cells ? 0 : 1, num_buffers = outputs.size() - first;
        if (!only_cells)
            outputs[0].set_data(mx::allocator::malloc(outputs[0].nbytes()));
        release_inputs(inputs, outputs);
        for (size_t i = 0; i < num_buffers; i++)
            take_over(encoder, inputs[NUM_OTHERS + i], outputs[first + i]);
        float *out = only_cells ? nullptr : outputs[0].data<float>();
        AttentionCall call =
            call_of(encoder, inputs, num_buffers, elements<float>(encoder, inputs[0]), out, has_blocks);
        call.add_cells(window, {outputs.begin() + first, outputs.end()}, weights->head_dim());
        encoder.dispatch([weights = weights, terms = terms, call] {
            run(*weights, terms.data(), call, fed_tokens(call.num_fed, call.rows, call.width));
        });
        note_holds(encoder, inputs, outputs);
    }

private:
    std::shared_ptr<const AttentionWeights> weights;
    int window;
    bool has_blocks, only_cells;
    std::vector<LowRank> terms;
};

class MLPPrimitive : public CpuPrimitive {
public:
    MLPPrimitive(mx::Stream stream, std::shared_ptr<const MLPWeights> weights, const std::vector<LowRank> &terms)
        : CpuPrimitive(stream), weights(std::move(weights)), terms(terms) {}

    const char *name() const override { return "OutriderMLP"; }

    void eval_cpu(const std::vector<mx::array> &inputs, std::vector<mx::array> &outputs) override {
        auto &encoder = mx::cpu::get_command_encoder(stream());
        const mx::array &x = inputs[0];
        outputs[0].set_data(mx::allocator::malloc(outputs[0].nbytes()));
        MLPCall call = {.rows = x.shape(0),
                        .width = x.shape(1),
                        .x = elements<float>(encoder, x),
                        .num_fed = elements<int>(encoder, inputs[1]),
                        .out = outputs[0].data<float>(),
                        .adapters = adapters_of(encoder, inputs, 2)};
        encoder.dispatch([weights = weights, terms = terms, call] {
            run(*weights, terms.data(), call, fed_tokens(call.num_fed, call.rows, call.width));
        });
    }

private:
    std::shared_ptr<const MLPWeights> weights;
    std::vector<LowRank> terms;
};

class LayersPrimitive : public CpuPrimitive {
public:
    LayersPrimitive(mx::Stream stream, std::shared_ptr<const std::vector<LayerWeights>> layers,
                    const std::vector<int> &windows, bool has_blocks, const std::vector<LowRank> &terms)
        : CpuPrimitive(stream), layers(std::move(layers)), windows(windows), has_blocks(has_blocks), terms(terms) {}

    const char *name() const override { return "OutriderLayers"; }

    void eval_cpu(const std::vector<mx::array> &inputs, std::vector<mx::array> &outputs) override {
        auto &encoder = mx::cpu::get_command_encoder(stream());
        const mx::array &x = inputs[0];
        outputs[0].set_data(mx::allocator::malloc(outputs[0].nbytes()));
        release_inputs(inputs, outputs);
        for (size_t i = 1; i < outputs.size(); i++)
            take_over(encoder, inputs[NUM_OTHERS + i - 1], outputs[i]);
        float *out = outputs[0].data<float>();
        AttentionCall call = call_of(encoder, inputs, outputs.size() - 1, out, out, has_blocks);
        std::vector<AttentionCall> calls;
        size_t per_layer = (outputs.size() - 1) / layers->size();
        for (size_t i = 0; i < layers->size(); i++) {
            auto first = outputs.begin() + 1 + i * per_layer;
            call.add_cells(windows[i], {first, first + per_layer}, (*layers)[i].attention->head_dim());
            calls.push_back(call);
        }
        encoder.dispatch([layers = layers, terms = terms, calls, from = elements<float>(encoder, x), out,
                          bytes = outputs[0].nbytes()] {
            InParts in_parts;
            std::memcpy(out, from, bytes);
            std::vector<Token> tokens = fed_tokens(calls[0].num_fed, calls[0].rows, calls[0].width);
            for (size_t i = 0; i < layers->size(); i++) {
                const AttentionCall &call = calls[i];
                const LowRank *own = terms.empty() ? nullptr : terms.data() + i * LayerWeights::NUM_LINEARS;
                const LowRank *of_mlp = own ? own + AttentionWeights::NUM_LINEARS : nullptr;
                run(*(*layers)[i].attention, own, call, tokens);
                run(*(*layers)[i].mlp, of_mlp, {call.rows, call.width, out, call.num_fed, out, call.adapters}, tokens);
            }
        });
        note_holds(encoder, inputs, outputs);
    }

private:
    std::shared_ptr<const std::vector<LayerWeights>> layers;
    std::vector<int> windows;
    bool has_blocks;
    std::vector<LowRank> terms;
};

class RMSNormPrimitive : public CpuPrimitive {
public:
    RMSNormPrimitive(mx::Stream stream, const RMSNorm &norm) : CpuPrimitive(stream), norm(norm) {}

    const char *name() const override { return "OutriderRMSNorm"; }

    void eval_cpu(const std::vector<mx::array> &inputs, std::vector<mx::array> &outputs) override {
        auto &encoder = mx::cpu::get_command_encoder(stream());
        outputs[0].set_data(mx::allocator::malloc(outputs[0].nbytes()));
        encoder.dispatch([norm = norm, x = elements<float>(encoder, inputs[0]), y = outputs[0].data<float>(),
                          num = int(inputs[0].size() / norm.size())] {
            size_t size = norm.size();
            const Math &math = outrider::math();
            for_tokens(num, [&](int t) {
                math.rms_norm(x + t * size, norm.data(), size, norm.eps, y + t * size);
            });
        });
    }

private:
    RMSNorm norm;
};

class RopeAnglesPrimitive : public CpuPrimitive {
public:
    RopeAnglesPrimitive(mx::Stream stream, const RopeAngles &own) : CpuPrimitive(stream), own(own) {}

    const char *name() const override { return "OutriderRopeAngles"; }

    void eval_cpu(const std::vector<mx::array> &inputs, std::vector<mx::array> &outputs) override {
        auto &encoder = mx::cpu::get_command_encoder(stream());
        outputs[0].set_data(mx::allocator::malloc(outputs[0].nbytes()));
        encoder.dispatch([own = own, positions = elements<int>(encoder, inputs[0]), angles = outputs[0].data<float>(),
                          rows = outputs[0].shape(0), width = outputs[0].shape(2)] {
            for_tokens(rows * width, [&](int t) {
                own.fill(positions[t / width], t % width, angles + ptrdiff_t(t) * own.dims());
            });
        });
    }

private:
    RopeAngles own;
};

std::vector<float> to_floats(const mx::array &array) {
    mx::array floats = mx::contiguous(mx::astype(array, mx::float32));
    floats.eval();
    return {floats.data<float>(), floats.data<float>() + floats.size()};
}

void check(const Linear &linear, size_t num_rows, size_t size) {
    require(size_t(linear.matrix.num_rows) == num_rows && size_t(linear.matrix.size) == size,
            "a weight of another shape than the layer's");
    require(linear.bias.empty() || linear.bias.size() == num_rows, "a bias of another size than its weight");
    require(num_rows % 16 == 0 && size % BLOCK == 0, "sizes must be multiples of 16 and 32");
}

void check_adapters(int rows, const std::optional<mx::array> &adapters, const std::vector<LowRank> &terms,
                    const std::vector<const Linear *> &linears) {
    if (!adapters)
        return;
    require(adapters->shape() == mx::Shape{rows} && adapters->dtype() == mx::int32, "adapters: int32 [rows]");
    require(terms.size() == linears.size(), "low-rank terms: one for each linear layer");
    auto term = terms.begin();
    for (const Linear *linear : linears)
        require((term++)->fits(linear->matrix.size, linear->matrix.num_rows), "low-rank terms of another size");
}

// Of a layer whose first inputs are x and the angles.
void check_pass(const AttentionWeights &w, const mx::array &x, const mx::array &angles, int window) {
    int hidden = w.norm.size();
    require(x.ndim() == 3 && x.shape(2) == hidden && x.dtype() == mx::float32, "x: float32 [rows, width, hidden]");
    require(angles.shape() == mx::Shape{x.shape(0), 1, x.shape(1), w.rope_dims} && angles.dtype() == mx::float32,
            "angles: float32 [rows, 1, width, rope dims]");
    require(window >= 0, "window: 0 or more");
}

// The outputs of a primitive that changes the buffers, and x unless it `keeps_x`.
std::vector<mx::array> changed(std::shared_ptr<mx::Primitive> primitive, std::vector<mx::array> inputs,
                               const std::vector<mx::array> &buffers, const std::optional<mx::array> &adapters,
                               bool keeps_x = false) {
    std::vector<mx::Shape> shapes;
    std::vector<mx::Dtype> dtypes;
    if (!keeps_x) {
        shapes.push_back(inputs[0].shape());
        dtypes.push_back(mx::float32);
    }
    for (const mx::array &buffer : buffers) {
        inputs.push_back(buffer);
        shapes.push_back(buffer.shape());
        dtypes.push_back(buffer.dtype());
    }
    if (adapters)
        inputs.push_back(*adapters);
    return mx::array::make_arrays(std::move(shapes), dtypes, std::move(primitive), std::move(inputs));
}

}  // namespace

Linear::Linear(const mx::array &weight, const mx::array &scales, const std::optional<mx::array> &biases,
               int group_size, int bits, const std::string &mode, const std::optional<mx::array> &own_bias)
    : held{mx::contiguous(weight), mx::contiguous(scales)} {
    require((weight.ndim() == 2 || weight.ndim() == 3) && scales.ndim() == weight.ndim(), "not a quantised matrix");
    WeightFormat format = {group_size, bits, mode, weight.ndim() == 3};
    check_weights(format, format.num_in_row(scales) * group_size, weight, scales, biases);
    if (biases)
        held.push_back(mx::contiguous(*biases));
    mx::eval(held);
    matrix = matrix_of(format, held[0], held[1], biases ? &held[2] : nullptr);
    if (own_bias)
        bias = to_floats(*own_bias);
}

RMSNorm::RMSNorm(const mx::array &array, float eps)
    : eps(eps), weight(std::make_shared<const std::vector<float>>(to_floats(array))) {
    require(size() > 0 && size() % 16 == 0, "a norm's size must be a multiple of 16");
}

mx::array RMSNorm::operator()(const mx::array &x) const {
    require(x.ndim() > 0 && size_t(x.shape(-1)) == size() && x.dtype() == mx::float32,
            "x: float32 [..., size of the norm]");
    auto primitive = std::make_shared<RMSNormPrimitive>(mx::default_stream(mx::Device::cpu), *this);
    return mx::array(x.shape(), mx::float32, primitive, {x});
}

void AttentionWeights::check() const {
    size_t hidden = norm.size(), dim = head_dim();
    require(num_kv_heads > 0 && num_heads % num_kv_heads == 0 && dim * num_heads == size_t(q.matrix.num_rows),
            "heads do not divide");
    require(dim % 16 == 0 && rope_dims % 2 == 0 && size_t(rope_dims) <= dim, "heads must be multiples of 16");
    outrider::check(q, dim * num_heads, hidden);
    outrider::check(k, dim * num_kv_heads, hidden);
    outrider::check(v, dim * num_kv_heads, hidden);
    outrider::check(o, hidden, dim * num_heads);
    require(!q_norm || q_norm->size() == dim, "a query norm of another size than a head");
    require(!k_norm || k_norm->size() == dim, "a key norm of another size than a head");
}

void MLPWeights::check() const {
    size_t hidden = norm.size(), size = gate.matrix.num_rows;
    outrider::check(gate, size, hidden);
    outrider::check(up, size, hidden);
    outrider::check(down, hidden, size);
}

Attention::Attention(AttentionWeights own) : weights(std::make_shared<const AttentionWeights>(std::move(own))) {
    weights->check();
}

void Attention::check(const mx::array &x, const std::vector<mx::array> &buffers, const mx::array &angles,
                      const mx::array &starts, const mx::array &num_fed, const mx::array &places, bool has_blocks,
                      int window, const std::optional<mx::array> &adapters, const std::vector<LowRank> &terms) const {
    const AttentionWeights &w = *weights;
    check_pass(w, x, angles, window);
    check_buffers(buffers, w.num_kv_heads, w.head_dim());
    check_attended_places(x.shape(0), buffers[0], starts, num_fed, places, has_blocks);
    check_adapters(x.shape(0), adapters, terms, w.linears());
}

std::vector<mx::array> Attention::operator()(const mx::array &x, const std::vector<mx::array> &buffers,
                                             const mx::array &angles, const mx::array &starts,
                                             const mx::array &num_fed, const mx::array &places, bool has_blocks,
                                             int window, const std::optional<mx::array> &adapters,
                                             const std::vector<LowRank> &terms) const {
    check(x, buffers, angles, starts, num_fed, places, has_blocks, window, adapters, terms);
    auto stream = mx::default_stream(mx::Device::cpu);
    auto primitive = std::make_shared<AttentionPrimitive>(stream, weights, window, has_blocks, false, terms);
    return changed(primitive, {x, angles, starts, num_fed, places}, buffers, adapters);
}

std::vector<mx::array> Attention::write_cells(const mx::array &x, const std::vector<mx::array> &buffers,
                                              const mx::array &angles, const mx::array &starts,
                                              const mx::array &num_fed, const mx::array &places, bool has_blocks,
                                              const std::optional<mx::array> &adapters,
                                              const std::vector<LowRank> &terms) const {
    check(x, buffers, angles, starts, num_fed, places, has_blocks, 0, adapters, terms);
    auto stream = mx::default_stream(mx::Device::cpu);
    auto primitive = std::make_shared<AttentionPrimitive>(stream, weights, 0, has_blocks, true, terms);
    return changed(primitive, {x, angles, starts, num_fed, places}, buffers, adapters, true);
}

Layers::Layers(const std::vector<std::pair<Attention, MLP>> &own) {
    require(!own.empty(), "no layers");
    std::vector<LayerWeights> all;
    for (const auto &[attention, mlp] : own) {
        all.push_back({attention.weights, mlp.weights});
        require(!attention.weights->is_part && !mlp.weights->is_part, "layers of one rank of several");
        require(mlp.weights->norm.size() == own[0].first.weights->norm.size(), "layers of different sizes");
    }
    layers = std::make_shared<const std::vector<LayerWeights>>(std::move(all));
}

std::vector<mx::array> Layers::operator()(const mx::array &x, const std::vector<mx::array> &buffers,
                                          const mx::array &angles, const mx::array &starts, const mx::array &num_fed,
                                          const mx::array &places, bool has_blocks, const std::vector<int> &windows,
                                          const std::optional<mx::array> &adapters,
                                          const std::vector<LowRank> &terms) const {
    size_t num_layers = layers->size(), per_layer = buffers.size() / num_layers;
    require(per_layer * num_layers == buffers.size(), "every layer needs as many buffers");
    require(windows.size() == num_layers, "windows: one for each layer");
    std::vector<const Linear *> linears;
    for (size_t i = 0; i < num_layers; i++) {
        const LayerWeights &layer = (*layers)[i];
        const AttentionWeights &w = *layer.attention;
        std::vector<mx::array> own(buffers.begin() + i * per_layer, buffers.begin() + (i + 1) * per_layer);
        check_pass(w, x, angles, windows[i]);
        check_buffers(own, w.num_kv_heads, w.head_dim());
        check_attended_places(x.shape(0), own[0], starts, num_fed, places, has_blocks);
        for (const auto &of_part : {w.linears(), layer.mlp->linears()})
            linears.insert(linears.end(), of_part.begin(), of_part.end());
    }
    check_adapters(x.shape(0), adapters, terms, linears);
    auto stream = mx::default_stream(mx::Device::cpu);
    auto primitive =
        std::make_shared<LayersPrimitive>(stream, layers, windows, has_blocks, adapters ? terms : std::vector<LowRank>{});
    return changed(primitive, {x, angles, starts, num_fed, places}, buffers, adapters);
}

MLP::MLP(MLPWeights own) : weights(std::make_shared<const MLPWeights>(std::move(own))) { weights->check(); }

mx::array MLP::operator()(const mx::array &x, const mx::array &num_fed, const std::optional<mx::array> &adapters,
                          const std::vector<LowRank> &terms) const {
    int hidden = weights->norm.size();
    require(x.ndim() == 3 && x.shape(2) == hidden && x.dtype() == mx::float32, "x: float32 [rows, width, hidden]");
    require(num_fed.shape() == mx::Shape{x.shape(0)} && num_fed.dtype() == mx::int32, "fed counts: int32 [rows]");
    check_adapters(x.shape(0), adapters, terms, weights->linears());
    auto primitive = std::make_shared<MLPPrimitive>(mx::default_stream(mx::Device::cpu), weights, terms);
    std::vector<mx::array> inputs = {x, num_fed};
    if (adapters)
        inputs.push_back(*adapters);
    return mx::array(x.shape(), mx::float32, primitive, std::move(inputs));
}

RopeAngles::RopeAngles(const mx::array &own, float scale, float magnitude)
    : frequencies(std::make_shared<const std::vector<float>>(to_floats(own))), scale(scale), magnitude(magnitude) {}

void RopeAngles::fill(int position, int column, float *angles) const {
    float scaled = (float(position) + float(column)) * scale;
    size_t half = frequencies->size();
    for (size_t i = 0; i < half; i++) {
        mx::simd::Simd<float, 1> angle(scaled * (*frequencies)[i]);  // as MLX's own cosines
        angles[i] = mx::simd::cos(angle).value * magnitude;
        angles[i + half] = mx::simd::sin(angle).value * magnitude;
    }
}

mx::array RopeAngles::operator()(const mx::array &positions, int width) const {
    require(positions.ndim() == 1 && positions.dtype() == mx::int32 && width > 0, "positions: int32 [rows]");
    auto stream = mx::default_stream(mx::Device::cpu);
    mx::Shape shape = {positions.shape(0), 1, width, dims()};
    return mx::array(shape, mx::float32, std::make_shared<RopeAnglesPrimitive>(stream, *this), {positions});
}

}  // namespace outrider
