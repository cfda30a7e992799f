/* The layers of a decoder pass, for processors.
 *
 * Every output row is computed by the same operations in the same order, whatever other rows share
 * the pass: products sum over the inner size from front to back, and the keys of a row are visited
 * in blocks of 64 positions of ITS OWN path, root first. So a row of a tree, of a chain, of a batch
 * or alone gives the same bits.
 *
 * Tensors are bfloat16 (bf16 = 1) or float32; all sums are float32. Vectors are GCC vector
 * extensions, so the file compiles for any processor; products of bfloat16 use the instruction that
 * AVX-512 has for them where it exists.
 */
#include "kernels.h"

#include <float.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#ifdef _OPENMP
#include <omp.h>
#endif
#ifdef __AVX512BF16__
#include <immintrin.h>
#endif

#define LANES 16 /* of a vector */
#define PARTS 4  /* vectors per block of positions */
#define BLOCK (PARTS * LANES)
#define MAX_HEAD 256
#define MAX_QUERIES 64 /* handled by one task */
#define TOGETHER 4     /* queries that share one walk over a block */

typedef float vf __attribute__((vector_size(64)));
typedef int32_t vi __attribute__((vector_size(64)));
typedef uint32_t vu __attribute__((vector_size(64)));
typedef uint16_t vh __attribute__((vector_size(32)));

#define INLINE static inline __attribute__((always_inline))

INLINE int32_t node_of(const Pass *pass, int s, int32_t row) {
    return pass->node[s + 1] - pass->first[s + 1] + row;
}

INLINE vf splat(float x) { return x - (vf){0}; }

INLINE vf load(const void *p, int64_t i, int bf16) {
    if (bf16) {
        vh h;
        memcpy(&h, (const uint16_t *)p + i, sizeof h);
        return (vf)(__builtin_convertvector(h, vu) << 16);
    }
    vf x;
    memcpy(&x, (const float *)p + i, sizeof x);
    return x;
}

INLINE void store(void *p, int64_t i, vf x, int bf16) {
    if (bf16) { /* round to nearest even */
        vu u = (vu)x;
        vh h = __builtin_convertvector((u + 0x7fff + ((u >> 16) & 1)) >> 16, vh);
        memcpy((uint16_t *)p + i, &h, sizeof h);
    } else {
        memcpy((float *)p + i, &x, sizeof x);
    }
}

/* acc + w0 * x0 + w1 * x1, for 16 pairs of weights and one pair of inputs */
INLINE vf dot(vf acc, vu w, uint32_t x) {
#ifdef __AVX512BF16__
    return (vf)_mm512_dpbf16_ps((__m512)acc, (__m512bh)w, (__m512bh)_mm512_set1_epi32((int)x));
#else
    uint32_t low = x << 16, high = x & 0xffff0000;
    float x0, x1;
    memcpy(&x0, &low, 4);
    memcpy(&x1, &high, 4);
    acc += (vf)(w << 16) * x0;
    return acc + (vf)(w & 0xffff0000) * x1;
#endif
}

/* Fold the upper half onto the lower one, four times; all lanes end up with the result. */
#define FOLD(x, op)                                                                    \
    do {                                                                               \
        vf y = __builtin_shuffle(x, (vi){8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7}); \
        x = op(x, y);                                                                  \
        y = __builtin_shuffle(x, (vi){4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11});    \
        x = op(x, y);                                                                  \
        y = __builtin_shuffle(x, (vi){2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13});    \
        x = op(x, y);                                                                  \
        y = __builtin_shuffle(x, (vi){1, 0, 3, 2, 5, 4, 7, 6, 9, 8, 11, 10, 13, 12, 15, 14});    \
        x = op(x, y);                                                                  \
    } while (0)

INLINE vf plus(vf a, vf b) { return a + b; }

INLINE vf larger(vf a, vf b) {
    vi first = a > b;
    return (vf)(((vi)a & first) | ((vi)b & ~first));
}

INLINE float sum(vf x) {
    FOLD(x, plus);
    return x[0];
}

INLINE float max(vf x) {
    FOLD(x, larger);
    return x[0];
}

/* e^x for x <= 0 (and small positive x), relative error about 1e-7; below -87 it is 0. */
INLINE vf exponential(vf x) {
    vi tiny = x < splat(-87.0f);
    x = (vf)((vi)x & ~tiny);
    vf n = x * 1.44269504f + 12582912.0f; /* adding 1.5 * 2^23 rounds to an integer */
    vi power = (vi)n << 23;
    n -= 12582912.0f;
    x -= n * 0.693359375f;
    x -= n * -2.12194440e-4f;
    vf y = splat(1.9875691500e-4f);
    y = y * x + 1.3981999507e-3f;
    y = y * x + 8.3334519073e-3f;
    y = y * x + 4.1665795894e-2f;
    y = y * x + 1.6666665459e-1f;
    y = y * x + 5.0000001201e-1f;
    y = y * (x * x) + x + 1.0f;
    return (vf)(((vi)y + power) & ~tiny);
}

INLINE vf tanh_of(vf x) { /* 1 - 2 / (e^2x + 1), with the exponent kept <= 0 */
    vi negative = x < splat(0.0f);
    vf e = exponential(-2.0f * (vf)((vi)x & 0x7fffffff));
    vf t = (1.0f - e) / (1.0f + e);
    return (vf)((vi)t | (negative & (int32_t)0x80000000));
}

/* out[to] = x[at] / rms(x[at]) * weight (+ residual[to]); weight is float32 with any offset added. */
INLINE void norm_row(const void *x, int64_t at, const float *weight, const void *residual, void *out,
                     int64_t to, int dim, float eps, int bf16) {
    vf squares = {0};
    for (int d = 0; d < dim; d += LANES) {
        vf v = load(x, at + d, bf16);
        squares += v * v;
    }
    float scale = 1.0f / sqrtf(sum(squares) / dim + eps);
    for (int d = 0; d < dim; d += LANES) {
        vf v = load(x, at + d, bf16) * scale * load(weight, d, 0);
        if (residual) v += load(residual, to + d, bf16);
        store(out, to + d, v, bf16);
    }
}

/* Functions with `omp for` share their work among the threads of the region they are called in. */

static void rms_norm(const void *x, const float *weight, const void *residual, void *out,
                     int32_t rows, int32_t dim, float eps, int bf16) {
#pragma omp for schedule(static)
    for (int32_t r = 0; r < rows; r++) {
        int64_t at = (int64_t)r * dim;
        if (bf16) norm_row(x, at, weight, residual, out, at, dim, eps, 1);
        else norm_row(x, at, weight, residual, out, at, dim, eps, 0);
    }
}

INLINE vf activate(vf x, int gelu) {
    if (gelu) return 0.5f * x * (1.0f + tanh_of(0.79788456f * (x + 0.044715f * x * x * x)));
    vi negative = x < splat(0.0f);
    vf e = exponential(-(vf)((vi)x & 0x7fffffff)); /* e^-|x|: never overflows */
    vf numerator = (vf)(((vi)e & negative) | ((vi)splat(1.0f) & ~negative));
    return x * numerator / (1.0f + e);
}

