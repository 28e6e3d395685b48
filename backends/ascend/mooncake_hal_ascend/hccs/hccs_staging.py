"""Staging buffers: many small pieces move as contiguous runs, and a kernel scatters them.

Who reads many small pieces reads runs into two buffers of its own and scatters them from there,
two for each peer that is read from at a time.
Who writes many borrows two buffers of the receiver's, fills them with runs by its engine, and asks
for each to be scattered. In both cases the engine fills one buffer while the other is scattered.
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
"""Prefill ranks that push many small pieces to one of decode's; the others write piece by piece."""
LENT_BYTES = SLOTS * BUFFER_BYTES
MAX_READS = 8
"""At a time, by runs; more of them wait a little for buffers, and go piece by piece then."""
READ_BYTES = SLOTS * BUFFER_BYTES
BUFFERS_SECONDS = 0.25
"""How long a read waits for buffers: what keeps them longer waits for a peer that does not answer,
which is to hold up no other."""
LIMITS = StagingLimits(NAME, SLOTS, BUFFER_BYTES)
ELEMENT = torch.int32
"""Of ELEMENT_BYTES."""
POLL_SECONDS = 0.05
"""How often a wait looks whether its transfer was stopped."""
GRACE_SECONDS = 2.0
"""How long a peer may take to answer after that; then it counts as lost."""

TensorAt = Callable[[int], "Tensor | None"]
"""The tensor, flat uint8, of the backend's allocation that begins at an address."""

Wait = Callable[[], None]


