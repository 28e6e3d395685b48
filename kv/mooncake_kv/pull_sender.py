"""Prefill side of pull: holds finished prompts for peers under leases. Loop thread only."""

from __future__ import annotations

import asyncio
import logging

from mooncake_kv.connector import LeaseEnded
from mooncake_kv.connector_scheduler import ConnectorContext
from mooncake_kv.handshake import check_decode_peer
from mooncake_kv.leases import NO_READER, LeaseTable
from mooncake_kv.protocol import (
    AnyMessage,
    Done,
    Failed,
    Hello,
    LeaseReply,
    LeaseStatus,
    Reject,
    Renew,
    Renewed,
    welcome,
)

logger = logging.getLogger(__name__)

SWEEPS_PER_LEASE = 10


class PullSender:
    """The leases that this instance has granted, and the handler of peers' messages about them.

    Args:
        context: services of the connector.

    Attributes:
        num_expired: leases that have timed out since the start.
    """

    def __init__(self, context: ConnectorContext) -> None:
        self._context = context
        self.num_expired = 0
        self._leases = LeaseTable(context.lease_s)

    @property
    def num_held(self) -> int:
        """Number of current leases."""
        return len(self._leases)

    def is_held(self, request_id: str) -> bool:
        """Whether a request's lease is current."""
        return self._leases.is_held(request_id)

    def grant(self, request_id: str) -> None:
        """Start a request's lease."""
        self._leases.grant(request_id, self._context.clock())

    def end(self, request_id: str, ending: LeaseStatus, reader: str = NO_READER) -> LeaseStatus:
        """End a lease before its deadline; returns how it ended, now or earlier."""
        was_held = self._leases.is_held(request_id)
        status = self._leases.end(request_id, ending, reader)
        if was_held:
            self._context.post(LeaseEnded(request_id))
        return status

    def drop(self, request_id: str) -> None:
        """End a request's lease, even an unknown one. A peer that is reading the KV asks for the
        lease afterwards, and then discards what it has read."""
        self._leases.end(request_id, LeaseStatus.EXPIRED)
        self._context.post(LeaseEnded(request_id))

    def handle(self, message: AnyMessage) -> AnyMessage:
        """Answer a peer.

        Raises:
            HandshakeRefused: the peer is incompatible.
        """
        ticket = message.ticket
        if isinstance(message, Hello):
            own, incompatible = self._context.instance, self._context.incompatible
            check = self._context.rounding.noting(check_decode_peer)
            return welcome(message, own, check, incompatible)
        if isinstance(message, Renew):
            return Renewed(ticket, self._leases.renew(message.request_ids, self._context.clock()))
        if isinstance(message, Done):
            ending = self.end(message.request_id, LeaseStatus.RELEASED, message.reader)
            return LeaseReply(ticket, ending)
        if isinstance(message, Failed):
            # the reader warns of what has failed; that a client has left is no failure
            logger.info("a peer gave up reading %s: %s", message.request_id, message.reason)
            return LeaseReply(ticket, self.end(message.request_id, LeaseStatus.EXPIRED))
        return Reject(ticket, f"{type(message).__name__} is not a request")

    async def sweep(self) -> None:
        """Expire leases at their deadlines, whether or not the engine steps; runs until
        cancelled."""
        while True:
            await asyncio.sleep(self._leases.duration_s / SWEEPS_PER_LEASE)
            for request_id in self._leases.expire(self._context.clock()):
                self.num_expired += 1
                logger.warning(
                    "the lease of %s expired: its KV was not read within %g s; freeing its blocks",
                    request_id,
                    self._leases.duration_s,
                )
                self._context.post(LeaseEnded(request_id))
