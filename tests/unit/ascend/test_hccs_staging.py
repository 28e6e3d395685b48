"""Staged transfers over hccs: stripes move as contiguous runs and are scattered by the receiver."""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from unittest.mock import patch

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from support import fake_hccs
from support.fake_hccs import DEVICE, HostMemory, HostStream, NpuBuffer, host_scatterer

from mooncake_hal.errors import PeerLost, RegionRevoked, RegionUnknown, TransferError
from mooncake_hal.session.authentication import encode
from mooncake_hal.session.regions import AttachedRegions
from mooncake_hal.session.session import Session
from mooncake_hal.transport import Endpoint, EndpointOptions, MemoryRegion, Peer, Spans
from mooncake_hal.transports.adapters.adapter_transport import AdapterDataPath, AdapterTransport
from mooncake_hal.transports.staging import PackedPieces
from mooncake_hal_ascend.hccs import hccs_staging, hccs_transport
from mooncake_hal_ascend.hccs.contiguous_runs import BUFFER_BYTES
from mooncake_hal_ascend.hccs.hccs_staging import (
    LENT_BYTES,
    Borrow,
    ScatterBuffer,
    Scatterer,
    StagingBufferPool,
    Wait,
)

TOKENS, PIECE, RANKS = 128, 256, 2
ENGINES = {"mooncake": fake_hccs.mooncake_module, "memfabric": fake_hccs.memfabric_module}
CLASSES = {"mooncake": fake_hccs.HixlEngine, "memfabric": fake_hccs.MemfabricEngine}
OPTIONS = EndpointOptions(device=DEVICE)
SECONDS = 60.0


@pytest.fixture(autouse=True)
def environment() -> Iterator[None]:
    """Restore the environment variables that the transport sets for the engines."""
    with patch.dict(os.environ):
        yield


@dataclass
class Counted:
    """A transport, and the number of pieces in each call of its engine."""

    transport: AdapterTransport
    calls: list[int]


