/* Fake instances and a load generator, fast enough not to be what is measured.
 *
 *   bench backend PORT PORT TOKENS TICK_US   answers everything on both; streams TOKENS events, one per tick
 *   bench load PORT CONNECTIONS SECONDS STREAM   closed loop; prints one JSON line
 *
 * Both use one thread and epoll. Events carry the monotonic time at which they were written, so the
 * other side of a proxy knows how late each one is.
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <netinet/tcp.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/resource.h>
#include <sys/timerfd.h>
#include <time.h>
#include <unistd.h>

#define MAX_CONNECTIONS 4096
#define BUFFER 65536
#define MAX_SAMPLES 4000000

typedef struct {
    int fd;
    size_t used;
    int tokens_left;
    uint64_t started;
    char data[BUFFER];
} Connection;

static Connection *connections[MAX_CONNECTIONS];

static uint64_t now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000000ull + t.tv_nsec;
}

static void die(const char *what) {
    perror(what);
    exit(1);
}

static void watch(int ep, int fd) {
    struct epoll_event event = {.events = EPOLLIN, .data.fd = fd};
    if (epoll_ctl(ep, EPOLL_CTL_ADD, fd, &event)) die("epoll_ctl");
}

static void adopt(int ep, int fd) {
    int one = 1;
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
    if (fd >= MAX_CONNECTIONS) die("too many connections");
    if (!connections[fd]) connections[fd] = malloc(sizeof(Connection));
    connections[fd]->fd = fd;
    connections[fd]->used = 0;
    connections[fd]->tokens_left = 0;
    watch(ep, fd);
}

/* Length of the first whole message in the buffer, 0 when there is none. */
static size_t whole_message(Connection *c) {
    c->data[c->used] = 0;
    char *end = strstr(c->data, "\r\n\r\n");
    if (!end) return 0;
    size_t head = (size_t)(end - c->data) + 4;
    *end = 0;
    char *length = strcasestr(c->data, "content-length:");
    size_t body = length ? (size_t)atol(length + 15) : 0;
    *end = '\r';
    return c->used >= head + body ? head + body : 0;
}

static void send_all(int fd, const char *data, size_t size) {
    while (size) {
        ssize_t sent = write(fd, data, size);
        if (sent < 0 && errno == EAGAIN) continue;
        if (sent <= 0) return;
        data += sent;
        size -= (size_t)sent;
    }
}

/* ------------------------------------------------------------------ backend */

static const char PREFILLED[] =
    "{\"id\":\"cmpl-1\",\"object\":\"text_completion\",\"created\":1700000000,\"model\":\"m\",\"choices\":"
    "[{\"index\":0,\"text\":\" a\",\"logprobs\":null,\"finish_reason\":\"length\"}],\"usage\":{\"prompt_tokens\":100,"
    "\"completion_tokens\":1,\"total_tokens\":101},\"kv_transfer_params\":{\"do_remote_prefill\":true,"
    "\"do_remote_decode\":false,\"remote_engine_id\":\"e\",\"remote_request_id\":\"r\",\"remote_host\":\"127.0.0.1\","
    "\"remote_port\":1,\"remote_block_ids\":[[1,2,3,4,5,6,7]],\"remote_block_size\":16,\"remote_ptp_size\":1,"
    "\"remote_pcp_size\":1,\"remote_dcp_size\":1,\"num_prompt_blocks\":7,\"num_prompt_tokens\":100,\"last_token_id\":5}}";
static const char ANSWER[] =
    "{\"id\":\"cmpl-1\",\"object\":\"text_completion\",\"created\":1700000000,\"model\":\"m\",\"choices\":"
    "[{\"index\":0,\"text\":\" a b c d e f g h i j k l m n o p\",\"logprobs\":null,\"finish_reason\":\"length\"}],"
    "\"usage\":{\"prompt_tokens\":100,\"completion_tokens\":16,\"total_tokens\":116}}";

typedef struct {
    char bytes[4096];
    size_t size;
} Reply;

static Reply prefilled, answered;

static void prepare(Reply *reply, const char *body) {
    reply->size = (size_t)snprintf(
        reply->bytes, sizeof reply->bytes,
        "HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %zu\r\n\r\n%s", strlen(body), body);
}

