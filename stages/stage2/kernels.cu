/* stages/stage2/kernels.cu: tangled from layer.nw; change it there. */
/* Stage 2: the launches of stage 1 with loads of 16 bytes, many of them in flight. */
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

/* stage 2: what the kernels are given */
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
    float *qkv;                /* [n_q + 2 n_kv][hd] */
    /* stage 2: vectors between the kernels */
    float *h;                  /* [d], laid out by slot() */
    float *roped_q;            /* [n_q * hd] */
    float *scores;             /* [n_q][pos.rows]: scores, then probabilities */
    float *attended;           /* [n_q * hd], laid out by slot() */
    float *x1;                 /* [d]: the residual stream after attention */
    float *act;                /* [ffn]: silu(gate) * up, laid out by slot() */
    float *o_out, *down_out;   /* [d]: the two products before the residual */
    float *gate_out, *up_out;  /* [ffn] */
};

/* stage 2: the operands of a norm */
struct norm_args {
    const uint16_t *narrow;    /* [d], or null */
    const float *wide;         /* [d], where narrow is null */
    const uint16_t *weight;    /* [d] */
    float *h;                  /* [d], laid out by slot() */
    int64_t d;
    float eps;
};

/* stage 2: the operands of a GEMV */
struct gemv_args {
    const uint16_t *W;         /* [rows][columns] */
    const float *x;            /* [columns], laid out by slot() */
    float *y;                  /* [rows] */
    int64_t rows, columns;
};

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

/* the largest value of every thread in a block */
DEVICE float block_max(float v, float *shared)   /* shared[32] */
{
    int warps = (int)blockDim.x / 32;
    for (int m = 16; m; m >>= 1) v = fmaxf(v, shfl_xor_f32(v, m));
    __syncthreads();
    if (threadIdx.x % 32 == 0) shared[threadIdx.x / 32] = v;
    __syncthreads();
    for (int w = 0; w < warps; w++) v = fmaxf(v, shared[w]);
    return v;
}

/* a vector in shared memory, laid out for 16-byte weight loads */
DEVICE int64_t slot(int64_t i, int64_t n)
{
    return (i / 8) * 4 + i % 4 + (i & 4 ? n / 2 : 0);
}

/* four loads of each row in flight */
enum { AHEAD = 4 };   /* 16-byte loads of each row in flight */

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

/* the share of a warp */
DEVICE int first_unit(void)   /* of this warp; units are dealt out warp by warp */
{
    return (int)(threadIdx.x / 32 * gridDim.x + blockIdx.x);
}

