"""The link between a connector's scheduler side and the workers of its ranks: Unix sockets, and the
messages on them.

vLLM passes data between the two with its steps only; messages that can't wait for a step use a Unix
socket of our own. Each worker listens on a path that is derived from the instance's names, which
both sides know. So nothing depends on vLLM's handshake metadata, which MultiConnector mixes up.
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
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path

import msgspec

from mooncake_hal.deployment import Hardware
from mooncake_hal.kv.geometry import KVGeometry
from mooncake_kv.errors import KVConfigError

logger = logging.getLogger(__name__)

CONNECT_S = 60.0
"""How long the scheduler side waits for the workers, in seconds. vLLM starts them first."""
RETRY_S = 0.05
MAX_PATH_BYTES = 107
"""What Linux has room for in a socket's address, without the zero at the end."""


class RankInfo(msgspec.Struct, frozen=True, tag=True):
    """Worker to scheduler, the first message: describes vLLM's KV memory on the rank.

    Args:
        geometry: geometry of the whole model's KV; the same on all ranks.
        block_size: tokens per block of the layout.
        blocks_per_page: blocks of the layout per block that vLLM's scheduler counts.
        hardware: backend and generation of the rank's device.
    """

    geometry: KVGeometry
    block_size: int
    blocks_per_page: int
    hardware: Hardware


class FromWorker(msgspec.Struct, frozen=True, tag=True):
    """Worker to scheduler: a message of ``mooncake_kv.ranks``."""

    payload: bytes


class WorkerDied(msgspec.Struct, frozen=True, tag=True):
    """Worker to scheduler: a thread of the worker died, for this reason."""

    reason: str


class ToWorker(msgspec.Struct, frozen=True, tag=True):
    """Scheduler to worker: a message of ``mooncake_kv.ranks``."""

    payload: bytes


class ReportLoad(msgspec.Struct, frozen=True, tag=True):
    """Scheduler to worker: report to vLLM, with the next step, that a load has ended, drained.

    Args:
        request_id: vLLM's id of the request.
        load: the connector's name of the load; empty if it was never started.
        is_failed: whether KV is missing.
    """

    request_id: str
    load: str
    is_failed: bool


class ReportSend(msgspec.Struct, frozen=True, tag=True):
    """Scheduler to worker: report to vLLM, with the next step, that a request's blocks are
    released."""

    request_id: str


class WakeUp(msgspec.Struct, frozen=True, tag=True):
    """Scheduler to worker: end the wait of an idle step, because a request has arrived or can
    continue."""


RankMessage = RankInfo | FromWorker | WorkerDied
SchedulerMessage = ToWorker | ReportLoad | ReportSend | WakeUp

_encode = msgspec.msgpack.Encoder().encode
_decode_from_rank = msgspec.msgpack.Decoder(RankMessage).decode
_decode_to_rank = msgspec.msgpack.Decoder(SchedulerMessage).decode


def socket_paths(names: Sequence[str], num_ranks: int) -> list[Path]:
    """The Unix sockets of an instance's workers, by rank.

    Args:
        names: names of the instance that identify it uniquely together.
        num_ranks: number of ranks of the instance.

    Raises:
        KVConfigError: the folder belongs to another user, others can enter it, or its path is too
            long.
    """
    folder = Path(tempfile.gettempdir()) / f"mooncake-vllm-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    found = folder.stat()
    if found.st_uid != os.getuid() or stat.S_IMODE(found.st_mode) & 0o077:
        raise KVConfigError(
            f"{folder} must belong to this user and be closed to all others (mode 0700); remove "
            "it, or point TMPDIR elsewhere"
        )
    name = hashlib.blake2b("\0".join(names).encode(), digest_size=8).hexdigest()
    paths = [folder / f"{name}-{rank}" for rank in range(num_ranks)]
    if len(os.fsencode(paths[-1])) > MAX_PATH_BYTES:
        raise KVConfigError(
            f"{paths[-1]} is too long for the path of a socket, which has at most {MAX_PATH_BYTES} "
            "bytes: point TMPDIR to a folder with a shorter path"
        )
    return paths


