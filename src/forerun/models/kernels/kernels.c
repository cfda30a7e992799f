/* The parts of a decoder pass that are not matrix products, for processors.
 *
 * Every output row is computed by the same operations in the same order, whatever other rows share
 * the pass: the keys of a row are visited in tiles of 16 positions of ITS OWN path, root first. So a
 * row of a tree, of a chain, of a batch or alone gives the same bits.
 *
 * Tensors are bfloat16 (bf16 = 1) or float32; all sums are float32. Vectors are GCC vector
 * extensions, so the file compiles for any processor.
 */
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define TILE 16 /* positions per tile, lanes per vector */
#define MAX_HEAD 256
#define MAX_QUERIES 64 /* query heads handled by one task */

typedef float vf __attribute__((vector_size(64)));
typedef int32_t vi __attribute__((vector_size(64)));
typedef uint32_t vu __attribute__((vector_size(64)));
typedef uint16_t vh __attribute__((vector_size(32)));

#define INLINE static inline __attribute__((always_inline))

/* One pass over the rows of several sequences. Row i of segment s lies in slot base + length + i. */
typedef struct {
    int32_t rows, segments;
    const int32_t *base, *length; /* per segment: first slot, committed slots */
    const int32_t *first;         /* per segment and one more: first row */
    const int32_t *parent;        /* per row: row of its segment that it follows, or -1 */
    int32_t *position;            /* per row, filled by prepare */
    int32_t *straight;            /* per row, filled by prepare: leading positions of its path that
                                     lie in consecutive slots from the segment's base on */
    float *query;                 /* scratch [rows, heads, head_dim] */
} Pass;

typedef struct {
    int32_t bf16, heads, kv_heads, head_dim;
    int64_t slots;              /* of the store: stride between heads is slots * head_dim */
    void *key, *value;          /* this layer's [kv_heads, slots, head_dim] */
    const float *cosine, *sine; /* [positions, head_dim / 2] */
    const float *q_norm, *k_norm; /* [head_dim] or null; the offset is already added */
    float norm_eps, scale, softcap; /* softcap 0: none */
    int32_t window;                 /* 0: all positions */
} Layer;

INLINE vf splat(float x) { return x - (vf){0}; }

INLINE vf load(const void *p, int64_t i, int bf16) {
    if (bf16) {
        vh h;
        memcpy(&h, (const uint16_t *)p + i, sizeof h);
        return (vf)(__builtin_convertvector(h, vu) << 16);
    }
    vf x;
    memcpy(&x, (const float *)p + i, sizeof x);
    return x;
}

INLINE void store(void *p, int64_t i, vf x, int bf16) {
    if (bf16) { /* round to nearest even */
        vu u = (vu)x;
        vh h = __builtin_convertvector((u + 0x7fff + ((u >> 16) & 1)) >> 16, vh);
        memcpy((uint16_t *)p + i, &h, sizeof h);
    } else {
        memcpy((float *)p + i, &x, sizeof x);
    }
}

INLINE float sum(vf x) {
    float s[TILE];
    memcpy(s, &x, sizeof s);
    for (int w = TILE / 2; w; w /= 2)
        for (int i = 0; i < w; i++) s[i] += s[i + w];
    return s[0];
}

INLINE float max(vf x) {
    float s[TILE];
    memcpy(s, &x, sizeof s);
    for (int w = TILE / 2; w; w /= 2)
        for (int i = 0; i < w; i++) s[i] = s[i] > s[i + w] ? s[i] : s[i + w];
    return s[0];
}

/* e^x for x <= 0 (and small positive x), relative error about 1e-7; below -87 it is 0. */
INLINE vf exponential(vf x) {
    vi tiny = x < splat(-87.0f);
    x = (vf)((vi)x & ~tiny);
    vf n = x * 1.44269504f + 12582912.0f; /* adding 1.5 * 2^23 rounds to an integer */
    vi power = (vi)n << 23;
    n -= 12582912.0f;
    x -= n * 0.693359375f;
    x -= n * -2.12194440e-4f;
    vf y = splat(1.9875691500e-4f);
    y = y * x + 1.3981999507e-3f;
    y = y * x + 8.3334519073e-3f;
    y = y * x + 4.1665795894e-2f;
    y = y * x + 1.6666665459e-1f;
    y = y * x + 5.0000001201e-1f;
    y = y * (x * x) + x + 1.0f;
    return (vf)(((vi)y + power) & ~tiny);
}

