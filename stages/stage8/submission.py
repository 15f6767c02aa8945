# stages/stage8/submission.py: tangled from layer.nw; change it there.
"""One decoder layer in one launch, over packed weights: stage 8 in one file.

    handle = build_layer(weights, kv_cache, cfg, max_seq_len)
    x_out = layer_step(handle, x, pos)
    teardown(handle)

    refresh(handle)       packs anew what the dict and its tensors hold now
    packing(handle)       what became of each matrix
    bytes_read(handle)    of weights, in a step
    own_weights(handle)   from then on the caller may drop the weights

The weights are packed when the handle is built. What is written to them later is seen
only after refresh(handle), which holds both packed copies for a moment; until then a
step may see some of it. A graph captured before own_weights or refresh has to be
captured again.

Needs PyTorch, a GPU of compute capability 9.0 or later and, the first time, nvcc.
"""

# submission: imports
import ctypes
import functools
import hashlib
import itertools
import numbers
import operator
import os
import pathlib
import shutil
import stat
import struct
import subprocess
import sys
import tempfile
import weakref

import torch

# stage 8: the sources of the submission
STAGE = 8

KERNELS_CU = r"""

/* stage 8: the kernel file */
/* Stage 8: stage 7 over weights that are packed, without loss, into 12 bits. */
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

/* PTX: pairs of bfloat16 */
DEVICE uint32_t pack_bf16(float low, float high)
{
    uint32_t pair;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
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

/* PTX: named barriers */
DEVICE void named_barrier_sync(int id, int threads)
{
    asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
DEVICE void named_barrier_arrive(int id, int threads)
{
    asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
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

/* PTX: counters within a block */
DEVICE void add_in_block(uint32_t *p, uint32_t v)
{
    asm volatile("red.release.cta.shared::cta.add.u32 [%0], %1;"
                 ::"r"(shared_address(p)), "r"(v) : "memory");
}

/* PTX: relaxed values */
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

DEVICE bits128 load_relaxed_4(const uint32_t *p)
{
    bits128 x;
    asm volatile("ld.relaxed.gpu.global.v4.u32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(x.v[0]), "=r"(x.v[1]), "=r"(x.v[2]), "=r"(x.v[3])
                 : "l"(p) : "memory");
    return x;
}
DEVICE void store_relaxed_4(uint32_t *p, bits128 x)
{
    asm volatile("st.relaxed.gpu.global.v4.u32 [%0], {%1,%2,%3,%4};"
                 ::"l"(p), "r"(x.v[0]), "r"(x.v[1]), "r"(x.v[2]), "r"(x.v[3])
                 : "memory");
}

enum { HINT_POLLS = 4096 };
DEVICE void count_relaxed(uint32_t *p, uint32_t n)
{
    asm volatile("red.relaxed.gpu.global.add.u32 [%0], %1;"
                 ::"l"(p), "r"(n) : "memory");
}
DEVICE void wait_hint(const uint32_t *p, uint32_t v)
{
    for (int i = 0; i < HINT_POLLS && (int32_t)(load_relaxed(p) - v) < 0; i++)
        ;
}

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

DEVICE uint64_t spin_start(void) { return spin_ns(); }
static __device__ __noinline__ void values_failed(const void *p)
{
    printf("block %u thread %u waits with its warp for the proof of values at %p\n",
           blockIdx.x, threadIdx.x, p);
    asm volatile("trap;");
}
DEVICE void retry_values(const uint32_t *p, uint64_t start)
{
    if (spin_ns() - start > SPIN_LIMIT)
        values_failed(p);
}
#else
DEVICE uint64_t spin_start(void) { return 0; }
DEVICE void retry_values(const uint32_t *p, uint64_t start) { (void)p, (void)start; }
#endif

/* PTX: prefetch */
DEVICE void prefetch(const void *p)
{
    asm volatile("prefetch.global.L1 [%0];" ::"l"(p));
}

/* PTX: registers of a warpgroup */
#if defined __CUDA_ARCH_FEAT_SM90_ALL || defined __CUDA_ARCH_SPECIFIC__ || \
    defined __CUDA_ARCH_FAMILY_SPECIFIC__
#define SHRINK_REGISTERS(n) \
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(n))
#define GROW_REGISTERS(n) \
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(n))
#else
#define SHRINK_REGISTERS(n) ((void)0)
#define GROW_REGISTERS(n) ((void)0)
#endif

/* PTX: mbarriers */
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
DEVICE void mbarrier_init(uint64_t *b, uint32_t count)
{
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;"
                 ::"r"(shared_address(b)), "r"(count) : "memory");
}
DEVICE void mbarrier_init_fence(void)
{
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

DEVICE void mbarrier_arrive(uint64_t *b)
{
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];"
                 ::"r"(shared_address(b)) : "memory");
}

/* PTX: announce bytes, wait for a phase */
DEVICE void mbarrier_expect(uint64_t *b, uint32_t bytes)
{
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;"
                 ::"r"(shared_address(b)), "r"(bytes) : "memory");
}

DEVICE uint32_t mbarrier_try(uint64_t *b, uint32_t parity)
{
    uint32_t done;
    asm volatile("{\n\t.reg .pred p;\n\t"
                 "mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n\t"
                 "selp.u32 %0, 1, 0, p;\n\t}"
                 : "=r"(done) : "r"(shared_address(b)), "r"(parity) : "memory");
    return done;
}

/* PTX: wait for a phase */
DEVICE void mbarrier_wait(uint64_t *b, uint32_t parity)
{
#ifdef DEBUG_SPINS
    uint64_t start = spin_ns();
    while (!mbarrier_try(b, parity))
        if (spin_ns() - start > SPIN_LIMIT)
            spin_failed("an mbarrier's parity", b, parity, parity ^ 1u);
#else
    asm volatile("{\n\t.reg .pred done;\n"
                 "AGAIN:\n\t"
                 "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n\t"
                 "@!done bra AGAIN;\n\t}"
                 ::"r"(shared_address(b)), "r"(parity) : "memory");
#endif
}

/* PTX: bulk copies */
DEVICE uint64_t evict_first(void)
{
    uint64_t policy;
    asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;"
                 : "=l"(policy));
    return policy;
}

DEVICE void bulk_load(void *shared, const void *global, uint32_t bytes,
                      uint64_t *b, uint64_t policy)
{
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes"
                 ".L2::cache_hint [%0], [%1], %2, [%3], %4;"
                 ::"r"(shared_address(shared)), "l"(global), "r"(bytes),
                 "r"(shared_address(b)), "l"(policy) : "memory");
}

DEVICE void proxy_fence(void)
{
    asm volatile("fence.proxy.async;" ::: "memory");
}

/* PTX: tensor cores */
DEVICE void mma_bf16(float c[4], const uint32_t a[4], const uint32_t b[2])
{
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
                 "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
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

/* PTX: dependent launch */
DEVICE void launch_dependents(void)
{
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}
DEVICE void wait_for_prerequisites(void)
{
    asm volatile("griddepcontrol.wait;" ::: "memory");
}

/* PTX: bytes of two words */
DEVICE uint32_t pick_bytes(uint32_t low, uint32_t high, uint32_t places)
{
    return __byte_perm(low, high, places);   /* a hex digit a byte: 0-3 low, 4-7 high */
}

/* PTX: powers of two */
DEVICE float exp2_approx(float x)   /* within two units in the last place */
{
    float y;
    asm("ex2.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
#else
#include "device.h"
#endif

/* packed: the parts of the kernel */
/* packed: what the kernels are given */
/* a position, given or to be found on the device */
struct position {
    const int64_t *at;   /* device memory, or null */
    int64_t given;       /* the position when at is null */
    int64_t rows;        /* of the cache: valid positions are below */
};

/* packed: the sizes of the ring */
enum {
    HALF = 16384,         /* bytes of half a slot at most, and of one bulk copy */
    MAX_SLOTS = 8,        /* of two halves */
    TILE_KEYS = 48,       /* keys of a tile */
    SUMS = 16,            /* chunks whose sums wait for the epilogue */
    DELIVERERS = 9,       /* warps that contribute to the sums of a chunk */
    MORE_SHARED = 6272,   /* bytes of shared memory besides */
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

/* packed: a matrix as the stream reads it */
enum { W_Q, W_K, W_V, W_O, W_GATE, W_UP, W_DOWN, MATRICES };   /* as in layer.h */

struct matrix {
    const char *at;        /* its first row; packed: of its first piece */
    const uint32_t *lists; /* [pieces][rows][words]: of the exceptions of each row */
    const uint32_t *more;  /* exceptions that do not fit into their lists */
    int64_t stride;        /* bytes from row to row, where they are not packed */
    int64_t rows;
    int32_t packed;        /* 1: rows of 12 bits a weight, end to end */
    int32_t words;         /* of a list; 0: there are no lists */
    int32_t base;          /* lowest exponent of the window; 0: no window */
    float scale;           /* of the sums of a row: 2^(base - LOWEST) */
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
    struct matrix m[MATRICES];
    int32_t whole_steps;   /* all matrices are packed */
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

/* packed: what the kernels that pack are given */
struct pack_args {
    const uint16_t *from;   /* weight i of row r is from[r * stride + i] */
    uint16_t *out;          /* likewise, where to unpack to; null: compare with from */
    char *packed;           /* the rows, end to end */
    uint32_t *lists;        /* [rows][words] */
    uint32_t *more, *used;  /* exceptions without room in their lists; how many */
    uint32_t *exponents;    /* [256]: how many weights have each */
    uint32_t *wrong;        /* eights that came back different */
    int64_t rows, stride;
    int32_t n, base, words; /* weights of a row, lowest exponent, words of a list */
};

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

/* stream: who does what */
DEVICE int rank_of_block(const struct layer_args *a, int phase)
{
    int rank = (int)blockIdx.x;
    if (phase != GATE_UP) rank -= (int)gridDim.x - a->g.p[phase].extra;
    return rank < 0 ? rank + (int)gridDim.x : rank;
}

DEVICE int chunks_of_block(const struct layer_args *a, int phase)
{
    const struct product *p = a->g.p + phase;
    return p->each + (rank_of_block(a, phase) < p->extra);
}

struct deal { int first, step; };   /* from one chunk of this block to the next */

DEVICE struct deal deal_of(const struct layer_args *a, int phase)
{
    const struct product *p = a->g.p + phase;
    int rank = rank_of_block(a, phase), more = rank < p->extra ? rank : p->extra;
    struct deal around = { rank, (int)gridDim.x }, run = { rank * p->each + more, 1 };
    return phase == OUT || phase == DOWN ? run : around;
}

DEVICE int batch_end(const struct product *p, int start, int to)
{
    return p->pieces > 1 && to - start > BATCH ? start + BATCH : to;
}

DEVICE int piece_width(const struct product *p, int piece)
{
    int left = p->columns - piece * p->piece;
    return left < p->piece ? left : p->piece;
}

/* 0: a query, 1: a key, 2: a value; i < hd / 2 */
struct place { int kind, head, i; };

DEVICE struct place place_of(const struct layer_args *a, int pair)
{
    int bits = a->hd == 128 ? 6 : 5, head = pair >> bits;
    struct place at = { 0, head, pair & ((1 << bits) - 1) };
    if (head >= a->n_q) at.kind = 1, at.head -= a->n_q;
    if (at.kind && at.head >= a->n_kv) at.kind = 2, at.head -= a->n_kv;
    return at;
}

/* tiles of a group's old keys; units of this block */
struct span { int tiles, units; };

DEVICE struct span span_at(const struct layer_args *a, int64_t pos)
{
    int units = a->g.splits * a->g.groups, b = (int)blockIdx.x, blocks = (int)gridDim.x;
    struct span n = { (int)((pos + TILE_KEYS - 1) / TILE_KEYS),
                      b < units ? (units - b - 1) / blocks + 1 : 0 };
    return n;
}

DEVICE int first_tile(const struct layer_args *a, struct span n, int split)
{
    /* split may be splits: the end */
    return (int)((int64_t)n.tiles * split >> a->g.bits);
}

DEVICE int chunks_before_tiles(const struct layer_args *a)   /* of this block, in QKV */
{
    const struct product *queries = a->g.p + ATTEND;
    int chunks = chunks_of_block(a, QKV);
    int mine = queries->each + (rank_of_block(a, QKV) < queries->extra);
    return queries->pieces > 1 || mine + 3 > chunks ? chunks : mine + 3;
}

DEVICE int unit_of(int u) { return (int)(blockIdx.x + u * gridDim.x); }

DEVICE int tiles_of_block(const struct layer_args *a, struct span n)
{
    int tiles = 0;
    for (int u = 0; u < n.units; u++) {
        int split = unit_of(u) / a->g.groups;
        tiles += first_tile(a, n, split + 1) - first_tile(a, n, split);
    }
    return tiles;
}

DEVICE int first_head(const struct layer_args *a, int group)
{
    return group / a->g.octets * (a->n_q / a->n_kv) + group % a->g.octets * HEADS;
}

DEVICE int heads_of(const struct layer_args *a, int group)
{
    int left = a->n_q / a->n_kv - group % a->g.octets * HEADS;
    return left < HEADS ? left : HEADS;
}

struct leg { int phase, from, to; };   /* chunks of this block */

DEVICE struct leg leg_of(const struct layer_args *a, int number)
{
    int phase = number == ATTEND ? QKV : number, chunks = chunks_of_block(a, phase);
    struct leg l = { phase, 0, chunks };
    if (number == QKV) l.to = chunks_before_tiles(a);
    if (number == ATTEND) l.from = chunks_before_tiles(a);
    return l;
}

/* stream: shared memory */
DEVICE struct shared *block_state(void)
{
    return (struct shared *)shared_memory();
}

DEVICE char *slot_half(const struct layer_args *a, int slot, int half)
{
    return shared_memory() + SHARED_BYTES + (2 * slot + half) * a->g.half;
}

DEVICE int lane_id(void) { return (int)threadIdx.x % 32; }
DEVICE int any_lane(uint32_t bits) { return ballot((int)bits) != 0; }

struct turn { int slot; uint32_t odd; };   /* odd: the lap */

DEVICE void next_turn(struct turn *t, int slots)
{
    if (++t->slot == slots) t->slot = 0, t->odd ^= 1;
}

DEVICE void skip_turns(struct turn *t, int slots, int by)
{
    t->odd ^= (uint32_t)((t->slot + by) / slots) & 1;
    t->slot = (t->slot + by) % slots;
}

DEVICE void prepare_barriers(struct shared *s, int slots)
{
    for (int i = 0; i < slots; i++) {
        mbarrier_init(s->full[0] + i, 1), mbarrier_init(s->full[1] + i, 1);
        mbarrier_init(s->empty + i, CONSUMERS);
    }
    for (int i = 0; i < SUMS; i++) {
        mbarrier_init(s->delivered + i, DELIVERERS);
        mbarrier_init(s->taken + i, 1);
    }
    mbarrier_init(&s->tiles_begin, 2);
    mbarrier_init(&s->tiles_over, 2);
    mbarrier_init_fence();
}

enum { READY = 1, UNITS = 2 };   /* named barriers */
enum { READY_THREADS = 32 * BLOCK_WARPS };

DEVICE void wait_until_ready(void)
{
    named_barrier_sync(READY, READY_THREADS);
    wait_for_prerequisites();
}

/* stream: values that carry their step */
#define LOG2_E 1.44269504088896341f
enum { EPOCH_BITS = 15, LINE = 32, SLICE = 1024 };   /* LINE: words in 128 bytes */

DEVICE uint32_t tagged(float value, uint32_t epoch)
{
    uint32_t bits = value == value ? f32_bits(value) : 0x7fc00000u;
    return (bits & ~(uint32_t)EPOCH_BITS) | (epoch & EPOCH_BITS);
}

DEVICE float value_of(uint32_t word) { return bits_f32(word & ~(uint32_t)EPOCH_BITS); }

DEVICE uint32_t stale(uint32_t word,
                      uint32_t epoch) { return (word ^ epoch) & EPOCH_BITS; }

DEVICE uint32_t any_stale(bits128 w, uint32_t epoch)
{
    return stale(w.v[0], epoch) | stale(w.v[1], epoch) | stale(w.v[2], epoch)
         | stale(w.v[3], epoch);
}

enum hint { HINT_ROW, HINT_Q, HINT_UNITS, HINT_ATTENDED, HINT_X1, HINT_ACT, HINTS };

DEVICE uint32_t *hint_of(const struct layer_args *a, enum hint kind, int64_t i)
{
    return a->hints + (a->first_hint[kind] + i) * LINE;
}

DEVICE void wait_for_slices(const struct layer_args *a, enum hint kind, int64_t from,
                            int64_t to, int64_t columns, uint32_t epoch)
{
    for (int64_t i = from / SLICE; i * SLICE < to; i++) {
        int64_t left = columns - i * SLICE;
        uint32_t words = (uint32_t)(left < SLICE ? left : SLICE);
        if (lane_id() == 0) wait_hint(hint_of(a, kind, i), epoch * words);
    }
    __syncwarp();
}

/* stream: fill the ring */
struct producer {
    uint64_t policy;
    int half;               /* 0: low rows and keys; 1: high rows and values */
    struct turn next;       /* the slot to fill */
    struct turn oldest;     /* the first that may still be under way */
    int open, most;         /* halves under way; allowed to be */
};

DEVICE void wait_for_oldest(struct shared *s, struct producer *p, int slots)
{
    mbarrier_wait(s->full[p->half] + p->oldest.slot, p->oldest.odd);
    next_turn(&p->oldest, slots);
    p->open--;
}

DEVICE void wait_for_room(struct shared *s, const struct producer *p)
{
    mbarrier_wait(s->empty + p->next.slot, p->next.odd ^ 1);
}

DEVICE void fetch(const struct layer_args *a, struct shared *s, struct producer *p,
                  const void *from, uint32_t bytes)
{
    uint64_t *full = s->full[p->half] + p->next.slot;
    wait_for_room(s, p);
    while (p->open >= p->most) wait_for_oldest(s, p, a->g.slots);
    mbarrier_expect(full, bytes);
    bulk_load(slot_half(a, p->next.slot, p->half), from, bytes, full, p->policy);
    next_turn(&p->next, a->g.slots);
    p->open++;
}

/* packed: eight weights */
enum { WINDOW = 16, LOWEST = 112 };   /* exponents: how many, and the first */

DEVICE uint32_t upper_bytes(uint32_t tops)
{
    return (tops & 0x87878787u) | 0x38383838u;
}

DEVICE bits128 unpack(uint32_t first_bottoms, uint32_t second_bottoms, uint32_t tops)
{
    uint32_t first = upper_bytes(tops), second = upper_bytes(tops << 4 | tops >> 28);
    bits128 w;
    w.v[0] = pick_bytes(first_bottoms, first, 0x5140);
    w.v[1] = pick_bytes(first_bottoms, first, 0x7362);
    w.v[2] = pick_bytes(second_bottoms, second, 0x5140);
    w.v[3] = pick_bytes(second_bottoms, second, 0x7362);
    return w;
}

enum { STAND_IN = LOWEST << 7 };   /* 2^-15, as bf16 */

DEVICE int outside(uint32_t w, int base)   /* of the window */
{
    return (w >> 7 & 0xffu) - (uint32_t)base >= (uint32_t)WINDOW;
}

DEVICE uint32_t into_window(uint32_t w, int base)
{
    uint32_t up = (uint32_t)(LOWEST - base) << 7;
    return outside(w, base) ? STAND_IN : (w + up) & 0xffffu;
}

DEVICE uint32_t half_of(bits128 w, int i) { return w.v[i / 2] >> i % 2 * 16 & 0xffffu; }

DEVICE uint32_t exceptions_in(bits128 w, int base)   /* a bit for each of the eight */
{
    uint32_t found = 0;
    for (int i = 0; i < 8; i++) found |= (uint32_t)outside(half_of(w, i), base) << i;
    return found;
}

/* packed: the exceptions of a row */
/* of a row: sums of x and of w x over E */
struct fix { float inputs, products, scale; };

DEVICE void add_exception(struct fix *f, uint32_t weight, float x)
{
    f->products = fmaf(bf16_to_f32((uint16_t)weight), x, f->products);
    f->inputs += x;
}

DEVICE float corrected(float sum, struct fix f)
{
    float stand_in = bf16_to_f32(STAND_IN);
    return fmaf(fmaf(-stand_in, f.inputs, sum), f.scale, f.products);
}

/* packed: where rows lie */
struct more {   /* of shared memory */
    struct fix fix[SUMS][2][DELIVERED];
    /* its lowest exponent, of what is in a half; 0: raw */
    int32_t window[2][MAX_SLOTS];
};
DEVICE struct more *more_shared(void)
{
    return (struct more *)(shared_memory() + sizeof(struct shared));
}

DEVICE int matrix_of(const struct layer_args *a, int phase, int c, int half)
{
    if (phase == QKV) return W_Q + place_of(a, c * a->g.p[QKV].pairs).kind;
    return phase == OUT ? W_O : phase == DOWN ? W_DOWN : W_GATE + half;
}

/* the first */
DEVICE int64_t row_of(const struct layer_args *a, int phase, int c, int half)
{
    int pairs = a->g.p[phase].pairs;
    if (phase == GATE_UP) return (int64_t)c * pairs;
    if (phase != QKV) return (2 * (int64_t)c + half) * pairs;
    struct place at = place_of(a, c * pairs);
    return (int64_t)at.head * a->hd + at.i + half * (a->hd / 2);
}

struct rows { const char *at; int64_t stride; uint32_t bytes; int32_t window; };

DEVICE struct rows rows_of(const struct layer_args *a, int phase, int piece, int c,
                           int half)
{
    const struct product *p = a->g.p + phase;
    const struct matrix *m = a->m + matrix_of(a, phase, c, half);
    int width = piece_width(p, piece), several = phase == GATE_UP ? 1 : 2;
    int64_t row = m->packed ? width / 2 * 3 : m->stride;   /* bytes to the next */
    int64_t skip = m->packed ? piece * m->rows * (p->piece / 2 * 3)
                             : 2 * (int64_t)piece * p->piece;
    uint32_t bytes = (uint32_t)(p->pairs * (m->packed ? width / 2 * 3 : 2 * width));
    struct rows r = { m->at + skip + row_of(a, phase, c, half) * row,
                      row * several * p->pairs * deal_of(a, phase).step,
                      bytes, m->base };
    return r;
}

DEVICE void produce_piece(const struct layer_args *a, struct shared *s,
                          struct producer *p,
                          /* chunks i to end - 1 */
                          int phase, int piece, int i, int end)
{
    struct deal d = deal_of(a, phase);
    int c = d.first + i * d.step;
    struct rows r = rows_of(a, phase, piece, c, p->half);
    p->most = a->g.p[phase].open;
    UNROLL(1)
    for (; i < end; i++, c += d.step, r.at += r.stride) {
        if (phase == QKV) r = rows_of(a, QKV, piece, c, p->half);
        wait_for_room(s, p);
        more_shared()->window[p->half][p->next.slot] = r.window;
        fetch(a, s, p, r.at, r.bytes);
    }
}

/* stream: the producers */
DEVICE void produce_unit(const struct layer_args *a, struct shared *s,
                         struct producer *p,
                         struct span n, int64_t pos, int unit)
{
    int kv = unit % a->g.groups / a->g.octets, split = unit / a->g.groups;
    int tile = first_tile(a, n, split), end = first_tile(a, n, split + 1);
    int64_t at = (kv * a->pos.rows + (int64_t)tile * TILE_KEYS) * a->hd;
    const uint16_t *from = (p->half ? a->v_cache : a->k_cache) + at;
    UNROLL(1)
    for (; tile < end; tile++, from += TILE_KEYS * a->hd) {
        int64_t left = pos - (int64_t)tile * TILE_KEYS;
        uint32_t keys = left < TILE_KEYS ? (uint32_t)left : TILE_KEYS;
        fetch(a, s, p, from, 2 * keys * (uint32_t)a->hd);
    }
}

DEVICE void produce_tiles(const struct layer_args *a, struct shared *s,
                          struct producer *p, int64_t pos)
{
    struct span n = span_at(a, pos);
    if (!n.units) return;
    wait_for_prerequisites();   /* the rows of earlier steps */
    p->most = a->g.open_tiles;
    wait_for_room(s, p);
    mbarrier_arrive(&s->tiles_begin);
    for (int u = 0; u < n.units; u++) produce_unit(a, s, p, n, pos, unit_of(u));
    wait_for_room(s, p);
    mbarrier_arrive(&s->tiles_over);
}

DEVICE void produce(const struct layer_args *a, struct shared *s, int64_t pos, int half)
{
    if (half == 0 && lane_id() == 0) prepare_barriers(s, a->g.slots);
    __syncwarp();
    if (half == 0) named_barrier_arrive(READY, READY_THREADS);
    else named_barrier_sync(READY, READY_THREADS);
    if (lane_id() != 0) return;
    launch_dependents();
    struct producer p = { evict_first(), half, { 0, 0 }, { 0, 0 }, 0, 1 };
    UNROLL(1)
    for (int number = QKV; number < PHASES; number++) {
        struct leg l = leg_of(a, number);
        const struct product *m = a->g.p + l.phase;
        if (number == ATTEND) produce_tiles(a, s, &p, pos);
        for (int start = l.from, end; start < l.to; start = end) {
            end = batch_end(m, start, l.to);
            for (int piece = 0; piece < m->pieces; piece++)
                produce_piece(a, s, &p, l.phase, piece, start, end);
        }
    }
}

/* stream: the vector */
enum { RUN = 256, EIGHT = 8 };   /* columns of a warp, of a lane, in one load */

struct columns {
    int first;   /* of this lane, in the piece */
    int live;    /* how many of its runs have columns */
    int row;     /* first pair of this warp in a chunk */
};

DEVICE struct columns columns_of(const struct product *p, int width, int warp)
{
    int runs = p->wide ? 4 : 2, group = warp >> p->bits;
    int first = (warp & (p->across - 1)) * runs * RUN + lane_id() * EIGHT;
    int live = first < width ? (width - first - 1) / RUN + 1 : 0;
    struct columns c = { first, live < runs ? live : runs, p->wide ? 0 : 2 * group };
    return c;
}

DEVICE void widen(float *x, bits128 b)   /* eight bf16 */
{
    for (int i = 0; i < 4; i++) {
        x[2 * i] = bits_f32(b.v[i] << 16);
        x[2 * i + 1] = bits_f32(b.v[i] & 0xffff0000u);
    }
}

DEVICE void split_pair(float x, float y, uint32_t *hi, uint32_t *lo)
{
    *hi = pack_bf16(x, y);
    float u = x - bits_f32(*hi << 16), v = y - bits_f32(*hi & 0xffff0000u);
    *lo = pack_bf16(u - u == 0 ? u : 0, v - v == 0 ? v : 0);
}

DEVICE void take_values(float *x, const uint32_t *from, int live, uint32_t epoch)
{
    for (uint64_t start = spin_start();;) {
        bits128 w[4][2];
        uint32_t wrong = 0;
        for (int i = 0; i < 4; i++)
            if (i < live) {
                w[i][0] = load_relaxed_4(from + i * RUN);
                w[i][1] = load_relaxed_4(from + i * RUN + 4);
            }
        for (int i = 0; i < 4; i++)
            for (int j = 0; j < 2; j++) {
                if (i < live) wrong |= any_stale(w[i][j], epoch);
                for (int k = 0; k < 4; k++)
                    x[8 * i + 4 * j + k] = i < live ? value_of(w[i][j].v[k]) : 0;
            }
        if (!any_lane(wrong)) return;
        retry_values(from, start);
    }
}

DEVICE float weigh(float *x, const bits128 *weight)   /* the sum of squares of 32 */
{
    float squares = 0;
    for (int i = 0; i < 4; i++) {
        float w[8];
        widen(w, weight[i]);
        for (int j = 0; j < 8; j++) {
            squares = fmaf(x[8 * i + j], x[8 * i + j], squares);
            x[8 * i + j] *= w[j];
        }
    }
    for (int m = 16; m; m /= 2) squares += shfl_xor_f32(squares, m);
    return squares;
}

DEVICE void fetch_runs(bits128 *b, const uint16_t *from, int live)
{
    bits128 none = {{ 0, 0, 0, 0 }};
    for (int i = 0; i < 4; i++) b[i] = i < live ? load_16(from + i * RUN) : none;
}

/* into the first-level cache */
DEVICE void touch_runs(const uint16_t *from, int live)
{
    for (int i = 0; i < 4; i++)
        if (i < live) prefetch(from + i * RUN);
}

DEVICE void take_vector(const struct layer_args *a, struct shared *s, float *x,
                        int phase,
                        int piece, struct columns c, int warp, uint32_t epoch,
                            int again)
{
    const struct product *p = a->g.p + phase;
    int64_t from = (int64_t)piece * p->piece, at = from + c.first;
    int64_t to = from + piece_width(p, piece);
    const uint16_t *weight = phase == QKV ? a->in_norm : phase == GATE_UP ? a->post_norm
        : 0;
    bits128 norm[4];
    if (weight && phase != QKV) touch_runs(weight + at, c.live);
    if (phase == QKV) {
        bits128 given[4];
        fetch_runs(given, a->x + at, c.live);
        for (int i = 0; i < 4; i++) widen(x + 8 * i, given[i]);
    } else {
        const uint32_t *words = phase == OUT ? a->attended : phase == DOWN ? a->act
            : a->x1;
        enum hint kind = phase == OUT ? HINT_ATTENDED : phase == DOWN ? HINT_ACT
            : HINT_X1;
        /* wait for the slices that this warp's columns are in */
        int64_t first = from + c.first - lane_id() * EIGHT, span = p->wide ? 4 * RUN : 2 * RUN;
        if (first < to)
            wait_for_slices(a, kind, first, first + span < to ? first + span : to, p->columns,
                            epoch);
        take_values(x, words + at, c.live, epoch);
    }
    if (weight) {
        fetch_runs(norm, weight + at, c.live);
        float squares = weigh(x, norm);
        if (lane_id() == 0 && !again) s->squares[phase][warp] += squares;
    }
}

DEVICE float dot(const bits128 *w, const float *x, int runs)
{
    float even = 0, odd = 0;
    for (int i = 0; i < runs; i++)
        for (int k = 0; k < 4; k++) {
            even = fmaf(bits_f32(w[i].v[k] << 16), x[8 * i + 2 * k], even);
            odd = fmaf(bits_f32(w[i].v[k] & 0xffff0000u), x[8 * i + 2 * k + 1], odd);
        }
    return even + odd;
}

struct lane {
    float x[32];
    /* columns before this warp's rows; before this lane's, in a row */
    int row[2], first;
    int width, live;     /* columns of a row; runs that this lane has */
};

/* stream: deliver sums */
DEVICE float fold(float mine, float other, int lane_bit)   /* one of two rows stays */
{
    int second = lane_id() & lane_bit;
    float keep = second ? other : mine, give = second ? mine : other;
    return keep + shfl_xor_f32(give, lane_bit);
}

DEVICE float sum_of_rows(const float *sums, int pairs)   /* row by lane: see deliver */
{
    float sum = fold(sums[0], sums[pairs], 16);
    if (pairs == 2) sum = fold(sum, fold(sums[1], sums[3], 16), 8);
    else sum += shfl_xor_f32(sum, 8);
    for (int m = 4; m; m /= 2) sum += shfl_xor_f32(sum, m);
    return sum;
}

DEVICE void deliver(struct shared *s, float sum, int place, struct turn *out)
{                                        /* place < 0: another lane's sum */
    mbarrier_wait(s->taken + out->slot, out->odd ^ 1);
    if (place >= 0) ((float *)s->sum[out->slot])[place] = sum;
    __syncwarp();
    if (lane_id() == 0) mbarrier_arrive(s->delivered + out->slot);
    next_turn(out, SUMS);
}

DEVICE int place_of_sum(const struct product *p, struct columns c, int warp)
{
    int second = lane_id() / 8 % 2, high = lane_id() / 16;
    if (lane_id() % (p->wide ? 16 : 8)) return -1;
    return 2 * (((c.row + second) << p->bits) + (warp & (p->across - 1))) + high;
}

struct consumer {
    struct turn in, out;   /* the next slot of the ring, and of the sums */
    int place;             /* of this lane's sum; see deliver */
};

/* packed: where a weight lies */
enum { STEP = 2 * RUN };
struct bits64 { uint32_t v[2]; } __attribute__((aligned(8)));
struct row { const char *at; int n; };   /* packed; n weights */

DEVICE int place_of_eight(int c, int n)   /* of column c, among the eights as stored */
{
    int step = c / STEP * STEP, within = c - step;
    if (step + STEP > n) return c / 8;
    return step / 8 + within % RUN / 8 * 2 + within / RUN;
}

DEVICE bits128 eight_at(struct row r, int column)   /* of the eight from there on */
{
    int i = place_of_eight(column, r.n);
    struct bits64 bottoms = *(const struct bits64 *)(r.at + 8 * i);
    return unpack(bottoms.v[0], bottoms.v[1], *(const uint32_t *)(r.at + r.n + 4 * i));
}

/* packed: multiply a chunk */
struct step { bits128 bottoms; struct bits64 tops; };   /* a lane's sixteen of a row */

DEVICE void load_steps(const struct lane *l, struct step *w, const char *half,
                       int pairs, int steps)
{
    for (int q = 0; q < pairs; q++)
        for (int i = 0; i < steps; i++) {
            const char *row = half + l->row[q] / 2 * 3;
            int k = l->first + EIGHT * lane_id() + i * STEP;
            if (2 * i >= l->live) continue;
            w[q * steps + i].bottoms = load_16(row + k);
            w[q * steps + i].tops = *(const struct bits64 *)(row + l->width + k / 2);
        }
}

DEVICE float dot_steps(const struct step *w, const float *x, int steps)
{
    bits128 runs[4];
    for (int i = 0; i < steps; i++) {
        bits128 b = w[i].bottoms;
        runs[2 * i] = unpack(b.v[0], b.v[1], w[i].tops.v[0]);
        runs[2 * i + 1] = unpack(b.v[2], b.v[3], w[i].tops.v[1]);
    }
    return dot(runs, x, 2 * steps);
}

DEVICE bits128 load_run(const struct lane *l, const char *half, int row, int i,
                        int window)
{
    int column = l->first + i * RUN;
    bits128 w = {{ 0, 0, 0, 0 }};
    if (i >= l->live) return w;
#ifndef TWIN
    struct row r = { half + row / 2 * 3, l->width };
    if (window) return eight_at(r, column);
#endif
    w = load_16(half + 2 * (row + column));
    /* twin: move the weights into the window */
    #ifdef TWIN
    for (int j = 0; window && j < 4; j++)
        w.v[j] = into_window(w.v[j] & 0xffffu, window)
               | into_window(w.v[j] >> 16, window) << 16;
    #endif
    return w;
}

DEVICE void consume_by(const struct layer_args *a, struct shared *s, struct consumer *c,
                       const struct lane *l, int chunks, int pairs, int runs, int steps)
{
    struct step packed[4] = {{{{ 0 }}, {{ 0 }}}};   /* [half][pair][step] */
    bits128 w[8];                                  /* [half][pair][run] */
    UNROLL(1)
    for (int i = 0; i < chunks; i++) {
        float sums[4];
        for (int h = 0; h < 2; h++) {
            const char *half = slot_half(a, c->in.slot, h);
            mbarrier_wait(s->full[h] + c->in.slot, c->in.odd);
            /* packed: take a half of a slot */
            if (steps)
                load_steps(l, packed + h * pairs * runs / 2, half, pairs, runs / 2);
            else
                for (int j = 0; j < pairs * runs; j++)
                    w[h * pairs * runs + j] = load_run(l, half, l->row[j / runs], j % runs,
                                                       more_shared()->window[h][c->in.slot]);
        }
        __syncwarp();
        if (lane_id() == 0) mbarrier_arrive(s->empty + c->in.slot);
        next_turn(&c->in, a->g.slots);
        for (int r = 0; r < 2 * pairs; r++)
            sums[r] = steps ? dot_steps(packed + r * runs / 2, l->x, runs / 2)
                            : dot(w + r * runs, l->x, runs);
        deliver(s, sum_of_rows(sums, pairs), c->place, &c->out);
    }
}

DEVICE void consume_chunks(const struct layer_args *a, struct shared *s,
                           struct consumer *c,
                           const struct lane *l, int chunks, int pairs, int runs)
{
    if (a->whole_steps && l->width % STEP == 0)
        consume_by(a, s, c, l, chunks, pairs, runs, 1);
    else consume_by(a, s, c, l, chunks, pairs, runs, 0);
}

/* stream: the consumers */
DEVICE void pass_tiles(const struct layer_args *a, struct shared *s, struct consumer *w,
                       int64_t pos)
{
    struct span n = span_at(a, pos);
    if (!n.units) return;
    skip_turns(&w->in, a->g.slots, tiles_of_block(a, n));
    mbarrier_wait(&s->tiles_over, 0);
}

DEVICE void consume(const struct layer_args *a, struct shared *s, int64_t pos, int warp)
{
    uint32_t epoch = load_relaxed(a->launches + blockIdx.x) + 1;
    struct consumer w = { { 0, 0 }, { 0, 0 }, 0 };
    struct lane l;
    if (lane_id() == 0) s->squares[QKV][warp] = s->squares[GATE_UP][warp] = 0;
    UNROLL(1)
    for (int number = QKV; number < PHASES; number++) {
        struct leg leg = leg_of(a, number);
        const struct product *p = a->g.p + leg.phase;
        if (number == ATTEND) pass_tiles(a, s, &w, pos);
        for (int start = leg.from, end; start < leg.to; start = end) {
            end = batch_end(p, start, leg.to);
            for (int piece = 0; piece < p->pieces; piece++) {
                /* consume a piece of a batch */
                int width = piece_width(p, piece);
                struct columns c = columns_of(p, width, warp);
                if (number != ATTEND)
                    take_vector(a, s, l.x, leg.phase, piece, c, warp, epoch, start > 0);
                for (int q = 0; q < 2; q++) l.row[q] = (c.row + q) * width;
                l.first = c.first, l.width = width, l.live = c.live;
                w.place = place_of_sum(p, c, warp);
                if (number != ATTEND && start == leg.from && piece == 0) MARK(a, START, leg.phase);
                if (p->wide) consume_chunks(a, s, &w, &l, end - start, 1, 4);
                else consume_chunks(a, s, &w, &l, end - start, 2, 2);
                MARK(a, END, leg.phase);
            }
        }
    }
}

/* packed: the warp of the exceptions */
enum { AT_ONCE = 3 };   /* for more there are not registers enough */

DEVICE void add_exceptions(const struct layer_args *a, struct fix *f, int phase,
                           int piece, const uint32_t *one, uint32_t n, uint32_t epoch)
{
    int first = piece * a->g.p[phase].piece;
    float x[AT_ONCE];
    if (phase == QKV)
        for (int j = 0; j < AT_ONCE; j++)
            x[j] = bf16_to_f32(a->x[first + (one[j] >> 16)]);
    else {
        /* packed: take the values that exceptions meet */
        const uint32_t *from = (phase == OUT ? a->attended : phase == DOWN ? a->act : a->x1)
                             + first;
        for (uint64_t start = spin_start();;) {
            uint32_t word[AT_ONCE], wrong = 0;
            for (int j = 0; j < AT_ONCE; j++) word[j] = load_relaxed(from + (one[j] >> 16));
            for (int j = 0; j < AT_ONCE; j++)
                wrong |= stale(word[j], epoch), x[j] = value_of(word[j]);
            if (!wrong) break;
            retry_values(from, start);
        }
    }
    for (uint32_t j = 0; j < AT_ONCE; j++) {
        int i = first + (int)(one[j] >> 16);
        if (phase == QKV || phase == GATE_UP)
            x[j] *= bf16_to_f32((phase == QKV ? a->in_norm : a->post_norm)[i]);
        if (j < n) add_exception(f, one[j], x[j]);
    }
}

#ifndef TWIN
DEVICE struct fix fix_of(const struct layer_args *a, int phase, int piece, int c,
                         int half,
                         int pair, uint32_t epoch)
{
    const struct matrix *m = a->m + matrix_of(a, phase, c, half);
    struct fix f = { 0, 0, m->scale };
    if (!m->words) return f;
    int64_t row = piece * m->rows + row_of(a, phase, c, half) + pair;
    const uint32_t *list = m->lists + row * m->words;
    bits128 head = load_16(list), next = load_16(list + (m->words > 4 ? 4 : 0));
    uint32_t count = head.v[0], room = (uint32_t)m->words - 2;
    uint32_t one[AT_ONCE] = { head.v[2], head.v[3], next.v[0] };
    UNROLL(1)
    for (uint32_t i = 0; i < count; i += AT_ONCE) {
        /* packed: read the exceptions that are not in registers */
        for (uint32_t j = i; (i || room == 2) && j < i + AT_ONCE && j < count; j++)
            one[j - i] = j < room ? list[2 + j] : m->more[head.v[1] + j - room];
        for (uint32_t j = 1; j < AT_ONCE; j++)
            if (i + j >= count) one[j] = one[0];
        add_exceptions(a, &f, phase, piece, one, count - i, epoch);
    }
    return f;
}
#else
/* twin: find the exceptions of a row */
DEVICE struct fix fix_of(const struct layer_args *a, int phase, int piece, int c,
                         int half,
                         int pair, uint32_t epoch)
{
    const struct product *p = a->g.p + phase;
    const struct matrix *m = a->m + matrix_of(a, phase, c, half);
    struct fix f = { 0, 0, m->scale };
    int64_t first = (int64_t)piece * p->piece, end = first + piece_width(p, piece);
    const uint16_t *row = (const uint16_t *)(m->at + (row_of(a, phase, c, half) + pair)
                                                     * m->stride);
    for (int64_t k = first; m->base && k < end; k += 8) {
        bits128 w = load_16(row + k);
        uint32_t found = exceptions_in(w, m->base);
        for (int j = 0; found >> j; j++)
            if (found >> j & 1) {
                uint32_t it = (uint32_t)(k + j - first) << 16 | half_of(w, j);
                uint32_t one[AT_ONCE] = { it, it, it };
                add_exceptions(a, &f, phase, piece, one, 1, epoch);
            }
    }
    return f;
}
#endif

DEVICE void deliver_fix(struct shared *s, struct turn *out, struct fix f, int row,
                        int bits)
/* row < 0: not of this chunk; of 2^bits pairs */
{
    mbarrier_wait(s->taken + out->slot, out->odd ^ 1);
    if (row >= 0)
        more_shared()->fix[out->slot][row >> bits][row & ((1 << bits) - 1)] = f;
    __syncwarp();
    if (lane_id() == 0) mbarrier_arrive(s->delivered + out->slot);
    next_turn(out, SUMS);
}

DEVICE void fix_chunks(const struct layer_args *a, struct shared *s, struct turn *out,
                       int phase, int piece, int i, int end, uint32_t epoch)
{
    const struct product *p = a->g.p + phase;
    int bits = p->wide ? 0 : 4 - p->bits, rows = 2 << bits, several = 32 / rows;
    int mine = lane_id() / rows, row = lane_id() % rows;
    struct deal d = deal_of(a, phase);
    if (several > SUMS / 2) several = SUMS / 2;
    UNROLL(1)
    for (; i < end; i += several) {
        struct fix f = { 0, 0, 1 };
        int c = d.first + (i + mine) * d.step;
        if (mine < several && i + mine < end)
            f = fix_of(a, phase, piece, c, row >> bits, row & ((1 << bits) - 1),
                       epoch);
        UNROLL(1)
        for (int j = 0; j < several && i + j < end; j++)
            deliver_fix(s, out, f, j == mine ? row : -1, bits);
    }
}

DEVICE void fix_sums(const struct layer_args *a, struct shared *s)
{
    struct turn out = { 0, 0 };
    wait_until_ready();
    uint32_t epoch = load_relaxed(a->launches + blockIdx.x) + 1;
    UNROLL(1)
    for (int number = QKV; number < PHASES; number++) {
        struct leg l = leg_of(a, number);
        const struct product *p = a->g.p + l.phase;
        for (int start = l.from, end; start < l.to; start = end) {
            end = batch_end(p, start, l.to);
            for (int piece = 0; piece < p->pieces; piece++)
                fix_chunks(a, s, &out, l.phase, piece, start, end, epoch);
        }
    }
}

/* packed: take the sums of a chunk */
/* stream: the sum over warps */
DEVICE struct pair sum_across(struct pair y, int bits)
{
    for (int m = 0; m < 3; m++)
        if (m < bits) {
            y.low += shfl_xor_f32(y.low, 1 << m);
            y.high += shfl_xor_f32(y.high, 1 << m);
        }
    return y;
}

/* of across */
DEVICE struct pair take_sums(struct shared *s, struct turn *in, int bits)
{
    int lane = lane_id() % DELIVERED, pair = lane >> bits;
    mbarrier_wait(s->delivered + in->slot, in->odd);
    struct pair y = s->sum[in->slot][lane];
    struct fix low = more_shared()->fix[in->slot][0][pair];
    struct fix high = more_shared()->fix[in->slot][1][pair];
    __syncwarp();
    if (lane_id() == 0) mbarrier_arrive(s->taken + in->slot);
    next_turn(in, SUMS);
    y = sum_across(y, bits);
    y.low = corrected(y.low, low), y.high = corrected(y.high, high);
    return y;
}

/* stream: the epilogue */
DEVICE struct pair take_pieces(const struct layer_args *a, struct shared *s,
                               struct turn *in,
                               struct leg l, int i)
{
    const struct product *p = a->g.p + l.phase;
    int at = (i - l.from) % BATCH, end = batch_end(p, i, l.to);
    if (at == 0) {
        UNROLL(1)
        for (int piece = 0; piece < p->pieces - 1; piece++)
            UNROLL(1)
            for (int k = 0; k < end - i; k++) {
                struct pair y = take_sums(s, in, 3);
                if (lane_id() == 0 && piece)
                    y.low += s->batch[k].low, y.high += s->batch[k].high;
                if (lane_id() == 0) s->batch[k] = y;
            }
        __syncwarp();
    }
    struct pair y = take_sums(s, in, 3);
    y.low += s->batch[at].low, y.high += s->batch[at].high;
    return y;
}

DEVICE float norm_factor(const struct layer_args *a, const struct shared *s, int phase)
{
    float squares = 0;
    if (phase != QKV && phase != GATE_UP) return 1;
    UNROLL(1)
    for (int w = 0; w < a->g.p[phase].across; w++) squares += s->squares[phase][w];
    return rsqrtf(squares / (float)a->d + a->eps);
}

/* stream: rotate a pair */
DEVICE struct pair rotated(struct pair y, float c, float s)
{
    struct pair z = { y.low * c - y.high * s, y.high * c + y.low * s };
    return z;
}

DEVICE float half_turns(int64_t pos, double turn)   /* within -1 .. 1 */
{
    double turns = (double)pos * turn * 0.15915494309189533577;   /* 1 / 2 pi */
    return (float)(2 * (turns - rint(turns)));
}

DEVICE void prepare_rotation(const struct layer_args *a, struct shared *s, int64_t pos)
{
    for (int i = lane_id(); i < a->hd / 2; i += 32) {
        float x = half_turns(pos, a->turn[i]);
        s->cosine[i] = cospif(x), s->sine[i] = sinpif(x);
    }
    __syncwarp();
}

DEVICE void finish_projection(const struct layer_args *a, const struct shared *s,
                              int64_t pos, struct place at, struct pair y,
                                  uint32_t epoch)
{
    int half = a->hd / 2, column = at.head * a->hd + at.i;
    if (at.kind < 2) y = rotated(y, s->cosine[at.i], s->sine[at.i]);
    uint32_t *words = at.kind == 0 ? a->roped_q : at.kind == 1 ? a->new_k : a->new_v;
    if (at.kind) {
        uint16_t low = f32_to_bf16(y.low), high = f32_to_bf16(y.high);
        uint16_t *row = (at.kind == 1 ? a->k_cache : a->v_cache)
                      + (at.head * a->pos.rows + pos) * a->hd + at.i;
        row[0] = low, row[half] = high;
        y.low = bf16_to_f32(low), y.high = bf16_to_f32(high);
    }
    store_relaxed(words + column, tagged(y.low, epoch));
    store_relaxed(words + column + half, tagged(y.high, epoch));
}

DEVICE void count_words(uint32_t *hint, uint32_t words)
{
    __syncwarp();
    if (lane_id() == 0) count_relaxed(hint, words);
}

struct walk { int pair, mine, first, step; };   /* mine: this lane has a pair */

DEVICE struct walk walk_of(const struct layer_args *a, struct leg l)
{
    const struct product *p = a->g.p + l.phase;
    struct deal d = deal_of(a, l.phase);
    int pair = lane_id() >> p->bits;
    struct walk w = { pair, pair << p->bits == lane_id() && pair < p->pairs,
                      (d.first + l.from * d.step) * p->pairs,
                      d.step * p->pairs };   /* pairs from one chunk to the next */
    return w;
}

DEVICE void finish_projections(const struct layer_args *a, struct shared *s,
                               struct turn *in,
                               struct leg l, int64_t pos, uint32_t epoch)
{
    struct walk w = walk_of(a, l);
    int bits = a->g.p[QKV].bits, pieces = a->g.p[QKV].pieces;
    uint32_t words = 2 * (uint32_t)a->g.p[QKV].pairs;
    float factor = 0;
    UNROLL(1)
    for (int i = l.from; i < l.to; i++, w.first += w.step) {
        struct pair y = pieces > 1 ? take_pieces(a, s, in, l, i)
            : take_sums(s, in, bits);
        if (i == l.from) factor = norm_factor(a, s, QKV);
        y.low *= factor, y.high *= factor;
        struct place at = place_of(a, w.first + w.pair);
        if (w.mine) finish_projection(a, s, pos, at, y, epoch);
        at = place_of(a, w.first);
        count_words(hint_of(a, at.kind ? HINT_ROW : HINT_Q, at.head), words);
    }
}

DEVICE void finish_gate_up(const struct layer_args *a, struct shared *s,
                           struct turn *in,
                           struct leg l, uint32_t epoch)
{
    struct walk w = walk_of(a, l);
    int bits = a->g.p[GATE_UP].bits, pieces = a->g.p[GATE_UP].pieces;
    uint32_t words = (uint32_t)a->g.p[GATE_UP].pairs, *hints = hint_of(a, HINT_ACT, 0);
    float factor = 0;
    UNROLL(1)
    for (int i = l.from; i < l.to; i++, w.first += w.step) {
        struct pair y = pieces > 1 ? take_pieces(a, s, in, l, i)
            : take_sums(s, in, bits);
        if (i == l.from) factor = norm_factor(a, s, GATE_UP);
        float gate = y.low * factor, up = y.high * factor;
        float act = gate / (1 + exp2_approx(-LOG2_E * gate)) * up;
        if (w.mine) store_relaxed(a->act + w.first + w.pair, tagged(act, epoch));
        count_words(hints + w.first / SLICE * LINE, words);
    }
}

struct residuals { uint32_t low, high; };   /* of the two rows of a pair */

DEVICE struct residuals fetch_residuals(const struct layer_args *a, int phase, int row,
                                        int pairs, uint32_t epoch)
{
    struct residuals r;
    if (phase == DOWN)
        r.low = load_relaxed(a->x1 + row), r.high = load_relaxed(a->x1 + row + pairs);
    else {
        r.low = (uint32_t)a->x[row] << 16 | (epoch & EPOCH_BITS);
        r.high = (uint32_t)a->x[row + pairs] << 16 | (epoch & EPOCH_BITS);
    }
    return r;
}

DEVICE float residual(const struct layer_args *a, uint32_t word, int row,
                      uint32_t epoch)
{
    for (uint64_t start = spin_start(); stale(word, epoch);) {
        retry_values(a->x1 + row, start);
        word = load_relaxed(a->x1 + row);
    }
    return value_of(word);
}

DEVICE void finish_rows(const struct layer_args *a, struct shared *s, struct turn *in,
                        struct leg l, uint32_t epoch)
{
    struct walk w = walk_of(a, l);
    const struct product *p = a->g.p + l.phase;
    int bits = p->bits, pieces = p->pieces, pairs = p->pairs;
    struct residuals now, next = { 0, 0 };
    int row = 2 * w.first + w.pair;
    if (w.mine && l.from < l.to) next = fetch_residuals(a, l.phase, row, pairs, epoch);
    UNROLL(1)
    for (int i = l.from; i < l.to; i++, w.first += w.step, row += 2 * w.step) {
        struct pair y = pieces > 1 ? take_pieces(a, s, in, l, i)
            : take_sums(s, in, bits);
        /* add the residuals of a chunk, and fetch those of the next */
        now = next;
        if (w.mine && i + 1 < l.to)
            next = fetch_residuals(a, l.phase, row + 2 * w.step, pairs, epoch);
        if (w.mine) {
            y.low += residual(a, now.low, row, epoch);
            y.high += residual(a, now.high, row + pairs, epoch);
        }
        /* store the rows of a chunk */
        if (l.phase == OUT) {
            if (w.mine) {
                store_relaxed(a->x1 + row, tagged(y.low, epoch));
                store_relaxed(a->x1 + row + pairs, tagged(y.high, epoch));
            }
            count_words(hint_of(a, HINT_X1, 2 * w.first / SLICE), 2 * (uint32_t)pairs);
        } else if (w.mine)
            a->x_out[row] = f32_to_bf16(y.low), a->x_out[row + pairs] = f32_to_bf16(y.high);
    }
}

DEVICE void finish(const struct layer_args *a, struct shared *s, int64_t pos)
{
    struct turn in = { 0, 0 };
    wait_until_ready();
    prepare_rotation(a, s, pos);
    uint32_t epoch = load_relaxed(a->launches + blockIdx.x) + 1;
    finish_projections(a, s, &in, leg_of(a, QKV), pos, epoch);
    finish_projections(a, s, &in, leg_of(a, ATTEND), pos, epoch);
    finish_rows(a, s, &in, leg_of(a, OUT), epoch);
    finish_gate_up(a, s, &in, leg_of(a, GATE_UP), epoch);
    finish_rows(a, s, &in, leg_of(a, DOWN), epoch);
    if (lane_id() == 0) store_relaxed(a->launches + blockIdx.x, epoch);
}

/* stream: attention */
/* attention: the queries of a unit */
DEVICE void split_query(uint32_t q[2][4], const bits128 w[2])   /* eight numbers */
{
    for (int h = 0; h < 2; h++)
        for (int i = 0; i < 2; i++)
            split_pair(value_of(w[h].v[2 * i]), value_of(w[h].v[2 * i + 1]),
                       &q[h][2 * i], &q[h][2 * i + 1]);
}

DEVICE void take_queries(const struct layer_args *a, uint32_t q[8][4], int group,
                         uint32_t epoch, int hd)
{
    int g = lane_id() / 4, t = lane_id() % 4, heads = heads_of(a, group);
    /* others: the first again */
    int row = first_head(a, group) + (g < heads ? g : 0);
    const uint32_t *from = a->roped_q + row * hd + 8 * t;
    if (lane_id() < heads)
        wait_hint(hint_of(a, HINT_Q, first_head(a, group) + lane_id()),
                  epoch * (uint32_t)hd);
    __syncwarp();
    for (uint64_t start = spin_start();;) {
        bits128 w[4][2];
        uint32_t wrong = 0;
        for (int m = 0; m < hd / 32; m++)
            for (int i = 0; i < 2; i++) w[m][i] = load_relaxed_4(from + 32 * m + 4 * i);
        for (int m = 0; m < hd / 32; m++) {
            wrong |= any_stale(w[m][0], epoch) | any_stale(w[m][1], epoch);
            split_query(q + 2 * m, w[m]);
        }
        if (!any_lane(wrong)) return;
        retry_values(from, start);
    }
}

/* attention: a tile */
/* from this warp's keys */
DEVICE void load_keys(bits128 k[2][4], const char *tile, int hd)
{
    int g = lane_id() / 4, t = lane_id() % 4, odd = g % 2;
    for (int n = 0; n < 2; n++)
        for (int m = 0; m < hd / 32; m += 2) {
            const char *row = tile + (8 * n + g) * 2 * hd + 64 * m + 16 * t;
            bits128 x = load_16(row + 64 * odd), y = load_16(row + 64 * !odd);
            for (int i = 0; i < 4; i++) {
                k[n][m].v[i] = odd ? y.v[i] : x.v[i];
                k[n][m + 1].v[i] = odd ? x.v[i] : y.v[i];
            }
        }
}

DEVICE void score_keys(float score[2][2], uint32_t q[8][4], bits128 k[2][4], int hd)
{
    for (int n = 0; n < 2; n++) {
        float c[4] = { 0, 0, 0, 0 };
        for (int m = 0; m < hd / 32; m++) {
            mma_bf16(c, q[2 * m], k[n][m].v);
            mma_bf16(c, q[2 * m + 1], k[n][m].v + 2);
        }
        score[n][0] = c[0] + c[2], score[n][1] = c[1] + c[3];   /* hi and lo */
    }
}

DEVICE void load_values(bits128 v[4][2], const char *tile, int keys, int hd)
{
    int g = lane_id() / 4, t = lane_id() % 4;
    bits128 none = {{ 0, 0, 0, 0 }};
    for (int i = 0; i < 4; i++) {
        int key = i / 2 * 8 + 2 * t + i % 2;
        for (int j = 0; j < hd / 64; j++)
            v[i][j] = key < keys ? load_16(tile + key * 2 * hd + 128 * j + 16 * g)
                : none;
    }
}

DEVICE void add_values(float sum[16][4], const uint32_t p[4], bits128 v[4][2], int hd)
{
    for (int j = 0; j < hd / 64; j++)
        for (int i = 0; i < 8; i++) {
            uint32_t places = i % 2 ? 0x7632 : 0x5410, b[2];
            b[0] = pick_bytes(v[0][j].v[i / 2], v[1][j].v[i / 2], places);
            b[1] = pick_bytes(v[2][j].v[i / 2], v[3][j].v[i / 2], places);
            mma_bf16(sum[8 * j + i], p, b);
        }
}

DEVICE float base_of(float max) { return max == -INFINITY ? 0 : max; }

/* of head g; see the output's order */
struct online { float max, weight, sum[16][4]; };

DEVICE void soften(struct online *u, float score[2][2], int keys, float scale,
                   uint32_t p[4], int hd)
{
    int t = lane_id() % 4;
    float max = u->max, e[4];
    for (int i = 0; i < 4; i++) {
        int key = i / 2 * 8 + 2 * t + i % 2;
        e[i] = key < keys ? score[i / 2][i % 2] * scale : -INFINITY;
        max = fmaxf(max, e[i]);
    }
    max = fmaxf(max, shfl_xor_f32(max, 1));
    max = fmaxf(max, shfl_xor_f32(max, 2));
    if (any_lane(max != u->max)) {
        float f = exp2_approx(u->max - base_of(max));
        u->max = max, u->weight *= f;
        for (int i = 0; i < hd / 8; i++)
            for (int j = 0; j < 4; j++) u->sum[i][j] *= f;
    }
    for (int i = 0; i < 4; i++) e[i] = exp2_approx(e[i] - base_of(max));
    u->weight += e[0] + e[1] + e[2] + e[3];
    split_pair(e[0], e[1], p, p + 1);
    split_pair(e[2], e[3], p + 2, p + 3);
}

DEVICE void attend_tile(const struct layer_args *a, struct shared *s, struct turn t,
                        struct online *u, uint32_t q[8][4], int keys, int warp, int hd)
{
    bits128 k[2][4], v[4][2];
    float score[2][2];
    uint32_t p[4];
    keys -= 16 * warp;   /* of this warp's sixteen: those that there are */
    mbarrier_wait(s->full[0] + t.slot, t.odd);
    if (keys > 0) load_keys(k, slot_half(a, t.slot, 0) + 16 * warp * 2 * hd, hd);
    mbarrier_wait(s->full[1] + t.slot, t.odd);
    if (keys > 0)
        load_values(v, slot_half(a, t.slot, 1) + 16 * warp * 2 * hd, keys, hd);
    __syncwarp();
    if (lane_id() < CONSUMERS / ATTENTION) mbarrier_arrive(s->empty + t.slot);
    if (keys <= 0) return;
    score_keys(score, q, k, hd);
    soften(u, score, keys, a->score_scale * LOG2_E, p, hd);
    add_values(u->sum, p, v, hd);
}

/* attention: a unit */
DEVICE void keep_sums(struct shared *s, struct online *u, int warp, int hd)
{
    int g = lane_id() / 4, t = lane_id() % 4;
    u->weight += shfl_xor_f32(u->weight, 1);
    u->weight += shfl_xor_f32(u->weight, 2);
    if (t == 0) s->unit_max[warp][g] = u->max, s->unit_weight[warp][g] = u->weight;
    for (int j = 0; j < hd / 64; j++)
        for (int h = 0; h < 2; h++)
            for (int i = 0; i < 8; i++)
                s->unit_sum[warp][g][64 * j + 16 * t + 8 * h + i]
                    = u->sum[8 * j + i][h] + u->sum[8 * j + i][h + 2];   /* hi and lo */
}

DEVICE void store_unit(const struct layer_args *a, const struct shared *s, int unit,
                       int head, uint32_t epoch)
{
    int i = 4 * lane_id();
    float max = -INFINITY, weight = 0, sum[4] = { 0, 0, 0, 0 };
    for (int w = 0; w < ATTENTION; w++) max = fmaxf(max, s->unit_max[w][head]);
    uint32_t word = tagged(max, epoch);
    for (int w = 0; w < ATTENTION; w++) {
        float f = exp2_approx(s->unit_max[w][head] - base_of(value_of(word)));
        weight = fmaf(f, s->unit_weight[w][head], weight);
        if (i < a->hd)
            for (int j = 0; j < 4; j++)
                sum[j] = fmaf(f, s->unit_sum[w][head][i + j], sum[j]);
    }
    bits128 out;
    for (int j = 0; j < 4; j++) out.v[j] = tagged(sum[j], epoch);
    int at = unit * HEADS + head;
    if (i < a->hd) store_relaxed_4(a->unit_sum + (int64_t)at * a->hd + i, out);
    if (i == 0) {
        store_relaxed(a->unit_max + at, word);
        store_relaxed(a->unit_weight + at, tagged(weight, epoch));
    }
}

DEVICE void attend_unit(const struct layer_args *a, struct shared *s, struct span n,
                        int64_t pos, int number, struct turn *in, int warp,
                        uint32_t epoch, int hd)
{
    int group = number % a->g.groups, split = number / a->g.groups;
    int unit = group * a->g.splits + split, end = first_tile(a, n, split + 1);
    uint32_t q[8][4];
    struct online u = { -INFINITY, 0, {{ 0 }} };
    take_queries(a, q, group, epoch, hd);
    if (number == unit_of(0)) MARK(a, START, ATTEND);
    UNROLL(1)
    for (int t = first_tile(a, n, split); t < end; t++) {
        int64_t left = pos - (int64_t)t * TILE_KEYS;
        attend_tile(a, s, *in, &u, q, left < TILE_KEYS ? (int)left : TILE_KEYS, warp,
                    hd);
        next_turn(in, a->g.slots);
    }
    keep_sums(s, &u, warp, hd);
    named_barrier_sync(UNITS, 32 * ATTENTION);
    for (int h = 0; h < HEADS / ATTENTION; h++)
        store_unit(a, s, unit, warp * (HEADS / ATTENTION) + h, epoch);
    __syncwarp();
    if (lane_id() == 0) count_relaxed(hint_of(a, HINT_UNITS, group), 1);
    named_barrier_sync(UNITS, 32 * ATTENTION);   /* before the next unit's sums */
}

/* attention: merge the units of a group */
struct part { float max, weight; bits128 sum[2]; };   /* of one unit */

DEVICE void take_part(const struct layer_args *a, struct part *p, int unit, int head,
                      int at, int side, uint32_t epoch)
{
    const uint32_t *from = a->unit_sum + (int64_t)unit * HEADS * a->hd + at;
    for (uint64_t start = spin_start();;) {
        uint32_t max = load_relaxed(a->unit_max + unit * HEADS + head);
        uint32_t weight = load_relaxed(a->unit_weight + unit * HEADS + head);
        p->sum[0] = load_relaxed_4(from);
        p->sum[1] = a->hd == 128 ? load_relaxed_4(from + 4 * side) : p->sum[0];
        uint32_t wrong = stale(max, epoch) | stale(weight, epoch)
                       | any_stale(p->sum[0], epoch) | any_stale(p->sum[1], epoch);
        p->max = value_of(max), p->weight = value_of(weight);
        if (!any_lane(wrong)) return;
        retry_values(from, start);
    }
}

/* over the units */
DEVICE void merge_parts(struct part *p, float sum[2][4], int side)
{
    float max = p->max;
    for (int m = side; m < 32; m *= 2) max = fmaxf(max, shfl_xor_f32(max, m));
    float f = exp2_approx(p->max - base_of(max));
    p->max = max, p->weight *= f;
    for (int j = 0; j < 8; j++)
        sum[j / 4][j % 4] = f * value_of(p->sum[j / 4].v[j % 4]);
    UNROLL(1)
    for (int m = side; m < 32; m *= 2) {
        p->weight += shfl_xor_f32(p->weight, m);
        for (int j = 0; j < 8; j++)
            sum[j / 4][j % 4] += shfl_xor_f32(sum[j / 4][j % 4], m);
    }
}

struct newest { float score; bits128 value[2]; };   /* value: of this lane's columns */

DEVICE void take_newest(const struct layer_args *a, struct newest *n, int group,
                        bits128 query, int at, int side, uint32_t epoch)
{
    int kv = group / a->g.octets, i = 4 * lane_id() % a->hd;
    const uint32_t *k = a->new_k + kv * a->hd + i,
        *v = a->new_v + kv * a->hd + at % a->hd;
    float dot = 0;
    if (lane_id() == 0)
        wait_hint(hint_of(a, HINT_ROW, kv), epoch * 2 * (uint32_t)a->hd);
    __syncwarp();
    for (uint64_t start = spin_start();;) {
        bits128 key = load_relaxed_4(k);
        n->value[0] = load_relaxed_4(v);
        n->value[1] = a->hd == 128 ? load_relaxed_4(v + 4 * side) : n->value[0];
        uint32_t wrong = any_stale(key, epoch) | any_stale(n->value[0], epoch)
                       | any_stale(n->value[1], epoch);
        dot = 0;
        for (int j = 0; j < 4; j++)
            dot = fmaf(value_of(query.v[j]), value_of(key.v[j]), dot);
        if (!any_lane(wrong)) break;
        retry_values(v, start);
    }
    for (int m = a->hd / 8; m; m /= 2) dot += shfl_xor_f32(dot, m);
    n->score = dot * a->score_scale * LOG2_E;
}

DEVICE void merge_slice(const struct layer_args *a, int number, int warp,
                        uint32_t epoch)
{
    int group = number % a->g.groups, splits = a->g.splits, side = 32 / splits;
    int width = HEADS * a->hd / (splits * ATTENTION);   /* numbers of a warp */
    int first = (number / a->g.groups * ATTENTION + warp) * width, head = first / a->hd;
    int at = first + lane_id() % side * 4;
    struct part p;
    struct newest n;
    float sum[2][4];
    if (head >= heads_of(a, group)) return;
    bits128 query = load_relaxed_4(a->roped_q + (first_head(a, group) + head) * a->hd
                                   /* seen by this warp's unit */
                                   + 4 * lane_id() % a->hd);
    if (lane_id() == 0)
        wait_hint(hint_of(a, HINT_UNITS, group),
                  epoch * (uint32_t)(ATTENTION * splits));
    __syncwarp();
    take_part(a, &p, group * splits + lane_id() / side, head, at, side, epoch);
    merge_parts(&p, sum, side);
    take_newest(a, &n, group, query, at, side, epoch);
    /* add the newest key and hand the slice on */
    float base = base_of(fmaxf(p.max, n.score));
    float old = exp2_approx(p.max - base), now = exp2_approx(n.score - base);
    float weight = fmaf(old, p.weight, now);
    int64_t column = (int64_t)first_head(a, group) * a->hd;
    for (int j = 0; j < 2 && j < a->hd / 64; j++) {
        bits128 out;
        for (int i = 0; i < 4; i++)
            out.v[i] = tagged((old * sum[j][i] + now * value_of(n.value[j].v[i])) / weight,
                              epoch);
        if (lane_id() < side)
            store_relaxed_4(a->attended + column + at + 4 * side * j, out);
    }
    __syncwarp();
    if (lane_id() == 0)
        count_relaxed(hint_of(a, HINT_ATTENDED, (column + first) / SLICE), (uint32_t)width);
}

DEVICE void attend(const struct layer_args *a, struct shared *s, int64_t pos, int warp)
{
    uint32_t epoch = load_relaxed(a->launches + blockIdx.x) + 1;
    struct span n = span_at(a, pos);
    struct turn in = { 0, 0 };
    skip_turns(&in, a->g.slots, leg_of(a, QKV).to * a->g.p[QKV].pieces);
    mbarrier_wait(&s->tiles_begin, 0);
    UNROLL(1)
    for (int u = 0; u < n.units; u++) {
        if (a->hd == 128) attend_unit(a, s, n, pos, unit_of(u), &in, warp, epoch, 128);
        else attend_unit(a, s, n, pos, unit_of(u), &in, warp, epoch, 64);
    }
    UNROLL(1)
    for (int u = 0; u < n.units; u++) merge_slice(a, unit_of(u), warp, epoch);
    MARK(a, END, ATTEND);
}

/* packed: the kernel */
KERNEL THREADS(32 * BLOCK_WARPS)
whole_layer(const IN_PLACE struct layer_args a)
{
    /* stream: the roles of the warps */
    struct shared *s = block_state();
    int warp = (int)threadIdx.x / 32;
    if (a.pos.at) wait_for_prerequisites();   /* the position is somebody else's */
    int64_t pos = position(a.pos);
    if (pos < 0) {
        /* fill the result with NaN and remember */
        for (int64_t i = blockIdx.x * blockDim.x + threadIdx.x; i < a.d;
             i += gridDim.x * blockDim.x)
            a.x_out[i] = 0x7fc0;
        if (blockIdx.x == 0 && threadIdx.x == 0) *a.status = 4;   /* LAYER_BAD_POSITION */
        return;
    }
    if (warp < CONSUMERS) {
        GROW_REGISTERS(128);
        wait_until_ready();
        consume(&a, s, pos, warp);
    } else if (warp < CONSUMERS + ATTENTION) {
        GROW_REGISTERS(192);
        wait_until_ready();
        if (span_at(&a, pos).units) attend(&a, s, pos, warp - CONSUMERS);
    } else {
        SHRINK_REGISTERS(64);
        if (warp == EPILOGUE) finish(&a, s, pos);
        else if (warp < PRODUCERS + 2) produce(&a, s, pos, warp - PRODUCERS);
    else fix_sums(&a, s);
    /* stream: the end of the roles */
    }
}
CPU_KERNEL(whole_layer, struct layer_args)

enum { MORE_FITS = 1 / (sizeof(struct more) <= MORE_SHARED) };

/* packed: the kernels that pack */
KERNEL count_exponents(struct pack_args a)   /* 256 threads; rows without gaps */
{
    uint32_t *count = (uint32_t *)shared_memory();
    int64_t first = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
    int64_t step = (int64_t)gridDim.x * blockDim.x;
    count[threadIdx.x] = 0;
    __syncthreads();
    for (int64_t i = first; i < a.rows * a.stride / 8; i += step) {
        bits128 w = load_16(a.from + 8 * i);
        for (int j = 0; j < 8; j++)
            add_in_block(count + (half_of(w, j) >> 7 & 0xffu), 1);
    }
    __syncthreads();
    atomic_add_relaxed(a.exponents + threadIdx.x, count[threadIdx.x]);
}
CPU_KERNEL(count_exponents, struct pack_args)
#ifndef TWIN
/* packed: pack the rows */
/* packed: pack eight weights */
DEVICE void pack_eight(bits128 w, int base, char *row, int n, int place)
{
    struct bits64 bottoms;
    for (int i = 0; i < 4; i++)
        w.v[i] = into_window(w.v[i] & 0xffffu, base)
               | into_window(w.v[i] >> 16, base) << 16;
    bottoms.v[0] = pick_bytes(w.v[0], w.v[1], 0x6420);
    bottoms.v[1] = pick_bytes(w.v[2], w.v[3], 0x6420);
    uint32_t first = pick_bytes(w.v[0], w.v[1], 0x7531) & 0x87878787u;
    uint32_t second = pick_bytes(w.v[2], w.v[3], 0x7531) & 0x87878787u;
    *(struct bits64 *)(row + 8 * place) = bottoms;
    *(uint32_t *)(row + n + 4 * place) = first | second >> 4 | second << 28;
}

/* packed: list the exceptions of a row */
DEVICE void list_exceptions(const struct pack_args *a, const uint16_t *from,
                            uint32_t *list, uint32_t *more, uint32_t room)
{
    uint32_t found = 0;
    for (int k = 0; k < a->n; k += RUN) {
        int c = k + 8 * lane_id();
        uint32_t mine = c < a->n ? exceptions_in(load_16(from + c), a->base) : 0;
        int any = mine != 0;
        uint32_t who = ballot(any);
        for (int lane = 0; lane < 32 && who >> lane; lane++) {
            uint32_t its = shfl_u32(mine, lane);
            for (int j = 0; j < 8; j++) {
                if (!(its >> j & 1)) continue;
                uint32_t *to = found < room ? list + found : more + found - room;
                if (lane == lane_id()) *to = (uint32_t)(c + j) << 16 | from[c + j];
                found++;
            }
        }
    }
}

DEVICE void pack_row(const struct pack_args *a, const uint16_t *from, char *to,
                     uint32_t *list)
{
    int n = a->n, odd = 0;
    uint32_t more = 0, room = (uint32_t)a->words - 2;
    for (int c = 8 * lane_id(); c < n; c += RUN) {
        bits128 w = load_16(from + c);
        pack_eight(w, a->base, to, n, place_of_eight(c, n));
        for (int j = 0; j < 8; j++) odd += outside(half_of(w, j), a->base);
    }
    uint32_t count = (uint32_t)odd;
    for (int m = 16; m; m /= 2) count += shfl_xor_u32(count, m);
    if (lane_id() == 0) {
        if (count > room) more = atomic_add_relaxed(a->used, count - room);
        list[0] = count, list[1] = more;
    }
    more = shfl_u32(more, 0);
    if (count) list_exceptions(a, from, list + 2, a->more + more, room);
}

DEVICE int64_t first_row(void) { return (blockIdx.x * blockDim.x + threadIdx.x) / 32; }
DEVICE int64_t row_step(void) { return gridDim.x * blockDim.x / 32; }

KERNEL pack_rows(struct pack_args a)
{
    int64_t bytes = a.n / 2 * 3;
    for (int64_t r = first_row(); r < a.rows; r += row_step())
        pack_row(&a, a.from + r * a.stride, a.packed + r * bytes,
                 a.lists + r * a.words);
}
CPU_KERNEL(pack_rows, struct pack_args)

/* packed: unpack the rows */
DEVICE bits128 out_of_window(bits128 w, int base)
{
    uint32_t down = (uint32_t)(LOWEST - base) << 7;
    for (int i = 0; i < 4; i++)
        w.v[i] = ((w.v[i] - down) & 0xffffu)
               | ((w.v[i] >> 16) - down) << 16;
    return w;
}

DEVICE void replace(bits128 *w, int i, uint32_t weight)   /* number i of eight */
{
    for (int j = 0; j < 4; j++)
        if (i / 2 == j) w->v[j] = i % 2 ? (w->v[j] & 0xffffu) | weight << 16
                                        : (w->v[j] & 0xffff0000u) | weight;
}

DEVICE void unpack_row(const struct pack_args *a, struct row r, const uint32_t *list,
                       int64_t at)
{
    uint32_t i = 0, room = (uint32_t)a->words - 2;
    for (int k = 0; k < r.n; k += RUN) {
        int c = k + 8 * lane_id();
        bits128 w = {{ 0 }};
        if (c < r.n) w = out_of_window(eight_at(r, c), a->base);
        for (; i < list[0]; i++) {
            uint32_t one = i < room ? list[2 + i] : a->more[list[1] + i - room];
            int column = (int)(one >> 16);
            if (column >= k + RUN) break;
            if (column / 8 * 8 == c) replace(&w, column % 8, one & 0xffffu);
        }
        if (c < r.n) {
            /* deliver eight weights, or compare them */
            if (a->out) *(bits128 *)(a->out + at + c) = w;
            else {
                bits128 raw = load_16(a->from + at + c);
                uint32_t different = 0;
                for (int i = 0; i < 4; i++) different |= raw.v[i] ^ w.v[i];
                if (different) atomic_add_relaxed(a->wrong, 1);
            }
        }
    }
}

KERNEL unpack_rows(struct pack_args a)
{
    struct row r = { a.packed, a.n };
    for (int64_t i = first_row(); i < a.rows; i += row_step()) {
        r.at = a.packed + i * (a.n / 2 * 3);
        unpack_row(&a, r, a.lists + i * a.words, i * a.stride);
    }
}
CPU_KERNEL(unpack_rows, struct pack_args)
#endif

"""

