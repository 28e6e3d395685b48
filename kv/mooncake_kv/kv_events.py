"""KV events: an instance tells routers which blocks it holds, in vLLM's format.

A PUB socket sends three frames: topic, sequence number (8 bytes, big-endian), msgpack of
``[ts, events, data_parallel_rank]``, each event a map with a ``type`` (vLLM since 0.24; read by
Dynamo, llm-d and mooncake-conductor). A ROUTER socket sends the last batches again to whoever asks
with a sequence number. Each data-parallel rank has both for itself, at ports that its number is
added to.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

import msgspec
import zmq

from mooncake_kv.errors import KVConfigError
from mooncake_kv.kv_events_config import KVEventsConfig

logger = logging.getLogger(__name__)

_POLL_S = 0.05
_REPLAY_END = (-1).to_bytes(8, "big", signed=True)
_KEY_MASK = (1 << 64) - 1
MEDIUM_GPU = "GPU"
"""The device's memory, whatever device it is: the field's word."""


class _Event(msgspec.Struct, omit_defaults=True, gc=False, tag=True, frozen=True):
    """As vLLM writes it: a map that begins with its type."""


class BlockStored(_Event, frozen=True):
    """Full blocks that can be reused from now on, one behind the other.

    Args:
        block_hashes: the low 64 bits of each block's name.
        parent_block_hash: of the block before the first; None at the beginning of a prompt.
        token_ids: of all these blocks.
        block_size: tokens per block.
        lora_id, lora_name: adapter.
        medium: where they lie.
        extra_keys: what each block depends on besides; the first of a prompt on its cache salt.
    """

    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[list[str] | None] | None = None


class BlockRemoved(_Event, frozen=True):
    """Blocks that can no longer be reused."""

    block_hashes: list[int]
    medium: str | None


class AllBlocksCleared(_Event, frozen=True):
    """No block can be reused any more."""


KVEvent = BlockStored | BlockRemoved | AllBlocksCleared


class KVEventEndpoints(msgspec.Struct, frozen=True, omit_defaults=True):
    """Where an instance publishes, as its health says it; a wildcard means the instance's host.

    Args:
        endpoint: of the PUB socket.
        replay_endpoint: of the ROUTER socket, if there is one.
        other_dp_ranks: of data-parallel ranks from the second one on.
    """

    endpoint: str
    replay_endpoint: str | None = None
    other_dp_ranks: tuple[KVEventEndpoints, ...] = ()


def event_key(digest: bytes) -> int:
    """A block's name as events carry it: the low 64 bits."""
    return int.from_bytes(digest, "big") & _KEY_MASK


def encode_batch(events: Sequence[KVEvent], published_at: float, dp_rank: int = 0) -> bytes:
    """The third frame."""
    return msgspec.msgpack.encode([published_at, events, dp_rank])


class KVEventLog:
    """Collects a step's events and hands them to the publisher in one batch; what an engine's pool
    of blocks reports to.

    Args:
        publish: takes a batch.
        block_size: tokens per block.
        on_close: ends what publishes.
        endpoints: where subscribers find what is published.
    """

    def __init__(
        self,
        publish: Callable[[list[KVEvent]], None],
        block_size: int,
        on_close: Callable[[], None] | None = None,
        endpoints: KVEventEndpoints | None = None,
    ) -> None:
        self._endpoints = endpoints
        self._publish = publish
        self._on_close = on_close
        self._block_size = block_size
        self._events: list[KVEvent] = []
        self._removed: list[int] = []

    @property
    def endpoints(self) -> KVEventEndpoints | None:
        """Where subscribers find what is published."""
        return self._endpoints

    def stored(
        self,
        digests: Sequence[bytes],
        parent: bytes | None,
        token_ids: Sequence[int],
        cache_salt: str = "",
    ) -> None:
        """These blocks, one behind the other, can be found from now on."""
        extra_keys: list[list[str] | None] | None = None
        if cache_salt and parent is None:
            extra_keys = [[cache_salt], *[None] * (len(digests) - 1)]
        self._end_removals()
        stored = BlockStored(
            [event_key(digest) for digest in digests],
            None if parent is None else event_key(parent),
            list(token_ids),
            self._block_size,
            None,
            MEDIUM_GPU,
            None,
            extra_keys,
        )
        self._events.append(stored)

    def removed(self, digest: bytes) -> None:
        """This block is found no more."""
        self._removed.append(event_key(digest))

    def cleared(self) -> None:
        """No block is found any more."""
        self._removed.clear()
        self._events = [AllBlocksCleared()]

    def flush(self) -> None:
        """The step is over: publish what happened in it, if anything did."""
        self._end_removals()
        if self._events:
            events, self._events = self._events, []
            self._publish(events)

    def close(self) -> None:
        """Publish what is left, and end what publishes. Idempotent."""
        self.flush()
        if self._on_close is not None:
            self._on_close()
            self._on_close = None

    def _end_removals(self) -> None:
        if self._removed:
            self._events.append(BlockRemoved(self._removed, MEDIUM_GPU))
            self._removed = []


