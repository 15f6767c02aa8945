/* stages/stage6/kernels.cu: tangled from layer.nw; change it there. */
/* Stage 6: the whole layer in one cooperative launch, phases between grid barriers. */
#include <stdint.h>
#include <math.h>
#ifdef __CUDACC__
/* device: common */
#include <stdint.h>
#include <stddef.h>
#include <string.h>
#define DEVICE __device__ __forceinline__
#define APART static __device__ __noinline__   // with registers of its own
#define KERNEL extern "C" __global__ void
#define THREADS(n) __launch_bounds__(n, 1)
#define IN_PLACE __grid_constant__   // an argument that is never copied
#define PRAGMA(words) _Pragma(#words)
#define UNROLL(n) PRAGMA(unroll n)
#define CPU_KERNEL(name, argument)

/* device: sixteen bytes, and the bits of a float */
typedef struct bits128 {
    uint32_t v[4];
} __attribute__((aligned(16))) bits128;

DEVICE uint32_t f32_bits(float f)
{
    uint32_t bits;
    memcpy(&bits, &f, sizeof bits);
    return bits;
}

DEVICE float bits_f32(uint32_t bits)
{
    float f;
    memcpy(&f, &bits, sizeof f);
    return f;
}

/* device: bfloat16 */
DEVICE float bf16_to_f32(uint16_t h)
{
    return bits_f32((uint32_t)h << 16);
}
DEVICE uint16_t f32_to_bf16(float f)
{
    uint32_t bits = f32_bits(f);
    if ((bits & 0x7fffffffu) > 0x7f800000u)
        return (uint16_t)(bits >> 16 | 0x40u);
    return (uint16_t)((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16);
}

DEVICE char *shared_memory(void)
{
    extern __shared__ __align__(1024) char dynamic_shared[];
    return dynamic_shared;
}
DEVICE uint32_t shared_address(const void *p)
{
    return (uint32_t)__cvta_generic_to_shared(p);
}

/* PTX: warps */
DEVICE float shfl_xor_f32(float x, int mask)
{
    return __shfl_xor_sync(0xffffffffu, x, mask);
}
DEVICE uint32_t shfl_xor_u32(uint32_t x, int mask)
{
    return __shfl_xor_sync(0xffffffffu, x, mask);
}

DEVICE float shfl_f32(float x, int lane)
{
    return __shfl_sync(0xffffffffu, x, lane);
}
DEVICE uint32_t shfl_u32(uint32_t x, int lane)
{
    return __shfl_sync(0xffffffffu, x, lane);
}

DEVICE uint32_t ballot(int predicate)
{
    return __ballot_sync(0xffffffffu, predicate);
}

/* PTX: atomics */
DEVICE uint32_t atomic_add_relaxed(uint32_t *p, uint32_t v)
{
    uint32_t old;
    asm volatile("atom.relaxed.gpu.global.add.u32 %0, [%1], %2;"
                 : "=r"(old) : "l"(p), "r"(v) : "memory");
    return old;
}

DEVICE uint32_t atomic_add_release(uint32_t *p, uint32_t v)
{
    uint32_t old;
    asm volatile("atom.release.gpu.global.add.u32 %0, [%1], %2;"
                 : "=r"(old) : "l"(p), "r"(v) : "memory");
    return old;
}

DEVICE uint32_t atomic_add_acq_rel(uint32_t *p, uint32_t v)
{
    uint32_t old;
    asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], %2;"
                 : "=r"(old) : "l"(p), "r"(v) : "memory");
    return old;
}

/* PTX: loads and stores with an order */
/* PTX: one word, relaxed */
#ifndef RELAXED_WORD
#define RELAXED_WORD 4 // bytes
DEVICE uint32_t load_relaxed(const uint32_t *p)
{
    uint32_t v;
    asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];"
                 : "=r"(v) : "l"(p) : "memory");
    return v;
}
DEVICE void store_relaxed(uint32_t *p, uint32_t v)
{
    asm volatile("st.relaxed.gpu.global.u32 [%0], %1;" ::"l"(p), "r"(v) : "memory");
}
#endif

DEVICE uint32_t load_acquire(const uint32_t *p)
{
    uint32_t v;
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];"
                 : "=r"(v) : "l"(p) : "memory");
    return v;
}

