#include "recurrence.h"

#include <algorithm>
#include <cstdint>
#include <memory>
#include <stdexcept>
#include <vector>

#include "primitive.h"
#include "threads.h"

namespace outrider {
namespace {

namespace mx = mlx::core;

#define ALWAYS_INLINE inline __attribute__((always_inline))

constexpr int LANES = 16;         // partial sums of a product of two vectors
constexpr int ROWS_PER_CHUNK = 16;  // rows of a state, the unit of work of a thread; chosen by hand
constexpr int MAX_KEY_DIM = 512;

struct Recurrence {
    int num_rows, num_tokens, key_heads, heads, key_dim, value_dim, gate_dim;
    bool is_delta_rule;
    const float *keys, *values, *gates, *betas, *state;
    const float *queries;   // null: no outputs are wanted
    const int32_t *counts;  // null: no states are wanted
    float *outputs, *new_state;
};

// Partial sums, added in pairs.
ALWAYS_INLINE float sum_of(float *lanes) {
    for (int half = LANES / 2; half > 0; half /= 2)
        for (int j = 0; j < half; j++)
            lanes[j] += lanes[j + half];
    return lanes[0];
}

ALWAYS_INLINE float product(const float *a, const float *b, int size) {
    float lanes[LANES] = {0};
    int whole = size / LANES * LANES;
    for (int i = 0; i < whole; i += LANES)
        for (int j = 0; j < LANES; j++)
            lanes[j] += a[i + j] * b[i + j];
    for (int i = whole; i < size; i++)
        lanes[i - whole] += a[i] * b[i];
    return sum_of(lanes);
}

// Some rows of one head's state through all tokens: keys of any size.
ALWAYS_INLINE void run_any(const Recurrence &p, int row, int head, int first, int last) {
    alignas(64) float s[MAX_KEY_DIM];
    int size = p.key_dim, key_head = head / (p.heads / p.key_heads);
    for (int i = first; i < last; i++) {
        ptrdiff_t place = ((static_cast<ptrdiff_t>(row) * p.heads + head) * p.value_dim + i) * size;
        std::copy_n(p.state + place, size, s);
        int count = p.counts ? p.counts[row] : -1, end = p.queries ? p.num_tokens : count;
        if (count == 0)
            std::copy_n(s, size, p.new_state + place);
        for (int t = 0; t < end; t++) {
            ptrdiff_t token = static_cast<ptrdiff_t>(row) * p.num_tokens + t, at_head = token * p.heads + head;
            const float *k = p.keys + (token * p.key_heads + key_head) * size;
            const float *gate = p.gates + at_head * p.gate_dim;
            if (p.gate_dim == 1)
                for (int j = 0; j < size; j++)
                    s[j] *= gate[0];
            else
                for (int j = 0; j < size; j++)
                    s[j] *= gate[j];
            float value = p.values[at_head * p.value_dim + i];
            if (p.is_delta_rule)
                value -= product(s, k, size);
            float delta = p.betas[at_head] * value;
            for (int j = 0; j < size; j++)
                s[j] += delta * k[j];
            if (p.queries)
                p.outputs[at_head * p.value_dim + i] =
                    product(s, p.queries + (token * p.key_heads + key_head) * size, size);
            if (t + 1 == count)
                std::copy_n(s, size, p.new_state + place);
        }
    }
}

typedef float Lanes __attribute__((vector_size(LANES * sizeof(float))));

// Floats that are aligned as floats only. (A typedef for vectors that are, and a cast, will not do: gcc forgets the
// alignment of typedefs in templates.)
ALWAYS_INLINE Lanes load(const float *from) {
    Lanes loaded;
    __builtin_memcpy(&loaded, from, sizeof loaded);
    return loaded;
}

ALWAYS_INLINE float sum_of(const Lanes &v) {
    float lanes[LANES];
    __builtin_memcpy(lanes, &v, sizeof lanes);
    return sum_of(lanes);
}

// The same for keys of BLOCKS * LANES elements: ROWS rows of a state stay in registers from token to token.
template <int ROWS, int BLOCKS>
ALWAYS_INLINE void run_some(const Recurrence &p, int row, int head, int first) {
    constexpr int SIZE = BLOCKS * LANES;
    Lanes s[ROWS][BLOCKS];
    ptrdiff_t place = ((static_cast<ptrdiff_t>(row) * p.heads + head) * p.value_dim + first) * SIZE;
    __builtin_memcpy(s, p.state + place, sizeof s);
    int count = p.counts ? p.counts[row] : -1, end = p.queries ? p.num_tokens : count;
    if (count == 0)
        __builtin_memcpy(p.new_state + place, s, sizeof s);
    for (int t = 0; t < end; t++) {
        ptrdiff_t token = static_cast<ptrdiff_t>(row) * p.num_tokens + t, at_head = token * p.heads + head;
        ptrdiff_t at_key = (token * p.key_heads + head / (p.heads / p.key_heads)) * SIZE;
        const float *k = p.keys + at_key, *q = p.queries + at_key, *gates = p.gates + at_head * p.gate_dim;
        Lanes gate = Lanes{} + gates[0], read[ROWS] = {}, out[ROWS] = {};
        float delta[ROWS];
        for (int b = 0; b < BLOCKS; b++)
            for (int i = 0; i < ROWS; i++) {
                s[i][b] *= p.gate_dim == 1 ? gate : load(gates + b * LANES);
                read[i] += s[i][b] * load(k + b * LANES);
            }
        for (int i = 0; i < ROWS; i++) {
            float value = p.values[at_head * p.value_dim + first + i];
            delta[i] = p.betas[at_head] * (p.is_delta_rule ? value - sum_of(read[i]) : value);
        }
        for (int b = 0; b < BLOCKS; b++)
            for (int i = 0; i < ROWS; i++)
                s[i][b] += delta[i] * load(k + b * LANES);
        if (p.queries) {
            for (int b = 0; b < BLOCKS; b++)
                for (int i = 0; i < ROWS; i++)
                    out[i] += s[i][b] * load(q + b * LANES);
            for (int i = 0; i < ROWS; i++)
                p.outputs[at_head * p.value_dim + first + i] = sum_of(out[i]);
        }
        if (t + 1 == count)
            __builtin_memcpy(p.new_state + place, s, sizeof s);
    }
}

template <int ROWS, int BLOCKS>
ALWAYS_INLINE void run_in_registers(const Recurrence &p, int row, int head, int first, int last) {
    for (; first + ROWS <= last; first += ROWS)
        run_some<ROWS, BLOCKS>(p, row, head, first);
    for (; first < last; first++)
        run_some<1, BLOCKS>(p, row, head, first);
}

// Compiled for several instruction sets: without contraction of products and sums all of them give the same.
__attribute__((target_clones("avx512f", "avx2", "default"))) void run_rows(
    const Recurrence &p, int row, int head, int first, int last) {
    if (p.key_dim == 4 * LANES)
        run_in_registers<4, 4>(p, row, head, first, last);
    else if (p.key_dim == 8 * LANES)
        run_in_registers<2, 8>(p, row, head, first, last);
    else
        run_any(p, row, head, first, last);
}

void run(const Recurrence &p) {
    int per_head = (p.value_dim + ROWS_PER_CHUNK - 1) / ROWS_PER_CHUNK;
    parallel(p.num_rows * p.heads * per_head, [&p, per_head](int chunk) {
        int first = chunk % per_head * ROWS_PER_CHUNK, head = chunk / per_head;
        run_rows(p, head / p.heads, head % p.heads, first, std::min(first + ROWS_PER_CHUNK, p.value_dim));
    });
}

class RecurrencePrimitive : public CpuPrimitive {
  public:
    RecurrencePrimitive(mx::Stream stream, bool is_delta_rule, bool has_queries, bool has_counts)
        : CpuPrimitive(stream), is_delta_rule_(is_delta_rule), has_queries_(has_queries), has_counts_(has_counts) {}

