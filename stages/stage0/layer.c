/* stages/stage0/layer.c: tangled from layer.nw; change it there. */
/* Stage 0, host side: 43 launches a step. */
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include "layer.h"

/* stage 0: the operands of a kernel */
/* a position, given or to be found on the device */
struct position {
    const int64_t *at;   /* device memory, or null */
    int64_t given;       /* the position when at is null */
    int64_t rows;        /* of the cache: valid positions are below */
};

struct operands {
    const uint16_t *a, *b;   /* bf16 inputs */
    const float *f, *g;      /* single-precision inputs */
    uint16_t *out;           /* the result, if it is bf16 */
    float *f_out;            /* the result, if it is single precision */
    int64_t n, m;            /* sizes, as each kernel says */
    float scale;
    struct position pos;
    uint32_t *status;        /* where a position out of range is remembered */
};

/* stage 0: the operands of attention */
struct attention_args {
    const uint16_t *q;       /* [n_q][hd] */
    uint16_t *p;             /* [n_q][bound]: the probabilities, rounded */
    const uint16_t *cache;   /* [n_kv][rows][hd], of keys or of values */
    float *scores;           /* [n_q][bound] */
    float *probabilities;    /* [n_q][bound] */
    uint16_t *out;           /* [n_q][hd] */
    int64_t n_q, n_kv, hd, bound;
    float scale;             /* 1 / sqrt(hd) */
    struct position pos;
};

/* stage 0: the kernels, as the host sees them */
void to_f32(struct operands), to_bf16(struct operands), square(struct operands);
void mean(struct operands), add_eps(struct operands), inverse_root(struct operands);
void scale_by(struct operands), multiply(struct operands), add(struct operands);
void silu(struct operands), gemv(struct operands), times_cos(struct operands);
void negate_half(struct operands), concatenate(struct operands);
void add_times_sin(struct operands), append(struct operands), last_add(struct operands);
void score(struct attention_args), softmax(struct attention_args);
void weighted_values(struct attention_args);

struct layer {
    /* what every handle keeps */
    layer_config c;
    layer_weights w;
    uint16_t *k_cache, *v_cache;   /* [n_kv][max_seq_len][hd] */
    uint32_t *status;              /* device memory: a sticky layer status */
    char *scratch;                 /* device memory that the handle owns */
    int device;                    /* the device all of it lives on */
    int blocks;                    /* thread blocks of a launch that fills the chip */
    /* stage 0: what else the handle keeps */
    float *cos_table, *sin_table;      /* [max_seq_len][hd] */
    float *xf, *squares, *scaled;      /* [d] */
    float *mean, *mean_eps, *root;     /* [1] */
    uint16_t *narrowed, *h;            /* [d] */
    uint16_t *q, *q_roped, *a;         /* [n_q * hd] */
    uint16_t *k, *v, *k_roped;         /* [n_kv * hd] */
    float *times_cos, *rotated;        /* [n_q * hd] */
    uint16_t *negated, *swapped;       /* [n_q * hd] */
    float *scores, *probabilities;     /* [n_q][max_seq_len] */
    uint16_t *p;                       /* [n_q][max_seq_len] */
    uint16_t *o, *x1, *down;           /* [d] */
    uint16_t *gate, *act, *up, *mlp;   /* [ffn] */
};

/* say which rule was broken */
#include <stdarg.h>
#include <stdio.h>
static _Thread_local struct { int status; char rule[200]; } broken;

static int refused(int status, const char *format, ...)
{
    va_list args;
    va_start(args, format);
    vsnprintf(broken.rule, sizeof broken.rule, format, args);
    va_end(args);
    return broken.status = status;
}

/* everything fits */
static int fit(layer *l) { return l ? LAYER_OK : LAYER_BAD_ARGUMENT; }

/* take a piece of scratch memory */
static void *take(char **at, size_t bytes)
{
    char *piece = *at;
    *at = (char *)(((uintptr_t)piece + bytes + 255) & ~(uintptr_t)255);
    return piece;
}

