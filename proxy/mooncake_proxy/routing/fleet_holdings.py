"""Keeps the conductor's chunk index up to date: which chunks each instance and its store hold.

Instances that publish KV events are tracked exactly; for the others the holdings are estimated from
the requests that the proxy has sent them. Owned by `ConductorFleet`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from mooncake_conductor.index.chunk_index import ChunkIndex
from mooncake_conductor.index.event_stream import (
    ChunkHoldings,
    EventStream,
    PublisherRequest,
    ReplayRequest,
)
from mooncake_conductor.index.holder_sets import Tier
from mooncake_conductor.index.prompt_keys import CHUNK_TOKENS, Keys
from mooncake_conductor.index.published_blocks import BlockNames, PublishedBlocks
from mooncake_conductor.index.publisher_holdings import PublisherHoldings
from mooncake_conductor.simulator.engine_models import ChunkCache
from mooncake_proxy.pool.instances import Instance, KVEventEndpoints

if TYPE_CHECKING:
    from mooncake_proxy.pool.kv_event_feed import KVEventDelivery, KVEventFeed

# After this many seconds a store is asked for another snapshot, once, if it still has orphans:
# chunks whose predecessors are unknown. There may have been more of them than are kept.
SNAPSHOT_RETRY_S = 30.0


@dataclass(slots=True)
class _SlotHoldings:
    """Known or estimated holdings of the instance in one slot."""

    instance: Instance
    # Estimate of its device memory until it publishes: the chunks it has processed, within its
    # capacity. None once it publishes.
    estimated: ChunkCache | None
    # Where the estimate is applied.
    on_devices: ChunkHoldings
    # Event endpoints of its data-parallel ranks and of its store.
    ranks: tuple[KVEventEndpoints, ...] = ()
    store: KVEventEndpoints | None = None
    # By publisher name.
    streams: dict[str, EventStream] = field(default_factory=dict)
    # Holdings of each publisher, if there are several.
    by_publisher: PublisherHoldings | None = None
    # Loop time at which its store is asked for another snapshot; None: not any more.
    retry_snapshot_at: float | None = None

    @property
    def store_name(self) -> str:
        """Publisher name of the store."""
        return f"{self.instance.name}#store"


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
        # Slots whose events are received, by publisher name.
        self._publishers: dict[str, int] = {}
        # Shared by all stores: those of one model use the same chunk keys.
        self._store_blocks = BlockNames()
        # Names of all adapters for which a publisher holds KV.
        self.adapters: set[str] = set()

    def join(self, slot: int, instance: Instance) -> None:
        """Add an instance that has got a slot."""
        self._slots[slot] = _SlotHoldings(instance, ChunkCache(self._num_chunks), self._index)

    def leave(self, slot: int) -> None:
        """Remove the instance that has lost its slot."""
        self._unsubscribe(self._slots.pop(slot))

    def discard_estimate(self, slot: int) -> None:
        """Discard the estimate of an instance that is down: it may restart with empty caches.

        Publishers report that themselves.
        """
        held = self._slots[slot]
        if held.estimated is not None:
            held.estimated = ChunkCache(self._num_chunks)
            held.on_devices.cleared(slot)

    def update_subscriptions(self, slot: int, now: float) -> None:
        """Subscribe to the events of an instance and its store, if their endpoints have changed."""
        held = self._slots[slot]
        own, store = held.instance.kv_events, held.instance.store_kv_events
        ranks = () if own is None else (own, *own.other_dp_ranks)
        if (ranks, store) == (held.ranks, held.store):
            return
        self._unsubscribe(held)
        self._index.cleared(slot)
        held.ranks, held.store = ranks, store
        held.estimated = ChunkCache(self._num_chunks)
        held.by_publisher = None
        publishers: Sequence[ChunkHoldings] = (self._index,)
        num_ranks = max(1, len(ranks))
        if num_ranks > 1 or store is not None:
            held.by_publisher = PublisherHoldings(self._index, num_ranks, int(store is not None))
            publishers = held.by_publisher.publishers
        held.on_devices = publishers[0]
        for number, endpoints in enumerate(ranks):
            name = f"{held.instance.name}#{number}" if number else held.instance.name
            self._subscribe(slot, name, endpoints, publishers[number], self._new_blocks())
        if store is not None:
            blocks = self._new_blocks(self._store_blocks)
            self._subscribe(slot, held.store_name, store, publishers[-1], blocks)
            held.retry_snapshot_at = now + SNAPSHOT_RETRY_S

    def apply(self, delivery: KVEventDelivery) -> Iterator[None]:
        """Apply a delivery of events.

        Yields between portions, so that the event loop can run other work, but no other delivery.
        """
        slot = self._publishers.get(delivery.name)
        if slot is None:
            return  # the publisher has left in the meantime
        held = self._slots[slot]
        stream = held.streams[delivery.name]
        has_batches = delivery.batches or any(each.batches for each in delivery.snapshots)
        if has_batches and held.estimated is not None and delivery.name != held.store_name:
            held.estimated = None  # holdings are known from now on
            held.on_devices.cleared(slot)
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
        """Add the chunks of a processed prompt to the estimate of an instance without events."""
        held = self._slots.get(slot)
        if held is None or held.estimated is None:
            return
        new, evicted = held.estimated.insert(keys)
        held.on_devices.stored(slot, Tier.DEVICE, new)
        held.on_devices.removed(slot, Tier.DEVICE, evicted)

    def cached_on_ranks(self, slot: int, keys: Keys) -> list[int]:
        """Leading prompt tokens cached on each data-parallel rank; empty if ranks don't publish."""
        held = self._slots[slot]
        if held.by_publisher is None or len(held.ranks) < 2:
            return []
        return [count * CHUNK_TOKENS for count in held.by_publisher.leading_chunks(keys)]

    def num_tokens(self) -> Iterator[tuple[Instance, str, int]]:
        """Yield how many tokens each instance holds, per tier (device, host, disk)."""
        for slot, held in self._slots.items():
            for tier in Tier:
                num_chunks, _ = self._index.digest(slot, tier)
                yield held.instance, tier.name.lower(), num_chunks * CHUNK_TOKENS

    def sweep(self, now: float) -> None:
        """Ask stores that still have orphans for another snapshot, once."""
        for held in self._slots.values():
            if held.retry_snapshot_at is not None and held.retry_snapshot_at <= now:
                held.retry_snapshot_at = None
                stream = held.streams[held.store_name]
                if stream.num_orphans:
                    self._send_request(held.store_name, stream.request_snapshot())

    def _new_blocks(self, names: BlockNames | None = None) -> PublishedBlocks:
        return PublishedBlocks(names, self.adapters)

    def _subscribe(
        self,
        slot: int,
        name: str,
        endpoints: KVEventEndpoints,
        holdings: ChunkHoldings,
        blocks: PublishedBlocks,
    ) -> None:
        self._slots[slot].streams[name] = EventStream(
            holdings,
            slot,
            blocks,
            supports_snapshots=endpoints.replay_endpoint is not None,
            namespace=endpoints.namespace or "",
        )
        self._publishers[name] = slot
        self._feed().subscribe(name, endpoints)

    def _unsubscribe(self, held: _SlotHoldings) -> None:
        for name, stream in held.streams.items():
            self._feed().unsubscribe(name)
            stream.end()
            del self._publishers[name]
        held.streams.clear()
        held.retry_snapshot_at = None

    def _send_request(self, name: str, request: PublisherRequest | None) -> None:
        if isinstance(request, ReplayRequest):
            self._feed().replay(name, request.start)
        elif request is not None:
            self._feed().snapshot(name)
