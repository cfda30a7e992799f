/* Where a draft agrees with a greedy target: `follow` of verify/follow.py in one call. Behind a pass,
 * which has moved its weights through all caches, an interpreter takes longer for it than the search
 * for the largest logits does. */
#include "kernels.h"

#include <string.h>

#define WIDE 64 /* scores that are looked at together */

/* Column of the largest score, the lowest one in a tie. */
static int64_t largest(const float *x, int32_t size) {
    float maxima[WIDE], most = x[0];
    int32_t whole = size / WIDE * WIDE;
    for (int32_t j = 0; j < WIDE; j++) maxima[j] = most;
    for (int32_t i = 0; i < whole; i += WIDE)
        for (int32_t j = 0; j < WIDE; j++) maxima[j] = x[i + j] > maxima[j] ? x[i + j] : maxima[j];
    for (int32_t j = 0; j < WIDE; j++) most = maxima[j] > most ? maxima[j] : most;
    for (int32_t i = whole; i < size; i++) most = x[i] > most ? x[i] : most;
    for (int32_t i = 0; i < whole; i += WIDE) {
        int32_t found = 0;
        for (int32_t j = 0; j < WIDE; j++) found |= x[i + j] == most;
        if (found) {
            whole = i;
            break;
        }
    }
    while (whole < size - 1 && x[whole] != most) whole++;
    return whole;
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
        *next = largest(logits + (int64_t)(last + 1) * size, size);
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
