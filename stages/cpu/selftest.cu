/* stages/cpu/selftest.cu: tangled from layer.nw; change it there. */
/* Right programs for every primitive, and how each goes wrong (a.fault). */
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

/* PTX: timers */
DEVICE uint64_t device_ns(void)
{
    uint64_t t;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(t));
    return t;
}
#else
#include "device.h"
#endif

/* selftest: what a kernel is given */
enum { N = 4096, SCRATCH = 2048 };
struct test {
    int fault;    // 0: none
    float *x, *y; // [N] whole numbers below 97; [N] NaN
    uint32_t *u;  // [1568] zeros
};

/* selftest: its place */
DEVICE unsigned index_of(unsigned t) { return blockIdx.x * blockDim.x + t; }

/* selftest: barriers */
KERNEL test_syncthreads(struct test a)
{
    float *s = (float *)shared_memory();
    unsigned t = threadIdx.x;
    s[t] = a.x[index_of(t)];
    if (a.fault == 3 && t == 40)
        return;
    if (a.fault != 1 && !(a.fault == 2 && t < 32))
        __syncthreads();
    a.y[index_of(t)] = s[(t + 33) % blockDim.x];
}
CPU_KERNEL(test_syncthreads, struct test)

KERNEL test_syncwarp(struct test a)
{
    float *s = (float *)shared_memory();
    unsigned t = threadIdx.x;
    s[t] = a.x[index_of(t)];
    if (a.fault != 1)
        __syncwarp();
    a.y[index_of(t)] = s[t / 32 * 32 + (t + 1) % 32];
}
CPU_KERNEL(test_syncwarp, struct test)

KERNEL test_named_sync(struct test a) // two groups of 64 threads
{
    float *s = (float *)shared_memory();
    unsigned t = threadIdx.x, group = t / 64;
    s[t] = a.x[index_of(t)];
    if (a.fault != 1)
        named_barrier_sync(a.fault == 3 ? 1 : 1 + (int)group, a.fault == 2 ? 128 : 64);
    a.y[index_of(t)] = s[group * 64 + (t + 33) % 64];
}
CPU_KERNEL(test_named_sync, struct test)

KERNEL test_named_arrive(struct test a) // 64 threads produce for 64 others
{
    float *s = (float *)shared_memory();
    unsigned t = threadIdx.x;
    if (t < 64) {
        if (a.fault == 3)
            named_barrier_arrive(1, 128);
        s[t] = a.x[index_of(t)];
        if (a.fault < 2)
            named_barrier_arrive(1, 128);
        a.y[index_of(t)] = 0;
    } else {
        if (a.fault != 1)
            named_barrier_sync(1, 128);
        a.y[index_of(t)] = s[t - 64];
    }
}
CPU_KERNEL(test_named_arrive, struct test)

/* selftest: warps */
KERNEL test_shuffle(struct test a)
{
    unsigned t = threadIdx.x;
    float x = a.x[index_of(t)], sum = x;
    for (int mask = 16; mask; mask /= 2)
        if (a.fault == 1 && t % 32 == 5 && mask == 4)
            continue;
        else if (a.fault == 2 && t % 32 == 5 && mask == 4)
            sum += (float)ballot(1);
        else
            sum += shfl_xor_f32(sum, mask);
    uint32_t bits = shfl_xor_u32(f32_bits(x), 1);
    sum += shfl_f32(x, 3) + bits_f32(shfl_u32(bits, 3));
    a.y[index_of(t)] = sum;
}
CPU_KERNEL(test_shuffle, struct test)

KERNEL test_ballot(struct test a)
{
    unsigned t = threadIdx.x;
    int mine = a.x[index_of(t)] > 40.0f;
    uint32_t votes = a.fault == 1 && t % 32 == 5 ? 0 : ballot(mine);
    a.y[index_of(t)] = (float)(votes & 0xffffu) + (float)(votes >> 16);
}
CPU_KERNEL(test_ballot, struct test)

