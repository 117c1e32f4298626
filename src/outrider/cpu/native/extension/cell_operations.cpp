#include "cell_operations.h"

#include <cstring>
#include <memory>

#include "decoder_math.h"
#include "decoder_pass.h"
#include "primitive.h"
#include "threads.h"

namespace mx = mlx::core;

namespace outrider {
namespace {

// Keys or values [rows, heads, width, dim] as they lie in memory. Elements of a vector follow each other.
struct Vectors {
    const float *data;
    int64_t row, head, token;  // strides

    static Vectors of(mx::cpu::CommandEncoder &encoder, const mx::array &array) {
        if (array.strides(3) == 1 || array.shape(3) == 1)
            return {array.data<float>(), array.strides(0), array.strides(1), array.strides(2)};
        int64_t dim = array.shape(3), token = dim, head = token * array.shape(2), row = head * array.shape(1);
        return {elements<float>(encoder, array), row, head, token};
    }

    const float *at(const Token &where, int of_head) const {
        return data + where.row * row + of_head * head + where.column * token;
    }
};

class WriteCells : public CpuPrimitive {
public:
    WriteCells(mx::Stream stream, bool has_blocks) : CpuPrimitive(stream), has_blocks(has_blocks) {}

    static constexpr size_t NUM_OTHERS = 5;  // inputs before the buffers

    const char *name() const override { return "OutriderWriteCells"; }

    void eval_cpu(const std::vector<mx::array> &inputs, std::vector<mx::array> &outputs) override {
        auto &encoder = mx::cpu::get_command_encoder(stream());
        release_inputs(inputs, outputs);
        for (size_t i = 0; i < outputs.size(); i++)
            take_over(encoder, inputs[NUM_OTHERS + i], outputs[i]);
        const mx::array &shape = inputs[0];
        int num_heads = shape.shape(1);
        auto data = [](const mx::array &buffer) { return static_cast<const void *>(buffer.data<char>()); };
        AttentionCall call = {.rows = shape.shape(0),
                              .width = shape.shape(2),
                              .starts = elements<int>(encoder, inputs[2]),
                              .num_fed = elements<int>(encoder, inputs[3]),
                              .places = elements<int>(encoder, inputs[4]),
                              .columns = inputs[4].shape(1),
                              .has_blocks = has_blocks,
                              .num_cells = outputs[0].shape(2),
                              .cells = cells_of(outputs, 0, shape.shape(3), data)};
        encoder.dispatch([call, num_heads, keys = Vectors::of(encoder, inputs[0]),
                          values = Vectors::of(encoder, inputs[1])] {
            const Math &math = outrider::math();
            std::vector<Token> tokens = fed_tokens(call.num_fed, call.rows, call.width);
            for_tokens(tokens.size(), [&](int t) {
                ptrdiff_t cell = call.cell_of(tokens[t], num_heads);
                for (int head = 0; head < num_heads && cell >= 0; head++, cell += call.num_cells) {
                    math.write_cell(keys.at(tokens[t], head), call.cells.keys.from(cell));
                    math.write_cell(values.at(tokens[t], head), call.cells.values.from(cell));
                }
            });
        });
        note_holds(encoder, inputs, outputs);
    }

private:
    bool has_blocks;
};

class CellAttentionPrimitive : public CpuPrimitive {
public:
    CellAttentionPrimitive(mx::Stream stream, const Heads &heads, int window, bool has_blocks)
        : CpuPrimitive(stream), heads(heads), window(window), has_blocks(has_blocks) {}

    static constexpr size_t NUM_OTHERS = 4;  // inputs before the buffers

    const char *name() const override { return "OutriderCellAttention"; }

