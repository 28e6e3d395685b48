"""Layer-by-layer reads of chunks from an SSD: the first layers of all chunks first, and never wrong
data."""

import threading
import time
from functools import partial

import numpy as np
import pytest

from mooncake_hal.negotiation import Transports
from mooncake_hal.registry import Registry
from mooncake_hal.transport import EndpointOptions
from mooncake_kv.store.chunk_store import Chunk, Residence, Tier
from mooncake_kv.store.node_store import NodeStore, NodeStoreConfig
from mooncake_kv.store.ssd_config import SsdConfig, SsdDirectoryConfig
from mooncake_kv.store.ssd_directory import SsdDirectory
from mooncake_kv.store.ssd_reads import RecordRead
from mooncake_kv.store.ssd_records import (
    MAX_PARTS,
    MAX_SECTIONS,
    MIN_PART_BYTES,
    MIN_SECTION_BYTES,
    PAGE,
    parts_to_read,
    record_bytes,
    section_bytes,
)
from mooncake_kv.store.ssd_tier import SsdTier
from mooncake_kv.store.store_client import StoreClient
from mooncake_kv.store.store_service import StoreAddress, StoreService
from mooncake_kv.store.tier_moves import PinRequest, TierMoves, _Progress

WAIT_S = 60
SHORT_S = 0.05
SECTION = max(MIN_SECTION_BYTES, MIN_PART_BYTES)
NBYTES = 5 * SECTION - PAGE
COUNT = 4


def chunk(number):
    parent = (number - 1).to_bytes(16, "big") if number else None
    return Chunk(number.to_bytes(16, "big"), parent, number, NBYTES, 16)


def content(number):
    return np.random.default_rng(number).integers(0, 255, NBYTES, np.uint8).tobytes()


KEYS = [chunk(number).key for number in range(COUNT)]


class Reads:
    """Records an SSD's reads in order; they wait for a gate, optionally except those of records'
    leading bytes, and except those of the record at ``free``."""

    def __init__(self, monkeypatch, *, beginning=True, free=0):
        self.gate = threading.Event()
        self.starts = []
        read = SsdDirectory.read_sections

        def gated(directory, location, start, payload, section):
            self.starts.append((start, location.offset))
            if (start > PAGE or not beginning) and location.offset != free:
                assert self.gate.wait(WAIT_S)
            return read(directory, location, start, payload, section)

        monkeypatch.setattr(SsdDirectory, "read_sections", gated)


@pytest.fixture
def store(tmp_path):
    """A store whose chunks are on its SSD only."""
    drive = SsdDirectoryConfig(tmp_path, 3 << 23, 1 << 23, min_free_bytes=0)
    config = NodeStoreConfig(COUNT * (NBYTES + PAGE), ssd=SsdConfig((drive,)))
    store = NodeStore(config)
    user = store.open_user()
    for number in range(COUNT):
        put(store, user, chunk(number), content(number))
        user.release(user.pin([chunk(number).key]).result())
        is_written = partial(lambda count, stats: stats.ssd_chunks == count, number + 1)
        await_level(store, is_written)  # one by one, so that tests can damage a particular one
    await_level(store, lambda stats: not stats.num_pins)
    others = [Chunk(bytes([99, number]), None, 0, NBYTES, 16) for number in range(COUNT)]
    for other in others:
        put(store, user, other, bytes(NBYTES))
    user.drop([other.key for other in others])
    assert user.probe(KEYS).result() == [Residence.SSD] * COUNT
    user.close()
    yield store
    store.check_integrity()
    store.close()


def put(store, user, what, data):
    (handle,) = user.reserve([what]).result()
    view = store.memory.view(handle.offset, NBYTES)
    view[:] = data
    view.release()
    assert user.commit([handle]).result() == [True]


def await_level(store, holds):
    deadline = time.monotonic() + WAIT_S
    while not holds(store.stats()):
        assert time.monotonic() < deadline, store.stats()
        time.sleep(0.005)


