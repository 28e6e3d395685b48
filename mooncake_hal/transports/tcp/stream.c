/* One-sided reads and writes over TCP streams: the client's operations, which can be resumed, and
 * the loop that serves a connection. Frames are little endian, as is every supported machine.
 *
 *   request   magic u32, operation u16, levels u16, rows u64, total u64, then rows of u64: address,
 *             nbytes, and count and step of each level (strided_pieces.py); a write's bytes follow
 *   reply     magic u32, status u32, index u64 of the first rejected span
 *   a read's bytes follow a reply with status OK, in chunks, each with a trailer: magic u32,
 *             status u32
 *
 * A server that has to abort a read fills the chunk up with zeros and gives the reason in the
 * trailer, so that the connection stays usable. */
#define _GNU_SOURCE
#include <errno.h>
#include <poll.h>
#include <pthread.h>
#include <sched.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <time.h>

#define MAGIC 0x3154484du /* "MHT1" */
#define CHUNK_BYTES (64u << 20)
#define MAX_PIECES 1024 /* IOV_MAX */
#define MAX_SPANS (1u << 20)
#define MAX_LEVELS 3
#define SPIN_NS 30000 /* poll this long before sleeping: a wake-up costs more than a fast reply */

enum { READ = 1, WRITE = 2 };
enum { OK = 0, UNKNOWN = 1, REVOKED = 2, OUT_OF_BOUNDS = 3, MALFORMED = 4, FAULT = 5 };
enum { RUN_DONE = 0, RUN_AGAIN = -1, RUN_STOPPED = -2, RUN_LATE = -3, RUN_CLOSED = -4, RUN_BROKEN = -5 };

struct request {
    uint32_t magic;
    uint16_t operation, levels;
    uint64_t rows, total;
};

static uint64_t row_bytes(uint16_t levels) { return 16 * (1 + (uint64_t)levels); }

struct reply {
    uint32_t magic, status;
    uint64_t index;
};

struct trailer {
    uint32_t magic, status;
};

static int64_t now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

/* Bytes in flight: a head, a body that is scattered over pieces, and a tail. */
struct flow {
    char *head, *tail;
    uint64_t head_left, body_left, tail_left;
    const uint64_t *address, *nbytes; /* the pieces of the body, `stride` words apart */
    uint64_t stride, next, offset;
};

static int gather(const struct flow *f, struct iovec *iov) {
    int n = 0;
    uint64_t left = f->body_left, i = f->next, offset = f->offset;
    if (f->head_left) iov[n++] = (struct iovec){f->head, f->head_left};
    while (left && n < MAX_PIECES - 1) {
        uint64_t size = f->nbytes[i * f->stride] - offset;
        if (size > left) size = left;
        iov[n++] = (struct iovec){(void *)(f->address[i * f->stride] + offset), size};
        left -= size;
        i++;
        offset = 0;
    }
    if (!left && f->tail_left) iov[n++] = (struct iovec){f->tail, f->tail_left};
    return n;
}

static uint64_t take(uint64_t *left, uint64_t moved) {
    uint64_t used = moved < *left ? moved : *left;
    *left -= used;
    return used;
}

static void skip_body(struct flow *f, uint64_t moved) {
    f->body_left -= moved;
    while (moved) {
        uint64_t left = f->nbytes[f->next * f->stride] - f->offset;
        if (moved < left) {
            f->offset += moved;
            return;
        }
        moved -= left;
        f->next++;
        f->offset = 0;
    }
}

static void advance(struct flow *f, uint64_t moved) {
    uint64_t used = take(&f->head_left, moved);
    f->head += used;
    moved -= used;
    used = moved < f->body_left ? moved : f->body_left;
    skip_body(f, used);
    moved -= used;
    used = take(&f->tail_left, moved);
    f->tail += used;
}

/* Make one system call. The socket's own timeouts (tens of milliseconds) bound it, so that stop
 * flags and deadlines are checked often enough. Returns the bytes that moved, 0 at the end of the
 * stream, -EAGAIN if none moved in time, or another -errno. */
