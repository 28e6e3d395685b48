"""The conductor: places requests on instances, admits or refuses them, and tracks reservations.

Pure: time and random numbers are arguments. The proxy and the simulator use the same class.
"""

from __future__ import annotations

import random
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from mooncake_conductor.cost.latency_model import LatencyModel
from mooncake_conductor.cost.online_fit import LatencyEstimator, RunningQuantile
from mooncake_conductor.decode_choice import DecodeChoice, DecodeChooser
from mooncake_conductor.decode_load import DecodeLedger
from mooncake_conductor.errors import UnknownInstance
from mooncake_conductor.fleet import Fleet, InstanceSpec
from mooncake_conductor.index.chunk_index import ChunkIndex, PrefixMatches
from mooncake_conductor.policies.heat import CacheReports, HeatMeter
from mooncake_conductor.policies.mooncake_policy import Boundary
from mooncake_conductor.policies.policy_names import DEFAULT_POLICY, PolicyParts, make_policy
from mooncake_conductor.policies.situation import PrefillChoice, RoutingRequest, Situation
from mooncake_conductor.replication import Replication, ReplicationRule, Replicator
from mooncake_conductor.reservations import Reservation, ReservationBook, Stage
from mooncake_conductor.slo_admission import (
    ADMITTED,
    NO_UNLOADED_LATENCY,
    Admission,
    AdmissionMode,
    Forecast,
    Objective,
    Objectives,
    Refusal,
    UnloadedLatency,
    Verdict,
)

_REFIT_EVERY = 16
"""Measurements between two refits of the latency model; each of the first ones causes a refit."""
_STALE_S = 60.0
"""Seconds for which past delays, and estimates without new measurements, may refuse everything.
Only admitted requests report delays and are measured, so nothing else would correct them."""


@dataclass(frozen=True, slots=True)
class ConductorSettings:
    """How requests are placed and admitted.

    Args:
        policy: name of the prefill policy.
        admission: when load leads to a refusal.
        objectives: objectives of the request classes.
        threshold: parameter of the policy ``mooncake``.
        boundary: parameter of the policy ``mooncake``.
        binds_late: choose the decode instance again when the prefill ends (pull), instead of only
            once at arrival (push).
        is_coupled: the prefill instance also decodes the request; no KV is transferred.
        replication: when copies of hot chunks are proposed; None: never.
        decode_share: a request is expected to decode for this quantile of past decode durations.
        lateness_share: admission adds this quantile of past delays, relative to their forecasts,
            to a TTFT forecast; 0: adds nothing. Under overload, requests are admitted up to the
            edge of their objective; without the addition half of them would miss it.
    """

    policy: str = DEFAULT_POLICY
    admission: AdmissionMode = AdmissionMode.NONE
    objectives: Objectives = field(default_factory=Objectives)
    threshold: float = 2.0
    boundary: Boundary = Boundary.FAST
    binds_late: bool = False
    is_coupled: bool = False
    replication: ReplicationRule | None = None
    decode_share: float = 0.5
    lateness_share: float = 0.0


@dataclass(frozen=True, slots=True)
class Decision:
    """A decision about a request, with all terms that led to it.

    Args:
        request_id: the request.
        verdict: whether it is admitted.
        prefill: where and how it is prefilled.
        decode: where it decodes.
        decided_at: time of the decision.
        replications: copies of hot chunks that should be made now.
    """

    request_id: str
    verdict: Verdict
    prefill: PrefillChoice
    decode: DecodeChoice
    decided_at: float
    replications: tuple[Replication, ...] = ()

    def explain(self, names: dict[int, str]) -> dict[str, Any]:
        """The decision as plain data for logs and traces, with names of instances."""
        prefill, decode = asdict(self.prefill), asdict(self.decode)
        prefill["plan"] = self.prefill.plan.value
        for part in (prefill, decode):
            part["instance"] = names.get(part.pop("slot"), "?")
        for fetch in prefill["fetches"]:
            fetch["source"] = names.get(fetch["source"], "?")
        refusal = self.verdict.refusal
        return {
            "request": self.request_id,
            "at": self.decided_at,
            "refusal": refusal.value if refusal else None,
            "retry_after_s": self.verdict.retry_after_s,
            "prefill": prefill,
            "decode": decode,
        }


