// The only function of MLIR's C runner library that lowered kernels call.
#include <stdint.h>
#include <string.h>

typedef struct {
    int64_t rank;
    void *descriptor;
} Unranked;
typedef struct {
    char *base;
    char *data;
    int64_t offset;
    int64_t sizes_and_strides[];
} Ranked;

void memrefCopy(int64_t width, Unranked *from, Unranked *to) {
    Ranked *source = from->descriptor, *target = to->descriptor;
    int64_t rank = from->rank, at[16] = {0};
    const int64_t *sizes = source->sizes_and_strides;
    const int64_t *old = sizes + rank, *new = target->sizes_and_strides + rank;
    for (int64_t i = 0; i < rank; i++) {
        if (!sizes[i]) return;
    }
    for (;;) {
        char *read = source->data + source->offset * width;
        char *write = target->data + target->offset * width;
        for (int64_t i = 0; i < rank; i++) {
            read += at[i] * old[i] * width;
            write += at[i] * new[i] * width;
        }
        memcpy(write, read, width);
        int64_t i = rank - 1;
        for (; i >= 0 && ++at[i] == sizes[i]; i--) at[i] = 0;
        if (i < 0) return;
    }
}
