"""Runs one request on the engine and sends its response: whole, or as a stream of events."""

from __future__ import annotations

import logging
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any, Generic

import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.types import Receive, Scope, Send

from mooncake_engine.errors import EngineError, GrammarFailed, InvalidRequest
from mooncake_engine.messages import FinishReason, TokenLogprobs, TokenUpdate
from mooncake_engine.server.kv_transfer_requests import kv_transfer_response
from mooncake_engine.server.live_requests import (
    ClientGone,
    LiveRequests,
    merge,
    request_id_from,
    until_disconnect,
)
from mooncake_engine.server.openai_protocol import (
    ApiError,
    RequestType,
    decode_request,
    to_api_error,
)
from mooncake_engine.server.request_context import GeneratedChoice, RequestContext
from mooncake_engine.server.request_metrics import ServerMetrics
from mooncake_engine.server.request_tracing import Tracing
from mooncake_engine.server.response_builders import (
    DONE,
    ChunkTemplate,
    ResponseBuilder,
    chunk,
    sse,
)
from mooncake_engine.text.completion_output import (
    EngineClient,
    TextOutputProcessor,
    TextUpdate,
    generate_text,
    without_shown,
)
from mooncake_engine.text.tokenizer import Tokenizer
from mooncake_kv.params import KVTransferDict

log = logging.getLogger(__name__)

_JSON = b"application/json"
_EVENTS = b"text/event-stream; charset=utf-8"
Headers = Mapping[str, str]
"""By names in lower case."""


@dataclass(frozen=True, slots=True)
class GenerationHandler:
    """Generates responses with one engine.

    Args:
        engine, tokenizer: where text comes from.
        metrics: counts requests, tokens and times.
        max_body_bytes: longer bodies are not read.
        tracing: records spans; None for none.
    """

    engine: EngineClient
    tokenizer: Tokenizer
    metrics: ServerMetrics
    max_body_bytes: int
    tracing: Tracing | None = None

    async def complete(self, context: RequestContext, builder: ResponseBuilder) -> bytes:
        """The body of a response that is not streamed.

        Raises:
            EngineError: what ``generate_text`` raises; every choice of the request is aborted.
        """
        try:
            async with aclosing(self._updates(context)) as updates:
                async for choice, update in updates:
                    choice.output.add(update)
        except BaseException:
            # The client has left, or another choice failed: no peer will fetch what is held.
            for choice in context.choices:
                if choice.output.kv_transfer_params is not None:
                    self.engine.abort(choice.output.kv_transfer_params["remote_request_id"])
            raise
        shown = context.shown_choices()
        body: dict[str, Any] = {
            "id": builder.api_id(context),
            "object": builder.object_name,
            "created": context.created,
            "model": context.model,
            "choices": [builder.choice(context, choice) for choice in shown],
            "usage": context.usage(),
            **builder.beside_choices(context, shown),
        }
        if context.kv_transfer.is_outgoing:
            body["kv_transfer_params"] = self._kv_transfer_response(context)
        return msgspec.json.encode(body)

    async def stream(
        self, context: RequestContext, builder: ResponseBuilder
    ) -> AsyncGenerator[bytes, None]:
        """The events of a streamed response. The first one comes when the engine has generated
        something, so that errors before it have a status of their own; raises like ``complete``."""
        writer = _ChunkWriter(context, builder)
        async with aclosing(self._updates(context)) as updates:
            async for choice, update in updates:
                events = writer.write(choice, update)
                if events:
                    yield events
        yield writer.closing()

    async def _updates(
        self, context: RequestContext
    ) -> AsyncGenerator[tuple[GeneratedChoice, TextUpdate], None]:
        choices = context.choices
        outcome = FinishReason.ABORT  # of choices that have not ended by themselves
        try:
            self.engine.check_room(len(choices))
            streams = [self._generate(context, choice) for choice in choices]
            async with aclosing(merge(streams)) as merged:
                async for index, update in merged:
                    self.metrics.advance(choices[index].stats, update, time.monotonic())
                    shown = _without_output(update) if context.is_prompt_only else update
                    yield choices[index], shown
        except EngineError as exc:
            is_grammar = isinstance(exc, GrammarFailed)
            outcome = FinishReason.GRAMMAR if is_grammar else FinishReason.ERROR
            raise
        finally:
            self.metrics.end(context, time.monotonic(), outcome)
            if self.tracing is not None:
                self.tracing.record(context, outcome)

    def _generate(
        self, context: RequestContext, choice: GeneratedChoice
    ) -> AsyncGenerator[TextUpdate, None]:
        finished = context.kv_transfer.finished_update(choice.index)
        if finished is not None:
            return self._replay(context, choice, finished)
        return generate_text(
            self.engine,
            self.tokenizer,
            choice.request,
            parser=context.make_parser(),
            is_first_delivered=context.kv_transfer.is_first_delivered,
        )

    async def _replay(
        self, context: RequestContext, choice: GeneratedChoice, finished: TokenUpdate
    ) -> AsyncGenerator[TextUpdate, None]:
        """A choice that ended at the prefill instance with its first token."""
        processor = TextOutputProcessor(
            self.tokenizer, choice.request.sampling, context.make_parser()
        )
        update = processor.advance(finished)
        yield without_shown(update) if context.kv_transfer.is_first_delivered else update

    def _kv_transfer_response(self, context: RequestContext) -> KVTransferDict | None:
        """What a decode instance needs to continue; None if every choice ended here."""
        facts: dict[str, Any] = {
            "created": context.created,
            "remote_cached_tokens": context.num_cached_tokens,
            "tokenizer_fingerprint": self.tokenizer.fingerprint,
        }
        [prompt, *others] = context.prompts
        if prompt.text is not None and not others:  # who continues need not tokenise again
            facts["prompt_token_ids"] = prompt.token_ids
        updates = [
            _finished_update(choice)
            if choice.output.kv_transfer_params is None
            else choice.output.kv_transfer_params
            for choice in context.choices
        ]
        return kv_transfer_response(updates, facts)


