"""Plain flow: one instance both prefills and decodes the request.

The other flows use it as a fallback, and `generate` for their decode step.
"""

from __future__ import annotations

import logging
from functools import partial

from mooncake_proxy.api.openai_bodies import CompletionResponse, answer_decoder
from mooncake_proxy.api.proxied_request import RequestContext, plain_body
from mooncake_proxy.api.tenants import used_tokens
from mooncake_proxy.errors import (
    DECODE_ERRORS,
    NO_PREFILL,
    ConnectionLost,
    MalformedResponse,
    NoInstance,
    OutOfSockets,
    UpstreamError,
    is_loss,
)
from mooncake_proxy.flows.stream_forwarder import StreamForwarder, check_streams
from mooncake_proxy.flows.token_record import RecordingForwarder
from mooncake_proxy.pool.instances import Instance, Role
from mooncake_proxy.routing.router import RequestRouter

logger = logging.getLogger(__name__)


async def plain(router: RequestRouter, context: RequestContext, role: Role) -> None:
    """Serve the request on one instance of `role`."""
    try:
        await router.attempt(role, context, _run_plain_attempt)
    finally:
        router.end_short_prompt(context)


async def _run_plain_attempt(
    router: RequestRouter, context: RequestContext, instance: Instance
) -> None:
    context.decoder = instance.name
    await generate(router, context, instance, plain_body(context, instance))


async def generate(
    router: RequestRouter,
    context: RequestContext,
    instance: Instance,
    body: bytes,
    forwarder_class: type[StreamForwarder] = StreamForwarder,
) -> None:
    """Send `body` to `instance` and forward its answer: whole, or as a stream while it arrives."""
    started = router.now()
    payload = instance.build_post(
        context.endpoint.path, context.attempt_id, context.forward_to(instance), body
    )
    if context.parsed.stream:
        await _stream(router, context, instance, payload, forwarder_class)
        return
    with await instance.connections.exchange(payload, context.deadline, await_body=True) as answer:
        whole = answer.body
    if context.record is not None:
        whole = context.record.record_answer(whole, instance.name)
    if context.tenant is not None:
        context.num_used_tokens = used_tokens(whole)
    _note_first(router, context, instance, started)
    context.request.respond(200, whole, "application/json", context.reply_headers)


async def _stream(
    router: RequestRouter,
    context: RequestContext,
    instance: Instance,
    payload: bytes,
    forwarder_class: type[StreamForwarder],
) -> None:
    note_first = partial(_note_first, router, context, instance, router.now())
    if context.record is not None:
        forwarder: StreamForwarder = RecordingForwarder(
            context, instance.name, note_first, context.record
        )
    else:
        forwarder = forwarder_class(context, instance.name, note_first)
    forwarder.on_tokens = router.token_clock(context)
    with await instance.connections.exchange(payload, context.deadline, await_body=False) as answer:
        check_streams(answer)
        if context.on_accepted is not None:
            context.on_accepted()
            context.on_accepted = None
        context.request.attach(answer)
        try:
            await answer.forward(forwarder)
        except ConnectionLost:
            if not forwarder.is_finished:  # else the client has the whole answer already
                raise
        finally:
            context.request.attach(None)
    forwarder.check_end()
    context.request.end()


def _note_first(
    router: RequestRouter, context: RequestContext, instance: Instance, started: float
) -> None:
    """Note that the instance has sent the first event or the whole answer."""
    now = router.now()
    elapsed_s = now - started
    router.metrics.stage_seconds.observe(elapsed_s, "decode", instance.name)
    if context.prefiller and context.parsed.stream:
        router.short_prompts.note_handover(elapsed_s)
    if context.num_short_tokens:
        router.end_short_prompt(context)
    if router.conductor is not None:
        router.conductor.decoding(context)
    if not context.request.has_started:
        router.note_first_token(context, now)


def role_without_disaggregation(router: RequestRouter, context: RequestContext) -> Role | None:
    """The role that serves the whole request if it can't or need not be split, else None.

    Raises:
        NoInstance: no instance could decode the request; raised before any prefill is spent on it.
    """
    pool = router.pool
    obstacle = context.disaggregation_obstacle()
    if obstacle is None and pool.can_disaggregate:
        limit = context.parsed.token_limit
        if limit is not None and limit <= 1:
            return Role.PREFILL
        return Role.DECODE if router.takes_short_prompt(context) else None
    whole = pool.undisaggregated_role()
    if whole is None:
        pool.require(Role.DECODE)
    if obstacle is not None:
        router.metrics.fallbacks.add(obstacle)
        return whole
    if whole is Role.BOTH:
        return whole
    if not router.config.local_prefill:
        pool.require_pair()
    reason = "no_fitting_pair" if pool.live(Role.PREFILL) else NO_PREFILL
    logger.warning("request %s: %s, prefilling on the decode instance", context.request_id, reason)
    router.metrics.fallbacks.add(reason)
    return whole


def may_prefill_locally(
    router: RequestRouter, context: RequestContext, error: UpstreamError | NoInstance
) -> bool:
    """Whether D may prefill after P failed, or left the pool before the prefill was sent.

    Not if local prefill is disabled, the deadline has passed, P rejected the request as the
    client's mistake, this host is out of sockets, or P was lost.
    """
    # The request itself may have crashed P; it must not crash D too.
    if isinstance(error, UpstreamError) and is_loss(error):
        return False
    if isinstance(error, OutOfSockets):
        return False
    is_client_fault = isinstance(error, UpstreamError) and error.is_client_fault
    is_early = router.now() < context.deadline
    return router.config.local_prefill and is_early and not is_client_fault


async def prefill_locally(router: RequestRouter, context: RequestContext, reason: str) -> None:
    """Serve the request on D alone, as a new attempt."""
    logger.warning("request %s: %s, prefilling on the decode instance", context.request_id, reason)
    router.metrics.fallbacks.add(reason)
    context.attempt += 1
    await plain(router, context, router.pool.undisaggregated_role() or Role.DECODE)


def decode_answer(instance: Instance, body: bytes) -> CompletionResponse:
    """Parse an OpenAI answer. Raises MalformedResponse if it is none."""
    try:
        return answer_decoder.decode(body)
    except DECODE_ERRORS as exc:
        raise MalformedResponse(instance.name, f"no OpenAI answer: {exc}") from exc
