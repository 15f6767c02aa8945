// Holds multiprocessors: blocks so large that each fills one, which spin for some milliseconds.
#include <cuda_runtime.h>

__global__ void spin(unsigned long long ns)
{
    extern __shared__ char memory[];
    unsigned long long start, now;
    memory[threadIdx.x] = 0;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(start));
    do asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
    while (now - start < ns);
}

extern "C" int hold(int blocks, int ms, void *stream)
{
    int device, most;
    if (cudaGetDevice(&device)
        || cudaDeviceGetAttribute(&most, cudaDevAttrMaxSharedMemoryPerBlockOptin, device)
        || cudaFuncSetAttribute(spin, cudaFuncAttributeMaxDynamicSharedMemorySize, most))
        return -1;
    spin<<<blocks, 128, most, (cudaStream_t)stream>>>(ms * 1000000ull);
    return (int)cudaGetLastError();
}
