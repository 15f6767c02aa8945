# stages/stage7/submission.py: tangled from layer.nw; change it there.
"""One decoder layer in one launch: stage 7 with its CUDA source, in one file.

    handle = build_layer(weights, kv_cache, cfg, max_seq_len)
    x_out = layer_step(handle, x, pos)
    refresh(handle)        # only after a tensor of the weights was given other memory
    teardown(handle)

Steps read the weights where they lie: what is written there, in the order of the
stream, the next step sees.

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

# submission: the sources
STAGE = 7

KERNELS_CU = r"""

/* stage 7: the kernel file */
/* Stage 7: the whole layer in one launch, around a stream that never stops. */
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
DEVICE void publish_in_block(uint32_t *p, uint32_t v)
{
    asm volatile("st.release.cta.shared::cta.u32 [%0], %1;"
                 ::"r"(shared_address(p)), "r"(v) : "memory");
}
DEVICE void add_in_block(uint32_t *p, uint32_t v)
{
    asm volatile("red.release.cta.shared::cta.add.u32 [%0], %1;"
                 ::"r"(shared_address(p)), "r"(v) : "memory");
}
DEVICE void wait_in_block(const uint32_t *p, uint32_t v)
{
    uint32_t seen;
    /* PTX: start the clock of a bounded spin */
    #ifdef DEBUG_SPINS
    uint64_t start = spin_ns();
    #endif
    do {
        asm volatile("ld.acquire.cta.shared::cta.u32 %0, [%1];"
                     : "=r"(seen) : "r"(shared_address(p)) : "memory");
        /* PTX: give up a spin that takes too long */
        #ifdef DEBUG_SPINS
        if ((int32_t)(seen - v) < 0 && spin_ns() - start > SPIN_LIMIT)
            spin_failed("a counter of the block", p, v, seen);
        #endif
    } while ((int32_t)(seen - v) < 0);
}

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
#endif
    while (!mbarrier_try(b, parity)) {
#ifdef DEBUG_SPINS
        if (spin_ns() - start > SPIN_LIMIT)
            spin_failed("an mbarrier's parity", b, parity, parity ^ 1u);
#endif
    }
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

/* stream: shared memory */
struct tag {
    int32_t phase, part;   /* part: group of ATTEND, piece of GATE_UP and DOWN */
    int32_t item;          /* the tile within the unit, or the chunk */
    int32_t vector;        /* that a product needs; of ATTEND: the count before it */
    int32_t last;          /* of this warp in this phase and piece */
    int32_t tile;          /* of ATTEND: its number among all tiles of the group */
};

struct shared {
    uint64_t full[MAX_WARPS];      /* mbarriers: a slot's bytes have arrived */
    uint64_t empty[2][MAX_WARPS];  /* a slot is given back, in even laps and in odd */
    uint64_t placed[DOWN + PARTS]; /* the vector of a product is in place */
    uint64_t tiles[UNIT_TILES];    /* the tile in this place is summed */
    struct tag tag[MAX_WARPS];     /* what each slot holds */
    uint32_t queries;              /* queries put in place so far, or places merged */
    uint32_t gated;                /* chunks of gate and up that are multiplied */
    float scale;                   /* of the vector in place */
    float sums[LOADER_WARPS];
    float tile_max[UNIT_TILES][HEADS], tile_weight[UNIT_TILES][HEADS];
    struct layer_args args;        /* a copy of the kernel's argument */
};
enum { SHARED_FITS = 1 / (sizeof(struct shared) <= SHARED_BYTES) };

DEVICE void give_back(struct shared *s, int w, uint32_t lap)
{
    mbarrier_arrive(s->empty[lap % 2] + w);
}

DEVICE void wait_until_given_back(struct shared *s, int w, uint32_t lap)
{
    mbarrier_wait(s->empty[lap % 2] + w, lap / 2 % 2);
}

DEVICE struct shared *block_state(void)
{
    return (struct shared *)shared_memory();
}

DEVICE char *vector_area(void) { return shared_memory() + SHARED_BYTES; }

DEVICE char *slot(const struct layer_args *a, int w)
{
    return vector_area() + a->g.vector_bytes + w * a->g.slot_bytes;
}

DEVICE float *tile_sums(const struct layer_args *a, int tile)   /* [HEADS][hd] */
{
    return (float *)vector_area() + tile * HEADS * a->hd;
}

DEVICE uint16_t *unit_queries(const struct layer_args *a)  /* hi, lo: [HEADS][hd] */
{
    return (uint16_t *)tile_sums(a, UNIT_TILES);
}

/* stream: who does what */
DEVICE int first_chunk(const struct layer_args *a, int phase)   /* of this block */
{
    int before = 0, blocks = (int)gridDim.x;
    for (int p = QKV; p < phase; p++) before += p == ATTEND ? 0 : a->g.chunks[p];
    return (int)(blockIdx.x + blocks - before % blocks) % blocks;
}

struct span { int units, tiles; };    /* of each group, at this position */

DEVICE struct span span_at(const struct layer_args *a, int64_t pos)
{
    struct span n;
    n.tiles = (int)(pos / TILE_KEYS) + 1;
    n.units = n.tiles < a->g.max_units ? n.tiles : a->g.max_units;
    return n;
}

DEVICE int first_tile(struct span n, int unit)   /* unit may be n.units: the end */
{
    return (int)((int64_t)n.tiles * unit / n.units);
}

DEVICE int units_of_block(const struct layer_args *a, struct span n)
{
    int units = n.units * a->g.groups, b = (int)blockIdx.x;
    return b < units ? (units - b - 1) / (int)gridDim.x + 1 : 0;
}

struct share { int team, teams, first_piece; };   /* no team: first_piece = pieces */

DEVICE struct share share_of_down(const struct layer_args *a)
{
    int blocks = (int)gridDim.x, b = (int)blockIdx.x, pieces = a->g.pieces;
    struct share s = { 0, 1, b };
    if (blocks < pieces) return s;
    s.teams = blocks / pieces;
    s.team = b / pieces;
    s.first_piece = s.team < s.teams ? b % pieces : pieces;
    return s;
}

