"""Looks for a writer of whom nothing is heard: is it dead for certain, and if not, what it says."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from mooncake_engine.errors import KVTransferError, PeerGone
from mooncake_engine.kv_transfer.peers import PeerAddress, PeerBook
from mooncake_engine.kv_transfer.protocol import Inquire, Standing
from mooncake_engine.timing import timeout

CONNECT_TIMEOUT_S = 2.0


async def inquire(writer: PeerAddress, request_ids: Sequence[str], book: PeerBook) -> Standing:
    """Ask an instance how its pushes stand.

    Args:
        writer: the incarnation, and its side channel.
        request_ids: its own names for them.
        book: of all peers.

    Raises:
        PeerGone: nobody listens at its address, or somebody else. A side channel listens for as
            long as its process may write: who refuses a connection is dead, who is silent is not.
        KVTransferError: it can't be known.
    """
    try:
        await _knock(writer)
    except ConnectionRefusedError as exc:
        book.forget(writer, "nobody listens there")
        raise PeerGone(f"instance {writer.engine_id} is gone: nobody listens there") from exc
    except (OSError, asyncio.TimeoutError) as exc:
        raise KVTransferError(f"instance {writer.engine_id} can't be reached: {exc!r}") from exc
    named = tuple(request_ids)
    standing = await book.get(writer).client.ask(
        lambda ticket: Inquire(ticket, named), Standing, tries=1
    )
    if standing.engine_id != writer.engine_id:
        book.forget(writer, f"{standing.engine_id} listens there now")
        raise PeerGone(f"instance {writer.engine_id} is gone: {standing.engine_id} listens there")
    return standing


async def _knock(writer: PeerAddress) -> None:
    """Connect and hang up: a kernel answers for a process that lives, however busy."""
    async with timeout(CONNECT_TIMEOUT_S):
        _, stream = await asyncio.open_connection(writer.host, writer.port)
    stream.close()
