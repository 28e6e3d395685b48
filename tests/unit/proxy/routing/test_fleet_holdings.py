"""The index of the KV that instances and their stores hold, built from published events."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from mooncake_conductor.index.chunk_index import ChunkIndex
from mooncake_conductor.index.holder_sets import Tier
from mooncake_conductor.index.kv_event_messages import AllCleared, BlocksStored, EventBatch
from mooncake_conductor.index.prompt_keys import CHUNK_TOKENS, text_keys, token_keys
from mooncake_conductor.index.published_blocks import PORTION_BLOCKS
from mooncake_proxy.pool.instance_reports import KVEventEndpoints, PoolUse, StoreLocation
from mooncake_proxy.pool.kv_event_feed import KVEventDelivery, Snapshot
from mooncake_proxy.routing.fleet_holdings import FleetHoldings

# Keys of the chunks of `batch`.
KEYS = token_keys(range(3 * CHUNK_TOKENS))


class Feed:
    """Records the subscriptions and the requests to publishers, by the number in their address. The
    tests deliver events themselves."""

    def __init__(self) -> None:
        self.names: dict[int, str] = {}
        self.asked: list[int] = []

    def subscribe(self, name: str, endpoints: KVEventEndpoints) -> None:
        number = int(endpoints.endpoint.removeprefix("tcp://s"))
        assert number not in self.names, "it is subscribed to already"
        self.names[number] = name

    def unsubscribe(self, name: str) -> None:
        del self.names[self.number(name)]

    def snapshot(self, name: str) -> None:
        self.asked.append(self.number(name))

    def replay(self, name: str, start: int) -> None:
        self.asked.append(self.number(name))

    def number(self, name: str) -> int:
        """The number of a publisher."""
        [found] = [number for number, known in self.names.items() if known == name]
        return found

    def delivery(self, number: int, *chunks: int, at: int = 0) -> KVEventDelivery:
        """A delivery of a store's batch with this sequence number."""
        return KVEventDelivery(self.names[number], [(at, batch(*chunks))])

    def snapshot_of(self, number: int, num_chunks: int) -> KVEventDelivery:
        """A snapshot of a store, which holds this many chunks of one prompt."""
        held = Snapshot(0, (batch(*range(num_chunks)),))
        return KVEventDelivery(self.names[number], [], snapshots=(held,))


def use_stores(holdings: FleetHoldings, slot: int, *stores: int) -> None:
    """Report the stores that an instance uses."""
    instance: Any = holdings._slots[slot].instance
    instance.store_kv_events = tuple(KVEventEndpoints(f"tcp://s{number}") for number in stores)
    holdings.update_subscriptions(slot, now=0.0)


def fleet(
    num_instances: int, stores: tuple[int, ...] | None = None
) -> tuple[FleetHoldings, ChunkIndex, Feed]:
    """Instances that publish nothing, with stores that publish events: these, or one each."""
    index, feed = ChunkIndex(num_instances), Feed()
    fleet_feed: Any = feed
    holdings = FleetHoldings(index, lambda: fleet_feed, num_chunks=8)
    for slot in range(num_instances):
        instance: Any = SimpleNamespace(
            name=f"i{slot}", kv_events=None, store_kv_events=(), stores=()
        )
        holdings.join(slot, instance)
        use_stores(holdings, slot, *((slot,) if stores is None else stores))
    return holdings, index, feed


def held(index: ChunkIndex, num_instances: int) -> list[int]:
    """Number of chunks in the stores of each instance."""
    return [index.num_held(slot, Tier.HOST) for slot in range(num_instances)]


def batch(*numbers: int) -> EventBatch:
    """A batch of a store that holds these chunks of a prompt."""
    events = []
    for number in numbers:
        ids = tuple(range(number * CHUNK_TOKENS, (number + 1) * CHUNK_TOKENS))
        parent = number - 1 if number else None
        events.append(BlocksStored((number,), parent, CHUNK_TOKENS, Tier.HOST, ids))
    return EventBatch(1.0, tuple(events))


def take(holdings: FleetHoldings, what: KVEventDelivery) -> int:
    """Apply a delivery; returns the number of portions."""
    return 1 + sum(1 for _ in holdings.apply(what))


