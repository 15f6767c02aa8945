/* stages/cpu/cpu.c: tangled from layer.nw; change it there. */
// cpu.c: a hostile GPU. One thread of the operating system; fibers do the rest.
#define _GNU_SOURCE

/* cpu: headers */
#include "device.h"
#undef gridDim
#undef blockDim
#include <signal.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>
#if !defined __x86_64__ && !defined CPU_UCONTEXT
#define CPU_UCONTEXT
#endif
#ifdef CPU_UCONTEXT
#include <ucontext.h>
#endif

/* cpu: the size of the machine */
enum {
    WARP = 32,
    SM_THREADS = 1024,
    SM_BLOCKS = 32,
    SM_SHARED = 228 << 10,     // bytes
    BLOCK_SHARED = 227 << 10,  // bytes a block may have when it asks for them
    PLAIN_SHARED = 48 << 10,   // bytes a block may have without asking
    BLOCK_RESERVED = 1 << 10,  // bytes of an SM's shared memory lost to each block
    BARRIERS = 16,
    REGISTERS = 1 << 16,       // of an SM, all for its one block if it shifts them
    MOST_REGISTERS = 248,      // a thread starts with at most
    PAGE = 4096,              // bytes
    MOST_SMS = 256,
    MOST_STREAMS = 256,
    MOST_KERNELS = 1024,
    MOST_FIBERS = 7000,       // under ThreadSanitizer
    STACK = 128 << 10,         // bytes of address space; little of it is touched
    ASKED_IN_VAIN = 4000,     // retries of a fiber without progress,
    IN_VAIN_AT_LEAST = 1 << 17, // of all, since a starved block may be what is late
    MOST_STEPS = 1000000      // turns without progress
};
static const size_t device_memory = (size_t)8 << 30; // bytes

/* cpu: what there is */
enum wait_kind {
    FOR_WORD, FOR_VALUE, FOR_MBARRIER, FOR_BARRIER, FOR_WARP, FOR_REGISTERS, FOR_GRID
};
struct fiber {
    struct cpu_place place; // must be first: cpu_here points at it
    struct block *block;
    struct warp *warp;
    void *stack_pointer;
    char *stack;            // its low end
    size_t stack_bytes;
    void *tsan, *asan;      // what the sanitizers call it
    struct fiber *next;     // in a pool, or among the sleepers
    const void *where;      // what it sleeps on
    enum wait_kind kind;
    uint32_t wanted;
    /* fiber: what its next fences will act on */
    unsigned n_loads, n_inits;
    const uint32_t *loads[8]; // addresses loaded in relaxed order since the last fence
    uint64_t *inits[64];      // mbarriers initialised and not yet shown to the engine
    /* fiber: its relaxed stores, its retries */
    unsigned n_late;
    uint64_t shown, asked_at; // asked_at: what had moved when it last asked
        const uint32_t *asked;    // for a value, and found no proof in it
#ifdef CPU_UCONTEXT
    ucontext_t context;
#endif
};
struct pool { struct fiber *idle; };

struct operand { uint32_t a[4], b[2]; float c[4]; };
struct warp {
    const char *operation;   // the one that is gathering
    unsigned detail;         // what its lanes must also agree on
    unsigned lanes, arrived; // threads in the warp; those that called
    unsigned generation;     // operations completed
    unsigned ticket;         // the barrier generation it waits to see the end of
    unsigned registers;      // of each lane
    unsigned changes;        // a digest of how it changed them
    char edge;               // for ThreadSanitizer
    struct operand in[WARP];
    union { uint32_t u; float f[4]; } out[WARP];
};

struct barrier {
    unsigned expected, arrived, generation; // warps, warps, times completed
    uint32_t who;                           // the warps that have arrived
    char edge[2];                           // for ThreadSanitizer, by generation
};

struct block {
    struct grid *grid;
    unsigned index, sm, alive, n_ready, seat; // seat: its place among the runnable
    unsigned in_flight;                       // bulk copies
    unsigned registers;                       // that no warp has
    bool triggered;                           // called launch_dependents
    char *shared;
    char start, end, issue;                   // for ThreadSanitizer
    struct fiber *engine;   // runs no code: ThreadSanitizer's idea of the copy engine
    struct barrier barriers[BARRIERS];
    struct warp *warps;
    struct fiber **fibers, **ready;
};

struct kernel {
    const void *function;
    void (*call)(const void *);
    const char *name;
    size_t argument_bytes, most_shared;
};

struct grid {
    struct kernel *kernel;
    struct CUstream_st *stream;
    void *argument;
    unsigned blocks, threads, shared_bytes;
    unsigned started, ended, triggered;  // blocks
    unsigned *order;                     // in which the blocks start
    bool cooperative, dependent, early;  // early: its prerequisite still runs
    char start, end, prerequisite;       // for ThreadSanitizer
    struct fiber *proxied, *constant;
    struct pool *pool;
    uint64_t serial;
};

enum op_kind { COPY, FILL, LAUNCH, RECORD, WAIT };
struct op {
    enum op_kind kind;
    struct op *next;
    void *to;
    const void *from;
    size_t bytes;
    int byte;
    struct grid *grid;
    struct CUevent_st *event;
    uint64_t nth; // which record of the event
};

struct CUstream_st {
    bool used;
    struct op *first, *last;
    struct grid *running[2];
    unsigned n_running, turn; // turn: which pool the last launch used
    struct pool pools[2];
    void *tsan;
    char edge, start; // for ThreadSanitizer
};

struct CUevent_st {
    uint64_t recorded, completed;
    bool timed;
    double when; // seconds
};

/* cpu: the state of the machine */
static struct fiber host, *self = &host;
struct cpu_place *cpu_here = &host.place;
static struct block **runnable, *starved;
static unsigned n_runnable, room_runnable, spell;
static struct CUstream_st streams[MOST_STREAMS]; // the first is the default stream
static unsigned n_streams = 1;
static struct kernel kernels[MOST_KERNELS];
static unsigned n_kernels;
static struct { unsigned threads, blocks, shared; } sms[MOST_SMS];
static unsigned n_sms = 3, n_fibers, n_late; // n_late: stores on their way
static uint64_t in_vain, n_moves; // retries since anything moved; how often it did
static uint64_t seed = 1, switches, steps, n_begun, n_launched;
static cudaError_t last_error;
static void *nobody; // an identity for ThreadSanitizer that knows nothing, ever

/* cpu: chance */
static uint64_t chance_state;
static uint32_t chance(void)
{
    chance_state ^= chance_state << 13;
    chance_state ^= chance_state >> 7;
    chance_state ^= chance_state << 17;
    return (uint32_t)(chance_state >> 16);
}
static unsigned below(unsigned n)
{
    return (unsigned)((uint64_t)chance() * n >> 32);
}
static bool one_in(unsigned n) { return below(n) == 0; }

/* cpu: what the sanitizers are told */
#ifdef TSAN
void *__tsan_get_current_fiber(void);
void *__tsan_create_fiber(unsigned flags);
void __tsan_switch_to_fiber(void *, unsigned flags);
void __tsan_set_fiber_name(void *, const char *);
void __tsan_acquire(void *);
void __tsan_release(void *);
void __tsan_read_range(void *, unsigned long);
void __tsan_write_range(void *, unsigned long);
const char *__tsan_default_options(void) { return "atexit_sleep_ms=0"; }
static void *acting;
static void *act_as(void *who)
{
    void *was = acting;
    if (who != was)
        __tsan_switch_to_fiber(who, 1); // 1: this orders nothing
    acting = who;
    return was;
}

/* cpu: edges and accesses that ThreadSanitizer sees */
static void *new_identity(const char *name)
{
    void *was = act_as(nobody);
    void *fiber = __tsan_create_fiber(0);
    __tsan_set_fiber_name(fiber, name);
    act_as(was);
    return fiber;
}
static void acquire(const void *edge) { __tsan_acquire((void *)edge); }
static void release(const void *edge) { __tsan_release((void *)edge); }
static void reads(const void *p, size_t n) { __tsan_read_range((void *)p, n); }
static void writes(const void *p, size_t n) { __tsan_write_range((void *)p, n); }
static void release_as(void *who, const void *edge)
{
    void *was = act_as(who);
    release(edge);
    act_as(was);
}
#else
/* cpu: nothing to tell */
static inline void *act_as(void *who) { return who; }
static inline void *new_identity(const char *name) { return (void)name, NULL; }
static inline void acquire(const void *edge) { (void)edge; }
static inline void release(const void *edge) { (void)edge; }
static inline void release_as(void *who, const void *e) { (void)who, (void)e; }
static inline void reads(const void *p, size_t n) { (void)p, (void)n; }
static inline void writes(const void *p, size_t n) { (void)p, (void)n; }
#endif

/* cpu: what AddressSanitizer is told */
#ifdef ASAN
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#define leaves_for(me, next) \
    __sanitizer_start_switch_fiber(&(me)->asan, (next)->stack, (next)->stack_bytes)
#define is_back(me) __sanitizer_finish_switch_fiber((me)->asan, NULL, NULL)
#define poison(p, n) __asan_poison_memory_region(p, n)
#define unpoison(p, n) __asan_unpoison_memory_region(p, n)
#else
#define leaves_for(me, next) ((void)0)
#define is_back(me) ((void)0)
#define poison(p, n) ((void)0)
#define unpoison(p, n) ((void)0)
#endif

/* cpu: memory of the machine's own */
static void *grab(size_t bytes)
{
    void *was = act_as(host.tsan);
    void *p = calloc(1, bytes);
    act_as(was);
    if (!p) {
        fputs("cpu target: out of memory\n", stderr);
        _exit(3);
    }
    return p;
}

