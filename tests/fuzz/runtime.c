/* The fuzzed parts of the driver call nothing of the runtime: to link, each call is one that ends. */
#include <stdlib.h>
#define NEVER(name) void name(void); void name(void) { abort(); }
NEVER(cudaMalloc) NEVER(cudaFree) NEVER(cudaMemset) NEVER(cudaMemcpy) NEVER(cudaGetDevice)
NEVER(cudaSetDevice) NEVER(cudaDeviceSynchronize) NEVER(cudaGetLastError) NEVER(cudaFuncSetAttribute)
NEVER(cudaDeviceGetAttribute) NEVER(cudaOccupancyMaxActiveBlocksPerMultiprocessor)
NEVER(cudaLaunchKernelExC) NEVER(cudaGetErrorString) NEVER(cudaPeekAtLastError) NEVER(cudaGetDeviceCount)
NEVER(cudaGetDeviceProperties) NEVER(cudaDriverGetVersion) NEVER(cudaRuntimeGetVersion)
NEVER(cudaGraphCreate) NEVER(cudaGraphAddKernelNode) NEVER(cudaGraphKernelNodeSetAttribute)
NEVER(cudaGraphInstantiateWithFlags) NEVER(cudaGraphExecKernelNodeSetParams) NEVER(cudaGraphLaunch)
NEVER(cudaGraphExecDestroy) NEVER(cudaGraphDestroy) NEVER(cudaStreamIsCapturing)
NEVER(whole_layer) NEVER(fill) NEVER(read_stream)
