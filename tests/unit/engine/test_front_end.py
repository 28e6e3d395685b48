"""Messages to a front end that reads slowly are queued, in order and up to a bound."""

from __future__ import annotations

import pickle
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from mmap import mmap
from multiprocessing.connection import Connection, Pipe
from pathlib import Path

import pytest
from support.scripted_core import ScriptedExecutor, scripted_engine

from mooncake_engine import assembly, core_client, core_process
from mooncake_engine.config import EngineConfig
from mooncake_engine.core_messages import (
    UPDATES,
    CoreReport,
    PromptEncoder,
    Start,
    decode_updates,
)
from mooncake_engine.core_process import CoreProcess, FrontEnd, send_report
from mooncake_engine.errors import EngineDead
from mooncake_engine.execution import node_launcher, rank_processes
from mooncake_engine.messages import (
    EngineRequest,
    EngineStats,
    ExpertLoad,
    FinishReason,
    TokenUpdate,
    total_stats,
)
from mooncake_engine.sampling_params import SamplingParams
from mooncake_engine.step_watchdog import STATE_BYTES
from mooncake_hal.command_line import LogSettings

ANSWER = [65 + number % 26 for number in range(60)]
HEADER_BYTES = 5
MAX_BYTES = 1 << 20
LARGE = bytes(range(256)) * (
    MAX_BYTES >> 7
)  # twice the bound, and more than a socket's buffer holds


@pytest.fixture
def peer(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[FrontEnd, Connection]]:
    monkeypatch.setattr(core_process, "MAX_UNSENT_BYTES", MAX_BYTES)
    here, there = Pipe()
    front = FrontEnd(here, "API worker 1")
    with here, there:
        yield front, there
    wait_for_threads()
    front._socket.close()


def wait_for_threads() -> None:
    """Join the sender and reader threads: they end once they have sent everything that is queued,
    or found that their peer has closed the connection."""
    for thread in threading.enumerate():
        if thread.name == "unsent" or thread.name.startswith(("reports", "requests-")):
            thread.join()


def test_queued_messages_beyond_the_bound_are_delivered_in_order(
    peer: tuple[FrontEnd, Connection],
) -> None:
    """Prompt log probabilities of one step may take 100 MiB; later steps are queued behind them."""
    front, there = peer
    sent = [LARGE, b"a", b"b" * 1000, b"", b"c"]
    for message in sent:
        front.send(UPDATES, message)
    kind = bytes([UPDATES])
    assert [there.recv_bytes() for _ in sent] == [kind + message for message in sent]
    front.send(UPDATES, b"later")
    assert there.recv_bytes() == kind + b"later"


def test_a_large_message_is_queued_if_it_is_the_only_one(peer: tuple[FrontEnd, Connection]) -> None:
    front, there = peer
    for _ in range(2):
        assert front.can_queue(len(LARGE))
        front.send(UPDATES, LARGE)
    assert not front.can_queue(1)
    for _ in range(2):
        assert there.recv_bytes()[1:] == LARGE
    wait_for_threads()
    assert front.can_queue(len(LARGE))


def test_unread_messages_are_bounded(peer: tuple[FrontEnd, Connection]) -> None:
    front, there = peer
    message = bytes((64 << 10) - HEADER_BYTES)
    front.send(UPDATES, LARGE)
    num_sent = 0
    while front.can_queue(len(message)):
        front.send(UPDATES, message)
        num_sent += 1
    assert num_sent == MAX_BYTES // (64 << 10)
    assert there.recv_bytes()[1:] == LARGE
    for _ in range(num_sent):
        assert there.recv_bytes()[1:] == message


def test_messages_to_a_closed_front_end_are_dropped(peer: tuple[FrontEnd, Connection]) -> None:
    front, there = peer
    front.send(UPDATES, LARGE)
    there.close()
    wait_for_threads()
    for _ in range(3):
        front.send(UPDATES, LARGE)


class Core(CoreProcess):
    """A core process that runs in this process, without a parent that controls it."""

    def _handle_parent(self) -> None:
        pass


@pytest.fixture
def workers(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Connection]]:
    """The API workers' ends of two connections to a core that queues at most 1000 unread bytes;
    the first worker's socket has a minimal send buffer, too."""
    monkeypatch.setattr(core_process, "MAX_UNSENT_BYTES", 1000)
    monkeypatch.setattr(core_process.gc, "freeze", lambda: None)
    engine = scripted_engine(ScriptedExecutor(lambda _request: ANSWER))
    monkeypatch.setattr(assembly, "build_engine", lambda *_: engine)
    pairs = [Pipe() for _ in range(3)]
    parent, *served = [FrontEnd(ours, f"front {n}") for n, (ours, _) in enumerate(pairs)]
    served[0]._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1)
    core = Core(parent, served, mmap(-1, STATE_BYTES))
    start = Start(EngineConfig(Path("scripted")), LogSettings.current())
    thread = threading.Thread(target=core.run, args=(start,))
    thread.start()
    yield [theirs for _, theirs in pairs[1:]]
    core._stopping.set()
    thread.join()
    for _, theirs in pairs:
        theirs.close()
    wait_for_threads()
    for (ours, _), front in zip(pairs, core._fronts, strict=True):
        front._socket.close()
        ours.close()


