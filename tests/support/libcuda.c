// The functions of NVIDIA's driver that mooncake_hal_cuda calls, on host memory. There is one device:
// its memory is files that other processes of this user can open, its streams are synchronous.
// Compiled with NVIDIA's own header, so each function has the type declared there. The header's rules
// about arguments and the order of calls are enforced, and that a device is current in the calling
// thread; memory without granted access faults. EMULATED_CUDA_LACKS lists features that the device
// lacks (vmm, fd, rdma, fabric), or that fail in this process although the device's attributes
// report them: imex, daemon (of IMEX: memory with a fabric handle can be allocated, but not exported),
// import (of fabric handles), gpudirect (fabric memory for NICs), pinning (memory for NICs), export.
// With peer there is a second device without peer access; with atomics one with peer access, over
// PCIe.
#define _GNU_SOURCE
#include <cuda.h>
#include <fcntl.h>
#include <pthread.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

enum { MAX = 4096 };
static const size_t TOTAL = 4ull << 30, GRANULE = 2ull << 20;

typedef struct { CUdeviceptr address; size_t nbytes; int fd, is_mapping; } Piece;
typedef struct { int32_t pid, fd; uint64_t nbytes; int32_t types; } Name;
typedef struct { int fd, references, is_imported; size_t nbytes; CUmemAllocationProp prop; } Memory;
typedef struct { CUdeviceptr address; size_t nbytes, mapped; Memory *memory; } Range;

static Piece pieces[MAX], hosted[MAX];
static Memory memories[MAX];
static Range ranges[MAX];
static size_t used;
static int accesses[2][2], streams;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static __thread CUcontext current;

static int lacks(const char *what) {
    const char *missing = getenv("EMULATED_CUDA_LACKS");
    return missing && strstr(missing, what);
}

static int new_file(size_t nbytes) {
    int fd = memfd_create("emulated-cuda", MFD_CLOEXEC);
    if (fd >= 0 && ftruncate(fd, nbytes)) close(fd), fd = -1;
    return fd;
}

static int open_file(const Name *name) {
    char path[64];
    snprintf(path, sizeof path, "/proc/%d/fd/%d", name->pid, name->fd);
    return open(path, O_RDWR | O_CLOEXEC);
}

#define NEEDS_CONTEXT do { if (!current) return CUDA_ERROR_INVALID_CONTEXT; } while (0)
static CUresult finish(CUresult status) { return pthread_mutex_unlock(&lock), status; }

// -- devices, contexts, streams -------------------------------------------------------------------

