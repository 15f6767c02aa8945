/* stages/stage2/driver.c: tangled from layer.nw; change it there. */
/* The driver of stage 2; see --help. */

/* stage 2: what the driver must know */
#define STAGE 2
#define TITLE "products that stream"
#define LAUNCHES 17
#define TOLERANCE 5e-3
#define KV_SLACK 1.0
#define KV_FLOOR 0.0

/* the driver of a stage */
/* driver: all but measuring */
#define _POSIX_C_SOURCE 200809L
#include <errno.h>
#include <math.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include "layer.h"
#include "../oracle/oracle.h"

/* driver: what a stage says of itself */
enum { SETS = 3 };   /* of weights, in rotation: nothing survives in the L2 cache */

/* driver: fail with a message */
static void die(int code, const char *format, ...)
{
    va_list args;
    va_start(args, format);
    vfprintf(stderr, format, args);
    va_end(args);
    fputc('\n', stderr);
    exit(code);
}

static void cuda(cudaError_t e, const char *what)
{
    if (e) die(1, "stage %d: %s: %s", STAGE, what, cudaGetErrorString(e));
}

static void ok(int status, const char *what)
{
    if (status == LAYER_CUDA_FAILED)
        die(1, "stage %d: %s: %s", STAGE, what, cudaGetErrorString(cudaGetLastError()));
    if (status) die(status == LAYER_BAD_SHAPE ? 2 : 1, "stage %d: %s: %s", STAGE, what,
                    layer_strerror(status));
}

/* driver: options */
struct options {
    layer_config c;
    int64_t prefill;      /* rows of the cache that are filled before the first step */
    uint64_t seed;
    int samples, probe, csv, quick, check;
    const char *timeline; /* the file it goes to */
    const char *at;       /* positions, with commas between: check only these */
};
static struct options opt = {
#ifdef CUDA_CPU_TARGET
    .c = { .d = 192, .ffn = 320, .n_q = 6, .n_kv = 2, .hd = 64,
           .eps = 1e-5, .theta = 500000 },
    .prefill = 150,
#else
    .c = { .d = 8192, .ffn = 28672, .n_q = 64, .n_kv = 8, .hd = 128,
           .eps = 1e-5, .theta = 500000 },
    .prefill = 4096,
#endif
    .seed = 1, .samples = 15,
};
static int shape_given;

static const char *const help =
    "usage: driver [--d=N --ffn=N --n-q=N --n-kv=N --hd=N] [--prefill=N] [--rows=N]\n"
    "              [--seed=N] [--at=P,P,...] [--samples=N] [--quick] [--check]\n"
    "              [--probe] [--csv]\n"
    "Checks this stage of the decoder layer against the oracle, then measures it on\n"
    "the GPU. Without a GPU (built for the CPU target) it checks small shapes only.\n"
    "  --d= --ffn= --n-q= --n-kv= --hd=   the shape; default: a 70B-class layer on a\n"
    "                GPU, two small ones without\n"
    "  --prefill=N   cache rows filled before the first step (default 4096; 150)\n"
    "  --rows=N      of the cache (default: 128 more than are filled)\n"
    "  --at=P,P,...  check the steps at these positions, in this order, and no more\n"
    "  --seed=N      of the inputs (default 1)\n"
    "  --samples=N   timed samples of 32 steps each (default 15)\n"
    "  --quick       check only the last timed step\n"
    "  --check       check, and do not measure\n"
    "  --probe       measure only copy and read-only bandwidth, in TB/s\n"
    "  --csv         end with a row of data/ladder.csv\n"
    "  --timeline=FILE   record when each SM worked on which phase (needs timers)\n"
    "exit status: 0 passed, 1 failed, 2 cannot run here or bad usage";

static int64_t number(const char *text, const char *option, int64_t low, int64_t high)
{
    char *end;
    errno = 0;
    long long n = strtoll(text, &end, 10);
    if (*text < '0' || *text > '9' || *end || errno || n < low || n > high)
        die(2, "--%s= takes a number from %lld to %lld, not '%s'", option,
            (long long)low, (long long)high, text);
    return n;
}

static void set_option(const char *name, const char *value)
{
    const struct { const char *name; int64_t *to, low, high; } shape[] = {
        { "d", &opt.c.d, 1, 1 << 20 }, { "ffn", &opt.c.ffn, 1, 1 << 20 },
        { "n-q", &opt.c.n_q, 1, 4096 }, { "n-kv", &opt.c.n_kv, 1, 4096 },
        { "hd", &opt.c.hd, 1, 1024 }, { "prefill", &opt.prefill, 0, 1 << 23 },
        { "rows", &opt.c.max_seq_len, 1, 1 << 24 },
    };
    for (size_t i = 0; i < sizeof shape / sizeof *shape; i++)
        if (!strcmp(name, shape[i].name)) {
            *shape[i].to = number(value, name, shape[i].low, shape[i].high);
            shape_given = 1;
            return;
        }
    if (!strcmp(name, "seed")) opt.seed = (uint64_t)number(value, name, 0, INT64_MAX);
    else if (!strcmp(name, "at")) opt.at = value;
    else if (!strcmp(name, "samples")) opt.samples = (int)number(value, name, 3, 1000);
#ifdef TIMERS
    else if (!strcmp(name, "timeline")) opt.timeline = value;
#endif
    else die(2, "unknown option --%s; see --help", name);
}

enum { STEPS = 32 };   /* of a sample */

