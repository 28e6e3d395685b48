"""Continuous batching: which tokens of which requests run in the next step.

There are no prefill and decode phases: in each step every running request gets tokens until its
KV has caught up with its tokens, within a budget; long prompts run in chunks (after vLLM v1 and
Sarathi-Serve). First come, first served, within a priority. Pure: no torch, no clock, no I/O; a
connector that moves KV is an argument.

Several steps may be in flight: planned, and not yet over. They run one after the other, in order,
so a step may build on the KV of those before it, and take the place of blocks that they used; what
is not bound to that order, a peer above all, sees only what is over.
"""

from __future__ import annotations

from collections import deque
from itertools import groupby
from math import ceil
from operator import attrgetter
from typing import NamedTuple

from mooncake_engine.messages import FinishReason, TokenUpdate
from mooncake_engine.scheduling.answers import Answers
from mooncake_engine.scheduling.block_manager import BlockManager
from mooncake_engine.scheduling.delay import AdmissionDelay
from mooncake_engine.scheduling.kv_connector import KVConnector
from mooncake_engine.scheduling.limits import SchedulerLimits
from mooncake_engine.scheduling.loads import PeerLoads
from mooncake_engine.scheduling.places import Places
from mooncake_engine.scheduling.plan import ScheduledSequence, StepPlan, StepResult
from mooncake_engine.scheduling.preemption import Preemption
from mooncake_engine.scheduling.queue import urgency
from mooncake_engine.scheduling.request import FirstToken, Request, RequestState, SequenceGroup
from mooncake_engine.scheduling.speculation import Speculation
from mooncake_engine.scheduling.step_builder import StepBuilder

_group_of = attrgetter("group")


class _Flight(NamedTuple):
    """A step in flight: its plan, and who takes part, siblings behind their leaders."""

    plan: StepPlan
    requests: list[Request]


