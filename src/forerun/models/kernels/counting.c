/* A round of drafters that count (drafters/suffix.py, drafters/corpus.py): the most probable paths
 * under what followed the same tokens before in the request and, mixed with it, in a corpus. */
#include "noise.h"
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

typedef struct { /* a node that may be taken next */
    double reached;   /* the belief that it and all its ancestors are right */
    double belief;
    int64_t token;
    int32_t parent, level;
} Open;

typedef struct {
    const Counting *net;
    const Text *text;
    Tree *tree;
    int64_t *ending;  /* [order], the last token first */
    int64_t *next;    /* [length], tokens that followed matches, */
    int32_t *matched; /* [length], of so many tokens */
    Follower *law;    /* [most + length] */
    int32_t *places;  /* [slots], in the law, by hash of the token; -1: free */
    int32_t slots, matches, longest, known;
    Node *nodes;
    Open *open;  /* [nodes], the best first; no more than these can be taken */
    int32_t count, opened;
} Round;

/* Tokens of the longest ending that anybody asks for. */
static int32_t reach(const Counting *net) {
    return net->corpus ? larger_of(net->order, net->corpus->order) : net->order;
}

static size_t lay_out(Round *r, char *begin) {
    const Counting *net = r->net;
    Memory memory = {.begin = begin};
    int32_t nodes = r->tree->nodes, length = r->text->length;
    int32_t tokens = length + (net->corpus ? net->corpus->most : 0);
    for (r->slots = 64; r->slots < 2 * tokens;) r->slots *= 2;
    r->ending = take(&memory, reach(net) * sizeof(int64_t));
    r->next = take(&memory, length * sizeof(int64_t));
    r->matched = take(&memory, length * sizeof(int32_t));
    r->law = take(&memory, tokens * sizeof(Follower));
    r->places = take(&memory, r->slots * sizeof(int32_t));
    r->nodes = take(&memory, nodes * sizeof(Node));
    r->open = take(&memory, nodes * sizeof(Open));
    return memory.used;
}

/* ---- the law behind a path ------------------------------------------------------------------- */

/* The last tokens of the text and the path to a node; how many. */
static int32_t end_of_path(Round *r, int32_t node, int32_t wanted) {
    int32_t count = 0;
    for (; node >= 0 && count < wanted; node = r->nodes[node].parent)
        r->ending[count++] = r->nodes[node].token;
    for (int32_t at = r->text->length; at && count < wanted;) r->ending[count++] = r->text->tokens[--at];
    return count;
}

static Follower *follower(Round *r, int64_t token) {
    uint32_t mask = r->slots - 1, at = (uint32_t)(token * GOLDEN >> 32) & mask;
    for (; r->places[at] >= 0; at = (at + 1) & mask)
        if (r->law[r->places[at]].token == token) return &r->law[r->places[at]];
    r->places[at] = r->known;
    Follower *fresh = &r->law[r->known++];
    *fresh = (Follower){.token = token};
    return fresh;
}

/* The longest context of the corpus in which a text ends. */
static int32_t context_of(const Corpus *c, const int64_t *ending, int32_t length) {
    int32_t found = 0;
    uint64_t key = 0;
    for (int32_t i = 0; i < length; i++) {
        key = (key ^ (uint64_t)(ending[i] + 1)) * GOLDEN;
        key ^= key >> 32;
        int32_t low = 0, high = c->contexts;
        while (low < high) {
            int32_t middle = low + (high - low) / 2;
            if (c->keys[middle] < key) low = middle + 1;
            else high = middle;
        }
        if (low == c->contexts || c->keys[low] != key) break;
        found = low;
    }
    return found;
}

static void look_up(Round *r, int32_t length) {
    const Corpus *c = r->net->corpus;
    int32_t place = context_of(c, r->ending, length < c->order ? length : c->order);
    for (int32_t i = c->begins[place]; i < c->begins[place + 1]; i++) {
        int64_t token = c->wide ? ((const uint32_t *)c->followers)[i] : ((const uint16_t *)c->followers)[i];
        follower(r, token)->chance = c->chances[i] / 65535.0;
    }
}

/* Where the text has this ending before, and how much of it. */
static void match(Round *r, int32_t length, int32_t last) {
    const int64_t *tokens = r->text->tokens, *ending = r->ending;
    r->matches = r->longest = 0;
    if (length > r->net->order) length = r->net->order;
    for (int32_t end = 1; end <= last; end++) {
        if (tokens[end - 1] != ending[0]) continue;
        int32_t matched = 1;
        while (matched < length && matched < end && tokens[end - 1 - matched] == ending[matched]) matched++;
        r->longest = larger_of(r->longest, matched);
        if (end == r->text->length) continue; /* nothing followed yet */
        r->next[r->matches] = tokens[end];
        r->matched[r->matches++] = matched;
    }
}

