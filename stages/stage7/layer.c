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

/* stream: the sizes of the ring */
enum {
    HALF = 16384,         /* bytes of half a slot at most, and of one bulk copy */
    MAX_SLOTS = 6,        /* of two halves */
    TILE_KEYS = 64,       /* keys of a tile */
    SUMS = 8,             /* chunks whose sums wait for the epilogue */
    DELIVERERS = 8,       /* warps that contribute to the sums of a chunk */
    MORE_SHARED = 0,      /* bytes of shared memory besides */
};

/* the phases of the stream */
enum phase { QKV, ATTEND, OUT, GATE_UP, DOWN, PHASES };

enum {
    WIDEST = 8192,        /* columns of a product that a block multiplies at once */
    HEADS = 8,            /* query heads that share a tile */
    MAX_SPLITS = 32,      /* of the keys of a group */
    BATCH = 64,           /* pairs whose sums a block keeps */
};

/* how the layer is cut into chunks */
struct product {
    int32_t columns, piece;    /* of a row, and of one piece of it */
    int32_t pieces;            /* more than one only where a chunk is one pair */
    int32_t wide;              /* a lane has 32 columns; else 16 */
    int32_t across, bits;      /* warps that share a row: 8, or 4, 2, 1; 2^bits */
    int32_t pairs, chunks;     /* pairs of a chunk; chunks in all */
    int32_t each, extra;       /* chunks of a block; blocks that have one more */
    int32_t open;              /* halves of it that a producer has under way at most */
};

struct geometry {
    struct product p[PHASES];  /* ATTEND: the chunks of QKV that are queries, dealt */
    int32_t slots, half;       /* of the ring; bytes of half a slot */
    int32_t groups, octets;    /* groups: n_kv * octets; octets of heads a KV head */
    int32_t splits, bits;      /* of each group's keys: 2^bits, 2 to MAX_SPLITS */
    int32_t open_tiles;        /* halves of tiles under way at most */
};

/* stream: what the warps of a block share */
struct pair { float low, high; };   /* sums of the two rows of a pair */

enum {
    CONSUMERS = 8, ATTENTION = 4,   /* warps */
    EPILOGUE = CONSUMERS + ATTENTION, PRODUCERS, BLOCK_WARPS = 16,
    DELIVERED = 16,     /* numbers that the consumers make of each half of a chunk */
};

struct shared {
    uint64_t full[2][MAX_SLOTS];    /* mbarriers: the bytes of a half have arrived */
    uint64_t empty[MAX_SLOTS];      /* a slot has been read */
    uint64_t delivered[SUMS], taken[SUMS];   /* the sums of a chunk */
    uint64_t tiles_begin, tiles_over;        /* the run of tiles, in the stream */
    struct pair sum[SUMS][DELIVERED];   /* [pair of the chunk][warp across] */
    struct pair batch[BATCH];       /* sums of the pieces so far */
    float squares[PHASES][CONSUMERS];        /* of the vector of QKV and GATE_UP */
    float cosine[64], sine[64];     /* of the rotation by pos */
    float unit_max[ATTENTION][HEADS], unit_weight[ATTENTION][HEADS];
    float unit_sum[ATTENTION][HEADS][128 + 4] __attribute__((aligned(16)));
};
enum { SHARED_BYTES = (sizeof(struct shared) + MORE_SHARED + 127) / 128 * 128 };

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
    /* what blocks hand to each other */
    uint32_t *launches;        /* [blocks]: steps since build, as this block counts them */
    uint32_t *hints;           /* [number of hints] * LINE: words stored since build */
    /* words of single precision whose low bits are the epoch */
    uint32_t *roped_q;         /* [n_q * hd] */
    uint32_t *new_k, *new_v;   /* [n_kv * hd]: the rows of this step, rounded to bf16 */
    uint32_t *unit_sum;        /* [groups][splits][HEADS][hd]: sums of p V */
    uint32_t *unit_max;        /* [groups][splits][HEADS]: largest score, base 2 */
    uint32_t *unit_weight;     /* [groups][splits][HEADS]: sum of p */
    uint32_t *attended;        /* [n_q * hd] */
    uint32_t *x1;              /* [d]: the residual stream after attention */
    uint32_t *act;             /* [ffn]: silu(gate) * up */
    int32_t first_hint[6];     /* of each kind; see enum hint */
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
static void cut_product(struct product *p, int64_t columns, int64_t pairs, int blocks)
{
    p->columns = (int32_t)columns;
    p->pieces = (int32_t)((columns + WIDEST - 1) / WIDEST);
    p->piece = (int32_t)((columns + p->pieces * 64 - 1) / (p->pieces * 64) * 64);
    p->pieces = (int32_t)((columns + p->piece - 1) / p->piece);
    p->wide = p->piece > WIDEST / 2;
    p->bits = 3;
    while (!p->wide && p->bits && p->piece << 1 <= 512 << p->bits) p->bits--;
    p->across = 1 << p->bits;
    p->pairs = p->wide ? 1 : 16 / p->across;
    p->chunks = (int32_t)(pairs / p->pairs);
    p->each = p->chunks / blocks, p->extra = p->chunks % blocks;
}

