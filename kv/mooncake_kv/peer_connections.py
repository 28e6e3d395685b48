"""Chooses the connection to a peer, which is an instance or a store, that an order of a rank uses.
Orders of the same use share a connection: loads from a store use one, saves to it another.

An order that fails on a connection may have been unlucky, late, or the first to find the connection
dead. So new orders don't use that connection any more, but the orders in flight keep it, and the
last of them closes it. No order fails because of another one's failure.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count

from mooncake_hal.errors import TransferCancelled, TransferError

LOADING, SAVING = "loading", "saving"
"""The uses of a peer's connections."""


@dataclass(slots=True, eq=False)
class _Connection:
    """One connection to all ranks of a peer, established or not.

    Args:
        epoch: the peer's epoch.
        use: LOADING or SAVING.
        number: unique number.
        num_orders: number of orders in flight that use it.
    """

    epoch: str
    use: str
    number: int
    num_orders: int = 0


class PeerConnections:
    """Assigns connections to orders. Any thread.

    Args:
        close: closes a connection, by the peer's epoch and its number. Idempotent.
    """

    def __init__(self, close: Callable[[str, int], None]) -> None:
        self._close = close
        self._numbers = count()
        self._current: dict[tuple[str, str], _Connection] = {}
        self._lock = threading.Lock()

    @contextmanager
    def used(self, epochs: Collection[str], use: str) -> Iterator[dict[str, int]]:
        """Assign connections to one order, for the duration of the context; yields their numbers by
        epoch. If the order fails, other than by cancellation, later orders get new connections."""
        with self._lock:
            connections = [self._connection(epoch, use) for epoch in epochs]
            for connection in connections:
                connection.num_orders += 1
        has_failed = False
        try:
            yield {connection.epoch: connection.number for connection in connections}
        except TransferError as exc:
            has_failed = not isinstance(exc, TransferCancelled)
            raise
        finally:
            self._leave(connections, has_failed=has_failed)

    def forget(self, epoch: str) -> None:
        """Drop a peer that is gone. Its connections in use are closed when their orders end."""
        with self._lock:
            for use in (LOADING, SAVING):
                self._current.pop((epoch, use), None)

    def _connection(self, epoch: str, use: str) -> _Connection:
        connection = self._current.get((epoch, use))
        if connection is None:
            connection = _Connection(epoch, use, next(self._numbers))
            self._current[epoch, use] = connection
        return connection

    def _leave(self, connections: Collection[_Connection], *, has_failed: bool) -> None:
        unused = []
        with self._lock:
            for connection in connections:
                connection.num_orders -= 1
                key = connection.epoch, connection.use
                if has_failed and self._current.get(key) is connection:
                    del self._current[key]
                if not connection.num_orders and self._current.get(key) is not connection:
                    unused.append(connection)
        for connection in unused:
            self._close(connection.epoch, connection.number)
