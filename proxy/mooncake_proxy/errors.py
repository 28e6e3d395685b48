"""The exception tree of the proxy.

ProxyError
├── ConfigError             a flag, file or value that the proxy can't run with
│   └── AddressInUse        another program listens on the address
├── Refusal                 the proxy itself refuses; has HTTP status, type and code
│   ├── BadRequest          400
│   ├── Unauthorized        401
│   ├── Forbidden           403
│   ├── NotFound            404
│   │   ├── NoSuchPath      404, with the nearest path
│   │   └── ModelNotFound   404, as OpenAI's
│   ├── MethodNotAllowed    405
│   ├── Conflict            409
│   ├── Quarantined         422, with Retry-After
│   ├── Overloaded          429, with Retry-After
│   │   ├── SloRefused      429, the request could not be served within its objectives
│   │   └── RateLimited     429, the API key has reached a limit per minute
│   ├── NoInstance          503, no live instance of a role
│   └── ShuttingDown        503, with Retry-After
└── UpstreamError           an instance gave no usable response
    ├── ConnectFailed       no connection within the timeout
    ├── OutOfSockets        this host has no descriptor or port left
    ├── ConnectionLost      closed before the response was complete
    ├── UpstreamTimeout     silent for too long
    ├── DeadlineExceeded    the request's own deadline has passed
    ├── MalformedResponse   the response is no valid HTTP, JSON or SSE
    ├── Rejected            an error status; the response is kept unchanged
    ├── FailedStream        status 200, then an SSE error event
    └── Recomputed          the instance returned the request for a new prefill
"""

from __future__ import annotations

import difflib
import errno
import math
from collections.abc import Iterable

# Error code of an instance, or of this proxy, that is shutting down and takes no new requests.
SHUTTING_DOWN = "shutting_down"
# The only message that clients get about internal errors of the proxy.
INTERNAL_ERROR = "internal error of the proxy; its log has the details"
# Code of NoInstance if no prefill instance is live.
NO_PREFILL = "no_live_prefill"
# Characters of an unknown path that its error shows.
MAX_SHOWN_PATH = 100
# Raised by decoding untrusted JSON. msgspec's errors and invalid UTF-8 are ValueErrors; JSON that
# is nested too deeply is a RecursionError.
DECODE_ERRORS = (ValueError, RecursionError)


class ProxyError(Exception):
    """Base of all exceptions that the proxy raises itself."""


class ConfigError(ProxyError):
    """The configuration can't be used. The message names the value and what is allowed."""


class AddressInUse(ConfigError):
    """Another program listens on the address. A retry may succeed: it may be shutting down."""


def cannot_listen(host: str, port: int, exc: OSError) -> ConfigError:
    """The error for an address that the system refuses to bind."""
    if exc.errno == errno.EADDRINUSE:
        return AddressInUse(
            f"can't listen on {host}:{port}: the port is in use; stop the program that uses it, or "
            "choose another one"
        )
    return ConfigError(f"can't listen on {host}:{port}: {exc}")