static void read_options(int argc, char **argv)
{
    for (int i = 1; i < argc; i++) {
        char *equals = strchr(argv[i], '=');
        if (!strcmp(argv[i], "--help")) { puts(help); exit(0); }
        else if (!strcmp(argv[i], "--probe")) opt.probe = 1;
        else if (!strcmp(argv[i], "--csv")) opt.csv = 1;
        else if (!strcmp(argv[i], "--quick")) opt.quick = 1;
        else if (!strcmp(argv[i], "--check")) opt.check = 1;
        else if (strncmp(argv[i], "--", 2) || !equals)
            die(2, "cannot read '%s'; see --help", argv[i]);
        else {
            *equals = 0;
            set_option(argv[i] + 2, equals + 1);
        }
    }
    if (!opt.c.max_seq_len) opt.c.max_seq_len = opt.prefill + 128;
    if (!opt.at && opt.c.max_seq_len < opt.prefill + STEPS)
        die(2, "--rows= must be at least %lld, %d more than are filled, and is %lld",
            (long long)opt.prefill + STEPS, STEPS, (long long)opt.c.max_seq_len);
}

/* driver: sets of weights and caches */
enum { IN_NORM = 1, POST_NORM, WQ, WK, WV, WO, GATE, UP, DOWN, K_CACHE, V_CACHE,
       TENSORS, X = 1000, SMALL_X = 2000000 };

static int64_t elements(int tensor)
{
    const layer_config *c = &opt.c;
    int64_t q = c->n_q * c->hd, kv = c->n_kv * c->hd, cache = kv * c->max_seq_len;
    int64_t n[TENSORS] = { 0, c->d, c->d, q * c->d, kv * c->d, kv * c->d, c->d * q,
                           c->ffn * c->d, c->ffn * c->d, c->d * c->ffn, cache, cache };
    return n[tensor];
}

static float scale_of(int tensor)
{
    double fan_in = tensor == WO ? (double)(opt.c.n_q * opt.c.hd)
                  : tensor == DOWN ? (double)opt.c.ffn
                  : tensor >= WQ && tensor <= UP ? (double)opt.c.d
                  : tensor == V_CACHE && opt.at ? 1 / (double)opt.c.max_seq_len : 1;
    if (tensor == IN_NORM || tensor == POST_NORM) return (float)(0.1 / 65536);
    return (float)((tensor >= SMALL_X ? 1e-3 : 1) / (65536 * sqrt(fan_in)));
}

static int32_t offset_of(int tensor)
{
    return tensor == IN_NORM || tensor == POST_NORM ? 655360 : 0;
}

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

void fill(struct fill_args), read_stream(struct read_args);

static void run(const void *kernel, int blocks, int threads, size_t shared, void *args)
{
    cudaLaunchConfig_t config = { .dynamicSmemBytes = shared };
    config.gridDim.x = (unsigned)blocks, config.gridDim.y = config.gridDim.z = 1;
    config.blockDim.x = (unsigned)threads, config.blockDim.y = config.blockDim.z = 1;
    cuda(cudaLaunchKernelExC(&config, kernel, &args), "launch of a probe");
}

#ifdef CUDA_CPU_TARGET
enum { FILL_BLOCKS = 1 };
#else
enum { FILL_BLOCKS = 1024 };
#endif

static void fill_on_device(void *out, uint64_t seed, int tensor, int64_t n)
{
    struct fill_args a = { .out = out, .n = n, .offset = offset_of(tensor),
                           .scale = scale_of(tensor) };
    a.key = generator_key(seed, (uint32_t)tensor);
    int64_t blocks = (n + 255) / 256;
    if (blocks > FILL_BLOCKS) blocks = FILL_BLOCKS;
    run((const void *)fill, (int)blocks, 256, 0, &a);
}

struct set {
    char *arena;               /* device memory: tensors 1 .. V_CACHE, end to end */
    int64_t bytes;
    void *tensor[TENSORS];     /* addresses within the arena */
    layer_weights w;
    layer *l;
};

static int64_t place_tensors(struct set *s)
{
    int64_t at = 0;
    for (int t = IN_NORM; t <= V_CACHE; t++) {
        s->tensor[t] = s->arena + at;
        at += (2 * elements(t) + 255) / 256 * 256;
    }
    return at;
}

static layer_weights weights_at(void **tensor)
{
    return (layer_weights){
        .in_norm = tensor[IN_NORM], .post_norm = tensor[POST_NORM], .q = tensor[WQ],
        .k = tensor[WK], .v = tensor[WV], .o = tensor[WO], .gate = tensor[GATE],
        .up = tensor[UP], .down = tensor[DOWN],
    };
}

static void draw_set(struct set *s, uint64_t seed)
{
    s->arena = NULL;
    s->bytes = place_tensors(s);
    cuda(cudaMalloc((void **)&s->arena, (size_t)s->bytes), "memory for weights");
    place_tensors(s);
    for (int t = IN_NORM; t <= V_CACHE; t++)
        fill_on_device(s->tensor[t], seed, t, elements(t));
    s->w = weights_at(s->tensor);
    ok(layer_build(&s->l, &opt.c, &s->w, s->tensor[K_CACHE], s->tensor[V_CACHE]),
       "build");
    cuda(cudaDeviceSynchronize(), "drawing the inputs");
}

/* driver: a copy on the host */
struct host {
    char *arena, *before;        /* copies of a set's arena; before: an earlier one */
    void *tensor[TENSORS];
    layer_weights w;
    uint16_t *x, *out, *again;   /* [d] */
    double *expected;            /* [d] */
};

static void *need(size_t bytes)
{
    void *p = malloc(bytes);
    if (!p) die(1, "out of host memory (%zu bytes)", bytes);
    return p;
}

static void copy_out(void *to, const void *from, size_t bytes)
{
    cuda(cudaMemcpy(to, from, bytes, cudaMemcpyDeviceToHost), "copy to the host");
}

