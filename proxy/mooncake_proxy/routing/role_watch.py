"""Measures the prefill and decode load of a model, and switches instances between the roles.

Autoscalers see the load as metrics. The rule is the conductor's (`role_balance.py`). An instance
that should switch gets no more requests from the conductor, and switches once it is idle; then all
worker processes are notified of its new role.
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
# Seconds to wait for an instance that should switch to become idle; then the switch is given up.
DRAIN_TIMEOUT_S = 60.0


class RoleWatch:
    """Checks the load a few times per second.

    Args:
        fleet: the instances that serve the model in pairs.
        mode: `off` only measures, `propose` logs the switches that it would make, `allow` makes
            them.
        ttft_s: TTFT objective, relative to which prefill load is measured; must be finite.
        rule: thresholds of the rule; None: the defaults.
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
        # The switch that waits for its instance to become idle, and since which loop time.
        self._pending: tuple[RoleChange, float] | None = None

    @property
    def balance(self) -> Balance:
        """Which role is short of instances, as far as switches are looked for."""
        return (self._changes if self._mode == "allow" else self._balancer).state

    def load(self, now: float) -> FleetLoad:
        """Load of both roles; 1 is the most that the objectives allow."""
        conductor = self._fleet.conductor
        return fleet_load(conductor.fleet, conductor.ledger, self._ttft_s, now)

    def tick(self, now: float) -> tuple[Instance, Role] | None:
        """The switch to make now, if any. The caller makes it, and notifies the other workers."""
        if self._mode == "propose":
            self._propose(now)
        elif self._mode == "allow":
            if self._pending is None and (change := self._changes.tick(now)) is not None:
                self._pending = change, now
            return self._make_pending(now)
        return None

    def _propose(self, now: float) -> None:
        conductor = self._fleet.conductor
        fleet = conductor.fleet
        change = self._balancer.propose(fleet, conductor.ledger, self.load(now), now)
        if change is not None:
            name, role = fleet.names[change.slot], change.role.value
            logger.warning("%s should become a %s instance: %s", name, role, self.balance.value)

    def _make_pending(self, now: float) -> tuple[Instance, Role] | None:
        if self._pending is None:
            return None
        change, since = self._pending
        instance = self._fleet.instance(change.slot)
        fleet = self._fleet.conductor.fleet
        if instance is None or fleet.is_away[change.slot] or now - since > DRAIN_TIMEOUT_S:
            self._pending = None
            if instance is not None:
                fleet.drain(change.slot, False)
            return None
        if instance.total_running:
            return None
        self._pending = None
        return instance, Role(change.role.value)
