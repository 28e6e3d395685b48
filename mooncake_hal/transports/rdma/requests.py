"""Work requests as arrays: a batch is built by a handful of assignments and posted by one call.

``struct ibv_send_wr`` and ``struct ibv_sge`` are part of libibverbs' stable ABI. Building them in
numpy costs some tens of nanoseconds per piece; a pyverbs object per piece costs more than 2 µs.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

SEND_SIGNALED = 1 << 1
SEND_INLINE = 1 << 3
RDMA_WRITE = 0
RDMA_READ = 4

WORK_REQUEST = np.dtype(
    {
        "names": [
            "wr_id",
            "next",
            "sg_list",
            "num_sge",
            "opcode",
            "send_flags",
            "remote_addr",
            "rkey",
        ],
        "formats": ["<u8", "<u8", "<u8", "<i4", "<u4", "<u4", "<u8", "<u4"],
        "offsets": [0, 8, 16, 24, 28, 32, 40, 48],
        "itemsize": 128,
    }
)
SCATTER_GATHER = np.dtype([("addr", "<u8"), ("length", "<u4"), ("lkey", "<u4")])


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """Pieces to post together, in one direction; all arrays are [n].

    Args:
        opcode: RDMA_READ or RDMA_WRITE.
        local, remote, nbytes: as in ``Spans``, in the NIC's own addresses.
        lkeys, rkeys: the NIC's keys of the memory of each piece.
        inline: whether each piece is sent inside its request, or None if none is.
    """

    opcode: int
    local: NDArray[np.uint64]
    remote: NDArray[np.uint64]
    nbytes: NDArray[np.uint64]
    lkeys: NDArray[np.uint32]
    rkeys: NDArray[np.uint32]
    inline: NDArray[np.bool_] | None = None


class RequestArray:
    """Work requests, linked once, that are filled and posted again and again.

    Posting copies them into the NIC's queue, so they may be refilled at once.

    Args:
        depth: how many can be posted together.
        signal_every: distance of the ones that report their completion; the last always does.
    """

    def __init__(self, depth: int, signal_every: int) -> None:
        self.depth = depth
        self.signal_every = signal_every
        self.requests = np.zeros(depth, WORK_REQUEST)
        self.pieces = np.zeros(depth, SCATTER_GATHER)
        self._steps = np.arange(depth, dtype=np.uint64)
        self._flags = np.zeros(depth, np.uint32)
        self._flags[signal_every - 1 :: signal_every] = SEND_SIGNALED
        base = self.requests.ctypes.data
        self._links = base + WORK_REQUEST.itemsize * (np.arange(depth, dtype=np.uint64) + 1)
        self.requests["next"] = self._links
        self.requests["sg_list"] = self.pieces.ctypes.data + SCATTER_GATHER.itemsize * self._steps
        self.requests["num_sge"] = 1
        self.address: int = base
        self._last = 0

    def fill(self, batch: Batch, first_id: int) -> int:
        """Fill in at most ``depth`` pieces, numbered from ``first_id``; return how many."""
        count = len(batch.nbytes)
        requests, pieces = self.requests[:count], self.pieces[:count]
        self.requests["next"][self._last] = self._links[self._last]
        self._last = count - 1
        requests["next"][count - 1] = 0
        requests["wr_id"] = self._steps[:count] + np.uint64(first_id)
        requests["opcode"] = batch.opcode
        requests["send_flags"] = self._flags[:count]
        if batch.inline is not None:
            requests["send_flags"] |= np.where(batch.inline, np.uint32(SEND_INLINE), np.uint32(0))
        requests["send_flags"][count - 1] |= SEND_SIGNALED
        requests["remote_addr"] = batch.remote
        requests["rkey"] = batch.rkeys
        pieces["addr"] = batch.local
        pieces["length"] = batch.nbytes
        pieces["lkey"] = batch.lkeys
        return count
