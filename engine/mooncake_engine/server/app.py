"""The ASGI application: what is served where."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from http import HTTPStatus

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from mooncake_engine.errors import EngineError
from mooncake_engine.server.access import AccessLog, KeyCheck
from mooncake_engine.server.answering import Answerer
from mooncake_engine.server.endpoints import GenerationEndpoint, PlainEndpoints
from mooncake_engine.server.errors import ApiError, to_api_error
from mooncake_engine.server.forms import ChatForm, CompletionForm
from mooncake_engine.server.metrics import ServerMetrics
from mooncake_engine.server.options import ServerOptions
from mooncake_engine.server.planning import Planner
from mooncake_engine.server.protocol import ChatRequest, CompletionRequest
from mooncake_engine.server.request_ids import LiveRequests
from mooncake_engine.server.tracing import Tracing
from mooncake_engine.text.generation import Engine
from mooncake_engine.text.tokenizer import Tokenizer

_DEFAULTS = ServerOptions()
_MODEL_PATH = "/v1/models/"
_COUNTED = frozenset(
    {
        "/v1/completions",
        "/v1/chat/completions",
        "/v1/models",
        _MODEL_PATH,
        "/tokenize",
        "/detokenize",
        "/abort",
    }
)


def create_app(
    engine: Engine,
    tokenizer: Tokenizer,
    options: ServerOptions = _DEFAULTS,
    tracing: Tracing | None = None,
    live: LiveRequests | None = None,
) -> Starlette:
    """OpenAI's API over an engine that has been started; closing engine and tracing is the
    caller's, and so is closing ``live`` when no more requests shall be taken."""
    tool_format = options.tool_format(tokenizer)
    names = (engine.config.model_name, *options.model_aliases)
    planner = Planner(names, engine.facts, tokenizer, tool_format)
    metrics = ServerMetrics(engine)
    answerer = Answerer(engine, tokenizer, metrics, tracing)
    live = LiveRequests() if live is None else live
    plain = PlainEndpoints(planner, answerer, live, started=int(time.time()))
    return Starlette(
        routes=[*_generation_routes(planner, answerer, live), *_plain_routes(plain)],
        middleware=_middleware(options, metrics),
        exception_handlers={EngineError: _engine_error, HTTPException: _http_error},
    )


def _middleware(options: ServerOptions, metrics: ServerMetrics) -> list[Middleware]:
    around = [Middleware(_Counted, count=metrics.answered)]
    if options.access_log != "off":
        around.append(Middleware(AccessLog, level=options.access_log))
    if options.api_keys:
        around.append(Middleware(KeyCheck, keys=options.api_keys))
    return around


class _Counted:
    """Counts answers by path and status; what is asked of every server all the time is left out."""

    def __init__(self, app: ASGIApp, count: Callable[[str, str, int], None]) -> None:
        self._app = app
        self._count = count

    def __call__(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        path = scope.get("path", "")
        if path.startswith(_MODEL_PATH):
            path = _MODEL_PATH
        if path not in _COUNTED:
            return self._app(scope, receive, send)

        def counted(message: Message) -> Awaitable[None]:
            if message["type"] == "http.response.start":
                self._count(scope["method"], path, message["status"])
            return send(message)

        return self._app(scope, receive, counted)


def _generation_routes(planner: Planner, answerer: Answerer, live: LiveRequests) -> list[Route]:
    token_bytes = planner.tokenizer.token_bytes
    completions = GenerationEndpoint(
        CompletionRequest, planner.completion, CompletionForm(token_bytes), answerer, live
    )
    chat = GenerationEndpoint(ChatRequest, planner.chat, ChatForm(token_bytes), answerer, live)
    return [
        Route("/v1/completions", completions, methods=["POST"]),
        Route("/v1/chat/completions", chat, methods=["POST"]),
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
        Route("/metrics", plain.metrics, methods=["GET"]),
        Route("/kv/topology", plain.topology, methods=["GET"]),
        Route("/abort", plain.abort, methods=["POST"]),
        Route("/reset_prefix_cache", plain.reset_prefix_cache, methods=["POST"]),
        Route("/tokenize", plain.tokenize, methods=["POST"]),
        Route("/detokenize", plain.detokenize, methods=["POST"]),
    ]


async def _engine_error(_: Request, exc: Exception) -> Response:
    return to_api_error(exc).response()


async def _http_error(request: Request, exc: Exception) -> Response:
    assert isinstance(exc, HTTPException)
    words = HTTPStatus(exc.status_code).phrase
    message = f"{request.method} {request.url.path}: {words}"
    return ApiError(exc.status_code, message, "invalid_request_error").response()
