#include "decoder_layer.h"

#include <cstring>
#include <stdexcept>

#include "decoder_math.h"
#include "mlx/backend/cpu/simd/simd.h"
#include "primitive.h"
#include "scratch.h"
#include "threads.h"

namespace mx = mlx::core;

namespace outrider {
namespace {

constexpr int MAX_TOKENS = 256;        // that are computed at once: bounds the memory; chosen by hand
constexpr int MIN_SHARED_TOKENS = 32;  // from which norms, ropes and activations pay several threads; chosen by hand
constexpr int TOKENS_PER_CHUNK = 8;    // of those
constexpr int MAX_QUERY_ROWS = 96;     // queries times heads that attend to a block of cells together; chosen by hand
constexpr int UNITS_PER_THREAD = 4;    // rows times heads of the keys, below which a row's cells are shared too; chosen by hand
constexpr double MIN_SHARED_WORK = 2e5;  // multiplications of attention from which several threads pay: 10 us

int ceil_div(int a, int b) { return (a + b - 1) / b; }

// Calls work(t) for every token, on several threads if there are many.
template <class Work>
void for_tokens(int num, const Work &work) {
    if (num < MIN_SHARED_TOKENS) {
        for (int t = 0; t < num; t++)
            work(t);
        return;
    }
    parallel(ceil_div(num, TOKENS_PER_CHUNK), [&](int chunk) {
        int first = chunk * TOKENS_PER_CHUNK;
        for (int t = first; t < std::min(first + TOKENS_PER_CHUNK, num); t++)
            work(t);
    });
}

struct Token {
    int row, column;
    size_t index;  // row * width + column
};

// The tokens of a pass that are not padding.
std::vector<Token> fed_tokens(const int *num_fed, int rows, int width) {
    std::vector<Token> tokens;
    for (int row = 0; row < rows; row++)
        for (int column = 0; column < std::min(num_fed[row], width); column++)
            tokens.push_back({row, column, size_t(row) * width + column});
    return tokens;
}

// y = linear(tokens) without the bias
Product product(const Linear &linear, float *y) { return {linear.matrix, y, linear.matrix.num_rows}; }

void add_bias(const Math &math, const Linear &linear, float *y) {
    if (!linear.bias.empty())
        math.add(linear.bias.data(), linear.matrix.num_rows, y);
}

// out = x + y + bias, for the tokens [first, first + num)
void add_residual(const Math &math, const Linear &linear, const Token *tokens, int num, const float *x, float *y,
                  float *out) {
    size_t size = linear.matrix.num_rows;
    for_tokens(num, [&](int t) {
        float *own = y + t * size;
        add_bias(math, linear, own);
        math.add(x + tokens[t].index * size, size, own);
        std::memcpy(out + tokens[t].index * size, own, size * sizeof(float));
    });
}

QuantizedTokens normed_tokens(const Math &math, const RMSNorm &norm, const Token *tokens, int num, const float *x) {
    static thread_local Scratch floats, codes;
    size_t size = norm.size();
    float *normed = floats.floats(num * size);
    for_tokens(num, [&](int t) {
        math.rms_norm(x + tokens[t].index * size, norm.data(), size, norm.eps, normed + t * size);
    });
    return quantize(normed, num, size, size, codes.bytes(token_bytes(num, size)));
}

struct AttentionCall {
    int rows, width, num_cells, window;
    const float *x, *angles;
    const int *starts, *num_fed, *slots;
    float *out, *keys, *values;
};

// Norms and turns a token's queries and keys, and writes its keys and values into its cell.
void write_cell(const Math &math, const AttentionWeights &w, const AttentionCall &call, const Token &token, float *q,
                float *k, float *v) {
    int dim = w.head_dim();
    add_bias(math, w.q, q);
    add_bias(math, w.k, k);
    add_bias(math, w.v, v);
    const float *angles = call.angles + token.index * w.rope_dims;
    auto turn = [&](const std::optional<RMSNorm> &norm, float *head) {
        if (norm)
            math.rms_norm(head, norm->data(), dim, norm->eps, head);
        math.rope(head, angles, w.rope_dims);
    };
    for (int head = 0; head < w.num_heads; head++)
        turn(w.q_norm, q + head * dim);
    int cell = std::min(call.starts[token.row] + token.column, call.num_cells - 1);
    for (int head = 0; head < w.num_kv_heads; head++) {
        turn(w.k_norm, k + head * dim);
        size_t at = ((size_t(call.slots[token.row]) * w.num_kv_heads + head) * call.num_cells + cell) * dim;
        std::memcpy(call.keys + at, k + head * dim, dim * sizeof(float));
        std::memcpy(call.values + at, v + head * dim, dim * sizeof(float));
    }
}

void attend(const Math &math, const Queries &queries) {
    static thread_local Scratch scratch, partials;
    size_t size = Partial::num_floats(queries);
    float *memory = partials.floats(2 * size);
    Partial part = Partial::in(queries, memory), sum = Partial::in(queries, memory + size);
    clear(sum, queries.num * queries.group, queries.dim);
    for (int segment = queries.first_segment(); segment < queries.end_segment(); segment++) {
        math.attend_segment(queries, segment, scratch.floats(attention_scratch(queries)), part);
        math.merge(queries, segment, part, sum);
    }
    math.finish(queries, sum);
}

// The same for several, with a thread for each segment. They all have the same numbers of heads and elements.
void attend_by_segment(const Math &math, const std::vector<Queries> &all) {
    static thread_local Scratch partials;
    struct Task {
        const Queries *queries;
        int segment;
        size_t at;
    };
    std::vector<Task> tasks;
    size_t size = 0;
    for (const Queries &queries : all)
        for (int segment = queries.first_segment(); segment < queries.end_segment(); segment++) {
            tasks.push_back({&queries, segment, size});
            size += Partial::num_floats(queries);
        }
    float *memory = partials.floats(size);
    parallel(tasks.size(), [&](int i) {
        static thread_local Scratch scratch;
        const Queries &queries = *tasks[i].queries;
        float *own = scratch.floats(attention_scratch(queries));
        math.attend_segment(queries, tasks[i].segment, own, Partial::in(queries, memory + tasks[i].at));
    });
    for (size_t i = 0, next; i < tasks.size(); i = next) {
        const Queries &queries = *tasks[i].queries;
        static thread_local Scratch sums;
        Partial sum = Partial::in(queries, sums.floats(Partial::num_floats(queries)));
        clear(sum, queries.num * queries.group, queries.dim);
        for (next = i; next < tasks.size() && tasks[next].queries == &queries; next++)
            math.merge(queries, tasks[next].segment, Partial::in(queries, memory + tasks[next].at), sum);
        math.finish(queries, sum);
    }
}

// Attention of tokens [num, heads * dim], `q`, over the cells of their rows.
void attend(const Math &math, const AttentionWeights &w, const AttentionCall &call, const Token *tokens, int num,
            const float *q, float *out) {
    int dim = w.head_dim(), group = w.num_heads / w.num_kv_heads;
    int max_num = std::max(MAX_QUERY_ROWS / group, 1);
    std::vector<Queries> all;
    double work = 0;
    for (int t = 0, next; t < num; t = next) {
        for (next = t + 1; next < num && next - t < max_num && tokens[next].row == tokens[t].row;)
            next++;
        Queries queries = {.num = next - t,
                           .group = group,
                           .dim = dim,
                           .cell = call.starts[tokens[t].row] + tokens[t].column,
                           .max_cell = std::max(call.num_cells - 2, 0),
                           .window = call.window,
                           .scale = w.scale,
                           .stride = ptrdiff_t(w.num_heads) * dim};
        int num_cells = queries.end_cell(queries.num - 1) - queries.first_cell(0);
        work += 2.0 * num_cells * queries.num * w.num_heads * dim;
        for (int head = 0; head < w.num_kv_heads; head++) {
            size_t at = (size_t(call.slots[tokens[t].row]) * w.num_kv_heads + head) * call.num_cells * dim;
            ptrdiff_t first = t * queries.stride + ptrdiff_t(head) * group * dim;
            queries.queries = q + first;
            queries.out = out + first;
            queries.keys = call.keys + at;
            queries.values = call.values + at;
            all.push_back(queries);
        }
    }
    bool is_shared = work >= MIN_SHARED_WORK;
    if (is_shared && int(all.size()) < UNITS_PER_THREAD * num_threads())
        return attend_by_segment(math, all);
    auto run = [&](int i) { attend(math, all[i]); };
    if (is_shared)
        return parallel(all.size(), run);
    for (size_t i = 0; i < all.size(); i++)
        run(i);
}

void run(const AttentionWeights &w, const AttentionCall &call) {
    static thread_local Scratch qs, ks, vs, outs, ys, codes;
    const Math &math = outrider::math();
    size_t hidden = w.norm.size(), q_size = w.q.matrix.num_rows, kv_size = w.k.matrix.num_rows;
    std::memcpy(call.out, call.x, size_t(call.rows) * call.width * hidden * sizeof(float));
    std::vector<Token> all = fed_tokens(call.num_fed, call.rows, call.width);
    for (size_t first = 0; first < all.size(); first += MAX_TOKENS) {
        const Token *tokens = all.data() + first;
        int num = std::min<size_t>(MAX_TOKENS, all.size() - first);
        float *q = qs.floats(num * q_size), *k = ks.floats(num * kv_size), *v = vs.floats(num * kv_size);
        QuantizedTokens normed = normed_tokens(math, w.norm, tokens, num, call.x);
        Product products[] = {product(w.q, q), product(w.k, k), product(w.v, v)};
        multiply(products, 3, normed);
        for_tokens(num, [&](int t) {
            write_cell(math, w, call, tokens[t], q + t * q_size, k + t * kv_size, v + t * kv_size);
        });
        float *out = outs.floats(num * q_size), *y = ys.floats(num * hidden);
        attend(math, w, call, tokens, num, q, out);
        Product last = product(w.o, y);
        multiply(&last, 1, quantize(out, num, q_size, q_size, codes.bytes(token_bytes(num, q_size))));
        add_residual(math, w.o, tokens, num, call.x, y, call.out);
    }
}

struct MLPCall {
    int rows, width;
    const float *x;
    const int *num_fed;
    float *out;
};

void run(const MLPWeights &w, const MLPCall &call) {
    static thread_local Scratch gates, ups, ys, codes;
    const Math &math = outrider::math();
    size_t hidden = w.norm.size(), size = w.gate.matrix.num_rows;
    std::memcpy(call.out, call.x, size_t(call.rows) * call.width * hidden * sizeof(float));
    std::vector<Token> all = fed_tokens(call.num_fed, call.rows, call.width);
    for (size_t first = 0; first < all.size(); first += MAX_TOKENS) {
        const Token *tokens = all.data() + first;
        int num = std::min<size_t>(MAX_TOKENS, all.size() - first);
        float *gate = gates.floats(num * size), *up = ups.floats(num * size), *y = ys.floats(num * hidden);
        QuantizedTokens normed = normed_tokens(math, w.norm, tokens, num, call.x);
        Product products[] = {product(w.gate, gate), product(w.up, up)};
        multiply(products, 2, normed);
        for_tokens(num, [&](int t) {
            add_bias(math, w.gate, gate + t * size);
            add_bias(math, w.up, up + t * size);
            math.swiglu(gate + t * size, up + t * size, size);
        });
        Product last = product(w.down, y);
        multiply(&last, 1, quantize(gate, num, size, size, codes.bytes(token_bytes(num, size))));
        add_residual(math, w.down, tokens, num, call.x, y, call.out);
    }
}

class AttentionPrimitive : public CpuPrimitive {
public:
    AttentionPrimitive(mx::Stream stream, std::shared_ptr<const AttentionWeights> weights, int window)
        : CpuPrimitive(stream), weights(std::move(weights)), window(window) {}