static void copy_set(struct host *h, struct set *s)
{
    struct set shadow = { .arena = need((size_t)s->bytes) };
    place_tensors(&shadow);
    memcpy(h->tensor, shadow.tensor, sizeof h->tensor);
    h->arena = shadow.arena;
    h->before = need((size_t)s->bytes);
    h->w = weights_at(h->tensor);
    copy_out(h->arena, s->arena, (size_t)s->bytes);
    size_t d = (size_t)opt.c.d;
    h->x = need(d * sizeof *h->x), h->out = need(d * sizeof *h->out);
    h->again = need(d * sizeof *h->again), h->expected = need(d * sizeof(double));
}

static int generator_agrees(const struct host *h, uint64_t seed)
{
    uint16_t first[1000];
    for (int t = IN_NORM; t <= V_CACHE; t++) {
        int64_t n = elements(t) < 1000 ? elements(t) : 1000;
        generate(first, 0, n, seed, (uint32_t)t, offset_of(t), scale_of(t));
        if (memcmp(first, h->tensor[t], (size_t)n * sizeof *first)) return 0;
    }
    return 1;
}

/* driver: compare */
/* widen a bf16, in C */
static float widen(uint16_t h)
{
    uint32_t u = (uint32_t)h << 16;
    float f;
    memcpy(&f, &u, sizeof f);
    return f;
}

static double relative_error(const uint16_t *got, const double *expected, int64_t n)
{
    double difference = 0, length = 0;
    for (int64_t i = 0; i < n; i++) {
        double e = widen(got[i]) - expected[i];
        difference += e * e;
        length += expected[i] * expected[i];
    }
    return sqrt(difference / length);
}

static double row_excess(const uint16_t *got, const uint16_t *expected, int64_t hd)
{
    double worst = 0;   /* the largest error, as a share of what is allowed */
    for (int64_t i = 0; i < hd; i++) {
        double e = fabs((double)widen(got[i]) - widen(expected[i]));
        double a = widen(expected[i]), b = widen(expected[(i + hd / 2) % hd]);
        int exponent;
        frexp(a, &exponent);
        double pair = KV_SLACK * sqrt(a * a + b * b) + KV_FLOOR;
        double allowed = ldexp(1, exponent - 8) + ldexp(pair, -8);
        if (!(e / allowed <= worst)) worst = e / allowed;
    }
    return worst;
}

/* driver: the checks */
static int failures;
static double largest_error;

static void verdict(int passed, const char *format, ...)
{
    va_list args;
    va_start(args, format);
    printf("  %s  ", passed ? "ok  " : "FAIL");
    vprintf(format, args);
    putchar('\n');
    va_end(args);
    failures += !passed;
    fflush(stdout);
}

static void *x_device, *out_device;   /* bf16 [d] */
static int x_tensor = X;              /* from which x is drawn; SMALL_X: near 1e-3 */

static void step_once(layer *l, int64_t pos, uint16_t *out)
{
    size_t bytes = (size_t)opt.c.d * sizeof *out;
    fill_on_device(x_device, opt.seed, x_tensor + (int)pos, opt.c.d);
    cuda(cudaMemset(out_device, 0xff, bytes), "poison the result");
    ok(layer_step(l, x_device, pos, out_device, NULL), "step");
    cuda(cudaDeviceSynchronize(), "step");
    copy_out(out, out_device, bytes);
}

static void check_position(struct set *s, struct host *h, int64_t pos)
{
    const layer_config *c = &opt.c;
    size_t bytes = (size_t)s->bytes;
    uint16_t *k = h->tensor[K_CACHE], *v = h->tensor[V_CACHE];
    memcpy(h->before, h->arena, bytes);
    step_once(s->l, pos, h->out);
    copy_out(h->x, x_device, (size_t)c->d * 2);
    if (oracle_step(c, &h->w, k, v, h->x, pos, h->expected))
        die(1, "out of host memory");
    double error = relative_error(h->out, h->expected, c->d), rows = 0;
    if (!(error <= largest_error)) largest_error = error;
    /* compare what the device has with what the oracle left */
    for (int t = K_CACHE; t <= V_CACHE; t++)
        for (int64_t head = 0; head < c->n_kv; head++) {
            int64_t at = (head * c->max_seq_len + pos) * c->hd;
            uint16_t row[128], *expected = (uint16_t *)h->tensor[t] + at;
            copy_out(row, (uint16_t *)s->tensor[t] + at, (size_t)c->hd * 2);
            double excess = row_excess(row, expected, c->hd);
            if (!(excess <= rows)) rows = excess;
            memcpy(expected, row, (size_t)c->hd * 2);
        }
    copy_out(h->before, s->arena, bytes);
    int same = !memcmp(h->before, h->arena, bytes);
    verdict(error <= TOLERANCE && rows <= 1 && same,
            "position %lld%s: error %.1e (at most %.1e), cache rows at %.2f of their "
            "bound, all else %s", (long long)pos, x_tensor == X ? "" : ", x near 1e-3",
            error, TOLERANCE, rows,
            same ? "untouched" : "CHANGED");
}

static void poison_rows(struct set *s, struct host *h, int64_t from)
{
    size_t row = (size_t)opt.c.hd * 2, count = (size_t)(opt.c.max_seq_len - from) * row;
    for (int t = K_CACHE; t <= V_CACHE; t++)
        for (int64_t head = 0; head < opt.c.n_kv; head++) {
            size_t at = (size_t)(head * opt.c.max_seq_len + from) * row;
            cuda(cudaMemset((char *)s->tensor[t] + at, 0xff, count), "poison");
            memset((char *)h->tensor[t] + at, 0xff, count);
        }
}

