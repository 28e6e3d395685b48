"""Batch work runs in what interactive requests leave: in idle memory, and in no one's way.

A prefill instance has memory and time that nobody uses between two peaks. Requests of the batch
class fill it: they start when no interactive request waits, their prompts pause while one does,
and they are preempted as soon as one needs their blocks or their place. What they had computed
stays in the prefix cache for as long as nobody needs the memory.
"""

from __future__ import annotations

from itertools import takewhile

from mooncake_engine.kv_cache.block_manager import BlockManager
from mooncake_engine.messages import BATCH_PRIORITY
from mooncake_engine.scheduling.request import Request, RequestStatus
from mooncake_engine.scheduling.request_queues import RequestQueues, priority_key


def is_batch(request: Request) -> bool:
    """Whether nobody waits for the request."""
    return request.group.priority_key[0] >= BATCH_PRIORITY


class BatchWork:
    """Finds who has to wait for whom.

    Args:
        queues: where requests stand.
        blocks: their tables.
    """

    def __init__(self, queues: RequestQueues, blocks: BlockManager) -> None:
        self._queues = queues
        self._blocks = blocks

    def find_waiting(self) -> Request | None:
        """The most urgent interactive request that waits for blocks or for its turn."""
        queues = self._queues
        heads = (queues.waiting.peek(), queues.swapped.peek(), queues.preallocating.peek())
        return min(
            (head for head in heads if head is not None and not is_batch(head)),
            key=priority_key,
            default=None,
        )

    def find_victim(self) -> Request | None:
        """The least urgent batch request that holds blocks, and may be preempted."""
        running = takewhile(is_batch, reversed(self._queues.running))  # the most urgent is first
        last = next((request for request in running if not request.group.is_unproven), None)
        ready = [r for r in self._queues.ready if is_batch(r) and not r.group.is_unproven]
        return max(ready if last is None else [last, *ready], key=priority_key, default=None)

    def _num_kept_free(self, request: Request) -> int:
        """Blocks that a load of KV leaves to those that run: one for each."""
        if request.state is not RequestStatus.PREALLOCATING:
            return 0
        queues = self._queues
        return len(queues.running) + len(queues.ready) + len(queues.transferring)

    def has_room(self, request: Request, max_num_seqs: int, reserve: int) -> bool:
        """Whether an interactive request could start now, as far as batch work is concerned.

        Args:
            request: that waits.
            max_num_seqs: that may run.
            reserve: blocks that stay free besides.
        """
        has_place = len(self._queues.running) < max_num_seqs
        return has_place and not self.lacks_blocks(request, reserve)

    def lacks_blocks(self, request: Request, reserve: int) -> bool:
        """Whether there are too few blocks for it, if ``reserve`` stay free besides."""
        wanted = self._blocks.blocks_for(len(request.token_ids)) + len(request.group.members) - 1
        swapped = sum(len(member.host_block_ids) for member in request.group.members)
        wanted = max(wanted, swapped) + reserve + self._num_kept_free(request)
        return wanted > self._blocks.pool.num_free