static void emit(Connection *c) {
    char event[512], out[600];
    int size;
    if (--c->tokens_left > 0)
        size = snprintf(event, sizeof event,
                        "data: {\"id\":\"cmpl-1\",\"object\":\"text_completion\",\"created\":1700000000,\"model\":\"m\","
                        "\"choices\":[{\"index\":0,\"text\":\"%020llu\",\"logprobs\":null,\"finish_reason\":null}]}\n\n",
                        (unsigned long long)now_ns());
    else
        size = snprintf(event, sizeof event, "data: [DONE]\n\n");
    size = snprintf(out, sizeof out, "%x\r\n%s\r\n%s", size, event, c->tokens_left ? "" : "0\r\n\r\n");
    send_all(c->fd, out, (size_t)size);
}

static void answer(Connection *c, size_t size, int num_tokens) {
    char saved = c->data[size];
    c->data[size] = 0;
    if (strstr(c->data, "\"do_remote_decode\":true"))
        send_all(c->fd, prefilled.bytes, prefilled.size);
    else if (strstr(c->data, "\"stream\":true") || strstr(c->data, "\"stream\": true")) {
        const char head[] = "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n";
        send_all(c->fd, head, sizeof head - 1);
        c->tokens_left = num_tokens + 1;
    } else
        send_all(c->fd, answered.bytes, answered.size);
    c->data[size] = saved;
}

static int listen_at(int ep, int port) {
    int listener = socket(AF_INET, SOCK_STREAM, 0), one = 1;
    struct sockaddr_in at = {.sin_family = AF_INET, .sin_port = htons((uint16_t)port)};
    at.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    setsockopt(listener, SOL_SOCKET, SO_REUSEADDR, &one, sizeof one);
    if (bind(listener, (struct sockaddr *)&at, sizeof at) || listen(listener, 4096)) die("listen");
    watch(ep, listener);
    return listener;
}

static void backend(int prefill_port, int decode_port, int num_tokens, int tick_us) {
    prepare(&prefilled, PREFILLED);
    prepare(&answered, ANSWER);
    int ep = epoll_create1(0);
    int prefill = listen_at(ep, prefill_port), decode = listen_at(ep, decode_port);
    int timer = timerfd_create(CLOCK_MONOTONIC, TFD_NONBLOCK);
    struct itimerspec tick = {.it_interval.tv_nsec = tick_us * 1000L, .it_value.tv_nsec = tick_us * 1000L};
    timerfd_settime(timer, 0, &tick, NULL);
    watch(ep, timer);
    struct epoll_event events[256];
    for (;;) {
        int count = epoll_wait(ep, events, 256, -1);
        for (int i = 0; i < count; i++) {
            int fd = events[i].data.fd;
            if (fd == prefill || fd == decode) {
                int client = accept4(fd, NULL, NULL, SOCK_NONBLOCK);
                if (client >= 0) adopt(ep, client);
            } else if (fd == timer) {
                uint64_t ticks;
                if (read(timer, &ticks, sizeof ticks) < 0) continue;
                for (uint64_t t = 0; t < ticks && t < 8; t++)
                    for (int k = 0; k < MAX_CONNECTIONS; k++)
                        if (connections[k] && connections[k]->tokens_left > 0) emit(connections[k]);
            } else {
                Connection *c = connections[fd];
                ssize_t got = read(fd, c->data + c->used, BUFFER - 1 - c->used);
                if (got <= 0) {
                    c->tokens_left = 0;
                    close(fd);
                    continue;
                }
                c->used += (size_t)got;
                size_t size;
                while ((size = whole_message(c))) {
                    answer(c, size, num_tokens);
                    memmove(c->data, c->data + size, c->used - size);
                    c->used -= size;
                }
            }
        }
    }
}

/* ------------------------------------------------------------------ load */

static uint32_t *samples;
static size_t num_samples;
static long num_requests, num_tokens_got, num_errors;

static void sample(uint64_t ns) {
    if (num_samples < MAX_SAMPLES) samples[num_samples++] = (uint32_t)(ns / 100);
}

static int by_value(const void *a, const void *b) {
    uint32_t x = *(const uint32_t *)a, y = *(const uint32_t *)b;
    return (x > y) - (x < y);
}

static double percentile_ms(double share) {
    return num_samples ? samples[(size_t)((double)(num_samples - 1) * share)] / 1e4 : 0;
}

static char request[8192];
static size_t request_size;

static void ask(Connection *c) {
    c->started = now_ns();
    c->used = 0;
    send_all(c->fd, request, request_size);
}

