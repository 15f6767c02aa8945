/* stages/stage7/layer.c: tangled from layer.nw; change it there. */
/* stage 7: the host side */
/* Stage 7, host side: one cooperative launch a step. */
#include <math.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include "layer.h"

/* stream: what the kernel is given */
/* a position, given or to be found on the device */
struct position {
    const int64_t *at;   /* device memory, or null */
    int64_t given;       /* the position when at is null */
    int64_t rows;        /* of the cache: valid positions are below */
};

/* how many slots, and the keys of a tile */
enum { MAX_WARPS = 7 };    /* consumer warps, and slots, at most */
enum { OPEN = 3 };         /* products of a block that are open at a time */
enum { TILE_KEYS = 64 };   /* keys of a tile */
enum { SHARED_BYTES = 1536 };   /* before the vector, which is before the slots */

/* the phases of the stream */
enum phase { QKV, ATTEND, OUT, GATE_UP, DOWN, PHASES, THE_END = PHASES, NOTHING };

enum {
    LOADER_WARPS = 8,   /* one for each head of a tile */
    LOADERS = 32 * LOADER_WARPS,
    UNIT_TILES = 7,     /* tiles of a unit that have a place at the same time */
    HEADS = 8,          /* query heads that share a tile: with lo, the M of 16 */
    PARTS = 16,         /* pieces of down at most */
    STRIPE = 256,       /* columns that a warp multiplies at once */
    LINE = 32,          /* counters are this many words apart: 128 bytes */
};

/* how the layer is cut into chunks */
struct geometry {
    int64_t slot_bytes, vector_bytes;
    int32_t warps;             /* consumers, each with a slot */
    int32_t pairs[PHASES];     /* rows pairs of a chunk, at most; a power of two */
    int32_t chunks[PHASES];    /* of a phase; of DOWN: of one piece */
    int32_t piece, pieces;     /* columns of down that one chunk spans, and how many */
    int32_t groups, octets;    /* groups: n_kv * octets; octets: of heads a KV head */
    int32_t max_units;         /* splits of a group at most, at any length */
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
    struct geometry g;
    /* scratch memory between the phases */
    float *roped_q;            /* [n_q * hd] */
    float *unit_sum;           /* [groups][max_units][HEADS][hd]: sums of p V */
    float *unit_max;           /* [groups][max_units][HEADS]: largest score */
    float *unit_weight;        /* [groups][max_units][HEADS]: sum of p */
    float *attended;           /* [n_q * hd] */
    float *x1;                 /* [d]: the residual stream after attention */
    float *act;                /* [ffn]: silu(gate) * up */
    float *piece_sum;          /* [pieces][d]: down, a piece of the columns each */
    /* counters between the blocks */
    uint32_t *done;            /* [PHASES][PARTS] * LINE: chunks finished since build */
    uint32_t *launches;        /* [blocks]: steps since build, as this block counts them */
    uint32_t *units_done;      /* [groups] * LINE: shares of units since build */
    uint32_t *pieces_done;     /* [teams][MAX_WARPS]: pieces of this step */
    /* timers: the marks */
    #ifdef TIMERS
    uint64_t *marks;   /* [blocks][MARKED_WARPS][PHASES][2]: START, END in ns; 0: never */
    #endif
};

void whole_layer(struct layer_args);
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
    /* stream: a step as a graph */
    cudaGraph_t graph;             /* its one node is a step */
    cudaGraphNode_t node;
    cudaGraphExec_t exec;          /* null while the layer is built */
    atomic_flag taken;             /* some thread is launching exec */
    int wanted, dependent;         /* dependent launches: asked for; made from now on */
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

/* stream: cut the layer into chunks */
static int64_t larger(int64_t a, int64_t b) { return a > b ? a : b; }

static int32_t pairs_of(int64_t slot_bytes, int64_t columns, int64_t divides)
{
    int32_t pairs = 4;
    while (pairs > 1 && (4 * pairs * columns > slot_bytes || divides % pairs))
        pairs /= 2;
    return pairs;
}

