"""Segments of records on a disk: recovered after a restart, torn ends dropped, one store per
directory."""

import errno
import os
import threading

import pytest

from mooncake_kv.errors import KVConfigError, StoreIOError
from mooncake_kv.store.chunk_store import Chunk
from mooncake_kv.store.ssd_config import SsdDirectoryConfig
from mooncake_kv.store.ssd_directory import GROW_RETRY_S, SsdDirectory, aligned_buffer
from mooncake_kv.store.ssd_records import (
    PAGE,
    SegmentHeader,
    do_checksums_match,
    fill_page,
    read_page,
    record_bytes,
    record_header,
)
from mooncake_kv.store.ssd_sections import section_checksums

NBYTES = 3 * PAGE
WAIT_S = 60
SEGMENT = PAGE + 4 * record_bytes(NBYTES)


def opened(config, *clock):
    directory = SsdDirectory(config, *clock)
    directory.open()
    return directory


def config(path, segments=3, **changes):
    return SsdDirectoryConfig(path, segments * SEGMENT, SEGMENT, min_free_bytes=0, **changes)


def chunk(number):
    return Chunk(number.to_bytes(16, "big"), None, number, NBYTES, 16, "tenant")


def store(directory, number):
    location = directory.append(NBYTES)
    payload = aligned_buffer(NBYTES)
    payload[:] = bytes([number % 251]) * NBYTES
    page = aligned_buffer(PAGE)
    fill_page(page, record_header(chunk(number), location.use, payload))
    directory.write(location, page, payload)
    directory.release(location)
    return location


def found(path, **changes):
    directory = opened(config(path, **changes))
    numbers = [record.header.position for record in directory.scan()]
    directory.close()
    return numbers


def test_records_are_recovered_with_all_fields(tmp_path):
    directory = opened(config(tmp_path))
    for number in range(6):
        store(directory, number)
    directory.close()
    again = opened(config(tmp_path))
    records = list(again.scan())
    assert [record.header.chunk() for record in records] == [chunk(n) for n in range(6)]
    page, payload = aligned_buffer(PAGE), aligned_buffer(NBYTES)
    assert again.hold(records[5].location)
    again.read(records[5].location, 0, [page, payload])
    assert read_page(page) == records[5].header
    assert bytes(payload) == bytes([5]) * NBYTES
    assert do_checksums_match(records[5].header, 0, section_checksums(payload, 16 * PAGE))
    again.close()


@pytest.mark.parametrize("damage", ["truncated", "header flipped", "segment header flipped"])
def test_torn_end_is_dropped(tmp_path, damage):
    directory = opened(config(tmp_path))
    for number in range(6):
        last = store(directory, number)
    directory.close()
    segment = sorted(tmp_path.glob("segment-*"))[1]
    if damage == "truncated":
        os.truncate(segment, last.offset + record_bytes(NBYTES) - 1)
    else:
        with segment.open("r+b") as file:
            file.seek(last.offset + 20 if damage == "header flipped" else 20)
            byte = file.read(1)
            file.seek(-1, os.SEEK_CUR)
            file.write(bytes([byte[0] ^ 4]))
    assert found(tmp_path) == ([0, 1, 2, 3] if "segment" in damage else [0, 1, 2, 3, 4])


def test_recycled_segments_old_records_are_not_found(tmp_path):
    directory = opened(config(tmp_path))
    first = store(directory, 0)
    for number in range(1, 12):
        store(directory, number)
    assert directory.append(NBYTES) is None
    oldest = directory.segment_to_collect()
    assert oldest is first.segment
    assert directory.hold(first)
    assert not directory.recycle(oldest), "it is being read"
    directory.release(first)
    assert directory.recycle(oldest)
    assert not directory.hold(first)
    store(directory, 12)
    directory.close()
    assert found(tmp_path) == [4, 5, 6, 7, 8, 9, 10, 11, 12]


def test_files_of_another_version_or_no_store_are_recycled(tmp_path):
    (tmp_path / "segment-00000004.kv").write_bytes(os.urandom(SEGMENT))
    page = aligned_buffer(PAGE)
    fill_page(page, SegmentHeader(b"12345678", 1, version=99))
    (tmp_path / "segment-00000005.kv").write_bytes(bytes(page) + bytes(SEGMENT - PAGE))
    directory = opened(config(tmp_path))
    assert list(directory.scan()) == []
    store(directory, 1)
    directory.close()
    assert len(list(tmp_path.glob("segment-*"))) == 2


