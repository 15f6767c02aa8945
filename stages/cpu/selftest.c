/* stages/cpu/selftest.c: tangled from layer.nw; change it there. */
// selftest: runs a case with a fault: selftest CASE FAULT; selftest all; selftest list
#include <cuda_runtime_api.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* selftest: what a kernel is given */
enum { N = 4096, SCRATCH = 2048 };
struct test {
    int fault;    // 0: none
    float *x, *y; // [N] whole numbers below 97; [N] NaN
    uint32_t *u;  // [1568] zeros
};

/* selftest: a case */
struct shape { unsigned blocks, threads; size_t shared; };
struct test_case {
    const char *name;
    void (*kernel)(struct test);
    struct shape shape;
    float (*right)(unsigned i);
    unsigned results;            // how many of y are checked
    int (*run)(const struct test_case *, struct test); // 0: the launches succeeded
    const char *faults[12];
};
static float x_of(unsigned i) { return (float)(i * 31 % 97); }

/* selftest: memory for a case */
static float host_x[N], host_y[N];
static int allocate(struct test *a)
{
    for (unsigned i = 0; i < N; i++)
        host_x[i] = x_of(i);
    return cudaMalloc((void **)&a->x, sizeof host_x) ||
           cudaMalloc((void **)&a->y, sizeof host_y) ||
           cudaMalloc((void **)&a->u, 6272) || cudaMemset(a->u, 0, 6272) ||
           cudaMemcpy(a->x, host_x, sizeof host_x, cudaMemcpyHostToDevice);
}

static int fetch(const struct test_case *c, struct test a)
{
    if (cudaMemcpy(host_y, a.y, sizeof host_y, cudaMemcpyDeviceToHost))
        return 1;
    for (unsigned i = 0; i < c->results; i++)
        if (!(host_y[i] == c->right(i))) {
            printf("%s: y[%u] is %g, not %g\n", c->name, i, host_y[i], c->right(i));
            return 1;
        }
    return cudaFree(a.x) || cudaFree(a.y) || cudaFree(a.u);
}

/* selftest: right results */
static float turned_64(unsigned i) { return x_of(i / 64 * 64 + (i + 33) % 64); }
static float next_lane(unsigned i) { return x_of(i / 32 * 32 + (i + 1) % 32); }
static float next_of_64(unsigned i) { return x_of(i / 64 * 64 + (i + 1) % 64); }
static float reversed(unsigned i) { return x_of(i / 64 * 64 + 63 - i % 64); }
static float same(unsigned i) { return x_of(i); }
static float modulo_64(unsigned i) { return x_of(i % 64); }
static float other_64(unsigned i) { return x_of(i ^ 64); }
static float backwards_64(unsigned i) { return x_of(63 - i % 64); }
static float first_only(unsigned i) { return (void)i, x_of(0); }
static float next_block(unsigned i) { return x_of((i + 64) % 192); }
static float next_of_six(unsigned i) { return x_of((i + 64) % 384); }
static float passed_on(unsigned i)
{
    return i % 128 < 64 ? 0 : x_of(i - 64);
}

static float first_four(unsigned i)
{
    return (void)i, x_of(0) + x_of(1) + x_of(2) + x_of(3);
}

static float warp_sum(unsigned i)
{
    float sum = 0;
    for (unsigned j = 0; j < 32; j++)
        sum += x_of(i / 32 * 32 + j);
    return sum + x_of(i / 32 * 32 + 3) + x_of(i / 32 * 32 + 2);
}

static float votes(unsigned i)
{
    unsigned half[2] = {0, 0};
    for (unsigned j = 0; j < 32; j++)
        half[j / 16] |= (unsigned)(x_of(i / 32 * 32 + j) > 40) << j % 16;
    return (float)half[0] + (float)half[1];
}

static float product(unsigned i)
{
    float sum = 0;
    for (unsigned k = 0; k < 16; k++)
        sum += x_of(i / 8 * 16 + k) * x_of(256 + k * 8 + i % 8);
    return sum;
}

static float chunk_sum(unsigned i)
{
    float sum = 0;
    for (unsigned c = 0; c < 6; c++)
        sum += x_of((i / 128 * 6 + c) * 128 + (i + c * 32) % 128);
    return sum;
}

/* selftest: one kernel, launched once */
static int launch(void (*kernel)(struct test), struct shape s, struct test a,
                  cudaStream_t stream, cudaLaunchAttribute *attribute)
{
    void *arguments[1] = {&a};
    cudaLaunchConfig_t c = {.gridDim = {s.blocks, 1, 1}, .blockDim = {s.threads, 1, 1},
                            .dynamicSmemBytes = s.shared, .stream = stream,
                            .attrs = attribute, .numAttrs = attribute != NULL};
    return (int)cudaLaunchKernelExC(&c, (const void *)kernel, arguments);
}

