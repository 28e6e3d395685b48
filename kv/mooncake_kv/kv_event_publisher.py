"""Publishes KV events over ZeroMQ, and sends replays and snapshots to subscribers that missed some.

A PUB socket sends three frames: topic, sequence number (8 bytes, big-endian), batch. A ROUTER
socket answers two kinds of requests, each of 8 bytes, with frames of the same form and an end mark:

    a sequence number   a replay of the kept batches from that number on
    b"snapshot"         everything that is held: batches that begin with AllBlocksCleared; each has
                        the sequence number of the next live batch (vLLM's pull request 50134)

vLLM's own publisher takes the second for a sequence number that no batch has reached, so its answer
is empty. Each data-parallel rank has both sockets for itself; its number is added to their ports.
"""

from __future__ import annotations

import logging
import queue
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from itertools import islice
from typing import NamedTuple

import zmq

from mooncake_kv.errors import KVConfigError
from mooncake_kv.kv_events import KVEvent, KVEventEndpoints, encode_batch
from mooncake_kv.kv_events_config import KVEventsConfig
from mooncake_kv.published_state import PublishedState

logger = logging.getLogger(__name__)

SNAPSHOT_REQUEST = b"snapshot"

_POLL_S = 0.05
_BATCH_BYTES = 128
"""Memory of a kept batch besides its payload: the tuple, the number, the deque's slot."""
_SNAPSHOT_EVENTS = 64
"""Events per message of a snapshot; if prompts are long, each event has many blocks."""
_MAX_RECEIVED_BYTES = 512
"""Longest message of a peer, besides our topic: a request, a subscription, or ZeroMQ's greeting,
with a name of up to 255 bytes. ZeroMQ keeps some 50 bytes for each byte of a subscription."""
_MAX_RECEIVED = 16
"""Messages of one peer that wait to be read; ZeroMQ reads no more from its connection."""
_PAUSE_PER_ANSWER = 4.0
"""Pause after an answer, in times of what the answer took: requests must not keep the thread from
publishing."""
_REPLAY_END = (-1).to_bytes(8, "big", signed=True)


class _Batch(NamedTuple):
    sequence: int
    published_at: float
    events: list[KVEvent]


class ReplayBuffer:
    """The most recent batches; the oldest are dropped first.

    Args:
        max_batches: maximum number of batches.
        max_bytes: maximum memory of all batches, in bytes; a batch that is larger is not kept.
    """

    def __init__(self, max_batches: int, max_bytes: int) -> None:
        self._batches: deque[tuple[int, bytes]] = deque()
        self._max_batches = max_batches
        self._max_bytes = max_bytes
        self.num_bytes = 0

    def append(self, sequence: int, payload: bytes) -> None:
        """Add a batch; sequence numbers are ascending."""
        self._batches.append((sequence, payload))
        self.num_bytes += _kept_bytes(payload)
        while len(self._batches) > self._max_batches or self.num_bytes > self._max_bytes:
            self.num_bytes -= _kept_bytes(self._batches.popleft()[1])

    def since(self, first: int) -> Iterator[tuple[int, bytes]]:
        """The kept batches from a sequence number on."""
        return (sent for sent in self._batches if sent[0] >= first)


