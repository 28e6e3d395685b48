"""The eviction policy ``hit-density``: expected hits, learned from the store's own traffic. Pure.

How likely a sequence is to be used again depends less on when it was last used than on the request
that used it: a turn that added little to a long conversation is mostly followed by another one, a
new prompt of many chunks seldom is. Uses are therefore classified by what is known when they
happen, and for each class the policy learns at which ages sequences are used again. It evicts where
it expects the fewest hits per chunk and unit of time.

Sources: LHD (Beckmann, Chen and Cidon, NSDI 2018) ranks objects by hit density and learns it by
class and age. That requests fall into classes whose reuse is stable is a finding of "KVCache Cache
in the Wild" (arXiv 2506.02634, ATC 2025). Evicted chunks are remembered for a while, as the ghosts
of ARC (Megiddo and Modha, FAST 2003) are: otherwise what was evicted early would never be seen to
be used again.
"""

from __future__ import annotations

import math
from collections import OrderedDict, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import dropwhile, islice
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from mooncake_kv.store.chunk_store import Chunk  # brings numpy, and options name policies

NUM_AGE_GROUPS = 28
"""Ages are counted in uses of chunks. Group g holds those from 2**g - 1 on, the last one all that
follow."""
SHARED_PREFIX_USES = 32
"""From so many uses on, a chunk counts as part of a prefix that many conversations share."""
GHOSTS_PER_CHUNK = 4
MAX_GHOSTS = 1 << 17
"""Evicted chunks that are remembered, at some 350 bytes each, or 750 if each was used alone."""
ESTIMATE_INTERVAL = 4096
"""Uses of chunks between two estimates, which take a few milliseconds."""
MEMORY_PER_CHUNK = 8
"""Uses of chunks, per stored chunk, after which counts weigh 1/e: they follow the traffic."""
PRIOR_USES = 8.0
"""Weight of the average over all classes in the estimate of one class, in uses."""
MAX_SAMPLES = 64
"""Uses per class that an estimate looks at beside those that have ended."""


class UseClass(NamedTuple):
    """What is known about a use when it happens.

    Args:
        num_new_bits: bit length of the number of chunks that the use added.
        history: 0 if no chunk before them was known, 2 if the last one that was is part of a
            prefix that many conversations share, otherwise 1.
    """

    num_new_bits: int
    history: int


class SequenceUse:
    """The latest use of some chunks: consecutive chunks of one sequence, used by one request.

    Attributes:
        keys: those chunks that have not been used since and are stored, from first to last.
        used_at: time of the use; a use goes on while chunks are added to it.
        history: see ``UseClass``.
        num_new: number of chunks that it added.
        size: the largest number of its keys so far.
        num_ghosts: how many of its chunks were evicted and are remembered.
        use_class: its class.
    """

    __slots__ = ("history", "keys", "num_ghosts", "num_new", "size", "use_class", "used_at")

    def __init__(self) -> None:
        self.keys: dict[bytes, None] = {}
        self.used_at = 0
        self.history = 0
        self.num_new = 0
        self.size = 0
        self.num_ghosts = 0
        self.use_class = self.classify()

    def classify(self) -> UseClass:
        """The class that the use belongs to now."""
        return UseClass(self.num_new.bit_length(), self.history)


