"""Connects a conductor to the instances of one model: maps instances to slots, reports timings.

`mooncake_conductor` works with slots and seconds, the proxy with instances and HTTP exchanges; this
module translates. Imported only if the conductor is configured, because it needs numpy.
"""

from __future__ import annotations

import itertools
import logging
import os
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import TYPE_CHECKING, Any

from msgspec import Struct

from mooncake_conductor.conductor import Conductor, ConductorSettings, Decision
from mooncake_conductor.cost.latency_model import MODELS, LatencyModel, cold_start, find
from mooncake_conductor.cost.link_calendar import Fetch
from mooncake_conductor.cost.online_fit import RunningQuantile
from mooncake_conductor.errors import ConductorConfigError
from mooncake_conductor.fleet import Fleet, InstanceSpec, Role as FleetRole
from mooncake_conductor.index.prompt_keys import CHUNK_TOKENS, Keys
from mooncake_conductor.policies.situation import RoutingRequest
from mooncake_conductor.reservations import ReservationEvent
from mooncake_conductor.shared_reservations import ReservationChange, ReservationExchange
from mooncake_conductor.slo_admission import AdmissionMode, Objectives, Verdict, objective
from mooncake_proxy.config import ConductorConfig
from mooncake_proxy.errors import ConfigError
from mooncake_proxy.pool.device_classes import costs_of
from mooncake_proxy.pool.instance_reports import PoolUse, StoreLocation
from mooncake_proxy.pool.instances import Instance, InstancePool, Role
from mooncake_proxy.routing.fleet_holdings import FleetHoldings

if TYPE_CHECKING:
    from mooncake_proxy.pool.kv_event_feed import KVEventFeed

logger = logging.getLogger(__name__)
MAX_INSTANCES = 1024
# Admission expects first tokens to be delayed by this quantile of past delays.
LATENESS_SHARE = 0.95
# Expected tokens of an answer before any answers were observed.
INITIAL_OUTPUT_TOKENS = 256.0
# Owner of this process's reservations. Unique: workers are forked before this is imported.
OWNER = os.urandom(6).hex()
_numbers = itertools.count()


class PrefixSource(Struct, frozen=True):
    """A node store from which the prefill instance can fetch KV of a prompt's leading tokens."""

    host: str
    port: int
    epoch: str
    num_tokens: int


@dataclass(slots=True)
class RoutedRequest:
    """A request's placement. `names` are the names of the slots at the time of the decision."""

    fleet: ConductorFleet
    request: RoutingRequest
    decision: Decision
    names: dict[int, str]
    # Slot of the decode instance; may change until the request decodes.
    decode_slot: int
    outcome: dict[str, Any]
    # Whether the decode instance works on the request already: it reserved blocks for a push or an
    # early pull before the prefill began.
    is_decode_bound: bool = False
    # Stores from which the prefill instance fetches the prefix that the decision plans to fetch.
    prefix_sources: tuple[PrefixSource, ...] = ()

    def slot(self, role: Role) -> int:
        """Slot of the instance that takes the step of `role`."""
        return self.decode_slot if role is Role.DECODE else self.decision.prefill.slot

    def is_prefilled_by(self, instance: Instance) -> bool:
        """Whether `instance` was chosen for the prefill."""
        return self.fleet.instance(self.decision.prefill.slot) is instance

    def record(self) -> dict[str, Any]:
        """Every term of the decision, and its outcome."""
        return self.decision.explain(self.names) | {"outcome": self.outcome}


@dataclass(slots=True)
class _SlotEntry:
    """An instance and the role in which it occupies its slot."""

    instance: Instance
    role: Role
    # Loop time of its latest prefill answer. The next prefill is assumed to start no sooner.
    free_at: float = 0.0


