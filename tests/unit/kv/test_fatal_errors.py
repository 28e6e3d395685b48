"""A connector ends its engine only for the reasons in ``Fatal``; any other exception ends the
request in which it was raised."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from support.push_line import convert_nothing, metadata_of

from mooncake_hal.errors import PeerLost, TransferError
from mooncake_kv import push_worker
from mooncake_kv.connector import LoadEnded
from mooncake_kv.connector_scheduler import ConnectorContext
from mooncake_kv.errors import ConnectorDead, Fatal
from mooncake_kv.handshake import IncompatiblePeers
from mooncake_kv.io_loop import IoLoop
from mooncake_kv.kv_reader import KVReader
from mooncake_kv.lease_keeper import LeaseKeeper
from mooncake_kv.metaserver_client import RequestMetaserver
from mooncake_kv.params import RemoteKV
from mooncake_kv.peers import Handshake, PeerTable
from mooncake_kv.pull_connector import MooncakeConnector
from mooncake_kv.pull_receiver import PullReceiver
from mooncake_kv.pull_worker import PullWorker, _RunningLoad
from mooncake_kv.push_progress import PromptProgress
from mooncake_kv.push_receiver import PushReceiver
from mooncake_kv.push_worker import PushSession, SendServices, SendTask, SendThread
from mooncake_kv.ranks import Load, LoadReport, RankGroup, RankLoads, decode_from_rank
from mooncake_kv.store.store_metrics import MetricsServer
from mooncake_kv.store.store_service import StoreService

TIMEOUT_S = 20.0
LOAD = Load("r", "p", (0,), (0,), 0, 4, 0, 4)


class Bug(Exception):
    """An unexpected exception."""


class Owner:
    """The owner of a loop, and the failures that it receives."""

    def __init__(self) -> None:
        self.errors: list[tuple[str, Exception]] = []
        self.failures: list[ConnectorDead] = []
        self.has_report = threading.Event()
        self.loop = IoLoop("test", self._error, self._failure)

    def _error(self, request_id: str, exc: Exception) -> None:
        if request_id == "can't be given up":
            raise Bug("again")
        self.errors.append((request_id, exc))
        self.has_report.set()

    def _failure(self, dead: ConnectorDead) -> None:
        self.failures.append(dead)
        self.has_report.set()

    def wait(self) -> None:
        assert self.has_report.wait(TIMEOUT_S)

    def call(self, function: Callable[..., Any], *args: Any) -> None:
        """Call it on the loop, on behalf of no request."""

        async def main() -> None:
            function(*args)

        self.loop.run(main(), TIMEOUT_S)


@pytest.fixture
def owner() -> Iterator[Owner]:
    made = Owner()
    yield made
    made.loop.close()


def fail() -> None:
    raise Bug("a bug")


async def fail_later() -> None:
    fail()


def test_failed_call_fails_its_request(owner: Owner, caplog: pytest.LogCaptureFixture) -> None:
    owner.loop.call("r", fail)
    owner.wait()
    [(request_id, exc)] = owner.errors
    assert (request_id, str(exc)) == ("r", "a bug")
    assert owner.failures == []
    assert "Bug: a bug" in caplog.text, "with its traceback"


def test_failed_task_fails_its_request(owner: Owner) -> None:
    owner.call(lambda: owner.loop.spawn(fail_later(), "r"))
    owner.wait()
    assert [request_id for request_id, _ in owner.errors] == ["r"]
    assert owner.failures == []


def test_failed_task_without_a_request_is_only_logged(
    owner: Owner, caplog: pytest.LogCaptureFixture
) -> None:
    owner.call(lambda: owner.loop.spawn(fail_later()))
    owner.loop.call("r", owner.has_report.set)
    owner.wait()
    assert (owner.errors, owner.failures) == ([], [])
    assert "failed in a task without a request" in caplog.text


def test_ended_housekeeping_task_ends_the_engine(owner: Owner) -> None:
    owner.call(lambda: owner.loop.spawn_housekeeping(fail_later()))
    owner.wait()
    [dead] = owner.failures
    assert dead.fatal is Fatal.HOUSEKEEPING_ENDED
    assert "Bug('a bug')" in str(dead)


def test_failure_that_cannot_be_reported_ends_the_engine(owner: Owner) -> None:
    owner.loop.call("can't be given up", fail)
    owner.wait()
    assert [dead.fatal for dead in owner.failures] == [Fatal.HOUSEKEEPING_ENDED]


def test_request_that_finds_the_connector_dead_ends_the_engine(owner: Owner) -> None:
    async def find() -> None:
        raise ConnectorDead(Fatal.MEMORY_MAY_CHANGE)

    owner.call(lambda: owner.loop.spawn(find(), "r"))
    owner.wait()
    assert [dead.fatal for dead in owner.failures] == [Fatal.MEMORY_MAY_CHANGE]
    assert owner.errors == [], "the load is not failed, since that would free its blocks"


def test_loop_that_stops_by_itself_ends_the_engine(owner: Owner) -> None:
    owner.loop.call("r", lambda: asyncio.get_running_loop().stop())
    owner.wait()
    assert [dead.fatal for dead in owner.failures] == [Fatal.IO_LOOP_ENDED]


def closable(kind: str, loop: IoLoop) -> Any:
    """A connector or a server that has started with this loop, without its sockets."""
    if kind == "connector":
        made: Any = object.__new__(MooncakeConnector)
        made._is_started = True
    elif kind == "service":
        made = object.__new__(StoreService)
        made._listener = SimpleNamespace(sessions=())
        made._users, made._clients, made._departed = {}, {}, set()
    else:
        made = object.__new__(MetricsServer)
        made._server = SimpleNamespace()
    made._loop = loop
    return made


@pytest.mark.parametrize("kind", ["connector", "service", "metrics"])
def test_owner_of_a_loop_that_stopped_by_itself_can_be_closed(owner: Owner, kind: str) -> None:
    """An error there would hide why the loop has stopped."""
    owner.loop._loop.call_soon_threadsafe(owner.loop._loop.stop)
    owner.loop._thread.join(TIMEOUT_S)
    closable(kind, owner.loop).close()
    assert [dead.fatal for dead in owner.failures] == [Fatal.IO_LOOP_ENDED]


def test_closed_loop_does_not_end_the_engine(owner: Owner) -> None:
    owner.loop.close()
    assert (owner.errors, owner.failures) == ([], [])


class FakeTransfer:
    """A transfer that fails and possibly can't be drained."""

    def __init__(self, failure: Exception, cancel_failure: Exception | None = None) -> None:
        self._failure = failure
        self._cancel_failure = cancel_failure

    def wait(self) -> None:
        raise self._failure

    def cancel(self) -> None:
        if self._cancel_failure is not None:
            raise self._cancel_failure


