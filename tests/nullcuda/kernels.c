/* Kernels and calls of libraries on null CUDA: what was launched, and how often, by name. */
#define __CUDA_RUNTIME_API_VERSION 13000
#include <cuda_runtime_api.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include "account.h"

typedef cudaError_t E;

/* By the address of its stub on the host, or of its name. */
typedef struct {
    const void *function;
    const char *name;
    long launches;
} Kernel;
enum { BITS = 18, KERNELS = 1 << BITS }; /* torch has some 40,000 */
static Kernel kernels[KERNELS];

static Kernel *kernel_of(const void *function) {
    size_t at = ((size_t)function * 0x9E3779B97F4A7C15ull) >> (64 - BITS);
    while (kernels[at].function && kernels[at].function != function) at = (at + 1) % KERNELS;
    kernels[at].function = function;
    return kernels + at;
}

static void count(const void *function, const char *name) {
    Kernel *kernel = kernel_of(function);
    if (!kernel->name) kernel->name = name;
    __sync_add_and_fetch(&kernel->launches, 1);
}

int nullcuda_launch(const void *function) {
    count(function, "a kernel without a name");
    __sync_add_and_fetch(&take_context()->launches, 1);
    return 0;
}

void *nullcuda_kernel(const char *name) {
    char *kept = strdup(name); /* for as long as the process lives */
    kernel_of(kept)->name = kept;
    return kept;
}

/* As the libraries of products and collectives say of themselves. */
void nullcuda_called(const char *name) {
    count(name, name);
    __sync_add_and_fetch(&take_context()->calls, 1);
}

/* Write "launches name" for each kernel launched since the last time to a file; without one, forget them. */
void nullcuda_names(const char *path) {
    FILE *file = path ? fopen(path, "w") : 0;
    for (size_t at = 0; at < KERNELS; at++) {
        if (file && kernels[at].launches) fprintf(file, "%ld %s\n", kernels[at].launches, kernels[at].name);
        kernels[at].launches = 0;
    }
    if (file) fclose(file);
}

void __cudaRegisterFunction(void **binary, const char *function, char *stub, const char *name, int threads, void *thread, void *block,
                            void *block_size, void *grid, int *warp) {
    kernel_of(function)->name = name;
}

E cudaLaunchKernel(const void *kernel, dim3 grid, dim3 block, void **given, size_t shared, cudaStream_t stream) { return nullcuda_launch(kernel); }
E cudaLaunchKernelExC(const cudaLaunchConfig_t *how, const void *kernel, void **given) { return nullcuda_launch(kernel); }
E cudaLaunchCooperativeKernel(const void *kernel, dim3 grid, dim3 block, void **given, size_t shared, cudaStream_t stream) { return nullcuda_launch(kernel); }
E __cudaLaunchKernel(void *kernel, dim3 grid, dim3 block, void **given, size_t shared, cudaStream_t stream) { return nullcuda_launch(kernel); }

static E set(void *at, int value, size_t bytes) {
    static const char name[] = "memset";
    count(name, name);
    __sync_add_and_fetch(&take_context()->launches, 1);
    return 0;
}
E cudaMemsetAsync(void *at, int value, size_t bytes, cudaStream_t stream) { return set(at, value, bytes); }
E cudaMemset(void *at, int value, size_t bytes) { return set(at, value, bytes); }

static char somewhere[1 << 20];
void **__cudaRegisterFatBinary(void *binary) { return (void **)somewhere; }
unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared, void *stream) { return 0; }
E __cudaPopCallConfiguration(dim3 *grid, dim3 *block, size_t *shared, void *stream) {
    grid->x = grid->y = grid->z = block->x = block->y = block->z = 1;
    *shared = 0;
    *(void **)stream = 0;
    return 0;
}
E __cudaGetKernel(void **kernel, const void *function) { *kernel = (void *)function; return 0; }
E cudaGetSymbolAddress(void **at, const void *symbol) { *at = somewhere; return 0; }
E cudaFuncGetAttributes(struct cudaFuncAttributes *about, const void *function) {
    memset(about, 0, sizeof *about);
    about->maxThreadsPerBlock = 1024;
    about->numRegs = 32;
    about->ptxVersion = about->binaryVersion = 90;
    about->maxDynamicSharedSizeBytes = 232448;
    return 0;
}
E cudaOccupancyMaxActiveBlocksPerMultiprocessor(int *blocks, const void *function, int threads, size_t shared) { *blocks = 2; return 0; }
E cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *blocks, const void *function, int threads, size_t shared, unsigned flags) {
    *blocks = 2;
    return 0;
}
E cudaFuncSetAttribute(const void *function, enum cudaFuncAttribute name, int value) { return 0; }
E cudaKernelSetAttributeForDevice(cudaKernel_t kernel, enum cudaFuncAttribute name, int value, int device) { return 0; }
E cudaMemcpyToSymbol(const void *symbol, const void *from, size_t bytes, size_t offset, enum cudaMemcpyKind kind) { return 0; }
E cudaLibraryLoadData(cudaLibrary_t *library, const void *code, enum cudaJitOption *names, void **values, unsigned found, enum cudaLibraryOption *more,
                      void **others, unsigned further) {
    *library = (void *)somewhere;
    return 0;
}
E cudaLibraryGetKernel(cudaKernel_t *kernel, cudaLibrary_t library, const char *name) {
    *kernel = nullcuda_kernel(name);
    return 0;
}
E cudaLibraryUnload(cudaLibrary_t library) { return 0; }
E cudaProfilerStart(void) { return 0; }
E cudaProfilerStop(void) { return 0; }
E cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t function, void *given) { function(given); return 0; }
E cudaStreamAddCallback(cudaStream_t stream, cudaStreamCallback_t function, void *given, unsigned flags) { function(stream, 0, given); return 0; }
