"""The thread that waits for completions and deadlines."""

from __future__ import annotations

import fcntl
import os
import resource
import threading
import time
from collections.abc import Iterator

import pytest

from mooncake_hal.errors import TransferError
from mooncake_hal.transports.rdma.progress_thread import ProgressThread, is_readable

SECONDS = 30.0


class Endpoint:
    """The owner of the thread, which receives its callbacks."""

    def __init__(self) -> None:
        self.ticked = threading.Event()
        self.failed = threading.Event()
        self.errors: list[Exception] = []
        self.tick_error: Exception | None = None
        self.progress = ProgressThread(self.tick, self.fail)

    def tick(self, now: float) -> float | None:
        self.ticked.set()
        if self.tick_error is not None:
            raise self.tick_error
        return None

    def fail(self, error: Exception) -> None:
        self.errors.append(error)
        self.failed.set()


@pytest.fixture
def endpoint() -> Iterator[Endpoint]:
    endpoint = Endpoint()
    yield endpoint
    endpoint.progress.close()


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    ends = os.pipe()
    yield ends
    for end in ends:
        os.close(end)


def test_callback_of_a_readable_descriptor_is_called(
    endpoint: Endpoint, pipe: tuple[int, int]
) -> None:
    called = threading.Event()

    def take() -> None:
        os.read(pipe[0], 1)
        called.set()

    endpoint.progress.add(pipe[0], take)
    os.write(pipe[1], b"x")
    assert called.wait(SECONDS)
    endpoint.progress.remove(pipe[0])
    endpoint.progress.remove(pipe[0])
    os.write(pipe[1], b"y")
    assert is_readable(pipe[0], SECONDS)
    endpoint.progress.close()
    assert os.read(pipe[0], 1) == b"y", "the callback was called after its removal"


def test_tick_is_called_at_the_deadline(endpoint: Endpoint) -> None:
    endpoint.progress.wake_by(time.monotonic() + 3600)
    endpoint.progress.wake_by(time.monotonic())
    assert endpoint.ticked.wait(SECONDS)


def test_error_of_a_callback_is_reported(endpoint: Endpoint, pipe: tuple[int, int]) -> None:
    def take() -> None:
        os.read(pipe[0], 1)
        raise RuntimeError("of a callback")

    endpoint.progress.add(pipe[0], take)
    os.write(pipe[1], b"x")
    assert endpoint.failed.wait(SECONDS)
    assert [str(error) for error in endpoint.errors] == ["of a callback"]


def test_error_of_a_tick_is_reported_and_the_thread_continues(
    endpoint: Endpoint, pipe: tuple[int, int]
) -> None:
    endpoint.tick_error = RuntimeError("of a tick")
    endpoint.progress.wake_by(time.monotonic())
    assert endpoint.failed.wait(SECONDS)
    called = threading.Event()
    endpoint.progress.add(pipe[0], called.set)
    os.write(pipe[1], b"x")
    assert called.wait(SECONDS)


def test_close_is_idempotent(endpoint: Endpoint) -> None:
    endpoint.progress.close()
    endpoint.progress.close()


def test_descriptors_above_1024_are_supported(pipe: tuple[int, int]) -> None:
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit <= 1100:
        pytest.skip("this shell allows 1024 descriptors only")
    high = fcntl.fcntl(pipe[0], fcntl.F_DUPFD_CLOEXEC, 1100)
    assert not is_readable(high)
    os.write(pipe[1], b"x")
    assert is_readable(high, SECONDS)
    os.close(high)


def test_thread_that_cannot_be_started_leaks_no_descriptors(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def start(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    before = len(os.listdir("/proc/self/fd"))
    monkeypatch.setattr(threading.Thread, "start", start)
    with pytest.raises(TransferError, match="progress thread can't be started: can't start new"):
        Endpoint()
    assert len(os.listdir("/proc/self/fd")) == before
