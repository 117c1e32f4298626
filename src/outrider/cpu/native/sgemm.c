/* Matmuls in front of a BLAS. A token's results are bit-identical whatever tokens are beside it and whatever the
   number of threads. `cblas_sgemm` computes two forms and passes all other calls on to the BLAS that it was given.

   y = x @ w^T for few tokens (sgemm_tile.h). A BLAS would copy (pack) the weights before it multiplies them. Here
   the weights are read from memory once, row by row, in the order in which they are stored. Each thread takes the
   next chunk of rows that no thread has taken.

   y = x @ v for any number of tokens (sgemm_columns.h): attention weights times values. Its sums run over cells. A
   BLAS cuts a long sum at places that depend on its length, and with some kernels (OpenBLAS's for AVX2) also on the
   number of tokens. Here a sum is cut every MAX_SUM cells, counted from the first. So a row with more cells, of which
   the last have no weight, gives the same to the bit. */

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
#include <time.h>
#include <unistd.h>

#include "late_helper.h"

#define EXPORT __attribute__((visibility("default")))

enum {
    ROWS = 4,               /* rows of the weights in a tile */
    ROWS_AHEAD = 2 * ROWS,  /* rows after the tile's first that are prefetched from memory meanwhile */
    MAX_SIZE = 640,         /* elements of a row in one block: tile and tokens stay in the L1 and L2 caches */
    MAX_BLOCK = 96 << 10,   /* elements of x in one block */
    MAX_CHUNK = 32 << 10,   /* elements of the weights in a chunk, the unit of work of a thread */
    CHUNKS_PER_THREAD = 4,  /* chunks are smaller if a thread would get fewer than this */
    FREE_TOKENS = 8,        /* tokens that are computed in the time that the weights take to arrive */
    MIN_SHARED = 100 << 10, /* elements of the weights from which several threads pay, for up to FREE_TOKENS */
    VECTORS = 4,            /* vectors of columns in a tile of x @ v */
    MAX_SUM = 256,          /* cells whose products are added in a register, before the sum is added to y */
    CHUNK_TOKENS = 192,     /* tokens of x @ v in a chunk: MAX_SUM elements of each stay in the L2 cache */
    TOKENS_STEP = 48,       /* smaller chunks, one for each thread or more, have a multiple of this many tokens */
    CHUNK_COLUMNS = 512,    /* columns of x @ v in a chunk */
    MIN_PRODUCTS = 1 << 20, /* multiplications of x @ v from which several threads pay */
    MAX_THREADS = 64,
    LINE = 16,              /* elements of a cache line */
    SPIN_CYCLES = 32 << 10, /* an idle thread sleeps after this many: 400,000 made a step 10 % slower */
};

typedef struct Matmul {
    int num_tokens, num_outputs, size;
    size_t ldx, ldw, ldy;
    const float *x, *w; /* [num_tokens, size]; w [num_outputs, size], or v [size, num_outputs] */
    float *y;           /* [num_tokens, num_outputs] */
    int adds;           /* 1: add the result to y; 0: overwrite y */
    void (*compute_chunk)(const struct Matmul *, int chunk);
    int outputs_per_chunk, tokens_per_chunk, num_chunks, num_threads;
} Matmul;

static inline int min(int a, int b) { return a < b ? a : b; }
static inline int max(int a, int b) { return a > b ? a : b; }
static inline int ceil_div(int a, int b) { return (a + b - 1) / b; }

/* The address of the row `distance` rows after row n, which is at `row`. Past `last` the rows go on at `next`. */
static inline const float *later_row(
    const Matmul *p, const float *row, int n, int distance, int last, const float *next)
{
    return n + distance < last ? row + distance * p->ldw : next + (n + distance - last) * p->ldw;
}

/* AVX-512: 24 of 32 registers are accumulators. */

#define NAME(x) avx512_##x
#define TARGET "avx512f,avx512dq"
#define TOKENS 6
#define UNPACKED 96 /* up to so many tokens x @ v reads the cells where they are */
#define CASES CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6)
#define LANES 16
#define VEC __m512
#define ZERO _mm512_setzero_ps
#define LOAD _mm512_loadu_ps
#define STORE _mm512_storeu_ps
#define SET _mm512_set1_ps
#define ADD _mm512_add_ps
#define FMA _mm512_fmadd_ps
#define MASK __mmask16
#define FIRST(count) ((__mmask16)((1u << (count)) - 1))
#define LOAD_FIRST(from, mask) _mm512_maskz_loadu_ps(mask, from)
#define STORE_FIRST(to, mask, x) _mm512_mask_storeu_ps(to, mask, x)

