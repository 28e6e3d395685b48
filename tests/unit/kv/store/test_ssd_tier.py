"""A store with SSDs: chunks used twice outlive memory and the process, and are never wrong."""

import errno
import hashlib
import os
import threading
import time

import numpy as np
import pytest
from msgspec import structs

from mooncake_kv.errors import KVConfigError, StoreIOError
from mooncake_kv.store import ssd_tier, tier_moves
from mooncake_kv.store.arena_allocator import GRANULE
from mooncake_kv.store.chunk_store import (
    MAX_NAMESPACE_BYTES,
    Chunk,
    ChunkContent,
    PutRefusal,
    Residence,
    Tier,
)
from mooncake_kv.store.node_store import NodeStore, NodeStoreConfig
from mooncake_kv.store.ssd_config import SsdConfig, SsdDirectoryConfig
from mooncake_kv.store.ssd_directory import SsdDirectory
from mooncake_kv.store.ssd_drive import ChunkWrite
from mooncake_kv.store.ssd_reads import ChunkRead
from mooncake_kv.store.ssd_records import PAGE, read_page, record_bytes

NBYTES = 4 * GRANULE
SEGMENT = PAGE + 8 * record_bytes(NBYTES)
WAIT_S = 60


def key_of(number):
    return hashlib.blake2b(str(number).encode(), digest_size=16).digest()


def chunk(number):
    parent = key_of(number - 1) if number % 2 else None
    return Chunk(key_of(number), parent, number % 2, NBYTES, 16)


def keys(numbers):
    return [chunk(number).key for number in numbers]


class Stored:
    """A store with SSD directories, filled and read by the test."""

    def __init__(self, *paths, capacity=8, segments=4, load_timeout_s=WAIT_S, **ssd):
        directories = tuple(
            SsdDirectoryConfig(path, segments * SEGMENT, SEGMENT, min_free_bytes=0)
            for path in paths
        )
        self.events = []
        self.changed = threading.Condition()
        self.store = NodeStore(
            NodeStoreConfig(
                capacity * NBYTES,
                ssd=SsdConfig(directories, **ssd),
                load_timeout_s=load_timeout_s,
            ),
            observer=self,
        )
        self.user = self.store.open_user()

    def stored(self, tier, chunks):
        for what in chunks:
            self._note("stored", tier, what.key)

    def removed(self, tier, gone):
        for key in gone:
            self._note("removed", tier, key)

    def _note(self, *event):
        with self.changed:
            self.events.append(event)
            self.changed.notify_all()

    def await_event(self, *event):
        with self.changed:
            assert self.changed.wait_for(lambda: event in self.events, WAIT_S), event

    def put(self, number, **options):
        (handle,) = self.user.reserve([chunk(number)], **options).result()
        view = self.store.memory.view(handle.offset, NBYTES)
        view[:] = content(number)
        view.release()
        assert self.user.commit([handle]).result() == [True]

    def get(self, numbers):
        """Read chunks; returns the tier of each, None for a miss. Wrong bytes fail the test."""
        handles = self.user.pin(keys(numbers)).result(WAIT_S)
        for number, handle in zip(numbers, handles, strict=True):
            if handle is not None:
                view = self.store.memory.view(handle.offset, NBYTES)
                assert bytes(view) == content(number)
                view.release()
        granted = [handle for handle in handles if handle is not None]
        assert all(self.user.release(granted).result())
        return [handle and handle.tier for handle in handles]

    def save(self, numbers):
        """Put and use chunks, and wait until an SSD holds them."""
        for number in numbers:
            self.put(number)
            self.get([number])
            self.await_event("stored", Tier.SSD, chunk(number).key)

    def await_writes(self):
        """Wait until all writes and collections have completed."""
        for drive in self.store._moves.tier._drives:
            drive.writers.close()
            assert drive.writers.join(time.monotonic() + WAIT_S)

    def close(self):
        self.user.close()
        self.store.check_integrity()
        self.store.close()


def content(number):
    return np.random.default_rng(number).bytes(NBYTES)


@pytest.fixture
def opened(tmp_path):
    stores = []

    def open_store(*paths, **options):
        stores.append(Stored(*(paths or [tmp_path]), **options))
        return stores[-1]

    yield open_store
    for store in stores:
        store.close()