static int64_t step(int fd, struct flow *f, int is_send, int flags) {
    struct iovec iov[MAX_PIECES];
    struct msghdr message = {.msg_iov = iov, .msg_iovlen = gather(f, iov)};
    ssize_t moved =
        is_send ? sendmsg(fd, &message, MSG_NOSIGNAL) : recvmsg(fd, &message, flags);
    if (moved < 0) {
        if (errno == EINTR || errno == EWOULDBLOCK) return -EAGAIN;
        return -errno;
    }
    advance(f, moved);
    return moved;
}

static int is_over(const struct flow *f) {
    return !(f->head_left | f->body_left | f->tail_left);
}

/* ---- client ------------------------------------------------------------------------------- */

struct operation {
    const uint64_t *local, *remote, *nbytes; /* [count] */
    uint64_t count, total;
    char *frame; /* buffer with the request, then its rows */
    uint64_t rows;
    int64_t deadline_ns;
    int32_t fd, write;
    int32_t stop, phase;
    uint32_t status, levels;
    uint64_t index;
    struct flow flow;
    struct reply reply;
    struct trailer trailer;
    uint64_t left; /* of a read: bytes of the chunks after the current one */
    uint64_t one[3]; /* of mooncake_one: local, remote, nbytes */
    char one_frame[sizeof(struct request) + 16];
};

enum { SENDING = 0, RECEIVING = 1 };

uint64_t mooncake_operation_size(void) { return sizeof(struct operation); }

/* Fill in the request. The caller has set its rows and the fields up to `write`. */
void mooncake_begin(struct operation *op) {
    struct request request = {MAGIC, op->write ? WRITE : READ, op->levels, op->rows, op->total};
    memcpy(op->frame, &request, sizeof request);
    op->flow = (struct flow){
        .head = op->frame,
        .head_left = sizeof request + row_bytes(op->levels) * op->rows,
        .address = op->local,
        .nbytes = op->nbytes,
        .stride = 1,
        .body_left = op->write ? op->total : 0,
    };
    op->phase = SENDING;
    op->status = OK;
    op->left = op->write ? 0 : op->total;
}

static void expect_chunk(struct operation *op) {
    struct flow *f = &op->flow;
    f->body_left = op->left < CHUNK_BYTES ? op->left : CHUNK_BYTES;
    f->tail = (char *)&op->trailer;
    f->tail_left = op->write ? 0 : sizeof op->trailer;
    op->left -= f->body_left;
}

static void expect_reply(struct operation *op) {
    op->phase = RECEIVING;
    op->flow.next = op->flow.offset = 0;
    op->flow.head = (char *)&op->reply;
    op->flow.head_left = sizeof op->reply;
    expect_chunk(op);
}

/* Process received bytes; returns RUN_AGAIN if more are expected. */
static int process_received(struct operation *op) {
    struct flow *f = &op->flow;
    if (f->head_left) return RUN_AGAIN;
    if (op->reply.magic != MAGIC) return RUN_BROKEN;
    if (op->reply.status != OK) {
        op->status = op->reply.status;
        op->index = op->reply.index;
        return RUN_DONE;
    }
    if (!is_over(f)) return RUN_AGAIN;
    if (op->write) return RUN_DONE;
    if (op->trailer.magic != MAGIC) return RUN_BROKEN;
    if (op->trailer.status != OK) {
        op->status = op->trailer.status;
        return RUN_DONE;
    }
    if (!op->left) return RUN_DONE;
    expect_chunk(op);
    return RUN_AGAIN;
}

/* Wait for the first byte of the reply without blocking past `until_ns`. */
static int has_reply(int fd, int64_t until_ns) {
    int64_t left = until_ns - now_ns();
    struct timespec timeout = {0, left > 0 ? left : 0};
    struct pollfd wanted = {fd, POLLIN, 0};
    return ppoll(&wanted, 1, &timeout, NULL) != 0;
}

/* Poll for bytes for up to SPIN_NS without sleeping; -EAGAIN if none arrive. */
static int64_t step_soon(int fd, struct flow *f) {
    int64_t end = now_ns() + SPIN_NS, moved;
    do {
        moved = step(fd, f, 0, MSG_DONTWAIT);
        if (moved != -EAGAIN) return moved;
        sched_yield();
    } while (now_ns() < end);
    return -EAGAIN;
}

