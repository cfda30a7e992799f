/* Candidates where requests sample: the law and noise that the target would use, over the likeliest
 * tokens of a row. `_rank_alike` of drafters/ranking.py, with `contenders` and `gumbel` of
 * sampling.py. */
#include "noise.h"
#include "rounds.h"
#include "scores.h"

#define GROUP 16 /* columns that are passed over together */

typedef struct {
    float weight;
    int32_t column;
} Contender;

/* ---- the likeliest tokens of a row ----------------------------------------------------------- */

static int32_t at_least(const float *x, int32_t size, float bound) {
    int32_t count = 0;
    for (int32_t i = 0; i < size; i++) count += x[i] >= bound;
    return count;
}

/* From where on there are at least `wanted` of x, but no more than `room` if ties allow; returns
 * where there are fewer. By halving, not by `kth` of the chunks as elsewhere: rows of drafts have
 * hardly more chunks than tokens are wanted, so that those leave out little. */
static float narrow(const float *x, int32_t size, int32_t wanted, int32_t room, float largest,
                    float *low) {
    float high = nextafterf(largest, INFINITY), step = 4;
    int32_t count = 0;
    for (*low = largest; count < wanted && step < INFINITY; step *= 2) {
        *low = largest - step;
        count = at_least(x, size, *low);
        if (count < wanted) high = *low;
    }
    while (count > room) {
        float middle = *low + (high - *low) / 2;
        if (!(middle > *low && middle < high)) break; /* all between are the same number */
        int32_t found = at_least(x, size, middle);
        if (found < wanted) high = middle;
        else *low = middle, count = found;
    }
    return high;
}

/* Append those from `low` on and below `high`, as far as there is room; how many there are then. */
static int32_t gather(const float *x, int32_t size, float low, float high, int32_t count,
                      int32_t room, Contender *found) {
    for (int32_t begin = 0; begin < size && count < room; begin += GROUP) {
        int32_t end = begin + GROUP < size ? begin + GROUP : size;
        if (!at_least(x + begin, end - begin, low)) continue;
        for (int32_t i = begin; i < end && count < room; i++)
            if (x[i] >= low && x[i] < high) found[count++] = (Contender){x[i], i};
    }
    return count;
}

static int comes_first(Contender a, Contender b) {
    return a.weight != b.weight ? a.weight > b.weight : a.column < b.column;
}

/* Let a contender sink in a heap that has the likeliest on top. */
static void sink(Contender *heap, int32_t count, int32_t at, Contender c) {
    for (int32_t child; (child = 2 * at + 1) < count; at = child) {
        if (child + 1 < count && comes_first(heap[child + 1], heap[child])) child++;
        if (!comes_first(heap[child], c)) break;
        heap[at] = heap[child];
    }
    heap[at] = c;
}

/* ---- the law --------------------------------------------------------------------------------- */

/* Those that truncation leaves, best first, with their probabilities; how many. At most `wanted`
 * of them: what is less likely takes no part. */
static int32_t keep(const Sampling *law, const float *x, int32_t size, int32_t wanted, Mass mass,
                    Contender *heap, Contender *kept, float *probs) {
    int32_t room = 2 * wanted, count = 0, found = 0;
    float low = -INFINITY, high = INFINITY, log_sum = mass.largest + logf(mass.total);
    if (size > room) high = narrow(x, size, wanted, room, mass.largest, &low);
    count = gather(x, size, high, INFINITY, 0, room, heap);
    count = gather(x, size, low, high, count, room, heap);
    for (int32_t at = count / 2; at--;) sink(heap, count, at, heap[at]);
    float least = mass.largest + logf(law->min_p); /* log 0 is minus infinity */
    int32_t most = law->top_k > 0 && law->top_k < wanted ? law->top_k : wanted;
    int32_t truncated = law->min_p > 0 || law->top_k > 0;
    double total = 0, before = 0;
    for (; count && found < most && heap[0].weight >= least; found++) {
        if (!truncated && law->top_p < 1 && total >= law->top_p) break;
        kept[found] = heap[0];
        total += probs[found] = expf(kept[found].weight - log_sum);
        count--;
        sink(heap, count, 0, heap[count]);
    }
    if (law->top_p == 1) return found;
    double cover = law->top_p * (truncated ? total : 1);
    int32_t covering = 0;
    while (covering < found && before < cover) before += probs[covering++];
    return covering;
}

/* ---- the race -------------------------------------------------------------------------------- */

/* The `count` best by log p + noise, and the share of p exp(noise) that each has. */
static void race_row(float *x, int32_t size, const Rules *rules, const Choice *choice,
                     const int64_t *ids, int64_t *columns, float *shares) {
    const Sampling *law = choice->sampling;
    int32_t wanted = rules->contenders, found = 0;
    Contender heap[2 * wanted], kept[wanted];
    float probs[wanted], all = 0;
    for (int32_t i = 0; i < size; i++) x[i] /= law->temperature;
    int32_t racing = keep(law, x, size, wanted, mass_of(x, size), heap, kept, probs);
    uint64_t key = key_of(law->seed, choice->position);
    for (int32_t i = 0; i < racing; i++) {
        int64_t column = kept[i].column;
        float share = probs[i] / arrival(key, ids ? ids[column] : column);
        all += share;
        insert(share, column, rules->width, &found, columns, shares);
    }
    for (int32_t i = 0; i < found; i++) shares[i] /= all;
    for (int32_t i = found; i < rules->width; i++) columns[i] = shares[i] = 0;
}

static int samples(const Choice *choices, int32_t rows) {
    for (int32_t r = 0; r < rows; r++)
        if (choices[r].sampling->temperature > 0) return 1;
    return 0;
}

/* `best` of scores [rows, stride], as the request of each row chooses; scores are written over.
 * columns, shares [rows, width]. A share of 0: no candidate. */
void best_choices(float *scores, int32_t rows, int32_t stride, int32_t size, const Rules *rules,
                  const Choice *choices, const int64_t *ids, int64_t *columns, float *shares) {
    int32_t width = rules->width;
    if (!samples(choices, rows)) {
        best(scores, rows, stride, size, width, columns, shares);
        return;
    }
#pragma omp parallel for schedule(static)
    for (int64_t r = 0; r < rows; r++) {
        int64_t *own_columns = columns + r * width;
        float *own = scores + r * stride, *own_shares = shares + r * width;
        if (choices[r].sampling->temperature > 0)
            race_row(own, size, rules, &choices[r], ids, own_columns, own_shares);
        else best(own, 1, stride, size, width, own_columns, own_shares);
    }
}

/* The same from states x to the best of their logits, as `rank`. */
double rank_choices(const void *x, const float *norm, float eps, const Matrix *head, void *normed,
                    float *scores, int32_t rows, int32_t bf16, int32_t size, const Rules *rules,
                    const Choice *choices, const int64_t *ids, int64_t *columns, float *shares) {
    if (!samples(choices, rows))
        return rank(x, norm, eps, head, normed, scores, rows, bf16, size, rules->width, columns, shares);
    logits(x, norm, eps, head, normed, scores, rows, bf16);
    double begin = now();
    best_choices(scores, rows, head->out, size, rules, choices, ids, columns, shares);
    return now() - begin;
}
