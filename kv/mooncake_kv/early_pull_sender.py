"""The prefill half of an early pull: tell the reader, chunk by chunk, what may be read already.

The lease of such a prompt begins with the request. While the prompt is computed its blocks are the
request's in any case; what the lease says then is whether the reader still wants them. Loop thread
only.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass, field

from mooncake_kv.connector_scheduler import ConnectorContext
from mooncake_kv.errors import KVTransferError
from mooncake_kv.params import FirstToken, PushTarget
from mooncake_kv.peers import PeerTable
from mooncake_kv.protocol import LeaseReply, LeaseStatus, PrefillProgress, Writer
from mooncake_kv.pull_sender import PullSender

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a prompt has come.

    Args:
        attempt: another one whenever the request has lost its blocks meanwhile.
        block_ids: its table.
        num_tokens: the first tokens, whose KV is there.
        first_token: the answer's first, once all is computed.
        error: it will not be computed; empty if it will.
    """

    attempt: int = 0
    block_ids: tuple[int, ...] = ()
    num_tokens: int = 0
    first_token: FirstToken | None = None
    error: str = ""

    @property
    def is_last(self) -> bool:
        """Whether nothing follows."""
        return self.first_token is not None or bool(self.error)


@dataclass(slots=True)
class _Sent:
    """A prompt that a reader waits for; ``changed`` is set while ``newest`` has not been told."""

    target: PushTarget
    newest: Progress = field(default_factory=Progress)
    changed: asyncio.Event = field(default_factory=asyncio.Event)


class EarlyPullSender:
    """Prompts that are computed for readers which have reserved blocks.

    Args:
        context: what it works with.
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
        self._sent: dict[str, _Sent] = {}

    def begin(self, request_id: str, target: PushTarget) -> None:
        """A request has come: its reader is told so before anything is computed."""
        self._sender.grant(request_id)
        sent = self._sent[request_id] = _Sent(target)
        self._peers.hold(target.remote)
        self._context.spawn(self._report(request_id, sent), request_id)

    def advance(self, request_id: str, progress: Progress) -> None:
        """A request has come on; what has not been told yet is told with it."""
        sent = self._sent.get(request_id)
        if sent is not None and not sent.newest.is_last:
            sent.newest = progress
            sent.changed.set()

    def complete(self, request_id: str, progress: Progress) -> None:
        """All of a prompt is computed; ``LeaseEnded`` follows when its blocks are free: at once, if
        nobody wants them any more."""
        self.advance(request_id, progress)
        if not self._sender.is_held(request_id):
            self._sender.give_up(request_id)

    def cancel(self, request_id: str, reason: str) -> None:
        """A prompt will not be computed, or is no longer held."""
        self.advance(request_id, Progress(error=reason))

    async def _report(self, request_id: str, sent: _Sent) -> None:
        """One message after the other, each with all that is known when it leaves."""
        remote = sent.target.remote
        try:
            while True:
                sent.changed.clear()
                told = sent.newest
                if await self._tell(request_id, sent.target, told) is not LeaseStatus.HELD:
                    self._sender.end(request_id, LeaseStatus.EXPIRED)  # nobody waits for it
                    return
                if told.is_last:
                    return
                await sent.changed.wait()
        except KVTransferError as exc:
            logger.warning("the reader of %s can't be told of it: %s", request_id, exc)
            self._peers.forget(remote, str(exc))
            self._sender.end(request_id, LeaseStatus.EXPIRED)
        finally:
            del self._sent[request_id]
            self._peers.release(remote)

    async def _tell(self, request_id: str, target: PushTarget, progress: Progress) -> LeaseStatus:
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
