/* Masks of fp32 weights on the CPU: many groups at a time, so that each comparison is one vector instruction over many groups. The usual
   M go through a sorting network as in the Triton kernels, other M compare all pairs. Compiled at first use by cpu.py, with the
   machine's own C compiler.

   A lane is one group: element m of lane q is at (q / k) * M * k + m * k + q % k, k being the stride of the group axis. Lanes that
   follow each other in memory form a run. A block of lanes is copied into columns, ranked, and its flags are copied back. */

#include <stdint.h>

#if defined(__AVX512F__) || defined(__AVX2__)
#include <immintrin.h>
#elif defined(__ARM_NEON)
#include <arm_neon.h>
#endif

#define LANES 64
#define MAX_M 64
#define INLINE static inline __attribute__((always_inline))

typedef struct {
    int count;                               /* lanes in use */
    int runs;                                /* how many runs they form */
    int length[LANES];                       /* of each run */
    int64_t at[LANES];                       /* where each run's first weight is */
    _Alignas(64) int32_t key[MAX_M][LANES];  /* magnitude, as an integer that orders like it */
    _Alignas(64) int32_t rank[MAX_M][LANES]; /* how many weights of the group go before; by a network: 0 where kept, else n */
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

/* A register of lanes, and the smaller and the larger of two of them. */
#if defined(__AVX512F__)
typedef int32_t lanes __attribute__((vector_size(64)));
#define WIDTH_BITS 4
#define MIN(A, B) (lanes)_mm512_min_epi32((__m512i)(A), (__m512i)(B))
#define MAX(A, B) (lanes)_mm512_max_epi32((__m512i)(A), (__m512i)(B))
#elif defined(__AVX2__)
typedef int32_t lanes __attribute__((vector_size(32)));
#define WIDTH_BITS 3
#define MIN(A, B) (lanes)_mm256_min_epi32((__m256i)(A), (__m256i)(B))
#define MAX(A, B) (lanes)_mm256_max_epi32((__m256i)(A), (__m256i)(B))
#elif defined(__ARM_NEON)
typedef int32_t lanes __attribute__((vector_size(16)));
#define WIDTH_BITS 2
#define MIN(A, B) (lanes)vminq_s32((int32x4_t)(A), (int32x4_t)(B))
#define MAX(A, B) (lanes)vmaxq_s32((int32x4_t)(A), (int32x4_t)(B))
#else
typedef int32_t lanes __attribute__((vector_size(16)));
#define WIDTH_BITS 2
#define MIN(A, B) (((A) & ((A) < (B))) | ((B) & ((A) >= (B))))
#define MAX(A, B) (((A) & ((A) >= (B))) | ((B) & ((A) < (B))))
#endif
#define WIDTH (1 << WIDTH_BITS)
#define UNROLL _Pragma("GCC unroll 64")

/* The n-th largest of each lane: Batcher's odd-even merge sort, all of it unrolled. `v` is sorted, descending. */
INLINE lanes nth_largest(lanes *v, int n, int m_size) {
    UNROLL
    for (int stage = 0; stage < 36; stage++) { /* counted so that the compiler can unroll it: p is 1, 2, 4, ..., step is p, p/2, ..., 1 */
        const int p = 1 << stage / 6, step = p >> stage % 6;
        if (p >= m_size || step == 0) continue;
        UNROLL
        for (int i = 0; i < m_size - step; i++) /* is i the upper partner of i + step? */
            if (i >= step % p && (i - step % p) % (2 * step) < step && i / (2 * p) == (i + step) / (2 * p)) {
                lanes high = MAX(v[i], v[i + step]);
                v[i + step] = MIN(v[i], v[i + step]);
                v[i] = high;
            }
    }
    lanes sorted[MAX_M]; /* in memory, which can be looked up by a variable, so that v need not be */
    UNROLL
    for (int m = 0; m < m_size; m++) sorted[m] = v[m];
    return sorted[n - 1];
}

/* All ones where kept: keys above the n-th largest of the group and, of those equal to it, the first. `apart`: from key to key. */
INLINE void keep_by_nth(const lanes *key, lanes *keep, int apart, int n, int m_size) {
    lanes v[MAX_M], room = (lanes){0} + n;
    UNROLL
    for (int m = 0; m < m_size; m++) v[m] = key[m * apart];
    lanes nth = nth_largest(v, n, m_size);
    UNROLL
    for (int m = 0; m < m_size; m++) room += key[m * apart] > nth; /* true is -1 */
    UNROLL
    for (int m = 0; m < m_size; m++) {
        lanes equal = key[m * apart] == nth;
        keep[m * apart] = (key[m * apart] > nth) | (equal & (room > 0));
        room += equal;
    }
}

/* For the usual M. Functions of their own, since unrolled networks take long to compile: one for a block of columns, and one for WIDTH
   contiguous groups, which are turned into columns and back inside registers. */
#define NETWORK(M)                                                                              \
    static __attribute__((noinline)) void rank_by_network_##M(block *b, int n) {                \
        for (int first = 0; first < LANES; first += WIDTH) {                                    \
            lanes *rank = (lanes *)&b->rank[0][first];                                          \
            keep_by_nth((const lanes *)&b->key[0][first], rank, LANES / WIDTH, n, M);           \
            UNROLL for (int m = 0; m < M; m++) rank[m * (LANES / WIDTH)] = ~rank[m * (LANES / WIDTH)] & n; \
        }                                                                                       \
    }                                                                                           \
    static __attribute__((noinline)) void keep_rows_##M(const uint32_t *w, uint32_t *flags, int n) { \
        lanes v[M], keep[M];                                                                    \
        UNROLL for (int m = 0; m < M; m++) v[m] = ((const unaligned *)w)[m] & 0x7fffffff;       \
        UNROLL for (int bit = 1; bit < WIDTH; bit *= 2) shuffle(v, M);                          \
        keep_by_nth(v, keep, 1, n, M);                                                          \
        UNROLL for (int bit = 1; bit < M; bit *= 2) shuffle(keep, M);                           \
        UNROLL for (int m = 0; m < M; m++) ((lanes *)flags)[m] = keep[m];                       \
    }

