"""The queue of requests that wait for their prompt's KV from a peer."""

from __future__ import annotations

import logging
from collections.abc import Callable

from mooncake_engine.kv_cache.block_manager import BlockManager
from mooncake_engine.messages import LOCAL_HIT, TokenLogprobs
from mooncake_engine.scheduling.output_processor import OutputProcessor
from mooncake_engine.scheduling.request import Request, RequestStatus
from mooncake_engine.scheduling.request_queues import RequestQueues, priority_key
from mooncake_engine.scheduling.scheduler_interface import KVConnector, SchedulerLimits
from mooncake_engine.scheduling.step_plan import SampledToken
from mooncake_kv.config import LoadFailurePolicy
from mooncake_kv.params import FirstToken


class ReceivedBlocks:
    """Loaded blocks that workers have yet to convert to their KV layout.

    Each block is converted once. A request that shares a block later finds it converted, or in
    conversion in the same step.

    Args:
        blocks: owner of the block tables.
    """

    def __init__(self, blocks: BlockManager) -> None:
        self._blocks = blocks
        self._pending: list[int] = []

    def note(self, request: Request) -> None:
        """Add the blocks of a completed load; ``num_computed`` must still be its value before."""
        first = self._blocks.blocks_for(request.num_computed)
        self._pending += request.block_ids[first:]

    def take(self) -> tuple[int, ...]:
        """Returns and clears the blocks, for the plan that is being made."""
        taken, self._pending = tuple(self._pending), []
        return taken

    def drop_freed(self) -> None:
        """Drop the blocks that were freed before any plan listed them, and their cached content,
        since peers may get them next."""
        references = self._blocks.pool.references.__getitem__
        freed = [block_id for block_id in self._pending if not references(block_id)]
        if freed:
            self._blocks.pool.forget(freed)
            self._pending = [block_id for block_id in self._pending if references(block_id)]


logger = logging.getLogger(__name__)

LOADING = (RequestStatus.PREALLOCATING, RequestStatus.TRANSFERRING)


class RemoteKVQueue:
    """Allocates blocks for loads from peers, starts the loads, and handles their ends.

    Args:
        limits: timeout of loads, and the policy for those that fail.
        queues: queues of the requests.
        blocks: allocates their block tables.
        outputs: reports first tokens and failures, and holds blocks until loads are drained.
        connector: moves KV; None if no request transfers KV.
        wait: queues a request that has to compute its prompt after all.

    Attributes:
        received: blocks that peers have written and that no plan has listed yet; stays empty unless
            plans list such blocks.
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
        """Add a request whose KV comes from a peer. If the peer's first token came with the
        request, it is reported now, and may end the request."""
        assert self._connector is not None, "a request with a peer's KV needs a connector"
        self._connector.on_new_request(request)
        request.deadline = request.arrival + self._limits.load_timeout_s
        self._queues.preallocate(request)
        if request.first_token is not None:
            self._outputs.report_first(request, _sampled(request.first_token))

    def start(self, watermark_blocks: int, before: Request | None = None) -> None:
        """Start loads, the most urgent first, while there are free blocks. One block per running,
        ready or loading request stays free.

        Args:
            watermark_blocks: blocks that stay free besides, if any request owns blocks.
            before: most urgent request that waits for blocks for another reason; less urgent loads
                don't start before it.
        """
        queues = self._queues
        self.received.drop_freed()
        while request := queues.preallocating.peek():
            if before is not None and priority_key(before) < priority_key(request):
                return
            num_holders = queues.num_holders
            reserve = num_holders + watermark_blocks if num_holders else 0
            if not self._begin(request, reserve):
                return

    def _begin(self, request: Request, reserve: int) -> bool:
        """Load the prompt, share a sibling's, or follow a sibling whose load is in flight. False if
        too few blocks are free."""
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
        """Share a sibling's prompt. Nothing is left to load, but the peer must be notified."""
        self._blocks.fork(request, sibling)
        self._load(request)

    def _load(self, request: Request) -> None:
        assert self._connector is not None, "a request with a peer's KV needs a connector"
        self._queues.transfer(request)
        self._connector.start_load_kv(request)

    def handle_load_ended(
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
        if request is None or request.status not in LOADING or request.pool_load is not None:
            return
        if error is None:
            if request.status is RequestStatus.TRANSFERRING:
                self._mark_loaded(request, first_token)
            return
        if not is_drained:
            self._outputs.drain(request)
        self.give_up(request, error)

    def give_up(self, request: Request, reason: str) -> None:
        """Compute a request's prompt here, or fail the request, as configured, because its KV does
        not arrive from the peer. The load is drained, and its failure has been logged."""
        self._queues.release_followers(request)
        self._queues.dequeue(request)
        self._blocks.release(request)
        self._outputs.cancel_load(request)
        if self._limits.load_failure is LoadFailurePolicy.RECOMPUTE:
            logger.info("request %s: %s; computing its prompt here", request.request_id, reason)
            self._wait(request)
            return
        self._queues.wait(request)  # a request that fails is taken out of its queue
        self._outputs.fail(request, f"the prompt's KV did not arrive: {reason}")

    def expire(self) -> None:
        """Give up the loads that have waited too long for blocks. Requests that follow a sibling's
        load share its fate, at the load's own deadline."""
        now = self._queues.now
        for request in list(self._queues.preallocating):
            if request.deadline and now > request.deadline:
                limit = self._limits.load_timeout_s
                reason = f"no KV blocks became free for the load within {limit:g} s"
                logger.warning("request %s: %s", request.request_id, reason)
                self.give_up(request, reason)

    def _mark_loaded(self, request: Request, first_token: FirstToken | None) -> None:
        self._queues.dequeue(request)
        if self._limits.reports_received_blocks:
            self.received.note(request)
        prompt, num_local = request.num_prompt_tokens, request.num_computed
        request.prompt_hits = {LOCAL_HIT: num_local, "p2p": prompt - num_local}
        request.num_computed = request.num_received = prompt
        request.loaded_at = self._queues.now
        self._blocks.publish(request, shares=False)
        self._queues.wait(request)
        for follower in self._queues.followers(request):
            self._queues.dequeue(follower)
            # The connector has given up the load of one that was to compute its prompt after all.
            if follower.status is RequestStatus.PREALLOCATING:
                self._share(follower, request)
            else:
                self._queues.wait(follower)
        if first_token is not None:
            request.num_cached_tokens = first_token.num_cached_tokens
            if _is_complete(request, first_token):
                request.has_peer_token = True
                self._outputs.append(request, (_sampled(first_token),))
        if not request.num_pending:
            request.num_computed -= 1  # the prompt's last token runs again, to sample the first


def _is_complete(request: Request, first: FirstToken) -> bool:
    """Whether a peer's token comes with everything that the request asked for; a token from vLLM
    has no log probabilities."""
    return request.sampling.logprobs is None or first.logprobs is not None


def _sampled(first: FirstToken) -> SampledToken:
    """Converts a peer's first token to the form of one that was sampled here."""
    if first.logprobs is None:
        return SampledToken(first.token_id)
    logprob, top = first.logprobs.logprob, first.logprobs.top
    return SampledToken(first.token_id, TokenLogprobs(first.token_id, logprob, top))


def _loading(request: Request) -> Request | None:
    """Returns a sibling whose load of the prompt's KV from the peer is in flight, or None."""
    for member in request.group.members:
        is_pulling = member.status is RequestStatus.TRANSFERRING and member.pool_load is None
        if is_pulling and member.block_ids:
            return member
    return None
