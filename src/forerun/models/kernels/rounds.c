/* What compiled rounds of drafting share; see rounds.h. */
#include "rounds.h"

#include <stdlib.h>

/* ---- memory ---------------------------------------------------------------------------------- */

void *take(Memory *memory, size_t bytes) {
    char *place = memory->begin ? memory->begin + memory->used : NULL;
    memory->used += (bytes + 63) / 64 * 64;
    return place;
}

/* A pass through layers like this one, with its scratch. */
void take_packing(Memory *memory, Packing *p, const Layer *l, int32_t segments, int32_t nodes,
                  int32_t rows) {
    int64_t narrow = larger_of(l->qkv.in, larger_of(l->o.in, l->down.in));
    int64_t wide = larger_of(l->qkv.out, larger_of(l->gate_up.out, l->o.out));
    p->base = take(memory, segments * sizeof(int32_t));
    p->length = take(memory, segments * sizeof(int32_t));
    p->first = take(memory, (segments + 1) * sizeof(int32_t));
    p->node = take(memory, (segments + 1) * sizeof(int32_t));
    p->parent = take(memory, nodes * sizeof(int32_t));
    p->pass = (Pass){
        .segments = segments,
        .base = p->base,
        .length = p->length,
        .first = p->first,
        .node = p->node,
        .parent = p->parent,
        .position = take(memory, nodes * sizeof(int32_t)),
        .straight = take(memory, nodes * sizeof(int32_t)),
        .query = take(memory, (size_t)rows * l->heads * l->head_dim * sizeof(float)),
        .narrow = take(memory, bytes_of(rows * narrow, l->bf16)),
        .wide = take(memory, bytes_of(rows * wide, l->bf16)),
    };
}

/* Kept from round to round: fresh memory would cost a page fault per 4 KB. */
char *kept_memory(size_t bytes) {
    static _Thread_local char *memory;
    static _Thread_local size_t room;
    if (room < bytes) {
        free(memory);
        memory = aligned_alloc(64, bytes);
        room = memory ? bytes : 0;
    }
    return memory;
}

/* ---- trees ----------------------------------------------------------------------------------- */

/* That a node is right whose ancestors are. */
double chance_of(const Rules *rules, const Tree *tree, double belief) {
    double chance = belief * rules->shared->values[(int32_t)(belief * rules->bins)] * tree->own->values[0];
    return chance < rules->most ? chance : rules->most;
}

int ends(const Tree *tree, int64_t token) {
    for (int32_t i = 0; i < tree->end_count; i++)
        if (tree->ends[i] == token) return 1;
    return 0;
}

typedef struct {
    const Rules *rules;
    const Node *nodes;
    int32_t count;
    Tree *tree;
} Handing;

/* The children of a node, each followed by all below it. above: its place in the tree. */
static void hand_over_below(const Handing *h, int32_t parent, int32_t above, double reached) {
    Tree *tree = h->tree;
    for (int32_t i = parent + 1; i < h->count; i++) {
        const Node *node = &h->nodes[i];
        if (node->parent != parent) continue;
        int32_t place = tree->count++;
        double survival = reached * chance_of(h->rules, tree, node->belief);
        tree->tokens[place] = node->token;
        tree->parents[place] = above;
        tree->beliefs[place] = node->belief;
        tree->survival[place] = survival;
        hand_over_below(h, i, place, survival);
    }
}

/* Nodes in any order that has parents before children and the likelier siblings first. */
void hand_over(const Rules *rules, const Node *nodes, int32_t count, Tree *tree) {
    Handing h = {rules, nodes, count, tree};
    tree->count = 0;
    hand_over_below(&h, -1, -1, 1);
}

/* ---- what became of them --------------------------------------------------------------------- */

/* `learn` of models/heads/ratios.py. */
static void learn(const Ratios *ratios, int32_t at, double expected, int32_t right) {
    if (ratios->expected[at] > ratios->memory) {
        ratios->right[at] *= 0.5;
        ratios->expected[at] *= 0.5;
    }
    ratios->expected[at] += expected;
    ratios->right[at] += right;
    ratios->values[at] = ratios->right[at] / ratios->expected[at];
}

/* Learn from the tokens that followed, as `settle` of drafters/calibration.py. They decide the
 * children of the root and of all right nodes, as far as they reach. */
void settle(const Rules *rules, const Tree *tree, const int64_t *truth, int32_t length) {
    double expected = 0;
    int32_t found = 0;
    for (int32_t node = 0; node < tree->count; node++) {
        int32_t parent = tree->parents[node], next = parent < 0 ? 0 : tree->behind[parent];
        tree->behind[node] = length; /* index of the true token behind it: none, unless it is right */
        if (next >= length) continue;
        int32_t right = tree->tokens[node] == truth[next];
        if (right) tree->behind[node] = next + 1;
        double belief = tree->beliefs[node];
        int32_t bin = belief * rules->bins;
        double chance = belief * rules->shared->values[bin];
        expected += chance < rules->most ? chance : rules->most;
        found += right;
        learn(rules->shared, bin, belief, right);
    }
    learn(tree->own, 0, expected, found);
}
