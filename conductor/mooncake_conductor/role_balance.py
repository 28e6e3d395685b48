"""Which side is short, whether an instance should change sides, and how many there should be.

Roles are fixed and change only on significant shifts of load, as in the paper: a two-state rule
with hysteresis. An instance that is to change gets no more requests, and changes once it is idle.
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
    """When a side is short.

    Args:
        high: load of a side from which it is short, if the other's is below ``low``.
        low: load of the other side below which it can spare an instance.
        hold_s: how long both must hold before anything is proposed, and between two proposals.
        min_each: instances that each side keeps.
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
    """Which side is short."""

    EVEN = "even"
    SHORT_OF_PREFILL = "short of prefill"
    SHORT_OF_DECODE = "short of decode"


@dataclass(frozen=True, slots=True)
class FleetLoad:
    """The load of both sides; 1 is as much as the objectives allow.

    Args:
        prefill: mean seconds of queue, as a share of the objective for the first token.
        decode: mean share of decode slots or of KV memory that is taken, whichever is more.
        num_prefill, num_decode: instances.
    """

    prefill: float
    decode: float
    num_prefill: int
    num_decode: int

    def wanted(self, target: float = 0.7) -> tuple[int, int]:
        """Prefill and decode instances at which the load would be ``target``, at least 1 each:
        what an autoscaler computes from the loads."""
        return (
            max(math.ceil(self.num_prefill * self.prefill / target), 1),
            max(math.ceil(self.num_decode * self.decode / target), 1),
        )


@dataclass(frozen=True, slots=True)
class RoleChange:
    """An instance that should change sides once it has no work.

    Args:
        slot: which.
        role: what it becomes.
    """

    slot: int
    role: Role


def fleet_load(fleet: Fleet, ledger: DecodeLedger, ttft_s: float, now: float) -> FleetLoad:
    """The load of now.

    Args:
        fleet: the instances.
        ledger: who decodes where.
        ttft_s: objective for the first token; must be finite.
        now: the time.
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
    """Looks at loads now and then, and says who should change sides.

    Args:
        rule: when.
    """

    def __init__(self, rule: RoleRule) -> None:
        self.state = Balance.EVEN
        self._rule = rule
        self._since = -math.inf
        self._proposed_at = -math.inf

    def observe(self, load: FleetLoad, now: float) -> Balance:
        """The state with this load: a side that was short stays so until its load is below the
        middle of both limits, or the other's above it."""
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
        """The instance with the least work on the side that can spare one, if it is time."""
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
    """Carries a change through: drain, wait until idle, change; or give up if the load turns.

    Args:
        fleet: the instances.
        book: what they still have to do.
        ledger: who decodes where.
        rule: when.
        ttft_s: objective for the first token, which prefill load is measured by.
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
        """Which side is short."""
        return self._balancer.state

    def load(self, now: float) -> FleetLoad:
        """The load of both sides: what autoscalers are shown."""
        return fleet_load(self._fleet, self._ledger, self._ttft_s, now)

    def tick(self, now: float) -> RoleChange | None:
        """Call now and then; returns a change that can be made at once. Whoever makes it calls
        ``Fleet.set_role``."""
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
