"""Replays a trace against an eviction policy: its hit rate, and the best hit rate possible.

A trace has one JSON object per line, as Mooncake publishes them: ``hash_ids`` are a request's
blocks in order, and equal ids are equal prefixes. A request hits the blocks before its first miss,
then all of its blocks are stored. Pure, except for ``read_trace``.

``replay_optimum`` knows the future: it evicts the block whose next use is latest (Belady's MIN,
with the option not to store a block at all). A request that uses a block also uses all blocks
before it, so this evicts ends of sequences first, and no policy hits more blocks.
``saved_seconds_bound`` bounds the seconds that any policy can save, where late blocks cost more
than early ones.
"""

from __future__ import annotations

import heapq
import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import numpy as np

from mooncake_kv.errors import KVConfigError
from mooncake_kv.store.chunk_store import Chunk
from mooncake_kv.store.eviction import EvictionPolicy, recompute_seconds

TRACE_BLOCK_TOKENS = 512


@dataclass(frozen=True, slots=True)
class ReplayResult:
    """The result of replaying a trace with a policy.

    Args:
        num_blocks: blocks of all requests.
        num_hits: blocks that were present together with all blocks before them.
        seconds: modelled seconds to compute all blocks, see ``recompute_seconds``.
        saved_seconds: the same for the blocks that were hit.
    """

    num_blocks: int
    num_hits: int
    seconds: float
    saved_seconds: float

    @property
    def hit_rate(self) -> float:
        """Fraction of the blocks that were hit."""
        return self.num_hits / max(1, self.num_blocks)

    @property
    def saved_rate(self) -> float:
        """Fraction of the computation that was saved."""
        return self.saved_seconds / self.seconds if self.seconds else 0.0


Requests = Sequence[Sequence[Chunk]]


def read_trace(path: Path, *, max_requests: int | None = None) -> list[list[Chunk]]:
    """Read the requests of a trace, each as a list of chunks; equal blocks are the same object.

    Raises:
        KVConfigError: the file can't be read, or a line is not a request.
    """
    requests: list[list[Chunk]] = []
    known: dict[tuple[int, int], Chunk] = {}
    try:
        with path.open(encoding="utf-8") as file:
            for line in islice(file, max_requests):
                requests.append(_chunks(json.loads(line)["hash_ids"], known))
    except OSError as exc:
        raise KVConfigError(f"the trace {path} can't be read: {exc}") from exc
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError) as exc:
        raise KVConfigError(
            f"{path}, line {len(requests) + 1}: wanted an object with hash_ids, a list of "
            f"numbers: {exc!r}"
        ) from exc
    return requests


def _chunks(hash_ids: Iterable[int], known: dict[tuple[int, int], Chunk]) -> list[Chunk]:
    chunks: list[Chunk] = []
    for position, hash_id in enumerate(hash_ids):
        chunk = known.get((hash_id, position))
        if chunk is None:
            key = hash_id.to_bytes(8, "big")
            parent = chunks[-1].key if chunks else None
            chunk = Chunk(key, parent, position, 1, TRACE_BLOCK_TOKENS)
            known[hash_id, position] = chunk
        chunks.append(chunk)
    return chunks


def replay(requests: Requests, policy: EvictionPolicy, capacity: float) -> ReplayResult:
    """Replay a trace against a policy with a capacity of ``capacity`` blocks."""
    present: set[bytes] = set()
    tally = _Tally()
    for chunks in requests:
        tally.count(chunks, present)
        used = {chunk.key for chunk in chunks}
        policy.touch([chunk.key for chunk in chunks if chunk.key in present])
        missing = [chunk for chunk in chunks if chunk.key not in present]
        too_many = len(present) + len(missing) - capacity
        if too_many > 0:
            victims = (key for key in policy.victims() if key not in used)
            for key in list(islice(victims, int(too_many))):
                policy.remove(key)
                present.discard(key)
        for chunk in missing[: int(min(len(missing), capacity - len(present)))]:
            policy.add(chunk)
            present.add(chunk.key)
    return tally.result()