/* Reads stamped events; returns 1 when the stream has ended. */
static int take_events(Connection *c) {
    uint64_t now = now_ns();
    char *at = c->data, *end = c->data + c->used, *found;
    *end = 0;
    while ((found = strstr(at, "\"text\":\"")) && found + 30 < end) {
        if (found[8] == '0') {
            num_tokens_got++;
            sample(now - strtoull(found + 8, NULL, 10));
        }
        at = found + 30;
    }
    int ended = c->used >= 5 && strstr(at, "0\r\n\r\n") && strstr(at, "[DONE]") != NULL;
    if (!ended) {
        size_t rest = (size_t)(end - at);
        memmove(c->data, at, rest);
        c->used = rest;
    }
    return ended;
}

static void load(int port, int num_connections, double seconds, int streams) {
    samples = malloc(sizeof(uint32_t) * MAX_SAMPLES);
    char body[2048], prompt[401];
    memset(prompt, 'a', 400);
    prompt[400] = 0;
    int size = snprintf(body, sizeof body,
                        "{\"model\":\"m\",\"prompt\":\"%s\",\"max_tokens\":200,\"temperature\":0.0,\"stream\":%s}",
                        prompt, streams ? "true" : "false");
    request_size = (size_t)snprintf(request, sizeof request,
                                    "POST /v1/completions HTTP/1.1\r\nhost: 127.0.0.1:%d\r\ncontent-type: application/json\r\n"
                                    "content-length: %d\r\n\r\n%s", port, size, body);
    int ep = epoll_create1(0);
    struct sockaddr_in at = {.sin_family = AF_INET, .sin_port = htons((uint16_t)port)};
    at.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    int *fds = calloc((size_t)num_connections, sizeof(int));
    for (int i = 0; i < num_connections; i++) {
        fds[i] = socket(AF_INET, SOCK_STREAM, 0);
        if (connect(fds[i], (struct sockaddr *)&at, sizeof at)) die("connect");
        fcntl(fds[i], F_SETFL, O_NONBLOCK);
        adopt(ep, fds[i]);
    }
    uint64_t begin = now_ns(), stop = begin + (uint64_t)(seconds * 1e9);
    for (int i = 0; i < num_connections; i++) ask(connections[fds[i]]);
    struct epoll_event events[256];
    while (now_ns() < stop) {
        int count = epoll_wait(ep, events, 256, 50);
        for (int i = 0; i < count; i++) {
            Connection *c = connections[events[i].data.fd];
            ssize_t got = read(c->fd, c->data + c->used, BUFFER - 1 - c->used);
            if (got <= 0) {
                num_errors++;
                epoll_ctl(ep, EPOLL_CTL_DEL, c->fd, NULL);
                close(c->fd);
                continue;
            }
            c->used += (size_t)got;
            if (streams ? take_events(c) : whole_message(c) != 0) {
                if (!streams) {
                    sample(now_ns() - c->started);
                    if (strncmp(c->data, "HTTP/1.1 200", 12)) num_errors++;
                }
                num_requests++;
                ask(c);
            }
        }
    }
    double elapsed = (double)(now_ns() - begin) / 1e9;
    qsort(samples, num_samples, sizeof *samples, by_value);
    printf("{\"requests_per_s\":%.1f,\"requests\":%ld,\"tokens_per_s\":%.1f,\"tokens\":%ld,\"errors\":%ld,"
           "\"p50_ms\":%.4f,\"p99_ms\":%.4f}\n",
           (double)num_requests / elapsed, num_requests, (double)num_tokens_got / elapsed, num_tokens_got,
           num_errors, percentile_ms(0.5), percentile_ms(0.99));
}

int main(int argc, char **argv) {
    signal(SIGPIPE, SIG_IGN);
    if (argc == 6 && !strcmp(argv[1], "backend"))
        backend(atoi(argv[2]), atoi(argv[3]), atoi(argv[4]), atoi(argv[5]));
    else if (argc == 6 && !strcmp(argv[1], "load"))
        load(atoi(argv[2]), atoi(argv[3]), atof(argv[4]), atoi(argv[5]));
    else
        fprintf(stderr, "usage: bench backend PORT PORT TOKENS TICK_US | load PORT CONNECTIONS SECONDS STREAM\n");
    return argc > 1 ? 0 : 2;
}