    void eval_cpu(const std::vector<mx::array> &inputs, std::vector<mx::array> &outputs) override {
        auto &encoder = mx::cpu::get_command_encoder(stream());
        const mx::array &queries = inputs[0];
        outputs[0].set_data(mx::allocator::malloc(outputs[0].nbytes()));
        auto data = [&](const mx::array &buffer) { return contiguous_data(encoder, buffer); };
        AttentionCall call = {.rows = queries.shape(0),
                              .width = queries.shape(1),
                              .window = window,
                              .x = elements<float>(encoder, queries),
                              .starts = elements<int>(encoder, inputs[1]),
                              .num_fed = elements<int>(encoder, inputs[2]),
                              .places = elements<int>(encoder, inputs[3]),
                              .columns = inputs[3].shape(1),
                              .has_blocks = has_blocks,
                              .num_cells = inputs[NUM_OTHERS].shape(2),
                              .out = outputs[0].data<float>(),
                              .cells = cells_of(inputs, NUM_OTHERS, heads.dim, data)};
        encoder.dispatch([heads = heads, call, bytes = outputs[0].nbytes()] {
            std::vector<Token> tokens = fed_tokens(call.num_fed, call.rows, call.width);
            std::memset(call.out, 0, bytes);
            attend(heads, call, tokens.data(), tokens.size(), call.x, call.out, true);
        });
        note_holds(encoder, {inputs.begin() + NUM_OTHERS, inputs.end()});
    }

private:
    Heads heads;
    int window;
    bool has_blocks;
};

}  // namespace

std::vector<mx::array> write_cells(const mx::array &keys, const mx::array &values, const std::vector<mx::array> &buffers,
                                   const mx::array &starts, const mx::array &num_fed, const mx::array &places,
                                   bool has_blocks) {
    require(keys.ndim() == 4 && keys.dtype() == mx::float32 && keys.shape(3) > 0 && keys.shape() == values.shape() &&
                values.dtype() == mx::float32,
            "keys, values: float32 [rows, heads, width, dim]");
    require(!buffers.empty() && buffers[0].ndim() == 4, "no buffers of keys and values");
    check_buffers(buffers, keys.shape(1), keys.shape(3));
    check_places(keys.shape(0), starts, num_fed, places, has_blocks);
    std::vector<mx::array> inputs = {keys, values, starts, num_fed, places};
    std::vector<mx::Shape> shapes;
    std::vector<mx::Dtype> dtypes;
    for (const mx::array &buffer : buffers) {
        inputs.push_back(buffer);
        shapes.push_back(buffer.shape());
        dtypes.push_back(buffer.dtype());
    }
    auto primitive = std::make_shared<WriteCells>(mx::default_stream(mx::Device::cpu), has_blocks);
    return mx::array::make_arrays(std::move(shapes), dtypes, std::move(primitive), std::move(inputs));
}

mx::array attend_cells(const mx::array &queries, const std::vector<mx::array> &buffers, const mx::array &starts,
                       const mx::array &num_fed, const mx::array &places, bool has_blocks, int window, float scale) {
    require(queries.ndim() == 4 && queries.dtype() == mx::float32, "queries: float32 [rows, width, heads, dim]");
    require(!buffers.empty() && buffers[0].ndim() == 4, "no buffers of keys and values");
    Heads heads = {queries.shape(2), buffers[0].shape(1), queries.shape(3), scale};
    require(heads.num_kv > 0 && heads.num % heads.num_kv == 0 && heads.dim % 16 == 0,
            "heads do not divide, or are no multiples of 16");
    require(window >= 0, "window: 0 or more");
    check_buffers(buffers, heads.num_kv, heads.dim);
    check_attended_places(queries.shape(0), buffers[0], starts, num_fed, places, has_blocks);
    std::vector<mx::array> inputs = {queries, starts, num_fed, places};
    inputs.insert(inputs.end(), buffers.begin(), buffers.end());
    auto stream = mx::default_stream(mx::Device::cpu);
    auto primitive = std::make_shared<CellAttentionPrimitive>(stream, heads, window, has_blocks);
    return mx::array(queries.shape(), mx::float32, primitive, std::move(inputs));
}

}  // namespace outrider