LAYER_H = r"""

/* layer.h, the same for every stage */
#ifndef LAYER_H
#define LAYER_H
#include <stdint.h>
#include <cuda_runtime_api.h>
#ifdef __cplusplus
extern "C" {
#endif

/* the shape and the weights of a layer */
#ifndef LAYER_SHAPE   /* the oracle's header has it too */
#define LAYER_SHAPE
typedef struct {
    int64_t d, ffn;          /* widths of the residual stream and of the MLP */
    int64_t n_q, n_kv, hd;   /* query heads, KV heads, dimension of a head */
    int64_t max_seq_len;     /* rows the cache holds for each KV head */
    double eps, theta;       /* of the RMSNorm; base of the RoPE angles */
    int32_t max_blocks;      /* thread blocks to use at most; 0: all that fit */
} layer_config;

typedef struct {             /* all bf16, row-major, applied as W x */
    const void *in_norm, *post_norm;  /* [d] */
    const void *q;                    /* [n_q * hd][d] */
    const void *k, *v;                /* [n_kv * hd][d] */
    const void *o;                    /* [d][n_q * hd] */
    const void *gate, *up;            /* [ffn][d] */
    const void *down;                 /* [d][ffn] */
} layer_weights;
#endif

typedef struct layer layer;

/* the status codes */
enum {
    LAYER_OK = 0,
    LAYER_BAD_ARGUMENT,   /* a null pointer */
    LAYER_BAD_ALIGNMENT,  /* a device pointer not 16-byte aligned (a position: 8) */
    LAYER_BAD_SHAPE,      /* sizes this stage does not serve */
    LAYER_BAD_POSITION,   /* pos outside [0, max_seq_len) */
    LAYER_BAD_DEVICE,     /* compute capability below 9.0, not the layer's device, or
                             without room for the grid */
    LAYER_NO_MEMORY,
    LAYER_CUDA_FAILED     /* the runtime refused; cudaGetLastError() says why */
};

/* build, step, teardown */
/* Weights and caches are device memory, bf16; a cache is [n_kv][max_seq_len][hd]. The
   layer belongs to the device that is current here. */
int layer_build(layer **out, const layer_config *c, const layer_weights *w,
                void *k_cache, void *v_cache);
/* x, x_out: bf16 [d] on the device, not overlapping. Queues one step on the stream:
   writes row pos of both caches, then x_out. */
int layer_step(layer *l, const void *x, int64_t pos, void *x_out, cudaStream_t stream);
/* The same with the position read on the device while the step runs, for graphs; it
   must not change until the step has ended. Out of range: x_out becomes NaN, the caches
   stay as they are, layer_status() remembers. */
int layer_step_at(layer *l, const void *x, const int64_t *pos_on_device, void *x_out,
                  cudaStream_t stream);
/* LAYER_BAD_POSITION once any step_at was out of range. Waits for the device. */
int layer_status(layer *l);
/* NULL is allowed. Waits for steps still running. */
int layer_teardown(layer *l);
/* For the status of this thread's last refusal: the rule that was broken, with the
   numbers, until the thread's next call. */
const char *layer_strerror(int status);
#ifdef __cplusplus
}
#endif
#endif

/* layer.h: what is said of packed weights */
#ifndef LAYER_PACKED
#define LAYER_PACKED
#ifdef __cplusplus
extern "C" {
#endif
enum { LAYER_Q, LAYER_K, LAYER_V, LAYER_O, LAYER_GATE, LAYER_UP, LAYER_DOWN,
       LAYER_MATRICES };
typedef struct {
    int64_t weights, exceptions;
    int64_t bytes;          /* that a step reads of it: 8 * bytes / weights bits each */
    int32_t raw;            /* 1: it did not compress and is read as it was given */
    int32_t base;           /* lowest of the sixteen exponents; raw: 0 */
} layer_packing;

/* packed: the calls */
/* layer_build reads the weights; what computes them must have been queued before it. */
/* What became of one of the seven matrices. */
int layer_packing_of(const layer *l, int matrix, layer_packing *out);
/* Bytes of weights, norms included, that a step reads. */
int64_t layer_weight_bytes(const layer *l);
/* Writes a matrix as it was given to layer_build, bit for bit, to device memory: bf16,
   row-major, 16-byte aligned. Waits for the device. */
int layer_unpack(layer *l, int matrix, void *out);
/* Copies what steps still read of the caller's weights (norms, and what did not
   compress), so that from then on the caller may free all of them. Waits for the
   device. After LAYER_NO_MEMORY the layer works as before, and still needs them. A
   graph captured before still reads the old ones, and has to be captured again. */
int layer_own_weights(layer *l);
#ifdef __cplusplus
}
#endif
#endif

"""

