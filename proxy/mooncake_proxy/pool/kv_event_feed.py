"""Follows the KV events of instances and stores: one thread with a ZMQ socket for each, batches to
the loop.

vLLM, SGLang, mooncake-engine and mooncake-kv publish alike. What a publisher holds is asked for
when it is first followed; what it still has, whenever a batch is missing.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from enum import Enum, auto

import zmq

from mooncake_conductor.errors import MalformedEvent
from mooncake_conductor.index.kv_event_messages import (
    REPLAY_END,
    SNAPSHOT_QUESTION,
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
class Snapshot:
    """What a publisher said that it holds; no batches: it can't say that, or did not answer."""

    # Of the live batch that follows.
    next_sequence: int = 0
    batches: tuple[EventBatch, ...] = ()


@dataclass(frozen=True, slots=True)
class KVEventDelivery:
    """What came of one publisher: batches by sequence number, live or replayed, and which of the
    questions that it was asked have ended behind them, with an answer or without."""

    name: str
    batches: list[tuple[int, EventBatch]]
    is_replayed: bool = False
    num_replays_ended: int = 0
    snapshots: tuple[Snapshot, ...] = ()


class _Question(Enum):
    REPLAY = auto()
    SNAPSHOT = auto()


@dataclass(slots=True)
class _Followed:
    name: str
    live: zmq.Socket[bytes]
    replay: zmq.Socket[bytes] | None
    replay_endpoint: str
    # Those that await an answer, in the order in which they were asked, and so are answered.
    asked: deque[_Question] = field(default_factory=deque)
    # What has come of the snapshot that is being answered.
    snapshot: list[tuple[int, EventBatch]] = field(default_factory=list)
    # When those that run are given up.
    replay_until: float = 0.0
    num_malformed: int = 0


class KVEventFeed:
    """The thread. `deliver` is called on the loop that made this, and takes a delivery in portions;
    the next one when that has been taken."""

    def __init__(self, deliver: Callable[[KVEventDelivery], Iterator[None]]) -> None:
        self._loop = asyncio.get_running_loop()
        self._deliver = deliver
        # On the loop: those that have come and are not taken yet, the oldest maybe in part.
        self._arrived: deque[Iterator[None]] = deque()
        self._orders: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._followed: dict[str, _Followed] = {}
        self._has_other_sockets = False
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
        number = start.to_bytes(8, "big")
        self._orders.put(lambda: self._ask(name, _Question.REPLAY, number))

    def snapshot(self, name: str) -> None:
        """Ask for all that is held."""
        self._orders.put(lambda: self._ask(name, _Question.SNAPSHOT, SNAPSHOT_QUESTION))

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
                    elif followed.asked and followed.replay_until < time.monotonic():
                        self._give_up(followed)
        except (zmq.ZMQError, OSError) as exc:
            logger.exception("the thread that follows KV events has died")
            self._failure = exc
        finally:
            self._context.destroy(linger=0)

    def _obey(self, poller: zmq.Poller) -> None:
        """Carry out orders; the poller then has the sockets that there are."""
        if self._orders.empty() and not self._has_other_sockets:
            return
        while True:
            try:
                order = self._orders.get_nowait()
            except queue.Empty:
                break
            order()
        self._has_other_sockets = False
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
            where = endpoints.replay_endpoint or ""
            replay = self._open_replay(where) if where else None
        except (zmq.ZMQError, ValueError, TypeError) as exc:
            logger.warning("KV events of %s are not followed: %s: %s", name, endpoints, exc)
            return
        self._followed[name] = _Followed(name, live, replay, where)
        if replay is not None:
            self._ask(name, _Question.SNAPSHOT, SNAPSHOT_QUESTION)

    def _open_replay(self, endpoint: str) -> zmq.Socket[bytes]:
        replay: zmq.Socket[bytes] = self._context.socket(zmq.DEALER)
        replay.set_hwm(RECEIVE_HWM)
        replay.connect(endpoint)
        return replay

    def _end(self, name: str) -> None:
        followed = self._followed.pop(name, None)
        if followed is not None:
            followed.live.close(linger=0)
            if followed.replay is not None:
                followed.replay.close(linger=0)

    def _ask(self, name: str, question: _Question, text: bytes) -> None:
        followed = self._followed.get(name)
        if followed is None:
            return
        followed.asked.append(question)
        if followed.replay is None:
            self._give_up(followed)
            return
        followed.replay_until = time.monotonic() + REPLAY_TIMEOUT_S
        followed.replay.send_multipart((b"", text), zmq.DONTWAIT)

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
            if not followed.asked:
                continue  # nobody has asked for it
            followed.replay_until = time.monotonic() + REPLAY_TIMEOUT_S
            if len(frames) >= 2 and frames[-2][:8] == REPLAY_END:
                self._end_answer(followed, batches)
                return
            answer = followed.snapshot if followed.asked[0] is _Question.SNAPSHOT else batches
            answer += self._decoded(followed, frames[-2:])
        if batches:
            self._send(KVEventDelivery(followed.name, batches, is_replayed=True))

    def _end_answer(self, followed: _Followed, batches: list[tuple[int, EventBatch]]) -> None:
        """The answer to the oldest question is complete."""
        if followed.asked.popleft() is _Question.REPLAY:
            self._send(KVEventDelivery(followed.name, batches, True, num_replays_ended=1))
            return
        held, followed.snapshot = followed.snapshot, []
        next_sequence = held[0][0] if held else 0
        snapshot = Snapshot(next_sequence, tuple(batch for _, batch in held))
        self._send(KVEventDelivery(followed.name, [], snapshots=(snapshot,)))

    def _give_up(self, followed: _Followed) -> None:
        """What was asked is not answered; nor later, when it could be taken for another answer."""
        if followed.replay is not None:
            followed.replay.close(linger=0)
            followed.replay = self._open_replay(followed.replay_endpoint)
            self._has_other_sockets = True
        num_snapshots = followed.asked.count(_Question.SNAPSHOT)
        num_replays = len(followed.asked) - num_snapshots
        followed.asked.clear()
        followed.snapshot.clear()
        snapshots = (Snapshot(),) * num_snapshots
        self._send(KVEventDelivery(followed.name, [], True, num_replays, snapshots))

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
            self._loop.call_soon_threadsafe(self._arrive, delivery)

    # ------------------------------------------------ on the loop

    def _arrive(self, delivery: KVEventDelivery) -> None:
        self._arrived.append(self._deliver(delivery))
        if len(self._arrived) == 1:
            self._take_portion()

    def _take_portion(self) -> None:
        """Of the oldest delivery; what else the loop has to do comes before the next one."""
        if self._stop.is_set():
            return
        is_taken = True
        try:
            is_taken = next(self._arrived[0], True) is True
        finally:  # one that fails does not keep the others
            if is_taken:
                self._arrived.popleft()
            if self._arrived:
                self._loop.call_soon(self._take_portion)
