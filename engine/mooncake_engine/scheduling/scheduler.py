"""Continuous batching: which tokens of which requests run in the next step.

There are no prefill and decode phases: in each step every running request gets tokens until its
KV has caught up with its tokens, within a budget; long prompts run in chunks (after vLLM v1 and
Sarathi-Serve). First come, first served, within a priority. Pure: no torch, no clock, no I/O; a
connector that moves KV is an argument.

Several steps may be in flight: scheduled, but not completed. The device runs them one after the
other, in order, so a step may build on the KV of those before it, and reuse blocks that they used.
A peer is not bound to that order: it sees only what completed steps have written.
"""

from __future__ import annotations

from itertools import islice, takewhile

from mooncake_engine.kv_cache.block_manager import BlockManager
from mooncake_engine.messages import FinishReason, TokenUpdate
from mooncake_engine.scheduling.batch_work import is_batch
from mooncake_engine.scheduling.draft_scheduling import DraftScheduler
from mooncake_engine.scheduling.kv_residency import HeldBlocks, count_held
from mooncake_engine.scheduling.output_processor import OutputProcessor
from mooncake_engine.scheduling.pool_use import PoolUse
from mooncake_engine.scheduling.preemption import Preemption
from mooncake_engine.scheduling.remote_kv_queue import RemoteKVQueue
from mooncake_engine.scheduling.request import Request, RequestStatus, SequenceGroup
from mooncake_engine.scheduling.request_admission import RequestAdmission
from mooncake_engine.scheduling.request_queues import RequestQueues, priority_key
from mooncake_engine.scheduling.scheduler_interface import ChunkPool, KVConnector, SchedulerLimits
from mooncake_engine.scheduling.step_plan import (
    ScheduledSequence,
    StepBuilder,
    StepPlan,
    StepResult,
)
from mooncake_engine.scheduling.steps_in_flight import InFlightStep, StepsInFlight
from mooncake_kv.params import FirstToken
from mooncake_kv.pool.pool_events import PoolEvent


