/* Drafters that count: laws, and rounds of the most probable paths under them. See counting.h. */
#include "counting.h"
#include "frontier.h"
#include "noise.h"

/* Tokens of the longest ending that anybody asks for. */
static int32_t reach(const Counting *net) {
    return net->corpus ? larger_of(net->order, net->corpus->order) : net->order;
}

void take_counts(Memory *memory, Counts *c) {
    const Counting *net = c->net;
    int32_t length = c->text->length, tokens = length + (net->corpus ? net->corpus->most : 0);
    for (c->slots = 64; c->slots < 2 * tokens;) c->slots *= 2;
    c->ending = take(memory, reach(net) * sizeof(int64_t));
    c->next = take(memory, length * sizeof(int64_t));
    c->matched = take(memory, length * sizeof(int32_t));
    c->law = take(memory, tokens * sizeof(Follower));
    c->places = take(memory, c->slots * sizeof(int32_t));
}

/* ---- the law behind a path ------------------------------------------------------------------- */

/* The last tokens of the text and the path to a node; how many. */
static int32_t end_of_path(Counts *c, const Node *nodes, int32_t node, int32_t wanted) {
    int32_t count = 0;
    for (; node >= 0 && count < wanted; node = nodes[node].parent)
        c->ending[count++] = nodes[node].token;
    for (int32_t at = c->text->length; at && count < wanted;) c->ending[count++] = c->text->tokens[--at];
    return count;
}

/* Where a token has its place in the law, or would have it. */
static int32_t *place_of(const Counts *c, int64_t token) {
    uint32_t mask = c->slots - 1, at = (uint32_t)(token * GOLDEN >> 32) & mask;
    while (c->places[at] >= 0 && c->law[c->places[at]].token != token) at = (at + 1) & mask;
    return &c->places[at];
}

/* Null: the law does not name it. */
const Follower *known_follower(const Counts *c, int64_t token) {
    int32_t place = *place_of(c, token);
    return place < 0 ? NULL : &c->law[place];
}