/* stage 0: divide the scratch memory */
static char *divide_scratch(layer *l, char *at)
{
    size_t d = (size_t)l->c.d, ffn = (size_t)l->c.ffn, rows = (size_t)l->c.max_seq_len;
    size_t q = (size_t)(l->c.n_q * l->c.hd), kv = (size_t)(l->c.n_kv * l->c.hd);
    size_t table = rows * (size_t)l->c.hd, scores = rows * (size_t)l->c.n_q;
    l->status = take(&at, sizeof(uint32_t));
    /* stage 0: single-precision pieces */
    float **singles[] = {
        &l->cos_table, &l->sin_table, &l->scores, &l->probabilities, &l->xf, &l->squares,
        &l->scaled, &l->mean, &l->mean_eps, &l->root, &l->times_cos, &l->rotated,
    };
    size_t single_sizes[] = { table, table, scores, scores, d, d, d, 1, 1, 1, q, q };
    for (size_t i = 0; i < sizeof singles / sizeof *singles; i++)
        *singles[i] = take(&at, single_sizes[i] * sizeof(float));
    /* stage 0: bf16 pieces */
    uint16_t **halves[] = {
        &l->narrowed, &l->h, &l->o, &l->x1, &l->down, &l->q, &l->q_roped, &l->a,
        &l->negated, &l->swapped, &l->k, &l->v, &l->k_roped, &l->p,
        &l->gate, &l->act, &l->up, &l->mlp,
    };
    size_t half_sizes[] = { d, d, d, d, d, q, q, q, q, q, kv, kv, kv, scores,
                            ffn, ffn, ffn, ffn };
    for (size_t i = 0; i < sizeof halves / sizeof *halves; i++)
        *halves[i] = take(&at, half_sizes[i] * sizeof(uint16_t));
    return at;
}

/* stage 0: fill the RoPE tables */
static int prepare(layer *l)
{
    int64_t rows = l->c.max_seq_len, hd = l->c.hd;
    size_t bytes = (size_t)(rows * hd) * sizeof(float);
    float *cosines = malloc(bytes), *sines = malloc(bytes);
    for (int64_t i = 0; cosines && sines && i < rows * hd; i++) {
        double turn = pow(l->c.theta, -2.0 * (double)(i % hd % (hd / 2)) / (double)hd);
        cosines[i] = (float)cos((double)(i / hd) * turn);
        sines[i] = (float)sin((double)(i / hd) * turn);
    }
    int bad = !cosines || !sines ? LAYER_NO_MEMORY : LAYER_OK;
    if (!bad && (cudaMemcpy(l->cos_table, cosines, bytes, cudaMemcpyHostToDevice)
                 || cudaMemcpy(l->sin_table, sines, bytes, cudaMemcpyHostToDevice)))
        bad = LAYER_CUDA_FAILED;
    free(cosines), free(sines);
    return bad;
}

/* launch a kernel */
static int launch(const void *kernel, int64_t blocks, unsigned threads, size_t shared,
                  void *args, cudaStream_t stream)
{
    cudaLaunchConfig_t config = { 0 };
    config.gridDim.x = (unsigned)blocks, config.gridDim.y = config.gridDim.z = 1;
    config.blockDim.x = threads, config.blockDim.y = config.blockDim.z = 1;
    config.dynamicSmemBytes = shared;
    config.stream = stream;
    return cudaLaunchKernelExC(&config, kernel, &args) ? LAYER_CUDA_FAILED : LAYER_OK;
}

/* stage 0: one step */
/* stage 0: a launch over elements */
#define RUN(kernel, threads, ...)                                                   \
    if (!bad) bad = launch((const void *)kernel, ((threads) + 255) / 256, 256, 128,  \
                           &(struct operands){ __VA_ARGS__ }, stream)

static int norm(layer *l, const uint16_t *x, const uint16_t *weight,
                cudaStream_t stream)
{
    int bad = 0;
    int64_t d = l->c.d;
    RUN(to_f32, d, .a = x, .f_out = l->xf, .n = d);
    RUN(square, d, .f = l->xf, .f_out = l->squares, .n = d);
    RUN(mean, 256, .f = l->squares, .f_out = l->mean, .n = d);
    RUN(add_eps, 1, .f = l->mean, .f_out = l->mean_eps, .scale = (float)l->c.eps);
    RUN(inverse_root, 1, .f = l->mean_eps, .f_out = l->root);
    RUN(scale_by, d, .f = l->xf, .g = l->root, .f_out = l->scaled, .n = d);
    RUN(to_bf16, d, .f = l->scaled, .out = l->narrowed, .n = d);
    RUN(multiply, d, .a = l->narrowed, .b = weight, .out = l->h, .n = d);
    return bad;
}

