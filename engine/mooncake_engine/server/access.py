"""Who may ask this instance."""

from __future__ import annotations

import hmac
from pathlib import Path

from starlette.requests import HTTPConnection
from starlette.types import ASGIApp, Receive, Scope, Send

from mooncake_engine.errors import ConfigError
from mooncake_engine.server.errors import ApiError

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
