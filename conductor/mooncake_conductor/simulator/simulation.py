"""Discrete-event simulation of a trace on modelled instances and links, with the real conductor."""

from __future__ import annotations

import heapq
import math
import random
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import count

from mooncake_conductor.conductor import Conductor, ConductorSettings, Decision
from mooncake_conductor.cost.latency_model import LatencyModel
from mooncake_conductor.cost.link_calendar import LinkCalendar
from mooncake_conductor.fleet import Fleet, InstanceSpec, Role
from mooncake_conductor.index.holder_sets import Tier
from mooncake_conductor.policies.situation import Plan, RoutingRequest
from mooncake_conductor.replication import Replication
from mooncake_conductor.role_balance import RoleChanges, RoleRule
from mooncake_conductor.simulator.engine_models import (
    ChunkCache,
    Decoded,
    DecodeNode,
    PrefillJob,
    PrefillNode,
)
from mooncake_conductor.simulator.trace_file import TraceRequest

SAMPLE_S = 15.0
HOT_RANKS = (10, 100, 1000)


@dataclass(frozen=True, slots=True)
class Cluster:
    """The simulated cluster.

    Args:
        num_prefill: prefill nodes.
        num_decode: decode nodes.
        latency: latency model of each node.
        kv_bytes_per_token: KV bytes per token of the model.
        num_layers: layers of the model.
        cache_tokens: capacity of a prefill node's cache, in tokens.
        link_gb_s: bandwidth of a node's network link, in GB/s.
        host_gb_s: bandwidth from host to device memory, in GB/s.
        max_batch: sequences per decode node.
        kv_tokens: tokens of KV per decode node.
        chunk_tokens: tokens per hash id of the trace.
        cache_tier: tier in which prefill nodes cache chunks; device memory needs no load.
        decode_cache_tokens: tokens of decoded prompts that a decode node caches; 0: none.
        shares_prefixes: whether prefill nodes can read chunks from each other.
        first_token_s: part of the TTFT in which no node is busy (HTTP, the hop of the proxy).
        hand_over_s: seconds from the first token to the first decode step, besides the transfer of
            the KV but including its setup.
        join_steps: further steps, besides the running one, until a busy decode node includes a new
            sequence.
    """

    num_prefill: int
    num_decode: int
    latency: LatencyModel
    kv_bytes_per_token: float = 327_680
    num_layers: int = 80
    cache_tokens: int = 3_000_000
    link_gb_s: float = 50.0
    host_gb_s: float = 128.0
    max_batch: int = 256
    kv_tokens: int = 1_500_000
    chunk_tokens: int = 512
    cache_tier: Tier = Tier.HOST
    decode_cache_tokens: int = 0
    shares_prefixes: bool = True
    first_token_s: float = 0.0
    hand_over_s: float = 0.0
    join_steps: int = 0


@dataclass(slots=True)
class RequestRecord:
    """The outcome of one request. Times in seconds from the start of the trace.

    ``refused`` is the code of a refusal, ``stage`` when it was refused: at arrival or after the
    prefill. ``alone_ttft`` and ``alone_tbt`` are its unloaded latencies, with nothing reused.
    """

    number: int
    arrived_at: float
    num_input: int
    num_output: int
    alone_ttft: float = 0.0
    alone_tbt: float = 0.0
    prefill: str = ""
    decode: str = ""
    plan: str = ""
    num_reused: int = 0
    num_fetched: int = 0
    expected_ttft: float = 0.0
    prefill_s: float = 0.0
    ttft: float | None = None
    mean_tbt: float | None = None
    tail_tbt: float | None = None
    ended_at: float | None = None
    refused: str = ""
    stage: str = ""
    retry_after_s: int = 0

    @property
    def mean_gap(self) -> float | None:
        """Mean seconds per token after the first as seen by the client, including the handover.

        None if there is no second token.
        """
        if self.ttft is None or self.ended_at is None or self.num_output < 2:
            return None
        return (self.ended_at - self.arrived_at - self.ttft) / (self.num_output - 1)


def new_records(requests: Sequence[TraceRequest], latency: LatencyModel) -> list[RequestRecord]:
    """The initial record of each request."""
    return [
        RequestRecord(
            number,
            request.at_s,
            request.num_input,
            request.num_output,
            latency.prefill_seconds(request.num_input, 0),
            latency.step_seconds(1, request.num_input + request.num_output / 2),
        )
        for number, request in enumerate(requests)
    ]


@dataclass(frozen=True, slots=True)
class LoadSample:
    """The load at one time, as means over nodes.

    Args:
        at_s: time of the sample.
        prefill_queue_s: seconds of queued prefills per prefill node.
        decode_batch: sequences per decode node, including those that wait for capacity.
        num_copies: copies of the 10th, 100th and 1,000th most frequently requested chunk.
    """

    at_s: float
    prefill_queue_s: float
    decode_batch: float
    num_copies: tuple[int, ...]