LAYER_C = r"""

/* stage 8: the host side */
/* Stage 8, host side: packs the weights; then one cooperative launch a step. */
#include <math.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include "layer.h"

/* packed: what the kernels are given */
/* a position, given or to be found on the device */
struct position {
    const int64_t *at;   /* device memory, or null */
    int64_t given;       /* the position when at is null */
    int64_t rows;        /* of the cache: valid positions are below */
};

/* packed: the sizes of the ring */
enum {
    HALF = 16384,         /* bytes of half a slot at most, and of one bulk copy */
    MAX_SLOTS = 8,        /* of two halves */
    TILE_KEYS = 48,       /* keys of a tile */
    SUMS = 16,            /* chunks whose sums wait for the epilogue */
    DELIVERERS = 9,       /* warps that contribute to the sums of a chunk */
    MORE_SHARED = 6272,   /* bytes of shared memory besides */
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

/* packed: a matrix as the stream reads it */
enum { W_Q, W_K, W_V, W_O, W_GATE, W_UP, W_DOWN, MATRICES };   /* as in layer.h */

struct matrix {
    const char *at;        /* its first row; packed: of its first piece */
    const uint32_t *lists; /* [pieces][rows][words]: of the exceptions of each row */
    const uint32_t *more;  /* exceptions that do not fit into their lists */
    int64_t stride;        /* bytes from row to row, where they are not packed */
    int64_t rows;
    int32_t packed;        /* 1: rows of 12 bits a weight, end to end */
    int32_t words;         /* of a list; 0: there are no lists */
    int32_t base;          /* lowest exponent of the window; 0: no window */
    float scale;           /* of the sums of a row: 2^(base - LOWEST) */
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
    struct matrix m[MATRICES];
    int32_t whole_steps;   /* all matrices are packed */
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

/* packed: what the kernels that pack are given */
struct pack_args {
    const uint16_t *from;   /* weight i of row r is from[r * stride + i] */
    uint16_t *out;          /* likewise, where to unpack to; null: compare with from */
    char *packed;           /* the rows, end to end */
    uint32_t *lists;        /* [rows][words] */
    uint32_t *more, *used;  /* exceptions without room in their lists; how many */
    uint32_t *exponents;    /* [256]: how many weights have each */
    uint32_t *wrong;        /* eights that came back different */
    int64_t rows, stride;
    int32_t n, base, words; /* weights of a row, lowest exponent, words of a list */
};

void whole_layer(struct layer_args), count_exponents(struct pack_args);
void pack_rows(struct pack_args), unpack_rows(struct pack_args);
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
    layer_packing packing[MATRICES];
    void *owned[MATRICES + 2];     /* packed matrices, copies of others, of the norms */
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

/* packed: the bytes of half a slot */
static int64_t packed_row(int64_t n) { return n / 2 * 3; }

static int64_t half_chunk(const layer *l, int phase)   /* bytes, at most */
{
    const struct product *p = l->args.g.p + phase;
    static const int first[] = { W_Q, 0, W_O, W_GATE, W_DOWN },
        last[] = { W_V, 0, W_O, W_UP,
                                                                          W_DOWN };
    int raw = 0;
    for (int i = first[phase]; i <= last[phase]; i++) raw |= !l->args.m[i].packed;
    return p->pairs * (raw ? 2 * (int64_t)p->piece : packed_row(p->piece));
}

static int32_t half_bytes(const layer *l)
{
    int64_t most = 2 * TILE_KEYS * l->c.hd;
    for (int p = QKV; p < PHASES; p++)
        if (p != ATTEND && half_chunk(l, p) > most) most = half_chunk(l, p);
    return (int32_t)((most + 127) / 128 * 128);
}

static void limit_flight(layer *l)
{
    struct geometry *g = &l->args.g;
    for (int p = QKV; p < PHASES; p++)
        if (p != ATTEND) g->p[p].open = open_halves(half_chunk(l, p), g->slots);
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

/* packed: pack the layer */
struct source { const uint16_t *at; int64_t rows, columns, width; };   /* of a piece */

static struct source source_of(const layer *l, int i)
{
    const layer_config *c = &l->c;
    const layer_weights *w = &l->w;
    int64_t q = c->n_q * c->hd, kv = c->n_kv * c->hd;
    const void *at[] = { w->q, w->k, w->v, w->o, w->gate, w->up, w->down };
    int64_t rows[] = { q, kv, kv, c->d, c->ffn, c->ffn, c->d };
    int64_t columns = i == W_O ? q : i == W_DOWN ? c->ffn : c->d;
    const int phase[] = { QKV, QKV, QKV, OUT, GATE_UP, GATE_UP, DOWN };
    int64_t width = l->args.g.p[phase[i]].piece;
    return (struct source){ at[i], rows[i], columns, width };
}

static int claim(void **p, int64_t bytes)   /* of device memory */
{
    cudaError_t e = cudaMalloc(p, (size_t)bytes);
    if (!e) return LAYER_OK;
    *p = NULL;
    if (e != cudaErrorMemoryAllocation) return LAYER_CUDA_FAILED;
    cudaGetLastError();
    return refused(LAYER_NO_MEMORY, "there are no %lld bytes of device memory for "
                   "weights", (long long)bytes);
}

static int best_base(const uint32_t count[256], int64_t *inside)
{
    int best = 1;
    *inside = 0;
    for (int base = 1; base + 15 < 255; base++) {
        int64_t sum = 0;
        for (int e = base; e < base + 16; e++) sum += count[e];
        if (sum > *inside) *inside = sum, best = base;
    }
    return best;
}

/* packed: launch a kernel over a matrix */
#ifdef CUDA_CPU_TARGET
enum { PACK_BLOCKS = 2 };   /* a thread is a fiber there, and a loop is cheaper */
#else
enum { PACK_BLOCKS = 1056 };
#endif
enum { USED = 256, WRONG, COUNTS };   /* counters of kernels, behind the exponents */

static struct pack_args pack_args_of(struct source s, uint32_t *counts)
{
    struct pack_args p = { .from = s.at, .rows = s.rows, .stride = s.columns };
    p.exponents = counts, p.used = counts + USED, p.wrong = counts + WRONG;
    p.n = (int32_t)s.width;
    return p;
}

static int run(void (*kernel)(struct pack_args), struct pack_args *p)
{
    return launch((const void *)kernel, PACK_BLOCKS, 256, 1024, p, NULL);
}

/* packed: choose the window of a matrix */
enum { RARE = 256 };

static int choose_window(layer *l, int i, uint32_t *counts, int64_t *exceptions)
{
    struct source s = source_of(l, i);
    struct matrix *m = l->args.m + i;
    struct pack_args p = pack_args_of(s, counts);
    int64_t weights = s.rows * s.columns, inside;
    uint32_t seen[COUNTS];
    m->at = (const char *)s.at, m->stride = 2 * s.columns, m->rows = s.rows,
        m->scale = 1;
    l->packing[i] = (layer_packing){ weights, 0, 2 * weights, 1, 0 };
    if (weights > UINT32_MAX || s.width > 65536) return LAYER_OK;
    if (cudaMemset(counts, 0, sizeof seen) || run(count_exponents, &p)
        || cudaMemcpy(seen, counts, sizeof seen, cudaMemcpyDeviceToHost))
        return LAYER_CUDA_FAILED;
    int base = best_base(seen, &inside);
    *exceptions = weights - inside;
    l->packing[i].exceptions = *exceptions;
    if (*exceptions > weights / RARE) return LAYER_OK;
    m->base = base, m->scale = (float)ldexp(1, base - 112);
    return LAYER_OK;
}
#ifndef TWIN
/* packed: pack a matrix and compare */
/* packed: the room for the exceptions of a row */
enum { MOST_WORDS = 32 };   /* of a list */

static int32_t list_words(int64_t exceptions, int64_t rows)
{
    double mean = (double)exceptions / (double)rows;
    double room = mean + 4 * sqrt(mean) + 1;
    int32_t words = 4;                          /* two of them are count and place */
    while (words - 2 < room && words < MOST_WORDS) words += 4;
    return words;
}

/* packed: pack or unpack all pieces of a matrix */
static int over_pieces(void (*kernel)(struct pack_args), struct pack_args p,
                       struct source s)
{
    for (int64_t at = 0; at < s.columns; at += s.width) {
        struct pack_args piece = p;
        int64_t left = s.columns - at;
        piece.n = (int32_t)(left < s.width ? left : s.width);
        piece.from = s.at + at;
        piece.out = p.out ? p.out + at : NULL;
        piece.packed = p.packed + at / s.width * s.rows * packed_row(s.width);
        piece.lists = p.lists + at / s.width * s.rows * p.words;
        if (run(kernel, &piece)) return LAYER_CUDA_FAILED;
    }
    return LAYER_OK;
}

static int pack_matrix(layer *l, int i, uint32_t *counts, int64_t exceptions)
{
    struct source s = source_of(l, i);
    struct matrix *m = l->args.m + i;
    struct pack_args p = pack_args_of(s, counts);
    int64_t pieces = (s.columns + s.width - 1) / s.width, weights = s.rows * s.columns;
    uint32_t seen[COUNTS];
    m->words = list_words(exceptions, s.rows * pieces);
    p.base = m->base, p.words = m->words;
    int64_t lists = s.rows * packed_row(s.columns);   /* where they begin */
    int64_t bytes = lists + 4 * s.rows * pieces * p.words;
    int none = claim(&l->owned[i], bytes + 4 * exceptions);
    if (none) return none;
    p.packed = l->owned[i], p.lists = (uint32_t *)(p.packed + lists);
    p.more = (uint32_t *)(p.packed + bytes);
    if (cudaMemset(p.packed, 0, (size_t)(bytes + 4 * exceptions))
        || over_pieces(pack_rows, p, s) || over_pieces(unpack_rows, p, s)
        || cudaMemcpy(seen, counts, sizeof seen, cudaMemcpyDeviceToHost))
        return LAYER_CUDA_FAILED;
    if (seen[WRONG]) {
        /* packed: give up packing this matrix */
        void *packed = l->owned[i];
        l->owned[i] = NULL, m->base = m->words = 0, m->scale = 1;
        return cudaFree(packed) ? LAYER_CUDA_FAILED : LAYER_OK;
    }
    m->at = p.packed, m->lists = p.lists, m->more = p.more, m->packed = 1;
    l->packing[i] = (layer_packing){ weights, exceptions, bytes + 4 * seen[USED], 0,
                                     m->base };
    return LAYER_OK;
}
#endif

static int pack_layer(layer *l)
{
    uint32_t *counts;   /* device memory: [COUNTS] */
    if (cudaDeviceSynchronize()) return LAYER_CUDA_FAILED;   /* the weights are there */
    int bad = claim((void **)&counts, COUNTS * sizeof *counts);
    if (bad) return bad;
    for (int i = 0; i < MATRICES && !bad; i++) {
        int64_t exceptions = 0;
        bad = choose_window(l, i, counts, &exceptions);
#ifndef TWIN
        if (!bad && l->args.m[i].base) bad = pack_matrix(l, i, counts, exceptions);
#endif
    }
    if (cudaFree(counts) && !bad) bad = LAYER_CUDA_FAILED;
    return bad;
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

/* packed: describe the layer to the kernel */
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
    int bad = pack_layer(l);
    a->whole_steps = 1;
    for (int i = 0; i < MATRICES; i++) a->whole_steps &= a->m[i].packed;
    if (!bad) bad = share_out(l);
    if (!bad) bad = try_grid(l);
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

/* packed: tear a layer down */
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
    for (int i = 0; i < MATRICES + 2; i++)
        if (l->owned[i] && cudaFree(l->owned[i])) bad = 1;
    if (l->scratch && cudaFree(l->scratch)) bad = 1;
    if (!bad && before != l->device) bad = cudaSetDevice(before) != cudaSuccess;
    free(l);
    return bad ? LAYER_CUDA_FAILED : LAYER_OK;
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

/* packed: what a caller may ask */
int layer_packing_of(const layer *l, int matrix, layer_packing *out)
{
    if (!l || !out || matrix < 0 || matrix >= MATRICES) return LAYER_BAD_ARGUMENT;
    *out = l->packing[matrix];
    return LAYER_OK;
}

int64_t layer_weight_bytes(const layer *l)
{
    if (!l) return 0;
    int64_t bytes = 4 * l->c.d;
    for (int i = 0; i < MATRICES; i++) bytes += l->packing[i].bytes;
    return bytes;
}

int layer_unpack(layer *l, int matrix, void *out)
{
    if (!l || !out || matrix < 0 || matrix >= MATRICES) return LAYER_BAD_ARGUMENT;
    if (misaligned(out)) return LAYER_BAD_ALIGNMENT;
    struct source s = source_of(l, matrix);
    const struct matrix *m = l->args.m + matrix;
    int bad = check_current(l);
    if (bad) return bad;
    if (cudaDeviceSynchronize()) return LAYER_CUDA_FAILED;
#ifndef TWIN
    struct pack_args p = pack_args_of(s, NULL);
    p.packed = (char *)m->at, p.more = (uint32_t *)m->more, p.out = out;
    p.lists = (uint32_t *)m->lists, p.base = m->base, p.words = m->words;
    if (m->packed) bad = over_pieces(unpack_rows, p, s);
#endif
    if (!m->packed) bad = cudaMemcpy(out, m->at, (size_t)(2 * s.rows * s.columns),
                                     cudaMemcpyDeviceToDevice);
    if (cudaDeviceSynchronize()) bad = 1;
    return bad ? LAYER_CUDA_FAILED : LAYER_OK;
}

static int own(void **copy, const void *from, int64_t bytes)
{
    int none = claim(copy, bytes);
    if (none) return none;
    if (!cudaMemcpy(*copy, from, (size_t)bytes, cudaMemcpyDeviceToDevice))
        return LAYER_OK;
    cudaFree(*copy);
    *copy = NULL;
    return LAYER_CUDA_FAILED;
}

int layer_own_weights(layer *l)
{
    if (!l) return LAYER_BAD_ARGUMENT;
    void **norms = l->owned + MATRICES;
    int64_t bytes = 2 * l->c.d;
    int bad = check_current(l);
    if (!bad && cudaDeviceSynchronize()) bad = LAYER_CUDA_FAILED;
    for (int i = 0; i < MATRICES && !bad; i++) {
        struct matrix *m = l->args.m + i;
        if (l->owned[i]) continue;   /* packed, or copied before */
        bad = own(&l->owned[i], m->at, 2 * l->packing[i].weights);
        if (!bad) m->at = l->owned[i];
    }
    if (!bad && !norms[0]) bad = own(&norms[0], l->args.in_norm, bytes);
    if (!bad && !norms[1]) bad = own(&norms[1], l->args.post_norm, bytes);
    if (!bad) l->args.in_norm = norms[0], l->args.post_norm = norms[1];
    if (cudaDeviceSynchronize() && !bad) bad = LAYER_CUDA_FAILED;
    return bad;
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

"""