DEVICE uint32_t pair_of(float lower, float upper)
{
    return (uint32_t)f32_to_bf16(upper) << 16 | f32_to_bf16(lower);
}
KERNEL test_mma(struct test a) // y[16][8] = x[16][16] times x + 256, [16][8]
{
    unsigned g = threadIdx.x / 4, t = threadIdx.x % 4;
    const float *left = a.x, *right = a.x + 256;
    uint32_t p[4], q[2];
    float c[4] = {0, 0, 0, 0};
    for (unsigned i = 0; i < 4; i++) {
        unsigned row = g + i % 2 * 8, k = 2 * t + i / 2 * 8;
        p[a.fault == 1 ? i ^ 3 : i] =
            pair_of(left[row * 16 + k], left[row * 16 + k + 1]);
    }
    for (unsigned i = 0; i < 2; i++) {
        unsigned k = 2 * t + i * 8;
        q[i] = pair_of(right[k * 8 + g], right[k * 8 + 8 + g]);
    }
    if (!(a.fault == 2 && threadIdx.x == 9))
        mma_bf16(c, p, q);
    for (unsigned i = 0; i < 4; i++)
        a.y[(g + i / 2 * 8) * 8 + 2 * t + i % 2] = c[i];
}
CPU_KERNEL(test_mma, struct test)

/* selftest: order between blocks */
KERNEL test_message(struct test a)
{
    unsigned t = threadIdx.x;
    if (blockIdx.x == 0) {
        a.y[t] = a.x[t];
        if (a.fault != 3)
            __syncthreads();
        if (t == 0 && a.fault == 1)
            store_relaxed(a.u, 1);
        else if (t == 0)
            store_release(a.u, 1);
    } else {
        if (t == 0 && a.fault != 2)
            wait_at_least(a.u, 1);
        if (a.fault != 4)
            __syncthreads();
        a.y[index_of(t)] = a.y[t];
    }
}
CPU_KERNEL(test_message, struct test)

KERNEL test_poll(struct test a) // blocks of one thread
{
    if (blockIdx.x == 0) {
        a.y[0] = a.x[0];
        if (a.fault < 2)
            store_release(a.u, 1);
    } else {
        while (a.fault == 3 && *(volatile uint32_t *)a.u == 0)
            ;
        while ((a.fault == 1 ? load_relaxed(a.u) : load_acquire(a.u)) == 0)
            ;
        a.y[1] = a.y[0];
    }
}
CPU_KERNEL(test_poll, struct test)

DEVICE void sum_if_last(struct test a, uint32_t arrivals)
{
    if (arrivals != gridDim.x - 1)
        return;
    float sum = 0;
    for (unsigned b = 0; b < gridDim.x; b++)
        sum += a.y[SCRATCH + b];
    a.y[0] = sum;
}

KERNEL test_last(struct test a) // blocks of one thread
{
    uint32_t arrivals;
    a.y[SCRATCH + blockIdx.x] = a.x[blockIdx.x];
    if (a.fault == 1)
        arrivals = atomic_add_relaxed(a.u, 1);
    else if (a.fault == 2)
        arrivals = atomic_add_release(a.u, 1);
    else
        arrivals = atomic_add_acq_rel(a.u, 1);
    sum_if_last(a, arrivals);
}
CPU_KERNEL(test_last, struct test)

KERNEL test_fence(struct test a) // blocks of one thread
{
    a.y[SCRATCH + blockIdx.x] = a.x[blockIdx.x];
    if (a.fault != 1)
        fence_gpu();
    uint32_t arrivals = atomic_add_relaxed(a.u, 1);
    if (a.fault != 2)
        fence_gpu();
    sum_if_last(a, arrivals);
}
CPU_KERNEL(test_fence, struct test)

