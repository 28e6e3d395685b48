"""The connectors' per-rank workers, with CPU memory and real transports."""

from __future__ import annotations

import itertools
import logging
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import replace
from typing import NamedTuple

import msgspec
import pytest
from support.kv_rank import TIMEOUT_S, Rank, wait_for

from mooncake_hal.errors import PeerLost, TransferError, TransferTimeout
from mooncake_hal.kv.transfer_plan import PeerSpans, plan_transfer
from mooncake_hal.negotiation import NegotiatedPeer, Transports
from mooncake_hal.transport import MemoryRegion, Peer, Spans
from mooncake_kv.config import KVTransferConfig
from mooncake_kv.connector_worker import ConnectorWorker, RankTransports
from mooncake_kv.errors import ConnectorDead, Fatal, KVConfigError
from mooncake_kv.pool.pool_messages import (
    LoadRuns,
    SaveRuns,
    decode_from_rank as decode_pool_message,
)
from mooncake_kv.pool.pool_worker import PoolWorker
from mooncake_kv.pull_worker import PullWorker, _RunningLoad
from mooncake_kv.push_worker import PushWorker
from mooncake_kv.ranks import (
    CancelLoad,
    ConnectPeer,
    ConvertRopeOrder,
    EndPush,
    ForgetPeer,
    Load,
    RankReady,
    StartPush,
    decode_from_rank,
)

LOAD = Load("r", "p", (0,), (0,), 0, 4, 0, 4)
PUSH = StartPush("r", "p", (0,), 0, 4, 0)
BOTH = pytest.mark.parametrize(("worker", "order"), [(PullWorker, LOAD), (PushWorker, PUSH)])

Make = Callable[[type[ConnectorWorker]], ConnectorWorker]


@pytest.fixture
def rank() -> Iterator[Rank]:
    made = Rank()
    yield made
    made.allocation.free()


def opened(rank: Rank, worker: type[ConnectorWorker]) -> tuple[ConnectorWorker, bytes]:
    """A worker, and the order that connects it to an instance like its own."""
    running = worker(rank.context)
    ready = msgspec.msgpack.decode(rank.sent.pop(), type=RankReady)
    return running, msgspec.msgpack.encode(ConnectPeer("p", (ready.metadata,)))


@BOTH
def test_messages_after_close_are_dropped(
    rank: Rank, worker: type[ConnectorWorker], order: msgspec.Struct
) -> None:
    running, connect = opened(rank, worker)
    running.receive(connect)
    running.close()
    before = threading.active_count()
    for message in (msgspec.msgpack.encode(order), connect):
        running.receive(message)
    assert (rank.sent, rank.failures) == ([], [])
    assert threading.active_count() == before, "nothing is started"
    running.close()