SOURCES = {"kernels.cu": KERNELS_CU, "layer.h": LAYER_H, "layer.c": LAYER_C}

# submission: refuse an argument
def refuse(name, got, accepted):
    raise ValueError(f"{name}: got {got}; accepted: {accepted}")


def check_keys(name, given, expected):
    if not isinstance(given, dict):
        refuse(name, type(given).__name__, "a dict")
    if set(given) != set(expected):
        refuse(name, f"the keys {sorted(map(str, given))}",
               f"exactly {sorted(expected)}")

def whole(name, value, low, high):
    """value as an int of [low, high]; integers of other libraries are taken too"""
    number = None
    if not isinstance(value, torch.Tensor) and "bool" not in type(value).__name__:
        try:
            number = operator.index(value)
        except TypeError:
            pass
    if number is None or not low <= number <= high:
        refuse(name, repr(value), f"an integer from {low} to {high}")
    return number


def positive(name, value):
    is_number = isinstance(value, numbers.Real) and not isinstance(value, bool)
    if not is_number or not 1e-37 < value < 3e38:
        refuse(name, repr(value), "a positive number that single precision can hold")
    return float(value)

def check_tensor(name, t, shape, device=None):
    """t is a bf16 CUDA tensor that the kernels can use as it is"""
    if not isinstance(t, torch.Tensor):
        refuse(name, type(t).__name__, "a tensor")
    if t.device.type != "cuda" or device not in (None, t.device):
        refuse(name, f"a tensor on {t.device}", f"one on {device or 'a CUDA device'}")
    if t.dtype is not torch.bfloat16:
        refuse(name, t.dtype, "torch.bfloat16")
    if tuple(t.shape) != shape:
        batch = len(shape) > 1 == shape[0] and t.shape[1:] == shape[1:]
        refuse(name, f"shape {tuple(t.shape)}" + f", batch size {len(t)}" * batch,
               f"shape {shape}" + ", batch size 1" * batch)
    if t.layout is not torch.strided or not t.is_contiguous():
        strides = t.stride() if t.layout is torch.strided else t.layout
        refuse(name, f"a layout with strides {strides}", "contiguous rows")
    if t.data_ptr() % 16:
        refuse(name, f"an address {t.data_ptr() % 16} bytes past a multiple of 16",
               "a multiple of 16")

