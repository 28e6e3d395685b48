"""Keeps the conductor's chunk index up to date: which chunks each instance and its stores hold.

Instances that publish KV events are tracked exactly; for the others the holdings are estimated from
the requests that the proxy has sent them. Prompts whose tokens the proxy does not know exactly,
such as chats, can't be found among published tokens: they are estimated for all instances. A store
is subscribed to once, however many instances use it. Owned by `ConductorFleet`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from typing import TYPE_CHECKING

from mooncake_conductor.index.chunk_index import ChunkIndex
from mooncake_conductor.index.event_stream import (
    ChunkHoldings,
    EventStream,
    PublisherRequest,
    ReplayRequest,
)
from mooncake_conductor.index.holder_sets import Tier
from mooncake_conductor.index.prompt_keys import CHUNK_TOKENS, Keys, are_published
from mooncake_conductor.index.published_blocks import BlockNames, PublishedBlocks
from mooncake_conductor.index.publisher_holdings import PublisherHoldings
from mooncake_conductor.simulator.engine_models import ChunkCache
from mooncake_proxy.pool.instance_reports import KVEventEndpoints
from mooncake_proxy.pool.instances import Instance

if TYPE_CHECKING:
    from mooncake_proxy.pool.kv_event_feed import KVEventDelivery, KVEventFeed

# After this many seconds a store is asked for another snapshot, once, if it still has orphans:
# chunks whose predecessors are unknown. There may have been more of them than are kept.
SNAPSHOT_RETRY_S = 30.0
# Bound of the epochs of a store that are remembered.
MAX_EPOCHS = 16
# For unique publisher names: all fleets of the process have one feed, and an instance that switches
# its role may join one fleet before it leaves another.
_publisher_numbers = count()


@dataclass(slots=True)
class _SlotHoldings:
    """Known or estimated holdings of the instance in one slot."""

    instance: Instance
    # Estimate of its device memory, and the shared holder of the index to which it is applied: the
    # chunks it has processed, within its capacity. Once it publishes, only those not published.
    estimated: ChunkCache
    estimate: int
    publishes: bool = False
    # Event endpoints of its data-parallel ranks, and their publisher names.
    ranks: tuple[KVEventEndpoints, ...] = ()
    rank_names: list[str] = field(default_factory=list)
    # Holdings of each rank, if there are several.
    by_rank: PublisherHoldings | None = None
    # The stores that it uses.
    stores: set[KVEventEndpoints] = field(default_factory=set)


@dataclass(slots=True)
class _StoreSubscription:
    """The subscription to one store's events."""

    # Publisher name.
    name: str
    # Its shared holder in the index.
    holder: int
    users: set[int]
    # Loop time at which the store is asked for another snapshot; None: not any more.
    retry_snapshot_at: float | None
    # Its latest epochs as instances report them; some report a restart later than others.
    epochs: deque[str] = field(default_factory=lambda: deque(maxlen=MAX_EPOCHS))


