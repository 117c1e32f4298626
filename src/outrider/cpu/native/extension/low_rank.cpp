#include "low_rank.h"

#include <cstring>

#include "decoder_math.h"
#include "primitive.h"
#include "scratch.h"
#include "threads.h"

namespace mx = mlx::core;

namespace outrider {
namespace {

constexpr int MAX_TOKENS = 8;            // of one adapter that are computed together; chosen by hand
constexpr double MIN_SHARED_WORK = 2e5;  // multiplications from which several threads pay; as in decoder_pass.cpp

// Tokens that follow each other and have the same adapter, and one layer.
struct Task {
    const LowRank::Factors *factors;
    const float *x;
    float *y;
    int num;

    double work() const { return double(num) * factors->rank * (factors->size + factors->num_rows); }
};

void run(const Math &math, const Task &task, bool has_bias) {
    static thread_local Scratch scratch;
    const LowRank::Factors &f = *task.factors;
    float *reduced = scratch.floats(size_t(task.num) * f.rank);
    for (int t = 0; t < task.num; t++) {
        math.dots(task.x + size_t(t) * f.size, f.a, f.rank, f.size, reduced + size_t(t) * f.rank);
        if (f.gain)
            math.multiply(f.gain, f.num_rows, task.y + size_t(t) * f.num_rows);
    }
    math.add_product(reduced, task.num, f.rank, f.b, f.num_rows, task.y);
    if (f.shift && has_bias)
        for (int t = 0; t < task.num; t++)
            math.add(f.shift, f.num_rows, task.y + size_t(t) * f.num_rows);
}

class LowRankPrimitive : public CpuPrimitive {
public:
    LowRankPrimitive(mx::Stream stream, const LowRank &terms) : CpuPrimitive(stream), terms(terms) {}

    const char *name() const override { return "OutriderLowRank"; }

    void eval_cpu(const std::vector<mx::array> &inputs, std::vector<mx::array> &outputs) override {
        auto &encoder = mx::cpu::get_command_encoder(stream());
        mx::array &out = outputs[0];
        out.set_data(mx::allocator::malloc(out.nbytes()));
        encoder.dispatch([terms = terms, y = elements<float>(encoder, inputs[0]),
                          x = elements<float>(encoder, inputs[1]), ids = elements<int>(encoder, inputs[2]),
                          to = out.data<float>(), bytes = out.nbytes(), rows = out.shape(0), width = out.shape(1),
                          size = inputs[1].shape(2)] {
            std::memcpy(to, y, bytes);
            std::vector<int> of_tokens;
            for (int row = 0; row < rows; row++)
                of_tokens.insert(of_tokens.end(), width, ids[row]);
            LowRankProduct product = {&terms, to};
            add_low_rank(&product, 1, x, size, of_tokens.data(), rows * width, true);
        });
    }

private:
    LowRank terms;
};

}  // namespace

void add_low_rank(const LowRankProduct *products, int num_products, const float *x, int size, const int *ids,
                  int num_tokens, bool has_bias) {
    const Math &math = outrider::math();
    std::vector<Task> tasks;
    double work = 0;
    for (int t = 0, next; t < num_tokens; t = next) {
        for (next = t + 1; next < num_tokens && next - t < MAX_TOKENS && ids[next] == ids[t];)
            next++;
        for (int i = 0; i < num_products; i++)
            if (const LowRank::Factors *factors = products[i].terms->find(ids[t])) {
                float *y = products[i].y + size_t(t) * factors->num_rows;
                tasks.push_back({factors, x + size_t(t) * size, y, next - t});
                work += tasks.back().work();
            }
    }
    if (work >= MIN_SHARED_WORK && tasks.size() > 1)
        return parallel(tasks.size(), [&](int i) { run(math, tasks[i], has_bias); });
    for (const Task &task : tasks)
        run(math, task, has_bias);
}

LowRank::LowRank(const Arrays &a, const Arrays &b, const Arrays &gains, const Arrays &shifts) {
    require(a.size() == b.size() && a.size() == gains.size() && a.size() == shifts.size(),
            "low-rank factors: lists of different lengths");
    auto found = std::make_shared<Held>();
    found->by_id.resize(a.size());
    auto hold = [&](const std::optional<mx::array> &array, const mx::Shape &shape) -> const float * {
        if (!array)
            return nullptr;
        require(array->dtype() == mx::float32 && array->shape() == shape, "low-rank factors of a wrong shape or type");
        found->arrays.push_back(mx::contiguous(*array));
        found->arrays.back().eval();
        return found->arrays.back().data<float>();
    };
    for (size_t i = 0; i < a.size(); i++) {
        if (!a[i])
            continue;
        require(i > 0 && a[i]->ndim() == 2 && b[i] && b[i]->ndim() == 2, "low-rank factors: [rank, size], [rank, rows]");
        int rank = a[i]->shape(0), size = a[i]->shape(1), num_rows = b[i]->shape(1);
        require(rank > 0 && size % 16 == 0 && num_rows % 16 == 0, "low-rank sizes must be multiples of 16");
        found->by_id[i] = {rank, size, num_rows, hold(a[i], {rank, size}), hold(b[i], {rank, num_rows}),
                           hold(gains[i], {num_rows}), hold(shifts[i], {num_rows})};
    }
    held = std::move(found);
}

bool LowRank::fits(int size, int num_rows) const {
    if (held)
        for (const Factors &factors : held->by_id)
            if (factors.rank && (factors.size != size || factors.num_rows != num_rows))
                return false;
    return true;
}

mx::array LowRank::operator()(const mx::array &y, const mx::array &x, const mx::array &ids) const {
    require(x.ndim() == 3 && y.ndim() == 3 && x.shape(0) == y.shape(0) && x.shape(1) == y.shape(1) &&
                x.dtype() == mx::float32 && y.dtype() == mx::float32,
            "x, y: float32 [rows, width, size]");
    require(ids.shape() == mx::Shape{x.shape(0)} && ids.dtype() == mx::int32, "adapters: int32 [rows]");
    require(fits(x.shape(2), y.shape(2)), "low-rank factors of another size than the layer's");
    auto primitive = std::make_shared<LowRankPrimitive>(mx::default_stream(mx::Device::cpu), *this);
    return mx::array(y.shape(), mx::float32, primitive, {y, x, ids});
}

}  // namespace outrider
