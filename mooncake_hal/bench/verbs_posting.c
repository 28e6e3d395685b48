/* A simulated NIC: like a driver of real hardware, it writes work requests to a ring of 64-byte
 * big-endian entries with a doorbell; it completes them immediately.
 *
 * An entry (control, remote address, data) has the layout of the ConnectX family; the other structs
 * are the first fields of libibverbs' own, which its ABI fixes. */
#include <stdint.h>
#include <string.h>
#include <unistd.h>

#define RING 4096
#define SIGNALED 2
#define INLINE 8

struct sge { uint64_t addr; uint32_t length, lkey; };
struct send_wr {
  uint64_t wr_id; struct send_wr *next; struct sge *sg_list;
  int32_t num_sge; uint32_t opcode, send_flags, imm;
  uint64_t remote_addr; uint32_t rkey;
};
struct entry {
  uint32_t opcode_index, qpn_size, flags, imm;
  uint64_t remote_addr; uint32_t rkey, reserved;
  uint32_t length, lkey; uint64_t addr;
  uint8_t rest[16];
};

struct nic {
  struct entry ring[RING];
  uint64_t ids[RING];          /* wr_id of each entry in the ring */
  uint64_t done[RING];         /* completions of the signalled requests, in order */
  uint64_t bytes;              /* total size of the requests */
  uint32_t posted, completed, taken, doorbell;
  int event, armed;
};

static inline uint32_t be32(uint32_t x) { return __builtin_bswap32(x); }
static inline uint64_t be64(uint64_t x) { return __builtin_bswap64(x); }

struct wc { uint64_t wr_id; int32_t status, opcode; uint32_t rest[8]; };

/* qp_context, the second word of struct ibv_qp, and cq_context, the third of struct ibv_cq, are for
 * the application's use. */
int wireless_post_send(void **qp, struct send_wr *wr, struct send_wr **bad) {
  struct nic *nic = qp[1];
  for (; wr; wr = wr->next) {
    uint32_t at = nic->posted++ % RING;
    struct entry *entry = &nic->ring[at];
    entry->opcode_index = be32(nic->posted << 8 | (wr->opcode == 4 ? 16 : 8));
    entry->qpn_size = be32(7 << 8 | 3);
    entry->flags = wr->send_flags & SIGNALED ? 8 : 0;
    entry->imm = 0;
    entry->remote_addr = be64(wr->remote_addr);
    entry->rkey = be32(wr->rkey);
    if (wr->send_flags & INLINE) {
      if (wr->sg_list->length > 28) { *bad = wr; return 12; }
      entry->length = be32(wr->sg_list->length | 0x80000000u);
      memcpy(&entry->lkey, (void *)wr->sg_list->addr, wr->sg_list->length);
    } else {
      entry->length = be32(wr->sg_list->length);
      entry->lkey = be32(wr->sg_list->lkey);
      entry->addr = be64(wr->sg_list->addr);
    }
    nic->ids[at] = wr->wr_id;
    nic->bytes += wr->sg_list->length;
    if (wr->send_flags & SIGNALED) nic->done[nic->completed++ % RING] = wr->wr_id;
  }
  __atomic_store_n(&nic->doorbell, be32(nic->posted & 0xffff), __ATOMIC_RELEASE);
  if (nic->armed && nic->completed != nic->taken) {
    uint64_t one = 1;
    nic->armed = 0;
    if (write(nic->event, &one, sizeof one) < 0) return 11;
  }
  return 0;
}

uint64_t wireless_size(void) { return sizeof(struct nic); }
void wireless_open(struct nic *nic, int event) { memset(nic, 0, sizeof *nic); nic->event = event; }
int wireless_arm(void **cq, int solicited) { (void)solicited; ((struct nic *)cq[2])->armed = 1; return 0; }
uint64_t wireless_bytes(struct nic *nic) { return nic->bytes; }

/* Poll up to `most` completions; returns their number. */
int wireless_poll_cq(void **cq, int most, struct wc *wc) {
  struct nic *nic = cq[2];
  int count = 0;
  for (; count < most && nic->taken != nic->completed; count++)
    wc[count] = (struct wc){.wr_id = nic->done[nic->taken++ % RING]};
  return count;
}