/* `mixture` of drafters/counts.py; the sum of what followed. */
static double count_followers(Round *r) {
    double left = 1, total = 0;
    int32_t seen = 0, different = 0;
    for (int32_t order = r->longest; order && left >= r->net->negligible; order--) {
        for (int32_t i = 0; i < r->matches; i++) {
            if (r->matched[i] != order) continue;
            different += !follower(r, r->next[i])->seen++;
            seen++;
        }
        if (!seen) continue;
        double all = r->net->weight * seen + different, share = left * r->net->weight / all;
        for (int32_t i = 0; i < r->known; i++) r->law[i].followed += share * r->law[i].seen;
        left *= different / all;
    }
    for (int32_t i = 0; i < r->known; i++) total += r->law[i].followed;
    return total;
}

/* `mixed` of drafters/corpus.py. */
static void mix(Round *r, double total) {
    double trust = total > 0 ? r->longest / (r->longest + r->net->equal) : 0;
    for (int32_t i = 0; i < r->known; i++) {
        Follower *f = &r->law[i];
        if (!r->net->corpus) f->chance = f->followed;
        else if (total > 0) f->chance = (1 - trust) * f->chance + trust * f->followed / total;
    }
}

/* `coupled` of drafters/corpus.py. */
static void couple(Round *r, int32_t drafted) {
    const Counting *net = r->net;
    uint64_t key = key_of(r->tree->sampling.seed, r->tree->position + drafted);
    double all = 0, total = 0;
    for (int32_t i = 0; i < r->known; i++) {
        Follower *f = &r->law[i];
        all += f->chance;
        double v = ((double)(hash_of(key, f->token) >> 12) + 0.5) * 0x1p-52;
        f->chance = f->chance < net->noiseless ? 0 : f->chance * pow(-log1p(-v), -net->coupling);
        total += f->chance;
    }
    if (all < 1) total += (1 - all) * net->unknown;
    for (int32_t i = 0; i < r->known && total > 0; i++) r->law[i].chance /= total;
}

/* What may follow a node, -1: the root, at so many tokens behind it. */
static void find_law(Round *r, int32_t node, int32_t drafted) {
    const Counting *net = r->net;
    int32_t length = end_of_path(r, node, reach(net));
    r->known = 0;
    memset(r->places, -1, r->slots * sizeof(int32_t));
    if (net->corpus) look_up(r, length);
    match(r, length, node < 0 ? r->text->length - 1 : r->text->length);
    mix(r, count_followers(r));
    if (r->text->coupled) couple(r, drafted);
}

/* ---- the tree -------------------------------------------------------------------------------- */

/* Into the best that can still be taken, behind those that are as likely. */
static void push(Round *r, Open fresh) {
    int32_t room = r->tree->nodes - r->count;
    if (r->opened >= room && !(fresh.reached > r->open[room - 1].reached)) return;
    int32_t at = r->opened < room ? r->opened++ : room - 1;
    for (; at && fresh.reached > r->open[at - 1].reached; at--) r->open[at] = r->open[at - 1];
    r->open[at] = fresh;
}

static void offer(Round *r, int32_t node, double reached, int32_t level) {
    find_law(r, node, level - 1);
    for (int32_t i = 0; i < r->known; i++) {
        double path = reached * r->law[i].chance; /* over `reached` again, as Python has it */
        if (path > 0 && path >= r->net->floor)
            push(r, (Open){path, path / reached, r->law[i].token, node, level});
    }
}

/* `best_first` of drafters/tree.py. */
static void grow(Round *r) {
    Tree *tree = r->tree;
    if (tree->nodes > 0 && r->text->depth > 0) offer(r, -1, 1, 1);
    while (r->opened) {
        Open best = r->open[0];
        memmove(r->open, r->open + 1, --r->opened * sizeof(Open));
        int32_t node = r->count++;
        r->nodes[node] = (Node){best.belief, best.token, best.parent};
        if (r->count == tree->nodes) break;
        if (best.level < r->text->depth && !ends(tree, best.token)) offer(r, node, best.reached, best.level + 1);
    }
}

double counting_round(const Counting *net, const Rules *rules, const Text *const texts[],
                      Tree *const trees[], int32_t count) {
    int32_t failed = 0;
#pragma omp parallel for schedule(dynamic) reduction(+ : failed) if (count > 2)
    for (int32_t s = 0; s < count; s++) {
        Round r = {.net = net, .text = texts[s], .tree = trees[s]};
        char *memory = kept_memory(lay_out(&r, NULL));
        if (!memory) {
            failed++;
            continue;
        }
        lay_out(&r, memory);
        grow(&r);
        hand_over(rules, r.nodes, r.count, trees[s]);
    }
    return failed ? -1 : 0;
}