class Scheduler:
    """Admission, growth and budgets; the parts beside it hold queues, answers, loads, preemption.

    Args:
        limits: bounds.
        blocks: the block tables.
        connector: moves KV; None where no request asks for it.
    """

    def __init__(
        self, limits: SchedulerLimits, blocks: BlockManager, connector: KVConnector | None = None
    ) -> None:
        self.limits = limits
        self.blocks = blocks
        self._connector = connector
        self._places = Places()
        self._answers = Answers(limits, self._places, blocks, connector)
        self._loads = PeerLoads(limits, self._places, blocks, self._answers, connector)
        self._preemption = Preemption(self._places, blocks)
        self.speculation = Speculation(limits, blocks)
        self._delay = AdmissionDelay(limits.delay_factor)
        self._watermark_blocks = ceil(limits.watermark * blocks.pool.num_blocks)
        self._step = 0
        self._flights: deque[_Flight] = deque()
        self._awaits_landing = False

    @property
    def num_running(self) -> int:
        """Requests that take part in steps."""
        return len(self._places.running)

    @property
    def num_waiting(self) -> int:
        """Requests that wait: for their turn, for blocks, or for KV."""
        return len(self._places.requests) - len(self._places.running)

    @property
    def num_swapped(self) -> int:
        """Those of them whose KV is in host memory."""
        return len(self._places.swapped)

    @property
    def num_loading(self) -> int:
        """Those that wait while a peer's KV comes in."""
        return len(self._places.transferring)

    @property
    def num_preemptions(self) -> int:
        """Requests that gave their blocks up for more urgent ones, so far."""
        return self._preemption.num_preemptions

    @property
    def num_swap_outs(self) -> int:
        """Those of them whose KV went to host memory."""
        return self._preemption.num_swap_outs

    @property
    def has_work(self) -> bool:
        """Whether ``schedule`` might plan something or ``update`` might report something."""
        places = self._places
        is_queued = len(places.requests) > len(places.transferring)
        has_rest = self._answers.has_updates or bool(places.retired)
        return is_queued or has_rest or bool(self._flights)

    @property
    def num_held_tables(self) -> int:
        """Block tables that outlive their requests: see ``Answers.held_tables``."""
        return len(self._answers.held_tables)

    # --- requests come and go ------------------------------------------------------------

    def add(self, request: Request) -> None:
        """Take a request in. Its id is not in use, its prompt fits the model."""
        self._places.enter(request)
        self._answers.watch(request)
        if request.loads_kv:
            self._loads.expect(request)
            return
        if request.sends_kv:
            assert self._connector is not None, "a request that sends its KV needs a connector"
            self._connector.announce(request)
        self._places.wait(request)
        if leader := _prefilling(request):
            self._places.follow(request, leader)

    def abort(self, request_id: str) -> None:
        """End a request in whatever state it is, or what is still held for it. Idempotent."""
        request = self._places.requests.get(request_id)
        if request is None:
            self._answers.withdraw(request_id)
        else:
            self._answers.finish(request, TokenUpdate(request_id, finish=FinishReason.ABORT))

    def expire(self, now: float) -> None:
        """End the requests whose time is up; fail those that waited too long for blocks to load
        KV into. To be called before every step: ``now`` is when it begins."""
        self._places.now = now
        self._answers.end_overdue()
        self._loads.expire()

    def load_ended(
        self,
        request_id: str,
        error: str | None,
        *,
        first_token: FirstToken | None = None,
        is_drained: bool = True,
    ) -> None:
        """A load is over: its KV is complete if ``error`` is None, else unusable.

        Args:
            request_id: whose load; unknown ones are normal.
            error: why it failed.
            first_token: the peer's token, if it comes with the KV.
            is_drained: False if the peer may still write into the blocks: they are kept apart
                until this is called again, drained.
        """
        self._loads.ended(request_id, error, first_token=first_token, is_drained=is_drained)

    def release(self, request_id: str) -> None:
        """A peer has read what was held for it, or never will: the blocks are free. Idempotent."""
        self._answers.release(request_id)

    def reset_prefix_cache(self) -> bool:
        """Forget all cached prefixes; refused, with False, while any block is in use."""
        return self.blocks.reset_prefix_cache()

    # --- one step --------------------------------------------------------------------------

    def schedule(self) -> StepPlan:
        """Plan the next step; the plan may be empty: then nobody has to run it.

        Else it is in flight until ``update`` is called with it.
        """
        step = StepBuilder(self.limits.max_num_batched_tokens)
        self._awaits_landing = self._awaits_landing and bool(self._flights)
        if not self._awaits_landing:
            self._fill(step)
        if self.limits.num_speculative_tokens:
            self.speculation.plan(step, self._places.requests)
        arrived = self._loads.arrivals.take() if step.requests else ()
        plan = step.build(self._step, self._places.take_retired(), arrived)
        self._step += 1
        if not plan.is_empty:
            self._flights.append(_Flight(plan, step.requests))
        return plan

    def _fill(self, step: StepBuilder) -> None:
        self._delay.begin_step(self._places.now)
        if not self._continue_running(step):
            return
        self._admit(step)
        is_queued = len(self._places.waiting) or len(self._places.swapped)
        # a peer writes at any time, also before blocks that were given up have been copied
        if not is_queued and not any(self._reaches_freed(flight.plan) for flight in self._flights):
            self._loads.start(self._watermark_blocks)

    def _reaches_freed(self, plan: StepPlan) -> bool:
        """Whether a plan in flight works on blocks that may have been given up since."""
        references = self.blocks.pool.references
        return plan.reads_freed_blocks or not all(map(references, plan.arrived_blocks))

    def update(self, plan: StepPlan, result: StepResult) -> list[TokenUpdate]:
        """Take in what came of a step; returns what happened to each request since the last call.

        Args:
            plan: of the oldest step in flight; an empty one changes nothing.
            result: its.
        """
        if not plan.is_empty:
            flight = self._flights.popleft()
            assert flight.plan is plan, f"step {plan.step} is over before {flight.plan.step}"
            requests = iter(flight.requests)
            for sequence in plan.sequences:
                self._land(next(requests), sequence, result)
                if sequence.siblings:
                    for _ in sequence.siblings:
                        self._land(next(requests), sequence, result)
        return self._answers.take_updates()

    def take_updates(self) -> list[TokenUpdate]:
        """What happened outside steps: aborts, failures, first tokens from a peer."""
        return self._answers.take_updates()

    def check_integrity(self) -> None:
        """Prove that every block is owned by exactly the tables that list it."""
        self._places.check()
        requests = self._places.requests.values()
        tables = [request.block_ids for request in requests]
        self.blocks.pool.check_integrity([*tables, *self._answers.held_tables])
        self.blocks.host_pool.check_integrity([request.host_block_ids for request in requests])
        for request in self._places.swapped:
            assert request.host_block_ids, f"{request.request_id} is swapped out to nowhere"

    def _land(self, request: Request, sequence: ScheduledSequence, result: StepResult) -> None:
        """A request's share of a step is over; the request itself may have ended meanwhile."""
        stop = sequence.start + sequence.count
        request.num_in_flight -= stop - request.num_computed
        request.num_computed = stop
        if request.state is not RequestState.RUNNING:
            if not request.num_in_flight:
                self._answers.settle(request)
            return
        self.blocks.publish(request)
        if result.prompt_logprobs:
            scores = result.prompt_logprobs.get(request.request_id, ())
            self._answers.report_scores(request, sequence.start, scores)
        if sequence.is_sampling:
            request.num_promised -= 1
            name = request.spec.request_id
            if name in result.failed:
                self._answers.fail(request, result.failed[name])
            else:
                self._answers.append(request, result.tokens[name])
            if sequence.num_guesses:
                self.speculation.settle(request, sequence, result)

    # --- running ---------------------------------------------------------------------------

    def _continue_running(self, step: StepBuilder) -> bool:
        """Give running requests their tokens; False if blocks ran out: some gave way, or have to
        when nothing is in flight any more."""
        before = self._preemption.num_preemptions
        for group, members in groupby(list(self._places.running), _group_of):
            if len(group.members) == 1:
                self._continue_single(next(members), step)
            else:
                self._continue_group(group, list(members), step)
            if self._awaits_landing:
                return False
        return self._preemption.num_preemptions == before

    def _continue_single(self, request: Request, step: StepBuilder) -> None:
        # as _count does, without a call: this runs for every decode
        start = request.num_computed + request.num_in_flight
        num_promised = request.num_promised
        count = min(len(request.token_ids) + num_promised - start, step.budget)
        if not count or (num_promised and not self._runs_ahead(request)):
            return
        if request.state is not RequestState.RUNNING:
            return
        while (growth := self.blocks.grow(request, start + count)) is None:
            if not self._make_room_for(request.group, step):
                return
            if request.state is not RequestState.RUNNING:
                return
        step.add(request, count, growth)

    def _count(self, request: Request, budget: int) -> int:
        """How many tokens of a request run next."""
        is_ready = not request.num_promised or self._runs_ahead(request)
        if not is_ready or request.state is not RequestState.RUNNING:
            return 0
        return min(request.num_pending, budget)

    def _runs_ahead(self, request: Request) -> bool:
        """Whether a request runs on before it is known what a step in flight samples: not where the
        workers don't know it themselves, nor after the token that certainly is its last."""
        return self.limits.feeds_forward and request.num_tokens < request.max_num_tokens

    def _make_room_for(self, group: SequenceGroup, step: StepBuilder) -> bool:
        """Have somebody give way, whom no step in flight runs: else nothing is planned until all of
        them are over."""
        if self._flights:
            self._awaits_landing = True
            return False
        self._preemption.make_room_for(group, step)
        return True

    def _continue_group(
        self, group: SequenceGroup, members: list[Request], step: StepBuilder
    ) -> None:
        """All members that can run do, or the group gives way."""
        pool = self.blocks.pool
        while True:
            shares, wanted = self._shares(members, step.budget)
            if wanted <= pool.num_free:
                break
            if not self._make_room_for(group, step):
                return
        for request, count in shares:
            self._run_on(request, count, step)

    def _shares(self, members: list[Request], budget: int) -> tuple[list[tuple[Request, int]], int]:
        """How many tokens each running member gets, and how many blocks that takes."""
        shares, wanted = [], 0
        for request in members:
            if count := self._count(request, budget):
                shares.append((request, count))
                wanted += self.blocks.lacking(request, request.num_scheduled + count)
                budget -= count
        return shares, wanted

    def _run_on(self, request: Request, count: int, step: StepBuilder) -> None:
        growth = self.blocks.grow(request, request.num_scheduled + count)
        assert growth is not None, "blocks were counted before they were taken"
        followers: list[Request] = []
        if request.shares_first_token and count == request.num_pending:
            followers = self._take_followers(request, step)
        step.add(request, count, growth, followers)

    def _take_followers(self, leader: Request, step: StepBuilder) -> list[Request]:
        """Siblings that get the prompt's blocks and sample from its logits, while there is room."""
        followers = self._places.followers(leader)
        taken = followers[: self.limits.max_num_seqs - len(self._places.running)]
        for follower in taken:
            self._places.leave(follower)
            self.blocks.fork(follower, leader)
            self._places.run(follower)
            step.admit(follower)
        self._places.disperse(leader)
        return taken

    # --- admitting -------------------------------------------------------------------------

    def _admit(self, step: StepBuilder) -> None:
        """Those with blocks go first; then the most urgent one, swapped out or without blocks."""
        places = self._places
        while step.budget and len(places.running) < self.limits.max_num_seqs:
            if request := places.ready.peek():
                is_admitted = self._run_ready(request, step)
            elif request := self._most_urgent():
                is_admitted = self._bring_in(request, step)
            else:
                return
            if not is_admitted:
                return

    def _most_urgent(self) -> Request | None:
        heads = (self._places.swapped.peek(), self._places.waiting.peek())
        return min((head for head in heads if head is not None), key=urgency, default=None)

    def _run_ready(self, request: Request, step: StepBuilder) -> bool:
        growth = self.blocks.grow(request, len(request.token_ids))
        if growth is not None:
            step.copy(growth)
            self._run(request, step)
        elif not self._places.running and not self._flights:
            self._preemption.start_over(self._places.ready.least_urgent() or request)
        else:
            return False
        return True

    def _bring_in(self, request: Request, step: StepBuilder) -> bool:
        """Swap a group in, or begin a request; False if it has to wait."""
        is_alone = not self._places.running
        # room for those that run, and for the request's siblings to part from it
        reserve = 0 if is_alone else self._watermark_blocks + len(request.group.members) - 1
        if request.state is RequestState.SWAPPED:
            return self._preemption.bring_back(request, step, reserve)
        has_passed = is_alone or self._delay.has_passed(request.arrival)
        if not has_passed or not self._place(request, reserve, step):
            return False
        self._delay.note_admission()
        if request.shares_first_token:
            self._places.gather(request)
        self._run(request, step)
        return True

    def _place(self, request: Request, reserve: int, step: StepBuilder) -> bool:
        """Blocks for all the tokens that the request has now, a sibling's where it has the same."""
        sibling = request.group.find_prompt()
        if sibling is not None and request.shares_prompt:
            return self._fork(request, sibling, reserve, step)
        num_tokens = len(request.token_ids)
        cacheable = 0 if request.awaits_scores else num_tokens - 1
        if not self.blocks.begin(request, num_tokens, cacheable=cacheable, reserve=reserve):
            return False
        if not request.num_output_tokens:
            request.num_cached_tokens = request.num_computed
        return True

    def _fork(self, request: Request, sibling: Request, reserve: int, step: StepBuilder) -> bool:
        """Go on from a sibling's prompt; its last token runs again if there is no later one."""
        num_tokens, prompt = len(request.token_ids), request.num_prompt_tokens
        wanted = self.blocks.blocks_for(num_tokens) - self.blocks.blocks_for(prompt) + 1
        if wanted + reserve > self.blocks.pool.num_free:
            return False
        self.blocks.fork(request, sibling)
        request.num_computed = min(prompt, num_tokens - 1)
        growth = self.blocks.grow(request, num_tokens)
        assert growth is not None, "blocks were counted before they were taken"
        step.copy(growth)
        return True

    def _run(self, request: Request, step: StepBuilder) -> None:
        """A request that has all its blocks takes part from now on."""
        self._places.leave(request)
        self._places.run(request)
        step.admit(request)
        self._run_on(request, min(request.num_pending, step.budget), step)


def _prefilling(request: Request) -> Request | None:
    """A sibling that is computing the prompt, and has not sampled from it."""
    if not request.shares_first_token:
        return None
    for member in request.group.members:
        if member.state is RequestState.RUNNING and member.shares_first_token:
            return member
    return None
