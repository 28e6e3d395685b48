"""Errors as clients get them."""

from __future__ import annotations

from typing import Any, cast

import pytest

from mooncake_proxy.api.error_responses import respond_error
from mooncake_proxy.errors import (
    ConnectionLost,
    DeadlineExceeded,
    FailedStream,
    ProxyError,
    Rejected,
)
from mooncake_proxy.http1.http_request import HttpRequest


class Recorded:
    """A connection that keeps what is sent."""

    def __init__(self) -> None:
        self.sent = b""

    def send(self, data: bytes) -> None:
        self.sent += data


def headers_of(error: ProxyError) -> dict[bytes, bytes]:
    connection = Recorded()
    respond_error(HttpRequest(cast("Any", connection)), error, b"x-request-id: a\r\n")
    _, *lines = connection.sent.partition(b"\r\n\r\n")[0].split(b"\r\n")
    return dict(line.split(b": ", 1) for line in lines)


def stream_error(code: str) -> FailedStream:
    error = b'{"message":"gone","code":"%b"}' % code.encode()
    return FailedStream("d", b'data: {"error":%b}\n\n' % error, error, 502)


@pytest.mark.parametrize(
    ("error", "is_final"),
    [
        (DeadlineExceeded("d"), True),
        (Rejected("d", 409, {b"x-should-retry": b"false"}, b"{}"), True),
        (stream_error("aborted"), True),
        (stream_error("deadline_exceeded"), True),
        (ConnectionLost("d", "closed"), False),
        (Rejected("d", 503, {b"retry-after": b"1"}, b"{}"), False),
        (stream_error("shutting_down"), False),
    ],
)
def test_clients_do_not_repeat_what_has_ended_for_good(
    error: ProxyError, *, is_final: bool
) -> None:
    headers = headers_of(error)
    assert headers.get(b"x-should-retry") == (b"false" if is_final else None)
    assert headers[b"x-request-id"] == b"a"