DEVICE int queries_of_tile(int item)   /* after those of its unit */
{
    return item < UNIT_TILES ? 0 : item - UNIT_TILES + 1;
}

DEVICE int chunks_of_block(const struct layer_args *a, int phase)
{
    int left = a->g.chunks[phase] - first_chunk(a, phase), step = (int)gridDim.x;
    return left > 0 ? (left - 1) / step + 1 : 0;
}

/* stream: small helpers */
DEVICE int lane_id(void) { return (int)threadIdx.x % 32; }

DEVICE int loader_thread(const struct layer_args *a)
{
    return (int)threadIdx.x - 32 * a->g.warps;
}

DEVICE float base_of(float max)   /* what scores are reduced by; see below */
{
    return max == -INFINITY ? 0 : max;
}

DEVICE void loaders_meet(void) { named_barrier_sync(1, LOADERS); }

struct pair { float low, high; };   /* sums of the two rows of a pair */

DEVICE uint32_t *counter(const struct layer_args *a, int phase, int part)
{
    return a->done + (phase * PARTS + part) * LINE;
}

/* stream: hi and lo */
DEVICE void split_pair(float x, float y, uint32_t *hi, uint32_t *lo)
{
    *hi = pack_bf16(x, y);
    *lo = pack_bf16(x - bits_f32(*hi << 16), y - bits_f32(*hi & 0xffff0000u));
}

struct eight { float v[8]; };

DEVICE void split(const struct eight *x, bits128 *hi, bits128 *lo)
{
    for (int i = 0; i < 4; i++)
        split_pair(x->v[2 * i], x->v[2 * i + 1], &hi->v[i], &lo->v[i]);
}

/* stream: where the vector lies */
DEVICE int64_t padded(int64_t n) { return (n + STRIPE - 1) / STRIPE * STRIPE; }

struct bits64 { uint32_t v[2]; } __attribute__((aligned(8)));

DEVICE void put_words(uint16_t *to, bits128 w)
{
    struct bits64 even = {{ w.v[0], w.v[2] }}, odd = {{ w.v[1], w.v[3] }};
    *(struct bits64 *)to = even;
    *(struct bits64 *)(to + 32) = odd;
}

DEVICE void put_eight(uint16_t *hi, int64_t n, int64_t j, struct eight x)
{                                               /* elements j to j + 7 of n */
    int e = (int)(j % STRIPE) / 8;
    uint16_t *to = hi + j / STRIPE * STRIPE + (e % 16 / 4 * 8 + e % 4) * 8 + e / 16 * 4;
    bits128 h, l;
    split(&x, &h, &l);
    put_words(to, h);
    put_words(to + padded(n), l);
}

/* stream: the producer */
/* stream: what the producer remembers */
struct producer {
    uint64_t policy;
    int w;          /* the next slot */
    uint32_t lap;   /* how often the ring was filled before */
};

/* stream: offer a slot, and move on */
DEVICE void offer(struct shared *s, const struct producer *p, struct tag tag,
                  uint32_t bytes)
{
    wait_until_given_back(s, p->w, p->lap - 1);
    s->tag[p->w] = tag;
    mbarrier_expect(s->full + p->w, bytes);
}

DEVICE void next_slot(const struct layer_args *a, struct producer *p)
{
    if (++p->w < a->g.warps) return;
    p->w = 0;
    p->lap++;
}

DEVICE void finish_lap(const struct layer_args *a, struct shared *s, struct producer *p)
{
    struct tag nothing = { NOTHING, 0, 0, 0, 0, 0 };
    for (; p->w; next_slot(a, p)) offer(s, p, nothing, 0);
}

/* stream: copy rows into a slot */
DEVICE void copy(const struct layer_args *a, struct shared *s, const struct producer *p,
                 int64_t to, const uint16_t *from, int64_t elements)
{
    bulk_load(slot(a, p->w) + to, from, (uint32_t)(2 * elements), s->full + p->w,
              p->policy);
}

/* stream: produce a product */
struct rows { const uint16_t *low, *high; int count; };   /* count of each */

/* stream: the rows of a chunk */
/* stream: the pairs that a chunk has */
DEVICE int pairs_left(const struct layer_args *a, int phase, int c, int64_t total)
{
    int64_t left = total - (int64_t)c * a->g.pairs[phase];
    return (int)(left < a->g.pairs[phase] ? left : a->g.pairs[phase]);
}

DEVICE int pairs_in(const struct layer_args *a, int phase, int c)
{
    if (phase == QKV) return a->g.pairs[QKV];
    return pairs_left(a, phase, c, phase == GATE_UP ? a->ffn : a->d / 2);
}

DEVICE struct rows rows_of(const struct layer_args *a, int phase, int c)
{
    int64_t first = (int64_t)c * a->g.pairs[phase], q = (int64_t)a->n_q * a->hd;
    if (phase == QKV) {
        /* the rows of a chunk of queries, keys or values */
        int half = a->hd / 2, bits = half == 64 ? 6 : 5;   /* half is 64 or 32 */
        int head = (int)first >> bits, k = head - a->n_q, v = k - a->n_kv;
        const uint16_t *W = k < 0 ? a->q : v < 0 ? a->k : a->v;
        int64_t row = (int64_t)(k < 0 ? head : v < 0 ? k : v) * a->hd + (first & (half - 1));
        struct rows r = { W + row * a->d, W + (row + half) * a->d, a->g.pairs[QKV] };
        return r;
    }
    if (phase == OUT) {
        struct rows r = { a->o + first * q, a->o + (first + a->d / 2) * q,
                          pairs_left(a, phase, c, a->d / 2) };
        return r;
    }
    struct rows r = { a->gate + first * a->d, a->up + first * a->d,
                      pairs_left(a, phase, c, a->ffn) };
    return r;
}

