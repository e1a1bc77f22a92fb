/* The CUDA runtime and driver, as far as torch calls them, without a device: memory is address space of this process,
 * counted in a file that all processes share; kernels are launched nowhere and leave memory as it was; streams and
 * events are done at once. What torch decides by itself stays its own: allocator, segments, streams, IPC, NCCL's
 * set-up, waits.
 *
 * NULLCUDA_DEVICES: devices of the machine. NULLCUDA_BYTES: memory of each. NULLCUDA_ACCOUNTS: the shared file.
 * NULLCUDA_PENDING: events never end. */
#define _GNU_SOURCE
#define __CUDA_RUNTIME_API_VERSION 13000
#include <cuda_runtime_api.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>
#include "account.h"

#define SLOTS 512
#define GRANULE ((size_t)2 << 20)
#define SMALL ((size_t)1 << 16) /* copies of more bytes are not carried out: nobody reads what kernels never wrote */
typedef cudaError_t E;
enum { HOST = cudaMemoryTypeHost, DEVICE = cudaMemoryTypeDevice };

static Account *accounts, *own, aside;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

static size_t whole(void) {
    const char *text = getenv("NULLCUDA_BYTES");
    return text ? strtoull(text, 0, 10) : 150109880320ull;
}

/* How many devices this process sees, and the number of the first of them. */
static int visible(int *first) {
    const char *all = getenv("NULLCUDA_DEVICES"), *some = getenv("CUDA_VISIBLE_DEVICES");
    int count = all ? atoi(all) : 1;
    *first = 0;
    if (!some) return count;
    if (!*some || atoi(some) < 0) return 0;
    *first = atoi(some);
    for (count = 1; *some; some++) count += *some == ',';
    return count;
}

static int alive(int pid) { return pid == getpid() || kill(pid, 0) == 0; }