INLINE vf tanh_of(vf x) { /* 1 - 2 / (e^2x + 1), with the exponent kept <= 0 */
    vi negative = x < splat(0.0f);
    vf e = exponential(-2.0f * (vf)((vi)x & 0x7fffffff));
    vf t = (1.0f - e) / (1.0f + e);
    return (vf)((vi)t | (negative & (int32_t)0x80000000));
}

/* out = x / rms(x) * weight (+ residual); weight is float32 with any offset already added. */
INLINE void norm_row(const void *x, const float *weight, const void *residual, void *out,
                     int64_t at, int dim, float eps, int bf16) {
    vf squares = {0};
    for (int d = 0; d < dim; d += TILE) {
        vf v = load(x, at + d, bf16);
        squares += v * v;
    }
    float scale = 1.0f / sqrtf(sum(squares) / dim + eps);
    for (int d = 0; d < dim; d += TILE) {
        vf v = load(x, at + d, bf16) * scale * load(weight, d, 0);
        if (residual) v += load(residual, at + d, bf16);
        store(out, at + d, v, bf16);
    }
}

void rms_norm(const void *x, const float *weight, const void *residual, void *out, int32_t rows,
              int32_t dim, float eps, int32_t bf16) {
#pragma omp parallel for if ((int64_t)rows * dim > 32768)
    for (int32_t r = 0; r < rows; r++)
        if (bf16) norm_row(x, weight, residual, out, (int64_t)r * dim, dim, eps, 1);
        else norm_row(x, weight, residual, out, (int64_t)r * dim, dim, eps, 0);
}

INLINE vf activate(vf x, int gelu) {
    if (gelu) return 0.5f * x * (1.0f + tanh_of(0.79788456f * (x + 0.044715f * x * x * x)));
    vi negative = x < splat(0.0f);
    vf e = exponential(-(vf)((vi)x & 0x7fffffff)); /* e^-|x|: never overflows */
    vf numerator = (vf)(((vi)e & negative) | ((vi)splat(1.0f) & ~negative));
    return x * numerator / (1.0f + e);
}

INLINE void gate_row(const void *gate_up, void *out, int64_t r, int dim, int gelu, int bf16) {
    for (int d = 0; d < dim; d += TILE) {
        vf gate = load(gate_up, r * 2 * dim + d, bf16);
        vf up = load(gate_up, r * 2 * dim + dim + d, bf16);
        store(out, r * dim + d, activate(gate, gelu) * up, bf16);
    }
}

/* out = activation(gate) * up, from rows [gate | up] */
void gated(const void *gate_up, void *out, int32_t rows, int32_t dim, int32_t gelu, int32_t bf16) {
#pragma omp parallel for if ((int64_t)rows * dim > 16384)
    for (int32_t r = 0; r < rows; r++)
        if (bf16) gelu ? gate_row(gate_up, out, r, dim, 1, 1) : gate_row(gate_up, out, r, dim, 0, 1);
        else gelu ? gate_row(gate_up, out, r, dim, 1, 0) : gate_row(gate_up, out, r, dim, 0, 0);
}

/* Positions and path shapes of a pass; once per pass, before its layers. */
void prepare(Pass *pass) {
    for (int s = 0; s < pass->segments; s++) {
        int32_t first = pass->first[s], length = pass->length[s];
        for (int32_t i = 0; first + i < pass->first[s + 1]; i++) {
            int32_t row = first + i, parent = pass->parent[row];
            int32_t above = parent < 0 ? length - 1 : pass->position[first + parent];
            int32_t before = parent < 0 ? length : pass->straight[first + parent];
            pass->position[row] = above + 1;
            /* consecutive as long as each row follows the one packed just before it */
            pass->straight[row] = before == length + i && parent == i - 1 ? before + 1 : before;
        }
    }
}

