"""Messages between a connector's scheduler side and the workers of its ranks.

vLLM carries data between the two with its steps; what can't wait for a step goes by a Unix socket
of our own. Each worker listens under a name that follows from the instance's names, which both
sides know. So nothing depends on vLLM's handshake metadata, which MultiConnector mixes up.
"""

from __future__ import annotations

import hashlib
import logging
import os
import socket
import stat
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path

import msgspec

from mooncake_hal.deployment import Hardware
from mooncake_hal.kv.geometry import KVGeometry
from mooncake_kv.errors import KVConfigError

logger = logging.getLogger(__name__)

CONNECT_S = 60.0
"""How long the scheduler side waits for the workers, who were there before it."""
RETRY_S = 0.05


class RankInfo(msgspec.Struct, frozen=True, tag=True):
    """Worker to scheduler, first: what vLLM's memory has turned out to be.

    Args:
        geometry: of the whole model's KV; the same on all ranks.
        block_size: tokens of a block of the layout.
        blocks_per_page: how many of them make one of the blocks that vLLM's scheduler counts.
        hardware: what the rank runs on.
    """

    geometry: KVGeometry
    block_size: int
    blocks_per_page: int
    hardware: Hardware


class FromWorker(msgspec.Struct, frozen=True, tag=True):
    """Worker to scheduler: a message of ``mooncake_kv.ranks``."""

    payload: bytes


class WorkerDied(msgspec.Struct, frozen=True, tag=True):
    """Worker to scheduler: a thread of the worker died of this."""

    reason: str


class ToWorker(msgspec.Struct, frozen=True, tag=True):
    """Scheduler to worker: a message of ``mooncake_kv.ranks``."""

    payload: bytes


class ReportLoad(msgspec.Struct, frozen=True, tag=True):
    """Scheduler to worker: tell vLLM, with the next step, that a load is over and drained.

    Args:
        request_id: vLLM's name for who waited for it.
        load: the connector's name for it.
        is_failed: whether KV is missing.
    """

    request_id: str
    load: str
    is_failed: bool


class ReportSend(msgspec.Struct, frozen=True, tag=True):
    """Scheduler to worker: tell vLLM, with the next step, that these blocks are free again."""

    request_id: str


class WakeUp(msgspec.Struct, frozen=True, tag=True):
    """Scheduler to worker: a request has come, and waits for the step that waits for a report."""


RankMessage = RankInfo | FromWorker | WorkerDied
SchedulerMessage = ToWorker | ReportLoad | ReportSend | WakeUp

_encode = msgspec.msgpack.Encoder().encode
_decode_from_rank = msgspec.msgpack.Decoder(RankMessage).decode
_decode_to_rank = msgspec.msgpack.Decoder(SchedulerMessage).decode


def socket_paths(names: Sequence[str], num_ranks: int) -> list[Path]:
    """Where the workers of an instance listen, by rank.

    Args:
        names: of the instance; together no other has them.
        num_ranks: of the instance.

    Raises:
        KVConfigError: somebody else owns the folder.
    """
    folder = Path(tempfile.gettempdir()) / f"mooncake-vllm-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    found = folder.stat()
    if found.st_uid != os.getuid() or stat.S_IMODE(found.st_mode) & 0o077:
        raise KVConfigError(
            f"{folder} must be a folder of this user that no other can enter; remove it, or point "
            "TMPDIR elsewhere"
        )
    name = hashlib.blake2b("\0".join(names).encode(), digest_size=8).hexdigest()
    return [folder / f"{name}-{rank}" for rank in range(num_ranks)]


class Channel:
    """One connected socket. Messages are sent from any thread, and taken in a thread of its own.

    Args:
        connected: the socket, which is ours from now on.
        name: of the thread.
        on_message: takes each message; what it lets out ends the channel, loudly.
    """

    def __init__(
        self, connected: socket.socket, name: str, on_message: Callable[[bytes], None]
    ) -> None:
        self._socket = connected
        self._connection = Connection(os.dup(connected.fileno()))
        self._lock = threading.Lock()
        self._on_message = on_message
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def send(self, message: bytes) -> None:
        """Send a message; one to an end that has gone is dropped."""
        try:
            with self._lock:
                self._connection.send_bytes(message)
        except OSError as exc:
            logger.info("%s: the other end has gone: %s", self._thread.name, exc)

    def close(self) -> None:
        """End both directions and the thread. Idempotent."""
        with suppress(OSError):  # the other end was first
            self._socket.shutdown(socket.SHUT_RDWR)
        if self._thread is not threading.current_thread():
            self._thread.join()
        self._socket.close()

    def _run(self) -> None:
        try:
            while True:
                self._on_message(self._connection.recv_bytes())
        except (EOFError, OSError):
            logger.debug("%s: the other end has gone", self._thread.name)
        except Exception:  # top of a thread
            logger.exception("%s ended", self._thread.name)


