/* Products with weights that are mostly zeros, in fp32 on the CPU: convolutions and matrix products that leave the zeros out. Compiled at
   first use by products.py, with the machine's own C compiler.

   Lanes. Outputs that lie side by side, pixels of a row or rows of a batch, need the same weight times inputs that lie side by side too. So
   the lanes of a register are outputs side by side, and a kept weight is one load and one multiply-add for each register: nothing is
   gathered. For that the input of a convolution is copied once for each column of the kernel, shifted, so that what the kernel's rows and
   columns reach is a start in memory (`place`) and lies side by side from there on. All outputs of a layer keep equally many weights, so
   that several can be summed in one loop; that is what N:M gives.

   Vectors. The rows of a linear layer's batch do not lie side by side, and turning them takes its time. There the lanes are 16 outputs, and
   their inputs are picked out of a register, which holds a window of 16 of them, by the places of the kept weights. */

#include <stdint.h>
#include <string.h>

#if defined(__AVX512F__)
#include <immintrin.h>
#define WIDTH 16
#elif defined(__AVX__)
#define WIDTH 8
#else
#define WIDTH 4
#endif
#define MOST 8 /* sums of a loop, each a register: as many as hide the time that a multiply-add takes */
#define INLINE static inline __attribute__((always_inline))
#define UNROLL _Pragma("GCC unroll 16")

typedef float lanes __attribute__((vector_size(WIDTH * 4), aligned(4)));

typedef struct {
    int64_t outputs, blocks;  /* a block: inputs that stay in the first cache while all outputs are summed over them */
    const int64_t *kept;      /* how many weights an output keeps in each block */
    const int32_t *place;     /* where the input of each begins, block by block, output by output */
    const float *value, *bias;
} weights;

/* ---- lanes ---- */

/* Some outputs over some registers of lanes, in one block. `bias`: begin with it; without it go on from what is in y. */
INLINE void sum_tile(const float *x, const int32_t *place, const float *value, int64_t kept, float *y, int64_t pitch, const float *bias,
                     int outputs, int registers) {
    lanes sum[MOST];
    UNROLL for (int a = 0; a < outputs; a++)
        UNROLL for (int r = 0; r < registers; r++)
            sum[a * registers + r] = bias ? (lanes){0} + bias[a] : *(const lanes *)(y + a * pitch + r * WIDTH);
    for (int64_t k = 0; k < kept; k++)
        UNROLL for (int a = 0; a < outputs; a++) {
            const float *from = x + place[a * kept + k];
            const lanes w = (lanes){0} + value[a * kept + k];
            UNROLL for (int r = 0; r < registers; r++) sum[a * registers + r] += w * *(const lanes *)(from + r * WIDTH);
        }
    UNROLL for (int a = 0; a < outputs; a++)
        UNROLL for (int r = 0; r < registers; r++) *(lanes *)(y + a * pitch + r * WIDTH) = sum[a * registers + r];
}

#define SUM_OUTPUTS(R)                                                                                                             \
    static void sum_outputs_##R(const float *x, const int32_t *place, const float *value, int64_t kept, float *y, int64_t pitch,   \
                                const float *bias, int64_t begin, int64_t end) {                                                   \
        int64_t o = begin;                                                                                                         \
        for (; o + MOST / R <= end; o += MOST / R)                                                                                 \
            if (bias) sum_tile(x, place + o * kept, value + o * kept, kept, y + o * pitch, pitch, bias + o, MOST / R, R);          \
            else sum_tile(x, place + o * kept, value + o * kept, kept, y + o * pitch, pitch, 0, MOST / R, R);                      \
        for (; o < end; o++)                                                                                                       \
            if (bias) sum_tile(x, place + o * kept, value + o * kept, kept, y + o * pitch, pitch, bias + o, 1, R);                 \
            else sum_tile(x, place + o * kept, value + o * kept, kept, y + o * pitch, pitch, 0, 1, R);                             \
    }
