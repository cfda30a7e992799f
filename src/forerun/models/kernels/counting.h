/* What followed the same tokens before (drafters/suffix.py, drafters/corpus.py): the law behind any
 * path, from counts of the request and, mixed with them, of a corpus. */
#pragma once

#include "rounds.h"

typedef struct { /* a file, see drafters/corpus_file.py */
    const uint64_t *keys;  /* [contexts], sorted */
    const int32_t *begins; /* [contexts + 1] */
    const void *followers; /* uint16, or uint32 if they are `wide` */
    const uint16_t *chances;
    int32_t contexts, order, wide;
    int32_t most; /* followers of a context */
} Corpus;

typedef struct {
    const Corpus *corpus; /* or null: only the request counts */
    int32_t order;        /* longest ending that is looked for in the request */
    double weight;        /* sightings that one counts for */
    double negligible;    /* probability left over at which shorter endings no longer matter */
    double equal;         /* length of an ending from which on the request is trusted more */
    double floor;         /* paths that are less likely are not proposed */
    double noiseless, coupling, unknown; /* see `coupled` of drafters/corpus.py */
} Counting;

typedef struct { /* a request */
    const int64_t *tokens;
    int32_t length;
    int32_t depth;   /* of the longest path */
    int32_t coupled; /* whether the noise with which it samples is taken into account */
} Text;

typedef struct { /* a token that may follow */
    int64_t token;
    double chance;   /* in the corpus; in the end, that it follows */
    double followed; /* in the request, as far as shorter endings are not negligible */
    int32_t seen;    /* in the request, behind endings as long as those looked at */
} Follower;

typedef struct { /* the law behind a path, as `find_law` found it, and scratch for it */
    const Counting *net;
    const Text *text;
    const Tree *tree; /* of the request: how it samples, and where */
    int64_t *ending;  /* [order], the last token first */
    int64_t *next;    /* [length], tokens that followed matches, */
    int32_t *matched; /* [length], of so many tokens */
    Follower *law;    /* [most + length], */
    int32_t known;    /* so many of them */
    int32_t *places;  /* [slots], in the law, by hash of the token; -1: free */
    int32_t slots, matches, longest;
} Counts;

void take_counts(Memory *memory, Counts *c);
void find_law(Counts *c, const Node *nodes, int32_t node, int32_t drafted);
const Follower *known_follower(const Counts *c, int64_t token);
