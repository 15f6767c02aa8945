/* stages/stage5/probes.cu: tangled from layer.nw; change it there. */
/* the probes beside a stage */
/* Kernels that feed and gauge a stage: the input generator, the read-only stream. */
#include <stdint.h>
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
#else
#include "device.h"
#endif

/* the input generator */
DEVICE uint64_t mix64(uint64_t z)
{
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
    z = (z ^ z >> 27) * 0x94d049bb133111ebu;
    return z ^ z >> 31;
}

DEVICE int32_t normal_times_65536(uint64_t key, uint64_t i)
{
    int32_t sum = -393210;
    for (uint64_t j = 3 * i; j < 3 * i + 3; j++) {
        uint64_t bits = mix64(key + (j + 1) * 0x9e3779b97f4a7c15u);
        sum += (int32_t)(bits & 0xffff) + (int32_t)(bits >> 16 & 0xffff)
             + (int32_t)(bits >> 32 & 0xffff) + (int32_t)(bits >> 48);
    }
    return sum;
}

DEVICE float generated(uint64_t key, uint64_t i, int32_t offset, float scale)
{
    return (float)(offset + normal_times_65536(key, i)) * scale;
}

/* probe: fill a tensor */
/* what the probes are given */
struct fill_args {
    uint16_t *out;       /* [n] bf16 */
    uint64_t key;        /* of the seed and the tensor */
    int64_t first, n;    /* out[i] = element first + i, for all i < n */
    int32_t offset;
    float scale;
};
struct read_args {
    const char *from;    /* 16-byte aligned */
    int64_t chunks;      /* of chunk_bytes each */
    int32_t chunk_bytes, depth;
    uint32_t *sum;       /* [blocks][8]: xor of the words that each warp read */
};

KERNEL fill(struct fill_args a)
{
    int64_t step = (int64_t)gridDim.x * blockDim.x;
    for (int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x; i < a.n; i += step)
        a.out[i] = f32_to_bf16(generated(a.key, (uint64_t)(a.first + i), a.offset,
                                         a.scale));
}
CPU_KERNEL(fill, struct fill_args)

/* probe: the two sides of the ring */
enum { READERS = 8 };   /* warps that consume; one more produces */

DEVICE void produce(const struct read_args *a, uint64_t *full, uint64_t *empty,
                    char *ring)
{
    uint64_t policy = evict_first();
    int slot = 0, parity = 1;   /* the first wait for an empty slot passes */
    for (int64_t c = blockIdx.x; c < a->chunks; c += gridDim.x) {
        mbarrier_wait(empty + slot, (uint32_t)parity);
        mbarrier_expect(full + slot, (uint32_t)a->chunk_bytes);
        bulk_load(ring + slot * a->chunk_bytes, a->from + c * a->chunk_bytes,
                  (uint32_t)a->chunk_bytes, full + slot, policy);
        if (++slot == a->depth) slot = 0, parity ^= 1;
    }
}

DEVICE void consume(const struct read_args *a, uint64_t *full, uint64_t *empty,
                    char *ring)
{
    int slot = 0, parity = 0;
    uint32_t sum = 0;
    for (int64_t c = blockIdx.x; c < a->chunks; c += gridDim.x) {
        mbarrier_wait(full + slot, (uint32_t)parity);
        const bits128 *q = (const bits128 *)(ring + slot * a->chunk_bytes);
        for (int i = (int)threadIdx.x; i < a->chunk_bytes / 16; i += READERS * 32)
            sum ^= q[i].v[0] ^ q[i].v[1] ^ q[i].v[2] ^ q[i].v[3];
        __syncwarp();
        if (threadIdx.x % 32 == 0) mbarrier_arrive(empty + slot);
        if (++slot == a->depth) slot = 0, parity ^= 1;
    }
    for (int m = 16; m; m >>= 1) sum ^= shfl_xor_u32(sum, m);
    if (threadIdx.x % 32 == 0) a->sum[blockIdx.x * READERS + threadIdx.x / 32] = sum;
}

/* probe: read memory and do nothing else */
KERNEL THREADS(288) read_stream(struct read_args a)
{
    uint64_t *full = (uint64_t *)shared_memory(), *empty = full + 32;
    char *ring = shared_memory() + 1024;
    if (threadIdx.x == 0) {
        for (int i = 0; i < a.depth; i++) {
            mbarrier_init(full + i, 1);
            mbarrier_init(empty + i, READERS);
        }
        mbarrier_init_fence();
    }
    __syncthreads();
    if (threadIdx.x >= READERS * 32) {
        if (threadIdx.x == READERS * 32) produce(&a, full, empty, ring);
    } else consume(&a, full, empty, ring);
}
CPU_KERNEL(read_stream, struct read_args)
