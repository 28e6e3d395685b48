// The functions of NVML that mooncake_hal_cuda.memory.nvlink_domain calls, on one device that has
// joined its fabric. EMULATED_NVLINK is the first byte of the cluster's UUID; 0 is a fabric of one
// host, "none" a fabric that the device has not joined.
#include <stdlib.h>
#include <string.h>

typedef struct {
    unsigned version;
    unsigned char cluster[16];
    int status;
    unsigned clique;
    unsigned char state;
    unsigned health;
} FabricInfo;

enum { OK = 0, NOT_FOUND = 6, VERSION_MISMATCH = 25 };

int nvmlInit_v2(void) { return OK; }
int nvmlShutdown(void) { return OK; }
int nvmlDeviceGetHandleByUUID(const char *uuid, void **device) {
    return *device = (void *)1, strcmp(uuid, "GPU-07070707-0707-0707-0707-070707070707") ? NOT_FOUND : OK;
}
int nvmlDeviceGetGpuFabricInfoV(void *device, FabricInfo *info) {
    if (!device || info->version != 0x02000024) return VERSION_MISMATCH;
    const char *cluster = getenv("EMULATED_NVLINK");
    memset(info->cluster, 0, 16);
    info->state = cluster && !strcmp(cluster, "none") ? 1 : 3;
    info->cluster[0] = cluster ? atoi(cluster) : 9;
    info->status = info->health = 0, info->clique = 5;
    return OK;
}