SUM_OUTPUTS(1)
SUM_OUTPUTS(2)
SUM_OUTPUTS(4)
SUM_OUTPUTS(8)

/* Outputs [begin, end) over lanes [first, last), of which there are WIDTH at least. What does not fill a register at the end is summed
   once more from WIDTH before it, so that nothing beyond the end is read or written. */
static void sum_lanes(const float *x, const weights *w, float *y, int64_t pitch, int64_t first, int64_t last, int64_t begin, int64_t end) {
    for (int64_t q = first; q < last;) {
        const int64_t left = last - q;
        const int registers = left >= 8 * WIDTH ? 8 : left >= 4 * WIDTH ? 4 : left >= 2 * WIDTH ? 2 : 1;
        if (left < WIDTH) q = last - WIDTH;
        const int32_t *place = w->place;
        const float *value = w->value;
        for (int64_t b = 0; b < w->blocks; b++) {
            const float *bias = b ? 0 : w->bias;
            switch (registers) {
                case 8: sum_outputs_8(x + q, place, value, w->kept[b], y + q, pitch, bias, begin, end); break;
                case 4: sum_outputs_4(x + q, place, value, w->kept[b], y + q, pitch, bias, begin, end); break;
                case 2: sum_outputs_2(x + q, place, value, w->kept[b], y + q, pitch, bias, begin, end); break;
                default: sum_outputs_1(x + q, place, value, w->kept[b], y + q, pitch, bias, begin, end);
            }
            place += w->kept[b] * w->outputs;
            value += w->kept[b] * w->outputs;
        }
        q += (int64_t)registers * WIDTH;
    }
}

/* y[o][q] = bias[o] + the sum over o's kept weights of value * x[place + q], for `count` lanes q, WIDTH at least. The last tile belongs to the
   thread of the one before it: they overlap where the last register is not full. */
static void multiply(const float *x, const weights *w, float *y, int64_t pitch, int64_t count, int threads) {
    const int64_t tile = MOST * WIDTH, tiles = count / tile > 1 ? count / tile : 1;
    int64_t parts = (3 * threads + tiles - 1) / tiles; /* of the outputs, where there are few tiles */
    if (threads == 1 || parts < 1) parts = 1;
    const int64_t size = ((w->outputs + parts - 1) / parts + MOST - 1) / MOST * MOST;
    parts = (w->outputs + size - 1) / size;
#pragma omp parallel for collapse(2) schedule(dynamic) num_threads(threads) if (threads > 1)
    for (int64_t t = 0; t < tiles; t++)
        for (int64_t p = 0; p < parts; p++) {
            const int64_t begin = p * size, end = begin + size < w->outputs ? begin + size : w->outputs;
            sum_lanes(x, w, y, pitch, t * tile, t + 1 == tiles ? count : (t + 1) * tile, begin, end);
        }
}

/* ---- convolutions ---- */

typedef struct {
    int64_t images, channels, height, width;
    int64_t out_height, out_width;
    int64_t columns, stride_h, stride_w, pad_h, pad_w, dilation_w; /* columns: of the kernel */
    int64_t together, phases, rows, line, plane;                   /* as _Layout in products.py says */
} shape;

