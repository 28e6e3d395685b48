"""The default policy: every way to a prefix on every instance, in seconds; the least is taken."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from mooncake_conductor.cost.link_calendar import Fetch
from mooncake_conductor.fleet import Values
from mooncake_conductor.index.holder_sets import slots_of
from mooncake_conductor.policies.heat import CacheReports, HeatMeter, is_worth_keeping
from mooncake_conductor.policies.situation import Plan, PrefillChoice, Situation

_COMPUTE_PRICE = 1e-3
"""A second of computation is a thousandth worse than one of waiting: it breaks near-ties."""


@dataclass(frozen=True, slots=True)
class _Way:
    """One plan on all prefill instances."""

    plan: Plan
    num_reused: Values
    load: Values
    compute: Values
    ttft: Values


class CostPolicy:
    """Recompute, use what is local, wait for what is under way, or fetch from whoever has it.

    The pool holds chunks once: a fetch leaves a copy only where that is worth what it pushes out.

    Args:
        heat: how often chunks are asked for.
        reports: what instances would evict next.
        num_copies: of a chunk in the fleet, from the index.
    """

    def __init__(
        self, heat: HeatMeter, reports: CacheReports, num_copies: Callable[[int], int]
    ) -> None:
        self._heat = heat
        self._reports = reports
        self._num_copies = num_copies

    def choose(self, seen: Situation) -> PrefillChoice:
        sources = _sources(seen)
        ways = [_recompute(seen), *_local(seen), *_join(seen), *_fetch(seen, sources)]
        scores = np.stack([way.ttft + _COMPUTE_PRICE * way.compute for way in ways])
        index = seen.least(scores.min(axis=0))
        way = ways[int(scores[:, index].argmin())]
        slot = int(seen.slots[index])
        fetches = _missing(sources, seen, slot) if way.plan is Plan.FETCH else ()
        return PrefillChoice(
            slot,
            way.plan,
            int(way.num_reused[index]),
            float(way.ttft[index]),
            float(seen.queue[index]),
            float(way.load[index]),
            float(way.compute[index]),
            fetches,
            keeps_copy=bool(fetches) and self._keeps(seen, slot, fetches),
        )

    def _keeps(self, seen: Situation, slot: int, fetches: tuple[Fetch, ...]) -> bool:
        victim = self._reports.victim(slot)
        if victim is None:
            return True
        # The middle chunk of the longest run stands for all: heat falls along a prompt.
        run = max(fetches, key=lambda fetch: fetch.num_chunks)
        key = seen.request.keys[run.start + run.num_chunks // 2]
        fleet = seen.fleet
        return is_worth_keeping(
            heat=self._heat.of(key, seen.now),
            num_copies=self._num_copies(key),
            victim_heat=self._heat.of(victim, seen.now),
            victim_copies=self._num_copies(victim),
            refetch_s=fleet.chunk_bytes / float(fleet.links.bytes_per_s[slot]),
            recompute_s=float(fleet.prefill[1, slot]) * fleet.chunk_tokens,
        )


def _way(seen: Situation, plan: Plan, num_reused: Values, load: Values) -> _Way:
    compute = seen.compute(num_reused)
    ttft = np.maximum(seen.queue + compute, load + compute / seen.fleet.num_layers)
    return _Way(plan, num_reused, load, compute, ttft)


def _recompute(seen: Situation) -> _Way:
    nothing = np.zeros(len(seen.slots))
    return _way(seen, Plan.RECOMPUTE, nothing, nothing)


def _local(seen: Situation) -> list[_Way]:
    own = seen.local()
    if not own.any():
        return []
    return [_way(seen, Plan.LOCAL, seen.tokens(own), seen.local_load())]


def _join(seen: Situation) -> list[_Way]:
    """Wait for what a sibling is computing or fetching on that instance."""
    match = seen.match
    if match.predicted is match.local:
        return []
    wait = np.maximum(match.ready_at[seen.slots] - seen.now, 0.0)
    reused = seen.tokens(match.predicted[seen.slots])
    return [_way(seen, Plan.JOIN, reused, wait + seen.local_load())]


def _sources(seen: Situation) -> tuple[Fetch, ...]:
    """For each run of the pool's prefix the prefill instance that is soonest free to send it."""
    until, start, chosen = seen.fleet.links.sending_until, 0, []
    allowed = sum(1 << int(slot) for slot in seen.slots) if seen.match.runs else 0
    for length, mask in seen.match.runs:
        senders = list(slots_of(mask & allowed))
        if not senders:
            break
        chosen.append(Fetch(min(senders, key=until.__getitem__), start, length))
        start += length
    return tuple(chosen)


def _fetch(seen: Situation, sources: tuple[Fetch, ...]) -> list[_Way]:
    """Take the pool's prefix: what is held there, and the rest from its senders."""
    total = sum(fetch.num_chunks for fetch in sources)
    if not total:
        return []
    fleet, slots, now = seen.fleet, seen.slots, seen.now
    links = fleet.links
    held = np.minimum(seen.match.held[slots], total)
    moved = (total - held) * fleet.chunk_bytes
    sent = max(float(links.sending_until[fetch.source]) for fetch in sources)
    wait = np.maximum(np.maximum(links.receiving_until[slots], sent) - now, 0.0)
    rate = min(float(links.bytes_per_s[fetch.source]) for fetch in sources)
    remote = wait + links.setup_s + moved / np.minimum(links.bytes_per_s[slots], rate)
    scattered = np.maximum(held - seen.local(), 0) * fleet.chunk_bytes
    here = seen.local_load() + scattered / fleet.host_bytes_per_s[slots]
    load = np.where(moved > 0, np.maximum(remote, here), here)
    return [_way(seen, Plan.FETCH, seen.tokens(np.full(len(slots), total)), load)]


def _missing(sources: tuple[Fetch, ...], seen: Situation, slot: int) -> tuple[Fetch, ...]:
    """What that instance does not hold itself."""
    masks = [mask for _, mask in seen.match.runs]
    return tuple(fetch for fetch, mask in zip(sources, masks, strict=False) if not mask >> slot & 1)
