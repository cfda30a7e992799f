/* The layers of a decoder pass, for processors. Mirrored in __init__.py.
 *
 * Every output row is computed by the same operations in the same order, whatever other rows share
 * the pass: products sum over the inner size from front to back, and the keys of a row are visited
 * in blocks of 64 positions of ITS OWN path, root first. So a row of a tree, of a chain, of a batch
 * or alone gives the same bits.
 *
 * Tensors are bfloat16 (bf16 = 1) or float32; all sums are float32.
 */
#pragma once

#include <stdint.h>
#include <time.h>

#define MAX_HEAD 256
#define COLUMNS 32 /* of a block of a packed weight: two vectors */

/* One pass over the rows of several sequences. Nodes are what lies uncommitted in the store: node i
 * of segment s in slot base + length + i. The last nodes of a segment are its rows, those before
 * them were rows of earlier passes. */
typedef struct {
    int32_t rows, segments;
    const int32_t *base, *length; /* per segment: first slot, committed slots */
    const int32_t *first;         /* per segment and one more: first row */
    const int32_t *node;          /* per segment and one more: first node */
    const int32_t *parent;        /* per node: node of its segment that it follows, or -1 */
    int32_t *position;            /* per node, filled by prepare */
    int32_t *straight;            /* per node, filled by prepare: leading positions of its path that
                                     lie in consecutive slots from the segment's base on */
    void *query;                  /* scratch [rows, heads, head_dim] */
    void *narrow, *wide;          /* scratch [rows, largest inner size], [rows, largest fused size] */
} Pass;

/* y = x W^T + b, W packed as [out / 32, in / 2, 32, 2] (bfloat16) or [out / 32, in, 32] (float32),
 * padded to whole blocks of 32 outputs. */
typedef struct {
    const void *weight;
    const float *bias; /* or null */
    int32_t in, out;
} Matrix;

typedef struct {
    int32_t bf16, heads, kv_heads, head_dim;
    int64_t slots;              /* of the store: stride between heads is slots * head_dim */
    void *key, *value;          /* this layer's [kv_heads, slots, head_dim] */
    const float *cosine, *sine; /* [positions, head_dim / 2] */
    const float *q_norm, *k_norm; /* [head_dim] or null; the offset is already added */
    float norm_eps, scale, softcap; /* softcap 0: none */
    int32_t window;                 /* 0: all positions */
    int32_t anchored; /* windows end `window` before the segment's first node, not before the row */
    int32_t both_ways; /* rows see those behind them, too; segments must be chains */
    int32_t gelu;                   /* else SiLU */
    Matrix qkv, o, gate_up, down;   /* qkv is [q | k | v], gate_up [gate | up] */
    const float *before_attention, *after_attention, *before_mlp, *after_mlp; /* norm weights; all
                                       but before_mlp may be null */
    const float *beside;    /* null, or norm weight of a second input, which qkv reads first */
    int32_t normed_residual; /* the residual starts behind before_attention */
} Layer;

/* States between layers that are kept: boundary i lies before layer i of those run. */
typedef struct {
    int32_t count;
    const int32_t *boundary;
    void *out; /* [rows, count, dim] */
} Taps;

void prepare(Pass *pass);
void run(const Pass *pass, const Layer *const layers[], int32_t count, const void *beside,
         void *hidden, const Taps *taps);
void linear(const Matrix *m, const void *x, void *out, int32_t rows, int32_t bf16);
void norm(const void *x, const float *weight, float eps, void *out, int32_t rows, int32_t dim,
          int32_t bf16);
void append(const Pass *pass, const Layer *const layers[], int32_t count, const void *x);
void add_silu(const void *x, const void *y, int64_t stride, void *out, int32_t rows, int32_t dim,
              int32_t bf16);
void logits(const void *x, const float *norm, float eps, const Matrix *head, void *normed,
            float *out, int32_t rows, int32_t bf16);
void best(const float *scores, int32_t rows, int32_t stride, int32_t size, int32_t count,
          int64_t *columns, float *shares);
double rank(const void *x, const float *norm, float eps, const Matrix *head, void *normed,
            float *scores, int32_t rows, int32_t bf16, int32_t size, int32_t count, int64_t *columns,
            float *shares);

static inline double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec + 1e-9 * t.tv_nsec;
}