    const char *name() const override { return "OutriderAttention"; }

    void eval_cpu(const std::vector<mx::array> &inputs, std::vector<mx::array> &outputs) override {
        auto &encoder = mx::cpu::get_command_encoder(stream());
        const mx::array &x = inputs[0], &keys = inputs[1];
        outputs[0].set_data(mx::allocator::malloc(outputs[0].nbytes()));
        release_inputs(inputs, outputs);
        take_over(encoder, keys, outputs[1]);
        take_over(encoder, inputs[2], outputs[2]);
        AttentionCall call = {.rows = x.shape(0),
                              .width = x.shape(1),
                              .num_cells = keys.shape(2),
                              .window = window,
                              .x = elements<float>(encoder, x),
                              .angles = elements<float>(encoder, inputs[3]),
                              .starts = elements<int>(encoder, inputs[4]),
                              .num_fed = elements<int>(encoder, inputs[5]),
                              .slots = elements<int>(encoder, inputs[6]),
                              .out = outputs[0].data<float>(),
                              .keys = outputs[1].data<float>(),
                              .values = outputs[2].data<float>()};
        encoder.dispatch([weights = weights, call] { run(*weights, call); });
        note_holds(encoder, inputs, outputs);
    }

private:
    std::shared_ptr<const AttentionWeights> weights;
    int window;
};

class MLPPrimitive : public CpuPrimitive {
public:
    MLPPrimitive(mx::Stream stream, std::shared_ptr<const MLPWeights> weights)
        : CpuPrimitive(stream), weights(std::move(weights)) {}

