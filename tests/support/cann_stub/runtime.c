// The part of Ascend's runtime (libascendcl) that torch-npu and mooncake's engine need to start, over
// host memory: streams are synchronous. Operators without a kernel fail; nothing is faked.
// CANN_STUB_DEVICES is the number of NPUs, CANN_STUB_BYTES the memory of each.
#define _GNU_SOURCE
#include <pthread.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

typedef int Error;
enum { OK = 0, BAD_DEVICE = 107001, NO_CONTEXT = 107002, NO_MEMORY = 207001, NO_KERNEL = 100024 };

static __thread int current = -1;
static pthread_mutex_t books = PTHREAD_MUTEX_INITIALIZER;
static size_t used_bytes[64];

static int64_t setting(const char *name, int64_t otherwise) {
    const char *text = getenv(name);
    return text ? atoll(text) : otherwise;
}
static int device_count(void) { return (int)setting("CANN_STUB_DEVICES", 1); }
static size_t device_bytes(void) { return (size_t)setting("CANN_STUB_BYTES", 4LL << 30); }

const char *aclrtGetSocName(void) { return "Ascend910B3"; }
const char *aclGetRecentErrMsg(void) { return "refused by the stub of CANN"; }
Error aclInit(const char *path) { return OK; }
Error aclFinalize(void) { return OK; }

// -- devices -------------------------------------------------------------------------------------

Error aclrtGetDeviceCount(uint32_t *count) {
    *count = (uint32_t)device_count();
    return *count ? OK : BAD_DEVICE;
}
Error aclrtSetDevice(int32_t device) {
    if (device < 0 || device >= device_count()) return BAD_DEVICE;
    current = device;
    return OK;
}
Error aclrtGetDevice(int32_t *device) {
    if (current < 0) return NO_CONTEXT;
    *device = current;
    return OK;
}
Error aclrtResetDevice(int32_t device) { return OK; }
Error aclrtGetCurrentContext(void **context) {
    if (current < 0) return NO_CONTEXT;
    *context = (void *)(intptr_t)(0x1000 + current);
    return OK;
}
Error aclrtSetCurrentContext(void *context) {
    current = (int)((intptr_t)context - 0x1000);
    return OK;
}
Error aclrtGetPrimaryCtxState(int32_t device, uint32_t *flags, int32_t *is_active) {
    *is_active = 1;
    return OK;
}
Error aclrtGetPhyDevIdByLogicDevId(int32_t logical, int32_t *physical) {
    *physical = logical;
    return OK;
}
Error aclrtGetLogicDevIdByUserDevId(int32_t user, int32_t *logical) {
    *logical = user;
    return OK;
}
Error aclrtDeviceCanAccessPeer(int32_t *can, int32_t device, int32_t peer) {
    *can = 1;
    return OK;
}
Error aclrtGetDeviceInfo(uint32_t device, int attribute, int64_t *value) {
    *value = 20;
    return OK;
}
Error aclrtGetStreamResLimit(void *stream, int kind, uint32_t *value) {
    *value = 20;
    return OK;
}
Error aclrtGetDeviceResLimit(int device, int kind, uint32_t *value) {
    *value = 20;
    return OK;
}
Error aclrtGetSysParamOpt(int option, int64_t *value) {
    *value = 0;
    return OK;
}
Error aclrtCtxGetSysParamOpt(int option, int64_t *value) {
    *value = 0;
    return OK;
}

// -- memory --------------------------------------------------------------------------------------
// An allocation is preceded by a page with its size and its device.

typedef struct {
    size_t nbytes;
    int device;
    void *whole;
} Header;

enum { PAGE = 2 << 20 };

