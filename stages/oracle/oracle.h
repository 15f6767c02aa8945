/* stages/oracle/oracle.h: tangled from layer.nw; change it there. */
#ifndef ORACLE_H
#define ORACLE_H
#include <stdint.h>

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

/* Pointers are to host memory. k_cache, v_cache: bf16 [n_kv][max_seq_len][hd], row pos
   is written; x: bf16 [d]; x_out: [d]. Returns 0, or 1 when memory runs out. */
int oracle_step(const layer_config *c, const layer_weights *w, uint16_t *k_cache,
                uint16_t *v_cache, const uint16_t *x, int64_t pos, double *x_out);
/* Elements first .. first+n-1 of a generated tensor (see the input generator). */
uint64_t generator_key(uint64_t seed, uint32_t tensor);
void generate(uint16_t *out, int64_t first, int64_t n, uint64_t seed, uint32_t tensor,
              int32_t offset, float scale);
#endif