DEVICE void store_release(uint32_t *p, uint32_t v)
{
    asm volatile("st.release.gpu.global.u32 [%0], %1;" ::"l"(p), "r"(v) : "memory");
}
DEVICE void fence_gpu(void)
{
    asm volatile("fence.acq_rel.gpu;" ::: "memory");
}

/* PTX: wait until a counter has come far enough */
#ifdef DEBUG_SPINS
/* PTX: spins that end */
#ifndef SPIN_LIMIT
#define SPIN_LIMIT 2000000000ull // ns
#include <stdio.h>
DEVICE uint64_t spin_ns(void)
{
    uint64_t t;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(t));
    return t;
}

static __device__ __noinline__ void spin_failed(const char *what, const void *p,
                                                uint32_t wanted, uint32_t found)
{
    printf("block %u thread %u waits for %s at %p: wanted %u, found %u\n",
           blockIdx.x, threadIdx.x, what, p, wanted, found);
    asm volatile("trap;");
}
#endif
#endif
DEVICE void wait_at_least(const uint32_t *p, uint32_t v)
{
#ifdef DEBUG_SPINS
    uint64_t start = spin_ns();
#endif
    while ((int32_t)(load_acquire(p) - v) < 0) {
#ifdef DEBUG_SPINS
        if (spin_ns() - start > SPIN_LIMIT)
            spin_failed("a counter", p, v, load_relaxed(p));
#endif
    }
}

/* PTX: loads */
DEVICE bits128 load_stream(const void *p)
{
    bits128 x;
    asm volatile("ld.global.nc.L1::no_allocate.L2::256B.v4.u32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(x.v[0]), "=r"(x.v[1]), "=r"(x.v[2]), "=r"(x.v[3])
                 : "l"(p));
    return x;
}

DEVICE bits128 load_16(const void *p)
{
    uint4 u = *(const uint4 *)p;
    bits128 x = {{u.x, u.y, u.z, u.w}};
    return x;
}
#else
#include "device.h"
#endif

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

/* timers: mark a moment */
#ifdef TIMERS
/* timers: write a mark */
#ifdef __CUDACC__
/* PTX: timers */
DEVICE uint64_t device_ns(void)
{
    uint64_t t;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(t));
    return t;
}
#endif
enum { MARKED_WARPS = 32 };   /* of a block, at most */
enum when { START, END };

DEVICE void mark(uint64_t *marks, int when, int phase)
{
    int64_t warp = (int64_t)blockIdx.x * MARKED_WARPS + threadIdx.x / 32;
    if (threadIdx.x % 32 == 0) marks[(warp * PHASES + phase) * 2 + when] = device_ns();
}
#define MARK(a, when, phase) mark((a)->marks, when, phase)
#else
#define MARK(a, when, phase) ((void)0)
#endif
#define TIMED(a, phase, work) \
    do { MARK(a, START, phase); work; MARK(a, END, phase); } while (0)

/* a position that is valid, or -1 */
DEVICE int64_t position(struct position p)
{
    int64_t pos = p.at ? *p.at : p.given;
    return pos >= 0 && pos < p.rows ? pos : -1;
}

/* add up one value of every thread in a block */
DEVICE float warp_sum(float v)
{
    for (int m = 16; m; m >>= 1) v += shfl_xor_f32(v, m);
    return v;
}

DEVICE float block_sum(float v, float *shared)   /* shared[32] */
{
    int warps = (int)blockDim.x / 32;
    v = warp_sum(v);
    __syncthreads();                             /* shared may still be read */
    if (threadIdx.x % 32 == 0) shared[threadIdx.x / 32] = v;
    __syncthreads();
    v = 0;
    for (int w = 0; w < warps; w++) v += shared[w];
    return v;
}

/* the grid barrier */
DEVICE void grid_barrier(uint32_t *barrier, uint32_t *arrivals)
{
    *arrivals += gridDim.x;
    __syncthreads();
    if (threadIdx.x == 0) {
        atomic_add_release(barrier, 1);
        wait_at_least(barrier, *arrivals);
    }
    __syncthreads();
}

/* a vector in shared memory, laid out for 16-byte weight loads */
DEVICE int64_t slot(int64_t i, int64_t n)
{
    return (i / 8) * 4 + i % 4 + (i & 4 ? n / 2 : 0);
}

/* eight loads of each row in flight */
enum { AHEAD = 8 };   /* 16-byte loads of each row in flight */

/* two dot products at once */
struct four { float v[4]; } __attribute__((aligned(16)));   /* read as 16 bytes */

