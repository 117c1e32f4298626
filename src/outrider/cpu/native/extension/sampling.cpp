#include "sampling.h"

#include <algorithm>
#include <cfloat>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <memory>
#include <stdexcept>

#include "primitive.h"
#include "quantized.h"
#include "threads.h"

#ifdef __x86_64__
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

namespace outrider {
namespace {

namespace mx = mlx::core;

constexpr float INFINITE = std::numeric_limits<float>::infinity();

struct Logits {
    const float *logits;
    const int32_t *token_ids;  // null: 0, 1, ..
    int num;
    float inverse_temperature;

    float scaled(int i) const { return logits[i] * inverse_temperature; }
    int token_id(int i) const { return token_ids ? token_ids[i] : i; }
};

// A bijection of 32-bit words, also of vectors of them: see sampling/noise.py.
#define MIXED(x, key)                 \
    x = x ^ (x >> 16);                \
    x = x * 0x7FEB352Du ^ key;        \
    x = x ^ (x >> 15);                \
    x = x * 0x846CA68Bu;              \
    return x ^ (x >> 16)

uint32_t mixed(uint32_t x, uint32_t key = 0) { MIXED(x, key); }

// The noise of one position.
struct Noise {
    static constexpr float MOST = 22.9f;  // no noise is greater: -log(2^-33) is 22.87

    uint32_t first, second;

    Noise(const uint32_t *seed, uint32_t position)
        : first(mixed(seed[0] + mixed(position + 0x9E3779B9u))), second(mixed(seed[1] ^ mixed(first + 0x85EBCA6Bu))) {}

    float of(int token_id) const {
        float u = (float(mixed(uint32_t(token_id) + first, second)) + 0.5f) * float(0x1p-32 * (1 - 0x1p-24));
        float rest = std::min(1 - u, 1 - 0x1p-24f);
        return -std::log(std::log(rest) * (u / (rest - 1)));
    }
};

struct Loops {
    // The greatest scaled logit.
    float (*greatest)(const Logits &row);
    // The first place from `from` on whose scaled logit exceeds `limit`; row.num: none.
    int (*next_above)(const Logits &row, int from, float limit);
    // The first place from `from` on whose scaled logit exceeds `floor` and whose score may exceed `limit`; row.num: none.
    int (*next_rival)(const Logits &row, const Noise &noise, int from, float floor, float limit);
    // The sum of exp(scaled logit - best).
    double (*total)(const Logits &row, float best);
};

#ifdef __x86_64__

#define NAME avx512
#define TARGET __attribute__((target("avx512f,avx512dq,avx2,fma")))
#define LANES 16
#include "sampling_kernels.h"
#undef NAME
#undef TARGET
#undef LANES

#define NAME avx2
#define TARGET __attribute__((target("avx2,fma")))
#define LANES 8
#include "sampling_kernels.h"
#undef NAME
#undef TARGET
#undef LANES

#endif

#define NAME portable
#define TARGET
#define LANES 4
#include "sampling_kernels.h"

const Loops &loops() {
#ifdef __x86_64__
    if (std::strncmp(instructions(), "avx512", 6) == 0)
        return avx512::loops;
    if (std::strncmp(instructions(), "avx", 3) == 0)  // all of them have AVX2
        return avx2::loops;
#endif
    return portable::loops;
}

// Never a denormal number: in some modes a CPU reads such a number as 0.
float just_below(float x) { return std::min(std::nextafter(x, -INFINITE), x - FLT_MIN); }

// The two best scores so far.
struct BestTwo {
    int place = 0;
    float most = -INFINITE, second = -INFINITE;

