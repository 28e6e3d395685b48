"""Looks for a writer of whom nothing is heard: is it dead for certain, and if not, what it says."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Sequence

from mooncake_engine.errors import KVTransferError, PeerAbsent, PeerGone
from mooncake_engine.kv_transfer.peers import PeerAddress, PeerBook
from mooncake_engine.kv_transfer.protocol import Inquire, Standing
from mooncake_engine.timing import timeout

CONNECT_TIMEOUT_S = 2.0


async def inquire(
    writer: PeerAddress, request_ids: Sequence[str], book: PeerBook, *, is_near: bool
) -> Standing:
    """Ask an instance how its pushes stand.

    Args:
        writer: the incarnation, and its side channel.
        request_ids: its own names for them.
        book: of all peers.
        is_near: whether its side channel is in this process' network namespace.

    Raises:
        PeerGone: nobody listens at its address, or somebody else, and our own kernel says so. A
            side channel listens for as long as its process may write: it is dead.
        PeerAbsent: the same, said by another host, which may not be the writer's.
        KVTransferError: it can't be known.
    """
    try:
        await _knock(writer)
    except ConnectionRefusedError as exc:
        raise await _missing(writer, "nobody", book, is_near=is_near) from exc
    except (OSError, asyncio.TimeoutError) as exc:
        raise KVTransferError(f"instance {writer.engine_id} can't be reached: {exc!r}") from exc
    named = tuple(request_ids)
    standing = await book.get(writer).client.ask(
        lambda ticket: Inquire(ticket, named), Standing, tries=1
    )
    if standing.engine_id != writer.engine_id:
        raise await _missing(writer, standing.engine_id, book, is_near=is_near)
    return standing


async def _missing(
    writer: PeerAddress, found: str, book: PeerBook, *, is_near: bool
) -> PeerGone | PeerAbsent:
    """What to raise when ``found`` listens where the writer did."""
    book.forget(writer, f"{found} listens there now")
    if is_near and await _is_own_address(writer.host):
        return PeerGone(f"instance {writer.engine_id} is gone: {found} listens there")
    where = f"{writer.host} port {writer.port}"
    return PeerAbsent(f"instance {writer.engine_id} is not at {where} any more: {found} listens")


async def _is_own_address(host: str) -> bool:
    """Whether whoever connects to that host talks to this kernel, and to nothing in between."""
    try:
        kind = socket.SOCK_STREAM
        found = await asyncio.get_running_loop().getaddrinfo(host, 0, type=kind)
        for family, *_, address in found:
            with socket.socket(family, kind) as probe:
                probe.bind(address)
    except OSError:
        return False
    return True


async def _knock(writer: PeerAddress) -> None:
    """Connect and hang up: a kernel answers for a process that lives, however busy."""
    async with timeout(CONNECT_TIMEOUT_S):
        _, stream = await asyncio.open_connection(writer.host, writer.port)
    stream.close()
