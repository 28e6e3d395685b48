"""What all flows share: the fleet, the choice of an instance, retries, release of held KV."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any, Protocol, TypeVar

from mooncake_proxy.budget import RetryBudget
from mooncake_proxy.call import FORWARDED, Call, forwarded_headers
from mooncake_proxy.config import ProxyConfig
from mooncake_proxy.errors import Recomputed, Rejected, UpstreamError, is_leaving
from mooncake_proxy.health import PassiveHealth
from mooncake_proxy.http1.connection import ClientContext
from mooncake_proxy.instances import Fleet, Instance, Role
from mooncake_proxy.metrics import Metrics
from mooncake_proxy.openai import Endpoint, HandOver, encode
from mooncake_proxy.policy import NOTHING_CACHED, POLICIES, Hint
from mooncake_proxy.prefix import PrefixIndex, text_hashes, token_hashes
from mooncake_proxy.rendezvous import PATH, Rendezvous
from mooncake_proxy.tokenizing import (
    MAX_CHARACTERS,
    Tokenize,
    given_token_ids,
    load_tokenizer,
    prompt_text,
)
from mooncake_proxy.tracing import Trace, load_tracing

logger = logging.getLogger(__name__)
T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)
ABORT_TIMEOUT_S = 5.0

Fits = Callable[[Instance], bool]
"""Whether an instance can exchange KV with the one at the other end."""

# Tokenising less than this takes less than handing it to a thread.
INLINE_CHARACTERS = 1000


class Step(Protocol[T_co]):
    """One exchange of a request with an instance."""

    def __call__(self, router: Router, call: Call, instance: Instance, /) -> Awaitable[T_co]:
        """UpstreamError where it failed; of this very instance, if another one may help."""


@dataclass(slots=True)
class Turns:
    """Round-robin counters, one per role."""

    prefill: int = 0
    decode: int = 0

    def next(self, role: Role) -> int:
        """The next turn of this role."""
        if role is Role.PREFILL:
            self.prefill += 1
            return self.prefill
        self.decode += 1
        return self.decode


class Router:
    """The state of one proxy process that requests act on."""

    def __init__(self, config: ProxyConfig, client: ClientContext, *, seed: int | None = None):
        self.config = config
        self.client = client
        # Loop time in seconds.
        self.now = client.loop.time
        self.fleet = Fleet(client)
        self.metrics = Metrics()
        self.budget = RetryBudget(config.retry_ratio, config.retry_reserve)
        self.passive = PassiveHealth(config.eject_after)
        self.prefixes = PrefixIndex()
        self.rendezvous = Rendezvous()
        # Where D reaches this very process; set once it listens.
        self.metaserver_url = ""
        self._rng = Random(seed)
        self._turns = Turns()
        self._prefill_policy = POLICIES[config.prefill_policy]
        self._decode_policy = POLICIES[config.decode_policy]
        policies = (config.prefill_policy, config.decode_policy)
        self._wants_session = "session" in policies
        self._wants_prefix = "prefix" in policies
        self.tokenize: Tokenize | None = None
        if config.tokenizer is not None:
            self.tokenize = load_tokenizer(config.tokenizer)
        # None: requests leave no spans.
        self.tracing = None if config.otlp_endpoint is None else load_tracing(config.otlp_endpoint)
        self._background: set[asyncio.Task[None]] = set()

    def listens_at(self, url: str) -> None:
        """Tell the address under which decode instances reach this process."""
        self.metaserver_url = url.rstrip("/") + PATH

    def prepare(self, call: Call) -> None:
        """What the policies of this proxy want to know about a request, and its span."""
        if self.tracing is not None:
            headers = call.exchange.headers
            call.trace = self.tracing.begin(call.endpoint, call.ask, call.request_id, headers)
        if self._wants_session:
            given = call.exchange.headers.get(b"x-session-id")
            call.session = given.decode("latin-1") if given else call.ask.user
        if self._wants_prefix:
            ids = given_token_ids(call.ask)
            if ids is not None:
                self._expect_hits(call, token_hashes(ids))
            elif self.tokenize is None:
                is_chat = call.endpoint is Endpoint.CHAT
                prompt = call.ask.messages if is_chat else call.ask.prompt
                self._expect_hits(call, text_hashes(bytes(prompt)))

    async def read_prompt(self, call: Call, tokenize: Tokenize) -> None:
        """The rest of `prepare` where there is a tokenizer: text becomes token ids."""
        text = prompt_text(call.endpoint, call.ask)
        if text is None:
            return
        if len(text) < INLINE_CHARACTERS:
            ids = tokenize(text)
        else:
            ids = await self.client.loop.run_in_executor(None, tokenize, text)
        if len(text) < MAX_CHARACTERS:
            call.prompt_tokens = max(1, len(ids))
        self._expect_hits(call, token_hashes(ids))

    def _expect_hits(self, call: Call, hashes: tuple[int, ...]) -> None:
        call.prefix_blocks = hashes
        call.cached_tokens = self.prefixes.cached_tokens(hashes)

    def note_verdict(self, instance: Instance) -> None:
        """Health has changed: a restarted instance has an empty cache."""
        if instance.is_up:
            self.passive.succeeded(instance.name)
        else:
            self.prefixes.forget(instance.name)
            if instance.bootstrap is not None:
                instance.bootstrap.forget()

    # ------------------------------------------------ choice

    def choose(
        self,
        role: Role,
        call: Call,
        tried: Sequence[Instance] = (),
        fits: Fits | None = None,
    ) -> Instance:
        """The instance for this step: not one that already failed it, rather one that fits.
        NoInstance if none lives."""
        live: Sequence[Instance] = self.fleet.require(role)
        if tried:
            live = [instance for instance in live if instance not in tried] or live
        if fits is not None and self.fleet.has_misfits:
            live = [instance for instance in live if fits(instance)] or live
        if len(live) == 1:
            return self._note_blocks(call, live[0])
        hint = Hint(
            call.prompt_tokens,
            self._turns.next(role),
            call.session,
            call.cached_tokens or NOTHING_CACHED,
        )
        policy = self._prefill_policy if role is Role.PREFILL else self._decode_policy
        return self._note_blocks(call, policy(live, hint, self._rng))

    def _note_blocks(self, call: Call, chosen: Instance) -> Instance:
        if call.prefix_blocks:
            self.prefixes.record(call.prefix_blocks, chosen.name)
        return chosen

    # ------------------------------------------------ attempts

    def attempt(
        self, role: Role, call: Call, step: Step[T], fits: Fits | None = None
    ) -> Awaitable[T]:
        """Run `step` on an instance, and on another one for as long as nothing was forwarded.

        Each new try has a new attempt id. It takes from the retry budget, so that a fleet that
        is failing does not get more traffic than a healthy one.
        """
        if call.trace is None:
            return self._attempt(role, call, step, fits)
        return self._traced_attempt(role, call, step, fits, call.trace)

    async def _traced_attempt(
        self, role: Role, call: Call, step: Step[T], fits: Fits | None, trace: Trace
    ) -> T:
        own = forwarded_headers(call.exchange.headers, FORWARDED)
        with trace.stage(role.label) as leg:

            async def watched(router: Router, call: Call, instance: Instance, /) -> T:
                with trace.attempt(leg, instance.spec.origin, call.attempt) as lines:
                    call.forward = own + lines
                    return await step(router, call, instance)

            return await self._attempt(role, call, watched, fits)

    async def _attempt(self, role: Role, call: Call, step: Step[T], fits: Fits | None) -> T:
        tried: list[Instance] = []
        while True:
            instance = self.choose(role, call, tried, fits)
            instance.num_running += 1
            instance.num_prompt_tokens += call.prompt_tokens
            try:
                result = await step(self, call, instance)
            except Recomputed:
                raise  # no failure: the request goes on with a new prefill
            except UpstreamError as error:
                if error.instance != instance.name:
                    raise  # the other side of this attempt failed, not this instance
                self._count_failure(instance, role, error)
                tried.append(instance)
                if not self._may_try_again(role, call, tried, error):
                    raise
                self._note_retry(role, call, error)
            else:
                self.metrics.attempts.add(instance.name, role.label, "ok")
                self.passive.succeeded(instance.name)
                return result
            finally:
                instance.num_running -= 1
                instance.num_prompt_tokens -= call.prompt_tokens
                if instance.is_draining:
                    self.fleet.forget_drained(instance)

    def _note_retry(self, role: Role, call: Call, error: UpstreamError) -> None:
        call.attempt += 1
        self.metrics.retries.add(role.label)
        logger.warning(
            "request %s: %s failed, trying another: %s", call.request_id, role.label, error
        )

    def _may_try_again(
        self, role: Role, call: Call, tried: Sequence[Instance], error: UpstreamError
    ) -> bool:
        if call.is_committed or (isinstance(error, Rejected) and error.is_client_fault):
            return False
        untried = any(instance not in tried for instance in self.fleet.live(role))
        if not untried or self.now() >= call.deadline:
            return False
        if is_leaving(error):  # a fleet that is renewed does not fail: this costs nothing
            return True
        return len(tried) < self.config.max_attempts and self.budget.take()

    def _count_failure(self, instance: Instance, role: Role, error: UpstreamError) -> None:
        self.metrics.attempts.add(instance.name, role.label, error.reason)
        if is_leaving(error) or self.passive.failed(instance.name, error):
            self.fleet.set_up(instance, up=False, error=str(error))

    # ------------------------------------------------ release

    def release(self, instance: Instance, facts: HandOver) -> None:
        """Tell P that nobody comes for this request's KV, of any of its choices. In the
        background: the client is gone or has its answer, and P's lease is the safety net."""
        for remote_request_id in facts.held_request_ids:
            self.spawn(self._abort(instance, remote_request_id))

    async def _abort(self, instance: Instance, remote_request_id: str) -> None:
        body = encode({"request_id": remote_request_id})
        payload = instance.request("/abort", remote_request_id, b"", body)
        try:
            await instance.pool.fetch(payload, self.now() + ABORT_TIMEOUT_S)
            outcome = "200"
        except UpstreamError as error:
            outcome = error.reason
            logger.warning("abort of %s not delivered: %s", remote_request_id, error)
        self.metrics.aborts.add(outcome)

    def spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """A background task that is kept alive, and awaited by `close`."""
        task = self.client.loop.create_task(work)
        self._background.add(task)
        task.add_done_callback(self._reap)
        return task

    def _reap(self, task: asyncio.Task[None]) -> None:
        self._background.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("background task failed", exc_info=error)

    async def close(self) -> None:
        """Let running releases end, then close all connections."""
        if self._background:
            await asyncio.wait(tuple(self._background), timeout=ABORT_TIMEOUT_S)
        if self.tracing is not None:
            await self.client.loop.run_in_executor(None, self.tracing.close)
        self.fleet.close()