class LoadingRank:
    """A pull worker without transports, whose reads the test provides."""

    def __init__(self, read: Callable[[_RunningLoad], None]) -> None:
        self.reports: list[LoadReport] = []
        self.failures: list[BaseException] = []
        self.worker = PullWorker.__new__(PullWorker)
        self.worker._loads = {"r": _RunningLoad(LOAD, 1e12)}
        self.worker._timeout_s = 1.0
        self.worker._read = read  # type: ignore[method-assign]
        self.worker.context = self  # type: ignore[assignment]

    def run(self) -> None:
        self.worker._run(self.worker._loads["r"])

    def emit(self, message: bytes) -> None:
        report = decode_from_rank(message)
        assert isinstance(report, LoadReport)
        self.reports.append(report)

    def fail(self, exc: BaseException) -> None:
        self.failures.append(exc)


@pytest.mark.parametrize("exc", [Bug("a bug"), TransferError("lost"), MemoryError("full")])
def test_failed_read_is_reported_and_thread_survives(exc: Exception) -> None:
    def read(load: _RunningLoad) -> None:
        raise exc

    rank = LoadingRank(read)
    rank.run()
    [report] = rank.reports
    assert str(exc) in str(report.error)
    assert rank.failures == []


def test_undrainable_read_ends_the_engine_and_frees_no_block() -> None:
    def read(load: _RunningLoad) -> None:
        load.add(FakeTransfer(Bug("odd"), Bug("stuck")), 1)  # type: ignore[arg-type]
        load.drain()

    rank = LoadingRank(read)
    rank.run()
    assert rank.reports == [], "not reported, since the memory may still be written to"
    [dead] = rank.failures
    assert isinstance(dead, ConnectorDead)
    assert dead.fatal is Fatal.MEMORY_MAY_CHANGE


