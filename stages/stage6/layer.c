/* stages/stage6/layer.c: tangled from layer.nw; change it there. */
/* Stage 6, host side: one cooperative launch a step. */
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include "layer.h"

/* one launch: what the kernel is given */
/* a position, given or to be found on the device */
struct position {
    const int64_t *at;   /* device memory, or null */
    int64_t given;       /* the position when at is null */
    int64_t rows;        /* of the cache: valid positions are below */
};

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
    float *roped_q;            /* [n_q * hd] */
    /* the results of the tiles */
    float *split_sum;          /* [n_q][max_splits][hd]: sums of p V, not normalised */
    float *split_max;          /* [n_q][max_splits]: largest score */
    float *split_weight;       /* [n_q][max_splits]: sum of p */
    int32_t max_splits;
    float *attended;           /* [n_q * hd], laid out by slot() */
    float *x1;                 /* [d]: the residual stream after attention */
    float *act;                /* [ffn]: silu(gate) * up, laid out by slot() */
    uint32_t *barrier;         /* arrivals since the layer was built */
    uint32_t *barrier_base;    /* [blocks]: arrivals before this launch */
    /* timers: the marks */
    #ifdef TIMERS
    uint64_t *marks;   /* [blocks][MARKED_WARPS][PHASES][2]: START, END in ns; 0: never */
    #endif
};
enum timed_phase { QKV, ATTEND, MERGE, OUT, GATE_UP, DOWN, PHASES };

void whole_layer(struct layer_args);
enum { BLOCK_THREADS = 512, SPLIT_KEYS = 128 };
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
    size_t shared;                 /* bytes of dynamic shared memory a block */
    unsigned threads;
};

/* take a piece of scratch memory */
static void *take(char **at, size_t bytes)
{
    char *piece = *at;
    *at = (char *)(((uintptr_t)piece + bytes + 255) & ~(uintptr_t)255);
    return piece;
}

/* one launch: divide the scratch memory */
static char *divide_scratch(layer *l, char *at)
{
    struct layer_args *a = &l->args;
    size_t q = (size_t)(l->c.n_q * l->c.hd), f = sizeof(float);
    a->max_splits = (int32_t)((l->c.max_seq_len + SPLIT_KEYS - 1) / SPLIT_KEYS);
    size_t splits = (size_t)l->c.n_q * (size_t)a->max_splits;
    l->status = a->status = take(&at, sizeof(uint32_t));
    a->barrier = take(&at, sizeof(uint32_t));
    a->barrier_base = take(&at, (size_t)l->blocks * sizeof(uint32_t));
    a->turn = take(&at, (size_t)l->c.hd / 2 * sizeof(double));
    a->roped_q = take(&at, q * f);
    a->split_sum = take(&at, splits * (size_t)l->c.hd * f);
    a->split_max = take(&at, splits * f);
    a->split_weight = take(&at, splits * f);
    a->attended = take(&at, q * f);
    a->x1 = take(&at, (size_t)l->c.d * f);
    a->act = take(&at, (size_t)l->c.ffn * f);
    /* timers: room for the marks */
    #ifdef TIMERS
    a->marks = take(&at, (size_t)l->blocks * 32 * PHASES * 2 * sizeof(uint64_t));
    #endif
    return at;
}

/* one launch: describe the layer to the kernel */
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
    /* reserve the shared memory */
    int most, resident;
    size_t numbers = (size_t)(a->d > a->ffn ? a->d : a->ffn);
    size_t q = (size_t)(a->n_q * a->hd), rep = (size_t)(a->n_q / a->n_kv);
    if (numbers < q) numbers = q;
    size_t tile = rep * (size_t)(a->hd + SPLIT_KEYS) + (size_t)(SPLIT_KEYS * a->hd / 2);
    if (numbers < tile) numbers = tile;
    l->shared = (numbers + 32) * sizeof(float), l->threads = BLOCK_THREADS;
    if (cudaDeviceGetAttribute(&most, cudaDevAttrMaxSharedMemoryPerBlockOptin, l->device))
        return LAYER_CUDA_FAILED;
    if (l->shared > (size_t)most) return LAYER_BAD_SHAPE;
    if (cudaFuncSetAttribute((const void *)whole_layer,
                             cudaFuncAttributeMaxDynamicSharedMemorySize, most)
        || cudaOccupancyMaxActiveBlocksPerMultiprocessor(
               &resident, (const void *)whole_layer, (int)l->threads, l->shared))
        return LAYER_CUDA_FAILED;
    if (resident < 1) return LAYER_BAD_SHAPE;
    return LAYER_OK;
}

/* one launch: one step */
static int step(layer *l, const void *x, struct position pos, void *x_out,
                cudaStream_t stream)
{
    struct layer_args args = l->args;
    void *arg = &args;
    args.x = x, args.pos = pos, args.x_out = x_out;
    cudaLaunchAttribute together = { .id = cudaLaunchAttributeCooperative };
    together.val.cooperative = 1;
    cudaLaunchConfig_t config = { .dynamicSmemBytes = l->shared, .stream = stream,
                                  .attrs = &together, .numAttrs = 1 };
    config.gridDim.x = (unsigned)l->blocks, config.gridDim.y = config.gridDim.z = 1;
    config.blockDim.x = l->threads, config.blockDim.y = config.blockDim.z = 1;
    return cudaLaunchKernelExC(&config, (const void *)whole_layer, &arg)
         ? LAYER_CUDA_FAILED : LAYER_OK;
}