KERNEL test_grid(struct test a)
{
    unsigned t = threadIdx.x, n = gridDim.x * blockDim.x;
    a.y[SCRATCH + index_of(t)] = a.x[index_of(t)];
    if (a.fault != 3)
        __syncthreads();
    if (t == 0) {
        if (a.fault == 2)
            atomic_add_relaxed(a.u, 1);
        else if (!(a.fault == 4 && blockIdx.x == 1))
            atomic_add_release(a.u, 1);
        if (a.fault != 1)
            wait_at_least(a.u, gridDim.x);
    }
    if (a.fault != 5)
        __syncthreads();
    a.y[index_of(t)] = a.y[SCRATCH + (index_of(t) + blockDim.x) % n];
}
CPU_KERNEL(test_grid, struct test)

/* selftest: relaxed values */
enum { PROOF = 0x5a5a0000, PLACES = 32 }; // the values lie behind the counters
DEVICE int is_proven(uint32_t word) { return word >> 16 == PROOF >> 16; }
DEVICE uint32_t *place_of(struct test a, unsigned t) { return a.u + PLACES + 4 * t; }
DEVICE bits128 values_of(struct test a, unsigned t)
{
    uint32_t x = PROOF + (uint32_t)a.x[t];
    bits128 four = {{x, x + 1, x + 2, x + 3}};
    return four;
}
DEVICE float value(bits128 four) // NaN, unless the words belong together
{
    for (uint32_t i = 1; i < 4; i++)
        if (four.v[i] != four.v[0] + i)
            return bits_f32(0x7fc00000);
    return (float)(four.v[0] & 0xffff);
}

DEVICE int is_done(struct test a, bits128 four)
{
    if (a.fault == 1)
        return 1;
    for (int i = 0; i < (a.fault == 2 ? 1 : 4); i++)
        if (!is_proven(four.v[i]))
            return 0;
    return 1;
}
DEVICE float ask(struct test a, const uint32_t *p)
{
    bits128 four = load_relaxed_4(p);
    uint64_t start = spin_start();
    while (ballot((int)!is_done(a, four))) {
        retry_values(p, start);
        four = load_relaxed_4(p);
    }
    return value(four);
}

KERNEL test_values(struct test a)
{
    unsigned i = index_of(threadIdx.x);
    uint32_t *p = place_of(a, i);
    if (a.fault == 3 && i == 9)
        store_relaxed(p, PROOF);
    else
        store_relaxed_4(a.fault == 4 ? p + 1 : p, values_of(a, i));
    a.y[i] = ask(a, place_of(a, i ^ 64));
}
CPU_KERNEL(test_values, struct test)

KERNEL test_count(struct test a)
{
    unsigned i = index_of(threadIdx.x);
    const uint32_t *p = place_of(a, i ^ 64), *theirs = a.u + (blockIdx.x ^ 1);
    store_relaxed_4(place_of(a, i), values_of(a, i));
    __syncthreads();
    if (threadIdx.x == 0 && a.fault != 2)
        count_relaxed(a.u + blockIdx.x, 1);
    wait_hint(theirs, 1);
    uint64_t start = spin_start();
    while (a.fault && load_relaxed(theirs) == 0)
        retry_values(theirs, start);
    if (a.fault == 3)
        a.y[i] = value(load_16(p));
    else
        a.y[i] = ask(a, p);
}
CPU_KERNEL(test_count, struct test)

KERNEL test_late(struct test a)
{
    uint32_t *p = place_of(a, 0), busy = 0;
    if (blockIdx.x == 1) {
        for (int n = 0; n < 200000; n++)
            busy += load_relaxed(p);
        if (a.fault != 1)
            store_relaxed(p, PROOF + (uint32_t)a.x[0] + busy);
    } else {
        uint64_t start = spin_start();
        while (!is_proven(load_relaxed(p)))
            retry_values(p, start);
        a.y[0] = (float)(load_relaxed(p) & 0xffff);
    }
}
CPU_KERNEL(test_late, struct test)

