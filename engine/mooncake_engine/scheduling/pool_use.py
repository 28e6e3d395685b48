"""The scheduler's use of the KVCache pool: its loads, its saves, and the cost of computing."""

from __future__ import annotations

from collections.abc import Sequence

from mooncake_engine.kv_cache.block_manager import BlockManager
from mooncake_engine.scheduling.output_processor import OutputProcessor
from mooncake_engine.scheduling.pool_hits import PoolHits
from mooncake_engine.scheduling.pool_loads import PoolLoads
from mooncake_engine.scheduling.pool_saves import PoolSaves
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
)


class PoolUse:
    """The loads and saves of one scheduler, which owns this object.

    Args:
        limits: bounds of steps.
        queues: queues of the requests.
        blocks: allocates their block tables.
        outputs: keeps the tables of cancelled loads until they are drained.
        pool: moves chunks.
        hits: keeps what lookups have found.

    Attributes:
        chunk_pool: the pool.
        chunk_tokens: tokens per chunk.
        saves: the saves.
        loads: the loads.
    """

    def __init__(
        self,
        limits: SchedulerLimits,
        queues: RequestQueues,
        blocks: BlockManager,
        outputs: OutputProcessor,
        pool: ChunkPool,
        hits: PoolHits,
    ) -> None:
        self.chunk_pool = pool
        self.chunk_tokens = pool.chunk_tokens
        self._queues = queues
        self._prefill = PrefillCosts()
        self.saves = PoolSaves(blocks, pool, queues)
        self.loads = PoolLoads(
            queues,
            blocks,
            outputs,
            pool,
            self._prefill,
            self.saves,
            hits,
            max_step_tokens=limits.prefill_chunk_size or limits.max_num_batched_tokens,
        )
        self._with_wrong_kv: list[Request] = []

    @property
    def has_unproven(self) -> bool:
        """Whether steps run any request before its load has completed."""
        return self.loads.num_unproven > 0

    def handle_event(
        self, event: PoolEvent
    ) -> Sequence[tuple[Request, ScheduledSequence, StepResult]]:
        """Handle an event from the pool; returns held results of steps, to be applied now."""
        if isinstance(event, ChunksCopied):
            self.saves.handle_copied(event)
        elif isinstance(event, ChunksFound):
            self.loads.handle_found(event)
        elif isinstance(event, LoadReleased):
            self.loads.handle_released(event)
        else:
            held = self.loads.handle_ended(event)
            self._with_wrong_kv = [r for r in self._queues.running if r.has_wrong_kv]
            return held
        return ()

    def recompute_wrong(self) -> None:
        """Requeue the requests whose load has failed to be computed, as soon as no step in flight
        runs them."""
        if not self._with_wrong_kv:
            return
        live = [r for r in self._with_wrong_kv if r.has_wrong_kv and r in self._queues.running]
        for request in live:
            if not request.num_in_flight:
                self.loads.recompute(request)
        self._with_wrong_kv = [request for request in live if request.has_wrong_kv]

    def learn(self, plan: StepPlan, seconds: float) -> None:
        """Update the estimated cost of computing with the duration of a step; steps without prompt
        tokens and steps that may have waited for layers of a load are ignored."""
        sequences = plan.sequences
        if not sequences or sequences[-1].count == 1 or self.loads.num_unproven:
            return
        num_attended = sum(s.count * (s.start + s.count / 2) for s in sequences)
        self._prefill.learn(plan.num_tokens, int(num_attended), seconds, self._queues.now)
