/* libibverbs without a kernel: devices emu0 and emu1, whose queue pairs connect within this process.
 *
 * Structs are those of the public ABI. Requests complete when they are posted: the keys and bounds
 * of both ends are checked as by a NIC, then the bytes are copied. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <unistd.h>

#define DEVICES 2
#define MAX_QPS 4096
#define MAX_MRS 4096
#define SIGNALED 2
#define INLINE 8
enum { WRITE = 0, READ = 4 };
enum { RESET, INIT, RTR, RTS, SQD, SQE, ERROR };
enum { OK = 0, LOCAL_PROTECTION = 4, FLUSHED = 5, REMOTE_ACCESS = 10, NO_ANSWER = 12 };

struct device { char name[8]; int down; };
struct cq;
struct qp;
struct sge { uint64_t addr; uint32_t length, lkey; };
struct send_wr {
  uint64_t wr_id; struct send_wr *next; struct sge *sg_list;
  int32_t num_sge; uint32_t opcode, send_flags, imm;
  uint64_t remote_addr; uint32_t rkey;
  char rest[128 - 52];
};
struct wc { uint64_t wr_id; int32_t status, opcode; uint32_t rest[8]; };
struct ops {
  void *before[11];
  int (*poll_cq)(struct cq *, int, struct wc *);
  int (*req_notify_cq)(struct cq *, int);
  void *between[12];
  int (*post_send)(struct qp *, struct send_wr *, struct send_wr **);
  void *after[6];
};
struct context { struct device *device; struct ops ops; int cmd_fd, async_fd, num_comp_vectors; };
struct pd { struct context *context; uint32_t handle; };
struct mr {
  struct context *context; struct pd *pd; void *addr; size_t length;
  uint32_t handle, lkey, rkey;
};
struct channel { struct context *context; int fd, refcnt; struct cq *cq; };
struct cq {
  struct context *context; struct channel *channel; void *cq_context; uint32_t handle; int cqe;
  int armed, head, tail;
  struct wc ring[];
};
struct qp {
  struct context *context; void *qp_context; struct pd *pd; struct cq *send_cq, *recv_cq;
  void *srq; uint32_t handle, qp_num; int state, qp_type;
  uint32_t destination;
};
struct cap { uint32_t send_wr, recv_wr, send_sge, recv_sge, inline_data; };
struct init_attr {
  void *qp_context; struct cq *send_cq, *recv_cq; void *srq; struct cap cap; int qp_type, all;
};
struct attr { int state, current, mtu, migration; uint32_t qkey, rq_psn, sq_psn, destination; };

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct device devices[DEVICES] = {{"emu0", 0}, {"emu1", 0}};
static struct qp *qps[MAX_QPS];
static struct mr *mrs[MAX_MRS];
static uint32_t next_key;
static int objects; /* created and not destroyed */
static char failing[64];
static int failure;

/* The next call of a function fails with an errno. */
void emulated_fail(const char *function, int error) {
  strncpy(failing, function, sizeof failing - 1);
  failure = error;
}

/* Requests posted while this is set never complete. */
static int stuck;
void emulated_set_stuck(int on) { stuck = on; }

void emulated_set_down(int device, int down) { devices[device].down = down; }
int emulated_objects(void) { return objects; }

static int fails(const char *function) {
  if (!failure || strcmp(failing, function)) return 0;
  errno = failure;
  failure = 0;
  return 1;
}

static void *make(size_t size) {
  __atomic_add_fetch(&objects, 1, __ATOMIC_RELAXED);
  return calloc(1, size);
}

static int destroy(void *object) {
  __atomic_sub_fetch(&objects, 1, __ATOMIC_RELAXED);
  free(object);
  return 0;
}

static void complete(struct cq *cq, uint64_t id, int status) {
  cq->ring[cq->tail++ % cq->cqe] = (struct wc){.wr_id = id, .status = status};
  if (cq->armed && cq->channel) {
    uint64_t one = 1;
    cq->armed = 0;
    if (write(cq->channel->fd, &one, sizeof one) < 0) abort();
  }
}

static int covers(uint32_t key, uint64_t address, uint64_t length) {
  struct mr *mr = mrs[key % MAX_MRS];
  uint64_t start = mr ? (uint64_t)mr->addr : 0;
  return mr && mr->lkey == key && address >= start && address + length <= start + mr->length;
}

static int move(struct qp *qp, const struct send_wr *wr) {
  struct qp *there = qps[qp->destination % MAX_QPS];
  const struct sge *sge = wr->sg_list;
  if (qp->state != RTS) return FLUSHED;
  if (qp->context->device->down || !there || there->destination != qp->qp_num ||
      there->state < RTR || there->state == ERROR || there->context->device->down)
    return NO_ANSWER;
  if (!sge->length) return OK;
  if (!(wr->send_flags & INLINE) && !covers(sge->lkey, sge->addr, sge->length))
    return LOCAL_PROTECTION;
  if (!covers(wr->rkey, wr->remote_addr, sge->length)) return REMOTE_ACCESS;
  void *here = (void *)sge->addr, *remote = (void *)wr->remote_addr;
  if (wr->opcode == WRITE) memcpy(remote, here, sge->length);
  if (wr->opcode == READ) memcpy(here, remote, sge->length);
  return OK;
}

static int post_send(struct qp *qp, struct send_wr *wr, struct send_wr **bad) {
  (void)bad;
  pthread_mutex_lock(&lock);
  for (; wr && !stuck; wr = wr->next) {
    int status = move(qp, wr);
    if (status != OK) qp->state = ERROR;
    if (status != OK || wr->send_flags & SIGNALED) complete(qp->send_cq, wr->wr_id, status);
  }
  pthread_mutex_unlock(&lock);
  return 0;
}