static inline __attribute__((always_inline, target(TARGET))) __m128 avx512_sums(const __m512 v[ROWS])
{
    __m512 ab = _mm512_add_ps(_mm512_unpacklo_ps(v[0], v[1]), _mm512_unpackhi_ps(v[0], v[1]));
    __m512 cd = _mm512_add_ps(_mm512_unpacklo_ps(v[2], v[3]), _mm512_unpackhi_ps(v[2], v[3]));
    __m512 abcd = _mm512_add_ps(_mm512_shuffle_ps(ab, cd, 0x44), _mm512_shuffle_ps(ab, cd, 0xee));
    __m256 half = _mm256_add_ps(_mm512_castps512_ps256(abcd), _mm512_extractf32x8_ps(abcd, 1));
    return _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1));
}

#include "sgemm_tile.h"
#include "sgemm_columns.h"
#include "sgemm_undefine.h"

/* AVX2: 12 of 16 registers are accumulators. */

#define NAME(x) avx2_##x
#define TARGET "avx2,fma"
#define TOKENS 3
#define UNPACKED 24
#define CASES CASE(1) CASE(2) CASE(3)
#define LANES 8
#define VEC __m256
#define ZERO _mm256_setzero_ps
#define LOAD _mm256_loadu_ps
#define STORE _mm256_storeu_ps
#define SET _mm256_set1_ps
#define ADD _mm256_add_ps
#define FMA _mm256_fmadd_ps
#define MASK __m256i
#define FIRST(count) _mm256_cmpgt_epi32(_mm256_set1_epi32(count), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7))
#define LOAD_FIRST(from, mask) _mm256_maskload_ps(from, mask)
#define STORE_FIRST(to, mask, x) _mm256_maskstore_ps(to, mask, x)

static inline __attribute__((always_inline, target(TARGET))) __m128 avx2_sums(const __m256 v[ROWS])
{
    __m256 ab = _mm256_add_ps(_mm256_unpacklo_ps(v[0], v[1]), _mm256_unpackhi_ps(v[0], v[1]));
    __m256 cd = _mm256_add_ps(_mm256_unpacklo_ps(v[2], v[3]), _mm256_unpackhi_ps(v[2], v[3]));
    __m256 abcd = _mm256_add_ps(_mm256_shuffle_ps(ab, cd, 0x44), _mm256_shuffle_ps(ab, cd, 0xee));
    return _mm_add_ps(_mm256_castps256_ps128(abcd), _mm256_extractf128_ps(abcd, 1));
}

#include "sgemm_tile.h"
#include "sgemm_columns.h"
#include "sgemm_undefine.h"

static void (*compute_block)(const Matmul *, int, int, int, int, int, int, const float *);
static void (*compute_columns)(const Matmul *, int, int, int, int);

/* A chunk of y = x @ w^T: some rows of the weights, times all tokens. */
static void compute_rows_chunk(const Matmul *p, int chunk)
{
    int first = chunk * p->outputs_per_chunk, last = min(first + p->outputs_per_chunk, p->num_outputs);
    int size = ceil_div(ceil_div(p->size, ceil_div(p->size, MAX_SIZE)), 16) * 16; /* depends on p->size alone */
    int tokens = min(p->num_tokens, MAX_BLOCK / size);
    /* The first row of the chunk that this thread will probably take next. */
    int then = min(chunk + p->num_threads, p->num_chunks - 1) * p->outputs_per_chunk;
    for (int t = 0; t < p->num_tokens; t += tokens)
        for (int k = 0; k < p->size; k += size) {
            const float *next = p->w + (t + tokens < p->num_tokens ? first : then) * p->ldw;
            if (k + size < p->size)
                next = p->w + first * p->ldw + k + size;
            compute_block(p, first, last, t, min(t + tokens, p->num_tokens), k, min(size, p->size - k), next);
        }
}

/* A chunk of y = x @ v: some tokens and some columns. */
static void compute_columns_chunk(const Matmul *p, int chunk)
{
    int chunks_of_tokens = ceil_div(p->num_tokens, p->tokens_per_chunk);
    int begin = chunk % chunks_of_tokens * p->tokens_per_chunk;
    int first = chunk / chunks_of_tokens * p->outputs_per_chunk;
    compute_columns(p, begin, min(begin + p->tokens_per_chunk, p->num_tokens), first,
                    min(first + p->outputs_per_chunk, p->num_outputs));
}

