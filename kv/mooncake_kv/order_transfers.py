"""The transfers of one order of a rank's worker. They share a deadline, are cancelled together, and
are all drained when the order ends."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

from mooncake_hal.errors import TransferCancelled
from mooncake_hal.transport import Transfer
from mooncake_kv.errors import ConnectorDead, Fatal


class OrderTransfers:
    """The transfers of one order.

    Args:
        deadline: deadline of all transfers, by ``time.monotonic``; includes the wait for a thread.
    """

    def __init__(self, deadline: float) -> None:
        self.deadline = deadline
        self.nbytes = 0
        self.by_transport: dict[str, int] = {}
        """The part of ``nbytes`` whose transport is known, by its name."""
        self._lock = threading.Lock()
        self._transfers: list[Transfer] = []
        self._is_cancelled = False
        self._is_claimed = False

    def claim(self) -> bool:
        """Returns True to the first caller only, which executes the order, or reports it.

        A thread pool that can't start a thread raises from ``submit``, but keeps the task: another
        of its threads, or a later one, would execute an order that has already been reported.
        """
        with self._lock:
            is_first, self._is_claimed = not self._is_claimed, True
        return is_first

    @property
    def has_begun(self) -> bool:
        """Whether any transfer was started."""
        return bool(self._transfers)

    def time_left(self) -> float:
        """Seconds until the deadline.

        Raises:
            TransferCancelled: the deadline has passed, which is no fault of the connection.
        """
        left_s = self.deadline - time.monotonic()
        if left_s <= 0:
            raise TransferCancelled(
                "the deadline passed before all transfers had started: the peer is overloaded"
            )
        return left_s

    def add(self, transfer: Transfer, nbytes: int, transport: str | None = None) -> None:
        """Add a transfer in flight; it is cancelled immediately if the order is cancelled."""
        with self._lock:
            self._transfers.append(transfer)
            self.nbytes += nbytes
            if transport is not None:
                self.by_transport[transport] = self.by_transport.get(transport, 0) + nbytes
            is_cancelled = self._is_cancelled
        if is_cancelled:
            transfer.cancel()

    def wait(self, transfers: Sequence[Transfer]) -> None:
        """Block until these transfers are complete.

        Raises:
            TransferError: the first failure, or the order was cancelled.
        """
        for transfer in transfers:
            transfer.wait()
        if self._is_cancelled:
            raise TransferCancelled("the order was cancelled")

    def cancel(self) -> None:
        """Cancel and drain the transfers in flight, and any that are added later."""
        with self._lock:
            self._is_cancelled = True
            transfers = list(self._transfers)
        for transfer in transfers:
            transfer.cancel()

    def drain(self) -> None:
        """Cancel and drain the transfers, or end the instance.

        Raises:
            ConnectorDead: a transfer could not be drained, and may still write.
        """
        try:
            self.cancel()
        except Exception as exc:
            raise ConnectorDead(Fatal.MEMORY_MAY_CHANGE, exc) from exc