class Scheduler:
    """The next tokens of requests that run; the parts beside it hold queues, outputs, loads,
    admission, preemption.

    Args:
        limits: bounds.
        blocks: the block tables.
        connector: moves KV; None where no request asks for it.
        pool: the KVCache pool; None where there is none.
    """

    def __init__(
        self,
        limits: SchedulerLimits,
        blocks: BlockManager,
        connector: KVConnector | None = None,
        pool: ChunkPool | None = None,
    ) -> None:
        self.limits = limits
        self.blocks = blocks
        self._connector = connector
        self._queues = queues = RequestQueues()
        self._outputs = outputs = OutputProcessor(limits, queues, blocks, connector, pool)
        self._pool = None if pool is None else PoolUse(limits, queues, blocks, outputs, pool)
        self._wait = queues.wait if self._pool is None else self._pool.loads.look_up
        self._remote_kv = RemoteKVQueue(limits, queues, blocks, outputs, connector, self._wait)
        self._preemption = Preemption(queues, blocks, self._wait)
        self.speculation = DraftScheduler(limits, blocks)
        self._step = 0
        self._in_flight = StepsInFlight(blocks, is_pipeline=limits.num_stages > 1)
        self._admission = RequestAdmission(
            limits, queues, blocks, self._preemption, self._in_flight, self._pool
        )
        self._budget = self._admission.budget
        self._waits_for_steps = False

    @property
    def num_running(self) -> int:
        """Requests that take part in steps."""
        return len(self._queues.running)

    @property
    def num_waiting(self) -> int:
        """Requests that wait: for their turn, for blocks, or for KV."""
        return len(self._queues.requests) - len(self._queues.running)

    @property
    def num_swapped(self) -> int:
        """Those of them whose KV is in host memory."""
        return len(self._queues.swapped)

    @property
    def num_loading(self) -> int:
        """Those that wait while a peer's KV comes in."""
        return len(self._queues.transferring)

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
        is_queued = len(self._queues.requests) > len(self._queues.transferring)
        has_rest = self._outputs.has_updates or bool(self._queues.removed)
        return is_queued or has_rest or bool(self._in_flight)

    @property
    def num_held_tables(self) -> int:
        """Block tables that outlive their requests: see ``OutputProcessor.held_tables``; and blocks
        that were replaced by equal ones, but for which steps are in flight."""
        return len(self._outputs.held_tables) + len(self._in_flight.replaced_tables)

    def held_blocks(self) -> HeldBlocks:
        """What blocks are held for now."""
        return count_held(self._queues, self._outputs, self.blocks)

    def add(self, request: Request) -> None:
        """Take a request in. Its id is not in use, its prompt fits the model."""
        self._queues.add(request)
        self._outputs.track(request)
        if request.loads_kv:
            self._remote_kv.expect(request)
            return
        if request.sends_kv:
            assert self._connector is not None, "a request that sends its KV needs a connector"
            self._connector.on_new_request(request)
        if leader := request.group.find_leader(request):
            self._queues.wait(request)
            self._queues.follow(request, leader)
        else:
            self._wait(request)

    def abort(self, request_id: str) -> None:
        """End a request in whatever state it is, or what is still held for it. Idempotent."""
        request = self._queues.requests.get(request_id)
        if request is None:
            self._outputs.cancel_send(request_id)
        else:
            self._outputs.finish(request, TokenUpdate(request_id, finish=FinishReason.ABORT))

    def expire(self, now: float) -> None:
        """End the requests whose time is up; fail those that waited too long for blocks to load
        KV into. To be called before every step: ``now`` is when it begins."""
        self._queues.now = now
        self._outputs.end_overdue()
        self._remote_kv.expire()
        if self._pool is not None:
            self._pool.loads.expire()

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
            is_drained: False if the peer may still write into the blocks: they are reserved
                until this is called again, drained.
        """
        self._remote_kv.ended(request_id, error, first_token=first_token, is_drained=is_drained)

    def take_pool_event(self, event: PoolEvent) -> None:
        """Something came of what was asked of the pool."""
        assert self._pool is not None, "without a pool there are no events"
        for request, sequence, result in self._pool.take(event):
            self._complete(request, sequence, result)
        self._pool.recompute_wrong()
        self._in_flight.release_replaced()

    def release(self, request_id: str) -> None:
        """A peer has read what was held for it, or never will: the blocks are free. Idempotent."""
        self._outputs.release(request_id)

    def reset_prefix_cache(self) -> bool:
        """Forget all cached prefixes; refused, with False, while any block is in use."""
        return self.blocks.reset_prefix_cache()

    def schedule(self) -> StepPlan:
        """Plan the next step; an empty plan need not be run.

        Else it is in flight until ``update`` is called with it.
        """
        step = StepBuilder(self.limits.max_num_batched_tokens)
        self._waits_for_steps = bool(self._in_flight) and self._waits_for_steps
        if not self._waits_for_steps:
            self._schedule_requests(step)
        if self.limits.num_speculative_tokens:
            self.speculation.plan(step, self._queues.requests)
        arrived = self._remote_kv.received.take() if step.requests else ()
        drains = self._preemption.copies.drains(
            self._step,
            has_copies=step.has_host_copies,
            is_idle=not step.requests and not self._in_flight,
        )
        removed = self._queues.take_removed()
        plan = step.build(self._step, removed, arrived, drains_copies=drains)
        self._step += 1
        if not plan.is_empty:
            self._in_flight.push(plan, step.requests, self._queues.now)
            if self._pool is not None:
                self._pool.saves.offer_planned(plan, step.requests)
        return plan

    def _schedule_requests(self, step: StepBuilder) -> None:
        self._admission.begin_step(self._queues.now)
        before = self._preemption.num_preemptions
        if not self._admission.make_room(step):
            self._waits_for_steps = True
            return
        if not self._schedule_running(step) or self._preemption.num_preemptions != before:
            return
        self._admission.schedule_new(step)
        if self._admission.may_write():
            reserve = self._admission.watermark_blocks
            self._remote_kv.start(reserve, before=self._admission.highest_priority())
            if self._pool is not None:
                is_awaited = self._admission.batch.find_waiting() is not None
                self._pool.loads.start_early(reserve, has_batch=not is_awaited)

    @property
    def chunk_pool(self) -> ChunkPool | None:
        """The KVCache pool that it uses."""
        return None if self._pool is None else self._pool.chunk_pool

    def update(
        self, plan: StepPlan, result: StepResult, now: float | None = None
    ) -> list[TokenUpdate]:
        """Take in what came of a step; returns what happened to each request since the last call.

        Args:
            plan: of the oldest step in flight; an empty one changes nothing.
            result: its.
            now: when it was over; None if nothing is to be learnt of what it took.
        """
        if not plan.is_empty:
            flight, seconds = self._in_flight.pop(plan, now)
            if seconds is not None:
                self._learn(flight, result, seconds)
            requests = iter(flight.requests)
            for sequence in plan.sequences:
                request = next(requests)
                self._complete(request, sequence, result)
                if sequence.siblings:
                    for sibling in islice(requests, len(sequence.siblings)):
                        sibling.share_offers(request)
                        self._complete(sibling, sequence, result)
            if self._pool is not None:
                self._pool.recompute_wrong()
            self._in_flight.release_replaced()
            self._preemption.copies.learn(plan, result)
        return self._outputs.take_updates()

    def _learn(self, flight: InFlightStep, result: StepResult, seconds: float) -> None:
        """What a step took."""
        self._budget.learn(flight.plan, seconds)
        if self._pool is not None:
            self._pool.learn(flight.plan, seconds)
        if self.limits.num_speculative_tokens:
            self.speculation.learn(flight.plan, result, seconds)

    def take_updates(self) -> list[TokenUpdate]:
        """What happened outside steps: aborts, failures, first tokens from a peer."""
        return self._outputs.take_updates()

    def check_integrity(self) -> None:
        """Prove that every block is owned by exactly the tables that list it."""
        self._queues.check()
        requests = self._queues.requests.values()
        tables = [request.block_ids for request in requests]
        held = (*self._outputs.held_tables, *self._in_flight.replaced_tables)
        self.blocks.pool.check_integrity([*tables, *held])
        self.blocks.host_pool.check_integrity([request.host_block_ids for request in requests])
        for request in self._queues.swapped:
            assert request.host_block_ids, f"{request.request_id} is swapped out to nowhere"

    def _complete(self, request: Request, sequence: ScheduledSequence, result: StepResult) -> None:
        """A request's share of a step is over; the request itself may have ended meanwhile."""
        if request.is_unproven and self._pool is not None:
            self._pool.loads.hold(request, sequence, result)
            return
        start = request.num_computed if sequence.num_unverified_drafts else sequence.start
        stop = start + sequence.count
        request.num_in_flight -= stop - request.num_computed
        request.num_computed = stop
        request.num_unverified_drafts -= sequence.num_draft_tokens
        is_running = request.state is RequestStatus.RUNNING
        if not is_running or request.has_wrong_kv:
            if not is_running and not request.num_in_flight:
                self._outputs.complete(request)
            return
        if stop // self.blocks.block_size > request.num_published:
            self.blocks.publish(request)
        if self._pool is not None and (
            stop >= request.num_offered + self._pool.chunk_tokens
            or request.num_saved < request.num_offered
        ):
            self._pool.saves.computed(request)
        if result.prompt_logprobs:
            scores = result.prompt_logprobs.get(request.request_id, ())
            self._outputs.report_scores(request, sequence.start, scores)
        if sequence.is_sampling:
            request.num_output_placeholders -= 1
            self._outputs.take_sampled(request, result)
            if sequence.num_draft_tokens:
                self.speculation.complete(request, sequence, result)
        elif request.sends_kv:
            assert self._connector is not None, "a request that sends its KV needs a connector"
            self._connector.prefill_advanced(request)

    def _schedule_running(self, step: StepBuilder) -> bool:
        """Give running requests their tokens, decodes first (as Sarathi-Serve and vLLM v1 do): one
        long prompt, whatever its priority, must not hold up the next token of all others.

        Returns:
            False if blocks ran out: a group was preempted, or has to be when no step is in flight
            any more.
        """
        before = self._preemption.num_preemptions
        prompts: list[Request] = []
        running = list(self._queues.running)
        for index, request in enumerate(running):
            if len((group := request.group).members) == 1:
                self._schedule_single(request, step, prompts)
            elif not index or running[index - 1].group is not group:  # its first one
                members = list(takewhile(lambda r: r.group is group, running[index:]))
                self._schedule_group(group, members, step, prompts)
            if self._waits_for_steps:
                return False
        if self._preemption.num_preemptions == before:
            self._schedule_loaded(step, len(prompts))
        step.budget = min(step.budget, self._budget.beside_decodes(len(step.decodes)))
        is_awaited = self._admission.batch.find_waiting() is not None
        for request in prompts:
            if is_awaited and is_batch(request):
                continue
            if not self._schedule_prompt(request, step):
                return False
        return self._preemption.num_preemptions == before

    def _schedule_loaded(self, step: StepBuilder, num_prompts: int) -> None:
        """Decodes that begin here, with KV that was loaded or swapped in, go before prompts, too.
        They leave each running prompt the block that it may have to copy."""
        for request in sorted(self._queues.ready, key=priority_key):
            if not step.budget or len(self._queues.running) >= self._budget.max_num_seqs:
                return
            num_missing = self.blocks.num_missing(request, len(request.token_ids))
            if num_missing + num_prompts > self.blocks.pool.num_free:
                return
            if request.num_pending == 1:
                self._admission.schedule_ready(request, step)

    def _schedule_single(self, request: Request, step: StepBuilder, prompts: list[Request]) -> None:
        """Schedule a request without siblings if it decodes; else put it off to ``prompts``."""
        # as _count and _may_run_ahead do, without calls: this runs for every decode
        start = request.num_computed + request.num_in_flight
        num_output_placeholders = request.num_output_placeholders
        num_tokens = len(request.token_ids) + num_output_placeholders
        if num_tokens - start > 1:
            prompts.append(request)
            return
        if num_tokens == start or not step.budget or request.state is not RequestStatus.RUNNING:
            return
        num_drafts = request.num_unverified_drafts
        is_last = num_tokens + num_drafts >= request.max_num_tokens
        may_run_ahead = self.limits.uses_async_scheduling and not is_last
        is_ahead = num_output_placeholders and (not may_run_ahead or request.is_unproven)
        if is_ahead or request.has_wrong_kv:
            return
        if self.blocks.owns_next_slot(request, start + num_drafts) and request.changed_at is None:
            step.add_decode(request, start)
            return
        while (growth := self.blocks.grow(request, start + num_drafts + 1)) is None:
            if not self._preempt_for(request.group, step):
                return
            if request.state is not RequestStatus.RUNNING:
                return
        step.add(request, 1, growth)

    def _schedule_prompt(self, request: Request, step: StepBuilder) -> bool:
        """Run the next tokens of a prompt in what the decodes have left; False to plan no more.

        Its blocks are there since it was first scheduled, but for one: the copy of a block that it
        shares and is about to write to. A request that is in the step already can't be preempted
        for that: then the prompt waits for a step.
        """
        count = self._budget.chunk(request, self._count(request, step.budget))
        if not count:
            return True
        if self.blocks.num_missing(request, request.num_scheduled + count) > (
            self.blocks.pool.num_free
        ):
            return bool(step.requests) or self._preempt_for(request.group, step)
        self._admission.schedule_tokens(request, count, step)
        return True

    def _count(self, request: Request, budget: int) -> int:
        """How many tokens of a request run next."""
        is_ready = not request.num_output_placeholders or self._may_run_ahead(request)
        if not is_ready or request.state is not RequestStatus.RUNNING or request.has_wrong_kv:
            return 0
        return min(request.num_pending, budget)

    def _may_run_ahead(self, request: Request) -> bool:
        """Whether a request is scheduled again before its last token is known here.

        Async scheduling: the next step is planned with a placeholder, which the workers fill on the
        device with the token that the step in flight samples; behind drafts they begin where the
        last accepted one has left off. Not without async scheduling, as the workers would not know
        the token either, nor after a token that may be the last."""
        is_known = self.limits.uses_async_scheduling and not request.is_unproven
        return is_known and request.most_tokens < request.max_num_tokens

    def _preempt_for(self, group: SequenceGroup, step: StepBuilder) -> bool:
        """Preempt a group, which no step in flight may run: else plan nothing until all of them
        have completed, and return False, as where nobody can be preempted."""
        if self._in_flight:
            self._waits_for_steps = True
            return False
        return self._preemption.preempt_for(group, step)

    def _schedule_group(
        self,
        group: SequenceGroup,
        members: list[Request],
        step: StepBuilder,
        prompts: list[Request],
    ) -> None:
        """All members that decode run, or the group is preempted; the others are put off to
        ``prompts``."""
        prompts += [member for member in members if member.num_pending > 1]
        decodes = [member for member in members if member.num_pending <= 1]
        pool = self.blocks.pool
        while True:
            shares, wanted = self._shares(decodes, step.budget)
            if wanted <= pool.num_free:
                break
            if not self._preempt_for(group, step):
                return
        for request, count in shares:
            self._admission.schedule_tokens(request, count, step)

    def _shares(self, members: list[Request], budget: int) -> tuple[list[tuple[Request, int]], int]:
        """How many tokens each running member gets, and how many blocks that takes."""
        shares, wanted = [], 0
        for request in members:
            if count := self._count(request, budget):
                shares.append((request, count))
                wanted += self.blocks.num_missing(request, request.most_scheduled + count)
                budget -= count
        return shares, wanted
