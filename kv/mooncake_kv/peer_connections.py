"""Which of a rank's connections to a peer, an instance or a store, an order moves over. Orders of
the same use share one: a store's loads have one, its saves another.

An order that fails over a connection may have been unlucky, late, or the first to find it dead. So
nothing is given to that connection any more, and the orders that move over it keep it: the last of
them closes it. None is taken along by another one's failure.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count

from mooncake_hal.errors import TransferCancelled, TransferError

LOADING, SAVING = "loading", "saving"
"""What a peer's connections are for."""


@dataclass(slots=True, eq=False)
class _Connection:
    """One connection to all ranks of a peer, made or not.

    Args:
        epoch: of the peer.
        use: LOADING or SAVING.
        number: unique.
        num_orders: that move over it.
    """

    epoch: str
    use: str
    number: int
    num_orders: int = 0


class PeerConnections:
    """Says which connection an order uses. Any thread.

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
        """The connections of one order, for as long as it moves: their numbers, by epoch. Orders
        that begin after it has failed get others, unless it was cancelled."""
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
        """That peer is gone: what is in use of its connections is closed when its order ends."""
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
