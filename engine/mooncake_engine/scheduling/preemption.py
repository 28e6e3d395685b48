"""Who is preempted when blocks run out, how, and when it comes back."""

from __future__ import annotations

import logging
from collections.abc import Callable

from mooncake_engine.kv_cache.block_manager import BlockManager
from mooncake_engine.scheduling.request import Request, SequenceGroup
from mooncake_engine.scheduling.request_queues import RequestQueues, priority_key
from mooncake_engine.scheduling.step_plan import StepBuilder, StepPlan, StepResult

logger = logging.getLogger(__name__)


class HostCopies:
    """Copies to and from the host go on beside steps; this is what is known of them here.

    Attributes:
        seem_over: by what the reporting rank said last. Ranks have the same to copy, so a group
            that joins in then hardly waits; each rank waits for its own copies all the same.
        are_over: on every rank, for a plan that waits for them has been carried out. Peers may
            write to any free block then.
    """

    def __init__(self) -> None:
        self.seem_over = True
        self.are_over = True
        self._newest = -1

    def begin(self) -> None:
        """The step that is being planned copies."""
        self.seem_over = self.are_over = False

    def drains(self, step: int, *, has_copies: bool, is_idle: bool) -> bool:
        """Whether a plan is to wait for all copies: once that takes no time, or if there is nothing
        else to do.

        Args:
            step: the plan's.
            has_copies: whether some begin with it.
            is_idle: whether nothing runs meanwhile.
        """
        self._newest = step if has_copies else self._newest
        return not self.are_over and (self.seem_over or is_idle)

    def learn(self, plan: StepPlan, result: StepResult) -> None:
        """A step is over."""
        if plan.step >= self._newest:
            self.seem_over = self.seem_over or not result.is_copying
            self.are_over = self.are_over or plan.drains_copies


class Preemption:
    """The least urgent group is preempted, all of it: one that several sequences may still run of
    by a swap to host memory, a single one by starting over, which is cheaper than to copy it twice
    (after vLLM's v0). How many hold blocks right now says nothing: while a group's prompt is
    computed it is one of them, for all.

    Args:
        queues: where requests stand.
        blocks: their tables.
        wait: queue a request that has to compute what it has again.

    Attributes:
        num_preemptions: requests that gave their blocks up.
        num_swap_outs: those of them that were swapped out.
        copies: to and from host memory.
    """

    def __init__(
        self, queues: RequestQueues, blocks: BlockManager, wait: Callable[[Request], None]
    ) -> None:
        self.num_preemptions = 0
        self.num_swap_outs = 0
        self.copies = HostCopies()
        self._queues = queues
        self._blocks = blocks
        self._wait = wait
        self._has_warned = False

    def preempt_for(self, group: SequenceGroup, step: StepBuilder) -> bool:
        """Free some blocks at the cost of the least urgent group, of ``group`` itself at last.

        If no other group holds any, only the last member of ``group`` is preempted: alone, a
        sequence always fits.

        Returns:
            False: all that are less urgent, or ``group`` itself, run on a load that has not ended.
        """
        holders = (*self._queues.running, *self._queues.ready)
        lesser = [each for each in holders if each.group.priority_key >= group.priority_key]
        candidates = [each for each in lesser if not each.group.is_unproven]
        if not candidates:
            return False
        victim = max(candidates, key=priority_key).group
        if victim is group and len(candidates) < len(lesser):
            return False  # it waits for the load: sooner over than all it has is computed again
        is_alone = all(holder.group is group for holder in holders)
        if victim is not group:
            self.preempt(victim, step)
        elif is_alone and len(group.holders()) > 1:
            self.recompute(group.holders()[-1])
        else:
            self.preempt(group, step)
        return True

    def recompute(self, request: Request) -> None:
        """Preemption by recompute: give the blocks back and queue again, at the old priority."""
        self._dequeue(request)
        self._blocks.release(request)
        self._wait(request)

    def resume(self, request: Request, step: StepBuilder, reserve: int) -> bool:
        """Swap a request's group in, all of it or nothing; then it is ready, and joins in when the
        copies seem over.

        Args:
            request: the most urgent one that is swapped out.
            step: the step to plan.
            reserve: blocks that must stay free.
        """
        members = [member for member in request.group.members if member.host_block_ids]
        copies = self._blocks.swap_in(members, reserve=reserve)
        if copies is None:
            return False
        step.swap_in(copies)
        self.copies.begin()
        for member in members:
            member.awaits_copies = True
            self._queues.dequeue(member)
            self._queues.wait(member)
        return True

    def preempt(self, group: SequenceGroup, step: StepBuilder) -> None:
        """Take all blocks of a group, which no step in flight runs."""
        holders, num_sequences = group.holders(), len(group.members)
        copies = self._blocks.swap_out(holders) if num_sequences > 1 else None
        if copies is None:
            self._note_lack_of_host_memory(num_sequences)
            for request in holders:
                self.recompute(request)
            return
        step.swap_out(copies)
        self.copies.begin()
        self.num_swap_outs += len(holders)
        for request in holders:
            self._dequeue(request)
            self._queues.swap(request)

    def _dequeue(self, request: Request) -> None:
        self.num_preemptions += 1
        request.num_preemptions += 1
        self._queues.release_followers(request)
        self._queues.dequeue(request)
        self._queues.forget(request)

    def _note_lack_of_host_memory(self, num_sequences: int) -> None:
        if num_sequences > 1 and not self._has_warned:
            self._has_warned = True
            logger.warning(
                "no host memory to swap %d sequences of a request to: they are computed again; "
                "raise --swap-space to avoid that",
                num_sequences,
            )
