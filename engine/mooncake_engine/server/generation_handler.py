"""Runs one generation request on the engine and sends its response, complete or as a stream of
events. ``app`` mounts a ``GenerationEndpoint`` at each of the two generating paths."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Generic, TypeVar

from msgspec.structs import replace
from starlette.requests import ClientDisconnect, Request
from starlette.types import Receive, Scope, Send

from mooncake_engine.errors import (
    DeadlineExceeded,
    EngineError,
    GrammarFailed,
    InvalidRequest,
    Overloaded,
)
from mooncake_engine.messages import FinishReason, TokenLogprobs, TokenUpdate
from mooncake_engine.server.guarded_connection import WRITE_CHUNK
from mooncake_engine.server.kv_transfer_requests import kv_transfer_response
from mooncake_engine.server.live_requests import (
    ClientDisconnected,
    LiveRequests,
    request_id_from,
    until_disconnect,
)
from mooncake_engine.server.openai_protocol import (
    GenerationFields,
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
    encode_paced,
    encode_text,
    sse,
)
from mooncake_engine.server.response_sender import ResponseSender, StepWrites
from mooncake_engine.text.background_work import BackgroundWork
from mooncake_engine.text.completion_output import (
    ChoiceStream,
    EngineClient,
    TextOutputProcessor,
    TextUpdate,
    without_shown,
)
from mooncake_engine.text.tokenizer import Tokenizer
from mooncake_kv.params import KVTransferDict

logger = logging.getLogger(__name__)

_REPLAY_COST = 40
"""The cost of replaying one token through the parsers of an answer, in characters of text to
encode."""
Headers = Mapping[str, str]
"""HTTP headers by name, in lower case."""
Body = TypeVar("Body", bound=GenerationFields)


@dataclass(frozen=True, slots=True)
class GenerationHandler:
    """Generates responses with one engine; all generation endpoints of a server share it.

    Args:
        engine: the engine client that generates tokens.
        tokenizer: the model's tokenizer, for detokenising.
        metrics: counts requests, tokens and latencies.
        max_body_bytes: the largest request body that the server reads.
        tracing: records spans; None records none.
        step_writes: batches the writes of all streams that receive a token in the same step.
        work: processes the beginnings of answers that continue here.
    """

    engine: EngineClient
    tokenizer: Tokenizer
    metrics: ServerMetrics
    max_body_bytes: int
    tracing: Tracing | None = None
    step_writes: StepWrites = field(default_factory=StepWrites)
    work: BackgroundWork = field(default_factory=BackgroundWork)

    async def complete(self, context: RequestContext, builder: ResponseBuilder) -> bytes:
        """Generate all choices and return the encoded body of a response that is not streamed.

        Raises:
            EngineError: the engine rejects or can't finish the request; all its choices have been
                aborted.
        """
        try:
            await self._generate(context, lambda choice, update: choice.output.add(update))
            return await encode_paced(self._body(context, builder))
        except BaseException:
            # The client disconnected or another choice failed: no peer will fetch the KV that this
            # choice still holds.
            for choice in context.choices:
                if choice.output.kv_transfer_params is not None:
                    self.engine.abort(choice.output.kv_transfer_params["remote_request_id"])
            raise

    def _body(self, context: RequestContext, builder: ResponseBuilder) -> dict[str, Any]:
        shown = context.shown_choices()
        body: dict[str, Any] = {
            "id": builder.api_id(context),
            "object": builder.object_name,
            "created": context.created,
            "model": context.model,
            "choices": [builder.choice(context, choice) for choice in shown],
            "usage": context.usage(),
            **builder.top_level_fields(context, shown),
        }
        if context.kv_transfer.is_outgoing:
            body["kv_transfer_params"] = self._kv_transfer_response(context)
        return body

    async def stream(
        self, context: RequestContext, builder: ResponseBuilder, sender: ResponseSender
    ) -> None:
        """Generate all choices and send the events of a streamed response.

        The first event is sent once the engine has generated something, so that an earlier error
        can still have its own HTTP status. Raises the same errors as ``complete``."""
        writer = _ChunkWriter(context, builder, sender)
        await self._generate(context, writer.show, writer)
        sender.write(writer.closing())

    async def _generate(
        self,
        context: RequestContext,
        show: Callable[[GeneratedChoice, TextUpdate], None],
        writer: _ChunkWriter | None = None,
    ) -> None:
        """Run every choice to its end.

        Args:
            show: receives each update as soon as its text is final.
            writer: receives the tokens of a stream that add nothing but text; None for a response
                that is not streamed.
        """
        running = _RunningChoices(context, self.metrics, show)
        outcome = FinishReason.ABORT  # for choices without a finish reason of their own
        is_refused = False
        streams: list[ChoiceStream] = []
        try:
            self.engine.check_capacity(len(context.choices))
            for choice in context.choices:
                finished = context.kv_transfer.finished_update(choice.index)
                if finished is not None:
                    running.take(choice, self._replay(context, choice, finished))
                    continue
                stream = await self._choice_stream(context, choice, running, writer)
                streams.append(stream)
                await stream.start()
            await running.finished
        except EngineError as exc:
            outcome = _outcome(exc)
            is_refused = isinstance(exc, InvalidRequest | Overloaded)
            raise
        finally:
            for stream in streams:
                stream.close()
            running.close()
            if not is_refused:
                self.metrics.end(context, time.monotonic(), outcome)
            if self.tracing is not None:
                self.tracing.record(context, outcome)

    async def _choice_stream(
        self,
        context: RequestContext,
        choice: GeneratedChoice,
        running: _RunningChoices,
        writer: _ChunkWriter | None,
    ) -> ChoiceStream:
        processor = self._processor(context, choice)
        if context.generated and not context.kv_transfer.is_outgoing:
            replay = partial(processor.replay, context.generated)
            await self.work.on_text(_REPLAY_COST * len(context.generated), replay)
        on_plain_token = None
        if writer is not None and writer.shows_text_only and processor.is_plain:
            on_plain_token = _PlainTokens(choice, processor, running, writer).take
        return ChoiceStream(
            self.engine,
            choice.request,
            processor,
            on_text=lambda update: running.take(choice, update),
            on_error=running.fail,
            is_first_delivered=context.kv_transfer.is_first_delivered,
            on_plain_token=on_plain_token,
        )

    def _processor(self, context: RequestContext, choice: GeneratedChoice) -> TextOutputProcessor:
        # A prefill of an answer's middle is parsed by the instance that streams it.
        is_middle = context.kv_transfer.is_outgoing and context.generated
        parser = None if is_middle else context.make_parser()
        return TextOutputProcessor(self.tokenizer, choice.request.sampling, parser)

    def _replay(
        self, context: RequestContext, choice: GeneratedChoice, finished: TokenUpdate
    ) -> TextUpdate:
        """The text of a choice that finished on the prefill instance with its first token."""
        update = self._processor(context, choice).advance(finished)
        return without_shown(update) if context.kv_transfer.is_first_delivered else update

    def _kv_transfer_response(self, context: RequestContext) -> KVTransferDict | None:
        """The ``kv_transfer_params`` with which a decode instance continues; None if every choice
        finished here."""
        common: dict[str, Any] = {
            "created": context.created,
            "remote_cached_tokens": context.num_cached_tokens,
            "tokenizer_fingerprint": self.tokenizer.fingerprint,
        }
        [prompt, *others] = context.prompts
        if prompt.text is not None and not others:  # saves the decode instance from tokenising
            common["prompt_token_ids"] = prompt.token_ids + context.generated
        updates = [
            _finished_update(choice)
            if choice.output.kv_transfer_params is None
            else choice.output.kv_transfer_params
            for choice in context.choices
        ]
        return kv_transfer_response(updates, common)


def _outcome(error: EngineError) -> FinishReason:
    """The finish reason of choices that an error has ended."""
    if isinstance(error, GrammarFailed):
        return FinishReason.GRAMMAR
    return FinishReason.TIMEOUT if isinstance(error, DeadlineExceeded) else FinishReason.ERROR


class _RunningChoices:
    """Tracks the choices of one request while the engine generates them.

    Args:
        context: the request's context.
        metrics: counts tokens and latencies.
        show: receives each update.
    """

    def __init__(
        self,
        context: RequestContext,
        metrics: ServerMetrics,
        show: Callable[[GeneratedChoice, TextUpdate], None],
    ) -> None:
        self._is_prompt_only = context.is_prompt_only
        self._num_left = len(context.choices)
        self.metrics = metrics
        self._show = show
        self.finished: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Resolves when all choices have finished; the first error is set on it."""

    def take(self, choice: GeneratedChoice, update: TextUpdate) -> None:
        """Process an update of a choice."""
        if self.finished.done():  # another choice failed: ``complete`` releases this one's KV
            choice.output.kv_transfer_params = update.kv_transfer_params
            return
        self.metrics.advance(choice.stats, update, time.monotonic())
        self._show(choice, _without_output(update) if self._is_prompt_only else update)
        if update.finish is not None:
            self._num_left -= 1
            if not self._num_left:
                self.finished.set_result(None)

    def fail(self, error: Exception) -> None:
        """Fail the request with the error of one choice."""
        if not self.finished.done():
            self.finished.set_exception(error)

    def close(self) -> None:
        """Release the future: the handler no longer waits for it, and no update will follow. An
        error that was never retrieved is dropped."""
        if not self.finished.cancel() and not self.finished.cancelled():
            self.finished.exception()
        # Breaks a reference cycle (future, error, traceback frames, this object) that would
        # otherwise live until the next garbage collection.
        del self.finished


