/* Attention of rows that see committed slots and the path that leads to them. */
#include "dot.h"
#include "team.h"

#include <stdlib.h>

#define PARTS 4 /* vectors per block of positions */
#define BLOCK (PARTS * LANES)
#define MAX_QUERIES 64 /* handled by one task; no kv head may have more */
#define TOGETHER 4 /* queries that share one walk over a block */

/* The keys (transposed) and values of one block of positions, shared by all queries that see it.
 * In bfloat16, what a product sums over lies in pairs: key[d / 2] holds dimensions d and d + 1,
 * value row j / 2 positions j and j + 1. */
typedef struct {
    uint32_t key[MAX_HEAD][BLOCK] __attribute__((aligned(64)));
    uint32_t value[BLOCK * MAX_HEAD] __attribute__((aligned(64))); /* rows of `dim` words */
} Tile;

typedef struct { /* the online softmax of one query */
    float sum[MAX_HEAD] __attribute__((aligned(64)));
    vf total;      /* of the weights, lane by lane */
    float largest; /* score so far */
    int32_t hidden, last; /* sees the positions (hidden, last] */
    const void *query;
} State;

/* Transpose a 16 x 16 block in four rounds of pairwise exchanges. */
INLINE void transpose(vf x[LANES]) {
#define ROUND(w, lo, hi)                                                             \
    for (int i = 0; i < LANES; i++)                                                  \
        if (!(i & w)) {                                                              \
            vf a = x[i], b = x[i + w];                                               \
            x[i] = __builtin_shuffle(a, b, (vi)lo);                                  \
            x[i + w] = __builtin_shuffle(a, b, (vi)hi);                              \
        }
    ROUND(1, ((vi){0, 16, 2, 18, 4, 20, 6, 22, 8, 24, 10, 26, 12, 28, 14, 30}),
          ((vi){1, 17, 3, 19, 5, 21, 7, 23, 9, 25, 11, 27, 13, 29, 15, 31}))
    ROUND(2, ((vi){0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29}),
          ((vi){2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31}))
    ROUND(4, ((vi){0, 1, 2, 3, 16, 17, 18, 19, 8, 9, 10, 11, 24, 25, 26, 27}),
          ((vi){4, 5, 6, 7, 20, 21, 22, 23, 12, 13, 14, 15, 28, 29, 30, 31}))
    ROUND(8, ((vi){0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23}),
          ((vi){8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31}))
#undef ROUND
}

INLINE vu word(const void *p, int64_t i, int lanes) { /* up to 16 of 4 bytes, zeros behind them */
    vu x = {0};
    memcpy(&x, (const uint32_t *)p + i, lanes * sizeof(uint32_t));
    return x;
}

/* Load the keys and values of some slots of the kv head that starts at slot `head`; negative slots
 * give zeros. */
INLINE void load_tile(const Layer *layer, int64_t head, const int64_t slot[BLOCK], Tile *tile,
                      const int dim, const int bf16) {
    const int words = bf16 ? dim / 2 : dim; /* of a key */
    for (int at = 0; at < BLOCK; at += LANES)
        for (int d = 0; d < words; d += LANES) {
            const int lanes = words - d < LANES ? words - d : LANES;
            vf block[LANES];
            for (int j = 0; j < LANES; j++) {
                int64_t from = slot[at + j];
                block[j] = from < 0 ? (vf){0} : (vf)word(layer->key, (head + from) * words + d, lanes);
            }
            transpose(block);
            for (int j = 0; j < lanes; j++) memcpy(&tile->key[d + j][at], &block[j], sizeof(vf));
        }
    for (int j = 0; j < BLOCK; j += 1 + bf16)
        for (int d = 0; d < dim; d += LANES) {
            int64_t from = slot[j], next = slot[j + bf16];
            vf x = from < 0 ? (vf){0} : load(layer->value, (head + from) * dim + d, bf16);
            if (bf16) { /* a loaded bfloat16 fills the upper half of its lane */
                vf y = next < 0 ? (vf){0} : load(layer->value, (head + next) * dim + d, bf16);
                x = (vf)((vu)y | (vu)x >> 16);
            }
            memcpy(&tile->value[(j >> bf16) * dim + d], &x, sizeof x);
        }
}

