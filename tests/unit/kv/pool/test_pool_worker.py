"""A rank's loads and saves over fake connections, whose transfers complete when a test says so."""

from __future__ import annotations

from collections.abc import Iterator
from threading import Event, Lock
from typing import Any

import pytest
from support.kv_rank import TIMEOUT_S, Rank, wait_for

from mooncake_hal.errors import PeerLost, TransferCancelled, TransferError, TransferTimeout
from mooncake_hal.transport import Spans
from mooncake_kv.pool import pool_worker
from mooncake_kv.pool.pool_messages import (
    CancelRuns,
    ChunkRun,
    ConnectStore,
    LayersLoaded,
    LoadRuns,
    RunsEnded,
    SaveRuns,
    decode_from_rank,
    encode,
)
from mooncake_kv.pool.pool_worker import LOAD_THREADS, PoolWorker

LATE = "the deadline passed before all transfers had started: the peer is overloaded"


class Move:
    """A transfer."""

    def __init__(self) -> None:
        self.may_drain = Event()
        self.may_drain.set()
        self._ended = Event()
        self._error: TransferError | None = None

    def end(self, error: TransferError | None = None) -> None:
        if not self._ended.is_set():
            self._error = error
            self._ended.set()

    def wait(self) -> None:
        assert self._ended.wait(TIMEOUT_S)
        if self._error is not None:
            raise self._error

    def cancel(self) -> None:
        assert self.may_drain.wait(TIMEOUT_S)
        self.end(TransferCancelled("cancelled"))


class Connection:
    """A connection to a store."""

    def __init__(self) -> None:
        self.moves: list[Move] = []
        self.is_closed = False

    def read(self, spans: Spans, timeout: float) -> Move:
        self.moves.append(Move())
        return self.moves[-1]

    write = read

    def close(self) -> None:
        self.is_closed = True
        for move in self.moves:
            move.end(PeerLost("this side closed the connection"))


class Connections:
    """A rank's ``RankTransports``."""

    def __init__(self) -> None:
        self.stops_writes_on_failure = True
        self.all: dict[tuple[str, int], Connection] = {}
        self._lock = Lock()

    def peer(
        self, epoch: str, rank: int, endpoints: Any, *, connection: int, timeout_s: float
    ) -> Connection:
        with self._lock:
            return self.all.setdefault((epoch, connection), Connection())

    def transport_of(self, epoch: str, rank: int, connection: int) -> str:
        return f"to-{epoch}"

    def forget(self, epoch: str, number: int | None = None) -> None:
        for key in [key for key in self.all if key[0] == epoch and number in (None, key[1])]:
            self.all.pop(key).close()

    def close(self) -> None:
        for connection in self.all.values():
            connection.close()


class Worker:
    """A rank's worker that knows the stores a and b."""

    def __init__(self, rank: Rank, connections: Connections) -> None:
        self._rank = rank
        self._num_orders = 0
        self.connections = connections
        self.running = PoolWorker(rank.context)
        for epoch in ("a", "b"):
            self.running.receive(encode(ConnectStore(epoch, 1 << 40, 1 << 24, {}, 16)))

    def load(self, name: str, epoch: str = "a", **options: Any) -> None:
        runs, timeout_s = (ChunkRun(epoch, 0, (0,)),), options.pop("timeout_s", TIMEOUT_S)
        self._num_orders += 1
        self.running.receive(encode(LoadRuns(name, f"r-{name}", runs, (0,), timeout_s, **options)))

    def save(self, name: str, epoch: str = "a", **options: Any) -> None:
        runs, timeout_s = (ChunkRun(epoch, 0, (0,)),), options.pop("timeout_s", TIMEOUT_S)
        self._num_orders += 1
        self.running.receive(encode(SaveRuns(name, runs, (0,), timeout_s, **options)))

    def moves(self, epoch: str) -> list[Move]:
        """All transfers started to or from that store over its current connections."""
        connections = [each for key, each in self.connections.all.items() if key[0] == epoch]
        return [move for connection in connections for move in connection.moves]

    def fill(self, epoch: str = "a") -> None:
        """Occupy all threads with loads."""
        for number in range(LOAD_THREADS):
            self.load(f"long{number}", epoch)
        wait_for(lambda: len(self.moves(epoch)) == LOAD_THREADS)

    @property
    def released(self) -> list[str]:
        messages = map(decode_from_rank, list(self._rank.sent))
        return [message.load_id for message in messages if isinstance(message, LayersLoaded)]

    @property
    def reports(self) -> list[RunsEnded]:
        """The report of each completed order."""
        messages = map(decode_from_rank, list(self._rank.sent))
        return [each for each in messages if isinstance(each, RunsEnded)]

    @property
    def ended(self) -> dict[str, str | None]:
        """The error of each completed order."""
        return {each.order_id: each.error for each in self.reports}

    @property
    def begun_shares(self) -> dict[str, float]:
        return {each.order_id: each.begun_share for each in self.reports}

    def end_all(self) -> None:
        """Complete all transfers, so that all orders succeed that depend on nothing else."""

        def are_over() -> bool:
            for move in self.moves("a") + self.moves("b"):
                move.end()
            return len(self.ended) == self._num_orders

        wait_for(are_over)