class Line:
    """A thread that sends to one peer."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **services: Any) -> None:
        self.closed: list[PushSession] = []
        self.failures: list[BaseException] = []
        self.has_report = threading.Event()
        nothing: dict[str, Any] = {
            "plan": lambda movement: [],
            "connect": lambda rank: None,
            "disconnect": lambda: None,
            "bind": lambda: None,
            "timeout_s": 1.0,
        }
        made = SendServices(**{**nothing, "close": self._close, "fail": self._fail, **services})
        self.thread = SendThread("line", made)

    def session(self, name: str) -> PushSession:
        return PushSession(name, PromptProgress((0, 1)))

    def _close(self, session: PushSession) -> None:
        self.closed.append(session)
        self.has_report.set()

    def _fail(self, exc: BaseException) -> None:
        self.failures.append(exc)
        self.has_report.set()

    def wait(self) -> None:
        assert self.has_report.wait(TIMEOUT_S)
        self.has_report.clear()


class BrokenEvent:
    """A device event that raises an exception outside its contract."""

    def synchronize(self) -> None:
        raise Bug("the device is odd")


def test_failed_push_fails_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    line = Line(monkeypatch)
    first, second = line.session("a"), line.session("b")
    line.thread.put(SendTask(first, None, BrokenEvent()))  # type: ignore[arg-type]
    line.wait()
    line.thread.put(SendTask(second, None))
    line.wait()
    line.thread.close()
    assert [session.request_id for session in line.closed] == ["a", "b"]
    assert "the device is odd" in str(first.error)
    assert (second.error, line.failures) == (None, [])


class Wire:
    """Connections to a peer's rank in the order of their opening, and the writes in flight when all
    were closed.

    Args:
        failures: the errors of the first writes; the others succeed.
        breaks_at_once: whether a write fails when it is started instead of when it is awaited.
    """

    def __init__(self, failures: list[Exception], *, breaks_at_once: bool) -> None:
        self.failures, self.breaks_at_once = failures, breaks_at_once
        self.num_opened = 0
        self.is_open = False
        self.in_flight = 0
        self.cut_off = 0

    def connect(self, rank: int) -> Wire:
        self.num_opened += not self.is_open
        self.is_open = True
        return self

    def disconnect(self) -> None:
        self.is_open = False
        self.cut_off += self.in_flight

    def write(self, spans: Any, timeout: float) -> Wire:
        if self.failures and self.breaks_at_once:
            raise self.failures.pop(0)
        self.in_flight += 1
        return self

    def wait(self) -> None:
        self.in_flight -= 1
        if self.failures:
            raise self.failures.pop(0)

    def cancel(self) -> None:
        """Nothing moves."""


@pytest.mark.parametrize("breaks_at_once", [True, False], ids=["begun", "awaited"])
def test_failed_write_does_not_fail_others_of_its_batch(
    monkeypatch: pytest.MonkeyPatch, breaks_at_once: bool
) -> None:
    wire = Wire([PeerLost("gone")], breaks_at_once=breaks_at_once)
    spans = SimpleNamespace(peer=0, spans=SimpleNamespace(total_bytes=8))
    line = Line(
        monkeypatch,
        plan=lambda movement: [spans],
        connect=wire.connect,
        disconnect=wire.disconnect,
    )
    monkeypatch.setattr(push_worker, "_requested_part", lambda session, portion: object())
    monkeypatch.setattr(push_worker, "merge_portions", lambda portions: portions)
    sessions = [line.session(name) for name in "abc"]
    portion = SimpleNamespace(pass_number=0)
    line.thread._send_batch([SendTask(session, portion) for session in sessions])  # type: ignore[arg-type]
    line.thread._send_batch([SendTask(session, None) for session in sessions[1:]])
    line.thread.close()
    assert "gone" in str(sessions[0].error)
    assert [session.error for session in sessions[1:]] == [None, None]
    assert [dict(session.written) for session in sessions] == [{}, {0: 8}, {0: 8}]
    assert wire.cut_off == 0
    assert wire.num_opened == (2 if breaks_at_once else 1)


def test_ended_send_thread_ends_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threading, "excepthook", lambda args: None)
    line = Line(monkeypatch, bind=fail)
    line.wait()
    [dead] = line.failures
    assert isinstance(dead, ConnectorDead)
    assert dead.fatal is Fatal.RANK_THREAD_ENDED


def test_undrainable_write_ends_the_engine() -> None:
    with pytest.raises(ConnectorDead) as found:
        push_worker._drain(FakeTransfer(Bug("odd"), Bug("stuck")))  # type: ignore[arg-type]
    assert found.value.fatal is Fatal.MEMORY_MAY_CHANGE


def test_every_fatal_reason_is_tested() -> None:
    """Each reason has its test here; a new one needs one."""
    assert {fatal.name for fatal in Fatal} == {
        "IO_LOOP_ENDED",
        "HOUSEKEEPING_ENDED",
        "RANK_THREAD_ENDED",
        "MEMORY_MAY_CHANGE",
    }


REMOTE = RemoteKV("p", "theirs", "127.0.0.1", 1, (0,), 3)


def pulling(send: Callable[[int, bytes], None], events: list[Any], loop: IoLoop) -> PullReceiver:
    """A decode side over ranks to which messages can't be sent."""
    ranks = RankGroup(1, send)
    handshake = Handshake(metadata_of("d"), ranks, lambda own, peer: None, IncompatiblePeers())
    peers = PeerTable(b"", handshake)
    context = ConnectorContext(metadata_of("d"), 30.0, events.append, loop.spawn)

    async def known(remote: RemoteKV) -> Any:
        """The handshake is done."""

    peers.reach = known  # type: ignore[method-assign]
    return PullReceiver(
        context, KVReader(context, RankLoads(ranks), peers, LeaseKeeper(context, peers))
    )


