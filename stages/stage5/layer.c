/* stages/stage5/layer.c: tangled from layer.nw; change it there. */
/* Stage 5, host side: 6 launches a step. */
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include "layer.h"

/* stage 5: what the kernels are given */
/* a position, given or to be found on the device */
struct position {
    const int64_t *at;   /* device memory, or null */
    int64_t given;       /* the position when at is null */
    int64_t rows;        /* of the cache: valid positions are below */
};

enum { PIECE = 256 };          /* columns of down that a block takes at a time */
struct layer_args {
    /* the tensors of a layer, as kernels see them */
    const uint16_t *x;                 /* [d] */
    const uint16_t *in_norm, *post_norm;  /* [d] */
    const uint16_t *q;                 /* [n_q * hd][d] */
    const uint16_t *k, *v;             /* [n_kv * hd][d] */
    const uint16_t *o;                 /* [d][n_q * hd] */
    const uint16_t *gate, *up;         /* [ffn][d] */
    const uint16_t *down;              /* [d][ffn] */
    uint16_t *k_cache, *v_cache;       /* [n_kv][pos.rows][hd] */
    uint16_t *x_out;                   /* [d] */
    const double *turn;                /* [hd / 2]: RoPE angle per position */
    uint32_t *status;
    struct position pos;
    int64_t d, ffn;
    int32_t n_q, n_kv, hd;
    float eps, score_scale;            /* score_scale: 1 / sqrt(hd) */
    /* stage 4: vectors between the kernels */
    float *roped_q;            /* [n_q * hd] */
    /* the results of the tiles */
    float *split_sum;          /* [n_q][max_splits][hd]: sums of p V, not normalised */
    float *split_max;          /* [n_q][max_splits]: largest score */
    float *split_weight;       /* [n_q][max_splits]: sum of p */
    int32_t max_splits;
    float *attended;           /* [n_q * hd], laid out by slot() */
    float *x1;                 /* [d]: the residual stream after attention */
    float *partial;            /* [pieces][d]: what each piece adds to the result */
    int32_t pieces;            /* PIECE columns each, the last may have fewer */
};

/* stage 5: the kernels, as the host sees them */
void queries_keys_values(struct layer_args), attend(struct layer_args);
void merge(struct layer_args), output_projection(struct layer_args);
void swiglu(struct layer_args), add_pieces(struct layer_args);