INLINE void gate_row(const void *gate_up, void *out, int64_t r, int dim, int gelu, int bf16) {
    for (int d = 0; d < dim; d += LANES) {
        vf gate = load(gate_up, r * 2 * dim + d, bf16);
        vf up = load(gate_up, r * 2 * dim + dim + d, bf16);
        store(out, r * dim + d, activate(gate, gelu) * up, bf16);
    }
}

/* out = activation(gate) * up, from rows [gate | up] */
static void gated(const void *gate_up, void *out, int32_t rows, int32_t dim, int gelu, int bf16) {
#pragma omp for schedule(static)
    for (int32_t r = 0; r < rows; r++)
        if (bf16) gelu ? gate_row(gate_up, out, r, dim, 1, 1) : gate_row(gate_up, out, r, dim, 0, 1);
        else gelu ? gate_row(gate_up, out, r, dim, 1, 0) : gate_row(gate_up, out, r, dim, 0, 0);
}

INLINE void add_silu_row(const void *x, const void *y, int64_t y_at, void *out, int64_t at, int dim,
                         int bf16) {
    for (int d = 0; d < dim; d += LANES)
        store(out, at + d, load(x, at + d, bf16) + activate(load(y, y_at + d, bf16), 0), bf16);
}

/* out = x + SiLU(y), rows of `dim`; those of y begin `stride` apart. out may be x. */
void add_silu(const void *x, const void *y, int64_t stride, void *out, int32_t rows, int32_t dim,
              int32_t bf16) {
    for (int64_t r = 0; r < rows; r++)
        if (bf16) add_silu_row(x, y, r * stride, out, r * dim, dim, 1);
        else add_silu_row(x, y, r * stride, out, r * dim, dim, 0);
}

#define COLUMNS 32 /* of a block of a packed weight: two vectors */
#define ROWS 8     /* that share one walk over a block: their sums fill the registers */
#define SOON 48    /* steps of a walk that memory needs */

static int64_t words_of_block(const Matrix *m, int bf16) { return (int64_t)COLUMNS * (m->in >> bf16); }

static const uint32_t *block_of(const Matrix *m, int32_t block, int bf16) {
    return (const uint32_t *)m->weight + block * words_of_block(m, bf16);
}

/* n rows (a constant at each call) from row r on, times one block of columns, a word of each column
 * in every step: a pair of bfloat16 or a float32. `lines` (a constant, too) more of 64 bytes are
 * asked for in every step, from `ahead` on. */
INLINE void block_product(const Matrix *m, const void *x, const void *residual, void *out,
                          int64_t r, const int n, int32_t block, const uint32_t *ahead,
                          const int lines, const int bf16, const int out_bf16) {
    vf a[ROWS], b[ROWS]; /* arrays of constant size stay in registers, a[n] would not */
    const int64_t steps = m->in >> bf16;
    const uint32_t *w = block_of(m, block, bf16), *inputs = (const uint32_t *)x + r * steps;
    for (int i = 0; i < n; i++) a[i] = b[i] = (vf){0};
    for (int64_t k = 0; k < steps; k++, w += COLUMNS, ahead += lines * LANES) {
        vu w0, w1;
        for (int i = 0; i < lines; i++) __builtin_prefetch(ahead + i * LANES, 0, 2);
        memcpy(&w0, w, sizeof w0);
        memcpy(&w1, w + LANES, sizeof w1);
        for (int i = 0; i < n; i++) {
            uint32_t word = inputs[i * steps + k];
            if (bf16) {
                a[i] = dot(a[i], w0, word);
                b[i] = dot(b[i], w1, word);
            } else {
                float input;
                memcpy(&input, &word, sizeof input);
                a[i] += (vf)w0 * input;
                b[i] += (vf)w1 * input;
            }
        }
    }
    for (int half = 0; half < 2; half++) {
        int32_t column = block * COLUMNS + half * LANES;
        if (column >= m->out) break;
        for (int i = 0; i < n; i++) {
            vf y = half ? b[i] : a[i];
            int64_t at = (r + i) * m->out + column;
            if (m->bias) y += load(m->bias, column, 0);
            if (residual) y += load(residual, at, bf16);
            store(out, at, y, out_bf16);
        }
    }
}

/* All rows times one block, in walks that are as even as can be, because few rows wait for their sums.
 * Memory is to be busy all the time, not only in the first walk, where weights come from it: so the
 * first two ask for a half each of what comes behind the block (`next`, or null), and one that is
 * alone for what it needs itself soon. */
INLINE void rows_product(const Matrix *m, const void *x, const void *residual, void *out, int32_t rows,
                         int32_t block, const uint32_t *next, const int bf16, const int out_bf16) {
    int64_t walks = (rows + ROWS - 1) / ROWS, half = words_of_block(m, bf16) / 2;
    for (int64_t walk = 0; walk < walks; walk++) {
        int64_t r = rows * walk / walks;
        const uint32_t *soon = block_of(m, block, bf16) + SOON * COLUMNS;
        switch (rows * (walk + 1) / walks - r) {
#define CASE(n)                                                                                   \
    case n:                                                                                       \
        if (walks == 1) block_product(m, x, residual, out, r, n, block, soon, 2, bf16, out_bf16); \
        else if (walk < 2 && next)                                                                \
            block_product(m, x, residual, out, r, n, block, next + walk * half, 1, bf16, out_bf16); \
        else block_product(m, x, residual, out, r, n, block, next, 0, bf16, out_bf16);            \
        break;
            CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6) CASE(7) CASE(8)
#undef CASE
        }
    }
}

/* The blocks [begin, end) of a matrix that are this thread's. */
static void own_blocks(const Matrix *m, int32_t *begin, int32_t *end) {
    int64_t blocks = (m->out + COLUMNS - 1) / COLUMNS, thread = 0, threads = 1;
#ifdef _OPENMP
    thread = omp_get_thread_num();
    threads = omp_get_num_threads();
#endif
    *begin = blocks * thread / threads;
    *end = blocks * (thread + 1) / threads;
}

INLINE void product_of_type(const Matrix *m, const void *x, const void *residual, void *out,
                            int32_t rows, const Matrix *then, const int bf16, const int out_bf16) {
    int32_t begin, end, first;
    const uint32_t *after = NULL;
    if (then) {
        own_blocks(then, &first, &end);
        after = block_of(then, first, bf16);
    }
    own_blocks(m, &begin, &end);
    for (int32_t block = begin; block < end; block++) {
        const uint32_t *next = block + 1 < end ? block_of(m, block + 1, bf16) : after;
        rows_product(m, x, residual, out, rows, block, next, bf16, out_bf16);
    }
#pragma omp barrier
}

/* out = x W^T + b (+ residual); x and residual of the model's type. out may be the residual. `then`,
 * or null: whose product comes next. */
static void product(const Matrix *m, const void *x, const void *residual, void *out, int32_t rows,
                    const Matrix *then, int bf16, int out_bf16) {
    if (bf16 && out_bf16) product_of_type(m, x, residual, out, rows, then, 1, 1);
    else if (bf16) product_of_type(m, x, residual, out, rows, then, 1, 0);
    else product_of_type(m, x, residual, out, rows, then, 0, 0);
}

