/* A round of an EAGLE draft (models/heads/eagle.py): the rows that are due, then a tree per request,
 * level by level.
 *
 * The same is said at more leisure in drafters/eagle.py and drafters/growing.py, which also draft
 * for requests that edit logits.
 */
#include "rounds.h"

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
    int32_t joins;       /* fc reads embedding and state of every row, and features are states
                            (EAGLE-1); else it makes states of features, and the first layer reads
                            them beside the embedding (EAGLE-3) */
    int32_t size;        /* vocabulary of the draft */
    const int64_t *ids;  /* the target's ids of its tokens, or null: the same */
} Network;

typedef struct { /* a request in a round */
    int32_t base, length;  /* first slot of its rows, and how many there are */
    int32_t due;           /* features without a row */
    int32_t depth;         /* limit of its tree */
    const void *fed;       /* [due, features] */
    const int64_t *tokens; /* [due], what those rows read */
    void *hidden;          /* [dim], what its last row handed on; written over if rows are due */
} Lane;

typedef struct {
    double reached; /* the chance that it and all its ancestors are right */
    double belief;
    int64_t token;
    int32_t parent; /* candidate, -1: the root */
    int32_t origin; /* place of the parent in its frontier; in the end its own among the kept ones */
} Candidate;

typedef struct { /* the tree of one request, as `Growth` of growing.py */
    Candidate *candidates;
    Candidate **kept;  /* the best so far, as many as the tree may have; best first */
    Candidate **fresh; /* the best of the last level, as many as a frontier may have */
    int32_t *frontier; /* candidates to expand next, best first */
    int32_t *rows;     /* per candidate that was in a frontier, its parent among them, or -1 */
    int32_t count, kept_count, fresh_count, frontier_count, row_count;
    int32_t length; /* rows of the request before those of the tree */
    int32_t level; /* of the candidates that come next */
    int32_t begin; /* row of the first node of the frontier */
} Growth;

typedef struct {
    const Network *net;
    const Rules *rules;
    double floor; /* no level is begun whose nodes are all less likely */
    const Lane *lanes;
    Tree *const *trees;
    int32_t count;
    Growth *growths;
    Packing packing;
    char *fed, *embedded, *hidden, *above; /* a row for each of the pass */
    char *joined;                          /* [.., 2 * dim], if the network joins */
    void *normed;
    float *scores, *shares;
    int64_t *columns;
    Choice *choices; /* of each row that is ranked */
    Node *kept;
    double seconds; /* in passes */
} Round;

static int32_t due_rows(const Round *r) {
    int32_t rows = 0;
    for (int32_t s = 0; s < r->count; s++) rows += r->lanes[s].due;
    return rows;
}

/* Give every array of a round its place from `begin` on; the bytes that takes. */
static size_t lay_out(Round *r, char *begin) {
    const Network *net = r->net;
    Memory memory = {.begin = begin};
    int32_t width = r->rules->width, due = due_rows(r), open = r->count * width;
    int32_t rows = larger_of(due, open), nodes = 0, kept = 0;
    int64_t states = bytes_of((int64_t)rows * net->dim, net->bf16);
    r->growths = take(&memory, r->count * sizeof(Growth));
    for (int32_t s = 0; s < r->count; s++) {
        Growth own, *g = begin ? &r->growths[s] : &own;
        int32_t inner = (r->lanes[s].depth - 1) * width, all = width + inner * width;
        nodes += inner;
        kept = larger_of(kept, r->trees[s]->nodes);
        g->candidates = take(&memory, all * sizeof(Candidate));
        g->kept = take(&memory, r->trees[s]->nodes * sizeof(Candidate *));
        g->fresh = take(&memory, width * sizeof(Candidate *));
        g->frontier = take(&memory, width * sizeof(int32_t));
        g->rows = take(&memory, inner * sizeof(int32_t));
    }
    take_packing(&memory, &r->packing, net->layers[0], r->count, larger_of(nodes, due), rows);
    r->fed = take(&memory, bytes_of((int64_t)due * net->features, net->bf16));
    r->embedded = take(&memory, states);
    r->hidden = take(&memory, states);
    r->above = take(&memory, states);
    r->joined = take(&memory, net->joins ? 2 * states : 0);
    r->normed = take(&memory, states);
    r->scores = take(&memory, (size_t)open * net->head.out * sizeof(float));
    r->shares = take(&memory, open * width * sizeof(float));
    r->columns = take(&memory, open * width * sizeof(int64_t));
    r->choices = take(&memory, open * sizeof(Choice));
    r->kept = take(&memory, kept * sizeof(Node));
    return memory.used;
}

/* ---- passes ---------------------------------------------------------------------------------- */

