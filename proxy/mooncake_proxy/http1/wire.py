"""Bytes of HTTP/1.1 heads and chunks."""

from __future__ import annotations

from collections.abc import Iterable
from http import HTTPStatus

STATUS_LINES = {
    status.value: f"HTTP/1.1 {status.value} {status.phrase}\r\n".encode("ascii")
    for status in HTTPStatus
}
LAST_CHUNK = b"0\r\n\r\n"


def status_line(status: int) -> bytes:
    """The first line of an answer; unknown codes get no phrase."""
    return STATUS_LINES.get(status) or b"HTTP/1.1 %d \r\n" % status


def header_lines(headers: Iterable[tuple[str, str]]) -> bytes:
    """Header lines from checked names and values."""
    return "".join(f"{name}: {value}\r\n" for name, value in headers).encode("latin-1")


def chunk(data: bytes) -> bytes:
    """One chunk of a chunked body. `data` must not be empty: an empty chunk ends the body."""
    return b"%x\r\n%b\r\n" % (len(data), data)