CUresult cuDriverGetVersion(int *version) { return *version = CUDA_VERSION, CUDA_SUCCESS; }
CUresult cuInit(unsigned flags) { return flags ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS; }
static int devices(void) { return lacks("peer") || lacks("atomics") ? 2 : 1; }
CUresult cuDeviceGetCount(int *count) { return *count = devices(), CUDA_SUCCESS; }
CUresult cuDeviceGet(CUdevice *device, int ordinal) { return ordinal < 0 || ordinal >= devices() ? CUDA_ERROR_INVALID_DEVICE : (*device = ordinal, CUDA_SUCCESS); }
// Under the exported name, which the header maps to from 13.0 on; earlier headers declare both.
CUresult cuDeviceGetUuid_v2(CUuuid *uuid, CUdevice device) { return memset(uuid, 7 + device, 16), CUDA_SUCCESS; }
CUresult cuDeviceCanAccessPeer(int *can, CUdevice device, CUdevice peer) { return *can = device != peer && !lacks("peer"), CUDA_SUCCESS; }
CUresult cuDeviceGetP2PAttribute(int *value, CUdevice_P2PAttribute attribute, CUdevice device, CUdevice peer) {
    if (attribute != CU_DEVICE_P2P_ATTRIBUTE_NATIVE_ATOMIC_SUPPORTED || device == peer || device >= devices() || peer >= devices()) return CUDA_ERROR_INVALID_VALUE;
    return *value = !lacks("atomics"), CUDA_SUCCESS;
}
CUresult cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device) { return *context = (CUcontext)(intptr_t)(device + 1), device >= devices() ? CUDA_ERROR_INVALID_DEVICE : CUDA_SUCCESS; }
CUresult cuCtxSetCurrent(CUcontext context) { return current = context, CUDA_SUCCESS; }
CUresult cuCtxEnablePeerAccess(CUcontext peer, unsigned flags) {
    NEEDS_CONTEXT;
    if (flags || !peer || peer == current) return CUDA_ERROR_INVALID_VALUE;
    if (lacks("peer")) return CUDA_ERROR_PEER_ACCESS_UNSUPPORTED;
    int *access = &accesses[(intptr_t)current - 1][(intptr_t)peer - 1];
    return *access ? CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED : (*access = 1, CUDA_SUCCESS);
}
CUresult cuCtxSynchronize(void) { return current ? CUDA_SUCCESS : CUDA_ERROR_INVALID_CONTEXT; }
CUresult cuStreamCreate(CUstream *stream, unsigned flags) { return flags == CU_STREAM_NON_BLOCKING && current ? (*stream = (CUstream)(intptr_t)(16 + streams++), CUDA_SUCCESS) : CUDA_ERROR_INVALID_VALUE; }
CUresult cuStreamSynchronize(CUstream stream) { NEEDS_CONTEXT; return stream ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE; }
CUresult cuEventCreate(CUevent *event, unsigned flags) { return flags == CU_EVENT_DISABLE_TIMING && current ? (*event = (CUevent)3, CUDA_SUCCESS) : CUDA_ERROR_INVALID_VALUE; }
CUresult cuEventRecord(CUevent event, CUstream stream) { NEEDS_CONTEXT; return event && stream ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE; }
CUresult cuEventSynchronize(CUevent event) { NEEDS_CONTEXT; return event ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE; }
CUresult cuEventDestroy(CUevent event) { NEEDS_CONTEXT; return event ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE; }
CUresult cuMemcpyAsync(CUdeviceptr target, CUdeviceptr source, size_t nbytes, CUstream stream) {
    NEEDS_CONTEXT;
    return stream ? (memmove((void *)target, (void *)source, nbytes), CUDA_SUCCESS) : CUDA_ERROR_INVALID_VALUE;
}
CUresult cuMemsetD8(CUdeviceptr address, unsigned char value, size_t nbytes) { NEEDS_CONTEXT; return memset((void *)address, value, nbytes), CUDA_SUCCESS; }

CUresult cuDeviceGetAttribute(int *value, CUdevice_attribute attribute, CUdevice device) {
    *value = attribute == CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED ? !lacks("vmm")
        : attribute == CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED ? !lacks("fd")
        : attribute == CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED ? !lacks("rdma")
        : attribute == CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_FABRIC_SUPPORTED ? !lacks("fabric") : -1;
    return *value < 0 || device >= devices() ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
}

CUresult cuGetErrorString(CUresult status, const char **text) {
    *text = status == CUDA_ERROR_OUT_OF_MEMORY ? "out of memory"
        : status == CUDA_ERROR_INVALID_DEVICE ? "invalid device ordinal"
        : status == CUDA_ERROR_NOT_PERMITTED ? "operation not permitted"
        : status == CUDA_ERROR_INVALID_CONTEXT ? "invalid device context"
        : status == CUDA_ERROR_NOT_SUPPORTED ? "operation not supported" : "refused by the emulation";
    return CUDA_SUCCESS;
}

// -- plain allocations and their IPC handles ------------------------------------------------------

static Piece *find(CUdeviceptr address) {
    for (int i = 0; i < MAX; i++)
        if (pieces[i].nbytes && address - pieces[i].address < pieces[i].nbytes) return &pieces[i];
    return 0;
}

