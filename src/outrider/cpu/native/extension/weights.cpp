#include "weights.h"

#include <algorithm>
#include <stdexcept>

namespace outrider {
namespace {

namespace mx = mlx::core;

void check(bool is_valid, const std::string &what) {
    if (!is_valid)
        throw std::invalid_argument("quantised weights: " + what);
}

bool is_one_of(int value, std::initializer_list<int> known) {
    return std::find(known.begin(), known.end(), value) != known.end();
}

void check_format(const WeightFormat &format) {
    std::string bits = std::to_string(format.bits), group_size = std::to_string(format.group_size);
    if (format.mode == "affine") {
        check(is_one_of(format.bits, {2, 3, 4, 5, 6, 8}), "there are no weights of " + bits + " bits");
        check(is_one_of(format.group_size, {16, 32, 64, 128}),
              "groups have 16, 32, 64 or 128 elements, not " + group_size);
        return;
    }
    bool is_nvfp4 = format.mode == "nvfp4";
    check(is_nvfp4 || format.mode == "mxfp4" || format.mode == "mxfp8", "there is no mode '" + format.mode + "'");
    check(format.bits == (format.mode == "mxfp8" ? 8 : 4), format.mode + " does not have " + bits + " bits");
    check(format.group_size == (is_nvfp4 ? 16 : 32), format.mode + " does not have groups of " + group_size);
}

ScaleType scale_type(const WeightFormat &format, const mx::array &scales) {
    if (format.mode != "affine")
        return format.mode == "nvfp4" ? ScaleType::e4m3 : ScaleType::e8m0;
    if (scales.dtype() == mx::float32)
        return ScaleType::float32;
    return scales.dtype() == mx::float16 ? ScaleType::float16 : ScaleType::bfloat16;
}

}  // namespace

Elements WeightFormat::elements() const {
    if (mode == "affine")
        return Elements::integers;
    return mode == "mxfp8" ? Elements::e4m3 : Elements::e2m1;
}

int WeightFormat::num_rows(const mx::array &weight) const {
    return is_interleaved ? weight.shape(-3) * TILE_ROWS : weight.shape(-2);
}

int WeightFormat::num_in_row(const mx::array &one) const { return one.shape(is_interleaved ? -2 : -1); }

void check_weights(
    const WeightFormat &format, int size, const mx::array &weight, const mx::array &scales,
    const std::optional<mx::array> &biases) {
    check_format(format);
    check(size > 0 && size % format.group_size == 0 && size % BLOCK == 0,
          "groups of " + std::to_string(std::max(format.group_size, BLOCK)) + " do not divide rows of " +
              std::to_string(size));
    check(weight.dtype() == mx::uint32, "codes must be uint32");
    if (format.mode == "affine") {
        check(scales.dtype() == mx::float32 || scales.dtype() == mx::float16 || scales.dtype() == mx::bfloat16,
              "scales must be float32, float16 or bfloat16");
        check(!biases || biases->dtype() == scales.dtype(), "scales and biases must have the same type");
    } else {
        check(scales.dtype() == mx::uint8, "scales of " + format.mode + " must be uint8");
        check(!biases, format.mode + " has no biases");
    }
    if (format.is_interleaved) {
        check(weight.shape(-1) == TILE_ROWS, "interleaved weights have tiles of " + std::to_string(weight.shape(-1)) +
                                                 " rows, not " + std::to_string(TILE_ROWS));
        check(format.bits == 4 || (format.bits == 8 && format.elements() == Elements::integers),
              format.mode + " of " + std::to_string(format.bits) + " bits cannot be interleaved");
    }
    mx::Shape expected(weight.shape());
    expected[expected.size() - (format.is_interleaved ? 2 : 1)] = size / format.group_size;
    check(format.num_in_row(weight) == size / 32 * format.bits && scales.shape() == expected &&
              (!biases || biases->shape() == expected),
          "the shapes of codes, scales and biases do not belong together");
}

QuantizedMatrix matrix_of(
    const WeightFormat &format, const mx::array &weight, const mx::array &scales, const mx::array *biases,
    ptrdiff_t expert) {
    int rows = format.num_rows(weight), words = format.num_in_row(weight), groups = format.num_in_row(scales);
    ptrdiff_t skipped = expert * rows * groups * static_cast<ptrdiff_t>(scales.itemsize());
    return {.num_rows = rows,
            .size = groups * format.group_size,
            .bits = format.bits,
            .group_size = format.group_size,
            .codes = weight.data<uint32_t>() + expert * rows * words,
            .scales = scales.data<char>() + skipped,
            .biases = biases ? biases->data<char>() + skipped : nullptr,
            .type = scale_type(format, scales),
            .elements = format.elements(),
            .is_interleaved = format.is_interleaved};
}

}  // namespace outrider
