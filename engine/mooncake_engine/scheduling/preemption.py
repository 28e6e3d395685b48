"""Who is preempted when blocks run out, how, and when it comes back."""

from __future__ import annotations

import logging

from mooncake_engine.kv_cache.block_manager import BlockManager
from mooncake_engine.scheduling.request import Request, SequenceGroup
from mooncake_engine.scheduling.request_queues import RequestQueues, priority_key
from mooncake_engine.scheduling.step_plan import StepBuilder

logger = logging.getLogger(__name__)


class Preemption:
    """The least urgent group is preempted, all of it: one that several sequences may still run of
    by a swap to host memory, a single one by starting over, which is cheaper than to copy it twice
    (after vLLM's v0). How many hold blocks right now says nothing: while a group's prompt is
    computed it is one of them, for all.

    Args:
        queues: where requests stand.
        blocks: their tables.

    Attributes:
        num_preemptions: requests that gave their blocks up.
        num_swap_outs: those of them that were swapped out.
    """

    def __init__(self, queues: RequestQueues, blocks: BlockManager) -> None:
        self.num_preemptions = 0
        self.num_swap_outs = 0
        self._queues = queues
        self._blocks = blocks
        self._has_warned = False

    def preempt_for(self, group: SequenceGroup, step: StepBuilder) -> None:
        """Free some blocks at the cost of the least urgent group, of ``group`` itself at last.

        If no other group holds any, only the last member of ``group`` is preempted: alone, a
        sequence always fits.
        """
        holders = (*self._queues.running, *self._queues.ready)
        candidates = (*self._queues.running[-1:], *self._queues.ready)
        victim = max(candidates, key=priority_key).group
        is_alone = all(holder.group is group for holder in holders)
        if victim is not group:
            self.preempt(victim, step)
        elif is_alone and len(group.holders()) > 1:
            self.recompute(group.holders()[-1])
        else:
            self.preempt(group, step)

    def recompute(self, request: Request) -> None:
        """Preemption by recompute: give the blocks back and queue again, at the old priority."""
        self._dequeue(request)
        self._blocks.release(request)
        self._queues.wait(request)

    def resume(self, request: Request, step: StepBuilder, reserve: int) -> bool:
        """Swap a request's group in, all of it or nothing; then it is ready.

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
        for member in members:
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
        self.num_swap_outs += len(holders)
        for request in holders:
            self._dequeue(request)
            self._queues.swap(request)

    def _dequeue(self, request: Request) -> None:
        self.num_preemptions += 1
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
