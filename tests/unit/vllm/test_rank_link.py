"""The link to the ranks: a dead receiving thread is reported, and a closed connection is no
failure."""

from __future__ import annotations

import errno
import os
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from mooncake_hal.deployment import Hardware
from mooncake_hal.kv.geometry import AttentionKind, KVGeometry
from mooncake_kv.errors import KVConfigError
from mooncake_vllm import rank_link
from mooncake_vllm.rank_link import FromWorker, RankInfo, Ranks, WorkerDied, WorkerLink

TIMEOUT_S = 20.0
INFO = RankInfo(
    KVGeometry(AttentionKind.GQA, 1, 1, (4, 4), "float32", 4), 16, 1, Hardware("cpu", "")
)
MUCH = bytes(1 << 16)
"""A message of which a few dozen fill the kernel's buffer of an unread socket."""
WHATEVER = pytest.mark.parametrize(
    "exc",
    [RuntimeError("can't start new thread"), OSError(errno.EMFILE, "too many open files")],
    ids=["defect", "system"],
)


@dataclass
class Pair:
    """Both ends of a link, and the reported deaths.

    Args:
        worker: the listening end.
        path: the path of its socket.
        obey: processes the worker's orders.
    """

    worker: WorkerLink
    path: Path
    obey: Callable[[object], None] = lambda order: None
    reasons: list[str] = field(default_factory=list)
    has_death: threading.Event = field(default_factory=threading.Event)

    def connect(self) -> Ranks:
        self.worker.send(INFO)
        self.worker.listen(
            lambda order: self.obey(order),
            lambda cause: self.worker.send(WorkerDied(repr(cause))),
        )
        return Ranks([self.path], self._on_death)

    def wait(self) -> str:
        """Wait for the only reported reason."""
        assert self.has_death.wait(TIMEOUT_S), "no death was reported"
        [reason] = self.reasons
        return reason

    def _on_death(self, reason: str) -> None:
        self.reasons.append(reason)
        self.has_death.set()


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as opened:
        yield opened


@pytest.fixture
def pair(stack: ExitStack, tmp_path: Path) -> Pair:
    path = tmp_path / "rank-0"
    worker = WorkerLink(path)
    stack.callback(worker.close)
    return Pair(worker, path)


def once(exc: Exception) -> Callable[..., None]:
    """A function that raises this at its first call."""
    left = [exc]

    def call(*args: object) -> None:
        if left:
            raise left.pop()

    return call


@WHATEVER
def test_worker_that_cannot_receive_orders_reports_reason(
    stack: ExitStack, pair: Pair, exc: Exception
) -> None:
    pair.obey = once(exc)
    ranks = pair.connect()
    stack.callback(ranks.close)
    ranks.send(0, b"an order")
    assert pair.wait() == f"rank 0: {exc!r}"
    for _ in range(100):  # and the sender does not block until it reads
        ranks.send(0, MUCH)


@WHATEVER
def test_scheduler_side_gets_reason_of_dead_receiving_thread(
    stack: ExitStack, pair: Pair, exc: Exception
) -> None:
    ranks = pair.connect()
    stack.callback(ranks.close)
    ranks.listen(once(exc))
    pair.worker.send(FromWorker(b"a report"))
    assert pair.wait() == f"the thread that receives from rank 0: {exc!r}"
    for _ in range(100):
        pair.worker.send(FromWorker(MUCH))


@pytest.mark.parametrize("who", ["worker", "scheduler"])
def test_closed_connection_is_not_a_failure(pair: Pair, who: str) -> None:
    ranks = pair.connect()
    first, second = (pair.worker, ranks) if who == "worker" else (ranks, pair.worker)
    first.close()
    ranks.send(0, MUCH)
    pair.worker.send(FromWorker(MUCH))
    second.close()
    assert pair.reasons == []


def test_worker_that_cannot_accept_fails_to_start(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """No failure could be reported, so the instance does not start."""

    def dup(descriptor: int) -> int:
        if threading.current_thread().name == "kv-orders":
            raise OSError(errno.EMFILE, "too many open files")
        return real(descriptor)

    real = os.dup
    monkeypatch.setattr(os, "dup", dup)
    monkeypatch.setattr(rank_link, "CONNECT_S", 0.5)
    with pytest.raises(KVConfigError, match=r"no worker listens|0 of 1 ranks have described"):
        pair.connect()
    assert "could not be accepted" in caplog.text
    assert "too many open files" in caplog.text


def folder_of(monkeypatch: pytest.MonkeyPatch, base: Path, num_bytes: int) -> None:
    """Make the temporary folder such that the sockets' paths have so many bytes."""
    monkeypatch.setattr("tempfile.tempdir", str(base))
    [path] = rank_link.socket_paths(["an instance"], 1)
    longer = base / ("x" * (num_bytes - len(str(path)) - 1))
    longer.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(longer))


@pytest.fixture
def short_path() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        yield Path(folder)


def test_longest_path_of_a_socket_works(monkeypatch: pytest.MonkeyPatch, short_path: Path) -> None:
    folder_of(monkeypatch, short_path, rank_link.MAX_PATH_BYTES)
    WorkerLink(*rank_link.socket_paths(["an instance"], 1)).close()


def test_path_too_long_for_a_socket_is_refused(
    monkeypatch: pytest.MonkeyPatch, short_path: Path
) -> None:
    folder_of(monkeypatch, short_path, rank_link.MAX_PATH_BYTES + 1)
    with pytest.raises(KVConfigError, match=r"too long for the path of a socket.*TMPDIR"):
        rank_link.socket_paths(["an instance"], 1)


def test_folder_that_others_can_enter_is_refused(
    monkeypatch: pytest.MonkeyPatch, short_path: Path
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(short_path))
    [path] = rank_link.socket_paths(["an instance"], 1)
    path.parent.chmod(0o755)
    with pytest.raises(KVConfigError, match="mode 0700"):
        rank_link.socket_paths(["an instance"], 1)
