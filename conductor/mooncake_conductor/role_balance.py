"""Role balance: the load of both roles, which role is short of instances, and role switches.

Roles are switched only after significant shifts of load, as in the paper: a rule with hysteresis.
An instance that is to switch is drained, and switches once it is idle.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum

import numpy as np

from mooncake_conductor.decode_load import DecodeLedger
from mooncake_conductor.errors import ConductorConfigError
from mooncake_conductor.fleet import Fleet, Role
from mooncake_conductor.reservations import ReservationBook


@dataclass(frozen=True, slots=True)
class RoleRule:
    """When a role is short of instances.

    Args:
        high: load from which a role is short, if the other's load is at most ``low``.
        low: load up to which the other role can spare an instance.
        hold_s: seconds for which both must hold before a switch is proposed, and between proposals.
        min_each: instances that each role keeps.
    """

    high: float = 0.9
    low: float = 0.5
    hold_s: float = 30.0
    min_each: int = 1

    def __post_init__(self) -> None:
        if not (0 < self.low < self.high and self.hold_s >= 0 and self.min_each >= 1):
            raise ConductorConfigError(
                f"a role rule needs 0 < low < high and at least 1 instance each, found {self}"
            )


class Balance(Enum):
    """Which role is short of instances."""

    EVEN = "even"
    SHORT_OF_PREFILL = "short of prefill"
    SHORT_OF_DECODE = "short of decode"


@dataclass(frozen=True, slots=True)
class FleetLoad:
    """The load of both roles; 1 is the most that the objectives allow.

    Args:
        prefill: mean queueing time of prefills, as a share of the TTFT objective.
        decode: mean share of batch slots or KV memory in use, whichever is more.
        num_prefill: prefill instances.
        num_decode: decode instances.
    """

    prefill: float
    decode: float
    num_prefill: int
    num_decode: int

    def desired_instances(self, target: float = 0.7) -> tuple[int, int]:
        """Numbers of prefill and decode instances at which the load would be ``target``.

        At least 1 each. This is what an autoscaler computes from the loads.
        """
        return (
            max(math.ceil(self.num_prefill * self.prefill / target), 1),
            max(math.ceil(self.num_decode * self.decode / target), 1),
        )


@dataclass(frozen=True, slots=True)
class RoleChange:
    """An instance that should switch its role once it is idle.

    Args:
        slot: slot of the instance.
        role: its new role.
    """

    slot: int
    role: Role


def fleet_load(fleet: Fleet, ledger: DecodeLedger, ttft_s: float, now: float) -> FleetLoad:
    """The current load of both roles.

    Args:
        fleet: the instances.
        ledger: the requests bound to decode instances.
        ttft_s: TTFT objective in seconds; must be finite.
        now: current time.
    """
    queue = fleet.queues.seconds(fleet.prefill_slots, now)
    slots, held = fleet.decode_slots, ledger.reserved()
    share = np.maximum(
        held.num_sequences / np.maximum(fleet.max_batch[slots], 1),
        held.num_context / np.maximum(fleet.kv_tokens[slots], 1),
    )
    return FleetLoad(
        float(queue.mean()) / ttft_s if len(queue) else 0.0,
        float(share.mean()) if len(share) else 0.0,
        len(queue),
        len(share),
    )


class RoleBalancer:
    """Observes the load, and proposes which instance should switch its role.

    Args:
        rule: when a role is short of instances.
    """

    def __init__(self, rule: RoleRule) -> None:
        self.state = Balance.EVEN
        self._rule = rule
        self._since = -math.inf
        self._proposed_at = -math.inf

    def observe(self, load: FleetLoad, now: float) -> Balance:
        """Update the state with the current load, and return it.

        A role that was short stays so until its load falls below the middle of both limits, or the
        other role's load rises above it.
        """
        rule, middle = self._rule, (self._rule.low + self._rule.high) / 2
        prefill, decode = load.prefill, load.decode
        state = self.state
        short, other = (prefill, decode) if state is Balance.SHORT_OF_PREFILL else (decode, prefill)
        if short < middle or other > middle:
            state = Balance.EVEN
        if state is Balance.EVEN and prefill >= rule.high and decode <= rule.low:
            state = Balance.SHORT_OF_PREFILL
        elif state is Balance.EVEN and decode >= rule.high and prefill <= rule.low:
            state = Balance.SHORT_OF_DECODE
        if state is not self.state:
            self.state, self._since = state, now
        return state

    def propose(
        self, fleet: Fleet, ledger: DecodeLedger, load: FleetLoad, now: float
    ) -> RoleChange | None:
        """Propose to switch the least loaded instance of the role that can spare one, if due."""
        self.observe(load, now)
        waits_until = max(self._since, self._proposed_at) + self._rule.hold_s
        if self.state is Balance.EVEN or now < waits_until:
            return None
        takes_prefill = self.state is Balance.SHORT_OF_DECODE
        slots = fleet.prefill_slots if takes_prefill else fleet.decode_slots
        own = [slot for slot in slots if fleet.role(int(slot)) is not Role.BOTH]
        own = [slot for slot in own if not fleet.is_draining[slot]]
        if len(own) <= self._rule.min_each:
            return None
        self._proposed_at = now
        if takes_prefill:
            work = fleet.queues.seconds(np.array(own), now)
            return RoleChange(int(own[int(work.argmin())]), Role.DECODE)
        held = dict(zip(fleet.decode_slots.tolist(), ledger.reserved().num_sequences, strict=True))
        return RoleChange(int(min(own, key=lambda slot: held[int(slot)])), Role.PREFILL)


class RoleChanges:
    """Carries out role switches: drains the instance, waits until it is idle, and reports it.

    A switch is abandoned if the load changes meanwhile.

    Args:
        fleet: the instances.
        book: the reservations, which tell whether an instance is idle.
        ledger: the requests bound to decode instances.
        rule: when a role is short of instances.
        ttft_s: TTFT objective in seconds, relative to which prefill load is measured.
    """

    def __init__(
        self,
        fleet: Fleet,
        book: ReservationBook,
        ledger: DecodeLedger,
        rule: RoleRule,
        ttft_s: float,
    ) -> None:
        if not (0 < ttft_s < math.inf):
            raise ConductorConfigError(
                f"role changes need an objective for the first token in seconds, found {ttft_s}"
            )
        self._fleet, self._book, self._ledger = fleet, book, ledger
        self._balancer = RoleBalancer(rule)
        self._ttft_s = ttft_s
        self._pending: tuple[RoleChange, Balance] | None = None

    @property
    def state(self) -> Balance:
        """Which role is short of instances."""
        return self._balancer.state

    def load(self, now: float) -> FleetLoad:
        """The load of both roles, as shown to autoscalers."""
        return fleet_load(self._fleet, self._ledger, self._ttft_s, now)

    def tick(self, now: float) -> RoleChange | None:
        """Do the next step; must be called periodically.

        Returns:
            A switch that can be made now, if any. The caller makes it with ``Fleet.set_role``.
        """
        load = self.load(now)
        if self._pending is None:
            change = self._balancer.propose(self._fleet, self._ledger, load, now)
            if change is not None:
                self._pending = (change, self._balancer.state)
                self._fleet.drain(change.slot)
            return None
        change, reason = self._pending
        if self._balancer.observe(load, now) is not reason:
            self._fleet.drain(change.slot, False)
            self._pending = None
        elif not self._book.uses(change.slot):
            self._pending = None
            return change
        return None