class Refusal(ProxyError):
    """The proxy refuses a request. It is answered with `status` and an OpenAI error body."""

    status = 500
    type = "internal_error"
    code: str | None = None

    def __init__(self, message: str, *, code: str | None = None, param: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        if code is not None:
            self.code = code

    @property
    def headers(self) -> tuple[tuple[str, str], ...]:
        """Extra response headers."""
        return ()


class BadRequest(Refusal):
    """The body or a field of it can't be understood."""

    status = 400
    type = "invalid_request_error"


class Unauthorized(Refusal):
    """No key, or one that is not in the key file."""

    status = 401
    type = "authentication_error"
    code = "invalid_api_key"

    @property
    def headers(self) -> tuple[tuple[str, str], ...]:
        """A 401 has to name its scheme (RFC 9110 §11.6.1)."""
        return (("www-authenticate", "Bearer"),)


class Forbidden(Refusal):
    """Disabled by the proxy's configuration."""

    status = 403
    type = "permission_error"
    code = "forbidden"


class NotFound(Refusal):
    """No such path, instance or model."""

    status = 404
    type = "invalid_request_error"
    code = "not_found"


class NoSuchPath(NotFound):
    """The path is not served; the message names the nearest of those that are."""

    def __init__(self, path: str, served: Iterable[str]) -> None:
        shown = path[:MAX_SHOWN_PATH]
        nearest = difflib.get_close_matches(shown, list(served), n=1, cutoff=0.75)
        hint = f"; did you mean {nearest[0]}?" if nearest else ""
        super().__init__(f"no such path here: {shown}{hint}")


class ModelNotFound(NotFound):
    """No pool serves a model of that name."""

    code = "model_not_found"

    def __init__(self, model: str) -> None:
        super().__init__(
            f"The model `{model}` does not exist or you do not have access to it.", param="model"
        )


class MethodNotAllowed(Refusal):
    """The path exists, the method doesn't."""

    status = 405
    type = "invalid_request_error"
    code = "method_not_allowed"

    def __init__(self, method: str, path: str, allowed: Iterable[str]) -> None:
        self._allowed = ", ".join(allowed)
        super().__init__(f"{method} {path}: wanted {self._allowed}")

    @property
    def headers(self) -> tuple[tuple[str, str], ...]:
        """A 405 has to name what is allowed (RFC 9110 §15.5.6)."""
        return (("allow", self._allowed),)


class Conflict(Refusal):
    """The change does not fit the current state, such as a role switch of a busy instance."""

    status = 409
    type = "invalid_request_error"
    code = "conflict"


class Overloaded(Refusal):
    """The admission queue is full, or the request has waited in it for too long."""

    status = 429
    type = "rate_limit_error"
    code = "overloaded"

    def __init__(self, message: str, *, retry_after_s: int) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s

    @property
    def headers(self) -> tuple[tuple[str, str], ...]:
        """Retry-After, in whole seconds."""
        return (("retry-after", str(self.retry_after_s)),)


SLO_REASONS = {
    "slo_ttft": "its first token would come later than --slo-ttft allows",
    "slo_tbt": "its tokens would come more slowly than --slo-tbt allows",
    "decode_full": "no decode instance has the capacity for it",
    "shed": "best-effort requests are shed while load is high",
}


class SloRefused(Overloaded):
    """The conductor expects that a request misses its objectives; `code` tells which."""

    def __init__(self, code: str, retry_after_s: int) -> None:
        reason = SLO_REASONS.get(code, "it can't be served in time")
        super().__init__(
            f"refused: {reason}; try again after {retry_after_s} s", retry_after_s=retry_after_s
        )
        self.code = code


class RateLimited(Overloaded):
    """An API key has reached its requests or tokens per minute. In OpenAI's format."""

    code = "rate_limit_exceeded"

    def __init__(self, key: str, kind: str, limit: int, left: float, wait_s: float) -> None:
        short = {"requests": "RPM", "tokens": "TPM"}[kind]
        super().__init__(
            f"Rate limit reached for {key} on {kind} per min ({short}): Limit {limit}, "
            f"Remaining {left:.0f}. Please try again in {max(wait_s, 0.001):.3g}s.",
            retry_after_s=max(1, math.ceil(wait_s)),
        )
        self.type = kind
        self.wait_s = wait_s

    @property
    def headers(self) -> tuple[tuple[str, str], ...]:
        """Retry-After in seconds, and in milliseconds, which OpenAI's clients prefer."""
        return (*super().headers, ("retry-after-ms", str(max(1, math.ceil(1000 * self.wait_s)))))


class Quarantined(Refusal):
    """Instances died or hung up while they worked on a request with the same body."""

    status = 422
    type = "invalid_request_error"
    code = "request_quarantined"

    def __init__(self, left_s: float) -> None:
        super().__init__(
            "instances died or hung up while they worked on this request: it is refused for "
            f"{left_s:.0f} s"
        )
        self.retry_after_s = max(1, math.ceil(left_s))

    @property
    def headers(self) -> tuple[tuple[str, str], ...]:
        """Retry-After: the end of the quarantine."""
        return (("retry-after", str(self.retry_after_s)),)


class NoInstance(Refusal):
    """No live instance can take this step."""

    status = 503
    type = "service_unavailable"
    code = "no_live_instance"


class ShuttingDown(Refusal):
    """The proxy is shutting down: it accepts no new requests and cuts off slow ones."""

    status = 503
    type = "service_unavailable"
    code = SHUTTING_DOWN

    @property
    def headers(self) -> tuple[tuple[str, str], ...]:
        """Retry-After: by then another proxy may listen here, or the client tries another one."""
        return (("retry-after", "1"),)


class UpstreamError(ProxyError):
    """An attempt failed on an instance; another one may still answer."""

    reason = "failed"
    status = 502
    type = "upstream_error"

    def __init__(self, instance: str, detail: str) -> None:
        super().__init__(f"{instance}: {detail}")
        self.instance = instance
        self.detail = detail

    @property
    def is_client_fault(self) -> bool:
        """Whether every instance would refuse, or the request was aborted: 4xx other than 408, 425
        and 429."""
        return 400 <= self.status < 500 and self.status not in {408, 425, 429}


class ConnectFailed(UpstreamError):
    """No connection could be made."""

    reason = "connect_failed"


class OutOfSockets(UpstreamError):
    """This host has no descriptor, port or buffer left for a connection.

    Does not count as a failure of the instance, and retrying on another one would not help.
    """

    reason = "out_of_sockets"
    status = 503
    type = "service_unavailable"


class ConnectionLost(UpstreamError):
    """The connection was closed before the answer was complete."""

    reason = "connection_lost"


class UpstreamTimeout(UpstreamError):
    """The instance was silent for longer than the limit."""

    reason = "timeout"
    status = 504


class DeadlineExceeded(UpstreamError):
    """The deadline of the client or of `--request-timeout` has passed.

    Does not count as a failure of the instance: a client's short timeout must not eject it.
    """

    reason = "deadline_exceeded"
    status = 504
    type = "timeout"

    def __init__(self, instance: str) -> None:
        super().__init__(instance, "its answer was not complete before the request's deadline")


class MalformedResponse(UpstreamError):
    """The response violates HTTP or the API."""

    reason = "malformed"


class Rejected(UpstreamError):
    """The instance answered an error status. `body` goes to the client unless a retry succeeds."""

    reason = "rejected"

    def __init__(self, instance: str, status: int, headers: dict[bytes, bytes], body: bytes):
        super().__init__(instance, f"answered {status}: {body[:200].decode('utf-8', 'replace')}")
        self.status = status
        self.headers = headers
        self.body = body


class FailedStream(UpstreamError):
    """A stream with status 200 that ended with an error event; `event` is that event, unchanged."""

    reason = "error_event"

    def __init__(self, instance: str, event: bytes, error: bytes, status: int) -> None:
        super().__init__(instance, f"error event: {error[:200].decode('utf-8', 'replace')}")
        self.event = event
        self.error = error
        self.status = status


class Recomputed(UpstreamError):
    """D ran out of KV memory and returned the request (`stop_reason: "recomputed"`)."""

    reason = "recomputed"


def is_loss(error: UpstreamError) -> bool:
    """Whether the instance died or hung up after it had received the request."""
    return isinstance(error, ConnectionLost | UpstreamTimeout)


def is_draining(error: UpstreamError | None) -> bool:
    """Whether the instance refused the request or ended its stream because it is shutting down."""
    code = f'"{SHUTTING_DOWN}"'.encode()
    if isinstance(error, FailedStream):
        return code in error.error
    return isinstance(error, Rejected) and error.status == 503 and code in error.body