def test_second_use_saves_a_chunk_that_then_outlives_memory(opened):
    store = opened(capacity=4)
    store.save([0, 1])
    for number in range(10, 14):
        store.put(number)  # used once: evicts 0 and 1, and is not written
    assert store.user.probe(keys([0, 1, 10])).result() == [
        Residence.SSD,
        Residence.SSD,
        Residence.DRAM,
    ]
    assert store.get([0, 1]) == [Tier.SSD, Tier.SSD]
    assert store.get([0, 1, 99]) == [Tier.DRAM, Tier.DRAM, None]
    stats = store.user.stats().result()
    assert (stats.ssd_chunks, stats.num_ssd_hits) == (2, 2)
    assert stats.ssd_written_bytes == 2 * record_bytes(NBYTES)
    assert stats.num_ssd_skipped == {"first_touch": 6}


def test_load_without_memory_is_no_refused_put(opened):
    store = opened(capacity=2)
    store.save([0])
    store.put(2)
    store.put(4)
    store.await_event("removed", Tier.DRAM, chunk(0).key)
    pinned = store.user.pin(keys([2, 4])).result()
    assert store.get([0]) == [None]
    stats = store.store.stats()
    assert (stats.num_refused_puts, stats.num_refused_loads) == ({}, {"no_space": 1})
    assert stats.num_misses == 1
    assert store.user.release(pinned).result() == [True, True]


def test_chunk_that_is_put_again_after_memory_lost_it_is_written(opened):
    store = opened(capacity=2)
    for number in (0, 10, 20):
        store.put(number)
    store.put(0)
    store.await_event("stored", Tier.SSD, chunk(0).key)


def test_chunk_that_is_put_while_memory_has_it_is_written(opened):
    store = opened(capacity=2)
    store.put(0)
    assert store.user.reserve([chunk(0)]).result() == [PutRefusal.PRESENT]  # it was recomputed
    store.await_event("stored", Tier.SSD, chunk(0).key)


def test_chunks_saved_by_two_instances_for_one_request_count_one_use(opened):
    store = opened(capacity=4)
    store.put(0)
    offered = [chunk(0), chunk(1)]
    refused, handle = store.user.reserve(offered, is_use=False).result()
    assert refused is PutRefusal.PRESENT
    assert store.user.commit([handle]).result() == [True]
    # by the instance that computed them; first use of chunk 1
    refusals = store.user.reserve(offered).result()
    assert refusals == [PutRefusal.PRESENT] * 2
    store.await_event("stored", Tier.SSD, chunk(0).key)
    store.await_writes()
    assert store.user.stats().result().ssd_chunks == 1


def test_put_by_another_instance_after_eviction_does_not_write_chunk(opened):
    store = opened(capacity=2)
    for number in (0, 10, 20):
        store.put(number)
    store.put(0, is_use=False)
    store.await_writes()
    assert store.user.stats().result().ssd_chunks == 0


def test_restarted_store_finds_the_chunks_on_its_ssds(opened, tmp_path):
    paths = [tmp_path / "a", tmp_path / "b"]
    for path in paths:
        path.mkdir()
    first = opened(*paths)
    first.save(range(4, 10))
    first.close()
    second = opened(*paths)
    assert set(second.events) == {("stored", Tier.SSD, key) for key in keys(range(4, 10))}
    assert second.get(range(4, 10)) == [Tier.SSD] * 6
    assert {c.key for c in second.store.chunks()[Tier.SSD]} == set(keys(range(4, 10)))
    assert all(list(path.glob("segment-*")) for path in paths)
    assert second.store.verify() == (6, 0)


def flip(path, position):
    with path.open("r+b") as file:
        file.seek(position)
        byte = file.read(1)
        file.seek(position)
        file.write(bytes([byte[0] ^ 1]))


def test_flipped_bit_is_a_miss_and_the_record_is_forgotten(opened, tmp_path):
    first = opened()
    first.save(range(3))
    first.close()
    (segment,) = tmp_path.glob("segment-*")
    flip(segment, PAGE + record_bytes(NBYTES) + PAGE + 777)  # in the second record's bytes
    second = opened()
    assert second.get(range(3)) == [Tier.SSD, None, Tier.SSD]
    second.await_event("removed", Tier.SSD, chunk(1).key)
    assert second.user.probe(keys([1])).result() == [Residence.ABSENT]
    assert second.user.stats().result().num_ssd_corrupt == 1


