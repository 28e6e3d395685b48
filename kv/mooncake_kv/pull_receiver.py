"""Decode side of pull: renews leases while requests are queued, then loads. Loop thread only."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from mooncake_kv.connector import LoadEnded
from mooncake_kv.connector_scheduler import ConnectorContext
from mooncake_kv.errors import KVTransferError
from mooncake_kv.kv_reader import KVReader
from mooncake_kv.params import RemoteKV
from mooncake_kv.ranks import Load, spread_of

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _Expected:
    """A request whose KV a peer holds; ``may_be_written`` while the ranks may write its blocks."""

    remote: RemoteKV
    is_loading: bool = False
    is_cancelled: bool = False
    may_be_written: bool = False


class PullReceiver:
    """Requests whose KV peers hold, from their announcement to the end of their load.

    Args:
        context: services of the connector.
        reader: reads KV from the prefill instances.
    """

    def __init__(self, context: ConnectorContext, reader: KVReader) -> None:
        self._context = context
        self._reader = reader
        self._expected: dict[str, _Expected] = {}

    def expect(self, request_id: str, remote: RemoteKV) -> None:
        """Renew a request's lease until the request is loaded or cancelled."""
        self._expected[request_id] = _Expected(remote)
        self._reader.leases.keep(request_id, remote, self._on_lease_lost)

    def load(self, request_id: str, local_blocks: tuple[int, ...], start: int) -> None:
        """Load an expected request's prompt from token ``start`` on; ``LoadEnded`` follows."""
        expected = self._expected.get(request_id)
        if expected is None:  # its lease was lost just before, which has posted LoadEnded
            return
        remote = expected.remote
        order = Load(
            request_id,
            remote.engine_id,
            local_blocks,
            remote.block_ids,
            start,
            remote.num_tokens,
            spread=spread_of(remote.request_id),
            prompt_stop=remote.num_tokens,
        )
        expected.is_loading = True
        self._context.spawn(self._run(order, expected), request_id)

    def cancel(self, request_id: str) -> None:
        """Cancel a request: notify its peer, and cancel its load if one is running. Idempotent."""
        expected = self._expected.get(request_id)
        if expected is None:
            return
        if expected.is_loading:
            expected.is_cancelled = True
            self._reader.loads.cancel(request_id)
            return
        self._forget(request_id)
        self._reader.leases.spawn_failed(
            expected.remote, "the request ended before its KV was read"
        )

    def abort(self, request_id: str, reason: str) -> None:
        """Fail a request, even an unknown one; a running load reports its own end."""
        expected = self._expected.get(request_id)
        if expected is None or not expected.is_loading:
            self._forget(request_id)
            self._context.post(LoadEnded(request_id, reason))

    def _forget(self, request_id: str) -> None:
        self._expected.pop(request_id, None)
        self._reader.leases.drop(request_id)

    def _on_lease_lost(self, request_id: str, reason: str) -> None:
        """Fail a queued request whose lease is lost; a running load detects the loss itself."""
        expected = self._expected.get(request_id)
        if expected is not None and not expected.is_loading:
            self._forget(request_id)
            self._reader.counts.failures += 1
            logger.warning("the KV of %s is lost: %s", request_id, reason)
            self._context.post(LoadEnded(request_id, reason))

    async def _run(self, order: Load, expected: _Expected) -> None:
        """Run one load from start to end; posts its end exactly once, whatever happens."""
        error: str | None = "the load was interrupted"
        self._reader.counts.transfers += 1
        try:
            await self._load(order, expected)
            error = None
        except KVTransferError as exc:  # no rank has been sent the order, or all have reported
            expected.may_be_written = False
            error = str(exc)
            if not expected.is_cancelled:  # else its request has ended: nobody lacks the KV
                self._reader.note_failure(order.request_id, order.engine_id, error)
            self._reader.leases.spawn_failed(expected.remote, error)
        except Exception as exc:
            error = f"the load failed: {exc!r}"
            self._reader.counts.failures += 1
            raise  # the loop logs it
        finally:
            self._forget(order.request_id)
            is_drained = not expected.may_be_written
            self._context.post(LoadEnded(order.request_id, error, is_drained=is_drained))

    async def _load(self, order: Load, expected: _Expected) -> None:
        remote = expected.remote
        if order.start >= order.stop:  # nothing to load, so the state of the holder is irrelevant
            self._reader.leases.spawn_done(remote, self._reader.name_of(order.request_id))
            return
        peer = await self._reader.peers.reach(remote)
        if expected.is_cancelled:
            raise KVTransferError("cancelled before it began")
        expected.may_be_written = True
        await self._reader.read(order)
        expected.may_be_written = False
        await self._reader.confirm(peer, remote, order.request_id)