/* Make an operation's next system call; -EAGAIN if the reply does not arrive before `until_ns`. */
static int64_t advance_operation(struct operation *op, int64_t until_ns) {
    struct flow *f = &op->flow;
    if (op->phase == SENDING) return step(op->fd, f, 1, 0);
    if (f->head_left == sizeof op->reply) {
        int64_t moved = step_soon(op->fd, f);
        if (moved != -EAGAIN) return moved;
        if (until_ns && !has_reply(op->fd, until_ns)) return -EAGAIN;
    }
    return step(op->fd, f, 0, 0);
}

/* Run the operation until it is over or `until_ns` (0: its own deadline) has passed. Then returns
 * RUN_AGAIN, and the operation can be continued. Positive results are errno numbers. */
int mooncake_run(struct operation *op, int64_t until_ns) {
    for (;;) {
        if (__atomic_load_n(&op->stop, __ATOMIC_ACQUIRE)) return RUN_STOPPED;
        int64_t moved = advance_operation(op, until_ns);
        if (moved == 0) return RUN_CLOSED;
        if (moved < 0 && moved != -EAGAIN) return (int)-moved;
        if (moved > 0 && op->phase == SENDING && is_over(&op->flow)) expect_reply(op);
        else if (moved > 0 && op->phase == RECEIVING) {
            int state = process_received(op);
            if (state != RUN_AGAIN) return state;
        }
        int64_t now = now_ns();
        if (now > op->deadline_ns) return RUN_LATE;
        if (until_ns && now > until_ns) return RUN_AGAIN;
    }
}

/* Begin and run an operation of one span, whose arrays are stored in the operation itself. */
int mooncake_one(struct operation *op, uint64_t local, uint64_t remote, uint64_t nbytes,
                 double timeout, double inline_s) {
    int64_t now = now_ns();
    op->one[0] = local;
    op->one[1] = remote;
    op->one[2] = nbytes;
    op->local = &op->one[0];
    op->remote = &op->one[1];
    op->nbytes = &op->one[2];
    op->count = op->rows = 1;
    op->levels = 0;
    op->total = nbytes;
    op->frame = op->one_frame;
    memcpy(op->frame + sizeof(struct request), &op->one[1], 16);
    op->stop = 0;
    op->deadline_ns = timeout < 1e9 ? now + (int64_t)(timeout * 1e9) : INT64_MAX;
    mooncake_begin(op);
    return mooncake_run(op, now + (int64_t)(inline_s * 1e9));
}

/* ---- server ------------------------------------------------------------------------------- */

struct connection {
    struct connection *next;
    const uint64_t *table; /* (address, nbytes) x count of the current operation, or NULL */
    uint64_t count;
    int abort; /* its memory was revoked: it must not be accessed any more */
};

struct server {
    pthread_mutex_t lock;
    pthread_cond_t released;
    uint64_t live, dead; /* numbers of registered and of revoked regions */
    uint64_t *regions;   /* (start, end) of the registered ones, sorted, then of the revoked */
    struct connection *connections;
};

struct server *mooncake_server_new(void) {
    struct server *s = calloc(1, sizeof *s);
    if (!s) return NULL;
    pthread_mutex_init(&s->lock, NULL);
    pthread_cond_init(&s->released, NULL);
    return s;
}

/* The caller must have ended all connections. */
void mooncake_server_free(struct server *s) {
    free(s->regions);
    pthread_cond_destroy(&s->released);
    pthread_mutex_destroy(&s->lock);
    free(s);
}

/* Replace the tables of regions; returns 0, or -1 if out of memory. */
int mooncake_server_set(struct server *s, const uint64_t *regions, uint64_t live, uint64_t dead) {
    uint64_t *copy = malloc(16 * (live + dead) + 1);
    if (!copy) return -1;
    memcpy(copy, regions, 16 * (live + dead));
    pthread_mutex_lock(&s->lock);
    uint64_t *old = s->regions;
    s->regions = copy;
    s->live = live;
    s->dead = dead;
    pthread_mutex_unlock(&s->lock);
    free(old);
    return 0;
}

static int touches(const struct connection *c, uint64_t start, uint64_t end) {
    for (uint64_t i = 0; i < c->count; i++) {
        uint64_t a = c->table[2 * i], n = c->table[2 * i + 1];
        if (a < end && start < a + n) return 1;
    }
    return 0;
}