def test_damaged_header_page_is_found_by_verify_and_does_not_affect_reads(opened, tmp_path):
    """The page's data that a read needs is known; read data is compared with its checksums."""
    store = opened(capacity=3)
    store.save(range(0, 60, 10))
    (segment,) = tmp_path.glob("segment-*")
    flip(segment, PAGE + 20)  # in the header of the first record
    assert store.get([0]) == [Tier.SSD]
    assert store.store.verify() == (5, 1)
    assert store.user.stats().result().num_ssd_corrupt == 1


@pytest.mark.parametrize("left", [0, PAGE, 3 * PAGE, 2 * record_bytes(NBYTES)])
def test_truncated_segment_while_it_is_in_use_is_a_miss(opened, tmp_path, left):
    store = opened(capacity=3)
    store.save(range(0, 60, 10))
    (segment,) = tmp_path.glob("segment-*")
    os.truncate(segment, left)
    tiers = store.get([0, 10, 20])
    assert set(tiers) <= {Tier.SSD, None}
    assert None in tiers
    stats = store.user.stats().result()
    assert stats.num_ssd_corrupt + stats.num_ssd_errors >= 1


def test_full_disk_costs_only_the_copies_on_it(opened, monkeypatch):
    store = opened()

    def refuse(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    store.put(0)
    assert store.get([0]) == [Tier.DRAM]
    deadline = time.monotonic() + WAIT_S  # the copy starts after the read that triggers it
    while not (stats := store.user.stats().result()).num_ssd_errors:
        assert time.monotonic() < deadline, stats
        time.sleep(0.01)
    assert (stats.num_ssd_errors, stats.ssd_chunks) == (1, 0)
    assert store.get([0]) == [Tier.DRAM]


def await_level(store, holds):
    deadline = time.monotonic() + WAIT_S
    while not holds(store.store.stats()):
        assert time.monotonic() < deadline, store.store.stats()
        time.sleep(0.005)


def test_file_system_that_refuses_segments_reuses_the_oldest_ones(opened, monkeypatch, caplog):
    """As with a quota: the file system reports free space and grants none."""
    give, num_given = os.posix_fallocate, []

    def refuse(*args):
        if len(num_given) == 2:
            raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))
        num_given.append(give(*args))

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    store = opened(segments=100)
    store.save(range(16))
    store.put(16)
    store.get([16])  # finds no space
    await_level(store, lambda stats: stats.num_ssd_errors)
    store.save(range(17, 40))  # frees space
    store.await_event("removed", Tier.SSD, chunk(0).key)
    found = store.user.probe(keys([0, 39])).result()
    assert found == [Residence.ABSENT, Residence.DRAM]
    stats = store.store.stats()
    assert (stats.num_ssd_errors, stats.num_ssd_skipped.keys()) == (1, {"first_touch"})
    assert caplog.text.count("no segment can be added") == 1


def test_failing_statvfs_costs_only_copies_and_is_counted(opened, monkeypatch):
    def fails(path):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    store = opened()
    monkeypatch.setattr(os, "statvfs", fails)
    for number in range(3):
        store.put(number)
        assert store.get([number]) == [Tier.DRAM]
    store.await_writes()
    stats = store.store.stats()
    assert (stats.num_ssd_errors, stats.ssd_chunks, stats.num_pins) == (3, 0, 0)


def test_writes_are_bounded_by_the_budget_and_the_queue(opened, monkeypatch):
    store = opened(write_bytes_per_day=24 * record_bytes(NBYTES), max_queued_writes=1)
    store.save([0])
    store.put(1)
    store.get([1])
    assert store.user.stats().result().num_ssd_skipped["budget"] == 1


def test_whole_segments_are_collected_and_chunks_that_were_read_are_rewritten(opened):
    store = opened(capacity=6, segments=3)
    store.save([0, 1])
    for number in range(100, 106):
        store.put(number)
    assert store.get([0]) == [Tier.SSD]
    for number in range(10, 38):
        store.save([number])
    store.await_event("removed", Tier.SSD, chunk(1).key)
    assert ("removed", Tier.SSD, chunk(0).key) not in store.events
    assert store.user.probe(keys([0, 1])).result() == [Residence.SSD, Residence.ABSENT]
    assert store.get([0]) == [Tier.SSD]
    num_stored = store.user.stats().result().ssd_chunks
    assert num_stored <= 3 * 8


