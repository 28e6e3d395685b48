"""Staging buffers, through which many small pieces move as contiguous runs that a kernel scatters.

A reader reads runs into two buffers of its own, and scatters them from there. It has two buffers
for each peer that it reads from concurrently. A writer borrows two buffers of the receiver, has its
engine fill them with runs, and asks the receiver to scatter each. In both cases the engine fills
one buffer while the other is scattered.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future, wait
from queue import Empty, Queue
from typing import Protocol

import msgspec
import torch
from torch import Tensor

from mooncake_hal.errors import PeerLost, TransferError
from mooncake_hal.session.authentication import UNREADABLE, encode
from mooncake_hal.session.regions import AttachedRegions
from mooncake_hal.session.session import Session
from mooncake_hal.transport import MemoryRegion, Spans
from mooncake_hal.transports.adapters.adapter_messages import decode_message
from mooncake_hal.transports.staging import PackedPieces, StagingLimits
from mooncake_hal.transports.strided_pieces import U64
from mooncake_hal_ascend.hccs.contiguous_runs import (
    BUFFER_BYTES,
    ContiguousRuns,
    find_runs,
    is_row,
    row_bytes,
    rows_of,
)
from mooncake_hal_ascend.hccs.hccs_settings import NAME

logger = logging.getLogger(__name__)

SLOTS = 2
"""Buffers that are lent together: one is filled while the other is scattered."""
MAX_BORROWERS = 16
"""Prefill ranks that can borrow buffers of one decode rank; further ranks write piece by piece."""
LENT_BYTES = SLOTS * BUFFER_BYTES
MAX_READS = 8
"""Concurrent reads by runs. Further reads wait for buffers up to BUFFERS_SECONDS, and are then made
piece by piece."""
READ_BYTES = SLOTS * BUFFER_BYTES
BUFFERS_SECONDS = 0.25
"""Timeout of a read's wait for buffers, in seconds. A read that holds buffers longer is waiting for
a peer that does not answer, which must not block reads from other peers."""
LIMITS = StagingLimits(NAME, SLOTS, BUFFER_BYTES)
ELEMENT = torch.int32
"""The type of ELEMENT_BYTES as which rows are copied."""
POLL_SECONDS = 0.05
"""Interval at which a wait checks whether its transfer was cancelled."""
GRACE_SECONDS = 2.0
"""Time that a peer has to answer after its transfer was cancelled; then it is considered lost."""

TensorAt = Callable[[int], "Tensor | None"]
"""Returns the backend's allocation that begins at an address, as a flat uint8 tensor."""

Wait = Callable[[], None]