def replay_optimum(requests: Requests, capacity: float) -> ReplayResult:
    """Replay a trace with knowledge of the future; see the module."""
    next_uses = _next_uses(requests)
    present: set[bytes] = set()
    when: dict[bytes, tuple[float, int]] = {}
    order: list[tuple[float, int, bytes]] = []  # latest next use first, then latest position
    tally = _Tally()
    for chunks, later in zip(requests, next_uses, strict=True):
        tally.count(chunks, present)
        for chunk, use in zip(chunks, later, strict=True):
            present.add(chunk.key)
            when[chunk.key] = (-use, -chunk.position)
            heapq.heappush(order, (-use, -chunk.position, chunk.key))
        while len(present) > capacity:
            use, position, key = heapq.heappop(order)
            if key in present and when[key] == (use, position):
                present.discard(key)
    return tally.result()


def saved_seconds_bound(requests: Requests, capacity: float, *, num_steps: int = 300) -> float:
    """Upper bound of the seconds of computation that any policy can save.

    A block that is used again saves its seconds if it is held from one use to the next. Choosing
    the blocks to hold, with a capacity of ``capacity`` blocks between any two requests, is a linear
    program. Prices for the capacity at each time yield a bound (weak duality), which subgradient
    steps tighten. The constraint that a block is useless without those before it is left out: it
    could only lower the optimum.
    """
    first, last, worth = [], [], []
    for number, (chunks, later) in enumerate(zip(requests, _next_uses(requests), strict=True)):
        for chunk, use in zip(chunks, later, strict=True):
            if use < math.inf:
                first.append(number)
                last.append(int(use))
                worth.append(recompute_seconds(chunk))
    begin, end, seconds = np.array(first, int), np.array(last, int), np.array(worth)
    best = float(seconds.sum())
    if not best or capacity >= len(seconds):
        return best
    reached = replay_optimum(requests, capacity).saved_seconds
    prices = np.zeros(len(requests))
    for _ in range(num_steps):
        paid = np.concatenate(([0.0], np.cumsum(prices)))
        gains = seconds - (paid[end] - paid[begin])
        bound = capacity * float(prices.sum()) + float(gains[gains > 0].sum())
        best = min(best, bound)
        held = gains > 0
        size = len(requests) + 1
        changes = np.bincount(begin[held], minlength=size) - np.bincount(end[held], minlength=size)
        spare = capacity - np.cumsum(changes)[: len(requests)]
        norm = float(spare @ spare)
        if not norm or bound <= reached:
            break
        prices = np.maximum(0.0, prices - spare * (bound - reached) / norm)
    return max(best, reached)


def _next_uses(requests: Requests) -> list[list[float]]:
    """For each block of each request, the index of the next request that uses it."""
    upcoming: dict[bytes, int] = {}
    uses: list[list[float]] = []
    for number in range(len(requests) - 1, -1, -1):
        uses.append([upcoming.get(chunk.key, math.inf) for chunk in requests[number]])
        upcoming.update((chunk.key, number) for chunk in requests[number])
    uses.reverse()
    return uses


@dataclass(slots=True)
class _Tally:
    """Counts hits during a replay."""

    num_blocks: int = 0
    num_hits: int = 0
    seconds: float = 0.0
    saved_seconds: float = 0.0

    def count(self, chunks: Sequence[Chunk], present: set[bytes]) -> int:
        """Count one request; returns how many of its blocks are present before the first miss."""
        self.num_blocks += len(chunks)
        num_hits, is_prefix = 0, True
        for chunk in chunks:
            cost = recompute_seconds(chunk)
            self.seconds += cost
            is_prefix = is_prefix and chunk.key in present
            if is_prefix:
                num_hits += 1
                self.saved_seconds += cost
        self.num_hits += num_hits
        return num_hits

    def result(self) -> ReplayResult:
        """The totals so far."""
        return ReplayResult(self.num_blocks, self.num_hits, self.seconds, self.saved_seconds)