@BOTH
def test_messages_during_close_are_harmless(
    rank: Rank,
    worker: type[ConnectorWorker],
    order: msgspec.Struct,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Orders arrive continuously while the worker closes."""
    running, connect = opened(rank, worker)
    has_closed, raised = threading.Event(), []

    def order_on() -> None:
        running.receive(connect)
        try:
            for name in map(str, itertools.count()):
                if has_closed.is_set():
                    return
                new = msgspec.structs.replace(order, request_id=name)
                running.receive(msgspec.msgpack.encode(new))
        except RuntimeError as exc:
            raised.append(exc)

    ordering = threading.Thread(target=order_on)
    with caplog.at_level(logging.ERROR):
        ordering.start()
        running.close()
        has_closed.set()
        ordering.join()
    assert (raised, rank.failures, caplog.messages) == ([], [], [])


def refuse_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make every thread start fail from now on."""

    def start(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", start)


def reports(rank: Rank) -> list[tuple[str, str | None]]:
    """The worker's reports: request id and error."""
    messages = (decode_from_rank(message) for message in rank.sent)
    return [(each.request_id, each.error) for each in messages if not isinstance(each, RankReady)]


def test_load_without_a_thread_fails_and_is_not_started_later(
    rank: Rank, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thread pool would keep it; once a thread is available, its blocks belong to other
    requests."""
    running, connect = opened(rank, PullWorker)
    begun: list[str] = []

    def read(load: _RunningLoad) -> None:
        begun.append(load.order.request_id)

    monkeypatch.setattr(running, "_read", read)
    running.receive(connect)
    with monkeypatch.context() as short_of_threads:
        refuse_threads(short_of_threads)
        running.receive(msgspec.msgpack.encode(LOAD))
    assert reports(rank) == [("r", "can't start new thread")]
    running.receive(msgspec.msgpack.encode(msgspec.structs.replace(LOAD, request_id="next")))
    wait_for(lambda: len(rank.sent) == 2)
    running.close()
    assert (begun, reports(rank)[1:], rank.failures) == (["next"], [("next", None)], [])


def test_cancelling_loads_and_peers_works_without_a_new_thread(
    rank: Rank, monkeypatch: pytest.MonkeyPatch
) -> None:
    running, connect = opened(rank, PullWorker)
    assert isinstance(running, PullWorker)
    running.receive(connect)
    load = running._loads["r"] = _RunningLoad(LOAD, 1e12)
    forgotten: list[str] = []
    monkeypatch.setattr(running._transports, "forget", forgotten.append)
    refuse_threads(monkeypatch)
    running.receive(msgspec.msgpack.encode(CancelLoad("r")))
    running.receive(msgspec.msgpack.encode(ForgetPeer("p")))
    wait_for(lambda: load._is_cancelled and forgotten)
    monkeypatch.undo()
    running.close()
    assert (forgotten, rank.failures) == (["p"], [])


class SlowToDrain:
    """A transfer that drains only when the other side releases it."""

    def __init__(self) -> None:
        self.is_ending = threading.Event()
        self.lets_go = threading.Event()

    def cancel(self) -> None:
        self.is_ending.set()
        assert self.lets_go.wait(TIMEOUT_S)


def test_slow_cancellations_of_one_instance_delay_no_other(
    rank: Rank, monkeypatch: pytest.MonkeyPatch
) -> None:
    running, connect = opened(rank, PullWorker)
    assert isinstance(running, PullWorker)
    [facts] = msgspec.msgpack.decode(connect, type=ConnectPeer).ranks
    transfers = {}
    for name in ("slow", "other"):
        running.receive(msgspec.msgpack.encode(ConnectPeer(name, (facts,))))
        command = msgspec.structs.replace(LOAD, request_id=f"of {name}", engine_id=name)
        load = running._loads[command.request_id] = _RunningLoad(command, 1e12)
        transfers[name] = SlowToDrain()
        load.add(transfers[name], 0)
    forgotten: list[str] = []
    monkeypatch.setattr(running._transports, "forget", forgotten.append)
    running.receive(msgspec.msgpack.encode(CancelLoad("of slow")))
    assert transfers["slow"].is_ending.wait(TIMEOUT_S)
    running.receive(msgspec.msgpack.encode(ForgetPeer("slow")))
    running.receive(msgspec.msgpack.encode(CancelLoad("of other")))
    assert transfers["other"].is_ending.wait(TIMEOUT_S)
    transfers["other"].lets_go.set()
    running.receive(msgspec.msgpack.encode(ForgetPeer("other")))
    wait_for(lambda: forgotten == ["other"])
    transfers["slow"].lets_go.set()
    wait_for(lambda: forgotten == ["other", "slow"])
    running._loads.clear()
    running.close()


def test_close_waits_for_the_connections_of_all_dropped_peers(
    rank: Rank, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise they would be closed while the transport under them is."""
    running, connect = opened(rank, PullWorker)
    [facts] = msgspec.msgpack.decode(connect, type=ConnectPeer).ranks
    slow = SlowToDrain()
    ended: list[str] = []
    close = running._transports.close

    def forget(engine_id: str) -> None:
        if engine_id == "slow":
            slow.cancel()
        ended.append(engine_id)

    def note_close() -> None:
        ended.append("transports")
        close()

    monkeypatch.setattr(running._transports, "forget", forget)
    monkeypatch.setattr(running._transports, "close", note_close)
    for name in ("slow", "other"):
        running.receive(msgspec.msgpack.encode(ConnectPeer(name, (facts,))))
    running.receive(msgspec.msgpack.encode(ForgetPeer("slow")))
    assert slow.is_ending.wait(TIMEOUT_S)
    running.receive(msgspec.msgpack.encode(ForgetPeer("other")))
    wait_for(lambda: ended == ["other"])
    closing = threading.Thread(target=running.close)
    closing.start()
    closing.join(0.2)
    slow.lets_go.set()
    closing.join(TIMEOUT_S)
    assert ended == ["other", "slow", "transports"]


def test_pool_transfers_without_a_thread_fail_and_block_no_step(
    rank: Rank, monkeypatch: pytest.MonkeyPatch
) -> None:
    running = PoolWorker(rank.context)
    rank.sent.clear()
    load = LoadRuns("load", "r", (), (), TIMEOUT_S, release_layers=0)
    with monkeypatch.context() as short_of_threads:
        refuse_threads(short_of_threads)
        running.receive(msgspec.msgpack.encode(load))
        wait_for_layer = running.begin_step(1, ["r"], completes_chunks=False)
        running.receive(msgspec.msgpack.encode(SaveRuns("save", (), (), TIMEOUT_S)))
    assert wait_for_layer is None
    assert not running.has_loads
    ended = [decode_pool_message(message) for message in rank.sent]
    assert [(each.order_id, each.error) for each in ended] == [
        (name, "TransferError: a thread can't be started: can't start new thread")
        for name in ("load", "save")
    ]
    running.close()
    assert (len(rank.sent), rank.failures) == (2, [])


def test_push_without_a_thread_fails_alone(rank: Rank, monkeypatch: pytest.MonkeyPatch) -> None:
    running, connect = opened(rank, PushWorker)
    assert isinstance(running, PushWorker)
    running.receive(connect)
    with monkeypatch.context() as short_of_threads:
        refuse_threads(short_of_threads)
        running.receive(msgspec.msgpack.encode(PUSH))
        running.receive(msgspec.msgpack.encode(ConvertRopeOrder("converted", (0,), 0, 4, "pairs")))
        wait_for(lambda: len(rank.sent) == 2)
    [push, converted] = reports(rank)
    assert push == ("r", "its send thread can't be started: can't start new thread")
    assert converted[0] == "converted"
    running.receive(msgspec.msgpack.encode(EndPush("r", is_complete=False)))
    assert not running._sessions
    running.receive(msgspec.msgpack.encode(msgspec.structs.replace(PUSH, request_id="next")))
    assert running._sessions["next"].send_thread is not None
    running.close()
    assert rank.failures == []


def test_worker_without_threads_does_not_start(rank: Rank, monkeypatch: pytest.MonkeyPatch) -> None:
    refuse_threads(monkeypatch)
    with pytest.raises(KVConfigError, match="kv-end-0, which moves KV, can't be started: can't"):
        PullWorker(rank.context)


def test_transports_that_can_not_register_the_memory_are_closed(
    rank: Rank, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed, close = list[Transports](), Transports.close

    def refuse(transports: Transports, region: MemoryRegion) -> None:
        raise TransferError("the driver rejects the memory")

    def note_close(transports: Transports) -> None:
        closed.append(transports)
        close(transports)

    monkeypatch.setattr(Transports, "register", refuse)
    monkeypatch.setattr(Transports, "close", note_close)
    with pytest.raises(KVConfigError, match="the driver rejects the memory"):
        PullWorker(rank.context)
    assert len(closed) == 1


def test_thread_without_a_device_ends_the_engine(rank: Rank) -> None:
    """The thread's executor drops its orders without a report."""

    def bind() -> None:
        raise RuntimeError("no device")

    rank.context = replace(rank.context, bind_thread=bind)
    running, connect = opened(rank, PullWorker)
    running.receive(connect)
    running.receive(msgspec.msgpack.encode(LOAD))
    wait_for(lambda: rank.failures)
    running.close()
    [dead] = rank.failures
    assert isinstance(dead, ConnectorDead)
    assert dead.fatal is Fatal.RANK_THREAD_ENDED


def test_pool_worker_thread_without_a_device_ends_the_engine(rank: Rank) -> None:
    def bind() -> None:
        raise RuntimeError("no device")

    rank.context = replace(rank.context, bind_thread=bind)
    running = PoolWorker(rank.context)
    running.receive(msgspec.msgpack.encode(SaveRuns("save", (), (), TIMEOUT_S)))
    wait_for(lambda: rank.failures)
    running.close()
    [dead] = rank.failures
    assert isinstance(dead, ConnectorDead)
    assert dead.fatal is Fatal.RANK_THREAD_ENDED


def test_removed_peers_are_forgotten(rank: Rank) -> None:
    running, connect = opened(rank, PullWorker)
    [facts] = msgspec.msgpack.decode(connect, type=ConnectPeer).ranks
    for number in range(5):
        name = f"p{number}"
        running.receive(msgspec.msgpack.encode(ConnectPeer(name, (facts,))))
        running.receive(msgspec.msgpack.encode(ForgetPeer(name)))
    assert isinstance(running, PullWorker)
    assert [former.engine_id for former in running._retired] == ["p4"], "the last may be ending"
    running.close()


def test_peer_dropped_during_connect_is_not_kept(
    rank: Rank, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise the connection would never be closed."""
    running, connect = opened(rank, PullWorker)
    [facts] = msgspec.msgpack.decode(connect, type=ConnectPeer).ranks
    transports, closed = running._transports, []
    connected = transports._transports.connect

    def dropped_meanwhile(addresses: dict[str, bytes], *, timeout: float) -> NegotiatedPeer:
        choice = connected(addresses, timeout=timeout)
        kind, close = type(choice.peer), choice.peer.close
        monkeypatch.setattr(kind, "close", lambda peer: (closed.append(peer), close()))
        transports.forget("p")
        return choice

    monkeypatch.setattr(transports._transports, "connect", dropped_meanwhile)
    with pytest.raises(PeerLost, match="p was dropped while it was being connected to"):
        transports.peer("p", 0, facts.endpoints)
    monkeypatch.undo()
    assert len(closed) == 1
    kept = transports.peer("p", 0, facts.endpoints)
    assert kept is not closed[0]
    assert transports.peer("p", 0, facts.endpoints) is kept
    running.close()


def test_one_connection_of_a_peer_is_dropped_without_the_others(rank: Rank) -> None:
    running, connect = opened(rank, PullWorker)
    [facts] = msgspec.msgpack.decode(connect, type=ConnectPeer).ranks

    def peer(number: int) -> Peer:
        return running._transports.peer("p", 0, facts.endpoints, connection=number)

    first, second = peer(0), peer(1)
    running._transports.forget("p", 1)
    assert peer(0) is first
    assert peer(1) is not second
    running.close()


def test_dropped_peer_that_returns_keeps_its_new_connections(
    rank: Rank, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread that wrote to it before may take seconds to drain, and closes only its own
    connections."""
    running, connect = opened(rank, PushWorker)
    forget, is_drained = running._transports.forget, threading.Event()

    def forget_late(*which: str | int) -> None:
        is_drained.wait(TIMEOUT_S)
        forget(*which)

    monkeypatch.setattr(running._transports, "forget", forget_late)
    running.receive(connect)
    running.receive(msgspec.msgpack.encode(PUSH))
    old = running._send_threads["p"]
    before = old._services.connect(0)
    running.receive(msgspec.msgpack.encode(ForgetPeer("p")))
    running.receive(connect)
    running.receive(msgspec.msgpack.encode(msgspec.structs.replace(PUSH, request_id="new")))
    reconnect = running._send_threads["p"]._services.connect
    after = reconnect(0)
    is_drained.set()
    old._thread.join(TIMEOUT_S)
    assert reconnect(0) is after
    assert before is not after
    running.close()


class Reading:
    """A connection, and its reads."""

    def __init__(self) -> None:
        self.reads: list[Future[None]] = []
        self.is_closed = False

    def read(self, spans: Spans, *, timeout: float) -> OneRead:
        self.reads.append(Future())
        return OneRead(self.reads[-1])

    def close(self) -> None:
        self.is_closed = True
        for read in self.reads:
            if not read.done():
                read.set_exception(PeerLost("the connection was closed on this side"))


class OneRead(NamedTuple):
    """A transfer."""

    ended: Future[None]

    def wait(self) -> None:
        self.ended.result(TIMEOUT_S)

    def cancel(self) -> None:
        pass  # the queried transfers have completed


def test_late_load_keeps_connection_for_other_loads(
    rank: Rank, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other loads share the connection and may be about to complete; later loads get another
    one."""
    running, connect = opened(rank, PullWorker)
    made: list[Reading] = []

    def connected(addresses: dict[str, bytes], *, timeout: float) -> NegotiatedPeer:
        made.append(Reading())
        return NegotiatedPeer("tcp", made[-1], "")

    monkeypatch.setattr(running._transports._transports, "connect", connected)
    running.receive(connect)

    def load(name: str) -> None:
        running.receive(msgspec.msgpack.encode(msgspec.structs.replace(LOAD, request_id=name)))

    for number, name in enumerate(("late", "other"), 1):
        load(name)
        wait_for(lambda number=number: made and len(made[0].reads) == number)
    made[0].reads[0].set_exception(TransferTimeout("not done within 30 s; drained"))
    wait_for(lambda: rank.sent)
    load("next")
    wait_for(lambda: len(made) == 2 and made[1].reads)
    assert not made[0].is_closed
    made[0].reads[1].set_result(None)
    wait_for(lambda: len(rank.sent) == 2)
    assert (made[0].is_closed, made[1].is_closed) == (True, False)
    made[1].reads[0].set_result(None)
    wait_for(lambda: len(rank.sent) == 3)
    late = "TransferTimeout: not done within 30 s; drained"
    assert reports(rank) == [("late", late), ("other", None), ("next", None)]
    running.close()


def test_load_of_dropped_instance_leaves_no_connection(
    rank: Rank, monkeypatch: pytest.MonkeyPatch
) -> None:
    running, connect = opened(rank, PullWorker)
    made: list[Reading] = []

    def connected(addresses: dict[str, bytes], *, timeout: float) -> NegotiatedPeer:
        made.append(Reading())
        return NegotiatedPeer("tcp", made[-1], "")

    def dropped_meanwhile(*args: object) -> list[PeerSpans]:
        running.receive(msgspec.msgpack.encode(ForgetPeer("p")))
        running._cleanup_thread.submit(int).result(TIMEOUT_S)
        return plan_transfer(*args)

    monkeypatch.setattr(running._transports._transports, "connect", connected)
    monkeypatch.setattr("mooncake_kv.pull_worker.plan_transfer", dropped_meanwhile)
    running.receive(connect)
    running.receive(msgspec.msgpack.encode(LOAD))
    wait_for(lambda: made and made[0].reads)
    made[0].reads[0].set_result(None)
    wait_for(lambda: rank.sent)
    assert made[0].is_closed
    running.close()


def test_users_of_the_same_memory_and_configuration_share_transports(rank: Rank) -> None:
    """A connector and the KVCache pool of one rank: the last one to close closes the transports."""
    context = rank.context

    def opened_by(config: KVTransferConfig) -> RankTransports:
        return RankTransports(config, context.memory, context.registry, context.shared)

    first, second = opened_by(context.config), opened_by(replace(context.config))
    other = opened_by(replace(context.config, transports=("shm",)))
    peer = opened_by(replace(context.config, host="localhost"))
    assert first.addresses == second.addresses
    assert first.addresses.keys() != other.addresses.keys()
    first.close()
    first.close()
    peer.peer("p", 0, second.addresses, timeout_s=10.0)
    for each in (second, other, peer):
        each.close()
    third = opened_by(context.config)
    assert third.addresses != first.addresses
    third.close()
