"""The event loop applies deliveries from the thread that follows KV events."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest
import zmq

from mooncake_proxy.pool import kv_event_feed
from mooncake_proxy.pool.instance_reports import KVEventEndpoints
from mooncake_proxy.pool.kv_event_feed import KVEventDelivery, KVEventFeed


class PortionedConsumer:
    """Applies each delivery in three portions and yields to the loop between them."""

    def __init__(self, last: str, fails: str = "") -> None:
        self.seen: list[str] = []
        self.has_all = asyncio.Event()
        self._last = last
        self._fails = fails

    def take(self, delivery: KVEventDelivery) -> Iterator[None]:
        for number in range(3):
            name = f"{delivery.name}{number}"
            self.seen.append(name)
            if name == self._fails:
                raise ValueError(delivery.name)
            asyncio.get_running_loop().call_soon(self._work)
            yield

    def _work(self) -> None:
        if self.seen[-1] == self._last:
            self.has_all.set()
        self.seen.append("other work")


@pytest.mark.timeout(10)
def test_loop_runs_other_tasks_between_portions() -> None:
    async def main() -> None:
        taker = PortionedConsumer(last="b2")
        feed = KVEventFeed(taker.take)
        feed._send(KVEventDelivery("a", []))
        feed._send(KVEventDelivery("b", []))
        await taker.has_all.wait()
        feed.close()
        names = [f"{name}{number}" for name in "ab" for number in range(3)]
        assert taker.seen == [each for name in names for each in (name, "other work")]

    asyncio.run(main())


@pytest.mark.timeout(10)
def test_failed_delivery_does_not_block_the_next() -> None:
    async def main() -> None:
        failures: list[str] = []
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda _, found: failures.append(str(found["exception"])))
        taker = PortionedConsumer(last="b2", fails="a1")
        feed = KVEventFeed(taker.take)
        feed._send(KVEventDelivery("a", []))
        feed._send(KVEventDelivery("b", []))
        await taker.has_all.wait()
        feed.close()
        assert failures == ["a"]
        assert [each for each in taker.seen if each != "other work"] == [
            "a0",
            "a1",
            "b0",
            "b1",
            "b2",
        ]

    asyncio.run(main())


@pytest.mark.timeout(10)
def test_any_exception_that_ends_the_thread_is_raised_by_poll() -> None:
    async def main() -> None:
        feed = KVEventFeed(lambda _: iter(()))
        feed._commands.put(lambda: {}["unexpected"])
        feed._thread.join()
        with pytest.raises(KeyError, match="unexpected"):
            feed.poll()
        feed.close()

    asyncio.run(main())


async def until(is_so: Callable[[], object]) -> None:
    for _ in range(2000):
        if is_so():
            return
        await asyncio.sleep(0.005)
    raise AssertionError("it does not come")


@pytest.mark.timeout(20)
def test_events_wait_in_their_socket_while_the_loop_is_behind(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(kv_event_feed, "BATCHES_PER_TURN", 1)
    monkeypatch.setattr(kv_event_feed, "MAX_UNAPPLIED", 4)
    monkeypatch.setattr(kv_event_feed, "POLL_MS", 1)
    num_batches = 40
    waiting, applied = 0, []
    is_behind = True

    def take(delivery: KVEventDelivery) -> Iterator[None]:
        nonlocal waiting
        while is_behind:
            waiting = max(waiting, len(feed._deliveries))
            yield
        applied.extend(sequence for sequence, _ in delivery.batches)

    async def main() -> None:
        nonlocal feed, is_behind
        feed = KVEventFeed(take)
        with zmq.Context() as context, context.socket(zmq.XPUB) as publisher:
            publisher.linger = 0
            publisher.bind(f"ipc://{tmp_path}/events")
            feed.subscribe("a", KVEventEndpoints(f"ipc://{tmp_path}/events"))
            await until(lambda: publisher.poll(0))
            for number in range(num_batches):
                payload = msgspec.msgpack.encode([1.0, [], None])
                publisher.send_multipart((b"", number.to_bytes(8, "big"), payload))
            await until(lambda: waiting >= 4)
            for _ in range(20):  # turns in which the thread could receive the rest
                await asyncio.sleep(0.005)
            assert waiting == 4
            is_behind = False
            await until(lambda: len(applied) >= num_batches)
        feed.close()
        assert applied == list(range(num_batches))

    feed: KVEventFeed
    asyncio.run(main())


@pytest.mark.timeout(20)
def test_publishers_without_a_socket_for_requests_end_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(kv_event_feed, "REPLAY_TIMEOUT_S", 0.05)
    monkeypatch.setattr(kv_event_feed, "POLL_MS", 1)
    unanswered: dict[str, int] = {}
    applied: list[int] = []

    def take(delivery: KVEventDelivery) -> Iterator[None]:
        num_ended = len(delivery.snapshots) + delivery.num_replays_ended
        unanswered[delivery.name] = unanswered.get(delivery.name, 0) + num_ended
        applied.extend(sequence for sequence, _ in delivery.batches)
        yield

    async def main() -> None:
        feed = KVEventFeed(take)
        assert feed._context.get(zmq.MAX_SOCKETS) > 2 * 1024, "two for each instance of a fleet"
        feed._context.set(zmq.MAX_SOCKETS, 3)
        with zmq.Context() as context, context.socket(zmq.XPUB) as publisher:
            publisher.linger = 0
            publisher.bind(f"ipc://{tmp_path}/b")
            all_are_queued = threading.Event()
            feed._commands.put(all_are_queued.wait)
            for name in "abc":
                endpoint = f"ipc://{tmp_path}/{name}"
                feed.subscribe(name, KVEventEndpoints(endpoint, f"{endpoint}-replay"))
            all_are_queued.set()
            await until(lambda: unanswered == {"a": 1, "b": 1})
            feed.unsubscribe("a")
            feed.replay("b", 0)
            await until(lambda: unanswered == {"a": 1, "b": 2})
            assert publisher.poll(5000)
            publisher.send_multipart((b"", bytes(8), msgspec.msgpack.encode([1.0, [], None])))
            await until(lambda: applied)
            feed.poll()
        feed.close()

    asyncio.run(main())
    assert f"can't connect to the KV events of b at ipc://{tmp_path}/b-replay" in caplog.text
    assert f"can't connect to the KV events of c at ipc://{tmp_path}/c: Too many" in caplog.text
