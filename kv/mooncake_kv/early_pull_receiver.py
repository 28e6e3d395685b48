"""Decode side of early pull: reserves blocks, asks for the prefill, and reads it as it progresses.

The blocks are reserved before anything is computed. What was read can become invalid at any time,
because the holder may lose its blocks while it computes. It is used only once the holder has
confirmed, after the last byte, that the lease was held, and if all of it was read in the same
attempt. Loop thread only.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from mooncake_hal.timing import timeout
from mooncake_kv.connector import LoadEnded
from mooncake_kv.connector_scheduler import ConnectorContext
from mooncake_kv.errors import KVTransferError
from mooncake_kv.kv_reader import KVReader
from mooncake_kv.metaserver_client import RequestMetaserver
from mooncake_kv.params import FirstToken, KVTransferDict, RemoteKV
from mooncake_kv.peers import PeerInstance
from mooncake_kv.protocol import LeaseStatus, PrefillProgress, Writer
from mooncake_kv.ranks import Load, spread_of

logger = logging.getLogger(__name__)

PostParams = Callable[[RequestMetaserver, KVTransferDict], Awaitable[None]]
"""Asks the metaserver for a prefill; raises as ``post_params``."""


@dataclass(slots=True)
class _Reservation:
    """A request that has blocks reserved for its prompt's KV.

    Args:
        request_id: the request.
        block_ids: its block table.
        start, num_tokens: half-open range of the prompt's tokens whose KV is missing.
        prompt_digest: digest of the prompt.

    Attributes:
        newest: the holder's latest progress; None until a holder reports.
        changed: set when ``newest`` or ``error`` has changed.
        error: reason for which the request is abandoned; empty if it is not.
        replaced: holders that a newer one has replaced.
        is_cancelled: the request has ended, so that nobody lacks the KV.
        may_be_written: while the ranks may write the blocks.
    """

    request_id: str
    block_ids: tuple[int, ...]
    start: int
    num_tokens: int
    prompt_digest: str
    newest: PrefillProgress | None = None
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    error: str = ""
    replaced: set[Writer] = field(default_factory=set)
    is_cancelled: bool = False
    may_be_written: bool = False

    def fail(self, reason: str) -> None:
        """Abandon the request; the first reason is kept."""
        self.error = self.error or reason
        self.changed.set()

    def is_for(self, message: PrefillProgress) -> bool:
        """Whether the message is about the KV that this request waits for, from a current
        holder."""
        is_same = message.prompt_digest == self.prompt_digest
        is_whole = message.first_token is None or message.num_tokens == self.num_tokens
        return is_same and is_whole and not self.error and message.holder not in self.replaced

    def remote(self, progress: PrefillProgress) -> RemoteKV:
        """The location of the KV that a holder has computed so far."""
        holder = progress.holder
        return RemoteKV(
            holder.engine_id,
            holder.request_id,
            holder.host,
            holder.port,
            progress.block_ids,
            progress.num_tokens,
            lease_s=progress.lease_s,
        )


class EarlyPullReceiver:
    """Requests with blocks reserved here, whose prompts are computed by prefill instances.

    Args:
        context: services of the connector.
        reader: reads KV from the prefill instances.
        post: asks the metaserver for a prefill.
        max_load_s: timeout of a request's load, its prefill included, in seconds; applies even if
            the holder is alive.

    Attributes:
        num_early_bytes: bytes that were read before their prefill was complete.
    """

    def __init__(
        self, context: ConnectorContext, reader: KVReader, post: PostParams, *, max_load_s: float
    ) -> None:
        self.num_early_bytes = 0
        self._context = context
        self._reader = reader
        self._post = post
        self._max_load_s = max_load_s
        self._reserved: dict[str, _Reservation] = {}

    def __contains__(self, request_id: str) -> bool:
        """Whether a request is waiting for its KV, or reading it."""
        return request_id in self._reserved

    def __len__(self) -> int:
        return len(self._reserved)

    def load(
        self,
        request_id: str,
        block_ids: tuple[int, ...],
        metaserver: RequestMetaserver,
        params: KVTransferDict,
    ) -> None:
        """Ask for a prefill and read its KV; ``LoadEnded`` follows.

        Args:
            request_id: the request to load.
            block_ids: its block table.
            metaserver: where to ask for the prefill.
            params: see ``build_reservation_params``.
        """
        start, num_tokens = params["remote_cached_tokens"], params["num_prompt_tokens"]
        digest = params["prompt_digest"]
        reserved = _Reservation(request_id, block_ids, start, num_tokens, digest)
        self._reserved[request_id] = reserved
        self._context.spawn(self._run(reserved, metaserver, params), request_id)

    def cancel(self, request_id: str) -> None:
        """Cancel a request that has ended; ``LoadEnded`` is posted once it is drained.
        Idempotent."""
        reserved = self._reserved.get(request_id)
        if reserved is not None:
            reserved.is_cancelled = True
            self.abort(request_id, "the request ended before its KV was complete")

    def abort(self, request_id: str, reason: str) -> None:
        """Fail a request's load; ``LoadEnded`` is posted once it is drained. Idempotent."""
        reserved = self._reserved.get(request_id)
        if reserved is not None:
            reserved.fail(reason)
            self._reader.loads.cancel(request_id)

    def handle(self, message: PrefillProgress) -> LeaseStatus:
        """Process a prefill's progress; returns EXPIRED if no request waits for it (any more).

        If a second holder starts, it replaces the first, which the proxy has abandoned. A second
        holder whose first message is an error is itself the abandoned one, reporting late.
        """
        reserved = self._reserved.get(message.request_id)
        if reserved is None or not reserved.is_for(message):
            return LeaseStatus.EXPIRED
        newest = reserved.newest
        if newest is not None and newest.holder != message.holder:
            if message.error:
                reserved.replaced.add(message.holder)
                return LeaseStatus.EXPIRED
            reserved.replaced.add(newest.holder)
            newest = None
        if newest is None:
            remote = reserved.remote(message)
            self._reader.leases.keep(message.request_id, remote, self._on_lease_lost)
        if message.error:
            reserved.fail(f"the prefill instance gave up: {message.error}")
        if newest is None or _progress_key(message) > _progress_key(newest):
            reserved.newest = message
            reserved.changed.set()
        return LeaseStatus.HELD

    def _on_lease_lost(self, request_id: str, reason: str) -> None:
        """Fail a request whose holder is silent or has lost its KV; a running read detects that
        itself."""
        reserved = self._reserved.get(request_id)
        if reserved is not None:
            reserved.fail(reason)

    async def _run(
        self, reserved: _Reservation, metaserver: RequestMetaserver, params: KVTransferDict
    ) -> None:
        """Run one request from start to end; posts its end exactly once, whatever happens."""
        error: str | None = "the load was interrupted"
        first_token: FirstToken | None = None
        self._reader.counts.transfers += 1
        try:
            await self._post(metaserver, params)
            first_token = await self._read_prompt(reserved)
            error = None
        except KVTransferError as exc:  # no rank has been sent an order, or all have reported
            reserved.may_be_written = False
            error = str(exc)
            self._abandon(reserved, error)
        except Exception as exc:
            error = f"the load failed: {exc!r}"
            self._reader.counts.failures += 1
            raise  # the loop logs it
        finally:
            request_id = reserved.request_id
            del self._reserved[request_id]
            self._reader.leases.drop(request_id)
            is_drained = not reserved.may_be_written
            self._context.post(LoadEnded(request_id, error, first_token, is_drained=is_drained))

    def _abandon(self, reserved: _Reservation, error: str) -> None:
        newest = reserved.newest
        engine_id = "" if newest is None else newest.holder.engine_id
        if not reserved.is_cancelled:
            self._reader.note_failure(reserved.request_id, engine_id, error)
        if newest is not None:
            self._reader.leases.spawn_failed(reserved.remote(newest), error)

    async def _read_prompt(self, reserved: _Reservation) -> FirstToken:
        """Read each chunk as it becomes available, until the whole prompt is read and confirmed."""
        deadline = self._context.clock() + self._max_load_s
        known: tuple[Writer, int] | None = None
        peer: PeerInstance | None = None
        stop = reserved.start
        while True:
            progress = await self._next_progress(reserved, deadline)
            if known is None or known[0] != progress.holder:
                peer = await self._reader.peers.reach(reserved.remote(progress))
            if known != (progress.holder, progress.attempt):
                known, stop = (progress.holder, progress.attempt), reserved.start
            if progress.num_tokens > stop:
                if not await self._read(reserved, progress, stop):
                    continue
                stop = progress.num_tokens
            if progress.first_token is not None and not reserved.changed.is_set():
                assert peer is not None, "the handshake with every holder precedes its reads"
                await self._reader.confirm(peer, reserved.remote(progress), reserved.request_id)
                return progress.first_token

    async def _next_progress(self, reserved: _Reservation, deadline: float) -> PrefillProgress:
        """Wait for progress that has not been processed yet.

        Raises:
            KVTransferError: the request was abandoned, or the wait timed out.
        """
        wait_s = deadline - self._context.clock()
        if reserved.newest is None:
            wait_s = min(wait_s, self._context.lease_s)
        try:
            async with timeout(wait_s):
                await reserved.changed.wait()
        except asyncio.TimeoutError as exc:
            if reserved.newest is None:
                reason = f"no instance began its prefill within {wait_s:g} s"
            else:
                limit = f"{self._max_load_s:g} s (--early-pull-timeout-seconds)"
                reason = f"its prefill was not complete within {limit}"
            raise KVTransferError(reason) from exc
        reserved.changed.clear()
        if reserved.error:
            raise KVTransferError(reserved.error)
        assert reserved.newest is not None, "something has come"
        return reserved.newest

    async def _read(self, reserved: _Reservation, progress: PrefillProgress, start: int) -> bool:
        """Read the available tokens from ``start`` on. Returns False if the read failed at a holder
        that has since been replaced.

        Raises:
            KVTransferError: the read failed, or the request was abandoned.
        """
        if reserved.error:
            raise KVTransferError(reserved.error)
        order = Load(
            reserved.request_id,
            progress.holder.engine_id,
            reserved.block_ids,
            progress.block_ids,
            start,
            progress.num_tokens,
            spread_of(progress.holder.request_id),
            reserved.num_tokens,
        )
        reserved.may_be_written = True
        try:
            nbytes = await self._reader.read(order)
        except KVTransferError:  # raised after all ranks have reported
            reserved.may_be_written = False
            if reserved.error or progress.holder not in reserved.replaced:
                raise
            return False
        reserved.may_be_written = False
        if progress.first_token is None:
            self.num_early_bytes += nbytes
        return True


def _progress_key(message: PrefillProgress) -> tuple[int, int, bool]:
    """Sort key of one holder's messages: a repeated one may arrive after later ones."""
    return message.attempt, message.num_tokens, message.first_token is not None