class _ChunkWriter:
    """Encodes the updates of one streamed request as events."""

    def __init__(self, context: RequestContext, builder: ResponseBuilder) -> None:
        self._context = context
        self._builder = builder
        self._templates = [ChunkTemplate(builder, context, c.index) for c in context.choices]
        self._is_opened = [False] * len(context.choices)

    def write(self, choice: GeneratedChoice, update: TextUpdate) -> bytes:
        """The events of one update; empty while nothing is certain."""
        # Not output.add(): of what was streamed only the counts are needed again.
        output = choice.output
        output.token_ids.extend(update.token_ids)
        output.num_cached_tokens = max(output.num_cached_tokens, update.num_cached_tokens)
        output.prompt_logprobs.extend(update.prompt_logprobs)
        if update.prompt_logprobs and update.finish is None:
            return b""  # more of the prompt follows, or the first token
        if self._is_opened[choice.index]:
            return self._delta(choice, update, is_first=False)
        self._is_opened[choice.index] = True
        update = replace(update, prompt_logprobs=tuple(output.prompt_logprobs))
        return self._open(choice) + self._delta(choice, update, is_first=True)

    def closing(self) -> bytes:
        """The events after the last update."""
        if not self._context.includes_usage:
            return DONE
        return sse(chunk(self._builder, self._context, [], usage=self._context.usage())) + DONE

    def _open(self, choice: GeneratedChoice) -> bytes:
        context = self._context
        opening = self._builder.opening(context, choice.index)
        if opening is None and not context.returns_token_ids:
            return b""
        opening = opening or self._builder.plain_delta(choice.index, "")
        if context.returns_token_ids:
            opening["prompt_token_ids"] = choice.prompt.token_ids
        return self._chunk(opening)

    def _delta(self, choice: GeneratedChoice, update: TextUpdate, *, is_first: bool) -> bytes:
        context = self._context
        is_first = is_first and not context.kv_transfer.is_first_delivered
        shows_ids = context.returns_token_ids and update.token_ids
        shown_reasoning = update.reasoning and context.shows_reasoning
        has_details = update.logprobs or update.calls or shows_ids or shown_reasoning
        is_counted = context.has_usage_in_chunks and update.text
        is_echo = is_first and context.echoes
        if update.finish is not None or has_details or is_counted or is_echo:
            delta = self._builder.delta(context, choice, update, is_first=is_first)
            return self._chunk(delta)
        return self._templates[choice.index].encode(update.text) if update.text else b""

    def _chunk(self, choice: dict[str, Any]) -> bytes:
        context = self._context
        so_far = {"usage": context.usage()} if context.has_usage_in_chunks else {}
        return sse(chunk(self._builder, context, [choice], **so_far))


def _without_output(update: TextUpdate) -> TextUpdate:
    """What is left where no token was asked for."""
    return TextUpdate(
        "",
        finish=update.finish and FinishReason.LENGTH,
        num_cached_tokens=update.num_cached_tokens,
        prompt_logprobs=update.prompt_logprobs,
    )


