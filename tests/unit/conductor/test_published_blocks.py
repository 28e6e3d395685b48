"""Published blocks of any block size, tier, tenant and adapter become chunk keys."""

from __future__ import annotations

from hashlib import blake2b

import msgspec
import pytest
from hypothesis import given, settings, strategies as st

from mooncake_conductor.index import published_blocks
from mooncake_conductor.index.chunk_index import ChunkIndex
from mooncake_conductor.index.event_stream import EventStream
from mooncake_conductor.index.holder_sets import Tier
from mooncake_conductor.index.kv_event_messages import (
    BlocksRemoved,
    BlocksStored,
    EventBatch,
    decode_batch,
)
from mooncake_conductor.index.prompt_keys import CHUNK_TOKENS, chain_root, token_keys
from mooncake_conductor.index.published_blocks import (
    MAX_ADAPTERS,
    BlockNames,
    PublishedBlocks,
)


class Cache:
    """An instance with its own block hashes, which evicts chain tails first."""

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self.held: dict[int, tuple[int, ...]] = {}
        self.parents: dict[int, int | None] = {}

    def store(self, ids: list[int]) -> BlocksStored | None:
        """Store a prompt; return the event of its new blocks, if there are any."""
        new, tokens, parent, first_parent = [], [], None, None
        for end in range(self.block_size, len(ids) + 1, self.block_size):
            prefix = tuple(ids[:end])
            name = int.from_bytes(blake2b(repr(prefix).encode(), digest_size=8).digest(), "big")
            if name not in self.held:
                if not new:
                    first_parent = parent
                new.append(name)
                tokens += ids[end - self.block_size : end]
                self.held[name], self.parents[name] = prefix, parent
            parent = name
        if not new:
            return None
        stored = BlocksStored(tuple(new), first_parent, self.block_size, Tier.DEVICE, tuple(tokens))
        return stored

    def evict(self) -> BlocksRemoved | None:
        """Evict a block that is no other block's parent; return the event."""
        leaf = next((name for name in self.held if name not in self.parents.values()), None)
        if leaf is None:
            return None
        del self.held[leaf], self.parents[leaf]
        return BlocksRemoved((leaf,), Tier.DEVICE)

    def keys(self) -> set[int]:
        """Return the chunk keys that the index should have."""
        return {key for prefix in self.held.values() for key in token_keys(prefix)}


PROMPTS = st.lists(st.one_of(st.integers(0, 3), st.none()), min_size=1, max_size=30)


@given(PROMPTS, st.sampled_from([16, 32, 48, 64, 128]), st.integers(0, 5))
@settings(deadline=None, max_examples=150)
def test_index_has_exactly_the_complete_chunks(steps, block_size, seed) -> None:
    cache, index = Cache(block_size), ChunkIndex(1)
    stream = EventStream(index, 0, PublishedBlocks())
    known: set[int] = set()
    for number, step in enumerate(steps):
        # Prompts begin with one of two shared prefixes of 96 tokens, followed by their own tokens.
        ids = None if step is None else [step % 2] * 96 + [step + seed] * (100 * (number % 4))
        event = cache.evict() if ids is None else cache.store(ids)
        events = () if event is None else (event,)
        stream.receive(number, EventBatch(float(number), events))
        known |= cache.keys()
        found = {key for key in known if index.num_copies(key)}
        assert found == cache.keys()


def test_chunk_is_held_until_both_blocks_with_it_are_removed() -> None:
    beginning, blocks = list(range(CHUNK_TOKENS)), PublishedBlocks()
    [key] = token_keys(beginning)
    size = 2 * CHUNK_TOKENS
    for name in (1, 2):
        tokens = (*beginning, *([name] * CHUNK_TOKENS))
        assert key in blocks.stored(BlocksStored((name,), None, size, Tier.DEVICE, tokens))
    assert key not in blocks.removed((1,), Tier.DEVICE)
    assert key in blocks.removed((2,), Tier.DEVICE)
    assert len(blocks) == 0


