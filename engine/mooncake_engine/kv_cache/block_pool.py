"""The pool of KV block ids: reference counts, eviction order, and the index of cached prefixes.

A full block is identified by the digest of a hash chain over all tokens up to its end. Digests are
the same in every process and on every machine, so that prefill, decode and proxy agree. The scheme
follows the chained block hashes of vLLM's v1 engine, with BLAKE2b cut to 16 bytes.
"""

from __future__ import annotations

from array import array
from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence
from hashlib import blake2b
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from mooncake_kv.kv_events import KVEventEndpoints

DIGEST_BYTES = 16
ROOT = blake2b(b"mooncake-hal prefix chain v1", digest_size=DIGEST_BYTES).digest()


def root_of(cache_salt: str) -> bytes:
    """Returns the parent digest of a prompt's first block. Prompts with different salts share no
    block, and a client that does not know a salt can't find out what is cached under it."""
    if not cache_salt:
        return ROOT
    return blake2b(ROOT + cache_salt.encode(), digest_size=DIGEST_BYTES).digest()


def extend_block_hashes(
    block_hashes: list[bytes], token_ids: Sequence[int], block_size: int, cache_salt: str = ""
) -> None:
    """Append the hashes of the blocks that ``token_ids`` fill, as far as they are missing."""
    parent = block_hashes[-1] if block_hashes else root_of(cache_salt)
    for start in range(len(block_hashes) * block_size, len(token_ids) - block_size + 1, block_size):
        block = array("q", token_ids[start : start + block_size]).tobytes()
        parent = blake2b(parent + block, digest_size=DIGEST_BYTES).digest()
        block_hashes.append(parent)


class BlockEvents(Protocol):
    """Receives the changes of a pool's prefix cache, on the thread that owns the pool."""

    @property
    def endpoints(self) -> KVEventEndpoints | None:
        """Endpoints at which the events are published; None if they are not."""
        ...

    def stored(
        self,
        digests: Sequence[bytes],
        parent: bytes | None,
        token_ids: Sequence[int],
        cache_salt: str = "",
    ) -> None:
        """A run of consecutive blocks has been cached.

        Args:
            digests: digests of the blocks.
            parent: digest of the block before the first; None at the beginning of a prompt.
            token_ids: tokens of all these blocks.
            cache_salt: cache salt of the prompt.
        """
        ...

    def removed(self, digest: bytes) -> None:
        """A block has been evicted."""
        ...

    def cleared(self) -> None:
        """All cached blocks have been dropped."""
        ...

    def flush(self) -> None:
        """A step is over: the events since the last call form one batch."""
        ...

    def close(self) -> None:
        """No more events follow. Idempotent."""
        ...


