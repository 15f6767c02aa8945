/* stages/stage7/queue.cu: tangled from layer.nw; change it there. */
/* What a load from L2 costs beside a stream of weights; make queue runs it on a GPU. */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <cuda_runtime.h>

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

/* PTX: timers */
DEVICE uint64_t device_ns(void)
{
    uint64_t t;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(t));
    return t;
}

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

/* queue: what the kernel is given */
enum {
    RING = 192 * 1024,         /* bytes */
    MAX_SLOTS = RING / 2048,
    WORDS = 512, SPACING = 64, /* words to load, one every 256 bytes */
    LOADS = 2048               /* that a block can record in a pass */
};
struct loads {
    uint32_t count;
    uint32_t cycles[LOADS];          /* [count], in their order */
    uint64_t pass_cycles, pass_ns;   /* the whole pass, by both clocks */
};
struct queue_args {
    const char *from;                /* [copies][bytes] */
    int32_t copies, bytes, slots;
    int32_t limit;                   /* copies in flight, at most slots */
    const uint32_t *words;           /* [WORDS * SPACING], zeros that nobody writes */
    struct loads *loads;             /* [blocks] */
};

/* queue: stream with a limit */
struct queue_shared {
    uint64_t full[MAX_SLOTS], empty[MAX_SLOTS];   /* mbarriers */
    volatile uint32_t over;                       /* all copies have arrived */
};

DEVICE void stream(const struct queue_args *a, struct queue_shared *s, char *ring)
{
    uint64_t policy = evict_first();
    int slot = 0, oldest = 0, in_flight = 0;
    uint32_t parity = 1, oldest_parity = 0;
    const char *from = a->from + (int64_t)blockIdx.x * a->bytes;
    int64_t stride = (int64_t)gridDim.x * a->bytes;
    for (int c = (int)blockIdx.x; c < a->copies; c += (int)gridDim.x, from += stride) {
        mbarrier_wait(s->empty + slot, parity);
        if (in_flight < a->limit) in_flight++;
        else {
            mbarrier_wait(s->full + oldest, oldest_parity);
            if (++oldest == a->slots) oldest = 0, oldest_parity ^= 1;
        }
        mbarrier_expect(s->full + slot, (uint32_t)a->bytes);
        bulk_load(ring + slot * a->bytes, from, (uint32_t)a->bytes, s->full + slot,
                  policy);
        if (++slot == a->slots) slot = 0, parity ^= 1;
    }
}

/* queue: give the slots back */
DEVICE void give_slots_back(const struct queue_args *a, struct queue_shared *s)
{
    int slot = 0;
    uint32_t parity = 0;
    for (int c = (int)blockIdx.x; c < a->copies; c += (int)gridDim.x) {
        mbarrier_wait(s->full + slot, parity);
        mbarrier_arrive(s->empty + slot);
        if (++slot == a->slots) slot = 0, parity ^= 1;
    }
    s->over = 1;
}

/* queue: time loads */
DEVICE void time_loads(const struct queue_args *a, struct queue_shared *s)
{
    struct loads *mine = a->loads + blockIdx.x;
    uint64_t first_ns = device_ns();
    int64_t first = clock64();
    uint32_t n = 0;
    while (!s->over) {
        const uint32_t *word = a->words + (n * 37 + blockIdx.x * 11) % WORDS * SPACING;
        int64_t start = clock64();
        if (load_relaxed(word)) break;
        uint32_t cycles = (uint32_t)(clock64() - start);
        if (n < LOADS) mine->cycles[n++] = cycles;
        __nanosleep(200);
    }
    mine->count = n;
    mine->pass_cycles = (uint64_t)(clock64() - first);
    mine->pass_ns = device_ns() - first_ns;
}

/* queue: the kernel */
KERNEL THREADS(96) queue(const IN_PLACE struct queue_args a)
{
    struct queue_shared *s = (struct queue_shared *)shared_memory();
    char *ring = shared_memory() + 2048;
    if (threadIdx.x == 0) {
        for (int i = 0; i < a.slots; i++) {
            mbarrier_init(s->full + i, 1);
            mbarrier_init(s->empty + i, 1);
        }
        s->over = 0;
        mbarrier_init_fence();
    }
    __syncthreads();
    if (threadIdx.x == 0) stream(&a, s, ring);
    else if (threadIdx.x == 32) give_slots_back(&a, s);
    else if (threadIdx.x == 64) time_loads(&a, s);
}
enum { QUEUE_FITS = 1 / (sizeof(struct queue_shared) <= 2048) };

/* queue: call CUDA, or fail */
static void cuda(cudaError_t e, const char *what)
{
    if (!e) return;
    fprintf(stderr, "queue: %s: %s\n", what, cudaGetErrorString(e));
    exit(1);
}

static void launch(const void *kernel, int blocks, int threads, size_t shared,
                   void *args)
{
    dim3 grid = { (unsigned)blocks, 1, 1 }, block = { (unsigned)threads, 1, 1 };
    cuda(cudaLaunchKernel(kernel, grid, block, &args, shared, NULL), "launch");
}

/* queue: measure one depth */
#define BYTES ((int64_t)17580 * 96 * 1024)
enum { BUFFERS = 3, PASSES = 6, SAMPLES = 7, MAX_BLOCKS = 1024 };
static char *buffer[BUFFERS];       /* [BYTES] on the device, random */
static struct loads *on_device, on_host[MAX_BLOCKS];
static cudaEvent_t begin, end;

