"""Push flow: D reserves blocks first, P writes the KV there layer by layer.

client -> D            the request and the address of its meeting
D      -> metaserver   where its blocks are           (202 at once)
proxy  -> P            one token, "write the KV there"
D      -> client       everything
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable
from functools import partial

from msgspec import Raw

from mooncake_proxy.call import TRUE, Call, prefill_body
from mooncake_proxy.errors import UpstreamError
from mooncake_proxy.flows.plain import generate, plain
from mooncake_proxy.flows.pull import (
    decode_answer,
    fall_back,
    may_prefill_on_decoder,
    serve_alone,
)
from mooncake_proxy.flows.recompute import in_passes
from mooncake_proxy.instances import Instance, Role
from mooncake_proxy.openai import encode
from mooncake_proxy.router import Router

logger = logging.getLogger(__name__)


def push(router: Router, call: Call) -> Awaitable[None]:
    """Serve one request: D is asked first, P when D says where the KV goes."""
    if router.fleet.recomputes:
        return in_passes(router, call, _pass)
    return _pass(router, call)


async def _pass(router: Router, call: Call) -> None:
    """Decode and prefill once."""
    alone = serve_alone(router, call) or _decode_alone(router, call)
    if alone is not None:
        await plain(router, call, alone)
        return
    try:
        await router.attempt(Role.DECODE, call, _meet, router.fleet.is_paired)
    except UpstreamError as error:
        if call.is_committed or not _is_prefill_failure(router, call, error):
            raise
        await fall_back(router, call, "prefill_failed")


def _decode_alone(router: Router, call: Call) -> Role | None:
    """A push carries one answer's KV and first token; several answers are all D's."""
    if (call.ask.n or 1) == 1:
        return None
    router.metrics.fallbacks.add("several_answers")
    return Role.DECODE


async def _meet(router: Router, call: Call, decoder: Instance) -> None:
    """One attempt: D's answer, and beside it the prefill that D's post starts."""
    call.decoder = decoder.name
    with router.rendezvous.expect(
        lambda params: _dispatch(router, call, decoder, params)
    ) as meeting:
        body = decode_body(call, router.metaserver_url + meeting.key)
        decoding = router.client.loop.create_task(generate(router, call, decoder, body))
        await meeting.beside(decoding)


def decode_body(call: Call, metaserver: str) -> bytes:
    """The body for D: the client's own, and where to say which blocks are reserved."""
    params = {"do_remote_prefill": True, "do_remote_decode": False, "metaserver": metaserver}
    fields = call.fields.copy()
    fields["kv_transfer_params"] = Raw(encode(params))
    if call.record is not None:
        fields["return_token_ids"] = TRUE
    return encode(fields)


async def _dispatch(router: Router, call: Call, decoder: Instance, params: Raw) -> None:
    """The prefill, on another P if one fails."""
    try:
        prefill = partial(_prefill, prefill_body(call, params))
        await router.attempt(Role.PREFILL, call, prefill, decoder.fits)
    except UpstreamError as error:
        if not call.is_committed:
            raise
        # D answers already: it has the KV, or computes it itself
        logger.info("request %s: its prefill ended badly, D goes on: %s", call.request_id, error)


async def _prefill(body: bytes, router: Router, call: Call, instance: Instance) -> None:
    call.prefiller = instance.name
    started = router.now()
    payload = instance.request(call.endpoint.path, call.attempt_id, call.forward, body)
    answer = await instance.pool.fetch(payload, call.deadline)
    if call.record is not None:
        call.record.note_prefill(decode_answer(instance, answer))
    router.metrics.stage_seconds.observe(router.now() - started, "prefill", instance.name)


def _is_prefill_failure(router: Router, call: Call, error: UpstreamError) -> bool:
    """Whether it was P that failed; D can then prefill itself."""
    prefillers = [i.name for i in router.fleet if i.spec.role is Role.PREFILL]
    return error.instance in prefillers and may_prefill_on_decoder(router, call, error)