# submission: check what build_layer is given
SIZES = ("d", "ffn", "n_q", "n_kv", "hd")


def check_cfg(cfg):
    """the sizes as ints, eps and theta as floats"""
    check_keys("cfg", cfg, {"layers", "eps", "theta", "wdtype", *SIZES})
    whole("cfg['layers']", cfg["layers"], 1, 1)
    if not isinstance(cfg["wdtype"], str) or cfg["wdtype"] != "bf16":
        refuse("cfg['wdtype']", repr(cfg["wdtype"]), "'bf16'")
    c = {name: whole(f"cfg['{name}']", cfg[name], 1, 1 << 24) for name in SIZES}
    if c["hd"] not in (64, 128):
        refuse("cfg['hd']", c["hd"], "64 or 128")
    for name in ("d", "ffn"):
        if c[name] % 64:
            refuse(f"cfg['{name}']", c[name], "a multiple of 64")
    if c["n_q"] % c["n_kv"] or c["n_q"] > 16 * c["n_kv"]:
        refuse("cfg['n_q']", c["n_q"],
               f"a multiple of cfg['n_kv'] = {c['n_kv']}, at most 16 times it")
    return dict(c, eps=positive("cfg['eps']", cfg["eps"]),
                theta=positive("cfg['theta']", cfg["theta"]))

