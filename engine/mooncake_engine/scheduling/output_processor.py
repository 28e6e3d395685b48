"""Turns sampled tokens into updates of requests, ends requests, and frees or holds their blocks."""

from __future__ import annotations

from collections.abc import Iterator
from operator import attrgetter
from typing import NamedTuple

from msgspec.structs import replace

from mooncake_engine.kv_cache.block_manager import BlockManager
from mooncake_engine.messages import FinishReason, TokenLogprobs, TokenUpdate
from mooncake_engine.scheduling.pool_hits import PoolHits
from mooncake_engine.scheduling.request import Request, RequestStatus
from mooncake_engine.scheduling.request_queues import RequestQueue, RequestQueues
from mooncake_engine.scheduling.scheduler_interface import (
    ChunkPool,
    KVConnector,
    SchedulerLimits,
)
from mooncake_engine.scheduling.step_plan import SampledToken, StepResult

PromptLogprobs = tuple[TokenLogprobs, ...]
_NUM_TIMED_TOKENS = 2
"""Number of first tokens whose updates carry times: a peer's first token precedes the load, so the
times of the load come with the second one."""


class LeasedTables:
    """The block tables of finished prompts that peers have yet to read.

    Tables share the blocks of equal prefixes, so the blocks are counted as tables come and go.

    Args:
        num_blocks: number of blocks on the device.

    Attributes:
        num_blocks: how many blocks are in at least one of the tables.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = 0
        self._tables: dict[str, list[int]] = {}
        self._num_leases = [0] * num_blocks

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._tables

    def __iter__(self) -> Iterator[list[int]]:
        return iter(self._tables.values())

    def add(self, request_id: str, table: list[int]) -> None:
        """Add the table of a request that has none here."""
        self._tables[request_id] = table
        num_leases, num_new = self._num_leases, 0
        for block_id in table:
            num_new += not num_leases[block_id]
            num_leases[block_id] += 1
        self.num_blocks += num_new

    def pop(self, request_id: str) -> list[int]:
        """Remove and return a request's table; an empty one if there is none."""
        table = self._tables.pop(request_id, [])
        num_leases, num_gone = self._num_leases, 0
        for block_id in table:
            num_leases[block_id] -= 1
            num_gone += not num_leases[block_id]
        self.num_blocks -= num_gone
        return table


class _DrainingTable(NamedTuple):
    """A block table that a cancelled load may still write to.

    Args:
        block_ids: the table.
        num_unfilled: how many of its blocks the load writes to.
    """

    block_ids: list[int]
    num_unfilled: int


