"""A transfer under way, slice by slice."""

from __future__ import annotations

from dataclasses import dataclass, field

from mooncake_hal.errors import TransferError
from mooncake_hal.transport import Spans
from mooncake_hal.transports.transfers import RunningTransfer


@dataclass(slots=True, eq=False)
class Work:
    """One read or write.

    Args:
        is_read: which of the two.
        slices: the spans of each slice; at least one.
        local_keys: our regions that it touches.
        transfer: what the caller holds.
        error: why no more of it is to be moved.
        num_moved: slices that have arrived.
        num_failures: attempts in a row at the same slice that failed.
    """

    is_read: bool
    slices: list[Spans]
    local_keys: frozenset[int]
    transfer: RunningTransfer = field(init=False)
    error: TransferError | None = None
    num_moved: int = 0
    num_failures: int = 0

    @property
    def is_moved(self) -> bool:
        """Whether all of it has arrived."""
        return self.num_moved == len(self.slices)