/* Positions and path shapes of a pass; once per pass, before its layers. */
void prepare(Pass *pass) {
    for (int s = 0; s < pass->segments; s++) {
        int32_t first = pass->node[s], length = pass->length[s];
        for (int32_t i = 0; first + i < pass->node[s + 1]; i++) {
            int32_t node = first + i, parent = pass->parent[node];
            int32_t above = parent < 0 ? length - 1 : pass->position[first + parent];
            int32_t before = parent < 0 ? length : pass->straight[first + parent];
            pass->position[node] = above + 1;
            /* consecutive as long as each node follows the one packed just before it */
            pass->straight[node] = before == length + i && parent == i - 1 ? before + 1 : before;
        }
    }
}

/* Normalise and rotate one head into out (float32). */
INLINE void rotate(const void *x, int64_t at, const float *norm, float eps, const float *cosine,
                   const float *sine, int dim, float *out, int bf16) {
    float head[MAX_HEAD] __attribute__((aligned(64)));
    for (int d = 0; d < dim; d += LANES) store(head, d, load(x, at + d, bf16), 0);
    if (norm) norm_row(head, 0, norm, NULL, head, 0, dim, eps, 0);
    int half = dim / 2;
    for (int d = 0; d < half; d++) {
        float a = head[d], b = head[d + half];
        out[d] = a * cosine[d] - b * sine[d];
        out[d + half] = b * cosine[d] + a * sine[d];
    }
}

typedef struct { /* where a row stands */
    int64_t slot;
    const float *cosine, *sine;
} Place;

static Place place_of(const Pass *pass, const Layer *layer, int32_t row) {
    int s = 0; /* few segments: a linear search costs less than another array */
    while (row >= pass->first[s + 1]) s++;
    int32_t node = node_of(pass, s, row);
    int64_t angles = (int64_t)pass->position[node] * (layer->head_dim / 2);
    return (Place){pass->base[s] + pass->length[s] + node - pass->node[s], layer->cosine + angles,
                   layer->sine + angles};
}

/* The queries of row r, which lie at qkv[at], rotated, to scratch. */
INLINE void place_queries(const Pass *pass, const Layer *layer, const void *qkv, int64_t at,
                          int64_t r, Place p, int bf16) {
    int heads = layer->heads, dim = layer->head_dim;
    for (int h = 0; h < heads; h++, at += dim) {
        float query[MAX_HEAD] __attribute__((aligned(64)));
        int64_t to = (r * heads + h) * dim;
        rotate(qkv, at, layer->q_norm, layer->norm_eps, p.cosine, p.sine, dim, query, bf16);
        for (int d = 0; d < dim; d += LANES)
            store(pass->query, to + d, load(query, d, 0) * layer->scale, bf16);
    }
}

/* Keys and values of a row, which lie at kv[at], to their slot. */
INLINE void place_kv(const Layer *layer, const void *kv, int64_t at, Place p, int bf16) {
    int kv_heads = layer->kv_heads, dim = layer->head_dim;
    for (int g = 0; g < kv_heads; g++, at += dim) {
        float key[MAX_HEAD] __attribute__((aligned(64)));
        int64_t to = (g * layer->slots + p.slot) * dim;
        rotate(kv, at, layer->k_norm, layer->norm_eps, p.cosine, p.sine, dim, key, bf16);
        for (int d = 0; d < dim; d += LANES) store(layer->key, to + d, load(key, d, 0), bf16);
    }
    for (int g = 0; g < kv_heads; g++, at += dim) {
        int64_t to = (g * layer->slots + p.slot) * dim;
        for (int d = 0; d < dim; d += LANES) store(layer->value, to + d, load(kv, at + d, bf16), bf16);
    }
}

/* The keys (transposed) and values of one block of positions, shared by all queries that see it.
 * In bfloat16, what a product sums over lies in pairs: key[d / 2] holds dimensions d and d + 1,
 * value row j / 2 positions j and j + 1. */
typedef struct {
    uint32_t key[MAX_HEAD][BLOCK] __attribute__((aligned(64)));
    uint32_t value[BLOCK * MAX_HEAD] __attribute__((aligned(64))); /* rows of `dim` words */
} Tile;

typedef struct { /* the online softmax of one query */
    float sum[MAX_HEAD] __attribute__((aligned(64)));
    vf total;      /* of the weights, lane by lane */
    float largest; /* score so far */
    int32_t hidden, last; /* sees the positions (hidden, last] */
    const void *query;
} State;

/* Transpose a 16 x 16 block in four rounds of pairwise exchanges. */
INLINE void transpose(vf x[LANES]) {
#define ROUND(w, lo, hi)                                                             \
    for (int i = 0; i < LANES; i++)                                                  \
        if (!(i & w)) {                                                              \
            vf a = x[i], b = x[i + w];                                               \
            x[i] = __builtin_shuffle(a, b, (vi)lo);                                  \
            x[i + w] = __builtin_shuffle(a, b, (vi)hi);                              \
        }
    ROUND(1, ((vi){0, 16, 2, 18, 4, 20, 6, 22, 8, 24, 10, 26, 12, 28, 14, 30}),
          ((vi){1, 17, 3, 19, 5, 21, 7, 23, 9, 25, 11, 27, 13, 29, 15, 31}))
    ROUND(2, ((vi){0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29}),
          ((vi){2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31}))
    ROUND(4, ((vi){0, 1, 2, 3, 16, 17, 18, 19, 8, 9, 10, 11, 24, 25, 26, 27}),
          ((vi){4, 5, 6, 7, 20, 21, 22, 23, 12, 13, 14, 15, 28, 29, 30, 31}))
    ROUND(8, ((vi){0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23}),
          ((vi){8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31}))
#undef ROUND
}

INLINE vu word(const void *p, int64_t i, int lanes) { /* up to 16 of 4 bytes, zeros behind them */
    vu x = {0};
    memcpy(&x, (const uint32_t *)p + i, lanes * sizeof(uint32_t));
    return x;
}

/* Load the keys and values of some slots of the kv head that starts at slot `head`; negative slots
 * give zeros. */
INLINE void load_tile(const Layer *layer, int64_t head, const int64_t slot[BLOCK], Tile *tile,
                      const int dim, const int bf16) {
    const int words = bf16 ? dim / 2 : dim; /* of a key */
    for (int at = 0; at < BLOCK; at += LANES)
        for (int d = 0; d < words; d += LANES) {
            const int lanes = words - d < LANES ? words - d : LANES;
            vf block[LANES];
            for (int j = 0; j < LANES; j++) {
                int64_t from = slot[at + j];
                block[j] = from < 0 ? (vf){0} : (vf)word(layer->key, (head + from) * words + d, lanes);
            }
            transpose(block);
            for (int j = 0; j < lanes; j++) memcpy(&tile->key[d + j][at], &block[j], sizeof(vf));
        }
    for (int j = 0; j < BLOCK; j += 1 + bf16)
        for (int d = 0; d < dim; d += LANES) {
            int64_t from = slot[j], next = slot[j + bf16];
            vf x = from < 0 ? (vf){0} : load(layer->value, (head + from) * dim + d, bf16);
            if (bf16) { /* a loaded bfloat16 fills the upper half of its lane */
                vf y = next < 0 ? (vf){0} : load(layer->value, (head + next) * dim + d, bf16);
                x = (vf)((vu)y | (vu)x >> 16);
            }
            memcpy(&tile->value[(j >> bf16) * dim + d], &x, sizeof x);
        }
}

