/* A round of several drafters in one tree (drafters/joined.py): at every node each is asked for its
 * law, the beliefs are mixed, and the likeliest paths make the tree. */
#include "counting.h"
#include "frontier.h"

#include <math.h>

enum { SILENT, OTHERS, NAMED }; /* what a source says of a token, in base 3 a pattern */

enum { NOBODY, COUNTS, TREE, PLACES }; /* kinds of sources */

#define NOTHING (-1) /* stands for all tokens that no source names */
#define NOWHERE (-2) /* behind a token that is not in the source's tree */

typedef struct { /* what is believed behind the text of a request, see drafters/laws.py */
    int32_t kind;
    int32_t nodes, depth; /* that it would propose, in all and in one path */
    int32_t count;        /* of the nodes of its TREE, or of its PLACES, */
    int32_t width;        /* each of which has so many candidates */
    double floor;         /* paths that are less likely are not asked about */
    const Counting *net;  /* of COUNTS, */
    const Text *text;
    const int64_t *tokens;  /* [count], or [count, width], */
    const int32_t *parents; /* [count]; -1: the root */
    const double *survival; /* [count] */
    const float *beliefs;   /* [count, width] */
} Source;

typedef struct { /* see drafters/mixing.py */
    double *mean, *variance; /* [patterns, sources + 1], the last for the bias */
    int32_t sources;
    double least, largest, prior, drift;
    double negligible; /* a path that no source takes to be likelier is not looked at */
} Mixer;

typedef struct { /* a node of the tree that was asked about; the root is one, too */
    int32_t node, depth;
    int32_t first, count; /* of its candidates; the first of them is NOTHING */
    double reached, total;
} Place;

typedef struct { /* a token that may follow at a place */
    int64_t token;
    double share;
    int32_t pattern;
    int32_t behind; /* the place behind it; -1: the tree was not grown there */
} Candidate;

typedef struct { /* what is to be learned from, per request */
    int32_t places_room, candidates_room;
    int32_t depth; /* of the longest path that is left to the request */
    Place *places;
    Candidate *candidates;
    double *inputs; /* [candidates, sources + 1]: scores, and 1 for the bias */
    int32_t *patterns; /* [places_room], by node of the tree */
    int32_t places_count, candidates_count;
} Lesson;

typedef struct {
    const Mixer *mixer;
    const Source *sources;
    Tree *tree;
    Lesson *lesson;
    Counts *counts;  /* [sources] */
    int32_t *states; /* [nodes + 1, sources]: the node of a TREE, by node behind the root */
    Node *nodes;
    int32_t *place_of; /* [nodes] of the tree */
    Frontier frontier;
    int32_t depth; /* of the longest path */
} Round;

static size_t lay_out(Round *r, char *begin) {
    Memory memory = {.begin = begin};
    int32_t sources = r->mixer->sources, nodes = r->tree->nodes;
    r->counts = take(&memory, sources * sizeof(Counts));
    r->states = take(&memory, (size_t)(nodes + 1) * sources * sizeof(int32_t));
    r->nodes = take(&memory, nodes * sizeof(Node));
    r->place_of = take(&memory, nodes * sizeof(int32_t));
    take_frontier(&memory, &r->frontier, nodes);
    for (int32_t s = 0; s < sources; s++) {
        const Source *source = &r->sources[s];
        if (source->kind != COUNTS) continue;
        Counts counts = {.net = source->net, .text = source->text, .tree = r->tree};
        take_counts(&memory, &counts);
        if (begin) r->counts[s] = counts;
    }
    return memory.used;
}

/* ---- what one source says -------------------------------------------------------------------- */

typedef struct { /* to go through the successors of a place */
    const Source *source;
    const Counts *counts;
    int32_t state, depth, at;
} Law;

static double of_parent(const Source *s, int32_t node) {
    int32_t parent = s->parents[node];
    double above = parent < 0 ? 1 : s->survival[parent];
    return above > 0 ? s->survival[node] / above : 0;
}

/* The next token that a source names, and its belief; whether there is one. */
static int next_named(Law *law, int64_t *token, double *belief) {
    const Source *s = law->source;
    switch (s->kind) {
    case COUNTS:
        for (; law->at < law->counts->known; law->at++) {
            const Follower *f = &law->counts->law[law->at];
            if (!(f->chance > 0)) continue; /* left out of it */
            *token = f->token, *belief = f->chance;
            return law->at++, 1;
        }
        return 0;
    case TREE:
        for (; law->at < s->count; law->at++) {
            if (s->parents[law->at] != law->state) continue;
            *token = s->tokens[law->at], *belief = of_parent(s, law->at);
            return law->at++, 1;
        }
        return 0;
    case PLACES:
        while (law->at < s->width) {
            int32_t at = law->depth * s->width + law->at++;
            if (!(s->beliefs[at] > 0)) continue; /* not possible */
            *token = s->tokens[at], *belief = s->beliefs[at];
            return 1;
        }
        return 0;
    }
    return 0;
}

