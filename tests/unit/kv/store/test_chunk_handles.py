"""Handles on chunks: granted together, ended one by one."""

import pytest

from mooncake_kv.store.chunk_handles import ChunkHandles, ChunkState, Entry
from mooncake_kv.store.chunk_store import Chunk

ANNA, BERT = 1, 2


def entry(name, state=ChunkState.READY):
    return Entry(Chunk(name.encode(), None, 0, 1, 1), 0, 0, state, 0.0, "")


def names(entries):
    return [None if each is None else each.chunk.key.decode() for each in entries]


def test_handles_of_one_grant_end_one_by_one_and_only_for_their_user():
    handles = ChunkHandles()
    a, b, c = handles.grant([entry("a"), entry("b"), entry("c")], ANNA, 10.0, is_write=False)
    assert names(handles.take([b, b, 7], ANNA, is_write=False)) == ["b", None, None]
    assert names(handles.take([a], BERT, is_write=False)) == [None]
    assert names(handles.take([a], ANNA, is_write=True)) == [None]
    assert [handles.is_held(each, ANNA, 9.0) for each in (a, b, c)] == [True, False, True]
    assert not handles.is_held(a, ANNA, 10.0)
    handles.check_integrity()
    (late,) = handles.expired(10.0)
    assert names(late.entries.values()) == ["a", "c"]
    assert names(handles.take([a, c], ANNA, is_write=False)) == [None, None]
    assert list(handles.all()) == []


def test_late_write_keeps_its_handle():
    handles = ChunkHandles()
    written = entry("w", ChunkState.STAGING)
    (handle,) = handles.grant([written], ANNA, 1.0, is_write=True)
    assert len(list(handles.expired(1.0))) == 1
    with pytest.raises(AssertionError, match="no deadline"):
        handles.check_integrity()
    written.state = ChunkState.ABANDONED
    handles.check_integrity()
    assert list(handles.expired(99.0)) == []
    assert handles.take([handle], ANNA, is_write=True) == [written]


def test_reads_last_longer_when_they_are_extended():
    handles = ChunkHandles()
    a, b = handles.grant([entry("a"), entry("b")], ANNA, 1.0, is_write=False)
    handles.extend([b, 7], ANNA, 5.0)
    assert names(next(handles.expired(1.0)).entries.values()) == ["a"]
    assert [handles.is_held(each, ANNA, 4.0) for each in (a, b)] == [False, True]
    assert names(next(handles.expired(5.0)).entries.values()) == ["b"]


def test_ending_a_user_ends_its_reads_and_writes(monkeypatch):
    monkeypatch.setattr("mooncake_kv.store.chunk_handles.MAX_HANDLES_PER_USER", 3)
    handles = ChunkHandles()
    handles.grant([entry("a")], ANNA, 1.0, is_write=False)
    assert len(handles.grant([entry("b"), entry("c"), entry("d")], ANNA, 1.0, is_write=True)) == 2
    assert (handles.num_left(ANNA), handles.num_left(BERT)) == (0, 3)
    ended = [(each.chunk.key, is_write) for each, is_write in handles.end_user(ANNA)]
    assert ended == [(b"a", False), (b"b", True), (b"c", True)]
    assert handles.num_left(ANNA) == 3
    assert [len(lease.entries) for lease in handles.expired(1.0)] == [0, 0]