    void add(int at, float score) {
        if (score > most) {
            second = most;
            most = score;
            place = at;
            return;
        }
        if (score == most)
            place = std::min(place, at);
        second = score > second ? score : second;
    }
    float margin() const { return second == -INFINITE ? INFINITE : most - second; }
};

struct Filters {
    int top_k = 0;                 // 0: off
    float top_p = 1;               // 1: off
    float log_min_p = -INFINITE;   // -inf: off
};

struct Candidate {
    float scaled;
    int place;
};

bool is_better(const Candidate &a, const Candidate &b) {
    return a.scaled > b.scaled || (a.scaled == b.scaled && a.place < b.place);
}

std::vector<Candidate> &candidates() {
    static thread_local std::vector<Candidate> memory;
    return memory;
}

// The `num` best columns as candidates, in any order. Fewer if others are -inf.
void find_best(const Logits &row, int num) {
    auto &kept = candidates();
    kept.clear();
    size_t most = 2 * size_t(num) + 256;  // chosen by hand
    auto drop_others = [&] {
        std::nth_element(kept.begin(), kept.begin() + num - 1, kept.end(), is_better);
        kept.resize(num);
    };
    auto next_above = loops().next_above;
    float limit = -INFINITE;
    for (int i = next_above(row, 0, limit); i < row.num; i = next_above(row, i + 1, limit)) {
        kept.push_back({row.scaled(i), i});
        if (kept.size() == most) {
            drop_others();
            limit = kept.back().scaled;  // a later column with the same logit comes after it
        }
    }
    if (kept.size() > size_t(num))
        drop_others();
}

// Draws one token.
class Draw {
  public:
    Draw(const Logits &row, const Noise &noise, bool wants_margin)
        : row_(row), noise_(noise), wants_margin_(wants_margin), loops_(loops()) {}

    BestTwo result(const Filters &filters) {
        best_ = loops_.greatest(row_);
        if (!(best_ > -INFINITE))
            return found_;  // nothing is allowed: column 0
        bool has_top_k = 0 < filters.top_k && filters.top_k < row_.num;
        float least = best_ + filters.log_min_p;
        if (!has_top_k && filters.top_p >= 1) {
            add_rivals(least);
            return found_;
        }
        if (has_top_k)
            find_best(row_, filters.top_k);
        if (filters.top_p < 1)
            cut_to_share(filters.top_p, has_top_k, least);
        for (const Candidate &one : candidates())
            if (one.scaled >= least || one.scaled == best_)
                add(one.place);
        return found_;
    }

  private:
    void add(int place) { found_.add(place, row_.scaled(place) + noise_.of(row_.token_id(place))); }

    // All columns whose scaled logit is at least `least`, except those that cannot win. The one with the greatest logit
    // comes first: it leaves few others that can.
    void add_rivals(float least) {
        int first = loops_.next_above(row_, 0, just_below(best_));
        add(first);
        for (int i = -1;;) {  // an equal score counts: it may be that of an earlier column
            float limit = just_below(wants_margin_ ? found_.second : found_.most);
            i = loops_.next_rival(row_, noise_, i + 1, just_below(least), limit);
            if (i >= row_.num)
                return;
            if (i != first)
                add(i);
        }
    }

    // Leaves the best candidates that together have a share of `top_p`; without top_k, of all columns.
    void cut_to_share(float top_p, bool has_top_k, float least) {
        if (has_top_k) {
            double total = 0;
            for (const Candidate &one : candidates())
                total += weight(one);
            cut_at(top_p * total);
            return;
        }
        double wanted = top_p * loops_.total(row_, best_);
        for (float depth = 4;; depth *= 2) {  // few columns are near the best one
            float limit = std::max(best_ - depth, least);
            find_above(just_below(limit));
            if (cut_at(wanted) || limit == least || depth > 128)  // the weight of others is 0
                return;
        }
    }

    void find_above(float limit) {
        auto &kept = candidates();
        kept.clear();
        for (int i = loops_.next_above(row_, 0, limit); i < row_.num; i = loops_.next_above(row_, i + 1, limit))
            kept.push_back({row_.scaled(i), i});
    }

    // Leaves the best candidates up to the one with which they weigh `wanted`. False: all together weigh less.
    bool cut_at(double wanted) {
        auto &kept = candidates();
        std::sort(kept.begin(), kept.end(), is_better);
        double reached = 0;
        for (size_t i = 0; i < kept.size(); i++) {
            reached += weight(kept[i]);
            if (reached >= wanted) {
                kept.resize(i + 1);
                return true;
            }
        }
        return false;
    }

    double weight(const Candidate &one) const { return std::exp(double(one.scaled) - best_); }

