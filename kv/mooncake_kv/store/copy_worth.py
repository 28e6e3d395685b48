"""The value of a copy of a chunk, compared with the chunks that it would evict. Pure.

A pool holds each chunk once until a second copy pays off. A chunk that is fetched from another
store is used by the request and then discarded, unless keeping it saves more seconds than the chunk
that it would evict. The inputs are the uses of a chunk (a counter that halves every
``HALF_LIFE_S``), the number of stores that have it, and the seconds that its loss costs:

    worth of a copy  = uses / (copies + 1) * seconds to fetch it again
    loss of a victim = uses / copies * (seconds to fetch it again, or to compute the last copy)

So hot chunks are replicated and cold copies are evicted first; slow links lead to copies, fast ones
don't. Mooncake's conductor has no such rule: there every fetch leaves a copy, and the more a full
cache is fetched from, the worse it gets.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterable

import msgspec

from mooncake_kv.store.chunk_store import Chunk, CopyTerms
from mooncake_kv.store.eviction import recompute_seconds

HALF_LIFE_S = 300.0
"""Seconds after which a use counts half."""
PUT_USES = 0.25
"""Uses that a first put counts for: most chunks are never used again, while a fetch is a second
use."""
MAX_COUNTED_KEYS = 1 << 17
"""Upper bound of the chunks whose uses are counted."""


class _Count(msgspec.Struct, frozen=True, gc=False):
    """Decayed uses as of a time. Chunks that are always used together share one object."""

    uses: float
    at: float


class UseCounts:
    """Counts recent uses of chunks, whether the store has them or not.

    Args:
        half_life_s: seconds after which a use counts half.
        max_keys: upper bound of the chunks counted; the least recently used ones are forgotten.
    """

    def __init__(self, half_life_s: float = HALF_LIFE_S, max_keys: int = MAX_COUNTED_KEYS) -> None:
        self._half_life_s = half_life_s
        self._max_keys = max_keys
        self._counts: OrderedDict[bytes, _Count] = OrderedDict()

    def note(self, keys: Iterable[bytes], now: float, uses: float = 1.0) -> None:
        """Count a use of each chunk, or a fraction of one."""
        counts, first = self._counts, _Count(uses, now)
        before: _Count | None = None
        after = first
        for key in keys:
            count = counts.get(key)
            if count is None:
                counts[key] = first
                continue
            if count is not before:
                before, after = count, _Count(uses + self._decayed(count, now), now)
            counts[key] = after
            counts.move_to_end(key)
        while len(counts) > self._max_keys:
            counts.popitem(last=False)

    def uses(self, key: bytes, now: float) -> float:
        """The decayed uses of a chunk."""
        count = self._counts.get(key)
        return 0.0 if count is None else self._decayed(count, now)

    def _decayed(self, count: _Count, now: float) -> float:
        return count.uses * math.pow(0.5, (now - count.at) / self._half_life_s)


def worth_of_copy(uses: float, terms: CopyTerms) -> float:
    """Seconds that a copy saves over the time for which uses are counted; losing it costs as
    much."""
    return uses / (terms.num_copies + 1) * terms.refetch_s


def loss_of_last(uses: float, victim: Chunk, chunk: Chunk, terms: CopyTerms) -> float:
    """Seconds that the loss of a chunk costs of which no other store is known to have a copy.

    Args:
        uses: the victim's decayed uses.
        victim: the chunk that would be evicted.
        chunk, terms: the chunk that replaces it, and its costs; its recomputation time calibrates
            how fast this deployment computes.
    """
    return uses * recompute_seconds(victim) * terms.recompute_s / recompute_seconds(chunk)
