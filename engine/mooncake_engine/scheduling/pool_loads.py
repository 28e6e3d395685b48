"""Prompts whose beginning the KVCache pool has: look it up, choose, load, run while it comes in.

A prompt that comes in is looked up; so are a prompt whose KV did not come from a peer, and what a
preempted request has, prompt and answer. What is found is loaded when the request's turn comes, or
before if there are blocks that nobody more urgent waits for; the rest is computed. A step may begin
before all layers are there: ranks wait for each layer of a load before they read it. What such a
step brings is *unproven* until the load has ended well: nobody is told, nobody shares the blocks.
If it does not end well, the request starts over and computes its prompt.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from itertools import count

from mooncake_engine.kv_cache.block_manager import BlockManager
from mooncake_engine.scheduling.batch_work import is_batch
from mooncake_engine.scheduling.output_processor import OutputProcessor
from mooncake_engine.scheduling.pool_saves import HandedOut, PoolSaves
from mooncake_engine.scheduling.request import Request, RequestStatus
from mooncake_engine.scheduling.request_queues import RequestQueues, priority_key
from mooncake_engine.scheduling.scheduler_interface import ChunkPool
from mooncake_engine.scheduling.step_plan import ScheduledSequence, StepResult
from mooncake_kv.params import PrefixSource
from mooncake_kv.pool.pool_costs import (
    LoadChoice,
    PrefillCosts,
    PromptToLoad,
    choose_load,
    layers_before_release,
)
from mooncake_kv.pool.pool_events import (
    ChunksFound,
    ChunkSource,
    LoadReleased,
    LoadRequest,
    PoolLoadEnded,
)
from mooncake_kv.store.chunk_keys import num_loadable_chunks
from mooncake_kv.store.chunk_store import CopyTerms

logger = logging.getLogger(__name__)

MAX_LOADS = 16
"""Under way at once: more would only share what a link carries."""
MIN_PATIENCE_S = 2.0
PATIENCE = 4.0
"""A load may take so many times what it, or computing instead, was estimated to take."""
MIN_HINT_PATIENCE_S, MAX_HINT_PATIENCE_S = 0.05, 1.0
"""How long a store that a request names may take until it says what it has."""
MIN_COST_S = 1e-6
CHOICE_S = 0.5
"""So long a prompt that waits for room is not weighed again."""
MAX_STALE_HITS = 64
"""So many hits of requests that have ended are not worth looking for."""
GRACE_S = 0.5
"""Ranks end a load themselves at its deadline; so much later the scheduler does."""


class Turn(Enum):
    """What becomes of a request whose turn has come."""

    COMPUTE = auto()
    """It is computed: nothing is worth loading."""
    LOADS = auto()
    """It has blocks now, and loads; or it waits for another one's load."""
    NO_ROOM = auto()
    """There are no blocks for it."""


@dataclass(slots=True, eq=False)
class _Hit:
    """What the pool has of a request's prompt.

    Args:
        request: whose.
        keys: of its leading chunks.
        sources: of those that were found.

    Attributes:
        choice: what was best when it was asked last: at which time, and with how many tokens on the
            device.
    """

    request: Request
    keys: Sequence[bytes]
    sources: Sequence[ChunkSource]
    choice: LoadChoice | None = None
    chosen_at: float = 0.0
    num_cached: int = 0


@dataclass(slots=True, eq=False)
class _Load:
    """A load under way.

    Args:
        request: whose.
        load_id: unique.
        keys: of the chunks that the request will have.
        estimated_end: when it should be over.
        patience_end: when it is given up.
        sources: of these, where they come from.
        first: the first of them that is loaded.
        blocks: that they go to, and how often each was handed out.
        held: steps that ran on it, and what came of them.
    """

    request: Request
    load_id: str
    keys: Sequence[bytes]
    sources: Sequence[ChunkSource]
    first: int
    blocks: HandedOut
    estimated_end: float
    patience_end: float
    held: list[tuple[ScheduledSequence, StepResult]] = field(default_factory=list)


