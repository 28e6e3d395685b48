"""Follows the KV events of instances: one thread with a ZMQ socket for each, batches to the loop.

vLLM, SGLang and mooncake-engine publish alike. What a publisher still has is asked for when it is
first followed, and whenever a batch is missing.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

import zmq

from mooncake_conductor.errors import MalformedEvent
from mooncake_conductor.index.kv_event_messages import (
    REPLAY_END,
    EventBatch,
    decode_batch,
    decode_sequence,
)
from mooncake_proxy.pool.instances import KVEventEndpoints

logger = logging.getLogger(__name__)
POLL_MS = 50
REPLAY_TIMEOUT_S = 5.0
# Of one instance, before others and new orders have their turn.
BATCHES_PER_TURN = 500
RECEIVE_HWM = 100_000


@dataclass(frozen=True, slots=True)
class KVEventDelivery:
    """What came of one instance: batches by sequence number, live or replayed, and how many replays
    that were asked for have ended behind them, with all that the publisher has or without an
    answer."""

    name: str
    batches: list[tuple[int, EventBatch]]
    is_replayed: bool = False
    num_replays_ended: int = 0


@dataclass(slots=True)
class _Followed:
    name: str
    live: zmq.Socket[bytes]
    replay: zmq.Socket[bytes] | None
    num_replays: int = 0
    # When those that run are given up.
    replay_until: float = 0.0
    num_malformed: int = 0


class KVEventFeed:
    """The thread. `deliver` is called on the loop that made this."""

    def __init__(self, deliver: Callable[[KVEventDelivery], None]) -> None:
        self._loop = asyncio.get_running_loop()
        self._deliver = deliver
        self._orders: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._followed: dict[str, _Followed] = {}
        self._stop = threading.Event()
        self._failure: Exception | None = None
        self._context = zmq.Context()
        self._thread = threading.Thread(target=self._run, name="kv-events", daemon=True)
        self._thread.start()

    def follow(self, name: str, endpoints: KVEventEndpoints) -> None:
        """Begin with an instance: all that it still has, then what comes."""
        self._orders.put(lambda: self._begin(name, endpoints))

    def leave(self, name: str) -> None:
        """Follow it no longer."""
        self._orders.put(lambda: self._end(name))

    def replay(self, name: str, start: int) -> None:
        """Ask for everything from a sequence number on."""
        self._orders.put(lambda: self._ask(name, start))

    def poll(self) -> None:
        """Raise what ended the thread: the index must not grow old unseen."""
        if self._failure is not None:
            raise self._failure

    def close(self) -> None:
        """Stop. Idempotent."""
        self._stop.set()
        self._thread.join(timeout=5.0)

    # ------------------------------------------------ on the thread

    def _run(self) -> None:
        poller = zmq.Poller()
        try:
            while not self._stop.is_set():
                self._obey(poller)
                ready = dict(poller.poll(POLL_MS))
                for followed in tuple(self._followed.values()):
                    if followed.live in ready:
                        self._receive(followed)
                    if followed.replay is not None and followed.replay in ready:
                        self._receive_replay(followed)
                    elif followed.num_replays and followed.replay_until < time.monotonic():
                        self._end_replays(followed, [], followed.num_replays)
        except (zmq.ZMQError, OSError) as exc:
            logger.exception("the thread that follows KV events has died")
            self._failure = exc
        finally:
            self._context.destroy(linger=0)

    def _obey(self, poller: zmq.Poller) -> None:
        """Carry out orders; the poller then has the sockets that there are."""
        if self._orders.empty():
            return
        while True:
            try:
                order = self._orders.get_nowait()
            except queue.Empty:
                break
            order()
        for socket, _ in tuple(poller.sockets):
            poller.unregister(socket)
        for followed in self._followed.values():
            poller.register(followed.live, zmq.POLLIN)
            if followed.replay is not None:
                poller.register(followed.replay, zmq.POLLIN)

    def _begin(self, name: str, endpoints: KVEventEndpoints) -> None:
        self._end(name)
        try:
            live = self._context.socket(zmq.SUB)
            live.set_hwm(RECEIVE_HWM)
            live.setsockopt(zmq.SUBSCRIBE, b"")
            live.connect(endpoints.endpoint)
            replay = None
            if endpoints.replay_endpoint:
                replay = self._context.socket(zmq.DEALER)
                replay.set_hwm(RECEIVE_HWM)
                replay.connect(endpoints.replay_endpoint)
        except zmq.ZMQError as exc:
            logger.warning("KV events of %s are not followed: %s: %s", name, endpoints, exc)
            return
        self._followed[name] = _Followed(name, live, replay)
        if replay is not None:
            self._ask(name, 0)

    def _end(self, name: str) -> None:
        followed = self._followed.pop(name, None)
        if followed is not None:
            followed.live.close(linger=0)
            if followed.replay is not None:
                followed.replay.close(linger=0)

    def _ask(self, name: str, start: int) -> None:
        followed = self._followed.get(name)
        if followed is None:
            return
        if followed.replay is None:
            self._send(KVEventDelivery(name, [], num_replays_ended=1))
            return
        followed.num_replays += 1
        followed.replay_until = time.monotonic() + REPLAY_TIMEOUT_S
        followed.replay.send_multipart((b"", start.to_bytes(8, "big")), zmq.DONTWAIT)

    def _receive(self, followed: _Followed) -> None:
        """Frames: topic, sequence number, payload."""
        batches = []
        for _ in range(BATCHES_PER_TURN):
            try:
                frames = followed.live.recv_multipart(zmq.DONTWAIT)
            except zmq.Again:
                break
            batches += self._decoded(followed, frames[-2:])
        if batches:
            self._send(KVEventDelivery(followed.name, batches))

    def _receive_replay(self, followed: _Followed) -> None:
        """Frames: empty, topic (not from vLLM before 0.26), sequence number, payload."""
        assert followed.replay is not None
        batches: list[tuple[int, EventBatch]] = []
        for _ in range(BATCHES_PER_TURN):
            try:
                frames = followed.replay.recv_multipart(zmq.DONTWAIT)
            except zmq.Again:
                break
            if len(frames) >= 2 and frames[-2][:8] == REPLAY_END:
                self._end_replays(followed, batches, min(followed.num_replays, 1))
                return
            batches += self._decoded(followed, frames[-2:])
        followed.replay_until = time.monotonic() + REPLAY_TIMEOUT_S
        self._send(KVEventDelivery(followed.name, batches, is_replayed=True))

    def _end_replays(
        self, followed: _Followed, batches: list[tuple[int, EventBatch]], count: int
    ) -> None:
        followed.num_replays -= count
        followed.replay_until = time.monotonic() + REPLAY_TIMEOUT_S
        self._send(KVEventDelivery(followed.name, batches, True, count))

    def _decoded(self, followed: _Followed, frames: list[bytes]) -> list[tuple[int, EventBatch]]:
        """A batch that can't be read is as good as lost: its number is missing."""
        try:
            sequence, payload = frames
            return [(decode_sequence(sequence), decode_batch(payload))]
        except (MalformedEvent, ValueError) as exc:
            followed.num_malformed += 1
            if followed.num_malformed == 1:
                logger.warning("KV events of %s can't be read: %s", followed.name, exc)
            return []

    def _send(self, delivery: KVEventDelivery) -> None:
        if not self._stop.is_set() and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._deliver, delivery)
