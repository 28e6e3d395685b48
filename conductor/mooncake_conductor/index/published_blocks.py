"""One publisher's blocks, and which chunks of the index they make up."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
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

ChunkChange = tuple[Tier, list[int]]


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


MAX_NAMES = 1 << 20


class BlockNames:
    """Where blocks end in their prompts' chains, for publishers that call the same blocks by the
    same hashes: of a prompt that several stores have parts of, a part's parent is another's.

    Args:
        capacity: the oldest are forgotten.
    """

    def __init__(self, capacity: int = MAX_NAMES) -> None:
        self._capacity = capacity
        self._ends: OrderedDict[int, tuple[bytes, int]] = OrderedDict()

    def put(self, hash_: int, link: bytes, end_link: int) -> None:
        """A block ends at that link, the so many-th of its prompt."""
        self._ends[hash_] = link, end_link
        self._ends.move_to_end(hash_)
        if len(self._ends) > self._capacity:
            self._ends.popitem(last=False)

    def end(self, hash_: int) -> tuple[bytes, int] | None:
        """The link where that block ends, and how many it has before and in it."""
        return self._ends.get(hash_)


class PublishedBlocks:
    """Turns a publisher's hashes into keys of the index.

    A chunk is held in a tier while all blocks are that it consists of. Blocks whose size is no
    multiple of 16 tokens, or whose parent is not known, are counted and left out: the index claims
    less then, and nothing wrong.

    Args:
        names: of blocks that other publishers may have said; None: nobody calls blocks alike.
    """

    def __init__(self, names: BlockNames | None = None) -> None:
        self._names = names
        self.num_orphans = 0
        """Events since it was last cleared whose first block's parent was not known."""
        self._blocks: dict[int, _Block] = {}
        # Key of a chunk -> hashes of its blocks; more than once where prompts part behind the
        # chunk and inside of a block.
        self._parts: dict[int, list[tuple[int, ...]]] = {}
        self.num_unknown = 0

    def __len__(self) -> int:
        return len(self._blocks)

    def stored(self, event: BlocksStored) -> Keys:
        """Keys of the chunks that are complete in that tier now."""
        if event.token_ids:
            self._name(event)
        bit, complete = 1 << event.tier, []
        for hash_ in event.keys:
            block = self._blocks.get(hash_)
            if block is None:
                self.num_unknown += 1
                continue
            block.tiers |= bit
            complete += [key for key in block.chunks if self._is_held(key, bit)]
        return tuple(complete)

    def removed(self, hashes: Iterable[int], tier: Tier) -> Keys:
        """Keys of the chunks that are no longer complete in that tier."""
        bit, gone = 1 << tier, []
        for hash_ in hashes:
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
        self.num_orphans = 0
        self._blocks.clear()
        self._parts.clear()

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
            self.num_orphans += 1
            return
        size, parent = event.block_size, event.parent
        if size % LINK_TOKENS or len(event.token_ids) != size * len(event.keys):
            return
        per_block = size // LINK_TOKENS
        links = extend_links(link, event.token_ids)
        for index, hash_ in enumerate(event.keys):
            own = links[index * per_block : (index + 1) * per_block]
            if hash_ not in self._blocks:
                last = num_links + per_block
                self._blocks[hash_] = _Block(parent, own[-1], num_links, last)
                if self._names is not None:
                    self._names.put(hash_, own[-1], last)
                self._end_chunks(hash_, num_links, own)
            num_links += per_block
            parent = hash_

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
