/* The best of rows of scores. Parts of a row are looked over by the threads that have just computed
 * them; what is found does not depend on how many threads there are. */
#include "scores.h"
#include "team.h"

#include <math.h>

#define PARTS_OF_ROW 8

/* The `count` largest scores, best first and the lowest column first in a tie, and their shares. */
static void pick(const float *x, int32_t size, const float *maxima, Weighed *scratch,
                 const Mass masses[PARTS_OF_ROW], int32_t count, int64_t *columns, float *shares) {
    int32_t chunks = chunks_of(size), found = 0;
    float bound = kth(maxima, chunks, count, scratch);
    for (int32_t c = 0; c < chunks; c++) {
        if (!(maxima[c] >= bound)) continue; /* `count` chunks reach it */
        for (int32_t i = c * CHUNK; i < end_of_chunk(c, size); i++)
            if (x[i] >= bound) insert(x[i], i, count, &found, columns, shares);
    }
    float largest = shares[0], total = 0;
    for (int32_t p = 0; p < PARTS_OF_ROW; p++)
        total += masses[p].total * expf(masses[p].largest - largest);
    float log_sum = logf(total) + largest;
    for (int32_t i = 0; i < count; i++) shares[i] = expf(shares[i] - log_sum);
}

static int32_t floats_of_ranking(int32_t size) {
    int32_t chunks = chunks_of(size); /* their maxima, and those once more to rank them */
    return (PARTS_OF_ROW * sizeof(Mass) + chunks * (sizeof(float) + sizeof(Weighed))) / sizeof(float);
}

static void best_of_rows(const float *scores, int32_t rows, int32_t stride, int32_t size,
                         int32_t count, int64_t *columns, float *shares, float *scratch) {
    int32_t floats = floats_of_ranking(size), chunks = chunks_of(size);
    int32_t length = (chunks + PARTS_OF_ROW - 1) / PARTS_OF_ROW * CHUNK;
#pragma omp for schedule(static)
    for (int32_t part = 0; part < PARTS_OF_ROW; part++)
        for (int64_t r = 0; r < rows; r++) {
            Mass *masses = (Mass *)(scratch + r * floats);
            int32_t begin = part * length, end = begin + length < size ? begin + length : size;
            const float *x = scores + r * stride;
            float largest = look_over(x, begin, end, (float *)(masses + PARTS_OF_ROW));
            masses[part] = mass_below(largest, x, begin, end);
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
    float *scratch = kept_floats((size_t)rows * floats_of_ranking(size));
#pragma omp parallel if ((int64_t)rows * size * COST_OF_A_SCORE > WORTH_A_TEAM)
    best_of_rows(scores, rows, stride, size, count, columns, shares, scratch);
}

/* From states x to the best of their logits: `logits`, then `best`, whose seconds are returned.
 * scores is scratch, [rows, head->out], of which `size` are no padding. */
double rank(const void *x, const float *norm, float eps, const Matrix *head, void *normed,
          float *scores, int32_t rows, int32_t bf16, int32_t size, int32_t count, int64_t *columns,
          float *shares) {
    float *scratch = kept_floats((size_t)rows * floats_of_ranking(size));
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