def test_segment_with_unreadable_header_is_not_used(tmp_path, monkeypatch, caplog):
    directory = opened(config(tmp_path))
    for number in range(8):
        store(directory, number)
    directory.close()
    files = sorted(tmp_path.glob("segment-*"))
    inode, content, read = files[0].stat().st_ino, files[0].read_bytes(), os.preadv

    def fails(file, buffers, offset):
        if os.fstat(file).st_ino == inode and offset == 0:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return read(file, buffers, offset)

    monkeypatch.setattr(os, "preadv", fails)
    directory = opened(config(tmp_path))
    assert directory.num_unreadable == 1
    assert "segment-00000000.kv is not used" in caplog.text
    others = [record.header.position for record in directory.scan()]
    assert others, "the other segment's records are available"
    for number in range(10, 30):  # until it is full
        if directory.segment_to_collect() is not None:
            break
        store(directory, number)
    directory.close()
    assert files[0].read_bytes() == content
    assert set(others).isdisjoint(range(8 - len(others)))


def test_segments_of_an_earlier_format_are_dropped_with_one_line(tmp_path, caplog):
    directory = opened(config(tmp_path))
    for number in range(6):
        store(directory, number)
    directory.close()
    page = aligned_buffer(PAGE)
    for number, segment in enumerate(sorted(tmp_path.glob("segment-*"))):
        # contains no description of its records
        fill_page(page, SegmentHeader(b"12345678", number))
        with segment.open("r+b") as file:
            file.write(page)
    assert found(tmp_path) == []
    assert [record.getMessage() for record in caplog.records] == [
        f"{tmp_path}: dropped 2 segments that another release wrote and this one can't read"
    ]


def test_smaller_capacity_removes_the_oldest_segments(tmp_path):
    directory = opened(config(tmp_path, segments=5))
    for number in range(20):
        store(directory, number)
    directory.close()
    assert found(tmp_path, segments=3) == list(range(8, 20))
    assert len(list(tmp_path.glob("segment-*"))) == 3


def test_smaller_segments_keep_to_the_capacity(tmp_path, caplog):
    larger = opened(SsdDirectoryConfig(tmp_path, 6 * SEGMENT, 2 * SEGMENT, min_free_bytes=0))
    for number in range(6):
        store(larger, number)
    larger.close()
    directory = opened(config(tmp_path, segments=6))
    assert list(directory.scan()) == []
    for number in range(24):
        store(directory, number)
    assert directory.append(NBYTES) is None
    directory.close()
    assert sum(path.stat().st_size for path in tmp_path.glob("segment-*")) == 6 * SEGMENT
    assert "dropped 1 segments that are longer" in caplog.messages[-1]


def test_larger_segment_size_keeps_existing_segments(tmp_path):
    smaller = opened(config(tmp_path, segments=6))
    for number in range(6):
        store(smaller, number)
    smaller.close()
    wider = SsdDirectoryConfig(tmp_path, 6 * SEGMENT, 2 * SEGMENT, min_free_bytes=0)
    larger = opened(wider)
    assert [record.header.position for record in larger.scan()] == list(range(6))
    larger.close()


def test_directory_serves_one_store(tmp_path):
    directory = opened(config(tmp_path))
    with pytest.raises(KVConfigError, match="in use by another store"):
        opened(config(tmp_path))
    directory.close()
    opened(config(tmp_path)).close()


@pytest.mark.parametrize("refused", ["mooncake-kv.lock", "segment-00000000.kv"])
def test_user_who_lacks_permission_is_named(tmp_path, monkeypatch, refused):
    (tmp_path / "segment-00000000.kv").touch()
    open_file = os.open

    def refuse(path, *options):
        if path.name == refused:
            raise PermissionError(errno.EACCES, "Permission denied")
        return open_file(path, *options)

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(KVConfigError, match=rf"to the store's user \(uid {os.geteuid()}\)"):
        opened(config(tmp_path))


def test_unusable_directory_is_rejected(tmp_path):
    with pytest.raises(KVConfigError, match="there is no such directory"):
        opened(config(tmp_path / "absent"))
    with pytest.raises(KVConfigError, match="needs 3 or more"):
        opened(config(tmp_path, segments=2))


def test_no_segment_is_added_below_min_free_bytes(tmp_path, caplog):
    opened(config(tmp_path)).close()
    assert "nothing is stored there" not in caplog.text
    directory = opened(SsdDirectoryConfig(tmp_path, 3 * SEGMENT, SEGMENT, min_free_bytes=1 << 60))
    assert "nothing is stored there until its file system has more free space" in caplog.text
    assert directory.append(NBYTES) is None
    directory.close()


