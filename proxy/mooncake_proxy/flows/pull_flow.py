"""Pull flow: P prefills and holds the KV, then D pulls it and decodes.

client -> P   max_tokens 1, "hold the KV"       P -> client  the first token, immediately
       -> D   the request and the KV's location D -> client  everything from the second token on

Long prompts may instead go to D first, which pulls the KV while P computes it: see `push_flow.py`.
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
    OpenAIEndpoint,
    encode,
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
from mooncake_proxy.errors import DECODE_ERRORS, MalformedResponse, Rejected, UpstreamError
from mooncake_proxy.flows.continued_prompt import (
    ContinuedForwarder,
    ContinuedPrompt,
    can_continue,
    continued_prompt,
)
from mooncake_proxy.flows.migration import may_need_passes, run_passes
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
from mooncake_proxy.routing.router import ABORT_TIMEOUT_S, RequestRouter

# Seconds to wait for P's answer after the client has disconnected, to learn which KV to release.
HANG_UP_S = 5.0
NOT_SUPPORTED = (404, 405)
REFUSED = (400, 404, 422)
# A request that vLLM refuses: no instance has a model of that name.
REFUSED_REQUEST = {"model": "mooncake-releases-kv", "prompt": [0], "max_tokens": 1}
logger = logging.getLogger(__name__)


def pull(router: RequestRouter, context: RequestContext) -> Awaitable[None]:
    """Serve one request with a prefill and a decode instance, in several passes if needed."""
    if may_need_passes(router):
        return run_passes(router, context, _pass)
    return _pass(router, context)


async def _pass(router: RequestRouter, context: RequestContext) -> None:
    """Run one pass: a prefill and a decode."""
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
    if prefill.is_final and context.continues_answer:
        # Only an instance that streams parses an answer in its middle.
        await prefill_locally(router, context, "last_token")
    elif prefill.is_final:
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
    """P's parsed answer."""

    instance: Instance
    body: bytes
    answer: CompletionResponse
    # P's `kv_transfer_params`, forwarded to D as they are; None if P holds no KV.
    params: Raw | None
    kv_params: KVTransferParams
    # True if P's token is the last one: there is nothing to decode.
    is_final: bool
    # Loop time at which the request was sent to P.
    began: float = 0.0
    # For a D that would repeat the first token: the prompt to send it instead.
    continued: ContinuedPrompt | None = None
    # One lease serves all choices: D samples the first token of each.
    is_shared: bool = False


class HeldKV:
    """Context manager for the KV that P holds for this request until D has pulled it.

    If the block is left before that (client disconnected, no D available, D failed), P is told to
    free the KV now, instead of when its lease expires.
    """

    __slots__ = ("_context", "_is_pulled", "_prefill", "_router")

    def __init__(
        self, router: RequestRouter, context: RequestContext, prefill: PrefillResult
    ) -> None:
        self._router = router
        self._context = context
        self._prefill = prefill
        self._is_pulled = False

    def __enter__(self) -> HeldKV:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._is_pulled:
            return
        # Even a committed D may have fetched only some of several choices.
        kv_params = self._prefill.kv_params
        if not self._context.is_committed or kv_params.choices is not None:
            release_kv(self._router, self._context, self._prefill)

    async def decode(
        self, router: RequestRouter, context: RequestContext, instance: Instance
    ) -> None:
        """Run one decode attempt: deliver P's token unless done before, then forward D's answer."""
        context.decoder = instance.name
        params = self._prefill.params
        assert params is not None
        spec = instance.spec
        continues = spec.emits_first_token and not spec.recomputes
        continued = self._prefill.continued if continues else None
        is_held = False
        sends_first = not (self._prefill.is_shared or context.continues_answer)
        if context.parsed.stream and sends_first:
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
        self._is_pulled = True


# ---------------------------------------------------------------- prefill