/* Normalise and rotate one head into out (float32). */
INLINE void rotate(const void *x, int64_t at, const float *norm, float eps, const float *cosine,
                   const float *sine, int dim, float *out, int bf16) {
    float head[MAX_HEAD] __attribute__((aligned(64)));
    for (int d = 0; d < dim; d += TILE) store(head, d, load(x, at + d, bf16), 0);
    if (norm) norm_row(head, norm, NULL, head, 0, dim, eps, 0);
    int half = dim / 2;
    for (int d = 0; d < half; d++) {
        float a = head[d], b = head[d + half];
        out[d] = a * cosine[d] - b * sine[d];
        out[d + half] = b * cosine[d] + a * sine[d];
    }
}

/* Row r of qkv: rotated queries to scratch, keys and values to their slot. */
INLINE void place_row(const Pass *pass, const Layer *layer, const void *qkv, int64_t r,
                      int64_t slot, int bf16) {
    int heads = layer->heads, kv_heads = layer->kv_heads, dim = layer->head_dim;
    const float *cosine = layer->cosine + (int64_t)pass->position[r] * (dim / 2);
    const float *sine = layer->sine + (int64_t)pass->position[r] * (dim / 2);
    int64_t at = r * (heads + 2 * kv_heads) * dim;
    for (int h = 0; h < heads; h++, at += dim) {
        float *query = pass->query + (r * heads + h) * dim;
        rotate(qkv, at, layer->q_norm, layer->norm_eps, cosine, sine, dim, query, bf16);
        for (int d = 0; d < dim; d += TILE) store(query, d, load(query, d, 0) * layer->scale, 0);
    }
    for (int g = 0; g < kv_heads; g++, at += dim) {
        float key[MAX_HEAD] __attribute__((aligned(64)));
        int64_t to = (g * layer->slots + slot) * dim;
        rotate(qkv, at, layer->k_norm, layer->norm_eps, cosine, sine, dim, key, bf16);
        for (int d = 0; d < dim; d += TILE) store(layer->key, to + d, load(key, d, 0), bf16);
    }
    for (int g = 0; g < kv_heads; g++, at += dim) {
        int64_t to = (g * layer->slots + slot) * dim;
        for (int d = 0; d < dim; d += TILE) store(layer->value, to + d, load(qkv, at + d, bf16), bf16);
    }
}

/* 16 keys, transposed, and 16 values as float32: what all queries of a tile share. */
typedef struct {
    float key[MAX_HEAD][TILE] __attribute__((aligned(64)));
    float value[TILE][MAX_HEAD] __attribute__((aligned(64)));
} Tile;

typedef struct { /* one task: some rows of one segment, one kv head and its query heads */
    int32_t queries;
    float largest[MAX_QUERIES], total[MAX_QUERIES];
    float sum[MAX_QUERIES][MAX_HEAD] __attribute__((aligned(64)));
} State;

/* Transpose a 16 x 16 block in four rounds of pairwise exchanges. */
INLINE void transpose(vf x[TILE]) {
#define ROUND(w, lo, hi)                                                             \
    for (int i = 0; i < TILE; i++)                                                   \
        if (!(i & w)) {                                                              \
            vf a = x[i], b = x[i + w];                                               \
            x[i] = __builtin_shuffle(a, b, (vi)lo);                                  \
            x[i + w] = __builtin_shuffle(a, b, (vi)hi);                              \
        }
    ROUND(1, ((vi){0, 16, 2, 18, 4, 20, 6, 22, 8, 24, 10, 26, 12, 28, 14, 30}),
          ((vi){1, 17, 3, 19, 5, 21, 7, 23, 9, 25, 11, 27, 13, 29, 15, 31}))
    ROUND(2, ((vi){0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29}),
          ((vi){2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31}))
    ROUND(4, ((vi){0, 1, 2, 3, 16, 17, 18, 19, 8, 9, 10, 11, 24, 25, 26, 27}),
          ((vi){4, 5, 6, 7, 20, 21, 22, 23, 12, 13, 14, 15, 28, 29, 30, 31}))
    ROUND(8, ((vi){0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23}),
          ((vi){8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31}))
#undef ROUND
}

/* Load the keys and values of 16 slots (head offset already applied), negative slots as zeros. */
INLINE void load_tile(const Layer *layer, int64_t head, const int64_t slot[TILE], Tile *tile,
                      int dim, int bf16) {
    for (int d = 0; d < dim; d += TILE) {
        vf block[TILE];
        for (int j = 0; j < TILE; j++) {
            int64_t at = (head + (slot[j] < 0 ? 0 : slot[j])) * dim + d;
            block[j] = slot[j] < 0 ? (vf){0} : load(layer->key, at, bf16);
            store(tile->value[j], d, slot[j] < 0 ? (vf){0} : load(layer->value, at, bf16), 0);
        }
        transpose(block);
        for (int j = 0; j < TILE; j++) store(tile->key[d + j], 0, block[j], 0);
    }
}