/* acc + lane-wise product of a row of a tile with one word of the other factor */
INLINE vf dot_word(vf acc, const uint32_t *row, const void *other, int i, const int bf16) {
    vu x;
    memcpy(&x, row, sizeof x);
    if (bf16) return dot(acc, x, ((const uint32_t *)other)[i]);
    return acc + (vf)x * ((const float *)other)[i];
}

/* Weights of n queries (a constant at each call) for the block of positions from `from` on. */
INLINE void score(State *const state[], const int n, const Tile *tile, int32_t from, float softcap,
                  const int dim, const int bf16, float weight[][BLOCK], float old[]) {
    const vi lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    vf s[TOGETHER][PARTS];
    for (int i = 0; i < n; i++)
        for (int k = 0; k < PARTS; k++) s[i][k] = (vf){0};
    for (int d = 0; d < dim >> bf16; d++)
        for (int i = 0; i < n; i++)
            for (int k = 0; k < PARTS; k++)
                s[i][k] = dot_word(s[i][k], &tile->key[d][k * LANES], state[i]->query, d, bf16);
    for (int i = 0; i < n; i++) {
        vf top = splat(-INFINITY);
        for (int k = 0; k < PARTS; k++) {
            vi at = lane + (from + k * LANES);
            vi seen = (at <= state[i]->last) & (at > state[i]->hidden);
            if (softcap != 0) s[i][k] = softcap * tanh_of(s[i][k] / softcap);
            s[i][k] = (vf)(((vi)s[i][k] & seen) | ((vi)splat(-INFINITY) & ~seen));
            top = larger(top, s[i][k]);
        }
        float largest = max(top);
        if (state[i]->largest > largest) largest = state[i]->largest;
        old[i] = exponential(splat(state[i]->largest - largest))[0];
        state[i]->largest = largest;
        vf total = state[i]->total * old[i];
        for (int k = 0; k < PARTS; k++) {
            vf p = exponential(s[i][k] - largest);
            store(weight[i], k * LANES, p, bf16);
            total += load(weight[i], k * LANES, bf16); /* as rounded */
        }
        state[i]->total = total;
    }
}

/* Add the weighted values of a block to `width` lanes of n sums from d on (both constants). */
INLINE void gather(State *const state[], const int n, const Tile *tile, const float weight[][BLOCK],
                   const float old[], int d, const int width, const int dim, const int bf16) {
    vf x[TOGETHER][4];
    for (int i = 0; i < n; i++)
        for (int w = 0; w < width; w++) x[i][w] = load(state[i]->sum, d + w * LANES, 0) * old[i];
    for (int j = 0; j < BLOCK >> bf16; j++)
        for (int i = 0; i < n; i++)
            for (int w = 0; w < width; w++)
                x[i][w] = dot_word(x[i][w], &tile->value[j * dim + d + w * LANES], weight[i], j, bf16);
    for (int i = 0; i < n; i++)
        for (int w = 0; w < width; w++) store(state[i]->sum, d + w * LANES, x[i][w], 0);
}

INLINE void visit(State *const state[], const int n, const Tile *tile, int32_t from, float softcap,
                  const int dim, const int bf16) {
    float weight[TOGETHER][BLOCK] __attribute__((aligned(64))), old[TOGETHER];
    int d = 0;
    score(state, n, tile, from, softcap, dim, bf16, weight, old);
    for (; d + 4 * LANES <= dim; d += 4 * LANES) gather(state, n, tile, weight, old, d, 4, dim, bf16);
    for (; d < dim; d += LANES) gather(state, n, tile, weight, old, d, 1, dim, bf16);
}

INLINE void visit_all(State *const state[], int count, const Tile *tile, int32_t from,
                      float softcap, const int dim, const int bf16) {
    for (; count >= TOGETHER; count -= TOGETHER, state += TOGETHER)
        visit(state, TOGETHER, tile, from, softcap, dim, bf16);
    if (count == 3) visit(state, 3, tile, from, softcap, dim, bf16);
    if (count == 2) visit(state, 2, tile, from, softcap, dim, bf16);
    if (count == 1) visit(state, 1, tile, from, softcap, dim, bf16);
}

/* Rows [begin, end) of segment s with one kv head: states[row - begin][query head of the group]. */
typedef struct {
    const Pass *pass;
    const Layer *layer;
    int32_t s, kv_head, begin, end, group;
    State *states;
    Tile *shared, *own;
} Task;

INLINE void open_states(const Task *t, const int dim, const int bf16) {
    const Pass *pass = t->pass;
    const Layer *layer = t->layer;
    int32_t length = pass->length[t->s], nodes = pass->node[t->s + 1] - pass->node[t->s];
    for (int32_t r = t->begin; r < t->end; r++) {
        int32_t position = pass->position[node_of(pass, t->s, r)];
        int32_t hidden = -1, last = layer->both_ways ? length + nodes - 1 : position;
        if (layer->window && layer->anchored) {
            hidden = length - layer->window - 1;
        } else if (layer->window) {
            hidden = position - layer->window;
            if (last > position + layer->window - 1) last = position + layer->window - 1;
        }
        for (int i = 0; i < t->group; i++) {
            State *state = &t->states[(r - t->begin) * t->group + i];
            int64_t head = (int64_t)r * layer->heads + t->kv_head * t->group + i;
            state->query = (const char *)pass->query + head * dim * (bf16 ? 2 : 4);
            state->hidden = hidden;
            state->last = last;
            state->largest = -INFINITY;
            state->total = (vf){0};
            memset(state->sum, 0, dim * sizeof(float));
        }
    }
}

/* Slots of the block from `from` on along the path of row r. */
static void own_slots(const Task *t, int32_t r, int32_t from, int64_t slot[BLOCK]) {
    const Pass *pass = t->pass;
    int32_t length = pass->length[t->s], first = pass->node[t->s], node = node_of(pass, t->s, r);
    for (int j = 0; j < BLOCK; j++) slot[j] = from + j < length ? pass->base[t->s] + from + j : -1;
    for (int32_t p = pass->position[node]; p >= from && p >= length; p--) {
        if (p < from + BLOCK) slot[p - from] = pass->base[t->s] + length + node - first;
        node = first + pass->parent[node];
    }
}

/* Ask for the next block while this one is computed: its lines come from memory, layer after layer
 * of weights has passed through the caches since they were last used. */
