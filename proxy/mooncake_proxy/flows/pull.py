"""Pull flow: P prefills and holds the KV, D comes for it.

client -> P   one token, "hold the KV"          P -> client  the first token, at once
       -> D   the request and where the KV is   D -> client  everything from the second token
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable
from dataclasses import dataclass
from functools import partial
from types import TracebackType

import msgspec
from msgspec import Raw

from mooncake_proxy import openai
from mooncake_proxy.bootstrap import Bootstrap, for_prefill
from mooncake_proxy.call import ASK_TO_HOLD, Call, decode_body, new_request_id, prefill_body
from mooncake_proxy.errors import MalformedAnswer, Rejected, UpstreamError
from mooncake_proxy.flows.plain import generate, plain
from mooncake_proxy.flows.recompute import in_passes
from mooncake_proxy.http1.connection import Connection
from mooncake_proxy.instances import Instance, Role
from mooncake_proxy.openai import Answer, HandOver
from mooncake_proxy.router import Router

# How long an answer may still be on its way after the client has left.
HANG_UP_S = 5.0
logger = logging.getLogger(__name__)


def pull(router: Router, call: Call) -> Awaitable[None]:
    """Serve one request from a prefill and a decode instance."""
    if router.fleet.recomputes:
        return in_passes(router, call, _pass)
    return _pass(router, call)


async def _pass(router: Router, call: Call) -> None:
    """Prefill and decode once."""
    alone = serve_alone(router, call)
    if alone is not None:
        await plain(router, call, alone)
        return
    try:
        prefilled = await router.attempt(Role.PREFILL, call, _prefill, router.fleet.is_paired)
    except UpstreamError as error:
        if not may_prefill_on_decoder(router, call, error):
            raise
        await fall_back(router, call, "prefill_failed")
        return
    if prefilled.is_final:
        _answer_from_prefill(router, call, prefilled)
    elif prefilled.params is None:
        await fall_back(router, call, "no_params")
    else:
        with Held(router, call, prefilled) as held:
            await router.attempt(Role.DECODE, call, held.decode, prefilled.instance.fits)


@dataclass(slots=True)
class Prefilled:
    """P's answer."""

    instance: Instance
    body: bytes
    answer: Answer
    # What D needs, unread; None when P holds nothing.
    params: Raw | None
    facts: HandOver
    is_final: bool


class Held:
    """P holds KV for as long as this block runs without D having taken it.

    Leaving early (client gone, no D, D failed) tells P to let go at once instead of when its
    lease ends.
    """

    __slots__ = ("_call", "_is_taken", "_prefilled", "_router")

    def __init__(self, router: Router, call: Call, prefilled: Prefilled) -> None:
        self._router = router
        self._call = call
        self._prefilled = prefilled
        self._is_taken = False

    def __enter__(self) -> Held:
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
        facts = self._prefilled.facts
        if not self._call.is_committed or facts.choices is not None:
            self._router.release(self._prefilled.instance, facts)

    async def decode(self, router: Router, call: Call, instance: Instance) -> None:
        """One attempt: the first token out if it is not yet, then D's own stream or answer."""
        call.decoder = instance.name
        params = self._prefilled.params
        assert params is not None
        if call.streams:
            _deliver_first_token(router, call, self._prefilled.answer, instance)
        delivered = call.answer_id is not None
        await generate(router, call, instance, decode_body(call, params, delivered=delivered))
        self._is_taken = True


# ---------------------------------------------------------------- before


def serve_alone(router: Router, call: Call) -> Role | None:
    """The role that serves the whole request, when a hand-over can't or needn't happen.

    NoInstance before any prefill is spent on a request that nobody could decode.
    """
    fleet = router.fleet
    obstacle = call.obstacle_to_hand_over()
    if obstacle is None and fleet.hands_over:
        limit = call.ask.token_limit
        return Role.PREFILL if limit is not None and limit <= 1 else None
    whole = fleet.whole()
    if whole is None:
        fleet.require(Role.DECODE)
    if obstacle is not None:
        router.metrics.fallbacks.add(obstacle)
        return whole
    if whole is Role.BOTH:
        return whole
    if not router.config.local_prefill:
        fleet.require_pair()
    reason = "no_fitting_pair" if fleet.live(Role.PREFILL) else "no_live_prefill"
    logger.warning("request %s: %s, D prefills", call.request_id, reason)
    router.metrics.fallbacks.add(reason)
    return whole


def may_prefill_on_decoder(router: Router, call: Call, error: UpstreamError) -> bool:
    """Whether D may do what P could not: unless forbidden, too late, or the request is wrong."""
    is_client_fault = isinstance(error, Rejected) and error.is_client_fault
    is_early = router.now() < call.deadline
    return router.config.local_prefill and is_early and not is_client_fault


async def fall_back(router: Router, call: Call, reason: str) -> None:
    """Serve the request without a hand-over, as a new attempt."""
    logger.warning("request %s: %s, D prefills", call.request_id, reason)
    router.metrics.fallbacks.add(reason)
    call.attempt += 1
    await plain(router, call, router.fleet.whole() or Role.DECODE)


# ---------------------------------------------------------------- prefill