static void drop(void *p)
{
    void *was = act_as(host.tsan);
    free(p);
    act_as(was);
}

/* cpu: failure */
static void fail(const char *format, ...)
{
    va_list arguments;
    fflush(stdout);
    fprintf(stderr, "cpu target: seed %llu", (unsigned long long)seed);
    if (self != &host)
        fprintf(stderr, ", %s, block %u thread %u", self->block->grid->kernel->name,
                self->place.block.x, self->place.thread.x);
    fputs(": ", stderr);
    va_start(arguments, format);
    vfprintf(stderr, format, arguments);
    va_end(arguments);
    fputc('\n', stderr);
    _exit(3);
}

/* cpu: global memory */
struct allocation {
    struct allocation *next;
    char *first;
    size_t bytes;
};
static struct allocation *allocations;
static size_t allocated; // bytes
static const struct allocation *allocation_of(const void *p, size_t bytes)
{
    const char *c = p;
    for (const struct allocation *a = allocations; a; a = a->next)
        if (c >= a->first && c + bytes <= a->first + a->bytes)
            return a;
    return NULL;
}

static bool in_shared(const struct block *b, const void *p, size_t bytes)
{
    const char *c = p;
    return c >= b->shared && c + bytes <= b->shared + b->grid->shared_bytes;
}

/* cpu: switching from fiber to fiber */
#ifndef CPU_UCONTEXT
void cpu_swap(void **leaving, void *entering);
__asm__(".text\n.globl cpu_swap\n.type cpu_swap,@function\n"
        "cpu_swap:\n"
        "  push %rbp\n  push %rbx\n  push %r12\n  push %r13\n  push %r14\n  push %r15\n"
        "  mov %rsp, (%rdi)\n"
        "  mov %rsi, %rsp\n"
        "  pop %r15\n  pop %r14\n  pop %r13\n  pop %r12\n  pop %rbx\n  pop %rbp\n"
        "  ret\n");
#define swap(me, next) cpu_swap(&(me)->stack_pointer, (next)->stack_pointer)
#else
#define swap(me, next) swapcontext(&(me)->context, &(next)->context)
#endif
static void switch_to(struct fiber *next)
{
    struct fiber *me = self;
    if (next == me)
        return;
    self = next;
    cpu_here = &next->place;
    act_as(next->tsan);
    leaves_for(me, next);
    swap(me, next);
    is_back(me);
}

static void exit_thread(void);
static void name_identity(void)
{
#ifdef TSAN
    char name[64];
    snprintf(name, sizeof name, "block %u thread %u", self->place.block.x,
             self->place.thread.x);
    __tsan_set_fiber_name(self->tsan, name);
#endif
}

static void run_threads(void)
{
#ifdef ASAN
    const void *stack;
    size_t bytes;
    __sanitizer_finish_switch_fiber(NULL, &stack, &bytes);
    if (!host.stack) { // the first fiber is always entered from the host
        host.stack = (char *)stack;
        host.stack_bytes = bytes;
    }
#endif
    for (;;) {
        acquire(&self->block->start);
        name_identity();
        struct grid *grid = self->block->grid;
        grid->kernel->call(grid->argument);
        exit_thread();
    }
}

static void prepare(struct fiber *f)
{
#ifndef CPU_UCONTEXT
    void **top = (void **)(f->stack + STACK - 64);
    *--top = NULL;                // where run_threads would return to
    *--top = (void *)run_threads; // where the first switch returns to
    f->stack_pointer = top - 6;   // six registers, all zero
#else
    getcontext(&f->context);
    f->context.uc_stack.ss_sp = f->stack;
    f->context.uc_stack.ss_size = STACK;
    makecontext(&f->context, run_threads, 0);
#endif
}