static int32_t chunks_of(int64_t pairs, int32_t pairs_of_chunk)
{
    return (int32_t)((pairs + pairs_of_chunk - 1) / pairs_of_chunk);
}

static void cut(struct geometry *g, const layer_config *c)
{
    int64_t q = c->n_q * c->hd, rep = c->n_q / c->n_kv;
    int64_t widest = larger(larger(c->d, q), (c->ffn / 64 + PARTS - 1) / PARTS * 64);
    g->pieces = (int32_t)((c->ffn + widest - 1) / widest);
    g->piece = (int32_t)((c->ffn + g->pieces * 64 - 1) / (g->pieces * 64) * 64);
    g->pieces = (int32_t)((c->ffn + g->piece - 1) / g->piece);
    g->vector_bytes = larger(4 * ((widest + STRIPE - 1) / STRIPE * STRIPE),
                             4 * UNIT_TILES * HEADS * c->hd + 4 * HEADS * c->hd);
    g->octets = (int32_t)((rep + HEADS - 1) / HEADS);
    g->groups = (int32_t)c->n_kv * g->octets;
    g->max_units = g->groups < 128 ? 128 / g->groups : 1;
    /* count the pairs and chunks of each product */
    int64_t columns[PHASES] = { [QKV] = c->d, [OUT] = q, [GATE_UP] = c->d,
                                [DOWN] = g->piece };
    g->slot_bytes = 4 * TILE_KEYS * c->hd;
    for (int p = QKV; p < PHASES; p++) {
        if (p == ATTEND) continue;
        g->pairs[p] = pairs_of(32768, columns[p], p == QKV ? c->hd / 2 : 4);
        g->slot_bytes = larger(g->slot_bytes, 4 * g->pairs[p] * columns[p]);
    }
    /* count the chunks of each product */
    g->chunks[QKV] = chunks_of((c->n_q + 2 * c->n_kv) * c->hd / 2, g->pairs[QKV]);
    g->chunks[OUT] = chunks_of(c->d / 2, g->pairs[OUT]);
    g->chunks[GATE_UP] = chunks_of(c->ffn, g->pairs[GATE_UP]);
    g->chunks[DOWN] = chunks_of(c->d / 2, g->pairs[DOWN]);
}

/* stream: see whether the layer fits */
static int share_out(layer *l)   /* the shared memory of a block */
{
    struct layer_args *a = &l->args;
    /* stream: as many slots as fit */
    int most, resident;
    const void *kernel = (const void *)whole_layer;
    if (cudaDeviceGetAttribute(&most, cudaDevAttrMaxSharedMemoryPerBlockOptin, l->device))
        return LAYER_CUDA_FAILED;
    int64_t slots = (most - SHARED_BYTES - a->g.vector_bytes) / a->g.slot_bytes;
    if (slots < 2)
        return refused(LAYER_BAD_SHAPE, "the largest of d, n_q * hd and ffn / %d, in whole "
                       "%ds, must be at most %d on this device, and is %lld", PARTS,
                       STRIPE, (most - SHARED_BYTES) / 12 / STRIPE * STRIPE,
                       (long long)a->g.vector_bytes / 4);
    a->g.warps = (int32_t)(slots < MAX_WARPS ? slots : MAX_WARPS);
    l->shared = (size_t)(SHARED_BYTES + a->g.vector_bytes + a->g.warps * a->g.slot_bytes);
    l->threads = 32u * (unsigned)(a->g.warps + LOADER_WARPS + 1);
    if (cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, most)
        || cudaOccupancyMaxActiveBlocksPerMultiprocessor(&resident, kernel,
                                                         (int)l->threads, l->shared))
        return LAYER_CUDA_FAILED;
    /* refuse a grid that is not resident as a whole */
    if (resident < 1)
        return refused(LAYER_BAD_DEVICE, "a block of %u threads and %zu bytes of shared "
                       "memory does not fit on a multiprocessor", l->threads, l->shared);
    return LAYER_OK;
}