DEVICE float dot8(bits128 w, const float *low, const float *high, float sum)
{
    struct four x = *(const struct four *)low, y = *(const struct four *)high;
    for (int i = 0; i < 2; i++) {
        sum = fmaf(bits_f32(w.v[i] << 16), x.v[2 * i], sum);
        sum = fmaf(bits_f32(w.v[i] & 0xffff0000u), x.v[2 * i + 1], sum);
    }
    for (int i = 0; i < 2; i++) {
        sum = fmaf(bits_f32(w.v[2 + i] << 16), y.v[2 * i], sum);
        sum = fmaf(bits_f32(w.v[2 + i] & 0xffff0000u), y.v[2 * i + 1], sum);
    }
    return sum;
}

DEVICE void dot_pair(const uint16_t *row_a, const uint16_t *row_b, const float *x,
                     int64_t n, float *sum_a, float *sum_b)
{
    const bits128 zero = {{0, 0, 0, 0}};
    float a = 0, b = 0;
    for (int64_t i = threadIdx.x % 32 * 8; i < n; i += 256 * AHEAD) {
        bits128 wa[AHEAD], wb[AHEAD];
        for (int u = 0; u < AHEAD; u++) {
            int inside = i + 256 * u < n;
            wa[u] = inside ? load_stream(row_a + i + 256 * u) : zero;
            wb[u] = inside ? load_stream(row_b + i + 256 * u) : zero;
        }
        for (int u = 0; u < AHEAD; u++) {
            /* multiply what was loaded, where the vector goes on */
            const float *low = x + (i + 256 * u) / 2;
            if (i + 256 * u >= n) break;
            a = dot8(wa[u], low, low + n / 2, a);
            b = dot8(wb[u], low, low + n / 2, b);
        }
    }
    *sum_a = warp_sum(a);
    *sum_b = warp_sum(b);
}

/* RoPE of one pair */
DEVICE void rotate(float *low, float *high, int64_t pos, double turn)
{
    double turns = (double)pos * turn * 0.15915494309189533577;   /* 1 / 2 pi */
    float x = (float)(2 * (turns - rint(turns)));                 /* within -1 .. 1 */
    float c = cospif(x), s = sinpif(x), a = *low, b = *high;
    *low = a * c - b * s;
    *high = b * c + a * s;
}

/* one launch: the phases */
/* a block norms the input for itself */
/* norm a vector */
/* eight numbers at a time */
struct eight { struct four v[2]; };

DEVICE struct eight eight_bf16(const uint16_t *p)
{
    bits128 b = load_16(p);
    struct eight x;
    for (int i = 0; i < 4; i++) {
        x.v[i / 2].v[i % 2 * 2] = bits_f32(b.v[i] << 16);
        x.v[i / 2].v[i % 2 * 2 + 1] = bits_f32(b.v[i] & 0xffff0000u);
    }
    return x;
}

DEVICE struct eight eight_f32(const float *p)
{
    struct eight x = {{ *(const struct four *)p, *(const struct four *)(p + 4) }};
    return x;
}

DEVICE void norm_vector(const uint16_t *narrow, const float *wide,
                        const uint16_t *weight, float *h, int64_t d, float eps,
                        float *shared)
{
    float sum = 0;
    for (int64_t i = threadIdx.x * 8; i < d; i += blockDim.x * 8) {
        struct eight x = narrow ? eight_bf16(narrow + i) : eight_f32(wide + i);
        struct eight w = eight_bf16(weight + i);
        /* square the numbers and weigh them */
        for (int j = 0; j < 8; j++) {
            float v = x.v[j / 4].v[j % 4];
            sum = fmaf(v, v, sum);
            x.v[j / 4].v[j % 4] = v * w.v[j / 4].v[j % 4];
        }
        *(struct four *)(h + i / 2) = x.v[0];
        *(struct four *)(h + d / 2 + i / 2) = x.v[1];
    }
    float scale = rsqrtf(block_sum(sum, shared) / (float)d + eps);
    for (int64_t i = threadIdx.x * 8; i < d; i += blockDim.x * 8) {
        struct four *low = (struct four *)(h + i / 2);   /* as this thread left it */
        struct four *high = (struct four *)(h + d / 2 + i / 2);
        for (int j = 0; j < 4; j++) low->v[j] *= scale, high->v[j] *= scale;
    }
    __syncthreads();
}

