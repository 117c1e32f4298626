#include "draft_head.h"

#include <algorithm>
#include <cstring>

#include "decoder_math.h"
#include "decoder_pass.h"
#include "primitive.h"
#include "sampling.h"
#include "scratch.h"
#include "threads.h"
#include "top_two.h"

namespace mx = mlx::core;

namespace outrider {

// What a call computes, on plain memory.
struct DraftCall {
    int rows, width, depth;
    const float *hidden;
    const int *next_ids, *starts, *positions, *num_committed;
    AttentionCall cells;  // where keys and values are; the rest differs from pass to pass
    std::optional<SamplingNumbers> sampling;
    int32_t *drafts;
    float *margins;
};

namespace {

constexpr int MAX_FED = 256;  // tokens that go through fc at once: bounds the memory; chosen by hand

// The weights, with those of the layer.
struct Head {
    const DraftHeadParts &parts;
    const AttentionWeights &attention;
    const MLPWeights &mlp;

    int hidden() const { return parts.norm.size(); }
};

// The block's input for some tokens: x[index] of each, from its next token and hidden[index].
void through_fc(const Head &head, const Token *tokens, int num, const int *next_ids, const float *hidden, float *x) {
    static thread_local Scratch wides, codes, products;
    const Math &math = outrider::math();
    const DraftHeadParts &w = head.parts;
    size_t size = head.hidden();
    for (int first = 0; first < num; first += MAX_FED) {
        const Token *own = tokens + first;
        int count = std::min(MAX_FED, num - first);
        float *wide = wides.floats(count * 2 * size), *y = products.floats(count * size);
        QuantizedTokens rounded = tokens_in(codes.bytes(token_bytes(count, 2 * size)), count, 2 * size);
        for_tokens(count, [&](int t) {
            float *both = wide + t * 2 * size;
            float *embedded = both + (w.is_embedding_first ? 0 : size), *of_hidden = both + (w.is_embedding_first ? size : 0);
            // The engine checks ids. A wrong one must not read other memory.
            int id = std::clamp(next_ids[own[t].index], 0, w.embedding.matrix.num_rows - 1);
            dequantize_row(w.embedding.matrix, id, embedded);
            math.rms_norm(embedded, w.norm_of_embedding.data(), size, w.norm_of_embedding.eps, embedded);
            const float *from = hidden + own[t].index * size;
            math.rms_norm(from, w.norm_of_hidden.data(), size, w.norm_of_hidden.eps, of_hidden);
            quantize_token(both, rounded, t);
        });
        Product product = {w.fc.matrix, y, ptrdiff_t(size)};
        multiply(&product, 1, rounded);
        for (int t = 0; t < count; t++)
            std::memcpy(x + own[t].index * size, y + t * size, size * sizeof(float));
    }
}

// One pass of the layer over x, in place. `is_read`: false if only its cells are of use.
void run_layer(const Head &head, AttentionCall call, float *x, const std::vector<Token> &tokens, bool is_read) {
    if (tokens.empty())
        return;
    call.x = x;
    call.out = is_read ? x : nullptr;
    run(head.attention, nullptr, call, tokens);
    if (is_read)
        run(head.mlp, nullptr, {call.rows, call.width, x, nullptr, x, nullptr}, tokens);
}

// The drafts of the rows with these tokens. out [tokens, hidden]: normed
void choose(const Head &head, const DraftCall &call, int number, const std::vector<Token> &tokens, const float *out) {
    static thread_local Scratch logits, codes;
    const DraftHeadParts &w = head.parts;
    int num = tokens.size(), size = head.hidden(), vocab = w.projection.matrix.num_rows;
    float *scores = logits.floats(size_t(num) * vocab);
    Product product = {w.projection.matrix, scores, vocab};
    multiply(&product, 1, quantize(out, num, size, size, codes.bytes(token_bytes(num, size))));
    const int32_t *token_ids = w.token_ids ? w.token_ids->data<int32_t>() : nullptr;
    parallel(num, [&](int i) {
        int row = tokens[i].row, at = row * call.depth + number;
        const float *own = scores + size_t(i) * vocab;
        if (call.sampling) {
            uint32_t position = call.starts[row] + call.num_committed[row] + number + 1;
            Drawn drawn = draw(*call.sampling, row, position, own, vocab, token_ids, true);
            call.drafts[at] = drawn.token_id;
            call.margins[at] = drawn.margin;
            return;
        }
        int32_t place;
        find_top_two(own, vocab, &place, call.margins + at);
        call.drafts[at] = token_ids ? token_ids[place] : place;
    });
}

// Feeds the head what was committed. Returns the newest token of each row, computed if there are drafts to make.
std::vector<Token> feed(const Head &head, const DraftCall &call, float *x) {
    static thread_local Scratch angles;
    std::vector<Token> all, newest;
    for (int row = 0; row < call.rows; row++) {
        int num = std::min(call.num_committed[row], call.width);
        for (int column = 0; column < num; column++) {
            bool is_newest = call.depth > 0 && column == num - 1;
            (is_newest ? newest : all).push_back({row, column, size_t(row) * call.width + column});
        }
    }
    size_t num_others = all.size(), dims = head.parts.angles.dims();
    all.insert(all.end(), newest.begin(), newest.end());
    AttentionCall pass = call.cells;
    pass.rows = call.rows, pass.width = call.width, pass.starts = call.starts;
    float *turns = angles.floats(size_t(call.rows) * call.width * dims);
    for_tokens(all.size(), [&](int t) {
        head.parts.angles.fill(call.positions[all[t].row], all[t].column, turns + all[t].index * dims);
    });
    pass.angles = turns;
    through_fc(head, all.data(), all.size(), call.next_ids, call.hidden, x);
    all.resize(num_others);
    run_layer(head, pass, x, all, false);
    run_layer(head, pass, x, newest, true);
    return newest;
}

void run(const Head &head, const DraftCall &call) {
    static thread_local Scratch fed, normed, backs, all_angles;
    InParts in_parts;
    const Math &math = outrider::math();
    size_t size = head.hidden(), dims = head.parts.angles.dims(), rows = call.rows;
    std::fill_n(call.drafts, rows * call.depth, 0);
    std::fill_n(call.margins, rows * call.depth, 0.0f);
    float *x = fed.floats(rows * call.width * size), *out = normed.floats(rows * size);
    float *fed_back = backs.floats(rows * size), *angles = all_angles.floats(rows * dims);
    std::vector<Token> tokens = feed(head, call, x);
    std::vector<int> ids(rows), starts(rows);
    AttentionCall pass = call.cells;
    pass.rows = rows, pass.width = 1, pass.starts = starts.data(), pass.angles = angles;
    for (int number = 0; number < call.depth; number++) {
        for_tokens(tokens.size(), [&](int t) {
            math.rms_norm(x + tokens[t].index * size, head.parts.norm.data(), size, head.parts.norm.eps, out + t * size);
        });
        choose(head, call, number, tokens, out);
        if (number + 1 == call.depth)
            return;
        for (size_t t = 0; t < tokens.size(); t++) {
            int row = tokens[t].row, beyond = call.num_committed[row] + number;
            const float *from = head.parts.recurses_after_norm ? out + t * size : x + tokens[t].index * size;
            std::memcpy(fed_back + row * size, from, size * sizeof(float));
            ids[row] = call.drafts[row * call.depth + number];
            starts[row] = call.starts[row] + beyond;
            head.parts.angles.fill(call.positions[row] + beyond, 0, angles + row * dims);
            tokens[t] = {row, 0, size_t(row)};
        }
        through_fc(head, tokens.data(), tokens.size(), ids.data(), fed_back, x);
        run_layer(head, pass, x, tokens, true);
    }
}

enum Input { HIDDEN, NEXT_IDS, STARTS, POSITIONS, NUM_COMMITTED, PLACES, NUM_INPUTS };  // then sampling, then buffers

class DraftHeadPrimitive : public CpuPrimitive {
public:
    DraftHeadPrimitive(mx::Stream stream, std::shared_ptr<const DraftHeadParts> parts,
                       std::shared_ptr<const AttentionWeights> attention, std::shared_ptr<const MLPWeights> mlp,
                       bool has_blocks, int window, int depth, size_t num_sampling)
        : CpuPrimitive(stream),
          parts(std::move(parts)),
          attention(std::move(attention)),
          mlp(std::move(mlp)),
          has_blocks(has_blocks),
          window(window),
          depth(depth),
          num_sampling(num_sampling) {}

