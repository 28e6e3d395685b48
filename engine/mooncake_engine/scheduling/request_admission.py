"""Admission: which requests start, resume or run with loaded KV, and which yield to them."""

from __future__ import annotations

from math import ceil

from mooncake_engine.kv_cache.block_manager import BlockManager
from mooncake_engine.scheduling.batch_work import BatchWork, is_batch
from mooncake_engine.scheduling.pool_loads import LoadDecision
from mooncake_engine.scheduling.pool_use import PoolUse
from mooncake_engine.scheduling.preemption import Preemption
from mooncake_engine.scheduling.request import Request, RequestStatus
from mooncake_engine.scheduling.request_queues import RequestQueues, priority_key
from mooncake_engine.scheduling.scheduler_interface import SchedulerLimits
from mooncake_engine.scheduling.step_budget import AdmissionDelay, StepBudget
from mooncake_engine.scheduling.step_plan import StepBuilder
from mooncake_engine.scheduling.steps_in_flight import StepsInFlight


class RequestAdmission:
    """Moves requests from the queues into steps; within a priority, first come, first served.

    Args:
        limits: bounds of steps and requests.
        queues: queues of the requests.
        blocks: allocates their block tables.
        preemption: preempts and resumes groups.
        in_flight: steps in flight.
        pool: loads from the KVCache pool; None if the instance uses none.

    Attributes:
        budget: token budget of steps.
        batch: decides which batch work yields to interactive requests.
        watermark_blocks: blocks that stay free when a request starts.
    """

    def __init__(
        self,
        limits: SchedulerLimits,
        queues: RequestQueues,
        blocks: BlockManager,
        preemption: Preemption,
        in_flight: StepsInFlight,
        pool: PoolUse | None,
    ) -> None:
        self._queues = queues
        self._blocks = blocks
        self._preemption = preemption
        self._in_flight = in_flight
        self._pool = pool
        self.budget = StepBudget(limits)
        self.batch = BatchWork(queues, blocks)
        self.watermark_blocks = ceil(limits.watermark * blocks.pool.num_blocks)
        self._delay = AdmissionDelay(limits.delay_factor)

    def begin_step(self, now: float) -> None:
        """Record that the scheduler starts to plan a step."""
        self._delay.begin_step(now)

    def may_peers_write(self) -> bool:
        """Whether peers may write to free blocks now, that is, no step in flight and no copy to the
        host still reads any."""
        return self._preemption.copies.are_over and not self._in_flight.reach_freed_blocks

    @property
    def _is_unsettled(self) -> bool:
        """Whether steps are in flight, or a load that steps already run on."""
        return bool(self._in_flight) or (self._pool is not None and self._pool.has_unproven)

    def preempt_batch_work(self, step: StepBuilder) -> bool:
        """Preempt batch work for the most urgent waiting interactive request. Returns False if
        steps in flight have to complete first."""
        waiting = self.batch.find_waiting()
        if waiting is None:
            return True
        max_num_seqs, reserve = self.budget.max_num_seqs, self.watermark_blocks
        while victim := self.batch.find_victim():
            if self.batch.has_capacity(waiting, max_num_seqs, reserve):
                break
            if self._in_flight:
                return False
            self._preemption.preempt(victim.group, step)
        if self._pool is not None and self.batch.lacks_blocks(waiting, reserve):
            self._pool.loads.give_up_batch()
        return True

    def schedule_new(self, step: StepBuilder) -> None:
        """Start requests while the step has capacity: ready ones first, since they own blocks; then
        the most urgent of those that are swapped out or own no blocks."""
        queues = self._queues
        may_start = not queues.running or self._delay.has_passed(queues.waiting)
        while step.budget and len(queues.running) < self.budget.max_num_seqs:
            if request := queues.ready.peek():
                is_scheduled = self.schedule_ready(request, step)
            elif request := self.highest_priority():
                if is_batch(request) and self.batch.find_waiting() is not None:
                    return
                is_scheduled = self._schedule_waiting(request, step, may_start=may_start)
            else:
                return
            if not is_scheduled:
                return

    def highest_priority(self) -> Request | None:
        """Returns the most urgent request that is waiting or swapped out, or None."""
        heads = (self._queues.swapped.peek(), self._queues.waiting.peek())
        return min((head for head in heads if head is not None), key=priority_key, default=None)

    def schedule_ready(self, request: Request, step: StepBuilder) -> bool:
        """Start or resume a request whose KV was loaded or swapped in; False if it has to wait."""
        is_copying = request.awaits_copies and not self._preemption.copies.seem_over
        if not self.budget.chunk(request, step.budget) or (is_copying and self._queues.running):
            return False
        request.awaits_copies = False
        growth = self._blocks.grow(request, len(request.token_ids))
        if growth is not None:
            step.copy(growth)
            if request.shares_first_token:  # its siblings could not follow it while swapped
                self._queues.follow_leader(request)
            self._run(request, step)
        elif not self._queues.running and not self._is_unsettled:
            self._preemption.recompute(self._queues.ready.lowest_priority() or request)
        else:
            return False
        return True

    def _schedule_waiting(self, request: Request, step: StepBuilder, *, may_start: bool) -> bool:
        """Swap a group in, or start a request if new ones may start; False if it has to wait."""
        is_alone = not self._queues.running
        # free blocks for running requests, and for siblings' copies of the prompt's last block
        reserve = 0 if is_alone else self.watermark_blocks + len(request.group.members) - 1
        if request.status is RequestStatus.SWAPPED:
            return self._preemption.resume(request, step, reserve)
        if not may_start or not self.budget.may_begin(request, step.budget):
            return False
        if self._pool is not None and self._pool.loads.has_hit(request):
            decision = (
                self._pool.loads.decide_load(request, reserve) if self.may_peers_write() else None
            )
            if decision is not LoadDecision.COMPUTE:
                return decision is LoadDecision.LOAD
        if not self._allocate(request, reserve, step):
            return False
        self._delay.note_prefill()
        if request.shares_first_token:
            self._queues.follow_leader(request)
        self._run(request, step)
        return True

    def _allocate(self, request: Request, reserve: int, step: StepBuilder) -> bool:
        """Allocate blocks for all tokens that the request has now, sharing a sibling's prompt if
        possible; False if too few are free."""
        sibling = request.group.find_prompt()
        if sibling is not None and request.shares_prompt:
            return self._fork(request, sibling, reserve, step)
        num_tokens = len(request.token_ids)
        cacheable = 0 if request.awaits_scores else num_tokens - 1
        if not self._blocks.allocate(request, num_tokens, cacheable=cacheable, reserve=reserve):
            return False
        request.note_cached(request.num_computed)
        return True

    def _fork(self, request: Request, sibling: Request, reserve: int, step: StepBuilder) -> bool:
        """Continue from a sibling's prompt; if the request has no token behind it, the prompt's
        last token runs again. False if too few blocks are free."""
        num_tokens, prompt = len(request.token_ids), request.num_prompt_tokens
        wanted = self._blocks.blocks_for(num_tokens) - self._blocks.blocks_for(prompt) + 1
        if wanted + reserve > self._blocks.pool.num_free:
            return False
        self._blocks.fork(request, sibling)
        request.num_computed = min(prompt, num_tokens - 1)
        growth = self._blocks.grow(request, num_tokens)
        assert growth is not None, "blocks were counted before they were taken"
        step.copy(growth)
        return True

    def _run(self, request: Request, step: StepBuilder) -> None:
        """Move a request that has all its blocks to the running queue, and schedule its tokens."""
        self._queues.dequeue(request)
        self._queues.run(request)
        step.add_new_request(request)
        self.schedule_tokens(request, self.budget.chunk(request, step.budget), step)

    def schedule_tokens(self, request: Request, count: int, step: StepBuilder) -> None:
        """Schedule the next ``count`` tokens of a request; enough blocks are free. Its followers
        start with the step that runs the prompt's last token."""
        growth = self._blocks.grow(request, request.num_scheduled_with_drafts + count)
        assert growth is not None, "blocks were counted before they were taken"
        followers: list[Request] = []
        is_last = count == request.num_pending and not request.is_unproven
        if is_last and request.shares_first_token:
            followers = self._schedule_followers(request, step)
        step.add(request, count, growth, followers)

    def _schedule_followers(self, leader: Request, step: StepBuilder) -> list[Request]:
        """Start followers of a prompt, as many as may run: they share its blocks and sample from
        its logits. The others are queued again."""
        followers = self._queues.followers(leader)
        taken = followers[: self.budget.max_num_seqs - len(self._queues.running)]
        for follower in taken:
            self._queues.dequeue(follower)
            self._blocks.fork(follower, leader)
            self._queues.run(follower)
            step.add_new_request(follower)
        self._queues.release_followers(leader)
        return taken