static int poll_cq(struct cq *cq, int most, struct wc *wc) {
  int count = 0;
  pthread_mutex_lock(&lock);
  while (count < most && cq->head != cq->tail) wc[count++] = cq->ring[cq->head++ % cq->cqe];
  pthread_mutex_unlock(&lock);
  return count;
}

static int req_notify_cq(struct cq *cq, int solicited) {
  (void)solicited;
  pthread_mutex_lock(&lock);
  cq->armed = 1;
  pthread_mutex_unlock(&lock);
  return 0;
}

struct device **ibv_get_device_list(int *count) {
  struct device **list = calloc(DEVICES + 1, sizeof *list);
  for (*count = 0; *count < DEVICES; ++*count) list[*count] = &devices[*count];
  return list;
}
void ibv_free_device_list(struct device **list) { free(list); }
const char *ibv_get_device_name(struct device *device) { return device->name; }

struct context *ibv_open_device(struct device *device) {
  if (fails("ibv_open_device")) return NULL;
  struct context *context = make(sizeof *context);
  context->device = device;
  context->ops.poll_cq = poll_cq;
  context->ops.req_notify_cq = req_notify_cq;
  context->ops.post_send = post_send;
  context->cmd_fd = open("/dev/null", O_RDWR | O_CLOEXEC);
  return context;
}
int ibv_close_device(struct context *context) {
  close(context->cmd_fd);
  return destroy(context);
}

struct pd *ibv_alloc_pd(struct context *context) {
  if (fails("ibv_alloc_pd")) return NULL;
  struct pd *pd = make(sizeof *pd);
  pd->context = context;
  return pd;
}
int ibv_dealloc_pd(struct pd *pd) {
  int used = 0;
  pthread_mutex_lock(&lock);
  for (int i = 0; i < MAX_QPS; i++) used |= (qps[i] && qps[i]->pd == pd) || (mrs[i] && mrs[i]->pd == pd);
  pthread_mutex_unlock(&lock);
  return used ? EBUSY : destroy(pd);
}

struct mr *ibv_reg_mr(struct pd *pd, void *address, size_t length, int access) {
  (void)access;
  if (fails("ibv_reg_mr")) return NULL;
  struct mr *mr = make(sizeof *mr);
  pthread_mutex_lock(&lock);
  do mr->lkey = mr->rkey = ++next_key; while (mrs[mr->lkey % MAX_MRS]);
  *mr = (struct mr){pd->context, pd, address, length, 0, mr->lkey, mr->rkey};
  mrs[mr->lkey % MAX_MRS] = mr;
  pthread_mutex_unlock(&lock);
  return mr;
}
int ibv_dereg_mr(struct mr *mr) {
  if (fails("ibv_dereg_mr")) return errno;
  pthread_mutex_lock(&lock);
  mrs[mr->lkey % MAX_MRS] = NULL;
  pthread_mutex_unlock(&lock);
  return destroy(mr);
}

struct channel *ibv_create_comp_channel(struct context *context) {
  if (fails("ibv_create_comp_channel")) return NULL;
  struct channel *channel = make(sizeof *channel);
  channel->context = context;
  channel->fd = eventfd(0, EFD_CLOEXEC);
  return channel;
}
int ibv_destroy_comp_channel(struct channel *channel) {
  close(channel->fd);
  return destroy(channel);
}

struct cq *ibv_create_cq(struct context *context, int cqe, void *user, struct channel *channel,
                         int vector) {
  (void)vector;
  if (fails("ibv_create_cq")) return NULL;
  cqe *= 2; /* as real ones: at least what was asked for */
  struct cq *cq = make(sizeof *cq + cqe * sizeof cq->ring[0]);
  cq->context = context, cq->channel = channel, cq->cq_context = user, cq->cqe = cqe;
  if (channel) channel->cq = cq;
  return cq;
}
int ibv_destroy_cq(struct cq *cq) { return destroy(cq); }
int ibv_get_cq_event(struct channel *channel, struct cq **cq, void **user) {
  uint64_t count;
  if (read(channel->fd, &count, sizeof count) < 0) return -1;
  *cq = channel->cq;
  *user = channel->cq->cq_context;
  return 0;
}
void ibv_ack_cq_events(struct cq *cq, unsigned int count) { (void)cq, (void)count; }

struct qp *ibv_create_qp(struct pd *pd, struct init_attr *init) {
  if (fails("ibv_create_qp")) return NULL;
  struct qp *qp = make(sizeof *qp);
  qp->context = pd->context, qp->pd = pd, qp->qp_type = init->qp_type;
  qp->send_cq = init->send_cq, qp->recv_cq = init->recv_cq;
  pthread_mutex_lock(&lock);
  for (qp->qp_num = 1; qps[qp->qp_num]; qp->qp_num++) continue;
  qps[qp->qp_num] = qp;
  pthread_mutex_unlock(&lock);
  return qp;
}
int ibv_modify_qp(struct qp *qp, const struct attr *attr, int mask) {
  if (fails("ibv_modify_qp")) return errno;
  pthread_mutex_lock(&lock);
  qp->state = attr->state;
  if (mask & 1 << 20) qp->destination = attr->destination;
  pthread_mutex_unlock(&lock);
  return 0;
}
int ibv_destroy_qp(struct qp *qp) {
  pthread_mutex_lock(&lock);
  qps[qp->qp_num] = NULL;
  pthread_mutex_unlock(&lock);
  return destroy(qp);
}
