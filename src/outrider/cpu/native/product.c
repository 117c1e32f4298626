/* y = x @ w^T for few tokens, in place of a BLAS's, which copies the weights before it multiplies them.

   Weights are read from memory once, in rows, as they lie there; each thread takes the next chunk of rows that
   nobody has taken. A token's results are the same to the bit whatever tokens are beside it and whatever the
   number of threads. `cblas_sgemm` forwards what is not such a product to the BLAS it was given. */

#define _GNU_SOURCE
#include <immintrin.h>
#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <stddef.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

#define EXPORT __attribute__((visibility("default")))

enum {
    ROWS = 4,                 /* of the weights in a tile */
    ROWS_AHEAD = 2 * ROWS,    /* what is called from memory while a tile is computed */
    MOST_SIZE = 640,          /* elements of a row in one go: tile and tokens stay in the nearest caches */
    MOST_BLOCK = 96 << 10,    /* elements of the tokens in one go */
    MOST_CHUNK = 32 << 10,    /* elements of the weights that a thread takes at a time, */
    CHUNKS_EACH = 4,          /* or as many as give each thread some */
    TOKENS_FREE = 8,          /* computed in the time that the weights take to arrive */
    LEAST_SHARED = 100 << 10, /* elements of the weights, for that many tokens, that are worth a second thread */
    MOST_THREADS = 64,
    LINE = 16,                /* elements that come from memory together */
    SPIN_CYCLES = 32 << 10,   /* a thread without work sleeps after that; the program needs its core */
};

typedef struct {
    int num_tokens, num_rows, size;
    size_t ldx, ldw, ldy;
    const float *x, *w; /* [num_tokens, size], [num_rows, size] */
    float *y;           /* [num_tokens, num_rows] */
    int adds;           /* to what y holds */
    int rows_each, num_chunks, num_threads;
} Product;

static inline int least(int a, int b) { return a < b ? a : b; }
static inline int most(int a, int b) { return a > b ? a : b; }
static inline int ceil_div(int a, int b) { return (a + b - 1) / b; }

/* Where the row `distance` after row n is, which is at `row`; past the last one, of those from `next` on. */
static inline const float *later_row(
    const Product *p, const float *row, int n, int distance, int last, const float *next)
{
    return n + distance < last ? row + distance * p->ldw : next + (n + distance - last) * p->ldw;
}

/* AVX-512: 24 of 32 registers are accumulators. */

#define NAME(x) avx512_##x
#define TARGET "avx512f,avx512dq"
#define TOKENS 6
#define CASES CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6)
#define LANES 16
#define VEC __m512
#define ZERO _mm512_setzero_ps
#define LOAD _mm512_loadu_ps
#define FMA _mm512_fmadd_ps
#define MASK __mmask16
#define FIRST(count) ((__mmask16)((1u << (count)) - 1))
#define LOAD_FIRST(from, mask) _mm512_maskz_loadu_ps(mask, from)

static inline __attribute__((always_inline, target(TARGET))) __m128 avx512_sums(const __m512 v[ROWS])
{
    __m512 ab = _mm512_add_ps(_mm512_unpacklo_ps(v[0], v[1]), _mm512_unpackhi_ps(v[0], v[1]));
    __m512 cd = _mm512_add_ps(_mm512_unpacklo_ps(v[2], v[3]), _mm512_unpackhi_ps(v[2], v[3]));
    __m512 abcd = _mm512_add_ps(_mm512_shuffle_ps(ab, cd, 0x44), _mm512_shuffle_ps(ab, cd, 0xee));
    __m256 half = _mm256_add_ps(_mm512_castps512_ps256(abcd), _mm512_extractf32x8_ps(abcd, 1));
    return _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1));
}

#include "product_tile.h"

/* AVX2: 12 of 16 registers are accumulators. */

#define NAME(x) avx2_##x
#define TARGET "avx2,fma"
#define TOKENS 3
#define CASES CASE(1) CASE(2) CASE(3)
#define LANES 8
#define VEC __m256
#define ZERO _mm256_setzero_ps
#define LOAD _mm256_loadu_ps
#define FMA _mm256_fmadd_ps
#define MASK __m256i
#define FIRST(count) _mm256_cmpgt_epi32(_mm256_set1_epi32(count), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7))
#define LOAD_FIRST(from, mask) _mm256_maskload_ps(from, mask)