class BlockPool:
    """Allocates the block ids ``0 .. num_blocks - 1``; owns no memory itself.

    A block's reference count is the number of tables that own it. A block without references is
    free, but may still be cached: such blocks are allocated last, least recently used first.

    Args:
        num_blocks: number of blocks.
        events: receives the changes of the prefix cache; None publishes none.

    Attributes:
        num_claims: how often a block has become both cached and owned, by being cached or by being
            owned again.
    """

    def __init__(self, num_blocks: int, events: BlockEvents | None = None) -> None:
        self.num_blocks = num_blocks
        self.num_claims = 0
        self._events = events
        self.references = [0] * num_blocks
        """For each block, the number of tables that own it."""
        self._num_uses = [0] * num_blocks
        self._empty = list(range(num_blocks - 1, -1, -1))
        self._cached: OrderedDict[int, None] = OrderedDict()
        self._content: dict[int, bytes] = {}
        self._index: dict[bytes, int] = {}

    @property
    def num_free(self) -> int:
        """Number of blocks that can be allocated now, cached ones included."""
        return len(self._empty) + len(self._cached)

    @property
    def usage(self) -> float:
        """Fraction of the blocks that is owned, 0 to 1."""
        return 1.0 - self.num_free / self.num_blocks

    def uses(self, block_ids: Iterable[int]) -> list[int]:
        """Returns how often each block has been allocated. While that count is unchanged, a full
        block keeps its content, whether it is owned or not."""
        return [self._num_uses[block_id] for block_id in block_ids]

    def allocate(self, count: int) -> list[int] | None:
        """Allocate ``count`` blocks with one reference each; None if too few are free."""
        if count > self.num_free:
            return None
        return [self._take() for _ in range(count)]

    def share(self, block_ids: Iterable[int]) -> None:
        """Add a reference to each block; a free cached block becomes owned again."""
        for block_id in block_ids:
            if self.references[block_id] == 0:
                del self._cached[block_id]
                self.num_claims += 1
            self.references[block_id] += 1

    def release(self, block_ids: Sequence[int]) -> None:
        """Drop one reference of each block of a table, from its tail to its head.

        The tail of a prefix is less likely to be reused than its head, so it is evicted first.
        """
        for block_id in reversed(block_ids):
            count = self.references[block_id] - 1
            assert count >= 0, f"block {block_id} released more often than it was owned"
            self.references[block_id] = count
            if count == 0 and block_id in self._content:
                self._cached[block_id] = None
            elif count == 0:
                self._empty.append(block_id)

    def publish(self, block_id: int, digest: bytes) -> int:
        """Cache an owned, full block. Returns the cached block with that content: the first one
        that was published."""
        if digest not in self._index and block_id not in self._content:
            self._index[digest] = block_id
            self._content[block_id] = digest
            self.num_claims += 1
        return self._index.get(digest, block_id)

    def __contains__(self, digest: bytes) -> bool:
        """Whether a block with that content is cached."""
        return digest in self._index

    def find(self, digests: Iterable[bytes]) -> list[int]:
        """Returns the blocks of the longest cached prefix of a chain; adds no references."""
        found = []
        for digest in digests:
            block_id = self._index.get(digest)
            if block_id is None:
                break
            found.append(block_id)
        return found

    def count_free(self, block_ids: Iterable[int]) -> int:
        """Returns how many of the blocks are free: sharing them lowers ``num_free`` by that."""
        return sum(1 for block_id in block_ids if self.references[block_id] == 0)

    def forget(self, block_ids: Iterable[int]) -> None:
        """Drop free blocks from the prefix cache."""
        for block_id in block_ids:
            digest = self._content.pop(block_id, None)
            if digest is not None:
                del self._index[digest], self._cached[block_id]
                self._empty.append(block_id)
                if self._events is not None:
                    self._events.removed(digest)

    def forget_content(self) -> None:
        """Drop all blocks from the prefix cache; owned blocks stay owned."""
        self._empty.extend(self._cached)
        self._cached.clear()
        self._content.clear()
        self._index.clear()
        if self._events is not None:
            self._events.cleared()

    def check_integrity(self, tables: Iterable[Sequence[int]]) -> None:
        """Prove that reference counts match the tables, and that all other blocks are free.

        Raises:
            AssertionError: a block is lost, free twice, or has a wrong reference count.
        """
        owned = Counter(block_id for table in tables for block_id in table)
        for block_id in range(self.num_blocks):
            wanted, found = owned[block_id], self.references[block_id]
            assert wanted == found, f"block {block_id}: {wanted} owners, {found} references"
        free = Counter(self._empty) + Counter(self._cached.keys())
        assert not free or free.most_common(1)[0][1] == 1, "a block is free twice"
        unowned = {block_id for block_id in range(self.num_blocks) if not owned[block_id]}
        assert set(free) == unowned, f"lost or doubly used blocks: {set(free) ^ unowned}"
        assert {self._index[d]: d for d in self._index} == self._content, "index out of step"

    def _take(self) -> int:
        if self._empty:
            block_id = self._empty.pop()
        else:
            block_id, _ = self._cached.popitem(last=False)
            digest = self._content.pop(block_id)
            del self._index[digest]
            if self._events is not None:
                self._events.removed(digest)
        self.references[block_id] = 1
        self._num_uses[block_id] += 1
        return block_id
