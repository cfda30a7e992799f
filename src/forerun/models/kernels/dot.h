/* Products of pairs of bfloat16, by the instruction that AVX-512 has for them where it exists. */
#pragma once

#include "vectors.h"

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