static Error take(void **address, size_t nbytes) {
    if (current < 0) return NO_CONTEXT;
    pthread_mutex_lock(&books);
    int fits = used_bytes[current] + nbytes <= device_bytes();
    if (fits) used_bytes[current] += nbytes;
    pthread_mutex_unlock(&books);
    if (!fits) return NO_MEMORY;
    void *whole = NULL;
    if (posix_memalign(&whole, PAGE, nbytes + PAGE)) return NO_MEMORY;
    Header header = {nbytes, current, whole};
    *address = (char *)whole + PAGE;
    memcpy((char *)*address - sizeof header, &header, sizeof header);
    return OK;
}
Error aclrtMalloc(void **address, size_t nbytes, int policy) { return take(address, nbytes); }
Error aclrtMallocAlign32(void **address, size_t nbytes, int policy) { return take(address, nbytes); }
Error aclrtMallocWithCfg(void **address, size_t nbytes, int policy, void *config) {
    return take(address, nbytes);
}
Error aclrtFree(void *address) {
    Header header;
    memcpy(&header, (char *)address - sizeof header, sizeof header);
    pthread_mutex_lock(&books);
    used_bytes[header.device] -= header.nbytes;
    pthread_mutex_unlock(&books);
    free(header.whole);
    return OK;
}
Error aclrtGetMemInfo(int kind, size_t *free_bytes, size_t *total_bytes) {
    if (current < 0) return NO_CONTEXT;
    *total_bytes = device_bytes();
    *free_bytes = *total_bytes - used_bytes[current];
    return OK;
}
Error aclrtMallocHost(void **address, size_t nbytes) {
    return posix_memalign(address, 4096, nbytes ? nbytes : 1) ? NO_MEMORY : OK;
}
Error aclrtMallocHostWithCfg(void **address, size_t nbytes, void *config) {
    return aclrtMallocHost(address, nbytes);
}
Error aclrtFreeHost(void *address) {
    free(address);
    return OK;
}
Error aclrtMemcpy(void *to, size_t room, const void *from, size_t nbytes, int kind) {
    memmove(to, from, nbytes);
    return OK;
}
Error aclrtMemcpyAsync(
    void *to, size_t room, const void *from, size_t nbytes, int kind, void *stream) {
    memmove(to, from, nbytes);
    return OK;
}
Error aclrtMemcpyAsyncWithCondition(
    void *to, size_t room, const void *from, size_t nbytes, int kind, void *stream) {
    memmove(to, from, nbytes);
    return OK;
}
Error aclrtMemset(void *to, size_t room, int32_t value, size_t nbytes) {
    memset(to, value, nbytes);
    return OK;
}
Error aclrtMemsetAsync(void *to, size_t room, int32_t value, size_t nbytes, void *stream) {
    memset(to, value, nbytes);
    return OK;
}
typedef struct {
    struct {
        uint32_t id;
        uint32_t type;  // 0 host, 1 device
    } location;
    uint32_t page_bytes;
    uint32_t reserved[4];
} Attributes;  // aclrtPtrAttributes, which callers have on their stacks
Error aclrtPointerGetAttributes(const void *address, Attributes *attributes) {
    memset(attributes, 0, sizeof *attributes);
    attributes->location.type = 1;
    return OK;
}

// -- streams and events --------------------------------------------------------------------------

static intptr_t last_stream = 0x2000;
typedef struct {
    double at_ms;
} Event;

Error aclrtCreateStream(void **stream) {
    *stream = (void *)__sync_add_and_fetch(&last_stream, 16);
    return OK;
}
Error aclrtCreateStreamWithConfig(void **stream, uint32_t priority, uint32_t flags) {
    return aclrtCreateStream(stream);
}
Error aclrtStreamQuery(void *stream, int *status) {
    *status = 0;
    return OK;
}
Error aclrtGetStreamAvailableNum(uint32_t *count) {
    *count = 1000;
    return OK;
}
Error aclrtCreateEvent(void **event) {
    *event = calloc(1, sizeof(Event));
    return OK;
}
Error aclrtCreateEventWithFlag(void **event, uint32_t flags) { return aclrtCreateEvent(event); }
Error aclrtCreateEventExWithFlag(void **event, uint32_t flags) { return aclrtCreateEvent(event); }
Error aclrtDestroyEvent(void *event) {
    free(event);
    return OK;
}
Error aclrtRecordEvent(void *event, void *stream) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    ((Event *)event)->at_ms = now.tv_sec * 1e3 + now.tv_nsec / 1e6;
    return OK;
}
Error aclrtQueryEventStatus(void *event, int *status) {
    *status = 1;
    return OK;
}
Error aclrtQueryEventWaitStatus(void *event, int *status) {
    *status = 0;
    return OK;
}
Error aclrtQueryEvent(void *event, int *status) {
    *status = 0;
    return OK;
}
Error aclrtEventElapsedTime(float *milliseconds, void *from, void *to) {
    *milliseconds = (float)(((Event *)to)->at_ms - ((Event *)from)->at_ms);
    return OK;
}

// -- waits, which have nothing to wait for: streams are synchronous --------------------------------

#define DONE(name) \
    Error name(void) { return OK; }
DONE(aclrtSynchronizeDevice)
DONE(aclrtSynchronizeDeviceWithTimeout)
DONE(aclrtSynchronizeStream)
DONE(aclrtSynchronizeStreamWithTimeout)
DONE(aclrtSynchronizeEvent)
DONE(aclrtSynchronizeEventWithTimeout)
DONE(aclrtStreamWaitEvent)
DONE(aclrtResetEvent)
DONE(aclrtDestroyStream)
DONE(aclrtDestroyStreamForce)
DONE(aclrtSetOpExecuteTimeOut)
DONE(aclrtSetDeviceSatMode)
DONE(aclrtSetStreamFailureMode)
DONE(aclrtSetStreamOverflowSwitch)
DONE(aclrtSetSysParamOpt)
DONE(aclrtCtxSetSysParamOpt)
DONE(aclSetCompileopt)
DONE(aclopSetCompileFlag)

// -- operators, of which there are none ----------------------------------------------------------

size_t aclGetCompileoptSize(int option) { return 64; }
Error aclGetCompileopt(int option, char *value, size_t length) {
    if (length) value[0] = 0;
    return OK;
}
Error aclopCompileAndExecute(void) { return NO_KERNEL; }
Error aclopCompileAndExecuteV2(void) { return NO_KERNEL; }