def shapes(c):
    d, ffn, q, kv = c["d"], c["ffn"], c["n_q"] * c["hd"], c["n_kv"] * c["hd"]
    return dict(in_norm=(d,), post_norm=(d,), q=(q, d), k=(kv, d), v=(kv, d), o=(d, q),
                gate=(ffn, d), up=(ffn, d), down=(d, ffn))


def check_weights(weights, c):
    """the nine tensors by name, and the device that all of them are on"""
    check_keys("weights", weights, {"layers"})
    layers = weights["layers"]
    if not isinstance(layers, (list, tuple)) or len(layers) != 1:
        refuse("weights['layers']", describe(layers), "a list of one dict")
    check_keys("weights['layers'][0]", layers[0], shapes(c))
    device = None
    for name, shape in shapes(c).items():
        check_tensor(f"weights['layers'][0]['{name}']", layers[0][name], shape, device)
        device = layers[0][name].device
    return {name: layers[0][name] for name in shapes(c)}, device

def check_cache(kv_cache, c, max_seq_len, device, weights):
    """the pair of tensors, and their rows"""
    if not isinstance(kv_cache, (list, tuple)) or len(kv_cache) != 1:
        refuse("kv_cache", describe(kv_cache), "a list of one (k, v)")
    pair, rows = kv_cache[0], whole("max_seq_len", max_seq_len, 1, 1 << 24)
    if not isinstance(pair, (list, tuple)) or len(pair) != 2:
        refuse("kv_cache[0]", describe(pair), "a pair (k, v)")
    for i, t in enumerate(pair):
        if isinstance(t, torch.Tensor) and t.dim() == 4 and t.shape[2] != rows:
            refuse("max_seq_len", rows,
                   f"kv_cache[0][{i}].shape[2], which is {t.shape[2]}")
        check_tensor(f"kv_cache[0][{i}]", t, (1, c["n_kv"], rows, c["hd"]), device)
    check_apart("kv_cache[0]", "k and v", pair[0], pair[1])
    for (name, w), i in itertools.product(weights.items(), (0, 1)):
        check_apart(f"kv_cache[0][{i}]", f"it and '{name}'", pair[i], w)
    return tuple(pair), rows


