"""Who may ask, and what is written down about it."""

from __future__ import annotations

import hmac
import sys
import time
from typing import TextIO

from mooncake_proxy.call import Call
from mooncake_proxy.errors import ProxyError, Unauthorized
from mooncake_proxy.http1.server import Exchange
from mooncake_proxy.openai import encode

# What logs say where no answer was finished because the client went away; after nginx.
CLIENT_LEFT = 499


def check_key(headers: dict[bytes, bytes], keys: frozenset[str]) -> None:
    """Unauthorized unless the bearer token is one of `keys`; no keys means open."""
    if not keys:
        return
    scheme, _, token = headers.get(b"authorization", b"").partition(b" ")
    given = token.strip()
    # Every key is compared, each in constant time: the time tells nothing about any of them.
    matches = [hmac.compare_digest(given, key.encode()) for key in keys]
    if scheme.lower() != b"bearer" or not any(matches):
        raise Unauthorized("wrong or missing API key: send Authorization: Bearer KEY")


class AccessLog:
    """One JSON line per request on stderr: `off`, `errors` only, or `all`. Written in batches."""

    def __init__(self, level: str, out: TextIO | None = None) -> None:
        self._level = level
        self._out = out
        self._lines: list[bytes] = []

    def write(
        self,
        exchange: Exchange,
        call: Call | None,
        request_id: str,
        elapsed_s: float,
        error: ProxyError | None,
    ) -> None:
        """Remember a line; `flush` writes it."""
        if self._level == "off" or (self._level == "errors" and error is None):
            return
        facts: dict[str, object] = {
            "time": round(time.time(), 3),
            "request_id": request_id,
            "client": exchange.peer,
            "path": exchange.path,
            "status": exchange.status,
            "ms": round(elapsed_s * 1000, 3),
            "bytes": exchange.bytes_out,
        }
        if call is not None:
            facts |= {
                "model": call.ask.model,
                "stream": call.streams,
                "prompt_tokens": call.prompt_tokens,
                "prefill": call.prefiller,
                "decode": call.decoder,
                "attempts": call.attempt + 1,
            }
        if error is not None:
            facts["error"] = str(error)
        self._lines.append(encode(facts))

    def flush(self) -> None:
        """Write what has gathered."""
        if self._lines:
            lines, self._lines = self._lines, []
            out = self._out or sys.stderr
            out.write(b"\n".join(lines).decode("utf-8") + "\n")
            out.flush()