static void check_repeats(struct set *s, struct host *h, int64_t pos)
{
    int same = 1, counts[] = { 1, 7, 131 };
    size_t bytes = (size_t)opt.c.d * 2;
    step_once(s->l, pos, h->out);
    for (int i = 0; i < 3; i++) {
        step_once(s->l, pos, h->again);
        same &= !memcmp(h->out, h->again, bytes);
    }
    verdict(same, "the same bits when repeated");
    for (int i = 0; i < 3; i++) {
        layer *other;
        layer_config c = opt.c;
        c.max_blocks = counts[i];
        ok(layer_build(&other, &c, &s->w, s->tensor[K_CACHE], s->tensor[V_CACHE]),
           "build");
        step_once(other, pos, h->again);
        ok(layer_teardown(other), "teardown");
        verdict(!memcmp(h->out, h->again, bytes), "the same bits on %d block%s at most",
                counts[i], counts[i] > 1 ? "s" : "");
    }
}

static void check_neighbour(struct set *s, struct host *h, int64_t pos)
{
    layer *small;
    layer_config c = opt.c;
    size_t bytes = (size_t)c.d * 2;
    step_once(s->l, pos, h->out);
    c.d = c.ffn = c.hd = 64, c.n_q = c.n_kv = 1;
    ok(layer_build(&small, &c, &s->w, s->tensor[K_CACHE], s->tensor[V_CACHE]), "build");
    step_once(s->l, pos, h->again);
    verdict(!memcmp(h->out, h->again, bytes), "the same bits beside a smaller layer");
    ok(layer_teardown(small), "teardown");
}

static void check_step_at(struct set *s, struct host *h, int64_t pos)
{
    size_t bytes = (size_t)opt.c.d * 2;
    int64_t *at, tries[] = { pos, opt.c.max_seq_len, -1, INT64_MAX };
    cuda(cudaMalloc((void **)&at, sizeof *at), "memory for a position");
    step_once(s->l, pos, h->out);
    copy_out(h->arena, s->arena, (size_t)s->bytes);
    for (int i = 0; i < 4; i++) {
        cuda(cudaMemcpy(at, &tries[i], sizeof *at, cudaMemcpyHostToDevice),
             "a position");
        cuda(cudaMemset(out_device, i ? 0 : 0xff, bytes), "poison the result");
        ok(layer_step_at(s->l, x_device, at, out_device, NULL), "step_at");
        cuda(cudaDeviceSynchronize(), "step_at");
        copy_out(h->again, out_device, bytes);
        /* a valid position gives the same bits, any other NaN */
        int right = i ? 1 : !memcmp(h->out, h->again, bytes);
        for (int64_t j = 0; i && j < opt.c.d; j++) right &= isnan(widen(h->again[j])) != 0;
        right &= layer_status(s->l) == (i ? LAYER_BAD_POSITION : LAYER_OK);
        verdict(right, "step_at with position %lld on the device: %s", (long long)tries[i],
                i ? "NaN, and remembered" : "the same bits");
    }
    copy_out(h->before, s->arena, (size_t)s->bytes);
    verdict(!memcmp(h->before, h->arena, (size_t)s->bytes), "and the caches untouched");
    cuda(cudaFree(at), "free");
}

static void check_refusals(struct set *s, struct host *h)
{
    layer *none = NULL;
    layer_config odd = opt.c;
    size_t bytes = (size_t)opt.c.d * 2;
    odd.n_kv = opt.c.n_q + 1;
    cuda(cudaMemset(out_device, 0xff, bytes), "poison the result");
    int right = layer_step(s->l, x_device, -1, out_device, NULL) == LAYER_BAD_POSITION
        && layer_step(s->l, x_device, opt.c.max_seq_len, out_device, NULL)
           == LAYER_BAD_POSITION
        && layer_step(s->l, (char *)x_device + 2, 0, out_device, NULL)
           == LAYER_BAD_ALIGNMENT
        && layer_step(s->l, NULL, 0, out_device, NULL) == LAYER_BAD_ARGUMENT
        && layer_build(&none, &odd, &s->w, s->tensor[K_CACHE], s->tensor[V_CACHE])
           == LAYER_BAD_SHAPE && !none;
    cuda(cudaDeviceSynchronize(), "refusals");
    copy_out(h->again, out_device, bytes);
    for (size_t i = 0; i < bytes / 2; i++) right &= h->again[i] == 0xffff;
    verdict(right, "bad positions, alignments, pointers and shapes are refused");
}

static int64_t largest_position(const char *at)   /* of those listed */
{
    int64_t largest = 0;
    for (char *end; *at; at = *end ? end + 1 : end) {
        int64_t pos = strtoll(at, &end, 10);
        if (end == at || (*end && *end != ',') || pos < 0 || pos >= opt.c.max_seq_len)
            die(2, "--at= takes positions below %lld with commas between, not '%s'",
                (long long)opt.c.max_seq_len, at);
        if (pos > largest) largest = pos;
    }
    return largest;
}

static void check_positions(struct set *s, struct host *h)
{
    char *end;
    for (const char *at = opt.at; *at; at = *end ? end + 1 : end) {
        int64_t largest = largest_position(at);
        if (largest + 1 < opt.c.max_seq_len) poison_rows(s, h, largest + 1);
        check_position(s, h, strtoll(at, &end, 10));
    }
}

static void check_all(struct set *s)
{
    struct host h;
    copy_set(&h, s);
    verdict(generator_agrees(&h, opt.seed), "device and C generate the same inputs");
    if (opt.at) check_positions(s, &h);
    else {
        /* check whatever a step may do */
        poison_rows(s, &h, opt.prefill + 2);
        check_position(s, &h, opt.prefill);
        check_position(s, &h, 0);
        check_position(s, &h, opt.prefill + 1);
        x_tensor = SMALL_X;   /* so small that eps matters */
        check_position(s, &h, opt.prefill + 1);
        x_tensor = X;
        check_repeats(s, &h, opt.prefill + 1);
        check_neighbour(s, &h, opt.prefill + 1);
        check_refusals(s, &h);
        check_step_at(s, &h, opt.prefill + 1);
    }
    void *mine[] = { h.arena, h.before, h.x, h.out, h.again, h.expected };
    for (size_t i = 0; i < sizeof mine / sizeof *mine; i++) free(mine[i]);
}

