"""What the conductor's instances and their stores hold, from deliveries of what they publish."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from mooncake_conductor.index.chunk_index import ChunkIndex
from mooncake_conductor.index.holder_sets import Tier
from mooncake_conductor.index.kv_event_messages import BlocksStored, EventBatch
from mooncake_conductor.index.prompt_keys import CHUNK_TOKENS
from mooncake_proxy.pool.instances import KVEventEndpoints
from mooncake_proxy.pool.kv_event_feed import KVEventDelivery
from mooncake_proxy.routing.fleet_holdings import FleetHoldings


class Feed:
    """Notes what is asked of publishers."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def follow(self, name: str, endpoints: KVEventEndpoints) -> None:
        """Nothing is published by itself."""

    def leave(self, name: str) -> None:
        """The same."""

    def snapshot(self, name: str) -> None:
        self.asked.append(name)


def fleet(num_instances: int) -> tuple[FleetHoldings, ChunkIndex, Feed]:
    """Instances that publish nothing, with stores that do."""
    index, feed = ChunkIndex(num_instances), Feed()
    holdings = FleetHoldings(index, lambda: feed, num_chunks=8)
    for slot in range(num_instances):
        instance: Any = SimpleNamespace(
            name=f"i{slot}", kv_events=None, store_kv_events=KVEventEndpoints(f"tcp://s{slot}")
        )
        holdings.join(slot, instance)
        holdings.follow(slot, now=0.0)
    return holdings, index, feed


def delivery(slot: int, number: int) -> KVEventDelivery:
    """A store has the so many-th chunk of a prompt."""
    ids = tuple(range(number * CHUNK_TOKENS, (number + 1) * CHUNK_TOKENS))
    parent = number - 1 if number else None
    event = BlocksStored((number,), parent, CHUNK_TOKENS, Tier.HOST, ids)
    return KVEventDelivery(f"i{slot}#store", [(0, EventBatch(1.0, (event,)))])


def test_a_store_that_speaks_before_the_one_it_follows_on_is_placed_with_it() -> None:
    holdings, index, feed = fleet(2)
    holdings.take(delivery(0, 1))
    assert index.digest(0, Tier.HOST)[0] == 0
    holdings.take(delivery(1, 0))
    assert [index.digest(slot, Tier.HOST)[0] for slot in range(2)] == [1, 1]
    holdings.sweep(now=60.0)
    assert feed.asked == [], "nothing is missing"


def test_a_store_whose_beginning_is_still_not_known_is_asked_again_once() -> None:
    holdings, _, feed = fleet(1)
    holdings.take(delivery(0, 1))
    for now in (20.0, 40.0, 80.0):
        holdings.sweep(now)
    assert feed.asked == ["i0#store"]


def test_a_store_that_has_left_is_given_nothing() -> None:
    holdings, index, _ = fleet(2)
    holdings.take(delivery(0, 1))
    holdings.leave(0)
    holdings.take(delivery(1, 0))
    assert index.digest(0, Tier.HOST)[0] == 0
