"""Which requests begin, come back or go on with KV that has come, and which have to make room."""

from __future__ import annotations

from math import ceil

from mooncake_engine.kv_cache.block_manager import BlockManager
from mooncake_engine.scheduling.batch_work import BatchWork, is_batch
from mooncake_engine.scheduling.pool_loads import Turn
from mooncake_engine.scheduling.pool_use import PoolUse
from mooncake_engine.scheduling.preemption import Preemption
from mooncake_engine.scheduling.request import Request, RequestStatus
from mooncake_engine.scheduling.request_queues import RequestQueues, priority_key
from mooncake_engine.scheduling.scheduler_interface import SchedulerLimits
from mooncake_engine.scheduling.step_budget import AdmissionDelay, StepBudget
from mooncake_engine.scheduling.step_plan import StepBuilder
from mooncake_engine.scheduling.steps_in_flight import StepsInFlight


class RequestAdmission:
    """Takes requests from the queues into steps, first come, first served, within a priority.

    Args:
        limits: bounds.
        queues: where requests stand.
        blocks: their tables.
        preemption: what has left them, and how it comes back.
        in_flight: steps that are not completed.
        pool: what is loaded from the KVCache pool; None where there is none.

    Attributes:
        budget: of steps.
        batch: who has to wait for whom.
        watermark_blocks: blocks that stay free when a request begins.
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
        """A step is planned; the one before it is over."""
        self._delay.begin_step(now)

    def may_write(self) -> bool:
        """Whether peers may write to free blocks, before what was in them is copied, too."""
        return self._preemption.copies.are_over and not self._in_flight.reach_freed_blocks

    @property
    def _is_unsettled(self) -> bool:
        """Whether steps are in flight, or a load that steps ran on."""
        return bool(self._in_flight) or (self._pool is not None and self._pool.has_unproven)

    def make_room(self, step: StepBuilder) -> bool:
        """Preempt batch work for the interactive request that waits first; False if steps in
        flight have to complete before."""
        waiting = self.batch.find_waiting()
        if waiting is None:
            return True
        limits = self.budget.max_num_seqs, self.watermark_blocks
        while not self.batch.has_room(waiting, *limits):
            victim = self.batch.find_victim()
            if victim is None:
                break
            if self._in_flight:
                return False
            self._preemption.preempt(victim.group, step)
        if self._pool is not None and self.batch.lacks_blocks(waiting, self.watermark_blocks):
            self._pool.loads.give_up_batch()
        return True

    def schedule_new(self, step: StepBuilder) -> None:
        """Those with blocks go first; then the most urgent one, swapped out or without blocks."""
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
        """The most urgent one that waits without blocks: for its turn, or swapped out."""
        heads = (self._queues.swapped.peek(), self._queues.waiting.peek())
        return min((head for head in heads if head is not None), key=priority_key, default=None)

    def schedule_ready(self, request: Request, step: StepBuilder) -> bool:
        """Go on with a request that has its KV here; False if it has to wait."""
        copies_go_on = request.awaits_copies and not self._preemption.copies.seem_over
        if not self.budget.chunk(request, step.budget) or (copies_go_on and self._queues.running):
            return False
        request.awaits_copies = False
        growth = self._blocks.grow(request, len(request.token_ids))
        if growth is not None:
            step.copy(growth)
            if request.shares_first_token:  # its siblings waited without it while it was swapped
                self._queues.follow_leader(request)
            self._run(request, step)
        elif not self._queues.running and not self._is_unsettled:
            self._preemption.recompute(self._queues.ready.lowest_priority() or request)
        else:
            return False
        return True

    def _schedule_waiting(self, request: Request, step: StepBuilder, *, may_start: bool) -> bool:
        """Swap a group in, or begin a request if new ones may start; False if it has to wait."""
        is_alone = not self._queues.running
        # room for those that run, and for the request's siblings to part from it
        reserve = 0 if is_alone else self.watermark_blocks + len(request.group.members) - 1
        if request.state is RequestStatus.SWAPPED:
            return self._preemption.resume(request, step, reserve)
        if not may_start or not self.budget.may_begin(request, step.budget):
            return False
        if self._pool is not None and self._pool.loads.has_hit(request):
            turn = self._pool.loads.take_turn(request, reserve) if self.may_write() else None
            if turn is not Turn.COMPUTE:
                return turn is Turn.LOADS
        if not self._allocate(request, reserve, step):
            return False
        self._delay.note_prefill()
        if request.shares_first_token:
            self._queues.follow_leader(request)
        self._run(request, step)
        return True

    def _allocate(self, request: Request, reserve: int, step: StepBuilder) -> bool:
        """Blocks for all the tokens that the request has now, a sibling's where it has the same."""
        sibling = request.group.find_prompt()
        if sibling is not None and request.shares_prompt:
            return self._fork(request, sibling, reserve, step)
        num_tokens = len(request.token_ids)
        cacheable = 0 if request.awaits_scores else num_tokens - 1
        if not self._blocks.allocate(request, num_tokens, cacheable=cacheable, reserve=reserve):
            return False
        if not request.num_output_tokens:
            request.num_cached_tokens = request.num_computed
        return True

    def _fork(self, request: Request, sibling: Request, reserve: int, step: StepBuilder) -> bool:
        """Continue from a sibling's prompt; its last token runs again if there is no later one."""
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
        """A request that has all its blocks takes part from now on."""
        self._queues.dequeue(request)
        self._queues.run(request)
        step.add_new_request(request)
        self.schedule_tokens(request, self.budget.chunk(request, step.budget), step)

    def schedule_tokens(self, request: Request, count: int, step: StepBuilder) -> None:
        """Run so many of a request's next tokens, for which there are blocks; with the last one of
        a prompt its siblings begin."""
        growth = self._blocks.grow(request, request.most_scheduled + count)
        assert growth is not None, "blocks were counted before they were taken"
        followers: list[Request] = []
        is_last = count == request.num_pending and not request.is_unproven
        if is_last and request.shares_first_token:
            followers = self._schedule_followers(request, step)
        step.add(request, count, growth, followers)

    def _schedule_followers(self, leader: Request, step: StepBuilder) -> list[Request]:
        """Siblings that get the prompt's blocks and sample from its logits, while there is room."""
        followers = self._queues.followers(leader)
        taken = followers[: self.budget.max_num_seqs - len(self._queues.running)]
        for follower in taken:
            self._queues.dequeue(follower)
            self._blocks.fork(follower, leader)
            self._queues.run(follower)
            step.add_new_request(follower)
        self._queues.release_followers(leader)
        return taken