/* driver: measuring, and the main program */
#ifndef CUDA_CPU_TARGET
/* driver: measure */
static uint16_t *inputs, *results;   /* bf16 [STEPS][d] on the device */

static void run_sample(struct set *sets, cudaStream_t stream)
{
    for (int i = 0; i < STEPS; i++) {
        struct set *s = &sets[(STEPS - 1 - i) % SETS];
        ok(layer_step(s->l, inputs + i * opt.c.d, opt.prefill + i,
                      results + i * opt.c.d, stream), "timed step");
    }
}

static cudaEvent_t begin, end;

static double microseconds(void)   /* between the two events */
{
    float ms;
    cuda(cudaEventSynchronize(end), "timed work");
    cuda(cudaEventElapsedTime(&ms, begin, end), "timing");
    return 1e3 * ms;
}

static int ascending(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

struct spread { double p10, median, p90; };

static struct spread spread_of(double *us, int n)
{
    qsort(us, (size_t)n, sizeof *us, ascending);
    return (struct spread){ us[n / 10], us[n / 2], us[n - 1 - n / 10] };
}

static void prepare_samples(struct set *sets)
{
    size_t bytes = (size_t)(STEPS * opt.c.d) * 2;
    cuda(cudaMalloc((void **)&inputs, bytes), "memory for inputs");
    cuda(cudaMalloc((void **)&results, bytes), "memory for results");
    for (int i = 0; i < STEPS; i++)
        fill_on_device(inputs + i * opt.c.d, opt.seed, X + (int)opt.prefill + i,
                       opt.c.d);
    for (int s = 0; s < SETS; s++)
        for (int i = 0; i < STEPS; i++)
            ok(layer_step(sets[s].l, inputs + i * opt.c.d, opt.prefill + i, results,
                          NULL), "step");
    cuda(cudaMemset(results, 0xff, bytes), "poison the results");
    cuda(cudaDeviceSynchronize(), "first steps");
}

static struct spread time_steps(struct set *sets, cudaStream_t stream)
{
    double us[1000];
    int n = opt.samples < 1000 ? opt.samples : 1000;
    for (int i = -2; i < n; i++) {   /* two to warm up */
        cuda(cudaEventRecord(begin, stream), "event");
        run_sample(sets, stream);
        cuda(cudaEventRecord(end, stream), "event");
        double sample = microseconds() / STEPS;
        if (i >= 0) us[i] = sample;
    }
    return spread_of(us, n);
}

static double last_step_error(struct set *s)
{
    struct host h;
    int64_t d = opt.c.d, pos = opt.prefill + STEPS - 1;
    copy_set(&h, s);
    copy_out(h.x, inputs + (STEPS - 1) * d, (size_t)d * 2);
    copy_out(h.out, results + (STEPS - 1) * d, (size_t)d * 2);
    if (oracle_step(&opt.c, &h.w, h.tensor[K_CACHE], h.tensor[V_CACHE], h.x, pos,
                    h.expected)) die(1, "out of host memory");
    double error = relative_error(h.out, h.expected, d);
    void *mine[] = { h.arena, h.before, h.x, h.out, h.again, h.expected };
    for (size_t i = 0; i < sizeof mine / sizeof *mine; i++) free(mine[i]);
    return error;
}

static struct spread time_graph(struct set *sets, int *launches)
{
    cudaStream_t stream;
    cudaGraph_t graph;
    cudaGraphExec_t exec;
    size_t nodes;
    double us[15];
    cuda(cudaStreamCreate(&stream), "stream");
    cuda(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), "capture");
    run_sample(sets, stream);
    cuda(cudaStreamEndCapture(stream, &graph), "capture");
    cuda(cudaGraphGetNodes(graph, NULL, &nodes), "graph");
    cuda(cudaGraphInstantiate(&exec, graph, 0), "graph");
    *launches = (int)(nodes / STEPS);
    /* time the replays of the graph */
    for (int i = -2; i < 15; i++) {
        cuda(cudaEventRecord(begin, stream), "event");
        cuda(cudaGraphLaunch(exec, stream), "graph");
        cuda(cudaEventRecord(end, stream), "event");
        double sample = microseconds() / STEPS;
        if (i >= 0) us[i] = sample;
    }
    cuda(cudaGraphExecDestroy(exec), "graph");
    cuda(cudaGraphDestroy(graph), "graph");
    cuda(cudaStreamDestroy(stream), "stream");
    return spread_of(us, 15);
}

static double copy_bandwidth(void)   /* TB/s */
{
    size_t bytes = (size_t)2 << 30;
    char *from, *to;
    double us[15];
    cuda(cudaMalloc((void **)&from, bytes), "memory for the copy");
    cuda(cudaMalloc((void **)&to, bytes), "memory for the copy");
    fill_on_device(from, opt.seed, X, (int64_t)bytes / 2);
    for (int i = -2; i < 15; i++) {
        cuda(cudaEventRecord(begin, NULL), "event");
        cuda(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToDevice, NULL), "copy");
        cuda(cudaEventRecord(end, NULL), "event");
        double sample = microseconds();
        if (i >= 0) us[i] = sample;
    }
    cuda(cudaFree(from), "free");
    cuda(cudaFree(to), "free");
    return 2e-6 * (double)bytes / spread_of(us, 15).median;
}