def test_load_that_may_have_reached_a_rank_keeps_its_blocks_and_ends_the_engine(
    owner: Owner,
) -> None:
    events: list[Any] = []

    def send(rank: int, message: bytes) -> None:
        raise Bug("half of the ranks received it")

    def begin() -> None:
        receiver = pulling(send, events, owner.loop)
        receiver.expect("r", REMOTE)
        receiver.load("r", (0,), 0)

    owner.call(begin)
    owner.wait()
    [ended] = events
    assert isinstance(ended, LoadEnded)
    assert not ended.is_drained
    assert "half of the ranks" in str(ended.error)
    [dead] = owner.failures
    assert dead.fatal is Fatal.MEMORY_MAY_CHANGE
    assert owner.errors == [], "the blocks are not reported as free"


def test_abort_is_reported_to_the_scheduler_once(owner: Owner) -> None:
    """Of a known request, of an unknown one, and twice."""
    events: list[Any] = []

    def begin() -> None:
        receiver = pulling(lambda rank, message: None, events, owner.loop)
        receiver.expect("r", REMOTE)
        receiver.abort("r", "odd")
        assert not receiver._expected
        assert not receiver._reader.peers._num_held

    owner.call(begin)
    assert events == [LoadEnded("r", "odd")]


def test_unexpected_metaserver_error_fails_its_request() -> None:
    events: list[Any] = []

    async def post(metaserver: RequestMetaserver, params: Any) -> None:
        raise Bug("no contract says so")

    async def main() -> None:
        tasks: list[asyncio.Task[None]] = []

        def spawn(coroutine: Any, request_id: str | None = None) -> asyncio.Task[None]:
            tasks.append(asyncio.ensure_future(coroutine))
            return tasks[-1]

        context = ConnectorContext(metadata_of("d"), 30.0, events.append, spawn)
        receiver = PushReceiver(context, None, post, convert_nothing, max_load_s=300.0)  # type: ignore[arg-type]
        params = {"num_prompt_tokens": 3, "remote_cached_tokens": 0}
        receiver.load("r", (0,), RequestMetaserver("http://x"), params)
        [outcome] = await asyncio.gather(*tasks, return_exceptions=True)
        assert isinstance(outcome, Bug)
        receiver.abort("r", str(outcome))  # as the connector's loop does

    asyncio.run(main())
    assert events == [LoadEnded("r", "no contract says so")]
