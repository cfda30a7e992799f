/* A round of Medusa heads (models/heads/medusa.py): all heads read one state of a request. */
#include "rounds.h"

typedef struct {
    int32_t bf16, dim, heads;
    int32_t layers; /* of each head */
    int32_t shared; /* outputs[0] serves all heads */
    int32_t size;   /* tokens that logits are given of */
    const float *norm; /* the target's last */
    float norm_eps;
    Matrix first;          /* the first layers of all heads side by side */
    const Matrix *others;  /* [layers - 1, heads] */
    const Matrix *outputs; /* [heads], or one */
    const int64_t *ids;    /* the target's ids of the heads' tokens, or null: the same */
} Heads;

typedef struct {
    const Heads *net;
    int32_t count, places;
    char *normed;  /* [count, dim] */
    char *added;   /* [count, heads, dim], of the first layers */
    char *more;    /* [count, dim], of a later one */
    char *states;  /* [heads, count, dim] */
    float *scores; /* [places, count, outputs] */
    int64_t *columns; /* [places, count, width], as the shares */
    float *shares;
    Choice *choices; /* [places, count] */
    Growing growing;
} Round;

static size_t lay_out(Round *r, char *begin, int32_t width, int32_t nodes) {
    const Heads *net = r->net;
    Memory memory = {.begin = begin};
    int64_t rows = (int64_t)net->heads * r->count, ranked = (int64_t)r->places * r->count;
    r->normed = take(&memory, bytes_of((int64_t)r->count * net->dim, net->bf16));
    r->added = take(&memory, bytes_of(rows * net->dim, net->bf16));
    r->more = take(&memory, bytes_of((int64_t)r->count * net->dim, net->bf16));
    r->states = take(&memory, bytes_of(rows * net->dim, net->bf16));
    r->scores = take(&memory, ranked * net->outputs->out * sizeof(float));
    r->columns = take(&memory, ranked * width * sizeof(int64_t));
    r->shares = take(&memory, ranked * width * sizeof(float));
    r->choices = take(&memory, ranked * sizeof(Choice));
    take_growing(&memory, &r->growing, nodes);
    return memory.used;
}

static char *states_of(const Round *r, int32_t head) {
    return r->states + bytes_of((int64_t)head * r->count * r->net->dim, r->net->bf16);
}

/* What the output matrices read. */
static void run_heads(Round *r) {
    const Heads *net = r->net;
    norm(r->normed, net->norm, net->norm_eps, r->normed, r->count, net->dim, net->bf16);
    if (net->layers) linear(&net->first, r->normed, r->added, r->count, net->bf16);
    for (int32_t head = 0; head < net->heads; head++) {
        char *own = states_of(r, head);
        if (!net->layers) {
            memcpy(own, r->normed, bytes_of((int64_t)r->count * net->dim, net->bf16));
            continue;
        }
        const char *added = r->added + bytes_of((int64_t)head * net->dim, net->bf16);
        add_silu(r->normed, added, net->first.out, own, r->count, net->dim, net->bf16);
        for (int32_t layer = 1; layer < net->layers; layer++) {
            const Matrix *m = &net->others[(layer - 1) * net->heads + head];
            linear(m, own, r->more, r->count, net->bf16);
            add_silu(own, r->more, net->dim, own, r->count, net->dim, net->bf16);
        }
    }
}

static void score(Round *r) {
    const Heads *net = r->net;
    int64_t block = (int64_t)r->count * net->outputs->out;
    if (net->shared) {
        logits(r->states, NULL, 0, net->outputs, NULL, r->scores, r->places * r->count, net->bf16);
        return;
    }
    for (int32_t head = 0; head < r->places; head++)
        logits(states_of(r, head), NULL, 0, &net->outputs[head], NULL, r->scores + head * block,
               r->count, net->bf16);
}

/* states: per request, what the target's last layer gave behind the last cached token. ranked: null,
 * or what is given instead of trees. */
double medusa_round(const Heads *net, const Rules *rules, const void *const states[],
                    const Ranked *ranked, Tree *const trees[], int32_t count) {
    int32_t nodes = 0;
    for (int32_t s = 0; s < count; s++) nodes = larger_of(nodes, trees[s]->nodes);
    /* No tree is deeper than it has nodes. */
    Round r = {.net = net, .count = count, .places = nodes < net->heads ? nodes : net->heads};
    char *memory = kept_memory(lay_out(&r, NULL, rules->width, nodes));
    if (!memory) return -1;
    lay_out(&r, memory, rules->width, nodes);
    for (int32_t s = 0; s < count; s++) copy_row(r.normed, s, states[s], 0, net->dim, net->bf16);
    double begin = now();
    run_heads(&r);
    score(&r);
    double seconds = now() - begin;
    for (int32_t i = 0; i < r.places * count; i++)
        r.choices[i] = choice_of(trees[i % count], i / count);
    best_choices(r.scores, r.places * count, net->outputs->out, net->size, rules, r.choices, net->ids,
                 r.columns, r.shares);
    for (int32_t s = 0; s < count; s++) {
        int64_t at = (int64_t)s * rules->width, stride = (int64_t)count * rules->width;
        Marginals m = {r.columns + at, r.shares + at, r.places, stride, net->ids};
        if (ranked) give_ranked(&m, rules, &ranked[s]);
        else best_tree(&m, rules, &r.growing, trees[s]);
    }
    return seconds;
}
