"""What the executor does with reports and ends of ranks, which are played by this process."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

from mooncake_engine.config import EngineConfig
from mooncake_engine.errors import EngineDead
from mooncake_engine.execution import executor_messages as wire
from mooncake_engine.execution.executor import ExecutorOptions, RankKVInfo
from mooncake_engine.execution.rank_launcher import Rank
from mooncake_engine.execution.rank_process import PARENT_GONE, RankConnections, serve
from mooncake_engine.execution.rank_processes import RankProcesses
from mooncake_hal.kv.geometry import KVShard
from mooncake_hal.kv.layout import KVLayout
from mooncake_hal.transport import MemoryRegion

TIMEOUT_S = 30
KV = RankKVInfo(0, KVShard(0, 1, 0, 1), KVLayout("", 1, 1, (), (), (), ()), MemoryRegion(0, 0))


class PlayedRank(Rank):
    """A rank without a process; ``theirs`` are its ends of the connections."""

    def __init__(self, rank: int, ours: RankConnections, theirs: RankConnections) -> None:
        super().__init__(rank, *ours)
        self.theirs = theirs
        self._has_ended = threading.Event()

    @property
    def pid(self) -> int:
        return self.rank

    def adapt(self, config: EngineConfig) -> EngineConfig:
        return config

    def wait(self, timeout_s: float) -> bool:
        return self._has_ended.wait(timeout_s)

    def exit_reason(self) -> str:
        return f"exit of {self.rank}"

    def kill(self) -> None:
        self._has_ended.set()
        self.theirs.close()

    def report(self, *reports: wire.Report) -> None:
        for report in reports:
            self.theirs.orders.send_bytes(wire.encode(report))

    def receive_order(self) -> wire.Order:
        assert self.theirs.orders.poll(TIMEOUT_S)
        order: wire.Order = wire.decode_order(self.theirs.orders.recv_bytes())
        return order


class PlayedRanks:
    """A launcher of played ranks."""

    threads = 1

    def __init__(self, count: int) -> None:
        pairs = zip(*RankConnections.pipes(count), strict=True)
        self.ranks = [PlayedRank(number, *pair) for number, pair in enumerate(pairs)]

    def start(self) -> list[PlayedRank]:
        return self.ranks

    def rendezvous(self, name: str) -> str:
        return f"tcp://{name}"

    def close(self) -> None:
        for rank in self.ranks:
            rank.theirs.close()


@dataclass(frozen=True)
class Plan:
    """The part of an EnginePlan that is needed without models."""

    config: EngineConfig


def start(launcher: PlayedRanks, step_timeout_s: float = 300.0) -> RankProcesses:
    """Ranks that share experts, each of a data-parallel rank of its own."""
    count = len(launcher.ranks)
    config = EngineConfig(Path("m"), dp_size=count, ep_size=count, step_timeout_s=step_timeout_s)
    plan: Any = Plan(config)
    return RankProcesses(plan, [ExecutorOptions()] * count, launcher)


@pytest.fixture
def loaded() -> Iterator[tuple[RankProcesses, list[PlayedRank]]]:
    launcher = PlayedRanks(3)
    for rank in launcher.ranks:
        rank.report(wire.OrderDone(), wire.Ready(KV))
    processes = start(launcher)
    yield processes, launcher.ranks
    for rank in launcher.ranks:
        rank.kill()
    processes.close()


def await_step(processes: RankProcesses, dp_rank: int) -> None:
    for _ in processes.reports(processes.ranks_of(dp_rank)):
        pass


def test_lost_rank_ends_the_wait_for_others_and_is_named(
    loaded: tuple[RankProcesses, list[PlayedRank]],
) -> None:
    """Without it, the awaited rank hangs in a collective, until its library ends its process, and
    would be named."""
    processes, ranks = loaded
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(await_step, processes, 0)
        ranks[1].kill()
        with pytest.raises(EngineDead, match="rank 1 of 3 died: exit of 1"):
            waiting.result(TIMEOUT_S)
    assert all(rank.wait(0.0) for rank in ranks), "the others are ended"
    with pytest.raises(EngineDead, match="rank 1 of 3 died: exit of 1"):
        processes.failure.check()


@pytest.mark.parametrize(
    ("step_timeout_s", "least_s"), [(5.0, 60.0), (300.0, 301.0), (0.0, 86400.0)]
)
def test_collectives_time_out_after_the_watch_over_steps(
    step_timeout_s: float, least_s: float
) -> None:
    """The watch names the rank that does not answer; a collective blames the one that waits."""
    launcher = PlayedRanks(2)
    for rank in launcher.ranks:
        rank.report(wire.OrderDone(), wire.Ready(KV))
    processes = start(launcher, step_timeout_s)
    order = launcher.ranks[0].receive_order()
    assert isinstance(order, wire.Start)
    assert order.experts is not None
    assert order.experts.timeout_s >= least_s
    for rank in launcher.ranks:
        rank.kill()
    processes.close()


def test_no_rank_runs_before_all_have_loaded() -> None:
    """The first steps are collectives, which time out; loading may take minutes longer on one."""
    launcher = PlayedRanks(2)
    first, last = launcher.ranks
    with ThreadPoolExecutor(1) as threads:
        starting = threads.submit(start, launcher)
        for rank in launcher.ranks:
            assert isinstance(rank.receive_order(), wire.Start)
        first.report(wire.OrderDone())
        assert not first.theirs.orders.poll(0.1)
        last.report(wire.OrderDone())
        for rank in launcher.ranks:
            assert isinstance(rank.receive_order(), wire.MakeKVCache)
            rank.report(wire.Ready(KV))
        processes = starting.result(TIMEOUT_S)
    for rank in launcher.ranks:
        rank.kill()
    processes.close()


def vanished_host(patience_ms: int = 100) -> Connection:
    """A connection whose host has vanished: its next use raises TimeoutError (ETIMEDOUT)."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        ours = socket.create_connection(listener.getsockname())
        theirs, _ = listener.accept()
    ours.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, patience_ms)
    ours.setblocking(False)
    with theirs:
        try:
            while True:  # what is never read has the effect of what never arrives
                ours.send(bytes(1 << 20))
        except BlockingIOError:
            pass
        connection = Connection(ours.detach())
        assert connection.poll(TIMEOUT_S)
    return connection