static float us_of_a_pass(struct queue_args *a, int blocks)
{
    float ms;
    cuda(cudaEventRecord(begin, NULL), "event");
    for (int pass = 0; pass < PASSES; pass++) {
        a->from = buffer[pass % BUFFERS];
        launch((const void *)queue, blocks, 96, 2048 + RING, a);
    }
    cuda(cudaEventRecord(end, NULL), "event");
    cuda(cudaEventSynchronize(end), "timed passes");
    cuda(cudaEventElapsedTime(&ms, begin, end), "timing");
    return ms * 1000 / PASSES;
}

static int ascending(const void *x, const void *y)
{
    float a = *(const float *)x, b = *(const float *)y;
    return (a > b) - (a < b);
}

static float ns[MAX_BLOCKS * LOADS];   /* sorted */

static int sort_loads(int blocks)      /* returns how many there are */
{
    int n = 0;
    size_t bytes = (size_t)blocks * sizeof *on_host;
    cuda(cudaMemcpy(on_host, on_device, bytes, cudaMemcpyDeviceToHost), "copy times");
    for (int b = 0; b < blocks; b++) {
        struct loads *l = on_host + b;
        float rate = (float)l->pass_ns / (float)l->pass_cycles;   /* ns a cycle */
        for (uint32_t i = 4; i < l->count; i++) ns[n++] = (float)l->cycles[i] * rate;
    }
    qsort(ns, (size_t)n, sizeof *ns, ascending);
    return n;
}

static void measure_depth(int copy_kb, int in_flight_kb, int blocks,
                          const uint32_t *words)
{
    struct queue_args a = { NULL, (int32_t)(BYTES / 1024 / copy_kb), copy_kb * 1024,
                            RING / 1024 / copy_kb, in_flight_kb / copy_kb, words,
                            on_device };
    float us[SAMPLES];
    us_of_a_pass(&a, blocks);
    for (int i = 0; i < SAMPLES; i++) us[i] = us_of_a_pass(&a, blocks);
    qsort(us, SAMPLES, sizeof *us, ascending);
    int n = sort_loads(blocks);
    if (!n) {
        fprintf(stderr, "queue: no load was timed\n");
        exit(1);
    }
    printf("%d,%d,%d,%.2f,%.4f,%.0f,%.0f,%.0f\n", copy_kb, a.slots, in_flight_kb,
           us[SAMPLES / 2], (double)BYTES / us[SAMPLES / 2] / 1e6, ns[n / 2],
           ns[n / 10 * 9], ns[n / 100 * 99]);
    fflush(stdout);
}

/* queue: the main program */
/* queue: the device and its memory */
static int find_blocks(void)
{
    int count = 0, blocks;
    cudaError_t e = cudaGetDeviceCount(&count);
    if (e || !count) {
        fprintf(stderr, "queue: no CUDA device%s%s\n", e ? ": " : "",
                e ? cudaGetErrorString(e) : "");
        exit(2);
    }
    cuda(cudaDeviceGetAttribute(&blocks, cudaDevAttrMultiProcessorCount, 0), "device");
    if (blocks > MAX_BLOCKS) blocks = MAX_BLOCKS;
    cuda(cudaFuncSetAttribute((const void *)queue,
                              cudaFuncAttributeMaxDynamicSharedMemorySize,
                              2048 + RING), "shared memory");
    return blocks;
}

static uint32_t *prepare_memory(int blocks)   /* returns the words to load */
{
    uint32_t *words;
    size_t bytes = (size_t)blocks * sizeof *on_device;
    for (int i = 0; i < BUFFERS; i++) {
        cuda(cudaMalloc((void **)&buffer[i], BYTES), "memory for the stream");
        struct fill_args f = { (uint16_t *)buffer[i], (uint64_t)i + 1, 0, BYTES / 2, 0,
                               1.0f / 65536 };
        launch((const void *)fill, 8 * blocks, 256, 0, &f);
    }
    cuda(cudaMalloc((void **)&words, WORDS * SPACING * 4), "memory for the words");
    cuda(cudaMemset(words, 0, WORDS * SPACING * 4), "zeros");
    cuda(cudaMalloc((void **)&on_device, bytes), "memory for the times");
    cuda(cudaMemset(on_device, 0, bytes), "zeros");
    cuda(cudaEventCreate(&begin), "event");
    cuda(cudaEventCreate(&end), "event");
    cuda(cudaDeviceSynchronize(), "filling the buffers");
    return words;
}

int main(void)
{
    static const int depths[][2] = {   /* kilobytes of a copy, and in flight */
        { 32, 192 }, { 32, 128 }, { 32, 96 }, { 32, 64 }, { 32, 32 },
        { 16, 192 }, { 16, 96 }, { 16, 80 }, { 16, 64 }, { 16, 48 }, { 16, 32 },
        { 12, 192 }, { 12, 72 }, { 12, 60 }, { 12, 48 }, { 12, 36 },
        { 8, 192 }, { 8, 80 }, { 8, 64 }, { 8, 48 },
        { 4, 192 }, { 4, 64 }, { 4, 48 }, { 2, 62 }, { 2, 48 }
    };
    int blocks = find_blocks();
    uint32_t *words = prepare_memory(blocks);
    printf("copy_kb,slots,in_flight_kb,us,tbs,"
           "load_median_ns,load_p90_ns,load_p99_ns\n");
    for (size_t i = 0; i < sizeof depths / sizeof *depths; i++)
        measure_depth(depths[i][0], depths[i][1], blocks, words);
    return 0;
}
