/* What ranking, drawing and racing ask of a row of scores; see scores.h. */
#include "scores.h"

#include "vectors.h"

#include <stdlib.h>

/* Scratch of this thread, kept. */
float *kept_floats(size_t count) {
    static _Thread_local float *scratch;
    static _Thread_local size_t room;
    if (room < count) {
        free(scratch);
        scratch = malloc(count * sizeof(float));
        room = count;
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
Mass mass_below(float largest, const float *x, int32_t begin, int32_t end) {
    if (largest == -INFINITY) return (Mass){largest, 0}; /* nothing there, or all of it forbidden */
    vf totals = {0};
    int32_t i = begin;
    for (; i + LANES <= end; i += LANES) totals += exponential(load(x, i, 0) - largest);
    float total = sum(totals);
    for (; i < end; i++) total += expf(x[i] - largest);
    return (Mass){largest, total};
}

Mass mass_of(const float *x, int32_t size) { return mass_below(largest_of(x, 0, size), x, 0, size); }

/* The largest score, and that of every chunk, from `begin` on, where one begins. */
float look_over(const float *x, int32_t begin, int32_t end, float *maxima) {
    float largest = -INFINITY;
    for (int32_t at = begin; at < end; at += CHUNK) {
        float found = largest_of(x, at, at + CHUNK < end ? at + CHUNK : end);
        maxima[at / CHUNK] = found;
        if (found > largest) largest = found;
    }
    return largest;
}

INLINE void swap(Weighed *a, Weighed *b) {
    Weighed kept = *a;
    *a = *b;
    *b = kept;
}

/* The largest weight such that those from it on have the mass, or the smallest one. Quickselect. */
float cut(Weighed *x, int32_t count, double mass) {
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

/* What the k largest of some numbers reach, or -inf where they are fewer. */
float kth(const float *x, int32_t size, int32_t k, Weighed *scratch) {
    if (k > size) return -INFINITY;
    for (int32_t i = 0; i < size; i++) scratch[i] = (Weighed){x[i], 1};
    return cut(scratch, size, k);
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