static double read_time(struct set *sets, int chunk_bytes, int depth, int sms)
{
    double us[9];
    size_t shared = 1024 + (size_t)(chunk_bytes * depth);
    struct read_args a = { .chunks = sets[0].bytes / chunk_bytes, .depth = depth,
                           .chunk_bytes = chunk_bytes, .sum = (uint32_t *)results };
    cuda(cudaFuncSetAttribute((const void *)read_stream,
                              cudaFuncAttributeMaxDynamicSharedMemorySize, (int)shared),
         "shared memory of the read-only stream");
    for (int i = -1; i < 9; i++) {
        cuda(cudaEventRecord(begin, NULL), "event");
        for (int j = 0; j < 15; j++) {
            a.from = sets[j % SETS].arena;
            run((const void *)read_stream, sms, 288, shared, &a);
        }
        cuda(cudaEventRecord(end, NULL), "event");
        double sample = microseconds() / 15;
        if (i >= 0) us[i] = sample;
    }
    return spread_of(us, 9).median / (double)(a.chunks * chunk_bytes);
}

static double read_bandwidth(struct set *sets, int sms)   /* TB/s */
{
    int chunk[] = { 16384, 24576, 32768, 49152 }, depth[] = { 12, 8, 6, 4 };
    double best = INFINITY;
    for (int i = 0; i < 4; i++)
        best = fmin(best, read_time(sets, chunk[i], depth[i], sms));
    return 1e-6 / best;
}

static int probe_reads_all(struct set *s, int sms)
{
    int chunk = 32768;
    uint32_t got = 0, expected = 0, *sums = need((size_t)sms * 32);
    char *copy = need((size_t)s->bytes);
    struct read_args a = { .from = s->arena, .chunks = s->bytes / chunk, .depth = 6,
                           .chunk_bytes = chunk, .sum = (uint32_t *)results };
    run((const void *)read_stream, sms, 288, 1024 + 6 * 32768, &a);
    copy_out(sums, results, (size_t)sms * 32);
    copy_out(copy, s->arena, (size_t)s->bytes);
    for (int i = 0; i < 8 * sms; i++) got ^= sums[i];
    for (int64_t i = 0; i < a.chunks * chunk / 4; i++)
        expected ^= ((uint32_t *)copy)[i];
    free(copy), free(sums);
    return got == expected;
}

/* driver: the report */
static int64_t weight_bytes(void)
{
    int64_t sum = 0;
    for (int t = IN_NORM; t <= DOWN; t++) sum += 2 * elements(t);
    return sum;
}

struct figures {
    struct spread us, again;   /* two runs of the same build: the noise */
    double graph, copy_tbs, read_tbs, bytes, contract_bytes;
    int launches;
};

static void count_bytes(struct figures *f)
{
    const layer_config *c = &opt.c;
    double row = 4.0 * (double)(c->n_kv * c->hd), keys = (double)opt.prefill;
    double norms = 4.0 * (double)c->d, weights = (double)weight_bytes();
    f->bytes = weights + row * (keys + (STEPS + 1) / 2.0);
    f->contract_bytes = weights - norms + row * (keys + STEPS);
}

static void print_report(const struct figures *f, const struct cudaDeviceProp *p)
{
    double us = f->us.median, floor = f->contract_bytes / f->copy_tbs * 1e-6;
    double limit = f->bytes / f->read_tbs * 1e-6;
    int driver, runtime;
    cuda(cudaDriverGetVersion(&driver), "version");
    cuda(cudaRuntimeGetVersion(&runtime), "version");
    printf("stage %d: %s\n", STAGE, TITLE);
    printf("  on           %s, %d SMs, driver for CUDA %d.%d, runtime %d.%d\n", p->name,
           p->multiProcessorCount, driver / 1000, driver % 1000 / 10, runtime / 1000,
           runtime % 1000 / 10);
    printf("  launches     %d\n", f->launches);
    printf("  a step       %.1f us (p10 %.1f, p90 %.1f; again: %.1f)\n", us, f->us.p10,
           f->us.p90, f->again.median);
    printf("  in a graph   %.1f us\n", f->graph);
    printf("  tokens/s     %.0f\n", 1e6 / us);
    printf("  bytes        %.4g GB a step, %.2f TB/s\n", f->bytes * 1e-9,
           f->bytes / us * 1e-6);
    printf("  copy floor   %.1f us at %.2f TB/s: x %.3f\n", floor, f->copy_tbs,
           us / floor);
    printf("  read limit   %.1f us at %.2f TB/s: x %.3f\n", limit, f->read_tbs,
           us / limit);
    printf("  error        %.1e of float64 (at most %.1e)\n", largest_error, TOLERANCE);
}

static void print_row(const struct figures *f)
{
    double us = f->us.median;
    printf("%d,\"%s\",%d,%.2f,%.2f,%.2f,", STAGE, TITLE, f->launches, us, f->us.p10,
           f->us.p90);
    if (STAGE < 7) printf("%.2f", f->graph);
    printf(",%.1f,%.0f,%.4f,%.4f,%.4f,%.4f,%.3e\n", 1e6 / us, f->bytes, f->copy_tbs,
           f->read_tbs, us * f->copy_tbs * 1e6 / f->contract_bytes,
           us * f->read_tbs * 1e6 / f->bytes, largest_error);
}
#else
/* driver: what a GPU measured last */
static void field(const char *line, int n, char out[256])   /* the nth, of RFC 4180 */
{
    int quoted = 0, at = 0;
    for (; *line && *line != '\n' && (n > 0 || quoted || *line != ','); line++) {
        if (*line == '"') quoted = !quoted;
        else if (*line == ',' && !quoted) n--;
        else if (n == 0 && at < 255) out[at++] = *line;
    }
    out[at] = 0;
}

