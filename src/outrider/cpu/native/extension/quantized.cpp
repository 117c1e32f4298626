#include "quantized.h"

#include <algorithm>
#include <cstring>

#include "quantized_kernels.h"
#include "threads.h"

#ifdef __x86_64__
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace outrider {
namespace {

constexpr int CHUNKS_PER_THREAD = 8;       // at least; the last thread to finish is late by one chunk at most
constexpr long MAX_CHUNK = 500'000;        // products of weights and tokens, beyond the first tokens
constexpr long MIN_SHARED = 100'000;       // elements of the weights from which several threads pay
constexpr int FREE_TOKENS = 8;             // tokens that are computed in the time that the weights take to arrive

// -- choice of the instructions --------------------------------------------------------------------------------------

#ifdef __x86_64__
// __builtin_cpu_supports does not know this one in older compilers.
bool has_f16c() {
    unsigned a, b, c, d;
    return __get_cpuid(1, &a, &b, &c, &d) && c & bit_F16C;
}

bool has_avx_vnni() {
    constexpr unsigned AVX_VNNI = 1 << 4;
    unsigned a, b, c, d;
    return __get_cpuid_count(7, 1, &a, &b, &c, &d) && a & AVX_VNNI;
}

// Linux lets a process use tile registers only if it has asked.
bool has_amx() {
    constexpr unsigned AMX_TILE = 1 << 24, AMX_INT8 = 1 << 25;
    constexpr int ARCH_REQ_XCOMP_PERM = 0x1023, XTILEDATA = 18;
    unsigned a, b, c, d;
    return __get_cpuid_count(7, 0, &a, &b, &c, &d) && d & AMX_TILE && d & AMX_INT8 &&
           syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XTILEDATA) == 0;
}
#endif

bool has(const Kernels &kernels) {
#if defined(__x86_64__)
    __builtin_cpu_init();
    bool has_avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && has_f16c();
    if (&kernels == &AVX2_ONLY)
        return has_avx2;
#if HAS_AVX_VNNI
    if (&kernels == &AVX2_VNNI)
        return has_avx2 && has_avx_vnni();
#endif
    bool has_avx512 = has_avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
                      __builtin_cpu_supports("avx512vnni");
    if (&kernels == &AVX512_VNNI)
        return has_avx512;
#if HAS_AMX
    if (&kernels == &AVX512_AMX)
        return has_avx512 && has_amx();
#endif
#endif
    return &kernels == &PORTABLE;
}

const Kernels *const ALL_KERNELS[] = {
#if HAS_AMX
    &AVX512_AMX,
#endif
#if defined(__x86_64__)
    &AVX512_VNNI,
#if HAS_AVX_VNNI
    &AVX2_VNNI,
#endif
    &AVX2_ONLY,
#endif
    &PORTABLE};

const Kernels *find_kernels(const char *wanted) {
    for (const Kernels *kernels : ALL_KERNELS)
        if ((!*wanted || !std::strcmp(wanted, kernels->name)) && has(*kernels))  // `has` may ask Linux for AMX
            return kernels;
    return nullptr;
}

const Kernels *kernels = &PORTABLE;  // until `use` chooses others

// -- matmuls ---------------------------------------------------------------------------------------------------------

// Tokens from `first` on, from element k on.
TokenBlock token_block(const QuantizedTokens &tokens, int first, int k) {
    int num_blocks = tokens.size / BLOCK;
    ptrdiff_t at = static_cast<ptrdiff_t>(first) * num_blocks + k / BLOCK;
    return {
        .codes = tokens.codes + at * PAIR,
        .scales = tokens.scales + at,
        .sums = tokens.sums + at,
        .half_sums = tokens.half_sums + 2 * at,
        .code_stride = 2 * static_cast<ptrdiff_t>(tokens.size),
        .block_stride = num_blocks,
    };
}

void store(const Product &product, int row, int first, int num_tokens, const RowSums *sums) {
    int num_rows = std::min(TILE_ROWS, product.weights.num_rows - row);
    for (int t = 0; t < num_tokens; t++) {
        float *y = product.y + (first + t) * product.stride + row;
        if (num_rows == TILE_ROWS)
            std::memcpy(y, sums[t], sizeof(sums[t]));  // of a known size: no call
        else
            std::memcpy(y, sums[t], num_rows * sizeof(float));
    }
}

// Rows [row, row + TILE_ROWS) of the weights times all tokens. A tile has up to max_size elements of a row.
template <class TILE>
void multiply_tile(
    const Product &product, int row, const QuantizedTokens &tokens, int max_size,
    void (*fill)(const QuantizedMatrix &, int, int, int, TILE &),
    void (*add)(const TILE &, const TokenBlock &, int, Sums &)) {
    const QuantizedMatrix &w = product.weights;
    TILE tile;
    int num_rows = std::min(TILE_ROWS, w.num_rows - row);
    // Tiles of about the same size, which depends on the weights alone. They begin and end with a group and a block.
    int step = std::max(w.group_size, BLOCK);
    int num_parts = (w.size + max_size - 1) / max_size, steps = w.size / step;
    int most = (steps + num_parts - 1) / num_parts * step;
    for (int k = 0; k < w.size; k += most) {
        fill(w, row, k, std::min(most, w.size - k), tile);
        for (int t = 0; t < tokens.num_tokens; t += MAX_TOKENS) {
            int count = std::min(MAX_TOKENS, tokens.num_tokens - t);
            alignas(64) Sums sums = {};
            const float *y = product.y + t * product.stride + row;
            if (k > 0)
                for (int i = 0; i < count; i++)
                    std::memcpy(sums[i], y + i * product.stride, num_rows * sizeof(float));
            add(tile, token_block(tokens, t, k), count, sums);
            store(product, row, t, count, sums);
        }
    }
}

// Tiles [first, last) of interleaved weights times all tokens. The first tokens meet all of these tiles before the next
// tokens do: a few tokens stay in the L1 cache, and the tiles in the L2 cache.
void multiply_interleaved(
    const Kernels &own, const Product &product, int first, int last, const QuantizedTokens &tokens) {
    bool is_configured = false;
    for (int t = 0; t < tokens.num_tokens; t += MAX_INTERLEAVED) {
        int count = std::min(MAX_INTERLEAVED, tokens.num_tokens - t);
        TokenBlock block = token_block(tokens, t, 0);
        if (own.configure)
            is_configured |= own.configure(count);
        for (int n = first, num; n < last; n += num) {
            alignas(64) RowSums sums[2 * MAX_INTERLEAVED];
            num = own.add_interleaved(product.weights, n * TILE_ROWS, last - n, block, count, sums);
            for (int tile = 0; tile < num; tile++)
                store(product, (n + tile) * TILE_ROWS, t, count, sums + tile * MAX_INTERLEAVED);
        }
    }
    if (is_configured)
        own.release();
}

void multiply_tiles(const Product &product, int first, int last, const QuantizedTokens &tokens) {
    const QuantizedMatrix &w = product.weights;
    const Kernels &own = *kernels;  // the same from start to end, also if `use` chooses others meanwhile
    if (w.is_interleaved && own.add_interleaved)
        return multiply_interleaved(own, product, first, last, tokens);
    for (int row = first * TILE_ROWS; row < last * TILE_ROWS; row += TILE_ROWS)
        if (w.elements == Elements::e4m3)
            multiply_tile<FloatTile>(product, row, tokens, MAX_FLOATS, own.fill_floats, own.add_floats);
        else
            multiply_tile<Tile>(product, row, tokens, MAX_SIZE, w.is_interleaved ? PORTABLE.fill : own.fill, own.add);
}

int num_tiles(const Product &product) { return (product.weights.num_rows + TILE_ROWS - 1) / TILE_ROWS; }

}  // namespace

