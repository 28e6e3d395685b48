"""A rank's connections to stores: the loads of a store share one, its saves another.

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
"""What a store's connections are for."""


@dataclass(slots=True, eq=False)
class _Lane:
    """One connection, made or not.

    Args:
        epoch: of the store.
        use: LOADING or SAVING.
        number: unique.
        num_orders: that move over it.
    """

    epoch: str
    use: str
    number: int
    num_orders: int = 0


class StoreLanes:
    """Says which connection an order uses. Any thread.

    Args:
        close: closes a connection, by the store's epoch and its number. Idempotent.
    """

    def __init__(self, close: Callable[[str, int], None]) -> None:
        self._close = close
        self._numbers = count()
        self._current: dict[tuple[str, str], _Lane] = {}
        self._lock = threading.Lock()

    @contextmanager
    def used(self, epochs: Collection[str], use: str) -> Iterator[dict[str, int]]:
        """The connections of one order, for as long as it moves: their numbers, by epoch. Orders
        that begin after it has failed get others, unless it was cancelled."""
        with self._lock:
            lanes = [self._lane(epoch, use) for epoch in epochs]
            for lane in lanes:
                lane.num_orders += 1
        has_failed = False
        try:
            yield {lane.epoch: lane.number for lane in lanes}
        except TransferError as exc:
            has_failed = not isinstance(exc, TransferCancelled)
            raise
        finally:
            self._leave(lanes, has_failed=has_failed)

    def forget(self, epoch: str) -> None:
        """That store is gone: what is in use of its connections is closed when its order ends."""
        with self._lock:
            for use in (LOADING, SAVING):
                self._current.pop((epoch, use), None)

    def _lane(self, epoch: str, use: str) -> _Lane:
        lane = self._current.get((epoch, use))
        if lane is None:
            lane = self._current[epoch, use] = _Lane(epoch, use, next(self._numbers))
        return lane

    def _leave(self, lanes: Collection[_Lane], *, has_failed: bool) -> None:
        unused = []
        with self._lock:
            for lane in lanes:
                lane.num_orders -= 1
                key = lane.epoch, lane.use
                if has_failed and self._current.get(key) is lane:
                    del self._current[key]
                if not lane.num_orders and self._current.get(key) is not lane:
                    unused.append(lane)
        for lane in unused:
            self._close(lane.epoch, lane.number)
