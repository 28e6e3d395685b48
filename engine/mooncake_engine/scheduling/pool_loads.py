"""Loads from the KVCache pool: looks prompts up, decides what to load, and runs requests early.

The pool is asked for the prompt of a new request, for a prompt whose KV did not arrive from a peer,
and for the tokens of a preempted request, prompt and output. Chunks that were found are loaded when
the request's turn comes, or earlier if there are free blocks that no more urgent request waits for;
the remaining tokens are computed. Steps may run a request before all layers of its load have
arrived, since ranks wait for each layer before they read it. The results of such a step are
*unproven* until the load has succeeded: they are not reported, and other requests can't share the
blocks. If the load fails, the request starts over and its prompt is computed.
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
from mooncake_engine.scheduling.pool_hits import PoolHit, PoolHits
from mooncake_engine.scheduling.pool_saves import BlockSnapshot, PoolSaves
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
"""Maximum number of loads in flight; more would only divide the link's bandwidth further."""
MIN_TIMEOUT_S = 2.0
"""Minimum timeout of a lookup or a load, in seconds."""
TIMEOUT_FACTOR = 4.0
"""Timeout of a load, as a multiple of its estimate or that of recomputing, whichever is longer."""
MIN_HINT_TIMEOUT_S, MAX_HINT_TIMEOUT_S = 0.05, 1.0
"""Bounds of the lookup timeout at a store that a request names, in seconds."""
MIN_COST_S = 1e-6
"""Minimum cost that a store is given to weigh a copy by, in seconds: it must be positive."""
CHOICE_TTL_S = 0.5
"""Seconds for which the choice between loading and computing is reused while a prompt waits."""
_EXTERNAL_SOURCE = {"dram": "host", "ssd": "disk"}
"""Chunks of the own store, by ``ChunkSource.name``, among ``EXTERNAL_SOURCES``."""
GRACE_S = 0.5
"""Seconds after the ranks' own deadline of a load at which the scheduler gives the load up."""


class LoadDecision(Enum):
    """What happens to a request whose turn has come."""

    COMPUTE = auto()
    """The request is computed: there is nothing to load, or computing is faster."""
    LOAD = auto()
    """The request has left the waiting queue: it loads, or waits for another request's load."""
    WAIT = auto()
    """The request keeps waiting: there are too few free blocks, or too many loads in flight."""


@dataclass(slots=True, eq=False)
class _Load:
    """A load in flight.

    Args:
        request: the request that loads.
        load_id: unique id of the load.
        keys: keys of the leading chunks that the request has after the load.
        sources: sources of these chunks.
        first: index of the first chunk that is loaded; the device has those before it.
        blocks: target blocks, with their allocation counts at the start of the load.
        estimated_end: when the load should complete, in seconds.
        deadline: when it is given up, in seconds.
        held: shares and results of the steps that ran the unproven request, to apply when the load
            has ended.
    """

    request: Request
    load_id: str
    keys: Sequence[bytes]
    sources: Sequence[ChunkSource]
    first: int
    blocks: BlockSnapshot
    estimated_end: float
    deadline: float
    held: list[tuple[ScheduledSequence, StepResult]] = field(default_factory=list)


