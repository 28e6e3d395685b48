"""KV events over real sockets: three frames, replay, and gaps; parsed by the conductor."""

from __future__ import annotations

import queue
import threading
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import zmq
from support.event_requests import request_events
from support.portions import apply_all

from mooncake_conductor.index.chunk_index import ChunkIndex
from mooncake_conductor.index.event_stream import EventStream, ReplayRequest
from mooncake_conductor.index.kv_event_messages import (
    SNAPSHOT_REQUEST,
    AllCleared,
    BlocksRemoved,
    BlocksStored,
    decode_batch,
    decode_sequence,
)
from mooncake_kv import kv_event_publisher
from mooncake_kv.errors import KVConfigError
from mooncake_kv.kv_event_publisher import KVEventPublisher, ReplayBuffer
from mooncake_kv.kv_events import KVEventLog, event_key
from mooncake_kv.kv_events_config import KVEventsConfig

LOOPBACK = "tcp://127.0.0.1:*"
DIGESTS = [bytes([number]) * 16 for number in range(1, 6)]
KEYS = [event_key(digest) for digest in DIGESTS]


@contextmanager
def published(clock=None, **fields) -> Iterator[tuple[KVEventPublisher, zmq.Socket]]:
    """A publisher, and a subscriber whose subscription is established."""
    config = KVEventsConfig(True, endpoint=LOOPBACK, replay_endpoint=LOOPBACK, **fields)
    publisher = KVEventPublisher(config, clock=clock or iter(range(1000)).__next__)
    context = zmq.Context()
    subscriber = context.socket(zmq.SUB)
    subscriber.connect(publisher.endpoints.endpoint)
    subscriber.subscribe(b"")
    subscriber.rcvtimeo = 200
    try:
        joined = False
        while not joined:  # a PUB socket drops what it sends before the subscription has arrived
            KVEventLog(publisher.publish, 2).flush()
            publisher.publish([])
            try:
                subscriber.recv_multipart()
                joined = True
            except zmq.Again:
                continue
        subscriber.rcvtimeo = 20_000
        yield publisher, subscriber
    finally:
        publisher.close()
        context.destroy(linger=0)


def receive(subscriber: zmq.Socket):
    while True:
        topic, sequence, payload = subscriber.recv_multipart()
        batch = decode_batch(payload)
        if batch.events:
            return topic, decode_sequence(sequence), batch


def test_step_is_one_batch_that_conductor_parses() -> None:
    with published(topic="kv@pod") as (publisher, subscriber):
        log = KVEventLog(publisher.publish, block_size=2)
        log.stored(DIGESTS[:2], None, [1, 2, 3, 4])
        log.removed(DIGESTS[2])
        log.removed(DIGESTS[3])
        log.stored(DIGESTS[4:], DIGESTS[1], [5, 6])
        log.flush()
        log.flush()
        topic, _, batch = receive(subscriber)
        log.cleared()
        log.close()
        _, _, cleared = receive(subscriber)
    assert topic == b"kv@pod"
    assert batch.events == (
        BlocksStored(tuple(KEYS[:2]), None, 2, 0, (1, 2, 3, 4)),
        BlocksRemoved(tuple(KEYS[2:4]), 0),
        BlocksStored((KEYS[4],), KEYS[1], 2, 0, (5, 6)),
    )
    assert (batch.data_parallel_rank, cleared.events) == (0, (AllCleared(),))


def test_lost_batch_is_replayed() -> None:
    with published() as (publisher, subscriber):
        index = ChunkIndex(1)
        stream = EventStream(index, 0)
        log = KVEventLog(publisher.publish, 2)
        for digest in DIGESTS:
            log.stored([digest], None, [1, 2])
            log.flush()
        for _ in range(4):
            receive(subscriber)
        _, sequence, batch = receive(subscriber)  # the four before are lost
        asked = stream.receive(sequence, batch)
        assert asked == ReplayRequest(0)
        questions = b"not eight bytes", asked.start.to_bytes(8, "big")
        for sequence, batch in request_events(publisher.endpoints.replay_endpoint, *questions):
            stream.receive(sequence, batch)
        stream.replay_ended()
    assert index.match(KEYS, now=0.0).local[0] == 5


def test_replay_buffer_is_bounded_in_bytes() -> None:
    """Prompts' token ids are kilobytes; the oldest batches are dropped first."""
    with published(buffer_bytes=64_000) as (publisher, subscriber):
        log = KVEventLog(publisher.publish, 1000)
        for _ in range(40):
            log.stored(DIGESTS[:1], None, [100_000] * 1000)  # of five bytes each
            log.flush()
        sent = [receive(subscriber)[1] for _ in range(40)]
        kept = [n for n, _ in request_events(publisher.endpoints.replay_endpoint, bytes(8))]
        dropped = request_events(publisher.endpoints.replay_endpoint, sent[3].to_bytes(8, "big"))
    assert kept == sent[-12:]
    assert [sequence for sequence, _ in dropped] == kept, "from the first one available"


def test_bound_is_on_the_memory_of_batches() -> None:
    buffer = ReplayBuffer(max_batches=100_000, max_bytes=1 << 20)
    tracemalloc.start()
    try:
        for sequence in range(1000, 21_000):
            buffer.append(sequence, bytes(sequence % 200))
        taken, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(list(buffer.since(0))) > 3000
    assert 0.8 * taken < buffer.num_bytes <= 1 << 20
    buffer.append(21_000, bytes(1 << 20))
    assert (list(buffer.since(0)), buffer.num_bytes) == ([], 0)


