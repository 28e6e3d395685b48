// The calls of NVIDIA's driver that mooncake_hal_cuda.driver makes, on host memory: one device,
// whose memory is files that other processes of this user can open, and whose streams never lag.
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <pthread.h>
#include <unistd.h>

enum { OK = 0, INVALID = 1, OUT_OF_MEMORY = 2, INVALID_CONTEXT = 201, MAX = 4096 };
static const size_t TOTAL = 4ull << 30;

typedef struct { uint64_t address, nbytes; int fd, is_mapping; } Piece;
typedef struct { char bytes[64]; } Handle;
typedef struct { int32_t pid, fd; uint64_t nbytes; } Name;

static Piece pieces[MAX], hosted[MAX];
static size_t used;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

static Piece *find(uint64_t address) {
    for (int i = 0; i < MAX; i++)
        if (pieces[i].nbytes && address - pieces[i].address < pieces[i].nbytes) return &pieces[i];
    return 0;
}

static int add(uint64_t *address, size_t nbytes, int fd, int is_mapping) {
    void *at = mmap(0, nbytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (at == MAP_FAILED) return OUT_OF_MEMORY;
    for (int i = 0; i < MAX; i++)
        if (!pieces[i].nbytes) {
            pieces[i] = (Piece){(uint64_t)at, nbytes, fd, is_mapping};
            *address = (uint64_t)at;
            return OK;
        }
    munmap(at, nbytes);
    return OUT_OF_MEMORY;
}

static int remove_piece(uint64_t address, int is_mapping) {
    pthread_mutex_lock(&lock);
    Piece *piece = find(address);
    int status = piece && piece->address == address && piece->is_mapping == is_mapping ? OK : INVALID;
    if (status == OK) {
        munmap((void *)address, piece->nbytes);
        close(piece->fd);
        if (!is_mapping) used -= piece->nbytes;
        *piece = (Piece){0};
    }
    pthread_mutex_unlock(&lock);
    return status;
}

int cuInit(unsigned flags) { return flags ? INVALID : OK; }
int cuDeviceGet(int *device, int ordinal) { return ordinal ? 101 : (*device = 0, OK); }
int cuDeviceGetUuid(unsigned char *uuid, int device) { return memset(uuid, 7, 16), device ? INVALID : OK; }
int cuDeviceCanAccessPeer(int *can, int device, int peer) { return *can = device != peer, OK; }
int cuDevicePrimaryCtxRetain(void **context, int device) { return *context = (void *)1, device ? INVALID : OK; }
static __thread void *current;
int cuCtxSetCurrent(void *context) { return current = context, OK; }
int cuCtxSynchronize(void) { return current ? OK : INVALID_CONTEXT; }
int cuMemGetInfo_v2(size_t *free, size_t *total) { return *total = TOTAL, *free = TOTAL - used, OK; }

int cuMemAlloc_v2(uint64_t *address, size_t nbytes) {
    if (!current) return INVALID_CONTEXT;
    pthread_mutex_lock(&lock);
    int status = OUT_OF_MEMORY, fd = -1;
    if (nbytes <= TOTAL - used && (fd = memfd_create("emulated-cuda", MFD_CLOEXEC)) >= 0 && !ftruncate(fd, nbytes))
        status = add(address, nbytes, fd, 0);
    if (status == OK) used += nbytes;
    else if (fd >= 0) close(fd);
    pthread_mutex_unlock(&lock);
    return status;
}

int cuMemFree_v2(uint64_t address) { return remove_piece(address, 0); }
int cuIpcCloseMemHandle(uint64_t address) { return remove_piece(address, 1); }
int cuMemsetD8_v2(uint64_t address, unsigned char value, size_t nbytes) { return memset((void *)address, value, nbytes), OK; }

int cuMemGetAddressRange_v2(uint64_t *base, size_t *nbytes, uint64_t address) {
    pthread_mutex_lock(&lock);
    Piece *piece = find(address);
    if (piece) *base = piece->address, *nbytes = piece->nbytes;
    pthread_mutex_unlock(&lock);
    return piece ? OK : INVALID;
}

int cuIpcGetMemHandle(Handle *handle, uint64_t address) {
    pthread_mutex_lock(&lock);
    Piece *piece = find(address);
    int status = piece && piece->address == address && !piece->is_mapping ? OK : INVALID;
    memset(handle, 0, sizeof *handle);
    if (status == OK) {
        Name name = {getpid(), piece->fd, piece->nbytes};
        memcpy(handle, &name, sizeof name);
    }
    pthread_mutex_unlock(&lock);
    return status;
}

int cuIpcOpenMemHandle_v2(uint64_t *address, Handle handle, unsigned flags) {
    Name name;
    memcpy(&name, &handle, sizeof name);
    if (!current || flags != 1 || name.pid == getpid()) return INVALID_CONTEXT;
    char path[64];
    snprintf(path, sizeof path, "/proc/%d/fd/%d", name.pid, name.fd);
    int fd = open(path, O_RDWR | O_CLOEXEC);
    if (fd < 0) return INVALID;
    pthread_mutex_lock(&lock);
    int status = add(address, name.nbytes, fd, 1);
    if (status) close(fd);
    pthread_mutex_unlock(&lock);
    return status;
}

int cuMemcpyAsync(uint64_t target, uint64_t source, size_t nbytes, void *stream) {
    return stream ? (memmove((void *)target, (void *)source, nbytes), OK) : INVALID;
}
int cuStreamCreate(void **stream, unsigned flags) { return flags == 1 && current ? (*stream = (void *)2, OK) : INVALID; }
int cuStreamSynchronize(void *stream) { return stream ? OK : INVALID; }
int cuStreamDestroy_v2(void *stream) { return stream ? OK : INVALID; }
int cuGetErrorString(int status, const char **text) {
    return *text = status == OUT_OF_MEMORY ? "out of memory" : status == 101 ? "invalid device ordinal" : "refused by the emulation", OK;
}

int cuMemHostAlloc(void **address, size_t nbytes, unsigned flags) {
    if (!current || flags != 3) return INVALID_CONTEXT;
    *address = mmap(0, nbytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (*address == MAP_FAILED) return OUT_OF_MEMORY;
    pthread_mutex_lock(&lock);
    int status = INVALID;
    for (int i = 0; i < MAX && status; i++)
        if (!hosted[i].nbytes) hosted[i] = (Piece){(uint64_t)*address, nbytes, -1, 0}, status = OK;
    pthread_mutex_unlock(&lock);
    return status;
}

int cuMemFreeHost(void *address) {
    pthread_mutex_lock(&lock);
    int status = INVALID;
    for (int i = 0; i < MAX && status; i++)
        if (hosted[i].nbytes && hosted[i].address == (uint64_t)address) {
            status = munmap(address, hosted[i].nbytes) ? INVALID : OK;
            hosted[i] = (Piece){0};
        }
    pthread_mutex_unlock(&lock);
    return status;
}
