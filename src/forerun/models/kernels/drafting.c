/* A greedy round of an EAGLE-3 draft for all requests of a batch in one call: the rows that are due,
 * then a tree per request, level by level.
 *
 * The same is said at more leisure in drafters/eagle.py and drafters/growing.py, which also draft
 * for requests that sample. Between two passes lie a few microseconds of work, but behind a pass of
 * the target, which has moved its weights through all caches, every function of an interpreter that
 * takes part costs ten to begin with.
 */
#include "kernels.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

typedef struct {
    int32_t bf16, dim, features; /* width of a state, of what a row is fed of the target */
    int32_t layer_count, norm_count;
    const Layer *const *layers;
    const float *const *feature_norms; /* of equal parts of the features; there may be none */
    const void *embedding;             /* [vocabulary of the target, dim] */
    Matrix fc, head;
    const float *last_norm; /* or null */
    float norm_eps;
    int32_t norm_output; /* last_norm is part of what a row hands on, not of the head */
    int32_t size;        /* vocabulary of the draft */
    const int64_t *ids;  /* the target's ids of its tokens, or null: the same */
} Network;

typedef struct {
    int32_t width;        /* candidates behind a node, nodes that are expanded per level */
    int32_t bins;         /* of beliefs, which lie between 0 and 1 */
    double floor;         /* no level is begun whose nodes are all less likely */
    double most;          /* no chance is larger */
    const double *ratios; /* [bins + 1] of right to expected tokens */
} Rules;

typedef struct { /* a request in a round */
    int32_t base, length; /* first slot of its rows, and how many there are */
    int32_t due;          /* features without a row */
    int32_t nodes, depth; /* limits of its tree */
    int32_t end_count;
    const void *fed;       /* [due, features] */
    const int64_t *tokens; /* [due], what those rows read */
    const int64_t *ends;   /* tokens that nothing follows */
    void *hidden;          /* [dim], what its last row handed on; written over if rows are due */
    double ratio;          /* its own, of right to expected tokens */
    /* filled, depth first, the likeliest siblings first: */
    int64_t *draft; /* up to `nodes` tokens */
    int32_t *parents;
    double *beliefs; /* in each, given its parent */
    int32_t count;
} Lane;

typedef struct {
    double reached; /* the chance that it and all its ancestors are right */
    double belief;
    int64_t token;
    int32_t parent; /* candidate, -1: the root */
    int32_t origin; /* place of the parent in its frontier */
} Candidate;

typedef struct { /* the tree of one request, as `Growth` of growing.py */
    Candidate *candidates;
    const Candidate **order; /* scratch */
    int32_t *frontier;       /* candidates to expand next, best first */
    int32_t *rows;           /* per candidate that was in a frontier, its parent among them, or -1 */
    int32_t count, frontier_count, row_count;
    int32_t level; /* of the candidates that come next */
    int32_t begin; /* row of the first node of the frontier */
} Growth;

typedef struct {
    const Network *net;
    const Rules *rules;
    Lane *lanes;
    int32_t count;
    Growth *growths;
    Pass pass;
    int32_t *base, *length, *first, *node, *parent; /* of the pass */
    char *fed, *embedded, *hidden, *above;          /* a row for each of the pass */
    void *normed;
    float *scores, *shares;
    int64_t *columns;
    double seconds; /* in passes */
} Round;

/* ---- memory ---------------------------------------------------------------------------------- */

static int32_t larger_of(int32_t a, int32_t b) { return a > b ? a : b; }

static int32_t due_rows(const Round *r) {
    int32_t rows = 0;
    for (int32_t s = 0; s < r->count; s++) rows += r->lanes[s].due;
    return rows;
}