@pytest.fixture
def worker(monkeypatch: pytest.MonkeyPatch) -> Iterator[Worker]:
    rank, connections = Rank(), Connections()
    monkeypatch.setattr(pool_worker, "connect_memory", lambda context, max_moves: connections)
    made = Worker(rank, connections)
    yield made
    made.running.close()
    rank.allocation.free()
    assert rank.failures == []


def test_load_without_a_thread_neither_releases_nor_blocks_steps(worker: Worker) -> None:
    """The rank can't know whether the request runs nevertheless; if so, its output is unusable."""
    worker.fill()
    worker.load("quick", "b", release_layers=0)
    assert worker.released == []
    assert worker.running.begin_step(1, ["r-quick", "other"], completes_chunks=False) is None
    worker.end_all()
    assert worker.released == ["quick"]
    ended = worker.ended
    assert ended.pop("quick") == "a step continued without a layer that had not arrived in time"
    assert set(ended.values()) == {None}


def test_bytes_are_reported_by_transport(worker: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    """A connection that was closed meanwhile has none."""
    worker.load("load", "a")
    worker.save("save", "b")
    worker.end_all()
    monkeypatch.setattr(worker.connections, "transport_of", lambda *_: None)
    worker.load("unknown", "a")
    worker.end_all()
    reports = {each.order_id: each for each in worker.reports}
    for name, transport in (("load", "to-a"), ("save", "to-b")):
        assert reports[name].nbytes > 0
        assert reports[name].by_transport == {transport: reports[name].nbytes}
    assert reports["unknown"].by_transport == {}


def test_load_that_timed_out_before_a_thread_took_it_is_not_started(worker: Worker) -> None:
    worker.fill()
    worker.load("late", "b", timeout_s=0.0, release_layers=0)
    worker.end_all()
    assert worker.ended["late"] == f"TransferCancelled: {LATE}"
    assert (worker.released, worker.moves("b")) == ([], [])


def test_load_cancelled_in_the_queue_ends_at_once(worker: Worker) -> None:
    """Its blocks are free for other requests and its prompt is computed: no step waits for it."""
    worker.fill()
    worker.load("given-up", "b", release_layers=0)
    worker.running.receive(encode(CancelRuns("given-up")))
    assert worker.ended == {"given-up": "TransferCancelled: the load was cancelled"}
    assert worker.running.begin_step(1, ["r-given-up"], completes_chunks=False) is None
    worker.end_all()
    assert worker.moves("b") == []
    assert len(worker.ended) == LOAD_THREADS + 1


def test_step_continues_when_its_load_is_cancelled_however_long_it_drains(
    worker: Worker,
) -> None:
    worker.load("load", release_layers=0)
    wait_for(lambda: worker.moves("a"))
    worker.moves("a")[0].may_drain.clear()
    layer_done = worker.running.begin_step(1, ["r-load"], completes_chunks=False)
    assert layer_done is not None
    worker.running.receive(encode(CancelRuns("load")))
    layer_done(0)
    layer_done(1)
    assert worker.running.begin_step(2, ["r-load"], completes_chunks=False) is None
    assert worker.ended == {}
    worker.moves("a")[0].may_drain.set()
    wait_for(lambda: worker.ended)
    assert (worker.ended["load"] or "").startswith("TransferCancelled")


def test_load_that_a_step_did_not_wait_for_fails_even_if_all_layers_arrive(
    worker: Worker,
) -> None:
    """The step has read the blocks' old contents: no rank's result of it may be used."""
    worker.load("load", release_layers=0)
    wait_for(lambda: worker.moves("a"))
    layer_done = worker.running.begin_step(1, ["r-load"], completes_chunks=False)
    assert layer_done is not None
    worker.moves("a")[0].end()
    layer_done(0)
    wait_for(lambda: len(worker.moves("a")) == 2)
    worker.running._loads["load"].deadline = 0.0
    layer_done(1)
    assert worker.ended == {}
    worker.end_all()
    assert worker.ended == {"load": "a step continued without a layer that had not arrived in time"}


def test_load_that_times_out_in_the_queue_does_not_fail_others(worker: Worker) -> None:
    worker.fill()
    worker.load("late", timeout_s=0.0)
    worker.moves("a")[0].end()
    wait_for(lambda: len(worker.moves("a")) == LOAD_THREADS + 1)
    worker.moves("a")[LOAD_THREADS].end()
    wait_for(lambda: "late" in worker.ended)
    assert worker.ended.pop("late") == f"TransferCancelled: {LATE}"
    worker.end_all()
    assert {name for name, error in worker.ended.items() if error is None} == {
        f"long{number}" for number in range(LOAD_THREADS)
    }
    assert len(worker.connections.all) == 1


def test_save_whose_step_never_starts_does_not_fail_loads(worker: Worker) -> None:
    worker.fill()
    worker.save("save", timeout_s=0.05, step=7)
    wait_for(lambda: "save" in worker.ended)
    assert "step 7 did not reach layer 0 within" in (worker.ended["save"] or "")
    worker.end_all()
    ended = worker.ended
    del ended["save"]
    assert list(ended.values()) == [None] * LOAD_THREADS


@pytest.mark.parametrize("error", [TransferTimeout("late"), PeerLost("gone")])
def test_failing_order_keeps_the_connection_for_others(
    worker: Worker, error: TransferError
) -> None:
    """The store may be dead or only slow: new orders get another connection, and the last user
    closes the old one."""
    worker.load("failing")
    worker.load("slow")
    worker.save("save")
    wait_for(lambda: len(worker.moves("a")) == 3)
    loading, failing = next(
        (connection, connection.moves[0])
        for connection in worker.connections.all.values()
        if len(connection.moves) == 2
    )
    failing.end(error)
    wait_for(lambda: len(worker.ended) == 1)
    assert not loading.is_closed
    worker.load("next")
    wait_for(lambda: len(worker.connections.all) == 3)
    worker.end_all()
    assert sorted(map(str, worker.ended.values())) == sorted(
        ["None"] * 3 + [f"{type(error).__name__}: {error}"]
    )
    assert loading.is_closed
    assert [each.is_closed for each in worker.connections.all.values()] == [False, False]


@pytest.mark.parametrize("stops_writes", [False, True])
def test_failed_save_reports_whether_its_data_may_still_arrive(
    monkeypatch: pytest.MonkeyPatch, stops_writes: bool
) -> None:
    rank, connections = Rank(), Connections()
    connections.stops_writes_on_failure = stops_writes
    monkeypatch.setattr(pool_worker, "connect_memory", lambda context, max_moves: connections)
    worker = Worker(rank, connections)
    try:
        worker.save("unstarted", timeout_s=0.05, step=7)
        wait_for(lambda: worker.ended)
        worker.save("failed")
        wait_for(lambda: worker.moves("a"))
        worker.moves("a")[0].end(TransferTimeout("late"))
        wait_for(lambda: len(worker.ended) == 2)
        worker.save("whole")
        worker.end_all()
        assert {each.order_id: each.may_still_arrive for each in worker.reports} == {
            "unstarted": False,
            "failed": not stops_writes,
            "whole": False,
        }
    finally:
        worker.running.close()
        rank.allocation.free()


def test_load_reports_the_share_that_had_started_to_move(worker: Worker) -> None:
    worker.load("cut-off")
    wait_for(lambda: worker.moves("a"))
    worker.moves("a")[0].end(TransferTimeout("late"))
    wait_for(lambda: worker.ended)
    worker.load("whole")
    worker.end_all()
    assert worker.begun_shares == {"cut-off": 0.5, "whole": 1.0}