def _finished_update(choice: GeneratedChoice) -> TokenUpdate:
    """A choice that is complete with its first token, in the form that a peer can replay."""
    output = choice.output
    ends_with_token = output.finish is FinishReason.STOP and not isinstance(output.stop_reason, str)
    logprobs: tuple[TokenLogprobs, ...] | None = tuple(output.logprobs) or None
    return TokenUpdate(
        choice.request.request_id,
        tuple(output.token_ids),
        logprobs,
        finish=output.finish or FinishReason.STOP,
        stop_token_id=output.token_ids[-1] if ends_with_token else None,
        num_cached_tokens=output.num_cached_tokens,
    )


class ResponseSender:
    """Sends one HTTP response over ASGI, whole or event by event. Its status goes with its first
    bytes, so that an error before them has a status of its own."""

    def __init__(self, send: Send, request_id: str) -> None:
        self._send = send
        self._request_id = request_id.encode()
        self._is_streaming = False

    async def whole(self, body: bytes) -> None:
        """A complete response in JSON."""
        await self._start(
            200, [(b"content-type", _JSON), (b"content-length", str(len(body)).encode())]
        )
        await self._send({"type": "http.response.body", "body": body})

    async def event(self, event: bytes) -> None:
        """One event of a stream; the first one sends status 200."""
        if not self._is_streaming:
            self._is_streaming = True
            unbuffered = [(b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no")]
            await self._start(200, [(b"content-type", _EVENTS), *unbuffered])
        await self._send({"type": "http.response.body", "body": event, "more_body": True})

    async def end(self) -> None:
        """The stream is complete."""
        await self._send({"type": "http.response.body", "body": b""})

    async def fail(self, error: ApiError) -> None:
        """An error: with its own status, or as the last event of a stream that has begun."""
        if self._is_streaming:
            await self.event(b"data: " + error.body + b"\n\n")
            await self.end()
            return
        response = error.response()
        await self._start(error.status, response.raw_headers)
        await self._send({"type": "http.response.body", "body": error.body})

    async def _start(self, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        headers = [*headers, (b"x-request-id", self._request_id)]
        await self._send({"type": "http.response.start", "status": status, "headers": headers})


async def read_body(request: Request, max_bytes: int) -> bytes:
    """All of a request's body.

    Raises:
        InvalidRequest: it has more than ``max_bytes`` (413); the rest of it is left unread.
    """
    pieces, num_bytes = [], 0
    async for piece in request.stream():
        pieces.append(piece)
        num_bytes += len(piece)
        if num_bytes > max_bytes:
            raise InvalidRequest(
                f"the body must have at most {max_bytes} bytes (--max-body-bytes), got more",
                status=413,
            )
    return b"".join(pieces)


@dataclass(frozen=True, slots=True)
class GenerationEndpoint(Generic[RequestType]):
    """``/v1/completions`` or ``/v1/chat/completions``: an ASGI application of its own, to watch for
    clients that go away.

    Args:
        request_type: what the body holds.
        prepare: checks a request with its id and headers, and makes its context.
        builder: how responses look.
        handler: generates them.
        live: where requests are entered while they are served.
    """

    request_type: type[RequestType]
    prepare: Callable[[RequestType, str, Headers], Awaitable[RequestContext]]
    builder: ResponseBuilder
    handler: GenerationHandler
    live: LiveRequests

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request; a client that goes away ends its generation."""
        request = Request(scope, receive)
        request_id = request_id_from(request.headers.get("x-request-id"))
        sender = ResponseSender(send, request_id)
        try:
            body = await read_body(request, self.handler.max_body_bytes)
            with self.live.tracking(request_id) as ending:
                serving = self._serve(body, request_id, request, sender)
                await until_disconnect(receive, serving, ending)
        except (ClientGone, ClientDisconnect):
            log.info("request %s: the client went away", request_id)
        except EngineError as exc:
            await sender.fail(to_api_error(exc))
        except Exception as exc:  # the door of a request: nothing may take the server down
            log.exception("request %s failed", request_id)
            await sender.fail(to_api_error(exc))

    async def _serve(
        self, body: bytes, request_id: str, http: Request, sender: ResponseSender
    ) -> None:
        request = decode_request(body, self.request_type)
        context = await self.prepare(request, request_id, http.headers)
        context.note_sender(http.client.host if http.client else None)
        if not context.is_streamed:
            await sender.whole(await self.handler.complete(context, self.builder))
            return
        async with aclosing(self.handler.stream(context, self.builder)) as events:
            async for event in events:
                await sender.event(event)
        await sender.end()