static int run_once(const struct test_case *c, struct test a)
{
    return launch(c->kernel, c->shape, a, NULL, NULL);
}
#define KERNEL_OF(name) void test_##name(struct test);

/* selftest: the kernels */
KERNEL_OF(syncthreads) KERNEL_OF(syncwarp) KERNEL_OF(named_sync)
KERNEL_OF(named_arrive) KERNEL_OF(shuffle) KERNEL_OF(ballot) KERNEL_OF(mma)
KERNEL_OF(message) KERNEL_OF(poll) KERNEL_OF(last) KERNEL_OF(fence) KERNEL_OF(grid)
KERNEL_OF(values) KERNEL_OF(count) KERNEL_OF(late) KERNEL_OF(known) KERNEL_OF(registers)
KERNEL_OF(ring) KERNEL_OF(proxy) KERNEL_OF(bulk_bounds) KERNEL_OF(shared)
KERNEL_OF(global) KERNEL_OF(loads) KERNEL_OF(first) KERNEL_OF(second)

/* selftest: cases with more than one launch */
static int run_dependent(const struct test_case *c, struct test a)
{
    cudaLaunchAttribute early = {
        .id = cudaLaunchAttributeProgrammaticStreamSerialization,
        .val.programmaticStreamSerializationAllowed = 1};
    return launch(test_first, c->shape, a, NULL, NULL) ||
           launch(test_second, c->shape, a, NULL, &early);
}

static int run_streams(const struct test_case *c, struct test a)
{
    cudaStream_t s, t;
    int fault = a.fault;
    a.fault = 0;
    return cudaStreamCreateWithFlags(&s, cudaStreamNonBlocking) ||
           cudaStreamCreateWithFlags(&t, cudaStreamNonBlocking) ||
           launch(test_first, c->shape, a, s, NULL) ||
           launch(test_second, c->shape, a, fault == 1 ? t : s, NULL) ||
           (fault != 2 && cudaStreamSynchronize(s)) ||
           (fault != 2 && cudaStreamSynchronize(t)) ||
           (fault != 2 && (cudaStreamDestroy(s) || cudaStreamDestroy(t)));
}

static int run_events(const struct test_case *c, struct test a)
{
    cudaStream_t s, t;
    cudaEvent_t e;
    int fault = a.fault;
    a.fault = 0;
    return cudaStreamCreateWithFlags(&s, cudaStreamNonBlocking) ||
           cudaStreamCreateWithFlags(&t, cudaStreamNonBlocking) ||
           cudaEventCreate(&e) || (fault == 2 && cudaEventRecord(e, s)) ||
           launch(test_first, c->shape, a, s, NULL) ||
           (fault != 2 && cudaEventRecord(e, s)) ||
           (fault != 1 && cudaStreamWaitEvent(t, e, 0)) ||
           launch(test_second, c->shape, a, t, NULL) || cudaDeviceSynchronize() ||
           cudaEventDestroy(e) || cudaStreamDestroy(s) || cudaStreamDestroy(t);
}

static int run_cooperative(const struct test_case *c, struct test a)
{
    cudaLaunchAttribute whole = {.id = cudaLaunchAttributeCooperative,
                                 .val.cooperative = 1};
    struct shape larger = c->shape;
    int fault = a.fault, each = 0;
    a.fault = 0;
    larger.blocks++;
    if (cudaFuncSetAttribute((const void *)test_grid,
                             cudaFuncAttributeMaxDynamicSharedMemorySize,
                             (int)c->shape.shared) ||
        cudaOccupancyMaxActiveBlocksPerMultiprocessor(
            &each, (const void *)test_grid, (int)c->shape.threads, c->shape.shared) ||
        each * 3 != (int)c->shape.blocks)
        return 1;
    if (fault == 1)
        return launch(test_grid, larger, a, NULL, NULL);
    return launch(test_grid, larger, a, NULL, &whole) !=
               cudaErrorCooperativeLaunchTooLarge ||
           launch(test_grid, c->shape, a, NULL, &whole);
}