def ask_for_snapshot(publisher: KVEventPublisher) -> list:
    return request_events(publisher.endpoints.replay_endpoint, SNAPSHOT_REQUEST)


def test_late_subscriber_gets_a_snapshot_when_no_replay_reaches_back() -> None:
    with published(buffer_steps=1) as (publisher, subscriber):
        index = ChunkIndex(1)
        stream = EventStream(index, 0, supports_snapshots=True)
        log = KVEventLog(publisher.publish, 2)
        for digest in DIGESTS:
            log.stored([digest], None, [1, 2])
            log.flush()
        log.removed(DIGESTS[0])
        log.flush()
        for _ in range(6):
            _, last, _ = receive(subscriber)
        found = ask_for_snapshot(publisher)
        assert {sequence for sequence, _ in found} == {last + 1}
        assert apply_all(stream.apply_snapshot(last + 1, [batch for _, batch in found])) is None
        log.stored(DIGESTS[:1], None, [1, 2])
        log.flush()
        _, sequence, batch = receive(subscriber)
        assert index.match(KEYS[1:], now=0.0).local[0] == 4
        assert index.match(KEYS, now=0.0).local[0] == 0
        assert stream.receive(sequence, batch) is None
    assert index.match(KEYS, now=0.0).local[0] == 5


def test_full_queue_drops_and_leaves_a_gap(monkeypatch) -> None:
    with published(max_queue_size=1) as (publisher, subscriber):

        class Full(queue.Queue):  # which the publisher's thread may read meanwhile
            def put_nowait(self, item) -> None:
                raise queue.Full

        log = KVEventLog(publisher.publish, 2)
        with monkeypatch.context() as patch:
            patch.setattr(publisher, "_queue", Full(1))
            log.stored(DIGESTS[:1], None, [1, 2])
            sequence = publisher._sequence
            log.flush()
        for _ in range(100):  # until the thread has freed a slot
            log.stored(DIGESTS[1:2], None, [1, 2])
            dropped = publisher.num_dropped
            log.flush()
            if publisher.num_dropped == dropped:
                break
        _, found, _ = receive(subscriber)
        assert ask_for_snapshot(publisher) == [], "the held blocks are no longer known"
    assert publisher.num_dropped >= 1
    assert found > sequence


def test_await_sent_blocks_until_few_batches_are_queued(monkeypatch) -> None:
    taken, gate, encode = threading.Event(), threading.Event(), kv_event_publisher.encode_batch

    def gated(*batch):
        taken.set()
        assert gate.wait(20)
        return encode(*batch)

    with published() as (publisher, _):
        assert publisher.await_sent(0, timeout=20)
        monkeypatch.setattr(kv_event_publisher, "encode_batch", gated)
        for _ in range(4):
            publisher.publish([])
        assert taken.wait(20)
        assert publisher.await_sent(3, timeout=20)
        assert not publisher.await_sent(2, timeout=0.01)
        gate.set()
        assert publisher.await_sent(0, timeout=20)


@pytest.mark.parametrize("kind", [zmq.XSUB, zmq.DEALER])
def test_peer_that_sends_long_messages_is_disconnected(kind: int) -> None:
    """Subscriptions take fifty times their length of memory, and nothing is asked of a peer."""
    context = zmq.Context()
    peer = context.socket(kind)
    connection = peer.get_monitor_socket(zmq.EVENT_DISCONNECTED)
    try:
        with published() as (publisher, _):
            endpoints = publisher.endpoints
            peer.connect(endpoints.endpoint if kind == zmq.XSUB else endpoints.replay_endpoint)
            peer.send(b"\x01" + bytes(1000))
            assert connection.poll(5000), "the message was accepted"
    finally:
        peer.disable_monitor()
        context.destroy(linger=0)


def test_address_in_use_is_rejected_with_advice() -> None:
    with published() as (publisher, _):
        taken = publisher.endpoints.endpoint.replace("tcp://", "tcp://*:").rsplit(":", 1)[1]
        with pytest.raises(KVConfigError, match="give free addresses"):
            KVEventPublisher(
                KVEventsConfig(True, endpoint=LOOPBACK, replay_endpoint=f"tcp://127.0.0.1:{taken}")
            )


def test_any_exception_that_ends_the_thread_is_raised_by_publish() -> None:
    with published() as (publisher, _):
        publisher.publish([object()])  # type: ignore[list-item]  # can't be encoded
        publisher._thread.join()
        with pytest.raises(KVConfigError, match="can't be published"):
            publisher.publish([])


def test_batch_time_does_not_go_back_with_the_clock() -> None:
    times = [100.0]
    with published(clock=lambda: times[-1]) as (publisher, subscriber):
        log = KVEventLog(publisher.publish, block_size=2)
        stamps = []
        for now in (101.0, 41.0, 42.0, 102.0):
            times.append(now)
            log.stored(DIGESTS[:1], None, [1, 2])
            log.flush()
            _, _, batch = receive(subscriber)
            stamps.append(batch.published_at)
    assert stamps == [101.0, 101.0, 101.0, 102.0]
