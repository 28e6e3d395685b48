"""Ranks as threads of one process, in a real group over loopback: cheap, and their results can be
compared directly."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from torch import Tensor

from mooncake_hal.backend import Exchange, GroupSpec
from mooncake_hal.testing.backends import free_port
from mooncake_hal_cpu.cpu_backend import GlooCommunicator

Result = TypeVar("Result")


class CountingGroup(GlooCommunicator):
    """Records the bytes that each all-to-all sends from this rank to others."""

    def __init__(self, group: GroupSpec) -> None:
        super().__init__(group, 0)
        self.left: list[int] = []

    def start_all_to_all(
        self, x: Tensor, send_rows: Sequence[int], recv_rows: Sequence[int]
    ) -> Exchange:
        row_bytes = x[:1].numel() * x.element_size()
        self.left.append((sum(send_rows) - send_rows[self.rank]) * row_bytes)
        return super().start_all_to_all(x, send_rows, recv_rows)


def on_ranks(ranks: int, run: Callable[[CountingGroup], Result]) -> list[Result]:
    """Each rank's result."""
    meeting = _free_address()

    def one(rank: int) -> Result:
        group = CountingGroup(GroupSpec(rank, ranks, meeting, 60.0))
        try:
            return run(group)
        finally:
            group.close()

    with ThreadPoolExecutor(ranks) as threads:
        return list(threads.map(one, range(ranks)))


def on_data_parallel_ranks(
    dp_size: int, tp_size: int, run: Callable[[int, CountingGroup | None, CountingGroup], Result]
) -> list[Result]:
    """Each rank's result, one data-parallel rank after another.

    Args:
        dp_size: data-parallel ranks.
        tp_size: tensor-parallel ranks of each.
        run: called with the number of its data-parallel rank, the tensor-parallel group if there is
            one, and the group of all ranks.
    """
    stages = [_free_address() for _ in range(dp_size)]

    def one(everyone: CountingGroup) -> Result:
        dp_rank, tp_rank = divmod(everyone.rank, tp_size)
        if tp_size == 1:
            return run(dp_rank, None, everyone)
        stage = CountingGroup(GroupSpec(tp_rank, tp_size, stages[dp_rank], 60.0))
        try:
            return run(dp_rank, stage, everyone)
        finally:
            stage.close()

    return on_ranks(dp_size * tp_size, one)


def _free_address() -> str:
    return f"tcp://127.0.0.1:{free_port()}"
