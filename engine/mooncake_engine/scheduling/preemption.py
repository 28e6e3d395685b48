"""Who gives way when blocks run out, how, and when it comes back."""

from __future__ import annotations

import logging

from mooncake_engine.scheduling.block_manager import BlockManager
from mooncake_engine.scheduling.places import Places
from mooncake_engine.scheduling.queue import urgency
from mooncake_engine.scheduling.request import Request, SequenceGroup
from mooncake_engine.scheduling.step_builder import StepBuilder

logger = logging.getLogger(__name__)


class Preemption:
    """The least urgent group gives way, all of it: several sequences by a swap to host memory,
    a single one by starting over, which is cheaper than to copy it twice (after vLLM's v0).

    Args:
        places: where requests stand.
        blocks: their tables.

    Attributes:
        num_preemptions: requests that gave their blocks up.
        num_swap_outs: those of them that were swapped out.
    """

    def __init__(self, places: Places, blocks: BlockManager) -> None:
        self.num_preemptions = 0
        self.num_swap_outs = 0
        self._places = places
        self._blocks = blocks
        self._has_warned = False

    def make_room_for(self, group: SequenceGroup, step: StepBuilder) -> None:
        """Free some blocks at the cost of the least urgent group, of ``group`` itself at last.

        If nobody else holds any, only the last member of ``group`` gives way: alone, a sequence
        always fits.
        """
        victim = self._least_urgent().group
        if victim is not group:
            self._preempt(victim, step)
        elif self._is_alone(group):
            self.start_over(group.holders()[-1])
        else:
            self._preempt(group, step)

    def start_over(self, request: Request) -> None:
        """Preemption by recompute: give the blocks back and queue again, in the old place."""
        self._leave(request)
        self._blocks.release(request)
        self._places.wait(request)

    def bring_back(self, request: Request, step: StepBuilder, reserve: int) -> bool:
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
            self._places.leave(member)
            self._places.wait(member)
        return True

    def _preempt(self, group: SequenceGroup, step: StepBuilder) -> None:
        holders = group.holders()
        copies = self._blocks.swap_out(holders) if len(holders) > 1 else None
        if copies is None:
            self._note_lack_of_host_memory(len(holders))
            for request in holders:
                self.start_over(request)
            return
        step.swap_out(copies)
        self.num_swap_outs += len(holders)
        for request in holders:
            self._leave(request)
            self._places.swap(request)

    def _leave(self, request: Request) -> None:
        self.num_preemptions += 1
        self._places.disperse(request)
        self._places.leave(request)
        self._places.forget(request)

    def _least_urgent(self) -> Request:
        candidates: list[Request] = [*self._places.running[-1:], *self._places.ready]
        return max(candidates, key=urgency)

    def _is_alone(self, group: SequenceGroup) -> bool:
        holders = (*self._places.running, *self._places.ready)
        return all(holder.group is group for holder in holders) and len(group.holders()) > 1

    def _note_lack_of_host_memory(self, num_sequences: int) -> None:
        if num_sequences > 1 and not self._has_warned:
            self._has_warned = True
            logger.warning(
                "no host memory to swap %d sequences of a request to: they are computed again; "
                "raise --swap-space to avoid that",
                num_sequences,
            )
