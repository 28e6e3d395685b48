"""Asks the proxy's metaserver for a prefill: one short HTTP POST, whose status is checked."""

from __future__ import annotations

import asyncio
import ssl
from contextlib import closing
from urllib.parse import SplitResult, urlsplit

import msgspec

from mooncake_hal.timing import timeout
from mooncake_kv.errors import KVTransferError
from mooncake_kv.params import KVTransferDict

POST_TIMEOUT_S = 5.0
ACCEPTED = (200, 202)
MAX_ANSWER_BYTES = 16 * 1024
_PORTS = {"http": 80, "https": 443}


async def post_params(url: str, params: KVTransferDict) -> None:
    """Hand our blocks to the metaserver; it answers at once, before the prefill.

    Args:
        url: ``http://`` or ``https://``, as the request named it.
        params: see ``build_push_params``.

    Raises:
        KVTransferError: it is unreachable, silent, or answered anything but 200 or 202.
    """
    try:
        async with timeout(POST_TIMEOUT_S):
            status, body = await _exchange(url, params)
    except asyncio.TimeoutError as exc:
        raise KVTransferError(
            f"metaserver {url} did not answer within {POST_TIMEOUT_S:g} s"
        ) from exc
    except (OSError, ValueError, asyncio.IncompleteReadError) as exc:
        raise KVTransferError(
            f"metaserver {url} can't be asked: {exc or type(exc).__name__}"
        ) from exc
    if status not in ACCEPTED:
        said = body.decode(errors="replace").strip()
        raise KVTransferError(f"metaserver {url} answered {status}, not 202: {said}")


async def _exchange(url: str, params: KVTransferDict) -> tuple[int, bytes]:
    parts = urlsplit(url)
    if parts.scheme not in _PORTS or parts.hostname is None:
        raise ValueError("wanted http://host:port/path")
    reader, writer = await asyncio.open_connection(
        parts.hostname,
        parts.port or _PORTS[parts.scheme],
        ssl=ssl.create_default_context() if parts.scheme == "https" else None,
        limit=MAX_ANSWER_BYTES,
    )
    with closing(writer):
        writer.write(_request(parts, msgspec.json.encode(params)))
        await writer.drain()
        head = await reader.readuntil(b"\r\n\r\n")
        return _status_of(head), await reader.read(1024)


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
    """The status code of an answer's head.

    Raises:
        ValueError: it is no HTTP.
    """
    fields = head.split(b"\r\n", 1)[0].split(b" ")
    if not fields[0].startswith(b"HTTP/1.") or len(fields) < 2 or not fields[1].isdigit():
        raise ValueError(f"it does not speak HTTP: {fields[0][:32]!r}")
    return int(fields[1])
