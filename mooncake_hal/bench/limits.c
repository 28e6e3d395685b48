/* The machine's limits: the plainest possible copy loops, with which transports are compared. */
#define _GNU_SOURCE
#include <errno.h>
#include <stdint.h>
#include <string.h>
#include <sys/uio.h>

void limit_memcpy(const uint64_t *to, const uint64_t *from, const uint64_t *nbytes, uint64_t count) {
    for (uint64_t i = 0; i < count; i++) memcpy((void *)to[i], (const void *)from[i], nbytes[i]);
}

/* process_vm_readv in batches of 1,024 pieces, the maximum per call. */
int limit_readv(int pid, const uint64_t *to, const uint64_t *from, const uint64_t *nbytes,
                uint64_t count) {
    struct iovec local[1024], remote[1024];
    for (uint64_t i = 0; i < count;) {
        int n = 0;
        for (; n < 1024 && i < count; n++, i++) {
            local[n] = (struct iovec){(void *)to[i], nbytes[i]};
            remote[n] = (struct iovec){(void *)from[i], nbytes[i]};
        }
        if (process_vm_readv(pid, local, n, remote, n, 0) < 0) return errno;
    }
    return 0;
}
