"""The transfers that carry out one order of a rank's worker: they have one deadline, are cancelled
together, and leave nothing behind that may still move."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

from mooncake_hal.errors import TransferCancelled
from mooncake_hal.transport import Transfer
from mooncake_kv.errors import ConnectorDead, Fatal


class OrderTransfers:
    """Transfers of one order, which end together.

    Args:
        deadline: of all of them, the wait for a thread included, by ``time.monotonic``.
    """

    def __init__(self, deadline: float) -> None:
        self.deadline = deadline
        self.nbytes = 0
        self._lock = threading.Lock()
        self._transfers: list[Transfer] = []
        self._is_cancelled = False
        self._is_claimed = False

    def claim(self) -> bool:
        """Whether the caller is the first one: only who is carries the order out or reports it.

        A pool that can't start a thread raises, and keeps what was submitted nevertheless: a thread
        that it has, or gets later, would move what is long reported.
        """
        with self._lock:
            is_first, self._is_claimed = not self._is_claimed, True
        return is_first

    def time_left(self) -> float:
        """Seconds until the deadline.

        Raises:
            TransferCancelled: there are none, which is no fault of a connection.
        """
        left_s = self.deadline - time.monotonic()
        if left_s <= 0:
            raise TransferCancelled(
                "its time was up before all of it had begun to move: the other side is overloaded"
            )
        return left_s

    def add(self, transfer: Transfer, nbytes: int) -> None:
        """Note one in flight; ends it at once if the order is cancelled."""
        with self._lock:
            self._transfers.append(transfer)
            self.nbytes += nbytes
            is_cancelled = self._is_cancelled
        if is_cancelled:
            transfer.cancel()

    def wait(self, transfers: Sequence[Transfer]) -> None:
        """Block until these are done.

        Raises:
            TransferError: the first failure.
        """
        for transfer in transfers:
            transfer.wait()
        if self._is_cancelled:
            raise TransferCancelled("nobody wants it any more")

    def cancel(self) -> None:
        """End and drain what is in flight, and whatever is started later."""
        with self._lock:
            self._is_cancelled = True
            transfers = list(self._transfers)
        for transfer in transfers:
            transfer.cancel()

    def drain(self) -> None:
        """``cancel``, where nothing less will do.

        Raises:
            ConnectorDead: a transfer may still write.
        """
        try:
            self.cancel()
        except Exception as exc:
            raise ConnectorDead(Fatal.MEMORY_MAY_CHANGE, exc) from exc