INLINE void prefetch_block(const Layer *layer, int64_t slot, const int dim, const int bf16) {
    const int row = dim * (bf16 ? 2 : 4);
    const char *key = (const char *)layer->key + slot * row;
    const char *value = (const char *)layer->value + slot * row;
    for (int i = 0; i < BLOCK * row; i += 64) {
        __builtin_prefetch(key + i);
        __builtin_prefetch(value + i);
    }
}

/* One block of positions for all rows of a task. */
INLINE void visit_block(const Task *t, int32_t from, int32_t last, const float softcap,
                        const int dim, const int bf16) {
    const Pass *pass = t->pass;
    const Layer *layer = t->layer;
    int64_t slot[BLOCK], head = (int64_t)t->kv_head * layer->slots;
    State *sharing[MAX_QUERIES];
    int count = 0;
    for (int32_t r = t->begin; r < t->end; r++) {
        State *states = &t->states[(r - t->begin) * t->group], *row[MAX_QUERIES];
        int32_t seen = states->last, straight = pass->straight[node_of(pass, t->s, r)];
        if (from > seen || from + BLOCK - 1 <= states->hidden) continue;
        if (layer->both_ways || straight > seen || from + BLOCK <= straight) {
            for (int i = 0; i < t->group; i++) sharing[count++] = states + i;
            continue;
        }
        for (int i = 0; i < t->group; i++) row[i] = states + i;
        own_slots(t, r, from, slot);
        load_tile(layer, head, slot, t->own, dim, bf16);
        visit_all(row, t->group, t->own, from, softcap, dim, bf16);
    }
    if (!count) return;
    for (int j = 0; j < BLOCK; j++)
        slot[j] = from + j <= last ? pass->base[t->s] + from + j : -1;
    load_tile(layer, head, slot, t->shared, dim, bf16);
    if (from + BLOCK <= last) prefetch_block(layer, head + pass->base[t->s] + from + BLOCK, dim, bf16);
    visit_all(sharing, count, t->shared, from, softcap, dim, bf16);
}

INLINE void attend(const Task *t, void *out, const float softcap, const int dim, const int bf16) {
    open_states(t, dim, bf16);
    int32_t last = 0, start = INT32_MAX;
    for (int32_t i = 0; i < (t->end - t->begin) * t->group; i++) {
        if (t->states[i].last > last) last = t->states[i].last;
        if (t->states[i].hidden + 1 < start) start = t->states[i].hidden + 1;
    }
    for (int32_t from = (start < 0 ? 0 : start) / BLOCK * BLOCK; from <= last; from += BLOCK)
        visit_block(t, from, last, softcap, dim, bf16);
    for (int32_t r = t->begin; r < t->end; r++)
        for (int i = 0; i < t->group; i++) {
            State *state = &t->states[(r - t->begin) * t->group + i];
            float total = sum(state->total);
            int64_t at = ((int64_t)r * t->layer->heads + t->kv_head * t->group + i) * dim;
            for (int d = 0; d < dim; d += LANES)
                store(out, at + d, load(state->sum, d, 0) / total, bf16);
        }
}

static void attend_any(const Task *t, void *out) {
    /* The common sizes are constants, so that their loops are unrolled; a soft-cap that is 0 in the
     * source leaves its registers to the sums. */
    const Layer *l = t->layer;
    float cap = l->softcap;
    if (l->bf16 && !cap && l->head_dim == 64) attend(t, out, 0, 64, 1);
    else if (l->bf16 && !cap && l->head_dim == 128) attend(t, out, 0, 128, 1);
    else if (l->bf16) attend(t, out, cap, l->head_dim, 1);
    else attend(t, out, cap, l->head_dim, 0);
}

typedef struct {
    Tile shared, own;
    State states[MAX_QUERIES];
} Scratch;

/* Half a megabyte per thread, kept: allocating it anew would cost a page fault per 4 KB. */
static Scratch *own_scratch(void) {
    static _Thread_local Scratch *scratch;
    if (!scratch) scratch = aligned_alloc(64, (sizeof(Scratch) + 63) / 64 * 64);
    return scratch;
}

static int count_tasks(const Pass *pass, const Layer *layer, int block) {
    int tasks = 0;
    for (int s = 0; s < pass->segments; s++)
        tasks += (pass->first[s + 1] - pass->first[s] + block - 1) / block * layer->kv_heads;
    return tasks;
}

/* qkv [rows, (heads + 2 kv_heads) * head_dim] -> out [rows, heads * head_dim]; keys and values are
 * written to the store on the way. */
static void attention(const Pass *pass, const Layer *layer, const void *qkv, void *out) {
    int group = layer->heads / layer->kv_heads;
    int block = MAX_QUERIES / group; /* rows per task */
    int tasks = count_tasks(pass, layer, block);
    if (tasks < 4) { /* so few that threads would get unequal shares: split the rows in two */
        block = (pass->rows + 1) / 2 < block ? (pass->rows + 1) / 2 : block;
        tasks = count_tasks(pass, layer, block);
    }
#pragma omp for schedule(static)
    for (int64_t r = 0; r < pass->rows; r++) {
        Place p = place_of(pass, layer, r);
        int64_t at = r * layer->qkv.out, kv = at + layer->heads * layer->head_dim;
        if (layer->bf16) {
            place_queries(pass, layer, qkv, at, r, p, 1);
            place_kv(layer, qkv, kv, p, 1);
        } else {
            place_queries(pass, layer, qkv, at, r, p, 0);
            place_kv(layer, qkv, kv, p, 0);
        }
    }
    Scratch *scratch = own_scratch();
#pragma omp for schedule(dynamic, 1)
    for (int task = 0; task < tasks; task++) {
        int s = 0, left = task;
        for (;; s++) {
            int rows = pass->first[s + 1] - pass->first[s];
            int count = (rows + block - 1) / block * layer->kv_heads;
            if (left < count) break;
            left -= count;
        }
        int32_t begin = pass->first[s] + left / layer->kv_heads * block;
        int32_t end = begin + block < pass->first[s + 1] ? begin + block : pass->first[s + 1];
        Task t = {pass,  layer, s, left % layer->kv_heads, begin, end, group, scratch->states,
                  &scratch->shared, &scratch->own};
        attend_any(&t, out);
    }
}

/* y = x + [norm](x' W^T): one half of a layer ends like this */
static void add(const Pass *pass, const Layer *layer, const Matrix *m, const void *x,
                const float *norm, const Matrix *then, void *hidden) {
    if (!norm) {
        product(m, x, hidden, hidden, pass->rows, then, layer->bf16, layer->bf16);
        return;
    }
    product(m, x, NULL, pass->wide, pass->rows, then, layer->bf16, layer->bf16);
    rms_norm(pass->wide, norm, hidden, hidden, pass->rows, m->out, layer->norm_eps, layer->bf16);
}

/* One row of what qkv reads of a layer with two inputs: both, each behind its norm. */
INLINE void read_row(const Layer *l, const void *beside, void *hidden, void *out, int64_t r, int dim,
                     int bf16) {
    int64_t at = r * dim, to = 2 * at;
    norm_row(beside, at, l->beside, NULL, out, to, dim, l->norm_eps, bf16);
    norm_row(hidden, at, l->before_attention, NULL, out, to + dim, dim, l->norm_eps, bf16);
    if (l->normed_residual)
        for (int d = 0; d < dim; d += LANES)
            store(hidden, at + d, load(out, to + dim + d, bf16), bf16);
}

