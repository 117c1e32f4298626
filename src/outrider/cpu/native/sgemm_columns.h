/* y = x @ v of sgemm.c for one instruction set. sgemm.c includes this file after sgemm_tile.h.

   A tile is up to TOKENS tokens by up to VECTORS vectors of columns, over up to MAX_SUM cells. Every sum has one
   accumulator, which adds the products in the order of the cells. So a sum is bit-identical whatever tile it belongs
   to. Cells without weight at the end add zero. */

#define WIDTH (VECTORS * LANES)

static inline __attribute__((always_inline, target(TARGET))) void NAME(columns_tile)(
    const int tokens, const int vectors, const float *x, size_t ldx, const float *v, size_t ldv, int size,
    int columns, int adds, float *y, size_t ldy)
{
    VEC sum[TOKENS][VECTORS], token[TOKENS];
    EACH(t, tokens)
        EACH(c, vectors) sum[t][c] = ZERO();
    for (int k = 0; k < size; k++, v += ldv) {
        EACH(t, tokens) token[t] = SET(x[t * ldx + k]);
        EACH(c, vectors) {
            VEC cell = LOAD(v + c * LANES);
            EACH(t, tokens) sum[t][c] = FMA(token[t], cell, sum[t][c]);
        }
    }
    EACH(t, tokens) {
        EACH(c, vectors) {
            float *out = y + t * ldy + c * LANES;
            if (columns >= (c + 1) * LANES) {
                STORE(out, adds ? ADD(LOAD(out), sum[t][c]) : sum[t][c]);
            } else {
                MASK rest = FIRST(columns - c * LANES);
                STORE_FIRST(out, rest, adds ? ADD(LOAD_FIRST(out, rest), sum[t][c]) : sum[t][c]);
            }
        }
    }
}

/* `columns` columns of y from n on, for tokens [begin, end), over cells [k, k + size). The cells are at `v`. */
static inline __attribute__((always_inline, target(TARGET))) void NAME(columns_strip)(
    const int vectors, const Matmul *p, int begin, int end, int n, int columns, int k, int size, const float *v,
    size_t ldv)
{
    int tokens = end - begin, passes = ceil_div(tokens, TOKENS);
    for (int pass = 0; pass < passes; pass++) {
        int t = begin + tokens * pass / passes, then = begin + tokens * (pass + 1) / passes;
        switch (then - t) {
#define CASE(T) \
    case T: \
        NAME(columns_tile)(T, vectors, p->x + t * p->ldx + k, p->ldx, v, ldv, size, columns, p->adds || k > 0, \
                           p->y + t * p->ldy + n, p->ldy); \
        break;
            CASES
#undef CASE
        }
    }
}

/* Copies `size` rows of `columns` columns, with zeros up to full vectors. */
static inline __attribute__((always_inline, target(TARGET))) void NAME(pack)(
    const float *v, size_t ldv, int size, int columns, float *packed)
{
    int full = columns / LANES * LANES;
    MASK rest = FIRST(columns - full);
    for (int k = 0; k < size; k++, v += ldv) {
        for (int c = 0; c < full; c += LANES, packed += LANES)
            STORE(packed, LOAD(v + c));
        if (full < columns) {
            STORE(packed, LOAD_FIRST(v + full, rest));
            packed += LANES;
        }
    }
}

/* Columns [first, last) of y for tokens [begin, end). Cells that many tiles read are packed first. */
static __attribute__((noinline, target(TARGET))) void NAME(columns)(
    const Matmul *p, int begin, int end, int first, int last)
{
    _Alignas(64) float packed[MAX_SUM * WIDTH];
    for (int k = 0; k < p->size; k += MAX_SUM) {
        int size = min(MAX_SUM, p->size - k);
        for (int n = first; n < last; n += WIDTH) {
            int columns = min(last - n, WIDTH), vectors = ceil_div(columns, LANES);
            const float *v = p->w + k * p->ldw + n;
            size_t ldv = p->ldw;
            if (columns % LANES || (end - begin > UNPACKED && ldv != WIDTH)) {
                NAME(pack)(v, ldv, size, columns, packed);
                v = packed;
                ldv = vectors * LANES;
            }
            switch (vectors) {
#define CASE(N) \
    case N: \
        NAME(columns_strip)(N, p, begin, end, n, columns, k, size, v, ldv); \
        break;
                CASE(1) CASE(2) CASE(3) CASE(4)
#undef CASE
            }
        }
    }
}
