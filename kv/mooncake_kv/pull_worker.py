"""Per-rank worker of the pull connector: registers KV memory and reads into it."""

from __future__ import annotations

import logging
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from mooncake_hal.errors import HalError, PeerLost, TransferCancelled, TransferError
from mooncake_hal.kv.transfer_plan import BlockTransfer, KVShardSpec, plan_transfer
from mooncake_hal.transport import Transfer
from mooncake_kv.connector_worker import ConnectorWorker, RankContext
from mooncake_kv.handshake import RankMetadata
from mooncake_kv.ranks import (
    CancelLoad,
    ConnectPeer,
    ForgetPeer,
    Load,
    LoadReport,
    decode_to_rank,
    encode,
)

logger = logging.getLogger(__name__)

LOAD_THREADS = 4
"""Loads from one instance at a time."""


class PullWorker(ConnectorWorker):
    """One rank's half of MooncakeConnector; see ``ConnectorWorker``."""

    def __init__(self, context: RankContext) -> None:
        super().__init__(context)
        self._placement = KVShardSpec(context.memory.shard, context.memory.layout)
        self._sources: dict[str, _Source] = {}
        self._former: list[_Source] = []  # given up; their last loads may still be ending
        self._loads: dict[str, _RunningLoad] = {}
        self._endings = ThreadPoolExecutor(1, f"kv-end-{context.rank}")  # never behind a load
        self._announce()

    def _obey(self, message: bytes) -> None:
        command = decode_to_rank(message)
        if isinstance(command, Load):
            self._loads[command.request_id] = load = _RunningLoad(command)
            source = self._sources.get(command.engine_id)
            (source.threads if source else self._endings).submit(self._run, load)
        elif isinstance(command, CancelLoad):
            running = self._loads.get(command.request_id)
            if running is not None:
                self._endings.submit(running.cancel)
        elif isinstance(command, ConnectPeer):
            self._dismiss(command.engine_id)
            threads = self._make_threads()
            self._sources[command.engine_id] = _Source(command.engine_id, command.ranks, threads)
        elif isinstance(command, ForgetPeer):
            self._forget(command.engine_id)

    def _drain(self) -> None:
        for load in list(self._loads.values()):
            load.cancel()
        for source in (*self._former, *self._sources.values()):
            source.threads.shutdown(wait=True)
        self._endings.shutdown(wait=True)

    def _run(self, load: _RunningLoad) -> None:
        """Top of a pool thread: the load is reported once, drained, whatever happens."""
        started = time.monotonic()
        error = None
        try:
            self._read(load)
        except HalError as exc:
            error = f"{type(exc).__name__}: {exc}"
        except BaseException as exc:
            error = f"the loader died: {exc!r}"
            self.context.fail(exc)
            raise
        finally:
            seconds = time.monotonic() - started
            report = LoadReport(load.command.request_id, error, load.nbytes, seconds)
            self.context.emit(encode(report))
            del self._loads[load.command.request_id]

    def _read(self, load: _RunningLoad) -> None:
        command = load.command
        source = self._sources.get(command.engine_id)
        if source is None:
            raise PeerLost(f"instance {command.engine_id} was given up before the read began")
        ranks = source.ranks
        movement = BlockTransfer(
            command.local_blocks,
            command.remote_blocks,
            (command.start, command.stop),
            spread=command.spread,
        )
        plans = plan_transfer(
            self.context.memory.geometry,
            self._placement,
            [rank.placement for rank in ranks],
            movement,
        )
        try:
            for plan in plans:
                peer = self._transports.peer(
                    command.engine_id, plan.peer, ranks[plan.peer].endpoints
                )
                load.start(peer.read(plan.spans, timeout=self._timeout_s), plan.spans.total_bytes)
            load.wait()
        except TransferCancelled:  # the connection is sound, and others use it
            load.cancel()
            raise
        except TransferError:
            load.cancel()
            self._transports.forget(command.engine_id)
            raise

    def _forget(self, engine_id: str) -> None:
        if self._dismiss(engine_id):
            self._endings.submit(self._transports.forget, engine_id)

    def _dismiss(self, engine_id: str) -> bool:
        """No new loads from there; returns whether there could have been any."""
        source = self._sources.pop(engine_id, None)
        if source is None:
            return False
        source.threads.shutdown(wait=False)
        busy = {load.command.engine_id for load in list(self._loads.values())}
        self._former = [former for former in self._former if former.engine_id in busy]
        self._former.append(source)
        return True

    def _make_threads(self) -> ThreadPoolExecutor:
        context = self.context
        return ThreadPoolExecutor(
            LOAD_THREADS,
            f"kv-load-{context.rank}",
            initializer=context.bind_thread,
        )


@dataclass(frozen=True, slots=True)
class _Source:
    """An instance to read from; with threads of its own, so that one that hangs delays no other."""

    engine_id: str
    ranks: tuple[RankMetadata, ...]
    threads: ThreadPoolExecutor


class _RunningLoad:
    """A load's transfers, and whether it was cancelled."""

    def __init__(self, command: Load) -> None:
        self.command = command
        self.nbytes = 0
        self._lock = threading.Lock()
        self._transfers: list[Transfer] = []
        self._is_cancelled = False

    def start(self, transfer: Transfer, nbytes: int) -> None:
        """Note a transfer in flight; ends it at once if the load is cancelled."""
        with self._lock:
            self._transfers.append(transfer)
            self.nbytes += nbytes
            is_cancelled = self._is_cancelled
        if is_cancelled:
            transfer.cancel()

    def wait(self) -> None:
        """Block until all transfers are done.

        Raises:
            TransferError: the first failure.
        """
        for transfer in self._transfers:
            transfer.wait()
        if self._is_cancelled:
            raise TransferCancelled("the request ended while its KV was read")

    def cancel(self) -> None:
        """End and drain what is in flight, and whatever is started later."""
        with self._lock:
            self._is_cancelled = True
            transfers = list(self._transfers)
        for transfer in transfers:
            transfer.cancel()
