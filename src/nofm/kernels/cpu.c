/* Masks of fp32 weights on the CPU: the same comparisons as the Triton kernels, LANES groups at a time, so that each comparison is
   one vector instruction over many groups. Compiled at first use by cpu.py, with the machine's own C compiler.

   A lane is one group: element m of lane q is at (q / k) * M * k + m * k + q % k, k being the stride of the group axis. Lanes that
   follow each other in memory form a run. A block of lanes is copied into columns, ranked, and its flags are copied back. */

#include <stdint.h>

#define LANES 64
#define MAX_M 64
#define INLINE static inline __attribute__((always_inline))

typedef struct {
    int count;                   /* lanes in use */
    int runs;                    /* how many runs they form */
    int length[LANES];           /* of each run */
    int64_t at[LANES];           /* where each run's first weight is */
    int32_t key[MAX_M][LANES];   /* magnitude, as an integer that orders like it */
    int32_t rank[MAX_M][LANES];  /* how many weights of the group go before */
} block;

INLINE void find_runs(block *b, int64_t first, int64_t end, int m_size, int64_t k) {
    b->count = end - first < LANES ? (int)(end - first) : LANES;
    b->runs = 0;
    for (int done = 0; done < b->count;) {
        int64_t q = first + done, rest = k - q % k;
        int length = rest < b->count - done ? (int)rest : b->count - done;
        b->at[b->runs] = (q / k) * m_size * k + q % k;
        b->length[b->runs++] = length;
        done += length;
    }
}

INLINE void load_keys(block *b, const uint32_t *w, int64_t first, int m_size, int64_t k) {
    if (k == 1) {
        const uint32_t *group = w + first * m_size;
        for (int l = 0; l < b->count; l++)
            for (int m = 0; m < m_size; m++) b->key[m][l] = (int32_t)(group[l * m_size + m] & 0x7fffffffu);
        return;
    }
    for (int m = 0; m < m_size; m++)
        for (int r = 0, l = 0; r < b->runs; l += b->length[r++])
            for (int t = 0; t < b->length[r]; t++) b->key[m][l + t] = (int32_t)(w[b->at[r] + m * k + t] & 0x7fffffffu);
}

/* Larger magnitude first, then lower index: a total order, so the ranks of a group are 0 .. M-1, each once. */
INLINE void rank_keys(block *b, int m_size) {
    for (int m = 0; m < m_size; m++)
        for (int l = 0; l < LANES; l++) b->rank[m][l] = m_size - 1 - m;
    for (int j = 1; j < m_size; j++)
        for (int i = 0; i < j; i++)
            for (int l = 0; l < LANES; l++) {
                int32_t i_first = b->key[i][l] >= b->key[j][l];
                b->rank[j][l] += i_first;
                b->rank[i][l] -= i_first;
            }
}

INLINE void rank_block(block *b, const uint32_t *w, int64_t first, int64_t end, int m_size, int64_t k) {
    find_runs(b, first, end, m_size, k);
    load_keys(b, w, first, m_size, k);
    rank_keys(b, m_size);
}

/* Calls BODY for every weight of the block, with `at` its place and `keep` all ones or all zeros. */
#define FOR_EACH_WEIGHT(BODY)                                                                   \
    if (k == 1)                                                                                 \
        for (int l = 0; l < b.count; l++)                                                       \
            for (int m = 0; m < m_size; m++) {                                                  \
                int64_t at = (first + l) * m_size + m;                                          \
                uint32_t keep = -(uint32_t)(b.rank[m][l] < n);                                  \
                BODY;                                                                           \
            }                                                                                   \
    else                                                                                        \
        for (int m = 0; m < m_size; m++)                                                        \
            for (int r = 0, l = 0; r < b.runs; l += b.length[r++])                              \
                for (int t = 0; t < b.length[r]; t++) {                                         \
                    int64_t at = b.at[r] + m * k + t;                                           \
                    uint32_t keep = -(uint32_t)(b.rank[m][l + t] < n);                          \
                    BODY;                                                                       \
                }

#define FOR_EACH_BLOCK(BODY)                                                                    \
    block b = {0};                                                                              \
    for (int64_t first = begin; first < end; first += LANES) {                                  \
        rank_block(&b, (const uint32_t *)w, first, end, m_size, k);                             \
        FOR_EACH_WEIGHT(BODY)                                                                   \
    }

INLINE void masked(const uint32_t *w, uint32_t *out, int64_t begin, int64_t end, int n, int m_size, int64_t k) {
    FOR_EACH_BLOCK(out[at] = w[at] & keep)
}

INLINE void mask(const uint32_t *w, uint8_t *flags, int64_t begin, int64_t end, int n, int m_size, int64_t k) {
    FOR_EACH_BLOCK(flags[at] = keep & 1u)
}

typedef union {
    float number;
    uint32_t bits;
} word;

INLINE void refine(const float *w, float *out, float factor, int sign, int64_t begin, int64_t end, int n, int m_size, int64_t k) {
    FOR_EACH_BLOCK({
        float x = sign ? (float)(w[at] > 0.0f) - (float)(w[at] < 0.0f) : w[at];
        word before = {out[at]};
        word after = {out[at] + factor * x};
        before.bits = (before.bits & keep) | (after.bits & ~keep); /* no branch: half of them would be mispredicted */
        out[at] = before.number;
    })
}

/* The usual M as constants, so that their loops unroll. */
#define FOR_USUAL_M(CALL)                                                                       \
    switch (m_size) {                                                                           \
        case 2: CALL(2); break;                                                                 \
        case 4: CALL(4); break;                                                                 \
        case 8: CALL(8); break;                                                                 \
        case 16: CALL(16); break;                                                               \
        case 32: CALL(32); break;                                                               \
        default: CALL(m_size);                                                                  \
    }

/* out = w where kept, +0.0 elsewhere, for the groups [begin, end). */
void nofm_masked(const uint32_t *w, uint32_t *out, int64_t begin, int64_t end, int n, int m_size, int64_t k) {
#define CALL(M) if (k == 1) masked(w, out, begin, end, n, M, 1); else masked(w, out, begin, end, n, M, k)
    FOR_USUAL_M(CALL)
#undef CALL
}

/* flags = 1 where kept, 0 elsewhere. */
void nofm_mask(const uint32_t *w, uint8_t *flags, int64_t begin, int64_t end, int n, int m_size, int64_t k) {
#define CALL(M) if (k == 1) mask(w, flags, begin, end, n, M, 1); else mask(w, flags, begin, end, n, M, k)
    FOR_USUAL_M(CALL)
#undef CALL
}

/* out += factor * w where pruned (sign: factor * sign(w)). `out` may be `w` itself: a block is ranked before it is written. */
void nofm_refine(const float *w, float *out, float factor, int sign, int64_t begin, int64_t end, int n, int m_size, int64_t k) {
#define CALL(M)                                                                                 \
    if (k == 1 && !sign) refine(w, out, factor, 0, begin, end, n, M, 1);                        \
    else if (!sign) refine(w, out, factor, 0, begin, end, n, M, k);                             \
    else refine(w, out, factor, 1, begin, end, n, M, k)
    FOR_USUAL_M(CALL)
#undef CALL
}