static void last_figures(void)
{
    char line[2048], cell[14][256], this_stage[] = { '0' + STAGE, 0 };
    FILE *f = fopen("data/ladder.csv", "r");
    int found = 0;
    printf("last measured on a GPU (data/ladder.csv):\n");
    while (f && fgets(line, sizeof line, f)) {
        if (!strchr(line, '\n') && !feof(f)) {
            /* skip the rest of a line that is too long */
            int byte;
            do byte = fgetc(f);
            while (byte != EOF && byte != '\n');
            continue;
        }
        if (line[0] == '#') {
            /* repeat where and when it was measured */
            const char *shown[] = { "# gpu:", "# driver:", "# commit:", "# date:", "# note:" };
            for (size_t i = 0; i < sizeof shown / sizeof *shown; i++)
                if (!strncmp(line, shown[i], strlen(shown[i]))) printf("  %s", line + 2);
            continue;
        }
        for (int i = 0; i < 14; i++) field(line, i, cell[i]);
        if (strcmp(cell[0], this_stage)) continue;
        printf("  launches %s, %s us, x %s of the copy floor, x %s of the read limit\n",
               cell[2], cell[3], cell[11], cell[12]);
        found = 1;
    }
    if (!found) printf("  nothing yet\n");
    if (f) fclose(f);
}
#endif
#ifdef TIMERS
/* driver: the timeline */
enum { MARKED_WARPS = 32 };     /* of each block, as in the kernel */
struct phase { const char *name; int first, last; };   /* tensors, by number */
static const struct phase phases[] = { TIMED_PHASES };
enum { PHASES = sizeof phases / sizeof *phases };
int layer_marks(layer *l, uint64_t *out);   /* [blocks][MARKED_WARPS][PHASES][2], ns */

/* driver: what a block did in a phase */
struct stay { uint64_t start, end; };   /* ns; end 0: nothing */

static struct stay stay_of(const uint64_t *marks, int block, int phase)
{
    struct stay s = { UINT64_MAX, 0 };
    for (int w = 0; w < MARKED_WARPS; w++) {
        const uint64_t *m = marks + ((block * MARKED_WARPS + w) * PHASES + phase) * 2;
        if (m[1] && m[0] < s.start) s.start = m[0];
        if (m[1] > s.end) s.end = m[1];
    }
    return s;
}

static struct stay stay_of_all(const uint64_t *marks, int blocks, int phase)
{
    struct stay all = { UINT64_MAX, 0 };
    for (int b = 0; b < blocks; b++) {
        struct stay s = stay_of(marks, b, phase);
        if (s.end && s.start < all.start) all.start = s.start;
        if (s.end > all.end) all.end = s.end;
    }
    return all;
}

/* driver: write the timeline */
static const char *told(const char *name)
{
    const char *value = getenv(name);
    return value && *value ? value : "unknown";
}

static void print_provenance(FILE *f, const struct cudaDeviceProp *p)
{
    char date[32];
    time_t now = time(NULL);
    int runtime;
    cuda(cudaRuntimeGetVersion(&runtime), "version");
    strftime(date, sizeof date, "%Y-%m-%dT%H:%M:%SZ", gmtime(&now));
    fprintf(f, "# gpu: %s\n# driver: %s\n# cuda: %d.%d\n", p->name,
            told("DRIVER_VERSION"), runtime / 1000, runtime % 1000 / 10);
    fprintf(f, "# clocks: %s\n# commit: %s\n# date: %s\n", told("CLOCKS"),
            told("COMMIT"), date);
    fprintf(f, "# protocol: stage %d compiled with -DTIMERS, one step at position %lld "
            "after others, sets of weights in rotation; globaltimer at each warp's "
            "first and last work on a phase; sm is the number of the block\n", STAGE,
            (long long)opt.prefill);
}

static void write_timeline(const uint64_t *marks, int blocks,
                           const struct cudaDeviceProp *p)
{
    char new[4096];
    if (snprintf(new, sizeof new, "%s.new", opt.timeline) >= (int)sizeof new)
        die(2, "--timeline= takes a shorter path");
    FILE *f = fopen(new, "w");
    if (!f) die(1, "cannot write %s", new);
    print_provenance(f, p);
    fprintf(f, "sm,phase,start_us,end_us\n");
    uint64_t zero = stay_of_all(marks, blocks, 0).start;
    for (int i = 0; i < PHASES; i++)
        for (int b = 0; b < blocks; b++) {
            struct stay s = stay_of(marks, b, i);
            if (s.end) fprintf(f, "%d,%s,%.3f,%.3f\n", b, phases[i].name,
                               1e-3 * (double)(s.start - zero),
                               1e-3 * (double)(s.end - zero));
        }
    if (fclose(f) || rename(new, opt.timeline)) die(1, "cannot write %s", opt.timeline);
}

/* driver: a table of the phases */
static double bytes_of(const struct phase *phase)
{
    double rows = (double)(opt.prefill + 1) / (double)opt.c.max_seq_len, sum = 0;
    for (int t = phase->first; t <= phase->last; t++) {
        double size = 2;
#ifdef PACKED
        if (element_size[t]) size = element_size[t];
#endif
        sum += size * (double)elements(t) * (t >= K_CACHE ? rows : 1);
    }
    return sum;
}

static void print_phases(const uint64_t *marks, int blocks)
{
    uint64_t zero = stay_of_all(marks, blocks, 0).start, end = 0;
    printf("  phase             MB       us    TB/s\n");
    for (int i = 0; i < PHASES; i++) {
        struct stay s = stay_of_all(marks, blocks, i);
        double us = 1e-3 * (double)(s.end - s.start), bytes = bytes_of(&phases[i]);
        printf("  %-12s %7.1f  %7.1f  %6.2f\n", phases[i].name, bytes * 1e-6, us,
               bytes / us * 1e-6);
        if (s.end > end) end = s.end;
    }
    printf("  from the first mark to the last: %.1f us\n", 1e-3 * (double)(end - zero));
}

