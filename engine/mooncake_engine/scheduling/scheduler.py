"""Continuous batching: decides which tokens of which requests run in the next step.

There are no separate prefill and decode phases. In each step, every running request gets tokens
until its computed KV has caught up with its tokens, within the step's token budget; long prompts
run in chunks (after vLLM v1 and Sarathi-Serve). Within one priority, requests are served first
come, first served. The scheduler is pure: no torch, no clock, no I/O; the connector that moves KV
is passed in.

Several steps may be in flight, that is, scheduled but not completed. The device runs them in order,
so a step may read the KV that earlier steps compute and reuse blocks that they used. A peer does
not follow that order: it may be given only KV that completed steps have written.
"""

from __future__ import annotations

from itertools import islice

from mooncake_engine.kv_cache.block_manager import BlockManager
from mooncake_engine.messages import FinishReason, TokenUpdate
from mooncake_engine.scheduling.batch_work import is_batch
from mooncake_engine.scheduling.draft_scheduling import DraftScheduler
from mooncake_engine.scheduling.kv_residency import HeldBlocks, count_held
from mooncake_engine.scheduling.output_processor import OutputProcessor
from mooncake_engine.scheduling.pool_hits import PoolHits
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

_RUNNING = RequestStatus.RUNNING
"""A global of its own: up to Python 3.11, to look up a member of an enum takes 0.2 µs, which would
be a tenth of what a decode costs the scheduler."""


