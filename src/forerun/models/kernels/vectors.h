/* Vectors of 16 numbers: GCC vector extensions, which compile for any processor. */
#pragma once

#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#ifdef __AVX512BF16__
#include <immintrin.h>
#endif

#define LANES 16 /* of a vector */

typedef float vf __attribute__((vector_size(64)));
typedef int32_t vi __attribute__((vector_size(64)));
typedef uint32_t vu __attribute__((vector_size(64)));
typedef uint16_t vh __attribute__((vector_size(32)));

#define INLINE static inline __attribute__((always_inline))

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
#ifdef __AVX512BF16__
        __m256bh h = _mm512_cvtneps_pbh((__m512)x);
#else
        vu u = (vu)x;
        vh h = __builtin_convertvector((u + 0x7fff + ((u >> 16) & 1)) >> 16, vh);
#endif
        memcpy((uint16_t *)p + i, &h, sizeof h);
    } else {
        memcpy((float *)p + i, &x, sizeof x);
    }
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