@pytest.fixture
def cut_off() -> Iterator[RankConnections]:
    """Connections of which that for orders is to a host that has vanished."""
    [ours], [theirs] = RankConnections.pipes(1)
    with vanished_host() as orders, ours.orders, ours.messages, theirs.orders, theirs.messages:
        yield RankConnections(orders, ours.messages)


@pytest.mark.parametrize(
    "use",
    [lambda rank: rank.send_order(b""), lambda rank: rank.receive_report()],
    ids=["send", "receive"],
)
def test_rank_of_a_vanished_host_is_gone(
    cut_off: RankConnections, use: Callable[[Rank], object]
) -> None:
    assert use(PlayedRank(0, cut_off, cut_off)) is None


def test_rank_whose_executors_host_vanishes_exits(cut_off: RankConnections) -> None:
    assert serve(*cut_off) == PARENT_GONE


def test_rank_whose_host_vanishes_is_named(
    loaded: tuple[RankProcesses, list[PlayedRank]], monkeypatch: pytest.MonkeyPatch
) -> None:
    processes, ranks = loaded

    def recv_bytes() -> bytes:
        raise TimeoutError(110, "Connection timed out")

    monkeypatch.setattr(ranks[2].messages, "recv_bytes", recv_bytes)
    ranks[2].theirs.messages.send_bytes(b"x")
    with pytest.raises(EngineDead, match="rank 2 of 3 died: exit of 2"):
        await_step(processes, 0)
