"""Whether an incarnation of a peer is dead for certain, so that nothing of it writes any more."""

from __future__ import annotations

import asyncio
import logging

from mooncake_engine.errors import KVTransferError
from mooncake_engine.kv_transfer.peers import PeerAddress, PeerBook
from mooncake_engine.kv_transfer.protocol import Ping, Pong
from mooncake_engine.timing import timeout

logger = logging.getLogger(__name__)

CONNECT_TIMEOUT_S = 2.0


async def is_gone(peer: PeerAddress, book: PeerBook) -> bool:
    """True if nobody listens at its address, or somebody else; False if that can't be known.

    A side channel listens for as long as its process may write: whoever refuses a connection is
    dead, whoever is merely silent is not.
    """
    try:
        async with timeout(CONNECT_TIMEOUT_S):
            _, stream = await asyncio.open_connection(peer.host, peer.port)
        stream.close()
    except ConnectionRefusedError:
        book.forget(peer, "nobody listens there")
        return True
    except (OSError, asyncio.TimeoutError) as exc:
        logger.info("instance %s can't be reached: %r", peer.engine_id, exc)
        return False
    try:
        answer = await book.get(peer).client.ask(Ping, Pong, tries=1)
    except KVTransferError as exc:
        logger.info("instance %s does not say who it is: %s", peer.engine_id, exc)
        return False
    if answer.engine_id != peer.engine_id:
        book.forget(peer, f"{answer.engine_id} listens there now")
        return True
    return False