static int rotate(layer *l, const uint16_t *v, int64_t heads, uint16_t *out,
                  struct position pos, cudaStream_t stream)
{
    int bad = 0;
    int64_t hd = l->c.hd, n = heads * hd;
    RUN(times_cos, n, .a = v, .f = l->cos_table, .f_out = l->times_cos, .n = heads,
        .m = hd, .pos = pos);
    RUN(negate_half, n / 2, .a = v, .out = l->negated, .n = heads, .m = hd);
    RUN(concatenate, n, .a = v, .b = l->negated, .out = l->swapped, .n = heads,
        .m = hd);
    RUN(add_times_sin, n, .a = l->swapped, .g = l->times_cos, .f = l->sin_table,
        .f_out = l->rotated, .n = heads, .m = hd, .pos = pos);
    RUN(to_bf16, n, .f = l->rotated, .out = out, .n = n);
    return bad;
}

#ifdef CUDA_CPU_TARGET
enum { SUM_THREADS = 256 };
#else
enum { SUM_THREADS = 1024 };
#endif

static int attention(layer *l, struct position pos, cudaStream_t stream)
{
    int64_t n_q = l->c.n_q, bound = pos.at ? pos.rows : pos.given + 1;
    unsigned threads = SUM_THREADS;
    struct attention_args o = {
        .q = l->q_roped, .p = l->p, .cache = l->k_cache, .scores = l->scores,
        .out = l->a,
        .probabilities = l->probabilities, .n_q = n_q, .n_kv = l->c.n_kv, .hd = l->c.hd,
        .bound = bound, .scale = (float)(1 / sqrt((double)l->c.hd)), .pos = pos,
    };
    int bad = launch((const void *)score, (n_q * bound + 7) / 8, 256, 0, &o, stream);
    if (!bad) bad = launch((const void *)softmax, n_q, 256, 128, &o, stream);
    RUN(to_bf16, n_q * bound, .f = l->probabilities, .out = l->p, .n = n_q * bound);
    o.cache = l->v_cache;
    if (!bad) bad = launch((const void *)weighted_values, n_q, threads,
                           threads * sizeof(float), &o, stream);
    return bad;
}

/* stage 0: the launch of a GEMV */
#define GEMV(weights, x, y, rows, columns) \
    RUN(gemv, (rows) * 32, .a = weights, .b = x, .out = y, .n = rows, .m = columns)

static int step(layer *l, const void *x, struct position pos, void *x_out,
                cudaStream_t stream)
{
    int64_t d = l->c.d, ffn = l->c.ffn, n_kv = l->c.n_kv, hd = l->c.hd;
    int64_t q = l->c.n_q * hd, kv = n_kv * hd;
    int bad = norm(l, x, l->w.in_norm, stream);
    /* stage 0: queries, keys, values */
    GEMV(l->w.q, l->h, l->q, q, d);
    GEMV(l->w.k, l->h, l->k, kv, d);
    GEMV(l->w.v, l->h, l->v, kv, d);
    if (!bad) bad = rotate(l, l->q, l->c.n_q, l->q_roped, pos, stream);
    if (!bad) bad = rotate(l, l->k, n_kv, l->k_roped, pos, stream);
    RUN(append, kv, .a = l->k_roped, .out = l->k_cache, .n = n_kv, .m = hd, .pos = pos);
    RUN(append, kv, .a = l->v, .out = l->v_cache, .n = n_kv, .m = hd, .pos = pos);
    if (!bad) bad = attention(l, pos, stream);
    GEMV(l->w.o, l->a, l->o, d, q);
    RUN(add, d, .a = x, .b = l->o, .out = l->x1, .n = d);
    if (!bad) bad = norm(l, l->x1, l->w.post_norm, stream);
    /* stage 0: SwiGLU */
    GEMV(l->w.gate, l->h, l->gate, ffn, d);
    RUN(silu, ffn, .a = l->gate, .out = l->act, .n = ffn);
    GEMV(l->w.up, l->h, l->up, ffn, d);
    RUN(multiply, ffn, .a = l->act, .b = l->up, .out = l->mlp, .n = ffn);
    GEMV(l->w.down, l->mlp, l->down, d, ffn);
    RUN(last_add, d, .a = l->x1, .b = l->down, .out = x_out, .n = d, .pos = pos,
        .status = l->status);
    return bad;
}

/* refuse what no stage can serve */
static int misaligned(const void *p) { return ((uintptr_t)p & 15) != 0; }

