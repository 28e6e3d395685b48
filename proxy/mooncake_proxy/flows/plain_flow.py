"""Plain flow: the request goes to one instance as it is, prefill and decode together."""

from __future__ import annotations

from functools import partial

from mooncake_proxy.api.proxied_request import RequestContext, plain_body
from mooncake_proxy.flows.recomputation import RecordingForwarder
from mooncake_proxy.flows.stream_forwarder import StreamForwarder, check_streams
from mooncake_proxy.pool.instances import Instance, Role
from mooncake_proxy.routing.router import RequestRouter


async def plain(router: RequestRouter, context: RequestContext, role: Role) -> None:
    """Answer `call` from one instance of `role`."""
    try:
        await router.attempt(role, context, _ask)
    finally:
        router.end_short_prompt(context)


async def _ask(router: RequestRouter, context: RequestContext, instance: Instance) -> None:
    context.decoder = instance.name
    await generate(router, context, instance, plain_body(context))


async def generate(
    router: RequestRouter,
    context: RequestContext,
    instance: Instance,
    body: bytes,
    forwarder_class: type[StreamForwarder] = StreamForwarder,
) -> None:
    """Send `body` and forward what comes: the whole answer, or the stream as it arrives."""
    started = router.now()
    payload = instance.build_post(context.endpoint.path, context.attempt_id, context.forward, body)
    if context.streams:
        await _stream(router, context, instance, payload, forwarder_class)
        return
    with await instance.connections.exchange(payload, context.deadline, whole=True) as answer:
        whole = answer.body
    if context.record is not None:
        whole = context.record.take_answer(whole, instance.name)
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
    forwarder.on_tokens = partial(router.note_tokens, context)
    with await instance.connections.exchange(payload, context.deadline, whole=False) as answer:
        check_streams(answer)
        context.request.attach(answer)
        try:
            await answer.forward(forwarder)
        finally:
            context.request.attach(None)
    forwarder.check_end()
    context.request.end()


def _note_first(
    router: RequestRouter, context: RequestContext, instance: Instance, started: float
) -> None:
    """The first event, or the whole answer, has come."""
    elapsed_s = router.now() - started
    router.metrics.stage_seconds.observe(elapsed_s, "decode", instance.name)
    if context.prefiller and context.streams:
        router.short_prompts.note_handover(elapsed_s)
    router.end_short_prompt(context)
    if router.conductor is not None:
        router.conductor.decoding(context)
    if not context.request.has_started:
        router.note_first_token(context)