/* driver: record the timeline */
static void record_timeline(struct set *sets, const struct cudaDeviceProp *p)
{
    int blocks = p->multiProcessorCount, count = 1;
    uint64_t *marks = need((size_t)blocks * MARKED_WARPS * PHASES * 2 * sizeof *marks);
#ifndef CUDA_CPU_TARGET
    for (; count < SETS; count++) draw_set(&sets[count], opt.seed + (uint64_t)count);
#endif
    fill_on_device(x_device, opt.seed, X + (int)opt.prefill, opt.c.d);
    for (int i = 10 * count; i >= 0; i--)   /* the last one is of set 0 */
        ok(layer_step(sets[i % count].l, x_device, opt.prefill, out_device, NULL),
           "step");
    cuda(cudaDeviceSynchronize(), "steps");
    ok(layer_marks(sets[0].l, marks), "marks");
    write_timeline(marks, blocks, p);
    print_phases(marks, blocks);
    free(marks);
}
#endif

/* driver: the main program */
/* driver: one shape */
static void run_shape(const struct cudaDeviceProp *p)
{
    struct set sets[SETS] = {{ 0 }};
    const layer_config *c = &opt.c;
    printf("stage %d on %s: d %lld, ffn %lld, heads %lld/%lld x %lld, %lld keys, "
           "seed %llu\n", STAGE, p->name, (long long)c->d, (long long)c->ffn,
           (long long)c->n_q,
           (long long)c->n_kv, (long long)c->hd, (long long)opt.prefill,
           (unsigned long long)opt.seed);
    fflush(stdout);
    cuda(cudaMalloc(&x_device, (size_t)c->d * 2), "memory for x");
    cuda(cudaMalloc(&out_device, (size_t)c->d * 2), "memory for the result");
    draw_set(&sets[0], opt.seed);
#ifdef PACKED
    print_packing(&sets[0]);
#endif
    if (!opt.probe && !opt.quick && !opt.timeline) check_all(&sets[0]);
#ifdef PACKED
    if (!opt.probe && !opt.timeline) print_digest(&sets[0]);
#endif
#ifdef TIMERS
    if (opt.timeline) record_timeline(sets, p);
#endif
#ifndef CUDA_CPU_TARGET
    if (!opt.timeline && !opt.at && !opt.check) {
        /* draw the other sets and measure */
        struct figures f = { 0 };
        for (int i = 1; i < SETS; i++) draw_set(&sets[i], opt.seed + (uint64_t)i);
        cuda(cudaEventCreate(&begin), "event");
        cuda(cudaEventCreate(&end), "event");
        count_bytes(&f);
        #ifdef PACKED
        f.bytes += (double)(layer_weight_bytes(sets[0].l) - weight_bytes());
        #endif
        prepare_samples(sets);
        f.copy_tbs = copy_bandwidth();
        f.read_tbs = read_bandwidth(sets, p->multiProcessorCount);
        int all = probe_reads_all(&sets[0], p->multiProcessorCount);
        verdict(all, "the read-only probe reads all");
        if (opt.probe) printf("%.4f,%.4f\n", f.copy_tbs, f.read_tbs);
        else {
            cudaMemset(results, 0xff, (size_t)(STEPS * opt.c.d) * 2);
            f.us = time_steps(sets, NULL);
            f.again = time_steps(sets, NULL);
            double error = last_step_error(&sets[0]);
            verdict(error <= TOLERANCE, "the last timed step: error %.1e", error);
            f.graph = time_graph(sets, &f.launches).median;
            verdict(f.launches == LAUNCHES, "launches: %d", f.launches);
            print_report(&f, p);
            if (opt.csv) print_row(&f);
        }
    }
#endif
    /* give everything back */
    #ifdef CUDA_CPU_TARGET
    for (int i = 0; i < 1; i++) {
    #else
    cudaFree(inputs), cudaFree(results);
    for (int i = 0; i < SETS; i++) {
    #endif
        ok(layer_teardown(sets[i].l), "teardown");
        cuda(cudaFree(sets[i].arena), "free");
    }
    cuda(cudaFree(x_device), "free");
    cuda(cudaFree(out_device), "free");
}

int main(int argc, char **argv)
{
    struct cudaDeviceProp p;
    int count = 0;
    read_options(argc, argv);
    /* see that there is a device */
    int driver = 0, runtime = 0;
    cudaError_t e = cudaGetDeviceCount(&count);
    cudaDriverGetVersion(&driver), cudaRuntimeGetVersion(&runtime);
    if (e && e != cudaErrorNoDevice)
        die(2, "stage %d: %s (the driver is for CUDA %d.%d, the runtime %d.%d)", STAGE,
            cudaGetErrorString(e), driver / 1000, driver % 1000 / 10, runtime / 1000,
            runtime % 1000 / 10);
    if (e || !count)
        die(2, "stage %d: no CUDA device; build for the CPU target instead", STAGE);
    cuda(cudaGetDeviceProperties(&p, 0), "device properties");
    if (p.major < 9)
        die(2, "stage %d: %s has compute capability %d.%d; 9.0 or later is needed",
            STAGE, p.name, p.major, p.minor);
#ifdef CUDA_CPU_TARGET
    /* run the small shapes */
    int64_t small[][6] = {{ 192, 320, 6, 2, 64, 150 }, { 320, 448, 4, 1, 128, 37 }};
    for (int i = 0; i < (shape_given ? 1 : 2); i++) {
        if (!shape_given) {
            opt.c.d = small[i][0], opt.c.ffn = small[i][1], opt.c.n_q = small[i][2];
            opt.c.n_kv = small[i][3], opt.c.hd = small[i][4], opt.prefill = small[i][5];
            opt.c.max_seq_len = opt.prefill + 8;
        }
        run_shape(&p);
    }
    last_figures();
#else
    run_shape(&p);
#endif
    puts(failures ? "FAIL" : "PASS");
    return failures != 0;
}
