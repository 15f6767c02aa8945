/* stages/cpu/cuda_runtime_api.h: tangled from layer.nw; change it there. */
// cuda_runtime_api.h: what of the CUDA runtime the CPU target stands in for
#ifndef CPU_CUDA_RUNTIME_API_H
#define CPU_CUDA_RUNTIME_API_H
#include <stddef.h>
#define CUDA_CPU_TARGET 1

/* runtime: errors */
typedef enum cudaError {
    cudaSuccess = 0,
    cudaErrorInvalidValue = 1,
    cudaErrorMemoryAllocation = 2,
    cudaErrorInvalidConfiguration = 9,
    cudaErrorInvalidDeviceFunction = 98,
    cudaErrorNoDevice = 100,
    cudaErrorInvalidDevice = 101,
    cudaErrorInvalidResourceHandle = 400,
    cudaErrorNotReady = 600,
    cudaErrorLaunchFailure = 719,
    cudaErrorCooperativeLaunchTooLarge = 720,
    cudaErrorNotSupported = 801
} cudaError_t;
cudaError_t cudaGetLastError(void);
cudaError_t cudaPeekAtLastError(void);
const char *cudaGetErrorName(cudaError_t);

const char *cudaGetErrorString(cudaError_t);

/* runtime: the device and its attributes */
struct cudaDeviceProp {
    char name[256];
    size_t totalGlobalMem, sharedMemPerBlock, sharedMemPerBlockOptin;
    size_t sharedMemPerMultiprocessor;
    int major, minor, multiProcessorCount, l2CacheSize, warpSize;
    int maxThreadsPerBlock, maxThreadsPerMultiProcessor;
};

/* runtime: attributes by number */
enum cudaDeviceAttr {
    cudaDevAttrMaxThreadsPerBlock = 1,
    cudaDevAttrMaxSharedMemoryPerBlock = 8,
    cudaDevAttrWarpSize = 10,
    cudaDevAttrMultiProcessorCount = 16,
    cudaDevAttrL2CacheSize = 38,
    cudaDevAttrMaxThreadsPerMultiProcessor = 39,
    cudaDevAttrComputeCapabilityMajor = 75,
    cudaDevAttrComputeCapabilityMinor = 76,
    cudaDevAttrMaxSharedMemoryPerMultiprocessor = 81,
    cudaDevAttrCooperativeLaunch = 95,
    cudaDevAttrMaxSharedMemoryPerBlockOptin = 97
};

cudaError_t cudaGetDevice(int *device);
cudaError_t cudaSetDevice(int device);

cudaError_t cudaGetDeviceCount(int *count);
cudaError_t cudaDeviceGetAttribute(int *value, enum cudaDeviceAttr, int device);
cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *, int device);
cudaError_t cudaDeviceSynchronize(void);
cudaError_t cudaRuntimeGetVersion(int *version);
cudaError_t cudaDriverGetVersion(int *version);

/* runtime: memory */
typedef struct CUstream_st *cudaStream_t;
enum cudaMemcpyKind {
    cudaMemcpyHostToHost, cudaMemcpyHostToDevice, cudaMemcpyDeviceToHost,
    cudaMemcpyDeviceToDevice, cudaMemcpyDefault
};

enum cudaMemoryType {
    cudaMemoryTypeUnregistered, cudaMemoryTypeHost, cudaMemoryTypeDevice,
    cudaMemoryTypeManaged
};
struct cudaPointerAttributes {
    enum cudaMemoryType type;
    int device;
    void *devicePointer, *hostPointer;
};
cudaError_t cudaMalloc(void **, size_t bytes);
cudaError_t cudaFree(void *);

/* runtime: copies and fills */
cudaError_t cudaMemcpy(void *to, const void *from, size_t, enum cudaMemcpyKind);
cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t, enum cudaMemcpyKind,
                            cudaStream_t);
cudaError_t cudaMemset(void *, int byte, size_t);
cudaError_t cudaMemsetAsync(void *, int byte, size_t, cudaStream_t);
cudaError_t cudaMemGetInfo(size_t *free, size_t *total);
cudaError_t cudaPointerGetAttributes(struct cudaPointerAttributes *, const void *);

