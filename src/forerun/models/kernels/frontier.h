/* Trees that grow best first, as `best_first` of drafters/tree.py lets them. */
#pragma once

#include "rounds.h"

typedef struct { /* a node that may be taken next */
    double reached; /* the belief that it and all its ancestors are right */
    double above;   /* the same of its parent */
    int64_t token;
    int32_t parent, level;
} Open;

typedef struct {
    Open *open; /* the best first; no more than can still be taken */
    int32_t count;
    int32_t room;  /* nodes that can still be taken */
    int32_t taken;
    double floor; /* paths that are less likely are not taken */
} Frontier;

static inline void take_frontier(Memory *memory, Frontier *f, int32_t nodes) {
    f->open = take(memory, nodes * sizeof(Open));
    f->room = nodes;
}

/* Behind those that are as likely. */
static inline void open_node(Frontier *f, Open fresh) {
    if (!(fresh.reached > 0) || fresh.reached < f->floor) return;
    if (f->count >= f->room && !(fresh.reached > f->open[f->room - 1].reached)) return;
    int32_t at = f->count < f->room ? f->count++ : f->room - 1;
    for (; at && fresh.reached > f->open[at - 1].reached; at--) f->open[at] = f->open[at - 1];
    f->open[at] = fresh;
}

/* The likeliest, which becomes the next of the nodes; its place there. */
static inline int32_t take_best(Frontier *f, Node *nodes, Open *best) {
    *best = f->open[0];
    f->room--;
    memmove(f->open, f->open + 1, --f->count * sizeof(Open));
    if (f->count > f->room) f->count = f->room;
    /* over `above` again, as Python has it */
    nodes[f->taken] = (Node){best->reached / best->above, best->token, best->parent};
    return f->taken++;
}