class HccsRegionInfo(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Published info of a region.

    Args:
        address: address of the region.
        takes_runs: whether the region can be written through borrowed buffers.
    """

    address: int
    takes_runs: bool


class Borrow(msgspec.Struct, frozen=True, tag="borrow", forbid_unknown_fields=True):
    """Request: lend buffers to this connection, which keeps the same ones until it ends."""


class Lent(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Reply to Borrow: address of the first buffer, which is followed by the second."""

    address: int


class ScatterBuffer(msgspec.Struct, frozen=True, tag="scatter", forbid_unknown_fields=True):
    """Request: scatter a buffer to its targets; the reply is sent when all copies have completed.

    Args:
        slot: index of the buffer.
        targets: target addresses and lengths of the pieces.
    """

    slot: int
    targets: PackedPieces


def decode_call(payload: bytes) -> Borrow | ScatterBuffer:
    """Decode a request; raises TransferError if it is malformed."""
    try:
        return msgspec.msgpack.decode(payload, type=Borrow | ScatterBuffer)
    except UNREADABLE as exc:
        raise TransferError(f"{NAME}: a call can't be read: {exc}") from exc


class SideStream(Protocol):
    """A stream for copies, which runs independently of the model's stream."""

    def run(self, work: Callable[[], None], device: torch.device) -> Wait:
        """Call ``work`` to enqueue copies; returns a function that waits for their completion."""
        ...


class Scatterer:
    """Scatters buffers over the backend's memory. Thread-safe.

    Args:
        tensor_at: finds the backend's memory.
        stream: runs the copies.
    """

    def __init__(self, tensor_at: TensorAt, stream: SideStream) -> None:
        self._tensor_at = tensor_at
        self._stream = stream

    def can_scatter(self, address: int) -> bool:
        """Whether data can be scattered over the region at ``address``."""
        return self._tensor_at(address) is not None

    def scatter(self, buffer: Tensor, targets: U64, sizes: U64, base: int) -> Wait:
        """Start to copy pieces to their targets.

        Args:
            buffer: flat uint8, the pieces back to back.
            targets, sizes: [pieces] addresses and lengths, in rows for which ``is_row`` holds.
            base: address of the region of the targets, for which ``can_scatter`` holds.

        Returns:
            A function that waits until all copies have completed. The buffer must not change before
            that.
        """
        region = self._tensor_at(base)
        assert region is not None, "can_scatter() was not asked"
        row = row_bytes(targets, sizes, base)
        target = as_rows(region, row)
        packed = as_rows(buffer, row)[: int(sizes.sum()) // row]
        rows = torch.from_numpy(rows_of(targets, sizes, base, row))

        def copy() -> None:
            target.index_copy_(0, rows.to(target.device), packed)

        return self._stream.run(copy, target.device)


def as_rows(memory: Tensor, row: int) -> Tensor:
    """View flat uint8 memory as rows: [rows, row / 4] int32."""
    whole = memory.numel() // row * row
    return memory[:whole].view(ELEMENT).view(-1, row // ELEMENT.itemsize)


class StagedReader:
    """Reads contiguous runs into an endpoint's buffers, and scatters them from there. Thread-safe.

    Args:
        memory: memory of all buffers, flat uint8; registered with the engine.
        scatterer: scatters the buffers.
        num_reads: number of concurrent reads, each of which has two buffers of equal size.
    """

    def __init__(self, memory: Tensor, scatterer: Scatterer, num_reads: int) -> None:
        self._half = memory.numel() // num_reads // SLOTS
        self._scatterer = scatterer
        self._free: Queue[Tensor] = Queue()
        for number in range(num_reads):
            self._free.put(memory[SLOTS * self._half * number :][: SLOTS * self._half])

    def close(self) -> None:
        """Release the memory; no read may follow."""
        self._free = Queue()

    def read(self, region: MemoryRegion, spans: Spans, read: Callable[[Spans], None]) -> bool:
        """Read pieces as whole runs, if that is faster, and wait until all have arrived.

        Args:
            region: our region that contains all pieces.
            spans: the pieces.
            read: reads spans with the engine, and returns when all have arrived.

        Returns:
            Whether the pieces were read; if not, nothing has moved.
        """
        runs = find_runs(spans.remote, spans.local, spans.nbytes, region.address, self._half)
        if runs is None or not self._scatterer.can_scatter(region.address):
            return False
        try:
            buffers = self._free.get(timeout=BUFFERS_SECONDS)
        except Empty:
            return False
        try:
            self._read_runs(runs, region.address, buffers, read)
        finally:
            self._free.put(buffers)
        return True

    def _read_runs(
        self, runs: ContiguousRuns, base: int, buffers: Tensor, read: Callable[[Spans], None]
    ) -> None:
        pending_scatters: list[Wait] = [lambda: None] * SLOTS
        try:
            for number, batch in enumerate(runs.batches(self._half)):
                slot = number % SLOTS
                pending_scatters[slot]()
                buffer = buffers[slot * self._half :][: self._half]
                in_buffer = batch.in_buffer(buffer.data_ptr())
                read(Spans(in_buffer, batch.starts, batch.run_bytes))
                pending_scatters[slot] = self._scatterer.scatter(
                    buffer, batch.targets, batch.sizes, base
                )
        finally:  # even after an error, no memory may change once this returns
            for wait in pending_scatters:
                wait()


class StagingBufferPool:
    """The buffers that an endpoint lends to peers that write to it.

    Args:
        memory: memory of all buffers, flat uint8; registered with the engine.
        scatterer: scatters the buffers.
    """

    def __init__(self, memory: Tensor, scatterer: Scatterer) -> None:
        self._scatterer = scatterer
        # first in, first out: a peer that died may still be writing to the buffers it had borrowed
        self._free = deque(
            memory[begin : begin + LENT_BYTES] for begin in range(0, memory.numel(), LENT_BYTES)
        )
        self._lent: dict[Session, Tensor] = {}

    def close(self) -> None:
        """Release the memory; no request may follow."""
        self._free.clear()
        self._lent.clear()

    def can_scatter(self, region: MemoryRegion) -> bool:
        """Whether data can be scattered over a region."""
        return self._scatterer.can_scatter(region.address)

    def handle_request(self, session: Session, payload: bytes, local: AttachedRegions) -> bytes:
        call = decode_call(payload)
        if isinstance(call, Borrow):
            return encode(Lent(self._lend(session).data_ptr()))
        self._scatter(session, call, local)
        return b""

    def session_ended(self, session: Session) -> None:
        """Return the buffers that the session had borrowed to the pool."""
        if (buffers := self._lent.pop(session, None)) is not None:
            self._free.append(buffers)

    def _lend(self, session: Session) -> Tensor:
        if session not in self._lent:
            if not self._free:
                raise TransferError(
                    f"{NAME}: all buffers are lent, to {len(self._lent)} peers that push"
                )
            self._lent[session] = self._free.popleft()
        return self._lent[session]

    def _scatter(self, session: Session, call: ScatterBuffer, local: AttachedRegions) -> None:
        """Scatter a buffer over a region that is live now, and wait for all copies."""
        if session not in self._lent:
            raise TransferError(f"{NAME}: buffers must be borrowed before they are scattered")
        targets, sizes = LIMITS.read_pieces(call.slot, call.targets)
        index, at = local.locate(targets, sizes)
        base = index.starts[at[0]]
        if (at != at[0]).any() or not self._scatterer.can_scatter(base):
            raise TransferError(f"{NAME}: pieces must lie in one region that takes runs")
        if not is_row(row := row_bytes(targets, sizes, base)):
            raise TransferError(f"{NAME}: pieces in rows of {row} bytes can't be scattered")
        buffer = self._lent[session][call.slot * BUFFER_BYTES :][:BUFFER_BYTES]
        self._scatterer.scatter(buffer, targets, sizes, base)()


class StagedWriter:
    """Writes contiguous runs to buffers that a peer lends, and has the peer scatter them.

    Args:
        session: session with the peer.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self._address: int | None = None
        self._is_refused = False

    def write(
        self,
        spans: Spans,
        base: int,
        write: Callable[[Spans], None],
        must_stop: Callable[[], bool],
    ) -> bool:
        """Write pieces as whole runs, if that is faster, and wait until all have arrived.

        After this has returned or raised, the peer scatters nothing of this write any more. A peer
        that does not confirm this in time, for example because its process is stopped, is
        considered lost, and its connection is closed: when it continues, it may still scatter what
        it was asked for.

        Args:
            spans: pieces whose targets are in one region of the peer.
            base: address of that region.
            write: writes spans with the engine, and returns when all have arrived.
            must_stop: whether the transfer was cancelled or timed out.

        Returns:
            Whether the pieces were written; if not, nothing has moved.

        Raises:
            TransferError: not all pieces have arrived.
        """
        runs = find_runs(spans.local, spans.remote, spans.nbytes, base, BUFFER_BYTES)
        if runs is None or not self._borrowed(must_stop):
            return False
        answers: list[Future[bytes]] = []
        try:
            self._write_runs(runs, write, answers, must_stop)
        finally:
            self._await(answers, must_stop)
        for answer in answers:
            answer.result()
        return True

    def _write_runs(
        self,
        runs: ContiguousRuns,
        write: Callable[[Spans], None],
        answers: list[Future[bytes]],  # replies to scatter requests, one per batch
        must_stop: Callable[[], bool],
    ) -> None:
        assert self._address is not None
        for number, batch in enumerate(runs.batches(BUFFER_BYTES)):
            slot = number % SLOTS
            if number >= SLOTS:
                is_scattered = answers[number - SLOTS]
                self._await([is_scattered], must_stop)
                is_scattered.result()
            in_buffer = batch.in_buffer(self._address + slot * BUFFER_BYTES)
            write(Spans(batch.starts, in_buffer, batch.run_bytes))
            call = ScatterBuffer(slot, PackedPieces.of(batch.targets, batch.sizes))
            answers.append(self._session.start_request(encode(call)))

    def _borrowed(self, must_stop: Callable[[], bool]) -> bool:
        """Whether the peer lends buffers. It is asked once: its answer would only change if another
        peer left."""
        if self._address is None and not self._is_refused:
            answer = self._session.start_request(encode(Borrow()))
            self._await([answer], must_stop)
            try:
                self._address = decode_message(answer.result(), Lent).address
            except PeerLost:
                raise
            except TransferError as exc:
                self._is_refused = True
                logger.warning("%s: many small pieces are written one by one: %s", NAME, exc)
        return self._address is not None

    def _await(self, answers: Iterable[Future[bytes]], must_stop: Callable[[], bool]) -> None:
        """Wait until the peer has answered, or is considered lost."""
        missing, given_up = set(answers), float("inf")
        while missing:
            missing = wait(missing, POLL_SECONDS).not_done
            if must_stop() and given_up == float("inf"):
                given_up = time.monotonic() + GRACE_SECONDS
            if time.monotonic() >= given_up:
                self._session.hang_up()  # which fails the pending requests
