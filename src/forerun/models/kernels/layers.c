/* Decoder layers, and the logits behind them. */
#include <string.h>

#include "team.h"
#include "vectors.h"

/* y = x + [norm](x' W^T): one half of a layer ends like this */
static void add(const Pass *pass, const Layer *layer, const Matrix *m, const void *x,
                const float *norm, const Matrix *then, void *hidden) {
    if (!norm) {
        product(m, x, hidden, hidden, pass->rows, then, layer->bf16, layer->bf16);
        return;
    }
    product(m, x, NULL, pass->wide, pass->rows, then, layer->bf16, layer->bf16);
    rms_norm(pass->wide, norm, hidden, hidden, pass->rows, m->out, layer->norm_eps, layer->bf16);
}

/* One row of what qkv reads of a layer with two inputs: both, each behind its norm. */
INLINE void read_row(const Layer *l, const void *beside, void *hidden, void *out, int64_t r, int dim,
                     int bf16) {
    int64_t at = r * dim, to = 2 * at;
    norm_row(beside, at, l->beside, NULL, out, to, dim, l->norm_eps, bf16);
    norm_row(hidden, at, l->before_attention, NULL, out, to + dim, dim, l->norm_eps, bf16);
    if (l->normed_residual)
        for (int d = 0; d < dim; d += LANES)
            store(hidden, at + d, load(out, to + dim + d, bf16), bf16);
}

/* What qkv reads: hidden itself, or pass->narrow. */
static const void *read_input(const Pass *pass, const Layer *l, const void *beside, void *hidden) {
    int32_t rows = pass->rows, dim = l->o.out;
    if (!l->before_attention) return hidden;
    if (!l->beside) {
        rms_norm(hidden, l->before_attention, NULL, pass->narrow, rows, dim, l->norm_eps, l->bf16);
        return pass->narrow;
    }
#pragma omp for schedule(static)
    for (int32_t r = 0; r < rows; r++)
        if (l->bf16) read_row(l, beside, hidden, pass->narrow, r, dim, 1);
        else read_row(l, beside, hidden, pass->narrow, r, dim, 0);
    return pass->narrow;
}

/* `then`, or null: the layer behind this one. */
static void run_layer(const Pass *pass, const Layer *l, const Layer *then, const void *beside,
                      void *hidden) {
    int32_t rows = pass->rows, dim = l->o.out, bf16 = l->bf16;
    const Matrix *next = then ? &then->qkv : NULL;
    product(&l->qkv, read_input(pass, l, beside, hidden), NULL, pass->wide, rows, &l->o, bf16, bf16);
    attention(pass, l, pass->wide, pass->narrow);
    add(pass, l, &l->o, pass->narrow, l->after_attention, &l->gate_up, hidden);
    rms_norm(hidden, l->before_mlp, NULL, pass->narrow, rows, dim, l->norm_eps, bf16);
    product(&l->gate_up, pass->narrow, NULL, pass->wide, rows, &l->down, bf16, bf16);
    gated(pass->wide, pass->narrow, rows, l->down.in, l->gelu, bf16);
    add(pass, l, &l->down, pass->narrow, l->after_mlp, next, hidden);
}

/* Keep hidden, if somebody wants what lies at this boundary. */
static void keep(const Pass *pass, const Taps *taps, int32_t boundary, const void *hidden,
                 int64_t bytes) {
    for (int32_t t = 0; t < taps->count; t++) {
        if (taps->boundary[t] != boundary) continue;
#pragma omp for schedule(static)
        for (int32_t r = 0; r < pass->rows; r++)
            memcpy((char *)taps->out + (r * (int64_t)taps->count + t) * bytes,
                   (const char *)hidden + r * bytes, bytes);
    }
}

/* Some layers, in place on hidden [rows, dim]; beside [rows, dim] and taps may be null. */
void run(const Pass *pass, const Layer *const layers[], int32_t count, const void *beside,
         void *hidden, const Taps *taps) {
    const Layer *l = layers[0];
    int64_t work = (int64_t)pass->rows * l->o.out * (l->qkv.out + l->gate_up.out);
    int64_t bytes = (int64_t)l->o.out * (l->bf16 ? 2 : 4);
#pragma omp parallel if (work > WORTH_A_TEAM)
    for (int32_t i = 0; i <= count; i++) {
        if (taps) keep(pass, taps, i, hidden, bytes);
        if (i == count) break;
        run_layer(pass, layers[i], i + 1 < count ? layers[i + 1] : NULL, beside, hidden);
    }
}

/* The rows of qkv that give keys and values, and up to 31 before them: weights lie in blocks. */
static Matrix kv_rows(const Layer *l) {
    int32_t skipped = l->heads * l->head_dim / COLUMNS * COLUMNS;
    Matrix m = l->qkv;
    m.weight = (const char *)m.weight + (int64_t)skipped * m.in * (l->bf16 ? 2 : 4);
    if (m.bias) m.bias += skipped;
    m.out -= skipped;
    return m;
}

static void append_to_layer(const Pass *pass, const Layer *l, const void *x) {
    Matrix m = kv_rows(l);
    product(&m, x, NULL, pass->wide, pass->rows, NULL, l->bf16, l->bf16);
    place_kv_rows(pass, l, pass->wide, m.out);
}

/* Keys and values of rows x [rows, qkv.in] in some layers, which all read x itself. */
void append(const Pass *pass, const Layer *const layers[], int32_t count, const void *x) {
    int64_t work = (int64_t)pass->rows * layers[0]->qkv.in * layers[0]->kv_heads * layers[0]->head_dim;
#pragma omp parallel if (work * 2 > WORTH_A_TEAM)
    for (int32_t i = 0; i < count; i++) append_to_layer(pass, layers[i], x);
}

/* logits [rows, head->out] in float32 from the final norm, unless it is null, and head; normed is
 * scratch like x. */
void logits(const void *x, const float *norm, float eps, const Matrix *head, void *normed,
            float *out, int32_t rows, int32_t bf16) {
#pragma omp parallel if ((int64_t)rows * head->in * head->out > WORTH_A_TEAM)
    {
        if (norm) rms_norm(x, norm, NULL, normed, rows, head->in, eps, bf16);
        product(head, norm ? normed : x, NULL, out, rows, NULL, bf16, 0);
    }
}