def test_verify_does_not_count_as_a_read(opened):
    """Otherwise a nightly verification would wear the drives down twice as fast."""
    store = opened(capacity=6, segments=3)
    store.save(range(0, 60, 2))
    assert store.store.verify()[1] == 0
    before = store.store.stats().ssd_written_bytes
    store.save(range(60, 80, 2))
    store.await_writes()
    assert store.store.stats().ssd_written_bytes == before + 10 * record_bytes(NBYTES)


def test_bytes_on_ssds_are_counted_as_they_come_and_go(opened, monkeypatch):
    """Not when counters are read: an engine reads them twice a second, over millions of records."""
    store = opened(capacity=6, segments=3)
    for number in range(0, 60, 2):
        store.save([number])
        if number % 6 == 0:
            store.user.drop(keys([number]))
        store.get([number - 4])  # so that some are rewritten when they are collected
    store.await_writes()
    tier = store.store._moves.tier
    stats = store.store.stats()
    assert stats.ssd_bytes == stats.ssd_chunks * record_bytes(NBYTES) > 0
    assert any(event[0] == "removed" and event[1] is Tier.SSD for event in store.events)
    with monkeypatch.context() as patch:
        patch.setattr(tier, "_records", dict.fromkeys(tier._records))  # none of which is read
        assert store.store.stats() == stats
    store.close()
    again = opened(capacity=6, segments=3).store.stats()
    assert again.ssd_bytes == again.ssd_chunks * record_bytes(NBYTES) > 0


def test_drop_applies_to_all_tiers(opened):
    store = opened()
    store.save([0])
    store.put(1)
    assert store.user.drop(keys([0, 1, 2, 0, 1])).result() == 2
    assert store.user.probe(keys([0, 1])).result() == [Residence.ABSENT] * 2


def around_writes(monkeypatch, number, *, before=None, behind=None):
    """Call functions right before or after each write of a chunk's record."""
    write = SsdDirectory.write

    def wrapped(directory, location, page, payload):
        is_meant = read_page(page).key == chunk(number).key
        if is_meant and before is not None:
            before()
        write(directory, location, page, payload)
        if is_meant and behind is not None:
            behind(directory, location)

    monkeypatch.setattr(SsdDirectory, "write", wrapped)


def test_chunk_dropped_during_its_write_is_not_found(opened, monkeypatch):
    store = opened()
    around_writes(monkeypatch, 0, before=lambda: store.user.drop(keys([0])))
    store.put(0)
    store.user.touch(keys([0]))  # the second use
    store.await_writes()
    assert store.user.probe(keys([0])).result() == [Residence.ABSENT]
    assert ("stored", Tier.SSD, chunk(0).key) not in store.events


def test_chunk_dropped_during_collection_is_not_found(opened, monkeypatch):
    store = opened(capacity=6, segments=3)
    store.save([0, 1])
    for number in range(100, 106):
        store.put(number)
    assert store.get([0]) == [Tier.SSD]  # so that it is rewritten
    num_dropped = []
    around_writes(
        monkeypatch, 0, before=lambda: num_dropped.append(store.user.drop(keys([0])).result())
    )
    for number in range(10, 38):
        store.save([number])
    store.await_writes()
    assert num_dropped == [1]
    assert store.user.probe(keys([0])).result() == [Residence.ABSENT]


def test_segment_is_not_collected_before_its_writes_are_indexed(opened, monkeypatch):
    """Otherwise the index would keep an overwritten record for ever, and each load of it would
    fail."""
    recycled = []

    def collect(directory, location):
        directory._seal()
        recycled.append(directory.recycle(location.segment))

    store = opened()
    around_writes(monkeypatch, 0, behind=collect)
    store.put(0)
    store.get([0])
    store.await_event("stored", Tier.SSD, chunk(0).key)
    store.await_writes()
    assert recycled == [False]
    assert store.store.verify() == (1, 0)