/* acc + lane-wise product of a row of a tile with one word of the other factor */
INLINE vf dot_word(vf acc, const uint32_t *row, const void *other, int i, const int bf16) {
    vu x;
    memcpy(&x, row, sizeof x);
    if (bf16) return dot(acc, x, ((const uint32_t *)other)[i]);
    return acc + (vf)x * ((const float *)other)[i];
}

/* Weights of n queries (a constant at each call) for the block of positions from `from` on. */
INLINE void score(State *const state[], const int n, const Tile *tile, int32_t from, float softcap,
                  const int dim, const int bf16, float weight[][BLOCK], float old[]) {
    const vi lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    vf s[TOGETHER][PARTS];
    for (int i = 0; i < n; i++)
        for (int k = 0; k < PARTS; k++) s[i][k] = (vf){0};
    for (int d = 0; d < dim >> bf16; d++)
        for (int i = 0; i < n; i++)
            for (int k = 0; k < PARTS; k++)
                s[i][k] = dot_word(s[i][k], &tile->key[d][k * LANES], state[i]->query, d, bf16);
    vf before = {0}, largest = {0}; /* of each query */
    for (int i = 0; i < n; i++) {
        vf top = splat(-INFINITY);
        int whole = from > state[i]->hidden && from + BLOCK - 1 <= state[i]->last;
        for (int k = 0; k < PARTS; k++) {
            if (softcap != 0) s[i][k] = softcap * tanh_of(s[i][k] / softcap);
            if (!whole) {
                vi at = lane + (from + k * LANES);
                vi seen = (at <= state[i]->last) & (at > state[i]->hidden);
                s[i][k] = (vf)(((vi)s[i][k] & seen) | ((vi)splat(-INFINITY) & ~seen));
            }
            top = larger(top, s[i][k]);
        }
        before[i] = state[i]->largest;
        largest[i] = max(larger(top, splat(before[i])));
        state[i]->largest = largest[i];
    }
    vf shrunk = exponential(before - largest);
    for (int i = 0; i < n; i++) {
        old[i] = shrunk[i];
        vf total = state[i]->total * old[i];
        for (int k = 0; k < PARTS; k++) {
            vf p = exponential(s[i][k] - state[i]->largest);
            store(weight[i], k * LANES, p, bf16);
            total += load(weight[i], k * LANES, bf16); /* as rounded */
        }
        state[i]->total = total;
    }
}

/* Add the weighted values of a block to `width` lanes of n sums from d on (both constants). */
INLINE void gather(State *const state[], const int n, const Tile *tile, const float weight[][BLOCK],
                   const float old[], int d, const int width, const int dim, const int bf16) {
    vf x[TOGETHER][4];
    for (int i = 0; i < n; i++)
        for (int w = 0; w < width; w++) x[i][w] = load(state[i]->sum, d + w * LANES, 0) * old[i];
    for (int j = 0; j < BLOCK >> bf16; j++)
        for (int i = 0; i < n; i++)
            for (int w = 0; w < width; w++)
                x[i][w] = dot_word(x[i][w], &tile->value[j * dim + d + w * LANES], weight[i], j, bf16);
    for (int i = 0; i < n; i++)
        for (int w = 0; w < width; w++) store(state[i]->sum, d + w * LANES, x[i][w], 0);
}

INLINE void visit(State *const state[], const int n, const Tile *tile, int32_t from, float softcap,
                  const int dim, const int bf16) {
    float weight[TOGETHER][BLOCK] __attribute__((aligned(64))), old[TOGETHER];
    int d = 0;
    score(state, n, tile, from, softcap, dim, bf16, weight, old);
    for (; d + 4 * LANES <= dim; d += 4 * LANES) gather(state, n, tile, weight, old, d, 4, dim, bf16);
    for (; d < dim; d += LANES) gather(state, n, tile, weight, old, d, 1, dim, bf16);
}