def is_right(store, handle, number, nbytes):
    view = store.memory.view(handle.offset, nbytes)
    try:
        return bytes(view) == content(number)[:nbytes]
    finally:
        view.release()


def test_leading_bytes_of_all_chunks_are_read_first(store, monkeypatch):
    reads, user = Reads(monkeypatch), store.open_user()
    handles = user.pin(KEYS, first_bytes=SECTION).result(WAIT_S)
    assert [handle.tier for handle in handles] == [Tier.SSD] * COUNT
    assert user.await_bytes(handles, 0).result(WAIT_S) == SECTION
    assert all(is_right(store, h, number, SECTION) for number, h in enumerate(handles))
    assert not any(is_right(store, h, n, NBYTES) for n, h in enumerate(handles)), (
        "all of it has arrived"
    )
    more = user.await_bytes(handles, SECTION)
    time.sleep(SHORT_S)
    assert not more.done()
    assert [start for start, _ in reads.starts[:COUNT]] == [PAGE] * COUNT
    reads.gate.set()
    assert SECTION < more.result(WAIT_S) <= NBYTES
    there = more.result()
    while there < NBYTES:
        there = user.await_bytes(handles, there).result(WAIT_S)
    assert all(is_right(store, h, number, NBYTES) for number, h in enumerate(handles))
    assert user.release(handles).result() == [True] * COUNT
    parts = [start for start, _ in sorted(reads.starts)]
    assert parts == sorted([PAGE + n * SECTION for n in range(5)] * COUNT)
    stats = store.stats()
    assert stats.ssd_read_bytes == COUNT * (record_bytes(NBYTES) - PAGE)
    assert (stats.num_ssd_hits, stats.num_misses) == (COUNT, 0)


def test_reader_in_another_process_reads_the_bytes_that_have_arrived(store, monkeypatch):
    reads = Reads(monkeypatch)
    transports = Transports.open(Registry.discover(), EndpointOptions(secret=b"s"), wanted="shm")
    service = StoreService.start(store, transports, StoreAddress("127.0.0.1", 0, b"s"))
    client = StoreClient(StoreAddress("127.0.0.1", service.port, b"s"))
    try:
        assert client.await_store(WAIT_S)
        handles = client.pin(KEYS, first_bytes=2 * SECTION).result(WAIT_S)
        assert client.await_bytes(handles, 0).result(WAIT_S) == 2 * SECTION
        more = client.await_bytes(handles[1:], 2 * SECTION)
        assert client.release(handles[:1]).result(WAIT_S) == [False], "not all of it has arrived"
        reads.gate.set()
        assert more.result(WAIT_S) > 2 * SECTION
        assert client.await_bytes(handles[1:], NBYTES - 1).result(WAIT_S) == NBYTES
        assert client.release(handles[1:]).result(WAIT_S) == [True] * (COUNT - 1)
    finally:
        client.close()
        service.close()
        transports.close()


@pytest.mark.parametrize("section", range(5))
def test_flipped_bit_in_any_section_is_found_before_the_section_is_used(store, tmp_path, section):
    (segment,) = tmp_path.glob("segment-*")
    with segment.open("r+b") as file:
        file.seek(PAGE + record_bytes(NBYTES) + PAGE + section * SECTION + 77)
        byte = file.read(1)
        file.seek(-1, 1)
        file.write(bytes([byte[0] ^ 16]))
    user = store.open_user()
    handles = user.pin(KEYS, first_bytes=SECTION).result(WAIT_S)
    there = [0]
    while (found := user.await_bytes(handles[1:2], there[-1]).result(WAIT_S)) > there[-1]:
        there.append(found)
    assert there[-1] <= section * SECTION
    assert user.await_bytes([handles[0], *handles[2:]], NBYTES - 1).result(WAIT_S) == NBYTES
    assert sorted(user.release(handles).result()) == [False, True, True, True]
    assert store.stats().num_ssd_corrupt == 1
    assert user.probe(KEYS).result().count(Residence.ABSENT) == 1