class ReuseStatistics:
    """At which ages uses of each class are followed by another use of the same chunks."""

    def __init__(self) -> None:
        self._hits: defaultdict[UseClass, list[float]] = defaultdict(_no_counts)
        self._ends: defaultdict[UseClass, list[float]] = defaultdict(_no_counts)
        self._densities: dict[UseClass, list[float]] = {}
        # until something is known, the oldest use is expected to be hit least
        self._average = [0.5**group for group in range(NUM_AGE_GROUPS)]

    def note(self, use_class: UseClass, age: int, share: float, *, is_hit: bool) -> None:
        """A share of a use's chunks was used again at this age, or is not watched any longer."""
        self._ends[use_class][age_group(age)] += share
        if is_hit:
            self._hits[use_class][age_group(age)] += share

    def density(self, use_class: UseClass, age: int) -> float:
        """Expected hits per chunk and unit of time of a use that has reached this age."""
        densities, group = self._densities.get(use_class, self._average), age_group(age)
        if group == NUM_AGE_GROUPS - 1:
            return densities[group]
        part = (age + 1) / (1 << group) - 1
        return densities[group] * (1 - part) + densities[group + 1] * part

    def estimate(self, watched: Iterable[tuple[UseClass, int, float]], kept: float) -> None:
        """Estimate the densities anew.

        Args:
            watched: class, age and share of the uses that have not ended, without which classes
                that are seldom used again would look better than they are.
            kept: factor of the counts so far in later estimates.
        """
        ends: defaultdict[UseClass, list[float]] = defaultdict(_no_counts)
        for use_class, age, share in watched:
            ends[use_class][age_group(age)] += share
        for use_class, counts in self._ends.items():
            ends[use_class] = _sum((ends[use_class], counts))
        all_hits, all_ends = _sum(self._hits.values()), _sum(ends.values())
        prior = PRIOR_USES / max(PRIOR_USES, sum(all_ends))
        self._average = hit_densities(all_hits, all_ends)
        self._densities = {
            use_class: hit_densities(
                _sum((self._hits[use_class], _scaled(all_hits, prior))),
                _sum((counts, _scaled(all_ends, prior))),
            )
            for use_class, counts in ends.items()
        }
        for by_class in (self._hits, self._ends):
            for use_class, counts in by_class.items():
                by_class[use_class] = _scaled(counts, kept)


def age_group(age: int) -> int:
    """The group of an age."""
    return min((age + 1).bit_length(), NUM_AGE_GROUPS) - 1


def hit_densities(hits: Sequence[float], ends: Sequence[float]) -> list[float]:
    """Expected hits per unit of time, from each age group on.

    It is the maximum over all times until which one may wait for a hit (Gittins' index): a class
    that is seldom used within its first seconds, because people read before they write, is worth
    what follows.

    Args:
        hits: number of uses that were followed by another one, by age group.
        ends: number of uses that ended in any way, or have reached this age, by age group.
    """
    times, num_older = _no_counts(), 0.0
    for group in range(NUM_AGE_GROUPS - 1, -1, -1):
        times[group] = (num_older + ends[group] / 2) * (1 << group)
        num_older += ends[group]
    densities = []
    for group in range(NUM_AGE_GROUPS):
        best = num_hits = time = 0.0
        for later in range(group, NUM_AGE_GROUPS):
            num_hits += hits[later]
            time += times[later]
            if num_hits > best * time:
                best = num_hits / time
        densities.append(best)
    return densities