def test_directory_whose_free_space_is_unknown_is_unlocked(tmp_path, monkeypatch):
    def refuse(_):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as broken:
        broken.setattr(os, "statvfs", refuse)
        with pytest.raises(KVConfigError, match="the free space can't be determined"):
            opened(config(tmp_path))
    opened(config(tmp_path)).close()


def test_full_disk_is_an_error_of_that_write_and_leaves_no_file(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    directory = opened(config(tmp_path))
    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(StoreIOError, match="No space left"):
        directory.append(NBYTES)
    assert not list(tmp_path.glob("segment-*"))
    monkeypatch.undo()
    location = directory.append(NBYTES)
    monkeypatch.setattr(os, "pwritev", full)
    with pytest.raises(StoreIOError, match="a write failed"):
        directory.write(location, aligned_buffer(PAGE), aligned_buffer(NBYTES))
    monkeypatch.undo()
    assert store(directory, 1).segment is not location.segment, "a scan would end at the hole"
    directory.close()


@pytest.mark.parametrize("what", ["pwritev", "posix_fallocate", "statvfs"])
def test_reads_do_not_wait_for_a_segment_that_is_being_started(tmp_path, monkeypatch, what):
    """Users' pins hold records: under the same lock, a hung drive would block all of them."""
    directory = opened(config(tmp_path))
    for number in range(4):
        location = store(directory, number)
    hangs, over = threading.Event(), threading.Event()
    real = getattr(os, what)

    def hung(*args):
        hangs.set()
        assert over.wait(WAIT_S)
        return real(*args)

    monkeypatch.setattr(os, what, hung)
    begun = []
    thread = threading.Thread(target=lambda: begun.append(directory.append(NBYTES)))
    thread.start()
    assert hangs.wait(WAIT_S)
    assert directory.hold(location)
    directory.release(location)
    assert directory.append(NBYTES, wait_s=0.01) is None
    assert directory.segment_to_collect() is None
    over.set()
    thread.join(WAIT_S)
    assert begun[0].segment is not location.segment
    assert directory.append(NBYTES).segment is begun[0].segment
    directory.close()


def test_collection_waits_for_failed_start_of_segment(tmp_path, monkeypatch):
    """Otherwise concurrent writes that find a full drive mistake each other for one that has
    space."""
    directory = opened(config(tmp_path))
    for number in range(12):
        last = store(directory, number)
    begins, over = threading.Event(), threading.Event()
    can_grow, wait_for = directory._can_grow, directory._begun.wait_for

    def slow():
        begins.set()
        assert over.wait(WAIT_S)
        return can_grow()

    def wait(*args):
        over.set()
        return wait_for(*args)

    monkeypatch.setattr(directory, "_can_grow", slow)
    begun = []
    thread = threading.Thread(target=lambda: begun.append(directory.append(NBYTES)))
    thread.start()
    assert begins.wait(WAIT_S)
    monkeypatch.setattr(directory._begun, "wait_for", wait)
    oldest = directory.segment_to_collect(WAIT_S)
    over.set()
    thread.join(WAIT_S)
    assert begun == [None]
    assert oldest is not None
    assert oldest is not last.segment
    directory.close()


def test_segment_start_is_retried_after_file_system_refused_it(tmp_path, monkeypatch):
    def refuse(*_):
        raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))

    now = 0.0
    directory = opened(config(tmp_path, segments=9), lambda: now)
    for number in range(8):
        store(directory, number)
    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate", refuse)
        with pytest.raises(StoreIOError, match="quota"):
            directory.append(NBYTES)
    assert directory.append(NBYTES) is None
    assert directory.recycle(directory.segment_to_collect())
    for number in range(8, 12):
        store(directory, number)
    now = GROW_RETRY_S
    assert directory.segment_to_collect() is None
    store(directory, 12)
    directory.close()
    assert found(tmp_path, segments=9) == list(range(4, 13))


def test_refused_segment_does_not_disable_direct_io(tmp_path, monkeypatch, caplog):
    directory = opened(config(tmp_path))
    is_direct = directory._is_direct

    def refuse(*_):
        raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))

    with monkeypatch.context() as patch:
        patch.setattr(os, "open", refuse)
        with pytest.raises(StoreIOError, match="quota"):
            directory.append(NBYTES)
    assert directory._is_direct is is_direct
    assert "direct I/O" not in caplog.text
    directory.close()
