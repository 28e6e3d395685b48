"""One transfer of an RDMA peer: its pieces, the keys of their memory, and how much is left."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from mooncake_hal.errors import TransferError
from mooncake_hal.transport import Spans
from mooncake_hal.transports.rdma.keys import KeyTable
from mooncake_hal.transports.rdma.requests import RDMA_WRITE, Batch
from mooncake_hal.transports.rdma.window import Run
from mooncake_hal.transports.splitting import Pieces
from mooncake_hal.transports.transfers import RunningTransfer


@dataclass(slots=True, eq=False)
class Work:
    """A transfer in flight. Changed only under its peer's lock.

    Args:
        opcode: RDMA_READ or RDMA_WRITE.
        spans: what was asked for.
        pieces: the same, cut.
        local_at, remote_at: [n] which region each piece lies in, on either side.
        local_keys, remote_keys: the regions' keys at the moment it began.
        transfer: what the caller holds; set right after construction.
        unfinished: pieces that are queued or in flight; at zero the transfer ends.
        error: why it ends early, once it does.
        stopped_at: ``time.monotonic`` of that moment.
        awaits_verdict: whether the peer is still being asked what was wrong.
    """

    opcode: int
    spans: Spans
    pieces: Pieces
    local_at: NDArray[np.intp]
    remote_at: NDArray[np.intp]
    local_keys: KeyTable
    remote_keys: KeyTable
    transfer: RunningTransfer = field(init=False)
    ends: NDArray[np.int64] = field(init=False)
    unfinished: int = field(init=False)
    error: TransferError | None = None
    stopped_at: float = 0.0
    awaits_verdict: bool = False

    def __post_init__(self) -> None:
        self.ends = np.cumsum(self.pieces.nbytes.astype(np.int64))
        self.unfinished = len(self.ends)

    def __len__(self) -> int:
        return len(self.ends)


def batch_of(run: Run[Work], rail: int, remote_rail: int, inline_bytes: int) -> Batch:
    """Return the pieces of a run in the addresses and keys of a rail at either end."""
    work, part = run.load, slice(run.start, run.stop)
    local_at, remote_at = work.local_at[part], work.remote_at[part]
    nbytes = work.pieces.nbytes[part]
    inline = None
    if work.opcode == RDMA_WRITE and inline_bytes and int(nbytes.min()) <= inline_bytes:
        inline = (nbytes <= inline_bytes) & work.local_keys.on_host[local_at]
    return Batch(
        work.opcode,
        work.pieces.local[part] + work.local_keys.shifts[rail][local_at],
        work.pieces.remote[part] + work.remote_keys.shifts[remote_rail][remote_at],
        nbytes,
        work.local_keys.keys[rail][local_at],
        work.remote_keys.keys[remote_rail][remote_at],
        inline,
    )
