"""Receives the KV events of instances and node stores, and delivers them to the event loop.

One thread has a ZMQ subscription per publisher. vLLM, SGLang, mooncake-engine and mooncake-kv use
the same protocol. The feed requests a snapshot when it subscribes to a publisher; when a batch is
missing, `FleetHoldings` requests a replay of the batches that the publisher still has.
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
    SNAPSHOT_REQUEST,
    EventBatch,
    decode_batch,
    decode_sequence,
)
from mooncake_proxy.pool.instance_reports import KVEventEndpoints

logger = logging.getLogger(__name__)
POLL_MS = 50
REPLAY_TIMEOUT_S = 5.0
# Batches received from one publisher before other publishers and commands get their turn.
BATCHES_PER_TURN = 500
RECEIVE_HWM = 100_000
# Deliveries that the loop has not applied yet, beyond which nothing is received: the events wait in
# sockets, and what these can't hold is lost and replayed. Batches received meanwhile may be added.
MAX_UNAPPLIED = 64


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A publisher's answer to a snapshot request.

    Without batches: the publisher does not support snapshots, or did not answer.
    """

    # Sequence number of the live batch that follows the snapshot.
    next_sequence: int = 0
    batches: tuple[EventBatch, ...] = ()


@dataclass(frozen=True, slots=True)
class KVEventDelivery:
    """Events received from one publisher, and requests to it that have ended after them.

    Args:
        name: the publisher.
        batches: batches with their sequence numbers.
        is_replayed: the batches answer a replay request; False: they are live.
        num_replays_ended: replay requests that ended, answered or not.
        snapshots: answers to snapshot requests that ended, empty ones for those not answered.
    """

    name: str
    batches: list[tuple[int, EventBatch]]
    is_replayed: bool = False
    num_replays_ended: int = 0
    snapshots: tuple[Snapshot, ...] = ()


class _Request(Enum):
    REPLAY = auto()
    SNAPSHOT = auto()


@dataclass(slots=True)
class _Subscription:
    name: str
    live: zmq.Socket[bytes]
    replay_endpoint: str | None
    # For requests. Opened by the first one, and by the next one after some were given up.
    replay: zmq.Socket[bytes] | None = None
    # Requests in flight. A publisher answers them in order.
    in_flight: deque[_Request] = field(default_factory=deque)
    # Batches received so far of the snapshot that is being answered.
    snapshot: list[tuple[int, EventBatch]] = field(default_factory=list)
    # Monotonic time at which the requests in flight time out.
    requests_deadline: float = 0.0
    num_malformed: int = 0


