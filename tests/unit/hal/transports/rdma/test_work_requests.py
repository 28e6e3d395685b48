"""Work requests as arrays, the memory keys in them, and the call that posts them."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from mooncake_hal.bench.transfer_speed import TransferShape
from mooncake_hal.bench.verbs_posting import posting_us, wireless
from mooncake_hal.native import find_compiler
from mooncake_hal.transport import Spans
from mooncake_hal.transports.rdma.rdma_messages import RegionKeys
from mooncake_hal.transports.rdma.send_window import PieceRun
from mooncake_hal.transports.rdma.verbs import IbvContext, IbvQp, PostSend, batch_poster
from mooncake_hal.transports.rdma.work_requests import (
    RDMA_READ,
    RDMA_WRITE,
    SCATTER_GATHER,
    SEND_INLINE,
    SEND_SIGNALED,
    WORK_REQUEST,
    RdmaTransfer,
    RegionKeyTable,
    RegionKeyTables,
    SendBatch,
    WorkRequestArray,
    batch_of,
)
from mooncake_hal.transports.spans import cut


def batch(count: int, first: int = 0, inline: NDArray[np.bool_] | None = None) -> SendBatch:
    steps = np.arange(first, first + count, dtype=np.uint64)
    keys = steps.astype(np.uint32)
    return SendBatch(
        RDMA_READ,
        np.uint64(1000) + steps,
        np.uint64(2000) + steps,
        np.uint64(1) + steps,
        keys + np.uint32(10),
        keys + np.uint32(20),
        inline,
    )


def chain(address: int) -> list[tuple[Any, Any]]:
    """Follow the links as a driver does; return requests with their pieces."""
    found = []
    while address:
        request = np.frombuffer(_memory(address, WORK_REQUEST.itemsize), WORK_REQUEST)[0].copy()
        piece = np.frombuffer(
            _memory(int(request["sg_list"]), SCATTER_GATHER.itemsize), SCATTER_GATHER
        )[0].copy()
        assert request["num_sge"] == 1
        found.append((request, piece))
        address = int(request["next"])
    return found


def _memory(address: int, nbytes: int) -> Any:
    return (ctypes.c_uint8 * nbytes).from_address(address)


def test_layout_equals_that_of_the_verbs() -> None:
    class SendRequest(ctypes.Structure):  # struct ibv_send_wr, as far as one-sided requests use it
        _fields_ = (
            ("wr_id", ctypes.c_uint64),
            ("next", ctypes.c_void_p),
            ("sg_list", ctypes.c_void_p),
            ("num_sge", ctypes.c_int),
            ("opcode", ctypes.c_int),
            ("send_flags", ctypes.c_uint),
            ("imm_data", ctypes.c_uint32),
            ("remote_addr", ctypes.c_uint64),
            ("rkey", ctypes.c_uint32),
        )

    fields = WORK_REQUEST.fields
    assert fields is not None
    for name, (dtype, offset, *_) in fields.items():
        described = getattr(SendRequest, name)
        assert (described.offset, described.size) == (offset, dtype.itemsize), name
    assert WORK_REQUEST.itemsize == 128  # sizeof, with the unions of atomics and memory windows
    assert SCATTER_GATHER.itemsize == 16


def test_batch_is_a_chain_of_requests() -> None:
    array = WorkRequestArray(8, 3)
    assert array.fill(batch(7), 100) == 7
    found = chain(array.address)
    assert [int(request["wr_id"]) for request, _ in found] == list(range(100, 107))
    assert [int(request["remote_addr"]) for request, _ in found] == list(range(2000, 2007))
    assert [int(request["rkey"]) for request, _ in found] == list(range(20, 27))
    assert [int(piece["addr"]) for _, piece in found] == list(range(1000, 1007))
    assert [int(piece["length"]) for _, piece in found] == list(range(1, 8))
    assert [int(piece["lkey"]) for _, piece in found] == list(range(10, 17))
    assert {int(request["opcode"]) for request, _ in found} == {RDMA_READ}


def test_every_nth_request_and_the_last_are_signaled() -> None:
    array = WorkRequestArray(8, 3)
    array.fill(batch(8), 1)
    flags = [int(request["send_flags"]) for request, _ in chain(array.address)]
    assert flags == [0, 0, SEND_SIGNALED, 0, 0, SEND_SIGNALED, 0, SEND_SIGNALED]


def test_array_can_be_refilled() -> None:
    array = WorkRequestArray(8, 4)
    for first, count in ((1, 8), (9, 2), (11, 1), (12, 5), (17, 8)):
        array.fill(batch(count), first)
        found = chain(array.address)
        assert [int(request["wr_id"]) for request, _ in found] == [*range(first, first + count)]
        signalled = [bool(request["send_flags"] & SEND_SIGNALED) for request, _ in found]
        assert signalled == [at % 4 == 3 or at == count - 1 for at in range(count)]


def test_inline_pieces_are_marked() -> None:
    array = WorkRequestArray(4, 4)
    array.fill(batch(3, inline=np.array([True, False, True])), 1)
    flags = [int(request["send_flags"]) for request, _ in chain(array.address)]
    assert flags == [SEND_INLINE, 0, SEND_INLINE | SEND_SIGNALED]
    array.fill(batch(3), 1)
    assert not any(int(request["send_flags"]) & SEND_INLINE for request, _ in chain(array.address))


KEYS = {
    7: RegionKeys([1, 2], [0, 2**64 - 4096], True),
    9: RegionKeys([3, 4], [0, 0], False),
}


def test_keys_become_a_table() -> None:
    table = RegionKeyTables(2, lambda regions: [KEYS.get(key) for key in regions]).of([7, 8, 9])
    assert table.keys.tolist() == [[1, 0, 3], [2, 0, 4]]
    assert table.shifts.tolist() == [[0, 0, 0], [2**64 - 4096, 0, 0]]
    assert table.on_host.tolist() == [True, False, False]
    assert table.touched(np.array([2, 0, 2])) == {7, 9}


def test_table_is_cached_until_the_regions_change() -> None:
    asked = []

    def look_up(regions: list[int]) -> list[RegionKeys | None]:
        asked.append(regions)
        return [KEYS[key] for key in regions]

    tables = RegionKeyTables(2, look_up)
    regions = [7, 9]
    assert tables.of(regions) is tables.of(regions)
    assert tables.of([7]) is not tables.of(regions)
    assert asked == [[7, 9], [7], [7, 9]]


@pytest.fixture
def table() -> RegionKeyTable:
    return RegionKeyTables(2, lambda regions: [KEYS[key] for key in regions]).of([7, 9])


def work_of(opcode: int, table: RegionKeyTable, *nbytes: int) -> RdmaTransfer:
    """A transfer whose pieces alternate between regions 7 and 9, on both sides."""
    sizes = np.array(nbytes, np.uint64)
    starts = np.arange(len(nbytes), dtype=np.uint64) * np.uint64(65536) + np.uint64(2**20)
    spans = Spans(starts, starts, sizes)
    at = np.arange(len(nbytes)) % 2
    pieces = cut(spans.local, spans.remote, spans.nbytes, 1 << 20)
    return RdmaTransfer(opcode, spans, pieces, at, 1 - at, table, table)


def test_batch_uses_the_keys_and_addresses_of_its_nics(table: RegionKeyTable) -> None:
    transfer = work_of(RDMA_READ, table, 100, 100, 100)
    found = batch_of(PieceRun(transfer, 1, 3), 0, 1, 64)
    assert found.lkeys.tolist() == [3, 1]
    assert found.rkeys.tolist() == [2, 4]
    base = 2**20
    assert found.local.tolist() == [base + 65536, base + 2 * 65536]
    assert found.remote.tolist() == [base + 65536 - 4096, base + 2 * 65536], "shifted, mod 2**64"


def test_small_writes_from_host_memory_are_inline(table: RegionKeyTable) -> None:
    inline = batch_of(PieceRun(work_of(RDMA_WRITE, table, 64, 64, 65), 0, 3), 0, 0, 64).inline
    assert inline is not None
    assert inline.tolist() == [True, False, False], "region 9 is not on the host"


@pytest.mark.parametrize(
    ("opcode", "nbytes", "most"), [(RDMA_READ, 8, 64), (RDMA_WRITE, 65, 64), (RDMA_WRITE, 8, 0)]
)
def test_other_requests_are_not_inline(
    table: RegionKeyTable, opcode: int, nbytes: int, most: int
) -> None:
    transfer = work_of(opcode, table, nbytes)
    assert batch_of(PieceRun(transfer, 0, 1), 0, 0, most).inline is None


class Device:
    """A stand-in for a queue pair's driver, which records the posted requests."""

    def __init__(self) -> None:
        self.numbers: list[int] = []
        self.takes = 100
        self._context = IbvContext()
        self._context.ops.post_send = PostSend(self._post)
        self.pair = IbvQp(context=ctypes.addressof(self._context))

    def _post(self, pair: int, requests: int, bad: Any) -> int:
        assert pair == ctypes.addressof(self.pair)
        for taken, (request, _) in enumerate(chain(requests)):
            if taken == self.takes:
                bad[0] = requests + taken * WORK_REQUEST.itemsize
                return 12
            self.numbers.append(int(request["wr_id"]))
        return 0


