"""SGLang's flow: P and D get the request at the same time and meet in a bootstrap room.

client -> P   the request and a room              P -> D       KV and the first token
       -> D   the same                            D -> client  the whole answer

SGLang's OpenAI requests have three fields that name the room, which is on P's bootstrap server. P
answers once it has sent its KV; only D's answer goes to the client. An SGLang D can't prefill.
"""

from __future__ import annotations

import asyncio
import logging
import random
from functools import partial

from msgspec import Raw

from mooncake_proxy.api.openai_bodies import encode
from mooncake_proxy.api.proxied_request import FALSE, RequestContext
from mooncake_proxy.errors import BadRequest
from mooncake_proxy.flows.plain_flow import generate, plain
from mooncake_proxy.pool.instances import Instance, Role
from mooncake_proxy.routing.router import RequestRouter

logger = logging.getLogger(__name__)
# SGLang's default of --disaggregation-bootstrap-port.
BOOTSTRAP_PORT = 8998
ROOM_BITS = 63
_rooms = random.SystemRandom()


async def sglang(router: RequestRouter, context: RequestContext) -> None:
    """Serve one request with an SGLang pair, or with an instance that does both."""
    is_whole = _is_served_whole(router, context)
    if router.conductor is not None:
        router.conductor.place(context, Role.BOTH if is_whole else None)
    if is_whole:
        await plain(router, context, Role.BOTH)
        return
    await router.attempt(Role.PREFILL, context, _choose_decode, router.pool.is_paired)


def _is_served_whole(router: RequestRouter, context: RequestContext) -> bool:
    """Whether an instance that does both serves the request.

    Raises:
        BadRequest: only such an instance could, and there is none.
    """
    pool = router.pool
    obstacle = context.disaggregation_obstacle()
    if obstacle is None and (context.parsed.n or 1) > 1:
        obstacle = "several_answers"
    if obstacle is None and pool.can_disaggregate:
        return False
    if pool.live(Role.BOTH):
        if obstacle is not None:
            router.metrics.fallbacks.add(obstacle)
        return True
    if obstacle is not None:
        raise BadRequest(
            f"{obstacle.replace('_', ' ')}: a room of SGLang's bootstrap server takes one prompt "
            "and one answer; send one request for each, or have the operator add --backend-url"
        )
    pool.require_pair()
    return False


async def _choose_decode(
    router: RequestRouter, context: RequestContext, prefiller: Instance
) -> None:
    """Run one attempt with this P, on another D if one fails. Each D gets a new prefill of P."""
    context.prefiller = prefiller.name
    step = partial(_run_pair, prefiller)
    await router.attempt(Role.DECODE, context, step, prefiller.is_compatible)


async def _run_pair(
    prefiller: Instance, router: RequestRouter, context: RequestContext, decoder: Instance
) -> None:
    """Run one attempt of a pair in a new room.

    If P fails before D has started to answer, P's error is raised; when D fails, P's request is
    cancelled.
    """
    context.decoder = decoder.name
    room = room_fields(prefiller)
    loop = router.client.loop
    prefill = loop.create_task(_prefill(router, context, prefiller, room))
    decode = loop.create_task(generate(router, context, decoder, decode_body(context, room)))
    try:
        await asyncio.wait({prefill, decode}, return_when=asyncio.FIRST_COMPLETED)
        if not decode.done() and (error := prefill.exception()) is not None:
            if not context.is_committed:
                raise error
            # D is streaming already: it has the KV
            logger.info("request %s: its prefill failed late: %s", context.request_id, error)
        await decode
    finally:
        for task in (prefill, decode):
            task.cancel()
        await asyncio.gather(prefill, decode, return_exceptions=True)


def room_fields(prefiller: Instance) -> dict[str, Raw]:
    """A new room on P's bootstrap server, as fields of SGLang's requests."""
    host, port = prefiller.spec.origin.host, prefiller.spec.bootstrap_port or BOOTSTRAP_PORT
    return {
        "bootstrap_host": Raw(encode(f"[{host}]" if ":" in host else host)),
        "bootstrap_port": Raw(encode(port)),
        "bootstrap_room": Raw(encode(_rooms.getrandbits(ROOM_BITS))),
    }


def decode_body(context: RequestContext, room: dict[str, Raw]) -> bytes:
    """The body for D: the client's, plus the room."""
    return encode(context.fields | room)


def sglang_prefill_body(context: RequestContext, room: dict[str, Raw]) -> bytes:
    """The body for P: the same without streaming, because P's tokens are discarded."""
    fields = context.fields | room | {"stream": FALSE}
    fields.pop("stream_options", None)
    return encode(fields)


async def _prefill(
    router: RequestRouter, context: RequestContext, instance: Instance, room: dict[str, Raw]
) -> None:
    started = router.now()
    body = sglang_prefill_body(context, room)
    payload = instance.build_post(
        context.endpoint.path, context.attempt_id, context.forward_to(instance), body
    )
    await instance.connections.fetch(payload, context.deadline)
    if router.conductor is not None:
        router.conductor.pushed(context)
    router.metrics.stage_seconds.observe(router.now() - started, "prefill", instance.name)
