"""Client of the proxy's metaserver: asks for a prefill by one short HTTP POST, and checks its
status.

The URL comes from a request, so any client could make this instance post to any address. Therefore
it connects only to addresses that the operator allows, or to the one that the request came from.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import cache
from urllib.parse import SplitResult, urlsplit

import msgspec

from mooncake_hal.timing import timeout
from mooncake_kv.addresses import addresses_of, is_own_address
from mooncake_kv.allowed_hosts import AllowedHosts, plain_address
from mooncake_kv.errors import KVTransferError
from mooncake_kv.params import KVTransferDict

POST_TIMEOUT_S = 5.0
ACCEPTED = (200, 202)
MAX_ANSWER_BYTES = 16 * 1024
_PORTS = {"http": 80, "https": 443}


@dataclass(frozen=True, slots=True)
class RequestMetaserver:
    """The metaserver that a request names.

    Args:
        url: ``http://`` or ``https://``, as the request named it.
        requester: the address that the request came from; None for a request of this process, which
            may name any metaserver.
        tokenizer: fingerprint of the tokenizer that made the prompt from text. The prefill instance
            is then sent the token ids, and need not tokenize again. Empty: the client sent ids.
    """

    url: str
    requester: str | None = None
    tokenizer: str = ""


class MetaserverRule:
    """The rule for which metaservers a request may name.

    Args:
        allowed: see ``AllowedHosts``; if empty, only the host that the request came from.

    Raises:
        KVConfigError: an entry is not a host, address or network.
    """

    def __init__(self, allowed: Sequence[str]) -> None:
        self._allowed = AllowedHosts(allowed, "--metaserver-allow")

    def excludes(self, host: str) -> bool:
        """Whether a host may not be connected to, whatever its addresses are, so that it need not
        be resolved."""
        return bool(self._allowed) and self._allowed.excludes(host)

    async def permits(self, host: str, address: str, requester: str | None) -> bool:
        """Whether to connect to an address.

        Args:
            host: the host, as the URL names it.
            address: an address of that host.
            requester: the address that the request came from.
        """
        if self._allowed:
            return self._allowed.permits(host, address)
        if requester is None or plain_address(address) == plain_address(requester):
            return True
        return await is_own_address(address) and await is_own_address(requester)


async def post_params(
    metaserver: RequestMetaserver, params: KVTransferDict, rule: MetaserverRule
) -> None:
    """Post reserved blocks to the metaserver, which answers immediately, before the prefill.

    Args:
        metaserver: the metaserver.
        params: see ``build_reservation_params``.
        rule: decides which addresses may be connected to.

    Raises:
        KVTransferError: the metaserver is not allowed, unreachable or silent, or did not answer 200
            or 202.
    """
    url = metaserver.url
    try:
        async with timeout(POST_TIMEOUT_S):
            status, body = await _exchange(metaserver, params, rule)
    except asyncio.TimeoutError as exc:
        raise KVTransferError(
            f"metaserver {url} did not answer within {POST_TIMEOUT_S:g} s"
        ) from exc
    except (
        OSError,
        ValueError,
        asyncio.IncompleteReadError,
        asyncio.LimitOverrunError,  # the answer's head is longer than MAX_ANSWER_BYTES
    ) as exc:
        raise KVTransferError(
            f"the request to metaserver {url} failed: {exc or type(exc).__name__}"
        ) from exc
    if status not in ACCEPTED:
        detail = body.decode(errors="replace").strip()
        raise KVTransferError(f"metaserver {url} answered {status}, not 202: {detail}")


async def _exchange(
    metaserver: RequestMetaserver, params: KVTransferDict, rule: MetaserverRule
) -> tuple[int, bytes]:
    parts = urlsplit(metaserver.url)
    if parts.scheme not in _PORTS or parts.hostname is None:
        raise ValueError("wanted http://host:port/path")
    is_https = parts.scheme == "https"
    reader, writer = await asyncio.open_connection(
        await _permitted(parts, metaserver.requester, rule),
        parts.port or _PORTS[parts.scheme],
        ssl=_tls_context() if is_https else None,
        server_hostname=parts.hostname if is_https else None,
        limit=MAX_ANSWER_BYTES,
    )
    with closing(writer):
        writer.write(_request(parts, msgspec.json.encode(params)))
        await writer.drain()
        head = await reader.readuntil(b"\r\n\r\n")
        return _status_of(head), await reader.read(1024)


@cache
def _tls_context() -> ssl.SSLContext:
    """The context of all connections: making one reads this host's certificates, which takes the
    connector's loop 30 ms."""
    return ssl.create_default_context()


async def _permitted(parts: SplitResult, requester: str | None, rule: MetaserverRule) -> str:
    """Resolve the host to a permitted address. The caller connects to that address rather than to
    the name, which a name server might resolve differently the next time.

    Raises:
        KVTransferError: no address of the host is allowed.
    """
    host = parts.hostname or ""
    addresses = [] if rule.excludes(host) else await addresses_of(host)
    for address in addresses:
        if await rule.permits(host, address, requester):
            return address
    where = f", it is at {', '.join(addresses)}" if addresses else ""
    raise KVTransferError(
        f"metaserver {host} is not allowed: the request came from {requester}{where}; "
        f"allow it with --metaserver-allow {host}"
    )


def _request(parts: SplitResult, body: bytes) -> bytes:
    target = parts.path or "/"
    if parts.query:
        target += "?" + parts.query
    head = (
        f"POST {target} HTTP/1.1\r\nHost: {parts.netloc.rpartition('@')[2]}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n"
        "Connection: close\r\n\r\n"
    )
    return head.encode("ascii") + body


def _status_of(head: bytes) -> int:
    """The status code of an HTTP response head.

    Raises:
        ValueError: it is not HTTP.
    """
    fields = head.split(b"\r\n", 1)[0].split(b" ")
    if not fields[0].startswith(b"HTTP/1.") or len(fields) < 2 or not fields[1].isdigit():
        raise ValueError(f"the answer is not HTTP: {fields[0][:32]!r}")
    return int(fields[1])