def test_batch_is_posted_by_one_call() -> None:
    device = Device()
    batch_poster(ctypes.addressof(device.pair))(WorkRequestArray(8, 4), batch(5), 30)
    assert device.numbers == [30, 31, 32, 33, 34]


def test_full_queue_reports_the_number_of_posted_requests() -> None:
    device = Device()
    device.takes = 3
    post = batch_poster(ctypes.addressof(device.pair))
    with pytest.raises(OSError, match="took 3 requests: Cannot allocate memory"):
        post(WorkRequestArray(8, 4), batch(5), 30)


needs_compiler = pytest.mark.skipif(find_compiler() is None, reason="needs a C compiler")


@needs_compiler
def test_every_byte_of_a_batch_is_posted() -> None:
    shape = TransferShape(5000 * 48, 48)
    with wireless(shape.total_bytes) as (opened, here, there):
        spans = shape.spans(here, there)
        transfers = [opened.peer.read(spans, timeout=30) for _ in range(3)]
        for transfer in transfers:
            transfer.wait()
        assert opened.moved_bytes == 3 * shape.total_bytes
        assert all(nic.pairs[0].moved_bytes for nic in opened.nics), "a connection was idle"


@needs_compiler
def test_posting_cost_is_measured() -> None:
    assert posting_us(TransferShape(1000 * 64, 64), 3) > 0
