"""Weighted fair queueing of API keys, whichever sends the most."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping
from types import MappingProxyType
from unittest.mock import Mock

import pytest

from mooncake_proxy.api.admission_queue import AdmissionQueue
from mooncake_proxy.api.api_keys import ApiKey
from mooncake_proxy.api.openai_bodies import OpenAIEndpoint, parse_request
from mooncake_proxy.api.proxied_request import RequestContext
from mooncake_proxy.config import AdmissionConfig
from mooncake_proxy.errors import Overloaded

HEAVY, LIGHT = ApiKey("a", "heavy"), ApiKey("b", "light")


async def served(
    queue: AdmissionQueue,
    waiting: list[tuple[ApiKey, float]],
    turns: int,
    unspent: Mapping[ApiKey, float] = MappingProxyType({}),
) -> list[str]:
    """The order in which queued requests are served, one at a time; `unspent` is how much of their
    cost the requests of a key don't use."""
    order: list[str] = []
    first = ApiKey("x", "first")
    running = [first]
    assert queue.enter(first)

    async def wait(key: ApiKey, cost: float) -> None:
        await queue.queue(key, cost)
        order.append(key.name)
        running.append(key)

    tasks = [asyncio.ensure_future(wait(*each)) for each in waiting]
    await asyncio.sleep(0)
    for _ in range(turns):
        queue.leave(running[-1], unspent.get(running[-1], 0.0))
        await asyncio.sleep(0)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    return order


def test_key_with_more_requests_gets_no_larger_share() -> None:
    async def main() -> None:
        queue = AdmissionQueue(AdmissionConfig(1))
        waiting = [(HEAVY, 100.0)] * 50 + [(LIGHT, 100.0)] * 10
        order = await served(queue, waiting, 20)
        assert Counter(order) == {"heavy": 10, "light": 10}
        assert queue.num_waiting == 0

    asyncio.run(main())


def test_shares_follow_weights_and_request_costs() -> None:
    async def main() -> None:
        double = ApiKey("c", "double", weight=2.0)
        dear = ApiKey("d", "dear")
        waiting = [(LIGHT, 10.0)] * 30 + [(double, 10.0)] * 30 + [(dear, 30.0)] * 30
        counted = Counter(await served(AdmissionQueue(AdmissionConfig(1)), waiting, 30))
        assert counted["double"] / counted["light"] == pytest.approx(2.0, abs=0.3)
        assert counted["light"] / counted["dear"] == pytest.approx(3.0, abs=0.8)

    asyncio.run(main())


def test_queue_without_keys_is_fifo() -> None:
    async def main() -> None:
        queue, order = AdmissionQueue(AdmissionConfig(1)), []
        assert queue.enter()

        async def wait(number: int) -> None:
            await queue.queue(cost=100 - number)
            order.append(number)

        tasks = [asyncio.ensure_future(wait(number)) for number in range(5)]
        await asyncio.sleep(0)
        for _ in range(5):
            queue.leave()
            await asyncio.sleep(0)
        await asyncio.gather(*tasks)
        assert order == [0, 1, 2, 3, 4]

    asyncio.run(main())


def test_key_that_fills_queue_is_displaced_by_others() -> None:
    async def main() -> None:
        queue = AdmissionQueue(AdmissionConfig(1, max_waiting=4))
        assert queue.enter(HEAVY)
        waits = [asyncio.ensure_future(queue.queue(HEAVY)) for _ in range(4)]
        await asyncio.sleep(0)
        with pytest.raises(Overloaded):
            await queue.queue(HEAVY)
        light = asyncio.ensure_future(queue.queue(LIGHT))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert isinstance(waits[-1].exception(), Overloaded)
        assert queue.num_waiting == 4
        queue.leave()
        queue.leave()
        await light
        for task in waits[:-1]:
            task.cancel()
        await asyncio.gather(*waits, return_exceptions=True)
        assert queue.num_waiting == 0

    asyncio.run(main())


def test_room_is_checked_without_taking_it() -> None:
    async def main() -> None:
        queue = AdmissionQueue(AdmissionConfig(1, max_waiting=2))
        queue.check_room(HEAVY)
        assert queue.enter(HEAVY)
        waiting = []
        for _ in range(2):
            queue.check_room(HEAVY)
            waiting.append(asyncio.ensure_future(queue.queue(HEAVY)))
            await asyncio.sleep(0)
        with pytest.raises(Overloaded):
            queue.check_room(HEAVY)
        queue.check_room(LIGHT)  # would displace a request of the other key
        assert (queue.num_running, queue.num_waiting) == (1, 2)
        for each in waiting:
            each.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)

    asyncio.run(main())


def test_queue_without_bound_has_room() -> None:
    queue = AdmissionQueue(AdmissionConfig(0, max_waiting=0))
    queue.check_room(HEAVY)
    assert queue.enter(HEAVY)
    queue.check_room(HEAVY)