/* refuse what no stage can serve */
static int misaligned(const void *p) { return ((uintptr_t)p & 15) != 0; }

static int check_pointers(const layer_weights *w, const void *k_cache,
                          const void *v_cache)
{
    const void *all[] = { w->in_norm, w->post_norm, w->q, w->k, w->v, w->o,
                          w->gate, w->up, w->down, k_cache, v_cache };
    for (size_t i = 0; i < sizeof all / sizeof *all; i++)
        if (!all[i]) return LAYER_BAD_ARGUMENT;
    for (size_t i = 0; i < sizeof all / sizeof *all; i++)
        if (misaligned(all[i])) return LAYER_BAD_ALIGNMENT;
    return LAYER_OK;
}

static int check_shape(const layer_config *c)
{
    int64_t most = 1 << 24;   /* of any one size: products stay far below 2^63 */
    if (c->d <= 0 || c->ffn <= 0 || c->n_q <= 0 || c->n_kv <= 0) return LAYER_BAD_SHAPE;
    if (c->d > most || c->ffn > most || c->n_q > 4096) return LAYER_BAD_SHAPE;
    if (c->max_seq_len <= 0 || c->max_seq_len > most) return LAYER_BAD_SHAPE;
    if (c->hd != 64 && c->hd != 128) return LAYER_BAD_SHAPE;
    if (c->d % 64 || c->ffn % 64) return LAYER_BAD_SHAPE;
    if (c->n_q % c->n_kv || c->n_q / c->n_kv > 16) return LAYER_BAD_SHAPE;
    if (!((float)c->eps > 1e-37f) || !isfinite((float)c->eps)) return LAYER_BAD_SHAPE;
    if (!(c->theta > 0) || !isfinite(c->theta)) return LAYER_BAD_SHAPE;
    if (c->max_blocks < 0) return LAYER_BAD_SHAPE;
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
    return major < 9 ? LAYER_BAD_DEVICE : LAYER_OK;
}

/* claim and clear the scratch memory */
static int claim_scratch(layer *l)
{
    size_t bytes = (size_t)divide_scratch(l, NULL);
    if (cudaMalloc((void **)&l->scratch, bytes)) {
        cudaGetLastError();
        return LAYER_NO_MEMORY;
    }
    divide_scratch(l, l->scratch);
    return cudaMemset(l->scratch, 0, bytes) ? LAYER_CUDA_FAILED : LAYER_OK;
}

/* build a layer */
int layer_build(layer **out, const layer_config *c, const layer_weights *w,
                void *k_cache, void *v_cache)
{
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
    bad = claim_scratch(l);
    if (!bad) bad = prepare(l);
    if (!bad && cudaDeviceSynchronize()) bad = LAYER_CUDA_FAILED;
    if (bad) layer_teardown(l);
    else *out = l;
    return bad;
}

/* the two ways to step */
static int check_step(layer *l, const void *x, const void *x_out)
{
    int device;
    if (!l || !x || !x_out) return LAYER_BAD_ARGUMENT;
    if (misaligned(x) || misaligned(x_out)) return LAYER_BAD_ALIGNMENT;
    if (cudaGetDevice(&device)) return LAYER_CUDA_FAILED;
    return device == l->device ? LAYER_OK : LAYER_BAD_DEVICE;
}

int layer_step(layer *l, const void *x, int64_t pos, void *x_out, cudaStream_t stream)
{
    int bad = check_step(l, x, x_out);
    if (bad) return bad;
    if (pos < 0 || pos >= l->c.max_seq_len) return LAYER_BAD_POSITION;
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
    if (cudaDeviceSynchronize()) return LAYER_CUDA_FAILED;
    if (cudaMemcpy(&status, l->status, sizeof status, cudaMemcpyDeviceToHost))
        return LAYER_CUDA_FAILED;
    return (int)status;
}

/* tear a layer down */
int layer_teardown(layer *l)
{
    if (!l) return LAYER_OK;
    int bad = cudaDeviceSynchronize();
    if (l->scratch && cudaFree(l->scratch)) bad = 1;
    free(l);
    return bad ? LAYER_CUDA_FAILED : LAYER_OK;
}

/* error texts */
const char *layer_strerror(int status)
{
    static const char *text[] = {
        "ok", "a pointer is null", "a device pointer is not 16-byte aligned",
        "sizes not served: hd is 64 or 128, d and ffn are multiples of 64, n_kv "
        "divides n_q, at most 16 query heads a KV head, eps and theta positive",
        "position outside [0, max_seq_len)",
        "wrong device: it must have compute capability 9.0 or later, and be the one "
        "the layer was built on",
        "out of device memory", "the CUDA runtime refused a call",
    };
    int known = status >= 0 && status < (int)(sizeof text / sizeof *text);
    return known ? text[status] : "unknown status";
}

/* timers: hand out the marks */
#ifdef TIMERS
int layer_marks(layer *l, uint64_t *out)   /* out[blocks][32][PHASES][2] on the host */
{
    size_t bytes = (size_t)l->blocks * 32 * PHASES * 2 * sizeof(uint64_t);
    return cudaMemcpy(out, l->args.marks, bytes, cudaMemcpyDeviceToHost)
         ? LAYER_CUDA_FAILED : LAYER_OK;
}
#endif