/* What qkv reads: hidden itself, or pass->narrow. */
static const void *read_input(const Pass *pass, const Layer *l, const void *beside, void *hidden) {
    int32_t rows = pass->rows, dim = l->o.out;
    if (!l->before_attention) return hidden;
    if (!l->beside) {
        rms_norm(hidden, l->before_attention, NULL, pass->narrow, rows, dim, l->norm_eps, l->bf16);
        return pass->narrow;
    }
#pragma omp for schedule(static)
    for (int32_t r = 0; r < rows; r++)
        if (l->bf16) read_row(l, beside, hidden, pass->narrow, r, dim, 1);
        else read_row(l, beside, hidden, pass->narrow, r, dim, 0);
    return pass->narrow;
}

/* `then`, or null: the layer behind this one. */
static void run_layer(const Pass *pass, const Layer *l, const Layer *then, const void *beside,
                      void *hidden) {
    int32_t rows = pass->rows, dim = l->o.out, bf16 = l->bf16;
    const Matrix *next = then ? &then->qkv : NULL;
    product(&l->qkv, read_input(pass, l, beside, hidden), NULL, pass->wide, rows, &l->o, bf16, bf16);
    attention(pass, l, pass->wide, pass->narrow);
    add(pass, l, &l->o, pass->narrow, l->after_attention, &l->gate_up, hidden);
    rms_norm(hidden, l->before_mlp, NULL, pass->narrow, rows, dim, l->norm_eps, bf16);
    product(&l->gate_up, pass->narrow, NULL, pass->wide, rows, &l->down, bf16, bf16);
    gated(pass->wide, pass->narrow, rows, l->down.in, l->gelu, bf16);
    add(pass, l, &l->down, pass->narrow, l->after_mlp, next, hidden);
}

#define WORTH_A_TEAM 50000 /* multiplications; fewer are done before a second thread has woken up */

/* Some layers, in place on hidden [rows, dim]; beside [rows, dim] or null. */
void run(const Pass *pass, const Layer *const layers[], int32_t count, const void *beside,
         void *hidden) {
    const Layer *l = layers[0];
    int64_t work = (int64_t)pass->rows * l->o.out * (l->qkv.out + l->gate_up.out);
#pragma omp parallel if (work > WORTH_A_TEAM)
    for (int32_t i = 0; i < count; i++)
        run_layer(pass, layers[i], i + 1 < count ? layers[i + 1] : NULL, beside, hidden);
}

/* The rows of qkv that give keys and values, and up to 31 before them: weights lie in blocks. */
static Matrix kv_rows(const Layer *l) {
    int32_t skipped = l->heads * l->head_dim / COLUMNS * COLUMNS;
    Matrix m = l->qkv;
    m.weight = (const char *)m.weight + (int64_t)skipped * m.in * (l->bf16 ? 2 : 4);
    if (m.bias) m.bias += skipped;
    m.out -= skipped;
    return m;
}

static void append_to_layer(const Pass *pass, const Layer *l, const void *x) {
    Matrix m = kv_rows(l);
    product(&m, x, NULL, pass->wide, pass->rows, NULL, l->bf16, l->bf16);
#pragma omp for schedule(static)
    for (int32_t r = 0; r < pass->rows; r++) {
        Place p = place_of(pass, l, r);
        int64_t at = (int64_t)(r + 1) * m.out - 2 * l->kv_heads * l->head_dim;
        if (l->bf16) place_kv(l, pass->wide, at, p, 1);
        else place_kv(l, pass->wide, at, p, 0);
    }
}

/* Keys and values of rows x [rows, qkv.in] in some layers, which all read x itself. */
void append(const Pass *pass, const Layer *const layers[], int32_t count, const void *x) {
    int64_t work = (int64_t)pass->rows * layers[0]->qkv.in * layers[0]->kv_heads * layers[0]->head_dim;
#pragma omp parallel if (work * 2 > WORTH_A_TEAM)
    for (int32_t i = 0; i < count; i++) append_to_layer(pass, layers[i], x);
}

/* out = x W^T + b */
void linear(const Matrix *m, const void *x, void *out, int32_t rows, int32_t bf16) {
#pragma omp parallel if ((int64_t)rows * m->in * m->out > WORTH_A_TEAM)
    product(m, x, NULL, out, rows, NULL, bf16, bf16);
}

/* out = x / rms(x) * weight */
void norm(const void *x, const float *weight, float eps, void *out, int32_t rows, int32_t dim,
          int32_t bf16) {
    rms_norm(x, weight, NULL, out, rows, dim, eps, bf16);
}

/* logits [rows, head->out] in float32 from the final norm, unless it is null, and head; normed is
   scratch like x. */
void logits(const void *x, const float *norm, float eps, const Matrix *head, void *normed,
            float *out, int32_t rows, int32_t bf16) {
#pragma omp parallel if ((int64_t)rows * head->in * head->out > WORTH_A_TEAM)
    {
        if (norm) rms_norm(x, norm, NULL, normed, rows, head->in, eps, bf16);
        product(head, norm ? normed : x, NULL, out, rows, NULL, bf16, 0);
    }
}

/* Ranking. Parts of a row are looked over by the threads that have just computed them; what is found
 * does not depend on how many threads there are. */

#define CHUNK 64 /* columns; only few of them hold any of the best */
#define PARTS_OF_ROW 8
#define COST_OF_A_SCORE 8 /* multiplications: its exponential */

/* Scratch of rows with so many chunks, kept. */
static float *ranking_scratch(int32_t rows, int32_t floats) {
    static _Thread_local float *scratch;
    static _Thread_local size_t room;
    size_t wanted = (size_t)rows * floats;
    if (room < wanted) {
        free(scratch);
        scratch = malloc(wanted * sizeof(float));
        room = wanted;
    }
    return scratch;
}

static float largest_of(const float *x, int32_t begin, int32_t end) {
    vf found = splat(-INFINITY);
    int32_t i = begin;
    for (; i + LANES <= end; i += LANES) found = larger(found, load(x, i, 0));
    float largest = max(found);
    for (; i < end; i++) largest = x[i] > largest ? x[i] : largest;
    return largest;
}

/* Of scores of which this is the largest. */
static Mass mass_below(float largest, const float *x, int32_t begin, int32_t end) {
    if (largest == -INFINITY) return (Mass){largest, 0}; /* nothing there, or all of it forbidden */
    vf totals = {0};
    int32_t i = begin;
    for (; i + LANES <= end; i += LANES) totals += exponential(load(x, i, 0) - largest);
    float total = sum(totals);
    for (; i < end; i++) total += expf(x[i] - largest);
    return (Mass){largest, total};
}

Mass mass_of(const float *x, int32_t size) { return mass_below(largest_of(x, 0, size), x, 0, size); }