static inline __attribute__((always_inline, target(TARGET))) __m128 avx2_sums(const __m256 v[ROWS])
{
    __m256 ab = _mm256_add_ps(_mm256_unpacklo_ps(v[0], v[1]), _mm256_unpackhi_ps(v[0], v[1]));
    __m256 cd = _mm256_add_ps(_mm256_unpacklo_ps(v[2], v[3]), _mm256_unpackhi_ps(v[2], v[3]));
    __m256 abcd = _mm256_add_ps(_mm256_shuffle_ps(ab, cd, 0x44), _mm256_shuffle_ps(ab, cd, 0xee));
    return _mm_add_ps(_mm256_castps256_ps128(abcd), _mm256_extractf128_ps(abcd, 1));
}

#include "product_tile.h"

static void (*compute_block)(const Product *, int, int, int, int, int, int, const float *);

static void compute_chunk(const Product *p, int chunk)
{
    int first = chunk * p->rows_each, last = least(first + p->rows_each, p->num_rows);
    int size = ceil_div(ceil_div(p->size, ceil_div(p->size, MOST_SIZE)), 16) * 16; /* by p->size alone */
    int tokens = least(p->num_tokens, MOST_BLOCK / size);
    int then = least(chunk + p->num_threads, p->num_chunks - 1) * p->rows_each; /* most likely this thread's */
    for (int t = 0; t < p->num_tokens; t += tokens)
        for (int k = 0; k < p->size; k += size) {
            const float *next = p->w + (t + tokens < p->num_tokens ? first : then) * p->ldw;
            if (k + size < p->size)
                next = p->w + first * p->ldw + k + size;
            compute_block(p, first, last, t, least(t + tokens, p->num_tokens), k, least(size, p->size - k), next);
        }
}

/* Threads. One caller at a time shares its product: it takes chunks like the helpers do and waits only for those
   that a helper has begun, so a helper that gets no core costs nothing. A helper rounds and flushes (MXCSR) like
   the thread that started it, and all callers are taken to do so alike. */

static struct {
    _Alignas(64) atomic_int num_left; /* chunks that nobody has taken */
    _Alignas(64) atomic_int num_done;
    _Alignas(64) atomic_int num_helpers; /* how many may help */
    atomic_flag is_shared;
    int num_started;
    Product product; /* stays as it is while a taken chunk is not done */
    struct {
        _Alignas(64) atomic_int is_asleep;
    } helpers[MOST_THREADS];
} pool = {.is_shared = ATOMIC_FLAG_INIT};

static int help(void)
{
    int left = atomic_load(&pool.num_left);
    while (left > 0 && !atomic_compare_exchange_weak(&pool.num_left, &left, left - 1))
        ;
    if (left <= 0)
        return 0;
    compute_chunk(&pool.product, pool.product.num_chunks - left);
    atomic_fetch_add(&pool.num_done, 1);
    return 1;
}

static void *helper(void *number)
{
    int mine = (int)(ptrdiff_t)number;
    atomic_int *is_asleep = &pool.helpers[mine].is_asleep;
    for (;;) {
        for (unsigned long long since = __rdtsc(); __rdtsc() - since < SPIN_CYCLES; _mm_pause())
            while (mine < atomic_load(&pool.num_helpers) && help())
                since = __rdtsc();
        atomic_store(is_asleep, 1);
        if (mine < atomic_load(&pool.num_helpers) && atomic_load(&pool.num_left) > 0)
            atomic_store(is_asleep, 0);
        while (atomic_load(is_asleep))
            syscall(SYS_futex, is_asleep, FUTEX_WAIT_PRIVATE, 1, NULL, NULL, 0);
    }
    return NULL;
}

static void start_helpers(int count)
{
    sigset_t all, before;
    pthread_attr_t detached;
    pthread_t thread;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before); /* signals are for the program's own threads */
    pthread_attr_init(&detached);
    pthread_attr_setdetachstate(&detached, PTHREAD_CREATE_DETACHED);
    while (pool.num_started < count) {
        atomic_store(&pool.helpers[pool.num_started].is_asleep, 0);
        if (pthread_create(&thread, &detached, helper, (void *)(ptrdiff_t)pool.num_started)) {
            atomic_store(&pool.num_helpers, pool.num_started); /* no more are asked for until a number is set */
            break;
        }
        pool.num_started++;
    }
    pthread_attr_destroy(&detached);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
}