@dataclass(slots=True)
class SimulationResult:
    """The result of a run.

    Args:
        records: records of all requests, in the order of the trace.
        samples: samples of the load, every 15 s.
        ended_at: end of the last request.
        num_fetched_bytes: bytes fetched between prefill nodes.
        num_replications: copies of hot chunks that were made in advance.
        role_changes: role switches ``(time, node, new role)``.
    """

    records: list[RequestRecord]
    samples: list[LoadSample] = field(default_factory=list)
    ended_at: float = 0.0
    num_fetched_bytes: float = 0.0
    num_replications: int = 0
    role_changes: list[tuple[float, str, str]] = field(default_factory=list)


class Simulation:
    """Replays requests on a simulated cluster through a conductor.

    Args:
        cluster: the simulated cluster.
        settings: settings of the conductor.
        seed: seed of the random numbers.
        roles: when nodes switch their role; None: never.
    """

    def __init__(
        self,
        cluster: Cluster,
        settings: ConductorSettings,
        *,
        seed: int = 0,
        roles: RoleRule | None = None,
    ) -> None:
        num_slots = cluster.num_prefill + cluster.num_decode
        fleet = Fleet(
            num_slots,
            chunk_tokens=cluster.chunk_tokens,
            kv_bytes_per_token=cluster.kv_bytes_per_token,
            num_layers=cluster.num_layers,
        )
        self.conductor = Conductor(fleet, settings, random.Random(seed))
        self._cluster = cluster
        self._prefill: dict[int, PrefillNode] = {}
        self._decode: dict[int, DecodeNode] = {}
        self._decode_caches: dict[int, ChunkCache] = {}
        self._add_nodes()
        self._links = LinkCalendar(fleet.links.bytes_per_s.copy(), fleet.links.setup_s)
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = count()
        self._now = 0.0
        self._records: list[RequestRecord] = []
        self._requests: list[TraceRequest] = []
        self._sessions: dict[str, deque[int]] = {}
        self._wakes: dict[int, float] = {}
        self._samples: list[LoadSample] = []
        self._hot_keys: list[int] = []
        self._num_open = 0
        self._fetched_bytes = 0.0
        self._num_replications = 0
        self._role_changes: list[tuple[float, str, str]] = []
        self._roles: RoleChanges | None = None
        if roles is not None:
            conductor, wanted = self.conductor, settings.objectives.default
            self._roles = RoleChanges(fleet, conductor.book, conductor.ledger, roles, wanted.ttft_s)

    def run(
        self, requests: Sequence[TraceRequest], progress: Callable[[float], None] | None = None
    ) -> SimulationResult:
        """Replay until the last request has ended.

        Args:
            requests: the requests, sorted by time.
            progress: called periodically with the share of requests that have ended.
        """
        self._requests = list(requests)
        self._records = new_records(requests, self._cluster.latency)
        self._num_open = len(requests)
        asked = Counter(key for request in requests for key in request.keys)
        ranked = [key for key, _ in asked.most_common(HOT_RANKS[-1])]
        self._hot_keys = [ranked[min(rank, len(ranked)) - 1] for rank in HOT_RANKS if ranked]
        self._schedule_arrivals()
        self._at(0.0, self._sample)
        steps = max(len(requests) // 100, 1)
        while self._events:
            self._now, order, act = heapq.heappop(self._events)
            act()
            if progress is not None and order % (8 * steps) == 0:
                progress(1 - self._num_open / len(requests))
        ended = max((record.ended_at or 0.0 for record in self._records), default=0.0)
        return SimulationResult(
            self._records,
            self._samples,
            ended,
            self._fetched_bytes,
            self._num_replications,
            self._role_changes,
        )

    def _add_nodes(self) -> None:
        cluster = self._cluster
        wanted = ((Role.PREFILL, cluster.num_prefill), (Role.DECODE, cluster.num_decode))
        for role, number in wanted:
            for index in range(number):
                slot = self.conductor.add(self._spec(f"{role.value[0]}{index}", role))
                if not cluster.shares_prefixes:
                    self.conductor.fleet.share_prefixes(slot, sends=False, fetches=False)
                self._make_node(slot, role)

    def _make_node(self, slot: int, role: Role) -> None:
        cluster = self._cluster
        if role is Role.DECODE:
            self._decode[slot] = DecodeNode(
                cluster.latency, cluster.max_batch, cluster.kv_tokens, cluster.join_steps
            )
            num_chunks = cluster.decode_cache_tokens // cluster.chunk_tokens
            self._decode_caches[slot] = ChunkCache(num_chunks)
            return
        on_host = cluster.cache_tier is Tier.HOST
        chunk_bytes = cluster.chunk_tokens * cluster.kv_bytes_per_token if on_host else 0.0
        self._prefill[slot] = PrefillNode(
            cluster.latency,
            ChunkCache(cluster.cache_tokens // cluster.chunk_tokens),
            chunk_tokens=cluster.chunk_tokens,
            chunk_load_s=chunk_bytes / (cluster.host_gb_s * 1e9),
            num_layers=cluster.num_layers,
        )

    def _spec(self, name: str, role: Role) -> InstanceSpec:
        cluster = self._cluster
        return InstanceSpec(
            name,
            role,
            cluster.latency,
            link_gb_s=cluster.link_gb_s,
            host_gb_s=cluster.host_gb_s,
            kv_tokens=cluster.kv_tokens,
            max_batch=cluster.max_batch,
        )

    def _at(self, time: float, act: Callable[[], None]) -> None:
        heapq.heappush(self._events, (time, next(self._order), act))

    def _schedule_arrivals(self) -> None:
        """Schedule all requests; of a session only the first turn, as each turn starts the next."""
        for number, request in enumerate(self._requests):
            if request.session is not None and request.session in self._sessions:
                self._sessions[request.session].append(number)
                continue
            if request.session is not None:
                self._sessions[request.session] = deque()
            self._at(request.at_s, lambda number=number: self._arrive(number))  # type: ignore[misc]  # a default binds the number

    def _arrive(self, number: int) -> None:
        request, record = self._requests[number], self._records[number]
        record.arrived_at = self._now
        asked = RoutingRequest(
            str(number), request.num_input, request.keys, float(request.num_output)
        )
        decision = self.conductor.route(asked, self._now)
        if decision.verdict.refusal is not None:
            self._refuse(record, decision.verdict.refusal.value, "arrival")
            record.retry_after_s = decision.verdict.retry_after_s
            return
        self._admit(record, request, decision)
        for copy in decision.replications:
            self._replicate(copy)

    def _admit(self, record: RequestRecord, request: TraceRequest, decision: Decision) -> None:
        choice, names = decision.prefill, self.conductor.fleet.names
        record.prefill, record.plan = names[choice.slot], choice.plan.value
        record.decode, record.expected_ttft = names[decision.decode.slot], choice.ttft
        job = PrefillJob(str(record.number), request.num_input, request.keys)
        if choice.plan is Plan.FETCH:
            chunk_bytes = self.conductor.fleet.chunk_bytes
            job.num_fetched, job.keeps_copy = choice.num_reused, choice.keeps_copy
            booked = self._links.book_all(choice.fetches, choice.slot, chunk_bytes, self._now)
            job.loaded_at = max(booking.done for booking in booked)
            for fetch in choice.fetches:
                read = request.keys[fetch.start : fetch.start + fetch.num_chunks]
                self._prefill[fetch.source].cache.touch(read)
            moved = sum(fetch.num_chunks for fetch in choice.fetches)
            record.num_fetched = moved * self._cluster.chunk_tokens
            self._fetched_bytes += moved * chunk_bytes
        self._prefill[choice.slot].queue.append(job)
        self._start_prefill(choice.slot)

    def _replicate(self, copy: Replication) -> None:
        num_bytes = len(copy.keys) * self.conductor.fleet.chunk_bytes
        booked = self._links.book(copy.source, copy.target, num_bytes, self._now)
        self._num_replications += 1
        self._at(booked.done, lambda: self._keep_copy(copy))

    def _keep_copy(self, copy: Replication) -> None:
        node = self._prefill.get(copy.target)
        if node is not None:
            new, evicted = node.cache.insert(copy.keys)
            self._note_chunks(copy.target, new, evicted)

    def _note_chunks(self, slot: int, new: Sequence[int], evicted: Sequence[int]) -> None:
        tier = self._cluster.cache_tier
        self.conductor.index.stored(slot, tier, new)
        self.conductor.index.removed(slot, tier, evicted)

    def _change_roles(self, roles: RoleChanges) -> None:
        """Make a role switch, if one is due. The node loses its cache."""
        change = roles.tick(self._now)
        if change is None:
            return
        self._prefill.pop(change.slot, None)
        self._decode.pop(change.slot, None)
        self._decode_caches.pop(change.slot, None)
        self._wakes.pop(change.slot, None)
        self.conductor.index.cleared(change.slot)
        self.conductor.reports.report(change.slot, None)
        self.conductor.fleet.set_role(change.slot, change.role)
        self._make_node(change.slot, change.role)
        name = self.conductor.fleet.names[change.slot]
        self._role_changes.append((self._now, name, change.role.value))

    def _start_prefill(self, slot: int) -> None:
        job = self._prefill[slot].start_next(self._now)
        if job is not None:
            self._at(job.ends_at, lambda: self._end_prefill(slot))

    def _end_prefill(self, slot: int) -> None:
        node = self._prefill[slot]
        job, new, evicted = node.finish()
        record = self._records[int(job.request_id)]
        record.num_reused, record.prefill_s = job.num_reused, job.compute_s
        conductor = self.conductor
        verdict, decode_slot = conductor.prefilled(job.request_id, self._now)
        self._note_chunks(slot, new, evicted)
        conductor.reports.report(slot, node.cache.victim)
        conductor.measured_prefill(slot, job.num_tokens, job.num_reused, job.compute_s)
        if verdict.refusal is not None or decode_slot is None:
            self._refuse(record, verdict.refusal.value if verdict.refusal else "overdue", "prefill")
            record.retry_after_s = verdict.retry_after_s
        else:
            record.ttft = self._now - record.arrived_at + self._cluster.first_token_s
            record.decode = conductor.fleet.names[decode_slot]
            self._hand_over(slot, decode_slot, job, record)
        self._start_prefill(slot)

    def _hand_over(
        self, slot: int, decode_slot: int, job: PrefillJob, record: RequestRecord
    ) -> None:
        """Transfer the KV: with push during the prefill, with pull after it."""
        held = self._decode_caches[decode_slot].prefix(job.keys) * self._cluster.chunk_tokens
        num_bytes = (job.num_tokens - held) * self._cluster.kv_bytes_per_token
        pulls = self.conductor.settings.binds_late
        begin = self._now if pulls else job.started_at
        done = self._links.book(slot, decode_slot, num_bytes, begin).done
        if not pulls:
            rate = float(self._links.bytes_per_s[decode_slot])
            done = max(done, self._now + num_bytes / self._cluster.num_layers / rate)
        first_token_s = self._cluster.first_token_s
        if record.num_output == 1:
            self.conductor.finished(job.request_id, self._now)
            record.ended_at = self._now + first_token_s
            self._close(record)
            return
        # From here on times are as seen by the client: every token is as late as the first.
        path_s = first_token_s + max(self._cluster.hand_over_s - self._links.setup_s, 0.0)
        self._at(max(done, self._now) + path_s, lambda: self._join(decode_slot, record))

    def _join(self, slot: int, record: RequestRecord) -> None:
        self._decode[slot].add(str(record.number), record.num_input + 1, record.num_output - 1)
        self.conductor.joined(str(record.number), self._now)
        if self._cluster.decode_cache_tokens:
            self._note_chunks(
                slot, *self._decode_caches[slot].insert(self._requests[record.number].keys)
            )
        self._wake(slot)

    def _wake(self, slot: int) -> None:
        """Advance a decode node to the current time, and schedule its next batch change."""
        node = self._decode[slot]
        for decoded in node.advance(self._now):
            self._end_decode(decoded)
        when, planned = node.next_event(), self._wakes.get(slot, math.inf)
        if when is not None and (when < planned or planned <= self._now):
            self._wakes[slot] = when
            self._at(max(when, self._now), lambda: self._wake_at(slot, when))

    def _wake_at(self, slot: int, when: float) -> None:
        if self._wakes.get(slot) == when:
            del self._wakes[slot]
            self._wake(slot)

    def _end_decode(self, decoded: Decoded) -> None:
        record = self._records[int(decoded.request_id)]
        record.mean_tbt, record.tail_tbt = decoded.mean_tbt, decoded.tail_tbt
        record.ended_at = decoded.ended_at
        self.conductor.finished(decoded.request_id, self._now)
        self._close(record)

    def _refuse(self, record: RequestRecord, code: str, stage: str) -> None:
        record.refused, record.stage = code, stage
        self._close(record)

    def _close(self, record: RequestRecord) -> None:
        """End a request, and schedule the next turn of its session after its delay."""
        self._num_open -= 1
        request = self._requests[record.number]
        turns = self._sessions.get(request.session) if request.session is not None else None
        if turns:
            number = turns.popleft()
            delay = self._requests[number].delay_s
            self._at(self._now + delay, lambda: self._arrive(number))

    def _sample(self) -> None:
        fleet = self.conductor.fleet
        queue = fleet.queues.seconds(fleet.prefill_slots, self._now)
        nodes = self._decode.values()
        batch = sum(node.num_running + len(node.waiting) for node in nodes) / len(self._decode)
        copies = tuple(self.conductor.index.num_copies(key) for key in self._hot_keys)
        self._samples.append(LoadSample(self._now, float(queue.mean()), batch, copies))
        self.conductor.index.collect(1)
        if self._roles is not None:
            self._change_roles(self._roles)
        if self._num_open:
            self._at(self._now + SAMPLE_S, self._sample)