class CountedHash(int):
    """A block hash that counts how often one is looked at."""

    num_looks = 0

    def __hash__(self) -> int:
        CountedHash.num_looks += 1
        return super().__hash__()

    def __eq__(self, other: object) -> bool:
        CountedHash.num_looks += 1
        return super().__eq__(other)


@pytest.mark.parametrize("tiers", [(Tier.DEVICE,), (Tier.DEVICE, Tier.DISK)])
@pytest.mark.parametrize("num_shared", [0, 1])
def test_removing_a_block_does_not_look_at_all_that_begin_like_it(
    num_shared: int, tiers: tuple[Tier, ...]
) -> None:
    """With blocks longer than chunks, most prompts of a deployment may share their first chunk."""
    blocks, size, num_prompts = PublishedBlocks(), 4 * CHUNK_TOKENS + 16, 200
    common = tuple(range(size * num_shared + CHUNK_TOKENS))
    shared = tuple(CountedHash(1000 + index) for index in range(num_shared))
    hashes = [CountedHash(index) for index in range(num_prompts)]
    for hash_ in hashes:
        tokens = (*common, *[1000 + hash_] * (size - CHUNK_TOKENS))
        for tier in tiers:
            blocks.stored(BlocksStored((*shared, hash_), None, size, tier, tokens))
    CountedHash.num_looks = 0
    first = token_keys(common)[-1]
    gone = [first in blocks.removed((hash_,), Tier.DEVICE) for hash_ in hashes]
    assert gone == [False] * (num_prompts - 1) + [True]
    assert CountedHash.num_looks < 50 * num_prompts