    void eval_cpu(const std::vector<mx::array> &in, std::vector<mx::array> &out) override {
        auto &encoder = begin(in, out);
        const mx::array &keys = in[0], &values = in[1], &gates = in[2];
        Recurrence all = {
            values.shape(0), values.shape(1), keys.shape(2), values.shape(2), keys.shape(3), values.shape(3),
            gates.shape(3), is_delta_rule_, keys.data<float>(), values.data<float>(), gates.data<float>(),
            in[3].data<float>(), in[4].data<float>(), nullptr, nullptr, nullptr, nullptr};
        if (has_queries_) {
            all.queries = in[5].data<float>();
            all.outputs = out[0].data<float>();
        }
        if (has_counts_) {
            all.counts = in.back().data<int32_t>();
            all.new_state = out.back().data<float>();
        }
        encoder.dispatch([all]() { run(all); });
    }

    bool is_equivalent(const mx::Primitive &other) const override {
        auto &same = static_cast<const RecurrencePrimitive &>(other);
        return same.is_delta_rule_ == is_delta_rule_ && same.has_queries_ == has_queries_ &&
               same.has_counts_ == has_counts_;
    }

    const char *name() const override { return "OutriderRecurrence"; }

  private:
    bool is_delta_rule_, has_queries_, has_counts_;
};

void check(bool is_valid, const char *what) {
    if (!is_valid)
        throw std::invalid_argument(std::string("recurrence: ") + what);
}

}  // namespace

std::vector<mx::array> recurrence(
    const std::optional<mx::array> &queries, const mx::array &keys, const mx::array &values, const mx::array &gates,
    const mx::array &betas, const mx::array &state, const std::optional<mx::array> &counts, bool is_delta_rule) {
    check(keys.ndim() == 4 && values.ndim() == 4, "keys and values do not belong together");
    int rows = values.shape(0), tokens = values.shape(1), heads = values.shape(2), key_dim = keys.shape(3);
    check(keys.shape(0) == rows && keys.shape(1) == tokens && heads % keys.shape(2) == 0 && key_dim <= MAX_KEY_DIM,
          "keys and values do not belong together");
    check(!queries || queries->shape() == keys.shape(), "queries and keys differ");
    check(betas.shape() == mx::Shape{rows, tokens, heads}, "each token and head needs a beta");
    check(gates.shape() == mx::Shape{rows, tokens, heads, 1} || gates.shape() == mx::Shape{rows, tokens, heads, key_dim},
          "each token and head needs a gate");
    check(state.shape() == mx::Shape{rows, heads, values.shape(3), key_dim}, "each row and head needs a state");
    check(!counts || counts->shape() == mx::Shape{rows}, "each row needs a count");
    check(queries || counts, "nothing is wanted");
    auto stream = mx::default_stream(mx::Device::cpu);
    std::vector<mx::array> inputs;
    std::vector<mx::Shape> shapes;
    auto add = [&](const mx::array &one, mx::Dtype dtype) {
        inputs.push_back(mx::contiguous(mx::astype(one, dtype, stream), false, stream));
    };
    for (const mx::array &one : {keys, values, gates, betas, state})
        add(one, mx::float32);
    if (queries) {
        add(*queries, mx::float32);
        shapes.push_back(values.shape());
    }
    if (counts) {
        add(*counts, mx::int32);
        shapes.push_back(state.shape());
    }
    std::vector<mx::Dtype> dtypes(shapes.size(), mx::float32);
    auto primitive = std::make_shared<RecurrencePrimitive>(
        stream, is_delta_rule, queries.has_value(), counts.has_value());
    return mx::array::make_arrays(std::move(shapes), dtypes, primitive, inputs);
}

}  // namespace outrider