static void cut(struct geometry *g, const layer_config *c, int blocks)
{
    int64_t q = c->n_q * c->hd, rep = c->n_q / c->n_kv;
    cut_product(g->p + QKV, c->d, (c->n_q + 2 * c->n_kv) * c->hd / 2, blocks);
    cut_product(g->p + ATTEND, c->d, q / 2, blocks);
    cut_product(g->p + OUT, q, c->d / 2, blocks);
    cut_product(g->p + GATE_UP, c->d, c->ffn, blocks);
    cut_product(g->p + DOWN, c->ffn, c->d / 2, blocks);
    g->octets = (int32_t)((rep + HEADS - 1) / HEADS);
    g->groups = (int32_t)c->n_kv * g->octets;
    for (g->bits = 5; g->bits > 1 && g->groups << g->bits > 128;) g->bits--;
    g->splits = 1 << g->bits;
}

enum { IN_FLIGHT = 65536 };   /* bytes of both producers */

static int32_t open_halves(int64_t bytes, int32_t slots)   /* of so many bytes, each */
{
    int64_t most = IN_FLIGHT / 2 / bytes;
    if (most > slots - 1) most = slots - 1;
    return (int32_t)(most < 1 ? 1 : most);
}

/* stream: the bytes of half a slot */
static int32_t half_bytes(const layer *l) { (void)l; return HALF; }

static void limit_flight(layer *l)
{
    struct geometry *g = &l->args.g;
    for (int p = QKV; p < PHASES; p++)
        g->p[p].open = open_halves(2 * g->p[p].pairs * g->p[p].piece, g->slots);
    g->open_tiles = open_halves(2 * TILE_KEYS * l->c.hd, g->slots);
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
    a->g.half = half_bytes(l);
    int32_t slots = (most - (int32_t)SHARED_BYTES) / (2 * a->g.half);
    a->g.slots = slots < MAX_SLOTS ? slots : MAX_SLOTS;
    if (slots < 2)
        return refused(LAYER_BAD_DEVICE, "a block needs %d bytes of shared memory, and may "
                       "have %d", (int)SHARED_BYTES + 4 * a->g.half, most);
    l->shared = (size_t)(SHARED_BYTES + a->g.slots * 2 * a->g.half);
    l->threads = 32 * BLOCK_WARPS;
    limit_flight(l);
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
    struct layer_args *a = &l->args;
    int bad = read_environment(l);
    if (bad) return bad;
    /* name the tensors to the kernel */
    a->in_norm = l->w.in_norm, a->post_norm = l->w.post_norm;
    a->q = l->w.q, a->k = l->w.k, a->v = l->w.v, a->o = l->w.o;
    a->gate = l->w.gate, a->up = l->w.up, a->down = l->w.down;
    a->k_cache = l->k_cache, a->v_cache = l->v_cache;
    a->d = l->c.d, a->ffn = l->c.ffn, a->hd = (int32_t)l->c.hd;
    a->n_q = (int32_t)l->c.n_q, a->n_kv = (int32_t)l->c.n_kv;
    a->eps = (float)l->c.eps;
    a->score_scale = (float)(1 / sqrt((double)l->c.hd));
    cut(&a->g, &l->c, l->blocks);
    return share_out(l);
}

/* stream: divide the scratch memory */
static int32_t slices(int64_t columns) { return (int32_t)((columns + 1023) / 1024); }

static int32_t number_hints(struct layer_args *a)
{
    int32_t n = 0, kinds[] = { a->n_kv, a->n_q, a->g.groups, slices(a->n_q * a->hd),
                               slices(a->d), slices(a->ffn) };   /* as in enum hint */
    for (int i = 0; i < 6; i++) a->first_hint[i] = n, n += kinds[i];
    return n;
}

static char *divide_scratch(layer *l, char *at)
{
    struct layer_args *a = &l->args;
    size_t u = sizeof(uint32_t), q = (size_t)(a->n_q * a->hd) * u;
    size_t kv = (size_t)(a->n_kv * a->hd) * u;
    size_t units = (size_t)(a->g.groups * a->g.splits) * HEADS * u;
    l->status = a->status = take(&at, u);
    a->launches = take(&at, (size_t)l->blocks * u);
    a->hints = take(&at, (size_t)number_hints(a) * 128);
    a->turn = take(&at, (size_t)a->hd / 2 * sizeof(double));
    a->roped_q = take(&at, q), a->attended = take(&at, q);
    a->new_k = take(&at, kv), a->new_v = take(&at, kv);
    a->unit_sum = take(&at, units * (size_t)a->hd);
    a->unit_max = take(&at, units), a->unit_weight = take(&at, units);
    a->x1 = take(&at, (size_t)a->d * u), a->act = take(&at, (size_t)a->ffn * u);
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