@given(
    st.sampled_from([16, 48, 64, 96, 256]),
    st.lists(st.tuples(st.booleans(), st.integers(0, 5), st.sampled_from(list(Tier))), max_size=40),
)
@settings(deadline=None, max_examples=150)
def test_tiers_hold_exactly_the_chunks_of_which_they_hold_all_blocks(
    size: int, steps: list[tuple[bool, int, Tier]]
) -> None:
    """Blocks are removed in any order, also those whose children are held."""
    blocks, held = PublishedBlocks(), {tier: set() for tier in Tier}
    for is_store, number, tier in steps:
        cache = Cache(size)
        event = cache.store([0] * 80 + [number // 2] * 80 + [number] * 256)
        assert event is not None
        if is_store:
            again = BlocksStored(event.keys, None, size, tier, event.token_ids)
            held[tier] |= set(blocks.stored(again))
        else:
            held[tier] -= set(blocks.removed((event.keys[number % len(event.keys)],), tier))
        for each in Tier:
            assert held[each] == {
                key
                for block in blocks._blocks.values()
                for key in block.chunks
                if any(
                    all(blocks._blocks[part].tiers & (1 << each) for part in parts)
                    for parts in blocks._chunks[key].parts.values()
                )
            }


def test_chain_continues_from_a_block_of_another_publisher() -> None:
    ids, names = list(range(2 * CHUNK_TOKENS)), BlockNames(capacity=2)
    keys = token_keys(ids)
    first, second = PublishedBlocks(names), PublishedBlocks(names)
    head = BlocksStored((1,), None, CHUNK_TOKENS, Tier.HOST, tuple(ids[:CHUNK_TOKENS]))
    tail = BlocksStored((2,), 1, CHUNK_TOKENS, Tier.HOST, tuple(ids[CHUNK_TOKENS:]))
    assert second.stored(tail) == ()
    assert second.num_orphans == 1
    assert first.stored(head) == keys[:1]
    assert second.stored(tail) == keys[1:]
    second.clear()
    assert second.num_orphans == 0
    for name in (3, 4):
        first.stored(BlocksStored((name,), None, CHUNK_TOKENS, Tier.HOST, (name,) * CHUNK_TOKENS))
    assert second.stored(tail) == (), "names of other publishers' blocks are bounded"


def _chunk_event(number: int, tier: Tier = Tier.HOST) -> BlocksStored:
    """Return the event of chunk ``number`` of one prompt, as a block whose hash is that number."""
    ids = range(number * CHUNK_TOKENS, (number + 1) * CHUNK_TOKENS)
    return BlocksStored((number,), number - 1 if number else None, CHUNK_TOKENS, tier, tuple(ids))


PROMPT_KEYS = token_keys(list(range(6 * CHUNK_TOKENS)))


class Stores:
    """Stores with common block hashes, and the index that receives their events."""

    def __init__(self, count: int) -> None:
        self.names, self.index = BlockNames(), ChunkIndex(count)
        self.blocks = [PublishedBlocks(self.names) for _ in range(count)]
        self.streams = [EventStream(self.index, n, b) for n, b in enumerate(self.blocks)]

    def publish(self, store: int, *events: BlocksStored | BlocksRemoved) -> None:
        stream = self.streams[store]
        stream.receive(stream.expected, EventBatch(float(stream.expected), events))
        for _ in self.names.run_callbacks():
            pass

    def held(self, store: int, tier: Tier = Tier.HOST) -> int:
        return self.index.num_held(store, tier)


def test_orphan_blocks_are_indexed_once_their_parent_is_known() -> None:
    stores = Stores(2)
    stores.publish(0, _chunk_event(1), _chunk_event(3), _chunk_event(1, Tier.DISK), _chunk_event(5))
    assert (stores.held(0), stores.blocks[0].num_orphans) == (0, 3)
    stores.publish(1, _chunk_event(2))  # an orphan, too
    stores.publish(1, _chunk_event(0))  # resolves 0, store 0's 1, its own 2, store 0's 3
    assert (stores.held(0), stores.held(0, Tier.DISK), stores.held(1)) == (2, 1, 2)
    assert [stores.index.num_copies(key) for key in PROMPT_KEYS] == [1, 1, 1, 1, 0, 0]
    assert [each.num_orphans for each in stores.blocks] == [1, 0]
    stores.publish(0, _chunk_event(4))
    assert (stores.held(0), stores.blocks[0].num_orphans) == (4, 0)


def test_orphan_removed_before_its_parent_is_known_is_not_indexed() -> None:
    stores = Stores(3)
    stores.publish(0, _chunk_event(1), _chunk_event(1, Tier.DISK), BlocksRemoved((1,), Tier.HOST))
    stores.publish(1, _chunk_event(1), BlocksRemoved((1,), Tier.HOST))
    stores.publish(2, _chunk_event(1))
    stores.streams[2].end()
    assert [each.num_orphans for each in stores.blocks] == [1, 0, 0]
    stores.publish(1, _chunk_event(0))
    assert [stores.held(store) for store in range(3)] == [0, 1, 0]
    assert [stores.held(store, Tier.DISK) for store in range(3)] == [1, 0, 0]


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 5)), unique=True), st.integers(1, 2))
@settings(deadline=None, max_examples=100)
def test_index_does_not_depend_on_the_order_of_stores(store_events, times) -> None:
    stores = Stores(3)
    for store, number in store_events:
        stores.publish(store, *[_chunk_event(number)] * times)
    known = {number for _, number in store_events}
    num_leading = next(number for number in range(7) if number not in known)
    expected = [sum(at == key for _, at in store_events) for key in range(num_leading)]
    assert [stores.index.num_copies(key) for key in PROMPT_KEYS[:num_leading]] == expected
    assert not any(stores.index.num_copies(key) for key in PROMPT_KEYS[num_leading:])


def test_orphan_blocks_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(published_blocks, "MAX_ORPHAN_TOKENS", CHUNK_TOKENS)
    stores = Stores(2)
    stores.publish(0, _chunk_event(1), _chunk_event(3))
    assert stores.blocks[0].num_orphans == 2, "the one beyond the bound is counted, but not kept"
    stores.publish(1, _chunk_event(0), _chunk_event(2))
    assert (stores.held(0), stores.blocks[0].num_orphans) == (1, 1)


