#include "decoder_pass.h"

#include <cstring>
#include <initializer_list>

#include "decoder_math.h"
#include "scratch.h"
#include "threads.h"

namespace outrider {
namespace {

constexpr int MAX_TOKENS = 256;        // that are computed at once: bounds the memory; chosen by hand
constexpr int MAX_QUERY_ROWS = 96;     // queries times heads that attend to a block of cells together; chosen by hand
constexpr int UNITS_PER_THREAD = 4;    // as long as the longest one, below which a row's cells are shared too; chosen by hand
constexpr double MIN_SHARED_WORK = 2e5;  // multiplications of attention from which several threads pay: 10 us

int ceil_div(int a, int b) { return (a + b - 1) / b; }

// y = linear(tokens) without the bias
Product product(const Linear &linear, float *y) { return {linear.matrix, y, linear.matrix.num_rows}; }

void add_bias(const Math &math, const Linear &linear, float *y) {
    if (!linear.bias.empty())
        math.add(linear.bias.data(), linear.matrix.num_rows, y);
}

// The output of a pass before its tokens are computed: the residual, or zeros if that is null.
void begin_output(const float *residual, size_t size, float *out) {
    if (!residual)
        std::memset(out, 0, size * sizeof(float));
    else if (residual != out)
        std::memcpy(out, residual, size * sizeof(float));
}

// out = residual + y + bias, for the tokens [first, first + num)
void write_output(const Math &math, const Linear &linear, const Token *tokens, int num, const float *residual,
                  float *y, float *out) {
    size_t size = linear.matrix.num_rows;
    for_tokens(num, [&](int t) {
        float *own = y + t * size;
        add_bias(math, linear, own);
        if (residual)
            math.add(residual + tokens[t].index * size, size, own);
        std::memcpy(out + tokens[t].index * size, own, size * sizeof(float));
    });
}

struct NormedTokens {
    const float *floats;
    QuantizedTokens codes;
};

NormedTokens normed_tokens(const Math &math, const RMSNorm &norm, const Token *tokens, int num, const float *x) {
    static thread_local Scratch floats, codes;
    size_t size = norm.size();
    float *normed = floats.floats(num * size);
    QuantizedTokens rounded = tokens_in(codes.bytes(token_bytes(num, size)), num, size);
    for_tokens(num, [&](int t) {
        math.rms_norm(x + tokens[t].index * size, norm.data(), size, norm.eps, normed + t * size);
        quantize_token(normed + t * size, rounded, t);
    });
    return {normed, rounded};
}

// The adapters of some tokens, and the terms of a layer's products.
class TokenAdapters {
public:
    TokenAdapters(const int *of_rows, const LowRank *terms, const Token *tokens, int num) : terms(terms) {
        if (of_rows)
            for (int t = 0; t < num; t++)
                ids.push_back(of_rows[tokens[t].row]);
    }

