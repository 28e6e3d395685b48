"""Continuous batching: which tokens of which requests run in the next step.

There are no prefill and decode phases: in each step every running request gets tokens until its
KV has caught up with its tokens, within a budget; long prompts run in chunks (after vLLM v1 and
Sarathi-Serve). When blocks run out the least urgent request gives its blocks back and starts
over. Pure: no torch, no clock, no I/O; a connector that moves KV is an argument.
"""

from __future__ import annotations

import heapq
import logging
from dataclasses import dataclass, replace

from mooncake_engine.config import LoadFailurePolicy
from mooncake_engine.messages import FinishReason, TokenUpdate
from mooncake_engine.scheduling.block_manager import BlockManager
from mooncake_engine.scheduling.kv_connector import KVConnector
from mooncake_engine.scheduling.plan import SampledToken, StepPlan, StepResult
from mooncake_engine.scheduling.queue import RequestQueue, urgency
from mooncake_engine.scheduling.request import FirstToken, Request, RequestState
from mooncake_engine.scheduling.step_builder import StepBuilder

logger = logging.getLogger(__name__)

LOADING = (RequestState.PREALLOCATING, RequestState.TRANSFERRING)


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    """What bounds a step and a request.

    Args:
        max_num_seqs: sequences in one step.
        max_num_batched_tokens: tokens in one step.
        max_model_len: tokens of one sequence; the pool has room for at least one such.
        eos_token_ids: tokens that end an answer.
        load_failure: what becomes of a request whose KV does not arrive.
        load_timeout_s: how long a request may wait for blocks to load KV into.
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    eos_token_ids: frozenset[int]
    load_failure: LoadFailurePolicy = LoadFailurePolicy.RECOMPUTE
    load_timeout_s: float = 120.0


class Scheduler:
    """Queues, budgets and preemption.

    Args:
        limits: bounds.
        blocks: the block tables.
        connector: moves KV; None where no request asks for it.
    """

    def __init__(
        self, limits: SchedulerLimits, blocks: BlockManager, connector: KVConnector | None = None
    ) -> None:
        self.limits = limits
        self.blocks = blocks
        self.num_preemptions = 0
        self._connector = connector
        self._requests: dict[str, Request] = {}
        self._running: list[Request] = []
        self._waiting = RequestQueue()
        self._ready = RequestQueue()  # own blocks with loaded KV; go before the waiting ones
        self._preallocating = RequestQueue()
        self._transferring: dict[str, Request] = {}
        self._draining: dict[str, list[int]] = {}  # aborted while a peer's KV was coming in
        self._leased: dict[str, list[int]] = {}  # finished here; a peer has yet to read them
        self._updates: list[TokenUpdate] = []
        self._worker_knows: set[str] = set()
        self._retired: list[str] = []
        self._expiries: list[tuple[float, str]] = []  # a heap; requests that ended stay in it
        self._step = 0
        self._now = 0.0

    @property
    def num_running(self) -> int:
        """Requests that take part in steps."""
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        """Requests that wait: for their turn, for blocks, or for KV."""
        return len(self._requests) - len(self._running)

    @property
    def has_work(self) -> bool:
        """Whether ``schedule`` might plan something or ``update`` might report something."""
        queued = len(self._running) + len(self._waiting) + len(self._ready)
        return bool(queued or len(self._preallocating) or self._updates or self._retired)

    @property
    def num_held_tables(self) -> int:
        """Block tables kept for peers or until a cancelled load is drained."""
        return len(self._leased) + len(self._draining)

    # --- requests come and go ------------------------------------------------------------

    def add(self, request: Request) -> None:
        """Take a request in. Its id is not in use, its prompt fits the model."""
        self._requests[request.request_id] = request
        if request.expiry is not None:
            heapq.heappush(self._expiries, (request.expiry, request.request_id))
        if request.loads_kv:
            self._expect_kv(request)
            return
        if request.sends_kv:
            assert self._connector is not None, "a request that sends its KV needs a connector"
            self._connector.announce(request)
        self._enqueue(request)

    def abort(self, request_id: str) -> None:
        """End a request in whatever state it is, or what is still held for it. Idempotent."""
        request = self._requests.get(request_id)
        if request is not None:
            self._finish(request, TokenUpdate(request_id, finish=FinishReason.ABORT))
        elif request_id in self._leased and self._connector is not None:
            self._connector.withdraw(request_id)

    def expire(self, now: float) -> None:
        """End the requests whose time is up; fail those that waited too long for blocks to load
        KV into. To be called before every step: ``now`` is when it begins."""
        self._now = now
        self._end_overdue()
        for request in [r for r in self._preallocating if r.deadline and now > r.deadline]:
            self._give_up_load(
                request,
                f"no KV blocks came free for a load within {self.limits.load_timeout_s:g} s",
            )

    def _end_overdue(self) -> None:
        while self._expiries and self._expiries[0][0] <= self._now:
            expiry, request_id = heapq.heappop(self._expiries)
            request = self._requests.get(request_id)
            if request is not None and request.expiry == expiry:
                words = f"not finished within {request.spec.timeout_s:g} s, the request's own limit"
                update = TokenUpdate(request_id, finish=FinishReason.TIMEOUT, error=words)
                self._finish(request, update)

    def load_ended(
        self,
        request_id: str,
        error: str | None,
        *,
        first_token: FirstToken | None = None,
        is_drained: bool = True,
    ) -> None:
        """A load is over: its KV is complete if ``error`` is None, else unusable.

        Args:
            request_id: whose load; unknown ones are normal.
            error: why it failed.
            first_token: the peer's token, if it comes with the KV.
            is_drained: False if the peer may still write into the blocks: they are kept apart
                until this is called again, drained.
        """
        if request_id in self._draining:
            if is_drained:
                self.blocks.pool.release(self._draining.pop(request_id))
            return
        request = self._requests.get(request_id)
        if request is None or request.state not in LOADING:
            return
        if error is None:
            if request.state is RequestState.TRANSFERRING:
                self._mark_loaded(request, first_token)
            return
        if not is_drained:
            self._draining[request_id] = self.blocks.detach(request)
        self._give_up_load(request, error)

    def release(self, request_id: str) -> None:
        """A peer has read what was held for it, or never will: the blocks are free. Idempotent."""
        self.blocks.pool.release(self._leased.pop(request_id, []))

    # --- one step --------------------------------------------------------------------------

    def schedule(self) -> StepPlan:
        """Plan the next step; the plan may be empty."""
        step = StepBuilder(self.limits.max_num_batched_tokens)
        if self._continue_running(step):
            self._admit(step)
            self._start_loads()
        plan = step.build(self._step, tuple(self._retired))
        self._retired.clear()
        self._step += 1
        return plan

    def update(self, plan: StepPlan, result: StepResult) -> list[TokenUpdate]:
        """Take a step's tokens in; returns what happened to each request since the last call."""
        for sequence in plan.sequences:
            request = self._requests.get(sequence.request_id)
            if request is None or request.state is not RequestState.RUNNING:
                continue
            request.num_computed = sequence.start + sequence.count
            self.blocks.publish(request)
            self._report_scores(request, sequence.start, result)
            if sequence.is_sampling and sequence.request_id in result.failed:
                self._fail(request, result.failed[sequence.request_id])
            elif sequence.is_sampling:
                self._append(request, result.tokens[sequence.request_id])
        return self.take_updates()

    def take_updates(self) -> list[TokenUpdate]:
        """What happened outside steps: aborts, failures, first tokens from a peer."""
        updates, self._updates = self._updates, []
        return updates

    def check_integrity(self) -> None:
        """Prove that every block is owned by exactly the tables that list it."""
        tables = [request.block_ids for request in self._requests.values()]
        self.blocks.pool.check_integrity(
            [*tables, *self._leased.values(), *self._draining.values()]
        )
        queued = [*self._waiting, *self._ready, *self._preallocating]
        places = [*self._running, *queued, *self._transferring.values()]
        assert len(places) == len(self._requests), "a request is in two queues or in none"

    # --- running and admitting -------------------------------------------------------------

    def _continue_running(self, step: StepBuilder) -> bool:
        """Give running requests their tokens; False if blocks ran out and one was preempted."""
        preempted = self.num_preemptions
        for request in list(self._running):
            count = min(request.num_pending, step.budget)
            if request.state is not RequestState.RUNNING or not count:
                continue
            fresh = self._grow_or_preempt(request, request.num_computed + count)
            if fresh is not None:
                step.add(request, count, fresh)
        return self.num_preemptions == preempted

    def _grow_or_preempt(self, request: Request, num_tokens: int) -> tuple[int, ...] | None:
        """Extend a running request's table, at the cost of less urgent ones, itself at last."""
        while (fresh := self.blocks.grow(request, num_tokens)) is None:
            victim = self._ready.least_urgent() or self._running[-1]
            self._start_over(victim)
            if victim is request:
                return None
        return fresh

    def _admit(self, step: StepBuilder) -> None:
        while step.budget and len(self._running) < self.limits.max_num_seqs:
            queue = self._ready if len(self._ready) else self._waiting
            request = queue.peek()
            if request is None:
                return
            if not self._place(request):
                if queue is self._ready and not self._running:
                    self._start_over(self._ready.least_urgent() or request)
                    continue
                return
            queue.remove(request)
            self._run(request, step)

    def _place(self, request: Request) -> bool:
        """Blocks for all the tokens that the request has now."""
        num_tokens = len(request.token_ids)
        if request.block_ids:
            return self.blocks.grow(request, num_tokens) is not None
        cacheable = 0 if request.awaits_scores else num_tokens - 1
        if not self.blocks.begin(request, num_tokens, cacheable=cacheable):
            return False
        if not request.num_output_tokens:
            request.num_cached_tokens = request.num_computed
        return True

    def _run(self, request: Request, step: StepBuilder) -> None:
        request.state = RequestState.RUNNING
        request.scheduled = request.scheduled or self._now
        self._running.append(request)
        self._running.sort(key=urgency)
        self._worker_knows.add(request.request_id)
        step.admit(request)
        step.add(request, min(request.num_pending, step.budget))

    def _start_over(self, victim: Request) -> None:
        """Preemption by recompute: give the blocks back and queue again, in the old place."""
        if victim.state is RequestState.RUNNING:
            self._running.remove(victim)
        else:
            self._ready.remove(victim)
        self.num_preemptions += 1
        self._forget_on_worker(victim)
        self.blocks.release(victim)
        self._enqueue(victim)

    def _enqueue(self, request: Request) -> None:
        request.state = RequestState.WAITING
        self._waiting.push(request)

    # --- KV from a peer --------------------------------------------------------------------

    def _expect_kv(self, request: Request) -> None:
        """A peer's token, if it is here already, is the answer's first, and maybe its last."""
        assert self._connector is not None, "a request with a peer's KV needs a connector"
        self._connector.expect(request)
        request.state = RequestState.PREALLOCATING
        request.deadline = request.arrival + self.limits.load_timeout_s
        self._preallocating.push(request)
        if request.first_token is not None:
            first = request.first_token
            self._report(request, SampledToken(first.token_id, first.logprobs))

    def _start_loads(self) -> None:
        """Give blocks to those whose KV waits at a peer; others keep a block each to grow."""
        while (request := self._preallocating.peek()) and not len(self._waiting):
            holders = len(self._running) + len(self._ready) + len(self._transferring)
            prompt = request.num_prompt_tokens
            if not self.blocks.begin(request, prompt, cacheable=prompt, reserve=holders):
                return
            self._preallocating.remove(request)
            request.state = RequestState.TRANSFERRING
            request.load_started = self._now
            self._transferring[request.request_id] = request
            assert self._connector is not None
            self._connector.load(request, request.num_computed)

    def _mark_loaded(self, request: Request, first_token: FirstToken | None) -> None:
        self._leave_queue(request)
        request.num_computed = request.num_prompt_tokens
        request.loaded = self._now
        self.blocks.publish(request)
        request.state = RequestState.WAITING
        self._ready.push(request)
        if first_token is not None:
            request.num_cached_tokens = first_token.num_cached_tokens
            self._append(request, SampledToken(first_token.token_id, first_token.logprobs))

    def _give_up_load(self, request: Request, reason: str) -> None:
        """No KV from the peer: compute it here, or fail, as configured. The load is drained."""
        self._leave_queue(request)
        self.blocks.release(request)
        self._connector_cancel(request)
        self._enqueue(request)
        name = request.request_id
        if self.limits.load_failure is LoadFailurePolicy.RECOMPUTE:
            logger.warning("request %s: %s; computing its prompt here", name, reason)
            return
        self._fail(request, f"the prompt's KV did not arrive: {reason}")

    def _connector_cancel(self, request: Request) -> None:
        if request.loads_kv and self._connector is not None:
            self._connector.cancel(request.request_id)

    # --- tokens and endings ----------------------------------------------------------------

    def _append(self, request: Request, token: SampledToken) -> None:
        request.token_ids.append(token.token_id)
        request.last_logprobs = token.logprobs
        self._report(request, token)

    def _report_scores(self, request: Request, start: int, result: StepResult) -> None:
        """Tell of the prompt tokens after ``start``, but not again after a preemption."""
        scores = result.prompt_logprobs.get(request.request_id, ())
        fresh = scores[request.num_scored - start :]
        if fresh:
            request.num_scored += len(fresh)
            self._updates.append(TokenUpdate(request.request_id, prompt_logprobs=fresh))

    def _report(self, request: Request, token: SampledToken) -> None:
        """Tell of the newest token, and end the request if it was the last."""
        update = TokenUpdate(
            request.request_id,
            (token.token_id,),
            None if token.logprobs is None else (token.logprobs,),
            num_cached_tokens=request.num_cached_tokens,
            finish=self._finish_reason(request, token.token_id),
            stop_token_id=token.token_id if self._is_stop(request, token.token_id) else None,
        )
        if update.finish is None:
            self._updates.append(update)
        else:
            self._finish(request, update)

    def _is_stop(self, request: Request, token_id: int) -> bool:
        sampling = request.sampling
        if request.num_output_tokens < sampling.min_tokens:
            return False
        is_eos = token_id in self.limits.eos_token_ids and not sampling.ignore_eos
        return is_eos or token_id in sampling.stop_token_ids

    def _finish_reason(self, request: Request, token_id: int) -> FinishReason | None:
        if self._is_stop(request, token_id):
            return FinishReason.STOP
        limit = request.sampling.max_tokens
        at_limit = limit is not None and request.num_output_tokens >= limit
        if at_limit or request.keeps_kv or len(request.token_ids) >= self.limits.max_model_len:
            return FinishReason.LENGTH
        return None

    def _finish(self, request: Request, update: TokenUpdate) -> None:
        """Take the request out of its queue, settle its blocks, and report its end."""
        was = request.state
        self._leave_queue(request)
        request.state = RequestState.FINISHED
        del self._requests[request.request_id]
        self._forget_on_worker(request)
        if request.keeps_kv and self._is_complete(request, update):
            update = self._hand_over(request, update)
        elif request.sends_kv:
            self._stop_sending(request)
        elif was is RequestState.TRANSFERRING:
            self._draining[request.request_id] = self.blocks.detach(request)
            self._connector_cancel(request)
        else:
            self.blocks.release(request)
            self._connector_cancel(request)
        self._updates.append(replace(update, times=request.times))

    def _fail(self, request: Request, reason: str) -> None:
        update = TokenUpdate(request.request_id, finish=FinishReason.ERROR, error=reason)
        self._finish(request, update)

    def _is_complete(self, request: Request, update: TokenUpdate) -> bool:
        """Whether a peer needs the KV; one that awaits it hears of an answer that ends, too."""
        is_stop = update.finish is FinishReason.STOP and request.sends_kv
        return update.finish is FinishReason.LENGTH or is_stop

    def _stop_sending(self, request: Request) -> None:
        assert self._connector is not None, "a request that sends its KV needs a connector"
        self._leased[request.request_id] = self.blocks.detach(request)
        self._connector.withdraw(request.request_id)

    def _hand_over(self, request: Request, update: TokenUpdate) -> TokenUpdate:
        assert self._connector is not None, "a request that keeps its KV needs a connector"
        table = self.blocks.detach(request)
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

    def _leave_queue(self, request: Request) -> None:
        if request.state is RequestState.RUNNING:
            self._running.remove(request)
        elif request.state is RequestState.PREALLOCATING:
            self._preallocating.remove(request)
        elif request.state is RequestState.TRANSFERRING:
            del self._transferring[request.request_id]
        elif request.state is RequestState.WAITING:
            (self._ready if request.block_ids else self._waiting).remove(request)

    def _forget_on_worker(self, request: Request) -> None:
        if request.request_id in self._worker_knows:
            self._worker_knows.remove(request.request_id)
            self._retired.append(request.request_id)