def test_chunk_dropped_during_its_load_is_not_found(store, monkeypatch):
    reads, user = Reads(monkeypatch), store.open_user()
    handles = user.pin(KEYS, first_bytes=SECTION).result(WAIT_S)
    more = user.await_bytes(handles, NBYTES - 1)
    user.drop(KEYS[:1])
    reads.gate.set()
    assert more.result(WAIT_S) < NBYTES
    assert user.release(handles[:1]).result() == [False]
    assert user.probe(KEYS[:1]).result() == [Residence.ABSENT]


def test_wait_ends_once_one_of_its_chunks_is_lost(store, tmp_path, monkeypatch):
    (segment,) = tmp_path.glob("segment-*")
    with segment.open("r+b") as file:
        file.seek(2 * PAGE)  # after the segment's page and the record's
        file.write(bytes(PAGE))
    reads, user = Reads(monkeypatch, free=PAGE), store.open_user()
    handles = user.pin(KEYS, first_bytes=SECTION).result(WAIT_S)
    later = user.await_bytes(handles[1:], SECTION)
    await_level(store, lambda stats: stats.num_ssd_corrupt)
    assert user.await_bytes(handles, SECTION).result(WAIT_S) == 0
    assert not later.done()
    reads.gate.set()
    assert later.result(WAIT_S) > SECTION
    assert user.await_bytes(handles[1:], NBYTES - 1).result(WAIT_S) == NBYTES
    assert user.release(handles).result() == [False, *[True] * (COUNT - 1)]


def test_pin_completed_before_its_reply_is_granted_once(store, monkeypatch):
    """All data is read before ``pin`` returns; no later reader waits longer because of it."""
    has_returned, settled = threading.Event(), threading.Event()
    finish, read = TierMoves._finish, SsdTier.read

    def finish_late(moves, request):
        answer = finish(moves, request)
        settled.set()

        def answer_late():
            assert has_returned.wait(WAIT_S)
            answer()

        return answer_late

    def read_and_wait(tier, wanted, first_bytes=None):
        read(tier, wanted, first_bytes)
        assert settled.wait(WAIT_S)

    monkeypatch.setattr(TierMoves, "_finish", finish_late)
    monkeypatch.setattr(SsdTier, "read", read_and_wait)
    user = store.open_user()
    pinned = user.pin(KEYS[:1])
    assert not pinned.done()
    has_returned.set()
    (handle,) = pinned.result(WAIT_S)
    assert is_right(store, handle, 0, NBYTES)
    assert user.release([handle]).result() == [True]


def test_disconnected_and_late_readers_do_not_block_others(store, monkeypatch):
    """One reader disconnects while its chunks are read, and another finds them; then the memory has
    no owner."""
    reads, user, other = Reads(monkeypatch), store.open_user(), store.open_user()
    user.pin(KEYS, first_bytes=SECTION).result(WAIT_S)
    second = other.pin(KEYS, first_bytes=SECTION).result(WAIT_S)
    user.close()
    assert other.await_bytes(second, 0).result(WAIT_S) == SECTION
    reads.gate.set()
    assert other.await_bytes(second, NBYTES - 1).result(WAIT_S) == NBYTES
    assert other.release(second).result() == [True] * COUNT
    assert store.stats().num_pins == 0
    payload_bytes = record_bytes(NBYTES) - PAGE
    assert store.stats().ssd_read_bytes == COUNT * payload_bytes, "one read served both"


