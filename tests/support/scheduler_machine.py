"""A scheduler under test as a hypothesis state machine: adds, steps, aborts, preemptions, swaps and
peer events in any order."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from support.scheduling import EOS, Bench, token_of

from mooncake_api.instance_protocol import BATCH_PRIORITY
from mooncake_engine.messages import FinishReason, TokenUpdate
from mooncake_engine.scheduling.request import RequestStatus
from mooncake_engine.scheduling.request_queues import priority_key
from mooncake_kv.config import LoadFailurePolicy
from mooncake_kv.params import FirstToken

BLOCKS = 12
HOST_BLOCKS = 14
MAX_SEQS = 4
BUDGET = 10
LIMITS: list[dict[str, Any]] = [
    {},
    {},
    {"load_failure": LoadFailurePolicy.FAIL},
    {"num_stages": 2},
    {"prefill_chunk_size": 3},
    {"max_step_tokens_with_decodes": 6},
]
KINDS = [
    "plain",
    "plain",
    "scored",
    "unverified",
    "batch",
    "prefill",
    "decode",
    "sender",
    "receiver",
    "puller",
]


class SchedulerMachine(RuleBasedStateMachine):
    """The scheduler with simulated workers, which check the KV that every sequence attends to."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0
        self.live: set[str] = set()
        self.limits: dict[str, int] = {}
        self.answers: dict[str, list[int]] = {}
        self.first: dict[str, int] = {}
        self.scores: dict[str, list[int]] = {}
        self.now = 0.0
        self.groups: dict[str, tuple[list[int], str]] = {}

    @initialize(
        host_blocks=st.sampled_from([0, HOST_BLOCKS]),
        watermark=st.sampled_from([0.0, 0.1]),
        prefix_caching=st.booleans(),
        num_draft_tokens=st.sampled_from([0, 1, 5]),
        flights=st.sampled_from([(1, False), (1, True), (2, False), (2, True), (3, True)]),
        reports_received_blocks=st.booleans(),
        copies_late=st.booleans(),
        limits=st.sampled_from(LIMITS),
    )
    def begin(
        self,
        host_blocks: int,
        watermark: float,
        prefix_caching: bool,
        num_draft_tokens: int,
        flights: tuple[int, bool],
        reports_received_blocks: bool,
        copies_late: bool,
        limits: dict[str, Any],
    ) -> None:
        self.bench = Bench(
            BLOCKS,
            num_host_blocks=host_blocks,
            prefix_caching=prefix_caching,
            token=None,
            max_num_seqs=MAX_SEQS,
            max_num_batched_tokens=BUDGET,
            watermark=watermark,
            num_speculative_tokens=num_draft_tokens,
            depth=flights[0],
            uses_async_scheduling=flights[1],
            reports_received_blocks=reports_received_blocks,
            **limits,
        )
        self.bench.worker.copies_late = copies_late
        self.scheduler = self.bench.scheduler

    @rule(
        length=st.integers(1, 20),
        family=st.integers(0, 2),
        kind=st.sampled_from(KINDS),
        max_tokens=st.integers(1, 12),
        siblings=st.sampled_from([1, 1, 1, 2, 3, 6]),
        timeout_s=st.sampled_from([None, None, None, 20.0]),
    )
    def add(
        self,
        length: int,
        family: int,
        kind: str,
        max_tokens: int,
        siblings: int,
        timeout_s: float | None,
    ) -> None:
        prompt = [100 * family + index for index in range(length)]
        group = f"g{self.count}" if siblings > 1 else None
        if group is not None:
            self.groups[group] = prompt, kind
        for _ in range(siblings):
            self._add(prompt, kind, max_tokens, group, timeout_s)

    @precondition(lambda self: self.groups)
    @rule(data=st.data(), max_tokens=st.integers(1, 12))
    def add_late_sibling(self, data: st.DataObject, max_tokens: int) -> None:
        """The choices of a prompt reach the core one by one, maybe after the others have ended."""
        group = data.draw(st.sampled_from(sorted(self.groups)))
        prompt, kind = self.groups[group]
        self._add(prompt, kind, max_tokens, group)

    def _add(
        self,
        prompt: list[int],
        kind: str,
        max_tokens: int,
        group: str | None,
        timeout_s: float | None = None,
    ) -> None:
        name = f"r{self.count}"
        self.count += 1
        self.live.add(name)
        self.answers[name] = []
        self.scores[name] = list(prompt[1:]) if kind == "scored" else []
        self.limits[name] = 1 if kind in ("prefill", "sender") else max_tokens
        flag = {
            "prefill": "keeps_kv",
            "sender": "sends_kv",
            "receiver": "receives_kv",
            "unverified": "is_unverified",
            "scored": "is_scored",
        }.get(kind)
        if kind in ("decode", "receiver"):
            self.first[name] = token_of(name, 0)
        self.bench.add(
            name,
            prompt,
            arrival=self.count,
            max_tokens=max_tokens,
            first_token=self.first[name] if kind == "decode" else None,
            group=group,
            priority=BATCH_PRIORITY if kind == "batch" else 0,
            timeout_s=timeout_s,
            pulls_kv=kind in ("puller", "unverified"),
            **({flag: True} if flag else {}),
        )

    @property
    def is_cramped(self) -> bool:
        """Whether blocks are in use by others than the running requests."""
        is_loading = bool(self.scheduler._queues.transferring)
        return bool(self.scheduler.num_held_tables or is_loading or self.bench.in_flight)

    @rule(num_accepted=st.integers(0, 5))
    def step(self, num_accepted: int) -> None:
        self.bench.worker.num_accepted = num_accepted
        places = self.scheduler._queues
        holders = [*places.running, *places.ready]
        oldest = min(holders, key=priority_key, default=None)
        was_running = (
            oldest is not None
            and oldest.status is RequestStatus.RUNNING
            and oldest.spec.priority < BATCH_PRIORITY
        )
        is_cramped = self.is_cramped
        plan, updates = self.bench.step()
        assert plan.num_tokens <= BUDGET
        assert len(plan.sequences) <= MAX_SEQS
        if oldest is not None and was_running and not is_cramped:
            ran = {s.request_id for s in plan.sequences}
            assert oldest.request_id in ran, "the oldest did not progress"
        self._take(updates)

    @precondition(lambda self: self.bench.in_flight)
    @rule()
    def step_completes(self) -> None:
        self._take(self.bench.land())

    @rule()
    def step_while_others_hold_the_free_blocks(self) -> None:
        """Without free blocks, sequences that need one preempt others: groups are swapped, single
        sequences recomputed."""
        pool = self.scheduler.blocks.pool
        held = pool.allocate(pool.num_free)
        assert held is not None
        self.bench.submit()
        pool.release(held)
        if len(self.bench.in_flight) >= self.bench.depth:
            self._take(self.bench.land())

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        self.scheduler.abort(data.draw(st.sampled_from(sorted(self.live))))
        self._take(self.scheduler.take_updates())

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def execution_fails(self, data: st.DataObject) -> None:
        """The next token of one request is an error, for example that of its grammar."""
        self.bench.worker.failing = data.draw(st.sampled_from(sorted(self.live)))

    @rule(seconds=st.sampled_from([0.01, 0.4, 1.0, 3.0, 40.0]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        self.scheduler.expire(self.now)
        self._take(self.scheduler.take_updates())

    @precondition(lambda self: self.bench.connector.loading)
    @rule(data=st.data(), error=st.sampled_from([None, None, "peer lost"]))
    def load_ends(self, data: st.DataObject, error: str | None) -> None:
        name = data.draw(st.sampled_from(sorted(self.bench.connector.loading)))
        self._end_load(name, error)
        self.scheduler.handle_load_ended(name, error)

    @precondition(lambda self: self.bench.connector.loading)
    @rule(data=st.data())
    def peer_falls_silent(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.bench.connector.loading)))
        self.scheduler.handle_load_ended(name, "silent peer", is_drained=False)

    @precondition(lambda self: self._leased())
    @rule(data=st.data())
    def lease_is_lost(self, data: st.DataObject) -> None:
        """Of a request that waits for blocks; the scheduler is notified later."""
        self.bench.connector.lost.add(data.draw(st.sampled_from(self._leased())))

    def _leased(self) -> list[str]:
        """Requests with a lease whose loads have not begun."""
        connector = self.bench.connector
        names = connector.expected - connector.lost
        live = self.scheduler._queues.requests
        return sorted(name for name in names if name in live)

    @precondition(lambda self: self.bench.connector.lost)
    @rule()
    def scheduler_is_notified(self) -> None:
        connector = self.bench.connector
        for name in sorted(connector.lost):
            self.scheduler.handle_load_ended(name, "its lease was lost")
        connector.lost.clear()

    @precondition(lambda self: self.bench.connector.offered)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.bench.connector.offered)))
        del self.bench.connector.offered[name]
        self.scheduler.release(name)

    @rule()
    def reset_the_prefix_cache(self) -> None:
        is_idle = self.bench.num_free == BLOCKS
        assert self.scheduler.reset_prefix_cache() == is_idle

    @invariant()
    def books_balance(self) -> None:
        if hasattr(self, "scheduler"):
            self.scheduler.check_integrity()

    @invariant()
    def cached_blocks_in_use_are_not_underestimated(self) -> None:
        """Else a request that fits would wait."""
        if not hasattr(self, "scheduler"):
            return
        blocks, queues = self.scheduler.blocks, self.scheduler._queues
        for request in (*queues.waiting, *queues.preallocating):
            for cacheable in (len(request.token_ids), request.num_prompt_tokens // 2):
                most = blocks._most_in_use(request, cacheable)
                found = blocks._find_prefix(request, cacheable)
                assert most >= len(found) - blocks.pool.count_free(found)

    @invariant()
    def blocks_are_counted_by_what_they_are_held_for(self) -> None:
        if not hasattr(self, "scheduler"):
            return
        blocks, outputs = self.scheduler.blocks, self.scheduler._outputs
        leased = set[int]().union(*outputs._leased)
        written = [
            block
            for request in self.scheduler._queues.transferring.values()
            for block in request.block_ids[blocks.blocks_for(request.num_computed) :]
        ]
        for table in outputs._draining.values():
            written += table.block_ids[len(table.block_ids) - table.num_unfilled :]
        held = self.scheduler.held_blocks()
        assert (held.leased, held.reserved) == (len(leased), len(written))
        assert held.running == BLOCKS - blocks.pool.num_free - held.leased - held.reserved >= 0
        assert all(blocks.pool.references[block] == 1 for block in written), "shared, yet written"

    def _end_load(self, name: str, error: str | None) -> None:
        request = self.scheduler._queues.requests.get(name)
        params = None if request is None else request.spec.kv_transfer_params
        is_receiver = params is not None and params.metaserver is not None
        first = FirstToken(self.first[name]) if is_receiver and error is None else None
        is_wanted = request is not None and request.status is RequestStatus.TRANSFERRING
        self.bench.end_load(name, error if is_wanted else "not awaited", first)

    def _take(self, updates: list[TokenUpdate]) -> None:
        for update in updates:
            name = update.request_id
            assert name in self.live, "an update after the finish"
            answer, scores = self.answers[name], self.scores[name]
            scored = [score.token_id for score in update.prompt_logprobs or ()]
            assert scored == scores[: len(scored)], "scores of other tokens"
            del scores[: len(scored)]
            answer += update.token_ids
            assert answer == [token_of(name, i) for i in range(len(answer))], "wrong tokens"
            if update.finish is not None:
                self.live.remove(name)
                if update.finish in (FinishReason.STOP, FinishReason.LENGTH):
                    assert not scores
                    assert answer[-1] == EOS or len(answer) >= self.limits[name]

    def teardown(self) -> None:
        """Complete all loads: every request then finishes, and every block is freed."""
        if not hasattr(self, "bench"):
            return
        connector = self.bench.connector
        self.scheduler_is_notified()
        for _ in range(3000):
            for name in list(connector.loading):
                self._end_load(name, None)
            for name in [*connector.offered, *connector.withdrawn]:
                connector.offered.pop(name, None)
                self.scheduler.release(name)
            self.settle()
            if not self.live and not self.scheduler.has_work and not self.bench.in_flight:
                break
            self._take(self.bench.step()[1])
        assert not self.live, f"never finished: {self.live}"
        assert self.bench.num_free == BLOCKS
        host_pool = self.scheduler.blocks.host_pool
        assert host_pool.num_free == host_pool.num_blocks
        self.check_end()

    def settle(self) -> None:
        """Complete what a subclass has in flight."""

    def check_end(self) -> None:
        """Check what a subclass holds, after all requests have finished."""