@pytest.mark.parametrize("is_late", [False, True])
def test_record_whose_write_ends_while_its_segment_is_collected_is_not_found(
    opened, monkeypatch, is_late
):
    """Otherwise the index would keep it for ever: every load of it would fail, and it would not be
    rewritten."""
    store = opened(capacity=24, segments=3, write_threads=2)
    tier = store.store._moves.tier
    [drive] = tier._drives
    written, over, collected = threading.Event(), threading.Event(), threading.Event()
    forget_use = tier._forget_use

    def slow():
        written.set()
        assert over.wait(WAIT_S)

    def finish():
        over.set()
        await_level(store, lambda _: not drive.directory._sealed[0].num_busy)

    def forget(drive, use):
        """The write completes before its segment's records are forgotten, or right after."""
        is_first = not collected.is_set() and drive.directory._sealed[0].use == use
        if is_first and not is_late:
            finish()
        forget_use(drive, use)
        if is_first and is_late:
            finish()
        if is_first:
            collected.set()

    around_writes(monkeypatch, 0, before=slow)
    monkeypatch.setattr(tier, "_forget_use", forget)
    store.put(0)
    store.get([0])
    assert written.wait(WAIT_S)
    number = 2
    while not collected.is_set():
        store.save([number])
        number += 2
    store.await_writes()
    assert chunk(0).key not in {c.key for c in tier.chunks()}
    assert ("removed", Tier.SSD, chunk(0).key) in store.events


def test_stale_index_entry_is_removed_when_it_is_read(opened):
    store = opened(capacity=2)
    store.save([0])
    [drive] = store.store._moves.tier._drives
    for number in (11, 13, 15):
        store.put(number)
    with drive.directory._lock:
        drive.directory._seal()
    assert drive.directory.recycle(next(iter(drive.directory._sealed.values())))
    assert store.get([0]) == [None]
    store.await_event("removed", Tier.SSD, chunk(0).key)
    assert store.user.probe(keys([0])).result() == [Residence.ABSENT]
    assert store.store.verify() == (0, 0)
    store.put(0)  # memory held it before
    store.await_event("stored", Tier.SSD, chunk(0).key)


def test_failed_read_of_a_record_does_not_remove_its_successor(opened, monkeypatch):
    """The chunk may be dropped and rewritten while the old record is still being read."""
    store = opened(capacity=2)
    store.save([0])
    tier = store.store._moves.tier
    read_sections = SsdDirectory.read_sections
    again, rewritten = chunk(0), threading.Event()

    def fail_once(directory, *args):
        if rewritten.is_set():
            return read_sections(directory, *args)
        tier.forget(keys([0]))
        assert tier.admit(again)
        tier.write(ChunkWrite(again, 0, lambda: True, lambda _: rewritten.set()))
        assert rewritten.wait(WAIT_S)
        raise StoreIOError("of the old record")

    monkeypatch.setattr(SsdDirectory, "read_sections", fail_once)
    done = threading.Event()
    tier.read([ChunkRead(key_of(0), 0, lambda: True, lambda _: None, lambda _: done.set())])
    assert done.wait(WAIT_S)
    assert tier.chunk(key_of(0)) is again


def hang(monkeypatch):
    """Block reads of chunks until the returned event is set."""
    hung, read = threading.Event(), SsdDirectory.read_sections
    monkeypatch.setattr(SsdDirectory, "read_sections", lambda *a: hung.wait(WAIT_S) and read(*a))
    return hung


def test_hung_drive_delays_a_pin_for_a_bounded_time(opened, monkeypatch):
    store = opened(capacity=4, load_timeout_s=0.5)
    store.save([0])
    for number in range(10, 14):
        store.put(number)
    store.user.drop(keys([10]))
    hung = hang(monkeypatch)
    handles = store.user.pin([*keys([0]), *keys([11])]).result(WAIT_S)
    assert handles[0] is None
    assert handles[1] is not None, "chunks in memory are served"
    second = store.user.pin(keys([0]))
    third = store.user.pin(keys([0]))
    before = store.user.stats().result()
    leaving = store.store.open_user()
    ended = leaving.pin(keys([0]))
    leaving.close()
    assert ended.result(WAIT_S) == [None]
    hung.set()
    monkeypatch.undo()
    ((one,), (two,)) = second.result(WAIT_S), third.result(WAIT_S)
    assert one is not None
    assert two is not None, "one read served both"
    after = store.user.stats().result()
    assert after.ssd_read_bytes == record_bytes(NBYTES) - PAGE
    assert (after.num_ssd_hits - before.num_ssd_hits, after.num_misses) == (
        2,
        before.num_misses + 1,
    )


