"""What a conductor's instances hold: what they publish, else what they are believed to hold."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from mooncake_conductor.index.chunk_index import ChunkIndex
from mooncake_conductor.index.event_stream import (
    ChunkHoldings,
    EventStream,
    Question,
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

# After this a store is asked again, once, if it has chunks that follow on what is still not known:
# there may have been more than are kept until it is.
ASK_AGAIN_S = 30.0


@dataclass(slots=True)
class _SlotHoldings:
    """What is known of the instance in one slot."""

    instance: Instance
    # Of its devices, until it publishes: what it has worked on, and no more than fits.
    believed: ChunkCache | None
    # Where that is said.
    on_devices: ChunkHoldings
    # Where it and its store publish.
    ranks: tuple[KVEventEndpoints, ...] = ()
    store: KVEventEndpoints | None = None
    # By the name of the publisher.
    streams: dict[str, EventStream] = field(default_factory=dict)
    # What each publisher holds, if there are several.
    by_publisher: PublisherHoldings | None = None
    # When its store is asked again; None: it was.
    ask_again_at: float | None = None

    @property
    def store_name(self) -> str:
        """Of the store, as a publisher."""
        return f"{self.instance.name}#store"


class FleetHoldings:
    """Fills the conductor's index. `feed` begins with the first instance that publishes; instances
    without events are believed to hold up to `num_chunks`."""

    def __init__(self, index: ChunkIndex, feed: Callable[[], KVEventFeed], num_chunks: int) -> None:
        self._index = index
        self._feed = feed
        self._num_chunks = num_chunks
        self._slots: dict[int, _SlotHoldings] = {}
        # Whose events are followed, by the name of the publisher.
        self._publishers: dict[str, int] = {}
        # Stores of one model call their chunks alike.
        self._store_blocks = BlockNames()
        # Names of adapters that anything is published of.
        self.adapters: set[str] = set()

    def join(self, slot: int, instance: Instance) -> None:
        """An instance has got a slot."""
        self._slots[slot] = _SlotHoldings(instance, ChunkCache(self._num_chunks), self._index)

    def leave(self, slot: int) -> None:
        """It has lost it."""
        self._unfollow(self._slots.pop(slot))

    def doubt(self, slot: int) -> None:
        """It is down, and may come back with empty caches. What publishes says so itself."""
        held = self._slots[slot]
        if held.believed is not None:
            held.believed = ChunkCache(self._num_chunks)
            held.on_devices.cleared(slot)

    def follow(self, slot: int, now: float) -> None:
        """Begin with what an instance and its store publish, wherever they do that now."""
        held = self._slots[slot]
        own, store = held.instance.kv_events, held.instance.store_kv_events
        ranks = () if own is None else (own, *own.other_dp_ranks)
        if (ranks, store) == (held.ranks, held.store):
            return
        self._unfollow(held)
        self._index.cleared(slot)
        held.ranks, held.store = ranks, store
        held.believed = ChunkCache(self._num_chunks)
        held.by_publisher = None
        publishers: Sequence[ChunkHoldings] = (self._index,)
        num_ranks = max(1, len(ranks))
        if num_ranks > 1 or store is not None:
            held.by_publisher = PublisherHoldings(self._index, num_ranks, int(store is not None))
            publishers = held.by_publisher.publishers
        held.on_devices = publishers[0]
        for number, endpoints in enumerate(ranks):
            name = f"{held.instance.name}#{number}" if number else held.instance.name
            self._begin(slot, name, endpoints, publishers[number], self._new_blocks())
        if store is not None:
            blocks = self._new_blocks(self._store_blocks)
            self._begin(slot, held.store_name, store, publishers[-1], blocks)
            held.ask_again_at = now + ASK_AGAIN_S

    def take(self, delivery: KVEventDelivery) -> Iterator[None]:
        """Apply what a publisher has said, in portions: others have their turn between two of them,
        but no other delivery."""
        slot = self._publishers.get(delivery.name)
        if slot is None:
            return  # it has left meanwhile
        held = self._slots[slot]
        stream = held.streams[delivery.name]
        says_something = delivery.batches or any(each.batches for each in delivery.snapshots)
        if says_something and held.believed is not None and delivery.name != held.store_name:
            held.believed = None  # known from now on
            held.on_devices.cleared(slot)
        for sequence, batch in delivery.batches:
            self._ask(delivery.name, stream.receive(sequence, batch, delivery.is_replayed))
        for _ in range(delivery.num_replays_ended):
            self._ask(delivery.name, stream.replay_ended())
        for snapshot in delivery.snapshots:
            question = yield from stream.take_snapshot(snapshot.next_sequence, snapshot.batches)
            if stream.has_ended:
                return  # left while it was taken
            self._ask(delivery.name, question)
        yield from self._store_blocks.tell()

    def remember(self, slot: int, keys: Sequence[int]) -> None:
        """Without events: it holds now what it has just worked on."""
        held = self._slots.get(slot)
        if held is None or held.believed is None:
            return
        new, evicted = held.believed.insert(keys)
        held.on_devices.stored(slot, Tier.DEVICE, new)
        held.on_devices.removed(slot, Tier.DEVICE, evicted)

    def cached_on_ranks(self, slot: int, keys: Keys) -> list[int]:
        """By data-parallel rank, how many of a prompt's first tokens it has, as far as ranks
        publish it; empty if they don't."""
        held = self._slots[slot]
        if held.by_publisher is None or len(held.ranks) < 2:
            return []
        return [count * CHUNK_TOKENS for count in held.by_publisher.leading_chunks(keys)]

    def num_tokens(self) -> Iterator[tuple[Instance, str, int]]:
        """By instance and tier (device, host, disk), how many tokens it is known to hold there."""
        for slot, held in self._slots.items():
            for tier in Tier:
                num_chunks, _ = self._index.digest(slot, tier)
                yield held.instance, tier.name.lower(), num_chunks * CHUNK_TOKENS

    def sweep(self, now: float) -> None:
        """Ask stores again whose chunks could not all be placed."""
        for held in self._slots.values():
            if held.ask_again_at is not None and held.ask_again_at <= now:
                held.ask_again_at = None
                stream = held.streams[held.store_name]
                if stream.num_orphans:
                    self._ask(held.store_name, stream.ask_snapshot())

    def _new_blocks(self, names: BlockNames | None = None) -> PublishedBlocks:
        return PublishedBlocks(names, self.adapters)

    def _begin(
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
            asks_snapshots=endpoints.replay_endpoint is not None,
            namespace=endpoints.namespace or "",
        )
        self._publishers[name] = slot
        self._feed().follow(name, endpoints)

    def _unfollow(self, held: _SlotHoldings) -> None:
        for name, stream in held.streams.items():
            self._feed().leave(name)
            stream.end()
            del self._publishers[name]
        held.streams.clear()
        held.ask_again_at = None

    def _ask(self, name: str, question: Question | None) -> None:
        if isinstance(question, ReplayRequest):
            self._feed().replay(name, question.start)
        elif question is not None:
            self._feed().snapshot(name)