static struct fiber *new_fiber(void)
{
    void *was = act_as(nobody);
    char *stack = mmap(NULL, STACK + PAGE, PROT_READ | PROT_WRITE,
                       MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (stack == MAP_FAILED)
        fail("no memory for the stack of fiber %u", n_fibers);
    struct fiber *f = (struct fiber *)(stack + STACK);
    f->stack = stack;
    f->stack_bytes = STACK;
    f->tsan = new_identity("a CUDA thread");
    act_as(was);
    if (n_fibers++ < 8192)
        mprotect(stack, PAGE, PROT_NONE);
    prepare(f);
    return f;
}

static struct fiber *take_fiber(struct pool *pool)
{
#ifdef TSAN
    for (unsigned i = 0; !pool->idle && n_fibers >= MOST_FIBERS; i++)
        if (i == 2 * n_streams)
            fail("more fibers than ThreadSanitizer can hold");
        else if (streams[i / 2].pools[i % 2].idle)
            pool = &streams[i / 2].pools[i % 2];
#endif
    struct fiber *f = pool->idle;
    if (!f)
        return new_fiber();
    pool->idle = f->next;
    return f;
}

static void give_fiber(struct pool *pool, struct fiber *f)
{
    f->next = pool->idle;
    pool->idle = f;
}

/* cpu: the scheduler */
static void make_ready(struct fiber *f)
{
    struct block *b = f->block;
    if (b->n_ready == 0) {
        if (n_runnable == room_runnable)
            /* make more room for runnable blocks */
            {
                room_runnable = 2 * room_runnable + 64;
                struct block **more = grab(room_runnable * sizeof *more);
                for (unsigned i = 0; i < n_runnable; i++)
                    more[i] = runnable[i];
                drop(runnable);
                runnable = more;
            }
        b->seat = n_runnable;
        runnable[n_runnable++] = b;
    }
    b->ready[b->n_ready++] = f;
}

static struct fiber *pick(void)
{
    if (n_runnable == 0)
        return NULL;
    unsigned i = below(n_runnable);
    if (runnable[i] == starved && n_runnable > 1)
        i = (i + 1 + below(n_runnable - 1)) % n_runnable;
    struct block *b = runnable[i];
    unsigned j = below(b->n_ready);
    struct fiber *f = b->ready[j];
    b->ready[j] = b->ready[--b->n_ready];
    if (b->n_ready == 0) {
        runnable[i] = runnable[--n_runnable];
        runnable[i]->seat = i;
    }
    return f;
}

static void next_spell(void)
{
    if (starved && --spell > 0)
        return;
    starved = n_runnable && one_in(2) ? runnable[below(n_runnable)] : NULL;
    spell = 1 + below(1u << below(8));
}
static bool deliver(bool nothing_else_moves), land_some(bool nothing_else_moves);
static void pause_thread(void) // somebody else's turn
{
    steps++;
    if (one_in(16))
        deliver(false);
    for (unsigned i = n_late && one_in(4) ? 1u << below(4) : 0; i > 0; i--)
        land_some(false);
    struct fiber *next = NULL;
    if (++switches % 64 != 0) // else the host looks after streams
        next = pick();
    switch_to(next ? next : &host);
}
static void maybe_pause(void)
{
    if (one_in(8)) {
        make_ready(self);
        pause_thread();
    }
}

/* cpu: sleeping and waking */
enum { BEDS = 1024 };
static struct { struct fiber *first, *last; } beds[BEDS];
static unsigned bed_of(const void *where)
{
    return (unsigned)(((uintptr_t)where >> 2) * 2654435761u >> 7) % BEDS;
}

static void sleep_on(const void *where, enum wait_kind kind, uint32_t wanted)
{
    unsigned i = bed_of(where);
    self->where = where;
    self->kind = kind;
    self->wanted = wanted;
    self->next = NULL;
    if (beds[i].last)
        beds[i].last->next = self;
    else
        beds[i].first = self;
    beds[i].last = self;
    pause_thread();
}

static void wake(const void *where)
{
    unsigned i = bed_of(where);
    struct fiber *f = beds[i].first, *next;
    beds[i].first = beds[i].last = NULL;
    for (; f; f = next) {
        next = f->next;
        f->next = NULL;
        if (f->where == where) {
            f->where = NULL;
            steps = 0;
            make_ready(f);
        } else {
            if (beds[i].last)
                beds[i].last->next = f;
            else
                beds[i].first = f;
            beds[i].last = f;
        }
    }
}

/* cpu: stores on their way */
enum { MOST_LATE = 1 << 14, HEADS = 4096 };
struct late {
    uint32_t *at, value;
    bool adds, stubborn;
    unsigned seat;      // in the list
    uint64_t order;
    struct fiber *by;
    struct late *next;  // of the same head, by age
};
static struct late *late[MOST_LATE], *heads[HEADS], *spare;
static uint64_t n_stores;
static struct late **head_of(const uint32_t *p)
{
    return &heads[((uintptr_t)p >> 2) * 0x9e3779b97f4a7c15u >> 52];
}

static void something_moved(void)
{
    steps = in_vain = 0;
    n_moves++;
}
static void land(struct late *e)
{
    struct late **link = head_of(e->at);
    while ((*link)->at != e->at || (*link)->by != e->by)
        link = &(*link)->next;
    e = *link;
    *link = e->next;
    late[e->seat] = late[--n_late];
    late[e->seat]->seat = e->seat;
    e->by->n_late--;
    if (e->adds)
        __atomic_fetch_add(e->at, e->value, __ATOMIC_RELAXED);
    else
        __atomic_store_n(e->at, e->value, __ATOMIC_RELAXED);
    e->next = spare;
    spare = e;
    something_moved();
    wake(e->at);
}

static bool land_some(bool nothing_else_moves)
{
    if (n_late == 0)
        return false;
    struct late *e = late[below(n_late)];
    if (e->stubborn && !nothing_else_moves && (switches >> 10 & 3) != 3)
        return false;
    land(e);
    return true;
}
static bool is_known(const struct late *e) // to this thread
{
    return e->by == self ||
           (e->by->block == self->block && e->order <= e->by->shown);
}

void cpu_show(void) { self->shown = n_stores; }
void cpu_publish(void)
{
    cpu_show();
    for (unsigned i = n_late; i-- > 0;)
        while (i < n_late && is_known(late[i]))
            land(late[i]);
}
static void settle(const uint32_t *p, bool own_too)
{
    struct late *e = *head_of(p), *next;
    for (; e; e = next) {
        next = e->next;
        if (e->at == p && is_known(e) && (own_too || e->by != self))
            land(e);
    }
}
void cpu_settle(const uint32_t *p) { settle(p, true); }

uint32_t cpu_seen(const uint32_t *p, uint32_t in_memory)
{
    if (!*head_of(p))
        return in_memory;
    settle(p, false);
    uint32_t v = __atomic_load_n(p, __ATOMIC_RELAXED);
    for (const struct late *e = *head_of(p); e; e = e->next)
        if (e->at == p && e->by == self)
            v = e->adds ? v + e->value : e->value;
    return v;
}

void cpu_late(uint32_t *p, uint32_t v, int adds)
{
    settle(p, false);
    if (n_late == MOST_LATE)
        land(late[below(n_late)]);
    struct late *e = spare, **link = head_of(p);
    if (e)
        spare = e->next;
    else
        e = grab(sizeof *e);
    *e = (struct late){p, v, adds, one_in(8), n_late, ++n_stores, self, NULL};
    while (*link)
        link = &(*link)->next;
    *link = late[n_late++] = e;
    self->n_late++;
    maybe_pause();
}

unsigned cpu_below(unsigned n) { return below(n); }
void cpu_yield(void)
{
    make_ready(self);
    pause_thread();
}
static void no_progress(void);
void retry_values(const uint32_t *p, uint64_t start)
{
    (void)start;
    self->asked = p;
    self->asked_at = n_moves;
    make_ready(self);
    if (++in_vain > (uint64_t)ASKED_IN_VAIN * n_fibers + IN_VAIN_AT_LEAST)
        no_progress();
    pause_thread();
}

/* cpu: bulk copies in flight */
struct mbarrier {
    int64_t bytes : 21;      // announced, not yet arrived; may be negative for a while
    uint64_t pending : 20;   // arrivals missing in this phase
    uint64_t count : 20;     // arrivals in every phase
    uint64_t phase : 1;
    uint64_t valid : 2;      // 1: initialised; 2: the copy engine knows it too
};
enum { MOST_BYTES = (1 << 20) - 1 };
_Static_assert(sizeof(struct mbarrier) == sizeof(uint64_t), "an mbarrier is a word");

static const void *edge_of(const struct mbarrier *m, unsigned parity)
{
    return (const char *)m + 4 * parity; // for ThreadSanitizer, one for each parity
}

static void end_phase_if_complete(struct mbarrier *m)
{
    if (m->pending == 0 && m->bytes == 0) {
        m->phase ^= 1;
        m->pending = m->count;
        wake(m);
    }
}

struct flight {
    char *to;
    const char *from;
    uint32_t left; // bytes
    struct mbarrier *barrier;
    struct block *block;
};

static struct flight *flights;
static unsigned n_flights, room_flights;

/* is anybody asleep on this mbarrier? */
static bool is_awaited(const struct mbarrier *m)
{
    for (const struct fiber *f = beds[bed_of(m)].first; f; f = f->next)
        if (f->where == m)
            return true;
    return false;
}

static bool deliver(bool nothing_else_moves)
{
    if (n_flights == 0)
        return false;
    unsigned i = below(n_flights);
    struct flight *c = &flights[i];
    uint32_t bytes = 16 * (1 + below(c->left / 16));
    struct mbarrier *m = c->barrier;
    if (bytes == c->left && !nothing_else_moves && !is_awaited(m))
        return false;
    /* the engine moves a piece */
    void *was = act_as(c->block->engine->tsan);
    unpoison(c->to, c->left);
    memcpy(c->to, c->from, bytes);
    if (bytes < c->left)
        poison(c->to + bytes, c->left - bytes);
    release(edge_of(m, m->phase));
    act_as(was);
    c->to += bytes;
    c->from += bytes;
    c->left -= bytes;
    if (c->left == 0) {
        c->block->in_flight--;
        flights[i] = flights[--n_flights];
    }
    something_moved();
    m->bytes -= (int)bytes;
    end_phase_if_complete(m);
    return true;
}

/* cpu: mbarriers that can be used */
static struct mbarrier *known_mbarrier(uint64_t *b, const char *operation)
{
    struct mbarrier *m = (struct mbarrier *)b;
    if ((uintptr_t)b % 8 || !in_shared(self->block, b, 8))
        fail("%s: no mbarrier can be at %p", operation, (void *)b);
    if (m->valid == 0 || m->valid == 3)
        fail("%s: the mbarrier at offset %td was not initialised", operation,
             (char *)b - self->block->shared);
    reads(b, 8); // a race, if nothing orders this after mbarrier_init
    return m;
}

static const char proxy_edge;
static const uint64_t evict_first_policy = 0x12f0000000000000u;
uint64_t evict_first(void) { return evict_first_policy; }
void proxy_fence(void)
{
    cpu_publish();
    release(&proxy_edge);
    mbarrier_init_fence();
}

void bulk_load(void *shared, const void *global, uint32_t bytes, uint64_t *b,
               uint64_t policy)
{
    struct mbarrier *m = (struct mbarrier *)b;
    struct block *block = self->block;
    /* refuse a bulk copy that the hardware does not define */
    if (bytes == 0 || ((uintptr_t)shared | (uintptr_t)global | bytes) & 15)
        fail("bulk_load(%p, %p, %u): not all are multiples of 16", shared, global, bytes);
    if (bytes > MOST_BYTES || !in_shared(block, shared, bytes))
        fail("bulk_load: %u bytes at offset %td leave the block's shared memory of %u",
             bytes, (char *)shared - block->shared, block->grid->shared_bytes);
    if (!allocation_of(global, bytes))
        fail("bulk_load: %u bytes at %p leave their allocation", bytes, global);
    if (policy != evict_first_policy)
        fail("bulk_load: a policy that evict_first did not make");
    known_mbarrier(b, "bulk_load");
    if (m->valid != 2)
        fail("bulk_load: no mbarrier_init_fence since its mbarrier was initialised");
    /* is everything in the source known to the issuer and to the proxy? */
    reads(global, bytes);
    void *was = act_as(block->grid->proxied->tsan);
    acquire(&proxy_edge);
    reads(global, bytes);
    act_as(was);
    memset(shared, 0xff, bytes); // in the issuer's name: its readers must be done
    poison(shared, bytes);
    /* the engine learns what the issuer knows */
    release(&block->issue);
    was = act_as(block->engine->tsan);
    acquire(&block->issue);
    act_as(was);
    /* add the copy to those in flight */
    if (n_flights == room_flights) {
        room_flights = 2 * room_flights + 64;
        struct flight *more = grab(room_flights * sizeof *more);
        for (unsigned i = 0; i < n_flights; i++)
            more[i] = flights[i];
        drop(flights);
        flights = more;
    }
    flights[n_flights++] = (struct flight){shared, global, bytes, m, block};
    block->in_flight++;
    maybe_pause();
}

/* cpu: what a thread can do */
char *shared_memory(void) { return self->block->shared; }
uint64_t device_ns(void) { return switches * 100; }
void cpu_misaligned(const void *p) { fail("16 bytes at %p, no multiple of 16", p); }
void cpu_read_only(const void *p, size_t bytes)
{
    void *was = act_as(self->block->grid->constant->tsan);
    reads(p, bytes);
    act_as(was);
}

/* cpu: counters and fences */
void cpu_wrote(const uint32_t *p)
{
    wake(p);
    maybe_pause();
}
void cpu_read(const uint32_t *p)
{
    self->loads[self->n_loads++ % 8] = p;
    maybe_pause();
}
void cpu_wait_at_least(const uint32_t *p, uint32_t v) { sleep_on(p, FOR_WORD, v); }

void fence_gpu(void)
{
    cpu_publish();
    for (unsigned i = 0; i < 8 && i < self->n_loads; i++)
        acquire(self->loads[i]);
    self->n_loads = 0;
    self->place.fenced = 1;
    maybe_pause();
}

/* cpu: full-warp operations */
static struct warp *gather(const char *operation, unsigned detail)
{
    struct warp *w = self->warp;
    if (w->arrived == 0) {
        w->operation = operation;
        w->detail = detail;
    }
    if (w->operation != operation || w->detail != detail)
        fail("calls %s (%u) while %u lanes of its warp are in %s (%u)", operation,
             detail, w->arrived, w->operation, w->detail);
    w->arrived++;
    return w;
}

static void complete(struct warp *w)
{
    w->arrived = 0;
    w->generation++;
    wake(w);
}

static void together(const char *operation, void (*act)(struct warp *))
{
    struct warp *w = gather(operation, 0);
    unsigned generation = w->generation;
    if (w->lanes != WARP)
        fail("%s in a warp of %u threads", operation, w->lanes);
    if (w->arrived == WARP) {
        act(w);
        complete(w);
    }
    while (w->generation == generation)
        sleep_on(w, FOR_WARP, generation);
}
static unsigned lane(void) { return self->place.thread.x % WARP; }

static void exchange(struct warp *w)
{
    for (unsigned i = 0; i < WARP; i++)
        w->out[i].u = w->in[w->in[i].a[1] % WARP].a[0];
}

static uint32_t shuffle(const char *operation, uint32_t x, unsigned from)
{
    struct operand *in = &self->warp->in[lane()];
    in->a[0] = x;
    in->a[1] = from;
    together(operation, exchange);
    return self->warp->out[lane()].u;
}

uint32_t shfl_xor_u32(uint32_t x, int mask)
{
    return shuffle("shfl_xor", x, lane() ^ (unsigned)mask);
}
float shfl_xor_f32(float x, int mask)
{
    return bits_f32(shfl_xor_u32(f32_bits(x), mask));
}
uint32_t shfl_u32(uint32_t x, int from) { return shuffle("shfl", x, (unsigned)from); }
float shfl_f32(float x, int from) { return bits_f32(shfl_u32(f32_bits(x), from)); }

static void count_votes(struct warp *w)
{
    uint32_t votes = 0;
    for (unsigned i = 0; i < WARP; i++)
        votes |= w->in[i].a[0] << i;
    for (unsigned i = 0; i < WARP; i++)
        w->out[i].u = votes;
}

uint32_t ballot(int predicate)
{
    self->warp->in[lane()].a[0] = predicate != 0;
    together("ballot", count_votes);
    return self->warp->out[lane()].u;
}

static void all_release(struct warp *w, const void *edge)
{
    struct fiber **lanes = self->block->fibers + self->place.thread.x / WARP * WARP;
    for (unsigned i = 0; i < w->lanes; i++)
        release_as(lanes[i]->tsan, edge);
}
static void meet(struct warp *w) { all_release(w, &w->edge); }
void cpu_syncwarp(void)
{
    cpu_show();
    together("__syncwarp", meet);
    acquire(&self->warp->edge);
}

static float half_of(uint32_t pair, unsigned upper)
{
    return bits_f32(upper ? pair & 0xffff0000u : pair << 16);
}
static void multiply(struct warp *w)
{
    float a[16][16], b[16][8];
    /* unpack the fragments of a and b */
    for (unsigned i = 0; i < WARP; i++)
        for (unsigned j = 0; j < 8; j++) {
            unsigned g = i / 4, k = i % 4 * 2 + j % 2 + j / 4 * 8;
            a[g + j / 2 % 2 * 8][k] = half_of(w->in[i].a[j / 2], j % 2);
            if (j / 2 % 2 == 0)
                b[k][g] = half_of(w->in[i].b[j / 4], j % 2);
        }
    for (unsigned i = 0; i < WARP; i++)
        for (unsigned j = 0; j < 4; j++) {
            unsigned row = i / 4 + j / 2 * 8, column = i % 4 * 2 + j % 2;
            float sum = w->in[i].c[j];
            for (unsigned k = 0; k < 16; k++)
                sum += a[row][k] * b[k][column];
            w->out[i].f[j] = sum;
        }
}

void cpu_mma(float c[4], const uint32_t a[4], const uint32_t b[2])
{
    struct operand *in = &self->warp->in[lane()];
    memcpy(in->a, a, sizeof in->a);
    memcpy(in->b, b, sizeof in->b);
    memcpy(in->c, c, sizeof in->c);
    together("mma_bf16", multiply);
    memcpy(c, self->warp->out[lane()].f, sizeof in->c);
}

/* cpu: registers of a warp */
static void change_registers(struct warp *w, unsigned n, bool grow)
{
    struct block *b = self->block;
    unsigned difference = (grow ? n - w->registers : w->registers - n) * WARP;
    while (grow && b->registers < difference)
        sleep_on(&b->registers, FOR_REGISTERS, difference);
    b->registers += grow ? -difference : difference;
    w->registers = n;
    w->changes = w->changes * 1031 + 2 * n + grow;
    wake(&b->registers);
}

void cpu_registers(unsigned n, int grow)
{
    const char *operation = grow ? "GROW_REGISTERS" : "SHRINK_REGISTERS";
    struct warp *w = gather(operation, n);
    unsigned generation = w->generation;
    if (n % 8 || n < 24 || n > 256)
        fail("%s: %u is no multiple of 8 from 24 to 256", operation, n);
    if (grow ? n < w->registers : n > w->registers)
        fail("%s: to %u registers from %u", operation, n, w->registers);
    if ((self->place.thread.x | 127) >= self->place.threads.x)
        fail("%s: in a group of fewer than four warps", operation);
    if (w->arrived == WARP) {
        change_registers(w, n, grow);
        complete(w);
    }
    while (w->generation == generation)
        sleep_on(w, FOR_WARP, generation);
}

/* cpu: barriers of a block */
static void arrive(struct barrier *b, struct warp *w, unsigned id, unsigned warps)
{
    uint32_t bit = 1u << (self->place.thread.x / WARP);
    if (b->arrived == 0)
        b->expected = warps;
    if (b->expected != warps)
        fail("barrier %u: %u threads here, %u elsewhere", id, warps * WARP,
             b->expected * WARP);
    if (b->who & bit)
        fail("barrier %u: the same warp twice", id);
    b->who |= bit;
    w->ticket = b->generation;
    all_release(w, &b->edge[b->generation & 1]);
    if (++b->arrived == b->expected) {
        b->arrived = b->who = 0;
        b->generation++;
        wake(b);
    }
}

static void barrier(const char *operation, unsigned id, unsigned warps, bool waits)
{
    struct barrier *b = &self->block->barriers[id];
    cpu_show();
    struct warp *w = gather(operation, id * 64 + warps);
    unsigned generation = w->generation;
    if (w->arrived == w->lanes) {
        arrive(b, w, id, warps);
        complete(w);
    }
    if (!waits) {
        while (w->generation == generation)
            sleep_on(w, FOR_WARP, generation);
        return;
    }
    while (w->generation == generation || b->generation == w->ticket)
        sleep_on(b, FOR_BARRIER, id);
    acquire(&b->edge[w->ticket & 1]);
}

void cpu_syncthreads(void)
{
    unsigned warps = (self->place.threads.x + WARP - 1) / WARP;
    barrier("__syncthreads", 0, warps, true);
}

static void named_barrier(const char *operation, int id, int threads, bool waits)
{
    unsigned most = (self->place.threads.x + WARP - 1) / WARP * WARP;
    if (id < 0 || id >= BARRIERS)
        fail("%s: no barrier %d", operation, id);
    if (threads <= 0 || threads % WARP || (unsigned)threads > most)
        fail("%s: %d threads in a block of %u", operation, threads, most);
    barrier(operation, (unsigned)id, (unsigned)threads / WARP, waits);
}

void named_barrier_sync(int id, int threads)
{
    named_barrier("named_barrier_sync", id, threads, true);
}
void named_barrier_arrive(int id, int threads)
{
    named_barrier("named_barrier_arrive", id, threads, false);
}

/* cpu: what threads do to mbarriers */
void mbarrier_init(uint64_t *b, uint32_t count)
{
    struct mbarrier *m = (struct mbarrier *)b;
    if ((uintptr_t)b % 8 || !in_shared(self->block, b, 8))
        fail("mbarrier_init: no mbarrier can be at %p", (void *)b);
    if (m->valid == 1 || m->valid == 2)
        fail("mbarrier_init: initialised twice");
    if (count == 0 || count > MOST_BYTES)
        fail("mbarrier_init: a count of %u", count);
    writes(b, 8);
    *m = (struct mbarrier){.pending = count, .count = count, .valid = 1};
    self->inits[self->n_inits++ % 64] = b;
}

void mbarrier_init_fence(void)
{
    for (unsigned i = 0; i < self->n_inits && i < 64; i++)
        ((struct mbarrier *)self->inits[i])->valid = 2;
    self->n_inits = 0;
    maybe_pause();
}

static void arrive_at(uint64_t *b, uint32_t bytes, const char *operation)
{
    struct mbarrier *m = known_mbarrier(b, operation);
    if (m->pending == 0)
        fail("%s: more arrivals than the %u of a phase", operation, (unsigned)m->count);
    if (m->bytes + (int64_t)bytes > MOST_BYTES)
        fail("%s: more than %d bytes in a phase", operation, MOST_BYTES);
    cpu_show();
    release(edge_of(m, m->phase));
    m->bytes += (int)bytes;
    m->pending--;
    end_phase_if_complete(m);
    maybe_pause();
}

void mbarrier_arrive(uint64_t *b) { arrive_at(b, 0, "mbarrier_arrive"); }
void mbarrier_expect(uint64_t *b, uint32_t bytes)
{
    if (bytes % 16)
        fail("mbarrier_expect: %u bytes are not what bulk copies bring", bytes);
    arrive_at(b, bytes, "mbarrier_expect");
}

void mbarrier_wait(uint64_t *b, uint32_t parity)
{
    struct mbarrier *m = known_mbarrier(b, "mbarrier_wait");
    if (parity > 1)
        fail("mbarrier_wait: a parity of %u", parity);
    while (m->phase == parity)
        sleep_on(m, FOR_MBARRIER, parity);
    acquire(edge_of(m, parity));
}

/* cpu: dependent launch, seen from a kernel */
void launch_dependents(void)
{
    struct block *b = self->block;
    b->grid->triggered += !b->triggered;
    b->triggered = true;
    maybe_pause();
}

void wait_for_prerequisites(void)
{
    struct grid *g = self->block->grid;
    while (g->early)
        sleep_on(g, FOR_GRID, 0);
    if (!g->dependent)
        return;
    acquire(&g->prerequisite);
    void *was = act_as(g->proxied->tsan);
    acquire(&g->prerequisite);
    act_as(g->constant->tsan);
    acquire(&g->prerequisite);
    act_as(was);
}

/* cpu: the life of a block */
static unsigned whole_warps(unsigned threads) { return (threads + WARP - 1) & ~31u; }
static unsigned room_on(unsigned sm, const struct grid *g) // blocks
{
    unsigned threads = (SM_THREADS - sms[sm].threads) / whole_warps(g->threads);
    unsigned shared = (SM_SHARED - sms[sm].shared) / (g->shared_bytes + BLOCK_RESERVED);
    unsigned blocks = SM_BLOCKS - sms[sm].blocks;
    blocks = blocks < threads ? blocks : threads;
    return blocks < shared ? blocks : shared;
}

static void occupy(unsigned sm, const struct grid *g)
{
    sms[sm].threads += whole_warps(g->threads);
    sms[sm].shared += g->shared_bytes + BLOCK_RESERVED;
    sms[sm].blocks++;
}
static void vacate(unsigned sm, const struct grid *g)
{
    sms[sm].threads -= whole_warps(g->threads);
    sms[sm].shared -= g->shared_bytes + BLOCK_RESERVED;
    sms[sm].blocks--;
}

static void deal_registers(struct block *b, unsigned warps)
{
    unsigned each = REGISTERS / b->grid->threads & ~7u;
    each = each < MOST_REGISTERS ? each : MOST_REGISTERS;
    while (warps * WARP * each > REGISTERS) // the last warp may not be whole
        each -= 8;
    b->registers = REGISTERS - warps * WARP * each;
    for (unsigned i = 0; i < warps; i++)
        b->warps[i].registers = each;
}
static void compare_registers(const struct block *b)
{
    const struct warp *w = b->warps;
    for (unsigned i = 0; i < whole_warps(b->grid->threads) / WARP; i++)
        if (w[i].changes != w[i & ~3u].changes)
            fail("warps %u and %u are of one group, and changed their registers "
                 "differently", i & ~3u, i);
}

static void start_block(struct grid *g, unsigned sm)
{
    unsigned warps = whole_warps(g->threads) / WARP;
    struct block *b = grab(sizeof *b + 2 * g->threads * sizeof b->ready[0] +
                           warps * sizeof b->warps[0]);
    b->grid = g;
    b->index = g->order[g->started++];
    b->sm = sm;
    b->alive = g->threads;
    b->warps = (struct warp *)(b + 1);
    b->fibers = (struct fiber **)(b->warps + warps);
    b->ready = b->fibers + g->threads;
    occupy(sm, g);
    deal_registers(b, warps);
    /* make the block's shared memory, in the engine's name */
    b->engine = take_fiber(g->pool);
    void *was = act_as(b->engine->tsan), *shared;
    acquire(&g->start);
    if (posix_memalign(&shared, 1024, g->shared_bytes))
        fail("no memory for a block's %u bytes", g->shared_bytes);
    memset(shared, 0xff, g->shared_bytes);
    b->shared = shared;
    release(&b->start);
    act_as(was);
    for (unsigned t = 0; t < g->threads; t++)
        /* start thread t of the block */
        {
            struct fiber *f = b->fibers[t] = take_fiber(g->pool);
            f->block = b;
            f->warp = &b->warps[t / WARP];
            f->warp->lanes++;
            f->n_loads = f->n_inits = 0;
            f->place = (struct cpu_place){
                {t, 0, 0}, {b->index, 0, 0}, {g->threads, 1, 1}, {g->blocks, 1, 1}, 0};
            make_ready(f);
        }
}

static void end_grid(struct grid *g)
{
    struct CUstream_st *s = g->stream;
    release_as(g->proxied->tsan, &g->end);
    release_as(g->constant->tsan, &g->end);
    void *was = act_as(s->tsan);
    acquire(&g->end);
    free(g->argument);
    if (s->running[0] == g)
        s->running[0] = s->running[1];
    s->running[1] = NULL;
    if (--s->n_running) { // the next launch has begun early
        struct grid *next = s->running[0];
        next->early = false;
        release(&next->prerequisite);
        wake(next);
    }
    act_as(was);
    give_fiber(g->pool, g->proxied);
    give_fiber(g->pool, g->constant);
    drop(g->order);
    drop(g);
}

static void end_block(struct block *b)
{
    struct grid *g = b->grid;
    if (b->in_flight)
        fail("the block has ended with %u bulk copies in flight", b->in_flight);
    compare_registers(b);
    void *was = act_as(b->engine->tsan);
    acquire(&b->end);
    free(b->shared);
    release(&g->end);
    act_as(was);
    vacate(b->sm, g);
    g->triggered += !b->triggered;
    give_fiber(g->pool, b->engine);
    if (starved == b)
        starved = NULL;
    drop(b);
    if (++g->ended == g->blocks)
        end_grid(g);
}

static void exit_thread(void)
{
    struct block *b = self->block;
    while (self->n_late)
        cpu_yield();
    release(&b->end);
    give_fiber(b->grid->pool, self);
    something_moved();
    if (--b->alive == 0)
        end_block(b);
    pause_thread();
}

/* cpu: streams */
static bool has_room(const struct grid *g) // a cooperative grid starts whole
{
    unsigned room = 0;
    for (unsigned i = 0; i < n_sms; i++)
        room += room_on(i, g);
    return room >= g->blocks;
}

static bool can_begin(const struct CUstream_st *s)
{
    const struct op *op = s->first;
    if (!op || s->n_running == 2)
        return false;
    if (op->kind == LAUNCH && op->grid->cooperative && !has_room(op->grid))
        return false;
    if (s->n_running == 1)
        return op->kind == LAUNCH && op->grid->dependent &&
               s->running[0]->triggered == s->running[0]->blocks;
    return op->kind != WAIT || op->event->completed >= op->nth;
}

static void begin_grid(struct CUstream_st *s, struct op *op)
{
    struct grid *g = op->grid;
    s->turn = g->dependent ? !s->turn : 0;
    g->pool = &s->pools[s->turn];
    g->proxied = take_fiber(g->pool);
    g->constant = take_fiber(g->pool);
    g->early = s->n_running > 0;
    s->running[s->n_running++] = g;
    if (!g->early)
        release(&g->prerequisite);
    if (!g->dependent)
        release(&s->start);
    act_as(g->constant->tsan);
    acquire(op);
    acquire(&s->start);
    release(&g->start);
    act_as(g->proxied->tsan);
    acquire(&g->start);
    act_as(s->tsan);
}

static double now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static void begin(struct CUstream_st *s)
{
    struct op *op = s->first;
    s->first = op->next;
    void *was = act_as(s->tsan);
    acquire(op);
    switch (op->kind) {
    case COPY: memcpy(op->to, op->from, op->bytes); break;
    case FILL: memset(op->to, op->byte, op->bytes); break;
    case LAUNCH: begin_grid(s, op); break;
    case WAIT: acquire(op->event); break;
    case RECORD:
        op->event->completed = op->nth;
        op->event->when = now();
        release(op->event);
    }
    act_as(was);
    drop(op);
}

#ifdef TSAN
static bool is_crowded(const struct grid *g)
{
    unsigned resident = 0;
    for (unsigned i = 0; i < n_sms; i++)
        resident += sms[i].threads;
    return g->blocks > n_sms && !g->cooperative && resident > 0 &&
           resident + whole_warps(g->threads) > SM_THREADS;
}
#else
#define is_crowded(g) false
#endif

static void start_blocks(struct grid *g)
{
    unsigned first = below(n_sms);
    for (unsigned i = 0; i < n_sms && g->started < g->blocks; i++) {
        unsigned sm = (first + i) % n_sms;
        while (room_on(sm, g) && g->started < g->blocks && !is_crowded(g)) {
            start_block(g, sm);
            if (!g->cooperative && one_in(2))
                break;
        }
    }
}

static bool look_after_streams(bool eager)
{
    uint64_t before = n_begun;
    unsigned first = below(n_streams);
    for (unsigned i = 0; i < n_streams; i++) {
        struct CUstream_st *s = &streams[(first + i) % n_streams];
        while (can_begin(s) && (eager || one_in(2))) {
            begin(s);
            n_begun++;
            eager = false;
        }
        for (unsigned j = 0; j < s->n_running; j++)
            start_blocks(s->running[j]);
    }
    next_spell();
    return n_begun != before || n_runnable > 0;
}

/* cpu: when nothing can move */
static void describe_counter(const uint32_t *p, uint32_t wanted)
{
    const struct allocation *a = allocation_of(p, sizeof *p);
    fprintf(stderr, "wait_at_least: a counter to reach %u, it is %u", wanted, *p);
    if (a)
        fprintf(stderr, " (byte %td of an allocation of %zu)",
                (const char *)p - a->first, a->bytes);
}
static void describe_value(const uint32_t *p)
{
    const struct allocation *a = allocation_of(p, sizeof *p);
    fprintf(stderr, "retry_values: a value with its proof, it is 0x%08x", *p);
    if (a)
        fprintf(stderr, " (byte %td of an allocation of %zu)",
                (const char *)p - a->first, a->bytes);
}

static void describe(const struct fiber *f)
{
    const struct mbarrier *m = f->where;
    const struct barrier *b = f->where;
    const struct warp *w = f->where;
    long offset = (long)((const char *)f->where - f->block->shared);
    switch (f->kind) {
    case FOR_WORD:
        describe_counter(f->where, f->wanted);
        break;
    case FOR_VALUE:
        describe_value(f->where);
        break;
    case FOR_MBARRIER:
        fprintf(stderr, "mbarrier_wait: shared memory + %ld, the phase of parity %u; "
                "%u of %u arrivals and %d bytes are missing", offset, f->wanted,
                (unsigned)m->pending, (unsigned)m->count, (int)m->bytes);
        break;
    case FOR_BARRIER:
        /* describe waiting at a barrier, or for the warp to get there */
        if (f->warp->arrived)
            fprintf(stderr, "%s: %u of %u lanes have come", f->warp->operation,
                    f->warp->arrived, f->warp->lanes);
        else
            fprintf(stderr, "barrier %u: %u of %u warps have come", f->wanted, b->arrived,
                    b->expected);
        break;
    case FOR_WARP:
        fprintf(stderr, "%s: %u of %u lanes have come", w->operation, w->arrived,
                w->lanes);
        break;
    case FOR_REGISTERS:
        fprintf(stderr, "GROW_REGISTERS: a warp wants %u more, the pool has %u",
                f->wanted, f->block->registers);
        break;
    case FOR_GRID:
        fprintf(stderr, "wait_for_prerequisites: the launch before it to end");
    }
}

static int by_place(const void *p, const void *q)
{
    const struct fiber *f = *(struct fiber *const *)p, *g = *(struct fiber *const *)q;
    const struct grid *in = f->block->grid, *other = g->block->grid;
    if (in != other)
        return in->serial < other->serial ? -1 : 1;
    if (f->block != g->block)
        return f->block->index < g->block->index ? -1 : 1;
    return f->place.thread.x < g->place.thread.x ? -1 : 1;
}
static bool alike(const struct fiber *f, const struct fiber *g)
{
    if (f->block != g->block || f->kind != g->kind)
        return false;
    if (f->kind == FOR_VALUE)
        return f->warp == g->warp;
    return f->where == g->where && f->wanted == g->wanted;
}

static bool asks(const struct fiber *f)
{
    return f->asked && f->asked_at == n_moves;
}
static unsigned add_retriers(struct fiber **list, unsigned n)
{
    for (unsigned i = 0; i < n_runnable; i++)
        for (unsigned j = 0; j < runnable[i]->n_ready; j++)
            if (asks(runnable[i]->ready[j]))
                list[n++] = runnable[i]->ready[j];
    return n;
}
static void say_what_is_asked_for(struct fiber **list, unsigned n, unsigned awake)
{
    for (unsigned i = 0; i < n; i++)
        if (i < awake || (list[i]->kind == FOR_WARP && asks(list[i]))) {
            list[i]->kind = FOR_VALUE, list[i]->wanted = 0;
            list[i]->where = list[i]->asked;
        }
}

static unsigned sorted_sleepers(struct fiber **list)
{
    unsigned awake = add_retriers(list, 0), n = awake;
    for (unsigned i = 0; i < BEDS; i++)
        for (struct fiber *f = beds[i].first; f; f = f->next)
            list[n++] = f;
    say_what_is_asked_for(list, n, awake);
    qsort(list, n, sizeof *list, by_place);
    return n;
}

static unsigned list_sleepers(void)
{
    struct fiber **list = grab((n_fibers + 1) * sizeof *list);
    unsigned n = sorted_sleepers(list), lines = 0;
    for (unsigned i = 0; i < n && lines < 40; i++) {
        /* say it once for every sleeper that is like number i */
        unsigned many = 0, before = 0, j = i;
        while (j > 0 && list[j - 1]->block == list[i]->block)
            j--;
        for (; j < n && list[j]->block == list[i]->block; j++)
            if (alike(list[i], list[j])) {
                many++;
                before += j < i;
            }
        if (before)
            continue;
        fprintf(stderr, "  %s, block %u, thread %u", list[i]->block->grid->kernel->name,
                list[i]->place.block.x, list[i]->place.thread.x);
        if (many > 1)
            fprintf(stderr, " and %u others", many - 1);
        fputs(": ", stderr);
        describe(list[i]);
        fputc('\n', stderr);
        lines++;
    }
    drop(list);
    return n;
}

static void deadlock(const char *what)
{
    act_as(host.tsan);
    fflush(stdout);
    fprintf(stderr, "cpu target: seed %llu: %s\n", (unsigned long long)seed, what);
    unsigned asleep = list_sleepers();
    for (unsigned i = 0; i < n_streams; i++) {
        const struct CUstream_st *s = &streams[i];
        for (unsigned j = 0; j < s->n_running; j++)
            if (s->running[j]->started < s->running[j]->blocks)
                fprintf(stderr, "  %s: %u blocks found no room\n",
                        s->running[j]->kernel->name,
                        s->running[j]->blocks - s->running[j]->started);
        if (s->first && s->first->kind == WAIT && s->n_running == 0)
            fprintf(stderr, "  stream %u waits for an event\n", i);
    }
    fprintf(stderr, "  %u threads wait, %u bulk copies in flight\n", asleep,
            n_flights);
    _exit(3);
}

static bool look_again(void)
{
    for (unsigned i = 0; i < BEDS; i++)
        for (struct fiber *f = beds[i].first; f; f = f->next)
            if (f->kind == FOR_WORD &&
                (int32_t)(*(const uint32_t *)f->where - f->wanted) >= 0) {
                wake(f->where);
                return true;
            }
    return false;
}

static void no_progress(void)
{
    deadlock(in_vain ? "deadlock: values that are asked for never come"
                                   : "no progress: somebody spins by hand");
}

static void watch(int signal)
{
    static uint64_t before;
    (void)signal;
    if (self != &host && before == switches)
        fail("spins without giving up the processor");
    before = switches;
}

/* cpu: running until something is done */
static void run_until(bool (*done)(const void *), const void *what)
{
    while (!done(what)) {
        bool moved = look_after_streams(n_runnable == 0);
        struct fiber *next = pick();
        if (next)
            switch_to(next);
        else if (!moved && !deliver(true) && !land_some(true) && !look_again())
            deadlock("deadlock");
        if (steps > MOST_STEPS)
            no_progress();
    }
}

static bool is_idle(const void *stream)
{
    const struct CUstream_st *s = stream;
    return !s->first && s->n_running == 0;
}
static bool all_idle(const void *unused)
{
    (void)unused;
    for (unsigned i = 0; i < n_streams; i++)
        if (!is_idle(&streams[i]))
            return false;
    return true;
}

/* cpu: the runtime's calls */
static cudaError_t result(cudaError_t e)
{
    if (e != cudaSuccess)
        last_error = e;
    return e;
}

/* runtime calls: a call that fails */
static unsigned calls_until_failure; // 0: none will fail
void cpu_fail_call(unsigned n) { calls_until_failure = n; }
static bool fails(void)
{
    if (!calls_until_failure || --calls_until_failure)
        return false;
    last_error = cudaErrorMemoryAllocation;
    return true;
}

/* runtime calls: starting up */
static uint64_t from_environment(const char *name, uint64_t otherwise)
{
    const char *text = getenv(name);
    return text && *text ? strtoull(text, NULL, 0) : otherwise;
}
static void open_stream(struct CUstream_st *s)
{
    if (!s->tsan)
        s->tsan = new_identity("a stream");
    s->used = true;
}

__attribute__((constructor(101))) static void start_up(void)
{
#ifdef TSAN
    host.tsan = acting = __tsan_get_current_fiber();
    nobody = __tsan_create_fiber(0);
#endif
    seed = from_environment("CPU_SEED", 1);
    chance_state = (seed + 1) * 0x9e3779b97f4a7c15u;
    if (chance_state == 0)
        chance_state = 1;
    n_sms = (unsigned)from_environment("CPU_SMS", 3);
    if (n_sms == 0 || n_sms > MOST_SMS)
        fail("CPU_SMS must be 1 to %d", MOST_SMS);
    open_stream(&streams[0]);
    /* watch for threads that never give up the processor */
    struct itimerval period = {{2, 0}, {2, 0}};
    signal(SIGVTALRM, watch);
    setitimer(ITIMER_VIRTUAL, &period, NULL);
}

void cpu_register(const void *function, void (*call)(const void *), size_t bytes,
                  const char *name)
{
    if (n_kernels == MOST_KERNELS)
        fail("more than %d kernels", MOST_KERNELS);
    kernels[n_kernels++] = (struct kernel){function, call, name, bytes, PLAIN_SHARED};
}

static struct kernel *kernel_of(const void *function)
{
    for (unsigned i = 0; i < n_kernels; i++)
        if (kernels[i].function == function)
            return &kernels[i];
    return NULL;
}

/* runtime calls: errors and the device */
cudaError_t cudaPeekAtLastError(void) { return last_error; }
cudaError_t cudaGetLastError(void)
{
    cudaError_t e = last_error;
    last_error = cudaSuccess;
    return e;
}
static const struct { cudaError_t number; const char *name, *text; } errors[] = {
    {cudaSuccess, "cudaSuccess", "no error"},
    {cudaErrorInvalidValue, "cudaErrorInvalidValue", "invalid argument"},
    {cudaErrorMemoryAllocation, "cudaErrorMemoryAllocation", "out of memory"},
    {cudaErrorInvalidConfiguration, "cudaErrorInvalidConfiguration",
     "invalid configuration argument"},
    {cudaErrorInvalidDeviceFunction, "cudaErrorInvalidDeviceFunction",
     "invalid device function"},
    {cudaErrorNoDevice, "cudaErrorNoDevice", "no CUDA-capable device is detected"},
    {cudaErrorInvalidDevice, "cudaErrorInvalidDevice", "invalid device ordinal"},
    /* the other errors */
    {cudaErrorInvalidResourceHandle, "cudaErrorInvalidResourceHandle",
     "invalid resource handle"},
    {cudaErrorNotReady, "cudaErrorNotReady", "device not ready"},
    {cudaErrorLaunchFailure, "cudaErrorLaunchFailure", "unspecified launch failure"},
    {cudaErrorCooperativeLaunchTooLarge, "cudaErrorCooperativeLaunchTooLarge",
     "too many blocks in cooperative launch"},
    {cudaErrorNotSupported, "cudaErrorNotSupported", "operation not supported"},
};

enum { N_ERRORS = sizeof errors / sizeof errors[0] };
const char *cudaGetErrorName(cudaError_t e)
{
    for (unsigned i = 0; i < N_ERRORS; i++)
        if (errors[i].number == e)
            return errors[i].name;
    return "unrecognized error code";
}

const char *cudaGetErrorString(cudaError_t e)
{
    for (unsigned i = 0; i < N_ERRORS; i++)
        if (errors[i].number == e)
            return errors[i].text;
    return "unrecognized error code";
}

cudaError_t cudaGetDevice(int *device)
{
    if (fails())
        return last_error;
    *device = 0;
    return cudaSuccess;
}
cudaError_t cudaSetDevice(int device)
{
    return result(device == 0 ? cudaSuccess : cudaErrorInvalidDevice);
}

cudaError_t cudaGetDeviceCount(int *count)
{
    *count = 1;
    return cudaSuccess;
}

cudaError_t cudaRuntimeGetVersion(int *version)
{
    *version = 13000;
    return cudaSuccess;
}
cudaError_t cudaDriverGetVersion(int *v) { return cudaRuntimeGetVersion(v); }

cudaError_t cudaDeviceGetAttribute(int *value, enum cudaDeviceAttr which, int device)
{
    if (fails())
        return last_error;
    if (device != 0)
        return result(cudaErrorInvalidDevice);
    switch (which) {
    case cudaDevAttrMaxThreadsPerBlock: *value = 1024; break;
    case cudaDevAttrMaxSharedMemoryPerBlock: *value = PLAIN_SHARED; break;
    case cudaDevAttrWarpSize: *value = WARP; break;
    case cudaDevAttrMultiProcessorCount: *value = (int)n_sms; break;
    case cudaDevAttrL2CacheSize: *value = 1 << 20; break;
    case cudaDevAttrMaxThreadsPerMultiProcessor: *value = SM_THREADS; break;
    case cudaDevAttrComputeCapabilityMajor: *value = 9; break;
    case cudaDevAttrComputeCapabilityMinor: *value = 0; break;
    case cudaDevAttrMaxSharedMemoryPerMultiprocessor: *value = SM_SHARED; break;
    case cudaDevAttrCooperativeLaunch: *value = 1; break;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin: *value = BLOCK_SHARED; break;
    default: return result(cudaErrorInvalidValue);
    }
    return cudaSuccess;
}

cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *p, int device)
{
    if (device != 0)
        return result(cudaErrorInvalidDevice);
    *p = (struct cudaDeviceProp){
        .name = "CPU target", .totalGlobalMem = device_memory,
        .sharedMemPerBlock = PLAIN_SHARED, .sharedMemPerBlockOptin = BLOCK_SHARED,
        .sharedMemPerMultiprocessor = SM_SHARED, .major = 9, .minor = 0,
        .multiProcessorCount = (int)n_sms, .l2CacheSize = 1 << 20, .warpSize = WARP,
        .maxThreadsPerBlock = 1024, .maxThreadsPerMultiProcessor = SM_THREADS};
    return cudaSuccess;
}

