"""The endpoints. Those that generate are ASGI applications of their own, to watch for clients that
go away; the others are plain Starlette endpoints."""

from __future__ import annotations

import importlib.metadata
import logging
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, Generic

import msgspec
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from mooncake_engine.errors import EngineDead, EngineError, InvalidRequest
from mooncake_engine.server.answering import Answerer
from mooncake_engine.server.decoding import RequestType, decode_request
from mooncake_engine.server.envelope import Envelope
from mooncake_engine.server.errors import ApiError, to_api_error
from mooncake_engine.server.forms import Form
from mooncake_engine.server.jobs import Job
from mooncake_engine.server.planning import Planner
from mooncake_engine.server.prompts import encode, render_chat
from mooncake_engine.server.protocol import AbortRequest, DetokenizeRequest, TokenizeRequest
from mooncake_engine.server.reply import Reply
from mooncake_engine.server.request_ids import LiveRequests
from mooncake_engine.server.streams import ClientGone, ShuttingDown, until_disconnect
from mooncake_engine.server.tools import shown_tools

log = logging.getLogger(__name__)


_MAX_BODY_BYTES = 64 << 20


async def read_body(request: Request) -> bytes:
    """All of a request's body.

    Raises:
        InvalidRequest: it is too large (413); the rest of it is left unread.
    """
    pieces, num_bytes = [], 0
    async for piece in request.stream():
        pieces.append(piece)
        num_bytes += len(piece)
        if num_bytes > _MAX_BODY_BYTES:
            raise InvalidRequest(
                f"the body must have at most {_MAX_BODY_BYTES} bytes, got more", status=413
            )
    return b"".join(pieces)


