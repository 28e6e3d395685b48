"""Pull flow: P prefills and holds the KV, D pulls it.

A long prompt may go to D first, which pulls it early: see `push_flow`. Others:

client -> P   max_tokens 1, "hold the KV"          P -> client  the first token, at once
       -> D   the request and where the KV is   D -> client  everything from the second token
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable
from functools import partial
from types import TracebackType

from msgspec import Raw, Struct

from mooncake_proxy.api.openai_bodies import (
    CompletionResponse,
    KVTransferParams,
    final_answer_events,
    first_token_events,
    kv_transfer_params_decoder,
)
from mooncake_proxy.api.proxied_request import (
    HOLD_KV_PARAMS,
    RequestContext,
    new_request_id,
    prefill_body,
    pull_decode_body,
    with_prefix_sources,
)
from mooncake_proxy.errors import UNREADABLE, MalformedAnswer, UpstreamError
from mooncake_proxy.flows.continued_prompt import (
    ContinuedForwarder,
    ContinuedPrompt,
    can_continue,
    continued_prompt,
)
from mooncake_proxy.flows.migration import has_passes, run_passes
from mooncake_proxy.flows.plain_flow import (
    decode_answer,
    generate,
    may_prefill_locally,
    plain,
    prefill_locally,
    role_without_disaggregation,
)
from mooncake_proxy.flows.push_flow import reserve_first
from mooncake_proxy.http1.upstream_connection import UpstreamConnection
from mooncake_proxy.pool.bootstrap_server import BootstrapServer, for_prefill
from mooncake_proxy.pool.instances import Instance, Role
from mooncake_proxy.routing.router import RequestRouter

# How long an answer may still be on its way after the client has left.
HANG_UP_S = 5.0
logger = logging.getLogger(__name__)


def pull(router: RequestRouter, context: RequestContext) -> Awaitable[None]:
    """Serve one request from a prefill and a decode instance."""
    if has_passes(router):
        return run_passes(router, context, _pass)
    return _pass(router, context)


async def _pass(router: RequestRouter, context: RequestContext) -> None:
    """Prefill and decode once."""
    role = role_without_disaggregation(router, context)
    if router.conductor is not None:
        router.conductor.place(context, role)
    if role is not None:
        await plain(router, context, role)
        return
    if router.pulls_early(context):
        await reserve_first(router, context, is_pulled=True)
        return
    try:
        prefill = await router.attempt(Role.PREFILL, context, _prefill, router.pool.is_paired)
    except UpstreamError as error:
        if not may_prefill_locally(router, context, error):
            raise
        await prefill_locally(router, context, "prefill_failed")
        return
    if prefill.is_final:
        _answer_from_prefill(router, context, prefill)
    elif prefill.params is None:
        is_several = (context.parsed.n or 1) > 1
        await prefill_locally(router, context, "several_answers" if is_several else "no_params")
    else:
        with HeldKV(router, context, prefill) as held:
            if router.conductor is not None:
                router.conductor.prefilled(
                    context, prefill.instance, prefill.kv_params, prefill.began
                )
            await router.attempt(Role.DECODE, context, held.decode, prefill.instance.is_compatible)


class PrefillResult(Struct, eq=False):
    """P's answer."""

    instance: Instance
    body: bytes
    answer: CompletionResponse
    # What D needs, unread; None when P holds nothing.
    params: Raw | None
    kv_params: KVTransferParams
    is_final: bool
    # When P was asked, in loop time.
    began: float = 0.0
    # For a D that would send the first token again: what it can be asked for instead.
    continued: ContinuedPrompt | None = None
    # One lease for several answers: D samples the first token of each.
    is_shared: bool = False