KERNEL test_known(struct test a)
{
    unsigned t = threadIdx.x, other = blockIdx.x ^ 1;
    uint32_t *mine = a.u + PLACES + index_of(0), *theirs = a.u + PLACES + other * 64;
    store_relaxed(mine + t, (uint32_t)a.x[t]);
    count_relaxed(a.u + 8 + blockIdx.x, 1);
    if (a.fault != 1)
        __syncthreads();
    if (t == 0 && a.fault == 2)
        store_relaxed(a.u + blockIdx.x, 1);
    else if (t == 0)
        store_release(a.u + blockIdx.x, 1);
    float near = a.fault == 2 ? a.x[63 - t] : (float)load_relaxed(mine + 63 - t);
    if (t == 0)
        wait_at_least(a.u + other, 1);
    __syncthreads();
    uint32_t missing = 64 - load_relaxed(a.u + 8 + other);
    a.y[index_of(t)] = near + (float)missing;
    a.y[384 + index_of(t)] = (float)load_relaxed(theirs + 63 - t);
}
CPU_KERNEL(test_known, struct test)

/* selftest: registers */
KERNEL THREADS(384) test_registers(struct test a)
{
    unsigned t = threadIdx.x;
    if (t >= 128) {
        if (a.fault == 3)
            GROW_REGISTERS(160);
        else if (a.fault == 4)
            GROW_REGISTERS(200);
        else
            GROW_REGISTERS(232);
    } else if (a.fault == 2) {
        SHRINK_REGISTERS(200);
    } else if (a.fault != 1 && !(a.fault == 4 && t / 32 == 3)) {
        SHRINK_REGISTERS(40);
    }
    a.y[t] = a.x[t];
}
CPU_KERNEL(test_registers, struct test)

/* selftest: bulk copies */
enum { SLOTS = 2, CHUNK = 128, CHUNKS = 6 };
struct ring {
    float slot[SLOTS][CHUNK];
    uint64_t full[SLOTS], empty[SLOTS];
};

DEVICE void produce(struct test a, struct ring *r)
{
    uint64_t policy = evict_first();
    for (unsigned c = 0; c < CHUNKS; c++) {
        unsigned i = c % SLOTS;
        const float *from = a.x + (blockIdx.x * CHUNKS + c) * CHUNK;
        if (a.fault != 1)
            mbarrier_wait(&r->empty[i], (c / SLOTS & 1) ^ 1);
        if (a.fault == 6)
            mbarrier_arrive(&r->full[i]);
        else
            mbarrier_expect(&r->full[i], CHUNK * 4 + (a.fault == 5 ? 16 : 0));
        bulk_load(r->slot[i], from, CHUNK * 4, &r->full[i], policy);
    }
}

DEVICE void consume(struct test a, struct ring *r)
{
    unsigned t = threadIdx.x, warp = t / 32;
    float sum = 0;
    for (unsigned c = 0; c < CHUNKS; c++) {
        unsigned i = c % SLOTS;
        if (a.fault != 2)
            mbarrier_wait(&r->full[i], a.fault == 4 ? 0 : c / SLOTS & 1);
        sum += r->slot[i][(t + c * 32) % CHUNK];
        if (a.fault != 3)
            __syncwarp();
        if (a.fault == 9 || (t % 32 == 0 && !(a.fault == 8 && warp == 3)))
            mbarrier_arrive(&r->empty[i]);
    }
    a.y[blockIdx.x * CHUNK + t] = sum;
}

KERNEL test_ring(struct test a)
{
    struct ring *r = (struct ring *)shared_memory();
    if (threadIdx.x == 0) {
        for (int i = 0; i < SLOTS; i++) {
            mbarrier_init(&r->full[i], 1);
            mbarrier_init(&r->empty[i], 4);
        }
        if (a.fault != 7)
            mbarrier_init_fence();
    }
    if (a.fault != 10)
        __syncthreads();
    if (threadIdx.x < CHUNK)
        consume(a, r);
    else if (threadIdx.x == CHUNK)
        produce(a, r);
}
CPU_KERNEL(test_ring, struct test)

