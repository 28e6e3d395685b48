"""Transfers in parts: each ends once, keeps its first failure, and drains before it reports."""

from __future__ import annotations

import pytest

from mooncake_hal.errors import (
    OutOfBounds,
    PeerLost,
    TransferCancelled,
    TransferTimeout,
)
from mooncake_hal.transport import TransferState
from mooncake_hal.transports.transfers import (
    DONE,
    FinishedTransfer,
    RunningTransfer,
    deadline_after,
)


def running(parts: int = 1, timeout: float = 60.0) -> tuple[RunningTransfer, list[str]]:
    seen: list[str] = []

    def stop() -> None:
        seen.append("stop")
        while transfer.poll() is TransferState.PENDING:
            transfer.part_ended(TransferCancelled("stopped"))

    transfer = RunningTransfer(parts, deadline_after(timeout), stop, lambda _: seen.append("end"))
    return transfer, seen


def test_transfer_is_done_when_every_part_is() -> None:
    transfer, seen = running(2)
    transfer.part_ended(None)
    assert transfer.poll() is TransferState.PENDING
    transfer.part_ended(None)
    assert transfer.poll() is TransferState.DONE
    transfer.wait()
    assert seen == ["end"]


def test_first_failure_is_kept_and_stops_the_rest() -> None:
    transfer, seen = running(3)
    transfer.part_ended(OutOfBounds("first"))
    with pytest.raises(OutOfBounds, match="first"):
        transfer.wait()
    assert seen == ["stop", "end"]


def test_cancel_stops_and_is_final() -> None:
    transfer, seen = running()
    transfer.cancel()
    transfer.cancel()
    assert transfer.poll() is TransferState.FAILED
    with pytest.raises(TransferCancelled, match="cancelled by this side"):
        transfer.wait()
    assert seen == ["stop", "end"]


def test_deadline_stops_the_transfer() -> None:
    transfer, seen = running(timeout=0.0)
    with pytest.raises(TransferTimeout, match="not done within"):
        transfer.wait()
    assert seen == ["stop", "end"]


def test_timeout_of_wait_leaves_the_transfer_running() -> None:
    transfer, seen = running()
    with pytest.raises(TransferTimeout, match=r"still running after 0\.001 s"):
        transfer.wait(0.001)
    assert transfer.poll() is TransferState.PENDING
    assert not seen
    transfer.part_ended(None)
    transfer.wait()


def test_finished_transfers_keep_their_result() -> None:
    DONE.wait()
    DONE.cancel()
    assert DONE.poll() is TransferState.DONE
    lost = FinishedTransfer(PeerLost("gone"))
    assert lost.poll() is TransferState.FAILED
    with pytest.raises(PeerLost, match="gone"):
        lost.wait()
