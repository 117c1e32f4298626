/* The inner loops of product.c, for one instruction set; included once for each.

   Defined before: NAME(x), TARGET, LANES, VEC with its operations, TOKENS and CASES. A tile is ROWS rows of the
   weights by up to TOKENS tokens. Every sum has one accumulator, which takes the elements in order, LANES at a
   time, and the lanes are added in one order: so a sum is the same to the bit whatever tile it stands in. */

#define EACH(i, count) _Pragma("GCC unroll 8") for (int i = 0; i < (count); i++)

/* `lines`: how many of the rows from `ahead` on to call from memory meanwhile, for a later tile. */
static inline __attribute__((always_inline, target(TARGET))) void NAME(tile)(
    const int tokens, const float *x, size_t ldx, const float *const w[ROWS], size_t ldw, const float *ahead,
    int lines, int size, int adds, float *y, size_t ldy, int rows)
{
    VEC sum[TOKENS][ROWS], token[TOKENS];
    EACH(t, tokens)
        EACH(r, ROWS) sum[t][r] = ZERO();
    int k = 0;
    for (; k + LANES <= size; k += LANES) {
        EACH(t, tokens) token[t] = LOAD(x + t * ldx + k);
        if (lines) {
            __builtin_prefetch(ahead + k, 0, 2);
            if (lines > 1) {
                __builtin_prefetch(ahead + ldw + k, 0, 2);
                if (lines > 2) {
                    __builtin_prefetch(ahead + 2 * ldw + k, 0, 2);
                    __builtin_prefetch(ahead + 3 * ldw + k, 0, 2);
                }
            }
        }
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

/* Rows [first, last) of the weights with tokens [begin, end), along elements [k, k + size). */
static __attribute__((noinline, target(TARGET))) void NAME(block)(
    const Product *p, int first, int last, int begin, int end, int k, int size)
{
    int tokens = end - begin, passes = (tokens + TOKENS - 1) / TOKENS;
    int lines = passes == 1 ? ROWS : passes <= ROWS ? (ROWS + passes - 1) / passes : 1;
    for (int n = first; n < last; n += ROWS) {
        int rows = least(last - n, ROWS);
        const float *w[ROWS];
        for (int r = 0; r < ROWS; r++)
            w[r] = p->w + (n + least(r, rows - 1)) * p->ldw + k;
        for (int pass = 0; pass < passes; pass++) {
            int t = begin + tokens * pass / passes, next = begin + tokens * (pass + 1) / passes;
            const float *ahead = w[0] + (size_t)(ROWS_AHEAD + pass * lines) * p->ldw;
            int calls = pass * lines < ROWS ? lines : 0;
            switch (next - t) {
#define CASE(T) \
    case T: \
        NAME(tile)(T, p->x + t * p->ldx + k, p->ldx, w, p->ldw, ahead, calls, size, p->adds || k > 0, \
                   p->y + t * p->ldy + n, p->ldy, rows); \
        break;
                CASES
#undef CASE
            }
        }
    }
}

#undef EACH
#undef NAME
#undef TARGET
#undef TOKENS
#undef CASES
#undef LANES
#undef VEC
#undef ZERO
#undef LOAD
#undef FMA
#undef MASK
#undef FIRST
#undef LOAD_FIRST
