"""Batch work uses the capacity that interactive requests leave idle, and never delays them.

Between two peaks a prefill instance has idle memory and compute time. Batch requests use them: they
start only when no interactive request waits, their prompts pause while one waits, and they are
preempted as soon as one needs their blocks or their place in the batch. The KV that they had
computed stays in the prefix cache until its memory is needed.
"""

from __future__ import annotations

from itertools import takewhile

from mooncake_api.instance_protocol import BATCH_PRIORITY
from mooncake_engine.kv_cache.block_manager import BlockManager
from mooncake_engine.scheduling.request import Request, RequestStatus
from mooncake_engine.scheduling.request_queues import RequestQueues, priority_key


def is_batch(request: Request) -> bool:
    """Whether the request is batch work, that is, not interactive."""
    return request.group.priority_key[0] >= BATCH_PRIORITY


class BatchWork:
    """Finds the interactive request that waits, and the batch work to preempt for it.

    Args:
        queues: queues of the requests.
        blocks: owner of their block tables.
    """

    def __init__(self, queues: RequestQueues, blocks: BlockManager) -> None:
        self._queues = queues
        self._blocks = blocks

    def find_waiting(self) -> Request | None:
        """Returns the most urgent interactive request that is not scheduled yet, or None."""
        queues = self._queues
        heads = (queues.waiting.peek(), queues.swapped.peek(), queues.preallocating.peek())
        return min(
            (head for head in heads if head is not None and not is_batch(head)),
            key=priority_key,
            default=None,
        )

    def find_victim(self) -> Request | None:
        """Returns the least urgent batch request that owns blocks and may be preempted, or None."""
        running = takewhile(is_batch, reversed(self._queues.running))  # the most urgent is first
        last = next((request for request in running if not request.group.is_unproven), None)
        ready = [r for r in self._queues.ready if is_batch(r) and not r.group.is_unproven]
        return max(ready if last is None else [last, *ready], key=priority_key, default=None)

    def _num_kept_free(self, request: Request) -> int:
        """Returns the blocks that a load from a peer leaves free: one for each request that runs,
        is ready, or loads."""
        is_load = request.status is RequestStatus.PREALLOCATING
        return self._queues.num_holders if is_load else 0

    def has_capacity(self, request: Request, max_num_seqs: int, reserve: int) -> bool:
        """Whether an interactive request could start now, without preempting batch work.

        Args:
            request: the waiting request.
            max_num_seqs: maximum number of running sequences.
            reserve: number of blocks that must stay free besides.
        """
        has_place = len(self._queues.running) < max_num_seqs
        return has_place and not self.lacks_blocks(request, reserve)

    def lacks_blocks(self, request: Request, reserve: int) -> bool:
        """Whether too few blocks are free for the request if ``reserve`` more must stay free."""
        num_tokens = len(request.token_ids)
        wanted = self._blocks.blocks_for(num_tokens) + len(request.group.members) - 1
        swapped = sum(len(member.host_block_ids) for member in request.group.members)
        wanted = max(wanted, swapped) + reserve + self._num_kept_free(request)
        cacheable = 0 if swapped or request.awaits_scores else num_tokens - 1
        return self._blocks.lacks_free(request, wanted, cacheable)