def check_apart(name, both, s, t):
    low, high = sorted((s, t), key=lambda t: t.data_ptr())
    if low.data_ptr() + 2 * low.numel() > high.data_ptr():
        refuse(name, f"{both} that share memory", "memory of its own for each")


def describe(given):
    size = f" of {len(given)}" if isinstance(given, (list, tuple)) else ""
    return type(given).__name__ + size

def architecture(device):
    major, minor = torch.cuda.get_device_capability(device)
    if major < 9:
        refuse(f"the device of weights ({torch.cuda.get_device_name(device)})",
               f"compute capability {major}.{minor}", "9.0 or later")
    return "90a" if (major, minor) == (9, 0) else f"{major}{minor}"

# submission: compile, once
FLAGS = ("-shared", "-O3", "-Xcompiler", "-fPIC")


def cache_folder():
    base = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    folder = os.environ.get("LAYER_CACHE") or os.path.join(base, "one-layer-one-launch")
    return pathlib.Path(os.path.abspath(folder))   # dlopen searches for bare names


def digest(*texts):
    return hashlib.sha256("\0".join(texts).encode()).hexdigest()[:20]

def check_private(path):
    """raises unless only its owner can write path, and that is this user or root"""
    found = os.stat(path)
    if found.st_uid not in (os.geteuid(), 0) or found.st_mode & 0o022:
        raise RuntimeError(
            f"{str(path)!r}: got owner {found.st_uid}, mode "
            f"{stat.S_IMODE(found.st_mode):o}; accepted: what belongs to user "
            f"{os.geteuid()} or root and only its owner can write, because code is "
            "loaded from there; $LAYER_CACHE names another folder")
    return path

