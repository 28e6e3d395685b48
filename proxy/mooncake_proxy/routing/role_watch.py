"""The load of both sides of a model's pairs: what autoscalers are shown, and who changes sides.

The rule is the conductor's. An instance that is to change gets no more requests from it, and
changes once nothing runs on it; then every worker process sees its new role.
"""

from __future__ import annotations

import logging

from mooncake_conductor.role_balance import (
    Balance,
    FleetLoad,
    RoleBalancer,
    RoleChange,
    RoleChanges,
    RoleRule,
    fleet_load,
)
from mooncake_proxy.pool.instances import Instance, Role
from mooncake_proxy.routing.conductor_fleet import ConductorFleet

logger = logging.getLogger(__name__)
# How long an instance that should change may still have requests of others.
PATIENCE_S = 60.0


class RoleWatch:
    """Looks at the load a few times a second.

    `mode`: `off` only measures, `propose` logs what should change, `allow` changes it.
    `ttft_s`: objective for the first token, which prefill load is measured by; must be finite.
    """

    def __init__(
        self, fleet: ConductorFleet, mode: str, ttft_s: float, rule: RoleRule | None = None
    ) -> None:
        self._fleet = fleet
        self._mode = mode
        self._ttft_s = ttft_s
        rule = rule or RoleRule()
        conductor = fleet.conductor
        self._balancer = RoleBalancer(rule)
        self._changes = RoleChanges(conductor.fleet, conductor.book, conductor.ledger, rule, ttft_s)
        # Due once nothing runs on it, and since when.
        self._due: tuple[RoleChange, float] | None = None

    @property
    def balance(self) -> Balance:
        """Which side is short, as far as changes are looked for."""
        return (self._changes if self._mode == "allow" else self._balancer).state

    def load(self, now: float) -> FleetLoad:
        """Of both sides; 1 is as much as the objectives allow."""
        conductor = self._fleet.conductor
        return fleet_load(conductor.fleet, conductor.ledger, self._ttft_s, now)

    def tick(self, now: float) -> tuple[Instance, Role] | None:
        """A change that is to be made now; whoever makes it tells all processes."""
        if self._mode == "propose":
            self._propose(now)
        elif self._mode == "allow":
            if self._due is None and (change := self._changes.tick(now)) is not None:
                self._due = change, now
            return self._make_due(now)
        return None

    def _propose(self, now: float) -> None:
        conductor = self._fleet.conductor
        fleet = conductor.fleet
        change = self._balancer.propose(fleet, conductor.ledger, self.load(now), now)
        if change is not None:
            name, role = fleet.names[change.slot], change.role.value
            logger.warning("%s should become a %s instance: %s", name, role, self.balance.value)

    def _make_due(self, now: float) -> tuple[Instance, Role] | None:
        if self._due is None:
            return None
        change, since = self._due
        instance = self._fleet.instance(change.slot)
        fleet = self._fleet.conductor.fleet
        if instance is None or fleet.is_away[change.slot] or now - since > PATIENCE_S:
            self._due = None
            if instance is not None:
                fleet.drain(change.slot, False)
            return None
        if instance.total_running:
            return None
        self._due = None
        return instance, Role(change.role.value)
