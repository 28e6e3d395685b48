/* Copies of many pieces with no work per piece outside this file. A job is shared by several
 * threads, each of which takes chunks of it until it is done, stopped or late. */
#define _GNU_SOURCE
#include <errno.h>
#include <sched.h>
#include <stdint.h>
#include <string.h>
#include <sys/uio.h>
#include <time.h>
#if defined(__AVX512F__) || defined(__AVX2__)
#include <immintrin.h>
#endif

#define CHUNK_BYTES (1u << 21)
#define CHUNK_PIECES 1024 /* IOV_MAX */
#define AHEAD_BYTES 512   /* read ahead of a streamed copy: what the CPU foresees ends at a page */

enum { BY_MAPPING = 0, BY_CALL = 1 };
enum { RUN_DONE = 0, RUN_STOPPED = -1, RUN_LATE = -2 }; /* an errno otherwise */

struct job {
    const uint64_t *local, *remote, *nbytes; /* [count] */
    uint64_t count;
    uint64_t next, offset; /* the first piece not handed out, and what of it was; under `lock` */
    int64_t deadline_ns;   /* CLOCK_MONOTONIC */
    int32_t lock;
    int32_t stop;
    int32_t pid;
    int32_t method;
    int32_t write;
    int32_t streaming; /* bypass the caches: the whole job is larger than they are */
};

static int64_t now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

/* Hand out the next pieces; returns how many and their bytes. */
static int take(struct job *job, struct iovec *local, struct iovec *remote, uint64_t *bytes) {
    int pieces = 0;
    uint64_t taken = 0;
    while (__atomic_exchange_n(&job->lock, 1, __ATOMIC_ACQUIRE)) sched_yield();
    while (job->next < job->count && pieces < CHUNK_PIECES && taken < CHUNK_BYTES) {
        uint64_t i = job->next, left = job->nbytes[i] - job->offset;
        uint64_t size = left < CHUNK_BYTES - taken ? left : CHUNK_BYTES - taken;
        local[pieces] = (struct iovec){(void *)(job->local[i] + job->offset), size};
        remote[pieces] = (struct iovec){(void *)(job->remote[i] + job->offset), size};
        pieces++;
        taken += size;
        if (size == left) {
            job->next++;
            job->offset = 0;
        } else {
            job->offset += size;
        }
    }
    __atomic_store_n(&job->lock, 0, __ATOMIC_RELEASE);
    *bytes = taken;
    return pieces;
}

/* memcpy that does not read the destination's lines before it overwrites them. */
static void stream(char *to, const char *from, size_t size) {
#if defined(__AVX512F__)
    size_t head = -(uintptr_t)to & 63;
    if (size < 512 + head) {
        memcpy(to, from, size);
        return;
    }
    memcpy(to, from, head);
    to += head, from += head, size -= head;
    for (; size >= 256; size -= 256, to += 256, from += 256) {
        __m512i a = _mm512_loadu_si512(from), b = _mm512_loadu_si512(from + 64);
        __m512i c = _mm512_loadu_si512(from + 128), d = _mm512_loadu_si512(from + 192);
        _mm512_stream_si512((void *)to, a);
        _mm512_stream_si512((void *)(to + 64), b);
        _mm512_stream_si512((void *)(to + 128), c);
        _mm512_stream_si512((void *)(to + 192), d);
    }
#elif defined(__AVX2__)
    size_t head = -(uintptr_t)to & 31;
    if (size < 512 + head) {
        memcpy(to, from, size);
        return;
    }
    memcpy(to, from, head);
    to += head, from += head, size -= head;
    for (; size >= 128; size -= 128, to += 128, from += 128) {
        _mm_prefetch(from + AHEAD_BYTES, _MM_HINT_NTA); /* faults nowhere */
        _mm_prefetch(from + AHEAD_BYTES + 64, _MM_HINT_NTA);
        __m256i a = _mm256_loadu_si256((const void *)from);
        __m256i b = _mm256_loadu_si256((const void *)(from + 32));
        __m256i c = _mm256_loadu_si256((const void *)(from + 64));
        __m256i d = _mm256_loadu_si256((const void *)(from + 96));
        _mm256_stream_si256((void *)to, a);
        _mm256_stream_si256((void *)(to + 32), b);
        _mm256_stream_si256((void *)(to + 64), c);
        _mm256_stream_si256((void *)(to + 96), d);
    }
#endif
    memcpy(to, from, size);
}

static void copy_mapped(const struct job *job, const struct iovec *local,
                        const struct iovec *remote, int pieces) {
    const struct iovec *to = job->write ? remote : local, *from = job->write ? local : remote;
    for (int i = 0; i < pieces; i++) {
        if (job->streaming) {
            if (i + 1 < pieces) __builtin_prefetch(from[i + 1].iov_base);
            stream(to[i].iov_base, from[i].iov_base, to[i].iov_len);
        } else {
            memcpy(to[i].iov_base, from[i].iov_base, to[i].iov_len);
        }
    }
#if defined(__AVX512F__) || defined(__AVX2__)
    if (job->streaming) _mm_sfence();
#endif
}

static int copy_by_call(const struct job *job, const struct iovec *local,
                        const struct iovec *remote, int pieces, uint64_t bytes) {
    ssize_t moved =
        job->write ? process_vm_writev(job->pid, local, pieces, remote, pieces, 0)
                   : process_vm_readv(job->pid, local, pieces, remote, pieces, 0);
    if (moved < 0) return errno;
    return (uint64_t)moved == bytes ? 0 : EFAULT;
}

/* Work on the job until nothing of it is left to hand out. */
int mooncake_run(struct job *job) {
    struct iovec local[CHUNK_PIECES], remote[CHUNK_PIECES];
    uint64_t bytes;
    for (;;) {
        if (__atomic_load_n(&job->stop, __ATOMIC_ACQUIRE)) return RUN_STOPPED;
        if (now_ns() > job->deadline_ns) return RUN_LATE;
        int pieces = take(job, local, remote, &bytes);
        if (!pieces) return RUN_DONE;
        if (job->method == BY_MAPPING) {
            copy_mapped(job, local, remote, pieces);
        } else {
            int error = copy_by_call(job, local, remote, pieces, bytes);
            if (error) return error;
        }
    }
}

/* One piece through the kernel; returns 0 or an errno. */
int mooncake_call_one(int pid, int write, uint64_t local, uint64_t remote, uint64_t size) {
    struct iovec here = {(void *)local, size}, there = {(void *)remote, size};
    ssize_t moved = write ? process_vm_writev(pid, &here, 1, &there, 1, 0)
                          : process_vm_readv(pid, &here, 1, &there, 1, 0);
    if (moved < 0) return errno;
    return (uint64_t)moved == size ? 0 : EFAULT;
}
