"""Connects requests to the conductor: places them, reports their progress, explains decisions.

The router has a `ConductorRouting` if a policy of the conductor or `--admission` is configured.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial
from random import Random
from typing import TYPE_CHECKING, Any

from mooncake_conductor.index.prompt_keys import Keys, chain_root, text_keys, token_keys
from mooncake_conductor.shared_reservations import ReservationChange
from mooncake_conductor.slo_admission import Verdict
from mooncake_proxy.api.openai_bodies import KVTransferParams, OpenAIEndpoint
from mooncake_proxy.api.proxied_request import RequestContext
from mooncake_proxy.config import ConductorConfig
from mooncake_proxy.errors import BadRequest, NotFound, SloRefused
from mooncake_proxy.pool.instances import Instance, InstancePool, Role
from mooncake_proxy.routing.conductor_fleet import ConductorFleet, RoutedRequest
from mooncake_proxy.routing.prefix_index import prompt_bytes, token_ids_of
from mooncake_proxy.routing.role_watch import RoleWatch

if TYPE_CHECKING:
    from mooncake_proxy.pool.kv_event_feed import KVEventDelivery, KVEventFeed

MAX_RECORDS = 2048


class ConductorRouting:
    """Asks the conductor where to send requests, and reports to it how they progress.

    Args:
        pool: the instances of one model.
        config: how the conductor places and admits requests.
        rng: breaks ties.
        now: returns loop time in seconds.
        model: the first name of the pool's model.
    """

    def __init__(
        self,
        pool: InstancePool,
        config: ConductorConfig,
        rng: Random,
        now: Callable[[], float],
        model: str = "",
    ) -> None:
        self._pool = pool
        self._model = model
        self._now = now
        self._classes = frozenset(each.name for each in config.classes)
        # If True, nothing is sent to a client before a decode instance has accepted its request.
        self.refuses = config.admission != "none"
        # Two conductors: one for split requests, one for requests that a single instance serves.
        self.pairs = ConductorFleet(pool, config, self._open_feed, is_coupled=False, rng=rng)
        self.coupled = ConductorFleet(pool, config, self._open_feed, is_coupled=True, rng=rng)
        # Measures the load of both roles; needs a TTFT objective to measure it against.
        ttft_s = self.pairs.conductor.settings.objectives.default.ttft_s
        self.roles: RoleWatch | None = None
        if math.isfinite(ttft_s):
            self.roles = RoleWatch(self.pairs, config.role_changes, ttft_s)
        self._feed: KVEventFeed | None = None
        # The latest decisions, by the request id that the client knows.
        self._records: OrderedDict[str, RoutedRequest] = OrderedDict()

    def place(self, context: RequestContext, role: Role | None) -> None:
        """Choose the instances of a request, and reserve them.

        Args:
            context: the request.
            role: the role that serves it whole; None: it is split.

        Raises:
            SloRefused: the request could not be served within its objectives.
        """
        if context.routed is not None:  # a new pass: end the reservation of the one before
            context.routed.fleet.ended(context.routed, self._now())
            context.routed = None
        if role not in (None, Role.BOTH):
            return  # requests that only decode instances serve are not placed by the conductor
        fleet = self.pairs if role is None else self.coupled
        routed = fleet.place(
            num_tokens=context.prompt_tokens,
            keys=keys_of(context, self._adapter_of(context.parsed.model)),
            token_limit=context.parsed.token_limit,
            request_class=self._class_of(context),
            deadline=context.deadline,
            now=self._now(),
        )
        if routed is None:
            return
        self._note(context, routed)
        self._check(context, routed.decision.verdict)

    def choose(
        self, context: RequestContext, routed: RoutedRequest, role: Role, tried: Sequence[Instance]
    ) -> Instance | None:
        """The placed instance for a step, or another one if that was tried already or is not live.

        Returns:
            None if the conductor has no instance.
        """
        fleet, live = routed.fleet, self._pool.live(role)
        routed.is_decode_bound |= role is Role.DECODE
        chosen = fleet.instance(routed.slot(role))
        if chosen in live and chosen not in tried:
            return chosen
        failed = [*tried, chosen] if chosen is not None else tried
        if role is Role.DECODE:
            fleet.decode_elsewhere(routed, failed, self._now())
        else:
            again = fleet.place_again(routed, failed, self._now())
            if again is None:
                context.routed = None
                return None
            self._note(context, again)
            routed = again
        chosen = fleet.instance(routed.slot(role))
        return chosen if chosen in live and chosen not in tried else None

    def prefilled(
        self, context: RequestContext, instance: Instance, kv: KVTransferParams, began: float
    ) -> None:
        """Report that the prefill is complete.

        Raises:
            SloRefused: no decode instance could continue within the objectives.
        """
        now, routed = self._now(), context.routed
        fleet = self.pairs if routed is None else routed.fleet
        num_tokens, num_cached = kv.num_prompt_tokens or 0, kv.remote_cached_tokens or 0
        if num_tokens:
            fleet.measure_prefill(instance, num_tokens, num_cached, began, now)
        if routed is not None:
            routed.outcome |= {"prefill_s": now - began, "num_reused": num_cached}
            self._check(context, fleet.prefilled(routed, now))

    def cached_on_ranks(self, context: RequestContext, instance: Instance) -> list[int]:
        """Leading prompt tokens cached on each data-parallel rank; empty if ranks don't publish."""
        if (routed := context.routed) is None:
            return []
        return routed.fleet.cached_on_ranks(instance, routed.request.keys)

    def pushed(self, context: RequestContext) -> None:
        """Report that the prefill of a push is complete; its decode instance was fixed before."""
        if (routed := context.routed) is not None:
            routed.fleet.pushed(routed, self._now())

    def decoding(self, context: RequestContext) -> None:
        """Report that the first token or the whole answer has arrived."""
        if (routed := context.routed) is not None:
            now = self._now()
            routed.outcome.setdefault("ttft_s", now - context.arrival)
            routed.fleet.decoding(routed, now)

    def ended(self, context: RequestContext) -> None:
        """Report that the request has ended, successfully or not. Releases its reservation."""
        routed, now = context.routed, self._now()
        if routed is None:
            return
        request = context.request
        is_whole = request.ended and request.status == 200
        routed.outcome |= {"is_whole": is_whole, "seconds": now - context.arrival}
        timing = context.timing
        # The first token of an answer that is not streamed comes with the last one, so its decode
        # duration is unknown: as 0 it would hide the load of the class's streams.
        if not is_whole or not context.parsed.stream:
            routed.fleet.ended(routed, now)
            return
        per_token = None
        if timing.num_gaps and timing.first_at is not None and timing.last_at is not None:
            per_token = (timing.last_at - timing.first_at) / timing.num_gaps
            routed.outcome["tbt_s"] = per_token
        routed.fleet.finished(routed, timing.num_gaps + 1, per_token, now)

    def note_restart(self, instance: Instance) -> None:
        """Forget what an instance held, and subscribe to its events afresh."""
        for fleet in (self.pairs, self.coupled):
            slot = fleet.slot(instance)
            if slot is not None:
                fleet.holdings.subscribe_afresh(slot)

    def discard_estimate(self, instance: Instance) -> None:
        """Forget what an instance was estimated to hold: its caches may be empty."""
        for fleet in (self.pairs, self.coupled):
            slot = fleet.slot(instance)
            if slot is not None:
                fleet.holdings.discard_estimate(slot)

    def share(self, publish: Callable[[bool, ReservationChange], None]) -> None:
        """Publish every change of a reservation from now on.

        The flag passed to `publish` is True for requests that a single instance serves.
        """
        self.pairs.exchange.start(partial(publish, False))
        self.coupled.exchange.start(partial(publish, True))

    def apply(
        self,
        owner: str,
        is_whole: bool,
        changes: Sequence[ReservationChange],
        *,
        is_snapshot: bool = False,
    ) -> None:
        """Apply reservations of another proxy process; those in a snapshot may be known already."""
        fleet = self.coupled if is_whole else self.pairs
        fleet.apply(owner, changes, self._now(), is_snapshot=is_snapshot)

    def snapshot(self) -> list[tuple[bool, list[ReservationChange]]]:
        """All reservations of this process; the flag marks requests that one instance serves."""
        now = self._now()
        fleets = ((False, self.pairs), (True, self.coupled))
        return [(is_whole, fleet.exchange.snapshot(now)) for is_whole, fleet in fleets]

    def portions(self) -> Iterator[tuple[bool, list[ReservationChange]]]:
        """Yield the snapshot in portions; each is up to date when it is yielded."""
        for is_whole, fleet in ((False, self.pairs), (True, self.coupled)):
            for changes in fleet.exchange.portions(self._now):
                yield is_whole, changes

    def retain(self, owner: str, request_ids: Collection[str]) -> None:
        """Release all reservations of another proxy process except these."""
        for fleet in (self.pairs, self.coupled):
            fleet.exchange.retain(owner, request_ids, self._now())

    def forget(self, owner: str) -> None:
        """Release all reservations of another proxy process: it is gone."""
        for fleet in (self.pairs, self.coupled):
            fleet.conductor.book.release_owner(owner, self._now())

    def explain(self, request_id: str) -> dict[str, Any]:
        """The decision about a request, with every term.

        Raises:
            NotFound: there is no record of the request (any more).
        """
        routed = self._records.get(request_id)
        if routed is None:
            raise NotFound(
                f"no decision about a request {request_id!r}: the latest {MAX_RECORDS} of this "
                "proxy are kept, by X-Request-Id"
            )
        return routed.record()

    def sweep(self) -> None:
        """Do periodic work; called a few times per second."""
        now = self._now()
        self.pairs.sweep(now)
        self.coupled.sweep(now)

    def role_change(self) -> tuple[Instance, Role] | None:
        """The instance that should switch its role now, if any; called a few times per second."""
        return None if self.roles is None else self.roles.tick(self._now())

    def _class_of(self, context: RequestContext) -> str:
        """The request's class: the one that its header names, else the first class of its API key,
        else interactive or batch.

        Raises:
            BadRequest: the header names an unknown class, or one that the key may not use.
        """
        allowed = context.tenant.classes if context.tenant is not None else ()
        given = context.request.headers.get(b"x-request-class")
        if given is None:
            return allowed[0] if allowed else context.request_class
        name = given.decode("latin-1")
        if allowed and name not in allowed:
            raise BadRequest(f"X-Request-Class {name!r}: this key has {', '.join(allowed)}")
        if name not in self._classes:
            known = ", ".join(sorted(self._classes)) or "none (--request-class)"
            raise BadRequest(f"X-Request-Class {name!r}: there are {known}")
        return name

    def poll(self) -> None:
        """Re-raise the exception of the KV event thread if it has failed."""
        if self._feed is not None:
            self._feed.poll()

    def close(self) -> None:
        """Stop to receive KV events."""
        if self._feed is not None:
            self._feed.close()

    def _adapter_of(self, name: str | None) -> str:
        """The adapter that a request's `model` names; empty for the model itself or an alias of it.

        An adapter's KV is never the model's, so a name counts as an adapter's unless an instance
        that publishes KV events lists it as its model's. A pool without a name, whose instances
        list nothing, knows only the adapters for which they have published KV. While nobody
        publishes, nothing tells aliases from adapters.
        """
        if not name or name == self._model:
            return ""
        fleets = (self.pairs, self.coupled)
        if not any(fleet.holdings.has_publishers for fleet in fleets):
            return name
        if any(name in fleet.holdings.adapters for fleet in fleets):
            return name
        lists = [each.base_models for each in self._pool if each.base_models is not None]
        if any(name in names for names in lists):
            return ""
        return name if lists or self._model else ""

    def _open_feed(self) -> KVEventFeed:
        """Open the event feed for the first instance that publishes. Imported only then: pyzmq."""
        if self._feed is None:
            from mooncake_proxy.pool.kv_event_feed import KVEventFeed

            self._feed = KVEventFeed(self._deliver)
        return self._feed

    def _deliver(self, delivery: KVEventDelivery) -> Iterator[None]:
        yield from self.pairs.holdings.apply(delivery)
        yield from self.coupled.holdings.apply(delivery)

    def _note(self, context: RequestContext, routed: RoutedRequest) -> None:
        context.routed = routed
        self._records[context.request_id] = routed
        self._records.move_to_end(context.request_id)
        if len(self._records) > MAX_RECORDS:
            self._records.popitem(last=False)

    def _check(self, context: RequestContext, verdict: Verdict) -> None:
        """Raise SloRefused if the verdict refuses the request, unless its stream has started."""
        if verdict.refusal is not None and not context.request.has_started:
            raise SloRefused(verdict.refusal.value, verdict.retry_after_s)


def keys_of(context: RequestContext, adapter: str) -> Keys:
    """Keys of the prompt's chunks, from its token ids if they are known, else from its bytes. Those
    of a chat are known without the template, as which instances never publish them."""
    parsed = context.parsed
    root = chain_root(adapter, parsed.cache_salt or "")
    ids = context.token_ids if context.token_ids is not None else token_ids_of(parsed)
    if ids is not None:
        return token_keys(ids, root, is_exact=context.endpoint is not OpenAIEndpoint.CHAT)
    return text_keys(prompt_bytes(context.endpoint, parsed), root)
