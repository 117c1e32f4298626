#include "primitive.h"

#include <atomic>
#include <cstring>
#include <memory>
#include <mutex>
#include <unordered_map>

namespace mx = mlx::core;

namespace outrider {
namespace {

std::atomic<long> buffer_copies{0};

// Copies elements of four bytes in the order of the shape.
void copy_strided(const uint32_t *from, const mx::Shape &shape, const mx::Strides &strides, uint32_t *to) {
    size_t rest = 1;
    for (int size : shape)
        rest *= size;
    std::vector<int> at(shape.size(), 0);
    for (size_t i = 0; i < rest; i++) {
        int64_t offset = 0;
        for (size_t axis = 0; axis < at.size(); axis++)
            offset += at[axis] * strides[axis];
        to[i] = from[offset];
        for (int axis = int(at.size()) - 1; axis >= 0 && ++at[axis] == shape[axis]; axis--)
            at[axis] = 0;
    }
}

void copy(mx::cpu::CommandEncoder &encoder, const mx::array &from, mx::array &to) {
    const uint32_t *source = from.data<uint32_t>();
    uint32_t *target = to.data<uint32_t>();
    if (from.flags().row_contiguous)
        encoder.dispatch([=, bytes = from.nbytes()] { std::memcpy(target, source, bytes); });
    else
        encoder.dispatch([=, shape = from.shape(), strides = from.strides()] {
            copy_strided(source, shape, strides, target);
        });
}

// A hold of MLX on an array's memory that ends with the work: see note_holds. It lies in a temporary array, which MLX
// drops at the same time.
class Hold {
public:
    explicit Hold(const mx::array &array) : data(array.data_shared_ptr().get()) {
        std::lock_guard lock(mutex);
        counts[data]++;
    }

    Hold(const Hold &) = delete;

    ~Hold() {
        std::lock_guard lock(mutex);
        if (--counts[data] == 0)
            counts.erase(data);
    }

    static mx::array of(const mx::array &array) {
        auto drop = [hold = std::make_shared<Hold>(array)](mx::allocator::Buffer) {};
        return mx::array(mx::allocator::Data(mx::allocator::Buffer(nullptr), drop), mx::Shape{0}, mx::uint8);
    }

    static long count(const mx::array &array) {
        std::lock_guard lock(mutex);
        auto found = counts.find(array.data_shared_ptr().get());
        return found == counts.end() ? 0 : found->second;
    }

private:
    const void *data;
    static inline std::mutex &mutex = *new std::mutex;  // never deleted: work may go on while the process ends
    static inline auto &counts = *new std::unordered_map<const void *, long>;
};

// The number of arrays that are the same node of the graph, which MLX keeps private.
template <auto MEMBER>
struct NodeCount {
    friend long node_count(const mx::array &array) { return (array.*MEMBER).use_count(); }
};
long node_count(const mx::array &array);
template struct NodeCount<&mx::array::array_desc_>;

// As array::is_donatable, but holds that end before the next work begins do not count.
bool may_take_over(const mx::array &input) {
    const auto &data = input.data_shared_ptr();
    return input.flags().row_contiguous && node_count(input) == 1 && data->is_owned() &&
           data.use_count() - Hold::count(input) == 1;
}

}  // namespace

mx::cpu::CommandEncoder &CpuPrimitive::begin(const std::vector<mx::array> &in, std::vector<mx::array> &out) {
    auto &encoder = mx::cpu::get_command_encoder(stream());
    for (mx::array &one : out) {
        one.set_data(mx::allocator::malloc(one.nbytes()));
        encoder.set_output_array(one);
    }
    for (const mx::array &one : in)
        encoder.set_input_array(one);
    return encoder;
}

const void *contiguous_data(mx::cpu::CommandEncoder &encoder, const mx::array &input) {
    if (input.flags().row_contiguous)
        return input.data<void>();
    mx::array copied(input.shape(), input.dtype(), nullptr, {});
    copied.set_data(mx::allocator::malloc(copied.nbytes()));
    copy(encoder, input, copied);
    encoder.add_temporary(copied);
    return copied.data<void>();
}

void release_inputs(const std::vector<mx::array> &inputs, std::vector<mx::array> &outputs) {
    for (mx::array &output : outputs)
        if (&output.inputs() != &inputs && !output.is_tracer())
            output.inputs().clear();
}

void take_over(mx::cpu::CommandEncoder &encoder, const mx::array &input, mx::array &output) {
    if (may_take_over(input)) {
        output.copy_shared_buffer(input);
        return;
    }
    buffer_copies++;
    output.set_data(mx::allocator::malloc(output.nbytes()));
    copy(encoder, input, output);
}

void note_holds(
    mx::cpu::CommandEncoder &encoder, const std::vector<mx::array> &inputs, const std::vector<mx::array> &outputs) {
    for (const mx::array &output : outputs)
        if (&output.inputs() != &inputs)
            encoder.add_temporary(Hold::of(output));
}

void note_holds(mx::cpu::CommandEncoder &encoder, const std::vector<mx::array> &read) {
    for (const mx::array &input : read)
        encoder.add_temporary(Hold::of(input));
}

long num_buffer_copies() { return buffer_copies; }

}  // namespace outrider