typedef int32_t unaligned __attribute__((vector_size(sizeof(lanes)), aligned(4)));

/* A perfect shuffle of M registers, as one row of numbers: the first half and the second half by turns. The index of a number, group
   and place in the group, turns by one bit; as many turns as a group index has bits bring the groups side by side, and as many
   as a place has bring them back. */
#if WIDTH_BITS == 4
#define LOW 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23
#define HIGH 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31
#elif WIDTH_BITS == 3
#define LOW 0, 8, 1, 9, 2, 10, 3, 11
#define HIGH 4, 12, 5, 13, 6, 14, 7, 15
#else
#define LOW 0, 4, 1, 5
#define HIGH 2, 6, 3, 7
#endif
#if defined(__clang__)
#define SHUFFLE(A, B, ...) __builtin_shufflevector(A, B, __VA_ARGS__)
#else
#define SHUFFLE(A, B, ...) __builtin_shuffle(A, B, (lanes){__VA_ARGS__})
#endif

INLINE void shuffle(lanes *v, int m_size) {
    lanes before[MAX_M];
    UNROLL
    for (int m = 0; m < m_size; m++) before[m] = v[m];
    UNROLL
    for (int m = 0; m < m_size / 2; m++) {
        v[2 * m] = SHUFFLE(before[m], before[m + m_size / 2], LOW);
        v[2 * m + 1] = SHUFFLE(before[m], before[m + m_size / 2], HIGH);
    }
}

NETWORK(4)
NETWORK(8)
NETWORK(16)
NETWORK(32)

INLINE void rank_block(block *b, const uint32_t *w, int64_t first, int64_t end, int n, int m_size, int64_t k) {
    find_runs(b, first, end, m_size, k);
    load_keys(b, w, first, m_size, k);
    if (m_size == 4) rank_by_network_4(b, n);
    else if (m_size == 8) rank_by_network_8(b, n);
    else if (m_size == 16) rank_by_network_16(b, n);
    else if (m_size == 32) rank_by_network_32(b, n);
    else rank_keys(b, m_size);
}

#define HAS_NETWORK(M) ((M) == 4 || (M) == 8 || (M) == 16 || (M) == 32)
#define KEEP_ROWS(M) ((M) == 4 ? keep_rows_4 : (M) == 8 ? keep_rows_8 : (M) == 16 ? keep_rows_16 : keep_rows_32)

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
    int64_t first = begin;                                                                      \
    if (k == 1 && HAS_NETWORK(m_size))                                                          \
        for (; first + WIDTH <= end; first += WIDTH) {                                          \
            _Alignas(64) uint32_t flags_of_rows[WIDTH * 32];                                    \
            KEEP_ROWS(m_size)((const uint32_t *)w + first * m_size, flags_of_rows, n);          \
            for (int i = 0; i < WIDTH * m_size; i++) {                                          \
                int64_t at = first * m_size + i;                                                \
                uint32_t keep = flags_of_rows[i];                                               \
                BODY;                                                                           \
            }                                                                                   \
        }                                                                                       \
    block b = {0};                                                                              \
    for (; first < end; first += LANES) {                                                       \
        rank_block(&b, (const uint32_t *)w, first, end, n, m_size, k);                          \
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

/* ---- many weights in one call: for small networks the calls themselves are what costs ---- */

typedef struct {
    int64_t begin, end, n, m_size, k; /* which groups of a weight, and how they lie */
} span;

void nofm_masked_all(int64_t count, const uint32_t *const *w, uint32_t *const *out, const span *s) {
    for (int64_t i = 0; i < count; i++) nofm_masked(w[i], out[i], s[i].begin, s[i].end, (int)s[i].n, (int)s[i].m_size, s[i].k);
}

void nofm_refine_all(int64_t count, const float *const *w, float *const *out, const span *s, const float *factor, int sign) {
    for (int64_t i = 0; i < count; i++)
        nofm_refine(w[i], out[i], factor[i], sign, s[i].begin, s[i].end, (int)s[i].n, (int)s[i].m_size, s[i].k);
}

/* The largest magnitude in all of these weights, Inf and NaN being the largest of all. */
void nofm_largest(int64_t count, const uint32_t *const *w, const int64_t *size, uint32_t *largest) {
    uint32_t found = 0;
    for (int64_t i = 0; i < count; i++)
        for (int64_t at = 0; at < size[i]; at++) {
            uint32_t key = w[i][at] & 0x7fffffffu;
            found = key > found ? key : found;
        }
    *largest = found;
}
