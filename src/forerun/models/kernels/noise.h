/* The noise of the target's own choices, as in sampling.py: a hash of seed, position and token. */
#pragma once

#include <math.h>
#include <stdint.h>

#define GOLDEN 0x9E3779B97F4A7C15u /* SplitMix64 */

static inline uint64_t mixed(uint64_t z) {
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9u;
    z = (z ^ z >> 27) * 0x94D049BB133111EBu;
    return z ^ z >> 31;
}

static inline uint64_t key_of(uint64_t seed, int64_t position) {
    return mixed(mixed(mixed(seed + GOLDEN) + position + GOLDEN) + GOLDEN);
}

static inline uint64_t hash_of(uint64_t key, int64_t token) { return mixed(key + token * GOLDEN); }

/* exp(-noise): an exponential number. */
static inline float arrival(uint64_t key, int64_t token) {
    float v = ((float)(int64_t)(hash_of(key, token) >> 12) + 0.5f) * 0x1p-52f;
    return -log1pf(-fminf(v, 1 - 0x1p-24f));
}

static inline float gumbel(uint64_t key, int64_t token) { return -logf(arrival(key, token)); }
