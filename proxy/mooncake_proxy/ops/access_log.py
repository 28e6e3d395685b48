"""The access log: one JSON line per request on stderr."""

from __future__ import annotations

import sys
import time
from typing import TextIO

from mooncake_proxy.api.openai_bodies import encode
from mooncake_proxy.api.proxied_request import RequestContext
from mooncake_proxy.errors import ProxyError
from mooncake_proxy.http1.http_request import HttpRequest

# Logged as the status if the client disconnected before its response was complete (as nginx).
CLIENT_CLOSED_REQUEST = 499


class AccessLog:
    """Writes one JSON line per request, in batches. `level` is `off`, `errors` or `all`."""

    def __init__(self, level: str, out: TextIO | None = None) -> None:
        self._level = level
        self._out = out
        self._lines: list[bytes] = []

    def write(
        self,
        request: HttpRequest,
        context: RequestContext | None,
        request_id: str,
        elapsed_s: float,
        error: ProxyError | None,
    ) -> None:
        """Queue the line of a request; `flush` writes it."""
        if self._level == "off" or (self._level == "errors" and error is None):
            return
        fields: dict[str, object] = {
            "time": round(time.time(), 3),
            "request_id": request_id,
            "client": request.peer,
            "path": request.path,
            "status": request.status,
            "ms": round(elapsed_s * 1000, 3),
            "bytes": request.bytes_out,
        }
        if context is not None:
            fields |= {
                "model": context.parsed.model,
                "stream": bool(context.parsed.stream),
                "prompt_tokens": context.num_client_tokens,
                "prefill": context.prefiller,
                "decode": context.decoder,
                "attempts": context.attempt + 1,
            }
            if context.routed is not None:
                fields["decision"] = context.routed.record()
        if error is not None:
            fields["error"] = str(error)
        self._lines.append(encode(fields))

    def flush(self) -> None:
        """Write the queued lines."""
        if self._lines:
            lines, self._lines = self._lines, []
            out = self._out or sys.stderr
            out.write(b"\n".join(lines).decode("utf-8") + "\n")
            out.flush()
