#include "decoder_math.h"

#include <cmath>
#include <cstdint>
#include <cstring>
#include <utility>

#include "quantized.h"

#ifdef __x86_64__
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

namespace outrider {
namespace {

#ifdef __x86_64__

#define NAME avx512
#define TARGET __attribute__((target("avx512f,avx512dq,avx2,fma")))
#define LANES 16
#define MAX_ROWS 6  // 24 of 32 registers are sums
#define MAX_VECTORS 4
#include "decoder_kernels.h"
#undef NAME
#undef TARGET
#undef LANES
#undef MAX_ROWS
#undef MAX_VECTORS

#define NAME avx2
#define TARGET __attribute__((target("avx2,fma")))
#define LANES 8
#define MAX_ROWS 6  // 12 of 16 registers are sums
#define MAX_VECTORS 2
#include "decoder_kernels.h"
#undef NAME
#undef TARGET
#undef LANES
#undef MAX_ROWS
#undef MAX_VECTORS

#endif

#define NAME portable
#define TARGET
#define LANES 4
#define MAX_ROWS 3
#define MAX_VECTORS 4
#include "decoder_kernels.h"

}  // namespace

const Math &math() {
#ifdef __x86_64__
    if (std::strncmp(instructions(), "avx512", 6) == 0)
        return avx512::math;
    if (std::strncmp(instructions(), "avx", 3) == 0)  // all of them have AVX2
        return avx2::math;
#endif
    return portable::math;
}

}  // namespace outrider