/* The largest score of every chunk from `begin` on, which begins one, and the mass of all. */
static Mass look_over(const float *x, int32_t begin, int32_t end, float *maxima) {
    float largest = -INFINITY;
    for (int32_t at = begin; at < end; at += CHUNK) {
        float found = largest_of(x, at, at + CHUNK < end ? at + CHUNK : end);
        maxima[at / CHUNK] = found;
        if (found > largest) largest = found;
    }
    return mass_below(largest, x, begin, end);
}

typedef struct {
    float weight, mass;
} Weighed;

INLINE void swap(Weighed *a, Weighed *b) {
    Weighed kept = *a;
    *a = *b;
    *b = kept;
}

/* The largest weight such that those from it on have the mass, or the smallest one. Quickselect. */
static float cut(Weighed *x, int32_t count, double mass) {
    int32_t begin = 0, end = count;
    for (;;) {
        float pivot = x[begin + (end - begin) / 2].weight;
        double above = 0, equal = 0;
        int32_t first = begin, at = begin, last = end; /* equal weights end up in [first, last) */
        while (at < last) {
            if (x[at].weight > pivot) {
                above += x[at].mass;
                swap(x + first++, x + at++);
            } else if (x[at].weight < pivot) {
                swap(x + at, x + --last);
            } else {
                equal += x[at++].mass;
            }
        }
        if (first > begin && above >= mass) {
            end = first;
        } else if (last == end || above + equal >= mass) {
            return pivot;
        } else {
            mass -= above + equal;
            begin = last;
        }
    }
}

/* What the `count` largest of some numbers reach, or -inf where they are fewer. */
static float kth(const float *x, int32_t size, int32_t count, Weighed *scratch) {
    if (count > size) return -INFINITY;
    for (int32_t i = 0; i < size; i++) scratch[i] = (Weighed){x[i], 1};
    return cut(scratch, size, count);
}

/* Put a score into the best of those before it. */
void insert(float score, int64_t column, int32_t count, int32_t *found, int64_t *columns,
            float *scores) {
    if (*found == count && !(score > scores[count - 1])) return;
    int32_t at = *found < count ? (*found)++ : count - 1;
    for (; at && score > scores[at - 1]; at--) {
        scores[at] = scores[at - 1];
        columns[at] = columns[at - 1];
    }
    scores[at] = score;
    columns[at] = column;
}

/* The `count` largest scores, best first and the lowest column first in a tie, and their shares. */
static void pick(const float *x, int32_t size, const float *maxima, Weighed *scratch,
                 const Mass masses[PARTS_OF_ROW], int32_t count, int64_t *columns, float *shares) {
    int32_t chunks = (size + CHUNK - 1) / CHUNK, found = 0;
    float bound = kth(maxima, chunks, count, scratch);
    for (int32_t c = 0; c < chunks; c++) {
        if (!(maxima[c] >= bound)) continue; /* `count` chunks reach it */
        int32_t end = (c + 1) * CHUNK < size ? (c + 1) * CHUNK : size;
        for (int32_t i = c * CHUNK; i < end; i++)
            if (x[i] >= bound) insert(x[i], i, count, &found, columns, shares);
    }
    float largest = shares[0], total = 0;
    for (int32_t p = 0; p < PARTS_OF_ROW; p++)
        total += masses[p].total * expf(masses[p].largest - largest);
    float log_sum = logf(total) + largest;
    for (int32_t i = 0; i < count; i++) shares[i] = expf(shares[i] - log_sum);
}

static int32_t floats_of_ranking(int32_t size) {
    int32_t chunks = (size + CHUNK - 1) / CHUNK; /* their maxima, and those once more to rank them */
    return (PARTS_OF_ROW * sizeof(Mass) + chunks * (sizeof(float) + sizeof(Weighed))) / sizeof(float);
}

static void best_of_rows(const float *scores, int32_t rows, int32_t stride, int32_t size,
                         int32_t count, int64_t *columns, float *shares, float *scratch) {
    int32_t floats = floats_of_ranking(size), chunks = (size + CHUNK - 1) / CHUNK;
    int32_t length = (chunks + PARTS_OF_ROW - 1) / PARTS_OF_ROW * CHUNK;
#pragma omp for schedule(static)
    for (int32_t part = 0; part < PARTS_OF_ROW; part++)
        for (int64_t r = 0; r < rows; r++) {
            Mass *masses = (Mass *)(scratch + r * floats);
            int32_t begin = part * length, end = begin + length < size ? begin + length : size;
            masses[part] = look_over(scores + r * stride, begin, end, (float *)(masses + PARTS_OF_ROW));
        }
#pragma omp for schedule(static)
    for (int64_t r = 0; r < rows; r++) {
        Mass *masses = (Mass *)(scratch + r * floats);
        float *maxima = (float *)(masses + PARTS_OF_ROW);
        pick(scores + r * stride, size, maxima, (Weighed *)(maxima + chunks), masses, count,
             columns + r * count, shares + r * count);
    }
}

/* columns, shares [rows, count] of the best of scores [rows, stride], of which `size` are no padding:
 * shares in a softmax over all. */
void best(const float *scores, int32_t rows, int32_t stride, int32_t size, int32_t count,
          int64_t *columns, float *shares) {
    float *scratch = ranking_scratch(rows, floats_of_ranking(size));
#pragma omp parallel if ((int64_t)rows * size * COST_OF_A_SCORE > WORTH_A_TEAM)
    best_of_rows(scores, rows, stride, size, count, columns, shares, scratch);
}

/* Choosing. The law and the race are those of sampling.py, which says what they are. */

typedef struct {
    const float *logits;
    uint64_t key; /* of the noise at this place */
    double top_p;
    float temperature, least; /* least: log of min_p */
    int32_t top_k;            /* 0: no bound */
} Choice;

typedef struct { /* log weights are (logit - largest) / temperature, maxima those of the chunks */
    const Choice *choice;
    float largest;
    int32_t size, chunks;
    float *maxima;
} Law;

/* The log weights of a chunk; -inf beyond the end of the row. */
INLINE void weigh(const Law *law, int32_t chunk, float *weights) {
    const float *x = law->choice->logits + chunk * CHUNK;
    int32_t end = law->size - chunk * CHUNK;
    float largest = law->largest, temperature = law->choice->temperature;
    if (end >= CHUNK)
        for (int32_t i = 0; i < CHUNK; i += LANES)
            store(weights, i, (load(x, i, 0) - largest) / temperature, 0);
    else
        for (int32_t i = 0; i < CHUNK; i++)
            weights[i] = i < end ? (x[i] - largest) / temperature : -INFINITY;
}

static double mass_from(const Law *law, float bound) {
    vf totals = {0};
    for (int32_t c = 0; c < law->chunks; c++) {
        if (!(law->maxima[c] >= bound)) continue;
        float weights[CHUNK];
        weigh(law, c, weights);
        for (int32_t i = 0; i < CHUNK; i += LANES) {
            vf w = load(weights, i, 0);
            totals += (vf)((vi)exponential(w) & (w >= bound));
        }
    }
    return sum(totals);
}