/* stream: how steps are to be launched */
static int read_environment(layer *l)
{
    const char *given = getenv("LAYER_DEPENDENT");
    l->wanted = given && !strcmp(given, "1");
    if (!given || !*given || l->wanted || !strcmp(given, "0")) return LAYER_OK;
    return refused(LAYER_BAD_ARGUMENT, "the environment's LAYER_DEPENDENT must be 0 or "
                   "1, and is '%s'", given);
}

static int fit(layer *l)
{
    int bad = read_environment(l);
    if (bad) return bad;
    cut(&l->args.g, &l->c);
    return share_out(l);
}

/* stream: divide the scratch memory */
static char *divide_scratch(layer *l, char *at)
{
    struct layer_args *a = &l->args;
    struct geometry *g = &a->g;
    size_t q = (size_t)(l->c.n_q * l->c.hd), f = sizeof(float), u = sizeof(uint32_t);
    size_t units = (size_t)g->groups * (size_t)g->max_units * HEADS;
    l->status = a->status = take(&at, u);
    a->done = take(&at, (size_t)PHASES * PARTS * LINE * u);
    a->launches = take(&at, (size_t)l->blocks * u);
    a->units_done = take(&at, (size_t)g->groups * LINE * u);
    a->pieces_done = take(&at, (size_t)l->blocks * MAX_WARPS * u);
    a->turn = take(&at, (size_t)l->c.hd / 2 * sizeof(double));
    a->roped_q = take(&at, q * f);
    a->unit_sum = take(&at, units * (size_t)l->c.hd * f);
    a->unit_max = take(&at, units * f);
    a->unit_weight = take(&at, units * f);
    a->attended = take(&at, q * f);
    a->x1 = take(&at, (size_t)l->c.d * f);
    a->act = take(&at, (size_t)l->c.ffn * f);
    a->piece_sum = take(&at, (size_t)g->pieces * (size_t)l->c.d * f);
    /* timers: room for the marks */
    #ifdef TIMERS
    a->marks = take(&at, (size_t)l->blocks * 32 * PHASES * 2 * sizeof(uint64_t));
    #endif
    return at;
}

/* stream: one step */
/* see whether the grid starts */
static int step(layer *l, const void *x, struct position pos, void *x_out,
                cudaStream_t stream);

static int try_grid(layer *l)
{
    struct position none = { NULL, -1, l->c.max_seq_len };
    void *nowhere = l->args.x1;
    if (!step(l, nowhere, none, nowhere, NULL))   /* then forget that pos was bad */
        return cudaMemset(l->status, 0, sizeof *l->status)
             ? LAYER_CUDA_FAILED : LAYER_OK;
    if (cudaPeekAtLastError() != cudaErrorCooperativeLaunchTooLarge)
        return LAYER_CUDA_FAILED;
    return refused(LAYER_BAD_DEVICE, "%d blocks of %u threads and %zu bytes of shared "
                   "memory must be resident at once: %s", l->blocks, l->threads,
                   l->shared, cudaGetErrorString(cudaGetLastError()));
}

static struct cudaKernelNodeParams node_params(const layer *l, void **args)
{
    struct cudaKernelNodeParams p = { .func = (void *)whole_layer };
    p.gridDim.x = (unsigned)l->blocks, p.gridDim.y = p.gridDim.z = 1;
    p.blockDim.x = l->threads, p.blockDim.y = p.blockDim.z = 1;
    p.sharedMemBytes = (unsigned)l->shared;
    p.kernelParams = args;
    return p;
}

static int make_graph(layer *l)
{
    void *args = &l->args;
    struct cudaKernelNodeParams p = node_params(l, &args);
    cudaLaunchAttributeValue together = { .cooperative = 1 };
    atomic_flag_clear(&l->taken);
    return cudaGraphCreate(&l->graph, 0)
        || cudaGraphAddKernelNode(&l->node, l->graph, NULL, 0, &p)
        || cudaGraphKernelNodeSetAttribute(l->node, cudaLaunchAttributeCooperative,
                                           &together)
        || cudaGraphInstantiateWithFlags(&l->exec, l->graph, 0)
         ? LAYER_CUDA_FAILED : LAYER_OK;
}

