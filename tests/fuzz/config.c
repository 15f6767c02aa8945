/* What layer_build is given: any sizes, any pointers. The runtime is a stand-in that has little
   memory. Nothing overflows, what is refused leaves nothing, what is built has a grid and fits. */
#include <stdio.h>
#include <string.h>
#include STAGE

static int allocated, calls, failing;
static cudaError_t answer(void) { return ++calls == failing ? cudaErrorMemoryAllocation : cudaSuccess; }
cudaError_t cudaMalloc(void **p, size_t n)
{
    cudaError_t e = answer();
    *p = NULL;
    if (e || n > 1 << 20) return cudaErrorMemoryAllocation;
    allocated++;
    *p = aligned_alloc(256, (n + 255) / 256 * 256);
    return cudaSuccess;
}
cudaError_t cudaFree(void *p) { allocated -= p != NULL; free(p); return cudaSuccess; }
cudaError_t cudaMemset(void *p, int b, size_t n) { memset(p, b, n); return answer(); }
cudaError_t cudaMemcpy(void *p, const void *q, size_t n, enum cudaMemcpyKind k)
{
    (void)k, memcpy(p, q, n);
    return answer();
}
static cudaError_t made(void **p)   /* a graph: what is made must be destroyed */
{
    cudaError_t e = answer();
    allocated += !e;
    *p = e ? NULL : malloc(1);
    return e;
}
static cudaError_t gone(void *p) { allocated -= p != NULL; free(p); return cudaSuccess; }
cudaError_t cudaGraphCreate(cudaGraph_t *g, unsigned flags) { (void)flags; return made((void **)g); }
cudaError_t cudaGraphAddKernelNode(cudaGraphNode_t *node, cudaGraph_t g, const cudaGraphNode_t *behind,
                                   size_t n, const struct cudaKernelNodeParams *p)
{
    (void)g, (void)behind, (void)n, (void)p;
    *node = NULL;
    return answer();
}
cudaError_t cudaGraphKernelNodeSetAttribute(cudaGraphNode_t node, cudaLaunchAttributeID id,
                                            const cudaLaunchAttributeValue *v)
{
    (void)node, (void)id, (void)v;
    return answer();
}
cudaError_t cudaGraphInstantiateWithFlags(cudaGraphExec_t *exec, cudaGraph_t g, unsigned long long flags)
{
    (void)g, (void)flags;
    return made((void **)exec);
}
cudaError_t cudaGraphExecKernelNodeSetParams(cudaGraphExec_t exec, cudaGraphNode_t node,
                                             const struct cudaKernelNodeParams *p)
{
    (void)exec, (void)node, (void)p;
    return answer();
}
cudaError_t cudaGraphLaunch(cudaGraphExec_t exec, cudaStream_t s) { (void)exec, (void)s; return answer(); }
cudaError_t cudaGraphExecDestroy(cudaGraphExec_t exec) { return gone(exec); }
cudaError_t cudaGraphDestroy(cudaGraph_t g) { return gone(g); }
cudaError_t cudaStreamIsCapturing(cudaStream_t s, enum cudaStreamCaptureStatus *status)
{
    (void)s;
    *status = cudaStreamCaptureStatusNone;
    return answer();
}
cudaError_t cudaGetDevice(int *d) { *d = 0; return answer(); }
cudaError_t cudaSetDevice(int d) { (void)d; return answer(); }
cudaError_t cudaDeviceSynchronize(void) { return answer(); }
cudaError_t cudaGetLastError(void) { return cudaSuccess; }
cudaError_t cudaPeekAtLastError(void) { return cudaSuccess; }
const char *cudaGetErrorString(cudaError_t e) { return e ? "an error" : "none"; }
cudaError_t cudaFuncSetAttribute(const void *f, enum cudaFuncAttribute a, int v)
{
    (void)f, (void)a, (void)v;
    return answer();
}
cudaError_t cudaDeviceGetAttribute(int *v, enum cudaDeviceAttr a, int d)
{
    (void)d;
    *v = a == cudaDevAttrComputeCapabilityMajor ? 9 : a == cudaDevAttrMultiProcessorCount ? 132 : 232448;
    return answer();
}
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int *n, const void *f, int threads, size_t shared)
{
    (void)f;
    *n = threads <= 1024 && shared <= 232448;
    return answer();
}
cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t *c, const void *f, void **a)
{
    (void)f, (void)a;
    if (!c->gridDim.x || c->gridDim.x > 132 || !c->blockDim.x || c->blockDim.x > 1024
        || c->dynamicSmemBytes > 232448) abort();
    return answer();
}
void whole_layer(struct layer_args a) { (void)a; }

/* Sizes as they are, or brought near what is served. */
static int64_t near(int64_t any, int64_t unit, int64_t most)
{
    return any < 0 ? any : any % 7 == 0 ? any : (any % most + 1) * unit;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static char memory[64] __attribute__((aligned(16)));
    struct { int64_t n[6]; double eps, theta; int32_t blocks; int32_t fail; uint8_t off[12]; int64_t pos; } in;
    if (size < sizeof in) return 0;
    memcpy(&in, data, sizeof in);
    layer_config c = { .d = near(in.n[0], 64, 200), .ffn = near(in.n[1], 64, 500), .n_kv = near(in.n[2], 1, 8),
                       .max_seq_len = near(in.n[4], 1, 5000), .eps = in.eps, .theta = in.theta,
                       .max_blocks = in.blocks };
    c.hd = in.n[5] & 1 ? in.n[5] : in.n[5] & 2 ? 64 : 128;
    c.n_q = in.n[3] & 1 ? in.n[3] : c.n_kv > 0 && c.n_kv < 1000 ? c.n_kv * (in.n[3] >> 1 & 15) : in.n[3];
    const void *p[11];
    for (int i = 0; i < 11; i++) p[i] = in.off[i] < 240 ? memory : in.off[i] < 250 ? memory + (in.off[i] - 240) : NULL;
    layer_weights w = { p[0], p[1], p[2], p[3], p[4], p[5], p[6], p[7], p[8] };
    calls = 0, failing = in.fail & 31;
    layer *l = (layer *)memory;
    int status = layer_build(&l, &c, &w, (void *)p[9], (void *)p[10]);
    if (status < 0 || status > LAYER_CUDA_FAILED || !*layer_strerror(status)) abort();
    if (status) {
        if (l || allocated) abort();
        return 0;
    }
    int bad = layer_step(l, memory, in.pos, memory, NULL);
    if (!bad && (in.pos < 0 || in.pos >= c.max_seq_len)) abort();
    failing = 0;
    if (layer_teardown(l) || allocated) abort();
    return 0;
}
