/* A round of DFlash blocks (models/heads/dflash.py): the context that is due, then a block per
 * request, side by side in one pass. */
#include "rounds.h"

typedef struct {
    int32_t bf16, dim, features; /* width of a state, of what a context token is fed of the target */
    int32_t layer_count;
    const Layer *const *layers;
    const void *embedding; /* [vocabulary of the target, dim] */
    const void *mask;      /* [dim], what the slots behind the anchor read */
    Matrix fc, head;
    const float *context_norm, *last_norm;
    float norm_eps;
    int32_t first_slot;  /* that drafts */
    int32_t size;        /* vocabulary of the draft */
    const int64_t *ids;  /* the target's ids of its tokens, or null: the same */
} Blocks;

typedef struct { /* a request in a round */
    int32_t base, length; /* first slot of its context, and how much of it has keys and values */
    int32_t due;          /* context tokens that have none */
    const void *fed;      /* [due, features] */
    int64_t anchor;       /* the last committed token */
} Block;

typedef struct {
    const Blocks *net;
    const Block *blocks;
    int32_t count, slots, drafts; /* of a block */
    Packing packing;
    char *fed, *hidden, *normed; /* a row for each of the pass */
    float *scores;               /* [count, drafts, outputs] */
    int64_t *columns;            /* [count, drafts, width], as the shares */
    float *shares;
    Choice *choices; /* [count, drafts] */
    Growing growing;
} Round;

static int32_t due_rows(const Round *r) {
    int32_t rows = 0;
    for (int32_t s = 0; s < r->count; s++) rows += r->blocks[s].due;
    return rows;
}

static size_t lay_out(Round *r, char *begin, int32_t width, int32_t nodes) {
    const Blocks *net = r->net;
    Memory memory = {.begin = begin};
    int32_t due = due_rows(r), rows = larger_of(due, r->count * r->slots);
    int64_t ranked = (int64_t)r->count * r->drafts;
    take_packing(&memory, &r->packing, net->layers[0], r->count, rows, rows);
    r->fed = take(&memory, bytes_of((int64_t)due * net->features, net->bf16));
    r->hidden = take(&memory, bytes_of((int64_t)rows * net->dim, net->bf16));
    r->normed = take(&memory, bytes_of((int64_t)rows * net->dim, net->bf16));
    r->scores = take(&memory, ranked * net->head.out * sizeof(float));
    r->columns = take(&memory, ranked * width * sizeof(int64_t));
    r->shares = take(&memory, ranked * width * sizeof(float));
    r->choices = take(&memory, ranked * sizeof(Choice));
    take_growing(&memory, &r->growing, nodes);
    return memory.used;
}

/* A chain of rows for a request, behind what it has in the store. */
static void lay_chain(Packing *p, int32_t s, int32_t base, int32_t length, int32_t rows) {
    p->base[s] = base;
    p->length[s] = length;
    if (!s) p->first[0] = p->node[0] = 0;
    for (int32_t i = 0; i < rows; i++) p->parent[p->first[s] + i] = i - 1;
    p->first[s + 1] = p->node[s + 1] = p->pass.rows = p->first[s] + rows;
}

/* Give context tokens their keys and values; the seconds that takes. */
static double append_due(Round *r) {
    const Blocks *net = r->net;
    Packing *p = &r->packing;
    for (int32_t s = 0; s < r->count; s++) {
        const Block *b = &r->blocks[s];
        lay_chain(p, s, b->base, b->length, b->due);
        if (b->due)
            memcpy(r->fed + bytes_of((int64_t)p->first[s] * net->features, net->bf16), b->fed,
                   bytes_of((int64_t)b->due * net->features, net->bf16));
    }
    if (!p->pass.rows) return 0;
    double begin = now();
    linear(&net->fc, r->fed, r->hidden, p->pass.rows, net->bf16);
    norm(r->hidden, net->context_norm, net->norm_eps, r->normed, p->pass.rows, net->dim, net->bf16);
    prepare(&p->pass);
    append(&p->pass, net->layers, net->layer_count, r->normed);
    return now() - begin;
}

/* The rows of all blocks, with what they read. */
static void lay_blocks(Round *r) {
    const Blocks *net = r->net;
    for (int32_t s = 0; s < r->count; s++) {
        const Block *b = &r->blocks[s];
        lay_chain(&r->packing, s, b->base, b->length + b->due, r->slots);
        int32_t row = r->packing.first[s];
        copy_row(r->hidden, row, net->embedding, b->anchor, net->dim, net->bf16);
        for (int32_t i = 1; i < r->slots; i++)
            copy_row(r->hidden, row + i, net->mask, 0, net->dim, net->bf16);
    }
}

/* Run them and rank what the slots say that draft; the seconds up to the logits. */
static double run_blocks(Round *r, const Rules *rules, Tree *const trees[]) {
    const Blocks *net = r->net;
    Packing *p = &r->packing;
    double begin = now();
    prepare(&p->pass);
    run(&p->pass, net->layers, net->layer_count, NULL, r->hidden, NULL);
    for (int32_t s = 0; s < r->count; s++) /* close the gaps between those that draft */
        for (int32_t i = 0; i < r->drafts; i++)
            copy_row(r->hidden, s * r->drafts + i, r->hidden, p->first[s] + net->first_slot + i,
                     net->dim, net->bf16);
    int32_t rows = r->count * r->drafts;
    for (int32_t i = 0; i < rows; i++)
        r->choices[i] = choice_of(trees[i / r->drafts], i % r->drafts);
    double ranking = rank_choices(r->hidden, net->last_norm, net->norm_eps, &net->head, r->normed,
                                  r->scores, rows, net->bf16, net->size, rules, r->choices, net->ids,
                                  r->columns, r->shares);
    return now() - begin - ranking;
}

/* slots: of a block, its anchor included. ranked: null, or what is given instead of trees. */
double dflash_round(const Blocks *net, const Rules *rules, int32_t slots, const Block *blocks,
                    const Ranked *ranked, Tree *const trees[], int32_t count) {
    int32_t nodes = 0, drafts = slots - net->first_slot;
    for (int32_t s = 0; s < count; s++) nodes = larger_of(nodes, trees[s]->nodes);
    Round r = {.net = net, .blocks = blocks, .count = count, .slots = slots, .drafts = drafts};
    char *memory = kept_memory(lay_out(&r, NULL, rules->width, nodes));
    if (!memory) return -1;
    lay_out(&r, memory, rules->width, nodes);
    double seconds = append_due(&r);
    lay_blocks(&r);
    seconds += run_blocks(&r, rules, trees);
    for (int32_t s = 0; s < count; s++) {
        int64_t at = (int64_t)s * drafts * rules->width;
        Marginals m = {r.columns + at, r.shares + at, drafts, rules->width, net->ids};
        if (ranked) give_ranked(&m, rules, &ranked[s]);
        else best_tree(&m, rules, &r.growing, trees[s]);
    }
    return seconds;
}