static int launch_graph(layer *l, struct layer_args *args, cudaStream_t stream)
{
    void *arg = args;
    struct cudaKernelNodeParams p = node_params(l, &arg);
    return cudaGraphExecKernelNodeSetParams(l->exec, l->node, &p)
        || cudaGraphLaunch(l->exec, stream) ? LAYER_CUDA_FAILED : LAYER_OK;
}

static int launch_kernel(const layer *l, struct layer_args *args, cudaStream_t stream)
{
    void *arg = args;
    cudaLaunchAttribute how = { .id = cudaLaunchAttributeCooperative };
    how.val.cooperative = 1;
    /* stream: or a dependent launch */
    if (l->dependent) {
        how.id = cudaLaunchAttributeProgrammaticStreamSerialization;
        how.val.programmaticStreamSerializationAllowed = 1;
    }
    cudaLaunchConfig_t config = { .dynamicSmemBytes = l->shared, .stream = stream,
                                  .attrs = &how, .numAttrs = 1 };
    config.gridDim.x = (unsigned)l->blocks, config.gridDim.y = config.gridDim.z = 1;
    config.blockDim.x = l->threads, config.blockDim.y = config.blockDim.z = 1;
    return cudaLaunchKernelExC(&config, (const void *)whole_layer, &arg)
         ? LAYER_CUDA_FAILED : LAYER_OK;
}

static int step(layer *l, const void *x, struct position pos, void *x_out,
                cudaStream_t stream)
{
    struct layer_args args = l->args;
    args.x = x, args.pos = pos, args.x_out = x_out;
    enum cudaStreamCaptureStatus capture = cudaStreamCaptureStatusNone;
    if (l->exec && cudaStreamIsCapturing(stream, &capture)) return LAYER_CUDA_FAILED;
    if (!l->exec || capture || atomic_flag_test_and_set(&l->taken))
        return launch_kernel(l, &args, stream);
    int bad = launch_graph(l, &args, stream);
    atomic_flag_clear(&l->taken);
    return bad;
}

static int choose_launch(layer *l)   /* after the trial */
{
    l->dependent = l->wanted;
    return l->dependent ? LAYER_OK : make_graph(l);
}

/* stream: describe the layer to the kernel */
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
    int bad = try_grid(l);
    return bad ? bad : choose_launch(l);
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

/* stream: tear a layer down */
/* stream: drop the graph */
static int drop_graph(layer *l)
{
    int bad = l->exec && cudaGraphExecDestroy(l->exec);
    if (l->graph && cudaGraphDestroy(l->graph)) bad = 1;
    return bad;
}

int layer_teardown(layer *l)
{
    int before;
    if (!l) return LAYER_OK;
    int bad = cudaGetDevice(&before) || cudaSetDevice(l->device);
    if (cudaDeviceSynchronize()) bad = 1;
    if (drop_graph(l)) bad = 1;
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

/* timers: hand out the marks */
#ifdef TIMERS
int layer_marks(layer *l, uint64_t *out)   /* out[blocks][32][PHASES][2] on the host */
{
    size_t bytes = (size_t)l->blocks * 32 * PHASES * 2 * sizeof(uint64_t);
    return cudaMemcpy(out, l->args.marks, bytes, cudaMemcpyDeviceToHost)
         ? LAYER_CUDA_FAILED : LAYER_OK;
}
#endif

/* age the counters, in tests */
#ifdef AGEING
int layer_age(layer *l, uint32_t times);
int layer_age(layer *l, uint32_t times)   /* steps so far: so many times as many */
{
    size_t bytes = (size_t)((char *)l->args.turn - (char *)l->status);
    uint32_t *words = malloc(bytes);
    if (!words) return LAYER_NO_MEMORY;
    int bad = cudaDeviceSynchronize()
           || cudaMemcpy(words, l->status, bytes, cudaMemcpyDeviceToHost);
    for (size_t i = 0; !bad && i < bytes / sizeof *words; i++) words[i] *= times;
    if (!bad) bad = cudaMemcpy(l->status, words, bytes, cudaMemcpyHostToDevice);
    free(words);
    return bad ? LAYER_CUDA_FAILED : LAYER_OK;
}
#endif