    const char *name() const override { return "OutriderMLP"; }

    void eval_cpu(const std::vector<mx::array> &inputs, std::vector<mx::array> &outputs) override {
        auto &encoder = mx::cpu::get_command_encoder(stream());
        const mx::array &x = inputs[0];
        outputs[0].set_data(mx::allocator::malloc(outputs[0].nbytes()));
        MLPCall call = {.rows = x.shape(0),
                        .width = x.shape(1),
                        .x = elements<float>(encoder, x),
                        .num_fed = elements<int>(encoder, inputs[1]),
                        .out = outputs[0].data<float>()};
        encoder.dispatch([weights = weights, call] { run(*weights, call); });
    }

private:
    std::shared_ptr<const MLPWeights> weights;
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
    RopeAnglesPrimitive(mx::Stream stream, std::shared_ptr<const std::vector<float>> frequencies, float scale,
                        float magnitude)
        : CpuPrimitive(stream), frequencies(std::move(frequencies)), scale(scale), magnitude(magnitude) {}

    const char *name() const override { return "OutriderRopeAngles"; }

    void eval_cpu(const std::vector<mx::array> &inputs, std::vector<mx::array> &outputs) override {
        auto &encoder = mx::cpu::get_command_encoder(stream());
        outputs[0].set_data(mx::allocator::malloc(outputs[0].nbytes()));
        encoder.dispatch([frequencies = frequencies, scale = scale, magnitude = magnitude,
                          positions = elements<int>(encoder, inputs[0]), angles = outputs[0].data<float>(),
                          rows = outputs[0].shape(0), width = outputs[0].shape(2)] {
            size_t half = frequencies->size();
            for_tokens(rows * width, [&](int t) {
                float position = (float(positions[t / width]) + float(t % width)) * scale;
                float *own = angles + t * 2 * half;
                for (size_t i = 0; i < half; i++) {
                    mx::simd::Simd<float, 1> angle(position * (*frequencies)[i]);  // as MLX's own cosines
                    own[i] = mx::simd::cos(angle).value * magnitude;
                    own[i + half] = mx::simd::sin(angle).value * magnitude;
                }
            });
        });
    }

private:
    std::shared_ptr<const std::vector<float>> frequencies;
    float scale, magnitude;
};

void require(bool holds, const char *what) {
    if (!holds)
        throw std::invalid_argument(what);
}

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

}  // namespace

Linear::Linear(const mx::array &weight, const mx::array &scales, const mx::array &biases, int bits, int group_size,
               const std::optional<mx::array> &own_bias)
    : held{mx::contiguous(weight), mx::contiguous(scales), mx::contiguous(biases)} {
    require(weight.ndim() == 2 && weight.dtype() == mx::uint32 && scales.ndim() == 2, "not a quantised matrix");
    require(bits == 2 || bits == 3 || bits == 4 || bits == 5 || bits == 6 || bits == 8, "bits: 2 to 6, or 8");
    require(group_size > 0 && group_size % BLOCK == 0, "a group must be a multiple of 32 elements");
    require(scales.shape() == biases.shape() && scales.dtype() == biases.dtype() &&
                scales.shape(0) == weight.shape(0) &&
                int64_t(scales.shape(1)) * group_size * bits == int64_t(weight.shape(1)) * 32,
            "scales or biases of another shape than the weight's");
    require(scales.dtype() == mx::float32 || scales.dtype() == mx::float16 || scales.dtype() == mx::bfloat16,
            "scales must be float32, float16 or bfloat16");
    mx::eval(held);
    matrix = {.num_rows = weight.shape(0),
              .size = scales.shape(1) * group_size,
              .bits = bits,
              .group_size = group_size,
              .codes = held[0].data<uint32_t>(),
              .scales = held[1].data<void>(),
              .biases = held[2].data<void>(),
              .type = float_type(scales)};
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

std::tuple<mx::array, mx::array, mx::array> Attention::operator()(
    const mx::array &x, const mx::array &keys, const mx::array &values, const mx::array &angles,
    const mx::array &starts, const mx::array &num_fed, const mx::array &slots, int window) const {
    const AttentionWeights &w = *weights;
    int hidden = w.norm.size();
    require(x.ndim() == 3 && x.shape(2) == hidden && x.dtype() == mx::float32, "x: float32 [rows, width, hidden]");
    int rows = x.shape(0), width = x.shape(1);
    require(keys.ndim() == 4 && keys.shape(1) == w.num_kv_heads && keys.shape(3) == w.head_dim() &&
                keys.dtype() == mx::float32 && values.shape() == keys.shape() && values.dtype() == mx::float32,
            "keys, values: float32 [slots, heads, capacity + 1, dim]");
    require(angles.shape() == mx::Shape{rows, 1, width, w.rope_dims} && angles.dtype() == mx::float32,
            "angles: float32 [rows, 1, width, rope dims]");
    for (const mx::array *each : {&starts, &num_fed, &slots})
        require(each->size() == size_t(rows) && each->dtype() == mx::int32, "starts, fed counts, slots: int32 [rows]");
    require(window >= 0, "window: 0 or more");
    auto primitive = std::make_shared<AttentionPrimitive>(mx::default_stream(mx::Device::cpu), weights, window);
    auto out = mx::array::make_arrays({x.shape(), keys.shape(), values.shape()}, {mx::float32, mx::float32, mx::float32},
                                      primitive, {x, keys, values, angles, starts, num_fed, slots});
    return {std::move(out[0]), std::move(out[1]), std::move(out[2])};
}

MLP::MLP(MLPWeights own) : weights(std::make_shared<const MLPWeights>(std::move(own))) { weights->check(); }

mx::array MLP::operator()(const mx::array &x, const mx::array &num_fed) const {
    int hidden = weights->norm.size();
    require(x.ndim() == 3 && x.shape(2) == hidden && x.dtype() == mx::float32, "x: float32 [rows, width, hidden]");
    require(num_fed.shape() == mx::Shape{x.shape(0)} && num_fed.dtype() == mx::int32, "fed counts: int32 [rows]");
    auto primitive = std::make_shared<MLPPrimitive>(mx::default_stream(mx::Device::cpu), weights);
    return mx::array(x.shape(), mx::float32, primitive, {x, num_fed});
}

RopeAngles::RopeAngles(const mx::array &own, float scale, float magnitude)
    : frequencies(std::make_shared<const std::vector<float>>(to_floats(own))), scale(scale), magnitude(magnitude) {}

mx::array RopeAngles::operator()(const mx::array &positions, int width) const {
    require(positions.ndim() == 1 && positions.dtype() == mx::int32 && width > 0, "positions: int32 [rows]");
    auto stream = mx::default_stream(mx::Device::cpu);
    auto primitive = std::make_shared<RopeAnglesPrimitive>(stream, frequencies, scale, magnitude);
    mx::Shape shape = {positions.shape(0), 1, width, int(2 * frequencies->size())};
    return mx::array(shape, mx::float32, primitive, {positions});
}

}  // namespace outrider