class HeldKV:
    """P's KV for this request, until D has pulled it.

    Leaving the block early (client gone, no D, D failed) makes P free the KV at once instead of
    when its lease expires.
    """

    __slots__ = ("_context", "_is_taken", "_prefill", "_router")

    def __init__(
        self, router: RequestRouter, context: RequestContext, prefill: PrefillResult
    ) -> None:
        self._router = router
        self._context = context
        self._prefill = prefill
        self._is_taken = False

    def __enter__(self) -> HeldKV:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._is_taken:
            return
        # D may have begun with one choice and not have fetched the others.
        kv_params = self._prefill.kv_params
        if not self._context.is_committed or kv_params.choices is not None:
            self._router.release(self._prefill.instance, kv_params)

    async def decode(
        self, router: RequestRouter, context: RequestContext, instance: Instance
    ) -> None:
        """One attempt: the first token out if it is not yet, then D's own stream or answer."""
        context.decoder = instance.name
        params = self._prefill.params
        assert params is not None
        spec = instance.spec
        continues = spec.emits_first_token and not spec.recomputes
        continued = self._prefill.continued if continues else None
        is_held = False
        if context.parsed.stream and not self._prefill.is_shared:
            is_held = router.holds_headers and context.answer_id is None and continued is None
            is_held = is_held and not spec.repeats_first_token
            deliver = partial(
                _deliver_first_token, router, context, self._prefill, instance, continued
            )
            if is_held:
                context.on_accepted = deliver
            else:
                deliver()
        if continued is None:
            delivered = is_held or context.answer_id is not None
            body = pull_decode_body(context, params, delivered=delivered)
            await generate(router, context, instance, body)
        else:
            body = continued.body(context, params)
            await generate(router, context, instance, body, ContinuedForwarder)
        self._is_taken = True


# ---------------------------------------------------------------- prefill


async def _prefill(
    router: RequestRouter, context: RequestContext, instance: Instance
) -> PrefillResult:
    """One attempt: P's answer, parsed."""
    is_shared = _shares_lease(router, context, instance)
    if instance.bootstrap is not None:
        if is_shared:
            return _for_decode_alone(instance)
        return await _prefill_with_bootstrap(router, context, instance, instance.bootstrap)
    began = router.now()
    was_idle = router.short_prompts.is_learnt and instance.total_running == 1
    params = with_prefix_sources(context, instance, HOLD_KV_PARAMS)
    body = await _send_prefill(router, context, instance, params, wants_kv_alone=is_shared)
    prefill = parse_prefill_answer(instance, body)
    if is_shared and not _is_for_all(router, instance, prefill):
        router.release(instance, prefill.kv_params)
        return _for_decode_alone(instance)
    prefill.began, prefill.is_shared = began, is_shared
    kv, metrics = prefill.kv_params, router.metrics
    if kv.decode_continues_prompt and can_continue(context):
        prefill.continued = continued_prompt(context, prefill.answer, kv.last_token_id)
    num_tokens, num_cached = kv.num_prompt_tokens or 0, kv.remote_cached_tokens or 0
    if was_idle:
        router.short_prompts.note_prefill(num_tokens - num_cached, router.now() - began)
    metrics.prompt_tokens.values[()] += num_tokens
    metrics.cached_tokens.values[()] += num_cached
    if context.record is not None:
        context.record.note_prefill(prefill.answer)
    return prefill


def _shares_lease(router: RequestRouter, context: RequestContext, instance: Instance) -> bool:
    """Whether several answers are to begin from one lease of P: vLLM's P makes one for each answer
    and names one of them, and vLLM's D fetches one, however many it is given."""
    topology = instance.topology
    splits_choices = topology is not None and topology.splits_choices
    return (context.parsed.n or 1) > 1 and not (splits_choices and router.pool.splits_choices)


def _is_for_all(router: RequestRouter, instance: Instance, prefill: PrefillResult) -> bool:
    """Whether D can begin all answers from this lease. Of foreign connectors each answer would
    fetch it by itself, and P frees the KV after the first one."""
    is_ours = instance.topology is not None or prefill.kv_params.decode_continues_prompt
    return not prefill.is_final and (is_ours or not router.pool.emits_first_token)


def _for_decode_alone(instance: Instance) -> PrefillResult:
    """P holds nothing that several answers could begin from."""
    nothing = CompletionResponse([])
    return PrefillResult(instance, b"", nothing, None, KVTransferParams(), is_final=False)


async def _prefill_with_bootstrap(
    router: RequestRouter, context: RequestContext, instance: Instance, bootstrap: BootstrapServer
) -> PrefillResult:
    """The same for vLLM's own connector: P returns no parameters, the proxy names the transfer."""
    transfer_id = new_request_id()
    try:
        engine_id = await bootstrap.engine_id()
        body = await _send_prefill(router, context, instance, for_prefill(transfer_id))
    except UpstreamError:
        bootstrap.forget()
        raise
    answer = decode_answer(instance, body)
    if has_finished(answer):
        return PrefillResult(instance, body, answer, None, KVTransferParams(), is_final=True)
    params = bootstrap.for_decode(engine_id, transfer_id)
    kv_params = KVTransferParams(do_remote_prefill=True)
    return PrefillResult(instance, body, answer, params, kv_params, is_final=False)