    const Logits &row_;
    const Noise &noise_;
    bool wants_margin_;
    const Loops &loops_;
    float best_ = 0;
    BestTwo found_;
};

class Sample : public CpuPrimitive {
  public:
    Sample(mx::Stream stream, bool has_filters, bool has_token_ids, bool wants_margins)
        : CpuPrimitive(stream), has_filters_(has_filters), has_token_ids_(has_token_ids), wants_margins_(wants_margins) {}

    void eval_cpu(const std::vector<mx::array> &in, std::vector<mx::array> &out) override {
        auto &encoder = begin(in, out);
        const auto *logits = elements<float>(encoder, in[0]);
        const auto *positions = elements<uint32_t>(encoder, in[1]);
        SamplingNumbers numbers = {elements<float>(encoder, in[2]), elements<uint32_t>(encoder, in[3]), nullptr, nullptr,
                                   nullptr};
        if (has_filters_) {
            numbers.top_k = elements<int32_t>(encoder, in[4]);
            numbers.top_p = elements<float>(encoder, in[5]);
            numbers.log_min_p = elements<float>(encoder, in[6]);
        }
        const auto *token_ids = has_token_ids_ ? elements<int32_t>(encoder, in.back()) : nullptr;
        int width = in[0].shape(1), vocab = in[0].shape(2), num = in[0].shape(0) * width;
        encoder.dispatch([=, wants_margins = wants_margins_, tokens = out[0].data<int32_t>(),
                          margins = out[1].data<float>()]() {
            parallel(num, [=](int i) {
                const float *own = logits + ptrdiff_t(i) * vocab;
                Drawn drawn = draw(numbers, i / width, positions[i], own, vocab, token_ids, wants_margins);
                tokens[i] = drawn.token_id;
                margins[i] = drawn.margin;
            });
        });
    }

    bool is_equivalent(const mx::Primitive &other) const override {
        const auto &same = static_cast<const Sample &>(other);
        return has_filters_ == same.has_filters_ && has_token_ids_ == same.has_token_ids_ &&
               wants_margins_ == same.wants_margins_;
    }
    const char *name() const override { return "OutriderSample"; }

  private:
    bool has_filters_, has_token_ids_, wants_margins_;
};

class Logprobs : public CpuPrimitive {
  public:
    Logprobs(mx::Stream stream, int num_top) : CpuPrimitive(stream), num_top_(num_top) {}

    void eval_cpu(const std::vector<mx::array> &in, std::vector<mx::array> &out) override {
        auto &encoder = begin(in, out);
        const auto *logits = elements<float>(encoder, in[0]);
        const auto *targets = elements<int32_t>(encoder, in[1]);
        int vocab = in[0].shape(2), num = in[0].shape(0) * in[0].shape(1);
        encoder.dispatch([=, num_top = num_top_, of_targets = out[0].data<float>(), top_ids = out[1].data<int32_t>(),
                          top = out[2].data<float>()]() {
            parallel(num, [=](int i) {
                Logits row{logits + ptrdiff_t(i) * vocab, nullptr, vocab, 1};
                float best = loops().greatest(row);
                double whole = best + std::log(loops().total(row, best));
                bool is_known = 0 <= targets[i] && targets[i] < vocab;
                of_targets[i] = is_known ? float(row.logits[targets[i]] - whole) : -INFINITE;
                if (num_top == 0)
                    return;
                find_best(row, num_top);
                add_masked(row, num_top);
                for (int j = 0; j < num_top; j++) {
                    top_ids[ptrdiff_t(i) * num_top + j] = candidates()[j].place;
                    top[ptrdiff_t(i) * num_top + j] = float(candidates()[j].scaled - whole);
                }
            });
        });
    }

    bool is_equivalent(const mx::Primitive &other) const override {
        return num_top_ == static_cast<const Logprobs &>(other).num_top_;
    }
    const char *name() const override { return "OutriderLogprobs"; }

  private:
    // Where fewer columns than wanted have a chance, the first others.
    static void add_masked(const Logits &row, int num) {
        for (int i = 0; candidates().size() < size_t(num); i++)
            if (!(row.logits[i] > -INFINITE))
                candidates().push_back({-INFINITE, i});
    }