DEVICE void produce_rows(const struct layer_args *a, struct shared *s,
                         struct producer *p, int phase)
{
    int n = phase == OUT ? a->n_q * a->hd : (int)a->d, step = (int)gridDim.x;
    int pairs = a->g.pairs[phase], chunks = a->g.chunks[phase];
    int first = first_chunk(a, phase), part = 0;
    int part_chunks = phase == GATE_UP ? a->g.piece / pairs : chunks;
    int64_t stride = (int64_t)step * pairs * n;
    struct rows r = rows_of(a, phase, first);
    for (int c = first; c < chunks; c += step) {
        if (c != first) {
            /* go on to the next rows */
            r.low += stride, r.high += stride;
            r.count = pairs_in(a, phase, c);
            if (phase == QKV) r = rows_of(a, phase, c);
        }
        while (c >= (part + 1) * part_chunks) part++;   /* of down, that it feeds */
        int next = c + a->g.warps * step;
        int last = next >= chunks || next >= (part + 1) * part_chunks;
        struct tag tag = { phase, part, c, phase, last, 0 };
        offer(s, p, tag, (uint32_t)(4 * r.count * n));
        copy(a, s, p, 0, r.low, r.count * n);
        copy(a, s, p, 2 * r.count * n, r.high, r.count * n);
        next_slot(a, p);
    }
}

/* stream: the width of a piece */
DEVICE int64_t piece_width(const struct layer_args *a, int piece)
{
    int64_t left = a->ffn - (int64_t)piece * a->g.piece;
    return left < a->g.piece ? left : a->g.piece;
}

DEVICE void produce_down(const struct layer_args *a, struct shared *s,
                         struct producer *p, int piece)
{
    struct share share = share_of_down(a);
    int n = (int)piece_width(a, piece), step = share.teams, chunks = a->g.chunks[DOWN];
    int64_t pairs = a->g.pairs[DOWN], half = a->d / 2 * a->ffn;
    const uint16_t *low = a->down + share.team * pairs * a->ffn
                        + (int64_t)piece * a->g.piece;
    finish_lap(a, s, p);   /* each of a row's pieces to the same warp */
    for (int c = share.team; c < chunks; c += step, low += step * pairs * a->ffn) {
        int last = c + a->g.warps * step >= chunks, count = pairs_in(a, DOWN, c);
        struct tag tag = { DOWN, piece, c, DOWN + piece, last, 0 };
        offer(s, p, tag, (uint32_t)(4 * count * n));
        UNROLL(1)
        for (int r = 0; r < count; r++) {
            copy(a, s, p, 2 * r * n, low + r * a->ffn, n);
            copy(a, s, p, 2 * (r + count) * n, low + r * a->ffn + half, n);
        }
        next_slot(a, p);
    }
}

/* stream: produce a unit of attention */
DEVICE int produce_unit(const struct layer_args *a, struct shared *s,
                        struct producer *p, struct span n, int64_t pos, int unit,
                        int queries)   /* so far; returns as many with these */
{
    int group = unit % a->g.groups, kv = group / a->g.octets;
    int split = unit / a->g.groups, start = first_tile(n, split);
    int end = first_tile(n, split + 1);
    for (int t = start; t < end; t++) {
        int64_t first = (int64_t)t * TILE_KEYS, old = pos - first;
        if (old > TILE_KEYS) old = TILE_KEYS;
        int64_t at = (kv * a->pos.rows + first) * a->hd;
        struct tag tag = { ATTEND, group, t - start,
                           queries + queries_of_tile(t - start), 0, t };
        offer(s, p, tag, (uint32_t)(4 * old * a->hd));
        if (old) {
            copy(a, s, p, 0, a->k_cache + at, old * a->hd);
            copy(a, s, p, 2 * TILE_KEYS * a->hd, a->v_cache + at, old * a->hd);
        }
        next_slot(a, p);
    }
    return queries + queries_of_tile(end - start - 1) + 1;
}

/* stream: produce all of it, in order */
DEVICE void produce(const struct layer_args *a, struct shared *s, int64_t pos)
{
    struct producer p = { evict_first(), 0, 0 };
    struct span n = span_at(a, pos);
    int queries = 0, units = units_of_block(a, n);
    for (int phase = QKV; phase < DOWN; phase++)
        if (phase != ATTEND) produce_rows(a, s, &p, phase);
        else for (int u = 0; u < units; u++)
            queries = produce_unit(a, s, &p, n, pos, (int)(blockIdx.x + u * gridDim.x),
                                   queries);
    for (int piece = share_of_down(a).first_piece; piece < a->g.pieces;
         piece += (int)gridDim.x)
        produce_down(a, s, &p, piece);
    for (int w = 0; w < a->g.warps; w++) {
        struct tag end = { THE_END, 0, 0, 0, 0, 0 };
        offer(s, &p, end, 0);
        next_slot(a, &p);
    }
}

/* stream: the loaders */
/* stream: count what is done, and wait for it */
DEVICE void wait_for_phase(const struct layer_args *a, int phase, int part,
                           uint32_t launch, int each)
{
    if (loader_thread(a) == 0)
        wait_at_least(counter(a, phase, part), (launch + 1) * (uint32_t)each);
    loaders_meet();
}

DEVICE void announce(const struct layer_args *a, struct shared *s, int vector)
{
    loaders_meet();
    if (loader_thread(a) == 0) mbarrier_arrive(s->placed + vector);
}

DEVICE void publish(const struct layer_args *a, struct shared *s, uint32_t queries)
{
    loaders_meet();
    if (loader_thread(a) == 0) publish_in_block(&s->queries, queries);
}

/* stream: put a vector in place */
/* stream: read eight numbers */
DEVICE struct eight eight_bf16(bits128 b)
{
    struct eight x;
    for (int i = 0; i < 4; i++) {
        x.v[2 * i] = bits_f32(b.v[i] << 16);
        x.v[2 * i + 1] = bits_f32(b.v[i] & 0xffff0000u);
    }
    return x;
}

DEVICE struct eight eight_f32(bits128 low, bits128 high)
{
    struct eight x;
    for (int i = 0; i < 4; i++) {
        x.v[i] = bits_f32(low.v[i]);
        x.v[4 + i] = bits_f32(high.v[i]);
    }
    return x;
}