class _PlainTokens:
    """The fast path for streamed tokens of which the client sees nothing but text.

    It does as little as possible, because it runs once per token and stream.

    Args:
        choice: the choice that the tokens belong to.
        processor: detokenises them; its ``is_plain`` is true.
        running: the choices of the same request.
        writer: the chunk writer of the stream.
    """

    __slots__ = (
        "_finished",
        "_head",
        "_note_token",
        "_push_token",
        "_stats",
        "_tail",
        "_token_ids",
        "_write",
    )

    def __init__(
        self,
        choice: GeneratedChoice,
        processor: TextOutputProcessor,
        running: _RunningChoices,
        writer: _ChunkWriter,
    ) -> None:
        self._stats = choice.stats
        self._token_ids = choice.output.token_ids
        self._push_token = processor.push_token
        self._finished = running.finished
        self._note_token = running.metrics.note_token
        template = writer.templates[choice.index]
        self._head, self._tail = template.head, template.tail
        self._write = writer.sender.write_with_step

    def take(self, token_id: int) -> None:
        """Process the next token of the choice."""
        if self._finished.done():
            return
        self._note_token(self._stats, time.monotonic())
        self._token_ids.append(token_id)
        if text := self._push_token(token_id):
            self._write(self._head + encode_text(text) + self._tail)


