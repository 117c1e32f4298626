// Vectors of floats for one set of instructions. Files of kernels include this one, with NAME (a namespace), TARGET (a
// function attribute) and LANES (floats of a register) defined.
//
// Every number is computed by the same operations in the same order whatever LANES is, so all sets give the same bits.

namespace NAME {

typedef float Vec __attribute__((vector_size(4 * LANES)));
typedef float Unaligned __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef int32_t Ints __attribute__((vector_size(4 * LANES)));
typedef uint32_t Words __attribute__((vector_size(4 * LANES)));

#define INLINE static inline __attribute__((always_inline)) TARGET

INLINE Vec load(const float *from) { return *reinterpret_cast<const Unaligned *>(from); }
INLINE void store(float *to, Vec v) { *reinterpret_cast<Unaligned *>(to) = v; }
INLINE Vec all(float x) { return x - Vec{}; }

INLINE Vec fma(Vec a, Vec b, Vec c) {
#if LANES == 16
    return reinterpret_cast<Vec>(_mm512_fmadd_ps(a, b, c));
#elif LANES == 8
    return reinterpret_cast<Vec>(_mm256_fmadd_ps(a, b, c));
#elif defined(__aarch64__)
    return vfmaq_f32(c, a, b);
#else
    Vec sums;
    for (int i = 0; i < LANES; i++)
        sums[i] = __builtin_fmaf(a[i], b[i], c[i]);
    return sums;
#endif
}

INLINE float fma(float a, float b, float c) { return __builtin_fmaf(a, b, c); }

INLINE float max(Vec v) {
#if LANES == 16
    return _mm512_reduce_max_ps(v);
#else
    float most = v[0];
    for (int i = 1; i < LANES; i++)
        most = v[i] > most ? v[i] : most;
    return most;
#endif
}

// 2^x for x up to 126, within 1 ulp; 0 below -126. NaN stays NaN.
INLINE Vec power_of_two(Vec x) {
    const float rounder = 12582912;  // 1.5 * 2^23: a float of this size has no fraction
    Vec bounded = x < -126.f ? all(-126) : x;
    Vec shifted = bounded + rounder;
    Vec fraction = bounded - (shifted - rounder);  // in [-0.5, 0.5]
    Vec power = all(1.5345809e-4f);  // a polynomial with the least relative error there: 2e-9
    power = fma(power, fraction, all(1.3399931e-3f));
    power = fma(power, fraction, all(9.6184890e-3f));
    power = fma(power, fraction, all(5.5503288e-2f));
    power = fma(power, fraction, all(2.4022647e-1f));
    power = fma(power, fraction, all(6.9314721e-1f));
    power = fma(power, fraction, all(1));
    Ints exponent = (reinterpret_cast<Ints>(shifted) << 23) + (127 << 23);
    return x < -126.f ? Vec{} : power * reinterpret_cast<Vec>(exponent);
}

}  // namespace NAME