class PoolLoads:
    """See the module.

    Args:
        queues: where requests stand.
        blocks: their tables.
        outputs: what they have got.
        pool: moves chunks.
        prefill: what computing costs.
        saves: take what came from other stores.
        max_step_tokens: that a prompt gets in one step.

    Attributes:
        num_unproven: requests that steps run although their load has not ended.
    """

    def __init__(
        self,
        queues: RequestQueues,
        blocks: BlockManager,
        outputs: OutputProcessor,
        pool: ChunkPool,
        prefill: PrefillCosts,
        saves: PoolSaves,
        *,
        max_step_tokens: int,
    ) -> None:
        self._saves = saves
        self._max_step_tokens = max_step_tokens
        self._queues = queues
        self._blocks = blocks
        self._outputs = outputs
        self._pool = pool
        self._prefill = prefill
        self._ids = count()
        self._asked: dict[str, Request] = {}
        self._hits: dict[str, _Hit] = {}
        self._loads: dict[str, _Load] = {}
        self._parked: dict[str, tuple[_Load, _Hit]] = {}
        self.num_unproven = 0

    # -- looking up -----------------------------------------------------------------------------

    def look_up(self, request: Request) -> None:
        """Queue a request without blocks: for its turn; before that, where the pool has to be asked
        for the beginning of what it has to compute, for the answer."""
        if not self._asks(request):
            self._queues.wait(request)

    def _asks(self, request: Request) -> bool:
        """Look a request up; True: it waits for the answer now."""
        if request.awaits_scores or not request.has_verified_kv:
            return False
        num_tokens = len(request.token_ids)
        num_keys = num_loadable_chunks(num_tokens, self._pool.chunk_tokens)
        num_cached = self._blocks.count_cached(request, num_tokens - 1)
        # Others that are before it, or have preempted it, may take what is cached now.
        is_next = not self._queues.waiting and not request.num_preemptions
        if not num_keys or (is_next and num_keys * self._pool.chunk_tokens <= num_cached):
            return False
        keys = self._pool.keys(request, num_keys)
        load_id = f"{request.request_id}#{next(self._ids)}"
        hints = self._hints(request, num_cached)
        if hints:
            found = self._pool.lookup(load_id, keys, hints, self._hint_patience_s(request))
        else:
            found = self._pool.lookup(load_id, keys)
        if found is not None:
            self._note(request, keys, found)
            return False
        self._asked[load_id] = request
        # From its arrival: the last step of an engine that was idle is long ago.
        request.deadline = max(self._queues.now, request.arrival) + MIN_PATIENCE_S
        self._queues.look_up(request)
        return True

    def _hints(self, request: Request, num_cached: int) -> list[PrefixSource]:
        """Stores that are said to have chunks which the device has not."""
        size = self._pool.chunk_tokens
        hints = request.spec.kv_transfer_params.prefix_sources
        return [hint for hint in hints if hint.num_tokens // size * size > num_cached]

    def _hint_patience_s(self, request: Request) -> float:
        """No longer than computing the prompt would take."""
        if not self._prefill.is_known:
            return MAX_HINT_PATIENCE_S
        seconds = self._prefill.seconds(0, len(request.token_ids), self._queues.now)
        return min(max(seconds, MIN_HINT_PATIENCE_S), MAX_HINT_PATIENCE_S)

    def found(self, event: ChunksFound) -> None:
        """The pool answers."""
        request = self._asked.pop(event.load_id, None)
        if request is None or request.state is not RequestStatus.LOOKING_UP:
            return
        num_keys = num_loadable_chunks(len(request.token_ids), self._pool.chunk_tokens)
        self._note(request, self._pool.keys(request, num_keys), event.sources)
        self._end_look_up(request)

    def _note(
        self, request: Request, keys: Sequence[bytes], sources: Sequence[ChunkSource]
    ) -> None:
        if sources:
            self._hits[request.request_id] = _Hit(request, keys, sources)

    def _end_look_up(self, request: Request) -> None:
        request.deadline = None
        self._queues.dequeue(request)
        self._queues.wait(request)

    # -- beginning ------------------------------------------------------------------------------

    def has_hit(self, request: Request) -> bool:
        """Whether the pool has something of its prompt, and nothing was decided about that."""
        hit = self._hits.get(request.request_id)
        return hit is not None and hit.request is request

    def take_turn(self, request: Request, reserve: int) -> Turn:
        """The request is the most urgent one that waits: load, or leave it to be computed.

        Args:
            request: has a hit.
            reserve: blocks that must stay free.
        """
        hit = self._hits[request.request_id]
        if request.shares_prompt and request.group.find_prompt() is not None:
            del self._hits[request.request_id]
            return Turn.COMPUTE
        if leader := request.group.find_leader(request):
            del self._hits[request.request_id]
            self._queues.follow(request, leader)
            return Turn.LOADS
        num_tokens = len(request.token_ids)
        num_cached = self._blocks.count_cached(request, num_tokens - 1)
        wanted = self._blocks.blocks_for(num_tokens - num_cached) + reserve
        if wanted > self._blocks.pool.num_free:  # first: it is so in every step under load
            return Turn.NO_ROOM
        choice = self._choose(hit, num_cached)
        if choice.num_chunks * self._pool.chunk_tokens <= num_cached:
            num_found = len(hit.sources) - num_cached // self._pool.chunk_tokens
            self._pool.stats.num_recomputed_chunks += max(num_found, 0)
            del self._hits[request.request_id]
            return Turn.COMPUTE
        if load := self._same_load(hit, choice, num_cached):
            self._wait_for(load, hit)
            return Turn.LOADS
        if len(self._loads) >= MAX_LOADS:
            return Turn.NO_ROOM
        if not self._blocks.allocate(
            request, num_tokens, cacheable=num_tokens - 1, reserve=reserve
        ):
            return Turn.NO_ROOM
        del self._hits[request.request_id]
        self._begin(request, hit, choice)
        return Turn.LOADS

    def start_early(self, reserve: int, *, has_batch: bool) -> None:
        """Begin loads of requests whose turn has not come, with blocks that are left.

        Args:
            reserve: blocks that must stay free besides those that more urgent requests wait for.
            has_batch: whether batch work's are begun, too: not while somebody waits, or what it
                gives up for that one would be taken again.
        """
        if len(self._hits) > len(self._queues.waiting) + MAX_STALE_HITS:
            self._forget_ended()
        for request in self._queues.waiting.in_order() if self._hits else ():
            if len(self._loads) >= MAX_LOADS or self._blocks.pool.num_free <= reserve:
                return
            if is_batch(request) and not has_batch:  # and so are all behind it
                return
            turn = self.take_turn(request, reserve) if self.has_hit(request) else Turn.COMPUTE
            if turn is Turn.NO_ROOM:
                return
            if turn is Turn.COMPUTE:
                reserve += self._blocks.blocks_for(len(request.token_ids))

    def _forget_ended(self) -> None:
        """Drop the hits of requests that have ended before their turn came."""
        live = self._queues.requests
        self._hits = {
            name: hit for name, hit in self._hits.items() if live.get(name) is hit.request
        }

    def _choose(self, hit: _Hit, num_cached: int) -> LoadChoice:
        """What is best, or was a moment ago, where so many tokens are on the device."""
        pool, now = self._pool, self._queues.now
        is_fresh = hit.num_cached == num_cached and now - hit.chosen_at <= CHOICE_S
        if hit.choice is None or not is_fresh:
            prompt = PromptToLoad(
                len(hit.request.token_ids),
                num_cached,
                pool.chunk_tokens,
                pool.chunk_bytes,
                hit.sources,
                pool.num_layers,
            )
            hit.choice = choose_load(
                prompt, self._prefill, pool.load_costs, now, is_always=pool.always_loads
            )
            hit.chosen_at, hit.num_cached = now, num_cached
        return hit.choice

    def _same_load(self, hit: _Hit, choice: LoadChoice, num_cached: int) -> _Load | None:
        """A load under way that brings what this request would load, sooner than it could itself
        (single flight)."""
        first, now = num_cached // self._pool.chunk_tokens, self._queues.now
        for load in self._loads.values():
            is_wanted = self._is_loading(load) or load.request.is_unproven
            if not is_wanted or now > load.patience_end:
                continue
            # late already: it may take as long again
            remaining_s = abs(load.estimated_end - now)
            if _num_equal(load.keys, hit.keys[: choice.num_chunks]) <= first:
                continue
            # loading it twice would take the link twice, and slow both loads down
            if remaining_s + choice.compute_s <= choice.total_s + 2 * choice.load_s:
                return load
        return None

    def _wait_for(self, load: _Load, hit: _Hit) -> None:
        request = hit.request
        self._pool.stats.num_waits += 1
        del self._hits[request.request_id]
        self._queues.dequeue(request)
        self._queues.look_up(request)
        request.deadline = load.patience_end
        self._parked[request.request_id] = (load, hit)

    def _begin(self, request: Request, hit: _Hit, choice: LoadChoice) -> None:
        pool, now = self._pool, self._queues.now
        load_id = f"{request.request_id}#{next(self._ids)}"
        first = request.num_computed // pool.chunk_tokens
        num_tokens = len(request.token_ids)
        recompute_s = self._prefill.seconds(request.num_computed, num_tokens, now)
        patience_s = PATIENCE * max(choice.load_s, recompute_s)
        patience_s = min(max(patience_s, MIN_PATIENCE_S), pool.transfer_timeout_s)
        is_alone = len(request.group.members) == 1 and not request.sends_kv
        loaded = choice.num_chunks * pool.chunk_tokens
        stop = min(loaded + self._max_step_tokens, num_tokens)
        step_s = self._prefill.seconds(loaded, stop, now)
        layers = layers_before_release(pool.num_layers, choice.load_s, step_s)
        keys = hit.keys[: choice.num_chunks]
        num_blocks = self._blocks.blocks_for(choice.num_chunks * pool.chunk_tokens)
        block_ids = tuple(request.block_ids[:num_blocks])
        self._loads[load_id] = _Load(
            request,
            load_id,
            keys,
            hit.sources[: choice.num_chunks],
            first,
            HandedOut.now(block_ids, self._blocks.pool),
            now + choice.load_s,
            now + patience_s + GRACE_S,
        )
        request.pool_load = load_id
        self._queues.dequeue(request)
        self._queues.transfer(request)
        pool.start_load(
            LoadRequest(
                load_id,
                request.request_id,
                keys,
                hit.sources[: choice.num_chunks],
                first,
                request.num_computed - first * pool.chunk_tokens,
                block_ids,
                patience_s,
                layers if is_alone else None,
                step_s,
            )
        )

    # -- ending ---------------------------------------------------------------------------------

    def released(self, event: LoadReleased) -> None:
        """Steps may run the request from now on; ranks wait for its layers."""
        load = self._loads.get(event.load_id)
        if load is None or not self._is_loading(load):
            return
        self.num_unproven += 1
        load.request.is_unproven = True
        self._join_in(load.request, event.num_chunks)

    def hold(self, request: Request, sequence: ScheduledSequence, result: StepResult) -> None:
        """A step ran an unproven request: what came of it waits for the load."""
        assert request.pool_load is not None, "an unproven request has a load"
        self._loads[request.pool_load].held.append((sequence, result))

    def ended(
        self, event: PoolLoadEnded
    ) -> Sequence[tuple[Request, ScheduledSequence, StepResult]]:
        """A load is over and drained.

        Returns:
            What came of steps that ran on it, to be taken in now.
        """
        load = self._loads.pop(event.load_id, None)
        if load is None:
            return ()
        request = load.request
        was_loading = self._is_loading(load)
        if event.error is None:
            self._offer_copies(load, event.num_chunks)
        # Else it was given up, and the request may be running on another one by now.
        is_its = request.pool_load == load.load_id
        if is_its:
            request.pool_load = None
        self._unpark(load)
        if self._outputs.is_draining(load.load_id):
            self._outputs.end_drain(load.load_id)
            if is_its:
                self._end_unproven(request)
        elif request.is_unproven:
            return self._prove(load, event)
        elif was_loading:
            if event.error is not None:
                logger.info("request %s: from the pool: %s", request.request_id, event.error)
            self._join_in(request, event.num_chunks)
            self._blocks.publish(request, shares=False)
        return ()

    def expire(self) -> None:
        """Give up look-ups and loads that take too long."""
        now = self._queues.now
        for request in list(self._queues.looking_up):
            if request.deadline is not None and now > request.deadline:
                if parked := self._parked.pop(request.request_id, None):
                    self._hits[request.request_id] = parked[1]
                self._end_look_up(request)
        for load in list(self._loads.values()):
            if now > load.patience_end and self._is_loading(load):
                self._give_up(load, "the pool is too slow; computing its prompt")

    def give_up_batch(self) -> None:
        """Somebody waits for blocks: give up the least urgent load of batch work, which no step
        runs on, unless the one before has yet to be drained. It begins anew when there is room."""
        if any(self._outputs.is_draining(load_id) for load_id in self._loads):
            return
        batch = [each for each in self._loads.values() if is_batch(each.request)]
        loading = [load for load in batch if self._is_loading(load)]
        if loading:
            load = max(loading, key=lambda load: priority_key(load.request))
            self._give_up(load, "its blocks are for a request that somebody waits for")
            self._hits[load.request.request_id] = _Hit(load.request, load.keys, load.sources)

    def recompute(self, request: Request) -> None:
        """Its load has failed, and no step in flight runs it: its prompt is computed."""
        request.has_wrong_kv = False
        request.num_output_placeholders = 0
        request.num_saved = request.num_offered = 0
        self._queues.release_followers(request)
        self._queues.dequeue(request)
        self._queues.forget(request)
        self._blocks.release(request)
        self._queues.wait(request)

    def _offer_copies(self, load: _Load, num_chunks: int) -> None:
        """What came from other stores goes to the own one, where it is worth its room there."""
        pool, now = self._pool, self._queues.now
        remote = [p for p in range(load.first, num_chunks) if load.sources[p].store]
        if not remote:
            return
        size, position = pool.chunk_tokens, remote[0]
        refetch_s = pool.load_costs.seconds(load.sources[position], pool.chunk_bytes, now)
        recompute_s = self._prefill.seconds(position * size, (position + 1) * size, now)
        terms = CopyTerms(1, max(refetch_s, MIN_COST_S), max(recompute_s, MIN_COST_S))
        keys = load.keys[:num_chunks]
        self._saves.offer_copies(load.request, keys, position, load.blocks, terms)

    def _is_loading(self, load: _Load) -> bool:
        request = load.request
        is_its = request.pool_load == load.load_id
        return is_its and request.state is RequestStatus.TRANSFERRING

    def _join_in(self, request: Request, num_chunks: int) -> None:
        """It goes on from what is there: what the device had, at least."""
        self._queues.dequeue(request)
        num_loaded = num_chunks * self._pool.chunk_tokens
        request.num_computed = max(request.num_computed, num_loaded)
        if not request.num_output_tokens:
            request.num_cached_tokens = request.num_computed
        request.num_saved = max(request.num_saved, request.num_computed)
        request.num_offered = max(request.num_offered, request.num_computed)
        request.loaded = self._queues.now
        self._queues.wait(request)

    def _prove(
        self, load: _Load, event: PoolLoadEnded
    ) -> Sequence[tuple[Request, ScheduledSequence, StepResult]]:
        request = load.request
        self._end_unproven(request)
        self._queues.release_followers(request)  # whom its logits have not been kept for
        if request.state is not RequestStatus.FINISHED:
            if event.error is None:
                self._blocks.publish(request)
            else:
                name = request.request_id
                logger.info("request %s: from the pool: %s; computing it", name, event.error)
                request.has_wrong_kv = True
                if request.state is not RequestStatus.RUNNING:
                    self.recompute(request)
        return [(request, sequence, result) for sequence, result in load.held]

    def _end_unproven(self, request: Request) -> None:
        self.num_unproven -= request.is_unproven
        request.is_unproven = False

    def _give_up(self, load: _Load, reason: str) -> None:
        request = load.request
        logger.info("request %s: %s", request.request_id, reason)
        self._pool.cancel_load(load.load_id)
        self._queues.release_followers(request)
        self._queues.dequeue(request)
        self._outputs.drain(request, load.load_id)
        request.pool_load = None
        self._queues.wait(request)

    def _unpark(self, load: _Load) -> None:
        """Who waited for this load looks again at what the device has, and what is missing."""
        waiting = [name for name, (other, _) in self._parked.items() if other is load]
        for name in waiting:
            _, hit = self._parked.pop(name)
            if hit.request.state is RequestStatus.LOOKING_UP:
                self._hits[name] = hit
                self._end_look_up(hit.request)


def _num_equal(first: Sequence[bytes], second: Sequence[bytes]) -> int:
    """How many leading keys two sequences share. Keys are chained: the last equal one says it."""
    low, high = 0, min(len(first), len(second))
    while low < high:
        middle = (low + high + 1) // 2
        if first[middle - 1] == second[middle - 1]:
            low = middle
        else:
            high = middle - 1
    return low