/* n queries (a constant at each call) against one tile: the online softmax.
 * Lanes of `seen` are all ones where the position is visible. At least one is. */
INLINE void visit(const float *query, State *state, int first, const int n, const Tile *tile,
                  vi seen, float softcap, int dim) {
    vf even[n], odd[n];
    for (int i = 0; i < n; i++) even[i] = odd[i] = (vf){0};
    for (int d = 0; d < dim; d += 2) {
        vf k0 = load(tile->key[d], 0, 0), k1 = load(tile->key[d + 1], 0, 0);
        for (int i = 0; i < n; i++) {
            even[i] += query[i * dim + d] * k0;
            odd[i] += query[i * dim + d + 1] * k1;
        }
    }
    float weight[n][TILE], old[n];
    for (int i = 0; i < n; i++) {
        vf score = even[i] + odd[i];
        if (softcap != 0) score = softcap * tanh_of(score / softcap);
        score = (vf)(((vi)score & seen) | ((vi)splat(-INFINITY) & ~seen));
        float largest = max(score), before = state->largest[first + i];
        if (before > largest) largest = before;
        vf p = exponential(score - largest);
        vf q = exponential(splat(before - largest));
        old[i] = q[0];
        state->largest[first + i] = largest;
        state->total[first + i] = state->total[first + i] * old[i] + sum(p);
        memcpy(weight[i], &p, sizeof p);
    }
    for (int d = 0; d < dim; d += 2 * TILE) {
        int two = d + TILE < dim;
        vf a[n], b[n];
        for (int i = 0; i < n; i++) {
            a[i] = load(state->sum[first + i], d, 0) * old[i];
            b[i] = two ? load(state->sum[first + i], d + TILE, 0) * old[i] : (vf){0};
        }
        for (int j = 0; j < TILE; j++) {
            vf v0 = load(tile->value[j], d, 0);
            vf v1 = two ? load(tile->value[j], d + TILE, 0) : (vf){0};
            for (int i = 0; i < n; i++) {
                a[i] += weight[i][j] * v0;
                b[i] += weight[i][j] * v1;
            }
        }
        for (int i = 0; i < n; i++) {
            store(state->sum[first + i], d, a[i], 0);
            if (two) store(state->sum[first + i], d + TILE, b[i], 0);
        }
    }
}