def test_chunks_on_a_hung_drive_are_unavailable_after_another_drive_was_added(opened, tmp_path):
    paths = [tmp_path / "a", tmp_path / "b"]
    for path in paths:
        path.mkdir()
    first = opened(paths[1])
    first.save(range(0, 16, 2))
    first.close()
    second = opened(*paths)
    added, old = second.store._moves.tier._drives
    for drive, where in ((added, Residence.SSD), (old, Residence.ABSENT)):
        drive.reading.timeout_s = -1.0
        with drive.reading.watched(0):
            assert second.user.probe(keys(range(0, 16, 2))).result() == [where] * 8


def test_user_that_disconnects_while_waiting_keeps_no_pin(opened, monkeypatch):
    store = opened(capacity=4)
    store.save([0])
    store.user.drop([])
    for number in range(10, 14):
        store.put(number)
    hung = hang(monkeypatch)
    leaving = store.store.open_user()
    pinned = leaving.pin(keys([0]))
    leaving.close()
    assert pinned.result(WAIT_S) == [None]
    hung.set()
    monkeypatch.undo()
    assert store.get([0])[0] is not None
    assert store.user.stats().result().num_pins == 0


def test_failed_record_does_not_hide_records_after_it(opened, monkeypatch):
    store = opened()
    store.save([0])
    real = ssd_tier.record_header

    def header(chunk, use, payload):
        if chunk.key == key_of(10):
            raise ValueError("a header of 5000 bytes does not fit into a page of 4096")
        return real(chunk, use, payload)

    monkeypatch.setattr(ssd_tier, "record_header", header)
    store.put(10)
    store.get([10])
    store.save([20, 30])
    store.await_writes()
    stats = store.user.stats().result()
    assert (stats.ssd_chunks, stats.num_ssd_errors) == (3, 1)
    monkeypatch.undo()
    store.close()
    again = opened()
    assert again.user.stats().result().ssd_chunks == 3
    assert again.get([0, 20, 30]) == [Tier.SSD] * 3


def test_record_without_a_chunk_is_skipped(opened, monkeypatch):
    store = opened()
    real = ssd_tier.record_header

    def header(chunk, use, payload):
        made = real(chunk, use, payload)
        too_long = ChunkContent(bytes(MAX_NAMESPACE_BYTES + 1), bytes(64))
        return structs.replace(made, content=too_long) if chunk.key == key_of(10) else made

    monkeypatch.setattr(ssd_tier, "record_header", header)
    store.save([0, 10, 20])
    store.await_writes()
    store.close()
    again = opened()
    stats = again.user.stats().result()
    assert (stats.ssd_chunks, stats.num_ssd_corrupt) == (2, 1)


class HungStart:
    """A drive that hangs when its directory is opened, or scanned after the first record, until
    ``over``."""

    def __init__(self, monkeypatch, path, what):
        self.over = threading.Event()
        opens, scans = SsdDirectory.open, SsdDirectory.scan

        def hung_open(directory):
            assert directory.config.path != path or self.over.wait(WAIT_S)
            opens(directory)

        def hung_scan(directory):
            for number, record in enumerate(scans(directory)):
                assert directory.config.path != path or number == 0 or self.over.wait(WAIT_S)
                yield record

        hung = hung_open if what == "open" else hung_scan
        monkeypatch.setattr(SsdDirectory, what, hung)


@pytest.mark.parametrize("what", ["open", "scan"])
def test_drive_that_hangs_at_start_affects_only_that_drive(opened, tmp_path, monkeypatch, what):
    paths = [tmp_path / "a", tmp_path / "b"]
    for path in paths:
        path.mkdir()
    of_hung, of_other = [on_drive(0, 0), on_drive(100, 0)], on_drive(200, 1)
    first = opened(*paths)
    first.save([*of_hung, of_other])
    first.close()
    start = HungStart(monkeypatch, paths[0], what)
    store = opened(*paths, read_timeout_s=0.2)
    await_level(store, lambda stats: stats.num_ssd_hung_reads == 1)
    assert store.store.stats().num_ssd_unscanned == 1
    assert store.user.probe(keys(of_hung)).result() == [Residence.ABSENT] * 2
    assert store.get([*of_hung, of_other]) == [None, None, Tier.SSD]
    store.put(300)
    assert store.get([300]) == [Tier.DRAM]
    store.save([on_drive(400, 1)])
    start.over.set()
    for number in of_hung:
        store.await_event("stored", Tier.SSD, chunk(number).key)
    await_level(store, lambda stats: not stats.num_ssd_unscanned and not stats.num_ssd_hung_reads)
    assert store.get(of_hung) == [Tier.SSD] * 2
    store.save([on_drive(500, 0)])