class Scheduler:
    """Plans steps and applies their results. The engine core owns one per data-parallel rank.

    Queues, outputs, loads, admission and preemption are objects of their own, in the modules beside
    this one; the scheduler itself schedules the requests that already run.

    Args:
        limits: bounds of steps and requests.
        blocks: allocates the block tables.
        connector: moves KV between instances; None if no request transfers KV.
        pool: the KVCache pool; None if the instance uses none.
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
        hits = PoolHits()
        self._outputs = outputs = OutputProcessor(limits, queues, blocks, connector, pool, hits)
        self._pool = None if pool is None else PoolUse(limits, queues, blocks, outputs, pool, hits)
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
        """Requests in the running queue."""
        return len(self._queues.running)

    @property
    def num_waiting(self) -> int:
        """Live requests that are not running: they wait for their turn, for blocks, or for KV."""
        return len(self._queues.requests) - len(self._queues.running)

    @property
    def num_swapped(self) -> int:
        """Waiting requests whose KV is swapped out to host memory."""
        return len(self._queues.swapped)

    @property
    def num_loading(self) -> int:
        """Waiting requests whose KV is being loaded, from a peer or from the KVCache pool."""
        return len(self._queues.transferring)

    @property
    def prompt_tokens_by_source(self) -> dict[str, int]:
        """Prompt tokens of the requests that have begun to run, by ``PROMPT_TOKEN_SOURCES``."""
        return dict(self._queues.prompt_tokens_by_source)

    @property
    def num_preemptions(self) -> int:
        """Preemptions so far, by swap or by recomputation."""
        return self._preemption.num_preemptions

    @property
    def num_swap_outs(self) -> int:
        """Preemptions so far that swapped KV out to host memory."""
        return self._preemption.num_swap_outs

    @property
    def has_work(self) -> bool:
        """Whether ``schedule`` may plan a step or ``update`` may return updates."""
        is_queued = len(self._queues.requests) > len(self._queues.transferring)
        has_rest = self._outputs.has_updates or bool(self._queues.removed)
        return is_queued or has_rest or bool(self._in_flight)

    @property
    def num_held_tables(self) -> int:
        """Block tables that outlive their requests (see ``OutputProcessor.held_tables``), plus
        lists of duplicate blocks that have been replaced but that steps in flight still use."""
        return len(self._outputs.held_tables) + len(self._in_flight.replaced_tables)

    def held_blocks(self) -> HeldBlocks:
        """Counts the blocks in use, by what they are held for."""
        return count_held(self._queues, self._outputs, self.blocks)

    def add(self, request: Request) -> None:
        """Add a request. The caller has checked that its id is unused and its prompt fits the
        model."""
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
        """End a request, whatever its state; if it has finished already, stop holding its KV for a
        peer. Idempotent."""
        request = self._queues.requests.get(request_id)
        if request is None:
            self._outputs.cancel_send(request_id)
        else:
            self._outputs.finish(request, TokenUpdate(request_id, finish=FinishReason.ABORT))

    def fail(self, request_id: str, reason: str) -> None:
        """End a request with an error, unless it has ended already."""
        request = self._queues.requests.get(request_id)
        if request is not None:
            self._outputs.fail(request, reason)

    def set_time(self, now: float) -> None:
        """Set the time of the events that are handled next, in seconds; between steps it may be
        long after the last one was planned."""
        self._queues.now = now

    def expire(self, now: float) -> None:
        """End the requests that are past their deadline, and give up the loads that timed out.

        Args:
            now: start time of the next step, in seconds; call this before every step.
        """
        self.set_time(now)
        self._outputs.end_overdue()
        self._remote_kv.expire()
        if self._pool is not None:
            self._pool.loads.expire()

    def handle_load_ended(
        self,
        request_id: str,
        error: str | None,
        *,
        first_token: FirstToken | None = None,
        is_drained: bool = True,
    ) -> None:
        """Handle the end of a load from a peer. The KV is complete if ``error`` is None, otherwise
        unusable.

        Args:
            request_id: the request that loaded; an unknown id is ignored.
            error: why the load failed; None on success.
            first_token: the peer's first token, if it arrived with the KV.
            is_drained: False if the peer may still write to the blocks; they stay reserved until
                this is called again with True.
        """
        self._remote_kv.handle_load_ended(
            request_id, error, first_token=first_token, is_drained=is_drained
        )

    def handle_pool_event(self, event: PoolEvent) -> None:
        """Handle an event from the KVCache pool: the outcome of a lookup, a load or a save."""
        assert self._pool is not None, "without a pool there are no events"
        for request, sequence, result in self._pool.handle_event(event):
            self._complete(request, sequence, result)
        self._pool.recompute_wrong()
        self._in_flight.release_replaced()

    def release(self, request_id: str) -> None:
        """Free the blocks held for a peer, which has read them or never will. Idempotent."""
        self._outputs.release(request_id)

    def reset_prefix_cache(self) -> bool:
        """Drop all cached prefixes. Returns False, and drops nothing, while any block is in use."""
        return self.blocks.reset_prefix_cache()

    def schedule(self) -> StepPlan:
        """Plan the next step. An empty plan need not be run; any other one is in flight until
        ``update`` is called with it. Call this while idle, too: refused saves are offered again."""
        if self._pool is not None:
            self._pool.saves.retry()
        step = StepBuilder(self.limits.max_num_batched_tokens)
        self._waits_for_steps = bool(self._in_flight) and self._waits_for_steps
        if not self._waits_for_steps:
            self._schedule_requests(step)
        if self.limits.num_speculative_tokens:
            self.speculation.plan(step, self._queues.requests)
        uses_blocks = step.requests or step.has_host_copies
        received = self._remote_kv.received.take() if uses_blocks else ()
        drains = self._preemption.copies.drains(
            self._step,
            has_copies=step.has_host_copies,
            is_idle=not step.requests and not self._in_flight,
        )
        removed = self._queues.take_removed()
        plan = step.build(self._step, removed, received, drains_copies=drains)
        self._step += 1
        if not plan.is_empty:
            self._in_flight.push(plan, step.requests, self._queues.now)
            if self._pool is not None:
                self._pool.saves.offer_planned(plan, step.requests)
        return plan

    def _schedule_requests(self, step: StepBuilder) -> None:
        self._admission.begin_step(self._queues.now)
        before = self._preemption.num_preemptions
        if not self._admission.preempt_batch_work(step):
            self._waits_for_steps = True
            return
        if not self._schedule_running(step) or self._preemption.num_preemptions != before:
            return
        self._admission.schedule_new(step)
        if self._admission.may_peers_write():
            reserve = self._admission.watermark_blocks
            self._remote_kv.start(reserve, before=self._admission.highest_priority())
            if self._pool is not None:
                is_interactive_waiting = self._admission.batch.find_waiting() is not None
                self._pool.loads.start_early(reserve, has_batch=not is_interactive_waiting)

    @property
    def chunk_pool(self) -> ChunkPool | None:
        """The KVCache pool, or None if the instance uses none."""
        return None if self._pool is None else self._pool.chunk_pool

    def update(
        self, plan: StepPlan, result: StepResult, now: float | None = None
    ) -> list[TokenUpdate]:
        """Apply the result of a step; returns the request updates since the last call.

        Args:
            plan: the plan of the oldest step in flight; an empty plan changes nothing.
            result: the result of that plan.
            now: when the step completed, in seconds; None keeps its duration out of the estimates.
        """
        if not plan.is_empty:
            flight, seconds = self._in_flight.pop(plan, now)
            if seconds is not None:
                self._learn(flight, result, seconds)
            if self._pool is not None:
                self._pool.saves.last_step = plan.step
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
        """Feed the duration of a step to the estimators: step budget, prefill cost, drafting."""
        self._budget.learn(flight.plan, seconds)
        if self._pool is not None:
            self._pool.learn(flight.plan, seconds)
        if self.limits.num_speculative_tokens:
            self.speculation.learn(flight.plan, result, seconds)

    def take_updates(self) -> list[TokenUpdate]:
        """Returns the updates that arose outside steps: aborts, failures, first tokens of peers."""
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
        """Apply a step's result to one of its requests, which may have ended in the meantime."""
        if request.is_unproven and self._pool is not None:
            self._pool.loads.hold(request, sequence, result)
            return
        start = request.num_computed if sequence.num_unverified_drafts else sequence.start
        stop = start + sequence.count
        request.num_in_flight -= stop - request.num_computed
        request.num_computed = stop
        request.num_unverified_drafts -= sequence.num_draft_tokens
        is_running = request.status is _RUNNING
        if not is_running or request.has_wrong_kv:
            if not is_running and not request.num_in_flight:
                self._outputs.complete(request)
            return
        if stop // self.blocks.block_size > request.num_published:
            self.blocks.publish(request)
        if self._pool is not None and stop >= request.num_offered + self._pool.chunk_tokens:
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
        """Schedule the running requests, decodes first (as Sarathi-Serve and vLLM v1 do): one long
        prompt, whatever its priority, must not delay the next token of all others.

        Returns:
            False if blocks ran out: a group was preempted, or has to be once no step is in flight.
        """
        before = self._preemption.num_preemptions
        prompts: list[Request] = []
        running = list(self._queues.running)
        for index, request in enumerate(running):
            if len((group := request.group).members) == 1:
                self._schedule_single(request, step, prompts)
            elif not index or running[index - 1].group is not group:  # the group's first member
                behind = running[index : index + len(group.members)]
                members = [member for member in behind if member.group is group]
                self._schedule_group(group, members, step, prompts)
            if self._waits_for_steps:
                return False
        if self._preemption.num_preemptions == before:
            self._schedule_loaded(step, len(prompts))
        step.budget = min(step.budget, self._budget.beside_decodes(len(step.decodes)))
        is_interactive_waiting = self._admission.batch.find_waiting() is not None
        for request in prompts:
            if is_interactive_waiting and is_batch(request):
                continue
            if not self._schedule_prompt(request, step):
                return False
        return self._preemption.num_preemptions == before

    def _schedule_loaded(self, step: StepBuilder, num_prompts: int) -> None:
        """Schedule ready requests that can decode at once, because their KV was loaded or swapped
        in; they, too, go before prompts. One free block per running prompt is left over, since a
        prompt may have to copy a shared block."""
        for request in sorted(self._queues.ready, key=priority_key):
            if not step.budget or len(self._queues.running) >= self._budget.max_num_seqs:
                return
            num_missing = self.blocks.num_missing(request, len(request.token_ids))
            if num_missing + num_prompts > self.blocks.pool.num_free:
                return
            if request.num_pending == 1:
                self._admission.schedule_ready(request, step)

    def _schedule_single(self, request: Request, step: StepBuilder, prompts: list[Request]) -> None:
        """Schedule a request without siblings if it decodes; otherwise append it to ``prompts``."""
        # Inlines _count and _may_run_ahead: this runs for every decode.
        start = request.num_computed + request.num_in_flight
        num_output_placeholders = request.num_output_placeholders
        num_tokens = len(request.token_ids) + num_output_placeholders
        if num_tokens - start > 1:
            prompts.append(request)
            return
        if num_tokens == start or not step.budget or request.status is not _RUNNING:
            return
        num_drafts = request.num_unverified_drafts
        is_last = num_tokens + num_drafts >= request.max_num_tokens
        may_run_ahead = self.limits.uses_async_scheduling and not is_last
        is_blocked = num_output_placeholders and (not may_run_ahead or request.is_unproven)
        if is_blocked or request.has_wrong_kv:
            return
        if self.blocks.owns_next_slot(request, start + num_drafts) and request.changed_at is None:
            step.add_decode(request, start)
            return
        while (growth := self.blocks.grow(request, start + num_drafts + 1)) is None:
            if not self._preempt_for(request.group, step):
                return
            if request.status is not _RUNNING:
                return
        step.add(request, 1, growth)

    def _schedule_prompt(self, request: Request, step: StepBuilder) -> bool:
        """Schedule a chunk of a prompt within the budget that the decodes have left. Returns False
        if nothing more can be planned in this step.

        The prompt's blocks were allocated when it was first scheduled, except one: the copy of a
        shared block that it is about to write to. Requests that are already in this step can't be
        preempted for that block, so the prompt then waits for the next step.
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
        """How many tokens of a running request this step may run, at most ``budget``."""
        is_ready = not request.num_output_placeholders or self._may_run_ahead(request)
        if not is_ready or request.status is not _RUNNING or request.has_wrong_kv:
            return 0
        return min(request.num_pending, budget)

    def _may_run_ahead(self, request: Request) -> bool:
        """Whether a request may be scheduled again before the scheduler knows its last token.

        With async scheduling the next step is planned with a placeholder, which the workers replace
        on the device by the token that the step in flight samples; after draft tokens they continue
        behind the last accepted one. Without async scheduling the workers would not know the token
        either. A token that may be the request's last is never run ahead of."""
        is_known = self.limits.uses_async_scheduling and not request.is_unproven
        return is_known and request.num_tokens_with_drafts < request.max_num_tokens

    def _preempt_for(self, group: SequenceGroup, step: StepBuilder) -> bool:
        """Preempt the least urgent group to free blocks for ``group``; False if none was preempted.

        Blocks must not be taken from a request that a step in flight runs: while any is in flight,
        this preempts nothing, and no more is planned until all steps have completed.
        """
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
        """Schedule the decoding members of a group, or preempt; append the rest to ``prompts``."""
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
        """Returns the tokens that each running member gets, and the blocks that all need."""
        shares, wanted = [], 0
        for request in members:
            if count := self._count(request, budget):
                shares.append((request, count))
                wanted += self.blocks.num_missing(
                    request, request.num_scheduled_with_drafts + count
                )
                budget -= count
        return shares, wanted
