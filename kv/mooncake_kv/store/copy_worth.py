"""What a copy of a chunk is worth, beside what it would push out. Pure.

A pool holds each chunk once until a second copy pays: a chunk that is fetched from another store is
computed on, and then forgotten, unless keeping it saves more seconds than the chunk that has to go
for it. With how often a chunk is used (a counter that halves every ``HALF_LIFE_S``), how many
stores have it, and the seconds that its loss costs:

    worth of a copy  = uses / (copies + 1) * seconds to fetch it again
    loss of a victim = uses / copies * (seconds to fetch it again, or to compute the last copy)

So hot chunks spread and cold copies go first; slow links make copies, fast ones don't. After the
rule that Mooncake's conductor lacks: there every fetch leaves a copy, and a starved cache gets
worse the more it is fetched from.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterable

import msgspec

from mooncake_kv.store.chunk_store import Chunk, CopyTerms
from mooncake_kv.store.eviction import recompute_seconds

HALF_LIFE_S = 300.0
PUT_USES = 0.25
"""What a first put counts: most chunks are never used again, while a fetch is a second use."""
MAX_COUNTED_KEYS = 1 << 17


class _Count(msgspec.Struct, frozen=True, gc=False):
    """Uses up to a time. Chunks that are always used together share one."""

    uses: float
    at: float


class UseCounts:
    """How often chunks were used lately, whether they are here or not.

    Args:
        half_life_s: after which a use counts half.
        max_keys: how many are counted; the one that was used least recently is forgotten.
    """

    def __init__(self, half_life_s: float = HALF_LIFE_S, max_keys: int = MAX_COUNTED_KEYS) -> None:
        self._half_life_s = half_life_s
        self._max_keys = max_keys
        self._counts: OrderedDict[bytes, _Count] = OrderedDict()

    def note(self, keys: Iterable[bytes], now: float, uses: float = 1.0) -> None:
        """Count a use of each, or a part of one."""
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
        """Uses of a chunk, the older ones counted less."""
        count = self._counts.get(key)
        return 0.0 if count is None else self._decayed(count, now)

    def _decayed(self, count: _Count, now: float) -> float:
        return count.uses * math.pow(0.5, (now - count.at) / self._half_life_s)


def worth_of_copy(uses: float, terms: CopyTerms) -> float:
    """Seconds that a copy saves, in the time that uses are counted over; its loss costs as much."""
    return uses / (terms.num_copies + 1) * terms.refetch_s


def loss_of_last(uses: float, victim: Chunk, chunk: Chunk, terms: CopyTerms) -> float:
    """Seconds that the loss of a chunk that nobody else is known to have costs.

    Args:
        uses: of the victim.
        victim: that would go.
        chunk, terms: for which: what its computation takes says how fast this deployment is.
    """
    return uses * recompute_seconds(victim) * terms.recompute_s / recompute_seconds(chunk)