/* The belief in a token; less than 0: it is not named. */
static double belief_in(Law law, int64_t token) {
    if (law.source->kind == COUNTS) {
        const Follower *f = known_follower(law.counts, token);
        return f && f->chance > 0 ? f->chance : -1;
    }
    int64_t named;
    double belief;
    law.at = 0;
    while (next_named(&law, &named, &belief))
        if (named == token) return belief;
    return -1;
}

/* Where a TREE stands behind a token. */
static int32_t state_behind(const Source *s, int32_t state, int64_t token) {
    if (s->kind == TREE && state != NOWHERE)
        for (int32_t node = 0; node < s->count; node++)
            if (s->parents[node] == state && s->tokens[node] == token) return node;
    return NOWHERE;
}

/* ---- what all of them say -------------------------------------------------------------------- */

static double score(const Mixer *m, double belief) {
    return log(belief > m->least ? belief : m->least);
}

/* How likely a token is, before all that may follow are scaled. */
static double raw(const Mixer *m, int32_t pattern, const double *inputs) {
    int32_t count = m->sources + 1;
    const double *mean = m->mean + pattern * count;
    double total = 0;
    for (int32_t i = 0; i < count; i++) total += mean[i] * inputs[i];
    return exp(fmax(-m->largest, fmin(m->largest, total)));
}

/* Put a candidate to those of a place, unless there is no room; the sources say `inputs` of it. */
static void add_candidate(Round *r, Place *place, int64_t token, int32_t pattern, const double *inputs) {
    Lesson *l = r->lesson;
    if (l->candidates_count == l->candidates_room) return;
    int32_t count = r->mixer->sources + 1, at = l->candidates_count++;
    double *own = memcpy(l->inputs + (size_t)at * count, inputs, count * sizeof(double));
    double share = raw(r->mixer, pattern, own);
    l->candidates[at] = (Candidate){token, share, pattern, -1};
    place->total += share;
    place->count++;
}

/* A token among the candidates of a place, or null. */
static Candidate *candidate(const Lesson *l, const Place *p, int64_t token) {
    for (int32_t i = 0; i < p->count; i++)
        if (l->candidates[p->first + i].token == token) return &l->candidates[p->first + i];
    return NULL;
}

static const Source nobody = {.kind = NOBODY};

/* `_candidates` of drafters/joined.py. */
static void find_candidates(Round *r, Place *place) {
    const Mixer *m = r->mixer;
    int32_t sources = m->sources, speaking = 0, power = 1, worthy = 0;
    double least = m->negligible / place->reached, left[sources + 1], inputs[sources + 1];
    Law laws[sources];
    if (place->reached < m->negligible) return;
    for (int32_t s = 0; s < sources; s++, power *= 3) {
        const Source *source = &r->sources[s];
        int32_t state = r->states[(place->node + 1) * sources + s], named = 0;
        laws[s] = (Law){source, &r->counts[s], state, place->depth, 0};
        left[s] = 0;
        if (place->depth >= source->depth || place->reached < source->floor) {
            laws[s].source = &nobody;
            continue;
        }
        if (source->kind == COUNTS) find_law(&r->counts[s], r->nodes, place->node, place->depth);
        Law law = laws[s];
        int64_t token;
        double belief, sum = 0;
        for (; next_named(&law, &token, &belief); named++) {
            sum += belief;
            worthy |= belief >= least;
        }
        if (!named) continue;
        left[s] = score(m, 1 - sum);
        speaking += OTHERS * power;
    }
    left[sources] = 1; /* the input of the bias */
    if (!worthy) return;
    add_candidate(r, place, NOTHING, speaking, left);
    for (int32_t s = 0; s < sources; s++) {
        Law law = laws[s];
        int64_t token;
        double belief;
        while (next_named(&law, &token, &belief)) {
            if (belief < least || candidate(r->lesson, place, token)) continue;
            memcpy(inputs, left, sizeof(inputs));
            int32_t pattern = speaking;
            power = 1;
            for (int32_t other = 0; other < sources; other++, power *= 3) {
                double theirs = belief_in(laws[other], token);
                if (theirs < 0) continue;
                inputs[other] = score(m, theirs);
                pattern += (NAMED - OTHERS) * power;
            }
            add_candidate(r, place, token, pattern, inputs);
        }
    }
}

/* ---- the tree -------------------------------------------------------------------------------- */

/* Ask what may follow a node, -1: the root, and open it. */
static void offer(Round *r, int32_t node, double reached, int32_t depth) {
    Lesson *l = r->lesson;
    Place *place = &l->places[l->places_count++];
    *place = (Place){.node = node, .depth = depth, .first = l->candidates_count, .reached = reached};
    find_candidates(r, place);
    for (int32_t i = 1; i < place->count; i++) {
        const Candidate *c = &l->candidates[place->first + i];
        open_node(&r->frontier, (Open){reached * (c->share / place->total), reached, c->token, node, depth + 1});
    }
}