class Conductor:
    """Places requests on a fleet.

    Args:
        fleet: the instances; must be added and removed through the conductor.
        settings: how requests are placed and admitted.
        rng: breaks ties and adds jitter to retry times.
    """

    def __init__(self, fleet: Fleet, settings: ConductorSettings, rng: random.Random) -> None:
        self.fleet = fleet
        self.settings = settings
        self.index = ChunkIndex(fleet.num_slots)
        self.heat = HeatMeter()
        self.reports = CacheReports()
        self.ledger = DecodeLedger(fleet, share=settings.decode_share)
        self.book = ReservationBook(fleet, self.index, self.ledger, sends_late=settings.binds_late)
        self.admission = Admission(settings.admission, settings.objectives, rng)
        parts = PolicyParts(
            self.index, self.heat, self.reports, settings.threshold, settings.boundary
        )
        self._policy = make_policy(settings.policy, parts)
        self._chooser = DecodeChooser(fleet, self.ledger, settings.admission.view, rng)
        self._replicator: Replicator | None = None
        if settings.replication is not None:
            self._replicator = Replicator(fleet, self.heat, self.reports, settings.replication)
        self._rng = rng
        self._lateness = RunningQuantile(settings.lateness_share, 0.0, window=128)
        self._estimators: dict[int, tuple[LatencyEstimator, int]] = {}
        # When the first request was refused for its objective since one was admitted.
        self._refused_since: float | None = None
        # The latest request that was admitted only to correct the estimates.
        self._probe_id: str | None = None

    def add(self, spec: InstanceSpec) -> int:
        """Add an instance. Returns its slot."""
        return self.fleet.add(spec)

    def remove(self, slot: int, now: float) -> list[str]:
        """Remove an instance. Returns the ids of requests that needed it, which are released."""
        ended = self.book.release_slot(slot, now)
        self.fleet.remove(slot, now)
        self.index.cleared(slot)
        self.index.set_healthy(slot, True)
        self.reports.report(slot, None)
        self._estimators.pop(slot, None)
        return ended

    def expect(self, slot: int, latency: LatencyModel) -> None:
        """Set the expected latencies of an instance; ignored if it has been measured."""
        if slot not in self._estimators:
            self.fleet.set_latency(slot, latency)

    def route(self, request: RoutingRequest, now: float) -> Decision:
        """Place or refuse a request, and reserve what an admitted one needs.

        Raises:
            UnknownInstance: there is no prefill or no decode instance.
        """
        if not len(self.fleet.prefill_slots) or not len(self.fleet.decode_slots):
            raise UnknownInstance("no prefill instance, or no decode instance, to choose from")
        self.book.sweep(now)
        match = self.index.match(request.keys, now)
        self.heat.touch(request.keys, now)
        choice = self._policy.choose(Situation(self.fleet, request, match, now, self._rng))
        wanted, unloaded = self._objective_of(request)
        only = self._receivers(request, choice.slot)
        decode = self._chooser.choose(request, match, now + choice.ttft, wanted.tbt_s, only)
        if request.decode_slot is not None:
            decode = self._reevaluate(request, request.decode_slot, match, decode)
        self._lateness.forget_before(now - _STALE_S)
        forecast = self._forecast(request, choice.ttft, decode, unloaded)
        verdict = self.admission.at_arrival(request.request_class, forecast)
        if self._is_probe(verdict, choice.slot, decode, now):
            verdict, self._probe_id = ADMITTED, request.request_id
        decision = Decision(request.request_id, verdict, choice, decode, now)
        if verdict.is_admitted:
            self._refused_since = None
            self._reserve(request, decision, now)
            if self._replicator is not None:
                copies = self._replicator.propose(request.keys, match, now)
                for copy in copies:
                    num_bytes = len(copy.keys) * self.fleet.chunk_bytes
                    self.fleet.links.book(copy.source, copy.target, num_bytes, now)
                return replace(decision, replications=tuple(copies))
        return decision

    def prefilled(self, request_id: str, now: float) -> tuple[Verdict, int | None]:
        """Report a completed prefill, and decide whether and where the request may decode.

        Returns:
            The verdict and the slot of the decode instance. A refused request has lost its
            reservation. The slot is None if the request is refused, its reservation has expired, or
            there is no decode instance.
        """
        was_prefilling = self.book.is_prefilling(request_id)
        reservation = self.book.prefilled(request_id, now)
        if reservation is None or not len(self.fleet.decode_slots):
            return ADMITTED, None
        if was_prefilling:
            self._lateness.report(now - reservation.expected_at, now)
        request = reservation.request
        # The request itself must not count as load of the instance that it is bound to.
        self.ledger.release(request_id)
        wanted, unloaded = self._objective_of(request)
        only = self._receivers(request, reservation.choice.slot)
        match = self._held_by_decoders(request, now)
        decode = self._chooser.choose(request, match, now, wanted.tbt_s, only)
        if not self.settings.binds_late or self.settings.is_coupled:
            decode = self._reevaluate(request, reservation.decode_slot, match, decode)
        forecast = self._forecast(request, 0.0, decode, unloaded)
        verdict = self.admission.after_prefill(request.request_class, forecast)
        if request_id == self._probe_id and verdict.refusal is Refusal.SLO_TBT:
            verdict = ADMITTED
        if not verdict.is_admitted:
            self.book.release(request_id, now)
            return verdict, None
        self.book.rebind(request_id, decode.slot, now, decode.num_held)
        return verdict, decode.slot

    def decode_elsewhere(self, request_id: str, avoid: frozenset[int], now: float) -> int | None:
        """Bind a request to another decode instance, because its own one failed.

        Returns:
            The slot; None if the request has no reservation or decodes already, or there is no
            decode instance.
        """
        reservation = self.book.get(request_id)
        if (
            reservation is None
            or reservation.stage is Stage.DECODING
            or not len(self.fleet.decode_slots)
        ):
            return None
        self.ledger.release(request_id)
        request = replace(reservation.request, avoid=avoid)
        wanted, _ = self._objective_of(request)
        only = self._receivers(request, reservation.choice.slot)
        match = self._held_by_decoders(request, now)
        decode = self._chooser.choose(request, match, now, wanted.tbt_s, only)
        self.book.rebind(request_id, decode.slot, now, decode.num_held)
        return decode.slot

    def joined(self, request_id: str, now: float) -> None:
        """Report that the request decodes."""
        self.book.joined(request_id, now)

    def finished(self, request_id: str, now: float) -> None:
        """Report that the request has completed."""
        self.book.finished(request_id, now)

    def ended(self, request_id: str, now: float) -> None:
        """Report that the request failed, was cancelled, or that its client disconnected."""
        self.book.release(request_id, now)

    def measured_prefill(self, slot: int, num_tokens: int, num_reused: int, seconds: float) -> None:
        """Report the measured time of a prefill, without queueing and KV loads."""
        self._estimator(slot).prefilled(num_tokens, num_reused, seconds)
        self._refit(slot)

    def measured_step(
        self, slot: int, num_sequences: int, num_context_tokens: int, seconds: float
    ) -> None:
        """Report the measured time of a decode step."""
        self._estimator(slot).stepped(num_sequences, num_context_tokens, seconds)
        self._refit(slot)

    def _reserve(self, request: RoutingRequest, decision: Decision, now: float) -> None:
        choice = decision.prefill
        reservation = Reservation(
            request, choice, decision.decode.slot, request.deadline, now + choice.ttft
        )
        self.book.reserve(reservation, now)

    def _is_probe(
        self, verdict: Verdict, prefill_slot: int, decode: DecodeChoice, now: float
    ) -> bool:
        """Whether a refused request is admitted nevertheless, to correct the estimates: nothing has
        been admitted for a while, and its instances are idle."""
        if verdict.refusal not in (Refusal.SLO_TTFT, Refusal.SLO_TBT):
            return False
        if self._refused_since is None:
            self._refused_since = now
        is_idle = not self.fleet.queues.num_requests[prefill_slot] and not decode.num_sequences
        return is_idle and now - self._refused_since >= _STALE_S

    def _receivers(self, request: RoutingRequest, prefill_slot: int) -> frozenset[int] | None:
        """Slots that can decode what the instance in `prefill_slot` prefills; None: all can."""
        if self.settings.is_coupled:
            return frozenset((prefill_slot,))
        return request.receivers(prefill_slot) if request.receivers is not None else None

    def _held_by_decoders(self, request: RoutingRequest, now: float) -> PrefixMatches | None:
        """Which decode instances hold the prompt's chunks; None if they hold nothing at all."""
        if not self.index.holders & self.fleet.decode_mask:
            return None
        return self.index.match(request.keys, now)

    def _reevaluate(
        self, request: RoutingRequest, slot: int, match: PrefixMatches | None, best: DecodeChoice
    ) -> DecodeChoice:
        """The earlier choice of a decode instance, evaluated with the current load.

        If that instance is not available any more, the best choice instead.
        """
        if slot not in self.fleet.decode_slots:
            return best
        load = self.ledger.now()
        index = int((self.fleet.decode_slots == slot).argmax())
        tbt = self._chooser.tbt(load, request.num_tokens + request.num_output_tokens / 2)
        others = float(load.num_sequences[index])
        num_chunks = 0 if match is None else int(match.local[slot])
        held = min(num_chunks * self.fleet.chunk_tokens, request.num_tokens)
        return DecodeChoice(slot, float(tbt[index]), best.tail, others, held)

    def _forecast(
        self, request: RoutingRequest, ttft: float, decode: DecodeChoice, unloaded: UnloadedLatency
    ) -> Forecast:
        expected = self.ledger.expected_seconds(request.request_class)
        drain = expected / max(decode.num_sequences, 1.0)
        if ttft and self.settings.lateness_share:
            ttft += max(self._lateness.value, 0.0)
        return Forecast(ttft, decode.tbt, drain, unloaded)

    def _objective_of(self, request: RoutingRequest) -> tuple[Objective, UnloadedLatency]:
        """The request's objective in seconds, and the unloaded times that it was derived from."""
        wanted = self.admission.objectives.of(request.request_class)
        if not wanted.is_relative:
            return wanted, NO_UNLOADED_LATENCY
        seconds = self.fleet.unloaded_seconds(request.num_tokens, request.num_output_tokens)
        unloaded = UnloadedLatency(*seconds)
        return wanted.in_seconds(unloaded), unloaded

    def _estimator(self, slot: int) -> LatencyEstimator:
        if slot not in self.fleet.names:
            raise UnknownInstance(f"a report of slot {slot}, which has no instance")
        if slot not in self._estimators:
            fixed, per_token, squared = self.fleet.prefill[:, slot]
            step, per_sequence, per_context = self.fleet.step[:, slot]
            cold = LatencyModel(fixed, per_token, squared, step, per_sequence, per_context)
            self._estimators[slot] = (LatencyEstimator(cold), 0)
        return self._estimators[slot][0]

    def _refit(self, slot: int) -> None:
        estimator, reports = self._estimators[slot]
        self._estimators[slot] = (estimator, reports + 1)
        if reports < _REFIT_EVERY or reports % _REFIT_EVERY == 0:
            self.fleet.set_latency(slot, estimator.model())
