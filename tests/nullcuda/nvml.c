/* NVIDIA's management library, as far as torch and Ray ask it. */
#include <stdlib.h>
#include <string.h>
static int devices(void) { const char *all = getenv("NULLCUDA_DEVICES"); return all ? atoi(all) : 1; }
int nvmlInit(void) { return 0; }
int nvmlInit_v2(void) { return 0; }
int nvmlInitWithFlags(unsigned flags) { return 0; }
int nvmlShutdown(void) { return 0; }
int nvmlDeviceGetCount_v2(int *count) { *count = devices(); return 0; }
int nvmlDeviceGetHandleByIndex_v2(long at, void **device) { *device = (void *)(at + 1); return 0; }
int nvmlDeviceGetHandleByPciBusId_v2(const char *id, void **device) { *device = (void *)1; return 0; }
int nvmlDeviceGetName(void *device, char *name, unsigned most) { strncpy(name, "NVIDIA H200", most); return 0; }
int nvmlDeviceGetUUID(void *device, char *name, unsigned most) { strncpy(name, "GPU-0", most); return 0; }
int nvmlDeviceGetComputeRunningProcesses_v3(void *device, unsigned *count, void *found) { *count = 0; return 0; }
int nvmlSystemGetCudaDriverVersion_v2(int *version) { *version = 13000; return 0; }
const char *nvmlErrorString(int error) { return "null"; }

/* No links between devices: 3 says that a function is not supported. */
int nvmlDeviceGetNvLinkRemoteDeviceType(void) { return 3; }
int nvmlDeviceGetNvLinkRemotePciInfo_v2(void) { return 3; }
int nvmlDeviceGetGpuFabricInfoV(void) { return 0; } /* of no fabric: its struct is zeros */
int nvmlDeviceGetP2PStatus(void) { return 3; }
int nvmlDeviceGetComputeRunningProcesses(void *device, unsigned *count, void *found) { *count = 0; return 0; }
int nvmlDeviceGetHandleByUUID(const char *id, void **device) { *device = (void *)1; return 0; }