class Channel:
    """One connected socket. Messages are sent on any thread, and received on one.

    Args:
        connected: the socket; the channel takes ownership of it.
        name: name for the log.
        on_message: receives each message; an exception in it ends the channel.
        on_death: receives the exception that ended the channel, on which it can still send.

    Raises:
        OSError: the process has no descriptor left; the socket is closed.
    """

    def __init__(
        self,
        connected: socket.socket,
        name: str,
        on_message: Callable[[bytes], None],
        on_death: Callable[[BaseException], None],
    ) -> None:
        self._socket = connected
        try:
            self._connection = Connection(os.dup(connected.fileno()))
        except OSError:
            connected.close()
            raise
        self._name = name
        self._lock = threading.Lock()
        self._on_message, self._on_death = on_message, on_death

    def send(self, message: bytes) -> None:
        """Send a message; it is dropped if the other end has closed."""
        try:
            with self._lock:
                self._connection.send_bytes(message)
        except OSError as exc:
            logger.info("%s: the other end has closed: %s", self._name, exc)

    def run(self) -> None:
        """Receive messages until either end hangs up. Top of a thread."""
        try:
            while (message := self._receive()) is not None:
                self._on_message(message)
        except Exception as exc:  # top of a thread
            logger.exception("%s ended", self._name)
            self._on_death(exc)
            with suppress(OSError):  # senders must not block on a buffer that is never drained
                self._socket.shutdown(socket.SHUT_RD)

    def hang_up(self) -> None:
        """Shut down both directions, which ends ``run``. Idempotent."""
        with suppress(OSError):  # the other end may have hung up first
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the socket, after ``run`` has ended. Idempotent."""
        self.hang_up()
        self._socket.close()

    def _receive(self) -> bytes | None:
        """The next message; None if the other end has closed."""
        try:
            return self._connection.recv_bytes()
        except (EOFError, OSError):
            logger.debug("%s: the other end has closed", self._name)
            return None


class WorkerLink:
    """A worker's end of the link: listens, and queues its messages until the scheduler side has
    connected.

    Args:
        path: path of the Unix socket to listen on.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._channel: Channel | None = None
        self._unsent: list[bytes] = []
        self._lock = threading.Lock()
        self._is_closed = False
        path.unlink(missing_ok=True)  # left by a killed process with the same names
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(path))
        self._thread: threading.Thread | None = None

    def listen(
        self,
        on_message: Callable[[SchedulerMessage], None],
        on_death: Callable[[BaseException], None],
    ) -> None:
        """Accept the scheduler side, and receive its messages on a thread of the link.

        Args:
            on_message: receives each message.
            on_death: receives the exception that ended the thread; the link can still send.
        """
        self._listener.listen(1)
        self._thread = threading.Thread(
            target=self._serve, args=(on_message, on_death), name="kv-orders", daemon=True
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
        with self._lock:
            self._is_closed = True
        with suppress(OSError):  # not listening yet, or any more
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        if self._channel is not None:
            self._channel.hang_up()
        if self._thread is not None:
            self._thread.join()
        self._path.unlink(missing_ok=True)
        if self._channel is not None:
            self._channel.close()

    def _serve(
        self,
        on_message: Callable[[SchedulerMessage], None],
        on_death: Callable[[BaseException], None],
    ) -> None:
        """Top of the thread, which accepts and receives: a second thread might fail to start."""
        channel = self._accept(lambda data: on_message(_decode_to_rank(data)), on_death)
        if channel is not None:
            channel.run()

    def _accept(
        self, on_message: Callable[[bytes], None], on_death: Callable[[BaseException], None]
    ) -> Channel | None:
        """Accept the scheduler side's connection; None if that fails. The listener is then closed,
        so that the scheduler side finds no worker and fails to start."""
        try:
            connected, _ = self._listener.accept()
            channel = Channel(connected, "kv-orders", on_message, on_death)
        except OSError:
            if not self._is_closed:
                logger.exception("the KV connector's scheduler side could not be accepted")
                self._listener.close()
            return None
        with self._lock:
            if self._is_closed:
                channel.close()
                return None
            self._channel = channel
            for message in self._unsent:
                channel.send(message)
            self._unsent.clear()
        return channel


class SchedulerLink:
    """The scheduler side's end of the link: a channel to each worker, with a receiving thread.

    Args:
        paths: Unix sockets of the workers, by rank.
        on_message: receives a rank and its message; any thread.
        on_death: receives a rank, and the exception that ended its receiving thread; any thread.

    Raises:
        KVConfigError: a worker does not listen.
    """

    def __init__(
        self,
        paths: Sequence[Path],
        on_message: Callable[[int, RankMessage], None],
        on_death: Callable[[int, BaseException], None],
    ) -> None:
        self._channels: list[Channel] = []
        self._threads: list[threading.Thread] = []
        deadline = time.monotonic() + CONNECT_S
        try:
            for rank, path in enumerate(paths):
                channel = Channel(
                    _connect(path, deadline),
                    name := f"kv-rank-{rank}",
                    _decoding(rank, on_message),
                    partial(on_death, rank),
                )
                self._channels.append(channel)
                thread = threading.Thread(target=channel.run, name=name, daemon=True)
                thread.start()
                self._threads.append(thread)
        except BaseException:
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
            channel.hang_up()
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join()
        for channel in self._channels:
            channel.close()


def _decoding(rank: int, on_message: Callable[[int, RankMessage], None]) -> Callable[[bytes], None]:
    return lambda data: on_message(rank, _decode_from_rank(data))


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
    """The scheduler side's handle on the workers of an instance.

    Args:
        paths: Unix sockets of the workers, by rank.
        on_death: receives the reason why a worker's thread, or the one that receives from it, has
            died; any thread.

    Raises:
        KVConfigError: the workers did not connect, or differ in their KV.
    """

    def __init__(self, paths: Sequence[Path], on_death: Callable[[str], None]) -> None:
        self._num_ranks, self._on_death = len(paths), on_death
        self._lock = threading.RLock()
        self._on_payload: Callable[[int, bytes], None] | None = None
        self._early: list[tuple[int, bytes]] = []
        self._infos: dict[int, RankInfo] = {}
        self._all_known = threading.Event()
        self._link = SchedulerLink(paths, self._on_message, self._on_channel_death)
        try:
            self.info = self._await_rank_infos()
        except BaseException:
            self._link.close()
            raise

    def __len__(self) -> int:
        return self._num_ranks

    def listen(self, on_payload: Callable[[int, bytes], None]) -> None:
        """Pass the workers' messages, including those received so far, to ``on_payload``, each with
        its rank."""
        with self._lock:
            self._on_payload = on_payload
            for rank, payload in self._early:
                on_payload(rank, payload)
            self._early.clear()

    def send(self, rank: int, payload: bytes) -> None:
        """Send a message to a worker. Any thread."""
        self._link.send(rank, ToWorker(payload))

    def report(self, message: ReportLoad | ReportSend) -> None:
        """Have every rank report to vLLM. Any thread."""
        self._link.broadcast(message)

    def wake_up(self) -> None:
        """End the wait of idle steps on all ranks, because there is something to compute."""
        self._link.broadcast(WakeUp())

    def close(self) -> None:
        """Hang up. Idempotent."""
        self._link.close()

    def _await_rank_infos(self) -> RankInfo:
        if not self._all_known.wait(CONNECT_S):
            raise KVConfigError(
                f"only {len(self._infos)} of {self._num_ranks} ranks have described their KV "
                f"within {CONNECT_S:g} s"
            )
        infos = [self._infos[rank] for rank in range(self._num_ranks)]
        if len(set(infos)) > 1:
            raise KVConfigError(f"the ranks of this instance differ in their KV: {infos}")
        return infos[0]

    def _on_message(self, rank: int, message: RankMessage) -> None:
        if isinstance(message, FromWorker):
            with self._lock:
                if self._on_payload is None:
                    self._early.append((rank, message.payload))
                else:
                    self._on_payload(rank, message.payload)
        elif isinstance(message, RankInfo):
            self._infos[rank] = message
            if len(self._infos) == self._num_ranks:
                self._all_known.set()
        else:
            self._on_death(f"rank {rank}: {message.reason}")

    def _on_channel_death(self, rank: int, cause: BaseException) -> None:
        """A receiving thread has ended, so the rank's reports would be lost."""
        self._on_death(f"the thread that receives from rank {rank}: {cause!r}")
