"""Saves to the KVCache pool: offers computed chunks, and verifies that the copies are valid."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import count

from mooncake_engine.kv_cache.block_manager import BlockManager
from mooncake_engine.kv_cache.block_pool import BlockPool
from mooncake_engine.scheduling.request import Request, RequestStatus
from mooncake_engine.scheduling.request_queues import RequestQueues
from mooncake_engine.scheduling.scheduler_interface import ChunkPool
from mooncake_engine.scheduling.step_plan import StepPlan
from mooncake_kv.pool.pool_events import ChunksCopied, SaveRequest
from mooncake_kv.store.chunk_keys import completes_chunks
from mooncake_kv.store.chunk_store import CopyTerms

CHUNKS_PER_COPY = 4
"""Chunks per save when a load is copied to the own store: lookups find these while later chunks are
still being copied."""
MAX_REJECTED = 64
"""Maximum number of requests whose rejected chunks are kept to be offered again, and of saves that
are kept because the store had no memory for them."""
MIN_RETRY_S, MAX_RETRY_S = 0.5, 30.0
"""Seconds after which a save is offered again if the store had no memory for it. They double with
every refusal, and start anew once the store has accepted a save. If the pool rejected it, which is
busy or reaches no store, it is the minimum, or less if another save ends before."""


@dataclass(frozen=True, slots=True)
class BlockSnapshot:
    """Blocks and their allocation counts at some moment: see ``BlockPool.uses``."""

    block_ids: Sequence[int]
    uses: Sequence[int]

    @classmethod
    def now(cls, block_ids: Sequence[int], pool: BlockPool) -> BlockSnapshot:
        """Returns the blocks with their current allocation counts."""
        return cls(block_ids, pool.uses(block_ids))

    def between(self, start: int, stop: int) -> BlockSnapshot:
        """Returns the blocks with the indices ``start`` to ``stop - 1``."""
        return BlockSnapshot(self.block_ids[start:stop], self.uses[start:stop])

    def is_unchanged(self, pool: BlockPool) -> bool:
        """Whether none of the blocks has been allocated again since, so all keep their content."""
        return self.uses == pool.uses(self.block_ids)


@dataclass(frozen=True, slots=True, eq=False)
class _OfferedSave:
    """A save that was offered to the pool, and may have to be offered again.

    Args:
        request: the request whose chunks were offered.
        save: the save.
        snapshot: the blocks of the chunks to save.
        step: the step that computes its last chunk; None if all were computed when it was offered.
    """

    request: Request
    save: SaveRequest
    snapshot: BlockSnapshot
    step: int | None


class PoolSaves:
    """One scheduler's saves to the KVCache pool: full chunks of prompts and outputs. Owned by
    ``PoolUse``.

    Chunks that a prefill step completes are copied layer by layer while the step runs; all other
    chunks are copied after they have been computed.

    A save does not pin its blocks: they may be freed and allocated again while they are copied. The
    block pool counts the allocations of each block, so a copy whose blocks have been allocated
    again is known to be invalid, and is discarded; a request that was preempted offers these chunks
    again once it has computed them again. For the same reason, chunks that were rejected when a
    request ended can be offered again while its blocks are still cached, and so can chunks that the
    store had no memory for: one save at a time, after a delay, since it asks a full store.

    Args:
        blocks: owner of the block tables.
        pool: copies and stores chunks.
        queues: the time.

    Attributes:
        last_step: number of the latest step that has completed.
    """

    def __init__(self, blocks: BlockManager, pool: ChunkPool, queues: RequestQueues) -> None:
        self._blocks = blocks
        self._pool = pool
        self._queues = queues
        self.last_step = -1
        self._ids = count()
        self._copying: dict[str, _OfferedSave] = {}
        self._rejected: dict[str, _OfferedSave] = {}  # by request id, the oldest first
        self._accepts_from = 0.0  # the pool has rejected one of them: it will until then
        self._refused: deque[_OfferedSave] = deque(maxlen=MAX_REJECTED)  # by a store without memory
        self._retry: str | None = None  # the one of them that is offered again
        self._retry_s = MIN_RETRY_S
        self._retry_at = 0.0

    def offer_planned(self, plan: StepPlan, requests: Sequence[Request]) -> None:
        """Offer the prompt chunks that a planned step completes.

        Args:
            plan: the step's plan.
            requests: the step's requests in the plan's order; each sequence's request is followed
                by those of its siblings.
        """
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
        """Offer the complete chunks among a request's leading ``num_tokens`` tokens to the pool.

        Chunks that the pool rejects are offered again with the next chunk, which is of no use
        without them.

        Args:
            request: the request.
            num_tokens: leading tokens that are computed, or that ``step`` computes.
            step: the planned step that computes the last of them; None if all are computed.
        """
        size = self._pool.chunk_tokens
        stop, first = num_tokens // size, request.num_saved // size
        num_refused = request.num_offered // size - first
        request.num_offered = max(request.num_offered, stop * size)
        if not request.has_verified_kv or stop <= first + num_refused:
            return
        block_ids = tuple(request.block_ids[: stop * size // self._blocks.block_size])
        new_blocks = block_ids[first * size // self._blocks.block_size :]
        snapshot = BlockSnapshot.now(new_blocks, self._blocks.pool)
        keys, salt = self._pool.keys(request, stop), request.spec.cache_salt
        save = SaveRequest(
            save_id=f"save#{next(self._ids)}",
            keys=keys,
            first_chunk=first,
            block_ids=block_ids,
            tenant=salt,
            step=step,
            token_ids=self._published_tokens(request, first, stop),
            is_use=(first + 1) * size > request.num_received,
            num_refused=num_refused,
        )
        self._rejected.pop(request.request_id, None)
        offered = _OfferedSave(request, save, snapshot, step)
        if self._begin(offered):
            request.num_saved = stop * size
            return
        self._rejected[request.request_id] = offered
        if len(self._rejected) > MAX_REJECTED:
            del self._rejected[next(iter(self._rejected))]

    def computed(self, request: Request) -> None:
        """Offer the chunks that a completed step has computed."""
        if request.num_computed >= request.num_offered + self._pool.chunk_tokens:
            self.offer(request, request.num_computed)

    def retry(self) -> None:
        """Offer saves again that the pool or its store did not accept, if it is time. Called before
        a step is planned, which may allocate their blocks anew, and while there is none to run."""
        self._retry_rejected()
        self._retry_refused()

    def _retry_rejected(self) -> None:
        """Offer rejected saves of ended requests again, oldest first, until the pool rejects one.
        Saves whose blocks have been allocated again since are dropped. To find that out takes the
        longer the more blocks they have: a pool that has rejected one is not asked in each step."""
        if self._queues.now < self._accepts_from:
            return
        for request_id, rejected in list(self._rejected.items()):
            if rejected.request.status is not RequestStatus.FINISHED:
                continue  # offered again with the request's next chunk
            is_unchanged = rejected.snapshot.is_unchanged(self._blocks.pool)
            if is_unchanged and self._is_computed(rejected):
                again = self._again(rejected, rejected.save.first_chunk)
                if not self._begin(again):
                    self._accepts_from = self._queues.now + MIN_RETRY_S
                    return
            del self._rejected[request_id]

    def _retry_refused(self) -> None:
        """Offer the oldest save again that the store had no memory for, if it is time; the next one
        follows when the store has answered. Saves whose blocks have been allocated again since are
        dropped."""
        if self._retry is not None or self._queues.now < self._retry_at:
            return
        for _ in range(len(self._refused)):
            refused = self._refused.popleft()
            if not refused.snapshot.is_unchanged(self._blocks.pool):
                self._note_dropped(refused)
                continue
            if not self._is_computed(refused):
                self._refused.append(refused)
                continue
            if self._begin(refused):
                self._retry = refused.save.save_id
            else:
                self._keep_refused(refused)
            return

    def _is_computed(self, offered: _OfferedSave) -> bool:
        """Whether the KV of all chunks to save has been computed."""
        return offered.step is None or offered.step <= self.last_step

    def _keep_refused(self, refused: _OfferedSave) -> None:
        """Keep a save that the store had no memory for, to be offered again after a delay."""
        self._refused.append(refused)
        if self._queues.now >= self._retry_at:
            self._retry_at = self._queues.now + self._retry_s
            self._retry_s = min(2 * self._retry_s, MAX_RETRY_S)

    def _note_dropped(self, dropped: _OfferedSave) -> None:
        """The blocks of a save were allocated again before they were copied. If its request was
        preempted, its next offer begins with these chunks: later ones are useless without them."""
        if dropped.save.copy is None:
            request, first = dropped.request, dropped.save.first_chunk * self._pool.chunk_tokens
            request.num_saved = min(request.num_saved, first)
            request.num_offered = min(request.num_offered, first)

    def _again(self, offered: _OfferedSave, first: int) -> _OfferedSave:
        """The save of those chunks of ``offered`` that were not accepted: ``first`` and later."""
        save, size = offered.save, self._pool.chunk_tokens
        skipped = (first - save.first_chunk) * size
        again = replace(
            save,
            save_id=f"save#{next(self._ids)}",
            first_chunk=first,
            step=None,
            token_ids=save.token_ids[skipped:],
            num_refused=len(save.keys) - first,
        )
        start, stop = skipped // self._blocks.block_size, len(offered.snapshot.block_ids)
        return replace(offered, save=again, snapshot=offered.snapshot.between(start, stop))

    def offer_copies(
        self,
        request: Request,
        keys: Sequence[bytes],
        first: int,
        snapshot: BlockSnapshot,
        terms: CopyTerms,
    ) -> None:
        """Offer the own store copies of chunks that were loaded from another store, in several
        saves: lookups find the first chunks while the last ones are still being copied.

        Args:
            request: the request that loaded them.
            keys: keys of the sequence's leading chunks, up to the last one to copy.
            first: index of the first chunk that came from another store.
            snapshot: the sequence's blocks at the start of the load.
            terms: costs by which the store decides whether to keep the copies.
        """
        salt = request.spec.cache_salt
        blocks_per_chunk = self._pool.chunk_tokens // self._blocks.block_size
        for start in range(first, len(keys), CHUNKS_PER_COPY):
            stop = min(start + CHUNKS_PER_COPY, len(keys))
            block_ids = tuple(snapshot.block_ids[: stop * blocks_per_chunk])
            save = SaveRequest(
                save_id=f"copy#{next(self._ids)}",
                keys=keys[:stop],
                first_chunk=start,
                block_ids=block_ids,
                tenant=salt,
                copy=terms,
                token_ids=self._published_tokens(request, start, stop),
            )
            copied = snapshot.between(start * blocks_per_chunk, stop * blocks_per_chunk)
            if not self._begin(_OfferedSave(request, save, copied, None)):
                return

    def _published_tokens(self, request: Request, first: int, stop: int) -> Sequence[int]:
        """Returns the tokens of these chunks; none if saves are not published."""
        if not self._pool.publishes_saves:
            return ()
        size = self._pool.chunk_tokens
        return request.token_ids[first * size : stop * size]

    def _begin(self, offered: _OfferedSave) -> bool:
        """Start a save; False if the pool rejects it."""
        is_accepted = self._pool.save(offered.save)
        if is_accepted:
            self._copying[offered.save.save_id] = offered
        return is_accepted

    def handle_copied(self, event: ChunksCopied) -> None:
        """Commit a copied save if its blocks have kept their content, otherwise discard it. Keep
        the chunks that the store had no memory for; a copy of another store's is not worth that."""
        offered = self._copying.pop(event.save_id)
        self._accepts_from = 0.0
        if event.is_complete:
            is_unchanged = offered.snapshot.is_unchanged(self._blocks.pool)
            self._pool.end_save(event.save_id, is_unchanged=is_unchanged)
            if not is_unchanged:
                self._note_dropped(offered)
        if event.save_id == self._retry:
            self._retry = None
        if event.refused_chunk is not None:
            if offered.save.copy is None:
                self._keep_refused(self._again(offered, event.refused_chunk))
        elif event.is_complete:
            self._retry_s, self._retry_at = MIN_RETRY_S, 0.0
        self.retry()
