"""What a front end does not read at once waits for it, in order and up to a bound."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from multiprocessing.connection import Connection, Pipe

import pytest

from mooncake_engine import core_process
from mooncake_engine.core_messages import UPDATES
from mooncake_engine.core_process import FrontEnd
from mooncake_engine.errors import EngineDead

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
    """Until those that send what waits have sent it, or have found their peer gone."""
    for thread in threading.enumerate():
        if thread.name == "unsent":
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
        front.send(UPDATES, LARGE)
    with pytest.raises(EngineDead, match=r"2048 KiB of tokens wait for it, and 0 KiB more"):
        front.send(UPDATES, b"x")
    for _ in range(2):
        assert there.recv_bytes()[1:] == LARGE


def send_much(front: FrontEnd) -> None:
    for _ in range(100):
        front.send(UPDATES, bytes(64 << 10))


def test_what_nobody_reads_has_a_bound(peer: tuple[FrontEnd, Connection]) -> None:
    front, there = peer
    words = "^API worker 1 does not read: 960 KiB of tokens wait for it, and 64 KiB more have come"
    with pytest.raises(EngineDead, match=words):
        send_much(front)
    assert there.recv_bytes() == bytes([UPDATES]) + bytes(64 << 10)


def test_a_front_end_that_is_gone_is_owed_nothing(peer: tuple[FrontEnd, Connection]) -> None:
    front, there = peer
    front.send(UPDATES, LARGE)
    there.close()
    wait_for_threads()
    for _ in range(3):
        front.send(UPDATES, LARGE)