/* Threads. One caller at a time shares its matmul with helper threads. The caller takes chunks like the helpers do,
   and waits only for chunks that a helper has started. So a helper that gets no core costs nothing. A helper
   inherits the rounding and flushing modes (MXCSR) of the thread that started it; all callers are assumed to use
   the same modes. */

static struct {
    _Alignas(64) atomic_int num_left; /* chunks that no thread has taken */
    _Alignas(64) atomic_int num_done;
    _Alignas(64) atomic_int num_helpers; /* how many threads may help */
    atomic_flag is_shared;
    int num_started;
    Matmul matmul; /* does not change until all taken chunks are done */
    struct {
        _Alignas(64) atomic_int is_asleep;
        atomic_int thread_id;
        atomic_int has_run; /* since it was woken */
        long late_from;     /* by then it should have run */
    } helpers[MAX_THREADS];
} pool = {.is_shared = ATOMIC_FLAG_INIT};

static int help(void)
{
    int left = atomic_load(&pool.num_left);
    while (left > 0 && !atomic_compare_exchange_weak(&pool.num_left, &left, left - 1))
        ;
    if (left <= 0)
        return 0;
    pool.matmul.compute_chunk(&pool.matmul, pool.matmul.num_chunks - left);
    atomic_fetch_add(&pool.num_done, 1);
    return 1;
}

static void *helper(void *number)
{
    int mine = (int)(ptrdiff_t)number;
    atomic_int *is_asleep = &pool.helpers[mine].is_asleep;
    pthread_setname_np(pthread_self(), "outrider-sgemm");
    atomic_store(&pool.helpers[mine].thread_id, (int)syscall(SYS_gettid));
    for (;;) {
        atomic_store(&pool.helpers[mine].has_run, 1);
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
    pthread_sigmask(SIG_SETMASK, &all, &before); /* signals go to the program's own threads */
    pthread_attr_init(&detached);
    pthread_attr_setdetachstate(&detached, PTHREAD_CREATE_DETACHED);
    while (pool.num_started < count) {
        atomic_store(&pool.helpers[pool.num_started].is_asleep, 0);
        atomic_store(&pool.helpers[pool.num_started].has_run, 1);
        if (pthread_create(&thread, &detached, helper, (void *)(ptrdiff_t)pool.num_started)) {
            atomic_store(&pool.num_helpers, pool.num_started); /* start no more threads until a new number is set */
            break;
        }
        pool.num_started++;
    }
    pthread_attr_destroy(&detached);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
}

static long now_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1000000000L + now.tv_nsec;
}

static void wake(int helper)
{
    atomic_int *is_asleep = &pool.helpers[helper].is_asleep;
    if (atomic_load(is_asleep)) {
        atomic_store(&pool.helpers[helper].has_run, 0);
        pool.helpers[helper].late_from = now_ns() + LATE_NS;
        if (atomic_exchange(is_asleep, 0))
            syscall(SYS_futex, is_asleep, FUTEX_WAKE_PRIVATE, 1, NULL, NULL, 0);
        else
            atomic_store(&pool.helpers[helper].has_run, 1); /* it has seen the work before it slept */
    } else if (!atomic_load(&pool.helpers[helper].has_run) && now_ns() > pool.helpers[helper].late_from) {
        send_to_other_cores(atomic_load(&pool.helpers[helper].thread_id));
        pool.helpers[helper].late_from = now_ns() + LATE_AGAIN_NS;
    }
}

static void compute_with_helpers(const Matmul *p, int num_helpers)
{
    if (pool.num_started < num_helpers)
        start_helpers(num_helpers);
    pool.matmul = *p;
    atomic_store(&pool.num_done, 0);
    atomic_store(&pool.num_left, p->num_chunks);
    for (int i = 0; i < min(num_helpers, pool.num_started); i++)
        wake(i);
    while (help())
        ;
    for (int spins = 0; atomic_load(&pool.num_done) < p->num_chunks; spins++)
        if (spins < 1000)
            _mm_pause();
        else
            sched_yield(); /* the helper may be waiting for this core */
}

static void compute(Matmul *p, int is_large)
{
    int num_helpers = atomic_load(&pool.num_helpers);
    p->num_threads = 1;
    if (num_helpers > 0 && is_large && p->num_chunks > 1 && !atomic_flag_test_and_set(&pool.is_shared)) {
        p->num_threads += num_helpers;
        compute_with_helpers(p, num_helpers);
        atomic_flag_clear(&pool.is_shared);
        return;
    }
    for (int chunk = 0; chunk < p->num_chunks; chunk++)
        p->compute_chunk(p, chunk);
}

