"""Probes without a message: another process reads from the index what the store holds."""

import os
import random
import struct
import subprocess
import sys
import threading

import pytest

from mooncake_kv.store.arena_allocator import GRANULE
from mooncake_kv.store.chunk_store import Chunk, IndexInfo, Residence, Tier
from mooncake_kv.store.node_store import NodeStore, NodeStoreConfig
from mooncake_kv.store.residence_index import (
    _LEFT_OUT_WORD,
    BUCKET_WORDS,
    IndexObserver,
    ResidenceIndex,
    ResidenceView,
)
from mooncake_kv.store.ssd_config import SsdConfig, SsdDirectoryConfig

EPOCH = "0123456789abcdef"


@pytest.fixture
def index():
    index = ResidenceIndex(1 << 20, EPOCH)
    yield index
    index.close()


def key(number):
    return random.Random(number).randbytes(16)


def test_tiers_are_distinguished_and_memory_has_precedence(index):
    view = ResidenceView.open(index.info, EPOCH)
    found = []
    for where, is_there in [
        (Residence.SSD, True),
        (Residence.STAGING, True),
        (Residence.DRAM, True),
        (Residence.STAGING, False),
        (Residence.SSD, False),
        (Residence.DRAM, False),
    ]:
        index.mark([key(1)], where, is_there)
        found += view.probe([key(1)])
    expected = ["ssd", "staging", "dram", "dram", "dram", "absent"]
    assert [where.value for where in found] == expected
    assert view.probe([b"short", b"a key that is longer than a hash"]) == [Residence.ABSENT] * 2
    index.mark([b"short"], Residence.DRAM)
    assert view.probe([key(1), b"short"]) == [Residence.ABSENT, Residence.DRAM]


def test_key_outside_the_index_is_probed_by_message(index, monkeypatch):
    monkeypatch.setattr("mooncake_kv.store.residence_index._place", lambda *_: (512, 520, 8))
    view = ResidenceView.open(index.info, EPOCH)
    assert view.probe([key(99)]) == [Residence.ABSENT]
    places = iter(range(1, 100))
    monkeypatch.setattr(
        "mooncake_kv.store.residence_index._place", lambda *_: (512, 520, next(places) << 3)
    )
    for number in range(18):
        index.mark([key(number)], Residence.DRAM)
    assert view.probe([key(99)]) is None, "two keys are not indexed, and this may be one of them"
    for number in (16, 17):
        index.mark([key(number)], Residence.SSD)
        index.mark([key(number)], Residence.DRAM, False)
    assert view.probe([key(99)]) is None
    for number in (16, 17):
        index.mark([key(number)], Residence.SSD, False)
    assert view.probe([key(99)]) == [Residence.ABSENT]


@pytest.fixture(params=["compiled", "interpreted"])
def how(request, monkeypatch):
    if request.param == "interpreted":
        monkeypatch.setattr("mooncake_kv.store.residence_index._compiled", lambda: None)


def test_batch_keys_outside_the_index_are_probed_by_message(index, how):
    view, crowd = (
        ResidenceView.open(index.info, EPOCH),
        [struct.pack("<QQ", 0, n << 3) for n in range(1, 31)],
    )
    index.mark(crowd, Residence.DRAM)
    assert view.probe([crowd[0]]) == [Residence.DRAM]
    assert view.probe([key(99)]) is None, "one bucket is full"
    assert index._words[_LEFT_OUT_WORD] == len(crowd) - BUCKET_WORDS
    index.mark(crowd, Residence.SSD)
    index.mark(crowd, Residence.DRAM, False)
    assert view.probe(crowd[:BUCKET_WORDS]) == [Residence.SSD] * BUCKET_WORDS
    index.mark(crowd, Residence.SSD, False)
    assert view.probe([key(99), *crowd]) == [Residence.ABSENT] * (1 + len(crowd))


def test_batch_is_indexed_like_its_single_chunks(index, how):
    view = ResidenceView.open(index.info, EPOCH)
    keys = [key(number) for number in range(2_000)]  # of 8,192 words
    for at in range(0, len(keys), 2):
        index.mark([keys[at]], Residence.SSD)
    for at in range(0, len(keys), 500):
        index.stage(keys[at : at + 500])
    assert view.probe(keys) == [Residence.STAGING] * len(keys)
    index.settle(keys[:1_500])
    for each in keys[1_500:]:
        index.unstage(each)
    found = view.probe(keys)
    assert found[:1_500] == [Residence.DRAM] * 1_500
    assert found[1_500:] == [Residence.SSD, Residence.ABSENT] * 250
    index.mark(keys, Residence.DRAM, False)
    assert view.probe(keys) == [Residence.SSD, Residence.ABSENT] * 1_000


