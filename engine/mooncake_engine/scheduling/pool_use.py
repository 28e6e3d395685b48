"""The scheduler's use of the KVCache pool: what it loads, what it saves, what computing costs."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count

from mooncake_engine.kv_cache.block_manager import BlockManager
from mooncake_engine.scheduling.output_processor import OutputProcessor
from mooncake_engine.scheduling.pool_loads import PoolLoads
from mooncake_engine.scheduling.request import Request
from mooncake_engine.scheduling.request_queues import RequestQueues
from mooncake_engine.scheduling.scheduler_interface import ChunkPool, SchedulerLimits
from mooncake_engine.scheduling.step_plan import ScheduledSequence, StepPlan, StepResult
from mooncake_kv.pool.pool_costs import PrefillCosts
from mooncake_kv.pool.pool_events import (
    ChunksCopied,
    ChunksFound,
    LoadReleased,
    PoolEvent,
    SaveRequest,
)
from mooncake_kv.store.chunk_keys import completes_chunks


class PoolSaves:
    """What of a sequence goes to the pool, and when: full chunks, prompts' and answers'.

    What a step with a prompt completes is copied layer by layer while it runs, all else once it is
    computed.

    Saving takes nothing away from anybody: blocks that are being copied may be given up and handed
    out again like all others. Blocks count how often they were handed out, so what was copied from
    blocks that have been handed out since is known to be worthless, and is not stored.

    Args:
        blocks: the tables.
        pool: copies chunks.
    """

    def __init__(self, blocks: BlockManager, pool: ChunkPool) -> None:
        self._blocks = blocks
        self._pool = pool
        self._ids = count()
        self._copying: dict[str, tuple[Sequence[int], Sequence[int]]] = {}

    def offer_planned(self, plan: StepPlan, requests: Sequence[Request]) -> None:
        """A step is about to be run by these requests, in its order: its first sequence's, those of
        its siblings, the next sequence's."""
        if not plan.sequences or plan.sequences[-1].count == 1:
            return
        size, running = self._pool.chunk_tokens, iter(requests)
        for sequence in plan.sequences:
            request, stop = next(running), sequence.start + sequence.count
            for _ in sequence.siblings:
                next(running)
            is_known = stop <= len(request.token_ids) and not request.is_unproven
            if is_known and completes_chunks(sequence.start, stop, size):
                self.offer(request, stop, plan.step)

    def offer(self, request: Request, num_tokens: int, step: int | None = None) -> None:
        """So many tokens of the request are computed, or will be by a step that is planned; a chunk
        may be complete."""
        size = self._pool.chunk_tokens
        stop = num_tokens // size
        first, request.num_saved = request.num_saved // size, stop * size
        if not request.has_verified_kv or stop <= first:
            return
        block_ids = tuple(request.block_ids[: stop * size // self._blocks.block_size])
        save_id = f"save#{next(self._ids)}"
        copied = block_ids[first * size // self._blocks.block_size :]
        keys = self._pool.keys(request, stop)
        save = SaveRequest(save_id, keys, first, block_ids, request.spec.cache_salt, step)
        if self._pool.save(save):
            self._copying[save_id] = (copied, self._blocks.pool.uses(copied))

    def copied(self, event: ChunksCopied) -> None:
        """A save's chunks have been copied: are they what they were?"""
        block_ids, uses = self._copying.pop(event.save_id)
        if event.is_complete:
            is_right = uses == self._blocks.pool.uses(block_ids)
            self._pool.end_save(event.save_id, is_right=is_right)


class PoolUse:
    """Loads and saves of one scheduler.

    Args:
        limits: of steps.
        queues: where requests stand.
        blocks: their tables.
        outputs: what they have got.
        pool: moves chunks.
    """

    def __init__(
        self,
        limits: SchedulerLimits,
        queues: RequestQueues,
        blocks: BlockManager,
        outputs: OutputProcessor,
        pool: ChunkPool,
    ) -> None:
        self.chunk_pool = pool
        self.chunk_tokens = pool.chunk_tokens
        self._queues = queues
        self._prefill = PrefillCosts()
        self.loads = PoolLoads(
            queues,
            blocks,
            outputs,
            pool,
            self._prefill,
            max_step_tokens=limits.prefill_chunk_size or limits.max_num_batched_tokens,
        )
        self.saves = PoolSaves(blocks, pool)
        self._wrong: list[Request] = []

    @property
    def has_unproven(self) -> bool:
        """Whether steps have run on a load that has not ended."""
        return self.loads.num_unproven > 0

    def take(self, event: PoolEvent) -> Sequence[tuple[Request, ScheduledSequence, StepResult]]:
        """Take an event in; returns what came of steps, to be taken in now."""
        if isinstance(event, ChunksCopied):
            self.saves.copied(event)
        elif isinstance(event, ChunksFound):
            self.loads.found(event)
        elif isinstance(event, LoadReleased):
            self.loads.released(event)
        else:
            held = self.loads.ended(event)
            self._wrong = [request for request in self._queues.running if request.has_wrong_kv]
            return held
        return ()

    def recompute_wrong(self) -> None:
        """Have requests compute their prompts whose load has failed, and which no step in flight
        runs any more."""
        if not self._wrong:
            return
        live = [r for r in self._wrong if r.has_wrong_kv and r in self._queues.running]
        for request in live:
            if not request.num_in_flight:
                self.loads.recompute(request)
        self._wrong = [request for request in live if request.has_wrong_kv]

    def learn(self, plan: StepPlan, seconds: float) -> None:
        """What a step took, if it had a prompt, and did not wait for layers."""
        sequences = plan.sequences
        if not sequences or sequences[-1].count == 1 or self.loads.num_unproven:
            return
        num_attended = sum(s.count * (s.start + s.count / 2) for s in sequences)
        self._prefill.learn(plan.num_tokens, int(num_attended), seconds, self._queues.now)
