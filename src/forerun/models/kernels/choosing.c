/* Tokens drawn from logits. The law and the race are those of sampling.py, which says what they are. */
#include "noise.h"
#include "scores.h"
#include "team.h"
#include "vectors.h"

#include <float.h>

typedef struct { /* one token */
    const float *logits;
    uint64_t key; /* of the noise at this place */
    double top_p;
    float temperature, least; /* least: log of min_p */
    int32_t top_k;            /* 0: no bound */
} Draw;

typedef struct { /* log weights are (logit - largest) / temperature, maxima those of the chunks */
    const Draw *draw;
    float largest;
    int32_t size, chunks;
    float *maxima;
} Law;

/* The log weights of a chunk; -inf beyond the end of the row. */
INLINE void weigh(const Law *law, int32_t chunk, float *weights) {
    const float *x = law->draw->logits + chunk * CHUNK;
    int32_t end = law->size - chunk * CHUNK;
    float largest = law->largest, temperature = law->draw->temperature;
    if (end >= CHUNK)
        for (int32_t i = 0; i < CHUNK; i += LANES)
            store(weights, i, (load(x, i, 0) - largest) / temperature, 0);
    else
        for (int32_t i = 0; i < CHUNK; i++)
            weights[i] = i < end ? (x[i] - largest) / temperature : -INFINITY;
}

static double mass_from(const Law *law, float bound) {
    vf totals = {0};
    for (int32_t c = 0; c < law->chunks; c++) {
        if (!(law->maxima[c] >= bound)) continue;
        float weights[CHUNK];
        weigh(law, c, weights);
        for (int32_t i = 0; i < CHUNK; i += LANES) {
            vf w = load(weights, i, 0);
            totals += (vf)((vi)exponential(w) & (w >= bound));
        }
    }
    return sum(totals);
}

/* The tokens from one weight on and below another. One more is written than is counted. */
static int32_t collect(const Law *law, float low, float high, Weighed *found) {
    int32_t count = 0;
    for (int32_t c = 0; c < law->chunks; c++) {
        if (!(law->maxima[c] >= low)) continue;
        float weights[CHUNK];
        weigh(law, c, weights);
        for (int32_t i = 0; i < CHUNK; i++) {
            found[count].weight = weights[i];
            count += (weights[i] >= low) & (weights[i] < high);
        }
    }
    return count;
}

/* The same with the mass of each, and of all. */
static int32_t collect_masses(const Law *law, float low, float high, Weighed *found, double *total) {
    int32_t count = collect(law, low, high, found);
    *total = 0;
    for (int32_t i = 0; i < count; i++) *total += found[i].mass = expf(found[i].weight);
    return count;
}

/* What the k largest weights reach, or the smallest one from `bound` on where those are fewer. */
static float kth_weight(const Law *law, int32_t k, float bound, Weighed *scratch) {
    float reached = kth(law->maxima, law->chunks, k, scratch); /* by a token each in k chunks */
    bound = reached > bound ? reached : bound;
    int32_t count = collect(law, bound, INFINITY, scratch);
    for (int32_t i = 0; i < count; i++) scratch[i].mass = 1;
    return cut(scratch, count, k);
}

/* The smallest weight in the nucleus of the tokens from `bound` on. No more than e^8 tokens have a
 * probability of e^-8, and mostly those are enough; otherwise it is sought between `low` and `high`. */
static float nucleus(const Law *law, float bound, Weighed *scratch) {
    double total = mass_from(law, bound), wanted = total * law->draw->top_p, above = 0;
    float low = bound, high = INFINITY, likely = logf(total) - 8;
    if (likely > bound) {
        int32_t count = collect_masses(law, likely, high, scratch, &above);
        if (above >= wanted) return cut(scratch, count, wanted);
        high = likely;
    }
    for (float step = 4; step > 0.25f && high - step > bound; step /= 2) {
        double mass = mass_from(law, high - step);
        if (mass >= wanted) low = high - step;
        else high -= step, above = mass;
    }
    double between;
    int32_t count = collect_masses(law, low, high, scratch, &between);
    return count ? cut(scratch, count, wanted - above) : high; /* none where rounding decided */
}

static float threshold_of(const Law *law, Weighed *scratch) {
    const Draw *draw = law->draw;
    float threshold = draw->least;
    if (draw->top_k > 0 && draw->top_k < law->size) {
        float kth = kth_weight(law, draw->top_k, threshold, scratch);
        threshold = kth > threshold ? kth : threshold;
    }
    if (draw->top_p < 1) threshold = nucleus(law, threshold, scratch);
    return threshold;
}

/* The token with the largest weight plus noise. For that e^-(weight + noise), which is at least
 * v / e^weight, has to be less than the smallest so far: few tokens need logarithms. */
static int32_t race(const Law *law, float threshold) {
    uint64_t key = law->draw->key;
    int32_t winner = 0;
    float score = -INFINITY, limit = FLT_MAX;
    for (int32_t c = 0; c < law->chunks; c++) {
        if (!(law->maxima[c] >= threshold)) continue;
        float weights[CHUNK];
        uint32_t upper[CHUNK]; /* half of the hash */
        int32_t fast[CHUNK];
        weigh(law, c, weights);
        for (int32_t i = 0; i < CHUNK; i++) upper[i] = hash_of(key, c * CHUNK + i) >> 32;
        for (int32_t i = 0; i < CHUNK; i += LANES) {
            vu u;
            memcpy(&u, upper + i, sizeof u);
            vf w = load(weights, i, 0), v = __builtin_convertvector(u, vf) * 0x1p-32f;
            vi in_time = (v <= exponential(w) * limit) & (w >= threshold);
            memcpy(fast + i, &in_time, sizeof in_time);
        }
        int32_t any = 0;
        for (int32_t i = 0; i < CHUNK; i++) any |= fast[i];
        if (!any) continue;
        for (int32_t i = 0; i < CHUNK; i++) {
            if (!fast[i]) continue;
            float reached = weights[i] + gumbel(key, c * CHUNK + i);
            if (!(reached > score)) continue;
            score = reached;
            winner = c * CHUNK + i;
            limit = expf(-score) * 1.0001f; /* nobody is left out by rounding */
        }
    }
    return winner;
}

static int32_t draw_one(const Draw *draw, int32_t size) {
    int32_t chunks = chunks_of(size), room = chunks * CHUNK + 1; /* what `collect` may write */
    Weighed *scratch = (Weighed *)kept_floats(2 * room + chunks);
    float *maxima = (float *)(scratch + room);
    float largest = look_over(draw->logits, 0, size, maxima);
    if (largest == -INFINITY) return 0; /* all of it forbidden */
    Law law = {draw, largest, size, chunks, maxima};
    for (int32_t c = 0; c < chunks; c++)
        maxima[c] = (maxima[c] - largest) / draw->temperature;
    return race(&law, threshold_of(&law, scratch));
}

/* One token per place, each from a row of `size` logits. */
void choose(const Draw *draws, int32_t rows, int32_t size, int64_t *tokens) {
#pragma omp parallel for if (rows > 1 && (int64_t)rows * size * COST_OF_A_SCORE > WORTH_A_TEAM)
    for (int32_t r = 0; r < rows; r++) tokens[r] = draw_one(draws + r, size);
}