/* Give every array of a round its place from `memory` on; the bytes that takes. */
static size_t lay_out(Round *r, char *memory) {
    const Network *net = r->net;
    const Layer *l = net->layers[0];
    size_t used = 0, width = r->rules->width, size = net->bf16 ? 2 : 4, nodes = 0;
    size_t due = due_rows(r), open = r->count * width, rows = due > open ? due : open;
    size_t narrow = larger_of(l->qkv.in, larger_of(l->o.in, l->down.in));
    size_t wide = larger_of(l->qkv.out, larger_of(l->gate_up.out, net->dim));
#define PLACE(array, bytes) (array = (void *)(memory + used), used += ((bytes) + 63) / 64 * 64)
    PLACE(r->growths, r->count * sizeof(Growth));
    for (int32_t s = 0; s < r->count; s++) {
        Growth own, *g = memory ? &r->growths[s] : &own;
        size_t inner = (r->lanes[s].depth - 1) * width, all = width + inner * width;
        nodes += inner;
        PLACE(g->candidates, all * sizeof(Candidate));
        PLACE(g->order, all * sizeof(Candidate *));
        PLACE(g->frontier, width * sizeof(int32_t));
        PLACE(g->rows, inner * sizeof(int32_t));
    }
    if (nodes < due) nodes = due;
    PLACE(r->base, r->count * sizeof(int32_t));
    PLACE(r->length, r->count * sizeof(int32_t));
    PLACE(r->first, (r->count + 1) * sizeof(int32_t));
    PLACE(r->node, (r->count + 1) * sizeof(int32_t));
    PLACE(r->parent, nodes * sizeof(int32_t));
    PLACE(r->pass.position, nodes * sizeof(int32_t));
    PLACE(r->pass.straight, nodes * sizeof(int32_t));
    PLACE(r->pass.query, rows * l->heads * l->head_dim * sizeof(float));
    PLACE(r->pass.narrow, rows * narrow * size);
    PLACE(r->pass.wide, rows * wide * size);
    PLACE(r->fed, due * net->features * size);
    PLACE(r->embedded, rows * net->dim * size);
    PLACE(r->hidden, rows * net->dim * size);
    PLACE(r->above, rows * net->dim * size);
    PLACE(r->normed, open * net->dim * size);
    PLACE(r->scores, open * net->head.out * sizeof(float));
    PLACE(r->shares, open * width * sizeof(float));
    PLACE(r->columns, open * width * sizeof(int64_t));
#undef PLACE
    return used;
}

/* Kept from round to round: fresh memory would cost a page fault per 4 KB. */
static char *memory_of(size_t bytes) {
    static _Thread_local char *memory;
    static _Thread_local size_t room;
    if (room < bytes) {
        free(memory);
        memory = aligned_alloc(64, bytes);
        room = memory ? bytes : 0;
    }
    return memory;
}

/* ---- passes ---------------------------------------------------------------------------------- */

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec + 1e-9 * t.tv_nsec;
}

static size_t bytes_of(const Network *net, int64_t numbers) { return numbers * (net->bf16 ? 2 : 4); }

/* States are [rows, dim]. */
static void copy_state(const Network *net, void *to, int64_t at, const void *from, int64_t row) {
    size_t state = bytes_of(net, net->dim);
    memcpy((char *)to + at * state, (const char *)from + row * state, state);
}

/* From features to what the first layer reads. */
static void fuse(Round *r, int32_t rows) {
    const Network *net = r->net;
    int32_t part = net->norm_count ? net->features / net->norm_count : 0;
    double begin = now();
    for (int32_t i = 0; i < rows * net->norm_count; i++) {
        char *at = r->fed + bytes_of(net, (int64_t)i * part);
        norm(at, net->feature_norms[i % net->norm_count], net->norm_eps, at, 1, part, net->bf16);
    }
    linear(&net->fc, r->fed, r->hidden, rows, net->bf16);
    r->seconds += now() - begin;
}

/* Run the rows of r->pass, from what is embedded and hidden; r->hidden is what they hand on. */
static void run_rows(Round *r) {
    const Network *net = r->net;
    double begin = now();
    prepare(&r->pass);
    run(&r->pass, net->layers, net->layer_count, r->embedded, r->hidden);
    if (net->norm_output && net->last_norm)
        norm(r->hidden, net->last_norm, net->norm_eps, r->hidden, r->pass.rows, net->dim, net->bf16);
    r->seconds += now() - begin;
}