class OutputProcessor:
    """Collects the updates of all requests, and owns the block tables that outlive their requests.

    The scheduler owns one; every part of the scheduler that can end a request uses it.

    Args:
        limits: bounds at which requests end.
        queues: queues of the requests.
        blocks: owner of their block tables.
        connector: holds or sends the KV of prompts for peers; None if no request transfers KV.
        pool: loads KV; None if the instance uses no KVCache pool.
        hits: what the pool has of requests, as long as they wait.
    """

    def __init__(
        self,
        limits: SchedulerLimits,
        queues: RequestQueues,
        blocks: BlockManager,
        connector: KVConnector | None,
        pool: ChunkPool | None,
        hits: PoolHits,
    ) -> None:
        self._pool = pool
        self._hits = hits
        self._limits = limits
        self._queues = queues
        self._blocks = blocks
        self._connector = connector
        self._updates: list[TokenUpdate] = []
        self._leased = LeasedTables(blocks.pool.num_blocks)
        self._draining: dict[str, _DrainingTable] = {}  # load cancelled, but not drained
        self._finished_in_flight: list[Request] = []  # steps in flight write to their blocks
        self._with_limit = RequestQueue(attrgetter("expiry"))

    @property
    def has_updates(self) -> bool:
        """Whether ``take_updates`` would return any."""
        return bool(self._updates)

    @property
    def held_tables(self) -> list[list[int]]:
        """Block tables held for peers, until a cancelled load is drained, or until the last step
        that writes to them completes."""
        unsettled = [request.block_ids for request in self._finished_in_flight]
        draining = [table.block_ids for table in self._draining.values()]
        return [*self._leased, *draining, *unsettled]

    @property
    def num_leased_blocks(self) -> int:
        """Number of blocks that peers have yet to read."""
        return self._leased.num_blocks

    @property
    def num_draining_blocks(self) -> int:
        """Number of blocks that cancelled loads may still write to."""
        return sum([table.num_unfilled for table in self._draining.values()])

    def take_updates(self) -> list[TokenUpdate]:
        """Returns and clears the updates since the last call."""
        updates, self._updates = self._updates, []
        return updates

    def track(self, request: Request) -> None:
        """Start to track a request: set the lengths and stop tokens at which it ends, and watch its
        timeout, if it has one."""
        prompt, sampling = request.num_prompt_tokens, request.sampling
        output_start = prompt - request.spec.num_generated
        longest = self._limits.max_model_len
        if request.keeps_kv:
            longest = min(longest, prompt + 1)
        elif sampling.max_tokens is not None:
            longest = min(longest, output_start + sampling.max_tokens)
        request.max_num_tokens = longest
        request.min_num_tokens = output_start + sampling.min_tokens
        stops = frozenset() if request.sampling.ignore_eos else self._limits.eos_token_ids
        request.stop_token_ids = stops.union(request.sampling.stop_token_ids)
        if request.expiry is not None:
            self._with_limit.push(request)

    def end_overdue(self) -> None:
        """End the requests that have timed out."""
        while (request := self._with_limit.peek()) is not None:
            assert request.expiry is not None, "it has a limit"
            if request.expiry > self._queues.now:
                return
            message = f"not finished within {request.spec.timeout_s:g} s, the request's own timeout"
            update = TokenUpdate(request.request_id, finish=FinishReason.TIMEOUT, error=message)
            self.finish(request, update)

    def report_scores(self, request: Request, start: int, scores: PromptLogprobs) -> None:
        """Report log probabilities of the prompt tokens after ``start``; those that were reported
        before a preemption are not reported again."""
        fresh = scores[request.num_scored - start :]
        if fresh:
            request.num_scored += len(fresh)
            self._updates.append(TokenUpdate(request.request_id, prompt_logprobs=fresh))

    def take_sampled(self, request: Request, result: StepResult) -> None:
        """Process a step's tokens for a request, or its failure.

        The common case, a single token without anything else to report, is handled inline, since it
        occurs once per running request and step."""
        name = request.request_id
        if name in result.grammar_failed:
            self.fail(request, result.grammar_failed[name], FinishReason.GRAMMAR)
            return
        if name in result.failed:
            self.fail(request, result.failed[name])
            return
        token_ids, token_id = request.token_ids, result.plain_tokens.get(name)
        num_tokens = len(token_ids) + 1
        if (
            token_id is None
            or num_tokens >= request.max_num_tokens
            or token_id in request.stop_token_ids
            or num_tokens <= request.num_prompt_tokens + _NUM_TIMED_TOKENS
        ):
            self.append(request, result.tokens_of(name))
            return
        token_ids.append(token_id)
        request.last_logprobs = None
        self._updates.append(TokenUpdate(name, (token_id,)))

    def append(self, request: Request, tokens: tuple[SampledToken, ...]) -> None:
        """Append sampled tokens, up to the one that ends the request; drop the rest."""
        finish = None
        for count, token in enumerate(tokens, start=1):
            request.token_ids.append(token.token_id)
            finish = self._finish_reason(request, token.token_id)
            if finish is not None:
                tokens = tokens[:count]
                break
        request.last_logprobs = tokens[-1].logprobs
        if len(tokens) > 1:  # accepted drafts, whose KV the step has written
            request.num_computed += len(tokens) - 1
            self._blocks.publish(request)
        self._report(request, tokens, finish)

    def report_first(self, request: Request, token: SampledToken) -> None:
        """Report the first token, which a peer sampled and the request holds already."""
        self._report(request, (token,), self._finish_reason(request, token.token_id))

    def _report(
        self, request: Request, tokens: tuple[SampledToken, ...], finish: FinishReason | None
    ) -> None:
        """Report the newest tokens, and end the request if ``finish`` is set."""
        last = tokens[-1]
        token_ids = tuple([token.token_id for token in tokens])
        num_output_tokens = len(request.token_ids) - request.num_prompt_tokens
        is_timed = num_output_tokens < len(tokens) + _NUM_TIMED_TOKENS
        if finish is None and last.logprobs is None and not is_timed:  # the common case
            self._updates.append(TokenUpdate(request.request_id, token_ids))
            return
        update = TokenUpdate(
            request.request_id,
            token_ids,
            None if last.logprobs is None else _logprobs(tokens),
            num_cached_tokens=request.num_cached_tokens,
            finish=finish,
            stop_token_id=last.token_id if finish is FinishReason.STOP else None,
            times=request.times if is_timed else None,
        )
        if finish is None:
            self._updates.append(update)
        else:
            self.finish(request, update)

    def finish(self, request: Request, update: TokenUpdate) -> None:
        """Remove the request from its queue, free or hold its blocks, and report its end."""
        is_loading = request.status is RequestStatus.TRANSFERRING or request.is_unproven
        self._queues.release_followers(request)
        self._queues.dequeue(request)
        self._queues.finish(request)
        self._hits.drop(request)
        if request in self._with_limit:
            self._with_limit.remove(request)
        if request.num_in_flight:
            self._finished_in_flight.append(request)
            self._cancel_pool_load(request)
        elif request.keeps_kv and _is_complete(request, update):
            update = self._hold_for_peer(request, update)
        elif is_loading:
            self.drain(request, request.pool_load)
            self._cancel_pool_load(request)
            self.cancel_load(request)
            if request.sends_kv and self._connector is not None:
                self._connector.cancel_send(request.request_id)
        else:
            self._free(request)
        self._updates.append(replace(update, times=request.times))

    def complete(self, request: Request) -> None:
        """Free the blocks of a finished request, after the last step that ran it."""
        self._finished_in_flight.remove(request)
        self._free(request)

    def fail(
        self, request: Request, reason: str, finish: FinishReason = FinishReason.ERROR
    ) -> None:
        """End a request that can't continue."""
        update = TokenUpdate(request.request_id, finish=finish, error=reason)
        self.finish(request, update)

    def cancel_load(self, request: Request) -> None:
        """Cancel the request's load at the connector, if it has one."""
        if request.loads_kv and self._connector is not None:
            self._connector.cancel_load(request.request_id)

    def drain(self, request: Request, load_id: str | None = None) -> None:
        """Take a request's block table and hold it until its load is drained, since the load may
        still write to it.

        Args:
            request: the request.
            load_id: id of the load from the KVCache pool; None if the load is from a peer.
        """
        num_unfilled = self._blocks.num_unfilled(request)
        table = _DrainingTable(self._blocks.detach(request), num_unfilled)
        self._draining[load_id or request.request_id] = table

    def is_draining(self, load_id: str) -> bool:
        """Whether blocks are held for a load that is not drained.

        Args:
            load_id: id of the load from the KVCache pool, or of the request that loads from a peer.
        """
        return load_id in self._draining

    def end_drain(self, load_id: str) -> None:
        """Free the blocks of a load that is drained."""
        self._blocks.pool.release(self._draining.pop(load_id).block_ids)

    def _cancel_pool_load(self, request: Request) -> None:
        if request.pool_load is not None and self._pool is not None:
            self._pool.cancel_load(request.pool_load)

    def cancel_send(self, request_id: str) -> None:
        """Stop holding a finished request's KV for a peer, if it is held; ``release`` follows."""
        if request_id in self._leased and self._connector is not None:
            self._connector.cancel_send(request_id)

    def release(self, request_id: str) -> None:
        """Free the blocks held for a peer, which has read them or never will. Idempotent."""
        self._blocks.pool.release(self._leased.pop(request_id))

    def _finish_reason(self, request: Request, token_id: int) -> FinishReason | None:
        num_tokens = len(request.token_ids)
        if num_tokens >= request.min_num_tokens and token_id in request.stop_token_ids:
            return FinishReason.STOP
        return FinishReason.LENGTH if num_tokens >= request.max_num_tokens else None

    def _free(self, request: Request) -> None:
        self._blocks.drop_swapped(request)
        if request.sends_kv:
            assert self._connector is not None, "a request that sends its KV needs a connector"
            self._leased.add(request.request_id, self._blocks.detach(request))
            self._connector.cancel_send(request.request_id)
            return
        self._blocks.release(request)
        self.cancel_load(request)

    def _hold_for_peer(self, request: Request, update: TokenUpdate) -> TokenUpdate:
        assert self._connector is not None, "a request that keeps its KV needs a connector"
        table = self._blocks.detach(request)
        self._leased.add(request.request_id, table)
        params = self._connector.request_finished(request, table)
        return replace(update, kv_transfer_params=params)


def _logprobs(tokens: tuple[SampledToken, ...]) -> tuple[TokenLogprobs, ...]:
    """Returns the tokens' log probabilities; a request has them for all tokens or for none."""
    return tuple([token.logprobs for token in tokens if token.logprobs is not None])


def _is_complete(request: Request, update: TokenUpdate) -> bool:
    """Whether a peer needs the KV of a finished prefill. A peer that gets it while it is computed
    needs it also if the first token is a stop token."""
    is_stop = update.finish is FinishReason.STOP and request.sends_kv
    return update.finish is FinishReason.LENGTH or is_stop
