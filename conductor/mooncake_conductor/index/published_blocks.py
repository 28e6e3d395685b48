"""Maps a publisher's blocks to the chunks of the index that they form."""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

from mooncake_conductor.index.holder_sets import Tier
from mooncake_conductor.index.kv_event_messages import BlocksStored
from mooncake_conductor.index.prompt_keys import (
    LINK_TOKENS,
    LINKS_PER_CHUNK,
    Keys,
    chain_root,
    extend_links,
    key_of,
)


@dataclass(slots=True)
class _Block:
    """A block that the publisher holds in some tier.

    Args:
        parent: hash of the parent block; None at the start of a prompt.
        link: link at the block's end.
        first_link: number of links before the block in its prompt's chain.
        end_link: number of links up to the block's end.
        tiers: bit mask of the tiers that hold it.
        chunks: keys of the chunks of which it is a part.
    """

    parent: int | None
    link: bytes
    first_link: int
    end_link: int
    tiers: int = 0
    chunks: list[int] = field(default_factory=list)


@dataclass(slots=True)
class _Chunk:
    """A chunk of the index.

    Args:
        parts: the hashes of its blocks, by that of the block in which it ends. There are several
            entries if prompts diverge after the chunk but within a block: with long blocks, one for
            each prompt that begins with the same few tokens.
        num_held: number of entries all of whose blocks a tier holds, by tier.
    """

    parts: dict[int, tuple[int, ...]] = field(default_factory=dict)
    num_held: list[int] = field(default_factory=lambda: [0] * len(Tier))


@dataclass(slots=True)
class _Orphan:
    """A block whose parent is not known yet.

    Args:
        parent: hash of the parent block.
        token_ids: token ids of the block.
        tiers: bit mask of the tiers that hold it.
    """

    parent: int
    token_ids: array[int]
    tiers: int = 0


PORTION_BLOCKS = 256
"""Blocks per portion when many blocks are applied; a portion takes a few milliseconds, so that
requests can be routed between two portions."""
MAX_NAMES = 1 << 20
MAX_ADAPTERS = 1 << 12
"""Bound of the adapter names that are kept."""
MAX_ORPHAN_TOKENS = 1 << 21
"""Bound of the tokens in one publisher's orphans, 8 bytes each. Further orphans are left out."""


class BlockNames:
    """The ends of blocks in their prompts' chains, shared by publishers with the same block hashes.

    Several node stores may hold parts of one prompt. Then a block in one store may have its parent
    in another one.

    Args:
        capacity: number of blocks; the oldest are forgotten.
    """

    def __init__(self, capacity: int = MAX_NAMES) -> None:
        self._capacity = capacity
        self._ends: OrderedDict[int, tuple[bytes, int]] = OrderedDict()
        self._awaited: OrderedDict[int, dict[Callable[[int], None], None]] = OrderedDict()
        self._added: list[int] = []

    def put(self, hash_: int, link: bytes, end_link: int) -> None:
        """Add a block that ends at `link`, which is link number `end_link` of its prompt."""
        self._ends[hash_] = link, end_link
        self._ends.move_to_end(hash_)
        if len(self._ends) > self._capacity:
            self._ends.popitem(last=False)
        if hash_ in self._awaited:
            self._added.append(hash_)

    def await_end(self, hash_: int, place: Callable[[int], None]) -> None:
        """Have ``run_callbacks`` call ``place`` with the hash once that block has been added."""
        self._awaited.setdefault(hash_, {})[place] = None
        if len(self._awaited) > self._capacity:
            self._awaited.popitem(last=False)

    def run_callbacks(self) -> Iterator[None]:
        """Call the waiting callbacks for all added blocks, including those that callbacks add.

        Yields between portions.
        """
        num_notified = 0
        while self._added:
            hash_ = self._added.pop()
            for place in self._awaited.pop(hash_, ()):
                place(hash_)
            num_notified += 1
            if num_notified % PORTION_BLOCKS == 0:
                yield

    def end(self, hash_: int) -> tuple[bytes, int] | None:
        """The link at which a block ends, and its number in the prompt; None if unknown."""
        return self._ends.get(hash_)


