"""Eviction policies: the order in which chunks leave a full store. Pure.

A chunk is useful only while all chunks before it in its sequence are present. A policy that evicts
the last chunks of a sequence first is *prefix-closed*. ``TailFirstLRU`` achieves this in constant
time and without a tree: a use of a sequence touches its last chunk first, so that every chunk is
younger than those that follow it.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Protocol

from mooncake_kv.errors import KVConfigError
from mooncake_kv.store.hit_density import HitDensity

if TYPE_CHECKING:
    from mooncake_kv.store.chunk_store import Chunk  # brings numpy, and options name policies


class EvictionPolicy(Protocol):
    """Orders the chunks of one group: those of a tenant with a quota, or those of all others."""

    def add(self, chunk: Chunk) -> None:
        """A chunk was stored. Its parent may be present or not."""
        ...

    def touch(self, keys: Sequence[bytes]) -> None:
        """Chunks of one sequence were used; ``keys`` are in its order. Ignores unknown keys."""
        ...

    def remove(self, key: bytes) -> None:
        """A chunk was removed, for any reason. Ignores unknown keys."""
        ...

    def victims(self) -> Iterator[bytes]:
        """Keys in the order of eviction. The policy must not change while it is iterated."""
        ...


class LRU:
    """Evicts the least recently used chunk; a use touches a sequence from its first chunk on."""

    def __init__(self) -> None:
        self._order: OrderedDict[bytes, None] = OrderedDict()  # next victim first

    def add(self, chunk: Chunk) -> None:
        self._order[chunk.key] = None

    def touch(self, keys: Sequence[bytes]) -> None:
        for key in keys:
            if key in self._order:
                self._order.move_to_end(key)

    def remove(self, key: bytes) -> None:
        self._order.pop(key, None)

    def victims(self) -> Iterator[bytes]:
        return iter(self._order)


class _Ranked:
    """Base of policies that evict the chunk with the smallest rank. Uses a heap with lazy deletion:
    stale ranks are dropped when they reach the top."""

    def __init__(self) -> None:
        self._ranks: dict[bytes, tuple[float, float]] = {}
        self._heap: list[tuple[tuple[float, float], bytes]] = []
        self._clock = 0

    def tick(self) -> int:
        """Advance the logical clock, which counts uses."""
        self._clock += 1
        return self._clock

    def rank(self, key: bytes, rank: tuple[float, float]) -> None:
        """Set or change the rank of a key."""
        self._ranks[key] = rank
        heapq.heappush(self._heap, (rank, key))
        if len(self._heap) > 4 * len(self._ranks) + 64:
            self._heap = [(rank, key) for key, rank in self._ranks.items()]
            heapq.heapify(self._heap)

    def remove(self, key: bytes) -> None:
        self._ranks.pop(key, None)

    def victims(self) -> Iterator[bytes]:
        passed: list[tuple[tuple[float, float], bytes]] = []
        try:
            while self._heap:
                rank, key = item = heapq.heappop(self._heap)
                if self._ranks.get(key) == rank:
                    passed.append(item)
                    yield key
        finally:
            for item in passed:
                if self._ranks.get(item[1]) == item[0]:
                    heapq.heappush(self._heap, item)


class LFU(_Ranked):
    """Evicts the least frequently used chunk; among equals, the least recently used one."""

    def __init__(self) -> None:
        super().__init__()
        self._uses: dict[bytes, int] = {}

    def add(self, chunk: Chunk) -> None:
        self._uses[chunk.key] = 1
        self.rank(chunk.key, (1, self.tick()))

    def touch(self, keys: Sequence[bytes]) -> None:
        for key in keys:
            if key in self._uses:
                self._uses[key] += 1
                self.rank(key, (self._uses[key], self.tick()))

    def remove(self, key: bytes) -> None:
        super().remove(key)
        self._uses.pop(key, None)


class LengthAware(_Ranked):
    """Evicts the chunk at the latest position of its sequence; among equals, the least recently
    used one."""

    def __init__(self) -> None:
        super().__init__()
        self._positions: dict[bytes, int] = {}

    def add(self, chunk: Chunk) -> None:
        self._positions[chunk.key] = chunk.position
        self.rank(chunk.key, (-chunk.position, self.tick()))

    def touch(self, keys: Sequence[bytes]) -> None:
        for key in keys:
            if key in self._positions:
                self.rank(key, (-self._positions[key], self.tick()))

    def remove(self, key: bytes) -> None:
        super().remove(key)
        self._positions.pop(key, None)


class TailFirstLRU:
    """Evicts the least recently used chunk, where a use touches a sequence's last chunk first.

    A new chunk is inserted right below its parent, whenever that was used: sequences grow while
    they are computed, and a chunk that is committed late must not outlive those before it.

    The order is a circular linked list of keys, from the oldest to the youngest and via END back to
    the oldest. Chunks that are adjacent in it are moved together.
    """

    END = b""  # no chunk's key

    def __init__(self) -> None:
        self._younger: dict[bytes, bytes] = {self.END: self.END}
        self._older: dict[bytes, bytes] = {self.END: self.END}
        self._parents: dict[bytes, bytes] = {}

    def add(self, chunk: Chunk) -> None:
        key, parent = chunk.key, chunk.parent
        if key in self._older:
            self.remove(key)
        below = self.END
        if parent is not None:
            self._parents[key] = parent
            below = parent if parent in self._older else self.END
        self._insert(key, key, below)

    def touch(self, keys: Sequence[bytes]) -> None:
        oldest = youngest = None
        for key in reversed(keys):
            if key not in self._older:
                continue
            if oldest is None:
                oldest = key
            elif youngest is not None and self._younger[youngest] != key:
                self._raise(oldest, youngest)
                oldest = key
            youngest = key
        if oldest is not None and youngest is not None:
            self._raise(oldest, youngest)
        # if a sequence is touched from its middle on, its chunks before that are touched too
        before = self._parents.get(keys[0]) if keys and keys[0] in self._older else None
        for _ in range(len(self._older)):  # bounded, since a faulty user's parents may be cyclic
            if before is None or before not in self._older:
                break
            self._raise(before, before)
            before = self._parents.get(before)

    def remove(self, key: bytes) -> None:
        if key in self._older:
            self._unlink(key, key)
            del self._older[key], self._younger[key]
            self._parents.pop(key, None)

    def victims(self) -> Iterator[bytes]:
        key = self._younger[self.END]
        while key != self.END:
            yield key
            key = self._younger[key]

    def _raise(self, oldest: bytes, youngest: bytes) -> None:
        """Move the keys from ``oldest`` to ``youngest`` to the young end of the order."""
        self._unlink(oldest, youngest)
        self._insert(oldest, youngest, self.END)

    def _insert(self, oldest: bytes, youngest: bytes, below: bytes) -> None:
        older = self._older[below]
        self._older[oldest], self._younger[youngest] = older, below
        self._younger[older], self._older[below] = oldest, youngest

    def _unlink(self, oldest: bytes, youngest: bytes) -> None:
        older, younger = self._older[oldest], self._younger[youngest]
        self._younger[older], self._older[younger] = younger, older


class CostAware(_Ranked):
    """Evicts the chunk whose recomputation costs least per byte, weighted by its number of uses.

    Greedy dual size frequency (GDSF): a chunk's value is its uses times its cost per byte, plus the
    value of the last victim, so that chunks in use overtake those that are no longer used. Due to
    attention, late chunks cost more than early ones, but they are useless without them. So a
    chunk's value is capped by that of the chunk before it, and the later of two equals is evicted
    first.

    Args:
        seconds: returns the seconds to compute a chunk when all chunks before it are present. Only
            ratios matter.
    """

    def __init__(self, seconds: Callable[[Chunk], float] | None = None) -> None:
        super().__init__()
        self._seconds = seconds or recompute_seconds
        self._chunks: dict[bytes, Chunk] = {}
        self._uses: dict[bytes, int] = {}
        self._floor = 0.0

    def add(self, chunk: Chunk) -> None:
        self._chunks[chunk.key] = chunk
        self._uses[chunk.key] = 1
        self._value(chunk)

    def touch(self, keys: Sequence[bytes]) -> None:
        for key in keys:
            if (chunk := self._chunks.get(key)) is not None:
                self._uses[key] += 1
                self._value(chunk)

    def remove(self, key: bytes) -> None:
        rank = self._ranks.get(key)
        if rank is not None and rank == min(rank, self._smallest()):
            self._floor = max(self._floor, rank[0])
        super().remove(key)
        self._chunks.pop(key, None)
        self._uses.pop(key, None)

    def _value(self, chunk: Chunk) -> None:
        """Recompute the rank of a chunk."""
        value = self._floor + self._uses[chunk.key] * self._seconds(chunk) / chunk.nbytes
        before = self._ranks.get(chunk.parent) if chunk.parent else None
        if before is not None:
            value = min(value, before[0])
        self.rank(chunk.key, (value, -chunk.position))

    def _smallest(self) -> tuple[float, float]:
        while self._heap and self._ranks.get(self._heap[0][1]) != self._heap[0][0]:
            heapq.heappop(self._heap)
        return self._heap[0][0] if self._heap else (0.0, 0.0)


def recompute_seconds(chunk: Chunk) -> float:
    """Model of the seconds to compute a chunk when all chunks before it are present.

    Linear layers and attention of a 70 B model on eight A800, digitised from figure 14 of
    Mooncake's FAST paper: 102 us per token, plus 1.9 ns per token and preceding token.
    """
    before = chunk.position * chunk.num_tokens
    return chunk.num_tokens * (102e-6 + 1.9e-9 * (before + chunk.num_tokens / 2))


POLICIES: dict[str, Callable[[], EvictionPolicy]] = {
    "tail-first-lru": TailFirstLRU,
    "lru": LRU,
    "lfu": LFU,
    "length-aware": LengthAware,
    "cost-aware": CostAware,
    "hit-density": HitDensity,
}
"""The policies by the name that options use; the first is the default."""

DEFAULT_POLICY = "tail-first-lru"


def make_policy(name: str) -> EvictionPolicy:
    """Create a policy by name.

    Raises:
        KVConfigError: there is no policy of that name.
    """
    if name not in POLICIES:
        raise KVConfigError(f"eviction policy {name!r} is not known; known are {sorted(POLICIES)}")
    return POLICIES[name]()