/* runtime calls: streams */
static struct CUstream_st *stream_of(cudaStream_t s)
{
    if (!s)
        return &streams[0];
    return s >= streams && s < streams + n_streams && s->used ? s : NULL;
}

static void enqueue(struct CUstream_st *s, struct op what)
{
    struct op *op = grab(sizeof *op);
    *op = what;
    release(op);
    if (s->first)
        s->last->next = op;
    else
        s->first = op;
    s->last = op;
}

static void synchronize(struct CUstream_st *s)
{
    run_until(is_idle, s);
    release_as(s->tsan, &s->edge);
    acquire(&s->edge);
}

cudaError_t cudaStreamCreateWithFlags(cudaStream_t *stream, unsigned flags)
{
    unsigned i = 1;
    while (i < n_streams && streams[i].used)
        i++;
    if (flags > cudaStreamNonBlocking || i == MOST_STREAMS)
        return result(cudaErrorInvalidValue);
    if (i == n_streams)
        n_streams++;
    open_stream(&streams[i]);
    *stream = &streams[i];
    return cudaSuccess;
}

cudaError_t cudaStreamCreate(cudaStream_t *stream)
{
    return cudaStreamCreateWithFlags(stream, cudaStreamDefault);
}
cudaError_t cudaStreamDestroy(cudaStream_t stream)
{
    struct CUstream_st *s = stream_of(stream);
    if (!stream || !s)
        return result(cudaErrorInvalidResourceHandle);
    synchronize(s);
    s->used = false;
    return cudaSuccess;
}