DEVICE float *normed_input(const struct layer_args *a)   /* shared h[d] */
{
    float *shared = (float *)shared_memory(), *h = shared + 32;
    norm_vector(a->x, NULL, a->in_norm, h, a->d, a->eps, shared);
    return h;
}

/* the share of a warp */
DEVICE int first_unit(void)   /* of this warp; units are dealt out warp by warp */
{
    return (int)(threadIdx.x / 32 * gridDim.x + blockIdx.x);
}

DEVICE int unit_step(void)
{
    return (int)(gridDim.x * (blockDim.x / 32));
}


/* project queries, keys and values */
DEVICE void project_qkv(const struct layer_args *a, const float *h, int64_t pos)
{
    int half = a->hd / 2, units = (a->n_q + 2 * a->n_kv) * half;
    for (int u = first_unit(); u < units; u += unit_step()) {
        int head = u / half, i = u % half;
        /* find the rows of pair i of this head */
        int is_q = head < a->n_q, is_k = !is_q && head < a->n_q + a->n_kv;
        int local = is_q ? head : (head - a->n_q) % a->n_kv;
        const uint16_t *W = is_q ? a->q : is_k ? a->k : a->v;
        const uint16_t *row = W + (int64_t)(local * a->hd + i) * a->d;
        float low, high;
        dot_pair(row, row + half * a->d, h, a->d, &low, &high);
        if (threadIdx.x % 32 == 0) {
            /* rotate the pair and put it where attention finds it */
            if (is_q || is_k) rotate(&low, &high, pos, a->turn[i]);
            int64_t at = (local * a->pos.rows + pos) * a->hd + i;
            if (is_q) {
                a->roped_q[local * a->hd + i] = low;
                a->roped_q[local * a->hd + i + half] = high;
            } else {
                uint16_t *cache = is_k ? a->k_cache : a->v_cache;
                cache[at] = f32_to_bf16(low);
                cache[at + half] = f32_to_bf16(high);
            }
        }
    }
}

/* attend the keys tile by tile */
enum { SPLIT_KEYS = 128 };

/* copy into shared memory */
enum { PIECES_AHEAD = 4 };   /* 16-byte loads of a thread in flight */

DEVICE void copy_in(void *to, const void *from, int64_t bytes)
{
    const bits128 *in = (const bits128 *)from;
    bits128 *out = (bits128 *)to, piece[PIECES_AHEAD];
    int n = (int)(bytes / 16), step = (int)blockDim.x;
    for (int i = (int)threadIdx.x; i < n; i += PIECES_AHEAD * step) {
        for (int u = 0; u < PIECES_AHEAD; u++)
            if (i + u * step < n) piece[u] = load_16(in + i + u * step);
        for (int u = 0; u < PIECES_AHEAD; u++)
            if (i + u * step < n) out[i + u * step] = piece[u];
    }
}

/* one launch: the scores of a tile */
enum { KEYS_AHEAD = 4 };   /* of a thread: 512 threads have all SPLIT_KEYS of them */

DEVICE void fetch_keys(const struct layer_args *a, const uint16_t *K, int keys,
                       bits128 k[KEYS_AHEAD])
{
    const bits128 zero = {{0, 0, 0, 0}};
    int lanes = a->hd / 8, lane = (int)threadIdx.x % lanes;
    for (int u = 0; u < KEYS_AHEAD; u++) {
        int key = ((int)threadIdx.x + u * (int)blockDim.x) / lanes;
        k[u] = key < keys ? load_16(K + (int64_t)key * a->hd + lane * 8) : zero;
    }
}

DEVICE void score_tile(const struct layer_args *a, const float *q,
                       const bits128 k[KEYS_AHEAD], int keys, int rep, float *s)
{
    int lanes = a->hd / 8, lane = (int)threadIdx.x % lanes;
    int first = (int)threadIdx.x / lanes, step = (int)blockDim.x / lanes;
    for (int r = 0; r < rep; r++) {
        /* score four keys for query r */
        const float *part = q + r * a->hd + lane * 8;
        float sum[KEYS_AHEAD];
        for (int u = 0; u < KEYS_AHEAD; u++) sum[u] = dot8(k[u], part, part + 4, 0);
        for (int u = 0; u < KEYS_AHEAD; u++)
            for (int m = lanes / 2; m; m /= 2) sum[u] += shfl_xor_f32(sum[u], m);
        for (int u = 0; u < KEYS_AHEAD; u++)
            if (lane == 0 && first + u * step < keys)
                s[r * SPLIT_KEYS + first + u * step] = sum[u];
    }
}

