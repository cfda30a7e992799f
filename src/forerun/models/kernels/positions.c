/* Where rows stand: their positions, by which queries and keys are rotated, and their slots. */
#include "team.h"
#include "vectors.h"

/* Positions and path shapes of a pass; once per pass, before its layers. */
void prepare(Pass *pass) {
    for (int s = 0; s < pass->segments; s++) {
        int32_t first = pass->node[s], length = pass->length[s];
        for (int32_t i = 0; first + i < pass->node[s + 1]; i++) {
            int32_t node = first + i, parent = pass->parent[node];
            int32_t above = parent < 0 ? length - 1 : pass->position[first + parent];
            int32_t before = parent < 0 ? length : pass->straight[first + parent];
            pass->position[node] = above + 1;
            /* consecutive as long as each node follows the one packed just before it */
            pass->straight[node] = before == length + i && parent == i - 1 ? before + 1 : before;
        }
    }
}

/* Normalise and rotate one head into out (float32). */
INLINE void rotate(const void *x, int64_t at, const float *norm, float eps, const float *cosine,
                   const float *sine, int dim, float *out, int bf16) {
    float head[MAX_HEAD] __attribute__((aligned(64)));
    for (int d = 0; d < dim; d += LANES) store(head, d, load(x, at + d, bf16), 0);
    if (norm) norm_row(head, 0, norm, NULL, head, 0, dim, eps, 0);
    int half = dim / 2;
    for (int d = 0; d < half; d++) {
        float a = head[d], b = head[d + half];
        out[d] = a * cosine[d] - b * sine[d];
        out[d + half] = b * cosine[d] + a * sine[d];
    }
}

typedef struct { /* where a row stands */
    int64_t slot;
    const float *cosine, *sine;
} Place;

static Place place_of(const Pass *pass, const Layer *layer, int32_t row) {
    int s = 0; /* few segments: a linear search costs less than another array */
    while (row >= pass->first[s + 1]) s++;
    int32_t node = node_of(pass, s, row);
    int64_t angles = (int64_t)pass->position[node] * (layer->head_dim / 2);
    return (Place){pass->base[s] + pass->length[s] + node - pass->node[s], layer->cosine + angles,
                   layer->sine + angles};
}

/* The queries of row r, which lie at qkv[at], rotated, to scratch. */
INLINE void place_queries(const Pass *pass, const Layer *layer, const void *qkv, int64_t at,
                          int64_t r, Place p, int bf16) {
    int heads = layer->heads, dim = layer->head_dim;
    for (int h = 0; h < heads; h++, at += dim) {
        float query[MAX_HEAD] __attribute__((aligned(64)));
        int64_t to = (r * heads + h) * dim;
        rotate(qkv, at, layer->q_norm, layer->norm_eps, p.cosine, p.sine, dim, query, bf16);
        for (int d = 0; d < dim; d += LANES)
            store(pass->query, to + d, load(query, d, 0) * layer->scale, bf16);
    }
}

/* Keys and values of a row, which lie at kv[at], to their slot. */
INLINE void place_kv(const Layer *layer, const void *kv, int64_t at, Place p, int bf16) {
    int kv_heads = layer->kv_heads, dim = layer->head_dim;
    for (int g = 0; g < kv_heads; g++, at += dim) {
        float key[MAX_HEAD] __attribute__((aligned(64)));
        int64_t to = (g * layer->slots + p.slot) * dim;
        rotate(kv, at, layer->k_norm, layer->norm_eps, p.cosine, p.sine, dim, key, bf16);
        for (int d = 0; d < dim; d += LANES) store(layer->key, to + d, load(key, d, 0), bf16);
    }
    for (int g = 0; g < kv_heads; g++, at += dim) {
        int64_t to = (g * layer->slots + p.slot) * dim;
        for (int d = 0; d < dim; d += LANES) store(layer->value, to + d, load(kv, at + d, bf16), bf16);
    }
}

/* Queries, keys and values of rows qkv [rows, (heads + 2 kv_heads) * head_dim]. */
void place_rows(const Pass *pass, const Layer *layer, const void *qkv) {
#pragma omp for schedule(static)
    for (int64_t r = 0; r < pass->rows; r++) {
        Place p = place_of(pass, layer, r);
        int64_t at = r * layer->qkv.out, kv = at + layer->heads * layer->head_dim;
        if (layer->bf16) {
            place_queries(pass, layer, qkv, at, r, p, 1);
            place_kv(layer, qkv, kv, p, 1);
        } else {
            place_queries(pass, layer, qkv, at, r, p, 0);
            place_kv(layer, qkv, kv, p, 0);
        }
    }
}

/* Keys and values alone, which end rows x [rows, width]. */
void place_kv_rows(const Pass *pass, const Layer *layer, const void *x, int32_t width) {
#pragma omp for schedule(static)
    for (int32_t r = 0; r < pass->rows; r++) {
        Place p = place_of(pass, layer, r);
        int64_t at = (int64_t)(r + 1) * width - 2 * layer->kv_heads * layer->head_dim;
        if (layer->bf16) place_kv(layer, x, at, p, 1);
        else place_kv(layer, x, at, p, 0);
    }
}