DEVICE float weigh(struct eight *x, bits128 weight, float squares)
{
    struct eight w = eight_bf16(weight);
    for (int i = 0; i < 8; i++) {
        squares = fmaf(x->v[i], x->v[i], squares);
        x->v[i] *= w.v[i];
    }
    return squares;
}

enum { IN_FLIGHT = 4 };   /* eights that a loader has in flight */

APART void put_vector(const struct layer_args *a, struct shared *s, const float *f,
                      const uint16_t *b, const uint16_t *weight, int64_t n)
{
    uint16_t *hi = (uint16_t *)vector_area();
    float squares = 0;
    /* put zeros behind the vector */
    for (int64_t j = n + loader_thread(a) * 8; j < padded(n); j += 8 * LOADERS) {
        struct eight none = {{ 0 }};
        put_eight(hi, n, j, none);
    }
    UNROLL(1)
    for (int64_t i = loader_thread(a) * 8; i - loader_thread(a) * 8 < n;
         i += 8 * LOADERS * IN_FLIGHT) {
        bits128 x[IN_FLIGHT][2], w[IN_FLIGHT];   /* as read: float or bf16; bf16 */
        /* fetch the eights and their weights */
        for (int u = 0; u < IN_FLIGHT; u++) {
            int64_t j = i + 8 * LOADERS * u;
            if (j >= n) break;
            x[u][0] = load_16(f ? (const void *)(f + j) : b + j);
            if (f) x[u][1] = load_16(f + j + 4);
            if (weight) w[u] = load_16(weight + j);
        }
        if (b && i < 8 * LOADERS) {
            __syncwarp();
            named_barrier_arrive(2, LOADERS + 32);
        }
        for (int u = 0; u < IN_FLIGHT; u++) {
            int64_t j = i + 8 * LOADERS * u;
            struct eight e = f ? eight_f32(x[u][0], x[u][1]) : eight_bf16(x[u][0]);
            if (j >= n) break;
            if (weight) squares = weigh(&e, w[u], squares);
            put_eight(hi, n, j, e);
        }
    }
    if (!weight && loader_thread(a) == 0) s->scale = 1;
    if (weight) {
        /* add up the squares and set the scale */
        for (int m = 16; m; m /= 2) squares += shfl_xor_f32(squares, m);
        if (lane_id() == 0) s->sums[loader_thread(a) / 32] = squares;
        loaders_meet();
        squares = 0;
        for (int i = 0; i < LOADER_WARPS; i++) squares += s->sums[i];
        if (loader_thread(a) == 0) s->scale = rsqrtf(squares / (float)n + a->eps);
    }
}

/* stream: attend a unit */
/* stream: put the queries of a unit in place */
#define LOG2_E 1.44269504088896341f

DEVICE int heads_of(const struct layer_args *a, int group, int *first)
{
    int rep = a->n_q / a->n_kv, octet = group % a->g.octets;
    *first = group / a->g.octets * rep + octet * HEADS;
    return rep - octet * HEADS < HEADS ? rep - octet * HEADS : HEADS;
}

DEVICE void put_queries(const struct layer_args *a, int group)
{
    uint16_t *hi = unit_queries(a), *lo = hi + HEADS * a->hd;
    int first, heads = heads_of(a, group, &first);
    for (int i = loader_thread(a) * 8; i < HEADS * a->hd; i += 8 * LOADERS) {
        struct eight q = {{ 0 }};
        const float *from = a->roped_q + first * a->hd + i;
        if (i < heads * a->hd) q = eight_f32(load_16(from), load_16(from + 4));
        for (int j = 0; j < 8; j++) q.v[j] *= a->score_scale * LOG2_E;
        split(&q, (bits128 *)(hi + i), (bits128 *)(lo + i));
    }
}

/* stream: wait for some tiles */
DEVICE void wait_for_tiles(struct shared *s, int first, int count, uint32_t *parities)
{
    UNROLL(1)
    for (int i = first; i < first + count; i++) {
        mbarrier_wait(s->tiles + i, *parities >> i & 1);
        *parities ^= 1u << i;
    }
}

/* stream: merge the tiles of a unit */
struct merged { float max, weight, sum[4]; };

DEVICE void merge(struct merged *m, float max, float weight, bits128 sum)
{
    float larger = fmaxf(m->max, max), base = base_of(larger);
    float e = exp2_approx(m->max - base), f = exp2_approx(max - base);
    m->weight = e * m->weight + f * weight;
    for (int j = 0; j < 4; j++) m->sum[j] = e * m->sum[j] + f * bits_f32(sum.v[j]);
    m->max = larger;
}

DEVICE void merge_tiles(const struct layer_args *a, struct shared *s, struct merged *m,
                        int first, int count)
{
    int head = loader_thread(a) / 32, i = lane_id() * 4;
    if (i >= a->hd) return;
    UNROLL(1)
    for (int t = first; t < first + count; t++)
        merge(m, s->tile_max[t][head], s->tile_weight[t][head],
              *(const bits128 *)(tile_sums(a, t) + head * a->hd + i));
}

DEVICE void store_unit(const struct layer_args *a, const struct merged *m, int group,
                       int split)
{
    int head = loader_thread(a) / 32, i = lane_id() * 4;
    int64_t at = ((int64_t)group * a->g.max_units + split) * HEADS + head;
    if (i >= a->hd) return;
    for (int j = 0; j < 4; j++) a->unit_sum[at * a->hd + i + j] = m->sum[j];
    if (i == 0) a->unit_max[at] = m->max, a->unit_weight[at] = m->weight;
}

/* stream: merge the units of a group */
struct partial { bits128 sum; float max, weight; };

DEVICE struct partial *partials(void) { return (struct partial *)vector_area(); }

DEVICE void fetch_slice(const struct layer_args *a, struct span n, int group, int from,
                        int count)   /* of fours of the group's numbers */
{
    UNROLL(1)
    for (int i = loader_thread(a); i < n.units * count; i += LOADERS) {
        int64_t unit = group * a->g.max_units + i / count;
        int at = 4 * (from + i % count), head = at / a->hd;
        struct partial *p = partials() + i;
        p->max = a->unit_max[unit * HEADS + head];
        p->weight = a->unit_weight[unit * HEADS + head];
        p->sum = load_16(a->unit_sum + unit * HEADS * a->hd + at);
    }
}

