"""The ASGI application of one API server: routes, middleware, and the endpoints that do not
generate. ``api_server`` and each API worker create one over their engine client."""

from __future__ import annotations

import difflib
import hmac
import importlib.metadata
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from http import HTTPStatus
from typing import Any

import msgspec
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import HTTPConnection, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from mooncake_api import COUNT_TOKENS_PATH, RequestRejected
from mooncake_api.api_formats import API_FORMATS, MESSAGES, count_tokens_request
from mooncake_engine.errors import EngineDead, EngineError, EngineStalled, InvalidRequest
from mooncake_engine.sampling_defaults import read_sampling_defaults
from mooncake_engine.server.generation_handler import (
    GenerationEndpoint,
    GenerationHandler,
    read_body,
)
from mooncake_engine.server.input_processor import (
    InputProcessor,
    check_chat_size,
    tokenize_chat,
)
from mooncake_engine.server.live_requests import (
    LiveRequests,
    ShuttingDown,
)
from mooncake_engine.server.metric_cells import MetricCells
from mooncake_engine.server.openai_protocol import (
    AbortBody,
    ApiError,
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
    decode_request,
    to_api_error,
)
from mooncake_engine.server.openapi_schema import openapi_schema
from mooncake_engine.server.request_metrics import LatencyObjectives, ServerMetrics
from mooncake_engine.server.request_tracing import Tracing
from mooncake_engine.server.response_builders import (
    ChatResponseBuilder,
    CompletionResponseBuilder,
)
from mooncake_engine.server.server_options import ServerOptions
from mooncake_engine.server.tool_choice import shown_tools
from mooncake_engine.server.translated_endpoint import TranslatedEndpoint, translated_error
from mooncake_engine.text.background_work import CHARACTERS_PER_TOKEN
from mooncake_engine.text.completion_output import EngineClient
from mooncake_engine.text.limits import check_text_size, longest_body
from mooncake_engine.text.tokenizer import Tokenizer
from mooncake_kv.pool.pool_events import StoreReport

_DEFAULTS = ServerOptions()
_MODEL_PATH = "/v1/models/"
_MAX_SHOWN_PATH = 100
_MAX_DETOKENIZED_TOKENS = 1 << 20
_COUNTED_PATHS = frozenset(
    {
        "/v1/completions",
        "/v1/chat/completions",
        *API_FORMATS,
        COUNT_TOKENS_PATH,
        "/v1/models",
        _MODEL_PATH,
        "/tokenize",
        "/detokenize",
        "/abort",
    }
)


def create_app(
    engine: EngineClient,
    tokenizer: Tokenizer,
    options: ServerOptions = _DEFAULTS,
    tracing: Tracing | None = None,
    live: LiveRequests | None = None,
    cells: MetricCells | None = None,
) -> Starlette:
    """Create the application that serves the OpenAI API over a started engine.

    The caller owns engine and tracing and closes both. The caller also closes ``live`` when the
    server should accept no more requests.

    Args:
        engine: a started engine client.
        tokenizer: the model's tokenizer.
        options: the server's options.
        tracing: records a span per request; None records none.
        live: the registry of requests in progress; None creates one.
        cells: memory shared by several API workers in which they count metrics; None where this
            process is the only one.
    """
    tool_format = options.tool_format(tokenizer)
    names = (engine.config.model_name, *options.model_aliases)
    defaults = read_sampling_defaults(engine.config)
    has_reasoning = options.has_reasoning(tokenizer)
    processor = InputProcessor(names, engine.info, tokenizer, tool_format, defaults, has_reasoning)
    objectives = LatencyObjectives.of_ms(options.slo_ttft_ms, options.slo_tbt_ms)
    metrics = ServerMetrics(engine, objectives, sorted(_COUNTED_PATHS), cells)
    max_body_bytes = options.max_body_bytes or longest_body(engine.info)
    handler = GenerationHandler(
        engine, tokenizer, metrics, max_body_bytes, tracing, work=processor.work
    )
    live = LiveRequests() if live is None else live
    plain = PlainEndpoints(processor, handler, live, started=int(time.time()))
    routes = [*_generation_routes(processor, handler, live), *_plain_routes(plain)]
    if options.enable_tokenizer_info_endpoint:
        routes.append(Route("/tokenizer_info", plain.tokenizer_info, methods=["GET"]))
    return Starlette(
        routes=[*routes, _schema_route(routes)],
        middleware=_middleware(options, metrics),
        exception_handlers={EngineError: _engine_error, HTTPException: _http_error},
    )