def test_snapshot_is_applied_in_portions() -> None:
    holdings, index, feed = fleet(1)
    assert take(holdings, feed.snapshot_of(0, 3)) == 1
    portions = holdings.apply(feed.snapshot_of(0, 2 * PORTION_BLOCKS + 1))
    for number in (1, 2):
        next(portions)
        assert index.num_held(0, Tier.HOST) == number * PORTION_BLOCKS
    assert next(portions, "taken") == "taken"
    assert index.num_held(0, Tier.HOST) == 2 * PORTION_BLOCKS + 1


def test_rest_of_snapshot_is_dropped_if_publisher_was_removed() -> None:
    """Another instance may have the slot by then."""
    holdings, index, feed = fleet(1)
    portions = holdings.apply(feed.snapshot_of(0, 3 * PORTION_BLOCKS))
    next(portions)
    instance = holdings._slots[0].instance
    holdings.leave(0)
    index.cleared(0)
    holdings.join(0, instance)
    holdings.update_subscriptions(0, now=0.0)
    assert next(portions, "taken") == "taken"
    assert index.num_held(0, Tier.HOST) == 0
    assert take(holdings, feed.delivery(0, 0)) == 1
    assert index.num_held(0, Tier.HOST) == 1
    assert not feed.asked


def test_blocks_after_other_publishers_block_are_applied_in_portions() -> None:
    holdings, index, feed = fleet(2)
    num_chunks = 2 * PORTION_BLOCKS + 1
    take(holdings, feed.delivery(0, *range(num_chunks, 0, -1)))
    assert index.num_held(0, Tier.HOST) == 0
    assert take(holdings, feed.delivery(1, 0)) == 3
    assert index.num_held(0, Tier.HOST) == num_chunks


def test_orphan_blocks_are_applied_when_parent_is_published() -> None:
    holdings, index, feed = fleet(2)
    take(holdings, feed.delivery(0, 1))
    assert index.num_held(0, Tier.HOST) == 0
    take(holdings, feed.delivery(1, 0))
    assert [index.num_held(slot, Tier.HOST) for slot in range(2)] == [1, 1]
    holdings.sweep(now=60.0)
    assert feed.asked == [], "nothing is missing"


def test_store_with_unknown_parent_is_asked_for_one_more_snapshot() -> None:
    holdings, _, feed = fleet(1)
    take(holdings, feed.delivery(0, 1))
    for now in (20.0, 40.0, 80.0):
        holdings.sweep(now)
    assert feed.asked == [0]


def test_removed_store_gets_no_entries() -> None:
    holdings, index, feed = fleet(2)
    take(holdings, feed.delivery(0, 1))
    holdings.leave(0)
    take(holdings, feed.delivery(1, 0))
    assert index.num_held(0, Tier.HOST) == 0


def test_store_of_several_instances_is_subscribed_to_once() -> None:
    holdings, index, feed = fleet(3, stores=(0,))
    take(holdings, feed.delivery(0, 0, 1))
    assert held(index, 3) == [2, 2, 2]
    holdings.leave(0)
    take(holdings, feed.delivery(0, 2, at=1))
    assert held(index, 3)[1:] == [3, 3]
    holdings.leave(1)
    assert [*feed.names] == [0]
    holdings.leave(2)
    assert not feed.names


def test_instance_that_joins_later_has_what_its_store_holds() -> None:
    holdings, index, feed = fleet(2)
    take(holdings, feed.delivery(0, 0, 1))
    use_stores(holdings, 1, 0)
    assert held(index, 2) == [2, 2]
    assert [*feed.names] == [0]


def test_instance_holds_what_any_of_its_stores_does() -> None:
    holdings, index, feed = fleet(1, stores=(0, 1))
    take(holdings, feed.delivery(0, 0))
    take(holdings, feed.delivery(1, 0, 1))
    first, second = (KVEventEndpoints(f"tcp://s{number}") for number in (0, 1))
    assert index.match(KEYS, 0.0).local[0] == 2
    assert [holdings.is_in_store(first, key) for key in KEYS] == [True, False, False]
    assert [holdings.is_in_store(second, key) for key in KEYS] == [True, True, False]
    use_stores(holdings, 0, 0)
    assert index.match(KEYS, 0.0).local[0] == 1, "what only the other one holds is gone"
    assert not holdings.is_in_store(second, KEYS[1])


