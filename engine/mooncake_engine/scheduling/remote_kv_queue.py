"""Requests that wait for their prompt's KV from a peer."""

from __future__ import annotations

import logging
from collections.abc import Callable

from mooncake_engine.kv_cache.block_manager import BlockManager
from mooncake_engine.messages import TokenLogprobs
from mooncake_engine.scheduling.output_processor import OutputProcessor
from mooncake_engine.scheduling.request import Request, RequestStatus
from mooncake_engine.scheduling.request_queues import RequestQueues, priority_key
from mooncake_engine.scheduling.scheduler_interface import KVConnector, SchedulerLimits
from mooncake_engine.scheduling.step_plan import SampledToken
from mooncake_kv.config import LoadFailurePolicy
from mooncake_kv.params import FirstToken


class ReceivedBlocks:
    """Loaded blocks that are yet to be converted to the workers' layout, each once: what shares one
    later finds it converted, or converted in the same step.

    Args:
        blocks: the tables.
    """

    def __init__(self, blocks: BlockManager) -> None:
        self._blocks = blocks
        self._pending: list[int] = []

    def note(self, request: Request) -> None:
        """A request's load is over; ``num_computed`` still is what was here before."""
        first = self._blocks.blocks_for(request.num_computed)
        self._pending += request.block_ids[first:]

    def take(self) -> tuple[int, ...]:
        """All of them, for the plan that is being made."""
        taken, self._pending = tuple(self._pending), []
        return taken

    def drop_freed(self) -> None:
        """Forget those that were given up before any plan, with what they hold: they are handed out
        to peers again now."""
        references = self._blocks.pool.references.__getitem__
        freed = [block_id for block_id in self._pending if not references(block_id)]
        if freed:
            self._blocks.pool.forget(freed)
            self._pending = [block_id for block_id in self._pending if references(block_id)]


logger = logging.getLogger(__name__)

LOADING = (RequestStatus.PREALLOCATING, RequestStatus.TRANSFERRING)