static void compute_together(const Product *p, int num_helpers)
{
    if (pool.num_started < num_helpers)
        start_helpers(num_helpers);
    pool.product = *p;
    atomic_store(&pool.num_done, 0);
    atomic_store(&pool.num_left, p->num_chunks);
    for (int i = 0; i < least(num_helpers, pool.num_started); i++)
        if (atomic_load(&pool.helpers[i].is_asleep) && atomic_exchange(&pool.helpers[i].is_asleep, 0))
            syscall(SYS_futex, &pool.helpers[i].is_asleep, FUTEX_WAKE_PRIVATE, 1, NULL, NULL, 0);
    while (help())
        ;
    for (int spins = 0; atomic_load(&pool.num_done) < p->num_chunks; spins++)
        if (spins < 1000)
            _mm_pause();
        else
            sched_yield(); /* the helper may be waiting for this very core */
}

static void compute(Product *p)
{
    int num_helpers = atomic_load(&pool.num_helpers);
    long elements = (long)p->num_rows * p->size;
    int is_large = elements * most(1, p->num_tokens / TOKENS_FREE) >= LEAST_SHARED;
    int rows = least(ceil_div(MOST_CHUNK, p->size), ceil_div(p->num_rows, CHUNKS_EACH * (num_helpers + 1)));
    p->rows_each = ceil_div(rows, ROWS) * ROWS;
    p->num_chunks = ceil_div(p->num_rows, p->rows_each);
    p->num_threads = 1;
    if (num_helpers > 0 && is_large && p->num_chunks > 1 && !atomic_flag_test_and_set(&pool.is_shared)) {
        p->num_threads += num_helpers;
        compute_together(p, num_helpers);
        atomic_flag_clear(&pool.is_shared);
        return;
    }
    for (int chunk = 0; chunk < p->num_chunks; chunk++)
        compute_chunk(p, chunk);
}

static void after_fork(void) /* the child has no helpers, and nobody shares a product */
{
    pool.num_started = 0;
    atomic_store(&pool.num_left, 0);
    atomic_flag_clear(&pool.is_shared);
}

/* What others see. */

typedef void Sgemm(int order, int x_form, int w_form, int num_tokens, int num_rows, int size, float alpha,
                   const float *x, int ldx, const float *w, int ldw, float beta, float *y, int ldy);

enum { ROW_MAJOR = 101, AS_IT_IS = 111, TRANSPOSED = 112 };

static Sgemm *other_sgemm;
static int most_tokens;

/* Choose the instructions: "avx512", "avx2", or "" for the best there are. Returns their name; NULL: none. */
EXPORT const char *outrider_product_start(const char *wanted, Sgemm *other, int num_tokens)
{
    static atomic_flag is_watching_forks = ATOMIC_FLAG_INIT;
    if (!atomic_flag_test_and_set(&is_watching_forks) && pthread_atfork(NULL, NULL, after_fork))
        return NULL;
    other_sgemm = other;
    most_tokens = num_tokens;
    __builtin_cpu_init();
    if (strcmp(wanted, "avx2") && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq")) {
        compute_block = avx512_block;
        return "avx512";
    }
    if (strcmp(wanted, "avx512") && __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) {
        compute_block = avx2_block;
        return "avx2";
    }
    return NULL;
}

EXPORT void outrider_product_set_num_threads(int count)
{
    atomic_store(&pool.num_helpers, least(most(count, 1), MOST_THREADS) - 1);
}

EXPORT void cblas_sgemm(int order, int x_form, int w_form, int num_tokens, int num_rows, int size, float alpha,
                        const float *x, int ldx, const float *w, int ldw, float beta, float *y, int ldy)
{
    if (order != ROW_MAJOR || x_form != AS_IT_IS || w_form != TRANSPOSED || alpha != 1.0f ||
        (beta != 0.0f && beta != 1.0f) || num_tokens < 1 || num_tokens > most_tokens || num_rows < 1 ||
        size < 1) {
        other_sgemm(order, x_form, w_form, num_tokens, num_rows, size, alpha, x, ldx, w, ldw, beta, y, ldy);
        return;
    }
    Product product = {.num_tokens = num_tokens, .num_rows = num_rows, .size = size,
                       .ldx = ldx, .ldw = ldw, .ldy = ldy, .x = x, .w = w, .y = y, .adds = beta == 1.0f};
    compute(&product);
}
