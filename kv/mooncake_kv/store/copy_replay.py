"""Replays a trace over several stores that fetch from each other, to compare rules about copies.

Requests are assigned to the stores round-robin. A request uses the chunks that its store has,
fetches those that another store has, and computes the rest, which its store then holds. Three rules
decide whether fetched chunks are kept: ``never``, ``always``, and ``worth``, which uses
``copy_worth``. The chunk tables are those of real stores. Seconds come from a model of computation
(``eviction.recompute_seconds``) and from a fixed fetch time. Nothing overlaps and no link is
shared, so the replay compares total seconds, not latencies. Pure, except for ``read_timed_trace``.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path

from mooncake_kv.store.arena_allocator import GRANULE
from mooncake_kv.store.chunk_store import Chunk, CopyTerms, Tier, WriteHandle
from mooncake_kv.store.chunk_table import ChunkTable, TableSettings
from mooncake_kv.store.eviction import TailFirstLRU, recompute_seconds
from mooncake_kv.store.trace_replay import Requests, read_trace

RULES = ("never", "always", "worth")
LEASE_S = 1.0
USER = 1


@dataclass(slots=True)
class CopyReplay:
    """The result of replaying a trace with a rule.

    Args:
        num_chunks: chunks of all requests.
        num_local, num_fetched: hits in the request's own store, and in another one.
        compute_s: seconds to compute the chunks that no store had.
        fetch_s: seconds to fetch the chunks that another store had.
        num_copies: fetched chunks that were kept.
    """

    num_chunks: int = 0
    num_local: int = 0
    num_fetched: int = 0
    compute_s: float = 0.0
    fetch_s: float = 0.0
    num_copies: int = 0

    @property
    def total_s(self) -> float:
        """Seconds of computation and transfer, without overlap."""
        return self.compute_s + self.fetch_s


class _Holders:
    """Tracks which stores have each chunk, as an observer of their tables."""

    def __init__(self) -> None:
        self.of: dict[bytes, set[int]] = {}

    def follow(self, number: int) -> _Follower:
        """Create the observer of one store."""
        return _Follower(self.of, number)


class _Follower:
    def __init__(self, holders: dict[bytes, set[int]], number: int) -> None:
        self._holders = holders
        self._number = number

    def staging(self, keys: Sequence[bytes]) -> None:
        """Ignored: the chunks can't be fetched yet."""

    def unstaged(self, key: bytes) -> None:
        """Ignored: the chunk could not be fetched."""

    def committed(self, chunks: Sequence[Chunk]) -> None:
        self.stored(Tier.DRAM, chunks)

    def stored(self, tier: Tier, chunks: Sequence[Chunk]) -> None:
        for chunk in chunks:
            self._holders.setdefault(chunk.key, set()).add(self._number)

    def removed(self, tier: Tier, keys: Sequence[bytes]) -> None:
        for key in keys:
            self._holders[key].discard(self._number)


def read_timed_trace(
    path: Path, *, max_requests: int | None = None
) -> tuple[Requests, list[float]]:
    """Read the requests of a trace, and their arrival times in seconds.

    Raises:
        KVConfigError: see ``read_trace``.
    """
    requests = read_trace(path, max_requests=max_requests)
    with path.open(encoding="utf-8") as file:
        times = [float(json.loads(line)["timestamp"]) / 1000 for line, _ in zip(file, requests)]  # noqa: B905  # the file may be longer
    return requests, times


def replay_copies(
    requests: Requests,
    times: Sequence[float],
    rule: str,
    *,
    num_stores: int,
    capacity: int,
    refetch_s: float,
) -> CopyReplay:
    """Replay a trace with a rule.

    Args:
        requests, times: from ``read_timed_trace``.
        rule: one of RULES.
        num_stores: number of stores.
        capacity: capacity of each store in chunks.
        refetch_s: seconds to fetch one chunk.
    """
    holders, result = _Holders(), CopyReplay()
    tables = [
        ChunkTable(capacity * GRANULE, TableSettings(TailFirstLRU), holders.follow(number))
        for number in range(num_stores)
    ]
    for number, (chunks, now) in enumerate(zip(requests, times, strict=True)):
        table = tables[number % num_stores]
        cached = list(takewhile(lambda chunk: holders.of.get(chunk.key), chunks))
        away = [chunk for chunk in cached if table.entry(chunk.key) is None]
        missing = chunks[len(cached) :]
        result.num_chunks += len(chunks)
        result.num_local += len(cached) - len(away)
        result.num_fetched += len(away)
        result.fetch_s += refetch_s * len(away)
        result.compute_s += sum(map(recompute_seconds, missing))
        table.touch([chunk.key for chunk in cached], now)
        for chunk in away:
            tables[next(iter(holders.of[chunk.key]))].touch([chunk.key], now)
        for chunk in away if rule != "never" else ():
            known = len(holders.of.get(chunk.key, ()))
            terms = CopyTerms(max(1, known), refetch_s, recompute_seconds(chunk))
            is_kept = _put(table, chunk, now, terms if rule == "worth" else None)
            result.num_copies += is_kept
        for chunk in missing:
            _put(table, chunk, now, None)
    return result


def _put(table: ChunkTable, chunk: Chunk, now: float, terms: CopyTerms | None) -> bool:
    (grant,) = table.reserve([chunk], USER, LEASE_S, now, terms)
    return isinstance(grant, WriteHandle) and table.commit([grant.handle_id], USER, now)[0]