async def _prefill(
    router: RequestRouter, context: RequestContext, instance: Instance
) -> PrefillResult:
    """Run one prefill attempt and parse P's answer."""
    is_shared = _shares_lease(router, context, instance)
    if instance.bootstrap is not None:
        if is_shared:
            return _without_kv(instance)
        return await _prefill_with_bootstrap(router, context, instance, instance.bootstrap)
    began = router.now()
    was_idle = router.short_prompts.is_learnt and instance.total_running == 1
    params = with_prefix_sources(context, instance, HOLD_KV_PARAMS)
    body = await _send_prefill(router, context, instance, params, wants_kv_only=is_shared)
    prefill = parse_prefill_answer(instance, body)
    if is_shared and not _serves_all_choices(router, instance, prefill):
        release_kv(router, context, prefill)
        return _without_kv(instance)
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
    """Whether all choices of this request should start from a single lease of P.

    vLLM's P creates a lease per choice but names only one of them, and vLLM's D fetches only one,
    however many it is given.
    """
    topology = instance.topology
    splits_choices = topology is not None and topology.splits_choices
    return (context.parsed.n or 1) > 1 and not (splits_choices and router.pool.splits_choices)


def _serves_all_choices(router: RequestRouter, instance: Instance, prefill: PrefillResult) -> bool:
    """Whether D can start all choices from this lease.

    With foreign connectors every choice fetches the KV by itself, but P frees it after the first
    fetch.
    """
    is_ours = instance.topology is not None or prefill.kv_params.decode_continues_prompt
    return not prefill.is_final and (is_ours or not router.pool.emits_first_token)


def _without_kv(instance: Instance) -> PrefillResult:
    """The result when P holds no KV that all choices could start from: D prefills itself."""
    nothing = CompletionResponse([])
    return PrefillResult(instance, b"", nothing, None, KVTransferParams(), is_final=False)


async def _prefill_with_bootstrap(
    router: RequestRouter, context: RequestContext, instance: Instance, bootstrap: BootstrapServer
) -> PrefillResult:
    """Run one prefill attempt for vLLM's Mooncake connector.

    P returns no parameters there: the proxy itself picks the id of the transfer.
    """
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
    wants_kv_only: bool = False,
) -> bytes:
    """Send the prefill and return the body of P's answer."""
    context.prefiller = instance.name
    started = router.now()
    wants_token_ids = router.pool.emits_first_token and can_continue(context)
    body = prefill_body(
        context, params, wants_token_ids=wants_token_ids, wants_kv_only=wants_kv_only
    )
    payload = instance.build_post(
        context.endpoint.path, context.attempt_id, context.forward_to(instance), body
    )
    abandon = partial(_hang_up, router, context, instance)
    with await instance.connections.exchange(
        payload, context.deadline, await_body=True, abandon=abandon
    ) as answer:
        body = answer.body
    router.metrics.stage_seconds.observe(router.now() - started, "prefill", instance.name)
    return body


def _hang_up(
    router: RequestRouter,
    context: RequestContext,
    instance: Instance,
    connection: UpstreamConnection,
) -> None:
    """Close the connection to P after the client has disconnected.

    P may have answered already, and then holds KV that no D will pull.
    """
    if connection.hang_up(HANG_UP_S):
        router.spawn(_release_late_answer(router, context, instance, connection))


async def _release_late_answer(
    router: RequestRouter, context: RequestContext, instance: Instance, answer: UpstreamConnection
) -> None:
    """Read an answer that P sent as the client disconnected, and release the KV that it names."""
    try:
        body = await answer.read()
        prefill = parse_prefill_answer(instance, body)
    except UpstreamError:
        return  # P aborted the request and holds nothing
    finally:
        answer.finish()
    release_kv(router, context, prefill)


def release_kv(router: RequestRouter, context: RequestContext, prefill: PrefillResult) -> None:
    """Tell P to free the KV of all choices of a request.

    Runs in the background: the client has its answer or is gone, and if the message is lost, P
    frees the KV when the lease expires.
    """
    instance, by_request = prefill.instance, None
    if prefill.params is not None and prefill.kv_params.decode_continues_prompt:
        body = encode({**REFUSED_REQUEST, "kv_transfer_params": prefill.params})
        path, forward = OpenAIEndpoint.COMPLETION.path, context.forward_to(instance)
        by_request = instance.build_post(path, context.attempt_id, forward, body)
    for remote_request_id in prefill.kv_params.held_request_ids:
        router.spawn(_abort(router, instance, remote_request_id, by_request))