/* The tokens from one weight on and below another. One more is written than is counted. */
static int32_t collect(const Law *law, float low, float high, Weighed *found) {
    int32_t count = 0;
    for (int32_t c = 0; c < law->chunks; c++) {
        if (!(law->maxima[c] >= low)) continue;
        float weights[CHUNK];
        weigh(law, c, weights);
        for (int32_t i = 0; i < CHUNK; i++) {
            found[count].weight = weights[i];
            count += (weights[i] >= low) & (weights[i] < high);
        }
    }
    return count;
}

/* The same with the mass of each, and of all. */
static int32_t collect_masses(const Law *law, float low, float high, Weighed *found, double *total) {
    int32_t count = collect(law, low, high, found);
    *total = 0;
    for (int32_t i = 0; i < count; i++) *total += found[i].mass = expf(found[i].weight);
    return count;
}

static float kth_weight(const Law *law, int32_t k, float bound, Weighed *scratch) {
    float reached = kth(law->maxima, law->chunks, k, scratch); /* by a token each in k chunks */
    bound = reached > bound ? reached : bound;
    int32_t count = collect(law, bound, INFINITY, scratch);
    for (int32_t i = 0; i < count; i++) scratch[i].mass = 1;
    return cut(scratch, count, k);
}

/* The smallest weight in the nucleus of the tokens from `bound` on. No more than e^8 tokens have a
 * probability of e^-8, and mostly those are enough; otherwise it is sought between `low` and `high`. */
static float nucleus(const Law *law, float bound, Weighed *scratch) {
    double total = mass_from(law, bound), wanted = total * law->choice->top_p, above = 0;
    float low = bound, high = INFINITY, likely = logf(total) - 8;
    if (likely > bound) {
        int32_t count = collect_masses(law, likely, high, scratch, &above);
        if (above >= wanted) return cut(scratch, count, wanted);
        high = likely;
    }
    for (float step = 4; step > 0.25f && high - step > bound; step /= 2) {
        double mass = mass_from(law, high - step);
        if (mass >= wanted) low = high - step;
        else high -= step, above = mass;
    }
    double between;
    int32_t count = collect_masses(law, low, high, scratch, &between);
    return count ? cut(scratch, count, wanted - above) : high; /* none where rounding decided */
}

static float threshold_of(const Law *law, Weighed *scratch) {
    const Choice *choice = law->choice;
    float threshold = choice->least;
    if (choice->top_k > 0 && choice->top_k < law->size) {
        float kth = kth_weight(law, choice->top_k, threshold, scratch);
        threshold = kth > threshold ? kth : threshold;
    }
    if (choice->top_p < 1) threshold = nucleus(law, threshold, scratch);
    return threshold;
}

INLINE uint64_t hashed(uint64_t key, uint64_t token) { /* SplitMix64 */
    uint64_t z = key + token * 0x9E3779B97F4A7C15u;
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9u;
    z = (z ^ z >> 27) * 0x94D049BB133111EBu;
    return z ^ z >> 31;
}

static float gumbel(uint64_t hash) {
    float v = ((float)(int64_t)(hash >> 12) + 0.5f) * 0x1p-52f;
    if (v > 1 - 0x1p-24f) v = 1 - 0x1p-24f;
    return -logf(-log1pf(-v));
}

/* The token with the largest weight plus noise. For that e^-(weight + noise), which is at least
 * v / e^weight, has to be less than the smallest so far: few tokens need logarithms. */
static int32_t race(const Law *law, float threshold) {
    uint64_t key = law->choice->key;
    int32_t winner = 0;
    float score = -INFINITY, limit = FLT_MAX;
    for (int32_t c = 0; c < law->chunks; c++) {
        if (!(law->maxima[c] >= threshold)) continue;
        float weights[CHUNK];
        uint32_t upper[CHUNK]; /* half of the hash */
        int32_t fast[CHUNK];
        weigh(law, c, weights);
        for (int32_t i = 0; i < CHUNK; i++) upper[i] = hashed(key, c * CHUNK + i) >> 32;
        for (int32_t i = 0; i < CHUNK; i += LANES) {
            vu u;
            memcpy(&u, upper + i, sizeof u);
            vf w = load(weights, i, 0), v = __builtin_convertvector(u, vf) * 0x1p-32f;
            vi in_time = (v <= exponential(w) * limit) & (w >= threshold);
            memcpy(fast + i, &in_time, sizeof in_time);
        }
        int32_t any = 0;
        for (int32_t i = 0; i < CHUNK; i++) any |= fast[i];
        if (!any) continue;
        for (int32_t i = 0; i < CHUNK; i++) {
            if (!fast[i]) continue;
            float reached = weights[i] + gumbel(hashed(key, c * CHUNK + i));
            if (!(reached > score)) continue;
            score = reached;
            winner = c * CHUNK + i;
            limit = expf(-score) * 1.0001f; /* nobody is left out by rounding */
        }
    }
    return winner;
}

static int32_t choose_one(const Choice *choice, int32_t size) {
    Law law = {choice, -INFINITY, size, (size + CHUNK - 1) / CHUNK, NULL};
    Weighed *scratch = (Weighed *)ranking_scratch(1, 2 * (law.chunks * CHUNK + 1) + law.chunks);
    law.maxima = (float *)(scratch + law.chunks * CHUNK + 1);
    for (int32_t c = 0; c < law.chunks; c++) {
        int32_t end = (c + 1) * CHUNK < size ? (c + 1) * CHUNK : size;
        law.maxima[c] = largest_of(choice->logits, c * CHUNK, end);
        if (law.maxima[c] > law.largest) law.largest = law.maxima[c];
    }
    if (law.largest == -INFINITY) return 0; /* all of it forbidden */
    for (int32_t c = 0; c < law.chunks; c++)
        law.maxima[c] = (law.maxima[c] - law.largest) / choice->temperature;
    return race(&law, threshold_of(&law, scratch));
}

/* One token per place, each from a row of `size` logits. */
void choose(const Choice *choices, int32_t rows, int32_t size, int64_t *tokens) {
#pragma omp parallel for if (rows > 1 && (int64_t)rows * size * COST_OF_A_SCORE > WORTH_A_TEAM)
    for (int32_t r = 0; r < rows; r++) tokens[r] = choose_one(choices + r, size);
}

double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec + 1e-9 * t.tv_nsec;
}

/* From states x to the best of their logits: `logits`, then `best`, whose seconds are returned.
 * scores is scratch, [rows, head->out], of which `size` are no padding. */
double rank(const void *x, const float *norm, float eps, const Matrix *head, void *normed,
          float *scores, int32_t rows, int32_t bf16, int32_t size, int32_t count, int64_t *columns,
          float *shares) {
    float *scratch = ranking_scratch(rows, floats_of_ranking(size));
    double begin = 0;
#pragma omp parallel if ((int64_t)rows * head->in * head->out > WORTH_A_TEAM)
    {
        if (norm) rms_norm(x, norm, NULL, normed, rows, head->in, eps, bf16);
        product(head, norm ? normed : x, NULL, scores, rows, NULL, bf16, 0);
#pragma omp master
        begin = now();
        best_of_rows(scores, rows, head->out, size, count, columns, shares, scratch);
    }
    return now() - begin;
}