class RemoteKVQueue:
    """Gives blocks to loads, and takes their ends in.

    Args:
        limits: deadlines, and what becomes of a request whose KV does not arrive.
        queues: where requests stand.
        blocks: their tables.
        outputs: what they have got.
        connector: moves KV.
        wait: queue a request that has to compute its prompt after all.

    Attributes:
        received: what has come and no plan has named, if plans do.
    """

    def __init__(
        self,
        limits: SchedulerLimits,
        queues: RequestQueues,
        blocks: BlockManager,
        outputs: OutputProcessor,
        connector: KVConnector | None,
        wait: Callable[[Request], None],
    ) -> None:
        self._limits = limits
        self._queues = queues
        self._blocks = blocks
        self._outputs = outputs
        self._connector = connector
        self._wait = wait
        self.received = ReceivedBlocks(blocks)

    def expect(self, request: Request) -> None:
        """Take a request in. A peer's token, if it is here already, is the first of the output,
        and maybe the last."""
        assert self._connector is not None, "a request with a peer's KV needs a connector"
        self._connector.on_new_request(request)
        request.deadline = request.arrival + self._limits.load_timeout_s
        self._queues.preallocate(request)
        if request.first_token is not None:
            self._outputs.report_first(request, _sampled(request.first_token))

    def start(self, watermark_blocks: int, before: Request | None = None) -> None:
        """Begin loads as long as there are blocks; one block per running or loading request stays
        free.

        Args:
            watermark_blocks: stay free besides, if anybody owns any.
            before: waits for blocks, too: what is less urgent does not take them from it, and it
                holds up nothing that is more urgent.
        """
        queues = self._queues
        self.received.drop_freed()
        while request := queues.preallocating.peek():
            if before is not None and priority_key(before) < priority_key(request):
                return
            num_holders = len(queues.running) + len(queues.ready) + len(queues.transferring)
            reserve = num_holders + watermark_blocks if num_holders else 0
            if not self._begin(request, reserve):
                return

    def _begin(self, request: Request, reserve: int) -> bool:
        """Load a prompt, or share a sibling's, or wait for one that is on its way."""
        prompt = request.num_prompt_tokens
        sibling = request.group.find_prompt()
        if sibling is not None and self._blocks.may_share_later(sibling):
            self._queues.dequeue(request)
            self._share(request, sibling)
        elif leader := _loading(request):
            self._queues.follow(request, leader)
        elif self._blocks.allocate(request, prompt, cacheable=prompt, reserve=reserve):
            self._queues.dequeue(request)
            self._load(request)
        else:
            return False
        return True

    def _share(self, request: Request, sibling: Request) -> None:
        """Nothing is left to load; the peer still has to hear so."""
        self._blocks.fork(request, sibling)
        self._load(request)

    def _load(self, request: Request) -> None:
        assert self._connector is not None, "a request with a peer's KV needs a connector"
        self._queues.transfer(request)
        self._connector.start_load_kv(request)

    def ended(
        self,
        request_id: str,
        error: str | None,
        *,
        first_token: FirstToken | None,
        is_drained: bool,
    ) -> None:
        if self._outputs.is_draining(request_id):
            if is_drained:
                self._outputs.end_drain(request_id)
            return
        request = self._queues.requests.get(request_id)
        if request is None or request.state not in LOADING or request.pool_load is not None:
            return
        if error is None:
            if request.state is RequestStatus.TRANSFERRING:
                self._mark_loaded(request, first_token)
            return
        if not is_drained:
            self._outputs.drain(request)
        self.give_up(request, error)

    def give_up(self, request: Request, reason: str) -> None:
        """No KV from the peer, which has been logged: compute it here, or fail, as configured. The
        load is drained."""
        self._queues.release_followers(request)
        self._queues.dequeue(request)
        self._blocks.release(request)
        self._outputs.cancel_load(request)
        self._wait(request)
        name = request.request_id
        if self._limits.load_failure is LoadFailurePolicy.RECOMPUTE:
            logger.info("request %s: %s; computing its prompt here", name, reason)
            return
        self._outputs.fail(request, f"the prompt's KV did not arrive: {reason}")

    def expire(self) -> None:
        """Give up on the requests that waited too long for blocks; those that follow a sibling's
        load end with it, at its own deadlines."""
        now = self._queues.now
        for request in list(self._queues.preallocating):
            if request.deadline and now > request.deadline:
                limit = self._limits.load_timeout_s
                reason = f"no KV blocks came free for a load within {limit:g} s"
                logger.warning("request %s: %s", request.request_id, reason)
                self.give_up(request, reason)

    def _mark_loaded(self, request: Request, first_token: FirstToken | None) -> None:
        self._queues.dequeue(request)
        if self._limits.reports_received_blocks:
            self.received.note(request)
        request.num_computed = request.num_received = request.num_prompt_tokens
        request.loaded = self._queues.now
        self._blocks.publish(request, shares=False)
        self._queues.wait(request)
        for follower in self._queues.followers(request):
            self._queues.dequeue(follower)
            if follower.loads_kv:
                self._share(follower, request)
            else:
                self._queues.wait(follower)
        if first_token is not None:
            request.num_cached_tokens = first_token.num_cached_tokens
            if _is_complete(request, first_token):
                self._outputs.append(request, (_sampled(first_token),))
        if not request.num_pending:
            request.num_computed -= 1  # its last token runs again, and the first one is sampled


def _is_complete(request: Request, first: FirstToken) -> bool:
    """Whether a peer's token comes with all that was asked for: vLLM's says nothing of its log
    probabilities."""
    return request.sampling.logprobs is None or first.logprobs is not None


def _sampled(first: FirstToken) -> SampledToken:
    """A peer's first token, as if it had been sampled here."""
    if first.logprobs is None:
        return SampledToken(first.token_id)
    logprob, top = first.logprobs.logprob, first.logprobs.top
    return SampledToken(first.token_id, TokenLogprobs(first.token_id, logprob, top))


def _loading(request: Request) -> Request | None:
    """A sibling whose prompt's KV is coming in from the peer."""
    for member in request.group.members:
        is_pulling = member.state is RequestStatus.TRANSFERRING and member.pool_load is None
        if is_pulling and member.block_ids:
            return member
    return None