cudaError_t cudaStreamSynchronize(cudaStream_t stream)
{
    struct CUstream_st *s = stream_of(stream);
    if (!s)
        return result(cudaErrorInvalidResourceHandle);
    synchronize(s);
    return cudaSuccess;
}

static void finish_all(void)
{
    run_until(all_idle, NULL);
    for (unsigned i = 0; i < n_streams; i++)
        synchronize(&streams[i]);
}
cudaError_t cudaDeviceSynchronize(void)
{
    finish_all();
    return fails() ? last_error : cudaSuccess;
}

cudaError_t cudaStreamQuery(cudaStream_t stream)
{
    struct CUstream_st *s = stream_of(stream);
    if (!s)
        return result(cudaErrorInvalidResourceHandle);
    return is_idle(s) ? cudaSuccess : cudaErrorNotReady;
}
cudaError_t cudaStreamIsCapturing(cudaStream_t s, enum cudaStreamCaptureStatus *status)
{
    *status = cudaStreamCaptureStatusNone;
    if (fails())
        return last_error;
    return result(stream_of(s) ? cudaSuccess : cudaErrorInvalidResourceHandle);
}

/* runtime calls: memory */
cudaError_t cudaMalloc(void **p, size_t bytes)
{
    void *memory;
    *p = NULL;
    if (fails())
        return last_error;
    if (bytes == 0)
        return cudaSuccess;
    if (bytes > device_memory - allocated || posix_memalign(&memory, 256, bytes))
        return result(cudaErrorMemoryAllocation);
    memset(memory, 0xff, bytes);
    struct allocation *a = grab(sizeof *a);
    *a = (struct allocation){allocations, memory, bytes};
    allocations = a;
    allocated += bytes;
    *p = memory;
    return cudaSuccess;
}

