"""What goes to the KVCache pool, and whether what was copied is what it is said to be."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import count

from mooncake_engine.kv_cache.block_manager import BlockManager
from mooncake_engine.kv_cache.block_pool import BlockPool
from mooncake_engine.scheduling.request import Request, RequestStatus
from mooncake_engine.scheduling.scheduler_interface import ChunkPool
from mooncake_engine.scheduling.step_plan import StepPlan
from mooncake_kv.pool.pool_events import ChunksCopied, SaveRequest
from mooncake_kv.store.chunk_keys import completes_chunks
from mooncake_kv.store.chunk_store import CopyTerms

COPIED_AT_ONCE = 4
"""Chunks of a copy that others find at the same moment: those behind them are still copied."""
MAX_REFUSED = 64
"""Requests whose refused chunks are remembered behind their end."""


@dataclass(frozen=True, slots=True)
class HandedOut:
    """Blocks, and how often each had been handed out: see ``BlockPool.uses``."""

    block_ids: Sequence[int]
    uses: Sequence[int]

    @classmethod
    def now(cls, block_ids: Sequence[int], pool: BlockPool) -> HandedOut:
        """As it is."""
        return cls(block_ids, pool.uses(block_ids))

    def between(self, start: int, stop: int) -> HandedOut:
        """A part of them."""
        return HandedOut(self.block_ids[start:stop], self.uses[start:stop])

    def are_same(self, pool: BlockPool) -> bool:
        """Whether none was handed out again since."""
        return self.uses == pool.uses(self.block_ids)


@dataclass(slots=True, eq=False)
class _Refused:
    """What the pool did not take, and no next chunk has brought along yet.

    Args:
        request: whose.
        save: what was offered.
        handed_out: the blocks of its table.
        is_computed: whether they hold what they are said to.
    """

    request: Request
    save: SaveRequest
    handed_out: HandedOut
    is_computed: bool


class PoolSaves:
    """What of a sequence goes to the pool, and when: full chunks, prompts' and answers'.

    What a step with a prompt completes is copied layer by layer while it runs, all else once it is
    computed.

    Saving takes nothing away from anybody: blocks that are being copied may be given up and handed
    out again like all others. Blocks count how often they were handed out, so what was copied from
    blocks that have been handed out since is known to be worthless, and is not stored. For the same
    reason what was refused as a request ended can be offered again while its blocks are cached.

    Args:
        blocks: the tables.
        pool: copies chunks.
    """

    def __init__(self, blocks: BlockManager, pool: ChunkPool) -> None:
        self._blocks = blocks
        self._pool = pool
        self._ids = count()
        self._copying: dict[str, HandedOut] = {}
        self._refused: dict[str, _Refused] = {}  # by request, the oldest first

    def offer_planned(self, plan: StepPlan, requests: Sequence[Request]) -> None:
        """A step is about to be run by these requests, in its order: its first sequence's, those of
        its siblings, the next sequence's."""
        self._offer_refused()
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
        may be complete. What the pool does not take now is offered again with the next chunk: those
        behind it are of no use without it."""
        size = self._pool.chunk_tokens
        stop, first = num_tokens // size, request.num_saved // size
        num_refused = request.num_offered // size - first
        request.num_offered = max(request.num_offered, stop * size)
        if not request.has_verified_kv or stop <= first + num_refused:
            return
        block_ids = tuple(request.block_ids[: stop * size // self._blocks.block_size])
        handed_out = HandedOut.now(block_ids, self._blocks.pool)
        keys, salt = self._pool.keys(request, stop), request.spec.cache_salt
        save = SaveRequest(
            *(f"save#{next(self._ids)}", keys, first, block_ids, salt, step),
            token_ids=self._published_tokens(request, first, stop),
            is_use=(first + 1) * size > request.num_received,
            num_refused=num_refused,
        )
        self._refused.pop(request.request_id, None)
        if self._begin(save, handed_out):
            request.num_saved = stop * size
            return
        is_computed = step is None
        self._refused[request.request_id] = _Refused(request, save, handed_out, is_computed)
        if len(self._refused) > MAX_REFUSED:
            del self._refused[next(iter(self._refused))]

    def computed(self, request: Request) -> None:
        """A step of the request is over: it may have completed a chunk, or computed one that was
        refused when the step was planned."""
        size, num_tokens = self._pool.chunk_tokens, request.num_computed
        refused = self._refused.get(request.request_id)
        if refused is not None and num_tokens >= len(refused.save.keys) * size:
            refused.is_computed = True
        if num_tokens >= request.num_offered + size:
            self.offer(request, num_tokens)

    def _offer_refused(self) -> None:
        """Offer again what was refused to requests that have ended, as far as their blocks have not
        been handed out since; no further than the pool takes it."""
        for request_id, refused in list(self._refused.items()):
            if refused.request.state is not RequestStatus.FINISHED:
                continue  # with its next chunk
            save = refused.save
            again = replace(
                save,
                save_id=f"save#{next(self._ids)}",
                step=None,
                num_refused=len(save.keys) - save.first_chunk,
            )
            is_there = refused.is_computed and refused.handed_out.are_same(self._blocks.pool)
            if is_there and not self._begin(again, refused.handed_out):
                return
            del self._refused[request_id]

    def offer_copies(
        self,
        request: Request,
        keys: Sequence[bytes],
        first: int,
        handed_out: HandedOut,
        terms: CopyTerms,
    ) -> None:
        """Chunks have been loaded from another store: the own one may keep a copy. Others find the
        first ones while the last ones are copied.

        Args:
            request: that they were loaded for.
            keys: of all leading chunks of the sequence up to the last one.
            first: the first one that came from elsewhere.
            handed_out: the sequence's blocks, when the load began.
            terms: on which the store decides.
        """
        salt = request.spec.cache_salt
        blocks_per_chunk = self._pool.chunk_tokens // self._blocks.block_size
        for start in range(first, len(keys), COPIED_AT_ONCE):
            stop = min(start + COPIED_AT_ONCE, len(keys))
            block_ids = tuple(handed_out.block_ids[: stop * blocks_per_chunk])
            tokens = self._published_tokens(request, start, stop)
            ids = f"copy#{next(self._ids)}", keys[:stop], start, block_ids, salt
            if not self._begin(SaveRequest(*ids, copy=terms, token_ids=tokens), handed_out):
                return

    def _published_tokens(self, request: Request, first: int, stop: int) -> Sequence[int]:
        """Of these chunks; none where nobody is told of them."""
        if not self._pool.publishes_saves:
            return ()
        size = self._pool.chunk_tokens
        return request.token_ids[first * size : stop * size]

    def _begin(self, save: SaveRequest, handed_out: HandedOut) -> bool:
        """Whether the pool takes it."""
        first = save.first_chunk * self._pool.chunk_tokens // self._blocks.block_size
        is_taken = self._pool.save(save)
        if is_taken:
            self._copying[save.save_id] = handed_out.between(first, len(save.block_ids))
        return is_taken

    def copied(self, event: ChunksCopied) -> None:
        """A save's chunks have been copied: are they what they were?"""
        copied = self._copying.pop(event.save_id)
        if event.is_complete:
            is_right = copied.are_same(self._blocks.pool)
            self._pool.end_save(event.save_id, is_right=is_right)
        self._offer_refused()