def test_block_copied_to_host_memory_needs_no_tokens() -> None:
    ids, blocks = list(range(CHUNK_TOKENS)), PublishedBlocks()
    [key] = token_keys(ids)
    names = (1, 2, 3, 4)
    assert blocks.stored(BlocksStored(names, None, 16, Tier.DEVICE, tuple(ids))) == (key,)
    assert blocks.stored(BlocksStored(names[:3], None, 16, Tier.HOST)) == ()
    assert blocks.stored(BlocksStored(names[3:], None, 16, Tier.HOST)) == (key,)
    assert blocks.removed(names[1:2], Tier.DEVICE) == (key,)
    assert blocks.removed(names[2:], Tier.DEVICE) == (key, key)
    assert blocks.removed(names, Tier.HOST)
    blocks.removed(names, Tier.DEVICE)
    assert len(blocks) == 0


@pytest.mark.parametrize(
    "event",
    [
        BlocksStored((1, 2), None, 10, Tier.DEVICE, tuple(range(20))),
        BlocksStored((1, 2), 99, 16, Tier.DEVICE, tuple(range(32))),
        BlocksStored((1, 2), None, 16, Tier.DEVICE, tuple(range(31))),
        BlocksStored((1, 2), None, 16, Tier.HOST),
    ],
    ids=["odd size", "unknown parent", "too few tokens", "no tokens"],
)
def test_unusable_blocks_are_counted_and_not_indexed(event: BlocksStored) -> None:
    blocks = PublishedBlocks()
    assert blocks.stored(event) == ()
    assert (blocks.num_unknown, len(blocks)) == (2, 0)


def published(**fields) -> bytes:
    event = {
        "type": "BlockStored",
        "block_hashes": [1, 2, 3, 4],
        "parent_block_hash": None,
        "token_ids": list(range(CHUNK_TOKENS)),
        "block_size": 16,
    } | fields
    return msgspec.msgpack.encode([1.0, [event], 0])


@pytest.mark.parametrize(
    ("fields", "root"),
    [
        ({}, chain_root()),
        ({"extra_keys": [["tenant"], None, None, None]}, chain_root("", "tenant")),
        ({"lora_name": "a", "extra_keys": [["a"]] * 4}, chain_root("a")),
        (
            {"lora_name": "a", "extra_keys": [["a", "tenant"], ["a"], ["a"], ["a"]]},
            chain_root("a", "tenant"),
        ),
        (
            {"lora_name": "a", "extra_keys": [["a", "a"], ["a"], ["a"], ["a"]]},
            chain_root("a", "a"),
        ),
    ],
    ids=["plain", "salt", "adapter", "both", "both with one name"],
)
def test_tenants_and_adapters_have_distinct_keys(fields, root) -> None:
    [event] = decode_batch(published(**fields)).events
    assert isinstance(event, BlocksStored)
    assert PublishedBlocks().stored(event) == token_keys(list(range(CHUNK_TOKENS)), root)


def test_blocks_of_an_unnamed_adapter_are_not_indexed() -> None:
    """Older publishers send only ``lora_id``; requests name their adapter."""
    [event] = decode_batch(published(lora_id=1)).events
    assert isinstance(event, BlocksStored)
    assert PublishedBlocks().stored(event) == ()


def test_adapter_names_are_bounded() -> None:
    adapters: set[str] = set()
    blocks = PublishedBlocks(None, adapters)
    for number in range(MAX_ADAPTERS + 1):
        [event] = decode_batch(published(lora_name=f"a{number}")).events
        assert isinstance(event, BlocksStored)
        blocks.stored(event)
    assert len(adapters) == MAX_ADAPTERS


def test_blocks_with_an_image_are_not_indexed() -> None:
    [event] = decode_batch(published(extra_keys=[None, ["image hash"], None, None])).events
    assert isinstance(event, BlocksStored)
    assert PublishedBlocks().stored(event) == ()
