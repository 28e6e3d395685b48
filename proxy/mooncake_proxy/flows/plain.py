"""Plain flow: the request goes to one instance as it is, prefill and decode together."""

from __future__ import annotations

from functools import partial

from mooncake_proxy.call import Call, plain_body
from mooncake_proxy.flows.recompute import RecordingRelay
from mooncake_proxy.flows.relay import StreamRelay, check_streams
from mooncake_proxy.instances import Instance, Role
from mooncake_proxy.router import Router


async def plain(router: Router, call: Call, role: Role) -> None:
    """Answer `call` from one instance of `role`."""
    await router.attempt(role, call, _ask)


async def _ask(router: Router, call: Call, instance: Instance) -> None:
    call.decoder = instance.name
    await generate(router, call, instance, plain_body(call))


async def generate(router: Router, call: Call, instance: Instance, body: bytes) -> None:
    """Send `body` and forward what comes: the whole answer, or the stream as it arrives."""
    started = router.now()
    payload = instance.request(call.endpoint.path, call.attempt_id, call.forward, body)
    if call.streams:
        await _stream(router, call, instance, payload)
        return
    with await instance.pool.exchange(payload, call.deadline, whole=True) as answer:
        whole = answer.body
    if call.record is not None:
        whole = call.record.take_answer(whole, instance.name)
    _note_first(router, call, instance, started)
    call.exchange.respond(200, whole, "application/json", call.reply_headers)


async def _stream(router: Router, call: Call, instance: Instance, payload: bytes) -> None:
    note_first = partial(_note_first, router, call, instance, router.now())
    if call.record is not None:
        relay: StreamRelay = RecordingRelay(call, instance.name, note_first, call.record)
    else:
        relay = StreamRelay(call, instance.name, note_first)
    with await instance.pool.exchange(payload, call.deadline, whole=False) as answer:
        check_streams(answer)
        call.exchange.attach(answer)
        try:
            await answer.relay(relay)
        finally:
            call.exchange.attach(None)
    relay.check_end()
    call.exchange.end()


def _note_first(router: Router, call: Call, instance: Instance, started: float) -> None:
    """The first event, or the whole answer, has come."""
    now = router.now()
    router.metrics.stage_seconds.observe(now - started, "decode", instance.name)
    if not call.exchange.has_started:
        router.metrics.first_token_seconds.observe(now - call.arrival)
