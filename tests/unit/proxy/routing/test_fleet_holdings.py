"""The index of the KV that instances and their stores hold, built from published events."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from mooncake_conductor.index.chunk_index import ChunkIndex
from mooncake_conductor.index.holder_sets import Tier
from mooncake_conductor.index.kv_event_messages import BlocksStored, EventBatch
from mooncake_conductor.index.prompt_keys import CHUNK_TOKENS
from mooncake_conductor.index.published_blocks import PORTION_BLOCKS
from mooncake_proxy.pool.instances import KVEventEndpoints
from mooncake_proxy.pool.kv_event_feed import KVEventDelivery, Snapshot
from mooncake_proxy.routing.fleet_holdings import FleetHoldings


class Feed:
    """Records the requests to publishers."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def subscribe(self, name: str, endpoints: KVEventEndpoints) -> None:
        """Do nothing: the tests deliver events themselves."""

    def unsubscribe(self, name: str) -> None:
        """The same."""

    def snapshot(self, name: str) -> None:
        self.asked.append(name)


def fleet(num_instances: int) -> tuple[FleetHoldings, ChunkIndex, Feed]:
    """Instances that publish nothing, with stores that publish events."""
    index, feed = ChunkIndex(num_instances), Feed()
    holdings = FleetHoldings(index, lambda: feed, num_chunks=8)
    for slot in range(num_instances):
        instance: Any = SimpleNamespace(
            name=f"i{slot}", kv_events=None, store_kv_events=KVEventEndpoints(f"tcp://s{slot}")
        )
        holdings.join(slot, instance)
        holdings.update_subscriptions(slot, now=0.0)
    return holdings, index, feed


def batch(*numbers: int) -> EventBatch:
    """A batch of a store that holds these chunks of a prompt."""
    events = []
    for number in numbers:
        ids = tuple(range(number * CHUNK_TOKENS, (number + 1) * CHUNK_TOKENS))
        parent = number - 1 if number else None
        events.append(BlocksStored((number,), parent, CHUNK_TOKENS, Tier.HOST, ids))
    return EventBatch(1.0, tuple(events))


def delivery(slot: int, *numbers: int) -> KVEventDelivery:
    """A delivery of a store's batches."""
    return KVEventDelivery(f"i{slot}#store", [(0, batch(*numbers))])


def snapshot(num_chunks: int) -> KVEventDelivery:
    """A snapshot of the first store, which holds this many chunks of one prompt."""
    held = Snapshot(0, (batch(*range(num_chunks)),))
    return KVEventDelivery("i0#store", [], snapshots=(held,))


def take(holdings: FleetHoldings, what: KVEventDelivery) -> int:
    """Apply a delivery; returns the number of portions."""
    return 1 + sum(1 for _ in holdings.apply(what))


def test_snapshot_is_applied_in_portions() -> None:
    holdings, index, _ = fleet(1)
    assert take(holdings, snapshot(3)) == 1
    portions = holdings.apply(snapshot(2 * PORTION_BLOCKS + 1))
    for number in (1, 2):
        next(portions)
        assert index.digest(0, Tier.HOST)[0] == number * PORTION_BLOCKS
    assert next(portions, "taken") == "taken"
    assert index.digest(0, Tier.HOST)[0] == 2 * PORTION_BLOCKS + 1


def test_rest_of_snapshot_is_dropped_if_publisher_was_removed() -> None:
    """Another instance may have the slot by then."""
    holdings, index, feed = fleet(1)
    portions = holdings.apply(snapshot(3 * PORTION_BLOCKS))
    next(portions)
    instance = holdings._slots[0].instance
    holdings.leave(0)
    index.cleared(0)
    holdings.join(0, instance)
    holdings.update_subscriptions(0, now=0.0)
    assert next(portions, "taken") == "taken"
    assert index.digest(0, Tier.HOST)[0] == 0
    assert take(holdings, delivery(0, 0)) == 1
    assert index.digest(0, Tier.HOST)[0] == 1
    assert not feed.asked


def test_blocks_after_other_publishers_block_are_applied_in_portions() -> None:
    holdings, index, _ = fleet(2)
    num_chunks = 2 * PORTION_BLOCKS + 1
    take(holdings, delivery(0, *range(num_chunks, 0, -1)))
    assert index.digest(0, Tier.HOST)[0] == 0
    assert take(holdings, delivery(1, 0)) == 3
    assert index.digest(0, Tier.HOST)[0] == num_chunks


def test_orphan_blocks_are_applied_when_parent_is_published() -> None:
    holdings, index, feed = fleet(2)
    take(holdings, delivery(0, 1))
    assert index.digest(0, Tier.HOST)[0] == 0
    take(holdings, delivery(1, 0))
    assert [index.digest(slot, Tier.HOST)[0] for slot in range(2)] == [1, 1]
    holdings.sweep(now=60.0)
    assert feed.asked == [], "nothing is missing"


def test_store_with_unknown_parent_is_asked_for_one_more_snapshot() -> None:
    holdings, _, feed = fleet(1)
    take(holdings, delivery(0, 1))
    for now in (20.0, 40.0, 80.0):
        holdings.sweep(now)
    assert feed.asked == ["i0#store"]


def test_removed_store_gets_no_entries() -> None:
    holdings, index, _ = fleet(2)
    take(holdings, delivery(0, 1))
    holdings.leave(0)
    take(holdings, delivery(1, 0))
    assert index.digest(0, Tier.HOST)[0] == 0