/* one launch: the weights of a tile */
DEVICE void weigh_tile(const struct layer_args *a, float *s, int keys, int rep, int kv,
                       int split)
{
    int r = (int)threadIdx.x / 32;
    if (r >= rep) return;
    float max = -INFINITY, sum = 0;
    for (int i = (int)threadIdx.x % 32; i < keys; i += 32)
        max = fmaxf(max, s[r * SPLIT_KEYS + i]);
    for (int m = 16; m; m /= 2) max = fmaxf(max, shfl_xor_f32(max, m));
    float base = max == -INFINITY ? 0 : max;   /* all scores overflowed: weights 0 */
    for (int i = (int)threadIdx.x % 32; i < keys; i += 32)
        sum += s[r * SPLIT_KEYS + i] = expf(s[r * SPLIT_KEYS + i] - base);
    sum = warp_sum(sum);
    int64_t at = (int64_t)(kv * rep + r) * a->max_splits + split;
    if (threadIdx.x % 32 == 0) a->split_max[at] = max, a->split_weight[at] = sum;
}

/* one launch: the sums of a tile */
DEVICE void sum_tile(const struct layer_args *a, const float *s, const uint16_t *V,
                     int keys, int rep, int kv, int split)
{
    int pairs = a->hd / 2;
    for (int t = (int)threadIdx.x; t < rep * pairs; t += (int)blockDim.x) {
        int r = t / pairs, i = t % pairs * 2;
        float low = 0, high = 0;
        for (int key = 0; key < keys; key++) {
            uint32_t v = *(const uint32_t *)(V + (int64_t)key * a->hd + i);
            low = fmaf(s[r * SPLIT_KEYS + key], bits_f32(v << 16), low);
            high = fmaf(s[r * SPLIT_KEYS + key], bits_f32(v & 0xffff0000u), high);
        }
        float *out = a->split_sum
                   + ((int64_t)(kv * rep + r) * a->max_splits + split) * a->hd + i;
        out[0] = low, out[1] = high;
    }
}

DEVICE void attend_splits(const struct layer_args *a, int64_t pos)
{
    int rep = a->n_q / a->n_kv, splits = (int)(pos / SPLIT_KEYS) + 1;
    float *q = (float *)shared_memory();          /* [rep][hd] */
    float *s = q + rep * a->hd;                   /* [rep][SPLIT_KEYS] */
    uint16_t *V = (uint16_t *)(s + rep * SPLIT_KEYS);   /* [SPLIT_KEYS][hd] */
    for (int u = (int)blockIdx.x; u < splits * a->n_kv; u += (int)gridDim.x) {
        /* find the keys of unit u */
        int kv = u % a->n_kv, split = u / a->n_kv;
        int64_t first = (int64_t)split * SPLIT_KEYS, left = pos + 1 - first;
        int keys = left < SPLIT_KEYS ? (int)left : SPLIT_KEYS;
        int64_t at = (kv * a->pos.rows + first) * a->hd;
        bits128 k[KEYS_AHEAD];
        fetch_keys(a, a->k_cache + at, keys, k);
        __syncthreads();                          /* s of the last unit was read */
        for (int i = (int)threadIdx.x; i < rep * a->hd; i += (int)blockDim.x)
            q[i] = a->roped_q[kv * rep * a->hd + i] * a->score_scale;
        copy_in(V, a->v_cache + at, keys * a->hd * (int64_t)sizeof *V);
        __syncthreads();
        score_tile(a, q, k, keys, rep, s);
        __syncthreads();
        weigh_tile(a, s, keys, rep, kv, split);
        __syncthreads();
        sum_tile(a, s, V, keys, rep, kv, split);
    }
}