def report_epoch(holdings: FleetHoldings, slot: int, epoch: str) -> None:
    """Report that an instance uses the first store in an epoch of it."""
    instance: Any = holdings._slots[slot].instance
    use = PoolUse(StoreLocation("s", 1, epoch), KVEventEndpoints("tcp://s0"))
    instance.stores = (use,)
    holdings.update_subscriptions(slot, now=0.0)


def test_restarted_store_holds_nothing_of_what_it_published() -> None:
    """Instances report its restart one after another; its events may not tell."""
    holdings, index, feed = fleet(2, stores=(0,))
    for slot in (0, 1):
        report_epoch(holdings, slot, "a")
    take(holdings, feed.delivery(0, 0, 1))
    former = feed.delivery(0, 2, at=1)
    report_epoch(holdings, 0, "b")
    assert held(index, 2) == [0, 0]
    take(holdings, former)
    assert held(index, 2) == [0, 0], "what was on its way is of the former epoch"
    take(holdings, feed.delivery(0, 0))
    report_epoch(holdings, 1, "a")
    assert held(index, 2) == [1, 1]
    report_epoch(holdings, 1, "b")
    assert held(index, 2) == [1, 1]


def test_restarted_instance_holds_nothing_of_what_it_published() -> None:
    """Although its clock was set back, and its events count from 0 again at the same address."""
    holdings, index, feed = fleet(1, stores=())
    instance: Any = holdings._slots[0].instance
    instance.kv_events = KVEventEndpoints("tcp://s9")
    holdings.update_subscriptions(0, now=0.0)
    for number in range(3):
        take(holdings, feed.delivery(9, number, at=number))
    assert index.num_held(0, Tier.HOST) == 3
    holdings.subscribe_afresh(0)
    assert index.num_held(0, Tier.HOST) == 0
    earlier = EventBatch(0.5, batch(0).events)
    take(holdings, KVEventDelivery(feed.names[9], [(0, earlier)]))
    assert index.num_held(0, Tier.HOST) == 1


def test_gap_of_a_store_concerns_all_its_instances() -> None:
    """The chunks of a publisher with missing events don't count, even for one that joins now."""
    holdings, index, feed = fleet(3, stores=(0,))
    take(holdings, feed.delivery(0, 0))
    assert [*index.match(KEYS, 0.0).local] == [1, 1, 1]
    use_stores(holdings, 2)
    list(holdings.apply(feed.delivery(0, 2, at=2)))
    use_stores(holdings, 2, 0)
    assert [*index.match(KEYS, 0.0).local] == [0, 0, 0]
    assert [*index.match(KEYS, 0.0).hinted] == [1, 1, 1]
    holdings.note_processed(1, KEYS[:1])
    assert [*index.match(KEYS, 0.0).local] == [0, 1, 0], "what else an instance holds counts"


def test_publishers_that_stay_keep_their_subscriptions_while_a_store_comes_and_goes() -> None:
    holdings, index, feed = fleet(1)
    instance: Any = holdings._slots[0].instance
    instance.kv_events = KVEventEndpoints("tcp://s9")  # of its only rank
    use_stores(holdings, 0, 0, 1)
    take(holdings, feed.delivery(9, 0))
    take(holdings, feed.delivery(1, 0, 1))
    rank, store = feed.names[9], feed.names[0]
    for _ in range(3):
        use_stores(holdings, 0, 0)
        assert held(index, 1) == [1], "what the rank holds"
        use_stores(holdings, 0, 0, 1)
    assert (feed.names[9], feed.names[0]) == (rank, store)


def test_stores_that_come_and_go_leave_nothing_behind() -> None:
    """Each start of a store may have another address."""
    holdings, index, feed = fleet(1)
    for number in range(1, 40):
        use_stores(holdings, 0, number)
        take(holdings, feed.delivery(number, 0))
    [held_by] = index._sets._sets
    assert held_by[Tier.HOST].bit_length() <= 4, "numbers of removed stores are used again"
    index.collect(256)
    assert (len(index), len(index._sets)) == (1, 1)


