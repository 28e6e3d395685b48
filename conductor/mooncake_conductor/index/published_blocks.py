"""One publisher's blocks, and which chunks of the index they make up."""

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
        parent: its hash; None at the beginning of a prompt.
        link: at its end.
        first_link, end_link: its part of the prompt's chain.
        tiers: in which it is held, as bits.
        chunks: keys of those that it is a part of.
    """

    parent: int | None
    link: bytes
    first_link: int
    end_link: int
    tiers: int = 0
    chunks: list[int] = field(default_factory=list)


@dataclass(slots=True)
class _Orphan:
    """A block whose parent is not known yet.

    Args:
        parent: its hash.
        token_ids: of the block.
        tiers: in which it is held, as bits.
    """

    parent: int
    token_ids: array[int]
    tiers: int = 0


PORTION_BLOCKS = 256
"""What is said of many more blocks is applied in portions of about so many, of a few milliseconds
each: who routes requests between two of them does not wait for all."""
MAX_NAMES = 1 << 20
MAX_ADAPTERS = 1 << 12
"""Whose names are kept."""
MAX_ORPHAN_TOKENS = 1 << 21
"""Of one publisher; 8 bytes each. What is beyond that is left out."""


class BlockNames:
    """Where blocks end in their prompts' chains, for publishers that call the same blocks by the
    same hashes: of a prompt that several stores have parts of, a part's parent is another's.

    Args:
        capacity: the oldest are forgotten.
    """

    def __init__(self, capacity: int = MAX_NAMES) -> None:
        self._capacity = capacity
        self._ends: OrderedDict[int, tuple[bytes, int]] = OrderedDict()
        self._awaited: OrderedDict[int, dict[Callable[[int], None], None]] = OrderedDict()
        self._come: list[int] = []

    def put(self, hash_: int, link: bytes, end_link: int) -> None:
        """A block ends at that link, the so many-th of its prompt."""
        self._ends[hash_] = link, end_link
        self._ends.move_to_end(hash_)
        if len(self._ends) > self._capacity:
            self._ends.popitem(last=False)
        if hash_ in self._awaited:
            self._come.append(hash_)

    def await_end(self, hash_: int, place: Callable[[int], None]) -> None:
        """Have ``tell`` call ``place`` with the hash once that block has been put."""
        self._awaited.setdefault(hash_, {})[place] = None
        if len(self._awaited) > self._capacity:
            self._awaited.popitem(last=False)

    def tell(self) -> Iterator[None]:
        """Tell those who wait of what has been put since, and of what they put thereby, in
        portions."""
        num_told = 0
        while self._come:
            hash_ = self._come.pop()
            for place in self._awaited.pop(hash_, ()):
                place(hash_)
            num_told += 1
            if num_told % PORTION_BLOCKS == 0:
                yield

    def end(self, hash_: int) -> tuple[bytes, int] | None:
        """The link where that block ends, and how many it has before and in it."""
        return self._ends.get(hash_)


class PublishedBlocks:
    """Turns a publisher's hashes into keys of the index.

    A chunk is held in a tier while all blocks are that it consists of. Blocks whose size is no
    multiple of 16 tokens, or whose parent is not known, are counted and left out: the index claims
    less then, and nothing wrong. With ``names``, those with an unknown parent are placed once
    somebody has said it.

    Args:
        names: of blocks that other publishers may have said; None: nobody calls blocks alike.
        adapters: names of those that blocks were computed with are added to it.
    """

    def __init__(self, names: BlockNames | None = None, adapters: set[str] | None = None) -> None:
        self.placed: Callable[[Tier, Keys], None] = lambda tier, keys: None
        """Told of chunks that are complete in a tier since the parent of a block became known."""
        self._names = names
        self._adapters: set[str] = set() if adapters is None else adapters
        self._num_left_out = 0
        self._orphans: dict[int, _Orphan] = {}
        self._orphans_behind: dict[int, dict[int, None]] = {}  # by their parent
        self._num_orphan_tokens = 0
        self._blocks: dict[int, _Block] = {}
        # Key of a chunk -> hashes of its blocks; more than once where prompts part behind the
        # chunk and inside of a block.
        self._parts: dict[int, list[tuple[int, ...]]] = {}
        self.num_unknown = 0

    def __len__(self) -> int:
        return len(self._blocks)

    @property
    def num_orphans(self) -> int:
        """Blocks that wait for their parent, and events since it was last cleared that are left out
        for want of it."""
        return len(self._orphans) + self._num_left_out

    def stored(self, event: BlocksStored) -> Keys:
        """Keys of the chunks that are complete in that tier now."""
        if event.lora_name and len(self._adapters) < MAX_ADAPTERS:
            self._adapters.add(event.lora_name)
        if event.token_ids:
            self._name(event)
        bit, complete = 1 << event.tier, []
        for hash_ in event.keys:
            block = self._blocks.get(hash_)
            if block is None:
                self.num_unknown += 1
                if (orphan := self._orphans.get(hash_)) is not None:
                    orphan.tiers |= bit
                continue
            block.tiers |= bit
            complete += [key for key in block.chunks if self._is_held(key, bit)]
        return tuple(complete)

    def removed(self, hashes: Iterable[int], tier: Tier) -> Keys:
        """Keys of the chunks that are no longer complete in that tier."""
        bit, gone = 1 << tier, []
        for hash_ in hashes:
            if (orphan := self._orphans.get(hash_)) is not None:
                orphan.tiers &= ~bit
                if not orphan.tiers:
                    self._take_orphan(hash_)
            block = self._blocks.get(hash_)
            if block is None:
                continue
            block.tiers &= ~bit
            gone += [key for key in block.chunks if not self._is_held(key, bit)]
            if not block.tiers:
                self._forget(hash_, block)
        return tuple(gone)

    def clear(self) -> None:
        """The publisher holds nothing."""
        self._num_left_out = self._num_orphan_tokens = 0
        for held in (self._orphans, self._orphans_behind, self._blocks, self._parts):
            held.clear()

    def _is_held(self, key: int, bit: int) -> bool:
        return any(
            all(self._blocks[part].tiers & bit for part in parts) for parts in self._parts[key]
        )

    def _name(self, event: BlocksStored) -> None:
        """Place new blocks in their prompts' chains."""
        if event.parent is None:
            link, num_links = chain_root(event.lora_name or "", event.cache_salt), 0
        elif (end := self._end(event.parent)) is not None:
            link, num_links = end
        else:
            self._await_parent(event, event.parent)
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
        """A block with these links, behind so many of its prompt."""
        last = num_links + len(links)
        block = self._blocks[hash_] = _Block(parent, links[-1], num_links, last)
        if self._names is not None:
            self._names.put(hash_, links[-1], last)
        self._end_chunks(hash_, num_links, links)
        return block

    def _await_parent(self, event: BlocksStored, parent: int) -> None:
        """Keep blocks until their parent is known, as far as they fit."""
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
                if parent not in self._orphans_behind:
                    self._names.await_end(parent, self._place_behind)
                self._orphans_behind.setdefault(parent, {})[hash_] = None
            parent = hash_

    def _place_behind(self, parent: int) -> None:
        """A block is known now: place those that follow on it."""
        end = self._end(parent)
        if end is None:  # it has been forgotten again
            return
        link, num_links = end
        for hash_ in list(self._orphans_behind.get(parent, ())):
            orphan = self._take_orphan(hash_)
            block = self._blocks.get(hash_)
            if block is None:
                links = extend_links(link, orphan.token_ids)
                block = self._place(hash_, parent, num_links, links)
            block.tiers |= orphan.tiers
            for tier in Tier:
                bit = 1 << tier
                if orphan.tiers & bit:
                    complete = tuple(key for key in block.chunks if self._is_held(key, bit))
                    self.placed(tier, complete)

    def _take_orphan(self, hash_: int) -> _Orphan:
        orphan = self._orphans.pop(hash_)
        self._num_orphan_tokens -= len(orphan.token_ids)
        siblings = self._orphans_behind[orphan.parent]
        del siblings[hash_]
        if not siblings:
            del self._orphans_behind[orphan.parent]
        return orphan

    def _end(self, hash_: int) -> tuple[bytes, int] | None:
        block = self._blocks.get(hash_)
        if block is not None:
            return block.link, block.end_link
        return None if self._names is None else self._names.end(hash_)

    def _end_chunks(self, hash_: int, num_links: int, links: list[bytes]) -> None:
        """Chunks that end in this block, which begins after so many links of its prompt."""
        for offset, link in enumerate(links, num_links + 1):
            if offset % LINKS_PER_CHUNK:
                continue
            key, first = key_of(link), offset - LINKS_PER_CHUNK
            parts = self._back_to(hash_, first)
            if parts is None:
                continue
            self._parts.setdefault(key, []).append(parts)
            for part in parts:
                if key not in self._blocks[part].chunks:
                    self._blocks[part].chunks.append(key)

    def _back_to(self, hash_: int, first_link: int) -> tuple[int, ...] | None:
        """The blocks from this one back to that which has ``first_link``; None if one is gone."""
        parts, block = [hash_], self._blocks[hash_]
        while block.first_link > first_link:
            if block.parent is None or block.parent not in self._blocks:
                return None
            parts.append(block.parent)
            block = self._blocks[block.parent]
        return tuple(parts)

    def _forget(self, hash_: int, block: _Block) -> None:
        for key in block.chunks:
            left = [parts for parts in self._parts[key] if hash_ not in parts]
            for part in {part for parts in self._parts[key] for part in parts} - {hash_}:
                if not any(part in parts for parts in left):
                    self._blocks[part].chunks.remove(key)
            if left:
                self._parts[key] = left
            else:
                del self._parts[key]
        del self._blocks[hash_]


def _is_whole(event: BlocksStored) -> bool:
    """Whether its blocks have tokens, as many as they say, and in whole links."""
    is_cut_at_links = event.block_size % LINK_TOKENS == 0
    return is_cut_at_links and len(event.token_ids) == event.block_size * len(event.keys)