class PublishedBlocks:
    """Converts a publisher's block hashes to chunk keys of the index.

    A tier holds a chunk while it holds all blocks of the chunk. Blocks whose size is not a multiple
    of 16 tokens, or whose parent is unknown, are counted and left out: the index then misses chunks
    but never claims wrong ones. With ``names``, blocks with an unknown parent become orphans, which
    are placed once any publisher has published the parent.

    Args:
        names: ends of blocks of other publishers; None: their block hashes differ.
        adapters: set to which the names of adapters of published blocks are added.
    """

    def __init__(self, names: BlockNames | None = None, adapters: set[str] | None = None) -> None:
        self.placed: Callable[[Tier, Keys], None] = lambda tier, keys: None
        """Called with chunks that became complete in a tier because a block's parent was found."""
        self._names = names
        self._adapters: set[str] = set() if adapters is None else adapters
        self._num_left_out = 0
        self._orphans: dict[int, _Orphan] = {}
        self._orphans_by_parent: dict[int, dict[int, None]] = {}  # parent -> its orphans
        self._num_orphan_tokens = 0
        self._blocks: dict[int, _Block] = {}
        self._chunks: dict[int, _Chunk] = {}  # by key
        self.num_unknown = 0

    def __len__(self) -> int:
        return len(self._blocks)

    @property
    def num_orphans(self) -> int:
        """Orphans, plus events since the last `clear` that were left out for want of a parent."""
        return len(self._orphans) + self._num_left_out

    def stored(self, event: BlocksStored) -> Keys:
        """Add stored blocks. Returns the keys of chunks that are complete in the tier now."""
        if event.lora_name and len(self._adapters) < MAX_ADAPTERS:
            self._adapters.add(event.lora_name)
        if event.token_ids:
            self._place_new(event)
        complete = []
        for hash_ in event.keys:
            block = self._blocks.get(hash_)
            if block is None:
                self.num_unknown += 1
                if (orphan := self._orphans.get(hash_)) is not None:
                    orphan.tiers |= 1 << event.tier
                continue
            complete += self._hold(hash_, block, event.tier)
        return tuple(complete)

    def removed(self, hashes: Iterable[int], tier: Tier) -> Keys:
        """Remove blocks. Returns the keys of chunks that are no longer complete in the tier."""
        gone = []
        for hash_ in hashes:
            if (orphan := self._orphans.get(hash_)) is not None:
                orphan.tiers &= ~(1 << tier)
                if not orphan.tiers:
                    self._pop_orphan(hash_)
            block = self._blocks.get(hash_)
            if block is None:
                continue
            self._drop(hash_, block, tier)
            gone += [key for key in block.chunks if not self._chunks[key].num_held[tier]]
            if not block.tiers:
                self._forget(hash_, block)
        return tuple(gone)

    def clear(self) -> None:
        """Remove all blocks and orphans."""
        self._num_left_out = self._num_orphan_tokens = 0
        for held in (self._orphans, self._orphans_by_parent, self._blocks, self._chunks):
            held.clear()

    def _hold(self, hash_: int, block: _Block, tier: Tier) -> list[int]:
        """Note that a tier holds a block. Returns the keys of its chunks that it holds now."""
        if not block.tiers & (1 << tier):
            block.tiers |= 1 << tier
            for key in block.chunks:
                self._chunks[key].num_held[tier] += self._num_held(hash_, key, tier)
        return [key for key in block.chunks if self._chunks[key].num_held[tier]]

    def _drop(self, hash_: int, block: _Block, tier: Tier) -> None:
        """Note that a tier does not hold a block any more."""
        if block.tiers & (1 << tier):
            for key in block.chunks:
                self._chunks[key].num_held[tier] -= self._num_held(hash_, key, tier)
            block.tiers &= ~(1 << tier)

    def _num_held(self, hash_: int, key: int, tier: Tier) -> int:
        """Entries of a chunk with this block, all of whose blocks the tier holds."""
        bit = 1 << tier
        return sum(
            all(self._blocks[part].tiers & bit for part in parts)
            for parts in self._parts_with(hash_, key)
        )

    def _parts_with(self, hash_: int, key: int) -> list[tuple[int, ...]]:
        """The entries of a chunk with this block. There may be several only if the chunk does not
        end in it; then its blocks are not multiples of a chunk."""
        entries = self._chunks[key].parts
        if (own := entries.get(hash_)) is not None:
            return [own]
        return [parts for parts in entries.values() if hash_ in parts]

    def _place_new(self, event: BlocksStored) -> None:
        """Compute the positions of new blocks in their prompt's chain."""
        if event.parent is None:
            link, num_links = chain_root(event.lora_name or "", event.cache_salt), 0
        elif (end := self._end(event.parent)) is not None:
            link, num_links = end
        else:
            self._add_orphans(event, event.parent)
            return
        size, parent = event.block_size, event.parent
        if not _is_whole(event):
            return
        per_block = size // LINK_TOKENS
        links = extend_links(link, event.token_ids)
        for index, hash_ in enumerate(event.keys):
            own = links[index * per_block : (index + 1) * per_block]
            if hash_ not in self._blocks:
                self._place(hash_, parent, num_links, own)
            num_links += per_block
            parent = hash_

    def _place(self, hash_: int, parent: int | None, num_links: int, links: list[bytes]) -> _Block:
        """Add a block with these links, after `num_links` links of its prompt."""
        last = num_links + len(links)
        block = self._blocks[hash_] = _Block(parent, links[-1], num_links, last)
        if self._names is not None:
            self._names.put(hash_, links[-1], last)
        self._end_chunks(hash_, num_links, links)
        return block

    def _add_orphans(self, event: BlocksStored, parent: int) -> None:
        """Keep blocks as orphans until their parent is known, within MAX_ORPHAN_TOKENS."""
        num_tokens = len(event.token_ids)
        left = MAX_ORPHAN_TOKENS - self._num_orphan_tokens
        if self._names is None or not _is_whole(event) or num_tokens > left:
            self._num_left_out += 1
            return
        size, token_ids = event.block_size, array("Q", event.token_ids)
        for index, hash_ in enumerate(event.keys):
            if hash_ not in self._orphans and hash_ not in self._blocks:
                own = token_ids[index * size : (index + 1) * size]
                self._orphans[hash_] = _Orphan(parent, own)
                self._num_orphan_tokens += size
                if parent not in self._orphans_by_parent:
                    self._names.await_end(parent, self._place_orphans)
                self._orphans_by_parent.setdefault(parent, {})[hash_] = None
            parent = hash_

    def _place_orphans(self, parent: int) -> None:
        """Place the orphans of a parent that is known now."""
        end = self._end(parent)
        if end is None:  # the parent has been forgotten again
            return
        link, num_links = end
        for hash_ in list(self._orphans_by_parent.get(parent, ())):
            orphan = self._pop_orphan(hash_)
            block = self._blocks.get(hash_)
            if block is None:
                links = extend_links(link, orphan.token_ids)
                block = self._place(hash_, parent, num_links, links)
            for tier in Tier:
                if orphan.tiers & (1 << tier):
                    self.placed(tier, tuple(self._hold(hash_, block, tier)))

    def _pop_orphan(self, hash_: int) -> _Orphan:
        orphan = self._orphans.pop(hash_)
        self._num_orphan_tokens -= len(orphan.token_ids)
        siblings = self._orphans_by_parent[orphan.parent]
        del siblings[hash_]
        if not siblings:
            del self._orphans_by_parent[orphan.parent]
        return orphan

    def _end(self, hash_: int) -> tuple[bytes, int] | None:
        block = self._blocks.get(hash_)
        if block is not None:
            return block.link, block.end_link
        return None if self._names is None else self._names.end(hash_)

    def _end_chunks(self, hash_: int, num_links: int, links: list[bytes]) -> None:
        """Register the chunks that end in a block, which starts after `num_links` links."""
        for offset, link in enumerate(links, num_links + 1):
            if offset % LINKS_PER_CHUNK:
                continue
            key, first = key_of(link), offset - LINKS_PER_CHUNK
            parts = self._parts_back_to(hash_, first)
            if parts is None:
                continue
            self._chunks.setdefault(key, _Chunk()).parts[hash_] = parts
            for part in parts:
                if key not in self._blocks[part].chunks:
                    self._blocks[part].chunks.append(key)

    def _parts_back_to(self, hash_: int, first_link: int) -> tuple[int, ...] | None:
        """The blocks from this one back to the one with ``first_link``; None if one is missing."""
        parts, block = [hash_], self._blocks[hash_]
        while block.first_link > first_link:
            if block.parent is None or block.parent not in self._blocks:
                return None
            parts.append(block.parent)
            block = self._blocks[block.parent]
        return tuple(parts)

    def _forget(self, hash_: int, block: _Block) -> None:
        for key in block.chunks:
            entries = self._chunks[key].parts
            gone = self._parts_with(hash_, key)
            for parts in gone:
                del entries[parts[0]]
            for part in {part for parts in gone for part in parts} - {hash_}:
                if not any(part in parts for parts in entries.values()):
                    self._blocks[part].chunks.remove(key)
            if not entries:
                del self._chunks[key]
        del self._blocks[hash_]


def _is_whole(event: BlocksStored) -> bool:
    """Whether the event has the tokens of all its blocks, and blocks consist of whole links."""
    is_cut_at_links = event.block_size % LINK_TOKENS == 0
    return is_cut_at_links and len(event.token_ids) == event.block_size * len(event.keys)