def test_idle_key_accumulates_no_credit() -> None:
    async def main() -> None:
        queue = AdmissionQueue(AdmissionConfig(1))
        await served(queue, [(HEAVY, 100.0)] * 20, 20)
        queue.leave()
        order = await served(queue, [(HEAVY, 100.0)] * 20 + [(LIGHT, 100.0)] * 20, 10)
        assert Counter(order) == {"heavy": 5, "light": 5}

    asyncio.run(main())


def test_key_that_was_idle_gets_no_credit_from_a_request_that_found_room() -> None:
    async def main() -> None:
        queue = AdmissionQueue(AdmissionConfig(2))
        for key in (LIGHT, *[HEAVY] * 20, LIGHT):
            assert queue.enter(key, 100.0)
            queue.leave()
        assert queue.enter(LIGHT, 100.0), "there is room for it"
        order = await served(queue, [(LIGHT, 100.0)] * 20 + [(HEAVY, 100.0)] * 20, 10)
        assert Counter(order) == {"heavy": 5, "light": 5}

    asyncio.run(main())


@pytest.mark.parametrize(
    ("unspent", "num_light"),
    [
        (0.0, 10),
        pytest.param(90.0, 18, id="tenth-of-the-cost"),
        pytest.param(-100.0, 7, id="twice-the-cost"),
    ],
)
def test_shares_follow_what_requests_used(unspent: float, num_light: int) -> None:
    async def main() -> None:
        waiting = [(LIGHT, 100.0)] * 20 + [(HEAVY, 100.0)] * 20
        queue = AdmissionQueue(AdmissionConfig(1))
        order = await served(queue, waiting, 20, unspent={LIGHT: unspent})
        assert Counter(order)["light"] == pytest.approx(num_light, abs=1)

    asyncio.run(main())


def test_what_was_not_used_is_no_credit_for_a_time_without_requests() -> None:
    async def main() -> None:
        queue = AdmissionQueue(AdmissionConfig(2))
        assert queue.enter(LIGHT, 1e6)
        await served(queue, [(HEAVY, 100.0)] * 20, 20)
        light, heavy = (
            [asyncio.ensure_future(queue.queue(key, 100.0)) for _ in range(20)]
            for key in (LIGHT, HEAVY)
        )
        await asyncio.sleep(0)
        queue.leave(LIGHT, 1e6)
        for _ in range(9):
            queue.leave(HEAVY)
        await asyncio.sleep(0)
        assert [sum(task.done() for task in tasks) for tasks in (light, heavy)] == [5, 5]
        for task in (*light, *heavy):
            task.cancel()
        await asyncio.gather(*light, *heavy, return_exceptions=True)

    asyncio.run(main())


def test_key_that_joins_others_in_the_queue_starts_where_they_are() -> None:
    async def main() -> None:
        queue, newcomer = AdmissionQueue(AdmissionConfig(1)), ApiKey("c", "newcomer")
        waiting = [(HEAVY, 100.0)] * 40 + [(LIGHT, 100.0)] * 40
        assert queue.enter(newcomer)
        tasks = [asyncio.ensure_future(queue.queue(*each)) for each in waiting]
        await asyncio.sleep(0)
        for _ in range(20):
            queue.leave()
        late = [asyncio.ensure_future(queue.queue(newcomer, 100.0)) for _ in range(20)]
        await asyncio.sleep(0)
        for _ in range(13):
            queue.leave()
        await asyncio.sleep(0)
        assert sum(each.done() for each in late) == 5
        for task in (*tasks, *late):
            task.cancel()
        await asyncio.gather(*tasks, *late, return_exceptions=True)

    asyncio.run(main())


def test_cost_that_cannot_be_charged_takes_no_place() -> None:
    queue = AdmissionQueue(AdmissionConfig(1))
    with pytest.raises(OverflowError):
        queue.enter(HEAVY, 10**400)
    assert queue.num_running == 0


def test_absurd_limits_of_a_request_leave_shares_fair() -> None:
    body = b'{"prompt":"x","max_tokens":9223372036854775807,"n":9223372036854775807}'
    parsed, fields = parse_request(body)
    context = RequestContext(
        Mock(), OpenAIEndpoint.COMPLETION, parsed, fields, "id", 0.0, 1.0, prompt_tokens=1
    )

    async def main() -> None:
        queue = AdmissionQueue(AdmissionConfig(1))
        await served(queue, [(HEAVY, context.cost_tokens)], 1)
        queue.leave()
        order = await served(queue, [(HEAVY, 10.0)] * 20 + [(LIGHT, 10.0)] * 20, 20)
        assert Counter(order) == {"heavy": 10, "light": 10}

    asyncio.run(main())


def test_changed_weight_applies_to_what_is_served_from_then_on() -> None:
    async def main() -> None:
        queue = AdmissionQueue(AdmissionConfig(1))
        waiting = [(HEAVY, 100.0)] * 20 + [(LIGHT, 100.0)] * 20
        order = await served(queue, waiting, 8)
        assert Counter(order) == {"heavy": 4, "light": 4}
        queue.leave(LIGHT)  # the last one
        queue.set_weights([ApiKey("a", "heavy", weight=3.0), ApiKey("n", "never seen")])
        order = await served(queue, waiting, 8)
        assert Counter(order) == {"heavy": 6, "light": 2}

    asyncio.run(main())