/* Rows [begin, end) of segment s and kv head g. */
INLINE void attend(const Pass *pass, const Layer *layer, void *out, int s, int g, int32_t begin,
                   int32_t end, Tile *shared, Tile *own, State *state, const int dim,
                   const int bf16) {
    int group = layer->heads / layer->kv_heads;
    int64_t head = g * layer->slots, base = pass->base[s];
    int32_t last = 0, length = pass->length[s], first = pass->first[s];
    for (int32_t r = begin; r < end; r++)
        if (pass->position[r] > last) last = pass->position[r];
    for (int i = 0; i < (end - begin) * group; i++) {
        state->largest[i] = -INFINITY;
        state->total[i] = 0;
        memset(state->sum[i], 0, dim * sizeof(float));
    }
    int32_t oldest = pass->position[begin];
    for (int32_t r = begin; r < end; r++)
        if (pass->position[r] < oldest) oldest = pass->position[r];
    int32_t start = layer->window && oldest >= layer->window ? oldest - layer->window + 1 : 0;
    for (int32_t from = start / TILE * TILE; from <= last; from += TILE) {
        int loaded = 0;
        for (int32_t r = begin; r < end; r++) {
            int32_t position = pass->position[r];
            int32_t low = layer->window ? position - layer->window : -1; /* last hidden one */
            if (from > position || from + TILE - 1 <= low) continue;
            int64_t slot[TILE];
            const Tile *tile = shared;
            int32_t straight = pass->straight[r];
            if (straight > position || from + TILE <= straight) {
                if (!loaded) {
                    for (int j = 0; j < TILE; j++)
                        slot[j] = base + from + j < layer->slots ? base + from + j : -1;
                    load_tile(layer, head, slot, shared, dim, bf16);
                    loaded = 1;
                }
            } else { /* this row's own path: walk up from the row to the tile */
                for (int j = 0; j < TILE; j++)
                    slot[j] = from + j < length ? base + from + j : -1;
                int32_t row = r - first;
                for (int32_t p = position; p >= from && p >= length; p--) {
                    if (p < from + TILE) slot[p - from] = base + length + row;
                    row = pass->parent[first + row];
                }
                load_tile(layer, head, slot, own, dim, bf16);
                tile = own;
            }
            vi lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
            vi seen = ((lane + from) <= position) & ((lane + from) > low);
            const float *query = pass->query + ((int64_t)r * layer->heads + g * group) * dim;
            int i = 0, at = (r - begin) * group;
            for (; i + 4 <= group; i += 4)
                visit(query + i * dim, state, at + i, 4, tile, seen, layer->softcap, dim);
            for (; i + 3 <= group; i += 3)
                visit(query + i * dim, state, at + i, 3, tile, seen, layer->softcap, dim);
            for (; i < group; i++)
                visit(query + i * dim, state, at + i, 1, tile, seen, layer->softcap, dim);
        }
    }
    for (int32_t r = begin; r < end; r++)
        for (int i = 0; i < group; i++) {
            int at = (r - begin) * group + i;
            for (int d = 0; d < dim; d += TILE)
                store(out, ((int64_t)r * layer->heads + g * group + i) * dim + d,
                      load(state->sum[at], d, 0) / state->total[at], bf16);
        }
}

static void attend_any(const Pass *pass, const Layer *layer, void *out, int s, int g,
                       int32_t begin, int32_t end, Tile *shared, Tile *own, State *state) {
    int dim = layer->head_dim;
    if (layer->bf16 && dim == 64)
        attend(pass, layer, out, s, g, begin, end, shared, own, state, 64, 1);
    else if (layer->bf16)
        attend(pass, layer, out, s, g, begin, end, shared, own, state, dim, 1);
    else
        attend(pass, layer, out, s, g, begin, end, shared, own, state, dim, 0);
}

/* qkv [rows, (heads + 2 kv_heads) * head_dim] -> out [rows, heads * head_dim]; keys and values are
 * written to the store on the way. */
void attention(const Pass *pass, const Layer *layer, const void *qkv, void *out) {
    int group = layer->heads / layer->kv_heads;
    int block = MAX_QUERIES / 2 / group > 0 ? MAX_QUERIES / 2 / group : 1;
    int64_t work = 0;
    int tasks = 0;
    for (int s = 0; s < pass->segments; s++) {
        int rows = pass->first[s + 1] - pass->first[s];
        tasks += (rows + block - 1) / block * layer->kv_heads;
        work += (int64_t)rows * layer->heads * (pass->length[s] + rows);
    }
#pragma omp parallel if (work > 4096)
    {
#pragma omp for schedule(static)
        for (int64_t r = 0; r < pass->rows; r++) {
            int s = 0; /* few segments: a linear search costs less than another array */
            while (r >= pass->first[s + 1]) s++;
            int64_t slot = pass->base[s] + pass->length[s] + r - pass->first[s];
            if (layer->bf16) place_row(pass, layer, qkv, r, slot, 1);
            else place_row(pass, layer, qkv, r, slot, 0);
        }
        Tile *tiles = aligned_alloc(64, 2 * sizeof(Tile));
        State *state = aligned_alloc(64, sizeof(State));
#pragma omp for schedule(dynamic, 1)
        for (int task = 0; task < tasks; task++) {
            int s = 0, left = task, count = 0, rows = 0;
            for (;; s++) {
                rows = pass->first[s + 1] - pass->first[s];
                count = (rows + block - 1) / block * layer->kv_heads;
                if (left < count) break;
                left -= count;
            }
            int32_t begin = pass->first[s] + left / layer->kv_heads * block;
            int32_t end = begin + block < pass->first[s + 1] ? begin + block : pass->first[s + 1];
            attend_any(pass, layer, out, s, left % layer->kv_heads, begin, end, tiles, tiles + 1,
                       state);
        }
        free(tiles);
        free(state);
    }
}
