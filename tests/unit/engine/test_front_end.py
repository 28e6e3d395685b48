"""What a front end does not read at once waits for it, in order and up to a bound."""

from __future__ import annotations

import pickle
import socket
import threading
from collections.abc import Iterator
from mmap import mmap
from multiprocessing.connection import Connection, Pipe
from pathlib import Path

import pytest
from support.scripted_core import ScriptedExecutor, scripted_engine

from mooncake_engine import core_process
from mooncake_engine.config import EngineConfig
from mooncake_engine.core_messages import UPDATES, AddRequest, Start, decode_updates
from mooncake_engine.core_process import CoreProcess, FrontEnd
from mooncake_engine.messages import EngineRequest, FinishReason, TokenUpdate
from mooncake_engine.sampling_params import SamplingParams
from mooncake_engine.step_watchdog import STATE_BYTES
from mooncake_hal.command_line import LogSettings

ANSWER = [65 + number % 26 for number in range(60)]
HEADER_BYTES = 5
MAX_BYTES = 1 << 20
LARGE = bytes(range(256)) * (
    MAX_BYTES >> 7
)  # twice the bound, and more than a socket takes at once


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
    """Until those that send what waits have sent it, or have found their peer gone, as those that
    read do."""
    for thread in threading.enumerate():
        if thread.name == "unsent" or thread.name.startswith(("reports", "requests-")):
            thread.join()


def test_messages_beyond_the_bound_are_sent_to_whoever_reads(
    peer: tuple[FrontEnd, Connection],
) -> None:
    """One step's log probabilities of prompts may be a hundred MiB, and steps go on behind it."""
    front, there = peer
    sent = [LARGE, b"a", b"b" * 1000, b"", b"c"]
    for message in sent:
        front.send(UPDATES, message)
    kind = bytes([UPDATES])
    assert [there.recv_bytes() for _ in sent] == [kind + message for message in sent]
    front.send(UPDATES, b"later")
    assert there.recv_bytes() == kind + b"later"


def test_a_second_large_message_may_wait_alone(peer: tuple[FrontEnd, Connection]) -> None:
    front, there = peer
    for _ in range(2):
        assert front.can_queue(len(LARGE))
        front.send(UPDATES, LARGE)
    assert not front.can_queue(1)
    for _ in range(2):
        assert there.recv_bytes()[1:] == LARGE
    wait_for_threads()
    assert front.can_queue(len(LARGE))


def test_what_nobody_reads_has_a_bound(peer: tuple[FrontEnd, Connection]) -> None:
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


def test_a_front_end_that_is_gone_is_owed_nothing(peer: tuple[FrontEnd, Connection]) -> None:
    front, there = peer
    front.send(UPDATES, LARGE)
    there.close()
    wait_for_threads()
    for _ in range(3):
        front.send(UPDATES, LARGE)


class Core(CoreProcess):
    """In this process, without a parent that it takes orders from."""

    def _handle_parent(self) -> None:
        pass


@pytest.fixture
def workers(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Connection]]:
    """Two API workers' ends of their connections to a core, which keeps little that is not read;
    the first one's socket takes little, too."""
    monkeypatch.setattr(core_process, "MAX_UNSENT_BYTES", 1000)
    monkeypatch.setattr(core_process.gc, "freeze", lambda: None)
    engine = scripted_engine(ScriptedExecutor(lambda _request: ANSWER))
    monkeypatch.setattr(core_process, "build_engine", lambda *_: engine)
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
    worker.send_bytes(pickle.dumps(AddRequest(EngineRequest(name, (1, 2, 3), sampling))))


def read_answer(worker: Connection) -> tuple[list[int], TokenUpdate]:
    """The tokens of the one request, and its last update."""
    tokens: list[int] = []
    while worker.poll(10.0):
        if (message := worker.recv_bytes())[0] != UPDATES:
            continue
        for update in decode_updates(message[1:]):
            tokens += update.token_ids
            if update.finish is not None:
                return tokens, update
    raise AssertionError(f"no last update behind {len(tokens)} tokens")


def test_requests_of_a_front_end_that_is_behind_end_and_no_others(
    workers: list[Connection], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow, other = workers
    ask(slow, "unread")
    ask(other, "read")
    assert read_answer(other)[0] == ANSWER
    while not caplog.records:  # it may be the last to say anything
        ask(other, "read, too")
        assert read_answer(other)[0] == ANSWER
    said = [record.getMessage() for record in caplog.records]
    assert said == ["front 1 is more than 0 MiB of tokens behind: ending 1 of its requests"]
    tokens, last = read_answer(slow)
    assert (last.finish, last.error) == (FinishReason.ERROR, core_process.BEHIND)
    assert tokens == ANSWER[: len(tokens)], "no gap"
    assert len(tokens) < len(ANSWER)
    monkeypatch.setattr(core_process, "MAX_UNSENT_BYTES", MAX_BYTES)  # it may be slow to read
    ask(slow, "later")
    assert read_answer(slow)[0] == ANSWER
