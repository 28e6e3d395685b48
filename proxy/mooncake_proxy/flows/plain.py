"""Plain flow: the request goes to one instance as it is, prefill and decode together."""

from __future__ import annotations

from collections.abc import Callable

from mooncake_proxy.call import Call, plain_body
from mooncake_proxy.flows.recompute import RecordingRelay
from mooncake_proxy.flows.relay import StreamRelay, check_status, check_streams
from mooncake_proxy.http1.connection import Connection
from mooncake_proxy.instances import Instance, Role
from mooncake_proxy.router import Router


async def plain(router: Router, call: Call, role: Role) -> None:
    """Answer `call` from one instance of `role`."""
    body = plain_body(call)
    await router.attempt(role, call, lambda chosen: _ask(router, call, chosen, body))


async def _ask(router: Router, call: Call, instance: Instance, body: bytes) -> None:
    call.decoder = instance.name
    await generate(router, call, instance, body)


async def generate(router: Router, call: Call, instance: Instance, body: bytes) -> None:
    """Send `body` and forward what comes: the whole answer, or the stream as it arrives."""
    started = router.now()

    def note_first() -> None:
        now = router.now()
        router.metrics.stage_seconds.observe(now - started, "decode", instance.name)
        if not call.exchange.has_started:
            router.metrics.first_token_seconds.observe(now - call.arrival)

    payload = instance.request(call.endpoint.path, call.attempt_id, call.forward, body)
    async with instance.pool.send(payload, call.deadline) as answer:
        await check_status(answer)
        if call.streams:
            await _relay_stream(call, answer, _relay_for(call, instance, note_first))
        else:
            whole = await answer.read()
            if call.record is not None:
                whole = call.record.take_answer(whole, instance.name)
            note_first()
            call.exchange.respond(200, whole, "application/json", call.reply_headers)


def _relay_for(call: Call, instance: Instance, on_start: Callable[[], None]) -> StreamRelay:
    if call.record is not None:
        return RecordingRelay(call, instance.name, on_start, call.record)
    return StreamRelay(call, instance.name, on_start)


async def _relay_stream(call: Call, answer: Connection, relay: StreamRelay) -> None:
    check_streams(answer)
    call.exchange.attach(answer)
    try:
        await answer.relay(relay)
    finally:
        call.exchange.attach(None)
    relay.check_end()
    call.exchange.end()
