"""Aborted requests are freed even while the head of the queue waits for blocks."""

from __future__ import annotations

import gc
from dataclasses import replace

from support.scheduling import EOS, RecordingConnector, make_request

from mooncake_engine.kv_cache.block_manager import BlockManager
from mooncake_engine.scheduling.request import Request
from mooncake_engine.scheduling.request_queues import MIN_STALE_ENTRIES, RequestQueue
from mooncake_engine.scheduling.scheduler import Scheduler
from mooncake_engine.scheduling.scheduler_interface import SchedulerLimits

NUM_REQUESTS = 2_000


def scheduler_with_a_blocked_head() -> Scheduler:
    """One request runs and holds nearly all blocks; the next one needs as many."""
    limits = SchedulerLimits(8, 4096, 4000, frozenset({EOS}))
    scheduler = Scheduler(limits, BlockManager(100, 4, prefix_caching=True), RecordingConnector())
    scheduler.add(make_request("runs", range(390)))
    scheduler.schedule()
    scheduler.add(make_request("blocked", range(390), arrival=1.0))
    return scheduler


def num_live_requests() -> int:
    """Count the requests in the whole process."""
    gc.collect()
    return sum(type(found) is Request for found in gc.get_objects())


def test_aborted_requests_behind_a_blocked_head_are_freed() -> None:
    scheduler = scheduler_with_a_blocked_head()
    before = num_live_requests()
    longest_heap = 0
    for number in range(NUM_REQUESTS):
        request = make_request(f"r{number}", range(300), arrival=2.0 + number)
        request = Request(replace(request.spec, timeout_s=3600.0), 0, request.arrival)
        scheduler.add(request)
        scheduler.abort(request.request_id)
        longest_heap = max(longest_heap, len(scheduler._queues.waiting._heap))
        scheduler.take_updates()
    del request
    assert num_live_requests() - before <= MIN_STALE_ENTRIES + 2
    assert longest_heap <= MIN_STALE_ENTRIES + 2
    assert len(scheduler._outputs._with_limit._heap) <= MIN_STALE_ENTRIES + 2
    scheduler.check_integrity()


def test_rebuilt_queue_keeps_its_order() -> None:
    queue = RequestQueue()
    scheduler = scheduler_with_a_blocked_head()
    requests = [make_request(f"r{n}", [1], arrival=float(n), priority=n % 3) for n in range(400)]
    for request in requests:
        scheduler._queues.add(request)
        queue.push(request)
    for request in requests:
        if request.spec.priority:
            queue.remove(request)
    order = []
    while (head := queue.peek()) is not None:
        order.append(head.arrival)
        queue.remove(head)
    assert order == [float(n) for n in range(400) if n % 3 == 0]
    assert len(queue) == 0


def test_request_that_rejoins_a_queue_is_in_it_once() -> None:
    queue = RequestQueue()
    scheduler = scheduler_with_a_blocked_head()
    first, second = (make_request(name, [1], arrival=9.0, group="n") for name in ("a", "b"))
    for request in (first, second):
        scheduler._queues.add(request)
        queue.push(request)
    queue.remove(first)
    queue.push(first)
    assert [request.request_id for request in queue.in_order()] == ["a", "b"]


def test_request_expires_at_its_timeout_and_not_before() -> None:
    scheduler = scheduler_with_a_blocked_head()
    for name, timeout_s in (("late", 50.0), ("early", 5.0)):
        request = make_request(name, range(300), arrival=2.0)
        scheduler.add(Request(replace(request.spec, timeout_s=timeout_s), 0, 2.0))
    scheduler.take_updates()
    scheduler.expire(7.5)
    assert [update.request_id for update in scheduler.take_updates()] == ["early"]
    scheduler.expire(51.9)
    assert scheduler.take_updates() == []
    scheduler.expire(52.0)
    assert [update.request_id for update in scheduler.take_updates()] == ["late"]
