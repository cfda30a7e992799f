/* Rows of scores in chunks, by whose largest ones the best of a row are found: few chunks hold any. */
#pragma once

#include <stddef.h>
#include <stdint.h>

#define CHUNK 64          /* columns */
#define COST_OF_A_SCORE 8 /* multiplications: its exponential */

typedef struct { /* of the exponentials of some scores, in units of the largest */
    float largest, total;
} Mass;

typedef struct {
    float weight, mass;
} Weighed;

static inline int32_t chunks_of(int32_t size) { return (size + CHUNK - 1) / CHUNK; }

static inline int32_t end_of_chunk(int32_t chunk, int32_t size) {
    return (chunk + 1) * CHUNK < size ? (chunk + 1) * CHUNK : size;
}

/* Hidden, so that no other library of the process can put its own in their place. */
#pragma GCC visibility push(hidden)

float *kept_floats(size_t count);
float look_over(const float *x, int32_t begin, int32_t end, float *maxima);
Mass mass_below(float largest, const float *x, int32_t begin, int32_t end);
Mass mass_of(const float *x, int32_t size);
float cut(Weighed *x, int32_t count, double mass);
float kth(const float *x, int32_t size, int32_t k, Weighed *scratch);
void insert(float score, int64_t column, int32_t count, int32_t *found, int64_t *columns,
            float *scores);

#pragma GCC visibility pop