/* The candidates behind the first rows of r->hidden. */
static void rank_rows(Round *r, int32_t rows) {
    const Network *net = r->net;
    double begin = now();
    rank(r->hidden, net->norm_output ? NULL : net->last_norm, net->norm_eps, &net->head, r->normed,
         r->scores, rows, net->bf16, net->size, r->rules->width, r->columns, r->shares);
    r->seconds += now() - begin;
}

/* Turn features into rows, which are then committed. */
static void feed(Round *r) {
    const Network *net = r->net;
    int32_t rows = 0;
    for (int32_t s = 0; s < r->count; s++) {
        Lane *lane = &r->lanes[s];
        r->first[s] = r->node[s] = rows;
        r->base[s] = lane->base;
        r->length[s] = lane->length;
        if (!lane->due) continue;
        memcpy(r->fed + bytes_of(net, (int64_t)rows * net->features), lane->fed,
               bytes_of(net, (int64_t)lane->due * net->features));
        for (int32_t i = 0; i < lane->due; i++, rows++) {
            copy_state(net, r->embedded, rows, net->embedding, lane->tokens[i]);
            r->parent[rows] = i - 1;
        }
        lane->length += lane->due;
    }
    r->first[r->count] = r->node[r->count] = r->pass.rows = rows;
    if (!rows) return;
    fuse(r, rows);
    run_rows(r);
    for (int32_t s = 0; s < r->count; s++)
        if (r->lanes[s].due)
            copy_state(net, r->lanes[s].hidden, 0, r->hidden, r->first[s + 1] - 1);
}

/* ---- trees ----------------------------------------------------------------------------------- */

/* The likelier first, the older first among equals. */
static int by_chance(const void *a, const void *b) {
    const Candidate *x = *(const Candidate *const *)a, *y = *(const Candidate *const *)b;
    if (x->reached != y->reached) return x->reached > y->reached ? -1 : 1;
    return x < y ? -1 : 1;
}

/* The candidates from `first` on, best first, in g->order. */
static void sort(Growth *g, int32_t first) {
    for (int32_t i = first; i < g->count; i++) g->order[i - first] = &g->candidates[i];
    qsort(g->order, g->count - first, sizeof *g->order, by_chance);
}

static int ends(const Lane *lane, int64_t token) {
    for (int32_t i = 0; i < lane->end_count; i++)
        if (lane->ends[i] == token) return 1;
    return 0;
}

/* What a node must exceed so that a child of it could be kept. */
static double least(Growth *g, int32_t nodes) {
    if (g->count < nodes) return 0;
    sort(g, 0);
    return g->order[nodes - 1]->reached;
}

/* Choose the next frontier among the candidates from `first` on. */
static void advance(const Rules *rules, const Lane *lane, Growth *g, int32_t first) {
    int32_t before = g->row_count - g->frontier_count, fresh = g->count - first;
    g->frontier_count = 0;
    if (g->level >= lane->depth || !fresh) return;
    double bound = least(g, lane->nodes);
    sort(g, first);
    if (g->order[0]->reached < rules->floor) return;
    for (int32_t i = 0; i < rules->width && i < fresh; i++) {
        const Candidate *c = g->order[i];
        if (!(c->reached > bound) || ends(lane, c->token)) continue;
        g->frontier[g->frontier_count++] = c - g->candidates;
        g->rows[g->row_count++] = g->level == 1 ? -1 : before + c->origin;
    }
}

/* Add the candidates behind the frontier, which were ranked. */
static void extend(const Round *r, const Lane *lane, Growth *g) {
    const Rules *rules = r->rules;
    int32_t first = g->count;
    for (int32_t place = 0; place < g->frontier_count; place++) {
        int32_t parent = g->frontier[place];
        double above = parent < 0 ? 1 : g->candidates[parent].reached;
        for (int32_t i = 0; i < rules->width; i++) {
            int64_t at = (int64_t)(g->begin + place) * rules->width + i, column = r->columns[at];
            double belief = r->shares[at];
            if (!(belief > 0)) continue;
            double chance = belief * rules->ratios[(int32_t)(belief * rules->bins)] * lane->ratio;
            if (chance > rules->most) chance = rules->most;
            if (!(chance > 0)) continue;
            int64_t token = r->net->ids ? r->net->ids[column] : column;
            g->candidates[g->count++] = (Candidate){above * chance, belief, token, parent, place};
        }
    }
    g->level++;
    advance(rules, lane, g, first);
}

