/* stages/stage1/kernels.cu: tangled from layer.nw; change it there. */
/* Stage 1: pointwise operations and norms fused, rounding where stage 0 rounds. */
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
#else
#include "device.h"
#endif

/* stage 1: the operands of a kernel */
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

struct append_args {
    const uint16_t *k, *v;         /* [n][m] */
    uint16_t *k_cache, *v_cache;   /* [n][pos.rows][m] */
    int64_t n, m;
    struct position pos;
};

/* stage 0: small helpers */
DEVICE int64_t thread_index(void)
{
    return (int64_t)blockIdx.x * (int64_t)blockDim.x + (int64_t)threadIdx.x;
}

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

/* stage 1: RMSNorm */
KERNEL THREADS(1024) rms_norm(struct operands o)   /* out[n] = norm(a[n]) * b[n] */
{
    float sum = 0;                                 /* one block; scale is eps */
    for (int64_t i = threadIdx.x; i < o.n; i += blockDim.x) {
        float x = bf16_to_f32(o.a[i]);
        sum += x * x;
    }
    float mean = block_sum(sum, (float *)shared_memory()) / (float)o.n;
    float root = rsqrtf(mean + o.scale);
    for (int64_t i = threadIdx.x; i < o.n; i += blockDim.x) {
        float x = bf16_to_f32(f32_to_bf16(bf16_to_f32(o.a[i]) * root));
        o.out[i] = f32_to_bf16(x * bf16_to_f32(o.b[i]));
    }
}
CPU_KERNEL(rms_norm, struct operands)

/* stage 0: a GEMV, one warp a row */
KERNEL gemv(struct operands o)          /* out[n] = a[n][m] b[m] */
{
    int64_t row = thread_index() / 32;
    if (row >= o.n) return;
    float sum = 0;
    for (int64_t i = threadIdx.x % 32; i < o.m; i += 32)
        sum = fmaf(bf16_to_f32(o.a[row * o.m + i]), bf16_to_f32(o.b[i]), sum);
    sum = warp_sum(sum);
    if (threadIdx.x % 32 == 0) o.out[row] = f32_to_bf16(sum);
}
CPU_KERNEL(gemv, struct operands)

/* stage 1: RoPE */
KERNEL rope(struct operands o)          /* out[n][m] rotated; f, g: cosines, sines */
{
    int64_t i = thread_index(), half = o.m / 2, pos = position(o.pos);
    if (i >= o.n * half || pos < 0) return;
    int64_t low = i / half * o.m + i % half, high = low + half;
    int64_t at = pos * o.m + i % half;
    float a = bf16_to_f32(o.out[low]), b = bf16_to_f32(o.out[high]);
    o.out[low] = f32_to_bf16(a * o.f[at] + -b * o.g[at]);
    o.out[high] = f32_to_bf16(b * o.f[at + half] + a * o.g[at + half]);
}
CPU_KERNEL(rope, struct operands)

/* stage 1: append */
KERNEL append(struct append_args o)     /* row pos of both caches */
{
    int64_t i = thread_index(), pos = position(o.pos);
    if (i >= o.n * o.m || pos < 0) return;
    int64_t at = (i / o.m * o.pos.rows + pos) * o.m + i % o.m;
    o.k_cache[at] = o.k[i];
    o.v_cache[at] = o.v[i];
}
CPU_KERNEL(append, struct append_args)

/* stage 0: scores */
KERNEL score(struct attention_args o)   /* scores[n_q][bound]; a warp an element */
{
    int64_t unit = thread_index() / 32, head = unit % o.n_q, key = unit / o.n_q;
    if (key > position(o.pos)) return;
    const uint16_t *q = o.q + head * o.hd;
    const uint16_t *k = o.cache + (head / (o.n_q / o.n_kv) * o.pos.rows + key) * o.hd;
    float sum = 0;
    for (int64_t i = threadIdx.x % 32; i < o.hd; i += 32)
        sum = fmaf(bf16_to_f32(q[i]), bf16_to_f32(k[i]), sum);
    sum = warp_sum(sum) * o.scale;
    if (threadIdx.x % 32 == 0) o.scores[head * o.bound + key] = sum;
}
CPU_KERNEL(score, struct attention_args)

/* stage 1: softmax */
KERNEL softmax(struct attention_args o) /* p[n_q][bound], rounded; a block a head */
{
    float *shared = (float *)shared_memory();
    int64_t keys = position(o.pos) + 1, t = threadIdx.x, step = blockDim.x;
    const float *s = o.scores + blockIdx.x * o.bound;
    uint16_t *p = o.p + blockIdx.x * o.bound;
    float max = -INFINITY, sum = 0;
    for (int64_t i = t; i < keys; i += step) max = fmaxf(max, s[i]);
    max = block_max(max, shared);
    for (int64_t i = t; i < keys; i += step) sum += expf(s[i] - max);
    sum = block_sum(sum, shared);
    for (int64_t i = t; i < keys; i += step) p[i] = f32_to_bf16(expf(s[i] - max) / sum);
}
CPU_KERNEL(softmax, struct attention_args)

/* stage 0: weigh the values */
KERNEL weighted_values(struct attention_args o)  /* out[n_q][hd]; a block a head */
{
    float *partial = (float *)shared_memory();   /* [groups][hd] */
    int64_t keys = position(o.pos) + 1, head = blockIdx.x;
    int64_t i = threadIdx.x % o.hd, group = threadIdx.x / o.hd;
    int64_t groups = blockDim.x / o.hd;
    const uint16_t *v = o.cache + head / (o.n_q / o.n_kv) * o.pos.rows * o.hd;
    const uint16_t *p = o.p + head * o.bound;
    float sum = 0;
    for (int64_t key = group; key < keys; key += groups)
        sum = fmaf(bf16_to_f32(p[key]), bf16_to_f32(v[key * o.hd + i]), sum);
    partial[group * o.hd + i] = sum;
    __syncthreads();
    if (group) return;
    for (int64_t g = 1; g < groups; g++) sum += partial[g * o.hd + i];
    o.out[head * o.hd + i] = f32_to_bf16(sum);
}
CPU_KERNEL(weighted_values, struct attention_args)

/* stage 0: add two vectors */
KERNEL add(struct operands o)           /* out[n] = a[n] + b[n] */
{
    int64_t i = thread_index();
    if (i < o.n) o.out[i] = f32_to_bf16(bf16_to_f32(o.a[i]) + bf16_to_f32(o.b[i]));
}
CPU_KERNEL(add, struct operands)

/* stage 1: SiLU times up */
KERNEL silu_times(struct operands o)    /* out[n] = silu(a[n]) * b[n] */
{
    int64_t i = thread_index();
    if (i >= o.n) return;
    float a = bf16_to_f32(o.a[i]);
    float act = bf16_to_f32(f32_to_bf16(a / (1.0f + expf(-a))));
    o.out[i] = f32_to_bf16(act * bf16_to_f32(o.b[i]));
}
CPU_KERNEL(silu_times, struct operands)

/* stage 0: the last addition */
KERNEL last_add(struct operands o)      /* out[n] = a[n] + b[n], or NaN */
{
    int64_t i = thread_index();
    int valid = position(o.pos) >= 0;
    if (!valid && i == 0) *o.status = 4;   /* LAYER_BAD_POSITION */
    if (i >= o.n) return;
    float sum = bf16_to_f32(o.a[i]) + bf16_to_f32(o.b[i]);
    o.out[i] = valid ? f32_to_bf16(sum) : 0x7fc0;
}
CPU_KERNEL(last_add, struct operands)