/* Abort all operations that touch [start, end); return once none does any more. */
void mooncake_server_fence(struct server *s, uint64_t start, uint64_t end) {
    pthread_mutex_lock(&s->lock);
    for (;;) {
        int busy = 0;
        for (struct connection *c = s->connections; c; c = c->next) {
            if (c->table && touches(c, start, end)) {
                __atomic_store_n(&c->abort, 1, __ATOMIC_RELEASE);
                busy = 1;
            }
        }
        if (!busy) break;
        pthread_cond_wait(&s->released, &s->lock);
    }
    pthread_mutex_unlock(&s->lock);
}

/* The position of the last region that starts at or before an address, or -1. */
static int64_t position(const struct server *s, uint64_t address) {
    int64_t low = 0, high = (int64_t)s->live;
    while (low < high) {
        int64_t middle = (low + high) / 2;
        if (s->regions[2 * middle] <= address) low = middle + 1;
        else high = middle;
    }
    return low - 1;
}

static uint32_t check_span(const struct server *s, uint64_t address, uint64_t nbytes) {
    if (!nbytes || address + nbytes < address) return nbytes ? UNKNOWN : MALFORMED;
    int64_t at = position(s, address);
    if (at >= 0 && address < s->regions[2 * at + 1])
        return address + nbytes <= s->regions[2 * at + 1] ? OK : OUT_OF_BOUNDS;
    for (uint64_t i = s->live; i < s->live + s->dead; i++)
        if (s->regions[2 * i] < address + nbytes && address < s->regions[2 * i + 1]) return REVOKED;
    return UNKNOWN;
}

struct pieces {
    uint64_t *table; /* (address, nbytes) x count */
    uint64_t count, capacity;
};

/* The number of pieces that rows describe; 0 if they are invalid or too many. */
static uint64_t count_pieces(const uint64_t *row, const struct request *r) {
    uint64_t count = 0;
    for (uint64_t i = 0; i < r->rows; i++, row += 2 + 2 * r->levels) {
        uint64_t pieces = 1;
        for (int level = 0; level < r->levels; level++) {
            uint64_t times = row[2 + 2 * level];
            if (!times || times > MAX_SPANS) return 0;
            pieces *= times; /* at most 2^60, since it was at most 2^40 */
        }
        if (pieces > MAX_SPANS - count) return 0;
        count += pieces;
    }
    return count;
}

/* Write the pieces of one row, the innermost level first; returns the position after them. */
static uint64_t *expand_row(const uint64_t *row, int levels, uint64_t *to) {
    uint64_t count = 1;
    to[0] = row[0];
    to[1] = row[1];
    for (int level = 0; level < levels; level++) {
        uint64_t times = row[2 + 2 * level], step = row[3 + 2 * level];
        for (uint64_t i = count; i < count * times; i++) {
            to[2 * i] = to[2 * (i - count)] + step;
            to[2 * i + 1] = row[1];
        }
        count *= times;
    }
    return to + 2 * count;
}

/* Expand a request's rows to pieces; returns RUN_BROKEN if they are invalid, or ENOMEM. */
static int expand(const uint64_t *rows, const struct request *r, struct pieces *pieces) {
    uint64_t count = count_pieces(rows, r);
    if (!count) return RUN_BROKEN;
    if (count > pieces->capacity) {
        free(pieces->table);
        pieces->table = malloc(16 * count);
        pieces->capacity = pieces->table ? count : 0;
        if (!pieces->table) return ENOMEM;
    }
    uint64_t *to = pieces->table;
    for (uint64_t i = 0; i < r->rows; i++)
        to = expand_row(rows + i * (2 + 2 * r->levels), r->levels, to);
    pieces->count = count;
    return RUN_DONE;
}

/* Check every span against the regions and, if all are valid, record the operation for `fence`.
 * Both happen under the lock that revoking takes. */