struct landing {
    float in[64];
    uint64_t full;
};
DEVICE void prepare(struct landing *s)
{
    if (threadIdx.x == 0) {
        mbarrier_init(&s->full, 1);
        mbarrier_init_fence();
    }
    __syncthreads();
}

KERNEL test_proxy(struct test a)
{
    struct landing *s = (struct landing *)shared_memory();
    unsigned t = threadIdx.x;
    prepare(s);
    if (a.fault == 3)
        proxy_fence();
    a.y[SCRATCH + index_of(t)] = a.x[index_of(t)];
    if (a.fault != 1 && a.fault != 3)
        proxy_fence();
    if (a.fault != 2)
        __syncthreads();
    if (t == 0) {
        mbarrier_expect(&s->full, sizeof s->in);
        bulk_load(s->in, a.y + SCRATCH + index_of(0), sizeof s->in, &s->full,
                  evict_first());
    }
    mbarrier_wait(&s->full, 0);
    a.y[index_of(t)] = s->in[(t + 1) % 64];
}
CPU_KERNEL(test_proxy, struct test)

KERNEL test_bulk_bounds(struct test a)
{
    struct landing *s = (struct landing *)shared_memory();
    unsigned t = threadIdx.x, fault = (unsigned)a.fault;
    uint32_t bytes = fault == 4 ? 248 : sizeof s->in;
    float *to = s->in + (fault == 1 ? 4 : 0);
    const float *from = fault == 2 ? a.x + N - 60 : a.x + (fault == 3);
    prepare(s);
    if (t == 0) {
        mbarrier_expect(&s->full, sizeof s->in);
        bulk_load(to, from, bytes, &s->full, evict_first());
    }
    a.y[t] = a.x[t];
    if (fault == 5)
        return;
    mbarrier_wait(&s->full, 0);
    a.y[t] = s->in[t];
}
CPU_KERNEL(test_bulk_bounds, struct test)

/* selftest: bounds and poison */
KERNEL test_shared(struct test a)
{
    float *s = (float *)shared_memory();
    unsigned t = threadIdx.x;
    if (!(a.fault == 2 && t == 5))
        s[a.fault == 1 && t == 63 ? 64 : t] = a.x[index_of(t)];
    __syncthreads();
    a.y[index_of(t)] = s[63 - t];
}
CPU_KERNEL(test_shared, struct test)

KERNEL test_global(struct test a)
{
    unsigned t = threadIdx.x;
    if (a.fault == 1 && t == 5)
        return;
    a.y[index_of(t)] = a.x[a.fault == 2 && t == 5 ? N : index_of(t)];
}
CPU_KERNEL(test_global, struct test)

KERNEL test_loads(struct test a) // the read-only path must not see what we write
{
    unsigned t = threadIdx.x;
    float *mine = a.y + SCRATCH + index_of(0);
    bits128 four = load_stream(a.x + index_of(t) / 4 * 4);
    mine[t] = bits_f32(four.v[t % 4]);
    __syncthreads();
    four = a.fault == 1 ? load_stream(mine + (63 - t) / 4 * 4)
                        : load_16(mine + (63 - t) / 4 * 4 - (a.fault == 2));
    a.y[index_of(t)] = bits_f32(four.v[(63 - t) % 4]);
}
CPU_KERNEL(test_loads, struct test)

/* selftest: launches */
KERNEL test_first(struct test a)
{
    launch_dependents();
    a.y[SCRATCH + index_of(threadIdx.x)] = a.x[index_of(threadIdx.x)];
}
CPU_KERNEL(test_first, struct test)

KERNEL test_second(struct test a)
{
    if (a.fault != 1)
        wait_for_prerequisites();
    a.y[index_of(threadIdx.x)] = a.y[SCRATCH + 63 - threadIdx.x + index_of(0)];
}
CPU_KERNEL(test_second, struct test)
