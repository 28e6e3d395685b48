"""Requests whose prompt's KV comes from a peer: from their arrival until it is there, or is not."""

from __future__ import annotations

import logging

from mooncake_engine.config import LoadFailurePolicy
from mooncake_engine.scheduling.answers import Answers
from mooncake_engine.scheduling.arrivals import Arrivals
from mooncake_engine.scheduling.block_manager import BlockManager
from mooncake_engine.scheduling.kv_connector import KVConnector
from mooncake_engine.scheduling.limits import SchedulerLimits
from mooncake_engine.scheduling.places import Places
from mooncake_engine.scheduling.plan import SampledToken
from mooncake_engine.scheduling.request import FirstToken, Request, RequestState

logger = logging.getLogger(__name__)

LOADING = (RequestState.PREALLOCATING, RequestState.TRANSFERRING)


class PeerLoads:
    """Gives blocks to loads, and takes their ends in.

    Args:
        limits: deadlines, and what becomes of a request whose KV does not arrive.
        places: where requests stand.
        blocks: their tables.
        answers: what they have got.
        connector: moves KV.

    Attributes:
        arrivals: what has come and no plan has named, if plans do.
    """

    def __init__(
        self,
        limits: SchedulerLimits,
        places: Places,
        blocks: BlockManager,
        answers: Answers,
        connector: KVConnector | None,
    ) -> None:
        self._limits = limits
        self._places = places
        self._blocks = blocks
        self._answers = answers
        self._connector = connector
        self.arrivals = Arrivals(blocks)

    def expect(self, request: Request) -> None:
        """A peer's token, if it is here already, is the answer's first, and maybe its last."""
        assert self._connector is not None, "a request with a peer's KV needs a connector"
        self._connector.expect(request)
        request.deadline = request.arrival + self._limits.load_timeout_s
        self._places.preallocate(request)
        if request.first_token is not None:
            first = request.first_token
            self._answers.report_first(request, SampledToken(first.token_id, first.logprobs))

    def start(self, watermark_blocks: int) -> None:
        """Begin loads as long as there are blocks; whoever owns some keeps one more to grow.

        Args:
            watermark_blocks: stay free besides, if anybody owns any.
        """
        places = self._places
        self.arrivals.drop_freed()
        while request := places.preallocating.peek():
            num_holders = len(places.running) + len(places.ready) + len(places.transferring)
            reserve = num_holders + watermark_blocks if num_holders else 0
            if not self._begin(request, reserve):
                return

    def _begin(self, request: Request, reserve: int) -> bool:
        """Load a prompt, or share a sibling's, or wait for one that is on its way."""
        prompt = request.num_prompt_tokens
        if sibling := request.group.find_prompt():
            self._places.leave(request)
            self._share(request, sibling)
        elif leader := _loading(request):
            self._places.follow(request, leader)
        elif self._blocks.begin(request, prompt, cacheable=prompt, reserve=reserve):
            self._places.leave(request)
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
        self._places.transfer(request)
        self._connector.load(request, request.num_computed)

    def ended(
        self,
        request_id: str,
        error: str | None,
        *,
        first_token: FirstToken | None,
        is_drained: bool,
    ) -> None:
        """See ``Scheduler.load_ended``."""
        if self._answers.is_draining(request_id):
            if is_drained:
                self._answers.end_drain(request_id)
            return
        request = self._places.requests.get(request_id)
        if request is None or request.state not in LOADING:
            return
        if error is None:
            if request.state is RequestState.TRANSFERRING:
                self._mark_loaded(request, first_token)
            return
        if not is_drained:
            self._answers.drain(request)
        self.give_up(request, error)

    def give_up(self, request: Request, reason: str) -> None:
        """No KV from the peer, as whoever found out has logged: compute it here, or fail, as
        configured. The load is drained."""
        self._places.disperse(request)
        self._places.leave(request)
        self._blocks.release(request)
        self._answers.cancel_load(request)
        self._places.wait(request)
        name = request.request_id
        if self._limits.load_failure is LoadFailurePolicy.RECOMPUTE:
            logger.info("request %s: %s; computing its prompt here", name, reason)
            return
        self._answers.fail(request, f"the prompt's KV did not arrive: {reason}")

    def expire(self) -> None:
        """Give up on the requests that waited too long for blocks; those that follow a sibling's
        load end with it, at its own deadlines."""
        now = self._places.now
        for request in list(self._places.preallocating):
            if request.deadline and now > request.deadline:
                limit = self._limits.load_timeout_s
                reason = f"no KV blocks came free for a load within {limit:g} s"
                logger.warning("request %s: %s", request.request_id, reason)
                self.give_up(request, reason)

    def _mark_loaded(self, request: Request, first_token: FirstToken | None) -> None:
        self._places.leave(request)
        if self._limits.names_arrivals:
            self.arrivals.note(request)
        request.num_computed = request.num_prompt_tokens
        request.loaded = self._places.now
        self._blocks.publish(request)
        self._places.wait(request)
        for follower in self._places.followers(request):
            self._places.leave(follower)
            self._share(follower, request)
        if first_token is not None:
            request.num_cached_tokens = first_token.num_cached_tokens
            token = SampledToken(first_token.token_id, first_token.logprobs)
            self._answers.append(request, (token,))


def _loading(request: Request) -> Request | None:
    """A sibling whose prompt's KV is coming in."""
    for member in request.group.members:
        if member.state is RequestState.TRANSFERRING and member.block_ids:
            return member
    return None
