"""The decode half of pulling: keep leases while requests queue, then load. Loop thread only."""

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
    """A request whose KV a peer holds; ``may_be_written`` while its blocks are the ranks'."""

    remote: RemoteKV
    is_loading: bool = False
    is_cancelled: bool = False
    may_be_written: bool = False


class PullReceiver:
    """Expected requests and running loads.

    Args:
        context: what it works with.
        reader: reads, and knows the prefill instances.
    """

    def __init__(self, context: ConnectorContext, reader: KVReader) -> None:
        self._context = context
        self._reader = reader
        self._expected: dict[str, _Expected] = {}

    def expect(self, request_id: str, remote: RemoteKV) -> None:
        """Keep this lease alive until the request is loaded or cancelled."""
        self._expected[request_id] = _Expected(remote)
        self._reader.leases.keep(request_id, remote, self._lose)

    def load(self, request_id: str, local_blocks: tuple[int, ...], start: int) -> None:
        """Load an expected request's prompt from token ``start`` on; ``LoadEnded`` follows."""
        expected = self._expected.get(request_id)
        if expected is None:  # its lease was lost just before; that LoadEnded is on its way
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
        """Give up on a request: tell its peer, and end its load if one runs. Idempotent."""
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

    def give_up(self, request_id: str, reason: str) -> None:
        """End a request's wait, whatever is known of it; a running load reports its own end."""
        expected = self._expected.get(request_id)
        if expected is None or not expected.is_loading:
            self._forget(request_id)
            self._context.post(LoadEnded(request_id, reason))

    def _forget(self, request_id: str) -> None:
        self._expected.pop(request_id, None)
        self._reader.leases.drop(request_id)

    def _lose(self, request_id: str, reason: str) -> None:
        """A running load finds out by itself; a queued request ends here."""
        expected = self._expected.get(request_id)
        if expected is not None and not expected.is_loading:
            self._forget(request_id)
            self._reader.counts.failures += 1
            logger.warning("the KV of %s is lost: %s", request_id, reason)
            self._context.post(LoadEnded(request_id, reason))

    async def _run(self, order: Load, expected: _Expected) -> None:
        """One load from first to last; whatever happens, its end is reported once, drained."""
        error: str | None = "the load was interrupted"
        self._reader.counts.transfers += 1
        try:
            await self._load(order, expected)
            error = None
        except KVTransferError as exc:  # once the ranks have orders, from all of their reports
            expected.may_be_written = False
            error = str(exc)
            self._reader.note_failure(order.request_id, order.engine_id, error)
            self._reader.leases.spawn_failed(expected.remote, error)
        except Exception as exc:
            error = f"the load failed: {exc!r}"
            self._reader.counts.failures += 1
            raise  # to be logged
        finally:
            self._forget(order.request_id)
            is_drained = not expected.may_be_written
            self._context.post(LoadEnded(order.request_id, error, is_drained=is_drained))

    async def _load(self, order: Load, expected: _Expected) -> None:
        remote = expected.remote
        if order.start >= order.stop:  # all of it is here: the holder's fate does not matter
            self._reader.leases.spawn_done(remote, self._reader.name_of(order.request_id))
            return
        peer = await self._reader.peers.reach(remote)
        if expected.is_cancelled:
            raise KVTransferError("cancelled before it began")
        expected.may_be_written = True
        await self._reader.read(order)
        expected.may_be_written = False
        await self._reader.confirm(peer, remote, order.request_id)