def ask(worker: Connection, name: str) -> None:
    sampling = SamplingParams(max_tokens=len(ANSWER))
    message = PromptEncoder().take_out(EngineRequest(name, (1, 2, 3), sampling))
    worker.send_bytes(pickle.dumps(message))


def read_answer(worker: Connection) -> tuple[list[int], TokenUpdate]:
    """Return the tokens of the request in flight, and its last update."""
    tokens: list[int] = []
    while worker.poll(10.0):
        if (message := worker.recv_bytes())[0] != UPDATES:
            continue
        for update in decode_updates(message[1:]):
            tokens += update.token_ids
            if update.finish is not None:
                return tokens, update
    raise AssertionError(f"no last update behind {len(tokens)} tokens")


def test_a_slow_front_end_loses_only_its_own_requests(
    workers: list[Connection], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow, other = workers
    ask(slow, "unread")
    ask(other, "read")
    assert read_answer(other)[0] == ANSWER
    while not caplog.records:  # the core may log only after the other request has finished
        ask(other, "read, too")
        assert read_answer(other)[0] == ANSWER
    logged = [record.getMessage() for record in caplog.records]
    assert logged == ["front 1 is more than 0 MiB of tokens behind: ending 1 of its requests"]
    tokens, last = read_answer(slow)
    assert (last.finish, last.error) == (FinishReason.ERROR, core_process.BEHIND)
    assert tokens == ANSWER[: len(tokens)], "no gap"
    assert len(tokens) < len(ANSWER)
    monkeypatch.setattr(core_process, "MAX_UNSENT_BYTES", MAX_BYTES)  # a slow reader is fine
    ask(slow, "later")
    assert read_answer(slow)[0] == ANSWER


def test_failure_of_a_background_thread_ends_the_core(
    peer: tuple[FrontEnd, Connection], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without it front ends would get stale reports, or no requests would arrive any more."""
    engine = scripted_engine(ScriptedExecutor())
    reports = [engine.core.report()]

    def report() -> CoreReport:
        if reports:
            return reports.pop()
        raise ValueError("a counter is broken")

    monkeypatch.setattr(engine.core, "report", report)
    monkeypatch.setattr(assembly, "build_engine", lambda *_: engine)
    monkeypatch.setattr(core_process.gc, "freeze", lambda: None)
    core = Core(peer[0], [], mmap(-1, STATE_BYTES))
    start = Start(EngineConfig(Path("scripted")), LogSettings.current())
    with ThreadPoolExecutor(1) as threads:
        running = threads.submit(core.run, start)
        try:
            with pytest.raises(EngineDead, match="a counter is broken"):
                running.result(10)
        finally:
            core._stopping.set()


def test_a_report_is_encoded_once_for_all_front_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the loads of many experts it is large."""
    encoded = []

    def encode(report: CoreReport) -> bytes:
        encoded.append(report)
        return pickle.dumps(report)

    monkeypatch.setattr(core_process, "encode_message", encode)
    pairs = [Pipe() for _ in range(3)]
    fronts = [FrontEnd(ours, f"front {n}") for n, (ours, _) in enumerate(pairs)]
    report = CoreReport(EngineStats(num_running=1), None, None, None)
    for _ in range(2):
        send_report(report, fronts)
    assert encoded == [report]
    for front, (ours, theirs) in zip(fronts, pairs, strict=True):
        assert pickle.loads(theirs.recv_bytes()[1:]) == report
        assert not theirs.poll()
        front._socket.close()
        ours.close()
        theirs.close()


def test_only_the_total_has_the_load_of_experts() -> None:
    """Each rank counts the choices of all ranks."""
    load = ExpertLoad({0: (3, 1)}, 1.5, 4)
    total = total_stats([EngineStats(experts=load), EngineStats(num_running=2, experts=load)])
    assert total.experts is not None
    assert total.experts.tokens == load.tokens
    assert total.by_dp_rank == (EngineStats(), EngineStats(num_running=2))


def test_core_has_the_time_to_end_its_ranks_and_nodes_in_order() -> None:
    own_s = rank_processes._STOP_TIMEOUT_S + node_launcher._KILL_TIMEOUT_S
    assert own_s < core_client._EXIT_TIMEOUT_S


def test_no_report_follows_a_newer_one(
    peer: tuple[FrontEnd, Connection], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or metrics would lack a request that a client has seen to end."""
    front, there = peer
    process = Core(front, [], mmap(-1, STATE_BYTES))
    core = scripted_engine(ScriptedExecutor()).core
    is_made, is_overtaken = threading.Event(), threading.Event()
    reports = [CoreReport(EngineStats(num_running=n), None, None, None) for n in (2, 1)]

    def report() -> CoreReport:
        made = reports.pop()
        if not is_made.is_set():
            is_made.set()
            is_overtaken.wait(0.2)
        return made

    monkeypatch.setattr(core, "report", report)
    with ThreadPoolExecutor(1) as threads:
        older = threads.submit(process._send_report, core, [front])
        assert is_made.wait(10)
        process._send_report(core, [front])
        is_overtaken.set()
        older.result(10)
    sent = [pickle.loads(there.recv_bytes()[1:]).stats.num_running for _ in range(2)]
    assert sent == [1, 2]
