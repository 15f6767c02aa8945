/* stages/cpu/device.h: tangled from layer.nw; change it there. */
// device.h: what a kernel may say, for a C compiler; the machine is in cpu.c
#ifndef CPU_DEVICE_H
#define CPU_DEVICE_H
#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include "cuda_runtime_api.h"

/* twin: the words that are spelled differently */
#define DEVICE static inline
#define APART static
#define KERNEL void
#define THREADS(n)
#define IN_PLACE
#define UNROLL(n)
#define CPU_KERNEL(name, argument) \
    static void cpu_call_##name(const void *a) { name(*(const argument *)a); } \
    __attribute__((constructor)) static void cpu_register_##name(void) \
    { \
        cpu_register((const void *)name, cpu_call_##name, sizeof(argument), #name); \
    }
void cpu_register(const void *, void (*)(const void *), size_t, const char *);

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

/* twin: pairs of bfloat16 */
static inline uint32_t pack_bf16(float low, float high)
{
    return f32_to_bf16(low) | (uint32_t)f32_to_bf16(high) << 16;
}

/* twin: bytes of two words */
static inline uint32_t pick_bytes(uint32_t low, uint32_t high, uint32_t places)
{
    uint64_t both = (uint64_t)high << 32 | low;
    uint32_t word = 0;
    for (int i = 0; i < 4; i++)
        word |= (uint32_t)(both >> 8 * (places >> 4 * i & 7) & 0xff) << 8 * i;
    return word;
}

/* twin: powers of two */
static inline float exp2_approx(float x) { return exp2f(x); }

/* twin: where a thread is */
struct cpu_place {
    struct { unsigned x, y, z; } thread, block, threads, blocks;
    int fenced; // has this thread passed a fence_gpu?
};
extern struct cpu_place *cpu_here;
#define threadIdx (cpu_here->thread)
#define blockIdx (cpu_here->block)
#define blockDim (cpu_here->threads)
#define gridDim (cpu_here->blocks)
#define __syncthreads() cpu_syncthreads()
#define __syncwarp() cpu_syncwarp()

static inline float rsqrtf(float x) { return 1.0f / sqrtf(x); }
static inline float sinpif(float x) { return (float)sin(3.14159265358979323846 * x); }
static inline float cospif(float x) { return (float)cos(3.14159265358979323846 * x); }

/* twin: what the machine does for every kernel */
void cpu_syncthreads(void);
void cpu_syncwarp(void);
char *shared_memory(void);
float shfl_xor_f32(float x, int mask);
uint32_t shfl_xor_u32(uint32_t x, int mask);
float shfl_f32(float x, int lane);
uint32_t shfl_u32(uint32_t x, int lane);

uint32_t ballot(int predicate);
void named_barrier_sync(int id, int threads);
void named_barrier_arrive(int id, int threads);
void mbarrier_init(uint64_t *b, uint32_t count);
void mbarrier_init_fence(void);

void mbarrier_arrive(uint64_t *b);
void mbarrier_expect(uint64_t *b, uint32_t bytes);
void mbarrier_wait(uint64_t *b, uint32_t parity);

uint64_t evict_first(void);
void bulk_load(void *shared, const void *global, uint32_t bytes, uint64_t *b,
               uint64_t policy);
void proxy_fence(void);
void fence_gpu(void);
void cpu_mma(float c[4], const uint32_t a[4], const uint32_t b[2]);
void launch_dependents(void);
void wait_for_prerequisites(void);
uint64_t device_ns(void);

/* twin: atomics */
void cpu_wrote(const uint32_t *p);
void cpu_read(const uint32_t *p);
void cpu_wait_at_least(const uint32_t *p, uint32_t v);
void cpu_publish(void);
void cpu_show(void);
void cpu_settle(const uint32_t *p);
void cpu_late(uint32_t *p, uint32_t v, int adds);
uint32_t cpu_seen(const uint32_t *p, uint32_t in_memory);

#define CPU_ATOMIC_ADD(name, order, before) \
    static inline uint32_t name(uint32_t *p, uint32_t v) \
    { \
        before; \
        uint32_t old = __atomic_fetch_add(p, v, order); \
        cpu_wrote(p); \
        return old; \
    }
CPU_ATOMIC_ADD(cpu_add_relaxed, __ATOMIC_RELAXED, cpu_settle(p))
CPU_ATOMIC_ADD(cpu_add_in_block, __ATOMIC_RELEASE, cpu_show())
CPU_ATOMIC_ADD(atomic_add_release, __ATOMIC_RELEASE, cpu_publish())
CPU_ATOMIC_ADD(atomic_add_acq_rel, __ATOMIC_ACQ_REL, cpu_publish())

static inline uint32_t atomic_add_relaxed(uint32_t *p, uint32_t v)
{
    uint32_t old = cpu_here->fenced ? atomic_add_release(p, v)
                                    : cpu_add_relaxed(p, v);
    cpu_read(p);
    return old;
}

static inline void store_release(uint32_t *p, uint32_t v)
{
    cpu_publish();
    __atomic_store_n(p, v, __ATOMIC_RELEASE);
    cpu_wrote(p);
}

static inline void cpu_relaxed(uint32_t *p, uint32_t v, int adds)
{
    __atomic_fetch_add(p, 0, __ATOMIC_RELAXED);
    cpu_late(p, v, adds);
}
static inline void store_relaxed(uint32_t *p, uint32_t v)
{
    if (cpu_here->fenced)
        store_release(p, v);
    else
        cpu_relaxed(p, v, 0);
}

static inline uint32_t load_relaxed(const uint32_t *p)
{
    uint32_t v = cpu_seen(p, __atomic_load_n(p, __ATOMIC_RELAXED));
    cpu_read(p);
    return v;
}
static inline uint32_t load_acquire(const uint32_t *p)
{
    uint32_t v = cpu_seen(p, __atomic_load_n(p, __ATOMIC_ACQUIRE));
    cpu_read(p);
    return v;
}

static inline void wait_at_least(const uint32_t *p, uint32_t v)
{
    while ((int32_t)(__atomic_load_n(p, __ATOMIC_ACQUIRE) - v) < 0)
        cpu_wait_at_least(p, v);
}

static inline void add_in_block(uint32_t *p, uint32_t v) { cpu_add_in_block(p, v); }

/* twin: relaxed values */
unsigned cpu_below(unsigned n);
void cpu_misaligned(const void *p);
void retry_values(const uint32_t *p, uint64_t start);
static inline uint64_t spin_start(void) { return 0; }   // deadlocks are seen without
static inline bits128 load_relaxed_4(const uint32_t *p)
{
    bits128 x;
    if ((uintptr_t)p % 16)
        cpu_misaligned(p);
    for (unsigned i = 0, turn = cpu_below(4); i < 4; i++)
        x.v[i ^ turn] = load_relaxed(p + (i ^ turn));
    return x;
}
static inline void store_relaxed_4(uint32_t *p, bits128 x)
{
    if ((uintptr_t)p % 16)
        cpu_misaligned(p);
    for (unsigned i = 0, turn = cpu_below(4); i < 4; i++)
        store_relaxed(p + (i ^ turn), x.v[i ^ turn]);
}

static inline void count_relaxed(uint32_t *p, uint32_t n)
{
    if (cpu_here->fenced)
        atomic_add_release(p, n);
    else
        cpu_relaxed(p, n, 1);
}
void cpu_yield(void);
static inline void wait_hint(const uint32_t *p, uint32_t v)
{
    for (unsigned i = cpu_below(4) ? cpu_below(64) : 0; i > 0; i--) {
        if ((int32_t)(load_relaxed(p) - v) >= 0)
            return;
        cpu_yield();
    }
}

/* twin: registers of a warpgroup */
#define SHRINK_REGISTERS(n) cpu_registers(n, 0)
#define GROW_REGISTERS(n) cpu_registers(n, 1)
void cpu_registers(unsigned n, int grow);

/* twin: loads */
#define CPU_ALIGNED(p, n) (((uintptr_t)(p) & ((n)-1)) == 0)
void cpu_read_only(const void *p, size_t bytes);

static inline struct bits128 load_16(const void *p)
{
    if (!CPU_ALIGNED(p, 16))
        cpu_misaligned(p);
    return *(const struct bits128 *)p;
}
static inline struct bits128 load_stream(const void *p)
{
    cpu_read_only(p, 16);
    return load_16(p);
}

static inline void mma_bf16(float c[4], const uint32_t a[4], const uint32_t b[2])
{
    float sum[4] = {c[0], c[1], c[2], c[3]};
    const uint32_t left[4] = {a[0], a[1], a[2], a[3]}, right[2] = {b[0], b[1]};
    cpu_mma(sum, left, right);
    for (int i = 0; i < 4; i++)
        c[i] = sum[i];
}

/* twin: prefetch */
static inline void prefetch(const void *p) { (void)p; }
#endif