class WorkerLink:
    """A worker's end: listens, and keeps what it has to say until the scheduler side has come.

    Args:
        path: where to listen.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._channel: Channel | None = None
        self._unsent: list[bytes] = []
        self._lock = threading.Lock()
        path.unlink(missing_ok=True)  # of one that was killed and had our names
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(path))
        self._thread: threading.Thread | None = None

    def listen(self, on_message: Callable[[SchedulerMessage], None]) -> None:
        """Let the scheduler side in; its messages come in a thread of their own."""
        self._listener.listen(1)
        self._thread = threading.Thread(
            target=self._accept, args=(on_message,), name="kv-link", daemon=True
        )
        self._thread.start()

    def send(self, message: RankMessage) -> None:
        """Send to the scheduler side. Any thread."""
        encoded = _encode(message)
        with self._lock:
            if self._channel is None:
                self._unsent.append(encoded)
                return
        self._channel.send(encoded)

    def close(self) -> None:
        """Stop listening and hang up. Idempotent."""
        with suppress(OSError):  # nobody listens yet, or any more
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        if self._thread is not None:
            self._thread.join()
        self._path.unlink(missing_ok=True)
        if self._channel is not None:
            self._channel.close()

    def _accept(self, on_message: Callable[[SchedulerMessage], None]) -> None:
        try:
            connected, _ = self._listener.accept()
        except OSError:
            return  # closed before anybody came
        with self._lock:
            self._channel = Channel(
                connected, "kv-orders", lambda data: on_message(_decode_to_rank(data))
            )
            for message in self._unsent:
                self._channel.send(message)
            self._unsent.clear()


class SchedulerLink:
    """The scheduler side's end: a channel to each worker.

    Args:
        paths: where they listen.
        on_message: takes a rank and its message; any thread.

    Raises:
        KVConfigError: a worker is not there.
    """

    def __init__(
        self, paths: Sequence[Path], on_message: Callable[[int, RankMessage], None]
    ) -> None:
        self._channels: list[Channel] = []
        deadline = time.monotonic() + CONNECT_S
        try:
            for rank, path in enumerate(paths):
                connected = _connect(path, deadline)
                self._channels.append(
                    Channel(connected, f"kv-rank-{rank}", _taker(rank, on_message))
                )
        except KVConfigError:
            self.close()
            raise

    def send(self, rank: int, message: SchedulerMessage) -> None:
        """Send to one worker. Any thread."""
        self._channels[rank].send(_encode(message))

    def broadcast(self, message: SchedulerMessage) -> None:
        """Send to every worker. Any thread."""
        encoded = _encode(message)
        for channel in self._channels:
            channel.send(encoded)

    def close(self) -> None:
        """Hang up. Idempotent."""
        for channel in self._channels:
            channel.close()


def _taker(rank: int, take: Callable[[int, RankMessage], None]) -> Callable[[bytes], None]:
    return lambda data: take(rank, _decode_from_rank(data))


def _connect(path: Path, deadline: float) -> socket.socket:
    while True:
        connected = socket.socket(socket.AF_UNIX)
        try:
            connected.connect(str(path))
        except OSError as exc:
            connected.close()
            if time.monotonic() > deadline:
                raise KVConfigError(
                    f"no worker listens on {path} ({exc}); the ranks of an instance must be on one "
                    "host, and share TMPDIR"
                ) from exc
            time.sleep(RETRY_S)
        else:
            return connected


class Ranks:
    """The workers of an instance, as its scheduler side knows them.

    Args:
        paths: where they listen, by rank.
        on_death: takes the reason why a worker's thread has died; any thread.

    Raises:
        KVConfigError: they did not come up, or differ in their KV.
    """

    def __init__(self, paths: Sequence[Path], on_death: Callable[[str], None]) -> None:
        self._num_ranks, self._on_death = len(paths), on_death
        self._lock = threading.RLock()
        self._take: Callable[[int, bytes], None] | None = None
        self._early: list[tuple[int, bytes]] = []
        self._infos: dict[int, RankInfo] = {}
        self._all_known = threading.Event()
        self._link = SchedulerLink(paths, self._on_message)
        try:
            self.info = self._meet()
        except BaseException:
            self._link.close()
            raise

    def __len__(self) -> int:
        return self._num_ranks

    def listen(self, take: Callable[[int, bytes], None]) -> None:
        """Pass on what the workers say, and have said so far: a rank and a message."""
        with self._lock:
            self._take = take
            for rank, payload in self._early:
                take(rank, payload)
            self._early.clear()

    def send(self, rank: int, payload: bytes) -> None:
        """Send a message to a worker. Any thread."""
        self._link.send(rank, ToWorker(payload))

    def report(self, message: ReportLoad | ReportSend) -> None:
        """Have every rank tell vLLM. Any thread."""
        self._link.broadcast(message)

    def wake_up(self) -> None:
        """Have no rank's step wait for a report any longer: there is something to compute."""
        self._link.broadcast(WakeUp())

    def close(self) -> None:
        """Hang up. Idempotent."""
        self._link.close()

    def _meet(self) -> RankInfo:
        if not self._all_known.wait(CONNECT_S):
            raise KVConfigError(
                f"{len(self._infos)} of {self._num_ranks} ranks have described their KV"
            )
        infos = [self._infos[rank] for rank in range(self._num_ranks)]
        if len(set(infos)) > 1:
            raise KVConfigError(f"the ranks of this instance differ in their KV: {infos}")
        return infos[0]

    def _on_message(self, rank: int, message: RankMessage) -> None:
        if isinstance(message, FromWorker):
            with self._lock:
                if self._take is None:
                    self._early.append((rank, message.payload))
                else:
                    self._take(rank, message.payload)
        elif isinstance(message, RankInfo):
            self._infos[rank] = message
            if len(self._infos) == self._num_ranks:
                self._all_known.set()
        else:
            self._on_death(f"rank {rank}: {message.reason}")
