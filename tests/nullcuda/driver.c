/* CUDA's driver, as far as triton asks it: it loads what it has compiled, and launches it. */
#define __CUDA_RUNTIME_API_VERSION 13000
#include <cuda_runtime_api.h>
#include <stdlib.h>
#include "account.h"

static char context[64];
int cuInit(unsigned flags) { return 0; }
int cuDriverGetVersion(int *version) { *version = 13000; return 0; }
int cuGetErrorString(int error, const char **text) { *text = "null driver"; return 0; }
int cuDeviceGet(int *device, int ordinal) { *device = 0; return 0; }
int cuDeviceGetAttribute(int *value, int name, int device) { return cudaDeviceGetAttribute(value, name, device); } /* numbered alike */
int cuDevicePrimaryCtxRetain(void **found, int device) { *found = context; return 0; }
int cuCtxGetCurrent(void **found) { *found = context; return 0; }
int cuCtxSetCurrent(void *chosen) { return 0; }
int cuCtxGetDevice(int *device) { *device = 0; return 0; }
int cuCtxGetLimit(size_t *found, int name) { *found = 0; return 0; }
int cuCtxSetLimit(int name, size_t wanted) { return 0; }
int cuModuleLoad(void **module, const char *file) { *module = context; return 0; }
int cuModuleLoadData(void **module, const void *image) { *module = context; return 0; }
int cuModuleLoadDataEx(void **module, const void *image, unsigned options, int *names, void **values) { *module = context; return 0; }
int cuModuleUnload(void *module) { return 0; }
int cuModuleGetFunction(void **kernel, void *module, const char *name) { *kernel = nullcuda_kernel(name); return 0; }
int cuFuncGetAttribute(int *value, int name, void *kernel) {
    enum { MOST_THREADS = 0, REGISTERS = 4 };
    *value = name == MOST_THREADS ? 1024 : name == REGISTERS ? 32 : 0;
    return 0;
}
int cuFuncSetAttribute(void *kernel, int name, int value) { return 0; }
int cuFuncSetCacheConfig(void *kernel, int name) { return 0; }
int cuLaunchKernel(void *kernel) { return nullcuda_launch(kernel); }
int cuLaunchKernelEx(const void *how, void *kernel) { return nullcuda_launch(kernel); }
int cuPointerGetAttribute(void **value, int name, void *at) { *value = at; return 0; } /* its address on the device */
int cuPointerGetAttributes(unsigned count, int *names, void **values, void *at) {
    for (unsigned one = 0; one < count; one++) *(void **)values[one] = at;
    return 0;
}
int cuOccupancyMaxActiveClusters(int *clusters, void *kernel, const void *how) { *clusters = 1; return 0; }
int cuTensorMapEncodeTiled(void) { return 0; }
int cuTensorMapEncodeIm2col(void) { return 0; }
