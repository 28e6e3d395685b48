"""The request router: chooses an instance for each attempt, and retries on another.

There is one `RequestRouter` per model (`model_routers.py`). The flows call `attempt` with a step
that exchanges the request with one instance.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass
from functools import partial
from random import Random
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from mooncake_proxy.api.proxied_request import FORWARDED, RequestContext, forwarded_headers
from mooncake_proxy.config import ProxyConfig
from mooncake_proxy.errors import (
    OutOfSockets,
    Quarantined,
    Recomputed,
    UpstreamError,
    is_draining,
    is_loss,
)
from mooncake_proxy.flows.metaserver import Metaserver
from mooncake_proxy.http1.upstream_connection import ClientContext
from mooncake_proxy.ops.proxy_metrics import ProxyMetrics
from mooncake_proxy.ops.proxy_tracing import RequestTrace, load_tracing
from mooncake_proxy.pool.dp_ranks import DP_RANK_HEADER, DPRank
from mooncake_proxy.pool.health_checks import PassiveHealth
from mooncake_proxy.pool.instances import Instance, InstancePool, Role
from mooncake_proxy.routing.policies import (
    NOTHING_CACHED,
    POLICIES,
    RANK_POLICIES,
    RoutingHint,
    least_loaded,
    prefix_affinity,
)
from mooncake_proxy.routing.prefix_index import (
    MAX_CHARACTERS,
    PrefixIndex,
    load_tokenizer,
    prompt_bytes,
    prompt_root,
    prompt_text,
    text_hashes,
    token_hashes,
    token_ids_of,
)
from mooncake_proxy.routing.prompt_tokens import PromptTokens
from mooncake_proxy.routing.retries import MAX_LOSSES, RetryBudget, SuspectBodies
from mooncake_proxy.routing.short_prompts import ShortPrompts

if TYPE_CHECKING:
    from mooncake_proxy.routing.conductor_routing import ConductorRouting

logger = logging.getLogger(__name__)
T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)
ABORT_TIMEOUT_S = 5.0

IsCompatible = Callable[[Instance], bool]
"""Whether an instance can exchange KV with the other side of the request."""

# Texts shorter than this are tokenized on the event loop: a thread hand-off would take longer.
INLINE_CHARACTERS = 1000


class AttemptStep(Protocol[T_co]):
    """One exchange of a request with an instance, such as its prefill."""

    def __call__(
        self, router: RequestRouter, context: RequestContext, instance: Instance, /
    ) -> Awaitable[T_co]:
        """Run the exchange.

        Raises:
            UpstreamError: it failed. The step is retried on another instance only if the error's
                `instance` is this one.
        """


@dataclass(slots=True)
class RoundRobinTurns:
    """Round-robin counters, one per role."""

    prefill: int = 0
    decode: int = 0

    def next(self, role: Role) -> int:
        """Increment and return the counter of `role`."""
        if role is Role.PREFILL:
            self.prefill += 1
            return self.prefill
        self.decode += 1
        return self.decode


class SharedState:
    """What the routers of all models in one proxy process share."""

    def __init__(self, config: ProxyConfig, seed: int | None) -> None:
        self.metrics = ProxyMetrics()
        self.budget = RetryBudget(config.retry_ratio, config.retry_reserve)
        self.suspects = SuspectBodies()
        self.passive = PassiveHealth(config.eject_after)
        self.metaserver = Metaserver()
        self.rng = Random(seed)
        # None: requests are not traced.
        self.tracing = None if config.otlp_endpoint is None else load_tracing(config.otlp_endpoint)
        self.background: set[asyncio.Task[None]] = set()
        # By model name.
        self.tokenizers = {
            model: load_tokenizer(folder) for model, folder in config.tokenizers.items()
        }


class RequestRouter:
    """Routing state of one proxy process for one model: pool, prefix index, conductor.

    Args:
        config: the checked configuration.
        client: shared state of the connections to instances.
        pool: the model's instances.
        shared: what the routers of all models share.
        model: the model's name; empty for instances without one.
    """

    def __init__(
        self,
        config: ProxyConfig,
        client: ClientContext,
        pool: InstancePool,
        shared: SharedState,
        model: str = "",
    ) -> None:
        self.config = config
        self.client = client
        # Loop time in seconds.
        self.now = client.loop.time
        self.metrics = shared.metrics
        self._record_gap = self.metrics.between_tokens_seconds.recorder()
        self._slo_tbt_s = math.inf if config.slo_tbt_s is None else config.slo_tbt_s
        self.budget = shared.budget
        self.suspects = shared.suspects
        self.passive = shared.passive
        self.metaserver = shared.metaserver
        self.tracing = shared.tracing
        self._rng = shared.rng
        self._background = shared.background
        # If the conductor routes, these are used for requests that it does not place.
        self._prefill_policy = POLICIES.get(config.prefill_policy, least_loaded)
        self._decode_policy = POLICIES.get(config.decode_policy, least_loaded)
        policies = (config.prefill_policy, config.decode_policy)
        self._wants_session = "session" in policies
        self._wants_prefix = "prefix" in policies
        # Policies that also choose a data-parallel rank. With the others the instance itself
        # chooses, because it knows the load of its ranks better.
        self._prefill_rank_policy = RANK_POLICIES.get(config.prefill_policy)
        self._decode_rank_policy = RANK_POLICIES.get(config.decode_policy)
        self.model = model
        self.pool = pool
        self.prefixes = PrefixIndex()
        self.short_prompts = ShortPrompts(config.short_prompt_tokens)
        self._turns = RoundRobinTurns()
        self.conductor = self._load_conductor(model)
        # None without a tokenizer.
        self.prompt_tokens: PromptTokens | None = None
        if (tokenizer := shared.tokenizers.get(model)) is not None:
            self.prompt_tokens = PromptTokens(tokenizer, pool, client, self.spawn)

    def _load_conductor(self, model: str) -> ConductorRouting | None:
        """Create the model's conductor if one is configured. Imported only then: it needs numpy."""
        config = self.config.conductor
        if config is None:
            return None
        from mooncake_proxy.routing.conductor_routing import ConductorRouting

        return ConductorRouting(self.pool, config.of_model(model), self._rng, self.now, model)

    def prepare(self, context: RequestContext) -> None:
        """Set the request's session, prefix hashes and trace span, if this proxy uses them."""
        if self.tracing is not None:
            headers = context.request.headers
            context.trace = self.tracing.begin(
                context.endpoint, context.parsed, context.request_id, headers
            )
        if self._wants_session:
            given = context.request.headers.get(b"x-session-id")
            context.session = given.decode("latin-1") if given else context.parsed.user
        if self._wants_prefix:
            ids, root = token_ids_of(context.parsed), prompt_root(context.parsed, self.model)
            if ids is not None:
                self._set_expected_hits(context, token_hashes(ids, root))
            elif self.prompt_tokens is None:
                prompt = prompt_bytes(context.endpoint, context.parsed)
                self._set_expected_hits(context, text_hashes(prompt, root))

    async def tokenize_prompt(self, context: RequestContext, tokens: PromptTokens) -> None:
        """Complete `prepare` if there is a tokenizer: tokenize the prompt.

        Instances that tokenize as the proxy does receive the token ids instead of the text.
        """
        text = prompt_text(context.endpoint, context.parsed)
        if text is None:
            return
        replaces_text = tokens.can_replace(context)
        if not replaces_text:
            text = text[:MAX_CHARACTERS]
        encode = partial(tokens.encode, context, text)
        if len(text) < INLINE_CHARACTERS:
            ids = encode()
        else:
            ids = await self.client.loop.run_in_executor(None, encode)
        if replaces_text and ids:
            tokens.put(context, ids)
        if replaces_text or len(text) < MAX_CHARACTERS:
            context.prompt_tokens = max(1, len(ids))
        context.token_ids = ids
        root = prompt_root(context.parsed, self.model)
        self._set_expected_hits(context, token_hashes(ids, root))

    def _set_expected_hits(self, context: RequestContext, hashes: tuple[int, ...]) -> None:
        context.prefix_blocks = hashes
        context.cached_tokens = self.prefixes.cached_tokens(hashes)

    def takes_short_prompt(self, context: RequestContext) -> bool:
        """Whether D should compute this prompt itself.

        If so, its tokens count as in flight on D until `end_short_prompt` is called.
        """
        if not self.short_prompts.limit:
            return False
        decodes = self.pool.live(Role.DECODE)
        hits = context.cached_tokens or NOTHING_CACHED
        num_cached = max((hits.get(instance.name, 0) for instance in decodes), default=0)
        num_uncached = max(context.prompt_tokens - num_cached, 1)
        if not self.short_prompts.is_short(num_uncached, len(decodes)):
            return False
        self.metrics.fallbacks.add("short_prompt")
        context.num_short_tokens = num_uncached
        self.short_prompts.num_tokens_in_flight += num_uncached
        return True

    @property
    def needs_metaserver(self) -> bool:
        """Whether early pulls only lack an address at which D reaches this process."""
        has_pairs = self.pool.can_disaggregate and self.pool.pulls_early
        return has_pairs and self.config.has_metaserver and not self.metaserver.is_reachable

    def pulls_early(self, context: RequestContext) -> bool:
        """Whether the prompt is long enough for an early pull, and the pool supports that."""
        limit = self.config.early_pull_tokens
        if not self.pool.pulls_early or not limit or (context.parsed.n or 1) > 1:
            return False
        if not self.config.is_reachable or not self.metaserver.is_reachable:
            return False
        hits = context.cached_tokens or NOTHING_CACHED
        num_cached = max((hits.get(p.name, 0) for p in self.pool.live(Role.PREFILL)), default=0)
        return context.prompt_tokens - num_cached >= limit

    def end_short_prompt(self, context: RequestContext) -> None:
        """Note that a short prompt has its first token or has failed. Idempotent."""
        self.short_prompts.num_tokens_in_flight -= context.num_short_tokens
        context.num_short_tokens = 0

    def note_first_token(self, context: RequestContext, now: float) -> None:
        """Record that the first token, or the whole answer, is sent to the client. An answer that
        is not streamed has no first token that anybody sees."""
        if context.parsed.stream:
            self.metrics.first_token_seconds.observe(now - context.arrival)
        context.timing.begin(now)

    def token_clock(self, context: RequestContext) -> Callable[[], None]:
        """Return a callback that records the time between the tokens of one stream.

        It is called for every token, so all lookups are done here, once per stream.
        """
        timing, now = context.timing, self.now
        record_gap, slo_tbt_s = self._record_gap, self._slo_tbt_s

        def note_tokens() -> None:
            last = timing.last_at
            timing.last_at = at = now()
            if last is None:
                timing.first_at = at
                return
            gap = at - last
            timing.num_gaps += 1
            if gap > slo_tbt_s:
                timing.num_late += 1
            record_gap(gap)

        return note_tokens

    def count_objectives(self, context: RequestContext, *, is_whole: bool) -> None:
        """Count whether a finished stream has met each SLO."""
        config, timing = self.config, context.timing
        met = timing.verdicts(
            context.arrival, config.slo_ttft_s, config.slo_tbt_s, is_whole=is_whole
        )
        for objective, is_met in met:
            verdict = "true" if is_met else "false"
            self.metrics.slo_requests.add(context.request_class, objective, verdict)

    def note_verdict(self, instance: Instance) -> None:
        """Process a change of an instance's health. One that is down counts as restarted, and so
        does one that is up again and reports no epoch."""
        if not instance.is_up:
            self._forget_caches(instance)
            return
        instance.num_failures = 0
        if self.conductor is not None and not instance.compatibility.engine_id:
            self.conductor.note_restart(instance)

    def note_restart(self, instance: Instance) -> None:
        """Process a restart of an instance: its caches are empty, and its events begin anew."""
        self._forget_caches(instance)
        if self.conductor is not None:
            self.conductor.note_restart(instance)

    def _forget_caches(self, instance: Instance) -> None:
        ranks = [rank.name for rank in instance.dp_ranks or ()]
        self.prefixes.forget({instance.name, *ranks})
        if instance.bootstrap is not None:
            instance.bootstrap.forget()
        if self.conductor is not None:
            self.conductor.discard_estimate(instance)

    # ------------------------------------------------ the conductor

    @property
    def holds_headers(self) -> bool:
        """Whether response headers are withheld until D has accepted the request.

        Admission may refuse a request as late as that, and then needs to answer with a status.
        """
        return self.conductor is not None and self.conductor.refuses

    # ------------------------------------------------ choice

    def choose(
        self,
        role: Role,
        context: RequestContext,
        tried: Sequence[Instance] = (),
        is_compatible: IsCompatible | None = None,
    ) -> Instance:
        """Choose the instance for a step.

        Args:
            role: the role that the step needs.
            context: the request.
            tried: instances that have failed this step; avoided if there are others.
            is_compatible: whether an instance can exchange KV with the other side of the request;
                incompatible ones are avoided if there are others.

        Raises:
            NoInstance: no instance of this role is live.
        """
        live: Sequence[Instance] = self.pool.require(role)
        if context.routed is not None and self.conductor is not None:
            placed = self.conductor.choose(context, context.routed, role, tried)
            if placed is not None:
                return placed
        if tried:
            live = [instance for instance in live if instance not in tried] or live
        if is_compatible is not None and self.pool.has_incompatible_pairs:
            live = [instance for instance in live if is_compatible(instance)] or live
        if len(live) == 1:
            chosen = live[0]
        else:
            hint = RoutingHint(
                context.prompt_tokens,
                self._turns.next(role),
                context.session,
                context.cached_tokens or NOTHING_CACHED,
            )
            policy = self._prefill_policy if role is Role.PREFILL else self._decode_policy
            chosen = policy(live, hint, self._rng)
        if context.prefix_blocks:
            self.prefixes.record(context.prefix_blocks, chosen.name)
        return chosen

    def _choose_rank(
        self, role: Role, context: RequestContext, instance: Instance
    ) -> DPRank | None:
        """Choose the data-parallel rank for the request, and count the request as in flight there.

        Returns:
            None if the instance should choose. This includes the case that the client names a rank
            that does not exist, which the instance rejects.
        """
        ranks, given = instance.dp_ranks, context.request.headers.get(DP_RANK_HEADER)
        assert ranks is not None, "an instance with one has none to choose from"
        rank = None if given is None else ranks.named(given)
        if rank is None and given is not None and not instance.has_other_ranks:
            return None
        policy = self._prefill_rank_policy if role is Role.PREFILL else self._decode_rank_policy
        cached = context.cached_tokens or NOTHING_CACHED
        if self.conductor is not None:
            held = self.conductor.cached_on_ranks(context, instance)
            policy = prefix_affinity if any(held) else None
            cached = {rank.name: held[rank.number] for rank in ranks if rank.number < len(held)}
        if rank is None and policy is not None:
            hint = RoutingHint(context.prompt_tokens, 0, context.session, cached)
            rank = policy(tuple(ranks), hint, self._rng)
        if rank is None:
            return None
        if context.prefix_blocks:
            self.prefixes.record(context.prefix_blocks, rank.name)
        if context.dp_ranks is None:
            context.dp_ranks = {}
        context.dp_ranks[instance.name] = rank
        rank.num_running += 1
        rank.num_prompt_tokens += context.prompt_tokens
        return rank

    # ------------------------------------------------ attempts

    def attempt(
        self,
        role: Role,
        context: RequestContext,
        step: AttemptStep[T],
        is_compatible: IsCompatible | None = None,
    ) -> Awaitable[T]:
        """Run `step` on an instance; if it fails before anything was forwarded, retry on another.

        Each retry has a new attempt id and takes from the retry budget, so that a failing pool does
        not get more traffic than a healthy one.
        """
        if context.trace is None:
            return self._attempt(role, context, step, is_compatible)
        return self._traced_attempt(role, context, step, is_compatible, context.trace)

    async def _traced_attempt(
        self,
        role: Role,
        context: RequestContext,
        step: AttemptStep[T],
        is_compatible: IsCompatible | None,
        trace: RequestTrace,
    ) -> T:
        own = forwarded_headers(context.request.headers, FORWARDED)
        with trace.stage(role.label) as leg:

            async def watched(
                router: RequestRouter, context: RequestContext, instance: Instance, /
            ) -> T:
                with trace.attempt(leg, instance.spec.origin, context.attempt) as lines:
                    context.forward = own + lines
                    return await step(router, context, instance)

            return await self._attempt(role, context, watched, is_compatible)

    async def _attempt(
        self,
        role: Role,
        context: RequestContext,
        step: AttemptStep[T],
        is_compatible: IsCompatible | None,
    ) -> T:
        tried, num_tokens = list(context.avoided), context.prompt_tokens
        while True:
            instance = self._choose_fit(role, context, tried, is_compatible)
            instance.num_running += 1
            instance.num_prompt_tokens += num_tokens
            rank = None if instance.dp_ranks is None else self._choose_rank(role, context, instance)
            began = self.now()
            try:
                result = await step(self, context, instance)
            except Recomputed:
                raise  # not a failure: the request continues with a new prefill
            except UpstreamError as error:
                if error.instance != instance.name:
                    raise  # the other side of this attempt failed, not this instance
                self._count_failure(instance, role, error)
                if is_loss(error):
                    self._note_loss(context, error, began)
                tried.append(instance)
                if not self._may_retry(role, context, tried, error):
                    raise
                self._note_retry(role, context, error)
            else:
                self.metrics.attempts.add(instance.name, role.label, "ok")
                instance.num_failures = 0
                return result
            finally:
                instance.num_running -= 1
                instance.num_prompt_tokens -= num_tokens
                if rank is not None:
                    rank.num_running -= 1
                    rank.num_prompt_tokens -= num_tokens
                if instance.is_draining:
                    self.pool.finish_drain(instance)

    def _choose_fit(
        self,
        role: Role,
        context: RequestContext,
        tried: Sequence[Instance],
        is_compatible: IsCompatible | None,
    ) -> Instance:
        """Choose the instance for a step as `choose` does, for the rest of an answer among those
        that are known to continue it."""
        if not context.continues_answer:
            return self.choose(role, context, tried, is_compatible)
        unfit = [each for each in self.pool if not each.compatibility.continues_answers]
        chosen = self.choose(role, context, [*tried, *unfit], is_compatible)
        if chosen in unfit:
            raise UpstreamError(chosen.name, "is not known to continue an answer")
        return chosen

    def _note_retry(self, role: Role, context: RequestContext, error: UpstreamError) -> None:
        context.attempt += 1
        self.metrics.retries.add(role.label)
        logger.warning(
            "request %s: %s failed, trying another: %s", context.request_id, role.label, error
        )

    def _may_retry(
        self, role: Role, context: RequestContext, tried: Sequence[Instance], error: UpstreamError
    ) -> bool:
        if context.is_committed or error.is_client_fault:
            return False
        if context.num_losses >= MAX_LOSSES or isinstance(error, OutOfSockets):
            return False
        untried = any(instance not in tried for instance in self.pool.live(role))
        if not untried or self.now() >= context.deadline:
            return False
        if is_draining(error):  # an instance that shuts down has not failed: spend no budget
            return True
        return len(tried) < self.config.max_attempts and self.budget.take()

    def _count_failure(self, instance: Instance, role: Role, error: UpstreamError) -> None:
        self.metrics.attempts.add(instance.name, role.label, error.reason)
        if is_draining(error) or self.passive.failed(instance, error):
            self.pool.set_up(instance, up=False, error=str(error))

    # ------------------------------------------------ suspects

    def check_suspect(self, context: RequestContext) -> None:
        """Raise Quarantined if instances were recently lost while they worked on this body."""
        left_s = self.suspects.quarantine_left(context.client_body, self.now())
        if left_s:
            self.metrics.suspects.add("refused")
            raise Quarantined(left_s)

    def _note_loss(self, context: RequestContext, error: UpstreamError, began: float) -> None:
        context.num_losses = self.suspects.note_loss(
            context.client_body, error.instance, began, self.now()
        )
        if context.num_losses == MAX_LOSSES:
            self.metrics.suspects.add("stopped")
            logger.error(
                "request %s: stopped and its body quarantined, as %d instances died or hung up "
                "while they worked on it; the latest: %s",
                context.request_id,
                MAX_LOSSES,
                error,
            )

    # ------------------------------------------------ background tasks

    def spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Start a background task. The router holds a reference to it, and `close` awaits it."""
        task = self.client.loop.create_task(work)
        self._background.add(task)
        task.add_done_callback(self._reap)
        return task

    def _reap(self, task: asyncio.Task[None]) -> None:
        self._background.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("background task failed", exc_info=error)

    async def close(self) -> None:
        """Wait for the background tasks, at most ABORT_TIMEOUT_S, and stop tracing."""
        if self._background:
            await asyncio.wait(tuple(self._background), timeout=ABORT_TIMEOUT_S)
        if self.tracing is not None:
            await self.client.loop.run_in_executor(None, self.tracing.close)
