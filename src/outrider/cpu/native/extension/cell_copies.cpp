#include "cell_copies.h"

#include <cstring>
#include <memory>
#include <stdexcept>

#include "primitive.h"
#include "threads.h"

namespace mx = mlx::core;

namespace outrider {
namespace {

using Ranges = std::vector<std::tuple<int, int, int>>;

class CopyCells : public CpuPrimitive {
  public:
    CopyCells(mx::Stream stream, const Ranges &ranges) : CpuPrimitive(stream), ranges(ranges) {}

    const char *name() const override { return "OutriderCopyCells"; }

    void eval_cpu(const std::vector<mx::array> &inputs, std::vector<mx::array> &outputs) override {
        auto &encoder = mx::cpu::get_command_encoder(stream());
        std::vector<char *> to;
        for (mx::array &output : outputs) {
            output.set_data(mx::allocator::malloc(output.nbytes()));
            to.push_back(output.data<char>());
        }
        std::vector<const char *> from;
        for (const mx::array &input : inputs)
            from.push_back(input.data<char>());
        const mx::array &first = inputs[0];
        size_t num_heads = first.shape(1), num_cells = first.shape(2);
        size_t cell_bytes = first.nbytes() / (first.shape(0) * num_heads * num_cells);
        encoder.dispatch([ranges = ranges, from, to, num_heads, num_cells, cell_bytes] {
            parallel(ranges.size() * from.size(), [&](int i) {
                auto [block, begin, end] = ranges[i / from.size()];
                size_t buffer = i % from.size(), bytes = (end - begin) * cell_bytes;
                for (size_t head = 0; head < num_heads; head++)
                    std::memcpy(to[i / from.size()] + (buffer * num_heads + head) * bytes,
                                from[buffer] + ((block * num_heads + head) * num_cells + begin) * cell_bytes, bytes);
            });
        });
    }

  private:
    Ranges ranges;
};

}  // namespace

std::vector<mx::array> copy_cells(const std::vector<mx::array> &buffers, const Ranges &ranges) {
    auto stream = mx::default_stream(mx::Device::cpu);
    std::vector<mx::array> inputs;
    for (const mx::array &buffer : buffers) {
        if (buffer.ndim() < 3 || buffer.shape() != buffers[0].shape() || buffer.dtype() != buffers[0].dtype())
            throw std::invalid_argument("copy_cells: buffers must be of one shape and type");
        inputs.push_back(mx::contiguous(buffer, false, stream));
    }
    if (inputs.empty() || ranges.empty())
        return {};
    std::vector<mx::Shape> shapes;
    for (auto [block, begin, end] : ranges) {
        if (block < 0 || block >= inputs[0].shape(0) || begin < 0 || end > inputs[0].shape(2) || begin >= end)
            throw std::invalid_argument("copy_cells: a range that the buffers do not have");
        mx::Shape shape = inputs[0].shape();
        shape[0] = static_cast<int>(inputs.size());
        shape[2] = end - begin;
        shapes.push_back(shape);
    }
    std::vector<mx::Dtype> dtypes(shapes.size(), inputs[0].dtype());
    return mx::array::make_arrays(
        std::move(shapes), dtypes, std::make_shared<CopyCells>(stream, ranges), std::move(inputs));
}

}  // namespace outrider
