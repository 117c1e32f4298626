#include "cell_arrays.h"

#include <stdexcept>

#include "decoder_math.h"

namespace mx = mlx::core;

namespace outrider {
namespace {

void require(bool holds) {
    if (!holds)
        throw std::invalid_argument(
            "buffers: float32 or bfloat16 [slots or blocks, heads, cells, dim] of keys and values; or of both uint32 codes "
            "of 8 or 4 bits, float32 scales and biases [slots or blocks, heads, cells, groups], groups of 64 or 32 elements");
}

bool have_same_places(const mx::array &a, const mx::array &b) {
    return a.ndim() == 4 && b.ndim() == 4 && a.shape(0) == b.shape(0) && a.shape(1) == b.shape(1) &&
           a.shape(2) == b.shape(2);
}

void check_codes(const mx::array &codes, const mx::array &scales, const mx::array &biases, int dim) {
    int groups = scales.shape(3);
    require(codes.dtype() == mx::uint32 && scales.dtype() == mx::float32 && biases.dtype() == mx::float32);
    require(scales.shape() == biases.shape() && groups > 0 && (groups * 64 == dim || groups * 32 == dim));
    require(codes.shape(3) * 4 == dim || codes.shape(3) * 8 == dim);
}

using Data = std::function<const void *(const mx::array &)>;

Cells cells_of(const mx::array *parts, bool has_codes, int dim, const Data &data) {
    auto words = static_cast<uint32_t *>(const_cast<void *>(data(parts[0])));
    if (!has_codes)
        return {words, nullptr, nullptr, dim, int(parts[0].itemsize()) * 8, 0};
    auto floats = [&](const mx::array &array) { return static_cast<float *>(const_cast<void *>(data(array))); };
    return {words, floats(parts[1]), floats(parts[2]), dim, parts[0].shape(3) * 32 / dim, parts[1].shape(3)};
}

}  // namespace

void check_buffers(const std::vector<mx::array> &buffers, int num_heads, int dim) {
    require(buffers.size() == 2 || buffers.size() == 6);
    for (const mx::array &each : buffers)
        require(have_same_places(each, buffers[0]) && each.shape(1) == num_heads);
    if (buffers.size() == 6) {
        check_codes(buffers[0], buffers[1], buffers[2], dim);
        check_codes(buffers[3], buffers[4], buffers[5], dim);
        return;
    }
    for (const mx::array &each : buffers)
        require((each.dtype() == mx::float32 || each.dtype() == mx::bfloat16) && each.dtype() == buffers[0].dtype() &&
                each.shape(3) == dim);
}

void check_places(int rows, const mx::array &starts, const mx::array &num_fed, const mx::array &places,
                  bool has_blocks) {
    for (const mx::array *each : {&starts, &num_fed})
        if (each->size() != size_t(rows) || each->dtype() != mx::int32)
            throw std::invalid_argument("starts, fed counts: int32 [rows]");
    if (places.ndim() != 2 || places.shape(0) != rows || places.dtype() != mx::int32 ||
        (has_blocks ? places.shape(1) < 2 : places.shape(1) != 1))
        throw std::invalid_argument("places: int32 [rows, 1], or [rows, blocks + 1]");
}

void check_attended_places(int rows, const mx::array &buffer, const mx::array &starts, const mx::array &num_fed,
                           const mx::array &places, bool has_blocks) {
    check_places(rows, starts, num_fed, places, has_blocks);
    if (has_blocks && buffer.shape(2) != CELLS)
        throw std::invalid_argument("blocks must have 64 cells");
}

KeysAndValues cells_of(const std::vector<mx::array> &arrays, size_t first, int dim, const Data &data) {
    size_t each = (arrays.size() - first) / 2;
    bool has_codes = each == 3;
    return {cells_of(&arrays[first], has_codes, dim, data), cells_of(&arrays[first + each], has_codes, dim, data)};
}

}  // namespace outrider