class HccsRegionInfo(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """What an endpoint publishes of a region.

    Args:
        address: its first byte.
        takes_runs: whether pieces of it may be written by way of borrowed buffers.
    """

    address: int
    takes_runs: bool


class Borrow(msgspec.Struct, frozen=True, tag="borrow", forbid_unknown_fields=True):
    """Call: lend this connection the buffers; it has the same ones until it ends."""


class Lent(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Answer to Borrow: where the first buffer begins; the second one lies behind it."""

    address: int


class ScatterBuffer(msgspec.Struct, frozen=True, tag="scatter", forbid_unknown_fields=True):
    """Call: copy what a buffer holds to its targets; all of it is there when the answer comes.

    Args:
        slot: which buffer.
        targets: of the pieces.
    """

    slot: int
    targets: PackedPieces


def decode_call(payload: bytes) -> Borrow | ScatterBuffer:
    """Read a call; raises TransferError if it is none."""
    try:
        return msgspec.msgpack.decode(payload, type=Borrow | ScatterBuffer)
    except UNREADABLE as exc:
        raise TransferError(f"{NAME}: a call can't be read: {exc}") from exc


class SideStream(Protocol):
    """A stream for copies: they do not wait for the model's work, and it does not for them."""

    def run(self, work: Callable[[], None], device: torch.device) -> Wait:
        """Enqueue what ``work`` does; returns what waits until it is done."""
        ...


class Scatterer:
    """Scatters buffers over the backend's memory. Any thread.

    Args:
        tensor_at: finds that memory.
        stream: of the copies.
    """

    def __init__(self, tensor_at: TensorAt, stream: SideStream) -> None:
        self._tensor_at = tensor_at
        self._stream = stream

    def can_scatter(self, address: int) -> bool:
        """Whether a region that begins at ``address`` can be scattered over."""
        return self._tensor_at(address) is not None

    def scatter(self, buffer: Tensor, targets: U64, sizes: U64, base: int) -> Wait:
        """Begin to copy pieces to their targets.

        Args:
            buffer: flat uint8, the pieces one behind the other.
            targets, sizes: [n] of the pieces, in rows as ``is_row`` has them.
            base: first byte of the region that they lie in; ``can_scatter`` holds for it.

        Returns:
            What waits until all are there; the buffer must not change before that.
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
    """Flat uint8 as rows: [n, row / 4] int32."""
    whole = memory.numel() // row * row
    return memory[:whole].view(ELEMENT).view(-1, row // ELEMENT.itemsize)


class StagedReader:
    """Reads contiguous runs into an endpoint's buffers, and scatters them from there. Any thread.

    Args:
        memory: of all buffers, flat uint8; registered with the engine.
        scatterer: empties them.
        num_reads: at a time; each has two buffers of equal size.
    """

    def __init__(self, memory: Tensor, scatterer: Scatterer, num_reads: int) -> None:
        self._half = memory.numel() // num_reads // SLOTS
        self._scatterer = scatterer
        self._free: Queue[Tensor] = Queue()
        for number in range(num_reads):
            self._free.put(memory[SLOTS * self._half * number :][: SLOTS * self._half])

    def close(self) -> None:
        """Let go of the memory; nothing is read any more."""
        self._free = Queue()

    def read(self, region: MemoryRegion, spans: Spans, read: Callable[[Spans], None]) -> bool:
        """Read by whole runs, if that is faster; all has arrived when this returns.

        Args:
            region: ours, that all pieces lie in.
            spans: the pieces.
            read: reads by the engine; returns when all has arrived.

        Returns:
            Whether it was done so; if not, nothing has moved.
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
        is_free: list[Wait] = [lambda: None] * SLOTS
        try:
            for number, batch in enumerate(runs.batches(self._half)):
                slot = number % SLOTS
                is_free[slot]()
                buffer = buffers[slot * self._half :][: self._half]
                in_buffer = batch.in_buffer(buffer.data_ptr())
                read(Spans(in_buffer, batch.starts, batch.run_bytes))
                is_free[slot] = self._scatterer.scatter(buffer, batch.targets, batch.sizes, base)
        finally:  # on an error, too, no memory may change after this returns
            for wait in is_free:
                wait()


class StagingBufferPool:
    """The buffers that an endpoint lends to peers that write to it.

    Args:
        memory: of all buffers, flat uint8; registered with the engine.
        scatterer: empties them.
    """

    def __init__(self, memory: Tensor, scatterer: Scatterer) -> None:
        self._scatterer = scatterer
        # What came back last is lent last: a peer that died may have begun a write into it.
        self._free = deque(
            memory[begin : begin + LENT_BYTES] for begin in range(0, memory.numel(), LENT_BYTES)
        )
        self._lent: dict[Session, Tensor] = {}

    def close(self) -> None:
        """Let go of the memory; nothing is lent any more."""
        self._free.clear()
        self._lent.clear()

    def can_scatter(self, region: MemoryRegion) -> bool:
        """Whether it can scatter over a region."""
        return self._scatterer.can_scatter(region.address)

    def handle_request(self, session: Session, payload: bytes, local: AttachedRegions) -> bytes:
        call = decode_call(payload)
        if isinstance(call, Borrow):
            return encode(Lent(self._lend(session).data_ptr()))
        self._scatter(session, call, local)
        return b""

    def session_ended(self, session: Session) -> None:
        """What it had borrowed is free again."""
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
        """Copy to regions that are live at this moment; all has arrived when this returns."""
        if session not in self._lent:
            raise TransferError(f"{NAME}: buffers are borrowed first")
        targets, sizes = LIMITS.read_pieces(call.slot, call.targets)
        index, at = local.locate(targets, sizes)
        base = index.starts[at[0]]
        if (at != at[0]).any() or not self._scatterer.can_scatter(base):
            raise TransferError(f"{NAME}: pieces must lie in one region that takes runs")
        if not is_row(row := row_bytes(targets, sizes, base)):
            raise TransferError(f"{NAME}: pieces in rows of {row} bytes are not scattered")
        buffer = self._lent[session][call.slot * BUFFER_BYTES :][:BUFFER_BYTES]
        self._scatterer.scatter(buffer, targets, sizes, base)()


class StagedWriter:
    """Writes contiguous runs into buffers that a peer lends, and has the peer scatter them.

    Args:
        session: to it.
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
        """Write by whole runs, if that is faster; all has arrived when this returns.

        However it ends, the peer scatters nothing of it afterwards. A peer that does not confirm
        that in time, because it is stopped for example, is given up with its connection: it may
        still scatter what it was asked for when it goes on.

        Args:
            spans: pieces that go to one region of the peer's.
            base: that region's first byte.
            write: writes by the engine; returns when all has arrived.
            must_stop: whether the transfer was cancelled or timed out.

        Returns:
            Whether it was done so; if not, nothing has moved.

        Raises:
            TransferError: not all of it has arrived.
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
        answers: list[Future[bytes]],  # that buffers are scattered, in turns
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
        """Whether the peer lends buffers. Asked once: the reply changes only when a peer leaves."""
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
        """Wait until the peer has answered, or is lost."""
        missing, given_up = set(answers), float("inf")
        while missing:
            missing = wait(missing, POLL_SECONDS).not_done
            if must_stop() and given_up == float("inf"):
                given_up = time.monotonic() + GRACE_SECONDS
            if time.monotonic() >= given_up:
                self._session.hang_up()  # which fails the requests that are still open
