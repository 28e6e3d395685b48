"""Cross-origin requests (CORS): which web pages of other origins may use the proxy in a browser.

A browser lets a page read a response only if a header of it names the page's origin, and asks
first (a preflight) whether a request may be sent that no form could send.
Source: https://fetch.spec.whatwg.org/#http-cors-protocol
"""

from __future__ import annotations

from collections.abc import Collection

from mooncake_proxy.http1.http_request import HttpRequest

METHODS = b"GET, POST"
EXPOSED_HEADERS = b"X-Request-Id, Retry-After, X-Should-Retry"
PREFLIGHT_MAX_AGE_S = 600


class CrossOriginPolicy:
    """Which origins' pages may use the proxy.

    Args:
        origins: such as `https://chat.example.com`; `*` allows all.
    """

    def __init__(self, origins: Collection[str]) -> None:
        self._allows_all = "*" in origins
        self._origins = frozenset(origin.encode() for origin in origins)

    def allows(self, origin: bytes) -> bool:
        """Whether pages of an origin may use the proxy."""
        return self._allows_all or origin in self._origins

    def response_headers(self, origin: bytes) -> bytes:
        """The header lines of a response to a page of an origin."""
        vary = b"" if self._allows_all else b"vary: Origin\r\n"
        if not self.allows(origin):
            return vary
        return b"access-control-allow-origin: %b\r\naccess-control-expose-headers: %b\r\n%b" % (
            b"*" if self._allows_all else origin,
            EXPOSED_HEADERS,
            vary,
        )

    def answer_preflight(self, request: HttpRequest) -> None:
        """Answer a preflight: every method and header that the API has is allowed, if the origin
        is. It needs no key, which browsers don't send with it."""
        if not self.allows(request.headers[b"origin"]):
            request.respond(400, b"Disallowed CORS origin", "text/plain")
            return
        wanted = request.headers.get(b"access-control-request-headers", b"")
        headers = b"access-control-allow-methods: %b\r\naccess-control-max-age: %d\r\n" % (
            METHODS,
            PREFLIGHT_MAX_AGE_S,
        )
        if wanted:
            headers += b"access-control-allow-headers: %b\r\n" % wanted
        request.respond(200, b"OK", "text/plain", headers)


def is_preflight(request: HttpRequest) -> bool:
    """Whether a browser asks if it may send a request."""
    names = request.headers
    is_asking = b"origin" in names and b"access-control-request-method" in names
    return request.method == "OPTIONS" and is_asking
