#include "top_two.h"

#include <limits>
#include <memory>
#include <stdexcept>
#include <vector>

#include "primitive.h"
#include "threads.h"

namespace mx = mlx::core;

namespace outrider {

void find_top_two(const float *scores, int num, int32_t *place, float *margin) {
    constexpr int LANES = 16;  // running maxima beside each other
    constexpr float NONE = -std::numeric_limits<float>::infinity();
    float best[LANES], second[LANES];
    for (int lane = 0; lane < LANES; lane++)
        best[lane] = second[lane] = NONE;
    int whole = num / LANES * LANES;
    for (int i = 0; i < whole; i += LANES)
        for (int lane = 0; lane < LANES; lane++) {
            float score = scores[i + lane], before = best[lane];
            float less = score > before ? before : score;
            best[lane] = score > before ? score : before;
            second[lane] = less > second[lane] ? less : second[lane];
        }
    float most = NONE, next = NONE;
    auto add = [&](float score) {
        if (score > most) {
            next = most;
            most = score;
        } else if (score > next)
            next = score;
    };
    for (int lane = 0; lane < LANES; lane++) {
        add(best[lane]);
        add(second[lane]);
    }
    for (int i = whole; i < num; i++)
        add(scores[i]);
    int first = 0;
    while (first < num - 1 && scores[first] != most)
        first++;
    *place = first;
    *margin = num == 1 ? std::numeric_limits<float>::infinity() : most - next;
}

namespace {

class TopTwo : public CpuPrimitive {
  public:
    using CpuPrimitive::CpuPrimitive;

    void eval_cpu(const std::vector<mx::array> &in, std::vector<mx::array> &out) override {
        auto &encoder = begin(in, out);
        int num = in[0].shape(-1), num_rows = static_cast<int>(out[0].size());
        encoder.dispatch([num, num_rows, scores = in[0].data<float>(), places = out[0].data<int32_t>(),
                          margins = out[1].data<float>()]() {
            parallel(num_rows, [=](int row) {
                find_top_two(scores + static_cast<ptrdiff_t>(row) * num, num, places + row, margins + row);
            });
        });
    }

    bool is_equivalent(const mx::Primitive &) const override { return true; }
    const char *name() const override { return "OutriderTopTwo"; }
};

}  // namespace

std::pair<mx::array, mx::array> top_two(const mx::array &scores) {
    if (scores.ndim() == 0 || scores.shape(-1) == 0 || scores.dtype() != mx::float32)
        throw std::invalid_argument("top_two: scores must be float32, with at least one in the last dimension");
    auto stream = mx::default_stream(mx::Device::cpu);
    mx::Shape shape(scores.shape().begin(), scores.shape().end() - 1);
    auto found = mx::array::make_arrays(
        {shape, shape}, {mx::int32, mx::float32}, std::make_shared<TopTwo>(stream),
        {mx::contiguous(scores, false, stream)});
    return {found[0], found[1]};
}

}  // namespace outrider