static int check_pointers(const layer_weights *w, const void *k_cache,
                          const void *v_cache)
{
    const struct { const char *name; const void *p; } all[] = {
        { "in_norm", w->in_norm }, { "post_norm", w->post_norm }, { "q", w->q },
        { "k", w->k }, { "v", w->v }, { "o", w->o }, { "gate", w->gate },
        { "up", w->up }, { "down", w->down }, { "k_cache", k_cache },
        { "v_cache", v_cache },
    };
    for (size_t i = 0; i < sizeof all / sizeof *all; i++)
        if (!all[i].p) return refused(LAYER_BAD_ARGUMENT, "%s is null", all[i].name);
    for (size_t i = 0; i < sizeof all / sizeof *all; i++)
        if (misaligned(all[i].p))
            return refused(LAYER_BAD_ALIGNMENT, "%s must be 16-byte aligned, and is at "
                           "%p", all[i].name, all[i].p);
    return LAYER_OK;
}

static int check_shape(const layer_config *c)
{
    int64_t most = 1 << 24;   /* of any one size: products stay far below 2^63 */
    int64_t rep = c->n_kv > 0 ? c->n_q / c->n_kv : 0;
    const struct { int broken; const char *rule; int64_t given; } rules[] = {
        /* the rules for a shape */
        { c->d <= 0 || c->d > most || c->d % 64,
          "d must be a multiple of 64 up to 16777216, and is %lld", c->d },
        { c->ffn <= 0 || c->ffn > most || c->ffn % 64,
          "ffn must be a multiple of 64 up to 16777216, and is %lld", c->ffn },
        { c->hd != 64 && c->hd != 128, "hd must be 64 or 128, and is %lld", c->hd },
        { c->n_q <= 0 || c->n_q > 4096, "n_q must be 1 to 4096, and is %lld", c->n_q },
        { c->n_kv <= 0 || c->n_q % c->n_kv, "n_kv must divide n_q, and is %lld", c->n_kv },
        { rep > 16, "at most 16 query heads may share a KV head, and %lld do", rep },
        { c->max_seq_len <= 0 || c->max_seq_len > most,
          "max_seq_len must be 1 to 16777216, and is %lld", c->max_seq_len },
        { !((float)c->eps > 1e-37f) || !isfinite((float)c->eps),
          "eps must be positive and finite in single precision", 0 },
        { !(c->theta > 0) || !isfinite(c->theta), "theta must be positive and finite", 0 },
        { c->max_blocks < 0, "max_blocks must not be negative, and is %lld", c->max_blocks },
    };
    for (size_t i = 0; i < sizeof rules / sizeof *rules; i++)
        if (rules[i].broken)
            return refused(LAYER_BAD_SHAPE, rules[i].rule, (long long)rules[i].given);
    return LAYER_OK;
}

/* refuse a device that is too old */
static int check_device(int *device, int *sms)
{
    int major;
    if (cudaGetDevice(device)) return LAYER_CUDA_FAILED;
    if (cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, *device)
        || cudaDeviceGetAttribute(sms, cudaDevAttrMultiProcessorCount, *device))
        return LAYER_CUDA_FAILED;
    return major >= 9 ? LAYER_OK
         : refused(LAYER_BAD_DEVICE, "the device must have compute capability 9.0 or "
                   "later, and has %d.x", major);
}

/* claim and clear the scratch memory */
static int claim_scratch(layer *l)
{
    size_t bytes = (size_t)divide_scratch(l, NULL);
    cudaError_t e = cudaMalloc((void **)&l->scratch, bytes);
    if (e && e != cudaErrorMemoryAllocation) return LAYER_CUDA_FAILED;
    if (e) {
        cudaGetLastError();
        return refused(LAYER_NO_MEMORY, "there are no %zu bytes of device memory for "
                       "scratch", bytes);
    }
    divide_scratch(l, l->scratch);
    return cudaMemset(l->scratch, 0, bytes) ? LAYER_CUDA_FAILED : LAYER_OK;
}