class FleetHoldings:
    """Fills the conductor's index.

    Args:
        index: the index of one conductor.
        feed: opens the KV event feed; called for the first instance that publishes.
        num_chunks: assumed capacity of instances without events.
    """

    def __init__(self, index: ChunkIndex, feed: Callable[[], KVEventFeed], num_chunks: int) -> None:
        self._index = index
        self._feed = feed
        self._num_chunks = num_chunks
        self._slots: dict[int, _SlotHoldings] = {}
        # All subscriptions, by publisher name; the slots of instances, by those of their ranks.
        self._streams: dict[str, EventStream] = {}
        self._rank_slots: dict[str, int] = {}
        self._stores: dict[KVEventEndpoints, _StoreSubscription] = {}
        # Shared by all stores: those of one model use the same chunk keys.
        self._store_blocks = BlockNames()
        # Names of all adapters for which a publisher holds KV.
        self.adapters: set[str] = set()

    def join(self, slot: int, instance: Instance) -> None:
        """Add an instance that has got a slot."""
        estimate = self._index.add_shared()
        self._index.join_shared(estimate, slot)
        self._slots[slot] = _SlotHoldings(instance, ChunkCache(self._num_chunks), estimate)

    @property
    def has_publishers(self) -> bool:
        """Whether any instance or store publishes events."""
        return bool(self._streams)

    def leave(self, slot: int) -> None:
        """Remove the instance that has lost its slot."""
        held = self._slots.pop(slot)
        self._unsubscribe(held.rank_names)
        for endpoints in held.stores:
            self._leave_store(slot, endpoints)
        self._index.remove_shared(held.estimate)

    def discard_estimate(self, slot: int) -> None:
        """Discard the estimate of an instance that is down or has cleared its caches."""
        held = self._slots[slot]
        if len(held.estimated):
            held.estimated = ChunkCache(self._num_chunks)
            self._index.cleared(held.estimate)

    def update_subscriptions(self, slot: int, now: float) -> None:
        """Subscribe to the events of an instance and its stores, if these endpoints changed, and
        afresh to those of a store that was restarted."""
        held = self._slots[slot]
        own, stores = held.instance.kv_events, held.instance.store_kv_events
        ranks = () if own is None else (own, *own.other_dp_ranks)
        for endpoints in held.stores - {*stores}:
            self._leave_store(slot, endpoints)
            held.stores.discard(endpoints)
        if ranks != held.ranks:
            self._subscribe_to_ranks(slot, ranks)
        for endpoints in stores:
            if endpoints not in held.stores:
                self._join_store(slot, endpoints, now)
                held.stores.add(endpoints)
        for use in held.instance.stores:
            if use.store is not None and use.kv_events in held.stores:
                self._note_epoch(use.kv_events, use.store.epoch, now)

    def subscribe_afresh(self, slot: int) -> None:
        """Forget what an instance has published, and ask it: it was restarted. Its events alone may
        not tell: there are none until its cache changes, and its clock may have been set back."""
        self._subscribe_to_ranks(slot, self._slots[slot].ranks)

    def _subscribe_to_ranks(self, slot: int, ranks: tuple[KVEventEndpoints, ...]) -> None:
        """Subscribe to an instance's ranks afresh."""
        held = self._slots[slot]
        self._unsubscribe(held.rank_names)
        self._index.cleared(slot)
        self._index.set_healthy(slot, True)
        self.discard_estimate(slot)
        held.ranks, held.publishes, held.by_rank = ranks, False, None
        publishers: Sequence[ChunkHoldings] = (self._index,)
        if len(ranks) > 1:
            held.by_rank = PublisherHoldings(self._index, len(ranks))
            publishers = held.by_rank.ranks
        for number, endpoints in enumerate(ranks):
            rank = f"{held.instance.name}#{number}" if number else held.instance.name
            name = f"{rank} (subscription {next(_publisher_numbers)})"
            self._subscribe(
                slot,
                name,
                endpoints,
                publishers[number],
                self._new_blocks(),
                on_clear=partial(self.discard_estimate, slot),
            )
            held.rank_names.append(name)
            self._rank_slots[name] = slot

    def apply(self, delivery: KVEventDelivery) -> Iterator[None]:
        """Apply a delivery of events.

        Yields between portions, so that the event loop can run other work, but no other delivery.
        """
        stream = self._streams.get(delivery.name)
        if stream is None:
            return  # the publisher has left in the meantime
        if delivery.batches or any(each.batches for each in delivery.snapshots):
            self._discard_estimate_of(delivery.name)
        self._warn_of_skipped(delivery)
        for sequence, batch in delivery.batches:
            self._send_request(delivery.name, stream.receive(sequence, batch, delivery.is_replayed))
        for _ in range(delivery.num_replays_ended):
            self._send_request(delivery.name, stream.replay_ended())
        for snapshot in delivery.snapshots:
            request = yield from stream.apply_snapshot(snapshot.next_sequence, snapshot.batches)
            if stream.has_ended:
                return  # the publisher left while its snapshot was applied
            self._send_request(delivery.name, request)
        yield from self._store_blocks.run_callbacks()

    def note_processed(self, slot: int, keys: Sequence[int]) -> None:
        """Add the chunks of a processed prompt to an instance's estimate, unless it publishes."""
        held = self._slots.get(slot)
        if held is None or (held.publishes and are_published(keys)):
            return
        new, evicted = held.estimated.insert(keys)
        self._index.stored(held.estimate, Tier.DEVICE, new)
        self._index.removed(held.estimate, Tier.DEVICE, evicted)

    def cached_on_ranks(self, slot: int, keys: Keys) -> list[int]:
        """Leading prompt tokens cached on each data-parallel rank; empty if ranks don't publish."""
        held = self._slots[slot]
        if held.by_rank is None:
            return []
        return [count * CHUNK_TOKENS for count in held.by_rank.leading_chunks(keys)]

    def num_tokens(self) -> Iterator[tuple[Instance, str, int]]:
        """Yield how many tokens each instance holds, per tier (device, host, disk).

        If it publishes, an estimate would count tokens a second time.
        """
        for slot, held in self._slots.items():
            for tier in Tier:
                num_chunks = self._index.num_held(slot, tier)
                if held.publishes:
                    num_chunks -= self._index.num_held(held.estimate, tier)
                yield held.instance, tier.name.lower(), num_chunks * CHUNK_TOKENS

    def is_in_store(self, endpoints: KVEventEndpoints, key: int) -> bool:
        """Whether the store with these events holds a chunk, as far as known."""
        store = self._stores.get(endpoints)
        return store is not None and self._index.holds(store.holder, key)

    def sweep(self, now: float) -> None:
        """Ask stores that still have orphans for another snapshot, once."""
        for store in self._stores.values():
            if store.retry_snapshot_at is not None and store.retry_snapshot_at <= now:
                store.retry_snapshot_at = None
                stream = self._streams[store.name]
                if stream.num_orphans:
                    self._send_request(store.name, stream.request_snapshot())

    def _discard_estimate_of(self, name: str) -> None:
        """Discard the estimate of an instance whose rank begins to publish."""
        slot = self._rank_slots.get(name)
        if slot is not None and not (held := self._slots[slot]).publishes:
            held.publishes = True
            self.discard_estimate(slot)

    def _warn_of_skipped(self, delivery: KVEventDelivery) -> None:
        """Warn once of an instance whose blocks can't all be used: they count as not held."""
        slot = self._rank_slots.get(delivery.name)
        if slot is not None and any(batch.num_skipped for _, batch in delivery.batches):
            self._slots[slot].instance.warn_once(
                "kv_events_skipped",
                "publishes some KV events without tokens or in a form that is not known; the "
                "conductor does not know that the instance holds these blocks",
            )

    def _join_store(self, slot: int, endpoints: KVEventEndpoints, now: float) -> None:
        """Add an instance to the users of a store, which is subscribed to for the first one."""
        store = self._stores.get(endpoints)
        if store is None:
            store = _StoreSubscription("", self._index.add_shared(), set(), None)
            self._stores[endpoints] = store
            self._subscribe_to_store(store, endpoints, now)
        store.users.add(slot)
        self._index.join_shared(store.holder, slot)

    def _subscribe_to_store(
        self, store: _StoreSubscription, endpoints: KVEventEndpoints, now: float
    ) -> None:
        store.name = f"store {next(_publisher_numbers)} at {endpoints.endpoint}"
        store.retry_snapshot_at = now + SNAPSHOT_RETRY_S
        blocks = self._new_blocks(self._store_blocks)
        self._subscribe(store.holder, store.name, endpoints, self._index, blocks)

    def _note_epoch(self, endpoints: KVEventEndpoints, epoch: str, now: float) -> None:
        """Forget what a store has published, and ask it, if it was restarted."""
        store = self._stores[endpoints]
        if epoch in store.epochs:
            return
        store.epochs.append(epoch)
        if len(store.epochs) > 1:
            self._unsubscribe([store.name])
            self._index.cleared(store.holder)
            self._index.set_healthy(store.holder, True)
            self._subscribe_to_store(store, endpoints, now)

    def _leave_store(self, slot: int, endpoints: KVEventEndpoints) -> None:
        """Remove an instance from the users of a store, whose last one ends the subscription."""
        store = self._stores[endpoints]
        store.users.discard(slot)
        self._index.leave_shared(store.holder, slot)
        if not store.users:
            del self._stores[endpoints]
            self._unsubscribe([store.name])
            self._index.remove_shared(store.holder)

    def _new_blocks(self, names: BlockNames | None = None) -> PublishedBlocks:
        return PublishedBlocks(names, self.adapters)

    def _subscribe(
        self,
        slot: int,
        name: str,
        endpoints: KVEventEndpoints,
        holdings: ChunkHoldings,
        blocks: PublishedBlocks,
        on_clear: Callable[[], None] = lambda: None,
    ) -> None:
        self._streams[name] = EventStream(
            holdings,
            slot,
            blocks,
            supports_snapshots=endpoints.replay_endpoint is not None,
            namespace=endpoints.namespace or "",
            on_clear=on_clear,
        )
        self._feed().subscribe(name, endpoints)

    def _unsubscribe(self, names: list[str]) -> None:
        """End subscriptions, and empty the list of their names."""
        for name in names:
            self._feed().unsubscribe(name)
            self._streams.pop(name).end()
            self._rank_slots.pop(name, None)
        names.clear()

    def _send_request(self, name: str, request: PublisherRequest | None) -> None:
        if isinstance(request, ReplayRequest):
            self._feed().replay(name, request.start)
        elif request is not None:
            self._feed().snapshot(name)