class ConductorFleet:
    """One conductor and its instances.

    Args:
        pool: the instances of one model.
        config: how the conductor places and admits requests.
        feed: opens the KV event feed on first use.
        is_coupled: the fleet is the instances that serve whole requests, not the pairs.
        rng: breaks ties.
    """

    def __init__(
        self,
        pool: InstancePool,
        config: ConductorConfig,
        feed: Callable[[], KVEventFeed],
        *,
        is_coupled: bool,
        rng: Random,
    ) -> None:
        self._pool = pool
        self._config = config
        self._roles = (Role.BOTH,) if is_coupled else (Role.PREFILL, Role.DECODE)
        self._cold, fleet = _costs(config)
        settings = ConductorSettings(
            policy=config.policy,
            admission=AdmissionMode(config.admission),
            objectives=_objectives(config),
            binds_late=config.binds_late,
            is_coupled=is_coupled,
            lateness_share=LATENESS_SHARE,
        )
        self.conductor = Conductor(fleet, settings, rng)
        self._entries: dict[int, _SlotEntry] = {}
        self._slots: dict[str, int] = {}
        num_chunks = config.kv_tokens // CHUNK_TOKENS
        self.holdings = FleetHoldings(self.conductor.index, feed, num_chunks)
        self._names: dict[int, str] = {}
        # Prefill instances whose KV no live decode instance can receive.
        self._unpaired: frozenset[int] = frozenset()
        self._version = -1
        self.exchange = ReservationExchange(
            self.conductor.book, OWNER, fleet.names, self._slots.get
        )
        self._output_tokens: dict[str, RunningQuantile] = {}

    def instance(self, slot: int) -> Instance | None:
        """The instance in a slot."""
        entry = self._entries.get(slot)
        return None if entry is None else entry.instance

    def slot(self, instance: Instance) -> int | None:
        """The slot of an instance."""
        return self._slots.get(instance.name)

    def sync_with_pool(self, now: float) -> None:
        """Update the slots after a change of the pool.

        New instances get a slot. Instances that have left the pool or switched their role lose
        theirs, and all reservations there. Instances that are down or draining are marked as away:
        their requests may still run, and count again when the instance is back.
        """
        if self._version == self._pool.version:
            return
        self._version = self._pool.version
        live = {(i.name, role): i for role in self._roles for i in self._pool.live(role)}
        for slot, entry in tuple(self._entries.items()):
            if not self._is_member(entry):
                self._leave(slot, now)
                continue
            is_live = (entry.instance.name, entry.role) in live
            self.conductor.fleet.set_away(slot, not is_live)
            if not entry.instance.is_up:
                self.holdings.discard_estimate(slot)
        for (name, role), instance in live.items():
            if name not in self._slots:
                self._join(instance, role)
            self._expect_costs(instance)
        self._names = {slot: entry.instance.name for slot, entry in self._entries.items()}
        self._unpaired = frozenset(
            slot
            for slot, entry in self._entries.items()
            if self._pool.has_incompatible_pairs
            and entry.role is Role.PREFILL
            and not self._pool.is_paired(entry.instance)
        )
        for slot, entry in self._entries.items():
            stores = entry.instance.stores
            is_reached = any(use.store is not None for use in stores)
            self.conductor.fleet.share_prefixes(slot, sends=is_reached, fetches=bool(stores))
            self.holdings.update_subscriptions(slot, now)

    def cached_on_ranks(self, instance: Instance, keys: Keys) -> list[int]:
        """Leading prompt tokens cached on each data-parallel rank; empty if ranks don't publish."""
        slot = self._slots.get(instance.name)
        return [] if slot is None else self.holdings.cached_on_ranks(slot, keys)

    def place(
        self,
        *,
        num_tokens: int,
        keys: Keys,
        token_limit: int | None,
        request_class: str,
        deadline: float,
        now: float,
    ) -> RoutedRequest | None:
        """Choose both instances of a request. None if there is no pair to choose from."""
        self.sync_with_pool(now)
        fleet = self.conductor.fleet
        if not len(fleet.prefill_slots) or not len(fleet.decode_slots):
            return None
        expected = self._output(request_class).value
        if token_limit is not None:
            expected = min(expected, max(float(token_limit), 1.0))
        request = RoutingRequest(
            f"{OWNER}-{next(_numbers)}",
            max(num_tokens, CHUNK_TOKENS * len(keys)),
            keys,
            expected,
            request_class,
            OWNER,
            avoid=self._unpaired,
            receivers=self._receivers(),
            deadline=deadline,
        )
        return self._route(request, now)

    def place_again(
        self, routed: RoutedRequest, tried: Collection[Instance], now: float
    ) -> RoutedRequest | None:
        """Choose another prefill instance, which is not in `tried`, and unless one is bound already
        also another decode instance. None if the conductor would refuse the request."""
        self.sync_with_pool(now)
        self.conductor.ended(routed.request.request_id, now)
        fleet = self.conductor.fleet
        if not len(fleet.prefill_slots) or not len(fleet.decode_slots):
            return None
        avoid, receivers = self._slots_of(tried) | self._unpaired, self._receivers()
        decode_slot = None
        if routed.is_decode_bound:
            decode_slot = routed.decode_slot
            if receivers is not None:
                slots = map(int, fleet.prefill_slots)
                avoid |= {slot for slot in slots if decode_slot not in receivers(slot)}
        request = replace(routed.request, avoid=avoid, receivers=receivers, decode_slot=decode_slot)
        found = self._route(request, now)
        return found if found.decision.verdict.is_admitted else None

    def decode_elsewhere(
        self, routed: RoutedRequest, tried: Collection[Instance], now: float
    ) -> None:
        """Bind a request to another decode instance, avoiding `tried`."""
        self.sync_with_pool(now)
        slot = self.conductor.decode_elsewhere(
            routed.request.request_id, self._slots_of(tried), now
        )
        if slot is not None:
            routed.decode_slot = slot

    def prefilled(self, routed: RoutedRequest, now: float) -> Verdict:
        """Report a completed prefill. Returns whether the request may decode, and binds it."""
        verdict, slot = self.conductor.prefilled(routed.request.request_id, now)
        if slot is not None:
            routed.decode_slot = slot
        routed.outcome["prefilled_at"] = now
        self._note_prefilled(routed.decision.prefill.slot, routed.request.keys, now)
        return verdict

    def pushed(self, routed: RoutedRequest, now: float) -> None:
        """Report the completed prefill of a request whose decode instance was fixed before."""
        self.conductor.book.prefilled(routed.request.request_id, now)
        routed.outcome["prefilled_at"] = now
        self._note_prefilled(routed.decision.prefill.slot, routed.request.keys, now)

    def measure_prefill(
        self, instance: Instance, num_tokens: int, num_cached: int, began: float, now: float
    ) -> None:
        """Report the time of a prefill without queueing: from the instance's previous answer on."""
        slot = self._slots.get(instance.name)
        if slot is None:
            return
        entry = self._entries[slot]
        begun, entry.free_at = max(began, entry.free_at), now
        if num_tokens > num_cached:
            self.conductor.measured_prefill(slot, num_tokens, num_cached, now - begun)

    def decoding(self, routed: RoutedRequest, now: float) -> None:
        """Report that a request decodes."""
        self.conductor.joined(routed.request.request_id, now)
        routed.outcome.setdefault("decoding_at", now)
        self.holdings.note_processed(routed.decode_slot, routed.request.keys)

    def finished(
        self, routed: RoutedRequest, num_tokens: int, seconds_per_token: float | None, now: float
    ) -> None:
        """Report a complete answer of about `num_tokens` tokens."""
        request = routed.request
        if seconds_per_token is not None:
            self._measure_step(routed, seconds_per_token)
        self.conductor.finished(request.request_id, now)
        self._output(request.request_class).report(float(num_tokens))

    def ended(self, routed: RoutedRequest, now: float) -> None:
        """Report that a request failed, was refused, or that its client disconnected."""
        self.conductor.ended(routed.request.request_id, now)

    def apply(
        self,
        owner: str,
        changes: Sequence[ReservationChange],
        now: float,
        *,
        is_snapshot: bool = False,
    ) -> None:
        """Apply reservation changes of another proxy process that uses the same instances."""
        self.sync_with_pool(now)
        for reservation, event in self.exchange.apply(owner, changes, now, is_snapshot=is_snapshot):
            if event is ReservationEvent.PREFILLED:
                self._note_prefilled(reservation.choice.slot, reservation.request.keys, now)
            elif event is ReservationEvent.JOINED:
                self.holdings.note_processed(reservation.decode_slot, reservation.request.keys)

    def sweep(self, now: float) -> None:
        """Release overdue reservations, and forget chunks that no instance holds."""
        self.sync_with_pool(now)
        self.conductor.book.sweep(now)
        self.holdings.sweep(now)
        self.conductor.index.collect(1)

    def _note_prefilled(self, slot: int, keys: Keys, now: float) -> None:
        """Note that the instance in `slot` has completed a prefill, also one of another process."""
        if (entry := self._entries.get(slot)) is not None:
            entry.free_at = now
        self.holdings.note_processed(slot, keys)

    def _route(self, request: RoutingRequest, now: float) -> RoutedRequest:
        decision = self.conductor.route(request, now)
        sources = self._prefix_sources(decision.prefill.fetches, request.keys)
        return RoutedRequest(
            self,
            request,
            decision,
            self._names,
            decode_slot=decision.decode.slot,
            outcome={},
            is_decode_bound=request.decode_slot is not None,
            prefix_sources=sources,
        )

    def _prefix_sources(self, fetches: Sequence[Fetch], keys: Keys) -> tuple[PrefixSource, ...]:
        """The node stores that a decision fetches from, and how many leading tokens each holds.

        One store may hold several runs of chunks. A run may be in any store of its instance: the
        first one is named that others reach and that has published its last chunk, else the first
        one that others reach: the instance saves to it, if it can't to those before it.
        """
        found: dict[StoreLocation, int] = {}
        for fetch in fetches:
            end = fetch.start + fetch.num_chunks
            uses = [use for use in self._entries[fetch.source].instance.stores if use.store]
            published = (use for use in uses if self._is_in(use, keys[end - 1]))
            use = next(published, uses[0] if uses else None)
            if use is not None and use.store is not None:
                found[use.store] = end * CHUNK_TOKENS
        return tuple(
            PrefixSource(store.host, store.port, store.epoch, num_tokens)
            for store, num_tokens in found.items()
        )

    def _is_in(self, use: PoolUse, key: int) -> bool:
        """Whether a store has published that it holds a chunk."""
        return use.kv_events is not None and self.holdings.is_in_store(use.kv_events, key)

    def _measure_step(self, routed: RoutedRequest, seconds: float) -> None:
        fleet = self.conductor.fleet
        if routed.decode_slot not in fleet.decode_slots:
            return
        load = self.conductor.ledger.now()
        index = int((fleet.decode_slots == routed.decode_slot).argmax())
        sequences, context = load.num_sequences[index], load.num_context[index]
        self.conductor.measured_step(routed.decode_slot, int(sequences), int(context), seconds)

    def _output(self, request_class: str) -> RunningQuantile:
        if request_class not in self._output_tokens:
            self._output_tokens[request_class] = RunningQuantile(0.5, INITIAL_OUTPUT_TOKENS)
        return self._output_tokens[request_class]

    def _receivers(self) -> Callable[[int], frozenset[int]] | None:
        """For a request that is placed now: a function from a prefill slot to the decode slots that
        can receive its KV. None if all can.

        The function remembers the instance in each slot, because an instance may leave its slot
        before its KV is transferred.
        """
        if not self._pool.has_incompatible_pairs:
            return None
        placed: dict[int, Instance] = {}

        def takers_of(slot: int) -> frozenset[int]:
            if slot not in placed:
                placed[slot] = self._entries[slot].instance
            return frozenset(
                at
                for at, entry in self._entries.items()
                if entry.role is not Role.PREFILL and placed[slot].is_compatible(entry.instance)
            )

        return takers_of

    def _is_member(self, entry: _SlotEntry) -> bool:
        """Whether the instance in a slot is still in the pool, with the same role."""
        name = entry.instance.name
        is_there = name in self._pool and self._pool.get(name) is entry.instance
        return is_there and entry.instance.spec.role is entry.role

    def _slots_of(self, instances: Collection[Instance]) -> frozenset[int]:
        found = (self._slots.get(instance.name) for instance in instances)
        return frozenset(slot for slot in found if slot is not None)

    def _join(self, instance: Instance, role: Role) -> None:
        spec = InstanceSpec(
            instance.name,
            FleetRole(role.value),
            self._cold,
            link_gb_s=self._config.link_gb_s,
            kv_tokens=self._config.kv_tokens,
            max_batch=self._config.max_batch,
        )
        try:
            slot = self.conductor.add(spec)
        except ConductorConfigError as exc:
            instance.warn_once("no_slot", f"gets no requests from the conductor: {exc}")
            return
        self._entries[slot] = _SlotEntry(instance, role)
        self.holdings.join(slot, instance)
        self._slots[instance.name] = slot

    def _expect_costs(self, instance: Instance) -> None:
        """Set the expected costs of an instance's device class, once its topology is known."""
        slot, costs = (
            self._slots.get(instance.name),
            costs_of(self._config.costs, instance.topology),
        )
        if slot is not None and costs is not None:
            self.conductor.expect(slot, costs)

    def _leave(self, slot: int, now: float) -> None:
        entry = self._entries.pop(slot)
        self.holdings.leave(slot)
        del self._slots[entry.instance.name]
        lost = self.conductor.remove(slot, now)
        logger.info("%s is gone: %d reservations released", entry.instance.name, len(lost))


