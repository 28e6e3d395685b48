"""Replicates hot chunks before they are requested again, if the links of all holders are busy.

A fetch leaves a copy where that pays, so hot chunks spread by themselves, but one request too late,
and each of these requests waits for the same links. If the links of all holders are booked for most
of the near future, another copy is worth its transfer immediately. Mooncake (FAST'25) copies on
demand only, and names congestion at the sender as the limit; this rule is our own.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from mooncake_conductor.errors import ConductorConfigError
from mooncake_conductor.fleet import Fleet
from mooncake_conductor.index.chunk_index import PrefixMatches
from mooncake_conductor.policies.heat import CacheReports, HeatMeter

_MAX_COOLING = 100_000


@dataclass(frozen=True, slots=True)
class ReplicationRule:
    """When a copy is made.

    Args:
        busy_share: share of the horizon for which the links of all holders must be booked.
        horizon_s: seconds into the future that are considered.
        cooldown_s: seconds between two copies of the same chunk.
        min_heat: decayed number of requests from which a chunk is hot.
    """

    busy_share: float = 0.7
    horizon_s: float = 2.0
    cooldown_s: float = 60.0
    min_heat: float = 4.0

    def __post_init__(self) -> None:
        if not (0 < self.busy_share <= 1 and self.horizon_s > 0 and self.cooldown_s >= 0):
            raise ConductorConfigError(
                f"replication needs 0 < busy share <= 1 and times above 0, found {self}"
            )


@dataclass(frozen=True, slots=True)
class Replication:
    """A copy to make.

    Args:
        source: slot of the sender.
        target: slot of the receiver.
        keys: keys of the chunks, in order.
    """

    source: int
    target: int
    keys: tuple[int, ...]


class Replicator:
    """Proposes copies; the caller decides whether to make them.

    Args:
        fleet: the instances and their links.
        heat: request frequency of chunks.
        reports: which instances have free space.
        rule: when a copy is made.
    """

    def __init__(
        self, fleet: Fleet, heat: HeatMeter, reports: CacheReports, rule: ReplicationRule
    ) -> None:
        self._fleet = fleet
        self._heat = heat
        self._reports = reports
        self._rule = rule
        self._cooling: OrderedDict[int, float] = OrderedDict()

    def propose(self, keys: Sequence[int], match: PrefixMatches, now: float) -> list[Replication]:
        """Propose copies of the chunks of a request, at most one per run of equal holders."""
        found, start = [], 0
        for length, mask in match.runs:
            run = tuple(keys[start : start + length])
            start += length
            holders = self._fleet.slots_of(mask & self._fleet.sender_mask)
            if (
                len(holders)
                and self._is_hot(run[length // 2], now)
                and self._are_busy(holders, now)
            ):
                target = self._target(mask, run, now)
                if target is not None:
                    until = self._fleet.links.sending_until[holders]
                    found.append(Replication(int(holders[until.argmin()]), target, run))
                    self._cool(run[0], now)
        return found

    def _is_hot(self, key: int, now: float) -> bool:
        return self._heat.of(key, now) >= self._rule.min_heat

    def _are_busy(self, holders: np.ndarray[tuple[int], np.dtype[np.int64]], now: float) -> bool:
        """Whether the links of all holders are booked for most of the horizon."""
        booked_s = self._fleet.links.sending_until[holders] - now
        return bool(booked_s.min() >= self._rule.busy_share * self._rule.horizon_s)

    def _target(self, mask: int, run: tuple[int, ...], now: float) -> int | None:
        """The instance to copy to: it lacks the chunks, its next victim is colder than they are,
        and its link is free to receive first."""
        if self._cooling.get(run[0], -np.inf) > now:
            return None
        fleet = self._fleet
        others = [
            int(slot)
            for slot in fleet.prefill_slots
            if fleet.fetches[slot] and not mask >> int(slot) & 1
        ]
        heat = self._heat.of(run[len(run) // 2], now) / (mask.bit_count() + 1)
        fitting = [slot for slot in others if self._victim_heat(slot, now) < heat]
        until = fleet.links.receiving_until
        return min(fitting, key=lambda slot: (float(until[slot]), slot), default=None)

    def _victim_heat(self, slot: int, now: float) -> float:
        victim = self._reports.victim(slot)
        return 0.0 if victim is None else self._heat.of(victim, now)

    def _cool(self, key: int, now: float) -> None:
        self._cooling[key] = now + self._rule.cooldown_s
        self._cooling.move_to_end(key)
        if len(self._cooling) > _MAX_COOLING:
            self._cooling.popitem(last=False)