class HitDensity:
    """Evicts the last chunk of the use with the lowest hit density, and no chunk before those that
    follow it in a sequence.

    Within a class, older uses have less to expect, so that only the oldest one of each class is
    compared.
    """

    def __init__(self) -> None:
        self._clock = 0
        self._statistics = ReuseStatistics()
        self._next_estimate = ESTIMATE_INTERVAL
        self._uses: dict[bytes, SequenceUse] = {}  # by chunk, stored or ghost
        self._queues: defaultdict[UseClass, OrderedDict[SequenceUse, None]] = defaultdict(
            OrderedDict
        )  # those with stored chunks, the oldest first
        self._num_uses: dict[bytes, int] = {}  # of each chunk, stored or ghost
        self._parents: dict[bytes, bytes | None] = {}  # of stored chunks
        self._num_children: dict[bytes, int] = {}  # of chunks with any that is stored
        self._ghosts: OrderedDict[bytes, None] = OrderedDict()
        self._uses_of_ghosts: dict[SequenceUse, None] = {}
        self._evicting: SequenceUse | None = None  # the use whose chunks are evicted next

    def add(self, chunk: Chunk) -> None:
        key, parent = chunk.key, chunk.parent
        if key in self._parents:
            self.remove(key)
        use = self._use_ending_with(parent)
        if use is None:
            use = SequenceUse()
            if parent in self._parents:
                use.history = self._history_after(parent)
        if key in self._ghosts:
            use.history = self._history_after(key)
            self._note(self._forget(key), 1, is_hit=True)
            self._num_uses[key] += 1
        else:
            use.num_new += 1
            self._num_uses[key] = 1
        self._parents[key] = parent
        if parent is not None:
            self._num_children[parent] = self._num_children.get(parent, 0) + 1
        self._extend(use, (key,))

    def touch(self, keys: Sequence[bytes]) -> None:
        stored = [key for key in dict.fromkeys(keys) if key in self._parents]
        if not stored:
            return
        num_hits: dict[SequenceUse, int] = {}
        for key in stored:
            use = self._uses[key]
            num_hits[use] = num_hits.get(use, 0) + 1
        if all(use.used_at == self._clock for use in num_hits):
            return  # a second call for the same use
        for use, count in num_hits.items():
            self._note(use, count, is_hit=True)
        history = self._history_after(stored[-1])
        for key in stored:
            self._take_out(key)
            self._num_uses[key] += 1
        use = self._use_ending_with(self._parents[stored[0]]) or SequenceUse()
        use.history, use.num_new = history, 0
        self._extend(use, stored)

    def remove(self, key: bytes) -> None:
        if key not in self._parents:
            return
        use = self._take_out(key)
        parent = self._parents.pop(key)
        if parent is not None:
            self._num_children[parent] -= 1
            if not self._num_children[parent]:
                del self._num_children[parent]
        self._ghosts[key] = None
        self._uses_of_ghosts[use] = None
        use.num_ghosts += 1
        while len(self._ghosts) > min(GHOSTS_PER_CHUNK * (1 + len(self._parents)), MAX_GHOSTS):
            oldest = next(iter(self._ghosts))
            self._note(self._forget(oldest), 1, is_hit=False)
            del self._num_uses[oldest]

    def victims(self) -> Iterator[bytes]:
        num_passed: dict[bytes, int] = {}  # of each chunk's children
        held: dict[SequenceUse, bytes] = {}  # uses with a chunk that other uses need: that chunk
        try:
            for use in self._by_density():
                for key in reversed(use.keys):
                    if self._is_needed(key, num_passed):
                        held[use] = key
                        break
                    self._pass(key, num_passed)
                    yield key
            yield from self._rest(held, num_passed)
        finally:
            self._defer(held)

    def _rest(
        self, held: Mapping[SequenceUse, bytes], num_passed: dict[bytes, int]
    ) -> Iterator[bytes]:
        """The chunks that other uses need, after those: of each use from the given one on."""
        rest = {
            key: None
            for use, first in held.items()
            for key in dropwhile(first.__ne__, reversed(use.keys))
        }
        while rest:  # if all are needed, a faulty user's parents are cyclic
            free = [key for key in rest if not self._is_needed(key, num_passed)]
            for key in free or tuple(rest):
                following: bytes | None = key
                while following is not None and following in rest:
                    del rest[following]
                    self._pass(following, num_passed)
                    yield following
                    following = self._parents[following]
                    if following is not None and self._is_needed(following, num_passed):
                        break

    def _by_density(self) -> Iterator[SequenceUse]:
        """The uses, the one with the lowest density first. The one whose chunks were evicted last
        precedes all others until it has none left or is used again."""
        first = self._evicting
        if first is not None:
            yield first
        queues = {use_class: iter(queue) for use_class, queue in self._queues.items() if queue}
        oldest = {use_class: next(queue) for use_class, queue in queues.items()}
        while oldest:
            use_class = min(oldest, key=lambda each: self._rank(oldest[each]))
            use, following = oldest[use_class], next(queues[use_class], None)
            if following is None:
                del oldest[use_class]
            else:
                oldest[use_class] = following
            if use is not first:
                if self._evicting is None:
                    self._evicting = use
                yield use

    def _rank(self, use: SequenceUse) -> tuple[float, int]:
        return self._statistics.density(use.use_class, self._clock - use.used_at), use.used_at

    def _is_needed(self, key: bytes, num_passed: Mapping[bytes, int]) -> bool:
        """Whether a chunk has children that are stored and were not passed."""
        return self._num_children.get(key, 0) > num_passed.get(key, 0)

    def _pass(self, key: bytes, num_passed: dict[bytes, int]) -> None:
        parent = self._parents[key]
        if parent is not None:
            num_passed[parent] = num_passed.get(parent, 0) + 1

    def _defer(self, held: Iterable[SequenceUse]) -> None:
        """Consider uses again after all others of their class, so that each eviction need not pass
        over them."""
        for use in held:
            if use.keys:
                self._queues[use.use_class].move_to_end(use)
            if use is self._evicting:
                self._evicting = None

    def _history_after(self, key: bytes) -> int:
        """The history of a use that continues behind a chunk."""
        return 2 if self._num_uses[key] >= SHARED_PREFIX_USES else 1

    def _use_ending_with(self, key: bytes | None) -> SequenceUse | None:
        """The use that a chunk behind this one continues, if there is one."""
        if key is None or key not in self._parents:
            return None
        use = self._uses[key]
        return use if next(reversed(use.keys), None) == key else None

    def _extend(self, use: SequenceUse, keys: Sequence[bytes]) -> None:
        """Add chunks to a use, which happens now."""
        self._clock += len(keys)
        for key in keys:
            use.keys[key] = None
            self._uses[key] = use
        use.used_at = self._clock
        use.size = max(use.size, len(use.keys))
        self._queues[use.use_class].pop(use, None)
        use.use_class = use.classify()
        self._queues[use.use_class][use] = None
        if use is self._evicting:
            self._evicting = None
        if self._clock >= self._next_estimate:
            self._next_estimate = self._clock + ESTIMATE_INTERVAL
            memory = MEMORY_PER_CHUNK * max(len(self._parents), ESTIMATE_INTERVAL)
            self._statistics.estimate(self._watched(), math.exp(-ESTIMATE_INTERVAL / memory))

    def _take_out(self, key: bytes) -> SequenceUse:
        """Take a stored chunk out of its use; returns that."""
        use = self._uses[key]
        del use.keys[key]
        if not use.keys:
            del self._queues[use.use_class][use]
            if use is self._evicting:
                self._evicting = None
        return use

    def _forget(self, ghost: bytes) -> SequenceUse:
        """Stop to remember an evicted chunk; returns its last use."""
        del self._ghosts[ghost]
        use = self._uses.pop(ghost)
        use.num_ghosts -= 1
        if not use.num_ghosts:
            del self._uses_of_ghosts[use]
        return use

    def _note(self, use: SequenceUse, num_chunks: int, *, is_hit: bool) -> None:
        """Some of a use's chunks are used again, or forgotten."""
        age = self._clock - use.used_at
        self._statistics.note(use.use_class, age, num_chunks / use.size, is_hit=is_hit)

    def _watched(self) -> Iterator[tuple[UseClass, int, float]]:
        """A sample of the uses whose chunks are stored or remembered: class, age, and the share
        of chunks that it stands for."""
        for queue in self._queues.values():
            step = 1 + len(queue) // MAX_SAMPLES
            for use in islice(queue, 0, None, step):
                yield use.use_class, self._clock - use.used_at, step * len(use.keys) / use.size
        step = 1 + len(self._uses_of_ghosts) // (16 * MAX_SAMPLES)
        for use in islice(self._uses_of_ghosts, 0, None, step):
            yield use.use_class, self._clock - use.used_at, step * use.num_ghosts / use.size


def _no_counts() -> list[float]:
    return [0.0] * NUM_AGE_GROUPS


def _sum(counts: Iterable[Sequence[float]]) -> list[float]:
    return [sum(column) for column in zip(_no_counts(), *counts, strict=True)]


def _scaled(counts: Sequence[float], factor: float) -> list[float]:
    return [factor * count for count in counts]