class KVEventPublisher:
    """A thread with a PUB and a ROUTER socket.

    Events are never waited for: a full queue drops a batch, whose sequence number is then missing.

    Args:
        config: where to publish.
        clock: seconds since the epoch, for the batches' time stamps.
        dp_rank: the data-parallel rank whose blocks they are.

    Raises:
        KVConfigError: an address can't be used.
    """

    def __init__(
        self, config: KVEventsConfig, clock: Callable[[], float] = time.time, dp_rank: int = 0
    ) -> None:
        config = config.of_dp_rank(dp_rank)
        self._dp_rank = dp_rank
        self.num_dropped = 0
        self._topic = config.topic.encode()
        self._clock = clock
        self._queue: queue.Queue[tuple[int, bytes]] = queue.Queue(config.max_queue_size)
        self._buffer: deque[tuple[int, bytes]] = deque(maxlen=config.buffer_steps)
        self._sequence = 0
        self._failure: Exception | None = None
        self._stop = threading.Event()
        self._context = zmq.Context()
        try:
            self._pub = self._open(zmq.PUB, config.hwm, config.endpoint, _is_bound(config.endpoint))
            self._replay: zmq.Socket[bytes] | None = None
            if config.replay_endpoint is not None:
                hwm = 2 * (config.buffer_steps + 1)
                self._replay = self._open(zmq.ROUTER, hwm, config.replay_endpoint, True)
        except zmq.ZMQError as exc:
            self._context.destroy(linger=0)
            raise KVConfigError(
                f"KV events can't use {config.endpoint} with replay at {config.replay_endpoint}: "
                f"{exc}; name free addresses in --kv-events-config"
            ) from exc
        self._thread = threading.Thread(target=self._run, name="kv-events", daemon=True)
        self._thread.start()

    @property
    def endpoint(self) -> str:
        """Where the PUB socket listens, with the port that a wildcard got."""
        return self._pub.getsockopt_string(zmq.LAST_ENDPOINT)

    @property
    def replay_endpoint(self) -> str | None:
        """Where a replay is asked for."""
        if self._replay is None:
            return None
        return self._replay.getsockopt_string(zmq.LAST_ENDPOINT)

    def publish(self, events: list[KVEvent]) -> None:
        """Send a batch soon. From one thread only.

        Raises:
            KVConfigError: the publisher's thread has died; says of what.
        """
        if self._failure is not None:
            raise KVConfigError(f"KV events can't be published: {self._failure}")
        sequence, self._sequence = self._sequence, self._sequence + 1
        try:
            self._queue.put_nowait((sequence, encode_batch(events, self._clock(), self._dp_rank)))
        except queue.Full:
            self.num_dropped += 1
            if self.num_dropped == 1:
                logger.warning("KV events are dropped: %d batches wait", self._queue.maxsize)

    def close(self) -> None:
        """Send what is queued, then stop. Idempotent."""
        self._stop.set()
        self._thread.join(timeout=5.0)

    def _open(self, kind: int, hwm: int, endpoint: str, is_bound: bool) -> zmq.Socket[bytes]:
        socket: zmq.Socket[bytes] = self._context.socket(kind)
        socket.set_hwm(hwm)
        if is_bound:
            socket.bind(endpoint)
        else:
            socket.connect(endpoint)
        return socket

    def _run(self) -> None:
        try:
            while not (self._stop.is_set() and self._queue.empty()):
                if self._replay is not None and self._replay.poll(0):
                    self._answer_replay(self._replay)
                try:
                    sequence, payload = self._queue.get(timeout=_POLL_S)
                except queue.Empty:
                    continue
                self._buffer.append((sequence, payload))
                self._pub.send_multipart((self._topic, sequence.to_bytes(8, "big"), payload))
        except zmq.ZMQError as exc:
            logger.exception("the thread that publishes KV events has died")
            self._failure = exc
        finally:
            self._context.destroy(linger=200)

    def _answer_replay(self, replay: zmq.Socket[bytes]) -> None:
        """Frames of a question: client, empty, first sequence number that is wanted."""
        frames = replay.recv_multipart()
        if len(frames) != 3 or len(frames[2]) != 8:
            logger.warning("a question for KV events that is none: %d frames", len(frames))
            return
        client, start = frames[0], int.from_bytes(frames[2], "big")
        for sequence, payload in self._buffer:
            if sequence >= start:
                number = sequence.to_bytes(8, "big")
                replay.send_multipart((client, b"", self._topic, number, payload))
        replay.send_multipart((client, b"", b"", _REPLAY_END, b""))


def _is_bound(endpoint: str) -> bool:
    return "*" in endpoint or "::" in endpoint or endpoint.startswith(("ipc://", "inproc://"))