static struct reply admit(struct server *s, struct connection *c, const struct pieces *pieces,
                          const struct request *request) {
    struct reply reply = {MAGIC, OK, 0};
    const uint64_t *table = pieces->table;
    uint64_t total = 0;
    pthread_mutex_lock(&s->lock);
    for (uint64_t i = 0; i < pieces->count && reply.status == OK; i++) {
        uint64_t n = table[2 * i + 1];
        reply.status = check_span(s, table[2 * i], n);
        reply.index = i;
        total += n;
    }
    if (reply.status == OK && total != request->total) reply.status = MALFORMED;
    if (reply.status == OK) {
        c->count = pieces->count;
        c->abort = 0;
        c->table = table;
    }
    pthread_mutex_unlock(&s->lock);
    return reply;
}

static void release(struct server *s, struct connection *c) {
    pthread_mutex_lock(&s->lock);
    c->table = NULL;
    pthread_cond_broadcast(&s->released);
    pthread_mutex_unlock(&s->lock);
}

static int stopped(const int32_t *stop) { return __atomic_load_n(stop, __ATOMIC_ACQUIRE); }

static ssize_t receive_soon(int fd, void *to, uint64_t size) {
    int64_t end = now_ns() + SPIN_NS;
    ssize_t got;
    do {
        got = recv(fd, to, size, MSG_DONTWAIT);
        if (got >= 0 || errno != EAGAIN) return got;
        sched_yield();
    } while (now_ns() < end);
    return recv(fd, to, size, 0);
}

static int receive_all(int fd, void *to, uint64_t size, const int32_t *stop, int idle) {
    char *at = to;
    while (size) {
        ssize_t got = idle ? receive_soon(fd, at, size) : recv(fd, at, size, 0);
        if (got == 0) return RUN_CLOSED;
        if (got < 0 && errno != EAGAIN && errno != EINTR) return errno;
        if (stopped(stop)) return RUN_STOPPED;
        if (got > 0) {
            at += got;
            size -= got;
        } else if (idle && at == (char *)to) { /* between requests: sleep until there is one */
            struct pollfd wanted = {fd, POLLIN, 0};
            poll(&wanted, 1, -1);
        }
    }
    return RUN_DONE;
}

static int drain(int fd, uint64_t size, const int32_t *stop) {
    char waste[65536];
    while (size) {
        uint64_t part = size < sizeof waste ? size : sizeof waste;
        int failed = receive_all(fd, waste, part, stop, 0);
        if (failed) return failed;
        size -= part;
    }
    return RUN_DONE;
}

static int send_all(int fd, const void *from, uint64_t size, const int32_t *stop) {
    const char *at = from;
    while (size) {
        ssize_t sent = send(fd, at, size, MSG_NOSIGNAL);
        if (sent < 0 && errno != EAGAIN && errno != EINTR) return errno;
        if (stopped(stop)) return RUN_STOPPED;
        if (sent > 0) at += sent, size -= sent;
    }
    return RUN_DONE;
}

static int send_zeros(int fd, uint64_t size, const int32_t *stop) {
    static const char zeros[65536];
    while (size) {
        uint64_t part = size < sizeof zeros ? size : sizeof zeros;
        int failed = send_all(fd, zeros, part, stop);
        if (failed) return failed;
        size -= part;
    }
    return RUN_DONE;
}

/* Move one flow; returns early with *status set if its memory was revoked or is not mapped. */
static int pump(int fd, struct flow *f, int is_send, const struct connection *c, uint32_t *status,
                const int32_t *stop) {
    while (!is_over(f)) {
        if (stopped(stop)) return RUN_STOPPED;
        if (__atomic_load_n(&c->abort, __ATOMIC_ACQUIRE)) {
            *status = REVOKED;
            return RUN_DONE;
        }
        int64_t moved = step(fd, f, is_send, 0);
        if (moved == 0) return RUN_CLOSED;
        if (moved == -EFAULT) {
            *status = FAULT;
            return RUN_DONE;
        }
        if (moved < 0 && moved != -EAGAIN) return (int)-moved;
    }
    return RUN_DONE;
}