static Follower *follower(Counts *c, int64_t token) {
    int32_t *place = place_of(c, token);
    if (*place >= 0) return &c->law[*place];
    *place = c->known;
    Follower *fresh = &c->law[c->known++];
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

static void look_up(Counts *c, int32_t length) {
    const Corpus *all = c->net->corpus;
    int32_t place = context_of(all, c->ending, length < all->order ? length : all->order);
    for (int32_t i = all->begins[place]; i < all->begins[place + 1]; i++) {
        int64_t token = all->wide ? ((const uint32_t *)all->followers)[i] : ((const uint16_t *)all->followers)[i];
        follower(c, token)->chance = all->chances[i] / 65535.0;
    }
}

/* Where the text has this ending before, and how much of it. */
static void match(Counts *c, int32_t length, int32_t last) {
    const int64_t *tokens = c->text->tokens, *ending = c->ending;
    c->matches = c->longest = 0;
    if (length > c->net->order) length = c->net->order;
    for (int32_t end = 1; end <= last; end++) {
        if (tokens[end - 1] != ending[0]) continue;
        int32_t matched = 1;
        while (matched < length && matched < end && tokens[end - 1 - matched] == ending[matched]) matched++;
        c->longest = larger_of(c->longest, matched);
        if (end == c->text->length) continue; /* nothing followed yet */
        c->next[c->matches] = tokens[end];
        c->matched[c->matches++] = matched;
    }
}

/* `mixture` of drafters/counts.py; the sum of what followed. */
static double count_followers(Counts *c) {
    double left = 1, total = 0;
    int32_t seen = 0, different = 0;
    for (int32_t order = c->longest; order && left >= c->net->negligible; order--) {
        for (int32_t i = 0; i < c->matches; i++) {
            if (c->matched[i] != order) continue;
            different += !follower(c, c->next[i])->seen++;
            seen++;
        }
        if (!seen) continue;
        double all = c->net->weight * seen + different, share = left * c->net->weight / all;
        for (int32_t i = 0; i < c->known; i++) c->law[i].followed += share * c->law[i].seen;
        left *= different / all;
    }
    for (int32_t i = 0; i < c->known; i++) total += c->law[i].followed;
    return total;
}

/* `mixed` of drafters/corpus.py. */
static void mix(Counts *c, double total) {
    double trust = total > 0 ? c->longest / (c->longest + c->net->equal) : 0;
    for (int32_t i = 0; i < c->known; i++) {
        Follower *f = &c->law[i];
        if (!c->net->corpus) f->chance = f->followed;
        else if (total > 0) f->chance = (1 - trust) * f->chance + trust * f->followed / total;
    }
}

/* `coupled` of drafters/corpus.py. */
static void couple(Counts *c, int32_t drafted) {
    const Counting *net = c->net;
    uint64_t key = key_of(c->tree->sampling.seed, c->tree->position + drafted);
    double all = 0, total = 0;
    for (int32_t i = 0; i < c->known; i++) {
        Follower *f = &c->law[i];
        all += f->chance;
        double v = ((double)(hash_of(key, f->token) >> 12) + 0.5) * 0x1p-52;
        f->chance = f->chance < net->noiseless ? 0 : f->chance * pow(-log1p(-v), -net->coupling);
        total += f->chance;
    }
    if (all < 1) total += (1 - all) * net->unknown;
    for (int32_t i = 0; i < c->known && total > 0; i++) c->law[i].chance /= total;
}

/* What may follow a node, -1: the root, at so many tokens behind it. */
void find_law(Counts *c, const Node *nodes, int32_t node, int32_t drafted) {
    const Counting *net = c->net;
    int32_t length = end_of_path(c, nodes, node, reach(net));
    c->known = 0;
    memset(c->places, -1, c->slots * sizeof(int32_t));
    if (net->corpus) look_up(c, length);
    match(c, length, node < 0 ? c->text->length - 1 : c->text->length);
    mix(c, count_followers(c));
    if (c->text->coupled) couple(c, drafted);
}

/* ---- the tree -------------------------------------------------------------------------------- */

typedef struct {
    Counts counts;
    Tree *tree;
    Node *nodes;
    Frontier frontier;
} Round;

static size_t lay_out(Round *r, char *begin) {
    Memory memory = {.begin = begin};
    take_counts(&memory, &r->counts);
    r->nodes = take(&memory, r->tree->nodes * sizeof(Node));
    take_frontier(&memory, &r->frontier, r->tree->nodes);
    return memory.used;
}

/* What may follow a node, -1: the root. */
static void offer(Round *r, int32_t node, double reached, int32_t level) {
    Counts *c = &r->counts;
    find_law(c, r->nodes, node, level - 1);
    for (int32_t i = 0; i < c->known; i++)
        open_node(&r->frontier, (Open){reached * c->law[i].chance, reached, c->law[i].token, node, level});
}

/* `best_first` of drafters/tree.py. */
static void grow(Round *r) {
    Tree *tree = r->tree;
    if (tree->nodes > 0 && r->counts.text->depth > 0) offer(r, -1, 1, 1);
    while (r->frontier.count) {
        Open best;
        int32_t node = take_best(&r->frontier, r->nodes, &best);
        if (!r->frontier.room) break;
        if (best.level < r->counts.text->depth && !ends(tree, best.token))
            offer(r, node, best.reached, best.level + 1);
    }
}

double counting_round(const Counting *net, const Rules *rules, const Text *const texts[],
                      Tree *const trees[], int32_t count) {
    int32_t failed = 0;
#pragma omp parallel for schedule(dynamic) reduction(+ : failed) if (count > 2)
    for (int32_t s = 0; s < count; s++) {
        Round r = {.counts = {.net = net, .text = texts[s], .tree = trees[s]}, .tree = trees[s]};
        r.frontier.floor = net->floor;
        char *memory = kept_memory(lay_out(&r, NULL));
        if (!memory) {
            failed++;
            continue;
        }
        lay_out(&r, memory);
        grow(&r);
        hand_over(rules, r.nodes, r.frontier.taken, trees[s]);
    }
    return failed ? -1 : 0;
}