cudaError_t cudaFree(void *p)
{
    struct allocation **link = &allocations, *a;
    if (!p)
        return cudaSuccess;
    finish_all();
    while (*link && (*link)->first != p)
        link = &(*link)->next;
    if (!*link)
        return result(cudaErrorInvalidValue);
    a = *link;
    *link = a->next;
    allocated -= a->bytes;
    free(a->first);
    drop(a);
    return cudaSuccess;
}

cudaError_t cudaMemGetInfo(size_t *unused, size_t *total)
{
    *total = device_memory;
    *unused = device_memory - allocated;
    return cudaSuccess;
}

cudaError_t cudaPointerGetAttributes(struct cudaPointerAttributes *a, const void *p)
{
    void *address = (void *)p;
    *a = (struct cudaPointerAttributes){cudaMemoryTypeUnregistered, -2, NULL, address};
    if (allocation_of(p, 1))
        *a = (struct cudaPointerAttributes){cudaMemoryTypeDevice, 0, address, NULL};
    return cudaSuccess;
}

static bool kind_fits(const void *to, const void *from, size_t n,
                      enum cudaMemcpyKind kind)
{
    bool to_device = allocation_of(to, n), from_device = allocation_of(from, n);
    switch (kind) {
    case cudaMemcpyHostToHost: return !to_device && !from_device;
    case cudaMemcpyHostToDevice: return to_device && !from_device;
    case cudaMemcpyDeviceToHost: return !to_device && from_device;
    case cudaMemcpyDeviceToDevice: return to_device && from_device;
    case cudaMemcpyDefault: return true;
    }
    return false;
}

cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t n,
                            enum cudaMemcpyKind kind, cudaStream_t stream)
{
    struct CUstream_st *s = stream_of(stream);
    if (fails())
        return last_error;
    if (!s)
        return result(cudaErrorInvalidResourceHandle);
    if (n == 0)
        return cudaSuccess;
    if (!kind_fits(to, from, n, kind))
        return result(cudaErrorInvalidValue);
    enqueue(s, (struct op){.kind = COPY, .to = to, .from = from, .bytes = n});
    return cudaSuccess;
}

cudaError_t cudaMemcpy(void *to, const void *from, size_t n, enum cudaMemcpyKind kind)
{
    cudaError_t e = cudaMemcpyAsync(to, from, n, kind, NULL);
    return e == cudaSuccess ? cudaStreamSynchronize(NULL) : e;
}

cudaError_t cudaMemsetAsync(void *to, int byte, size_t n, cudaStream_t stream)
{
    struct CUstream_st *s = stream_of(stream);
    if (fails())
        return last_error;
    if (!s)
        return result(cudaErrorInvalidResourceHandle);
    if (n == 0)
        return cudaSuccess;
    if (!allocation_of(to, n))
        return result(cudaErrorInvalidValue);
    enqueue(s, (struct op){.kind = FILL, .to = to, .byte = byte, .bytes = n});
    return cudaSuccess;
}

cudaError_t cudaMemset(void *to, int byte, size_t n)
{
    return cudaMemsetAsync(to, byte, n, NULL);
}

/* runtime calls: events */
cudaError_t cudaEventCreateWithFlags(cudaEvent_t *event, unsigned flags)
{
    *event = grab(sizeof **event);
    (*event)->timed = !(flags & cudaEventDisableTiming);
    return cudaSuccess;
}

cudaError_t cudaEventCreate(cudaEvent_t *event)
{
    return cudaEventCreateWithFlags(event, cudaEventDefault);
}
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream)
{
    struct CUstream_st *s = stream_of(stream);
    if (!s || !event)
        return result(cudaErrorInvalidResourceHandle);
    enqueue(s, (struct op){.kind = RECORD, .event = event, .nth = ++event->recorded});
    return cudaSuccess;
}

cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned flags)
{
    struct CUstream_st *s = stream_of(stream);
    if (!s || !event || flags)
        return result(cudaErrorInvalidResourceHandle);
    enqueue(s, (struct op){.kind = WAIT, .event = event, .nth = event->recorded});
    return cudaSuccess;
}

static bool is_complete(const void *event)
{
    const struct CUevent_st *e = event;
    return e->completed >= e->recorded;
}
cudaError_t cudaEventSynchronize(cudaEvent_t event)
{
    run_until(is_complete, event);
    acquire(event);
    return cudaSuccess;
}

cudaError_t cudaEventElapsedTime(float *ms, cudaEvent_t start, cudaEvent_t end)
{
    if (!start->timed || !end->timed || !start->recorded || !end->recorded)
        return result(cudaErrorInvalidResourceHandle);
    if (!is_complete(start) || !is_complete(end))
        return cudaErrorNotReady;
    *ms = (float)(1e3 * (end->when - start->when));
    return cudaSuccess;
}

cudaError_t cudaEventDestroy(cudaEvent_t event)
{
    finish_all(); // a queue may still name it
    drop(event);
    return cudaSuccess;
}

/* runtime calls: launches */
cudaError_t cudaFuncSetAttribute(const void *function, enum cudaFuncAttribute which,
                                 int value)
{
    struct kernel *k = kernel_of(function);
    if (fails())
        return last_error;
    if (!k)
        return result(cudaErrorInvalidDeviceFunction);
    if (which == cudaFuncAttributePreferredSharedMemoryCarveout)
        return cudaSuccess;
    if (value < 0 || value > BLOCK_SHARED)
        return result(cudaErrorInvalidValue);
    k->most_shared = (size_t)value;
    return cudaSuccess;
}

static unsigned occupancy(unsigned threads, size_t shared)
{
    unsigned by_threads = SM_THREADS / whole_warps(threads);
    unsigned by_shared = (unsigned)(SM_SHARED / (shared + BLOCK_RESERVED));
    unsigned blocks = by_threads < SM_BLOCKS ? by_threads : SM_BLOCKS;
    return blocks < by_shared ? blocks : by_shared;
}

cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int *blocks,
                                                          const void *function,
                                                          int threads, size_t shared)
{
    const struct kernel *k = kernel_of(function);
    if (fails())
        return last_error;
    if (!k)
        return result(cudaErrorInvalidDeviceFunction);
    if (threads < 1)
        return result(cudaErrorInvalidValue);
    *blocks = 0;
    if (threads <= 1024 && shared <= k->most_shared)
        *blocks = (int)occupancy((unsigned)threads, shared);
    return cudaSuccess;
}

static cudaError_t check_launch(const cudaLaunchConfig_t *c, const struct kernel *k)
{
    dim3 g = c->gridDim, b = c->blockDim;
    if (!stream_of(c->stream))
        return cudaErrorInvalidResourceHandle;
    if (!k)
        return cudaErrorInvalidDeviceFunction;
    if (g.x == 0 || g.y != 1 || g.z != 1 || b.x == 0 || b.y != 1 || b.z != 1 ||
        b.x > 1024 || g.x > 0x7fffffff)
        return cudaErrorInvalidConfiguration;
    if (c->dynamicSmemBytes > k->most_shared)
        return cudaErrorInvalidValue;
    return cudaSuccess;
}

static struct grid *new_grid(const cudaLaunchConfig_t *c, struct kernel *k)
{
    struct grid *g = grab(sizeof *g);
    g->kernel = k;
    g->stream = stream_of(c->stream);
    g->serial = ++n_launched;
    g->blocks = c->gridDim.x;
    g->threads = c->blockDim.x;
    g->shared_bytes = (unsigned)c->dynamicSmemBytes;
    for (unsigned i = 0; i < c->numAttrs; i++)
        if (c->attrs[i].id == cudaLaunchAttributeCooperative)
            g->cooperative = c->attrs[i].val.cooperative;
        else if (c->attrs[i].id == cudaLaunchAttributeProgrammaticStreamSerialization)
            g->dependent = c->attrs[i].val.programmaticStreamSerializationAllowed;
    g->order = grab(g->blocks * sizeof g->order[0]);
    for (unsigned i = 0; i < g->blocks; i++) {
        unsigned j = below(i + 1);
        g->order[i] = g->order[j];
        g->order[j] = i;
    }
    return g;
}

cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t *c, const void *function,
                                void **arguments)
{
    struct kernel *k = kernel_of(function);
    cudaError_t e = fails() ? last_error : check_launch(c, k);
    if (e != cudaSuccess)
        return result(e);
    struct grid *g = new_grid(c, k);
    if (g->cooperative && g->blocks > n_sms * occupancy(g->threads, g->shared_bytes)) {
        drop(g->order);
        drop(g);
        return result(cudaErrorCooperativeLaunchTooLarge);
    }
    void *was = act_as(g->stream->tsan); // it will free the copy
    g->argument = malloc(k->argument_bytes);
    if (!g->argument)
        fail("out of memory");
    memcpy(g->argument, arguments[0], k->argument_bytes);
    act_as(was);
    enqueue(g->stream, (struct op){.kind = LAUNCH, .grid = g});
    return cudaSuccess;
}

/* runtime calls: graphs */
struct CUgraphNode_st {
    struct kernel *kernel;
    cudaLaunchConfig_t config; // without stream and attributes
    int cooperative;
    void *argument;
};
struct CUgraph_st { struct CUgraphNode_st *node; };
struct CUgraphExec_st { cudaGraphNode_t of; struct CUgraphNode_st node; };

static void copy_argument(struct CUgraphNode_st *n, const void *argument)
{
    void *copy = grab(n->kernel->argument_bytes);
    memcpy(copy, argument, n->kernel->argument_bytes);
    drop(n->argument);
    n->argument = copy;
}
static cudaError_t set_params(struct CUgraphNode_st *n,
                              const struct cudaKernelNodeParams *p)
{
    cudaLaunchConfig_t c = {.gridDim = p->gridDim, .blockDim = p->blockDim,
                            .dynamicSmemBytes = p->sharedMemBytes};
    struct kernel *k = kernel_of(p->func);
    cudaError_t e = check_launch(&c, k);
    if (e != cudaSuccess || p->extra)
        return result(e != cudaSuccess ? e : cudaErrorNotSupported);
    n->kernel = k;
    n->config = c;
    copy_argument(n, p->kernelParams[0]);
    return cudaSuccess;
}

cudaError_t cudaGraphCreate(cudaGraph_t *graph, unsigned flags)
{
    if (fails())
        return last_error;
    if (flags)
        return result(cudaErrorInvalidValue);
    *graph = grab(sizeof **graph);
    return cudaSuccess;
}
cudaError_t cudaGraphAddKernelNode(cudaGraphNode_t *node, cudaGraph_t graph,
                                   const cudaGraphNode_t *behind, size_t n_behind,
                                   const struct cudaKernelNodeParams *p)
{
    (void)behind;
    if (fails())
        return last_error;
    if (n_behind || graph->node)
        return result(cudaErrorNotSupported);
    *node = graph->node = grab(sizeof **node);
    return set_params(*node, p);
}

cudaError_t cudaGraphKernelNodeSetAttribute(cudaGraphNode_t node,
                                            cudaLaunchAttributeID id,
                                            const cudaLaunchAttributeValue *value)
{
    if (fails())
        return last_error;
    if (id != cudaLaunchAttributeCooperative)
        return result(cudaErrorNotSupported);
    node->cooperative = value->cooperative;
    return cudaSuccess;
}
cudaError_t cudaGraphInstantiateWithFlags(cudaGraphExec_t *exec, cudaGraph_t graph,
                                          unsigned long long flags)
{
    if (fails())
        return last_error;
    if (flags || !graph->node)
        return result(cudaErrorNotSupported);
    struct CUgraphExec_st *made = *exec = grab(sizeof *made);
    made->of = graph->node;
    made->node = *graph->node;
    made->node.argument = NULL;
    copy_argument(&made->node, graph->node->argument);
    return cudaSuccess;
}

cudaError_t cudaGraphExecKernelNodeSetParams(cudaGraphExec_t exec, cudaGraphNode_t node,
                                             const struct cudaKernelNodeParams *p)
{
    if (fails())
        return last_error;
    return node == exec->of ? set_params(&exec->node, p)
                            : result(cudaErrorInvalidValue);
}
cudaError_t cudaGraphLaunch(cudaGraphExec_t exec, cudaStream_t stream)
{
    struct CUgraphNode_st *n = &exec->node;
    cudaLaunchAttribute together = {.id = cudaLaunchAttributeCooperative,
                                    .val.cooperative = n->cooperative};
    cudaLaunchConfig_t c = n->config;
    c.stream = stream;
    c.attrs = &together;
    c.numAttrs = 1;
    char copy[n->kernel->argument_bytes];
    for (size_t i = 0; i < sizeof copy; i++)
        copy[i] = ((const volatile char *)n->argument)[i];
    void *argument = copy;
    return cudaLaunchKernelExC(&c, n->kernel->function, &argument);
}

cudaError_t cudaGraphExecDestroy(cudaGraphExec_t exec)
{
    drop(exec->node.argument);
    drop(exec);
    return cudaSuccess;
}
cudaError_t cudaGraphDestroy(cudaGraph_t graph)
{
    if (graph->node)
        drop(graph->node->argument);
    drop(graph->node);
    drop(graph);
    return cudaSuccess;
}