/* y = x @ w^T */
static void compute_rows(Matmul *p)
{
    int chunks = CHUNKS_PER_THREAD * (atomic_load(&pool.num_helpers) + 1);
    long elements = (long)p->num_outputs * p->size;
    int rows = min(ceil_div(MAX_CHUNK, p->size), ceil_div(p->num_outputs, chunks));
    p->compute_chunk = compute_rows_chunk;
    p->outputs_per_chunk = ceil_div(rows, ROWS) * ROWS;
    p->num_chunks = ceil_div(p->num_outputs, p->outputs_per_chunk);
    compute(p, elements * max(1, p->num_tokens / FREE_TOKENS) >= MIN_SHARED);
}

/* y = x @ v */
static void compute_values(Matmul *p)
{
    int num_helpers = atomic_load(&pool.num_helpers);
    int is_large = (double)p->num_tokens * p->num_outputs * p->size >= MIN_PRODUCTS;
    int chunks = num_helpers > 0 && is_large ? CHUNKS_PER_THREAD * (num_helpers + 1) : 1;
    int tokens = ceil_div(ceil_div(p->num_tokens, chunks), TOKENS_STEP) * TOKENS_STEP;
    p->compute_chunk = compute_columns_chunk;
    p->tokens_per_chunk = min(tokens, CHUNK_TOKENS);
    p->outputs_per_chunk = min(p->num_outputs, CHUNK_COLUMNS);
    p->num_chunks = ceil_div(p->num_tokens, p->tokens_per_chunk) * ceil_div(p->num_outputs, p->outputs_per_chunk);
    compute(p, is_large);
}

static void after_fork(void) /* the child process has no helpers, and no matmul is shared */
{
    pool.num_started = 0;
    atomic_store(&pool.num_left, 0);
    atomic_flag_clear(&pool.is_shared);
}

/* Exported functions. */

typedef void Sgemm(int order, int x_form, int w_form, int num_tokens, int num_outputs, int size, float alpha,
                   const float *x, int ldx, const float *w, int ldw, float beta, float *y, int ldy);

enum { ROW_MAJOR = 101, NO_TRANSPOSE = 111, TRANSPOSE = 112 };

static Sgemm *fallback_sgemm;
static int max_tokens;

/* `wanted`: "avx512", "avx2", or "" for the best that the CPU has. Returns the choice; NULL: the CPU has neither. */
EXPORT const char *outrider_sgemm_start(const char *wanted, Sgemm *other, int num_tokens)
{
    static atomic_flag is_watching_forks = ATOMIC_FLAG_INIT;
    if (!atomic_flag_test_and_set(&is_watching_forks) && pthread_atfork(NULL, NULL, after_fork))
        return NULL;
    fallback_sgemm = other;
    max_tokens = num_tokens;
    __builtin_cpu_init();
    if (strcmp(wanted, "avx2") && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq")) {
        compute_block = avx512_block;
        compute_columns = avx512_columns;
        return "avx512";
    }
    if (strcmp(wanted, "avx512") && __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) {
        compute_block = avx2_block;
        compute_columns = avx2_columns;
        return "avx2";
    }
    return NULL;
}

EXPORT void outrider_sgemm_set_num_threads(int count)
{
    atomic_store(&pool.num_helpers, min(max(count, 1), MAX_THREADS) - 1);
}

EXPORT void cblas_sgemm(int order, int x_form, int w_form, int num_tokens, int num_outputs, int size, float alpha,
                        const float *x, int ldx, const float *w, int ldw, float beta, float *y, int ldy)
{
    int has_few_tokens = num_tokens <= max_tokens || w_form == NO_TRANSPOSE;
    if (order != ROW_MAJOR || x_form != NO_TRANSPOSE || (w_form != TRANSPOSE && w_form != NO_TRANSPOSE) ||
        alpha != 1.0f || (beta != 0.0f && beta != 1.0f) || num_tokens < 1 || !has_few_tokens || num_outputs < 1 ||
        size < 1) {
        fallback_sgemm(order, x_form, w_form, num_tokens, num_outputs, size, alpha, x, ldx, w, ldw, beta, y, ldy);
        return;
    }
    Matmul matmul = {.num_tokens = num_tokens, .num_outputs = num_outputs, .size = size,
                     .ldx = ldx, .ldw = ldw, .ldy = ldy, .x = x, .w = w, .y = y, .adds = beta == 1.0f};
    if (w_form == TRANSPOSE)
        compute_rows(&matmul);
    else
        compute_values(&matmul);
}
