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
from functools import partial
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
        load: the connector's name for it; empty: it has none, and no step names it.
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
    """One connected socket. Messages are sent from any thread, and taken in one.

    Args:
        connected: the socket, which is ours from now on.
        name: for the log.
        on_message: takes each message; what it lets out ends the channel.
        on_death: takes what ended it; what it sends leaves by this channel yet.

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
        """Send a message; one to an end that has gone is dropped."""
        try:
            with self._lock:
                self._connection.send_bytes(message)
        except OSError as exc:
            logger.info("%s: the other end has gone: %s", self._name, exc)

    def run(self) -> None:
        """Take messages until either end hangs up. The top of a thread."""
        try:
            while (message := self._receive()) is not None:
                self._on_message(message)
        except Exception as exc:  # top of a thread
            logger.exception("%s ended", self._name)
            self._on_death(exc)
            with suppress(OSError):  # who sends to nobody must not wait until there is room
                self._socket.shutdown(socket.SHUT_RD)

    def hang_up(self) -> None:
        """End both directions, and with them ``run``. Idempotent."""
        with suppress(OSError):  # the other end was first
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Let the socket go; nobody is in ``run`` any more. Idempotent."""
        self.hang_up()
        self._socket.close()

    def _receive(self) -> bytes | None:
        """The next message; None: the other end has gone."""
        try:
            return self._connection.recv_bytes()
        except (EOFError, OSError):
            logger.debug("%s: the other end has gone", self._name)
            return None


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
        self._is_closed = False
        path.unlink(missing_ok=True)  # of one that was killed and had our names
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(path))
        self._thread: threading.Thread | None = None

    def listen(
        self,
        on_message: Callable[[SchedulerMessage], None],
        on_death: Callable[[BaseException], None],
    ) -> None:
        """Let the scheduler side in; its messages come in a thread of their own.

        Args:
            on_message: takes them.
            on_death: takes what ended the thread; the link can still send.
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
        with suppress(OSError):  # nobody listens yet, or any more
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
        """Top of the thread, which needs no other one: that might not start."""
        channel = self._accept(lambda data: on_message(_decode_to_rank(data)), on_death)
        if channel is not None:
            channel.run()

    def _accept(
        self, on_message: Callable[[bytes], None], on_death: Callable[[BaseException], None]
    ) -> Channel | None:
        """The scheduler side's channel; None if it does not come: who can't be told finds nobody
        here, and does not start."""
        try:
            connected, _ = self._listener.accept()
            channel = Channel(connected, "kv-orders", on_message, on_death)
        except OSError:
            if not self._is_closed:
                logger.exception("the scheduler side of the KV connector could not be let in")
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
    """The scheduler side's end: a channel to each worker, and a thread that hears it.

    Args:
        paths: where they listen.
        on_message: takes a rank and its message; any thread.
        on_death: takes a rank, and what ended the thread that heard it; any thread.

    Raises:
        KVConfigError: a worker is not there.
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
                    _taker(rank, on_message),
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
        on_death: takes the reason why a thread has died, of a worker or the one that hears it; any
            thread.

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
        self._link = SchedulerLink(paths, self._on_message, self._on_channel_death)
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

    def _on_channel_death(self, rank: int, cause: BaseException) -> None:
        """Nobody hears that rank any more: what it reports is lost."""
        self._on_death(f"the thread that hears rank {rank}: {cause!r}")