DEVICE uint32_t share_of_unit(const struct layer_args *a, struct span n, int split)
{
    int most = a->g.max_units;
    return (uint32_t)(most * (split + 1) / n.units - most * split / n.units);
}

DEVICE bits128 merged_four(const struct partial *p, int units, int count)
{
    float max = -INFINITY, weight = 0, sum[4] = { 0, 0, 0, 0 };
    for (int u = 0; u < units; u++) max = fmaxf(max, p[u * count].max);
    UNROLL(4)
    for (int u = 0; u < units; u++) {
        const struct partial *one = p + u * count;
        float e = exp2_approx(one->max - base_of(max));
        weight = fmaf(e, one->weight, weight);
        for (int j = 0; j < 4; j++) sum[j] = fmaf(e, bits_f32(one->sum.v[j]), sum[j]);
    }
    bits128 y;
    for (int j = 0; j < 4; j++) y.v[j] = f32_bits(sum[j] / weight);
    return y;
}

DEVICE void merge_slice(const struct layer_args *a, struct span n, int group, int split)
{
    int fours = HEADS * a->hd / 4, from = fours * split / n.units;
    int count = fours * (split + 1) / n.units - from, t = loader_thread(a), first;
    int heads = heads_of(a, group, &first);
    fetch_slice(a, n, group, from, count);
    loaders_meet();
    for (int i = t; i < count; i += LOADERS) {
        int at = 4 * (from + i);
        if (at / a->hd >= heads) break;
        *(bits128 *)(a->attended + first * a->hd + at)
            = merged_four(partials() + i, n.units, count);
    }
    loaders_meet();
    if (t == 0) atomic_add_release(counter(a, ATTEND, 0), share_of_unit(a, n, split));
}

DEVICE uint32_t attend_unit(const struct layer_args *a, struct shared *s, struct span n,
                            int unit, uint32_t *parities, uint32_t queries)
{                                        /* returns the last count that it published */
    int group = unit % a->g.groups, split = unit / a->g.groups, t = loader_thread(a);
    int tiles = first_tile(n, split + 1) - first_tile(n, split);
    int step = tiles > UNIT_TILES ? 1 : tiles;
    struct merged m = { -INFINITY, 0, { 0, 0, 0, 0 } };
    put_queries(a, group);
    publish(a, s, ++queries);
    UNROLL(1)
    for (int i = 0; i < tiles; i += step) {
        wait_for_tiles(s, i % UNIT_TILES, step, parities);
        merge_tiles(a, s, &m, i % UNIT_TILES, step);
        if (i + UNIT_TILES < tiles) publish(a, s, ++queries);
    }
    store_unit(a, &m, group, split);
    loaders_meet();
    if (t == 0)
        atomic_add_release(a->units_done + group * LINE, share_of_unit(a, n, split));
    return queries;
}

APART void load_vectors(const struct layer_args *a, struct shared *s, int64_t pos)
{
    uint32_t launch = a->launches[blockIdx.x];
    uint32_t queries = 0, parities = 0;   /* of the places of tiles, a bit each */
    struct span n = span_at(a, pos);
    int t = loader_thread(a);
    put_vector(a, s, 0, a->x, a->in_norm, a->d);
    announce(a, s, QKV);
    if (units_of_block(a, n)) wait_for_phase(a, QKV, 0, launch, a->g.chunks[QKV]);
    for (int u = (int)blockIdx.x; u < n.units * a->g.groups; u += (int)gridDim.x)
        queries = attend_unit(a, s, n, u, &parities, queries);
    /* merge this block's slices */
    for (int u = (int)blockIdx.x; u < n.units * a->g.groups; u += (int)gridDim.x) {
        int group = u % a->g.groups, most = a->g.max_units;
        uint32_t *done = a->units_done + group * LINE;
        if (t == 0) wait_at_least(done, (launch + 1) * (uint32_t)most);
        loaders_meet();
        merge_slice(a, n, group, u / a->g.groups);
    }
    wait_for_phase(a, ATTEND, 0, launch, a->g.groups * a->g.max_units);
    put_vector(a, s, a->attended, 0, 0, (int64_t)a->n_q * a->hd);
    announce(a, s, OUT);
    wait_for_phase(a, OUT, 0, launch, a->g.chunks[OUT]);
    put_vector(a, s, a->x1, 0, a->post_norm, a->d);
    announce(a, s, GATE_UP);
    /* put the pieces of the gated vector in place */
    int before = -1;
    for (int piece = share_of_down(a).first_piece; piece < a->g.pieces;
         piece += (int)gridDim.x) {
        int rows = (int)piece_width(a, piece) / a->g.pairs[GATE_UP];
        wait_for_phase(a, GATE_UP, piece, launch, rows);
        if (t == 0) wait_in_block(&s->gated, (uint32_t)chunks_of_block(a, GATE_UP));
        if (before >= 0) wait_for_phase(a, DOWN, before, launch, a->g.chunks[DOWN]);
        loaders_meet();
        put_vector(a, s, a->act + (int64_t)piece * a->g.piece, 0, 0, piece_width(a, piece));
        announce(a, s, DOWN + piece);
        before = piece;
    }
    if (t == 0) a->launches[blockIdx.x] = launch + 1;
}

/* stream: the consumers */
/* stream: the product of two rows */
struct stripe { bits128 w[2], hi, lo; };   /* weights of both halves; the vector */

DEVICE struct stripe read_stripe(const uint16_t *row, const uint16_t *x, int lo)
{
    struct stripe s;
    s.w[0] = *(const bits128 *)row;
    s.hi = *(const bits128 *)x;
    s.w[1] = *(const bits128 *)(row + STRIPE / 2);
    s.lo = *(const bits128 *)(x + lo);
    return s;
}