static void advance(Round *r, int32_t node, int32_t parent, int64_t token) {
    int32_t sources = r->mixer->sources;
    const int32_t *above = r->states + (parent + 1) * sources;
    int32_t *states = r->states + (node + 1) * sources;
    for (int32_t s = 0; s < sources; s++) states[s] = state_behind(&r->sources[s], above[s], token);
}

static void grow(Round *r) {
    Lesson *l = r->lesson;
    int32_t *place_of = r->place_of; /* of nodes as they were taken */
    l->places_count = l->candidates_count = 0;
    if (!(r->frontier.room > 0 && r->depth > 0)) return;
    for (int32_t s = 0; s < r->mixer->sources; s++) r->states[s] = -1;
    offer(r, -1, 1, 0);
    while (r->frontier.count) {
        Open best;
        int32_t node = take_best(&r->frontier, r->nodes, &best);
        if (!r->frontier.room) break;
        if (best.level >= r->depth || ends(r->tree, best.token)) continue;
        int32_t above = best.parent < 0 ? 0 : place_of[best.parent];
        candidate(l, &l->places[above], best.token)->behind = place_of[node] = l->places_count;
        advance(r, node, best.parent, best.token);
        offer(r, node, best.reached, best.level);
    }
}

/* Who named each node of the tree as it was handed over. */
static void tell_patterns(const Round *r) {
    const Tree *tree = r->tree;
    for (int32_t node = 0; node < tree->count; node++) {
        int32_t parent = tree->parents[node];
        const Place *place = &r->lesson->places[parent < 0 ? 0 : r->place_of[parent]];
        const Candidate *c = candidate(r->lesson, place, tree->tokens[node]);
        r->lesson->patterns[node] = c->pattern;
        r->place_of[node] = c->behind;
    }
}

/* sources: [count, those of a mixer]. lessons: what is learned from as soon as it is known what
 * followed, with room for a place more than nodes. */
double joined_round(const Mixer *const mixers[], const Rules *rules, const Source *sources,
                    Lesson *const lessons[], Tree *const trees[], int32_t count) {
    int32_t failed = 0;
#pragma omp parallel for schedule(dynamic) reduction(+ : failed) if (count > 2)
    for (int32_t i = 0; i < count; i++) {
        const Mixer *m = mixers[i];
        Round r = {.mixer = m, .sources = sources + i * m->sources, .tree = trees[i], .lesson = lessons[i]};
        char *memory = kept_memory(lay_out(&r, NULL));
        if (!memory) {
            failed++;
            continue;
        }
        lay_out(&r, memory);
        r.frontier.floor = INFINITY;
        for (int32_t s = 0; s < m->sources; s++) {
            const Source *source = &r.sources[s];
            r.depth = larger_of(r.depth, source->depth);
            if (source->nodes) r.frontier.floor = fmin(r.frontier.floor, source->floor);
        }
        if (r.depth > lessons[i]->depth) r.depth = lessons[i]->depth;
        grow(&r);
        hand_over(rules, r.nodes, r.frontier.taken, trees[i]);
        tell_patterns(&r);
    }
    return failed ? -1 : 0;
}

/* ---- what became of it ----------------------------------------------------------------------- */

/* `Weights.learn` of drafters/mixing.py. */
static void learn(const Mixer *m, const Candidate *c, const double *inputs, double chance, int right) {
    int32_t count = m->sources + 1;
    double *mean = m->mean + c->pattern * count, *variance = m->variance + c->pattern * count;
    double slope = chance * (1 - chance), sum = 0;
    for (int32_t i = 0; i < count; i++) sum += variance[i] * inputs[i] * inputs[i];
    double scale = 1 / (1 + slope * sum), step = scale * (right - chance), shrink = scale * slope;
    for (int32_t i = 0; i < count; i++) {
        double gain = variance[i] * inputs[i];
        mean[i] += step * gain;
        variance[i] = fmin(m->prior, variance[i] - shrink * gain * gain + m->drift);
    }
}

/* Follow the tokens that came as far as they were asked about, as `_learn` of drafters/joined.py. */
void joined_learn(const Mixer *m, Lesson *l, const int64_t *truth, int32_t length) {
    int32_t at = l->places_count ? 0 : -1;
    for (int32_t t = 0; t < length && at >= 0; t++) {
        const Place *place = &l->places[at];
        const Candidate *found = candidate(l, place, truth[t]);
        at = found ? found->behind : -1;
        for (int32_t i = place->first; i < place->first + place->count; i++) {
            const Candidate *c = &l->candidates[i];
            int right = found ? c == found : c->token == NOTHING;
            learn(m, c, l->inputs + (size_t)i * (m->sources + 1), c->share / place->total, right);
        }
    }
}