@pytest.fixture(params=sorted(ENGINES))
def counted(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Counted:
    kind, calls = CLASSES[request.param], list[int]()
    move = kind._move

    def counting(self: object, session: str, ours: list[int], *rest: object) -> int:
        calls.append(len(ours))
        return move(self, session, ours, *rest)  # type: ignore[arg-type]  # handed on as it came

    monkeypatch.setattr(kind, "_move", counting)
    transport = fake_hccs.load_with({request.param: ENGINES[request.param]()})
    return Counted(transport, calls)


@dataclass
class Ranks:
    """A prefill rank with dense blocks, and a decode rank with a stripe of them per token."""

    near: Endpoint
    far: Endpoint
    peer: Peer
    here: NpuBuffer
    there: NpuBuffer
    key_there: int

    def spans(self, num_blocks: int) -> Spans:
        """Return spans to the second half of every token of the first ``num_blocks`` blocks."""
        place = np.arange(num_blocks * TOKENS, dtype=np.uint64)
        dense = place * np.uint64(PIECE) + np.uint64(self.here.region.address)
        base = np.uint64(self.there.region.address + PIECE)
        sizes = np.full(len(place), PIECE, np.uint64)
        return Spans(dense, place * np.uint64(RANKS * PIECE) + base, sizes)

    def close(self) -> None:
        self.near.close()
        self.far.close()


def ranks(transport: AdapterTransport, num_blocks: int) -> Ranks:
    near, far = transport.open(OPTIONS), transport.open(OPTIONS)
    here = NpuBuffer(num_blocks * TOKENS * PIECE)
    there = NpuBuffer(RANKS * num_blocks * TOKENS * PIECE)
    here.put(np.random.default_rng(1).integers(0, 256, here.region.nbytes, np.uint8))
    near.register(here.region)
    key = far.register(there.region)
    return Ranks(near, far, near.connect(far.address, timeout=SECONDS), here, there, key)


def halves(there: NpuBuffer) -> NDArray[np.uint8]:
    """Return the decode rank's memory as [tokens, ranks, bytes]."""
    return there.get().reshape(-1, RANKS, PIECE)


@pytest.mark.parametrize("num_blocks", [1, 3, 40, 100])
def test_push_moves_at_most_one_piece_per_block(counted: Counted, num_blocks: int) -> None:
    pair = ranks(counted.transport, num_blocks)
    counted.calls.clear()
    try:
        pair.peer.write(pair.spans(num_blocks), timeout=SECONDS).wait()
        found = halves(pair.there)
        assert (found[:, 1].reshape(-1) == pair.here.get()).all()
        assert not found[:, 0].any()
        assert sum(counted.calls) <= num_blocks  # adjacent blocks are one run
    finally:
        pair.close()


def test_pull_moves_at_most_one_piece_per_block(counted: Counted) -> None:
    pair = ranks(counted.transport, 40)
    decode = pair.far.connect(pair.near.address, timeout=SECONDS)
    counted.calls.clear()
    try:
        pushed = pair.spans(40)
        decode.read(Spans(pushed.remote, pushed.local, pushed.nbytes), timeout=SECONDS).wait()
        assert (halves(pair.there)[:, 1].reshape(-1) == pair.here.get()).all()
        assert sum(counted.calls) <= 40
    finally:
        pair.close()


@pytest.mark.parametrize("num_reads", [1, 2])
def test_hung_pull_does_not_block_another_one(
    monkeypatch: pytest.MonkeyPatch, num_reads: int
) -> None:
    """Even if the hung pull holds the only buffers: the other one then moves piece by piece."""
    monkeypatch.setattr(hccs_transport, "MAX_READS", num_reads)
    monkeypatch.setattr(hccs_staging, "BUFFERS_SECONDS", 0.02)
    has_begun, answers, move = threading.Event(), threading.Event(), fake_hccs.HixlEngine._move
    pair = ranks(fake_hccs.load_mooncake(), 40)
    try:
        slow, peer = (pair.far.connect(pair.near.address, timeout=SECONDS) for _ in range(2))
        pushed = pair.spans(40)
        first = Spans(*(array[:TOKENS] for array in (pushed.remote, pushed.local, pushed.nbytes)))

        def held_once(self: object, *rest: object) -> int:
            if not has_begun.is_set():
                has_begun.set()
                assert answers.wait(SECONDS)
            return move(self, *rest)  # type: ignore[arg-type]  # handed on as it came

        monkeypatch.setattr(fake_hccs.HixlEngine, "_move", held_once)
        waiting = slow.read(first, timeout=SECONDS)
        assert has_begun.wait(SECONDS)
        peer.read(Spans(pushed.remote, pushed.local, pushed.nbytes), timeout=5.0).wait()
        assert (halves(pair.there)[:, 1].reshape(-1) == pair.here.get()).all()
        answers.set()
        waiting.wait()
    finally:
        answers.set()
        pair.close()


def test_closed_endpoint_frees_its_device_memory(counted: Counted) -> None:
    """Its 50 MiB are freed at once, not by the garbage collector."""
    gc.collect()
    gc.disable()
    try:
        before = fake_hccs.bytes_in_use()
        pair = ranks(counted.transport, 4)
        pair.peer.write(pair.spans(4), timeout=SECONDS).wait()
        pair.peer.read(pair.spans(4), timeout=SECONDS).wait()
        buffers = pair.here.region.nbytes + pair.there.region.nbytes + 2 * fake_hccs.PAGE
        assert fake_hccs.bytes_in_use() > before + buffers
        pair.close()
        assert fake_hccs.bytes_in_use() == before + buffers
    finally:
        gc.enable()


def test_memory_that_cannot_be_scattered_is_written_piece_by_piece(
    counted: Counted, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The receiver publishes for each region whether it can scatter over it."""
    monkeypatch.setattr(Scatterer, "can_scatter", lambda self, address: False)
    pair = ranks(counted.transport, 2)
    counted.calls.clear()
    try:
        pair.peer.write(pair.spans(2), timeout=SECONDS).wait()
        assert (halves(pair.there)[:, 1].reshape(-1) == pair.here.get()).all()
        assert counted.calls == [2 * TOKENS]
    finally:
        pair.close()


def test_push_without_a_free_buffer_writes_piece_by_piece(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It is logged once; a peer's buffers become free when it disconnects."""
    monkeypatch.setattr(hccs_transport, "MAX_BORROWERS", 1)
    pair = ranks(fake_hccs.load_mooncake(), 2)
    try:
        pair.peer.write(pair.spans(2), timeout=SECONDS).wait()
        second = pair.near.connect(pair.far.address, timeout=SECONDS)
        for _ in range(2):
            second.write(pair.spans(2), timeout=SECONDS).wait()
        assert (halves(pair.there)[:, 1].reshape(-1) == pair.here.get()).all()
        assert caplog.text.count("many small pieces are written one by one: the peer refused") == 1
        assert "all buffers are lent, to 1 peers that push" in caplog.text
        caplog.clear()
        for peer in (pair.peer, second):
            peer.close()
        for thread in threading.enumerate():
            if thread.name == "control-peer":
                thread.join(SECONDS)
        third = pair.near.connect(pair.far.address, timeout=SECONDS)
        third.write(pair.spans(2), timeout=SECONDS).wait()
        assert not caplog.text
    finally:
        pair.close()


@dataclass
class Held:
    """A stream whose copies block until they are resumed."""

    begun: threading.Event
    resumed: threading.Event

    def run(self, work: Callable[[], None], device: torch.device) -> Wait:
        def wait() -> None:
            self.begun.set()
            assert self.resumed.wait(SECONDS)
            work()

        return wait


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Held:
    """Hold the receiver's copies."""
    stream = Held(threading.Event(), threading.Event())
    monkeypatch.setattr(HostStream, "run", lambda self, *rest: stream.run(*rest))
    return stream


def test_cancelled_push_waits_for_the_peers_scatter(held: Held) -> None:
    """Its blocks are not reused by another request before that."""
    pair = ranks(fake_hccs.load_mooncake(), 2)
    try:
        transfer = pair.peer.write(pair.spans(2), timeout=SECONDS)
        assert held.begun.wait(SECONDS)
        cancelling = threading.Thread(target=transfer.cancel)
        cancelling.start()
        cancelling.join(0.2)
        assert cancelling.is_alive()
        assert not halves(pair.there).any()
        held.resumed.set()
        cancelling.join(SECONDS)
        assert (halves(pair.there)[:, 1].reshape(-1) == pair.here.get()).all()
    finally:
        held.resumed.set()
        pair.close()


def test_revocation_waits_for_a_scatter_in_flight_and_fails_the_rest(
    held: Held, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_withdrawn, detach = threading.Event(), AdapterDataPath.detach

    def detaching(driver: AdapterDataPath, key: int) -> None:
        is_withdrawn.set()
        detach(driver, key)

    monkeypatch.setattr(AdapterDataPath, "detach", detaching)
    pair = ranks(fake_hccs.load_mooncake(), 100)
    try:
        transfer = pair.peer.write(pair.spans(100), timeout=SECONDS)
        assert held.begun.wait(SECONDS)
        revoking = threading.Thread(target=pair.far.revoke, args=(pair.key_there,))
        revoking.start()
        assert is_withdrawn.wait(SECONDS)
        revoking.join(0.1)
        assert revoking.is_alive()
        held.resumed.set()
        revoking.join(SECONDS)
        left = halves(pair.there)
        with pytest.raises(RegionRevoked):
            transfer.wait()
        assert (halves(pair.there) == left).all()
        assert not left[-1].any()
    finally:
        held.resumed.set()
        pair.close()


def test_silent_peer_is_lost(held: Held, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cancelled transfer ends when its peer is declared lost, and no earlier."""
    monkeypatch.setattr(hccs_staging, "GRACE_SECONDS", 0.2)
    pair = ranks(fake_hccs.load_mooncake(), 2)
    try:
        transfer = pair.peer.write(pair.spans(2), timeout=SECONDS)
        assert held.begun.wait(SECONDS)
        transfer.cancel()
        again = pair.peer.write(pair.spans(2), timeout=SECONDS)
        with pytest.raises(PeerLost):
            again.wait()
    finally:
        held.resumed.set()
        pair.close()


class Lender:
    """A pool with the buffers of one borrower, a region of 64 KiB, and a peer's session."""

    def __init__(self) -> None:
        self.memory = HostMemory().allocate(LENT_BYTES, 0)
        self.lent = StagingBufferPool(self.memory.tensor, host_scatterer())
        self.target = HostMemory().allocate(64 << 10, 0)
        self.local = AttachedRegions("this side")
        self.local.add(1, self.target.region, b"")
        self.guest = Session.__new__(Session)  # used only as a key

    def ask(self, call: Borrow | ScatterBuffer, guest: Session | None = None) -> bytes:
        return self.lent.handle_request(guest or self.guest, encode(call), self.local)

    def scatter(self, targets: list[int], sizes: list[int], slot: int = 0) -> None:
        base = self.target.region.address
        at = np.array([base + place for place in targets], np.uint64)
        self.ask(ScatterBuffer(slot, PackedPieces.of(at, np.array(sizes, np.uint64))))


def test_buffer_is_scattered_to_its_pieces() -> None:
    lender = Lender()
    lender.ask(Borrow())
    lender.memory.tensor[BUFFER_BYTES : BUFFER_BYTES + 96] = torch.arange(96, dtype=torch.uint8)
    lender.scatter([64, 1024], [32, 64], slot=1)
    found = lender.target.tensor.numpy()
    assert found[64:96].tolist() == list(range(32))
    assert found[1024:1088].tolist() == list(range(32, 96))
    assert np.count_nonzero(found) == 95


def test_buffers_must_be_borrowed_and_are_limited() -> None:
    lender, other = Lender(), Session.__new__(Session)
    with pytest.raises(TransferError, match="buffers must be borrowed before"):
        lender.scatter([0], [32])
    assert lender.ask(Borrow()) == lender.ask(Borrow())
    with pytest.raises(TransferError, match="all buffers are lent, to 1 peers that push"):
        lender.ask(Borrow(), other)
    lender.lent.session_ended(lender.guest)
    lender.ask(Borrow(), other)


@pytest.mark.parametrize(
    ("targets", "sizes", "slot", "message"),
    [
        ([0], [32], 2, "there are 2 buffers, 2 is none of them"),
        ([], [], 0, "0 bytes are no rows of 0 levels"),
        ([0], [0], 0, "pieces must have 1 to 1048576 bytes together"),
        ([0, 32], [1 << 20, 32], 0, "pieces must have 1 to 1048576 bytes together"),
        ([0], [2**64 - 32], 0, "pieces must have 1 to 1048576 bytes together"),
        ([64 << 10], [32], 0, "lies in no region that this side registered"),
        ([(64 << 10) - 32], [64], 0, "begins in this side's region"),
        ([0, 36], [36, 36], 0, None),
        ([0, 34], [34, 34], 0, "pieces in rows of 34 bytes can't be scattered"),
        ([0, 48], [32, 32], 0, "pieces in rows of 16 bytes can't be scattered"),
    ],
)
def test_scatter_requests_are_validated(
    targets: list[int], sizes: list[int], slot: int, message: str | None
) -> None:
    lender = Lender()
    lender.ask(Borrow())
    if message is None:
        lender.scatter(targets, sizes, slot)
        return
    with pytest.raises(TransferError, match=message):
        lender.scatter(targets, sizes, slot)
    assert not lender.target.tensor.any()


def test_malformed_request_is_rejected() -> None:
    session = Session.__new__(Session)
    with pytest.raises(TransferError, match="a call can't be read"):
        Lender().lent.handle_request(session, b"scatter it", AttachedRegions("this"))


def test_pieces_of_two_regions_or_of_foreign_memory_are_rejected() -> None:
    lender = Lender()
    lender.ask(Borrow())
    other = HostMemory().allocate(64 << 10, 0)
    lender.local.add(2, other.region, b"")
    begins = [memory.region.address for memory in (lender.target, other)]
    with pytest.raises(TransferError, match="must lie in one region that takes runs"):
        lender.scatter([begin - begins[0] for begin in sorted(begins)], [32, 32])
    foreign = torch.zeros(64, dtype=torch.uint8)
    lender.local.add(3, MemoryRegion(foreign.data_ptr(), 64, DEVICE), b"")
    there = PackedPieces.of(*np.array([[foreign.data_ptr()], [64]], np.uint64))
    with pytest.raises(TransferError, match="must lie in one region that takes runs"):
        lender.ask(ScatterBuffer(0, there))


def test_revoked_region_is_not_scattered_to() -> None:
    lender = Lender()
    lender.ask(Borrow())
    lender.local.revoke(1)
    with pytest.raises((RegionRevoked, RegionUnknown)):
        lender.scatter([0], [32])