enum { SPLIT_KEYS = 128 };
struct layer {
    /* what every handle keeps */
    layer_config c;
    layer_weights w;
    uint16_t *k_cache, *v_cache;   /* [n_kv][max_seq_len][hd] */
    uint32_t *status;              /* device memory: a sticky layer status */
    char *scratch;                 /* device memory that the handle owns */
    int device;                    /* the device all of it lives on */
    int blocks;                    /* thread blocks of a launch that fills the chip */
    struct layer_args args;        /* all but x, pos and x_out */
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

/* take a piece of scratch memory */
static void *take(char **at, size_t bytes)
{
    char *piece = *at;
    *at = (char *)(((uintptr_t)piece + bytes + 255) & ~(uintptr_t)255);
    return piece;
}

/* stage 5: divide the scratch memory */
static char *divide_scratch(layer *l, char *at)
{
    struct layer_args *a = &l->args;
    /* several launches: scratch memory up to the residual stream */
    size_t d = (size_t)l->c.d, q = (size_t)(l->c.n_q * l->c.hd), f = sizeof(float);
    a->max_splits = (int32_t)((l->c.max_seq_len + SPLIT_KEYS - 1) / SPLIT_KEYS);
    size_t splits = (size_t)l->c.n_q * (size_t)a->max_splits;
    l->status = a->status = take(&at, sizeof(uint32_t));
    a->turn = take(&at, (size_t)l->c.hd / 2 * sizeof(double));
    a->roped_q = take(&at, q * f);
    a->split_sum = take(&at, splits * (size_t)l->c.hd * f);
    a->split_max = take(&at, splits * f);
    a->split_weight = take(&at, splits * f);
    a->attended = take(&at, q * f);
    a->x1 = take(&at, d * f);
    a->pieces = (int32_t)((l->c.ffn + PIECE - 1) / PIECE);
    a->partial = take(&at, (size_t)a->pieces * d * f);
    return at;
}

/* stage 5: describe the layer to the kernels */
static size_t shared_bytes(const layer *l)   /* 32 for sums, h, a piece's activations */
{
    return (size_t)(32 + l->c.d + PIECE) * sizeof(float);
}

static int fit(layer *l)
{
    int most, bytes = (int)shared_bytes(l), device = l->device;
    enum cudaFuncAttribute limit = cudaFuncAttributeMaxDynamicSharedMemorySize;
    if (cudaDeviceGetAttribute(&most, cudaDevAttrMaxSharedMemoryPerBlockOptin, device))
        return LAYER_CUDA_FAILED;
    if (bytes > most)
        return refused(LAYER_BAD_SHAPE, "d must be at most %d on this device, and is "
                       "%lld", (most / 4 - PIECE - 32) / 64 * 64, (long long)l->c.d);
    if (cudaFuncSetAttribute((const void *)queries_keys_values, limit, most)
        || cudaFuncSetAttribute((const void *)swiglu, limit, most))
        return LAYER_CUDA_FAILED;
    return LAYER_OK;
}

static int prepare(layer *l)
{
    struct layer_args *a = &l->args;
    /* name the tensors to the kernel */
    a->in_norm = l->w.in_norm, a->post_norm = l->w.post_norm;
    a->q = l->w.q, a->k = l->w.k, a->v = l->w.v, a->o = l->w.o;
    a->gate = l->w.gate, a->up = l->w.up, a->down = l->w.down;
    a->k_cache = l->k_cache, a->v_cache = l->v_cache;
    a->d = l->c.d, a->ffn = l->c.ffn, a->hd = (int32_t)l->c.hd;
    a->n_q = (int32_t)l->c.n_q, a->n_kv = (int32_t)l->c.n_kv;
    a->eps = (float)l->c.eps;
    a->score_scale = (float)(1 / sqrt((double)l->c.hd));
    /* send the RoPE angles to the device */
    double turn[64];
    for (int i = 0; i < a->hd / 2; i++)
        turn[i] = pow(l->c.theta, -2.0 * i / (double)a->hd);
    if (cudaMemcpy((void *)a->turn, turn, sizeof(double) * (size_t)a->hd / 2,
                   cudaMemcpyHostToDevice))
        return LAYER_CUDA_FAILED;
    return LAYER_OK;
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

/* several launches: as many blocks as there is work for */
static int64_t blocks_for(const layer *l, int64_t work, int64_t work_of_a_block)
{
    int64_t all = (work + work_of_a_block - 1) / work_of_a_block;
    int64_t most = l->c.max_blocks;
    return most && most < all ? most : all;
}

/* several launches: run a kernel of the layer */
#define RUN(kernel, work, work_of_a_block, threads, shared)                            \
    if (!bad) bad = launch((const void *)kernel, blocks_for(l, work, work_of_a_block), \
                           threads, shared, &args, stream)

/* stage 5: one step */
enum { QKV_THREADS = 32 * 20 };

static int step(layer *l, const void *x, struct position pos, void *x_out,
                cudaStream_t stream)
{
    struct layer_args args = l->args;
    int64_t d = args.d, n_q = args.n_q, n_kv = args.n_kv, hd = args.hd, q = n_q * hd;
    int bad = 0;
    args.x = x, args.pos = pos, args.x_out = x_out;
    RUN(queries_keys_values, l->blocks, 1, QKV_THREADS, shared_bytes(l));
    /* several launches: the launches of attention by tiles */
    int64_t keys = pos.at ? pos.rows : pos.given + 1, tiles = (keys - 1) / SPLIT_KEYS + 1;
    size_t of_queries = (size_t)(n_q / n_kv * (hd + SPLIT_KEYS)) * sizeof(float);
    size_t of_values = (size_t)(SPLIT_KEYS * hd) * sizeof(uint16_t);
    RUN(attend, tiles * n_kv, 1, 512, of_queries + of_values);
    RUN(merge, q / 32, 2, 64, 0);
    RUN(output_projection, d / 2, 8, 256, 0);
    RUN(swiglu, args.pieces, 1, 1024, shared_bytes(l));
    RUN(add_pieces, d / 32, 1, 256, 256 * sizeof(float));
    return bad;
}

/* the host side that stages share */
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