/* selftest: the table */
static const struct test_case cases[] = {
    {"syncthreads", test_syncthreads, {2, 64, 256}, turned_64, 128, run_once,
     {"barrier removed", "one warp does not come", "a thread has ended"}},
    {"syncwarp", test_syncwarp, {2, 64, 256}, next_lane, 128, run_once,
     {"barrier removed"}},
    {"named_sync", test_named_sync, {2, 128, 512}, turned_64, 256, run_once,
     {"barrier removed", "count too large", "two groups at one barrier"}},
    {"named_arrive", test_named_arrive, {2, 128, 256}, passed_on, 256, run_once,
     {"wait removed", "arrival removed", "arrival before the data"}},
    {"shuffle", test_shuffle, {2, 64, 0}, warp_sum, 128, run_once,
     {"a lane skips one", "a lane votes instead"}},
    {"ballot", test_ballot, {2, 64, 0}, votes, 128, run_once,
     {"a lane does not vote"}},
    {"mma", test_mma, {1, 32, 0}, product, 128, run_once,
     {"fragments in another order", "a lane does not take part"}},
    /* cases of order between blocks */
    {"message", test_message, {2, 64, 0}, modulo_64, 128, run_once,
     {"release made relaxed", "wait removed", "barrier before the flag removed",
      "barrier after the wait removed"}},
    {"poll", test_poll, {2, 1, 0}, first_only, 2, run_once,
     {"acquire made relaxed", "flag never raised", "a spin with plain loads"}},
    {"last", test_last, {4, 1, 0}, first_four, 1, run_once,
     {"acq_rel made relaxed", "acq_rel made release"}},
    {"fence", test_fence, {4, 1, 0}, first_four, 1, run_once,
     {"fence before the counter removed", "fence after the counter removed"}},
    {"grid", test_grid, {3, 64, 0}, next_block, 192, run_once,
     {"wait removed", "release made relaxed", "barrier before removed",
      "a block does not arrive", "barrier after removed"}},
    /* cases of relaxed values and of registers */
    {"values", test_values, {2, 64, 0}, other_64, 128, run_once,
     {"no proof asked for", "one proof for four words", "three words never stored",
      "a store of four words not aligned"}},
    {"count", test_count, {6, 64, 0}, other_64, 384, run_once,
     {"the count taken as proof", "nobody counts", "a plain load"}},
    {"late", test_late, {2, 1, 0}, first_only, 1, run_once,
     {"the values never come"}},
    {"known", test_known, {6, 64, 0}, backwards_64, 768, run_once,
     {"barrier removed", "release made relaxed"}},
    {"registers", test_registers, {1, 384, 0}, same, 384, run_once,
     {"more than the pool has", "shrinks to more than it has",
      "grows to less than it has", "a warp of the group does not shrink"}},
    /* cases of bulk copies */
    {"ring", test_ring, {2, 160, 1056}, chunk_sum, 256, run_once,
     {"empty-wait removed", "full-wait removed", "syncwarp before the arrival removed",
      "parity does not turn", "too many bytes expected", "no bytes expected",
      "fence after init removed", "an arrival too few", "arrivals too many",
      "barrier after init removed"}},
    {"proxy", test_proxy, {2, 64, 264}, next_of_64, 128, run_once,
     {"proxy fence removed", "barrier removed", "proxy fence before the stores"}},
    {"bulk_bounds", test_bulk_bounds, {1, 64, 264}, same, 64, run_once,
     {"beyond shared memory", "beyond the allocation", "source not aligned",
      "length no multiple of 16", "block ends before the copy"}},
    /* cases of bounds and poison */
    {"shared", test_shared, {2, 64, 256}, reversed, 128, run_once,
     {"store beyond the end", "an element never stored"}},
    {"global", test_global, {2, 64, 0}, same, 128, run_once,
     {"an element never stored", "load beyond the end"}},
    {"loads", test_loads, {2, 64, 0}, reversed, 128, run_once,
     {"read-only load of what the kernel wrote", "load not aligned"}},
    /* cases of launches */
    {"dependent", test_second, {2, 64, 0}, reversed, 128, run_dependent,
     {"wait for the prerequisite removed"}},
    {"streams", test_second, {2, 64, 0}, reversed, 128, run_streams,
     {"another stream", "no synchronisation before the copy"}},
    {"events", test_second, {2, 64, 0}, reversed, 128, run_events,
     {"wait for the event removed", "event recorded too early"}},
    {"cooperative", test_grid, {6, 64, 100 << 10}, next_of_six, 384, run_cooperative,
     {"a block too many, not cooperative"}},
};

/* selftest: the command line */
enum { N_CASES = sizeof cases / sizeof cases[0] };
static int run(const struct test_case *c, int fault)
{
    struct test a = {.fault = fault};
    return allocate(&a) || c->run(c, a) || fetch(c, a);
}

static void list(void)
{
    for (unsigned i = 0; i < N_CASES; i++)
        for (int fault = 0; cases[i].faults[fault]; fault++)
            printf("%s\t%d\t%s\n", cases[i].name, fault + 1, cases[i].faults[fault]);
}

int main(int n, char **words)
{
    int failed = 0, known = 0;
    if (n == 2 && strcmp(words[1], "list") == 0)
        return list(), 0;
    for (unsigned i = 0; n >= 2 && i < N_CASES; i++)
        if (strcmp(words[1], cases[i].name) == 0 || strcmp(words[1], "all") == 0) {
            known = 1;
            failed |= run(&cases[i], n > 2 ? atoi(words[2]) : 0);
        }
    if (!known)
        fprintf(stderr, "usage: selftest CASE [FAULT] | all | list\n");
    return known ? failed : 2;
}
