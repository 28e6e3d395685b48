"""Who may ask this instance, and what is written down about it."""

from __future__ import annotations

import hmac
import sys
import time
from collections.abc import Awaitable
from pathlib import Path

import msgspec
from starlette.requests import HTTPConnection
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from mooncake_engine.errors import ConfigError
from mooncake_engine.server.errors import ApiError

_CLIENT_LEFT = 499
"""What stands for a status where no answer began because the client went away; after nginx."""
_GUARDED = ("/v1/", "/tokenize", "/detokenize")


def read_keys(path: Path | None) -> frozenset[str]:
    """Keys of a file, one per line; empty lines and ``#`` comments are skipped.

    Raises:
        ConfigError: it can't be read, or holds no key, which would lock everybody out.
    """
    if path is None:
        return frozenset()
    try:
        lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as exc:
        raise ConfigError(f"can't read --api-key-file: {exc}") from exc
    keys = frozenset(line.strip() for line in lines if line.strip() and not line.startswith("#"))
    if not keys:
        raise ConfigError(f"--api-key-file {path} holds no key; put one per line")
    return keys


class KeyCheck:
    """Lets nobody generate without a key. Health, metrics and what instances and the proxy ask each
    other need none, as with vLLM.

    Args:
        app: what is behind it.
        keys: that are good.
    """

    def __init__(self, app: ASGIApp, keys: frozenset[str]) -> None:
        self._app = app
        self._keys = [key.encode() for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or answer it with 401."""
        if not scope.get("path", "").startswith(_GUARDED) or self._is_known(HTTPConnection(scope)):
            await self._app(scope, receive, send)
            return
        message = "wrong or missing API key: send Authorization: Bearer KEY"
        error = ApiError(401, message, "authentication_error", code="invalid_api_key")
        response = error.response()
        response.headers["WWW-Authenticate"] = "Bearer"
        await response(scope, receive, send)

    def _is_known(self, asked: HTTPConnection) -> bool:
        scheme, _, token = asked.headers.get("authorization", "").partition(" ")
        given = token.strip().encode()
        # Every key is compared, each in constant time: the time tells nothing about any of them.
        matches = [hmac.compare_digest(given, key) for key in self._keys]
        return scheme.lower() == "bearer" and any(matches)


class AccessLog:
    """One JSON line per request on standard error, when it is over; the proxy's have these fields,
    too.

    Args:
        app: what is behind it.
        level: ``errors``, which leaves statuses below 400 out, or ``all``.
    """

    def __init__(self, app: ASGIApp, level: str) -> None:
        self._app = app
        self._lowest = 400 if level == "errors" else 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, and write down how it ended."""
        began = time.monotonic()
        answer: Message = {"status": _CLIENT_LEFT, "headers": []}

        def watched(message: Message) -> Awaitable[None]:
            if message["type"] == "http.response.start":
                answer.update(message)
            return send(message)

        try:
            await self._app(scope, receive, watched)
        finally:
            if answer["status"] >= self._lowest:
                _write_line(scope, answer, time.monotonic() - began)


def _write_line(scope: Scope, answer: Message, elapsed_s: float) -> None:
    host, port = scope.get("client") or ("local", 0)
    request_id = dict(answer["headers"]).get(b"x-request-id", b"").decode("latin-1")
    facts = {
        "time": round(time.time(), 3),
        "request_id": request_id or None,
        "client": f"{host}:{port}",
        "method": scope["method"],
        "path": scope["path"],
        "status": answer["status"],
        "ms": round(elapsed_s * 1000, 3),
    }
    sys.stderr.write(msgspec.json.encode(facts).decode() + "\n")
    sys.stderr.flush()