def test_during_a_scan_found_chunks_are_read_and_nothing_is_written(opened, tmp_path, monkeypatch):
    first = opened()
    first.save([0, 10, 20])
    first.close()
    start = HungStart(monkeypatch, tmp_path, "scan")
    store = opened(read_timeout_s=0.2)
    [drive] = store.store._moves.tier._drives
    monkeypatch.setattr(drive.reading, "is_hung", lambda: False)  # it is slow
    found = store.user.probe(keys([0, 10, 20])).result()
    assert found == [Residence.SSD, Residence.ABSENT, Residence.ABSENT]
    assert store.get([0]) == [Tier.SSD]
    store.put(30)
    store.get([30])
    assert store.store.stats().num_ssd_skipped["unscanned"] == 1
    assert store.user.drop(keys([10])).result() == 0
    start.over.set()
    await_level(store, lambda stats: not stats.num_ssd_unscanned)
    assert store.get([0, 10, 20]) == [Tier.DRAM, None, Tier.SSD], "dropped chunks stay dropped"
    store.save([10])


@pytest.mark.parametrize("what", ["open", "scan"])
def test_store_whose_drive_hangs_at_start_is_closed_in_bounded_time(
    opened, tmp_path, monkeypatch, caplog, what
):
    first = opened()
    first.save([0, 10])
    first.close()
    monkeypatch.setattr(ssd_tier, "CLOSE_TIMEOUT_S", 0.2)
    start = HungStart(monkeypatch, tmp_path, what)
    store = opened(read_timeout_s=0.2)
    [drive] = store.store._moves.tier._drives
    store.store.close()
    assert f"{tmp_path}: the drive is hung" in caplog.text
    caplog.clear()
    start.over.set()
    drive._scanner.join(WAIT_S)
    drive.directory.close()
    assert not caplog.messages, "chunks found later are not published"


def test_directory_that_becomes_unusable_is_logged(opened, tmp_path, monkeypatch, caplog):
    other = SsdDirectory(SsdDirectoryConfig(tmp_path, 4 * SEGMENT, SEGMENT, min_free_bytes=0))
    other.open()
    start = HungStart(monkeypatch, tmp_path, "open")
    store = opened(read_timeout_s=0.2)
    start.over.set()
    store.store._moves.tier._drives[0]._scanner.join(WAIT_S)
    assert "in use by another store" in caplog.text
    store.put(0)
    assert store.get([0]) == [Tier.DRAM]
    assert store.store.stats().num_ssd_unscanned == 1
    other.close()


class HungWrites:
    """Writes to one directory do not complete until ``over``; optionally only those that start a
    segment."""

    def __init__(self, monkeypatch, path, *, beginning=False):
        self.over, self.has_begun = threading.Event(), threading.Event()
        write = os.pwritev

        def hung(file, buffers, offset):
            if os.path.dirname(os.readlink(f"/proc/self/fd/{file}")) == str(path) and (
                (offset == 0) is beginning
            ):
                self.has_begun.set()
                assert self.over.wait(WAIT_S)
            return write(file, buffers, offset)

        monkeypatch.setattr(os, "pwritev", hung)


def on_drive(number, path):
    """The next chunk, from this one on, that is placed on the second of two drives, or on the
    first."""
    while int.from_bytes(key_of(number)[:4], "big") % 2 != path:
        number += 2  # without a parent, like the first chunk
    return number


def test_drive_with_hung_writes_is_read_and_others_are_written(
    opened, tmp_path, monkeypatch, caplog
):
    paths = [tmp_path / "a", tmp_path / "b"]
    for path in paths:
        path.mkdir()
    store = opened(*paths, capacity=12, write_timeout_s=0.2)
    before = on_drive(0, 0)
    store.save([before])
    for number in range(101, 113):
        store.put(number)
    hung = HungWrites(monkeypatch, paths[0])
    first = [on_drive(1000, 0)]
    while len(first) < 8:
        first.append(on_drive(first[-1] + 2, 0))
    for number in first:
        store.put(number)
        store.get([number])
    assert hung.has_begun.wait(WAIT_S)
    await_level(store, lambda stats: stats.num_ssd_hung_writes == 1)
    # writes queued behind hung ones release their memory, and no more are queued
    await_level(store, lambda stats: stats.num_pins == 4 and stats.num_ssd_skipped["hung"] == 4)
    store.get([first[-1]])
    assert store.store.stats().num_ssd_skipped["hung"] == 5
    assert store.get([before]) == [Tier.SSD]
    store.save([on_drive(2000, 1)])
    assert store.store.stats().num_ssd_hung_reads == 0
    hung.over.set()
    for number in first[:4]:
        store.await_event("stored", Tier.SSD, key_of(number))
    await_level(store, lambda stats: not stats.num_ssd_hung_writes and not stats.num_pins)
    store.save([on_drive(3000, 0)])
    assert [line for line in caplog.messages if str(paths[0]) in line] == [
        f"{paths[0]}: a write has timed out: this drive is only read until it completes",
        f"{paths[0]}: writes complete again",
    ]