/* From features to the states that rows are fed. */
static void fuse(Round *r, int32_t rows) {
    const Network *net = r->net;
    int32_t part = net->norm_count ? net->features / net->norm_count : 0;
    double begin = now();
    for (int32_t i = 0; i < rows * net->norm_count; i++) {
        char *at = r->fed + bytes_of((int64_t)i * part, net->bf16);
        norm(at, net->feature_norms[i % net->norm_count], net->norm_eps, at, 1, part, net->bf16);
    }
    if (net->joins) memcpy(r->hidden, r->fed, bytes_of((int64_t)rows * net->dim, net->bf16));
    else linear(&net->fc, r->fed, r->hidden, rows, net->bf16);
    r->seconds += now() - begin;
}

/* From what is embedded and hidden to what the first layer of a network that joins reads. */
static void join(Round *r, int32_t rows) {
    const Network *net = r->net;
    for (int64_t i = 0; i < rows; i++) {
        copy_row(r->joined, 2 * i, r->embedded, i, net->dim, net->bf16);
        copy_row(r->joined, 2 * i + 1, r->hidden, i, net->dim, net->bf16);
    }
    linear(&net->fc, r->joined, r->hidden, rows, net->bf16);
}

/* Run the rows of the pass, from what is embedded and hidden; r->hidden is what they hand on. */
static void run_rows(Round *r) {
    const Network *net = r->net;
    Pass *pass = &r->packing.pass;
    double begin = now();
    prepare(pass);
    if (net->joins) join(r, pass->rows);
    run(pass, net->layers, net->layer_count, net->joins ? NULL : r->embedded, r->hidden,
        NULL);
    if (net->norm_output && net->last_norm)
        norm(r->hidden, net->last_norm, net->norm_eps, r->hidden, pass->rows, net->dim, net->bf16);
    r->seconds += now() - begin;
}

/* The candidates behind the first rows of r->hidden. */
static void rank_rows(Round *r, int32_t rows) {
    const Network *net = r->net;
    double begin = now();
    const float *last_norm = net->norm_output ? NULL : net->last_norm;
    double ranking = rank_choices(r->hidden, last_norm, net->norm_eps, &net->head, r->normed,
                                  r->scores, rows, net->bf16, net->size, r->rules, r->choices,
                                  net->ids, r->columns, r->shares);
    r->seconds += now() - begin - ranking;
}

/* Turn features into rows, which are then committed. */
static void feed(Round *r) {
    const Network *net = r->net;
    Packing *p = &r->packing;
    int32_t rows = 0;
    for (int32_t s = 0; s < r->count; s++) {
        const Lane *lane = &r->lanes[s];
        p->first[s] = p->node[s] = rows;
        p->base[s] = lane->base;
        p->length[s] = lane->length;
        r->growths[s].length = lane->length + lane->due;
        if (!lane->due) continue;
        memcpy(r->fed + bytes_of((int64_t)rows * net->features, net->bf16), lane->fed,
               bytes_of((int64_t)lane->due * net->features, net->bf16));
        for (int32_t i = 0; i < lane->due; i++, rows++) {
            copy_row(r->embedded, rows, net->embedding, lane->tokens[i], net->dim, net->bf16);
            p->parent[rows] = i - 1;
        }
    }
    p->first[r->count] = p->node[r->count] = p->pass.rows = rows;
    if (!rows) return;
    fuse(r, rows);
    run_rows(r);
    for (int32_t s = 0; s < r->count; s++)
        if (r->lanes[s].due)
            copy_row(r->lanes[s].hidden, 0, r->hidden, p->first[s + 1] - 1, net->dim, net->bf16);
}

/* ---- trees ----------------------------------------------------------------------------------- */

/* Put the youngest candidate into a list of the likeliest, the older first among equals. */
static void keep(Candidate **list, int32_t *count, int32_t most, Candidate *c) {
    if (*count < most) (*count)++;
    else if (!(c->reached > list[most - 1]->reached)) return;
    int32_t at = *count - 1;
    for (; at && c->reached > list[at - 1]->reached; at--) list[at] = list[at - 1];
    list[at] = c;
}

/* Choose the next frontier among the candidates of the last level. */
static void advance(const Round *r, int32_t s) {
    Growth *g = &r->growths[s];
    int32_t before = g->row_count - g->frontier_count, nodes = r->trees[s]->nodes;
    g->frontier_count = 0;
    if (g->level >= r->lanes[s].depth || !g->fresh_count) return;
    if (g->fresh[0]->reached < r->floor) return;
    /* What a node must exceed so that a child of it could be kept. */
    double bound = g->kept_count < nodes ? 0 : g->kept[nodes - 1]->reached;
    for (int32_t i = 0; i < g->fresh_count; i++) {
        const Candidate *c = g->fresh[i];
        if (!(c->reached > bound) || ends(r->trees[s], c->token)) continue;
        g->frontier[g->frontier_count++] = c - g->candidates;
        g->rows[g->row_count++] = g->level == 1 ? -1 : before + c->origin;
    }
}

