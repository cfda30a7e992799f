/* What is done row by row: norms and activations. */
#include "team.h"
#include "vectors.h"

/* out = x / rms(x) * weight (+ residual) */
void rms_norm(const void *x, const float *weight, const void *residual, void *out, int32_t rows,
              int32_t dim, float eps, int bf16) {
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
void gated(const void *gate_up, void *out, int32_t rows, int32_t dim, int gelu, int bf16) {
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

/* The same on one thread. */
void norm(const void *x, const float *weight, float eps, void *out, int32_t rows, int32_t dim,
          int32_t bf16) {
    rms_norm(x, weight, NULL, out, rows, dim, eps, bf16);
}