DEVICE void multiply_stripe(float c[2][2][4], struct stripe s)
{
    for (int half = 0; half < 2; half++) {
        mma_bf16(c[half][0], s.w[half].v, s.hi.v + 2 * half);
        mma_bf16(c[half][1], s.w[half].v, s.lo.v + 2 * half);
    }
}

enum { DEPTH = 3 };   /* stripes in flight */

DEVICE struct pair dot(const uint16_t *low, const uint16_t *high, const uint16_t *x,
                       int n)
{
    int g = lane_id() / 4, segment = g / 2 ^ g % 2;
    int at = 32 * segment + lane_id() % 4 * 8;
    const uint16_t *row = (g % 2 ? high : low) + at;
    int lo = (int)padded(n), k = 0;
    float c[2][2][2][4] = {{{{ 0 }}}};   /* the middle stripe's apart */
    x += 8 * lane_id();
    if (n >= DEPTH * STRIPE) {
        /* multiply several stripes at a time */
        struct stripe s[DEPTH];
        for (int u = 0; u < DEPTH; u++)
            s[u] = read_stripe(row + STRIPE * u, x + STRIPE * u, lo);
        UNROLL(1)
        for (k = DEPTH * STRIPE; k + DEPTH * STRIPE <= n; k += DEPTH * STRIPE)
            for (int u = 0; u < DEPTH; u++) {
                multiply_stripe(c[u % 2], s[u]);
                s[u] = read_stripe(row + k + STRIPE * u, x + k + STRIPE * u, lo);
            }
        for (int u = 0; u < DEPTH - 1; u++)
            if (k + STRIPE <= n) {
                multiply_stripe(c[u % 2], s[u]);
                s[u] = read_stripe(row + k, x + k, lo);
                k += STRIPE;
            }
        for (int u = 0; u < DEPTH; u++) multiply_stripe(c[u % 2], s[u]);
    }
    /* multiply what is left of the rows */
    UNROLL(1)
    for (; k < n; k += STRIPE) {
        struct stripe s = {{{{ 0 }}}, {{ 0 }}, {{ 0 }}};
        if (k + at < n) s.w[0] = *(const bits128 *)(row + k);
        if (k + at + STRIPE / 2 < n) s.w[1] = *(const bits128 *)(row + k + STRIPE / 2);
        s.hi = *(const bits128 *)(x + k);
        s.lo = *(const bits128 *)(x + k + lo);
        multiply_stripe(c[0], s);
    }
    /* add up the segments */
    float sum = 0;
    for (int half = 0; half < 2; half++)
        for (int i = 0; i < 2; i++)
            for (int u = 0; u < 2; u++) sum += c[u][half][i][0] + c[u][half][i][3];
    if (lane_id() % 4 != segment) sum = 0;
    sum += shfl_xor_f32(sum, 1);
    sum += shfl_xor_f32(sum, 2);
    sum += shfl_xor_f32(sum, 8);
    sum += shfl_xor_f32(sum, 16);
    float other = shfl_xor_f32(sum, 4);
    struct pair y = { g % 2 ? other : sum, g % 2 ? sum : other };
    return y;
}

/* stream: what becomes of a sum */
DEVICE void store_x1(const struct layer_args *a, int64_t i, struct pair y)
{
    int64_t j = i + a->d / 2;
    a->x1[i] = bf16_to_f32(a->x[i]) + y.low;
    a->x1[j] = bf16_to_f32(a->x[j]) + y.high;
}

DEVICE void store_act(const struct layer_args *a, int64_t i, struct pair y)
{
    a->act[i] = y.low / (1 + expf(-y.low)) * y.high;   /* gate, up */
}

