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


def parse_fields(head: bytes) -> dict[bytes, bytes]:
    """Header fields by lower-case name from the bytes of an answer's head, 1xx heads before it and
    body bytes behind it left out. The C parser has already accepted them: lines end in CRLF."""
    blocks = head.split(b"\r\n\r\n")
    lines = next(block for block in blocks if block[9:10] != b"1").split(b"\r\n")
    fields = (line.partition(b":") for line in lines[1:])
    return {name.lower(): value.strip() for name, _, value in fields}


def chunk(data: bytes) -> bytes:
    """One chunk of a chunked body. `data` must not be empty: an empty chunk ends the body."""
    return b"%x\r\n%b\r\n" % (len(data), data)