class _ChunkWriter:
    """Encodes the updates of one streamed request as server-sent events.

    Args:
        context: the request's context.
        builder: lays out the chunks of the endpoint.
        sender: sends the encoded events.
    """

    def __init__(
        self, context: RequestContext, builder: ResponseBuilder, sender: ResponseSender
    ) -> None:
        self.sender = sender
        self.templates = [ChunkTemplate(builder, context, c.index) for c in context.choices]
        self._context = context
        self._builder = builder
        self._is_opened = [False] * len(context.choices)
        # Whether each chunk has token ids or usage beside its text.
        self._has_details = context.returns_token_ids or context.has_usage_in_chunks

    @property
    def shows_text_only(self) -> bool:
        """Whether the chunks between first and last hold nothing but text, so that a
        ``ChunkTemplate`` can encode them."""
        return not (self._has_details or self._context.is_prompt_only)

    def show(self, choice: GeneratedChoice, update: TextUpdate) -> None:
        """Write the events of one update, if it has anything to show."""
        if events := self._encode(choice, update):
            self.sender.write(events)

    def _encode(self, choice: GeneratedChoice, update: TextUpdate) -> bytes:
        # Not output.add(): once text is streamed, only the counts are needed again.
        output = choice.output
        output.token_ids.extend(update.token_ids)
        output.num_cached_tokens = max(output.num_cached_tokens, update.num_cached_tokens)
        output.prompt_logprobs.extend(update.prompt_logprobs)
        if update.prompt_logprobs and update.finish is None:
            return b""  # more prompt log probabilities, or the first token, will follow
        if self._is_opened[choice.index]:
            return self._delta(choice, update, is_first=False)
        self._is_opened[choice.index] = True
        update = replace(update, prompt_logprobs=tuple(output.prompt_logprobs))
        return self._open(choice) + self._delta(choice, update, is_first=True)

    def closing(self) -> bytes:
        """The events that follow the last update."""
        if not self._context.includes_usage:
            return DONE
        return sse(chunk(self._builder, self._context, [], usage=self._context.usage())) + DONE

    def _open(self, choice: GeneratedChoice) -> bytes:
        context = self._context
        if context.generated:
            return b""
        opening = self._builder.opening(context, choice.index)
        if opening is None and not context.returns_token_ids:
            return b""
        opening = opening or self._builder.plain_delta(choice.index, "")
        if not context.returns_token_ids:
            return self._chunk(choice, opening)
        ids = {"prompt_token_ids": choice.prompt.token_ids}
        # as in vLLM: a chat has one prompt, completions have one per choice
        if context.is_chat:
            return self._chunk(choice, opening, **ids)
        return self._chunk(choice, opening | ids)

    def _delta(self, choice: GeneratedChoice, update: TextUpdate, *, is_first: bool) -> bytes:
        context = self._context
        is_first = is_first and not context.kv_transfer.is_first_delivered
        shown_reasoning = update.reasoning and context.shows_reasoning
        has_details = bool(update.logprobs or update.calls or shown_reasoning)
        if self._has_details and not has_details:
            shows_ids = context.returns_token_ids and update.token_ids
            has_details = bool(shows_ids or (context.has_usage_in_chunks and update.text))
        if update.finish is not None or has_details or (is_first and context.echoes):
            delta = self._builder.delta(context, choice, update, is_first=is_first)
            return self._chunk(choice, delta)
        return self.templates[choice.index].encode(update.text) if update.text else b""

    def _chunk(self, choice: GeneratedChoice, shown: dict[str, Any], **more: Any) -> bytes:
        context = self._context
        if context.has_usage_in_chunks:
            more["usage"] = context.usage_of(choice)
        return sse(chunk(self._builder, context, [shown], **more))