    const char *name() const override { return "OutriderDraftHead"; }

    void eval_cpu(const std::vector<mx::array> &inputs, std::vector<mx::array> &outputs) override {
        auto &encoder = mx::cpu::get_command_encoder(stream());
        size_t first = depth > 0 ? 2 : 0;
        for (size_t i = 0; i < first; i++)
            outputs[i].set_data(mx::allocator::malloc(outputs[i].nbytes()));
        release_inputs(inputs, outputs);
        for (size_t i = first; i < outputs.size(); i++)
            take_over(encoder, inputs[NUM_INPUTS + num_sampling + i - first], outputs[i]);
        DraftCall call = {.rows = inputs[HIDDEN].shape(0),
                          .width = inputs[HIDDEN].shape(1),
                          .depth = depth,
                          .hidden = elements<float>(encoder, inputs[HIDDEN]),
                          .next_ids = elements<int>(encoder, inputs[NEXT_IDS]),
                          .starts = elements<int>(encoder, inputs[STARTS]),
                          .positions = elements<int>(encoder, inputs[POSITIONS]),
                          .num_committed = elements<int>(encoder, inputs[NUM_COMMITTED]),
                          .cells = cells(encoder, inputs[PLACES], {outputs.begin() + first, outputs.end()}),
                          .sampling = sampling(encoder, inputs),
                          .drafts = first ? outputs[0].data<int32_t>() : nullptr,
                          .margins = first ? outputs[1].data<float>() : nullptr};
        encoder.dispatch([parts = parts, attention = attention, mlp = mlp, call] {
            run({*parts, *attention, *mlp}, call);
        });
        note_holds(encoder, inputs, outputs);
    }

private:
    AttentionCall cells(mx::cpu::CommandEncoder &encoder, const mx::array &places, const std::vector<mx::array> &buffers) {
        AttentionCall call = {};
        call.places = elements<int>(encoder, places);
        call.columns = places.shape(1);
        call.has_blocks = has_blocks;
        call.add_cells(window, buffers, attention->head_dim());
        return call;
    }