def test_foreign_file_is_not_mapped_as_an_index(index, tmp_path):
    file = tmp_path / "file"
    file.write_bytes(bytes(1 << 17))
    descriptor = os.memfd_create("mooncake-kv-index")
    os.ftruncate(descriptor, index.info.nbytes)
    nbytes = index.info.nbytes
    for path in (str(file), "/proc/self/fd/1", "/proc/1/fd/99999", f"/proc/self/fd/{descriptor}"):
        assert ResidenceView.open(IndexInfo(path, nbytes), EPOCH) is None
    assert ResidenceView.open(index.info, "another store's!") is None
    assert ResidenceView.open(IndexInfo(index.info.path, nbytes * 2), EPOCH) is None
    os.close(descriptor)


def test_index_agrees_with_its_store_through_ten_thousand_changes(tmp_path):
    directory = SsdDirectoryConfig(tmp_path, 8 << 20, 1 << 20, min_free_bytes=0)
    config = NodeStoreConfig(24 * GRANULE, ssd=SsdConfig((directory,)), quarantine_s=0.0)
    store = NodeStore(config)
    user, view = store.open_user(), ResidenceView.open(store.arena.index, store.epoch)
    draw = random.Random(5)
    chunks = [Chunk(key(n), None, 0, GRANULE * (1 + n % 3), 16) for n in range(40)]
    keys, writes = [chunk.key for chunk in chunks], []
    for _ in range(10_000):
        chunk = draw.choice(chunks)
        writes += [h for h in user.reserve([chunk]).result() if not isinstance(h, str)]
        if writes and draw.random() < 0.8:
            end = draw.choice([user.commit, user.commit, user.abort])
            end([writes.pop(draw.randrange(len(writes)))])
        if draw.random() < 0.05:
            user.drop([draw.choice(keys)])
        user.touch([draw.choice(keys)])
    user.abort(writes)
    user.commit([h for h in user.reserve(chunks).result() if not isinstance(h, str)])
    store._moves.tier.close()  # the pending writes have completed now
    found = view.probe(keys)
    assert found == store.probe(keys)
    assert {Residence.DRAM, Residence.SSD} <= set(found)
    user.close()
    store.close()


def test_reader_never_sees_a_torn_state(index):
    """While a writer changes words all the time, each is read in its old or its new state."""
    view, stop = ResidenceView.open(index.info, EPOCH), threading.Event()
    still, moving = [key(n) for n in range(200)], [key(n) for n in range(200, 400)]
    for name in still:
        index.mark([name], Residence.SSD)

    def change():
        while not stop.is_set():
            for name in moving:
                index.mark([name], Residence.DRAM)
            for name in moving:
                index.mark([name], Residence.DRAM, False)

    writer = threading.Thread(target=change)
    writer.start()
    try:
        for _ in range(500):
            assert set(view.probe(still)) == {Residence.SSD}
            assert set(view.probe(moving)) <= {Residence.DRAM, Residence.ABSENT}
    finally:
        stop.set()
        writer.join()


def test_another_process_reads_it(index):
    index.mark([key(1)], Residence.DRAM)
    program = (
        "from mooncake_kv.store.residence_index import *\n"
        "from mooncake_kv.store.chunk_store import IndexInfo\n"
        f"view = ResidenceView.open(IndexInfo({index.info.path!r}, {index.info.nbytes}), "
        f"{EPOCH!r})\nprint(*(found.value for found in view.probe([{key(1)!r}, {key(2)!r}])))"
    )
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout == "dram absent\n"


def test_next_observer_receives_the_same_notifications(index):
    notifications = []

    class Follower:
        def stored(self, tier, chunks):
            notifications.append(("stored", tier, *(chunk.key for chunk in chunks)))

        def removed(self, tier, keys):
            notifications.append(("removed", tier, *keys))

    observer = IndexObserver(index, Follower())
    observer.stored(Tier.DRAM, [Chunk(key(n), None, 0, 1, 1) for n in (1, 2)])
    observer.removed(Tier.DRAM, [key(1)])
    expected = [
        ("stored", Tier.DRAM, key(1), key(2)),
        ("removed", Tier.DRAM, key(1)),
    ]
    assert notifications == expected