/* This process takes a context: an account of its own. */
Account *take_context(void) {
    if (own && own->pid == getpid()) return own;
    pthread_mutex_lock(&lock);
    const char *path = getenv("NULLCUDA_ACCOUNTS");
    int first, file = path ? open(path, O_RDWR | O_CREAT, 0600) : -1;
    own = &aside;
    if (file >= 0 && ftruncate(file, sizeof(Account) * SLOTS) == 0) {
        accounts = mmap(0, sizeof(Account) * SLOTS, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
        for (int at = 0; accounts != MAP_FAILED && at < SLOTS; at++)
            if (__sync_bool_compare_and_swap(&accounts[at].pid, 0, getpid())) {
                own = &accounts[at];
                break;
            }
    }
    if (file >= 0) close(file);
    own->pid = getpid();
    visible(&first);
    own->device = first;
    pthread_mutex_unlock(&lock);
    return own;
}

static size_t used(void) {
    Account *mine = take_context();
    if (mine == &aside) return mine->bytes;
    size_t sum = 0;
    for (int at = 0; at < SLOTS; at++)
        if (accounts[at].pid && accounts[at].device == mine->device && alive(accounts[at].pid)) sum += accounts[at].bytes;
    return sum;
}

static int take(size_t bytes) {
    Account *mine = take_context();
    if (used() + bytes > whole()) return 0;
    long now = __sync_add_and_fetch(&mine->bytes, (long)bytes);
    if (now > mine->peak) mine->peak = now;
    return 1;
}

static void give(size_t bytes) { __sync_sub_and_fetch(&take_context()->bytes, (long)bytes); }

/* Address ranges, by begin: what memory a pointer is of. */
typedef struct {
    char *at;
    size_t bytes;
    int kind;
} Range;
static Range *ranges;
static size_t count, room;

static size_t place_of(const void *at) { /* of the first range that begins behind it */
    size_t low = 0, high = count;
    while (low < high) {
        size_t middle = (low + high) / 2;
        if (ranges[middle].at <= (char *)at) low = middle + 1;
        else high = middle;
    }
    return low;
}

static void keep_range(void *at, size_t bytes, int kind) {
    pthread_mutex_lock(&lock);
    if (count == room) ranges = realloc(ranges, (room = room ? 2 * room : 1024) * sizeof(Range));
    size_t place = place_of(at);
    memmove(ranges + place + 1, ranges + place, (count++ - place) * sizeof(Range));
    ranges[place] = (Range){at, bytes, kind};
    pthread_mutex_unlock(&lock);
}

static Range range_of(const void *at) {
    Range found = {0};
    pthread_mutex_lock(&lock);
    size_t place = place_of(at);
    if (place && (char *)at < ranges[place - 1].at + ranges[place - 1].bytes) found = ranges[place - 1];
    pthread_mutex_unlock(&lock);
    return found;
}

static size_t drop_range(const void *at) {
    size_t bytes = 0;
    pthread_mutex_lock(&lock);
    size_t place = place_of(at);
    if (place && ranges[place - 1].at == at) {
        bytes = ranges[place - 1].bytes;
        memmove(ranges + place - 1, ranges + place, (count-- - place) * sizeof(Range));
    }
    pthread_mutex_unlock(&lock);
    return bytes;
}

static void *space(size_t bytes) {
    void *at = mmap(0, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    return at == MAP_FAILED ? 0 : at;
}

static __thread E last;
static E failed(E error) { return last = error; }

/* The host waits for the device: counted, and told to who asked. */
static void (*told)(void);
void nullcuda_on_wait(void (*function)(void)) { told = function; }
Account *nullcuda_account(void) { return take_context(); }
static E wait_for_device(void) {
    take_context()->waits++;
    if (told) told();
    return 0;
}

/* Errors and the device. */
E cudaGetLastError(void) { E found = last; last = 0; return found; }
E cudaPeekAtLastError(void) { return last; }
const char *cudaGetErrorString(E error) { return error == cudaErrorMemoryAllocation ? "out of memory" : "null CUDA"; }
const char *cudaGetErrorName(E error) { return error == cudaErrorMemoryAllocation ? "cudaErrorMemoryAllocation" : "null"; }
E cudaGetDeviceCount(int *found) { int first; *found = visible(&first); return *found ? 0 : cudaErrorNoDevice; }
E cudaGetDevice(int *device) { *device = 0; return 0; }
E cudaSetDevice(int device) { take_context(); return 0; }
E cudaRuntimeGetVersion(int *version) { *version = 13000; return 0; }
E cudaDriverGetVersion(int *version) { *version = 13000; return 0; }
E cudaDeviceCanAccessPeer(int *can, int one, int other) { *can = 1; return 0; }
E cudaDeviceGetPCIBusId(char *id, int most, int device) { snprintf(id, most, "0000:%02x:00.0", device); return 0; }
E cudaDeviceGetStreamPriorityRange(int *least, int *greatest) { *least = 0; *greatest = -5; return 0; }

E cudaGetDeviceProperties(struct cudaDeviceProp *about, int device) {
    memset(about, 0, sizeof *about);
    strcpy(about->name, "NVIDIA H200");
    about->totalGlobalMem = whole();
    about->major = 9;
    about->multiProcessorCount = 132;
    about->warpSize = 32;
    about->maxThreadsPerBlock = about->maxThreadsDim[0] = about->maxThreadsDim[1] = 1024;
    about->maxThreadsDim[2] = 64;
    about->maxGridSize[0] = 2147483647;
    about->maxGridSize[1] = about->maxGridSize[2] = 65535;
    about->maxThreadsPerMultiProcessor = 2048;
    about->maxBlocksPerMultiProcessor = 32;
    about->regsPerBlock = about->regsPerMultiprocessor = 65536;
    about->sharedMemPerBlock = 49152;
    about->sharedMemPerBlockOptin = 232448;
    about->sharedMemPerMultiprocessor = 233472;
    about->l2CacheSize = 50 << 20;
    about->textureAlignment = 512;
    about->unifiedAddressing = about->concurrentKernels = about->managedMemory = 1;
    return 0;
}

E cudaDeviceGetAttribute(int *value, enum cudaDeviceAttr name, int device) {
    struct cudaDeviceProp about;
    cudaGetDeviceProperties(&about, device);
    switch (name) {
    case cudaDevAttrMaxThreadsPerBlock: case cudaDevAttrMaxBlockDimX: case cudaDevAttrMaxBlockDimY: *value = 1024; break;
    case cudaDevAttrMaxBlockDimZ: *value = 64; break;
    case cudaDevAttrMaxGridDimX: *value = about.maxGridSize[0]; break;
    case cudaDevAttrMaxGridDimY: case cudaDevAttrMaxGridDimZ: *value = 65535; break;
    case cudaDevAttrMaxSharedMemoryPerBlock: *value = 49152; break;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin: *value = 232448; break;
    case cudaDevAttrMaxSharedMemoryPerMultiprocessor: *value = 233472; break;
    case cudaDevAttrWarpSize: *value = 32; break;
    case cudaDevAttrMultiProcessorCount: *value = 132; break;
    case cudaDevAttrMaxThreadsPerMultiProcessor: *value = 2048; break;
    case cudaDevAttrMaxRegistersPerBlock: *value = 65536; break;
    case cudaDevAttrComputeCapabilityMajor: *value = 9; break;
    case cudaDevAttrComputeCapabilityMinor: *value = 0; break;
    default: *value = 1;
    }
    return 0;
}

/* Memory. */
E cudaMemGetInfo(size_t *free_, size_t *all) {
    size_t taken = used();
    *all = whole();
    *free_ = taken > *all ? 0 : *all - taken;
    return 0;
}

E cudaMalloc(void **at, size_t bytes) {
    if (!take(bytes)) return failed(cudaErrorMemoryAllocation);
    keep_range(*at = space(bytes), bytes, DEVICE);
    return 0;
}

E cudaFree(void *at) {
    take_context();
    size_t bytes = at ? drop_range(at) : 0;
    if (bytes) {
        give(bytes);
        munmap(at, bytes);
    }
    return 0;
}

E cudaMallocAsync(void **at, size_t bytes, cudaStream_t stream) { return cudaMalloc(at, bytes); }
E cudaFreeAsync(void *at, cudaStream_t stream) { return cudaFree(at); }
E cudaHostAlloc(void **at, size_t bytes, unsigned flags) { take_context(); keep_range(*at = space(bytes), bytes, HOST); return 0; }
E cudaFreeHost(void *at) { size_t bytes = drop_range(at); if (bytes) munmap(at, bytes); return 0; }
E cudaHostRegister(void *at, size_t bytes, unsigned flags) { take_context(); keep_range(at, bytes, HOST); return 0; }
E cudaHostUnregister(void *at) { drop_range(at); return 0; }

E cudaPointerGetAttributes(struct cudaPointerAttributes *about, const void *at) {
    Range found = range_of(at);
    memset(about, 0, sizeof *about);
    about->type = found.at ? found.kind : cudaMemoryTypeUnregistered;
    about->device = found.at ? 0 : -2;
    about->devicePointer = found.at ? (void *)at : 0;
    about->hostPointer = found.kind == HOST ? (void *)at : 0;
    return 0;
}

static E move(void *to, const void *from, size_t bytes) {
    int into = range_of(to).kind == DEVICE, out_of = range_of(from).kind == DEVICE;
    if (into && out_of) return 0;
    if (bytes <= SMALL || !(into || out_of)) memcpy(to, from, bytes);
    /* A number of no kernel, which may be what another tensor left there: 0; a truth: true. */
    if (out_of && bytes <= sizeof(double)) memset(to, bytes == 1, bytes);
    return 0;
}

static E copy(void *to, const void *from, size_t bytes) {
    take_context()->copies++;
    return move(to, from, bytes);
}

E cudaMemcpyAsync(void *to, const void *from, size_t bytes, enum cudaMemcpyKind kind, cudaStream_t stream) { return copy(to, from, bytes); }
E cudaMemcpy(void *to, const void *from, size_t bytes, enum cudaMemcpyKind kind) { wait_for_device(); return copy(to, from, bytes); }

/* Streams and events: done at once, but that a wait is counted. */
E cudaStreamCreate(cudaStream_t *stream) { *stream = malloc(64); return 0; }
E cudaStreamCreateWithFlags(cudaStream_t *stream, unsigned flags) { return cudaStreamCreate(stream); }
E cudaStreamCreateWithPriority(cudaStream_t *stream, unsigned flags, int priority) { return cudaStreamCreate(stream); }
E cudaStreamGetPriority(cudaStream_t stream, int *priority) { *priority = 0; return 0; }
E cudaStreamIsCapturing(cudaStream_t stream, enum cudaStreamCaptureStatus *status) { *status = 0; return 0; }
E cudaStreamGetCaptureInfo(cudaStream_t stream, enum cudaStreamCaptureStatus *status, unsigned long long *id, cudaGraph_t *graph,
                           const cudaGraphNode_t **nodes, const cudaGraphEdgeData **edges, size_t *found) {
    *status = 0;
    return 0;
}
E cudaStreamSynchronize(cudaStream_t stream) { return wait_for_device(); }
E cudaDeviceSynchronize(void) { return wait_for_device(); }
E cudaEventSynchronize(cudaEvent_t event) { return wait_for_device(); }

static double milliseconds(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1e3 + now.tv_nsec / 1e6;
}

E cudaEventCreate(cudaEvent_t *event) { *event = calloc(1, 64); return 0; }
E cudaEventCreateWithFlags(cudaEvent_t *event, unsigned flags) { return cudaEventCreate(event); }
E cudaEventDestroy(cudaEvent_t event) { free(event); return 0; }
E cudaEventRecord(cudaEvent_t event, cudaStream_t stream) { *(double *)event = milliseconds(); return 0; }
E cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t stream, unsigned flags) { return cudaEventRecord(event, stream); }
E cudaEventQuery(cudaEvent_t event) { return getenv("NULLCUDA_PENDING") ? failed(cudaErrorNotReady) : 0; }
E cudaEventElapsedTime(float *spent, cudaEvent_t begin, cudaEvent_t end) {
    *spent = *(double *)end - *(double *)begin;
    if (*spent < 1e-3f) *spent = 1e-3f;
    return 0;
}

/* Between processes: who opens a handle gets address space of the same size. */
typedef struct {
    int pid;
    void *at;
    size_t bytes;
} Handle;

E cudaIpcGetMemHandle(cudaIpcMemHandle_t *handle, void *at) {
    Range found = range_of(at);
    memset(handle, 0, sizeof *handle);
    if (!found.at) return failed(cudaErrorInvalidValue); /* expandable segments have none */
    *(Handle *)handle = (Handle){getpid(), found.at, found.bytes};
    return 0;
}

E cudaIpcOpenMemHandle(void **at, cudaIpcMemHandle_t handle, unsigned flags) {
    Handle *sent = (Handle *)&handle;
    if (sent->pid == getpid()) return failed(cudaErrorDeviceUninitialized);
    take_context()->opened++;
    keep_range(*at = space(sent->bytes), sent->bytes, DEVICE);
    return 0;
}

E cudaIpcCloseMemHandle(void *at) { return cudaFreeHost(at); }
E cudaIpcGetEventHandle(cudaIpcEventHandle_t *handle, cudaEvent_t event) { memset(handle, 0, sizeof *handle); return 0; }
E cudaIpcOpenEventHandle(cudaEvent_t *event, cudaIpcEventHandle_t handle) { return cudaEventCreate(event); }

static char somewhere[64]; /* of pools, which torch only asks of */
E cudaMemPoolGetAttribute(cudaMemPool_t pool, enum cudaMemPoolAttr name, void *value) { *(unsigned long long *)value = 0; return 0; }
E cudaDeviceGetDefaultMemPool(cudaMemPool_t *pool, int device) { *pool = (void *)somewhere; return 0; }

/* The driver, by its entry points: virtual memory, of which expandable segments are made. */
static int device_of(int *device, int ordinal) { *device = 0; return 0; }
static int attribute(int *value, int name, int device) {
    enum { FABRIC = 128 };
    if (name == FABRIC) *value = 0;
    else cudaDeviceGetAttribute(value, name, device);
    return 0;
}
static int granularity(size_t *bytes, const void *about, int option) { *bytes = GRANULE; return 0; }
static int reserve(void **at, size_t bytes, size_t alignment, void *wish, unsigned long long flags) {
    char *found = space(bytes + GRANULE);
    if (!found) return cudaErrorMemoryAllocation;
    *at = (void *)(((size_t)found + GRANULE - 1) & ~(GRANULE - 1));
    keep_range(*at, bytes, DEVICE);
    return 0;
}
static int unreserve(void *at, size_t bytes) { drop_range(at); return 0; }
static int create(size_t **handle, size_t bytes, const void *about, unsigned long long flags) {
    if (!take(bytes)) return cudaErrorMemoryAllocation;
    *handle = malloc(sizeof **handle);
    **handle = bytes;
    return 0;
}
static int release(size_t *handle) { give(*handle); free(handle); return 0; }
static int unmap(void *at, size_t bytes) { madvise(at, bytes, MADV_DONTNEED); return 0; }
static int range(void **at, size_t *bytes, void *inside) {
    Range found = range_of(inside);
    *at = found.at;
    *bytes = found.bytes;
    return found.at ? 0 : cudaErrorInvalidValue;
}
static int text(int error, const char **found) { *found = "null driver"; return 0; }
static int done(void) { return 0; }

E cudaGetDriverEntryPointByVersion(const char *name, void **function, unsigned version, unsigned long long flags,
                                   enum cudaDriverEntryPointQueryResult *status) {
    static const struct { const char *name; void *function; } known[] = {
        {"cuDeviceGet", device_of}, {"cuDeviceGetAttribute", attribute}, {"cuMemGetAllocationGranularity", granularity},
        {"cuMemAddressReserve", reserve}, {"cuMemAddressFree", unreserve}, {"cuMemCreate", create},
        {"cuMemRelease", release}, {"cuMemUnmap", unmap}, {"cuMemGetAddressRange", range}, {"cuGetErrorString", text},
    };
    if (status) *status = cudaDriverEntryPointSuccess;
    *function = done;
    for (size_t at = 0; at < sizeof known / sizeof *known; at++)
        if (!strcmp(name, known[at].name)) *function = known[at].function;
    return 0;
}
E cudaGetDriverEntryPoint(const char *name, void **function, unsigned long long flags, enum cudaDriverEntryPointQueryResult *status) {
    return cudaGetDriverEntryPointByVersion(name, function, 13000, flags, status);
}
E cudaMemcpyPeerAsync(void *to, int there, const void *from, int here, size_t bytes, cudaStream_t stream) { return copy(to, from, bytes); }
E cudaMemcpy2DAsync(void *to, size_t wide, const void *from, size_t width, size_t row, size_t rows, enum cudaMemcpyKind kind, cudaStream_t stream) {
    take_context()->copies++;
    for (size_t at = 0; at < rows; at++) move((char *)to + at * wide, (char *)from + at * width, row);
    return 0;
}
E cudaStreamQuery(cudaStream_t stream) { return cudaEventQuery(0); }
E cudaStreamDestroy(cudaStream_t stream) { free(stream); return 0; }
E cudaThreadExchangeStreamCaptureMode(enum cudaStreamCaptureMode *mode) { return 0; }
E cudaDeviceEnablePeerAccess(int device, unsigned flags) { return 0; }
E cudaMemPoolSetAttribute(cudaMemPool_t pool, enum cudaMemPoolAttr name, void *value) { return 0; }
E cudaMemPoolTrimTo(cudaMemPool_t pool, size_t bytes) { return 0; }
E cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned flags) { return 0; }
E cudaMemPoolSetAccess(cudaMemPool_t pool, const struct cudaMemAccessDesc *access, size_t found) { return 0; }