/* merge the tiles */
DEVICE void merge_splits(const struct layer_args *a, int64_t pos)
{
    int splits = (int)(pos / SPLIT_KEYS) + 1;
    for (int u = first_unit(); u < a->n_q * a->hd / 32; u += unit_step()) {
        int t = u * 32 + (int)threadIdx.x % 32;
        int64_t head = (int64_t)(t / a->hd) * a->max_splits;
        float max = -INFINITY, sum = 0, weight = 0;
        UNROLL(8) for (int j = 0; j < splits; j++)
            max = fmaxf(max, a->split_max[head + j]);
        UNROLL(8) for (int j = 0; j < splits; j++) {
            float e = expf(a->split_max[head + j] - max);
            weight = fmaf(e, a->split_weight[head + j], weight);
            sum = fmaf(e, a->split_sum[(head + j) * a->hd + t % a->hd], sum);
        }
        a->attended[slot(t, (int64_t)a->n_q * a->hd)] = sum / weight;
    }
}

/* a block copies a vector for itself */
DEVICE float *shared_copy(const float *v, int64_t n)
{
    float *x = (float *)shared_memory() + 32;
    copy_in(x, v, n * (int64_t)sizeof *x);
    __syncthreads();
    return x;
}

/* project what was attended */
DEVICE void project_out(const struct layer_args *a, const float *x)
{                                                /* x1 = x + W_o attended */
    int64_t n = (int64_t)a->n_q * a->hd;
    for (int u = first_unit(); u < a->d / 2; u += unit_step()) {
        const uint16_t *row = a->o + 2 * u * n;
        float y[2];
        dot_pair(row, row + n, x, n, &y[0], &y[1]);
        if (threadIdx.x % 32 == 0)
            for (int r = 0; r < 2; r++)
                a->x1[2 * u + r] = bf16_to_f32(a->x[2 * u + r]) + y[r];
    }
}

/* a block norms the residual stream for itself */
DEVICE float *normed_x1(const struct layer_args *a)   /* shared h[d] */
{
    float *shared = (float *)shared_memory(), *h = shared + 32;
    norm_vector(NULL, a->x1, a->post_norm, h, a->d, a->eps, shared);
    return h;
}

/* gate and up */
DEVICE void gate_and_up(const struct layer_args *a, const float *h)
{                                                /* act = silu(gate) * up */
    for (int u = first_unit(); u < a->ffn; u += unit_step()) {
        float gate, up;
        dot_pair(a->gate + u * a->d, a->up + u * a->d, h, a->d, &gate, &up);
        if (threadIdx.x % 32 == 0)
            a->act[slot(u, a->ffn)] = gate / (1.0f + expf(-gate)) * up;
    }
}

/* down */
DEVICE void down(const struct layer_args *a, const float *x)
{                                                /* x_out = x1 + W_down act */
    for (int u = first_unit(); u < a->d / 2; u += unit_step()) {
        const uint16_t *row = a->down + 2 * u * a->ffn;
        float y[2];
        dot_pair(row, row + a->ffn, x, a->ffn, &y[0], &y[1]);
        if (threadIdx.x % 32 == 0)
            for (int r = 0; r < 2; r++)
                a->x_out[2 * u + r] = f32_to_bf16(a->x1[2 * u + r] + y[r]);
    }
}

/* one launch: the kernel */
KERNEL THREADS(512) whole_layer(struct layer_args a)
{
    int64_t pos = position(a.pos);
    if (pos < 0) {
        /* fill the result with NaN and remember */
        for (int64_t i = blockIdx.x * blockDim.x + threadIdx.x; i < a.d;
             i += gridDim.x * blockDim.x)
            a.x_out[i] = 0x7fc0;
        if (blockIdx.x == 0 && threadIdx.x == 0) *a.status = 4;   /* LAYER_BAD_POSITION */
        return;
    }
    uint32_t arrivals = a.barrier_base[blockIdx.x];
    TIMED(&a, QKV, project_qkv(&a, normed_input(&a), pos));
    grid_barrier(a.barrier, &arrivals);
    TIMED(&a, ATTEND, attend_splits(&a, pos));
    grid_barrier(a.barrier, &arrivals);
    TIMED(&a, MERGE, merge_splits(&a, pos));
    grid_barrier(a.barrier, &arrivals);
    TIMED(&a, OUT, project_out(&a, shared_copy(a.attended, (int64_t)a.n_q * a.hd)));
    grid_barrier(a.barrier, &arrivals);
    TIMED(&a, GATE_UP, gate_and_up(&a, normed_x1(&a)));
    grid_barrier(a.barrier, &arrivals);
    TIMED(&a, DOWN, down(&a, shared_copy(a.act, a.ffn)));
    if (threadIdx.x == 0) a.barrier_base[blockIdx.x] = arrivals;
}
CPU_KERNEL(whole_layer, struct layer_args)