/* Lay the frontiers side by side as the rows of a pass, each with what its parent handed on. */
static void gather(Round *r) {
    int32_t rows = 0, nodes = 0;
    for (int32_t s = 0; s < r->count; s++) {
        Growth *g = &r->growths[s];
        r->first[s] = rows;
        r->node[s] = nodes;
        r->length[s] = r->lanes[s].length;
        for (int32_t i = 0; i < g->frontier_count; i++) {
            const Candidate *c = &g->candidates[g->frontier[i]];
            copy_state(r->net, r->embedded, rows + i, r->net->embedding, c->token);
            copy_state(r->net, r->above, rows + i, r->hidden, g->begin + c->origin);
        }
        g->begin = rows;
        rows += g->frontier_count;
        if (!g->frontier_count) continue; /* no rows, and no nodes before them */
        memcpy(r->parent + nodes, g->rows, g->row_count * sizeof *g->rows);
        nodes += g->row_count;
    }
    r->first[r->count] = r->pass.rows = rows;
    r->node[r->count] = nodes;
    char *below = r->hidden;
    r->hidden = r->above;
    r->above = below;
}

static void plant(Round *r) {
    for (int32_t s = 0; s < r->count; s++) {
        Growth *g = &r->growths[s];
        g->count = g->row_count = g->level = 0;
        g->frontier_count = 1;
        g->frontier[0] = -1;
        g->begin = s;
        copy_state(r->net, r->hidden, s, r->lanes[s].hidden, 0);
    }
}

static void grow(Round *r) {
    int32_t rows = r->count;
    for (plant(r);; rows = r->pass.rows) {
        rank_rows(r, rows);
        for (int32_t s = 0; s < r->count; s++) extend(r, &r->lanes[s], &r->growths[s]);
        gather(r);
        if (!r->pass.rows) return;
        run_rows(r);
    }
}

/* Node `node` of the likeliest candidates and all below it to the draft of a lane. */
static void harvest_below(Lane *lane, const Growth *g, int32_t kept, int32_t node, int32_t parent) {
    int32_t at = lane->count++, candidate = g->order[node] - g->candidates;
    lane->draft[at] = g->order[node]->token;
    lane->parents[at] = parent;
    lane->beliefs[at] = g->order[node]->belief;
    for (int32_t i = node + 1; i < kept; i++) /* children are less likely, or younger */
        if (g->order[i]->parent == candidate) harvest_below(lane, g, kept, i, at);
}

/* The likeliest candidates, every node followed by its subtree. */
static void harvest(Lane *lane, Growth *g) {
    sort(g, 0);
    int32_t kept = g->count < lane->nodes ? g->count : lane->nodes;
    lane->count = 0;
    for (int32_t i = 0; i < kept; i++)
        if (g->order[i]->parent < 0) harvest_below(lane, g, kept, i, -1);
}

/* One round; the seconds that its passes took, or -1: no memory. */
double draft_round(const Network *net, const Rules *rules, Lane *lanes, int32_t count) {
    Round r = {.net = net, .rules = rules, .lanes = lanes, .count = count};
    char *memory = memory_of(lay_out(&r, NULL));
    if (!memory) return -1;
    lay_out(&r, memory);
    r.pass.segments = count;
    r.pass.base = r.base;
    r.pass.length = r.length;
    r.pass.first = r.first;
    r.pass.node = r.node;
    r.pass.parent = r.parent;
    feed(&r);
    grow(&r);
    for (int32_t s = 0; s < count; s++) harvest(&lanes[s], &r.growths[s]);
    return r.seconds;
}