class KVEventPublisher:
    """A thread with a PUB and a ROUTER socket.

    Publishing never blocks: if the queue is full, a batch is dropped, and its sequence number is
    missing for subscribers. From then on the published state is unknown, so no snapshot is sent.

    Args:
        config: the addresses and limits.
        clock: seconds since the Unix epoch, for the batches' timestamps. If the clock is set back,
            the timestamp stays constant until it has caught up, because subscribers attribute older
            timestamps to an earlier start.
        dp_rank: the data-parallel rank that holds the blocks.

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
        self._queue: queue.Queue[_Batch] = queue.Queue(config.max_queue_size)
        self._buffer = ReplayBuffer(config.buffer_steps, config.buffer_bytes)
        self._sequence = 0
        # Used by the thread only: the state that subscribers know, and the next sequence number.
        self._held = PublishedState()
        self._next_sequence = 0
        self._last_published = self._time_stamp = clock()
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
                f"KV events can't be published at {config.endpoint} with replay at "
                f"{config.replay_endpoint}: {exc}; give free addresses in --kv-events-config"
            ) from exc
        replay = self._replay
        self.endpoints = KVEventEndpoints(
            self._pub.getsockopt_string(zmq.LAST_ENDPOINT),
            None if replay is None else replay.getsockopt_string(zmq.LAST_ENDPOINT),
        )
        """Addresses of the sockets, with the ports that were chosen for wildcards."""
        self._thread = threading.Thread(target=self._run, name="kv-events", daemon=True)
        self._thread.start()

    def publish(self, events: list[KVEvent]) -> None:
        """Queue a batch. Called by one thread at a time.

        Raises:
            KVConfigError: the publisher's thread has died; has the cause.
        """
        if self._failure is not None:
            raise KVConfigError(f"KV events can't be published: {self._failure}")
        sequence, self._sequence = self._sequence, self._sequence + 1
        self._time_stamp = max(self._clock(), self._time_stamp)
        try:
            self._queue.put_nowait(_Batch(sequence, self._time_stamp, events))
        except queue.Full:
            self.num_dropped += 1
            if self.num_dropped == 1:
                logger.warning(
                    "KV events are dropped: the queue of %d batches is full", self._queue.maxsize
                )

    def await_sent(self, num_left: int, timeout: float) -> bool:
        """Block until at most ``num_left`` batches are queued, for callers that publish many
        batches at once: queued events take many times the memory of the chunks' own records.
        Returns False on timeout."""
        queued = self._queue
        with queued.not_full:  # notified whenever a batch is taken
            return queued.not_full.wait_for(lambda: len(queued.queue) <= num_left, timeout)

    def close(self) -> None:
        """Send the queued batches, then stop. Idempotent."""
        self._stop.set()
        self._thread.join(timeout=5.0)

    def _open(self, kind: int, hwm: int, endpoint: str, is_bound: bool) -> zmq.Socket[bytes]:
        socket: zmq.Socket[bytes] = self._context.socket(kind)
        socket.sndhwm, socket.rcvhwm = hwm, _MAX_RECEIVED
        socket.maxmsgsize = _MAX_RECEIVED_BYTES + len(self._topic)
        if is_bound:
            socket.bind(endpoint)
        else:
            socket.connect(endpoint)
        return socket

    def _run(self) -> None:
        answers_from = 0.0
        try:
            while not (self._stop.is_set() and self._queue.empty()):
                started = time.monotonic()
                if self._replay is not None and started >= answers_from and self._replay.poll(0):
                    self._answer(self._replay)
                    ended = time.monotonic()
                    answers_from = ended + _PAUSE_PER_ANSWER * (ended - started)
                try:
                    batch = self._queue.get(timeout=_POLL_S)
                except queue.Empty:
                    continue
                payload = encode_batch(batch.events, batch.published_at, self._dp_rank)
                if self._replay is not None:
                    self._buffer.append(batch.sequence, payload)
                    self._held.apply(batch.events)
                self._next_sequence = batch.sequence + 1
                self._last_published = batch.published_at
                number = batch.sequence.to_bytes(8, "big")
                self._pub.send_multipart((self._topic, number, payload))
        except Exception as exc:  # thread top: stored, and raised by `publish`
            logger.exception("the thread that publishes KV events has died")
            self._failure = exc
        finally:
            self._context.destroy(linger=200)

    def _answer(self, replay: zmq.Socket[bytes]) -> None:
        """Answer one request, whose frames are: client, empty, first wanted sequence number."""
        frames = replay.recv_multipart()
        if len(frames) != 3 or len(frames[2]) != 8:
            logger.warning("malformed request for KV events: %d frames", len(frames))
            return
        client, wanted = frames[0], frames[2]
        if wanted == SNAPSHOT_REQUEST:
            found = self._snapshot()
        else:
            found = self._buffer.since(int.from_bytes(wanted, "big"))
        for number, payload in found:
            replay.send_multipart((client, b"", self._topic, number.to_bytes(8, "big"), payload))
        replay.send_multipart((client, b"", b"", _REPLAY_END, b""))

    def _snapshot(self) -> Iterator[tuple[int, bytes]]:
        """The published state, in batches with the next sequence number and the timestamp of the
        last live batch; empty if the state is unknown."""
        if self.num_dropped:
            return
        held = self._held.snapshot()
        while events := list(islice(held, _SNAPSHOT_EVENTS)):
            yield self._next_sequence, encode_batch(events, self._last_published, self._dp_rank)


def _kept_bytes(payload: bytes) -> int:
    return sys.getsizeof(payload) + _BATCH_BYTES


def _is_bound(endpoint: str) -> bool:
    return "*" in endpoint or "::" in endpoint or endpoint.startswith(("ipc://", "inproc://"))