class KVEventFeed:
    """The KV event thread.

    Args:
        deliver: called with each delivery on the event loop that created the feed. It returns an
            iterator that applies the delivery in portions. Deliveries are applied one after
            another.
    """

    def __init__(self, deliver: Callable[[KVEventDelivery], Iterator[None]]) -> None:
        self._loop = asyncio.get_running_loop()
        self._deliver = deliver
        # On the loop: deliveries that are not completely applied yet, oldest first.
        self._deliveries: deque[Iterator[None]] = deque()
        # Each is written by one thread only.
        self._num_sent = 0
        self._num_applied = 0
        self._commands: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._subscriptions: dict[str, _Subscription] = {}
        self._has_new_sockets = False
        self._stop = threading.Event()
        self._failure: Exception | None = None
        self._context = zmq.Context()
        # Two for each publisher; 1023 by default, too few for the ranks of a large fleet.
        self._context.set(zmq.MAX_SOCKETS, self._context.get(zmq.SOCKET_LIMIT))
        self._thread = threading.Thread(target=self._run, name="kv-events", daemon=True)
        self._thread.start()

    def subscribe(self, name: str, endpoints: KVEventEndpoints) -> None:
        """Subscribe to a publisher, and request a snapshot of what it holds."""
        self._commands.put(lambda: self._subscribe(name, endpoints))

    def unsubscribe(self, name: str) -> None:
        """Unsubscribe from a publisher."""
        self._commands.put(lambda: self._unsubscribe(name))

    def replay(self, name: str, start: int) -> None:
        """Request a replay of all batches from sequence number `start` on."""
        number = start.to_bytes(8, "big")
        self._commands.put(lambda: self._ask(name, _Request.REPLAY, number))

    def snapshot(self, name: str) -> None:
        """Request a snapshot of everything that a publisher holds."""
        self._commands.put(lambda: self._ask(name, _Request.SNAPSHOT, SNAPSHOT_REQUEST))

    def poll(self) -> None:
        """Re-raise the exception that ended the thread, so that a stale index is noticed."""
        if self._failure is not None:
            raise self._failure

    def close(self) -> None:
        """Stop the thread. Idempotent."""
        self._stop.set()
        self._thread.join(timeout=5.0)

    # ------------------------------------------------ on the thread

    def _run(self) -> None:
        poller = zmq.Poller()
        try:
            while not self._stop.is_set():
                self._run_commands(poller)
                if self._num_sent - self._num_applied >= MAX_UNAPPLIED:
                    self._stop.wait(POLL_MS / 1000)
                    continue
                ready = dict(poller.poll(POLL_MS))
                for subscription in tuple(self._subscriptions.values()):
                    if subscription.live in ready:
                        self._receive(subscription)
                    if subscription.replay is not None and subscription.replay in ready:
                        self._receive_replay(subscription)
                    elif (
                        subscription.in_flight and subscription.requests_deadline < time.monotonic()
                    ):
                        self._give_up(subscription)
        except Exception as exc:  # thread top: stored, and raised by `poll`
            logger.exception("the KV event thread has failed")
            self._failure = exc
        finally:
            self._context.destroy(linger=0)

    def _run_commands(self, poller: zmq.Poller) -> None:
        """Execute queued commands, and register the current sockets with the poller."""
        if self._commands.empty() and not self._has_new_sockets:
            return
        while True:
            try:
                command = self._commands.get_nowait()
            except queue.Empty:
                break
            command()
        self._has_new_sockets = False
        for socket, _ in tuple(poller.sockets):
            poller.unregister(socket)
        for subscription in self._subscriptions.values():
            poller.register(subscription.live, zmq.POLLIN)
            if subscription.replay is not None:
                poller.register(subscription.replay, zmq.POLLIN)

    def _subscribe(self, name: str, endpoints: KVEventEndpoints) -> None:
        self._unsubscribe(name)
        live = self._open(zmq.SUB, name, endpoints.endpoint)
        if live is None:
            return
        live.setsockopt(zmq.SUBSCRIBE, b"")
        self._subscriptions[name] = _Subscription(name, live, endpoints.replay_endpoint)
        if endpoints.replay_endpoint is not None:
            self._ask(name, _Request.SNAPSHOT, SNAPSHOT_REQUEST)

    def _open(self, kind: int, name: str, endpoint: str) -> zmq.Socket[bytes] | None:
        """A socket that is connected to a publisher; None, and a warning, if there can't be one: no
        such address, or too many open files."""
        socket: zmq.Socket[bytes] | None = None
        try:
            socket = self._context.socket(kind)
            socket.set_hwm(RECEIVE_HWM)
            socket.connect(endpoint)
        except (zmq.ZMQError, ValueError, TypeError) as exc:
            if socket is not None:
                socket.close(linger=0)
            logger.warning("can't connect to the KV events of %s at %s: %s", name, endpoint, exc)
            return None
        return socket

    def _unsubscribe(self, name: str) -> None:
        subscription = self._subscriptions.pop(name, None)
        if subscription is not None:
            subscription.live.close(linger=0)
            if subscription.replay is not None:
                subscription.replay.close(linger=0)

    def _ask(self, name: str, request: _Request, text: bytes) -> None:
        subscription = self._subscriptions.get(name)
        if subscription is None:
            return
        subscription.in_flight.append(request)
        if subscription.replay is None and subscription.replay_endpoint is not None:
            subscription.replay = self._open(zmq.DEALER, name, subscription.replay_endpoint)
            self._has_new_sockets = True
        if subscription.replay is None:
            self._give_up(subscription)
            return
        subscription.requests_deadline = time.monotonic() + REPLAY_TIMEOUT_S
        subscription.replay.send_multipart((b"", text), zmq.DONTWAIT)

    def _receive(self, subscription: _Subscription) -> None:
        """Receive live batches. Frames: topic, sequence number, payload."""
        batches = []
        for _ in range(BATCHES_PER_TURN):
            try:
                frames = subscription.live.recv_multipart(zmq.DONTWAIT)
            except zmq.Again:
                break
            batches += self._decoded(subscription, frames[-2:])
        if batches:
            self._send(KVEventDelivery(subscription.name, batches))

    def _receive_replay(self, subscription: _Subscription) -> None:
        """Receive answers. Frames: empty, topic (missing before vLLM 0.26), number, payload."""
        assert subscription.replay is not None
        batches: list[tuple[int, EventBatch]] = []
        for _ in range(BATCHES_PER_TURN):
            try:
                frames = subscription.replay.recv_multipart(zmq.DONTWAIT)
            except zmq.Again:
                break
            if not subscription.in_flight:
                continue  # no request is in flight
            subscription.requests_deadline = time.monotonic() + REPLAY_TIMEOUT_S
            if len(frames) >= 2 and frames[-2][:8] == REPLAY_END:
                self._end_answer(subscription, batches)
                return
            answer = (
                subscription.snapshot if subscription.in_flight[0] is _Request.SNAPSHOT else batches
            )
            answer += self._decoded(subscription, frames[-2:])
        if batches:
            self._send(KVEventDelivery(subscription.name, batches, is_replayed=True))

    def _end_answer(
        self, subscription: _Subscription, batches: list[tuple[int, EventBatch]]
    ) -> None:
        """Deliver the complete answer to the oldest request."""
        if subscription.in_flight.popleft() is _Request.REPLAY:
            self._send(KVEventDelivery(subscription.name, batches, True, num_replays_ended=1))
            return
        held, subscription.snapshot = subscription.snapshot, []
        next_sequence = held[0][0] if held else 0
        snapshot = Snapshot(next_sequence, tuple(batch for _, batch in held))
        self._send(KVEventDelivery(subscription.name, [], snapshots=(snapshot,)))

    def _give_up(self, subscription: _Subscription) -> None:
        """Give up all requests in flight.

        The next one gets a new socket, so that a late answer can't be mistaken for its answer.
        """
        if subscription.replay is not None:
            subscription.replay.close(linger=0)
            subscription.replay = None
            self._has_new_sockets = True
        num_snapshots = subscription.in_flight.count(_Request.SNAPSHOT)
        num_replays = len(subscription.in_flight) - num_snapshots
        subscription.in_flight.clear()
        subscription.snapshot.clear()
        snapshots = (Snapshot(),) * num_snapshots
        self._send(KVEventDelivery(subscription.name, [], True, num_replays, snapshots))

    def _decoded(
        self, subscription: _Subscription, frames: list[bytes]
    ) -> list[tuple[int, EventBatch]]:
        """Decode a batch. A malformed one counts as lost: its sequence number is missing."""
        try:
            sequence, payload = frames
            return [(decode_sequence(sequence), decode_batch(payload))]
        except (MalformedEvent, ValueError) as exc:
            subscription.num_malformed += 1
            if subscription.num_malformed == 1:
                logger.warning("KV events of %s can't be read: %s", subscription.name, exc)
            return []

    def _send(self, delivery: KVEventDelivery) -> None:
        if not self._stop.is_set() and not self._loop.is_closed():
            self._num_sent += 1
            self._loop.call_soon_threadsafe(self._enqueue, delivery)

    # ------------------------------------------------ on the loop

    def _enqueue(self, delivery: KVEventDelivery) -> None:
        self._deliveries.append(self._deliver(delivery))
        if len(self._deliveries) == 1:
            self._apply_portion()

    def _apply_portion(self) -> None:
        """Apply a portion of the oldest delivery; the loop runs other work before the next one."""
        if self._stop.is_set():
            return
        is_applied = True
        try:
            is_applied = next(self._deliveries[0], True) is True
        finally:  # a delivery that fails must not block the others
            if is_applied:
                self._deliveries.popleft()
                self._num_applied += 1
            if self._deliveries:
                self._loop.call_soon(self._apply_portion)
