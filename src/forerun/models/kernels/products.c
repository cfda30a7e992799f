/* Products with packed weights. */
#include "dot.h"
#include "team.h"

#ifdef _OPENMP
#include <omp.h>
#endif

#define ROWS 8  /* that share one walk over a block: their sums fill the registers */
#define SOON 48 /* steps of a walk that memory needs */
#define FEW 6   /* rows with which the processor's own prefetching keeps memory busy */

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
 * alone for what it needs itself soon. With few rows the processor looks ahead by itself, and requests
 * beside its own only slow it down. */
INLINE void rows_product(const Matrix *m, const void *x, const void *residual, void *out, int32_t rows,
                         int32_t block, const uint32_t *next, const int bf16, const int out_bf16) {
    int64_t walks = (rows + ROWS - 1) / ROWS, half = words_of_block(m, bf16) / 2;
    for (int64_t walk = 0; walk < walks; walk++) {
        int64_t r = rows * walk / walks;
        const uint32_t *soon = block_of(m, block, bf16) + SOON * COLUMNS;
        switch (rows * (walk + 1) / walks - r) {
#define CASE(n)                                                                                   \
    case n:                                                                                       \
        if (walks == 1)                                                                           \
            block_product(m, x, residual, out, r, n, block, soon, n > FEW ? 2 : 0, bf16, out_bf16); \
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
void product(const Matrix *m, const void *x, const void *residual, void *out, int32_t rows,
             const Matrix *then, int bf16, int out_bf16) {
    if (bf16 && out_bf16) product_of_type(m, x, residual, out, rows, then, 1, 1);
    else if (bf16) product_of_type(m, x, residual, out, rows, then, 1, 0);
    else product_of_type(m, x, residual, out, rows, then, 0, 0);
}

/* out = x W^T + b */
void linear(const Matrix *m, const void *x, void *out, int32_t rows, int32_t bf16) {
#pragma omp parallel if ((int64_t)rows * m->in * m->out > WORTH_A_TEAM)
    product(m, x, NULL, out, rows, NULL, bf16, bf16);
}