    // Adds the terms of the products from `first` on to their outputs, before the biases. x [tokens, size]
    void add(size_t first, std::initializer_list<float *> outputs, const float *x, int size) const {
        if (ids.empty())
            return;
        std::vector<LowRankProduct> products;
        for (float *y : outputs)
            products.push_back({&terms[first + products.size()], y});
        add_low_rank(products.data(), products.size(), x, size, ids.data(), ids.size(), false);
    }

private:
    const LowRank *terms;
    std::vector<int> ids;  // empty: no token has one
};

// Norms and turns a token's queries and keys, and writes its keys and values into its cell. `q` may be null.
void write_cell(const Math &math, const AttentionWeights &w, const AttentionCall &call, const Token &token, float *q,
                float *k, float *v) {
    int dim = w.head_dim();
    if (q)
        add_bias(math, w.q, q);
    add_bias(math, w.k, k);
    add_bias(math, w.v, v);
    const float *angles = call.angles + token.index * w.rope_dims;
    auto turn = [&](const std::optional<RMSNorm> &norm, float *head) {
        if (norm)
            math.rms_norm(head, norm->data(), dim, norm->eps, head);
        math.rope(head, angles, w.rope_dims);
    };
    for (int head = 0; q && head < w.num_heads; head++)
        turn(w.q_norm, q + head * dim);
    ptrdiff_t cell = call.cell_of(token, w.num_kv_heads);
    for (int head = 0; head < w.num_kv_heads; head++) {
        turn(w.k_norm, k + head * dim);
        if (cell < 0)
            continue;  // a draft that goes deeper than the row's own depth
        ptrdiff_t at = cell + ptrdiff_t(head) * call.num_cells;
        math.write_cell(k + head * dim, call.cells.keys.from(at));
        math.write_cell(v + head * dim, call.cells.values.from(at));
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

}  // namespace

void AttentionCall::add_cells(int own_window, const std::vector<mlx::core::array> &buffers, int head_dim) {
    window = own_window;
    num_cells = buffers[0].shape(2);
    cells = cells_of(buffers, 0, head_dim, [](const mlx::core::array &buffer) -> const void * {
        return buffer.data<char>();
    });
}

// The tokens of a pass that are not padding.
std::vector<Token> fed_tokens(const int *num_fed, int rows, int width) {
    std::vector<Token> tokens;
    for (int row = 0; row < rows; row++)
        for (int column = 0; column < std::min(num_fed[row], width); column++)
            tokens.push_back({row, column, size_t(row) * width + column});
    return tokens;
}

void attend(const Heads &heads, const AttentionCall &call, const Token *tokens, int num, const float *q, float *out,
            bool has_padding) {
    const Math &math = outrider::math();
    int dim = heads.dim, group = heads.num / heads.num_kv;
    int max_num = std::max(MAX_QUERY_ROWS / group, 1);
    std::vector<Queries> all;
    double work = 0, most = 0;  // of all, and of one
    for (int t = 0, next; t < num; t = next) {
        for (next = t + 1; next < num && next - t < max_num && tokens[next].row == tokens[t].row;)
            next++;
        Queries queries = {.num = next - t,
                           .group = group,
                           .dim = dim,
                           .cell = call.starts[tokens[t].row] + tokens[t].column,
                           .max_cell = call.max_cell(),
                           .window = call.window,
                           .scale = heads.scale,
                           .stride = ptrdiff_t(heads.num) * dim,
                           .blocks = call.blocks(tokens[t].row),
                           .block_stride = ptrdiff_t(heads.num_kv) * CELLS};
        int num_cells = queries.end_cell(queries.num - 1) - queries.first_cell(0);
        double own = 2.0 * num_cells * queries.num * heads.num * dim;
        work += own;
        most = std::max(most, own / heads.num_kv);
        for (int head = 0; head < heads.num_kv; head++) {
            size_t slot = call.has_blocks ? 0 : call.places[tokens[t].row];
            size_t at = (slot * heads.num_kv + head) * call.num_cells;
            ptrdiff_t place = has_padding ? tokens[t].index : t;
            ptrdiff_t first = place * queries.stride + ptrdiff_t(head) * group * dim;
            queries.queries = q + first;
            queries.out = out + first;
            queries.keys = call.cells.keys.from(at);
            queries.values = call.cells.values.from(at);
            all.push_back(queries);
        }
    }
    bool is_shared = work >= MIN_SHARED_WORK;
    bool is_uneven = most * UNITS_PER_THREAD * num_threads() > work;  // also if there are few
    if (is_shared && is_uneven)
        return attend_by_segment(math, all);
    auto run = [&](int i) { attend(math, all[i]); };
    if (is_shared)
        return parallel(all.size(), run);
    for (size_t i = 0; i < all.size(); i++)
        run(i);
}

void run(const AttentionWeights &w, const LowRank *terms, const AttentionCall &call, const std::vector<Token> &all) {
    static thread_local Scratch qs, ks, vs, outs, ys, codes;
    const Math &math = outrider::math();
    size_t hidden = w.norm.size(), q_size = w.q.matrix.num_rows, kv_size = w.k.matrix.num_rows;
    const float *residual = w.is_part ? nullptr : call.x;
    if (call.out)
        begin_output(residual, size_t(call.rows) * call.width * hidden, call.out);
    for (size_t first = 0; first < all.size(); first += MAX_TOKENS) {
        const Token *tokens = all.data() + first;
        int num = std::min<size_t>(MAX_TOKENS, all.size() - first);
        float *k = ks.floats(num * kv_size), *v = vs.floats(num * kv_size);
        float *q = call.out ? qs.floats(num * q_size) : nullptr;
        TokenAdapters adapters(call.adapters, terms, tokens, num);
        NormedTokens normed = normed_tokens(math, w.norm, tokens, num, call.x);
        if (q) {
            Product products[] = {product(w.q, q), product(w.k, k), product(w.v, v)};
            multiply(products, 3, normed.codes);
            adapters.add(0, {q, k, v}, normed.floats, hidden);
        } else {
            Product products[] = {product(w.k, k), product(w.v, v)};
            multiply(products, 2, normed.codes);
            adapters.add(1, {k, v}, normed.floats, hidden);
        }
        for_tokens(num, [&](int t) {
            float *own = q ? q + t * q_size : nullptr;
            write_cell(math, w, call, tokens[t], own, k + t * kv_size, v + t * kv_size);
        });
        if (!q)
            continue;
        float *out = outs.floats(num * q_size), *y = ys.floats(num * hidden);
        attend({w.num_heads, w.num_kv_heads, w.head_dim(), w.scale}, call, tokens, num, q, out, false);
        Product last = product(w.o, y);
        multiply(&last, 1, quantize(out, num, q_size, q_size, codes.bytes(token_bytes(num, q_size))));
        adapters.add(3, {y}, out, q_size);
        write_output(math, w.o, tokens, num, residual, y, call.out);
    }
}

void run(const MLPWeights &w, const LowRank *terms, const MLPCall &call, const std::vector<Token> &all) {
    static thread_local Scratch gates, ups, ys, codes;
    const Math &math = outrider::math();
    size_t hidden = w.norm.size(), size = w.gate.matrix.num_rows;
    const float *residual = w.is_part ? nullptr : call.x;
    begin_output(residual, size_t(call.rows) * call.width * hidden, call.out);
    for (size_t first = 0; first < all.size(); first += MAX_TOKENS) {
        const Token *tokens = all.data() + first;
        int num = std::min<size_t>(MAX_TOKENS, all.size() - first);
        float *gate = gates.floats(num * size), *up = ups.floats(num * size), *y = ys.floats(num * hidden);
        TokenAdapters adapters(call.adapters, terms, tokens, num);
        NormedTokens normed = normed_tokens(math, w.norm, tokens, num, call.x);
        Product products[] = {product(w.gate, gate), product(w.up, up)};
        multiply(products, 2, normed.codes);
        adapters.add(0, {gate, up}, normed.floats, hidden);
        QuantizedTokens rounded = tokens_in(codes.bytes(token_bytes(num, size)), num, size);
        for_tokens(num, [&](int t) {
            add_bias(math, w.gate, gate + t * size);
            add_bias(math, w.up, up + t * size);
            math.swiglu(gate + t * size, up + t * size, size);
            quantize_token(gate + t * size, rounded, t);
        });
        Product last = product(w.down, y);
        multiply(&last, 1, rounded);
        adapters.add(2, {y}, gate, size);
        write_output(math, w.down, tokens, num, residual, y, call.out);
    }
}

}  // namespace outrider