/* runtime: streams and events */
typedef struct CUevent_st *cudaEvent_t;
enum { cudaStreamDefault = 0, cudaStreamNonBlocking = 1 };
enum { cudaEventDefault = 0, cudaEventBlockingSync = 1, cudaEventDisableTiming = 2 };
enum cudaStreamCaptureStatus { cudaStreamCaptureStatusNone };
cudaError_t cudaStreamCreate(cudaStream_t *);
cudaError_t cudaStreamCreateWithFlags(cudaStream_t *, unsigned flags);

cudaError_t cudaStreamDestroy(cudaStream_t);
cudaError_t cudaStreamSynchronize(cudaStream_t);
cudaError_t cudaStreamQuery(cudaStream_t);
cudaError_t cudaStreamWaitEvent(cudaStream_t, cudaEvent_t, unsigned flags);
cudaError_t cudaStreamIsCapturing(cudaStream_t, enum cudaStreamCaptureStatus *);
cudaError_t cudaEventCreate(cudaEvent_t *);
cudaError_t cudaEventCreateWithFlags(cudaEvent_t *, unsigned flags);

cudaError_t cudaEventRecord(cudaEvent_t, cudaStream_t);
cudaError_t cudaEventSynchronize(cudaEvent_t);
cudaError_t cudaEventElapsedTime(float *ms, cudaEvent_t start, cudaEvent_t end);
cudaError_t cudaEventDestroy(cudaEvent_t);

/* runtime: launches */
typedef struct dim3 { unsigned x, y, z; } dim3;
typedef enum cudaLaunchAttributeID {
    cudaLaunchAttributeCooperative = 2,
    cudaLaunchAttributeProgrammaticStreamSerialization = 6
} cudaLaunchAttributeID;
typedef union cudaLaunchAttributeValue {
    int cooperative;
    int programmaticStreamSerializationAllowed;
} cudaLaunchAttributeValue;
typedef struct cudaLaunchAttribute {
    cudaLaunchAttributeID id;
    cudaLaunchAttributeValue val;
} cudaLaunchAttribute;

/* runtime: a launch and what is asked about it */
typedef struct cudaLaunchConfig_t {
    dim3 gridDim, blockDim;
    size_t dynamicSmemBytes;
    cudaStream_t stream;
    cudaLaunchAttribute *attrs;
    unsigned numAttrs;
} cudaLaunchConfig_t;
enum cudaFuncAttribute {
    cudaFuncAttributeMaxDynamicSharedMemorySize = 8,
    cudaFuncAttributePreferredSharedMemoryCarveout = 9
};

cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t *, const void *, void **);
cudaError_t cudaFuncSetAttribute(const void *, enum cudaFuncAttribute, int);
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int *blocks, const void *,
                                                          int threads, size_t shared);

/* runtime: graphs */
typedef struct CUgraph_st *cudaGraph_t;
typedef struct CUgraphNode_st *cudaGraphNode_t;
typedef struct CUgraphExec_st *cudaGraphExec_t;
struct cudaKernelNodeParams {
    void *func;
    dim3 gridDim, blockDim;
    unsigned sharedMemBytes;
    void **kernelParams, **extra;
};
cudaError_t cudaGraphCreate(cudaGraph_t *, unsigned flags);
cudaError_t cudaGraphAddKernelNode(cudaGraphNode_t *, cudaGraph_t,
                                   const cudaGraphNode_t *behind, size_t n_behind,
                                   const struct cudaKernelNodeParams *);
cudaError_t cudaGraphKernelNodeSetAttribute(cudaGraphNode_t, cudaLaunchAttributeID,
                                            const cudaLaunchAttributeValue *);

cudaError_t cudaGraphInstantiateWithFlags(cudaGraphExec_t *, cudaGraph_t,
                                          unsigned long long flags);
cudaError_t cudaGraphExecKernelNodeSetParams(cudaGraphExec_t, cudaGraphNode_t,
                                             const struct cudaKernelNodeParams *);
cudaError_t cudaGraphLaunch(cudaGraphExec_t, cudaStream_t);
cudaError_t cudaGraphExecDestroy(cudaGraphExec_t);
cudaError_t cudaGraphDestroy(cudaGraph_t);

void cpu_fail_call(unsigned n); // the nth call from now is out of memory; 0: none is
#endif
