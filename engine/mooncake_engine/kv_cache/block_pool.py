"""The pool of KV blocks: reference counts, free order, and the index of cached prefixes.

A full block is named by a chain of hashes over the tokens up to its end. The names are equal in
every process and on every machine, so that prefill, decode and proxy agree; after the chained block
hashes of vLLM's v1 engine, with BLAKE2b cut to 16 bytes.
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
    """What the first block of a prompt follows. Prompts of different salts have no block in common,
    and whoever does not know a salt can't find out what is cached under it."""
    if not cache_salt:
        return ROOT
    return blake2b(ROOT + cache_salt.encode(), digest_size=DIGEST_BYTES).digest()


def extend_chain(
    chain: list[bytes], token_ids: Sequence[int], block_size: int, cache_salt: str = ""
) -> None:
    """Append the digests of the blocks that ``token_ids`` fill beyond those in ``chain``."""
    parent = chain[-1] if chain else root_of(cache_salt)
    for start in range(len(chain) * block_size, len(token_ids) - block_size + 1, block_size):
        block = array("q", token_ids[start : start + block_size]).tobytes()
        parent = blake2b(parent + block, digest_size=DIGEST_BYTES).digest()
        chain.append(parent)


class BlockEvents(Protocol):
    """What a pool reports to, on the thread that owns the pool."""

    @property
    def endpoints(self) -> KVEventEndpoints | None:
        """Where others find what is reported; None where nothing is published."""
        ...

    def stored(
        self,
        digests: Sequence[bytes],
        parent: bytes | None,
        token_ids: Sequence[int],
        cache_salt: str = "",
    ) -> None:
        """These blocks, one behind the other, can be found from now on.

        Args:
            digests: their names.
            parent: of the block before the first; None at the beginning of a prompt.
            token_ids: of all these blocks.
            cache_salt: of the prompt.
        """
        ...

    def removed(self, digest: bytes) -> None:
        """This block is found no more."""
        ...

    def cleared(self) -> None:
        """No block is found any more."""
        ...

    def flush(self) -> None:
        """A step is over: what was reported in it belongs together."""
        ...

    def close(self) -> None:
        """Nothing more will be reported. Idempotent."""
        ...


class BlockPool:
    """Hands out block ids ``0 .. num_blocks - 1``; holds no memory itself.

    A block with references is owned by that many tables. A block without is free, and may still
    hold published content: such blocks are reused last, the longest unused first.

    Args:
        num_blocks: size of the pool.
        events: told what can be found from when to when; None for nobody.
    """

    def __init__(self, num_blocks: int, events: BlockEvents | None = None) -> None:
        self.num_blocks = num_blocks
        self._events = events
        self.references = [0] * num_blocks
        """How many tables own each block."""
        self._num_uses = [0] * num_blocks
        self._empty = list(range(num_blocks - 1, -1, -1))
        self._cached: OrderedDict[int, None] = OrderedDict()
        self._content: dict[int, bytes] = {}
        self._index: dict[bytes, int] = {}

    @property
    def num_free(self) -> int:
        """Blocks that ``allocate`` could hand out now."""
        return len(self._empty) + len(self._cached)

    @property
    def usage(self) -> float:
        """Owned share of the pool, 0 to 1."""
        return 1.0 - self.num_free / self.num_blocks

    def uses(self, block_ids: Iterable[int]) -> list[int]:
        """How often each block was handed out: as long as that stays, a full block holds what it
        held, whoever owns it."""
        return [self._num_uses[block_id] for block_id in block_ids]

    def allocate(self, count: int) -> list[int] | None:
        """Take ``count`` blocks with one reference each, or none at all: None."""
        if count > self.num_free:
            return None
        return [self._take() for _ in range(count)]

    def share(self, block_ids: Iterable[int]) -> None:
        """Add a reference to each block; a free one with content is owned again."""
        for block_id in block_ids:
            if self.references[block_id] == 0:
                del self._cached[block_id]
            self.references[block_id] += 1

    def release(self, block_ids: Sequence[int]) -> None:
        """Drop one reference of each block of a table, its tail first.

        The tail of a chain of prefixes is worth less than its head, so it is evicted sooner.
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
        """Say what an owned, full block holds; returns the block that stands for such content: the
        first one."""
        if digest not in self._index and block_id not in self._content:
            self._index[digest] = block_id
            self._content[block_id] = digest
        return self._index.get(digest, block_id)

    def __contains__(self, digest: bytes) -> bool:
        """Whether a block with such content can be found."""
        return digest in self._index

    def find(self, digests: Iterable[bytes]) -> list[int]:
        """Blocks of the longest known prefix of a chain of digests; no reference is added."""
        found = []
        for digest in digests:
            block_id = self._index.get(digest)
            if block_id is None:
                break
            found.append(block_id)
        return found

    def count_free(self, block_ids: Iterable[int]) -> int:
        """How many of these blocks are free: sharing them lowers ``num_free`` by that much."""
        return sum(1 for block_id in block_ids if self.references[block_id] == 0)

    def forget(self, block_ids: Iterable[int]) -> None:
        """Forget what these free blocks hold."""
        for block_id in block_ids:
            digest = self._content.pop(block_id, None)
            if digest is not None:
                del self._index[digest], self._cached[block_id]
                self._empty.append(block_id)
                if self._events is not None:
                    self._events.removed(digest)

    def forget_content(self) -> None:
        """Empty the index of cached content; owned blocks stay owned."""
        self._empty.extend(self._cached)
        self._cached.clear()
        self._content.clear()
        self._index.clear()
        if self._events is not None:
            self._events.cleared()

    def check_integrity(self, tables: Iterable[Sequence[int]]) -> None:
        """Prove that the tables own exactly what is not free, and that nothing is lost.

        Raises:
            AssertionError: names the first block that breaks the books.
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