def _without_output(update: TextUpdate) -> TextUpdate:
    """The update without generated text and tokens, for a request that wants only its prompt."""
    return TextUpdate(
        "",
        finish=update.finish and FinishReason.LENGTH,
        num_cached_tokens=update.num_cached_tokens,
        prompt_logprobs=update.prompt_logprobs,
    )


def _finished_update(choice: GeneratedChoice) -> TokenUpdate:
    """A choice that finished with its first token, as an update that a decode instance replays."""
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


async def read_body(request: Request, max_bytes: int) -> bytes:
    """Read the whole body of a request.

    Raises:
        InvalidRequest: the body is larger than ``max_bytes`` (413). Nothing is read of one whose
            length says so, nor the rest of one without a length.
    """
    declared = request.headers.get("content-length", "0")  # digits, as the HTTP parser has checked
    if int(declared.lstrip("0") or "0") > max_bytes:  # int() refuses thousands of zeros
        raise _too_large(max_bytes)
    pieces, num_bytes = [], 0
    async for piece in request.stream():
        pieces.append(piece)
        num_bytes += len(piece)
        if num_bytes > max_bytes:
            raise _too_large(max_bytes)
    return b"".join(pieces)


def _too_large(max_bytes: int) -> InvalidRequest:
    return InvalidRequest(
        f"the body is larger than {max_bytes} bytes (--max-body-bytes)", status=413
    )


@dataclass(frozen=True, slots=True)
class GenerationEndpoint(Generic[Body]):
    """``/v1/completions`` or ``/v1/chat/completions``, as an ASGI application of its own so that it
    can watch for client disconnects.

    Args:
        request_type: the type that the body is decoded to.
        prepare: validates a request (with its id and headers) and creates its context.
        builder: lays out the responses.
        handler: generates the responses.
        live: the registry that holds each request while it is served.
    """

    request_type: type[Body]
    prepare: Callable[[Body, str, Headers], Awaitable[RequestContext]]
    builder: ResponseBuilder
    handler: GenerationHandler
    live: LiveRequests

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request. If the client disconnects, its generation is cancelled."""
        http = Request(scope, receive)
        header = http.headers.get("x-request-id")
        request_id = request_id_from(header)
        write_chunk = scope.get("extensions", {}).get(WRITE_CHUNK)
        sender = ResponseSender(send, request_id, self.handler.step_writes, write_chunk)
        try:
            body = await read_body(http, self.handler.max_body_bytes)
            request = decode_request(body, self.request_type)
            if request.request_id is not None:
                sender.request_id = request_id = request_id_from(header, request.request_id)
            with self.live.tracking(request_id) as ending:
                serving = self._serve(request, request_id, http, sender)
                await until_disconnect(receive, serving, ending)
        except (ClientDisconnected, ClientDisconnect):
            logger.info("request %s: the client disconnected", request_id)
        except EngineError as exc:
            await sender.fail(to_api_error(exc))
        except Exception as exc:  # top of a request: no error may take the server down
            logger.exception("request %s failed", request_id)
            await sender.fail(to_api_error(exc))
        finally:
            sender.close()

    async def _serve(
        self, request: Body, request_id: str, http: Request, sender: ResponseSender
    ) -> None:
        context = await self.prepare(request, request_id, http.headers)
        context.note_sender(http.client.host if http.client else None)
        if not context.is_streamed:
            await sender.send_json(await self.handler.complete(context, self.builder))
            return
        await self.handler.stream(context, self.builder, sender)
        await sender.end()