INLINE void visit_all(State *const state[], int count, const Tile *tile, int32_t from,
                      float softcap, const int dim, const int bf16) {
    for (; count >= TOGETHER; count -= TOGETHER, state += TOGETHER)
        visit(state, TOGETHER, tile, from, softcap, dim, bf16);
    if (count == 3) visit(state, 3, tile, from, softcap, dim, bf16);
    if (count == 2) visit(state, 2, tile, from, softcap, dim, bf16);
    if (count == 1) visit(state, 1, tile, from, softcap, dim, bf16);
}

/* Rows [begin, end) of segment s with one kv head: states[row - begin][query head of the group]. */
typedef struct {
    const Pass *pass;
    const Layer *layer;
    int32_t s, kv_head, begin, end, group;
    State *states;
    Tile *shared, *own;
} Task;

INLINE void open_states(const Task *t, const int dim, const int bf16) {
    const Pass *pass = t->pass;
    const Layer *layer = t->layer;
    int32_t length = pass->length[t->s], nodes = pass->node[t->s + 1] - pass->node[t->s];
    for (int32_t r = t->begin; r < t->end; r++) {
        int32_t position = pass->position[node_of(pass, t->s, r)];
        int32_t hidden = -1, last = layer->both_ways ? length + nodes - 1 : position;
        if (layer->window && layer->anchored) {
            hidden = length - layer->window - 1;
        } else if (layer->window) {
            hidden = position - layer->window;
            if (last > position + layer->window - 1) last = position + layer->window - 1;
        }
        for (int i = 0; i < t->group; i++) {
            State *state = &t->states[(r - t->begin) * t->group + i];
            int64_t head = (int64_t)r * layer->heads + t->kv_head * t->group + i;
            state->query = (const char *)pass->query + head * dim * (bf16 ? 2 : 4);
            state->hidden = hidden;
            state->last = last;
            state->largest = -INFINITY;
            state->total = (vf){0};
            memset(state->sum, 0, dim * sizeof(float));
        }
    }
}

/* Slots of the block from `from` on along the path of row r. */
static void own_slots(const Task *t, int32_t r, int32_t from, int64_t slot[BLOCK]) {
    const Pass *pass = t->pass;
    int32_t length = pass->length[t->s], first = pass->node[t->s], node = node_of(pass, t->s, r);
    for (int j = 0; j < BLOCK; j++) slot[j] = from + j < length ? pass->base[t->s] + from + j : -1;
    for (int32_t p = pass->position[node]; p >= from && p >= length; p--) {
        if (p < from + BLOCK) slot[p - from] = pass->base[t->s] + length + node - first;
        node = first + pass->parent[node];
    }
}

/* Ask for the next block while this one is computed: its lines come from memory, layer after layer
 * of weights has passed through the caches since they were last used. */
INLINE void prefetch_block(const Layer *layer, int64_t slot, const int dim, const int bf16) {
    const int row = dim * (bf16 ? 2 : 4);
    const char *key = (const char *)layer->key + slot * row;
    const char *value = (const char *)layer->value + slot * row;
    for (int i = 0; i < BLOCK * row; i += 64) {
        __builtin_prefetch(key + i);
        __builtin_prefetch(value + i);
    }
}

/* One block of positions for all rows of a task. */
INLINE void visit_block(const Task *t, int32_t from, int32_t last, const float softcap,
                        const int dim, const int bf16) {
    const Pass *pass = t->pass;
    const Layer *layer = t->layer;
    int64_t slot[BLOCK], head = (int64_t)t->kv_head * layer->slots;
    State *sharing[MAX_QUERIES];
    int count = 0;
    for (int32_t r = t->begin; r < t->end; r++) {
        State *states = &t->states[(r - t->begin) * t->group], *row[MAX_QUERIES];
        int32_t seen = states->last, straight = pass->straight[node_of(pass, t->s, r)];
        if (from > seen || from + BLOCK - 1 <= states->hidden) continue;
        if (layer->both_ways || straight > seen || from + BLOCK <= straight) {
            for (int i = 0; i < t->group; i++) sharing[count++] = states + i;
            continue;
        }
        for (int i = 0; i < t->group; i++) row[i] = states + i;
        own_slots(t, r, from, slot);
        load_tile(layer, head, slot, t->own, dim, bf16);
        visit_all(row, t->group, t->own, from, softcap, dim, bf16);
    }
    if (!count) return;
    for (int j = 0; j < BLOCK; j++)
        slot[j] = from + j <= last ? pass->base[t->s] + from + j : -1;
    load_tile(layer, head, slot, t->shared, dim, bf16);
    if (from + BLOCK <= last) prefetch_block(layer, head + pass->base[t->s] + from + BLOCK, dim, bf16);
    visit_all(sharing, count, t->shared, from, softcap, dim, bf16);
}