/* build a layer */
int layer_build(layer **out, const layer_config *c, const layer_weights *w,
                void *k_cache, void *v_cache)
{
    broken.status = LAYER_OK;
    if (!out || !c || !w) return LAYER_BAD_ARGUMENT;
    *out = NULL;
    int device, sms, bad = check_shape(c);
    if (!bad) bad = check_pointers(w, k_cache, v_cache);
    if (!bad) bad = check_device(&device, &sms);
    if (bad) return bad;
    layer *l = calloc(1, sizeof *l);
    if (!l) return LAYER_NO_MEMORY;
    l->c = *c, l->w = *w, l->k_cache = k_cache, l->v_cache = v_cache;
    l->device = device;
    l->blocks = c->max_blocks && c->max_blocks < sms ? c->max_blocks : sms;
    bad = fit(l);
    if (!bad) bad = claim_scratch(l);
    if (!bad) bad = prepare(l);
    if (!bad && cudaDeviceSynchronize()) bad = LAYER_CUDA_FAILED;
    if (bad) layer_teardown(l);
    else *out = l;
    return bad;
}

/* the two ways to step */
static int check_current(const layer *l)   /* the device */
{
    int device;
    broken.status = LAYER_OK;
    if (cudaGetDevice(&device)) return LAYER_CUDA_FAILED;
    return device == l->device ? LAYER_OK
         : refused(LAYER_BAD_DEVICE, "the layer was built on device %d, and device %d "
                   "is current", l->device, device);
}

static int check_step(layer *l, const void *x, const void *x_out)
{
    broken.status = LAYER_OK;
    if (!l || !x || !x_out) return LAYER_BAD_ARGUMENT;
    if (misaligned(x) || misaligned(x_out)) return LAYER_BAD_ALIGNMENT;
    return check_current(l);
}

int layer_step(layer *l, const void *x, int64_t pos, void *x_out, cudaStream_t stream)
{
    int bad = check_step(l, x, x_out);
    if (bad) return bad;
    if (pos < 0 || pos >= l->c.max_seq_len)
        return refused(LAYER_BAD_POSITION, "pos must be 0 to %lld, and is %lld",
                       (long long)l->c.max_seq_len - 1, (long long)pos);
    return step(l, x, (struct position){ NULL, pos, l->c.max_seq_len }, x_out, stream);
}

int layer_step_at(layer *l, const void *x, const int64_t *pos_on_device, void *x_out,
                  cudaStream_t stream)
{
    int bad = check_step(l, x, x_out);
    if (bad) return bad;
    if (!pos_on_device) return LAYER_BAD_ARGUMENT;
    if ((uintptr_t)pos_on_device & 7) return LAYER_BAD_ALIGNMENT;
    struct position p = { pos_on_device, 0, l->c.max_seq_len };
    return step(l, x, p, x_out, stream);
}

/* status, teardown, error texts */
/* the sticky status */
int layer_status(layer *l)
{
    uint32_t status;
    if (!l) return LAYER_BAD_ARGUMENT;
    int bad = check_current(l);
    if (bad) return bad;
    if (cudaDeviceSynchronize()) return LAYER_CUDA_FAILED;
    if (cudaMemcpy(&status, l->status, sizeof status, cudaMemcpyDeviceToHost))
        return LAYER_CUDA_FAILED;
    return (int)status;
}

/* tear a layer down */
int layer_teardown(layer *l)
{
    int before;
    if (!l) return LAYER_OK;
    int bad = cudaGetDevice(&before) || cudaSetDevice(l->device);
    if (cudaDeviceSynchronize()) bad = 1;
    if (l->scratch && cudaFree(l->scratch)) bad = 1;
    if (!bad && before != l->device) bad = cudaSetDevice(before) != cudaSuccess;
    free(l);
    return bad ? LAYER_CUDA_FAILED : LAYER_OK;
}

/* error texts */
const char *layer_strerror(int status)
{
    if (status == LAYER_CUDA_FAILED && cudaPeekAtLastError())
        return cudaGetErrorString(cudaPeekAtLastError());
    static const char *text[] = {
        "ok", "a pointer is null", "a device pointer is not 16-byte aligned",
        "sizes not served: hd is 64 or 128, d and ffn are multiples of 64, n_kv "
        "divides n_q, at most 16 query heads a KV head, eps and theta positive",
        "position outside [0, max_seq_len)",
        "wrong device: it must have compute capability 9.0 or later, be the one the "
        "layer was built on, and have room for the grid",
        "out of device memory", "the CUDA runtime refused a call",
    };
    int known = status >= 0 && status < (int)(sizeof text / sizeof *text);
    if (status && status == broken.status) return broken.rule;
    return known ? text[status] : "unknown status";
}