def test_new_subscription_of_an_instance_is_trusted_after_a_gap_of_the_former() -> None:
    holdings, index, feed = fleet(1, stores=(0,))
    list(holdings.apply(feed.delivery(0, 2, at=2)))
    use_stores(holdings, 0)
    use_stores(holdings, 0, 1)
    take(holdings, feed.delivery(1, 0))
    assert [*index.match(KEYS, 0.0).local] == [1]


def test_instance_that_joins_another_fleet_before_it_leaves_its_own_stays_subscribed() -> None:
    """After a change of its role, between pairs and instances that serve whole requests."""
    names: list[str] = []
    feed: Any = SimpleNamespace(
        subscribe=lambda name, endpoints: names.append(name), unsubscribe=names.remove
    )
    pairs, coupled = (FleetHoldings(ChunkIndex(1), lambda: feed, num_chunks=8) for _ in range(2))
    endpoints = KVEventEndpoints("tcp://s0")
    instance: Any = SimpleNamespace(name="i", kv_events=endpoints, store_kv_events=(), stores=())
    for holdings in (pairs, coupled):
        holdings.join(0, instance)
        holdings.update_subscriptions(0, now=0.0)
    first, second = names
    pairs.leave(0)
    assert first != second
    assert names == [second]
    assert coupled.has_publishers


def test_instance_with_events_that_cannot_be_used_is_warned_of() -> None:
    holdings, index, feed = fleet(1, stores=())
    warnings: list[str] = []
    instance: Any = holdings._slots[0].instance
    instance.warn_once = lambda key, message: warnings.append(key)
    instance.kv_events = KVEventEndpoints("tcp://s0")
    holdings.update_subscriptions(0, now=0.0)
    take(holdings, feed.delivery(0, 0))
    assert not warnings
    partly = EventBatch(1.0, batch(0, 1).events, num_skipped=1)
    take(holdings, KVEventDelivery(feed.names[0], [(1, partly)]))
    assert index.num_held(0, Tier.HOST) == 2
    assert warnings == ["kv_events_skipped"]


def test_prompts_that_are_not_published_are_estimated_beside_the_events() -> None:
    """The proxy knows neither a chat's template nor its tokens, which the events contain."""
    holdings, index, feed = fleet(1, stores=())
    chat = text_keys(b"You are helpful." * 32)
    instance: Any = holdings._slots[0].instance
    instance.kv_events = KVEventEndpoints("tcp://s0")
    holdings.update_subscriptions(0, now=0.0)

    def num_known() -> tuple[int, int]:
        return index.match(KEYS, 0.0).local[0], index.match(chat, 0.0).device[0]

    holdings.note_processed(0, KEYS[:1])
    holdings.note_processed(0, chat)
    assert num_known() == (1, 2)
    take(holdings, feed.delivery(0))
    assert num_known() == (0, 0), "it begins to publish"
    holdings.note_processed(0, KEYS)
    holdings.note_processed(0, chat)
    assert num_known() == (0, 2)
    take(holdings, feed.delivery(0, 0, 1, at=1))
    assert num_known() == (2, 2)
    assert [number for _, _, number in holdings.num_tokens()] == [0, 2 * CHUNK_TOKENS, 0]
    cleared = EventBatch(1.0, (AllCleared(),))
    take(holdings, KVEventDelivery(feed.names[0], [(2, cleared)]))
    assert num_known() == (0, 0)


def test_estimate_favours_no_rank() -> None:
    holdings, index, feed = fleet(1, stores=())
    instance: Any = holdings._slots[0].instance
    instance.kv_events = KVEventEndpoints(
        "tcp://s0", other_dp_ranks=(KVEventEndpoints("tcp://s1"),)
    )
    holdings.update_subscriptions(0, now=0.0)
    chat = text_keys(b"You are helpful." * 32)
    take(holdings, feed.delivery(1, 0))
    holdings.note_processed(0, chat)
    assert index.match(chat, 0.0).device[0] == 2
    assert holdings.cached_on_ranks(0, chat) == [0, 0]