def test_unwanted_loads_are_cancelled_and_free_the_drive(store, monkeypatch):
    """One cancelled long prompt kept the drive busy until all of it was read."""
    reads, user = Reads(monkeypatch), store.open_user()
    handles = user.pin(KEYS, first_bytes=SECTION).result(WAIT_S)
    assert user.await_bytes(handles, 0).result(WAIT_S) == SECTION
    other = store.open_user()
    [kept] = other.pin(KEYS[:1], first_bytes=SECTION).result(WAIT_S)
    user.release(handles)
    reads.gate.set()
    assert other.await_bytes([kept], NBYTES - 1).result(WAIT_S) == NBYTES
    await_level(store, lambda stats: not stats.num_staging)
    assert len(reads.starts) <= COUNT + 8 + 2, (
        "the reads that threads had started, and the rest of one chunk"
    )
    assert other.release([kept]).result() == [True]
    found = user.probe(KEYS).result()
    assert found == [Residence.DRAM, *[Residence.SSD] * (COUNT - 1)], "no record is wrong"
    assert None not in user.pin(KEYS).result(WAIT_S)


def test_late_progress_of_ended_load_does_not_count_for_the_next(store, monkeypatch):
    """A delayed thread reports bytes after its load has ended."""
    with monkeypatch.context() as patch:
        reads, user = Reads(patch), store.open_user()
        handles = user.pin(KEYS[:1], first_bytes=SECTION).result(WAIT_S)
        former = store._moves._loads[KEYS[0]]
        reads.gate.set()
        assert user.await_bytes(handles, NBYTES - 1).result(WAIT_S) == NBYTES
    assert user.release(handles).result() == [True]
    others = [Chunk(bytes([98, number]), None, 0, NBYTES, 16) for number in range(COUNT)]
    for other in others:
        put(store, user, other, bytes(NBYTES))
    user.drop([other.key for other in others])
    reads = Reads(monkeypatch, beginning=False)
    handles = user.pin(KEYS[:1], first_bytes=SECTION).result(WAIT_S)
    store._moves._arrived(former, NBYTES)
    more = user.await_bytes(handles, 0)
    time.sleep(SHORT_S)
    assert not more.done()
    reads.gate.set()
    assert more.result(WAIT_S) > 0
    assert user.await_bytes(handles, NBYTES - 1).result(WAIT_S) == NBYTES
    assert is_right(store, handles[0], 0, NBYTES)
    assert user.release(handles).result() == [True]


def test_wait_for_a_hung_drive_is_bounded(store, monkeypatch):
    reads, user = Reads(monkeypatch), store.open_user()
    store._moves._load_timeout_s = 0.3
    handles = user.pin(KEYS, first_bytes=SECTION).result(WAIT_S)
    assert user.await_bytes(handles, NBYTES - 1).result(WAIT_S) == 0
    reads.gate.set()
    user.close()


def test_chunks_on_a_hung_drive_are_unavailable_until_it_recovers(store, monkeypatch):
    """No reader waits for the store's whole timeout, and later readers do not wait at all."""
    reads, user = Reads(monkeypatch), store.open_user()
    [drive] = store._moves.tier._drives
    drive.reading.timeout_s = 0.2
    began = time.monotonic()
    handles = user.pin(KEYS, first_bytes=SECTION).result(WAIT_S)
    assert user.await_bytes(handles, NBYTES - 1).result(WAIT_S) == 0
    assert user.pin(KEYS[:1]).result(0) == [None]
    assert Residence.SSD not in user.probe(KEYS).result(0)
    assert store.stats().num_ssd_hung_reads == 1
    assert time.monotonic() - began < store._moves._load_timeout_s / 2
    reads.gate.set()
    await_level(store, lambda stats: not stats.num_ssd_hung_reads)
    user.release(handles)
    [again] = user.pin(KEYS[:1]).result(WAIT_S)
    assert is_right(store, again, 0, NBYTES)
    user.close()


def test_pin_of_whole_chunks_does_not_wait_for_a_hung_drive(store, monkeypatch):
    reads, user = Reads(monkeypatch, beginning=False, free=-1), store.open_user()
    [drive] = store._moves.tier._drives
    drive.reading.timeout_s = 0.2
    began = time.monotonic()
    assert user.pin(KEYS).result(WAIT_S) == [None] * COUNT
    assert time.monotonic() - began < store._moves._load_timeout_s / 2
    reads.gate.set()
    user.close()


