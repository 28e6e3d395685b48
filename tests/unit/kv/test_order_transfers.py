"""The transfers of one order share a deadline, and are cancelled together."""

from __future__ import annotations

import pytest

from mooncake_hal.errors import TransferCancelled
from mooncake_kv.errors import ConnectorDead
from mooncake_kv.order_transfers import OrderTransfers

FOR_EVER = 1e9


class EndlessTransfer:
    """A transfer that ends only when cancelled, or not even then."""

    def __init__(self, *, ends: bool = True) -> None:
        self.is_cancelled = False
        self._ends = ends

    def wait(self) -> None:
        """Return at once, as if it had completed."""

    def cancel(self) -> None:
        """End the transfer."""
        if not self._ends:
            raise RuntimeError("it does not let go")
        self.is_cancelled = True


def test_order_that_expired_in_the_queue_is_not_started() -> None:
    """The deadline counts from the order, however many orders of the same source run before."""
    with pytest.raises(
        TransferCancelled, match="the deadline passed before all transfers had started"
    ):
        OrderTransfers(0.0).time_left()


def test_order_is_executed_or_reported_exactly_once() -> None:
    order = OrderTransfers(FOR_EVER)
    assert [order.claim() for _ in range(3)] == [True, False, False]


def test_cancelled_order_cancels_running_and_later_transfers() -> None:
    order = OrderTransfers(FOR_EVER)
    early, late = EndlessTransfer(), EndlessTransfer()
    order.add(early, 10)
    order.cancel()
    order.add(late, 5)
    assert (early.is_cancelled, late.is_cancelled) == (True, True)
    assert order.nbytes == 15
    with pytest.raises(TransferCancelled):
        order.wait([early, late])


def test_undrainable_transfer_ends_the_connector() -> None:
    order = OrderTransfers(FOR_EVER)
    order.add(EndlessTransfer(ends=False), 10)
    with pytest.raises(ConnectorDead):
        order.drain()
