"""Ranks as threads of one process, in a real group over loopback: cheap, and their parts can be
compared."""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from torch import Tensor

from mooncake_hal.backend import Exchange, GroupSpec
from mooncake_hal_cpu.cpu_backend import GlooCommunicator

Result = TypeVar("Result")


class CountingGroup(GlooCommunicator):
    """Notes the bytes that leave this rank for others, all-to-all by all-to-all."""

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
    """What each rank of a group makes of it."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]

    def one(rank: int) -> Result:
        group = CountingGroup(GroupSpec(rank, ranks, f"tcp://127.0.0.1:{port}", 60.0))
        try:
            return run(group)
        finally:
            group.close()

    with ThreadPoolExecutor(ranks) as threads:
        return list(threads.map(one, range(ranks)))