static int serve_read(struct server *s, struct connection *c, int fd, struct reply *reply,
                      const struct request *request, const uint64_t *table, const int32_t *stop) {
    struct flow f = {.head = (char *)reply,
                     .head_left = sizeof *reply,
                     .address = table,
                     .nbytes = table + 1,
                     .stride = 2};
    uint64_t left = request->total;
    uint32_t status = OK;
    int result = RUN_DONE;
    while (left && status == OK && result == RUN_DONE) {
        struct trailer trailer = {MAGIC, OK};
        f.body_left = left < CHUNK_BYTES ? left : CHUNK_BYTES;
        f.tail = (char *)&trailer;
        f.tail_left = sizeof trailer;
        left -= f.body_left;
        result = pump(fd, &f, 1, c, &status, stop);
        if (status != OK) { /* the pieces are not accessed any more: wake a waiting `fence` */
            release(s, c);
            trailer.status = status;
            if (f.head_left) result = send_all(fd, f.head, f.head_left, stop);
            if (!result) result = send_zeros(fd, f.body_left, stop);
            if (!result) result = send_all(fd, f.tail, f.tail_left, stop);
        }
    }
    return result;
}

static int serve_write(struct server *s, struct connection *c, int fd, struct reply *reply,
                       const struct request *request, const uint64_t *table, const int32_t *stop) {
    struct flow f = {
        .address = table, .nbytes = table + 1, .stride = 2, .body_left = request->total};
    int result = pump(fd, &f, 0, c, &reply->status, stop);
    release(s, c);
    if (!result) result = drain(fd, f.body_left, stop);
    return result ? result : send_all(fd, reply, sizeof *reply, stop);
}

static int serve_one(struct server *s, struct connection *c, int fd, const struct request *request,
                     const struct pieces *pieces, const int32_t *stop) {
    struct reply reply = admit(s, c, pieces, request);
    const uint64_t *table = pieces->table;
    int result;
    if (reply.status != OK) {
        result = request->operation == WRITE ? drain(fd, request->total, stop) : RUN_DONE;
        return result ? result : send_all(fd, &reply, sizeof reply, stop);
    }
    if (request->operation == READ)
        result = serve_read(s, c, fd, &reply, request, table, stop);
    else
        result = serve_write(s, c, fd, &reply, request, table, stop);
    release(s, c);
    return result;
}

static void add_connection(struct server *s, struct connection *c) {
    pthread_mutex_lock(&s->lock);
    c->next = s->connections;
    s->connections = c;
    pthread_mutex_unlock(&s->lock);
}

static void remove_connection(struct server *s, struct connection *c) {
    pthread_mutex_lock(&s->lock);
    c->table = NULL;
    struct connection **at = &s->connections;
    while (*at != c) at = &(*at)->next;
    *at = c->next;
    pthread_cond_broadcast(&s->released);
    pthread_mutex_unlock(&s->lock);
}

/* Serve one connection until it ends: returns RUN_CLOSED if the peer closed it, RUN_STOPPED if
 * *stop is set, RUN_BROKEN if the peer sent an invalid request, or an errno. */
int mooncake_serve(struct server *s, int fd, const int32_t *stop) {
    struct connection c = {0};
    struct {
        struct request request;
        uint64_t first[2];
    } begin;
    struct pieces pieces = {0};
    uint64_t *rows = NULL, capacity = 0; /* bytes */
    int result = RUN_DONE;
    add_connection(s, &c);
    while (result == RUN_DONE) {
        result = receive_all(fd, &begin, sizeof begin, stop, 1);
        if (result) break;
        const struct request *r = &begin.request;
        if (r->magic != MAGIC || (r->operation != READ && r->operation != WRITE) || !r->rows ||
            r->levels > MAX_LEVELS || r->rows > 16 * MAX_SPANS / row_bytes(r->levels)) {
            result = RUN_BROKEN;
            break;
        }
        uint64_t size = row_bytes(r->levels) * r->rows;
        if (size > capacity) {
            free(rows);
            rows = malloc(size);
            capacity = rows ? size : 0;
            if (!rows) {
                result = ENOMEM;
                break;
            }
        }
        memcpy(rows, begin.first, sizeof begin.first);
        result = receive_all(fd, rows + 2, size - sizeof begin.first, stop, 0);
        if (!result) result = expand(rows, r, &pieces);
        if (!result) result = serve_one(s, &c, fd, r, &pieces, stop);
    }
    remove_connection(s, &c);
    free(pieces.table);
    free(rows);
    return result;
}
