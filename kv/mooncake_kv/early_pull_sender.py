"""Prefill side of early pull: notifies the reader, chunk by chunk, of the KV that it may read.

The lease of such a prompt begins when the request arrives. While the prompt is being computed, its
blocks belong to the request anyway; until then the lease only records whether the reader still
wants them. Loop thread only.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass, field

from mooncake_kv.connector import REFUSED, SendRefused
from mooncake_kv.connector_scheduler import ConnectorContext
from mooncake_kv.errors import HandshakeRefused, KVTransferError, SessionRefused
from mooncake_kv.params import FirstToken, PushTarget
from mooncake_kv.peers import PeerTable
from mooncake_kv.protocol import LeaseReply, LeaseStatus, PrefillProgress, Writer
from mooncake_kv.pull_sender import PullSender

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Progress:
    """Progress of a prompt's prefill.

    Args:
        attempt: changes whenever the request has lost its blocks.
        block_ids: its block table.
        num_tokens: number of leading tokens whose KV is computed.
        first_token: the sampled token, once the whole prompt is computed.
        error: reason for which the prefill will not complete; empty if it will.
    """

    attempt: int = 0
    block_ids: tuple[int, ...] = ()
    num_tokens: int = 0
    first_token: FirstToken | None = None
    error: str = ""

    @property
    def is_last(self) -> bool:
        """Whether no further progress follows."""
        return self.first_token is not None or bool(self.error)


@dataclass(slots=True)
class _EarlyPull:
    """A prompt that a reader waits for; ``changed`` is set while ``newest`` has not been sent."""

    target: PushTarget
    newest: Progress = field(default_factory=Progress)
    changed: asyncio.Event = field(default_factory=asyncio.Event)


class EarlyPullSender:
    """Prompts that are computed for readers that have reserved blocks.

    Args:
        context: services of the connector.
        peers: the decode instances.
        sender: holds the leases.
        address: host and port of our side channel.
    """

    def __init__(
        self,
        context: ConnectorContext,
        peers: PeerTable,
        sender: PullSender,
        address: tuple[str, int],
    ) -> None:
        self._context = context
        self._peers = peers
        self._sender = sender
        self._host, self._port = address
        self._pulls: dict[str, _EarlyPull] = {}

    def begin(self, request_id: str, target: PushTarget) -> None:
        """Start a request; notifies its reader before anything is computed."""
        self._sender.grant(request_id)
        pull = self._pulls[request_id] = _EarlyPull(target)
        self._peers.hold(target.remote)
        self._context.spawn(self._report(request_id, pull), request_id)

    def advance(self, request_id: str, progress: Progress) -> None:
        """Record a request's progress, to be sent in the next message to its reader."""
        pull = self._pulls.get(request_id)
        if pull is not None and not pull.newest.is_last:
            pull.newest = progress
            pull.changed.set()

    def complete(self, request_id: str, progress: Progress) -> None:
        """Complete a prompt's prefill; ``LeaseEnded`` follows when its blocks can be freed, which
        is immediately if the reader no longer wants them."""
        self.advance(request_id, progress)
        if not self._sender.is_held(request_id):
            self._sender.drop(request_id)

    def cancel(self, request_id: str, reason: str) -> None:
        """Notify the reader that a prompt will not be computed, or is no longer held."""
        self.advance(request_id, Progress(error=reason))

    async def _report(self, request_id: str, pull: _EarlyPull) -> None:
        """Send a request's progress to its reader, one message at a time, each with the state at
        the time of sending."""
        remote = pull.target.remote
        try:
            while True:
                pull.changed.clear()
                progress = pull.newest
                if await self._send(request_id, pull.target, progress) is not LeaseStatus.HELD:
                    self._sender.end(request_id, LeaseStatus.EXPIRED)  # nobody waits for it
                    return
                if progress.is_last:
                    return
                await pull.changed.wait()
        except KVTransferError as exc:
            if isinstance(exc, SessionRefused):
                self._context.incompatible.note(remote.engine_id, str(exc))
            level = self._context.incompatible.level(remote.engine_id)
            logger.log(level, "the reader of %s could not be notified: %s", request_id, exc)
            self._sender.end(request_id, LeaseStatus.EXPIRED)
            if isinstance(exc, HandshakeRefused):
                self._context.post(SendRefused(request_id, REFUSED))
        finally:
            del self._pulls[request_id]
            self._peers.release(remote)

    async def _send(self, request_id: str, target: PushTarget, progress: Progress) -> LeaseStatus:
        holder = Writer(self._context.instance.engine_id, request_id, self._host, self._port)
        reply = await self._peers.get(target.remote).client.ask(
            lambda ticket: PrefillProgress(
                ticket,
                target.remote.request_id,
                holder,
                progress.attempt,
                progress.block_ids,
                progress.num_tokens,
                target.prompt_digest,
                self._context.lease_s,
                progress.first_token,
                progress.error,
            ),
            LeaseReply,
        )
        return reply.status
