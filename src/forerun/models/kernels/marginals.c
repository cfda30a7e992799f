/* The best tree over places that do not depend on each other: `best_tree` of drafters/marginals.py. */
#include "rounds.h"

typedef struct Open { /* a node that may be taken next */
    double reached;   /* the belief that it and all its ancestors are right */
    int32_t parent, place, rank;
} Open;

void take_growing(Memory *memory, Growing *growing, int32_t nodes) {
    growing->nodes = take(memory, nodes * sizeof(Node));
    growing->reached = take(memory, nodes * sizeof(double));
    growing->open = take(memory, (nodes + 2) * sizeof(Open)); /* one is taken, up to two are opened */
}

/* The likelier one, among equals that with the older parent. */
static int comes_first(const Open *a, const Open *b) {
    if (a->reached != b->reached) return a->reached > b->reached;
    if (a->parent != b->parent) return a->parent < b->parent;
    return a->place != b->place ? a->place < b->place : a->rank < b->rank;
}

static void push(Open *heap, int32_t count, Open fresh) {
    int32_t at = count;
    for (; at && comes_first(&fresh, &heap[(at - 1) / 2]); at = (at - 1) / 2)
        heap[at] = heap[(at - 1) / 2];
    heap[at] = fresh;
}

/* Take the first away; `count` are left. */
static Open pop(Open *heap, int32_t count) {
    Open first = heap[0], last = heap[count];
    int32_t at = 0;
    for (int32_t child; (child = 2 * at + 1) < count; at = child) {
        if (child + 1 < count && comes_first(&heap[child + 1], &heap[child])) child++;
        if (!comes_first(&heap[child], &last)) break;
        heap[at] = heap[child];
    }
    heap[at] = last;
    return first;
}

void best_tree(const Marginals *m, const Rules *rules, const Growing *scratch, Tree *tree) {
    Open *heap = scratch->open;
    int32_t count = 0, open = 0;
    push(heap, open++, (Open){m->shares[0], -1, 0, 0});
    while (open && count < tree->nodes) {
        Open next = pop(heap, --open);
        if (!(next.reached > 0)) break; /* and so are all others */
        int64_t at = next.place * m->stride + next.rank;
        int64_t token = m->ids ? m->ids[m->columns[at]] : m->columns[at];
        scratch->nodes[count] = (Node){m->shares[at], token, next.parent};
        scratch->reached[count] = next.reached;
        if (next.rank + 1 < rules->width) {
            double above = next.parent < 0 ? 1 : scratch->reached[next.parent];
            push(heap, open++, (Open){above * m->shares[at + 1], next.parent, next.place, next.rank + 1});
        }
        if (next.place + 1 < m->places && !ends(tree, token)) {
            double reached = next.reached * m->shares[(next.place + 1) * m->stride];
            push(heap, open++, (Open){reached, count, next.place + 1, 0});
        }
        count++;
    }
    hand_over(rules, scratch->nodes, count, tree);
}

/* Instead of a tree: the candidates themselves. */
void give_ranked(const Marginals *m, const Rules *rules, const Ranked *ranked) {
    int32_t width = rules->width;
    for (int32_t place = 0; place < m->places; place++)
        for (int32_t rank = 0; rank < width; rank++) {
            int64_t column = m->columns[place * m->stride + rank];
            ranked->tokens[place * width + rank] = m->ids ? m->ids[column] : column;
            ranked->beliefs[place * width + rank] = m->shares[place * m->stride + rank];
        }
}