size_t token_bytes(int num_tokens, int size) {
    size_t num_codes = static_cast<size_t>(num_tokens) * size;
    return 2 * num_codes + 2 * sizeof(float) * (num_codes / BLOCK) + sizeof(float) * (num_codes / HALF);
}

QuantizedTokens tokens_in(void *memory, int num_tokens, int size) {
    ptrdiff_t num_blocks = static_cast<ptrdiff_t>(num_tokens) * (size / BLOCK);
    auto *codes = static_cast<int8_t *>(memory);
    auto *scales = reinterpret_cast<float *>(codes + 2 * static_cast<ptrdiff_t>(num_tokens) * size);
    return {num_tokens, size, codes, scales, scales + num_blocks, scales + 2 * num_blocks};
}

void quantize_token(const float *x, const QuantizedTokens &tokens, int number) {
    kernels->quantize(x, tokens.size / BLOCK, tokens.part(number, 1));
}

QuantizedTokens quantize(const float *x, int num_tokens, int size, ptrdiff_t stride, void *memory) {
    QuantizedTokens tokens = tokens_in(memory, num_tokens, size);
    for_tokens(num_tokens, [&](int t) { quantize_token(x + t * stride, tokens, t); });
    return tokens;
}

void multiply(const Product *products, int num_products, const QuantizedTokens &tokens) {
    int total = 0;
    long work = 0;
    for (int i = 0; i < num_products; i++) {
        total += num_tiles(products[i]);
        work += static_cast<long>(products[i].weights.num_rows) * tokens.size;
    }
    work *= std::max(1, tokens.num_tokens / FREE_TOKENS);
    long wanted = std::max<long>(CHUNKS_PER_THREAD * num_threads(), work / MAX_CHUNK);
    int num_chunks = work < MIN_SHARED ? 1 : static_cast<int>(std::min<long>(total, wanted));
    parallel(num_chunks, [&](int chunk) {
        int first = static_cast<int>(static_cast<long>(total) * chunk / num_chunks);
        int last = static_cast<int>(static_cast<long>(total) * (chunk + 1) / num_chunks);
        for (int i = 0, before = 0; i < num_products; before += num_tiles(products[i++])) {
            int end = std::min(last - before, num_tiles(products[i]));
            multiply_tiles(products[i], std::max(first - before, 0), end, tokens);
        }
    });
}

void dequantize_row(const QuantizedMatrix &w, int row, float *out) {
    for (int k = 0; k < w.size; k++) {
        ptrdiff_t group = group_of(w, row, k / w.group_size);
        float scale = load(w.scales, w.type, group);
        int code = code_of(w, row, k);
        switch (w.elements) {
        case Elements::e2m1: out[k] = scale * (0.5f * static_cast<float>(E2M1_CODES[code] - E2M1_MIDDLE)); break;
        case Elements::e4m3: out[k] = scale * from_e4m3(static_cast<uint8_t>(code)); break;
        default:
            out[k] = w.biases ? scale * static_cast<float>(code) + load(w.biases, w.type, group)
                              : scale * (static_cast<float>(code) - middle(w));
        }
    }
}

const char *instructions() { return kernels->name; }

bool interleaves() { return kernels->add_interleaved; }

bool use(const char *wanted) {
    const Kernels *found = find_kernels(wanted);
    if (found)
        kernels = found;
    return found != nullptr;
}

}  // namespace outrider
