/* Copies of many pieces, with no per-piece work in Python. Several threads run a job together: each
 * takes chunks of it until the job is done, stopped or past its deadline. */
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
#define BLOCK_BYTES 256u
#define PAGE_BYTES 4096u
#define AHEAD_BYTES 512u /* prefetch distance of streamed copies: CPUs prefetch within a page */

enum { BY_MAPPING = 0, BY_CALL = 1 };
/* Whether a copy bypasses the caches, for jobs that are larger than they are: in the way that is
 * fastest on this CPU, or several pages at a time on any CPU. */
enum { CACHED = 0, STREAMED = 1, STREAMED_BY_PAGES = 2 };
enum { RUN_DONE = 0, RUN_STOPPED = -1, RUN_LATE = -2 }; /* an errno otherwise */

struct job {
    const uint64_t *local, *remote, *nbytes; /* [count] */
    uint64_t count;
    uint64_t next, offset; /* the first piece not yet taken, and its bytes taken; under `lock` */
    int64_t deadline_ns;   /* CLOCK_MONOTONIC */
    int32_t lock;
    int32_t stop;
    int32_t pid;
    int32_t method;
    int32_t write;
    int32_t streaming; /* CACHED, STREAMED or STREAMED_BY_PAGES */
};

static int64_t now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

/* Take the next pieces; returns their number, and their total size in `bytes`. */
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

#if defined(__AVX512F__)
typedef __m512i vector;
#define LOAD(from) _mm512_loadu_si512(from)
#define STORE(to, value) _mm512_stream_si512((void *)(to), value)
#define READS_AHEAD 0
#elif defined(__AVX2__)
typedef __m256i vector;
#define LOAD(from) _mm256_loadu_si256((const __m256i *)(from))
#define STORE(to, value) _mm256_stream_si256((__m256i *)(to), value)
#define READS_AHEAD 1
#endif

#if defined(LOAD)
/* Copy BLOCK_BYTES with stores that bypass the caches; `to` is aligned to a vector. */
static inline void stream_block(char *to, const char *from) {
    vector values[BLOCK_BYTES / sizeof(vector)];
    for (unsigned i = 0; i < BLOCK_BYTES / sizeof(vector); i++)
        values[i] = LOAD(from + i * sizeof(vector));
    for (unsigned i = 0; i < BLOCK_BYTES / sizeof(vector); i++)
        STORE(to + i * sizeof(vector), values[i]);
}

/* Copy eight pages at a time, a block of each in turn; then four at a time if fewer are left. The
 * CPU's prefetching ends at each page, but with several pages some of it is always in flight.
 * Returns the number of bytes copied. Intel's CPUs: 12 GB/s, page after page 9.4, memcpy 7. */
static size_t stream_pages(char *to, const char *from, size_t size) {
    size_t done = 0;
    for (size_t group = 8 * PAGE_BYTES; group >= 4 * PAGE_BYTES; group /= 2)
        for (; size - done >= group; done += group)
            for (size_t at = done; at < done + PAGE_BYTES; at += BLOCK_BYTES)
                for (size_t page = 0; page < group; page += PAGE_BYTES)
                    stream_block(to + at + page, from + at + page);
    return done;
}

/* memcpy that does not read the destination's cache lines before it overwrites them. */
static void stream(char *to, const char *from, size_t size, int by_pages) {
    size_t done = -(uintptr_t)to & (sizeof(vector) - 1);
    if (size < 512 + done) {
        memcpy(to, from, size);
        return;
    }
    memcpy(to, from, done);
    if (by_pages) done += stream_pages(to + done, from + done, size - done);
    for (; size - done >= BLOCK_BYTES; done += BLOCK_BYTES) {
        if (READS_AHEAD && !by_pages)
            for (unsigned at = AHEAD_BYTES; at < AHEAD_BYTES + BLOCK_BYTES; at += 64)
                _mm_prefetch(from + done + at, _MM_HINT_NTA); /* never faults */
        stream_block(to + done, from + done);
    }
    memcpy(to + done, from + done, size - done);
}

static int streams_by_pages(const struct job *job) {
    return job->streaming == STREAMED_BY_PAGES || __builtin_cpu_is("intel");
}
#else
static void stream(char *to, const char *from, size_t size, int by_pages) {
    (void)by_pages;
    memcpy(to, from, size);
}

static int streams_by_pages(const struct job *job) { return job->streaming == STREAMED_BY_PAGES; }
#endif

static void copy_mapped(const struct job *job, const struct iovec *local,
                        const struct iovec *remote, int pieces) {
    const struct iovec *to = job->write ? remote : local, *from = job->write ? local : remote;
    int by_pages = streams_by_pages(job);
    for (int i = 0; i < pieces; i++) {
        if (job->streaming) {
            if (i + 1 < pieces) __builtin_prefetch(from[i + 1].iov_base);
            stream(to[i].iov_base, from[i].iov_base, to[i].iov_len, by_pages);
        } else {
            memcpy(to[i].iov_base, from[i].iov_base, to[i].iov_len);
        }
    }
#if defined(LOAD)
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

/* Copy chunks of the job until none is left. */
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

/* Copy one piece by system call; returns 0 or an errno. */
int mooncake_call_one(int pid, int write, uint64_t local, uint64_t remote, uint64_t size) {
    struct iovec here = {(void *)local, size}, there = {(void *)remote, size};
    ssize_t moved = write ? process_vm_writev(pid, &here, 1, &there, 1, 0)
                          : process_vm_readv(pid, &here, 1, &there, 1, 0);
    if (moved < 0) return errno;
    return (uint64_t)moved == size ? 0 : EFAULT;
}