class PoolLoads:
    """One scheduler's lookups in the KVCache pool and loads from it; owned by ``PoolUse``.

    Args:
        queues: queues of the requests.
        blocks: allocates their block tables.
        outputs: keeps the tables of cancelled loads until they are drained.
        pool: looks up and loads chunks.
        prefill: estimates the cost of computing.
        saves: copies chunks from other stores to the own store.
        hits: keeps what lookups have found.
        max_step_tokens: maximum number of tokens of a prompt in one step.

    Attributes:
        num_unproven: number of requests that steps run before their load has completed.
    """

    def __init__(
        self,
        queues: RequestQueues,
        blocks: BlockManager,
        outputs: OutputProcessor,
        pool: ChunkPool,
        prefill: PrefillCosts,
        saves: PoolSaves,
        hits: PoolHits,
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
        self._lookups: dict[str, Request] = {}
        self._hits = hits
        self._loads: dict[str, _Load] = {}
        self._parked: dict[str, tuple[_Load, PoolHit]] = {}
        self.num_unproven = 0

    def look_up(self, request: Request) -> None:
        """Queue a request without blocks. If the pool has to look up its tokens first, the request
        waits for that; otherwise it waits for its turn."""
        if not self._start_look_up(request):
            self._queues.wait(request)

    def _start_look_up(self, request: Request) -> bool:
        """Look a request up in the pool, if useful; True if it now waits for the answer."""
        if request.awaits_scores or not request.has_verified_kv:
            return False
        num_tokens = len(request.token_ids)
        num_keys = num_loadable_chunks(num_tokens, self._pool.chunk_tokens)
        num_cached = self._blocks.count_cached(request, num_tokens - 1)
        # Requests ahead of it, or those that preempted it, may evict what is cached now.
        is_next = not self._queues.waiting and not request.num_preemptions
        if not num_keys or (is_next and num_keys * self._pool.chunk_tokens <= num_cached):
            return False
        keys = self._pool.keys(request, num_keys)
        load_id = f"{request.request_id}#{next(self._ids)}"
        hints = self._hints(request, num_cached)
        if hints:
            found = self._pool.lookup(load_id, keys, hints, self._hint_timeout_s(request))
        else:
            found = self._pool.lookup(load_id, keys)
        if found is not None:
            self._add_hit(request, keys, found)
            return False
        self._lookups[load_id] = request
        # Not from queues.now alone: in an idle engine that is long ago.
        request.deadline = max(self._queues.now, request.arrival) + MIN_TIMEOUT_S
        self._queues.look_up(request)
        return True

    def _hints(self, request: Request, num_cached: int) -> list[PrefixSource]:
        """Returns the request's hints at stores with more of the prompt than the device has."""
        size = self._pool.chunk_tokens
        hints = request.spec.kv_transfer_params.prefix_sources
        return [hint for hint in hints if hint.num_tokens // size * size > num_cached]

    def _hint_timeout_s(self, request: Request) -> float:
        """Returns the timeout of hinted lookups: the time to compute the prompt, within bounds."""
        if not self._prefill.is_known:
            return MAX_HINT_TIMEOUT_S
        seconds = self._prefill.seconds(0, len(request.token_ids), self._queues.now)
        return min(max(seconds, MIN_HINT_TIMEOUT_S), MAX_HINT_TIMEOUT_S)

    def handle_found(self, event: ChunksFound) -> None:
        """Handle the pool's answer to a lookup."""
        request = self._lookups.pop(event.load_id, None)
        if request is None or request.status is not RequestStatus.LOOKING_UP:
            return
        num_keys = num_loadable_chunks(len(request.token_ids), self._pool.chunk_tokens)
        self._add_hit(request, self._pool.keys(request, num_keys), event.sources)
        self._end_look_up(request)

    def _add_hit(
        self, request: Request, keys: Sequence[bytes], sources: Sequence[ChunkSource]
    ) -> None:
        if sources:
            self._hits.add(PoolHit(request, keys, sources))

    def _end_look_up(self, request: Request) -> None:
        request.deadline = None
        self._queues.dequeue(request)
        self._queues.wait(request)

    def has_hit(self, request: Request) -> bool:
        """Whether the pool has chunks of the request that its turn has not dealt with yet."""
        return request in self._hits

    def decide_load(self, request: Request, reserve: int) -> LoadDecision:
        """Start the load of a request with a hit, or leave the request to be computed.

        Args:
            request: the request whose turn has come; has a hit.
            reserve: number of blocks that must stay free.
        """
        hit = self._hits[request]
        if request.shares_prompt and request.group.find_prompt() is not None:
            self._hits.drop(request)
            return LoadDecision.COMPUTE
        if leader := request.group.find_leader(request):
            self._hits.drop(request)
            self._queues.follow(request, leader)
            return LoadDecision.LOAD
        num_tokens = len(request.token_ids)
        wanted = self._blocks.blocks_for(num_tokens) + reserve
        if self._blocks.lacks_free(request, wanted, num_tokens - 1):
            return LoadDecision.WAIT  # checked first: the usual case under load
        num_cached = self._blocks.count_cached(request, num_tokens - 1)
        choice = self._choose(hit, num_cached)
        if choice.num_chunks * self._pool.chunk_tokens <= num_cached:
            num_found = len(hit.sources) - num_cached // self._pool.chunk_tokens
            self._pool.stats.num_recomputed_chunks += max(num_found, 0)
            self._hits.drop(request)
            return LoadDecision.COMPUTE
        if load := self._find_same_load(hit, choice, num_cached):
            self._park(load, hit)
            return LoadDecision.LOAD
        if len(self._loads) >= MAX_LOADS:
            return LoadDecision.WAIT
        if not self._blocks.allocate(
            request, num_tokens, cacheable=num_tokens - 1, reserve=reserve
        ):
            return LoadDecision.WAIT
        self._hits.drop(request)
        self._start_load(request, hit, choice)
        return LoadDecision.LOAD

    def start_early(self, reserve: int, *, has_batch: bool) -> None:
        """Start loads of waiting requests before their turn, with the blocks that are left.

        Args:
            reserve: blocks that must stay free, besides those that more urgent requests wait for.
            has_batch: whether to start loads of batch work, too. Not while an interactive request
                waits: batch work would take back the blocks that it has just given up for it.
        """
        waiting = self._queues.waiting
        if not self._hits.has_any_in(waiting):
            return
        for request in waiting.in_order():
            if len(self._loads) >= MAX_LOADS or self._blocks.pool.num_free <= reserve:
                return
            if is_batch(request) and not has_batch:  # all behind it are batch work, too
                return
            decision = LoadDecision.COMPUTE
            if request in self._hits:
                decision = self.decide_load(request, reserve)
                if decision is LoadDecision.WAIT or not self._hits.has_any_in(waiting):
                    return
            if decision is LoadDecision.COMPUTE:
                reserve += self._blocks.blocks_for(len(request.token_ids))

    def _choose(self, hit: PoolHit, num_cached: int) -> LoadChoice:
        """Returns the best choice for a prompt with ``num_cached`` tokens on the device; one that
        is at most ``CHOICE_TTL_S`` old is reused."""
        pool, now = self._pool, self._queues.now
        is_fresh = hit.num_cached == num_cached and now - hit.chosen_at <= CHOICE_TTL_S
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

    def _find_same_load(self, hit: PoolHit, choice: LoadChoice, num_cached: int) -> _Load | None:
        """Returns a load in flight that brings the chunks this request would load, sooner than a
        load of its own would (single flight), or None."""
        first, now = num_cached // self._pool.chunk_tokens, self._queues.now
        for load in self._loads.values():
            is_wanted = self._is_loading(load) or load.request.is_unproven
            if not is_wanted or now > load.deadline:
                continue
            # if it is late already, it may take as long again
            remaining_s = abs(load.estimated_end - now)
            if _common_prefix_length(load.keys, hit.keys[: choice.num_chunks]) <= first:
                continue
            # loading the chunks twice would use the link twice and slow both loads down
            if remaining_s + choice.compute_s <= choice.total_s + 2 * choice.load_s:
                return load
        return None

    def _park(self, load: _Load, hit: PoolHit) -> None:
        request = hit.request
        self._pool.stats.num_waits += 1
        self._hits.drop(request)
        self._queues.dequeue(request)
        self._queues.look_up(request)
        request.deadline = load.deadline
        self._parked[request.request_id] = (load, hit)

    def _start_load(self, request: Request, hit: PoolHit, choice: LoadChoice) -> None:
        pool, now = self._pool, self._queues.now
        load_id = f"{request.request_id}#{next(self._ids)}"
        first = request.num_computed // pool.chunk_tokens
        num_tokens = len(request.token_ids)
        recompute_s = self._prefill.seconds(request.num_computed, num_tokens, now)
        timeout_s = TIMEOUT_FACTOR * max(choice.load_s, recompute_s)
        timeout_s = min(max(timeout_s, MIN_TIMEOUT_S), pool.transfer_timeout_s)
        is_alone = len(request.group.members) == 1 and not request.sends_kv
        loaded = choice.num_chunks * pool.chunk_tokens
        stop = min(loaded + self._max_step_tokens, num_tokens)
        step_s = self._prefill.seconds(loaded, stop, now)
        layers = layers_before_release(pool.num_layers, choice.load_s, step_s)
        keys, sources = hit.keys[: choice.num_chunks], hit.sources[: choice.num_chunks]
        num_blocks = self._blocks.blocks_for(choice.num_chunks * pool.chunk_tokens)
        block_ids = tuple(request.block_ids[:num_blocks])
        self._loads[load_id] = _Load(
            request=request,
            load_id=load_id,
            keys=keys,
            sources=sources,
            first=first,
            blocks=BlockSnapshot.now(block_ids, self._blocks.pool),
            estimated_end=now + choice.load_s,
            deadline=now + timeout_s + GRACE_S,
        )
        request.pool_load = load_id
        self._queues.dequeue(request)
        self._queues.transfer(request)
        pool.start_load(
            LoadRequest(
                load_id=load_id,
                request_id=request.request_id,
                keys=keys,
                sources=sources,
                first_chunk=first,
                skipped_tokens=request.num_computed - first * pool.chunk_tokens,
                block_ids=block_ids,
                timeout_s=timeout_s,
                release_layers=layers if is_alone else None,
                compute_s=step_s,
            )
        )

    def handle_released(self, event: LoadReleased) -> None:
        """Let steps run the request from now on; ranks wait for each layer of its load."""
        load = self._loads.get(event.load_id)
        if load is None or not self._is_loading(load):
            return
        self.num_unproven += 1
        load.request.is_unproven = True
        self._requeue_loaded(load, event.num_chunks)

    def hold(self, request: Request, sequence: ScheduledSequence, result: StepResult) -> None:
        """Keep a step's result for an unproven request until its load has ended."""
        assert request.pool_load is not None, "an unproven request has a load"
        self._loads[request.pool_load].held.append((sequence, result))

    def handle_ended(
        self, event: PoolLoadEnded
    ) -> Sequence[tuple[Request, ScheduledSequence, StepResult]]:
        """Handle the end of a load, which is drained.

        Returns:
            The results of the steps that ran on it, to be applied now.
        """
        load = self._loads.pop(event.load_id, None)
        if load is None:
            return ()
        request = load.request
        was_loading = self._is_loading(load)
        if event.error is None:
            self._offer_copies(load, event.num_chunks)
        # Otherwise the load was given up, and the request may have started another one since.
        is_its = request.pool_load == load.load_id
        if is_its:
            request.pool_load = None
        self._requeue_parked(load)
        if self._outputs.is_draining(load.load_id):
            self._outputs.end_drain(load.load_id)
            if is_its:
                self._end_unproven(request)
        elif request.is_unproven:
            return self._prove(load, event)
        elif was_loading:
            if event.error is not None:
                logger.info(
                    "request %s: load from the KVCache pool: %s", request.request_id, event.error
                )
            self._requeue_loaded(load, event.num_chunks)
            self._blocks.publish(request, shares=False)
        return ()

    def expire(self) -> None:
        """Give up the lookups and loads that have timed out."""
        now = self._queues.now
        for request in list(self._queues.looking_up):
            if request.deadline is not None and now > request.deadline:
                if parked := self._parked.pop(request.request_id, None):
                    self._hits.add(parked[1])
                self._end_look_up(request)
        for load in list(self._loads.values()):
            if now > load.deadline and self._is_loading(load):
                reason = "load from the KVCache pool timed out; computing its prompt"
                self._give_up(load, reason, is_late=True)

    def give_up_batch(self) -> None:
        """Give up the least urgent load of batch work, to free blocks for an interactive request.

        Loads that steps run on are kept. Nothing is given up until the previous one is drained. The
        batch request keeps its hit, and loads again once there are free blocks."""
        if any(self._outputs.is_draining(load_id) for load_id in self._loads):
            return
        batch = [each for each in self._loads.values() if is_batch(each.request)]
        loading = [load for load in batch if self._is_loading(load)]
        if loading:
            load = max(loading, key=lambda load: priority_key(load.request))
            self._give_up(load, "load cancelled: an interactive request needs the blocks")
            self._hits.add(PoolHit(load.request, load.keys, load.sources))

    def recompute(self, request: Request) -> None:
        """Requeue a request to be computed: its load has failed, and no step in flight runs it."""
        request.has_wrong_kv = False
        request.num_output_placeholders = 0
        request.num_saved = request.num_offered = 0
        self._queues.release_followers(request)
        self._queues.dequeue(request)
        self._queues.forget(request)
        self._blocks.release(request)
        self._queues.wait(request)

    def _offer_copies(self, load: _Load, num_chunks: int) -> None:
        """Offer the own store copies of the chunks that came from other stores; the store decides
        by cost whether to keep them."""
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
        return is_its and request.status is RequestStatus.TRANSFERRING

    def _requeue_loaded(self, load: _Load, num_chunks: int) -> None:
        """Requeue a request, to continue behind the chunks that were loaded or that the device had
        already."""
        request, size = load.request, self._pool.chunk_tokens
        self._queues.dequeue(request)
        for chunk in range(load.first, num_chunks):
            source = _EXTERNAL_SOURCE.get(load.sources[chunk].name, "external_unspecified")
            num_tokens = (chunk + 1) * size - max(chunk * size, request.num_computed)
            known = request.prompt_hits.get(source, 0)
            request.prompt_hits[source] = known + max(num_tokens, 0)
        num_loaded = num_chunks * size
        request.num_computed = max(request.num_computed, num_loaded)
        request.note_cached(request.num_computed)
        request.num_saved = max(request.num_saved, request.num_computed)
        request.num_offered = max(request.num_offered, request.num_computed)
        if request.scheduled_at is None:
            request.loaded_at = self._queues.now
        self._queues.wait(request)

    def _prove(
        self, load: _Load, event: PoolLoadEnded
    ) -> Sequence[tuple[Request, ScheduledSequence, StepResult]]:
        request = load.request
        self._end_unproven(request)
        self._queues.release_followers(request)  # its logits have not been kept for them
        if request.status is not RequestStatus.FINISHED:
            if event.error is None:
                self._blocks.publish(request)
            else:
                logger.info(
                    "request %s: load from the KVCache pool: %s; computing its prompt",
                    request.request_id,
                    event.error,
                )
                request.has_wrong_kv = True
                if request.status is not RequestStatus.RUNNING:
                    self.recompute(request)
        return [(request, sequence, result) for sequence, result in load.held]

    def _end_unproven(self, request: Request) -> None:
        self.num_unproven -= request.is_unproven
        request.is_unproven = False

    def _give_up(self, load: _Load, reason: str, *, is_late: bool = False) -> None:
        request = load.request
        logger.info("request %s: %s", request.request_id, reason)
        self._pool.cancel_load(load.load_id, is_late=is_late)
        self._queues.release_followers(request)
        self._queues.dequeue(request)
        self._outputs.drain(request, load.load_id)
        request.pool_load = None
        self._queues.wait(request)

    def _requeue_parked(self, load: _Load) -> None:
        """Requeue the requests that waited for this load; their turn decides anew what to load."""
        waiting = [name for name, (other, _) in self._parked.items() if other is load]
        for name in waiting:
            _, hit = self._parked.pop(name)
            if hit.request.status is RequestStatus.LOOKING_UP:
                self._hits.add(hit)
                self._end_look_up(hit.request)


def _common_prefix_length(first: Sequence[bytes], second: Sequence[bytes]) -> int:
    """Returns how many leading keys two sequences share, by bisection: keys are chained, so equal
    keys imply equal keys before them."""
    low, high = 0, min(len(first), len(second))
    while low < high:
        middle = (low + high + 1) // 2
        if first[middle - 1] == second[middle - 1]:
            low = middle
        else:
            high = middle - 1
    return low
