"""Encoding and parsing of HTTP/1.1 heads and chunks, URLs of instances, and TCP keepalive."""

from __future__ import annotations

import re
import socket
from collections.abc import Iterable
from dataclasses import dataclass
from http import HTTPStatus
from typing import Protocol
from urllib.parse import urlsplit

from mooncake_proxy.errors import ConfigError

STATUS_LINES = {
    status.value: f"HTTP/1.1 {status.value} {status.phrase}\r\n".encode("ascii")
    for status in HTTPStatus
}
LAST_CHUNK = b"0\r\n\r\n"
MAX_PORT = 65535


def status_line(status: int) -> bytes:
    """The status line of a response; unknown codes get no reason phrase."""
    return STATUS_LINES.get(status) or b"HTTP/1.1 %d \r\n" % status


def header_lines(headers: Iterable[tuple[str, str]]) -> bytes:
    """Header lines from names and values, which the caller has validated."""
    return "".join(f"{name}: {value}\r\n" for name, value in headers).encode("latin-1")


def parse_fields(head: bytes) -> dict[bytes, bytes]:
    """Header fields of a response by lower-case name.

    `head` may also contain 1xx heads before it and body bytes after it, which are skipped. The C
    parser has accepted it already, so lines end in CRLF.
    """
    blocks = head.split(b"\r\n\r\n")
    lines = next(block for block in blocks if block[9:10] != b"1").split(b"\r\n")
    fields = (line.partition(b":") for line in lines[1:])
    return {name.lower(): value.strip() for name, _, value in fields}


def chunk(data: bytes) -> bytes:
    """One chunk of a chunked body. `data` must not be empty: an empty chunk ends the body."""
    return b"%x\r\n%b\r\n" % (len(data), data)


_WANTED = "wanted http://HOST:PORT or https://HOST:PORT"
# Characters that a request line or a Host header can't contain.
_UNFIT = re.compile(r"[^!-~]")


@dataclass(frozen=True, slots=True)
class Origin:
    """The parsed URL of an instance. `prefix` is a path before `/v1/...`, usually empty."""

    scheme: str
    host: str
    port: int
    prefix: str = ""

    @classmethod
    def parse(cls, url: str) -> Origin:
        """Parse `http://host:port[/prefix]`, `https://...`, or `host:port`; IPv6 in brackets.

        Raises:
            ConfigError: `url` is anything else.
        """
        text = url if "://" in url else f"http://{url}"
        try:
            parts = urlsplit(text)
            port = parts.port
        except ValueError as exc:
            raise ConfigError(f"instance URL {url!r}: {exc}; {_WANTED}") from exc
        if "://" not in url and port is None:
            raise ConfigError(f"instance URL {url!r}: neither scheme nor port; {_WANTED}")
        if parts.scheme not in {"http", "https"} or not parts.hostname or port == 0:
            raise ConfigError(f"instance URL {url!r}: {_WANTED}")
        if parts.username or parts.query or parts.fragment:
            raise ConfigError(f"instance URL {url!r}: user, query and fragment are not allowed")
        try:
            host = parts.hostname.encode("idna").decode("ascii")
        except UnicodeError as exc:  # an empty label between two dots, or one that is too long
            raise ConfigError(f"instance URL {url!r}: host {parts.hostname!r}: {exc}") from exc
        if _UNFIT.search(host + parts.path):
            raise ConfigError(f"instance URL {url!r}: blanks and the like are not allowed")
        default = 443 if parts.scheme == "https" else 80
        return cls(parts.scheme, host, port or default, parts.path.rstrip("/"))

    @property
    def authority(self) -> str:
        """`host:port` for URLs and Host headers."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"

    def __str__(self) -> str:
        return f"{self.scheme}://{self.authority}{self.prefix}"


class TcpSocket(Protocol):
    """A socket of asyncio or uvloop, as far as options go."""

    @property
    def family(self) -> int:
        """The address family."""

    def setsockopt(self, level: int, option: int, value: int, /) -> object:
        """Set an option."""


def probe_peer(sock: TcpSocket, patience_s: int, *, is_reader: bool = False) -> None:
    """Have the kernel end a connection on which nothing is sent once the other host has not replied
    for `patience_s` seconds; for a reader also once it has not taken what was sent for as long.

    A host that loses its power or network closes nothing: who only waits for it would wait for
    ever. A listening socket passes the options on to the connections that it accepts.
    """
    if sock.family not in (socket.AF_INET, socket.AF_INET6):
        return
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    options = {
        "TCP_KEEPIDLE": patience_s // 2,
        "TCP_KEEPINTVL": patience_s // 6,
        "TCP_KEEPCNT": 3,
    }
    if is_reader:
        options["TCP_USER_TIMEOUT"] = 1000 * patience_s
    for name, value in options.items():
        if hasattr(socket, name):  # all exist on Linux
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