@dataclass(frozen=True, slots=True)
class GenerationEndpoint(Generic[RequestType]):
    """``/v1/completions`` or ``/v1/chat/completions``.

    Args:
        request_type: what the body holds.
        plan: turns a request and its envelope into a job.
        form: how answers look.
    """

    request_type: type[RequestType]
    plan: Callable[[RequestType, Envelope], Awaitable[Job]]
    form: Form
    answerer: Answerer
    live: LiveRequests

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request; a client that goes away ends its generation."""
        request = Request(scope, receive)
        envelope = Envelope.of(request.headers)
        request_id = envelope.request_id
        reply = Reply(send, request_id)
        try:
            body = await read_body(request)
            with self.live.tracking(request_id) as ending:
                await until_disconnect(receive, self._serve(body, envelope, reply), ending)
        except (ClientGone, ClientDisconnect):
            log.info("request %s: the client went away", request_id)
        except EngineError as exc:
            await reply.fail(to_api_error(exc))
        except Exception as exc:  # the door of a request: nothing may take the server down
            log.exception("request %s failed", request_id)
            await reply.fail(to_api_error(exc))

    async def _serve(self, body: bytes, envelope: Envelope, reply: Reply) -> None:
        job = await self.plan(decode_request(body, self.request_type), envelope)
        if not job.is_streamed:
            await reply.whole(await self.answerer.whole(job, self.form))
            return
        async with aclosing(self.answerer.streamed(job, self.form)) as events:
            async for event in events:
                await reply.event(event)
        await reply.end()


@dataclass(frozen=True, slots=True)
class PlainEndpoints:
    """Everything that does not generate."""

    planner: Planner
    answerer: Answerer
    live: LiveRequests
    started: int

    async def models(self, _: Request) -> Response:
        """``GET /v1/models``."""
        cards = [self._card(name) for name in self.planner.model_names]
        return _json({"object": "list", "data": cards})

    async def model(self, request: Request) -> Response:
        """``GET /v1/models/NAME``; names may hold slashes."""
        name = request.path_params["model"]
        self.planner.check_model(name)
        return _json(self._card(name))

    async def version(self, _: Request) -> Response:
        """``GET /version``."""
        return _json({"version": importlib.metadata.version("mooncake-engine")})

    async def refuse_adapter(self, _: Request) -> Response:
        """``POST /v1/load_lora_adapter`` and its counterpart: 501."""
        message = "LoRA adapters are not served: merge the adapter into the model's weights"
        return ApiError(501, message, "not_implemented_error", code="lora_not_served").response()

    async def topology(self, _: Request) -> Response:
        """``GET /kv/topology``: where peers reach this instance; 404 if it works alone."""
        topology = self.answerer.engine.topology()
        if topology is None:
            message = "this instance works alone: it has no KV connector"
            return ApiError(404, message, "not_found_error").response()
        return Response(msgspec.json.encode(topology), media_type="application/json")

    async def health(self, _: Request) -> Response:
        """``GET /health``, ``GET /ready``: 200 while requests are taken, or 503 with the reason;
        a proxy learns here which pairs of instances to leave alone."""
        try:
            self.answerer.engine.check_health()
            self.live.check_open()
        except (EngineDead, ShuttingDown) as exc:
            return to_api_error(exc).response()
        engine = self.answerer.engine
        pairing = engine.pairing()
        peers = {} if pairing is None else msgspec.structs.asdict(pairing)
        return _json({"status": "ok", "role": engine.config.role.value, **peers})

    async def metrics(self, _: Request) -> Response:
        """``GET /metrics``."""
        exposition = self.answerer.metrics.exposition()
        return Response(exposition, headers={"content-type": CONTENT_TYPE_LATEST})

    async def abort(self, request: Request) -> Response:
        """``POST /abort``: 200 whether or not anything was left to abort."""
        wanted = decode_request(await read_body(request), AbortRequest)
        self.live.abort(wanted.request_id)
        self.answerer.engine.abort(wanted.request_id)
        return _json({})

    async def reset_prefix_cache(self, _: Request) -> Response:
        """``POST /reset_prefix_cache``: 200, or 409 while requests use the KV cache."""
        if await self.answerer.engine.reset_prefix_cache():
            return _json({})
        message = "the prefix cache can't be reset while requests use the KV cache; try again later"
        return ApiError(409, message, "invalid_request_error").response()

    async def tokenize(self, request: Request) -> Response:
        """``POST /tokenize``."""
        wanted = decode_request(await read_body(request), TokenizeRequest)
        self.planner.check_model(wanted.model)
        tokenizer = self.planner.tokenizer
        text, adds_special = self._text(wanted)
        ids = await encode(tokenizer, text, add_special_tokens=adds_special)
        answer: dict[str, Any] = {
            "count": len(ids),
            "max_model_len": self.planner.facts.max_model_len,
            "tokens": ids,
        }
        if wanted.return_token_strs:
            names = [tokenizer.token_bytes(token_id) for token_id in ids]
            answer["token_strs"] = [name.decode(errors="replace") for name in names]
        return _json(answer)

    async def detokenize(self, request: Request) -> Response:
        """``POST /detokenize``."""
        wanted = decode_request(await read_body(request), DetokenizeRequest)
        self.planner.check_model(wanted.model)
        size = self.planner.facts.vocab_size
        for token_id in wanted.tokens:
            if not 0 <= token_id < size:
                raise InvalidRequest(
                    f"tokens must be in [0, {size}), got {token_id}", param="tokens"
                )
        text = self.planner.tokenizer.decode(wanted.tokens, skip_special_tokens=False)
        return _json({"prompt": text})

    def _card(self, name: str) -> dict[str, Any]:
        return {
            "id": name,
            "object": "model",
            "created": self.started,
            "owned_by": "mooncake-engine",
            "max_model_len": self.planner.facts.max_model_len,
        }

    def _text(self, wanted: TokenizeRequest) -> tuple[str, bool]:
        """Text, and whether special tokens are added by default: not around a chat template."""
        adds_special = wanted.add_special_tokens
        if (wanted.prompt is None) == (wanted.messages is None):
            raise InvalidRequest("give either prompt or messages", param="prompt")
        if wanted.prompt is not None:
            return wanted.prompt, adds_special is not False
        text = render_chat(wanted, self.planner.tokenizer, shown_tools(wanted.tools or ()))
        return text, bool(adds_special)


def _json(answer: dict[str, Any]) -> Response:
    return Response(msgspec.json.encode(answer), media_type="application/json")