static CUresult add(CUdeviceptr *address, size_t nbytes, int fd, int is_mapping) {
    void *at = mmap(0, nbytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (at == MAP_FAILED) return CUDA_ERROR_OUT_OF_MEMORY;
    for (int i = 0; i < MAX; i++)
        if (!pieces[i].nbytes) {
            pieces[i] = (Piece){(CUdeviceptr)at, nbytes, fd, is_mapping};
            *address = (CUdeviceptr)at;
            return CUDA_SUCCESS;
        }
    munmap(at, nbytes);
    return CUDA_ERROR_OUT_OF_MEMORY;
}

static CUresult remove_piece(CUdeviceptr address, int is_mapping) {
    pthread_mutex_lock(&lock);
    Piece *piece = find(address);
    if (!piece || piece->address != address || piece->is_mapping != is_mapping) return finish(CUDA_ERROR_INVALID_VALUE);
    munmap((void *)address, piece->nbytes);
    close(piece->fd);
    if (!is_mapping) used -= piece->nbytes;
    *piece = (Piece){0};
    return finish(CUDA_SUCCESS);
}

CUresult cuMemGetInfo(size_t *free, size_t *total) { NEEDS_CONTEXT; return *total = TOTAL, *free = TOTAL - used, CUDA_SUCCESS; }

CUresult cuMemAlloc(CUdeviceptr *address, size_t nbytes) {
    if (!current) return CUDA_ERROR_INVALID_CONTEXT;
    pthread_mutex_lock(&lock);
    CUresult status = CUDA_ERROR_OUT_OF_MEMORY;
    int fd = nbytes <= TOTAL - used ? new_file(nbytes) : -1;
    if (fd >= 0 && (status = add(address, nbytes, fd, 0))) close(fd);
    if (status == CUDA_SUCCESS) used += nbytes;
    return finish(status);
}

CUresult cuMemFree(CUdeviceptr address) { NEEDS_CONTEXT; return remove_piece(address, 0); }
CUresult cuIpcCloseMemHandle(CUdeviceptr address) { NEEDS_CONTEXT; return remove_piece(address, 1); }

CUresult cuIpcGetMemHandle(CUipcMemHandle *handle, CUdeviceptr address) {
    NEEDS_CONTEXT;
    pthread_mutex_lock(&lock);
    Piece *piece = find(address);
    memset(handle, 0, sizeof *handle);
    if (!piece || piece->address != address || piece->is_mapping) return finish(CUDA_ERROR_INVALID_VALUE);
    Name name = {getpid(), piece->fd, piece->nbytes, 0};
    memcpy(handle, &name, sizeof name);
    return finish(CUDA_SUCCESS);
}

CUresult cuIpcOpenMemHandle(CUdeviceptr *address, CUipcMemHandle handle, unsigned flags) {
    Name name;
    memcpy(&name, &handle, sizeof name);
    if (!current || flags != CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS || name.pid == getpid()) return CUDA_ERROR_INVALID_CONTEXT;
    int fd = open_file(&name);
    if (fd < 0) return CUDA_ERROR_INVALID_VALUE;
    pthread_mutex_lock(&lock);
    CUresult status = add(address, name.nbytes, fd, 1);
    if (status) close(fd);
    return finish(status);
}

CUresult cuMemHostAlloc(void **address, size_t nbytes, unsigned flags) {
    if (!current || flags != (CU_MEMHOSTALLOC_PORTABLE | CU_MEMHOSTALLOC_DEVICEMAP)) return CUDA_ERROR_INVALID_CONTEXT;
    *address = mmap(0, nbytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (*address == MAP_FAILED) return CUDA_ERROR_OUT_OF_MEMORY;
    pthread_mutex_lock(&lock);
    for (int i = 0; i < MAX; i++)
        if (!hosted[i].nbytes) return hosted[i] = (Piece){(CUdeviceptr)*address, nbytes, -1, 0}, finish(CUDA_SUCCESS);
    return finish(CUDA_ERROR_OUT_OF_MEMORY);
}

CUresult cuMemFreeHost(void *address) {
    NEEDS_CONTEXT;
    pthread_mutex_lock(&lock);
    for (int i = 0; i < MAX; i++)
        if (hosted[i].nbytes && hosted[i].address == (CUdeviceptr)address) {
            munmap(address, hosted[i].nbytes);
            hosted[i] = (Piece){0};
            return finish(CUDA_SUCCESS);
        }
    return finish(CUDA_ERROR_INVALID_VALUE);
}

// -- virtual memory management --------------------------------------------------------------------

static CUresult refusal(const CUmemAllocationProp *prop) {
    static const unsigned char zeros[4];
    if (lacks("vmm")) return CUDA_ERROR_NOT_SUPPORTED;
    if (prop->location.type != CU_MEM_LOCATION_TYPE_DEVICE || prop->location.id < 0 || prop->location.id >= devices()) return CUDA_ERROR_INVALID_DEVICE;
    if (prop->type != CU_MEM_ALLOCATION_TYPE_PINNED || prop->win32HandleMetaData) return CUDA_ERROR_INVALID_VALUE;
    if (memcmp(prop->allocFlags.reserved, zeros, 4) || prop->allocFlags.gpuDirectRDMACapable > 1) return CUDA_ERROR_INVALID_VALUE;
    if (prop->allocFlags.compressionType || prop->allocFlags.usage) return CUDA_ERROR_NOT_SUPPORTED;
    if (prop->allocFlags.gpuDirectRDMACapable && lacks("rdma")) return CUDA_ERROR_NOT_SUPPORTED;
    int types = prop->requestedHandleTypes;
    if (types & ~(CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR | CU_MEM_HANDLE_TYPE_FABRIC)) return CUDA_ERROR_NOT_SUPPORTED;
    if ((types & CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR) && lacks("fd")) return CUDA_ERROR_NOT_SUPPORTED;
    if ((types & CU_MEM_HANDLE_TYPE_FABRIC) && lacks("fabric")) return CUDA_ERROR_NOT_SUPPORTED;
    return CUDA_SUCCESS;
}

static Memory *memory_of(CUmemGenericAllocationHandle handle) {
    return handle && handle <= MAX && memories[handle - 1].references ? &memories[handle - 1] : 0;
}

static CUresult keep(CUmemGenericAllocationHandle *handle, Memory memory) {
    for (int i = 0; i < MAX; i++)
        if (!memories[i].references) return memories[i] = memory, *handle = i + 1, CUDA_SUCCESS;
    return CUDA_ERROR_OUT_OF_MEMORY;
}

static void let_go(Memory *memory) {
    if (--memory->references) return;
    if (!memory->is_imported) used -= memory->nbytes;
    close(memory->fd);
}

static Range *range_of(CUdeviceptr address) {
    for (int i = 0; i < MAX; i++)
        if (ranges[i].nbytes && address - ranges[i].address < ranges[i].nbytes) return &ranges[i];
    return 0;
}

static Range *whole_range(CUdeviceptr address, size_t nbytes) {
    Range *range = range_of(address);
    return range && range->address == address && range->nbytes == nbytes ? range : 0;
}

CUresult cuMemGetAllocationGranularity(size_t *granule, const CUmemAllocationProp *prop, CUmemAllocationGranularity_flags option) {
    if (option != CU_MEM_ALLOC_GRANULARITY_MINIMUM && option != CU_MEM_ALLOC_GRANULARITY_RECOMMENDED) return CUDA_ERROR_INVALID_VALUE;
    return *granule = GRANULE, refusal(prop);
}

CUresult cuMemCreate(CUmemGenericAllocationHandle *handle, size_t nbytes, const CUmemAllocationProp *prop, unsigned long long flags) {
    if (flags || !nbytes || nbytes % GRANULE) return CUDA_ERROR_INVALID_VALUE;
    CUresult status = refusal(prop);
    if (status) return status;
    if ((prop->requestedHandleTypes & CU_MEM_HANDLE_TYPE_FABRIC) && lacks("imex")) return CUDA_ERROR_NOT_PERMITTED;
    if (prop->allocFlags.gpuDirectRDMACapable && lacks("pinning")) return CUDA_ERROR_NOT_SUPPORTED;
    if ((prop->requestedHandleTypes & CU_MEM_HANDLE_TYPE_FABRIC) && prop->allocFlags.gpuDirectRDMACapable && lacks("gpudirect")) return CUDA_ERROR_NOT_SUPPORTED;
    pthread_mutex_lock(&lock);
    int fd = nbytes <= TOTAL - used ? new_file(nbytes) : -1;
    if (fd < 0) return finish(CUDA_ERROR_OUT_OF_MEMORY);
    if ((status = keep(handle, (Memory){fd, 1, 0, nbytes, *prop}))) close(fd);
    else used += nbytes;
    return finish(status);
}

CUresult cuMemRelease(CUmemGenericAllocationHandle handle) {
    pthread_mutex_lock(&lock);
    Memory *memory = memory_of(handle);
    if (memory) let_go(memory);
    return finish(memory ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE);
}

CUresult cuMemAddressReserve(CUdeviceptr *address, size_t nbytes, size_t alignment, CUdeviceptr hint, unsigned long long flags) {
    if (flags || !nbytes || nbytes % getpagesize() || hint % getpagesize() || (alignment & (alignment - 1))) return CUDA_ERROR_INVALID_VALUE;
    // aligned to the granularity, as required of mappings
    char *at = mmap(0, nbytes + GRANULE, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (at == MAP_FAILED) return CUDA_ERROR_OUT_OF_MEMORY;
    char *aligned = (char *)(((uintptr_t)at + GRANULE - 1) / GRANULE * GRANULE);
    if (aligned > at) munmap(at, aligned - at);
    munmap(aligned + nbytes, GRANULE - (aligned - at));
    pthread_mutex_lock(&lock);
    for (int i = 0; i < MAX; i++)
        if (!ranges[i].nbytes) {
            ranges[i] = (Range){*address = (CUdeviceptr)aligned, nbytes, 0, 0};
            return finish(CUDA_SUCCESS);
        }
    munmap(aligned, nbytes);
    return finish(CUDA_ERROR_OUT_OF_MEMORY);
}

CUresult cuMemAddressFree(CUdeviceptr address, size_t nbytes) {
    pthread_mutex_lock(&lock);
    Range *range = whole_range(address, nbytes);
    if (!range || range->memory) return finish(CUDA_ERROR_INVALID_VALUE);
    munmap((void *)address, nbytes);
    *range = (Range){0};
    return finish(CUDA_SUCCESS);
}

CUresult cuMemMap(CUdeviceptr address, size_t nbytes, size_t offset, CUmemGenericAllocationHandle handle, unsigned long long flags) {
    if (flags || offset || !nbytes || address % GRANULE || nbytes % GRANULE) return CUDA_ERROR_INVALID_VALUE;
    pthread_mutex_lock(&lock);
    Range *range = range_of(address);
    Memory *memory = memory_of(handle);
    if (!range || range->address != address || range->memory || nbytes > range->nbytes) return finish(CUDA_ERROR_INVALID_VALUE);
    if (!memory || nbytes > memory->nbytes) return finish(CUDA_ERROR_INVALID_VALUE);
    if (mmap((void *)address, nbytes, PROT_NONE, MAP_SHARED | MAP_FIXED, memory->fd, 0) == MAP_FAILED) return finish(CUDA_ERROR_OUT_OF_MEMORY);
    memory->references++;
    range->memory = memory, range->mapped = nbytes;
    return finish(CUDA_SUCCESS);
}

CUresult cuMemUnmap(CUdeviceptr address, size_t nbytes) {
    pthread_mutex_lock(&lock);
    Range *range = range_of(address);
    if (!range || !range->memory || range->address != address || range->mapped != nbytes) return finish(CUDA_ERROR_INVALID_VALUE);
    mmap((void *)address, nbytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
    let_go(range->memory);
    range->memory = 0, range->mapped = 0;
    return finish(CUDA_SUCCESS);
}

CUresult cuMemSetAccess(CUdeviceptr address, size_t nbytes, const CUmemAccessDesc *wanted, size_t count) {
    if (count != 1 || wanted->location.type != CU_MEM_LOCATION_TYPE_DEVICE) return CUDA_ERROR_NOT_SUPPORTED;
    if (wanted->location.id < 0 || wanted->location.id >= devices()) return CUDA_ERROR_INVALID_DEVICE;
    int protection = wanted->flags == CU_MEM_ACCESS_FLAGS_PROT_READWRITE ? PROT_READ | PROT_WRITE
        : wanted->flags == CU_MEM_ACCESS_FLAGS_PROT_READ ? PROT_READ
        : wanted->flags == CU_MEM_ACCESS_FLAGS_PROT_NONE ? PROT_NONE : -1;
    pthread_mutex_lock(&lock);
    Range *range = range_of(address);
    int is_whole = range && range->memory && range->address == address && range->mapped == nbytes;
    if (!is_whole || protection < 0 || mprotect((void *)address, nbytes, protection)) return finish(CUDA_ERROR_INVALID_VALUE);
    return finish(CUDA_SUCCESS);
}

CUresult cuMemRetainAllocationHandle(CUmemGenericAllocationHandle *handle, void *address) {
    pthread_mutex_lock(&lock);
    Range *range = range_of((CUdeviceptr)address);
    if (!range || (CUdeviceptr)address - range->address >= range->mapped) return finish(CUDA_ERROR_INVALID_VALUE);
    range->memory->references++;
    *handle = range->memory - memories + 1;
    return finish(CUDA_SUCCESS);
}

CUresult cuMemGetAllocationPropertiesFromHandle(CUmemAllocationProp *prop, CUmemGenericAllocationHandle handle) {
    pthread_mutex_lock(&lock);
    Memory *memory = memory_of(handle);
    if (memory) *prop = memory->prop;
    return finish(memory ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE);
}

CUresult cuMemExportToShareableHandle(void *out, CUmemGenericAllocationHandle handle, CUmemAllocationHandleType type, unsigned long long flags) {
    pthread_mutex_lock(&lock);
    Memory *memory = memory_of(handle);
    if (!memory || flags || !(memory->prop.requestedHandleTypes & type)) return finish(CUDA_ERROR_INVALID_VALUE);
    if (type == CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR) {
        if (lacks("export")) return finish(CUDA_ERROR_NOT_SUPPORTED);
        *(int *)out = fcntl(memory->fd, F_DUPFD_CLOEXEC, 0);
        return finish(*(int *)out < 0 ? CUDA_ERROR_OUT_OF_MEMORY : CUDA_SUCCESS);
    }
    if (lacks("daemon")) return finish(CUDA_ERROR_NOT_PERMITTED);
    Name name = {getpid(), memory->fd, memory->nbytes, memory->prop.requestedHandleTypes};
    memset(out, 0, sizeof(CUmemFabricHandle));
    memcpy(out, &name, sizeof name);
    return finish(CUDA_SUCCESS);
}

CUresult cuMemImportFromShareableHandle(CUmemGenericAllocationHandle *handle, void *source, CUmemAllocationHandleType type) {
    CUmemAllocationProp prop = {.type = CU_MEM_ALLOCATION_TYPE_PINNED, .requestedHandleTypes = type, .location = {CU_MEM_LOCATION_TYPE_DEVICE, 0}};
    int fd;
    if (type == CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR) fd = fcntl((int)(intptr_t)source, F_DUPFD_CLOEXEC, 0);
    else if (type != CU_MEM_HANDLE_TYPE_FABRIC) return CUDA_ERROR_NOT_SUPPORTED;
    else if (lacks("imex") || lacks("import")) return CUDA_ERROR_NOT_PERMITTED;
    else {
        Name name;
        memcpy(&name, source, sizeof name);
        fd = open_file(&name);
    }
    off_t nbytes = fd < 0 ? 0 : lseek(fd, 0, SEEK_END);
    if (nbytes <= 0) return fd < 0 ? CUDA_ERROR_INVALID_VALUE : (close(fd), CUDA_ERROR_INVALID_VALUE);
    pthread_mutex_lock(&lock);
    CUresult status = keep(handle, (Memory){fd, 1, 1, nbytes, prop});
    if (status) close(fd);
    return finish(status);
}

CUresult cuMemGetAddressRange(CUdeviceptr *base, size_t *nbytes, CUdeviceptr address) {
    NEEDS_CONTEXT;
    pthread_mutex_lock(&lock);
    Piece *piece = find(address);
    Range *range = range_of(address);
    if (piece) *base = piece->address, *nbytes = piece->nbytes;
    else if (range && range->memory) *base = range->address, *nbytes = range->mapped;
    else return finish(CUDA_ERROR_INVALID_VALUE);
    return finish(CUDA_SUCCESS);
}

// -- functions for the tests ----------------------------------------------------------------------

int emulated_access(int device, int other) { return accesses[device][other]; }
int emulated_streams(void) { return streams; }

int emulated_leftovers(void) {
    int count = 0;
    for (int i = 0; i < MAX; i++) count += (pieces[i].nbytes > 0) + (memories[i].references > 0) + (ranges[i].nbytes > 0);
    return count;
}

#define FACT(text, value) if (!strcmp(name, text)) return (long)(value)
long header_fact(const char *name) {
    FACT("Location.size", sizeof(CUmemLocation));
    FACT("AccessDesc.size", sizeof(CUmemAccessDesc));
    FACT("AccessDesc.flags", offsetof(CUmemAccessDesc, flags));
    FACT("AllocationProp.size", sizeof(CUmemAllocationProp));
    FACT("AllocationProp.requestedHandleTypes", offsetof(CUmemAllocationProp, requestedHandleTypes));
    FACT("AllocationProp.location", offsetof(CUmemAllocationProp, location));
    FACT("AllocationProp.win32HandleMetaData", offsetof(CUmemAllocationProp, win32HandleMetaData));
    FACT("AllocationProp.allocFlags", offsetof(CUmemAllocationProp, allocFlags));
    FACT("AllocationFlags.gpuDirectRDMACapable", offsetof(CUmemAllocationProp, allocFlags.gpuDirectRDMACapable) - offsetof(CUmemAllocationProp, allocFlags));
    FACT("AllocationFlags.usage", offsetof(CUmemAllocationProp, allocFlags.usage) - offsetof(CUmemAllocationProp, allocFlags));
    FACT("FabricHandle.size", sizeof(CUmemFabricHandle));
    FACT("VIRTUAL_MEMORY", CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED);
    FACT("POSIX_FILE_DESCRIPTOR", CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED);
    FACT("GPU_DIRECT_RDMA", CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED);
    FACT("FABRIC", CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_FABRIC_SUPPORTED);
    FACT("NATIVE_ATOMICS", CU_DEVICE_P2P_ATTRIBUTE_NATIVE_ATOMIC_SUPPORTED);
    FACT("HandleType.POSIX_FILE_DESCRIPTOR", CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR);
    FACT("HandleType.FABRIC", CU_MEM_HANDLE_TYPE_FABRIC);
    FACT("ALREADY_ENABLED", CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED);
    FACT("CUDA_VERSION", CUDA_VERSION);
    return -1;
}