def _middleware(options: ServerOptions, metrics: ServerMetrics) -> list[Middleware]:
    middleware = [Middleware(_CountResponses, count=metrics.count_response)]
    if options.allowed_origins:  # before the keys, which browsers don't send with a preflight
        cross_origin = Middleware(
            CORSMiddleware,
            allow_origins=options.allowed_origins,
            allow_methods=("GET", "POST"),
            allow_headers=("*",),
            expose_headers=("X-Request-Id", "Retry-After", "X-Should-Retry"),
        )
        middleware.append(cross_origin)
    if options.access_log != "off":
        worker = {"worker": options.worker} if options.worker else {}
        middleware.append(Middleware(AccessLog, level=options.access_log, extra_fields=worker))
    if options.api_keys:
        middleware.append(Middleware(KeyCheck, keys=options.api_keys))
    return middleware


class _CountResponses:
    """Counts responses by path and status, except health checks and metric scrapes."""

    def __init__(self, app: ASGIApp, count: Callable[[str, str, int], None]) -> None:
        self._app = app
        self._count = count

    def __call__(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        path = scope.get("path", "")
        if path.startswith(_MODEL_PATH):
            path = _MODEL_PATH
        if path not in _COUNTED_PATHS:
            return self._app(scope, receive, send)

        def counted(message: Message) -> Awaitable[None]:
            if message["type"] == "http.response.start":
                self._count(scope["method"], path, message["status"])
            return send(message)

        return self._app(scope, receive, counted)


def _generation_routes(
    processor: InputProcessor, handler: GenerationHandler, live: LiveRequests
) -> list[Route]:
    token_bytes = processor.tokenizer.token_bytes
    completions = GenerationEndpoint(
        CompletionRequest,
        processor.completion,
        CompletionResponseBuilder(token_bytes),
        handler,
        live,
    )
    chat = GenerationEndpoint(
        ChatRequest, processor.chat, ChatResponseBuilder(token_bytes), handler, live
    )
    return [
        Route("/v1/completions", completions, methods=["POST"]),
        Route("/v1/chat/completions", chat, methods=["POST"]),
        *(
            Route(path, TranslatedEndpoint(each, chat, handler.max_body_bytes), methods=["POST"])
            for path, each in API_FORMATS.items()
        ),
    ]


def _plain_routes(plain: PlainEndpoints) -> list[Route]:
    return [
        Route("/v1/models", plain.models, methods=["GET"]),
        Route("/v1/models/{model:path}", plain.model, methods=["GET"]),
        Route("/version", plain.version, methods=["GET"]),
        Route("/v1/load_lora_adapter", plain.refuse_adapter, methods=["POST"]),
        Route("/v1/unload_lora_adapter", plain.refuse_adapter, methods=["POST"]),
        Route("/health", plain.health, methods=["GET"]),
        Route("/ready", plain.health, methods=["GET"]),
        Route("/ping", plain.health, methods=["GET", "POST"]),
        Route("/load", plain.load, methods=["GET"]),
        Route("/metrics", plain.metrics, methods=["GET"]),
        Route("/kv/topology", plain.topology, methods=["GET"]),
        Route("/expert_load", plain.expert_load, methods=["GET"]),
        Route("/abort", plain.abort, methods=["POST"]),
        Route("/reset_prefix_cache", plain.reset_prefix_cache, methods=["POST"]),
        Route("/tokenize", plain.tokenize, methods=["POST"]),
        Route(COUNT_TOKENS_PATH, plain.count_tokens, methods=["POST"]),
        Route("/detokenize", plain.detokenize, methods=["POST"]),
    ]


def _schema_route(routes: Sequence[Route]) -> Route:
    schema = msgspec.json.encode(openapi_schema(routes))

    async def published(_: Request) -> Response:
        return Response(schema, media_type="application/json")

    return Route("/openapi.json", published, methods=["GET"])


async def _engine_error(_: Request, exc: Exception) -> Response:
    return to_api_error(exc).response()


async def _http_error(request: Request, exc: Exception) -> Response:
    assert isinstance(exc, HTTPException)
    path = request.url.path[:_MAX_SHOWN_PATH]
    if exc.status_code == HTTPStatus.METHOD_NOT_ALLOWED:
        wanted = (exc.headers or {}).get("Allow", "another method")
        problem = f"this path takes {wanted}"
    elif path == "/tokenizer_info":
        problem = "start the instance with --enable-tokenizer-info-endpoint"
    else:
        paths = [route.path for route in request.app.routes]
        nearest = difflib.get_close_matches(path, paths, n=1, cutoff=0.75)
        problem = f"did you mean {nearest[0]}? " if nearest else ""
        problem += "This instance generates text; its GET /openapi.json lists its paths"
    message = f"{request.method} {path}: {HTTPStatus(exc.status_code).phrase}: {problem}"
    error = ApiError(exc.status_code, message, "invalid_request_error").response()
    error.headers.update(exc.headers or {})
    return error


@dataclass(frozen=True, slots=True)
class PlainEndpoints:
    """The endpoints that do not generate text.

    Args:
        processor: the input processor; also holds the model names and the tokenizer.
        handler: the generation handler, for its engine, metrics and body limit.
        live: the requests in progress, for ``/abort`` and ``/health``.
        started: when the server started, in Unix seconds: ``created`` of each model card.
    """

    processor: InputProcessor
    handler: GenerationHandler
    live: LiveRequests
    started: int

    async def models(self, _: Request) -> Response:
        """``GET /v1/models``."""
        cards = [self._model_card(name) for name in self.processor.model_names]
        return _json({"object": "list", "data": cards})

    async def model(self, request: Request) -> Response:
        """``GET /v1/models/NAME``; the name may contain slashes."""
        name = request.path_params["model"]
        self.processor.check_model(name)
        return _json(self._model_card(name))

    async def version(self, _: Request) -> Response:
        """``GET /version``."""
        return _json({"version": importlib.metadata.version("mooncake-engine")})

    async def refuse_adapter(self, _: Request) -> Response:
        """``POST /v1/load_lora_adapter`` and ``/v1/unload_lora_adapter``: always 501."""
        message = "LoRA adapters are not supported: merge the adapter into the model's weights"
        return ApiError(501, message, "not_implemented_error", code="lora_not_served").response()

    async def topology(self, _: Request) -> Response:
        """``GET /kv/topology``: the addresses at which peers reach this instance; 404 if it has no
        KV connector."""
        topology = self.handler.engine.topology()
        if topology is None:
            message = "this instance has no KV connector"
            return ApiError(404, message, "not_found_error").response()
        return Response(msgspec.json.encode(topology), media_type="application/json")

    async def expert_load(self, _: Request) -> Response:
        """``GET /expert_load``: token counts by layer and expert, in the format that
        ``--expert-load`` reads. 404 if experts are not divided over ranks, or if no expert has
        received a token yet."""
        await self.handler.engine.refresh()
        load = self.handler.engine.stats().experts
        if load is None:
            message = "no expert has received a token since the start, or --ep-size is 1"
            return ApiError(404, message, "not_found_error").response()
        return Response(msgspec.json.encode(load), media_type="application/json")

    async def health(self, _: Request) -> Response:
        """``GET /health``, ``GET /ready``, and ``/ping`` as SageMaker and others call it: 200 while
        the instance accepts requests, otherwise 503 with the reason.

        The proxy polls this endpoint. It reads here which pairs of instances are incompatible, and
        how much of the prompts the KVCache pool held, in chunks by tier."""
        try:
            self.handler.engine.check_ready()
            self.live.check_open()
        except (EngineDead, EngineStalled, ShuttingDown) as exc:
            return to_api_error(exc).response()
        engine = self.handler.engine
        compatibility = engine.compatibility()
        peers = {} if compatibility is None else msgspec.structs.asdict(compatibility)
        if (events := engine.kv_event_endpoints()) is not None:
            peers["kv_events"] = msgspec.to_builtins(events)
        stats = engine.stats()
        if (pool := stats.kv_pool) is not None:
            home, *others = [_described(store) for store in stats.pool_stores] or [{}]
            peers["kv_pool"] = {
                "saved": pool.num_saved_chunks,
                "found": pool.num_found_chunks,
                **home,
                **({"other_stores": others} if others else {}),
            }
        peers["data_parallel_size"] = engine.info.dp_size
        peers["continues_answers"] = True
        if stats.by_dp_rank:
            peers["data_parallel_ranks"] = [
                {"running": rank.num_running, "waiting": rank.num_waiting}
                for rank in stats.by_dp_rank
            ]
        return _json({"status": "ok", "role": engine.config.role.value, **peers})

    async def load(self, _: Request) -> Response:
        """``GET /load``: the number of clients that wait for an answer, on all API workers."""
        return _json({"server_load": self.live.num_everywhere})

    async def metrics(self, _: Request) -> Response:
        """``GET /metrics``."""
        await self.handler.engine.refresh()
        exposition = self.handler.metrics.exposition()
        return Response(exposition, headers={"content-type": CONTENT_TYPE_LATEST})

    async def abort(self, request: Request) -> Response:
        """``POST /abort``: 200 whether or not the request was still running."""
        wanted = decode_request(await self._body(request), AbortBody)
        self.live.abort(wanted.request_id)
        self.handler.engine.abort(wanted.request_id)
        return _json({})

    async def reset_prefix_cache(self, _: Request) -> Response:
        """``POST /reset_prefix_cache``: 200, or 409 while requests use the KV cache."""
        if await self.handler.engine.reset_prefix_cache():
            return _json({})
        message = "the prefix cache can't be reset while requests use the KV cache; try again later"
        return ApiError(409, message, "invalid_request_error").response()

    async def tokenize(self, request: Request) -> Response:
        """``POST /tokenize``."""
        return _json(await self._tokenize(await self._body(request)))

    async def count_tokens(self, request: Request) -> Response:
        """``POST /v1/messages/count_tokens``: the token count that ``/tokenize`` reports for the
        same conversation."""
        try:
            wanted = count_tokens_request(await self._body(request))
            counted = await self._tokenize(wanted)
        except RequestRejected as exc:
            return translated_error(MESSAGES, InvalidRequest(str(exc), param=exc.param))
        except EngineError as exc:
            return translated_error(MESSAGES, exc)
        return _json({"input_tokens": counted["count"]})

    async def _tokenize(self, body: bytes) -> dict[str, Any]:
        wanted = decode_request(body, TokenizeRequest)
        self.processor.check_model(wanted.model)
        tokenizer = self.processor.tokenizer
        num_characters, tokenise = self._tokenisation(wanted)
        ids = await self.processor.work.on_text(num_characters, tokenise)
        found: dict[str, Any] = {
            "count": len(ids),
            "max_model_len": self.processor.info.max_model_len,
            "tokens": ids,
        }
        if wanted.return_token_strs:
            names = [tokenizer.token_bytes(token_id) for token_id in ids]
            found["token_strs"] = [name.decode(errors="replace") for name in names]
        return found

    async def tokenizer_info(self, _: Request) -> Response:
        """``GET /tokenizer_info``, with ``--enable-tokenizer-info-endpoint``."""
        return _json(self.processor.tokenizer.info())

    async def detokenize(self, request: Request) -> Response:
        """``POST /detokenize``."""
        wanted = decode_request(await self._body(request), DetokenizeRequest)
        self.processor.check_model(wanted.model)
        size = self.processor.info.vocab_size
        if len(wanted.tokens) > _MAX_DETOKENIZED_TOKENS:
            raise InvalidRequest(
                f"tokens must hold at most {_MAX_DETOKENIZED_TOKENS} ids, got {len(wanted.tokens)}",
                param="tokens",
            )
        for token_id in (min(wanted.tokens, default=0), max(wanted.tokens, default=0)):
            if not 0 <= token_id < size:
                raise InvalidRequest(
                    f"tokens must be in [0, {size}), got {token_id}", param="tokens"
                )
        processor, cost = self.processor, CHARACTERS_PER_TOKEN * len(wanted.tokens)
        decode = partial(processor.tokenizer.decode, wanted.tokens, skip_special_tokens=False)
        text = await processor.work.on_text(cost, decode)
        return _json({"prompt": text})

    async def _body(self, request: Request) -> bytes:
        return await read_body(request, self.handler.max_body_bytes)

    def _model_card(self, name: str) -> dict[str, Any]:
        return {
            "id": name,
            "object": "model",
            "created": self.started,
            "owned_by": "mooncake-engine",
            "root": str(self.handler.engine.config.model),  # vLLM's bench loads the tokenizer there
            "parent": None,
            "max_model_len": self.processor.info.max_model_len,
        }

    def _tokenisation(self, wanted: TokenizeRequest) -> tuple[int, Callable[[], tuple[int, ...]]]:
        """The number of characters to tokenise, and a function that tokenises them.

        Special tokens are added by default, except around a chat template, which contains them."""
        if (wanted.prompt is None) == (wanted.messages is None):
            raise InvalidRequest("give either prompt or messages", param="prompt")
        tokenizer, info = self.processor.tokenizer, self.processor.info
        prompt = wanted.prompt
        if prompt is not None:
            check_text_size(len(prompt), info, param="prompt")
            adds_special = wanted.add_special_tokens is not False
            return len(prompt), partial(tokenizer.encode, prompt, add_special_tokens=adds_special)
        tools = shown_tools(wanted.tools or ())
        num_characters = check_chat_size(wanted, info)
        return num_characters, lambda: tokenize_chat(wanted, tokenizer, info, tools).token_ids


def _described(store: StoreReport) -> dict[str, Any]:
    """A store in the form of ``/health``, without what does not apply."""
    found = {"store": store.location, "kv_events": store.kv_events, "metrics": store.metrics}
    return {name: msgspec.to_builtins(each) for name, each in found.items() if each is not None}


def _json(body: dict[str, Any]) -> Response:
    return Response(msgspec.json.encode(body), media_type="application/json")


_CLIENT_CLOSED_REQUEST = 499
"""Status logged when the client disconnected before the response started, as nginx does."""
_KEY_PATHS = ("/v1/", "/tokenize", "/tokenizer_info", "/detokenize", "/reset_prefix_cache")


class KeyCheck:
    """Middleware that requires an API key to generate, and to empty the prefix cache. As in vLLM,
    health checks, metrics and requests between instances and the proxy need no key.

    Args:
        app: the wrapped application.
        keys: the accepted API keys.
    """

    def __init__(self, app: ASGIApp, keys: frozenset[str]) -> None:
        self._app = app
        self._keys = [key.encode() for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Forward the request to the application, or respond with 401."""
        needs_key = scope.get("path", "").startswith(_KEY_PATHS)
        if not needs_key or self._has_valid_key(HTTPConnection(scope)):
            await self._app(scope, receive, send)
            return
        message = "wrong or missing API key: send Authorization: Bearer KEY, or x-api-key: KEY"
        error = ApiError(401, message, "authentication_error", code="invalid_api_key")
        response = error.response()
        response.headers["WWW-Authenticate"] = "Bearer"
        await response(scope, receive, send)

    def _has_valid_key(self, connection: HTTPConnection) -> bool:
        authorization = connection.headers.get("authorization")
        if authorization is None:  # Anthropic's clients send x-api-key
            authorization = f"Bearer {connection.headers.get('x-api-key', '')}"
        scheme, _, token = authorization.partition(" ")
        given = token.strip().encode()
        # Every key is compared, each in constant time: timing reveals nothing about any of them.
        matches = [hmac.compare_digest(given, key) for key in self._keys]
        return scheme.lower() == "bearer" and any(matches)


class AccessLog:
    """Middleware that writes one JSON line per finished request to standard error. The proxy's
    access log has the same fields.

    Args:
        app: the wrapped application.
        level: ``errors``, which omits statuses below 400, or ``all``.
        extra_fields: fields to add to every line.
    """

    def __init__(self, app: ASGIApp, level: str, extra_fields: dict[str, str]) -> None:
        self._app = app
        self._extra_fields = extra_fields
        self._lowest = 400 if level == "errors" else 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Forward the request to the application, and log its outcome."""
        began = time.monotonic()
        start: Message = {"status": _CLIENT_CLOSED_REQUEST, "headers": []}

        def watched(message: Message) -> Awaitable[None]:
            if message["type"] == "http.response.start":
                start.update(message)
            return send(message)

        try:
            await self._app(scope, receive, watched)
        finally:
            if start["status"] >= self._lowest:
                _write_line(scope, start, time.monotonic() - began, self._extra_fields)


def _write_line(
    scope: Scope, start: Message, elapsed_s: float, extra_fields: dict[str, str]
) -> None:
    host, port = scope.get("client") or ("local", 0)
    request_id = dict(start["headers"]).get(b"x-request-id", b"").decode("latin-1")
    info = {
        "time": round(time.time(), 3),
        "request_id": request_id or None,
        "client": f"{host}:{port}",
        "method": scope["method"],
        "path": scope["path"],
        "status": start["status"],
        "ms": round(elapsed_s * 1000, 3),
        **extra_fields,
    }
    sys.stderr.write(msgspec.json.encode(info).decode() + "\n")
    sys.stderr.flush()