/* The input as (channel, kernel's column, phase, row, image, x of the output), zeros where it is padded. */
static void lay_out(const float *x, float *out, const shape *s, int64_t images, int threads) {
#pragma omp parallel for num_threads(threads) if (threads > 1)
    for (int64_t c = 0; c < s->channels; c++) {
        float *to = out + c * s->plane;
        for (int64_t j = 0; j < s->columns; j++)
            for (int64_t p = 0; p < s->phases; p++)
                for (int64_t r = 0; r < s->rows; r++) {
                    for (int64_t n = 0; n < s->together; n++, to += s->out_width) {
                        const int64_t y = r * s->stride_h + p - s->pad_h, first = j * s->dilation_w - s->pad_w;
                        if (n >= images || y < 0 || y >= s->height) {
                            memset(to, 0, s->out_width * sizeof(float));
                            continue;
                        }
                        const float *from = x + ((n * s->channels + c) * s->height + y) * s->width;
                        int64_t begin = first < 0 ? (-first + s->stride_w - 1) / s->stride_w : 0; /* before it: padding */
                        int64_t end = s->width <= first ? 0 : (s->width - first + s->stride_w - 1) / s->stride_w;
                        end = end < s->out_width ? end : s->out_width;
                        begin = begin < end ? begin : end;
                        for (int64_t i = 0; i < begin; i++) to[i] = 0;
                        if (s->stride_w == 1)
                            memcpy(to + begin, from + begin + first, (end - begin) * sizeof(float));
                        else
                            for (int64_t i = begin; i < end; i++) to[i] = from[i * s->stride_w + first];
                        for (int64_t i = end; i < s->out_width; i++) to[i] = 0;
                    }
                    for (int64_t i = s->together * s->out_width; i < s->line; i++) *to++ = 0;
                }
    }
}

/* Back from (output, row, image, x) to images. */
static void lay_back(const float *from, float *y, const shape *s, int64_t outputs, int64_t pitch, int64_t images, int threads) {
    const int64_t pixels = s->out_height * s->out_width;
#pragma omp parallel for num_threads(threads) if (threads > 1)
    for (int64_t o = 0; o < outputs; o++)
        for (int64_t r = 0; r < s->out_height; r++)
            for (int64_t n = 0; n < images; n++)
                memcpy(y + (n * outputs + o) * pixels + r * s->out_width, from + o * pitch + r * s->line + n * s->out_width,
                       s->out_width * sizeof(float));
}

/* `in` has some floats more than what lay_out writes, as many as lanes are added here. `pitch`: 0 where the sums go straight to y, else they
   go to `out`, in rows of so many lanes, whole registers. */
void nofm_convolution(const float *x, float *y, float *in, float *out, const weights *w, const shape *s, int64_t pitch, int64_t threads_) {
    const int64_t pixels = s->out_height * s->out_width, image = s->channels * s->height * s->width;
    const int threads = (int)threads_;
    const int64_t step = s->together ? s->together : 1;
    for (int64_t n = 0; n < s->images; n += step) {
        float *to = y + n * w->outputs * pixels;
        if (!s->together) {
            multiply(x + n * image, w, to, pixels, pixels, threads);
            continue;
        }
        const int64_t images = s->images - n < step ? s->images - n : step;
        lay_out(x + n * image, in, s, images, threads);
        if (!pitch) {
            multiply(in, w, to, pixels, pixels, threads);
        } else {
            multiply(in, w, out, pitch, pitch, threads);
            lay_back(out, to, s, w->outputs, pitch, images, threads);
        }
    }
}

/* ---- vectors ---- */

#define OUTPUTS 16 /* of a tile, whatever the machine's registers hold */
#define WINDOW 16  /* of inputs */

typedef struct {
    int64_t inputs, outputs, slots; /* slots: how many weights an output keeps of a window */
    const float *value;             /* (tile, window, slot, output of the tile) */
    const uint8_t *place;           /* the same; the input's place in its window */
    const float *bias;
} picked;

