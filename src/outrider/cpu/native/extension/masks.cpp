#include "masks.h"

#include <algorithm>
#include <cstdint>
#include <limits>
#include <memory>
#include <stdexcept>
#include <vector>

#include "primitive.h"
#include "threads.h"

namespace outrider {
namespace {

namespace mx = mlx::core;

constexpr int BITS = 32;

void mask(const float *logits, const uint32_t *words, int num_words, int vocab, float *out) {
    constexpr float FORBIDDEN = -std::numeric_limits<float>::infinity();
    int num = std::min(num_words, (vocab + BITS - 1) / BITS);
    for (int w = 0; w < num; w++) {
        int start = w * BITS, end = std::min(start + BITS, vocab);
        uint32_t word = words[w];
        if (word == 0)
            std::fill(out + start, out + end, FORBIDDEN);
        else if (word == ~uint32_t(0))
            std::copy(logits + start, logits + end, out + start);
        else
            for (int i = start; i < end; i++, word >>= 1)
                out[i] = word & 1 ? logits[i] : FORBIDDEN;
    }
    int masked = std::min(num * BITS, vocab);
    std::copy(logits + masked, logits + vocab, out + masked);
}

class MaskLogits : public CpuPrimitive {
  public:
    using CpuPrimitive::CpuPrimitive;

    void eval_cpu(const std::vector<mx::array> &in, std::vector<mx::array> &out) override {
        auto &encoder = begin(in, out);
        const auto *logits = elements<float>(encoder, in[0]);
        const auto *words = elements<uint32_t>(encoder, in[1]);
        const auto *rows = elements<int32_t>(encoder, in[2]);
        int num_rows = in[0].shape(0), width = in[0].shape(1), vocab = in[0].shape(2);
        int num_masked = in[1].shape(0), num_words = in[1].shape(2);
        encoder.dispatch([=, made = out[0].data<float>()]() {
            std::vector<int> masks(num_rows, -1);  // the mask of each row
            for (int m = 0; m < num_masked; m++)
                if (0 <= rows[m] && rows[m] < num_rows)
                    masks[rows[m]] = m;
            parallel(num_rows * width, [&](int i) {
                int m = std::max(masks[i / width], 0), num = masks[i / width] < 0 ? 0 : num_words;
                ptrdiff_t at = ptrdiff_t(i) * vocab, first = (ptrdiff_t(m) * width + i % width) * num_words;
                mask(logits + at, words + first, num, vocab, made + at);
            });
        });
    }

    bool is_equivalent(const mx::Primitive &) const override { return true; }
    const char *name() const override { return "OutriderMaskLogits"; }
};

}  // namespace

mx::array mask_logits(const mx::array &logits, const mx::array &words, const mx::array &rows) {
    if (logits.ndim() != 3 || logits.dtype() != mx::float32)
        throw std::invalid_argument("mask_logits: logits must be float32 [rows, n, vocab]");
    if (words.ndim() != 3 || words.dtype() != mx::uint32 || words.shape(1) != logits.shape(1))
        throw std::invalid_argument("mask_logits: words must be uint32 [masked rows, n, words]");
    if (rows.ndim() != 1 || rows.dtype() != mx::int32 || rows.shape(0) != words.shape(0))
        throw std::invalid_argument("mask_logits: rows must be int32 [masked rows]");
    auto stream = mx::default_stream(mx::Device::cpu);
    return mx::array(
        logits.shape(), mx::float32, std::make_shared<MaskLogits>(stream),
        {mx::contiguous(logits, false, stream), words, rows});
}

}  // namespace outrider
