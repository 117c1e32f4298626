// Compares products of interleaved weights with AMX and with AVX-512: formats, sizes, numbers of tokens and of tiles.
// Prints how many were compared, or the first one that differs.
#include <cstdio>
#include <cstring>
#include <random>
#include <vector>

#include "quantized_avx512.h"

using namespace outrider;

namespace {

std::mt19937 numbers(1);

template <class T, class Next>
std::vector<T> filled(size_t num, Next next) {
    std::vector<T> found(num);
    for (T &one : found)
        one = static_cast<T>(next());
    return found;
}

// The first two tiles of the weights at most, as `multiply_interleaved` asks for them.
std::vector<float> product(
    decltype(amx_add_interleaved) add, const QuantizedMatrix &w, const TokenBlock &tokens, int num_tokens) {
    int num_tiles = w.num_rows / TILE_ROWS;
    std::vector<float> found;
    alignas(64) RowSums sums[2 * MAX_INTERLEAVED];
    bool is_configured = amx_configure(num_tokens);
    for (int tile = 0, num; tile < num_tiles; tile += num) {
        num = add(w, tile * TILE_ROWS, num_tiles - tile, tokens, num_tokens, sums);
        for (int i = 0; i < num; i++)
            found.insert(found.end(), sums[i * MAX_INTERLEAVED], sums[i * MAX_INTERLEAVED + num_tokens]);
    }
    if (is_configured)
        amx_release();
    return found;
}

}  // namespace

int main() {
    struct Format {
        int bits, group_size;
        Elements elements;
        bool has_biases;
    };
    int num_compared = 0;
    for (Format format : {Format{4, 16, Elements::integers, true}, Format{4, 32, Elements::integers, true},
                          Format{4, 64, Elements::integers, true}, Format{4, 128, Elements::integers, false},
                          Format{8, 32, Elements::integers, false}, Format{8, 64, Elements::integers, true},
                          Format{4, 32, Elements::e2m1, false}})
        for (int size : {32, 64, 96, 128, 160, 640})
            for (int num_rows : {16, 32, 48}) {
                if (size % format.group_size)
                    continue;
                auto codes = filled<uint32_t>(size_t(num_rows) * size * format.bits / 32, numbers);
                auto number = [] { return (static_cast<int>(numbers() % 2001) - 1000) * 1e-3f; };
                auto scales = filled<float>(size_t(num_rows) * size / format.group_size, number);
                auto biases = filled<float>(scales.size(), number);
                QuantizedMatrix w = {num_rows,      size,          format.bits,
                                     format.group_size, codes.data(), scales.data(),
                                     format.has_biases ? biases.data() : nullptr, ScaleType::float32, format.elements,
                                     true};
                size_t num_blocks = size / BLOCK;
                auto bytes = filled<int8_t>(size_t(2) * MAX_INTERLEAVED * size, [] { return numbers() % 255 - 127; });
                auto token_scales = filled<float>(MAX_INTERLEAVED * num_blocks, number);
                auto sums = filled<float>(2 * MAX_INTERLEAVED * num_blocks, number);
                TokenBlock tokens = {bytes.data(), token_scales.data(), sums.data(), sums.data(), 2 * size,
                                     static_cast<ptrdiff_t>(num_blocks)};
                for (int num_tokens = 1; num_tokens <= MAX_INTERLEAVED; num_tokens++, num_compared++) {
                    auto expected = product(avx512_add_interleaved, w, tokens, num_tokens);
                    auto found = product(amx_add_interleaved, w, tokens, num_tokens);
                    if (found.size() != expected.size() ||
                        std::memcmp(found.data(), expected.data(), found.size() * sizeof(float))) {
                        std::printf("%d bits, groups of %d, %d x %d, %d tokens differ\n", format.bits,
                                    format.group_size, num_rows, size, num_tokens);
                        return 1;
                    }
                }
            }
    std::printf("%d products are equal\n", num_compared);
}
