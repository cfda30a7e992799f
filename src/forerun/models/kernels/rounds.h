/* What compiled rounds of drafting share: how trees are asked for and handed over, what is learned
 * of them, and memory. Mirrored in models/heads/rounds.py and models/heads/ratios.py.
 *
 * A round drafts for all requests of a batch in one call. Between two passes lie a few
 * microseconds of work, but behind a pass of the target, which has moved its weights through all
 * caches, every function of an interpreter that takes part costs ten to begin with.
 *
 * Each returns the seconds that its forward passes took, from what is fed to the logits, or -1: no
 * memory.
 */
#pragma once

#include "kernels.h"

#include <stddef.h>
#include <string.h>

typedef struct { /* right tokens over expected ones */
    double *right, *expected, *values;
    double memory; /* expected tokens after which old ones fade */
} Ratios;

typedef struct { /* see drafters/calibration.py */
    int32_t width;        /* candidates of a place */
    int32_t bins;         /* of beliefs, which lie between 0 and 1 */
    int32_t contenders;   /* likeliest tokens of a place that race where a request samples */
    double most;          /* no chance is larger */
    const Ratios *shared; /* [bins + 1], by belief */
} Rules;

typedef struct { /* how a request chooses its tokens, see sampling.py */
    float temperature; /* 0: always the likeliest, and nothing else counts */
    float min_p;
    double top_p;
    int32_t top_k; /* 0 or less: all */
    uint64_t seed;
} Sampling;

typedef struct { /* of a token */
    const Sampling *sampling;
    int64_t position;
} Choice;

typedef struct { /* the tree of a request, its nodes depth first and the likeliest siblings first */
    int32_t nodes; /* it may have */
    int32_t end_count;
    const int64_t *ends; /* tokens that nothing follows */
    const Ratios *own;   /* [1], of the request */
    Sampling sampling;
    int64_t position; /* of the tokens that follow the root */
    int32_t count;       /* of its nodes, for which there is room below */
    int64_t *tokens;
    int32_t *parents;  /* -1: the root */
    double *beliefs;   /* that a node is right if its ancestors are */
    double *survival;  /* the chance that it and its ancestors are, corrected */
    int32_t *behind;   /* scratch of `settle` */
} Tree;

typedef struct { /* of a tree that is handed over */
    double belief;
    int64_t token;
    int32_t parent;
} Node;

typedef struct { /* the candidates of each place, best first, in a draft whose places are independent */
    const int64_t *columns;
    const float *shares;
    int32_t places;
    int64_t stride;     /* from a place to the next */
    const int64_t *ids; /* of the target, by column; or null: the same */
} Marginals;

typedef struct { /* the same, as it is handed out */
    int64_t *tokens; /* [places, width] */
    float *beliefs;
} Ranked;

typedef struct { /* scratch of best_tree, for so many nodes */
    Node *nodes;
    double *reached;
    struct Open *open;
} Growing;

typedef struct { /* a pass that is put together */
    Pass pass;
    int32_t *base, *length, *first, *node, *parent; /* what its pointers point to */
} Packing;

typedef struct { /* where arrays get their places one after the other */
    char *begin; /* null: only counted */
    size_t used;
} Memory;

void *take(Memory *memory, size_t bytes);
void take_packing(Memory *memory, Packing *packing, const Layer *l, int32_t segments, int32_t nodes,
                  int32_t rows);
void take_growing(Memory *memory, Growing *growing, int32_t nodes);
char *kept_memory(size_t bytes);

double chance_of(const Rules *rules, const Tree *tree, double belief);
int ends(const Tree *tree, int64_t token);
void hand_over(const Rules *rules, const Node *nodes, int32_t count, Tree *tree);
void best_choices(float *scores, int32_t rows, int32_t stride, int32_t size, const Rules *rules,
                  const Choice *choices, const int64_t *ids, int64_t *columns, float *shares);
double rank_choices(const void *x, const float *norm, float eps, const Matrix *head, void *normed,
                    float *scores, int32_t rows, int32_t bf16, int32_t size, const Rules *rules,
                    const Choice *choices, const int64_t *ids, int64_t *columns, float *shares);
void give_ranked(const Marginals *m, const Rules *rules, const Ranked *ranked);
void best_tree(const Marginals *m, const Rules *rules, const Growing *scratch, Tree *tree);

static inline int32_t larger_of(int32_t a, int32_t b) { return a > b ? a : b; }

/* Of a token with so many drafted ones before it. */
static inline Choice choice_of(const Tree *tree, int32_t drafted) {
    return (Choice){&tree->sampling, tree->position + drafted};
}

/* Of numbers of a draft's own type. */
static inline size_t bytes_of(int64_t numbers, int32_t bf16) { return numbers * (bf16 ? 2 : 4); }

/* Row `from` of some rows [.., dim] becomes row `to` of others. */
static inline void copy_row(void *rows, int64_t to, const void *others, int64_t from, int32_t dim,
                            int32_t bf16) {
    size_t row = bytes_of(dim, bf16);
    memmove((char *)rows + to * row, (const char *)others + from * row, row);
}
