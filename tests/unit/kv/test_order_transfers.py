"""The transfers of one order share a deadline, and are cancelled together."""

from __future__ import annotations

import pytest

from mooncake_hal.errors import TransferCancelled
from mooncake_kv.errors import ConnectorDead
from mooncake_kv.order_transfers import OrderTransfers

FOR_EVER = 1e9


class EndlessTransfer:
    """One that only a cancellation ends, or nothing."""

    def __init__(self, *, ends: bool = True) -> None:
        self.is_cancelled = False
        self._ends = ends

    def wait(self) -> None:
        """Over at once, as if it had been done."""

    def cancel(self) -> None:
        """Ends it."""
        if not self._ends:
            raise RuntimeError("it does not let go")
        self.is_cancelled = True


def test_an_order_that_waited_for_its_time_to_be_up_is_not_begun() -> None:
    """One deadline from the order on, however many orders of that source come first."""
    with pytest.raises(
        TransferCancelled, match="the deadline passed before all transfers had started"
    ):
        OrderTransfers(0.0).time_left()


def test_an_order_is_carried_out_or_reported_by_one() -> None:
    order = OrderTransfers(FOR_EVER)
    assert [order.claim() for _ in range(3)] == [True, False, False]


def test_a_cancelled_order_cancels_running_and_later_transfers() -> None:
    order = OrderTransfers(FOR_EVER)
    early, late = EndlessTransfer(), EndlessTransfer()
    order.add(early, 10)
    order.cancel()
    order.add(late, 5)
    assert (early.is_cancelled, late.is_cancelled) == (True, True)
    assert order.nbytes == 15
    with pytest.raises(TransferCancelled):
        order.wait([early, late])


def test_a_transfer_that_can_not_be_drained_ends_the_connector() -> None:
    order = OrderTransfers(FOR_EVER)
    order.add(EndlessTransfer(ends=False), 10)
    with pytest.raises(ConnectorDead):
        order.drain()
