/* stages/oracle/oracle.c: tangled from layer.nw; change it there. */
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include "oracle.h"
#define DEVICE static inline   /* the generator also runs on a GPU */

/* the input generator */
DEVICE uint64_t mix64(uint64_t z)
{
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
    z = (z ^ z >> 27) * 0x94d049bb133111ebu;
    return z ^ z >> 31;
}

DEVICE int32_t normal_times_65536(uint64_t key, uint64_t i)
{
    int32_t sum = -393210;
    for (uint64_t j = 3 * i; j < 3 * i + 3; j++) {
        uint64_t bits = mix64(key + (j + 1) * 0x9e3779b97f4a7c15u);
        sum += (int32_t)(bits & 0xffff) + (int32_t)(bits >> 16 & 0xffff)
             + (int32_t)(bits >> 32 & 0xffff) + (int32_t)(bits >> 48);
    }
    return sum;
}

DEVICE float generated(uint64_t key, uint64_t i, int32_t offset, float scale)
{
    return (float)(offset + normal_times_65536(key, i)) * scale;
}

/* widen a bf16, in C */
static float widen(uint16_t h)
{
    uint32_t u = (uint32_t)h << 16;
    float f;
    memcpy(&f, &u, sizeof f);
    return f;
}

/* round to bf16, in C */
static uint16_t round_to_bf16(float f)
{
    uint32_t u;
    memcpy(&u, &f, sizeof u);
    if ((u & 0x7fffffff) > 0x7f800000) return (uint16_t)(u >> 16 | 0x40);
    return (uint16_t)((u + 0x7fff + (u >> 16 & 1)) >> 16);
}

/* the pieces of the layer, in double precision */
static void rmsnorm(double *h, const double *x, const uint16_t *w, int64_t n,
                    double eps)
{
    double sum = 0;
    for (int64_t i = 0; i < n; i++) sum += x[i] * x[i];
    double scale = 1 / sqrt(sum / (double)n + eps);
    for (int64_t i = 0; i < n; i++) h[i] = x[i] * scale * widen(w[i]);
}

static void gemv(double *y, const uint16_t *W, const double *x, int64_t rows,
                 int64_t cols)
{
    for (int64_t r = 0; r < rows; r++) {
        double sum = 0;
        for (int64_t c = 0; c < cols; c++) sum += widen(W[r * cols + c]) * x[c];
        y[r] = sum;
    }
}

static void rope(double *v, int64_t hd, int64_t pos, double theta)
{
    for (int64_t i = 0; i < hd / 2; i++) {
        double angle = (double)pos * pow(theta, -2.0 * (double)i / (double)hd);
        double a = v[i], b = v[i + hd / 2];
        v[i] = a * cos(angle) - b * sin(angle);
        v[i + hd / 2] = b * cos(angle) + a * sin(angle);
    }
}

static void attend(double *a, const double *q, const uint16_t *K, const uint16_t *V,
                   int64_t rows, int64_t hd, double *p)
{
    double max = -INFINITY, sum = 0;
    for (int64_t r = 0; r < rows; r++) {
        p[r] = 0;
        for (int64_t i = 0; i < hd; i++) p[r] += q[i] * widen(K[r * hd + i]);
        p[r] /= sqrt((double)hd);
        max = fmax(max, p[r]);
    }
    for (int64_t r = 0; r < rows; r++) sum += p[r] = exp(p[r] - max);
    for (int64_t i = 0; i < hd; i++) a[i] = 0;
    for (int64_t r = 0; r < rows; r++)
        for (int64_t i = 0; i < hd; i++) a[i] += p[r] / sum * widen(V[r * hd + i]);
}

/* one step of the layer, in double precision */
int oracle_step(const layer_config *c, const layer_weights *w, uint16_t *k_cache,
                uint16_t *v_cache, const uint16_t *x, int64_t pos, double *x_out)
{
    int64_t d = c->d, hd = c->hd, n_q = c->n_q, n_kv = c->n_kv, ffn = c->ffn;
    int64_t room = 2 * d + 2 * (n_q + n_kv) * hd + 2 * ffn + pos + 1;
    double *h = malloc((size_t)room * sizeof *h);
    if (!h) return 1;
    double *x1 = h + d, *q = x1 + d, *k = q + n_q * hd, *v = k + n_kv * hd;
    double *a = v + n_kv * hd, *gate = a + n_q * hd, *up = gate + ffn, *p = up + ffn;
    for (int64_t i = 0; i < d; i++) x1[i] = widen(x[i]);
    /* the attention half: x1 becomes x + W_o a */
    rmsnorm(h, x1, w->in_norm, d, c->eps);
    gemv(q, w->q, h, n_q * hd, d);
    gemv(k, w->k, h, n_kv * hd, d);
    gemv(v, w->v, h, n_kv * hd, d);
    for (int64_t i = 0; i < n_q; i++) rope(q + i * hd, hd, pos, c->theta);
    for (int64_t i = 0; i < n_kv; i++) rope(k + i * hd, hd, pos, c->theta);
    /* append k and v to the cache, rounded once */
    for (int64_t i = 0; i < n_kv * hd; i++) {
        int64_t at = (i / hd * c->max_seq_len + pos) * hd + i % hd;
        k_cache[at] = round_to_bf16((float)k[i]);
        v_cache[at] = round_to_bf16((float)v[i]);
    }
    for (int64_t i = 0; i < n_q; i++) {
        int64_t head = i / (n_q / n_kv) * c->max_seq_len * hd;
        attend(a + i * hd, q + i * hd, k_cache + head, v_cache + head, pos + 1, hd, p);
    }
    gemv(h, w->o, a, d, n_q * hd);
    for (int64_t i = 0; i < d; i++) x1[i] += h[i];
    /* the MLP half: x_out becomes x1 + W_down (silu(gate) up) */
    rmsnorm(h, x1, w->post_norm, d, c->eps);
    gemv(gate, w->gate, h, ffn, d);
    gemv(up, w->up, h, ffn, d);
    for (int64_t i = 0; i < ffn; i++) up[i] *= gate[i] / (1 + exp(-gate[i]));
    gemv(h, w->down, up, d, ffn);
    for (int64_t i = 0; i < d; i++) x_out[i] = x1[i] + h[i];
    free(h);
    return 0;
}

/* fill an array with generated bf16 */
uint64_t generator_key(uint64_t seed, uint32_t tensor)
{
    return mix64(seed * 0x9e3779b97f4a7c15u + tensor);
}

void generate(uint16_t *out, int64_t first, int64_t n, uint64_t seed, uint32_t tensor,
              int32_t offset, float scale)
{
    uint64_t key = generator_key(seed, tensor);
    for (int64_t i = 0; i < n; i++)
        out[i] = round_to_bf16(generated(key, (uint64_t)(first + i), offset, scale));
}