    std::optional<SamplingNumbers> sampling(mx::cpu::CommandEncoder &encoder, const std::vector<mx::array> &inputs) {
        if (num_sampling == 0)
            return {};
        const mx::array *own = &inputs[NUM_INPUTS];
        SamplingNumbers numbers = {elements<float>(encoder, own[0]), elements<uint32_t>(encoder, own[1])};
        if (num_sampling > 2) {
            numbers.top_k = elements<int32_t>(encoder, own[2]);
            numbers.top_p = elements<float>(encoder, own[3]);
            numbers.log_min_p = elements<float>(encoder, own[4]);
        }
        return numbers;
    }

    std::shared_ptr<const DraftHeadParts> parts;
    std::shared_ptr<const AttentionWeights> attention;
    std::shared_ptr<const MLPWeights> mlp;
    bool has_blocks;
    int window, depth;
    size_t num_sampling;
};

bool maps(const Linear &linear, size_t size, size_t num_rows) {
    return size_t(linear.matrix.size) == size && size_t(linear.matrix.num_rows) == num_rows && linear.bias.empty();
}

}  // namespace

DraftHead::DraftHead(DraftHeadParts own) {
    size_t size = own.norm.size();
    const AttentionWeights &attention = *own.attention.weights;
    require(attention.norm.size() == size && own.mlp.weights->norm.size() == size, "layers of different sizes");
    require(!attention.is_part && !own.mlp.weights->is_part, "layers of one rank of several");
    require(own.angles.dims() == attention.rope_dims, "angles of another rope");
    require(own.norm_of_embedding.size() == size && own.norm_of_hidden.size() == size, "norms of different sizes");
    require(size % BLOCK == 0 && maps(own.fc, 2 * size, size), "fc: [hidden, 2 * hidden], without a bias");
    require(maps(own.embedding, size, own.embedding.matrix.num_rows), "the embedding has another size");
    require(maps(own.projection, size, own.projection.matrix.num_rows), "the projection has another size, or a bias");
    if (own.token_ids) {
        require(own.token_ids->size() == size_t(own.projection.matrix.num_rows), "one token id for each output");
        own.token_ids = mx::contiguous(mx::astype(*own.token_ids, mx::int32));
        own.token_ids->eval();
    }
    parts = std::make_shared<const DraftHeadParts>(std::move(own));
}

std::vector<mx::array> DraftHead::operator()(
    const mx::array &hidden, const mx::array &next_ids, const std::vector<mx::array> &buffers, const mx::array &starts,
    const mx::array &positions, const mx::array &num_committed, const mx::array &places, bool has_blocks, int window,
    int depth, const std::vector<mx::array> &sampling) const {
    const auto &attention = parts->attention.weights;
    require(hidden.ndim() == 3 && size_t(hidden.shape(2)) == parts->norm.size() && hidden.dtype() == mx::float32,
            "hidden: float32 [rows, width, hidden]");
    int rows = hidden.shape(0), width = hidden.shape(1);
    require(rows > 0 && width > 0 && depth >= 0 && window >= 0, "no tokens, or a negative depth or window");
    require(next_ids.shape() == mx::Shape{rows, width}, "next ids: [rows, width]");
    auto stream = mx::default_stream(mx::Device::cpu);
    std::vector<mx::array> inputs = {hidden};
    for (const mx::array &one : {next_ids, starts, positions, num_committed, places})
        inputs.push_back(mx::astype(one, mx::int32, stream));
    require(positions.shape() == mx::Shape{rows}, "positions: [rows]");
    check_buffers(buffers, attention->num_kv_heads, attention->head_dim());
    check_attended_places(rows, buffers[0], inputs[STARTS], inputs[NUM_COMMITTED], inputs[PLACES], has_blocks);
    size_t num_sampling = sampling.size();
    if (num_sampling > 0) {
        require(num_sampling == 2 || num_sampling == 5, "sampling: inverse temperatures, seeds, and maybe three filters");
        for (mx::array &one : sampling_inputs(rows, sampling[0], sampling[1], {sampling.begin() + 2, sampling.end()}, stream))
            inputs.push_back(std::move(one));
    }
    std::vector<mx::Shape> shapes;
    std::vector<mx::Dtype> dtypes;
    if (depth > 0) {
        shapes = {{rows, depth}, {rows, depth}};
        dtypes = {mx::int32, mx::float32};
    }
    for (const mx::array &buffer : buffers) {
        inputs.push_back(buffer);
        shapes.push_back(buffer.shape());
        dtypes.push_back(buffer.dtype());
    }
    auto primitive = std::make_shared<DraftHeadPrimitive>(
        stream, parts, attention, parts->mlp.weights, has_blocks, window, depth, num_sampling);
    return mx::array::make_arrays(std::move(shapes), dtypes, std::move(primitive), std::move(inputs));
}

}  // namespace outrider