/* Add the candidates behind the frontier, which were ranked. */
static void extend(const Round *r, int32_t s) {
    Growth *g = &r->growths[s];
    int32_t width = r->rules->width;
    g->fresh_count = 0;
    for (int32_t place = 0; place < g->frontier_count; place++) {
        int32_t parent = g->frontier[place];
        double above = parent < 0 ? 1 : g->candidates[parent].reached;
        for (int32_t i = 0; i < width; i++) {
            int64_t at = (int64_t)(g->begin + place) * width + i, column = r->columns[at];
            double belief = r->shares[at];
            if (!(belief > 0)) continue;
            double chance = chance_of(r->rules, r->trees[s], belief);
            if (!(chance > 0)) continue;
            int64_t token = r->net->ids ? r->net->ids[column] : column;
            Candidate *c = &g->candidates[g->count++];
            *c = (Candidate){above * chance, belief, token, parent, place};
            keep(g->kept, &g->kept_count, r->trees[s]->nodes, c);
            keep(g->fresh, &g->fresh_count, width, c);
        }
    }
    g->level++;
    advance(r, s);
}

/* Lay the frontiers side by side as the rows of a pass, each with what its parent handed on. */
static void gather(Round *r) {
    const Network *net = r->net;
    Packing *p = &r->packing;
    int32_t rows = 0, nodes = 0;
    for (int32_t s = 0; s < r->count; s++) {
        Growth *g = &r->growths[s];
        p->first[s] = rows;
        p->node[s] = nodes;
        p->length[s] = g->length;
        for (int32_t i = 0; i < g->frontier_count; i++) {
            const Candidate *c = &g->candidates[g->frontier[i]];
            copy_row(r->embedded, rows + i, net->embedding, c->token, net->dim, net->bf16);
            copy_row(r->above, rows + i, r->hidden, g->begin + c->origin, net->dim, net->bf16);
            r->choices[rows + i] = choice_of(r->trees[s], g->level);
        }
        g->begin = rows;
        rows += g->frontier_count;
        if (!g->frontier_count) continue; /* no rows, and no nodes before them */
        memcpy(p->parent + nodes, g->rows, g->row_count * sizeof *g->rows);
        nodes += g->row_count;
    }
    p->first[r->count] = p->pass.rows = rows;
    p->node[r->count] = nodes;
    char *below = r->hidden;
    r->hidden = r->above;
    r->above = below;
}

static void plant(Round *r) {
    for (int32_t s = 0; s < r->count; s++) {
        Growth *g = &r->growths[s];
        g->count = g->kept_count = g->row_count = g->level = 0;
        g->frontier_count = 1;
        g->frontier[0] = -1;
        g->begin = s;
        r->choices[s] = choice_of(r->trees[s], 0);
        copy_row(r->hidden, s, r->lanes[s].hidden, 0, r->net->dim, r->net->bf16);
    }
}

static void grow(Round *r) {
    int32_t rows = r->count;
    for (plant(r);; rows = r->packing.pass.rows) {
        rank_rows(r, rows);
        for (int32_t s = 0; s < r->count; s++) extend(r, s);
        gather(r);
        if (!r->packing.pass.rows) return;
        run_rows(r);
    }
}

/* The likeliest candidates. */
static void harvest(const Round *r, int32_t s) {
    Growth *g = &r->growths[s];
    for (int32_t i = 0; i < g->kept_count; i++) {
        Candidate *c = g->kept[i];
        c->origin = i; /* children are less likely, or younger, and so come later */
        int32_t parent = c->parent < 0 ? -1 : g->candidates[c->parent].origin;
        r->kept[i] = (Node){c->belief, c->token, parent};
    }
    hand_over(r->rules, r->kept, g->kept_count, r->trees[s]);
}

double eagle_round(const Network *net, const Rules *rules, double floor, const Lane *lanes,
                   Tree *const trees[], int32_t count) {
    Round r = {.net = net, .rules = rules, .floor = floor, .lanes = lanes, .trees = trees, .count = count};
    char *memory = kept_memory(lay_out(&r, NULL));
    if (!memory) return -1;
    lay_out(&r, memory);
    feed(&r);
    grow(&r);
    for (int32_t s = 0; s < count; s++) harvest(&r, s);
    return r.seconds;
}