async def _abort(
    router: RequestRouter, instance: Instance, remote_request_id: str, by_request: bytes | None
) -> None:
    """Release the KV that P holds under an id.

    vLLM has no /abort. But it gives the parameters of a request that its front end refuses to our
    connector, which notifies the holder that they name: here vLLM itself.

    Args:
        router: the router of the request's model.
        instance: P.
        remote_request_id: the id.
        by_request: the HTTP request to have refused; None if P's engine has no use for it.
    """
    body = encode({"request_id": remote_request_id})
    payload = instance.build_post("/abort", remote_request_id, b"", body)
    outcome, error = "200", await _send_abort(router, instance, payload)
    has_endpoint = not _has_status(error, NOT_SUPPORTED)
    if not has_endpoint and by_request is not None:
        outcome, error = "by_request", await _send_abort(router, instance, by_request)
        error = None if _has_status(error, REFUSED) else error
    if error is not None:
        outcome = error.reason
        if not has_endpoint and by_request is None:
            instance.warn_once(
                "no_abort",
                "has no /abort, as vLLM: KV that no decode instance fetches stays allocated "
                "until its lease expires (lease_seconds)",
            )
        else:
            logger.warning("abort of %s not delivered: %s", remote_request_id, error)
    router.metrics.aborts.add(outcome)


async def _send_abort(
    router: RequestRouter, instance: Instance, payload: bytes
) -> UpstreamError | None:
    try:
        await instance.connections.fetch(payload, router.now() + ABORT_TIMEOUT_S)
    except UpstreamError as error:
        return error
    return None


def _has_status(error: UpstreamError | None, statuses: tuple[int, ...]) -> bool:
    return isinstance(error, Rejected) and error.status in statuses


def has_finished(answer: CompletionResponse) -> bool:
    """Whether every choice finished with its first token."""
    return "length" not in [choice.finish_reason for choice in answer.choices]


def parse_prefill_answer(instance: Instance, body: bytes) -> PrefillResult:
    """Parse P's answer. A P without a KV connector answers "length" and no parameters."""
    answer = decode_answer(instance, body)
    try:
        kv_params = kv_transfer_params_decoder.decode(answer.kv_transfer_params)
    except DECODE_ERRORS as exc:
        raise MalformedResponse(instance.name, f"kv_transfer_params: {exc}") from exc
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
    """Complete the client's answer with P's: its token was the last one."""
    request, record = context.request, context.record
    release_kv(router, context, prefill)
    if not request.has_started:
        router.note_first_token(context, router.now())
    if not context.parsed.stream:
        body = prefill.body
        if record is not None:
            body = record.record_answer(body, prefill.instance.name)
        request.respond(200, body, "application/json", context.reply_headers)
        return
    shows_ids = record is not None or bool(context.parsed.return_token_ids)
    events = final_answer_events(
        context.endpoint, prefill.answer, context.parsed, shows_ids=shows_ids
    )
    if record is not None:
        events = record.record_final_answer(events)
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
    """Forward P's token to the client, unless D will send it itself."""
    answer = prefill.answer
    is_repeated = instance.spec.repeats_first_token and continued is None
    if context.answer_id is None and not is_repeated:
        events = first_token_events(context.endpoint, answer, context.parsed)
        context.answer_id = answer.id
        if (record := context.record) is not None:
            events = record.record_first_token(answer, events, is_prompt=continued is not None)
            context.answer_id = record.answer_id
        if context.request.has_started:  # a later pass
            context.request.write(events)
        else:
            context.request.start_stream("text/event-stream", context.reply_headers, events)
            router.note_first_token(context, router.now())
    elif context.answer_id is not None and is_repeated:
        # No failure that ejects it: it was asked for what it can't do.
        raise UpstreamError(instance.name, "would send the first token twice")