#if defined(__AVX512F__)
#define PICK(ROWS)                                                                                                                  \
    INLINE void pick_##ROWS(const float *x, float *y, const picked *w, int64_t tile) {                                              \
        const int64_t windows = (w->inputs + WINDOW - 1) / WINDOW;                                                            \
        const float *value = w->value + tile * windows * w->slots * OUTPUTS;                                                        \
        const uint8_t *place = w->place + tile * windows * w->slots * OUTPUTS;                                                      \
        const int64_t left = w->outputs - tile * OUTPUTS;                                                                           \
        const __mmask16 real = left >= OUTPUTS ? 0xffff : (__mmask16)((1u << left) - 1);                                            \
        __m512 sum[ROWS];                                                                                                           \
        for (int b = 0; b < ROWS; b++) sum[b] = _mm512_maskz_loadu_ps(real, w->bias + tile * OUTPUTS);                              \
        for (int64_t i = 0; i < w->inputs; i += WINDOW) {                                                                        \
            const int64_t there = w->inputs - i < WINDOW ? w->inputs - i : WINDOW;                                            \
            const __mmask16 mask = (__mmask16)((1u << there) - 1);                                                                  \
            __m512 in[ROWS];                                                                                                        \
            for (int b = 0; b < ROWS; b++) in[b] = _mm512_maskz_loadu_ps(mask, x + b * w->inputs + i);                              \
            for (int64_t s = 0; s < w->slots; s++, value += OUTPUTS, place += OUTPUTS) {                                            \
                const __m512 v = _mm512_loadu_ps(value);                                                                            \
                const __m512i at = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)place));                                   \
                for (int b = 0; b < ROWS; b++) sum[b] = _mm512_fmadd_ps(v, _mm512_permutexvar_ps(at, in[b]), sum[b]);               \
            }                                                                                                                       \
        }                                                                                                                           \
        for (int b = 0; b < ROWS; b++) _mm512_mask_storeu_ps(y + b * w->outputs + tile * OUTPUTS, real, sum[b]);                    \
    }
#else
#define PICK(ROWS)                                                                                                                  \
    INLINE void pick_##ROWS(const float *x, float *y, const picked *w, int64_t tile) {                                              \
        const int64_t windows = (w->inputs + WINDOW - 1) / WINDOW;                                                            \
        const int64_t left = w->outputs - tile * OUTPUTS < OUTPUTS ? w->outputs - tile * OUTPUTS : OUTPUTS;                         \
        for (int b = 0; b < ROWS; b++) {                                                                                            \
            const float *value = w->value + tile * windows * w->slots * OUTPUTS, *in = x + b * w->inputs;                           \
            const uint8_t *place = w->place + tile * windows * w->slots * OUTPUTS;                                                  \
            float sum[OUTPUTS] = {0};                                                                                               \
            for (int64_t i = 0; i < w->inputs; i += WINDOW, in += WINDOW)                                                     \
                for (int64_t s = 0; s < w->slots; s++, value += OUTPUTS, place += OUTPUTS)                                          \
                    for (int l = 0; l < OUTPUTS; l++) sum[l] += value[l] * in[place[l]];                                            \
            for (int l = 0; l < left; l++) y[b * w->outputs + tile * OUTPUTS + l] = sum[l] + w->bias[tile * OUTPUTS + l];           \
        }                                                                                                                           \
    }
#endif
PICK(1)
PICK(2)
PICK(4)
PICK(8)

/* y[b][o] = bias[o] + the sum over o's kept weights of value * x[b][input], for each row b of a batch. Rows go in blocks that stay in the
   second cache while all tiles of outputs are summed over them. */
void nofm_vectors(const float *x, float *y, const picked *w, int64_t batch, int64_t threads) {
    const int64_t tiles = (w->outputs + OUTPUTS - 1) / OUTPUTS, fit = (1 << 16) / w->inputs / 8 * 8;
    const int64_t block = fit < 8 ? 8 : fit, blocks = (batch + block - 1) / block;
#pragma omp parallel for collapse(2) schedule(static) num_threads((int)threads) if (threads > 1)
    for (int64_t r = 0; r < blocks; r++)
        for (int64_t t = 0; t < tiles; t++)
            for (int64_t b = r * block, end = b + block < batch ? b + block : batch; b < end;) {
                const float *from = x + b * w->inputs;
                float *to = y + b * w->outputs;
                if (end - b >= 8) pick_8(from, to, w, t), b += 8;
                else if (end - b >= 4) pick_4(from, to, w, t), b += 4;
                else if (end - b >= 2) pick_2(from, to, w, t), b += 2;
                else pick_1(from, to, w, t), b += 1;
            }
}