async def _prefill(router: Router, call: Call, instance: Instance) -> Prefilled:
    """One attempt: P's answer, read and understood."""
    if instance.bootstrap is not None:
        return await _prefill_named(router, call, instance, instance.bootstrap)
    body = await _ask_prefill(router, call, instance, ASK_TO_HOLD)
    prefilled = understand(instance, body)
    metrics = router.metrics
    metrics.prompt_tokens.values[()] += prefilled.facts.num_prompt_tokens or 0
    metrics.cached_tokens.values[()] += prefilled.facts.remote_cached_tokens or 0
    if call.record is not None:
        call.record.note_prefill(prefilled.answer)
    return prefilled


async def _prefill_named(
    router: Router, call: Call, instance: Instance, bootstrap: Bootstrap
) -> Prefilled:
    """The same where P says nothing of its KV: the transfer's name is ours."""
    transfer_id = new_request_id()
    try:
        engine_id = await bootstrap.engine_id()
        body = await _ask_prefill(router, call, instance, for_prefill(transfer_id))
    except UpstreamError:
        bootstrap.forget()
        raise
    answer = decode_answer(instance, body)
    if is_stopped(answer):
        return Prefilled(instance, body, answer, None, HandOver(), is_final=True)
    params = bootstrap.for_decode(engine_id, transfer_id)
    facts = HandOver(do_remote_prefill=True)
    return Prefilled(instance, body, answer, params, facts, is_final=False)


async def _ask_prefill(router: Router, call: Call, instance: Instance, params: Raw) -> bytes:
    """P's whole answer."""
    call.prefiller = instance.name
    started = router.now()
    body = prefill_body(call, params)
    payload = instance.request(call.endpoint.path, call.attempt_id, call.forward, body)
    abandon = partial(_hang_up, router, instance)
    with await instance.pool.exchange(
        payload, call.deadline, whole=True, abandon=abandon
    ) as answer:
        body = answer.body
    router.metrics.stage_seconds.observe(router.now() - started, "prefill", instance.name)
    return body


def _hang_up(router: Router, instance: Instance, connection: Connection) -> None:
    """The client has left: P may have answered already, and hold KV that nobody comes for."""
    if connection.hang_up(HANG_UP_S):
        router.spawn(_release_late_answer(router, instance, connection))


async def _release_late_answer(router: Router, instance: Instance, answer: Connection) -> None:
    """The client left just as P answered: the answer says what P must let go."""
    try:
        body = await answer.read()
        prefilled = understand(instance, body)
    except UpstreamError:
        return  # aborted there, as it should be: nothing is held
    finally:
        answer.finish()
    router.release(instance, prefilled.facts)


def decode_answer(instance: Instance, body: bytes) -> Answer:
    """P's answer as an object."""
    try:
        return openai.answer_decoder.decode(body)
    except msgspec.DecodeError as exc:
        raise MalformedAnswer(instance.name, f"no OpenAI answer: {exc}") from exc


def is_stopped(answer: Answer) -> bool:
    """Whether every choice ended with its first token."""
    return all(choice.finish_reason != "length" for choice in answer.choices)


def understand(instance: Instance, body: bytes) -> Prefilled:
    """What P's answer means. A P without a PD connector answers "length" and no parameters."""
    answer = decode_answer(instance, body)
    try:
        facts = openai.hand_over_decoder.decode(answer.kv_transfer_params)
    except msgspec.DecodeError as exc:
        raise MalformedAnswer(instance.name, f"kv_transfer_params: {exc}") from exc
    has_ended = is_stopped(answer)
    if facts is None:
        if not has_ended:
            instance.warn_once(
                "no_params",
                "answered a prefill without kv_transfer_params: is its KV connector on? "
                "D prefills these requests itself",
            )
        return Prefilled(instance, body, answer, None, HandOver(), is_final=has_ended)
    is_final = has_ended or not facts.do_remote_prefill
    return Prefilled(instance, body, answer, answer.kv_transfer_params, facts, is_final)


def _answer_from_prefill(router: Router, call: Call, prefilled: Prefilled) -> None:
    """P's first token was the last: its answer is the answer."""
    router.metrics.first_token_seconds.observe(router.now() - call.arrival)
    router.release(prefilled.instance, prefilled.facts)
    if not call.streams:
        call.exchange.respond(200, prefilled.body, "application/json", call.reply_headers)
        return
    events = openai.final_answer_events(call.endpoint, prefilled.answer, call.ask)
    call.exchange.start_stream("text/event-stream", call.reply_headers, events)
    call.exchange.end()


# ---------------------------------------------------------------- decode


def _deliver_first_token(router: Router, call: Call, answer: Answer, instance: Instance) -> None:
    """Forward P's token before D is even asked, unless D will send it itself."""
    if call.answer_id is None and not instance.spec.repeats_first_token:
        events = openai.first_token_events(call.endpoint, answer, call.ask)
        call.exchange.start_stream("text/event-stream", call.reply_headers, events)
        router.metrics.first_token_seconds.observe(router.now() - call.arrival)
        call.answer_id = answer.id
    elif call.answer_id is not None and instance.spec.repeats_first_token:
        raise MalformedAnswer(instance.name, "would send the first token a second time")