INLINE void attend(const Task *t, void *out, const float softcap, const int dim, const int bf16) {
    open_states(t, dim, bf16);
    int32_t last = 0, start = INT32_MAX;
    for (int32_t i = 0; i < (t->end - t->begin) * t->group; i++) {
        if (t->states[i].last > last) last = t->states[i].last;
        if (t->states[i].hidden + 1 < start) start = t->states[i].hidden + 1;
    }
    for (int32_t from = (start < 0 ? 0 : start) / BLOCK * BLOCK; from <= last; from += BLOCK)
        visit_block(t, from, last, softcap, dim, bf16);
    for (int32_t r = t->begin; r < t->end; r++)
        for (int i = 0; i < t->group; i++) {
            State *state = &t->states[(r - t->begin) * t->group + i];
            float total = sum(state->total);
            int64_t at = ((int64_t)r * t->layer->heads + t->kv_head * t->group + i) * dim;
            for (int d = 0; d < dim; d += LANES)
                store(out, at + d, load(state->sum, d, 0) / total, bf16);
        }
}

static void attend_any(const Task *t, void *out) {
    /* The common sizes are constants, so that their loops are unrolled; a soft-cap that is 0 in the
     * source leaves its registers to the sums. */
    const Layer *l = t->layer;
    float cap = l->softcap;
    if (l->bf16 && !cap && l->head_dim == 64) attend(t, out, 0, 64, 1);
    else if (l->bf16 && !cap && l->head_dim == 128) attend(t, out, 0, 128, 1);
    else if (l->bf16) attend(t, out, cap, l->head_dim, 1);
    else attend(t, out, cap, l->head_dim, 0);
}

typedef struct {
    Tile shared, own;
    State states[MAX_QUERIES];
} Scratch;

/* Half a megabyte per thread, kept: allocating it anew would cost a page fault per 4 KB. */
static Scratch *own_scratch(void) {
    static _Thread_local Scratch *scratch;
    if (!scratch) scratch = aligned_alloc(64, (sizeof(Scratch) + 63) / 64 * 64);
    return scratch;
}

static int count_tasks(const Pass *pass, const Layer *layer, int block) {
    int tasks = 0;
    for (int s = 0; s < pass->segments; s++)
        tasks += (pass->first[s + 1] - pass->first[s] + block - 1) / block * layer->kv_heads;
    return tasks;
}

/* qkv [rows, (heads + 2 kv_heads) * head_dim] -> out [rows, heads * head_dim]; keys and values are
 * written to the store on the way. */
void attention(const Pass *pass, const Layer *layer, const void *qkv, void *out) {
    int group = layer->heads / layer->kv_heads;
    int block = MAX_QUERIES / group; /* rows per task */
    int tasks = count_tasks(pass, layer, block);
    if (tasks < 4) { /* so few that threads would get unequal shares: split the rows in two */
        block = (pass->rows + 1) / 2 < block ? (pass->rows + 1) / 2 : block;
        tasks = count_tasks(pass, layer, block);
    }
    place_rows(pass, layer, qkv);
    Scratch *scratch = own_scratch();
#pragma omp for schedule(dynamic, 1)
    for (int task = 0; task < tasks; task++) {
        int s = 0, left = task;
        for (;; s++) {
            int rows = pass->first[s + 1] - pass->first[s];
            int count = (rows + block - 1) / block * layer->kv_heads;
            if (left < count) break;
            left -= count;
        }
        int32_t begin = pass->first[s] + left / layer->kv_heads * block;
        int32_t end = begin + block < pass->first[s + 1] ? begin + block : pass->first[s + 1];
        Task t = {pass,  layer, s, left % layer->kv_heads, begin, end, group, scratch->states,
                  &scratch->shared, &scratch->own};
        attend_any(&t, out);
    }
}
