/* What the threads of a parallel region do together: all of them call these functions, which share
 * the work among them. Called outside of a region, they do it on one thread. */
#pragma once

#include "kernels.h"

#define WORTH_A_TEAM 50000 /* multiplications; fewer are done before a second thread has woken up */

/* Hidden, so that no other library of the process can put its own in their place. */
#pragma GCC visibility push(hidden)

void rms_norm(const void *x, const float *weight, const void *residual, void *out, int32_t rows,
              int32_t dim, float eps, int bf16);
void gated(const void *gate_up, void *out, int32_t rows, int32_t dim, int gelu, int bf16);
void product(const Matrix *m, const void *x, const void *residual, void *out, int32_t rows,
             const Matrix *then, int bf16, int out_bf16);
void place_rows(const Pass *pass, const Layer *layer, const void *qkv);
void place_kv_rows(const Pass *pass, const Layer *layer, const void *x, int32_t width);
void attention(const Pass *pass, const Layer *layer, const void *qkv, void *out);

#pragma GCC visibility pop

static inline int32_t node_of(const Pass *pass, int s, int32_t row) {
    return pass->node[s + 1] - pass->first[s + 1] + row;
}