def test_drive_that_hangs_during_collection_releases_queued_writes(opened, monkeypatch):
    first = opened(capacity=80)
    first.save(range(0, 48, 2))
    first.close()
    store = opened(capacity=80, write_threads=1, read_timeout_s=0.2)
    assert store.get(range(0, 16, 2)) == [Tier.SSD] * 8
    [drive] = store.store._moves.tier._drives
    hangs, over = threading.Event(), threading.Event()

    def hung(*_):
        hangs.set()
        assert over.wait(WAIT_S)
        raise StoreIOError("it hung")

    monkeypatch.setattr(drive.directory, "read", hung)
    store.put(48)
    store.get([48])
    assert hangs.wait(WAIT_S)
    for number in (50, 52):
        store.put(number)
        store.get([number])
    await_level(store, lambda stats: not stats.num_pins)
    stats = store.store.stats()
    assert (stats.num_ssd_hung_reads, stats.num_ssd_skipped["hung"]) == (1, 2)
    over.set()


def test_hung_write_whose_memory_was_reused_is_not_found(opened, tmp_path, monkeypatch):
    monkeypatch.setattr(tier_moves, "MAX_LEASE_S", 0.2)
    store = opened()
    hung = HungWrites(monkeypatch, tmp_path)
    store.put(0)
    store.get([0])
    assert hung.has_begun.wait(WAIT_S)
    await_level(store, lambda stats: stats.num_expired_reads == 1)
    hung.over.set()
    store.await_writes()
    assert store.store.stats().ssd_chunks == 0


@pytest.mark.parametrize("beginning", [True, False])
def test_store_whose_drive_hangs_is_closed_in_bounded_time(
    opened, tmp_path, monkeypatch, caplog, beginning
):
    monkeypatch.setattr(ssd_tier, "CLOSE_TIMEOUT_S", 0.2)
    store = opened()
    hung = HungWrites(monkeypatch, tmp_path, beginning=beginning)
    store.put(0)
    store.get([0])
    assert hung.has_begun.wait(WAIT_S)
    [drive] = store.store._moves.tier._drives
    store.store.close()
    assert f"{tmp_path}: the drive is hung" in caplog.text
    with pytest.raises(KVConfigError, match="in use by another store"):
        opened()
    hung.over.set()
    assert drive.writers.join(time.monotonic() + WAIT_S)
    drive.directory.close()


def test_closed_store_stops_collecting(opened, monkeypatch):
    """Records to rewrite stay where they are; otherwise a slow drive would be considered hung, and
    its directory would stay in use."""
    first = opened(capacity=80)
    first.save(range(0, 48, 2))
    first.close()
    store = opened(capacity=80)
    assert store.get(range(0, 16, 2)) == [Tier.SSD] * 8
    tier = store.store._moves.tier
    [drive] = tier._drives
    written, stops, over = [], threading.Event(), threading.Event()
    rewrite_hot, write, stop = tier._rewrite_hot, drive.directory.write, drive.writers.close

    def keep(*args):
        monkeypatch.setattr(drive.directory, "write", slow)
        rewrite_hot(*args)

    def slow(*args):
        written.append(args)
        stops.set()
        assert over.wait(WAIT_S)
        write(*args)

    def close():
        stop()
        over.set()

    monkeypatch.setattr(tier, "_rewrite_hot", keep)
    monkeypatch.setattr(drive.writers, "close", close)
    store.put(48)
    store.get([48])
    assert stops.wait(WAIT_S)
    store.store.close()
    assert len(written) == 1
    again = opened(capacity=80)
    assert again.user.probe(keys(range(0, 50, 2))).result() == [Residence.SSD] * 25
