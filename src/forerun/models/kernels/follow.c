/* Where a draft agrees with a greedy target: `follow` of verify/follow.py in one call. Behind a pass,
 * which has moved its weights through all caches, an interpreter takes longer for it than the search
 * for the largest logits does. */
#include "kernels.h"
#include "scores.h"

#include <string.h>

/* Column of the largest score, the lowest one in a tie. */
static int64_t largest_column(const float *x, int32_t size) {
    int32_t chunks = chunks_of(size);
    float *maxima = kept_floats(chunks), most = look_over(x, 0, size, maxima);
    for (int32_t c = 0; c < chunks; c++) {
        if (maxima[c] != most) continue;
        for (int32_t i = c * CHUNK; i < end_of_chunk(c, size); i++)
            if (x[i] == most) return i;
    }
    return 0; /* not a number */
}

/* logits [1 + count, size]: behind the last token, then behind each node of the draft. Writes the
 * nodes that are accepted to path, [count], and the token that follows; returns how many they are.
 * All nodes that spell the text so far are walked at once: siblings with one token lose nothing. */
int32_t follow(const float *logits, int32_t size, const int64_t *tokens, const int32_t *parents,
               int32_t count, int32_t *path, int64_t *next) {
    int32_t depths[count + 1], depth = 1, last = -1; /* of those walked; the root comes first */
    memset(depths, 0, sizeof depths);
    depths[0] = depth;
    for (;;) {
        *next = largest_column(logits + (int64_t)(last + 1) * size, size);
        int32_t first = -1;
        for (int32_t node = count - 1; node > last; node--)
            if (tokens[node] == *next && depths[parents[node] + 1] == depth) {
                depths[node + 1] = depth + 1;
                first = node;
            }
        if (first < 0) break;
        last = first;
        depth++;
    }
    for (int32_t i = depth - 2; i >= 0; i--, last = parents[last]) path[i] = last;
    return depth - 1;
}
