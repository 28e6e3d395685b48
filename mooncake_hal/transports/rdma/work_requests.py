"""Work requests, built from a transfer's pieces and the NICs' memory keys. Pure.

A batch is built by a few numpy assignments and posted by one call: ``struct ibv_send_wr`` and
``struct ibv_sge`` are part of libibverbs' stable ABI. That costs some tens of nanoseconds per
piece; a pyverbs object per piece costs more than 2 µs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from mooncake_hal.errors import TransferError
from mooncake_hal.transport import Spans
from mooncake_hal.transports.rdma.rdma_messages import RegionKeys
from mooncake_hal.transports.rdma.send_window import PieceRun
from mooncake_hal.transports.spans import Pieces
from mooncake_hal.transports.transfers import RunningTransfer

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
class SendBatch:
    """Pieces to post together, in one direction; all arrays are [n].

    Args:
        opcode: RDMA_READ or RDMA_WRITE.
        local, remote, nbytes: as in ``Spans``, but in the NICs' addresses.
        lkeys, rkeys: the NICs' keys of each piece's memory.
        inline: whether each piece is sent inline in its request; None: no piece is.
    """

    opcode: int
    local: NDArray[np.uint64]
    remote: NDArray[np.uint64]
    nbytes: NDArray[np.uint64]
    lkeys: NDArray[np.uint32]
    rkeys: NDArray[np.uint32]
    inline: NDArray[np.bool_] | None = None


class WorkRequestArray:
    """A reusable array of linked work requests, which is filled and posted for every batch.

    Posting copies the requests to the NIC's queue, so they may be refilled immediately.

    Args:
        depth: maximum number of requests in a batch.
        signal_every: every so many requests, one reports its completion; a batch's last one always
            does.
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

    def fill(self, batch: SendBatch, first_id: int) -> int:
        """Fill in a batch of up to ``depth`` pieces, numbered from ``first_id``; returns their
        number."""
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


@dataclass(frozen=True, slots=True, eq=False)
class RegionKeyTable:
    """A snapshot of every NIC's keys of every region.

    Args:
        regions: [regions] the endpoint's keys of the regions, ordered by address.
        keys: [NICs, regions] the NICs' keys.
        shifts: [NICs, regions] offset from a process's address to the NIC's, modulo 2**64.
        on_host: [regions] whether the CPU can read the region, which inline sends require.
    """

    regions: list[int]
    keys: NDArray[np.uint32]
    shifts: NDArray[np.uint64]
    on_host: NDArray[np.bool_]

    def touched(self, positions: NDArray[np.intp]) -> set[int]:
        """Return the endpoint's keys of the regions at these positions."""
        return {self.regions[at] for at in np.unique(positions).tolist()}


class RegionKeyTables:
    """Builds key tables, and caches the last one: regions change rarely, and transfers are many.

    Args:
        nics: number of NICs of the endpoint.
        lookup: returns the keys of regions; None for a region that has been revoked.
    """

    def __init__(
        self, nics: int, lookup: Callable[[list[int]], Sequence[RegionKeys | None]]
    ) -> None:
        self._nics = nics
        self._lookup = lookup
        self._last: RegionKeyTable | None = None

    def of(self, regions: list[int]) -> RegionKeyTable:
        """Return the table of ``regions``, a list that is never changed in place."""
        last = self._last
        if last is None or last.regions is not regions:
            last = self._last = self._build(regions)
        return last

    def _build(self, regions: list[int]) -> RegionKeyTable:
        keys = np.zeros((self._nics, len(regions)), np.uint32)
        shifts = np.zeros((self._nics, len(regions)), np.uint64)
        on_host = np.zeros(len(regions), np.bool_)
        for at, found in enumerate(self._lookup(regions)):
            if found is not None:  # otherwise key 0, which every NIC rejects
                keys[:, at] = found.keys
                shifts[:, at] = found.shifts
                on_host[at] = found.on_host
        return RegionKeyTable(regions, keys, shifts, on_host)


@dataclass(slots=True, eq=False)
class RdmaTransfer:
    """A transfer in flight. Changed only under its peer's lock.

    Args:
        opcode: RDMA_READ or RDMA_WRITE.
        spans: the spans of the transfer.
        pieces: the spans cut into pieces.
        local_at, remote_at: [n] position of each piece's region, on either side.
        local_keys, remote_keys: the regions' keys at the start of the transfer.
        handle: the transfer object that the caller holds; set right after construction.
        unfinished: number of pieces that are queued or in flight; at zero, the transfer ends.
        error: why it was stopped early, or None.
        stopped_at: ``time.monotonic`` value when it was stopped.
        awaits_reason: whether it waits for the peer's notifications to determine the reason of a
            failure.
    """

    opcode: int
    spans: Spans
    pieces: Pieces
    local_at: NDArray[np.intp]
    remote_at: NDArray[np.intp]
    local_keys: RegionKeyTable
    remote_keys: RegionKeyTable
    handle: RunningTransfer = field(init=False)
    ends: NDArray[np.int64] = field(init=False)
    unfinished: int = field(init=False)
    error: TransferError | None = None
    stopped_at: float = 0.0
    awaits_reason: bool = False

    def __post_init__(self) -> None:
        self.ends = np.cumsum(self.pieces.nbytes.astype(np.int64))
        self.unfinished = len(self.ends)

    def __len__(self) -> int:
        return len(self.ends)


def batch_of(
    run: PieceRun[RdmaTransfer], nic: int, remote_nic: int, inline_bytes: int
) -> SendBatch:
    """Return a run's pieces as a batch, in the addresses and keys of the two NICs."""
    transfer, part = run.transfer, slice(run.start, run.stop)
    local_at, remote_at = transfer.local_at[part], transfer.remote_at[part]
    nbytes = transfer.pieces.nbytes[part]
    inline = None
    if transfer.opcode == RDMA_WRITE and inline_bytes and int(nbytes.min()) <= inline_bytes:
        inline = (nbytes <= inline_bytes) & transfer.local_keys.on_host[local_at]
    return SendBatch(
        transfer.opcode,
        transfer.pieces.local[part] + transfer.local_keys.shifts[nic][local_at],
        transfer.pieces.remote[part] + transfer.remote_keys.shifts[remote_nic][remote_at],
        nbytes,
        transfer.local_keys.keys[nic][local_at],
        transfer.remote_keys.keys[remote_nic][remote_at],
        inline,
    )
