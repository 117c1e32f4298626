// Loops over the logits of a vocabulary, for one set of instructions. sampling.cpp includes this file once for each set,
// with NAME (a namespace), TARGET (a function attribute) and LANES (floats of a register) defined.

#include "vectors.h"

namespace NAME {

// One bit for each lane of `v` that is greater than `limit`.
INLINE unsigned bits_above(Vec v, float limit) {
#if LANES == 16
    return _mm512_cmp_ps_mask(v, _mm512_set1_ps(limit), _CMP_GT_OQ);
#elif LANES == 8
    return _mm256_movemask_ps(_mm256_cmp_ps(v, _mm256_set1_ps(limit), _CMP_GT_OQ));
#else
    unsigned bits = 0;
    for (int i = 0; i < LANES; i++)
        bits |= unsigned(v[i] > limit) << i;
    return bits;
#endif
}

INLINE Words mixed(Words x, uint32_t key) { MIXED(x, key); }

// What the noise cannot exceed. It is -log(-log(1 - u)) <= -log(u), where u * 2^32 is one of `numbers`. The bits of a float,
// read as an integer, are at most 2^23 * (127 + its binary logarithm).
INLINE Vec bound(Vec numbers) {
    constexpr float LOG_2 = 0.693147182f, ROUNDING = 1e-3f;
    Vec logarithms = __builtin_convertvector(reinterpret_cast<Ints>(numbers), Vec);
    return ((127 + 32) * LOG_2 + ROUNDING) - logarithms * (LOG_2 * 0x1p-23f);
}

TARGET static float greatest(const Logits &row) {
    constexpr float NONE = -std::numeric_limits<float>::infinity();
    Vec most = all(NONE);
    int i = 0;
    for (; i + LANES <= row.num; i += LANES) {
        Vec x = load(row.logits + i);
        most = x > most ? x : most;
    }
    float found = max(most);
    for (; i < row.num; i++)
        found = row.logits[i] > found ? row.logits[i] : found;
    return found * row.inverse_temperature;
}

TARGET static int next_above(const Logits &row, int from, float limit) {
    int i = from;
    for (; i + LANES <= row.num; i += LANES)
        if (unsigned bits = bits_above(load(row.logits + i) * row.inverse_temperature, limit))
            return i + __builtin_ctz(bits);
    while (i < row.num && !(row.scaled(i) > limit))
        i++;
    return i;
}

TARGET static int next_rival(const Logits &row, const Noise &noise, int from, float floor, float limit) {
    Words lanes;
    for (int lane = 0; lane < LANES; lane++)
        lanes[lane] = lane;
    int i = from;
    for (; i + LANES <= row.num; i += LANES) {
        Vec x = load(row.logits + i) * row.inverse_temperature;
        unsigned above = bits_above(x, floor);
        if (!above || !bits_above(x + Noise::MOST, limit))
            continue;
        Words ids = lanes + uint32_t(i);
        if (row.token_ids)
            std::memcpy(&ids, row.token_ids + i, sizeof ids);
        Vec numbers = __builtin_convertvector(mixed(ids + noise.first, noise.second), Vec) + 0.5f;
        if (unsigned bits = above & bits_above(x + bound(numbers), limit))
            return i + __builtin_ctz(bits);
    }
    while (i < row.num && !(row.scaled(i) > floor && row.scaled(i) + Noise::MOST > limit))
        i++;
    return i;
}

TARGET static double total(const Logits &row, float best) {
    constexpr int PART = 512;  // numbers that are added as floats
    constexpr float LOG2_E = 1.44269504f;
    double sum = 0;
    for (int start = 0; start < row.num; start += PART) {
        int end = std::min(start + PART, row.num), i = start;
        float parts[16] = {};
        for (; i + 16 <= end; i += 16)
            for (int lane = 0; lane < 16; lane += LANES) {
                Vec x = load(row.logits + i + lane) * row.inverse_temperature - best;
                store(parts + lane, load(parts + lane) + power_of_two(x * LOG2_E));
            }
        for (float part : parts)
            sum += part;
        for (; i < end; i++)
            sum += std::exp(double(row.scaled(i)) - best);
    }
    return sum;
}

const Loops loops = {greatest, next_above, next_rival, total};

#undef INLINE

}  // namespace NAME