DEVICE void store_piece(const struct layer_args *a, int piece, int64_t i, struct pair y)
{
    a->piece_sum[piece * a->d + i] = y.low;
    a->piece_sum[piece * a->d + i + a->d / 2] = y.high;
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

DEVICE void store_qkv(const struct layer_args *a, int64_t pos, int64_t pair,
                      struct pair y)
{
    int half = a->hd / 2, head = (int)(pair / half), i = (int)(pair % half);
    int is_q = head < a->n_q, is_v = head >= a->n_q + a->n_kv;
    if (!is_v) rotate(&y.low, &y.high, pos, a->turn[i]);
    if (is_q) {
        a->roped_q[head * a->hd + i] = y.low;
        a->roped_q[head * a->hd + i + half] = y.high;
        return;
    }
    uint16_t *cache = is_v ? a->v_cache : a->k_cache;
    int64_t at = ((head - a->n_q) % a->n_kv * a->pos.rows + pos) * a->hd + i;
    cache[at] = f32_to_bf16(y.low);
    cache[at + half] = f32_to_bf16(y.high);
}

/* stream: add up the pieces */
DEVICE void add_pieces(const struct layer_args *a, int64_t row)
{
    float sum = a->x1[row];
    UNROLL(4)
    for (int p = 0; p < a->g.pieces; p++) sum += a->piece_sum[p * a->d + row];
    a->x_out[row] = f32_to_bf16(sum);
}

DEVICE void finish_down(const struct layer_args *a, struct tag tag, int w)
{
    struct share share = share_of_down(a);
    uint32_t before = 0, *count = a->pieces_done + share.team * MAX_WARPS + w;
    if (lane_id() == 0) before = atomic_add_acq_rel(count, 1);
    before = shfl_u32(before, 0);
    if (before + 1 != (uint32_t)a->g.pieces) return;
    if (lane_id() == 0) store_relaxed(count, 0);   /* for the next step */
    __syncwarp();
    int step = share.teams * a->g.warps, first = tag.item % step;
    int pairs = a->g.pairs[DOWN], chunks = (a->g.chunks[DOWN] - first - 1) / step + 1;
    UNROLL(1)
    for (int i = lane_id(); i < chunks * pairs; i += 32) {
        int64_t row = (int64_t)(first + i / pairs * step) * pairs + i % pairs;
        if (row >= a->d / 2) continue;
        add_pieces(a, row);
        add_pieces(a, row + a->d / 2);
    }
}

/* stream: multiply the rows of a chunk */
DEVICE void multiply_chunk(const struct layer_args *a, struct shared *s, int64_t pos,
                           int w, uint32_t lap, struct tag tag)
{
    const uint16_t *weights = (const uint16_t *)slot(a, w);
    const uint16_t *vector = (const uint16_t *)vector_area();
    int64_t n = tag.phase == OUT ? (int64_t)a->n_q * a->hd
              : tag.phase == DOWN ? piece_width(a, tag.part) : a->d;
    int count = pairs_in(a, tag.phase, tag.item);
    struct pair mine = { 0, 0 };
    UNROLL(1)
    for (int i = 0; i < count; i++) {
        const uint16_t *low = weights + i * n;
        struct pair sum = dot(low, low + count * n, vector, (int)n);
        if (lane_id() == i) mine = sum;
    }
    mine.low *= s->scale, mine.high *= s->scale;
    __syncwarp();
    if (lane_id() == 0) give_back(s, w, lap);
    /* store the sums */
    if (lane_id() < count) {
        int64_t i = (int64_t)tag.item * a->g.pairs[tag.phase] + lane_id();
        if (tag.phase == QKV) store_qkv(a, pos, i, mine);
        else if (tag.phase == OUT) store_x1(a, i, mine);
        else if (tag.phase == GATE_UP) store_act(a, i, mine);
        else store_piece(a, tag.part, i, mine);
    }
    __syncwarp();
}

/* stream: attend a tile */
/* stream: fetch the row that is being written */
DEVICE void fetch_row(const struct layer_args *a, uint16_t *K, uint16_t *V, int kv,
                      int64_t pos, int row)
{
    int i = lane_id() % 16 * 8;
    const uint16_t *cache = lane_id() < 16 ? a->k_cache : a->v_cache;
    uint16_t *to = lane_id() < 16 ? K : V;
    bits128 zero = {{ 0 }};
    if (i < a->hd)
        *(bits128 *)(to + row * a->hd + i)
            = load_16(cache + (kv * a->pos.rows + pos) * a->hd + i);
    for (i = (row + 1) * a->hd + 8 * lane_id(); i < TILE_KEYS * a->hd; i += 256)
        *(bits128 *)(V + i) = zero;
    __syncwarp();
}

/* stream: score a tile */
enum { EIGHTS = TILE_KEYS / 8, SIXTEENS = TILE_KEYS / 16 };   /* of keys */

DEVICE void score_tile(const struct layer_args *a, const uint16_t *K,
                       float score[EIGHTS][4])
{
    int g = lane_id() / 4, t = lane_id() % 4;
    const uint16_t *hi = unit_queries(a) + g * a->hd, *lo = hi + HEADS * a->hd;
    UNROLL(1)
    for (int i = 8 * t; i < a->hd; i += 32) {
        bits128 h = *(const bits128 *)(hi + i), l = *(const bits128 *)(lo + i);
        uint32_t q[2][4] = {{ h.v[0], l.v[0], h.v[1], l.v[1] },
                            { h.v[2], l.v[2], h.v[3], l.v[3] }};
        bits128 k[EIGHTS];
        for (int n = 0; n < EIGHTS; n++)
            k[n] = *(const bits128 *)(K + (8 * n + g) * a->hd + i);
        for (int n = 0; n < EIGHTS; n++) mma_bf16(score[n], q[0], k[n].v);
        for (int n = 0; n < EIGHTS; n++) mma_bf16(score[n], q[1], k[n].v + 2);
    }
}

/* stream: the softmax of a tile */
DEVICE float add_low(float hi, float lo)   /* a score that has overflowed stays so */
{
    return fabsf(hi) == INFINITY ? hi : hi + lo;
}

DEVICE void soften(struct shared *s, float score[EIGHTS][4], int keys, int place,
                   uint32_t weight[SIXTEENS][4])
{
    int g = lane_id() / 4, t = lane_id() % 4;
    float max = -INFINITY, sum = 0;
    /* find the largest score of the head */
    for (int n = 0; n < EIGHTS; n++)
        for (int j = 0; j < 2; j++) {
            float both = add_low(score[n][j], score[n][2 + j]);
            score[n][j] = 8 * n + 2 * t + j < keys ? both : -INFINITY;
            max = fmaxf(max, score[n][j]);
        }
    for (int m = 1; m < 4; m *= 2) max = fmaxf(max, shfl_xor_f32(max, m));
    float base = base_of(max);
    for (int n = 0; n < EIGHTS; n++) {
        float *e = score[n];
        uint32_t *two = &weight[n / 2][n % 2 * 2];   /* hi, lo */
        for (int j = 0; j < 2; j++) e[j] = exp2_approx(e[j] - base), sum += e[j];
        split_pair(e[0], e[1], two, two + 1);
    }
    for (int m = 1; m < 4; m *= 2) sum += shfl_xor_f32(sum, m);
    if (t) return;
    s->tile_max[place][g] = max;
    s->tile_weight[place][g] = sum;
}

/* stream: sum a tile */
DEVICE uint32_t even_of(uint32_t a, uint32_t b) { return pick_bytes(a, b, 0x5410); }
DEVICE uint32_t odd_of(uint32_t a, uint32_t b) { return pick_bytes(a, b, 0x7632); }

DEVICE void sum_tile(const struct layer_args *a, uint32_t weight[SIXTEENS][4],
                     const uint16_t *V, int place)
{
    int g = lane_id() / 4, t = lane_id() % 4, hd = a->hd;
    UNROLL(1)
    for (int i = 0; i < hd; i += 64) {
        float c[4][2][4] = {{{ 0 }}};   /* of four words, even and odd */
        for (int m = 0; m < SIXTEENS; m++) {
            bits128 v[4];
            for (int j = 0; j < 4; j++)
                v[j] = *(const bits128 *)(V + i + 8 * g
                                          + (16 * m + 2 * t + j % 2 + j / 2 * 8) * hd);
            /* multiply the weights by the values of sixteen keys */
            for (int w = 0; w < 4; w++) {
                uint32_t even[2] = { even_of(v[0].v[w], v[1].v[w]), even_of(v[2].v[w], v[3].v[w]) };
                uint32_t odd[2] = { odd_of(v[0].v[w], v[1].v[w]), odd_of(v[2].v[w], v[3].v[w]) };
                mma_bf16(c[w][0], weight[m], even);
                mma_bf16(c[w][1], weight[m], odd);
            }
        }
        /* store the sums of 64 dimensions */
        float *out = tile_sums(a, place) + g * hd + i + 16 * t;
        for (int h = 0; h < 2; h++)
            for (int w = 0; w < 4; w += 2) {
                bits128 four;
                for (int j = 0; j < 4; j++) {
                    const float *d = c[w + j / 2][j % 2];
                    four.v[j] = f32_bits(d[h] + d[2 + h]);   /* hi and lo */
                }
                *(bits128 *)(out + 8 * h + 2 * w) = four;
            }
    }
}

APART void attend_tile(const struct layer_args *a, struct shared *s, int64_t pos, int w,
                       uint32_t lap, struct tag tag)
{
    uint16_t *K = (uint16_t *)slot(a, w), *V = K + TILE_KEYS * a->hd;
    int64_t first = (int64_t)tag.tile * TILE_KEYS;
    int keys = pos - first < TILE_KEYS ? (int)(pos - first) + 1 : TILE_KEYS;
    int place = tag.item % UNIT_TILES;
    float score[EIGHTS][4] = {{ 0 }};
    uint32_t weight[SIXTEENS][4];
    if (first + keys - 1 == pos)
        fetch_row(a, K, V, tag.part / a->g.octets, pos, keys - 1);
    score_tile(a, K, score);
    soften(s, score, keys, place, weight);
    sum_tile(a, weight, V, place);
    /* give the slot back, and say that the tile is summed */
    proxy_fence();
    __syncwarp();
    if (lane_id() == 0) {
        give_back(s, w, lap);
        mbarrier_arrive(s->tiles + place);
    }
}

/* stream: wait for the turn */
DEVICE void wait_for_turn(const struct layer_args *a, struct shared *s, int w,
                          uint32_t lap)
{
    if (a->g.warps <= OPEN) return;
    int older = w - OPEN;
    if (older < 0) older += a->g.warps, lap--;
    wait_until_given_back(s, older, lap);
}

/* stream: a consumer's life */
DEVICE void consume(const struct layer_args *a, struct shared *s, int64_t pos, int w)
{
    uint32_t chunks = 0;   /* finished and not yet counted */
    int timed = -1;        /* the phase whose start this warp has marked */
    for (uint32_t lap = 0;; lap++) {
        mbarrier_wait(s->full + w, lap % 2);
        struct tag tag = s->tag[w];
        if (tag.phase == THE_END) return;
        /* wait for the vector, and for the turn */
        if (tag.phase == ATTEND) {
            if (lane_id() == 0) wait_in_block(&s->queries, (uint32_t)tag.vector + 1);
        } else if (tag.phase != NOTHING) {
            mbarrier_wait(s->placed + tag.vector, 0);
            wait_for_turn(a, s, w, lap);
        }
        __syncwarp();
        if (tag.phase == NOTHING) {
            if (lane_id() == 0) give_back(s, w, lap);
            continue;
        }
        if (tag.phase != timed) MARK(a, START, timed = tag.phase);
        if (tag.phase == ATTEND) {
            attend_tile(&s->args, s, pos, w, lap, tag);
            MARK(a, END, ATTEND);
            continue;
        }
        multiply_chunk(a, s, pos, w, lap, tag);
        MARK(a, END, tag.phase);
        chunks++;
        if (!tag.last) continue;
        /* count this warp's chunks of the phase */
        if (tag.phase == GATE_UP && lane_id() == 0) add_in_block(&s->gated, chunks);
        if (tag.phase == DOWN) finish_down(a, tag, w);
        if (lane_id() == 0 && (tag.phase != DOWN || a->g.pieces > (int)gridDim.x))
            atomic_add_release(counter(a, tag.phase, tag.part), chunks);
        chunks = 0;
    }
}

/* stream: the kernel */
KERNEL THREADS(32 * (MAX_WARPS + LOADER_WARPS + 1))
whole_layer(const IN_PLACE struct layer_args a)
{
    struct shared *s = block_state();
    int warp = (int)threadIdx.x / 32;
    /* stream: prepare the barriers */
    typedef uint32_t any_word __attribute__((may_alias));   /* of whatever type */
    for (uint32_t i = threadIdx.x; i < sizeof a / 4; i += blockDim.x)
        ((any_word *)&s->args)[i] = ((const any_word *)&a)[i];
    if (threadIdx.x == 0) {
        for (int w = 0; w < a.g.warps; w++) {
            mbarrier_init(s->full + w, 1);
            for (int odd = 0; odd < 2; odd++) mbarrier_init(s->empty[odd] + w, 1);
        }
        for (int i = 0; i < DOWN + a.g.pieces; i++) mbarrier_init(s->placed + i, 1);
        for (int i = 0; i < UNIT_TILES; i++) mbarrier_init(s->tiles + i, 1);
        s->queries = s->gated = 0;
        mbarrier_init_fence();
    }
    wait_for_prerequisites();
    int64_t pos = position(a.pos);
    if (pos < 0) {
        /* fill the result with NaN and remember */
        for (int64_t i = blockIdx.x * blockDim.x + threadIdx.x; i < a.d;
             i += gridDim.x * blockDim.x)
            a.x_out[i] = 0x7fc0;
        if (blockIdx.x == 0 && threadIdx.x == 0) *a.status = 4;   /* LAYER_BAD_POSITION */
        return;
    }
    __syncthreads();
    if (warp < a.g.warps) consume(&a, s, pos, warp);
    else if (warp < a.g.warps + LOADER_WARPS) {
        load_vectors(&s->args, s, pos);
        launch_dependents();
    } else {
        named_barrier_sync(2, LOADERS + 32);   /* the loaders' first reads go ahead */
        if (threadIdx.x % 32 == 0) produce(&a, s, pos);
    }
}
CPU_KERNEL(whole_layer, struct layer_args)

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

"""

LAYER_C = r"""

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