    int num_top_;
};

void check(bool is_right, const char *problem) {
    if (!is_right)
        throw std::invalid_argument(problem);
}

}  // namespace

Drawn draw(const SamplingNumbers &numbers, int row, uint32_t position, const float *logits, int vocab,
           const int32_t *token_ids, bool wants_margin) {
    Logits of_row{logits, token_ids, vocab, numbers.inverse_temperature[row]};
    Noise noise(numbers.seeds + 2 * row, position);
    Filters filters;
    if (numbers.top_k)
        filters = {numbers.top_k[row], numbers.top_p[row], numbers.log_min_p[row]};
    BestTwo found = Draw(of_row, noise, wants_margin).result(filters);
    return {of_row.token_id(found.place), found.margin()};
}

std::vector<mx::array> sampling_inputs(
    int rows, const mx::array &inverse_temperature, const mx::array &seeds, const std::vector<mx::array> &filters,
    mx::Stream stream) {
    check(inverse_temperature.size() == size_t(rows) && seeds.size() == 2 * size_t(rows),
          "one temperature and two words of a seed a row");
    check(filters.empty() || filters.size() == 3, "filters are top_k, top_p and log_min_p");
    std::vector<mx::array> inputs{
        mx::astype(inverse_temperature, mx::float32, stream), mx::astype(seeds, mx::uint32, stream)};
    const mx::Dtype types[] = {mx::int32, mx::float32, mx::float32};
    for (size_t i = 0; i < filters.size(); i++) {
        check(filters[i].size() == size_t(rows), "one number of each filter a row");
        inputs.push_back(mx::astype(filters[i], types[i], stream));
    }
    return inputs;
}

std::pair<mx::array, mx::array> sample(
    const mx::array &logits, const mx::array &positions, const mx::array &inverse_temperature, const mx::array &seeds,
    const std::vector<mx::array> &filters, const std::optional<mx::array> &token_ids, bool wants_margins) {
    check(logits.ndim() == 3 && logits.dtype() == mx::float32 && logits.shape(2) > 0,
          "logits must be float32 [rows, n, vocab]");
    mx::Shape shape{logits.shape(0), logits.shape(1)};
    check(positions.shape() == shape, "positions must be [rows, n]");
    check(!token_ids || token_ids->size() == size_t(logits.shape(2)), "one token id for each column");
    auto stream = mx::default_stream(mx::Device::cpu);
    std::vector<mx::array> inputs{mx::contiguous(logits, false, stream), mx::astype(positions, mx::uint32, stream)};
    for (mx::array &one : sampling_inputs(logits.shape(0), inverse_temperature, seeds, filters, stream))
        inputs.push_back(std::move(one));
    if (token_ids)
        inputs.push_back(mx::astype(*token_ids, mx::int32, stream));
    auto found = mx::array::make_arrays(
        {shape, shape}, {mx::int32, mx::float32},
        std::make_shared<Sample>(stream, !filters.empty(), token_ids.has_value(), wants_margins), inputs);
    return {found[0], found[1]};
}

std::tuple<mx::array, mx::array, mx::array> logprobs(const mx::array &logits, const mx::array &targets, int num_top) {
    check(logits.ndim() == 3 && logits.dtype() == mx::float32, "logits must be float32 [rows, n, vocab]");
    check(targets.shape() == mx::Shape{logits.shape(0), logits.shape(1)}, "targets must be [rows, n]");
    check(0 <= num_top && num_top <= logits.shape(2), "at most the whole vocabulary");
    auto stream = mx::default_stream(mx::Device::cpu);
    mx::Shape shape{logits.shape(0), logits.shape(1)}, top_shape{logits.shape(0), logits.shape(1), num_top};
    auto found = mx::array::make_arrays(
        {shape, top_shape, top_shape}, {mx::float32, mx::int32, mx::float32},
        std::make_shared<Logprobs>(stream, num_top),
        {mx::contiguous(logits, false, stream), mx::astype(targets, mx::int32, stream)});
    return {found[0], found[1], found[2]};
}

}  // namespace outrider
