"""Tokens in, updates out, and what is settled when an answer ends."""

from __future__ import annotations

import heapq
from dataclasses import replace

from mooncake_engine.messages import FinishReason, TokenLogprobs, TokenUpdate
from mooncake_engine.scheduling.block_manager import BlockManager
from mooncake_engine.scheduling.kv_connector import KVConnector
from mooncake_engine.scheduling.limits import SchedulerLimits
from mooncake_engine.scheduling.places import Places
from mooncake_engine.scheduling.plan import SampledToken
from mooncake_engine.scheduling.request import Request, RequestState

PromptLogprobs = tuple[TokenLogprobs, ...]


class Answers:
    """What every request has got so far, and the tables that outlive their requests.

    Args:
        limits: what ends an answer.
        places: where requests stand.
        blocks: their tables.
        connector: told of prompts that peers wait for.
    """

    def __init__(
        self,
        limits: SchedulerLimits,
        places: Places,
        blocks: BlockManager,
        connector: KVConnector | None,
    ) -> None:
        self._limits = limits
        self._places = places
        self._blocks = blocks
        self._connector = connector
        self._updates: list[TokenUpdate] = []
        self._leased: dict[str, list[int]] = {}  # finished here; a peer has yet to read them
        self._draining: dict[str, list[int]] = {}  # given up while a peer's KV was coming in
        self._unsettled: list[Request] = []  # finished while steps that write to them are in flight
        self._expiries: list[tuple[float, str]] = []  # a heap; requests that ended stay in it

    @property
    def has_updates(self) -> bool:
        """Whether ``take_updates`` has something to tell."""
        return bool(self._updates)

    @property
    def held_tables(self) -> list[list[int]]:
        """Block tables kept for peers, until a cancelled load is drained, or until the last step
        that writes to them is over."""
        unsettled = [request.block_ids for request in self._unsettled]
        return [*self._leased.values(), *self._draining.values(), *unsettled]

    def take_updates(self) -> list[TokenUpdate]:
        """What happened to requests since this was asked last."""
        updates, self._updates = self._updates, []
        return updates

    def watch(self, request: Request) -> None:
        """End the request when it is long enough, and when its time is up, if it has a limit."""
        asked = 1 if request.keeps_kv else request.sampling.max_tokens
        longest = self._limits.max_model_len
        if asked is not None:
            longest = min(longest, request.num_prompt_tokens + asked)
        request.max_num_tokens = longest
        if request.expiry is not None:
            heapq.heappush(self._expiries, (request.expiry, request.request_id))

    def end_overdue(self) -> None:
        """End the requests whose time is up."""
        while self._expiries and self._expiries[0][0] <= self._places.now:
            expiry, request_id = heapq.heappop(self._expiries)
            request = self._places.requests.get(request_id)
            if request is not None and request.expiry == expiry:
                words = f"not finished within {request.spec.timeout_s:g} s, the request's own limit"
                update = TokenUpdate(request_id, finish=FinishReason.TIMEOUT, error=words)
                self.finish(request, update)

    def report_scores(self, request: Request, start: int, scores: PromptLogprobs) -> None:
        """Tell of the prompt tokens after ``start``, but not again after a preemption."""
        fresh = scores[request.num_scored - start :]
        if fresh:
            request.num_scored += len(fresh)
            self._updates.append(TokenUpdate(request.request_id, prompt_logprobs=fresh))

    def append(self, request: Request, tokens: tuple[SampledToken, ...]) -> None:
        """The answer goes on with these tokens, up to one that ends it: the rest is dropped."""
        finish = None
        for count, token in enumerate(tokens, start=1):
            request.token_ids.append(token.token_id)
            finish = self._finish_reason(request, token.token_id)
            if finish is not None:
                tokens = tokens[:count]
                break
        request.last_logprobs = tokens[-1].logprobs
        if len(tokens) > 1:  # drafts, whose KV the step has left
            request.num_computed += len(tokens) - 1
            self._blocks.publish(request)
        self._report(request, tokens, finish)

    def report_first(self, request: Request, token: SampledToken) -> None:
        """The answer begins with a token that a peer sampled and the request has already."""
        self._report(request, (token,), self._finish_reason(request, token.token_id))

    def _report(
        self, request: Request, tokens: tuple[SampledToken, ...], finish: FinishReason | None
    ) -> None:
        """Tell of the newest tokens, and end the request if they are the last."""
        last = tokens[-1]
        update = TokenUpdate(
            request.spec.request_id,
            tuple([token.token_id for token in tokens]),
            None if last.logprobs is None else _logprobs(tokens),
            num_cached_tokens=request.num_cached_tokens,
            finish=finish,
            stop_token_id=last.token_id if finish is FinishReason.STOP else None,
            # until after the second token: a peer's first one comes before the load
            times=request.times if request.num_output_tokens <= len(tokens) + 1 else None,
        )
        if finish is None:
            self._updates.append(update)
        else:
            self.finish(request, update)

    def finish(self, request: Request, update: TokenUpdate) -> None:
        """Take the request out of its place, settle its blocks, and report its end."""
        was = request.state
        is_loading = was is RequestState.TRANSFERRING
        self._places.disperse(request)
        self._places.leave(request)
        self._places.exit(request)
        if request.num_in_flight:
            self._unsettled.append(request)
        elif request.keeps_kv and _is_complete(request, update):
            update = self._hand_over(request, update)
        elif is_loading:
            self.drain(request)
            self.cancel_load(request)
        else:
            self._settle(request)
        self._updates.append(replace(update, times=request.times))

    def settle(self, request: Request) -> None:
        """The last step that ran a finished request is over: its blocks are free."""
        self._unsettled.remove(request)
        self._settle(request)

    def fail(self, request: Request, reason: str) -> None:
        """End a request that can't go on."""
        update = TokenUpdate(request.request_id, finish=FinishReason.ERROR, error=reason)
        self.finish(request, update)

    def cancel_load(self, request: Request) -> None:
        """Tell the connector that nobody waits for this request's KV any more."""
        if request.loads_kv and self._connector is not None:
            self._connector.cancel(request.request_id)

    def drain(self, request: Request) -> None:
        """Keep a table apart, because a peer may still write to it."""
        self._draining[request.request_id] = self._blocks.detach(request)

    def is_draining(self, request_id: str) -> bool:
        """Whether the request's blocks are kept apart."""
        return request_id in self._draining

    def end_drain(self, request_id: str) -> None:
        """Nobody writes there any more: the blocks are free."""
        self._blocks.pool.release(self._draining.pop(request_id))

    def withdraw(self, request_id: str) -> None:
        """Give up what is held for a peer, if anything; ``release`` follows."""
        if request_id in self._leased and self._connector is not None:
            self._connector.withdraw(request_id)

    def release(self, request_id: str) -> None:
        """A peer has read what was held for it, or never will. Idempotent."""
        self._blocks.pool.release(self._leased.pop(request_id, []))

    def _finish_reason(self, request: Request, token_id: int) -> FinishReason | None:
        sampling = request.spec.sampling
        num_tokens = len(request.token_ids)
        if num_tokens - len(request.spec.prompt_token_ids) >= sampling.min_tokens:
            is_eos = token_id in self._limits.eos_token_ids and not sampling.ignore_eos
            if is_eos or token_id in sampling.stop_token_ids:
                return FinishReason.STOP
        return FinishReason.LENGTH if num_tokens >= request.max_num_tokens else None

    def _settle(self, request: Request) -> None:
        if request.sends_kv:
            self._stop_sending(request)
            return
        self._blocks.release(request)
        self._blocks.drop_swapped(request)
        self.cancel_load(request)

    def _stop_sending(self, request: Request) -> None:
        assert self._connector is not None, "a request that sends its KV needs a connector"
        self._leased[request.request_id] = self._blocks.detach(request)
        self._connector.withdraw(request.request_id)

    def _hand_over(self, request: Request, update: TokenUpdate) -> TokenUpdate:
        assert self._connector is not None, "a request that keeps its KV needs a connector"
        table = self._blocks.detach(request)
        self._leased[request.request_id] = table
        params = self._connector.offer(request, table)
        return TokenUpdate(
            update.request_id,
            update.token_ids,
            update.logprobs,
            update.finish,
            num_cached_tokens=update.num_cached_tokens,
            kv_transfer_params=params,
        )


def _logprobs(tokens: tuple[SampledToken, ...]) -> tuple[TokenLogprobs, ...]:
    """Of every token: a request asks for all of them or for none."""
    return tuple([token.logprobs for token in tokens if token.logprobs is not None])


def _is_complete(request: Request, update: TokenUpdate) -> bool:
    """Whether a peer needs the KV; one that awaits it hears of an answer that ends, too."""
    is_stop = update.finish is FinishReason.STOP and request.sends_kv
    return update.finish is FinishReason.LENGTH or is_stop