async def _send_prefill(
    router: RequestRouter,
    context: RequestContext,
    instance: Instance,
    params: Raw,
    *,
    wants_kv_alone: bool = False,
) -> bytes:
    """P's whole answer."""
    context.prefiller = instance.name
    started = router.now()
    wants_token_ids = router.pool.emits_first_token and can_continue(context)
    body = prefill_body(
        context, params, wants_token_ids=wants_token_ids, wants_kv_alone=wants_kv_alone
    )
    payload = instance.build_post(
        context.endpoint.path, context.attempt_id, context.forward_to(instance), body
    )
    abandon = partial(_hang_up, router, instance)
    with await instance.connections.exchange(
        payload, context.deadline, whole=True, abandon=abandon
    ) as answer:
        body = answer.body
    router.metrics.stage_seconds.observe(router.now() - started, "prefill", instance.name)
    return body


def _hang_up(router: RequestRouter, instance: Instance, connection: UpstreamConnection) -> None:
    """The client has left: P may have answered already and hold KV that no D will pull."""
    if connection.hang_up(HANG_UP_S):
        router.spawn(_release_late_answer(router, instance, connection))


async def _release_late_answer(
    router: RequestRouter, instance: Instance, answer: UpstreamConnection
) -> None:
    """The client left just as P answered: the answer names the KV to release."""
    try:
        body = await answer.read()
        prefill = parse_prefill_answer(instance, body)
    except UpstreamError:
        return  # aborted there: nothing is held
    finally:
        answer.finish()
    router.release(instance, prefill.kv_params)


def has_finished(answer: CompletionResponse) -> bool:
    """Whether every choice ended with its first token."""
    return "length" not in [choice.finish_reason for choice in answer.choices]


def parse_prefill_answer(instance: Instance, body: bytes) -> PrefillResult:
    """What P's answer means. A P without a PD connector answers "length" and no parameters."""
    answer = decode_answer(instance, body)
    try:
        kv_params = kv_transfer_params_decoder.decode(answer.kv_transfer_params)
    except UNREADABLE as exc:
        raise MalformedAnswer(instance.name, f"kv_transfer_params: {exc}") from exc
    has_ended = has_finished(answer)
    if kv_params is None:
        if not has_ended:
            instance.warn_once(
                "no_params",
                "answered a prefill without kv_transfer_params: is its KV connector on? "
                "decode instances prefill these requests themselves",
            )
        return PrefillResult(instance, body, answer, None, KVTransferParams(), is_final=has_ended)
    is_final = has_ended or not kv_params.do_remote_prefill
    return PrefillResult(instance, body, answer, answer.kv_transfer_params, kv_params, is_final)


def _answer_from_prefill(
    router: RequestRouter, context: RequestContext, prefill: PrefillResult
) -> None:
    """P's token was the last one: its answer is the answer, or the end of what the client has."""
    request, record = context.request, context.record
    router.release(prefill.instance, prefill.kv_params)
    if not request.has_started:
        router.note_first_token(context, router.now())
    if not context.parsed.stream:
        body = prefill.body
        if record is not None:
            body = record.take_answer(body, prefill.instance.name)
        request.respond(200, body, "application/json", context.reply_headers)
        return
    shows_ids = record is not None or bool(context.parsed.return_token_ids)
    events = final_answer_events(
        context.endpoint, prefill.answer, context.parsed, shows_ids=shows_ids
    )
    if record is not None:
        events = record.take_final_answer(events)
    if request.has_started:  # a later pass
        request.write(events)
    else:
        request.start_stream("text/event-stream", context.reply_headers, events)
    request.end()


# ---------------------------------------------------------------- decode


def _deliver_first_token(
    router: RequestRouter,
    context: RequestContext,
    prefill: PrefillResult,
    instance: Instance,
    continued: ContinuedPrompt | None,
) -> None:
    """Forward P's token before D is even asked, unless D will send it itself."""
    answer = prefill.answer
    is_repeated = instance.spec.repeats_first_token and continued is None
    if context.answer_id is None and not is_repeated:
        events = first_token_events(context.endpoint, answer, context.parsed)
        context.answer_id = answer.id
        if (record := context.record) is not None:
            events = record.take_first_token(answer, events, is_prompt=continued is not None)
            context.answer_id = record.answer_id
        if context.request.has_started:  # a later pass
            context.request.write(events)
        else:
            context.request.start_stream("text/event-stream", context.reply_headers, events)
            router.note_first_token(context, router.now())
    elif context.answer_id is not None and is_repeated:
        raise MalformedAnswer(instance.name, "would send the first token twice")