@pytest.mark.parametrize("nbytes", [1, PAGE, SECTION, NBYTES, 32 << 20, (84 << 20) + 1])
@pytest.mark.parametrize("first_bytes", [-1, 1, 70_000, 1 << 20, 1 << 40])
def test_parts_are_few_and_consist_of_whole_sections(nbytes, first_bytes):
    parts, section = parts_to_read(nbytes, first_bytes), section_bytes(nbytes)
    assert parts[0][0] == 0
    assert parts[0][1] >= min(first_bytes, nbytes)
    assert [start for start, _ in parts[1:]] == [stop for _, stop in parts[:-1]]
    assert 0 <= parts[-1][1] - nbytes < PAGE
    assert all(start % section == 0 for start, _ in parts)
    assert len(parts) <= MAX_PARTS + 1
    assert parts_to_read(nbytes, None) == [(0, parts[-1][1])]
    assert -(-nbytes // section) <= MAX_SECTIONS
    assert all(stop - start >= min(start, MIN_PART_BYTES) for start, stop in parts[1:-1])


def test_parts_arriving_in_any_order_count_as_prefix():
    seen, parts = [], [(0, 10), (10, 20), (20, 30), (30, 40)]
    read = RecordRead(
        parts,
        lambda start, stop: True,
        lambda: True,
        seen.append,
        lambda *how: seen.append(how),
    )
    for index in (1, 0, 3, 2):
        read.run(index)
    assert seen == [20, (True, False)]


def test_after_a_damaged_part_no_other_is_read_and_on_done_is_called_once():
    read_ranges, ended = [], []

    def read(start, stop):
        read_ranges.append(start)
        if start == 20:  # while it runs, another one fails, and one is postponed
            record.run(1)
            record.run(0)
            assert not ended
        return start != 10

    parts = [(0, 10), (10, 20), (20, 30), (30, 40)]
    record = RecordRead(parts, read, lambda: True, lambda _: None, lambda *how: ended.append(how))
    record.run(2)
    assert ended == [(False, True)]
    record.run(3)
    assert (read_ranges, ended) == ([20, 10], [(False, True)])


def test_cancelled_read_does_not_count_as_failed():
    read_ranges, ended, is_wanted = [], [], True

    def read(start, stop):
        read_ranges.append(start)
        return True

    parts = [(0, 10), (10, 20), (20, 30)]
    record = RecordRead(
        parts, read, lambda: is_wanted, lambda _: None, lambda *how: ended.append(how)
    )
    record.run(0)
    is_wanted = False
    record.run(1)
    is_wanted = True
    record.run(2)
    assert (read_ranges, ended) == ([0], [(False, False)])


def test_waiting_pins_and_calls_cost_only_their_end(store, monkeypatch):
    """The timer holds the store's lock, four times a second."""
    reads, user = Reads(monkeypatch, beginning=False, free=None), store.open_user()
    handles = user.pin(KEYS, first_bytes=SECTION).result(WAIT_S)
    pins = [user.pin(KEYS) for _ in range(20)]
    calls = [user.await_bytes(handles, 0) for _ in range(20)]
    looked_at, compared = [], []
    is_available = SsdTier.is_available
    monkeypatch.setattr(
        SsdTier, "is_available", lambda tier, key: looked_at.append(key) or is_available(tier, key)
    )
    for kind in (PinRequest, _Progress):
        monkeypatch.setattr(kind, "__eq__", lambda one, other: compared.append(0) or one is other)
    with store._lock:
        assert store._moves.time_out(time.monotonic()) == []
        ended = store._moves.time_out(time.monotonic() + 10 * WAIT_S)
        assert store._moves.time_out(time.monotonic() + 10 * WAIT_S) == []
    assert not looked_at
    assert not compared
    assert len(ended) == 40
    for end in ended:
        end()
    assert [pin.result(0) for pin in pins] == [[None] * COUNT] * 20
    assert [call.result(0) for call in calls] == [0] * 20
    reads.gate.set()
    user.release(handles)
    user.close()
