"""The default policy: the plan and prefill instance of least cost in seconds."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from mooncake_conductor.cost.link_calendar import Fetch
from mooncake_conductor.fleet import Values
from mooncake_conductor.policies.heat import CacheReports, HeatMeter
from mooncake_conductor.policies.situation import Plan, PrefillChoice, Situation

_OTHERS_PRICE = 2.0
"""Weight of a second that other requests lose, relative to one that this request waits."""


class CostPolicy:
    """Recompute, reuse the local prefix, join a prefill in flight, or fetch from other instances.

    Chunks are ideally held once in the fleet: a fetch keeps a copy only if that is worth more than
    what it evicts.

    Args:
        heat: request frequency of chunks.
        reports: which chunk each instance would evict next.
        num_copies: returns the number of copies of a chunk in the fleet.
    """

    def __init__(
        self, heat: HeatMeter, reports: CacheReports, num_copies: Callable[[int], int]
    ) -> None:
        self._heat = heat
        self._reports = reports
        self._num_copies = num_copies
        self._victim_values: Values = np.zeros(0)

    def choose(self, situation: Situation) -> PrefillChoice:
        sources = _sources(situation)
        ways = [way for make in _WAYS if (way := make(situation, sources)) is not None]
        reused = np.array([way.num_reused for way in ways])
        load = np.array([way.load for way in ways])
        compute = situation.compute(reused)
        ttft = np.maximum(situation.queue + compute, load + compute / situation.fleet.num_layers)
        lost = ttft - situation.queue
        space, drop = self._space(situation, sources)
        if sources:
            # Chunks that are copied, or recomputed although another instance holds them, take
            # space twice.
            twice = np.maximum(situation.match.pool - situation.match.held[situation.slots], 0)
            lost[:-1] += twice * space
            lost[-1] += twice * np.minimum(space, drop)
        scores = ttft + _OTHERS_PRICE * lost
        index = situation.least(scores.min(axis=0))
        at = (int(scores[:, index].argmin()), index)
        slot, plan = int(situation.slots[index]), ways[at[0]].plan
        fetches = _missing(sources, situation, slot) if plan is Plan.FETCH else ()
        return PrefillChoice(
            slot,
            plan,
            int(reused[at]),
            float(ttft[at]),
            float(situation.queue[index]),
            float(load[at]),
            float(compute[at]),
            fetches,
            keeps_copy=bool(fetches) and bool(space[index] < drop[index]),
        )

    def _space(self, situation: Situation, sources: tuple[Fetch, ...]) -> tuple[Values, Values]:
        """Seconds that a chunk costs other requests on each instance, if kept and if not kept.

        If kept, it costs the chunk that it evicts, or nothing if there is free space; if not kept,
        it costs fetching it again.
        """
        self._value_victims(situation)
        space = self._victim_values[situation.slots]
        if not sources:
            return space, np.full(len(space), np.inf)
        # The middle chunk represents all: heat decreases along a prompt.
        key = situation.request.keys[situation.match.pool // 2]
        heat = self._heat.of(key, situation.now) / (self._num_copies(key) + 1)
        fleet = situation.fleet
        return space, heat * fleet.chunk_bytes / fleet.links.bytes_per_s[situation.slots]

    def _value_victims(self, situation: Situation) -> None:
        """Update the values of the chunks that instances would evict next.

        Losing the last copy of a chunk costs a computation, losing another copy a fetch, each
        multiplied by how often the chunk is requested.
        """
        fleet = situation.fleet
        if not len(self._victim_values):
            self._victim_values = np.zeros(fleet.num_slots)
        for slot in self._reports.changed():
            victim = self._reports.victim(slot)
            if victim is None:
                self._victim_values[slot] = 0.0
                continue
            copies = self._num_copies(victim)
            refetch = fleet.chunk_bytes / float(fleet.links.bytes_per_s[slot])
            recompute = float(fleet.prefill[1, slot]) * fleet.chunk_tokens
            each = refetch if copies > 1 else recompute
            heat = self._heat.of(victim, situation.now)
            self._victim_values[slot] = heat / max(copies, 1) * each


class _Way(NamedTuple):
    """One plan, evaluated on all prefill instances."""

    plan: Plan
    num_reused: Values
    load: Values


def _recompute(situation: Situation, sources: tuple[Fetch, ...]) -> _Way:
    nothing = np.zeros(len(situation.slots))
    return _Way(Plan.RECOMPUTE, nothing, nothing)


def _local(situation: Situation, sources: tuple[Fetch, ...]) -> _Way | None:
    if not situation.own.any():
        return None
    return _Way(Plan.LOCAL, situation.tokens(situation.own), situation.local_load)


def _join(situation: Situation, sources: tuple[Fetch, ...]) -> _Way | None:
    """Wait for chunks that another request is computing or fetching on the same instance."""
    match = situation.match
    if match.predicted is match.local:
        return None
    wait = np.maximum(match.ready_at[situation.slots] - situation.now, 0.0)
    return _Way(
        Plan.JOIN, situation.tokens(match.predicted[situation.slots]), wait + situation.local_load
    )


def _fetch(situation: Situation, sources: tuple[Fetch, ...]) -> _Way | None:
    """Use the fleet's longest prefix: local chunks where held, the rest fetched from senders."""
    total = sum(fetch.num_chunks for fetch in sources)
    if not total:
        return None
    fleet, slots, now = situation.fleet, situation.slots, situation.now
    links = fleet.links
    held = np.minimum(situation.match.held[slots], total)
    moved = (total - held) * fleet.chunk_bytes
    sent = max(float(links.sending_until[fetch.source]) for fetch in sources)
    wait = np.maximum(np.maximum(links.receiving_until[slots], sent) - now, 0.0)
    rate = min(float(links.bytes_per_s[fetch.source]) for fetch in sources)
    remote = wait + links.setup_s + moved / np.minimum(links.bytes_per_s[slots], rate)
    scattered = np.maximum(held - situation.own, 0) * fleet.chunk_bytes
    here = situation.local_load + scattered / fleet.host_bytes_per_s[slots]
    load = np.where(moved > 0, np.maximum(remote, here), here)
    load = np.where((moved > 0) & ~fleet.fetches[slots], np.inf, load)
    return _Way(Plan.FETCH, situation.tokens(np.full(len(slots), total)), load)


_WAYS = (_recompute, _local, _join, _fetch)


def _sources(situation: Situation) -> tuple[Fetch, ...]:
    """For each run of the fleet's prefix, the holder whose link is free to send first."""
    until, start, chosen = situation.fleet.links.sending_until, 0, []
    for length, mask in situation.match.runs:
        senders = situation.fleet.slots_of(mask & situation.fleet.sender_mask)
        if not len(senders):
            break
        chosen.append(Fetch(int(senders[until[senders].argmin()]), start, length))
        start += length
    return tuple(chosen)


def _missing(sources: tuple[Fetch, ...], situation: Situation, slot: int) -> tuple[Fetch, ...]:
    """The fetches that the instance needs, without those of chunks that it holds itself."""
    masks = [mask for _, mask in situation.match.runs]
    return tuple(fetch for fetch, mask in zip(sources, masks, strict=False) if not mask >> slot & 1)
