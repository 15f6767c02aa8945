/* Builds stage 7 at a shape, with addresses that nobody reads, and says how the layer was cut
   or why it was refused.

   usage: geometry D FFN N_Q N_KV HD ROWS [no-block | no-grid | no-up | odd-k]
   no-block: a block does not fit on a multiprocessor; no-grid: the grid is refused at launch;
   no-up: the address of W_up is null; odd-k: that of the keys is no multiple of 16. */
#include <stdio.h>
#include <string.h>
#include <cuda_runtime_api.h>

static size_t allocated;
static const char *without = "";   /* what is missing */
static cudaError_t last;

static cudaError_t counted(void **p, size_t bytes)
{
    allocated += bytes;
    return cudaMalloc(p, bytes);
}

static cudaError_t resident_blocks(int *blocks, const void *f, int threads, size_t shared)
{
    cudaError_t e = cudaOccupancyMaxActiveBlocksPerMultiprocessor(blocks, f, threads, shared);
    if (!strcmp(without, "no-block")) *blocks = 0;
    return e;
}

static cudaError_t launched(const cudaLaunchConfig_t *c, const void *f, void **args)
{
    if (!strcmp(without, "no-grid")) return last = cudaErrorCooperativeLaunchTooLarge;
    return cudaLaunchKernelExC(c, f, args);
}

static cudaError_t peeked(void) { return last ? last : cudaPeekAtLastError(); }

#define cudaMalloc counted
#define cudaOccupancyMaxActiveBlocksPerMultiprocessor resident_blocks
#define cudaLaunchKernelExC launched
#define cudaPeekAtLastError peeked
#define cudaGetLastError peeked
#include "../stages/stage7/layer.c"

int main(int argc, char **argv)
{
    long long n[6];
    if (argc < 7) return 2;
    for (int i = 0; i < 6; i++) n[i] = strtoll(argv[i + 1], NULL, 10);
    if (argc > 7) without = argv[7];
    layer_config c = { .d = n[0], .ffn = n[1], .n_q = n[2], .n_kv = n[3], .hd = n[4],
                       .max_seq_len = n[5], .eps = 1e-5, .theta = 500000 };
    void *p = (void *)4096;
    layer_weights w = { p, p, p, p, p, p, p, p, p };
    if (!strcmp(without, "no-up")) w.up = NULL;
    layer *l;
    int status = layer_build(&l, &c, &w, (char *)p + 2 * !strcmp(without, "odd-k"), p);
    if (status) {
        printf("refused %d %zu %s\n", status, allocated, layer_strerror(status));
        return 0;
    }
    struct geometry *g = &l->args.g;
    long long columns[PHASES] = { n[0], 0, n[2] * n[4], n[0], g->piece };
    printf("built %zu %d %lld %lld %d %d %d", allocated, g->warps, (long long)g->slot_bytes,
           (long long)g->vector_bytes, g->pieces, g->groups, g->max_units);
    for (int i = 0; i < PHASES; i++)
        printf(" %lld", i == ATTEND ? 4 * TILE_KEYS * n[4] : 4 * g->pairs[i] * columns[i]);
    printf(" %lld\n", (long long)l->shared);
    return layer_teardown(l);
}