def find_nvcc():
    """the path of nvcc, or None"""
    on_path = shutil.which("nvcc")
    found = [nvcc_in(os.environ.get("CUDA_HOME")), nvcc_in(os.environ.get("CUDA_PATH")),
             on_path and os.path.abspath(on_path), nvcc_in("/usr/local/cuda")]
    if not any(found):
        try:
            from torch.utils.cpp_extension import CUDA_HOME
            found.append(nvcc_in(CUDA_HOME))
        except ImportError:   # it wants setuptools
            pass
    return next(filter(None, found), None)


def nvcc_in(home):
    found = home and shutil.which("nvcc", path=os.path.join(home, "bin"))
    return os.path.abspath(found) if found else None   # it will run in another folder


@functools.lru_cache(None)
def version_of(nvcc):
    return subprocess.run([nvcc, "--version"], stdin=subprocess.DEVNULL,
                          stdout=subprocess.PIPE, check=True).stdout.decode()

def library(arch):
    """the path of the compiled layer"""
    more = [os.environ.get(f"NVCC_{p}PEND_FLAGS", "") for p in ("AP", "PRE")]
    folder, stem = cache_folder(), digest(*SOURCES.values(), arch, *FLAGS, *more)
    nvcc = find_nvcc()
    if nvcc is None:
        compiled = sorted(folder.glob(stem + "-*.so"), key=os.path.getmtime)
        if not compiled:
            raise RuntimeError(
                "there is no nvcc to compile the layer with: not in $CUDA_HOME/bin, on "
                f"PATH or in /usr/local/cuda/bin; and no compiled one in {folder}")
        check_private(folder)
        return check_private(compiled[-1])
    path = folder / f"{stem}-{digest(version_of(nvcc))}.so"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        check_private(folder)
        if not path.exists():
            compile_to(path, arch, nvcc)
    except OSError as error:
        raise RuntimeError(f"{error}; $LAYER_CACHE names another folder") from error
    return check_private(path)

def compile_to(path, arch, nvcc):
    print(f"stage {STAGE}: compiling for sm_{arch}, once, to {str(path)!r}",
          file=sys.stderr)
    command = [nvcc, *FLAGS, f"-gencode=arch=compute_{arch},code=sm_{arch}",
               "-o", "layer.so", *(name for name in SOURCES if not name.endswith(".h"))]
    with tempfile.TemporaryDirectory(prefix="new.", dir=path.parent) as folder:
        for name, text in SOURCES.items():
            pathlib.Path(folder, name).write_text(text, encoding="utf-8")
        run = subprocess.run(command, cwd=folder, env=dict(os.environ, TMPDIR="."),
                             stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                             stderr=subprocess.STDOUT)
        if run.returncode:
            raise RuntimeError(f"{' '.join(command)} failed:\n"
                               + run.stdout.decode(errors="replace"))
        made = os.path.join(folder, "layer.so")
        os.chmod(made, 0o700)
        os.replace(made, path)

# submission: load the library
class Config(ctypes.Structure):   # layer_config of layer.h
    _fields_ = ([(name, ctypes.c_int64) for name in (*SIZES, "max_seq_len")]
                + [("eps", ctypes.c_double), ("theta", ctypes.c_double),
                   ("max_blocks", ctypes.c_int32)])


class Weights(ctypes.Structure):   # layer_weights of layer.h
    _fields_ = [(name, ctypes.c_void_p) for name in
                ("in_norm", "post_norm", "q", "k", "v", "o", "gate", "up", "down")]

@functools.lru_cache(None)
def load(path):
    lib, p = ctypes.CDLL(str(path)), ctypes.c_void_p
    lib.layer_build.argtypes = (ctypes.POINTER(p), ctypes.POINTER(Config),
                                ctypes.POINTER(Weights), p, p)
    lib.step_in_record.argtypes = lib.step_at_in_record.argtypes = (ctypes.c_char_p,)
    lib.layer_teardown.argtypes = (p,)
    lib.layer_strerror.argtypes = (ctypes.c_int,)
    lib.layer_strerror.restype = ctypes.c_char_p
    return lib


LAYER_BAD_SHAPE, LAYER_NO_MEMORY = 3, 6   # as in layer.h


def explain(lib, status):
    nvcc, driver = find_nvcc(), getattr(torch._C, "_cuda_getDriverVersion", int)()
    compiler = version_of(nvcc).splitlines()[-1] if nvcc else "none"
    return (f"stage {STAGE}: {lib.layer_strerror(status).decode()} (the driver is for "
            f"CUDA {driver // 1000}.{driver % 1000 // 10}, the compiler: {compiler})")

SOURCES["record.c"] = r"""
#include "layer.h"
struct record {
    layer *l;
    const void *x;
    int64_t pos;             /* or the address of one */
    void *x_out;
    cudaStream_t stream;
};
int step_in_record(const struct record *r)
{
    return layer_step(r->l, r->x, r->pos, r->x_out, r->stream);
}
int step_at_in_record(const struct record *r)
{
    return layer_step_at(r->l, r->x, (const int64_t *)r->pos, r->x_out, r->stream);
}
"""
RECORD = struct.Struct("PPqPP").pack

# submission: build
class Layer:
    """what build_layer returns; opaque"""
    __slots__ = ("lib", "given", "tensors", "device", "fast", "step_at", "stream",
                 "number", "release", "__weakref__")

    def __init__(self, lib, pointer, given, tensors, shape, rows):
        self.lib, self.given, self.tensors = lib, given, tensors
        self.device = tensors[0].device
        self.fast = (lib.step_in_record, pointer, self.device.index, shape, rows,
                     torch._C._cuda_getCurrentRawStream, (shape[1], 1))
        self.step_at = lib.step_at_in_record
        self.stream = None   # of the last step
        self.number = next(NUMBERS)
        LIVE[self.number] = self
        self.release = weakref.finalize(self, lib.layer_teardown, pointer)
        self.release.atexit = False


NUMBERS, LIVE = itertools.count(), weakref.WeakValueDictionary()   # number: handle

def build_layer(weights, kv_cache, cfg, max_seq_len):
    """A handle for layer_step, which keeps the weights and the caches alive. The caches
    are used in place. When what is written to the weights later is seen, the head of
    this file says."""
    c = check_cfg(cfg)
    w, device = check_weights(weights, c)
    (k, v), rows = check_cache(kv_cache, c, max_seq_len, device, w)
    lib = load(library(architecture(device)))
    config = Config(max_seq_len=rows, **c)
    addresses = Weights(**{name: t.data_ptr() for name, t in w.items()})
    pointer = ctypes.c_void_p()
    given = (ctypes.byref(pointer), config, addresses, k.data_ptr(), v.data_ptr())
    with torch.cuda.device(device):
        status = lib.layer_build(*given)
        if status == LAYER_NO_MEMORY:   # what PyTorch keeps in reserve may be enough
            torch.cuda.empty_cache()
            status = lib.layer_build(*given)
        torch.cuda.synchronize()
    if status == LAYER_BAD_SHAPE:
        refuse("cfg", cfg, lib.layer_strerror(status).decode())
    if status:
        raise RuntimeError(explain(lib, status))
    return Layer(lib, pointer.value, (weights, kv_cache, cfg, max_seq_len),
                 (*w.values(), k, v), (1, c["d"]), rows)

# submission: step
def layer_step(handle, x, pos):
    """Queues one step on the current stream of the layer's device and returns a new
    (1, d) bf16 tensor, through which no gradient flows. pos is an int, or an int64
    tensor of one element on that device, which the step reads when it runs; out of
    range, that one makes x_out NaN."""
    if tracing():
        return step_as_operator(handle, x, pos)
    if type(handle) is not Layer or handle.fast is None:
        refuse_handle(handle)
    step, pointer, index, shape, rows, stream_of, strides = handle.fast
    if current_device() != index:
        with torch.cuda.device(index):
            return layer_step(handle, x, pos)
    # submission: check x and pos
    if not (isinstance(x, Tensor) and x.dtype is BF16 and x.get_device() == index
            and x.shape == shape and x.is_contiguous()):
        check_tensor("x", x, shape, handle.device)
    address = x.data_ptr()
    if address & 15:
        check_tensor("x", x, shape, handle.device)
    if type(pos) is not int or not 0 <= pos < rows:
        pos = check_pos(handle, pos)
        if type(pos) is not int:
            step, pos = handle.step_at, pos.data_ptr()
    stream = stream_of(index)
    if stream != handle.stream:
        follow(handle, stream)
    x_out = empty(shape, strides, BF16)
    # submission: call the layer
    status = step(RECORD(pointer, address, pos, x_out.data_ptr(), stream))
    if status:
        raise RuntimeError(explain(handle.lib, status))
    return x_out

def allocator():
    """of a tensor on the current GPU, by its shape, strides and type"""
    guards = getattr(getattr(torch._C, "_dynamo", None), "guards", None)
    return getattr(guards, "_empty_strided_cuda", None) or (
        lambda shape, strides, dtype: torch.empty_strided(shape, strides, dtype=dtype,
                                                          device="cuda"))


Tensor, BF16, empty = torch.Tensor, torch.bfloat16, allocator()
current_device = getattr(torch._C, "_cuda_getDevice", None)   # none without CUDA

def follow(handle, stream):
    """lets this stream wait for the handle's last step, which was on another"""
    with torch.cuda.device(handle.device):
        if torch.cuda.is_current_stream_capturing():
            return
        if handle.stream is not None:
            last = torch.cuda.ExternalStream(handle.stream, device=handle.device)
            torch.cuda.current_stream(handle.device).wait_stream(last)
    handle.stream = stream

def check_pos(handle, pos):
    if not isinstance(pos, torch.Tensor):
        return whole("pos", pos, 0, handle.fast[4] - 1)
    if pos.device != handle.device or pos.dtype is not torch.int64 or pos.numel() != 1:
        refuse("pos", f"a {pos.dtype} tensor of {pos.numel()} elements on {pos.device}",
               f"an int, or a tensor of one torch.int64 on {handle.device}")
    return pos


def refuse_handle(handle):
    if type(handle) is not Layer:
        refuse("handle", type(handle).__name__, "what build_layer returned")
    raise RuntimeError("the handle is used after teardown")

HAS_OPERATORS = hasattr(torch.library, "custom_op")
tracing = torch.compiler.is_dynamo_compiling if HAS_OPERATORS else bool   # False


def step_as_operator(handle, x, pos):
    operator = step_at_operator if isinstance(pos, torch.Tensor) else step_operator
    return operator(x, *handle.tensors[-2:], pos, handle.number)

if HAS_OPERATORS:
    free = next(n for n in itertools.count()
                if not hasattr(torch.ops.one_layer_one_launch, f"step_{n}"))

    def operator_of(name, kind):
        def step(x: torch.Tensor, k: torch.Tensor, v: torch.Tensor, pos: kind,
                 handle: int) -> torch.Tensor:
            return layer_step(LIVE[handle], x, pos)
        made = torch.library.custom_op(f"one_layer_one_launch::{name}_{free}", step,
                                       mutates_args=("k", "v"))
        made.register_fake(lambda x, k, v, pos, handle: torch.empty_like(x))
        return made

    step_operator = operator_of("step", int)
    step_at_operator = operator_of("step_at", torch.Tensor)

# submission: tear down
def refresh(handle):
    """Takes the tensors that the dict of weights and the list of caches hold now, in
    the place of those they held before. Refuses what build_layer refuses, and then
    leaves the handle as it was. Waits for steps still running."""
    if type(handle) is not Layer or handle.fast is None:
        refuse_handle(handle)
    if not handle.given:
        raise RuntimeError("the handle let go of its weights; build another layer")
    fresh = build_layer(*handle.given)
    status = handle.release()
    fresh.release.detach()
    handle.fast, handle.tensors = fresh.fast, fresh.tensors
    handle.release = weakref.finalize(handle, fresh.lib.layer_teardown, fresh.fast[1])
    handle.release.atexit = False
    if status:
        raise RuntimeError(explain(handle.lib, status))

def teardown(handle):
    """Gives the layer's memory back after its last step; twice does no harm."""
    if type(handle) is not Layer:
        refuse_handle(handle)
    status = handle.release()   # None the second time
    handle.fast, handle.tensors, handle.given = None, (), ()
    if status:
        raise RuntimeError(explain(handle.lib, status))

# submission: ask about packed weights
class Packing(ctypes.Structure):   # layer_packing of layer.h
    _fields_ = [("weights", ctypes.c_int64), ("exceptions", ctypes.c_int64),
                ("bytes", ctypes.c_int64), ("raw", ctypes.c_int32),
                ("base", ctypes.c_int32)]


def library_of(handle):
    """the handle's library and its layer, as C takes it"""
    if type(handle) is not Layer or handle.fast is None:
        refuse_handle(handle)
    return handle.lib, ctypes.c_void_p(handle.fast[1])


def packing(handle):
    """{name: {weights, exceptions, bytes, raw, base, bits}} of the seven matrices"""
    lib, layer = library_of(handle)
    told = {}
    for i, name in enumerate(("q", "k", "v", "o", "gate", "up", "down")):
        one = Packing()
        status = lib.layer_packing_of(layer, i, ctypes.byref(one))
        if status:
            raise RuntimeError(explain(lib, status))
        told[name] = {field: getattr(one, field) for field, _ in Packing._fields_}
        told[name]["bits"] = 8 * one.bytes / one.weights
    return told

def bytes_read(handle):
    """bytes of weights, norms included, that a step reads"""
    lib, layer = library_of(handle)
    lib.layer_weight_bytes.restype = ctypes.c_int64
    return lib.layer_weight_bytes(layer)


def own_weights(handle):
    """Copies what steps still read of the caller's weights; the handle then lets go of
    them. Waits for the device."""
    lib, layer = library_of(handle)
    with torch.cuda.device(handle.device):
        status = lib.layer_own_weights(layer)
    if status:
        raise RuntimeError(explain(lib, status))
    handle.tensors, handle.given = handle.tensors[-2:], ()   # the caches
