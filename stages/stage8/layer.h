/* stages/stage8/layer.h: tangled from layer.nw; change it there. */
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