DEVICE int unit_step(void)
{
    return (int)(gridDim.x * (blockDim.x / 32));
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

/* stage 2: RMSNorm */
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

KERNEL THREADS(1024) rms_norm(struct norm_args n)   /* one block */
{
    norm_vector(n.narrow, n.wide, n.weight, n.h, n.d, n.eps, (float *)shared_memory());
}
CPU_KERNEL(rms_norm, struct norm_args)

/* stage 2: a GEMV, one warp a pair of rows */
KERNEL THREADS(1024) gemv(struct gemv_args g)    /* y = W x */
{
    for (int u = first_unit(); u < g.rows / 2; u += unit_step()) {
        const uint16_t *row = g.W + 2 * u * g.columns;
        float y[2];
        dot_pair(row, row + g.columns, g.x, g.columns, &y[0], &y[1]);
        if (threadIdx.x % 32 == 0) g.y[2 * u] = y[0], g.y[2 * u + 1] = y[1];
    }
}
CPU_KERNEL(gemv, struct gemv_args)

/* stage 2: RoPE and append */
DEVICE int64_t thread_index(void)
{
    return (int64_t)blockIdx.x * (int64_t)blockDim.x + (int64_t)threadIdx.x;
}

DEVICE int64_t thread_step(void) { return (int64_t)gridDim.x * (int64_t)blockDim.x; }

KERNEL rope(struct layer_args a)        /* queries and keys, in place */
{
    int64_t half = a.hd / 2, pairs = (a.n_q + a.n_kv) * half, pos = position(a.pos);
    for (int64_t t = thread_index(); t < pairs && pos >= 0; t += thread_step()) {
        float *low = a.qkv + t / half * a.hd + t % half;
        rotate(low, low + half, pos, a.turn[t % half]);
    }
}
CPU_KERNEL(rope, struct layer_args)

KERNEL append(struct layer_args a)      /* row pos of both caches */
{
    int64_t n = (int64_t)a.n_kv * a.hd, pos = position(a.pos);
    const float *k = a.qkv + (int64_t)a.n_q * a.hd, *v = k + n;
    for (int64_t t = thread_index(); t < n && pos >= 0; t += thread_step()) {
        int64_t at = (t / a.hd * a.pos.rows + pos) * a.hd + t % a.hd;
        a.k_cache[at] = f32_to_bf16(k[t]);
        a.v_cache[at] = f32_to_bf16(v[t]);
    }
}
CPU_KERNEL(append, struct layer_args)

/* stage 2: attention, a query head at a time */
enum { KEYS_IN_FLIGHT = 8 };

KERNEL THREADS(256) score(struct layer_args a)   /* scores[n_q][rows] */
{
    int64_t pos = position(a.pos);
    int lanes = a.hd / 8, groups = (int)blockDim.x / lanes;
    int64_t tile = groups * KEYS_IN_FLIGHT, units = (pos / tile + 1) * a.n_q;
    for (int64_t u = blockIdx.x; u < units && pos >= 0; u += gridDim.x) {
        int64_t head = u % a.n_q, first = u / a.n_q * tile + threadIdx.x / lanes;
        const float *q = a.roped_q + head * a.hd + (int)threadIdx.x % lanes * 8;
        const uint16_t *K = a.k_cache + head / (a.n_q / a.n_kv) * a.pos.rows * a.hd
                          + threadIdx.x % lanes * 8;
        /* score the keys in flight for one head */
        const bits128 zero = {{0, 0, 0, 0}};
        bits128 k[KEYS_IN_FLIGHT];
        float sum[KEYS_IN_FLIGHT];
        for (int i = 0; i < KEYS_IN_FLIGHT; i++) {
            int64_t key = first + i * groups;
            k[i] = key <= pos ? load_16(K + key * a.hd) : zero;
        }
        for (int i = 0; i < KEYS_IN_FLIGHT; i++) sum[i] = dot8(k[i], q, q + 4, 0);
        for (int i = 0; i < KEYS_IN_FLIGHT; i++)
            for (int m = lanes / 2; m; m /= 2) sum[i] += shfl_xor_f32(sum[i], m);
        for (int i = 0; i < KEYS_IN_FLIGHT; i++)
            if (threadIdx.x % lanes == 0 && first + i * groups <= pos)
                a.scores[head * a.pos.rows + first + i * groups] = sum[i] * a.score_scale;
    }
}
CPU_KERNEL(score, struct layer_args)

KERNEL THREADS(512) softmax(struct layer_args a) /* in place; a block a head */
{
    float *shared = (float *)shared_memory();
    int64_t keys = position(a.pos) + 1, t = threadIdx.x, step = blockDim.x;
    for (int64_t head = blockIdx.x; head < a.n_q; head += gridDim.x) {
        float *s = a.scores + head * a.pos.rows, max = -INFINITY, sum = 0;
        UNROLL(8) for (int64_t i = t; i < keys; i += step) max = fmaxf(max, s[i]);
        max = block_max(max, shared);
        UNROLL(8) for (int64_t i = t; i < keys; i += step) sum += expf(s[i] - max);
        sum = block_sum(sum, shared);
        for (int64_t i = t; i < keys; i += step) s[i] = expf(s[i] - max) / sum;
    }
}
CPU_KERNEL(softmax, struct layer_args)

DEVICE void add_scaled(float sum[8], float weight, bits128 v)
{
    for (int i = 0; i < 4; i++) {
        sum[2 * i] = fmaf(weight, bits_f32(v.v[i] << 16), sum[2 * i]);
        sum[2 * i + 1] = fmaf(weight, bits_f32(v.v[i] & 0xffff0000u), sum[2 * i + 1]);
    }
}

enum { PART = 64, VALUES_IN_FLIGHT = 4 };   /* PART: dimensions that a block takes */

KERNEL THREADS(1024) weighted_values(struct layer_args a)   /* attended[n_q * hd] */
{
    float *partial = (float *)shared_memory();   /* [32][PART] */
    int64_t keys = position(a.pos) + 1, parts = a.hd / PART, n = (int64_t)a.n_q * a.hd;
    int lane = (int)threadIdx.x % 8, group = (int)threadIdx.x / 8;
    for (int64_t u = blockIdx.x; u < a.n_q * parts; u += gridDim.x) {
        int64_t head = u / parts, from = u % parts * PART;
        const uint16_t *V = a.v_cache + head / (a.n_q / a.n_kv) * a.pos.rows * a.hd
                          + from + lane * 8;
        const float *p = a.scores + head * a.pos.rows;
        float sum[8] = { 0, 0, 0, 0, 0, 0, 0, 0 };
        for (int64_t key = group; key < keys; key += (int64_t)VALUES_IN_FLIGHT * 128) {
            /* weigh the values in flight */
            const bits128 zero = {{0, 0, 0, 0}};
            bits128 v[VALUES_IN_FLIGHT];
            float weight[VALUES_IN_FLIGHT];
            for (int i = 0; i < VALUES_IN_FLIGHT; i++) {
                int inside = key + i * 128 < keys;
                v[i] = inside ? load_16(V + (key + i * 128) * a.hd) : zero;
                weight[i] = inside ? p[key + i * 128] : 0;
            }
            for (int i = 0; i < VALUES_IN_FLIGHT; i++) add_scaled(sum, weight[i], v[i]);
        }
        /* add up the groups and store the sums */
        for (int i = 0; i < 8; i++) {
            sum[i] += shfl_xor_f32(sum[i], 8);
            sum[i] += shfl_xor_f32(sum[i], 16);
        }
        __syncthreads();                             /* partial may still be read */
        for (int i = 0; i < 8; i++)
            if (group % 4 == 0) partial[group / 4 * PART + lane * 8 + i] = sum[i];
        __syncthreads();
        if (threadIdx.x < PART) {
            float all = 0;
            for (int w = 0; w < 32; w++) all += partial[w * PART + threadIdx.x];
            a.attended[slot(head * a.hd + from + threadIdx.x, n)] = all;
        }
    }
}
CPU_KERNEL(weighted_values, struct layer_args)

/* stage 2: the pointwise kernels that are left */
KERNEL add(struct layer_args a)         /* x1[d] = x + o_out */
{
    for (int64_t i = thread_index(); i < a.d; i += thread_step())
        a.x1[i] = bf16_to_f32(a.x[i]) + a.o_out[i];
}
CPU_KERNEL(add, struct layer_args)

KERNEL silu_times(struct layer_args a)  /* act[ffn] = silu(gate_out) * up_out */
{
    for (int64_t i = thread_index(); i < a.ffn; i += thread_step()) {
        float gate = a.gate_out[i];
        a.act[slot(i, a.ffn)] = gate / (1.0f + expf(-gate)) * a.up_out[i];
    }
}
CPU_KERNEL(silu_times, struct layer_args)

KERNEL last_add(struct layer_args a)    /* x_out[d] = x1 + down_out, or NaN */
{
    if (position(a.pos) < 0) {
        /* fill the result with NaN and remember */
        for (int64_t i = blockIdx.x * blockDim.x + threadIdx.x; i < a.d;
             i += gridDim.x * blockDim.x)
            a.x_out[i] = 0x7fc0;
        if (blockIdx.x == 0 && threadIdx.x == 0) *a.status = 4;   /* LAYER_BAD_POSITION */
        return;
    }
    for (int64_t i = thread_index(); i < a.d; i += thread_step())
        a.x_out[i] = f32_to_bf16(a.x1[i] + a.down_out[i]);
}
CPU_KERNEL(last_add, struct layer_args)
