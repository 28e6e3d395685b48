"""Preemption: which group loses its blocks when they run out, how, and when it resumes."""

from __future__ import annotations

import logging
from collections.abc import Callable

from mooncake_engine.kv_cache.block_manager import BlockManager
from mooncake_engine.scheduling.request import Request, SequenceGroup
from mooncake_engine.scheduling.request_queues import RequestQueues, priority_key
from mooncake_engine.scheduling.step_plan import StepBuilder, StepPlan, StepResult

logger = logging.getLogger(__name__)


class SwapCopies:
    """Tracks the copies of swapped blocks to and from the host, which run in parallel with steps.

    Attributes:
        seem_over: whether the copies are complete according to the reporting rank. All ranks copy
            the same blocks, so a group that resumes now hardly waits; each rank still waits for its
            own copies.
        are_over: whether the copies are complete on every rank, since a plan that waits for them
            has completed. Only then may peers write to any free block.
    """

    def __init__(self) -> None:
        self.seem_over = True
        self.are_over = True
        self._newest = -1

    def begin(self) -> None:
        """Record that the step that is being planned copies."""
        self.seem_over = self.are_over = False

    def drains(self, step: int, *, has_copies: bool, is_idle: bool) -> bool:
        """Whether the next plan should wait for all copies: if they seem complete, so that waiting
        takes no time, or if there is nothing else to do.

        Args:
            step: the plan's step number.
            has_copies: whether the plan starts copies.
            is_idle: whether no request runs meanwhile.
        """
        self._newest = step if has_copies else self._newest
        return not self.are_over and (self.seem_over or is_idle)

    def learn(self, plan: StepPlan, result: StepResult) -> None:
        """Update the state with the result of a completed step."""
        if plan.step >= self._newest:
            self.seem_over = self.seem_over or not result.is_copying
            self.are_over = self.are_over or plan.drains_copies


class Preemption:
    """Preempts the least urgent group, as a whole.

    A group with several live sequences is swapped out to host memory; a single sequence is
    recomputed, which is cheaper than copying it twice (after vLLM's v0). The number of members that
    own blocks does not decide that: while a group's prompt is computed, one member owns blocks on
    behalf of all.

    Args:
        queues: queues of the requests.
        blocks: owner of their block tables.
        wait: queues a request whose KV has to be recomputed.

    Attributes:
        num_preemptions: number of requests that lost their blocks.
        num_swap_outs: number of these that were swapped out.
        copies: copies to and from host memory.
    """

    def __init__(
        self, queues: RequestQueues, blocks: BlockManager, wait: Callable[[Request], None]
    ) -> None:
        self.num_preemptions = 0
        self.num_swap_outs = 0
        self.copies = SwapCopies()
        self._queues = queues
        self._blocks = blocks
        self._wait = wait
        self._has_warned = False

    def preempt_for(self, group: SequenceGroup, step: StepBuilder) -> bool:
        """Free blocks by preempting the least urgent group that is not more urgent than ``group``,
        if need be ``group`` itself.

        If no other group owns blocks, only the last member of ``group`` is preempted: a single
        sequence always fits.

        Returns:
            False if nothing was preempted: all less urgent groups, or ``group`` itself, run on
            loads that have not completed.
        """
        holders = (*self._queues.running, *self._queues.ready)
        less_urgent = [r for r in holders if r.group.priority_key >= group.priority_key]
        candidates = [r for r in less_urgent if not r.group.is_unproven]
        if not candidates:
            return False
        victim = max(candidates, key=priority_key).group
        if victim is group and len(candidates) < len(less_urgent):
            return False  # waiting for the load takes less time than recomputing the group
        is_alone = all(holder.group is group for holder in holders)
        if victim is not group:
            self.preempt(victim, step)
        elif is_alone and len(group.holders()) > 1:
            self.recompute(group.holders()[-1])
        else:
            self.preempt(group, step)
        return True

    def recompute(self, request: Request) -> None:
        """Preempt a request by recomputation: free its blocks and queue it at its old priority."""
        self._dequeue(request)
        self._blocks.release(request)
        self._wait(request)

    def resume(self, request: Request, step: StepBuilder, reserve: int) -> bool:
        """Swap a request's group in: all members, or as many as the device can hold. They are then
        ready, and run when the copies seem complete.

        Args:
            request: the most urgent request that is swapped out.
            step: the step that is being planned.
            reserve: number of blocks that must stay free.

        Returns:
            False if too few blocks are free.
        """
        members = self._fitting(request.group)
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

    def _fitting(self, group: SequenceGroup) -> list[Request]:
        """Returns the first swapped-out members whose blocks the device can hold at once. All may
        be too many: a member that loaded the prompt by itself, while the others were swapped out,
        was swapped out with its own copy of it."""
        taken: list[Request] = []
        blocks: set[int] = set()
        for member in group.members:
            blocks.update(member.host_block_ids)
            if taken and len(blocks) > self._blocks.pool.num_blocks:
                break
            if member.host_block_ids:
                taken.append(member)
        return taken

    def preempt(self, group: SequenceGroup, step: StepBuilder) -> None:
        """Take all blocks of a group that no step in flight runs: swap it out, or recompute it."""
        holders, num_sequences = group.holders(), len(group.members)
        copies = self._blocks.swap_out(holders) if num_sequences > 1 else None
        if copies is None:
            self._warn_no_host_memory(num_sequences)
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

    def _warn_no_host_memory(self, num_sequences: int) -> None:
        if num_sequences > 1 and not self._has_warned:
            self._has_warned = True
            logger.warning(
                "not enough host memory to swap out the %d sequences of a request: they are "
                "recomputed; raise --swap-space to avoid that",
                num_sequences,
            )
