/* y = x @ w^T of sgemm.c for one instruction set. sgemm.c includes this file once for each.

   sgemm.c defines NAME(x), TARGET, LANES, VEC with its operations, TOKENS and CASES before. A tile is ROWS rows of
   the weights by up to TOKENS tokens. Every sum has one accumulator, which adds the elements in order, LANES at a
   time. The lanes are added in a fixed order. So a sum is bit-identical whatever tile it belongs to. */

#define EACH(i, count) _Pragma("GCC unroll 8") for (int i = 0; i < (count); i++)

/* Computes one tile and prefetches two later ones: ROWS rows from `ahead` on from memory into the L2 cache, one line
   of each row in every `every` iterations; and the next tile, unless `near` is NULL, from L2 into L1. */
static inline __attribute__((always_inline, target(TARGET))) void NAME(tile)(
    const int tokens, const float *x, size_t ldx, const float *const w[ROWS], size_t ldw, const float *ahead,
    int every, const float *near, int size, int adds, float *y, size_t ldy, int rows)
{
    VEC sum[TOKENS][ROWS], token[TOKENS];
    EACH(t, tokens)
        EACH(r, ROWS) sum[t][r] = ZERO();
    int k = 0, wait = 1;
    for (; k + LANES <= size; k += LANES) {
        EACH(t, tokens) token[t] = LOAD(x + t * ldx + k);
        if (--wait == 0) {
            wait = every;
            EACH(r, ROWS) __builtin_prefetch(ahead + r * ldw, 0, 2);
            ahead += LINE;
        }
        if (near && k % LINE == 0)
            EACH(r, ROWS) __builtin_prefetch(near + r * ldw + k, 0, 3);
        EACH(r, ROWS) {
            VEC row = LOAD(w[r] + k);
            EACH(t, tokens) sum[t][r] = FMA(token[t], row, sum[t][r]);
        }
    }
    if (k < size) {
        MASK rest = FIRST(size - k);
        EACH(t, tokens) token[t] = LOAD_FIRST(x + t * ldx + k, rest);
        EACH(r, ROWS) {
            VEC row = LOAD_FIRST(w[r] + k, rest);
            EACH(t, tokens) sum[t][r] = FMA(token[t], row, sum[t][r]);
        }
    }
    EACH(t, tokens) {
        __m128 sums = NAME(sums)(sum[t]);
        float *out = y + t * ldy;
        if (rows == ROWS) {
            _mm_storeu_ps(out, adds ? _mm_add_ps(_mm_loadu_ps(out), sums) : sums);
        } else {
            float each[ROWS];
            _mm_storeu_ps(each, sums);
            for (int r = 0; r < rows; r++)
                out[r] = adds ? out[r] + each[r] : each[r];
        }
    }
}

/* Rows [first, last) of the weights times tokens [begin, end), over elements [k, k + size). The rows that are needed
   after these begin at `next`. */
static __attribute__((noinline, target(TARGET))) void NAME(block)(
    const Matmul *p, int first, int last, int begin, int end, int k, int size, const float *next)
{
    int tokens = end - begin, passes = (tokens + TOKENS - 1) / TOKENS;
    for (int n = first; n < last; n += ROWS) {
        int rows = min(last - n, ROWS);
        const float *w[ROWS];
        for (int r = 0; r < ROWS; r++)
            w[r] = p->w + (n + min(r, rows - 1)) * p->ldw + k;
        const float *near = later_row(p, w[0], n, ROWS, last, next);
        const float *far = later_row(p, w[0], n, ROWS_AHEAD, last, next);
        for (int pass = 0; pass < passes; pass++) {
            int t = begin + tokens * pass / passes, then = begin + tokens * (pass + 1) / passes;
            const float *ahead = far + size * pass / passes / LINE * LINE;
            int is_last = pass > 0 && then == end; /* with a single pass the memory is the limit anyway */
            switch (then - t) {
#define CASE(T) \
    case T: \
        NAME(tile)(T, p->x + t * p->ldx + k, p->ldx, w, p->ldw, ahead, passes * LINE / LANES, \
                   is_last ? near : NULL, size, p->adds || k > 0, p->y + t * p->ldy + n, p->ldy, rows); \
        break;
                CASES
#undef CASE
            }
        }
    }
}