def _objectives(config: ConductorConfig) -> Objectives:
    """The objectives of all request classes. Raises ConfigError for an invalid one."""
    found = {}
    for each in (config.default_class, *config.classes):
        try:
            found[each.name] = objective(
                each.slo_ttft, each.slo_tbt, is_best_effort=each.is_best_effort
            )
        except ConductorConfigError as exc:
            raise ConfigError(f"objectives of class {each.name!r}: {exc}") from exc
    return Objectives(found.pop(config.default_class.name), found)


def _costs(config: ConductorConfig) -> tuple[LatencyModel, Fleet]:
    """Parse `--costs`: the initial cost model, and a fleet with the model's KV size."""
    model, _, rest = config.costs.partition(":")
    device, _, number = rest.partition(":")
    try:
        shape = find(MODELS, model, "model")
        latency = cold_start(model, device, int(number or "1"))
    except (ConductorConfigError, ValueError) as exc:
        raise ConfigError(f"--costs {config.costs}: wanted MODEL:DEVICE:NUMBER; {exc}") from exc
    fleet = Fleet(
        MAX_INSTANCES,
        chunk_tokens=CHUNK_TOKENS,
        kv_bytes_per_token=shape.kv_bytes_per_token,
        num_layers=shape.num_layers,
    )
    return latency, fleet
