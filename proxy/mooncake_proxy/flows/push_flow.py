"""Push flow and early pulls: D reserves blocks first, then the proxy starts the prefill on P.

client -> D            the request and its metaserver URL
D      -> metaserver   the addresses of its blocks    (answered 202 immediately)
proxy  -> P            max_tokens 1, "the KV goes there"
D      -> client       the whole answer

With push, P writes the KV into D's blocks layer by layer; with an early pull, D reads it chunk by
chunk. In both cases blocks are reserved before anything is computed.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable
from functools import partial

from msgspec import Raw

from mooncake_proxy.api.openai_bodies import encode
from mooncake_proxy.api.proxied_request import (
    TRUE,
    RequestContext,
    prefill_body,
    with_prefix_sources,
)
from mooncake_proxy.errors import NO_PREFILL, NoInstance, UpstreamError
from mooncake_proxy.flows.migration import may_need_passes, run_passes
from mooncake_proxy.flows.plain_flow import (
    decode_answer,
    generate,
    may_prefill_locally,
    plain,
    prefill_locally,
    role_without_disaggregation,
)
from mooncake_proxy.pool.instances import Instance, Role
from mooncake_proxy.routing.router import RequestRouter

logger = logging.getLogger(__name__)


def push(router: RequestRouter, context: RequestContext) -> Awaitable[None]:
    """Serve one request: D reserves blocks, then P prefills into them."""
    if may_need_passes(router):
        return run_passes(router, context, _pass)
    return _pass(router, context)


async def _pass(router: RequestRouter, context: RequestContext) -> None:
    """Run one pass: a decode, and the prefill that it asks for."""
    role = role_without_disaggregation(router, context)
    if role is None and (context.parsed.n or 1) > 1 and not router.pool.splits_choices:
        # A push transfers the KV and first token of one choice; a D that can't split choices would
        # have nothing to start the others from.
        router.metrics.fallbacks.add("several_answers")
        role = Role.DECODE
    if router.conductor is not None:
        router.conductor.place(context, role)
    if role is not None:
        await plain(router, context, role)
        return
    await reserve_first(router, context, is_pulled=False)


async def reserve_first(router: RequestRouter, context: RequestContext, *, is_pulled: bool) -> None:
    """Serve one request on D, with the prefill on the P that receives D's reservation.

    Args:
        router: the router of the request's model.
        context: the request.
        is_pulled: D reads the KV from P; False: P writes it to D.
    """
    try:
        await router.attempt(
            Role.DECODE, context, partial(_decode, is_pulled), router.pool.is_paired
        )
    except (UpstreamError, NoInstance) as error:
        is_prefill_failure = _is_of_prefill(context, error) and not context.is_committed
        if not (is_prefill_failure and may_prefill_locally(router, context, error)):
            raise
        is_gone = isinstance(error, NoInstance)
        await prefill_locally(router, context, NO_PREFILL if is_gone else "prefill_failed")


def _is_of_prefill(context: RequestContext, error: UpstreamError | NoInstance) -> bool:
    """Whether `error` is a failure of the prefill rather than of D.

    Compares names only: the prefill instance may have left the pool since.
    """
    if isinstance(error, NoInstance):
        return error.code == NO_PREFILL
    return error.instance == context.prefiller


async def _decode(
    is_pulled: bool, router: RequestRouter, context: RequestContext, decoder: Instance
) -> None:
    """Run one decode attempt, and concurrently the prefill that D's post starts."""
    context.decoder = decoder.name
    with router.metaserver.expect(
        lambda params: _dispatch_prefill(router, context, decoder, params)
    ) as session:
        url = router.metaserver.url_of(session)
        body = reserving_decode_body(context, url, is_pulled=is_pulled)
        decoding = router.client.loop.create_task(generate(router, context, decoder, body))
        await session.supervise_decode(decoding)


def reserving_decode_body(context: RequestContext, metaserver: str, *, is_pulled: bool) -> bytes:
    """The body for D: the client's, plus the metaserver URL that D posts its reservation to."""
    params = {"do_remote_prefill": True, "do_remote_decode": False, "metaserver": metaserver}
    if is_pulled:
        params["do_pull"] = True
    fields = context.fields.copy()
    fields["kv_transfer_params"] = Raw(encode(params))
    if context.record is not None:
        fields["return_token_ids"] = TRUE
    return encode(fields)


async def _dispatch_prefill(
    router: RequestRouter, context: RequestContext, decoder: Instance, params: Raw
) -> None:
    """Run the prefill, on another P if one fails."""
    try:
        prefill = partial(_prefill, params)
        await router.attempt(Role.PREFILL, context, prefill, decoder.is_compatible)
    except (UpstreamError, NoInstance) as error:
        if not context.is_committed:
            raise
        # D is streaming already: it has the KV, or computes it itself
        logger.info("request %s: its prefill failed, D continues: %s", context.request_id, error)


async def _prefill(
    params: Raw, router: RequestRouter, context: RequestContext, instance: Instance
) -> None:
    context.prefiller = instance.name
    started = router.now()
    params = with_prefix_sources(context, instance, params)
    body = prefill_body(context, params, is_single=True)
    payload = instance.build_post(
        context.endpoint.path, context.attempt_id, context.forward_to(instance), body
    )
    answer = await instance.connections.fetch(payload, context.deadline)
    if router.conductor is not None:
        router.conductor.pushed(context)
    if context.record is not None:
        context.record.note_prefill(decode_answer(instance, answer))
    router.metrics.stage_seconds.observe(router.now() - started, "prefill", instance.name)
