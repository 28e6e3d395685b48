"""The conformance suite of ``ChunkStore``: for a store in this process, one in another process, and
adapters of third-party stores.

A subclass defines ``pool``: a fixture that returns an ``OpenedPool``.
"""

import random
import threading
import time
from dataclasses import dataclass

import numpy as np

from mooncake_hal.negotiation import Transports
from mooncake_hal.registry import Registry
from mooncake_hal.transport import EndpointOptions, MemoryRegion, Spans
from mooncake_kv.store.chunk_store import (
    Chunk,
    ChunkStore,
    PutRefusal,
    ReadHandle,
    Residence,
    WriteHandle,
)

WAIT_S = 60
NBYTES = 64 << 10
SECRET = b"secret"


class Rank:
    """Registered memory that exchanges chunks with a store over shm."""

    def __init__(self, store):
        self.store = store
        self.transports = Transports.open(
            Registry.discover(), EndpointOptions(secret=SECRET), wanted="shm"
        )
        self.memory = np.zeros(NBYTES, np.uint8)
        self.transports.register(MemoryRegion(self.memory.ctypes.data, NBYTES))
        self.peer = self.transports.connect(store.arena.endpoints, timeout=30).peer

    def _spans(self, handle):
        rows = (self.memory.ctypes.data, self.store.arena.address + handle.offset, handle.nbytes)
        return Spans(*(np.array([value], np.uint64) for value in rows))

    def write(self, handle, content):
        self.memory[: handle.nbytes] = content
        self.peer.write(self._spans(handle), timeout=30).wait()

    def read(self, handle):
        self.memory[:] = 0
        self.peer.read(self._spans(handle), timeout=30).wait()
        return self.memory[: handle.nbytes].copy()

    def close(self):
        self.transports.close()


@dataclass
class OpenedPool:
    """Two clients of one pool; ``nbytes`` is roughly the pool's capacity."""

    store: ChunkStore
    other: ChunkStore
    nbytes: int


def chunk(number, nbytes=NBYTES):
    return Chunk(number.to_bytes(16, "big"), None, 0, nbytes, 16)


def content(number, nbytes=NBYTES):
    return np.resize(np.frombuffer(b"<%d>" % number * 7, np.uint8), nbytes)


def put(rank, *chunks):
    """Whether each chunk is stored now, including those that the pool had before."""
    grants = rank.store.reserve(chunks).result(WAIT_S)
    stored = [grant is PutRefusal.PRESENT for grant in grants]
    for index, grant in enumerate(grants):
        if isinstance(grant, WriteHandle):
            rank.write(grant, content(int.from_bytes(grant.key, "big"), grant.nbytes))
            stored[index] = rank.store.commit([grant]).result(WAIT_S)[0]
    return stored


def get(rank, *keys):
    """Whether each key was a hit; the bytes of a hit must be right."""
    handles = rank.store.pin(keys).result(WAIT_S)
    hits = []
    for key, handle in zip(keys, handles, strict=True):
        found = rank.read(handle) if handle is not None else None
        is_hit = handle is not None and rank.store.release([handle]).result(WAIT_S) == [True]
        if is_hit:
            right = content(int.from_bytes(key, "big"), handle.nbytes)
            assert np.array_equal(found, right), "bytes of another key"
        hits.append(is_hit)
    return hits


def absent(store, number):
    return store.probe([chunk(number).key]).result(WAIT_S) == [Residence.ABSENT]


class ChunkStoreSuite:
    """The cases. Keys differ from case to case, so that a pool may outlive one case."""

    def ranks(self, pool):
        return Rank(pool.store), Rank(pool.other)

    def test_await_bytes_of_chunks_in_memory_returns_at_once(self, pool):
        writer, reader = self.ranks(pool)
        assert put(writer, chunk(301), chunk(302)) == [True, True]
        keys = [chunk(number).key for number in (301, 302, 309)]
        first, second, missing = pool.other.pin(keys, first_bytes=1).result(WAIT_S)
        assert missing is None
        for beyond in (0, NBYTES - 1, NBYTES):
            assert pool.other.await_bytes([first, second], beyond).result(WAIT_S) == NBYTES
        assert np.array_equal(reader.read(second), content(302))
        assert pool.other.release([first, second]).result(WAIT_S) == [True, True]
        for rank in (writer, reader):
            rank.close()

    def test_chunks_are_shared_between_clients(self, pool):
        writer, reader = self.ranks(pool)
        chunks = [chunk(1), chunk(2, NBYTES // 4)]
        assert put(writer, *chunks) == [True, True]
        assert get(reader, chunks[0].key, chunk(9).key, chunks[1].key) == [True, False, True]
        found = pool.other.probe([chunk(1).key, chunk(9).key]).result(WAIT_S)
        assert found == [Residence.DRAM, Residence.ABSENT]
        for rank in (writer, reader):
            rank.close()

    def test_uncommitted_chunk_is_a_miss(self, pool):
        (grant,) = pool.store.reserve([chunk(11)]).result(WAIT_S)
        assert pool.other.pin([chunk(11).key]).result(WAIT_S) == [None]
        assert pool.other.probe([chunk(11).key]).result(WAIT_S) != [Residence.DRAM]
        assert pool.store.reserve([chunk(11)]).result(WAIT_S) == [PutRefusal.STAGING]
        assert pool.store.abort([grant]).result(WAIT_S) == [True]
        assert absent(pool.other, 11)

    def test_aborted_chunk_can_be_put(self, pool):
        rank = Rank(pool.store)
        grants = pool.store.reserve([chunk(21)]).result(WAIT_S)
        pool.store.abort(grants).result(WAIT_S)
        assert put(rank, chunk(21)) == [True]
        assert get(rank, chunk(21).key) == [True]
        rank.close()

    def test_present_chunk_is_not_reserved_again(self, pool):
        rank = Rank(pool.store)
        put(rank, chunk(31))
        for store in (pool.store, pool.other):
            assert store.reserve([chunk(31)]).result(WAIT_S) == [PutRefusal.PRESENT]
        rank.close()

    def test_handle_is_valid_once(self, pool):
        rank = Rank(pool.store)
        (grant,) = pool.store.reserve([chunk(41)]).result(WAIT_S)
        rank.write(grant, content(41))
        assert pool.store.commit([grant]).result(WAIT_S) == [True]
        assert pool.store.commit([grant]).result(WAIT_S) == [False]
        assert pool.store.abort([grant]).result(WAIT_S) == [False]
        (handle,) = pool.store.pin([chunk(41).key]).result(WAIT_S)
        assert pool.store.release([handle]).result(WAIT_S) == [True]
        assert pool.store.release([handle]).result(WAIT_S) == [False]
        rank.close()

    def test_commit_after_the_deadline_fails(self, pool):
        rank = Rank(pool.store)
        (late,) = pool.store.reserve([chunk(51)], lease_s=0.01).result(WAIT_S)
        time.sleep(0.05)
        assert put(rank, chunk(51)) == [True], "another writer may start over"
        rank.write(late, content(52))
        assert pool.store.commit([late]).result(WAIT_S) == [False]
        assert get(rank, chunk(51).key) == [True]
        rank.close()

    def test_release_after_the_deadline_reports_failure(self, pool):
        rank = Rank(pool.store)
        put(rank, chunk(61))
        (handle,) = pool.store.pin([chunk(61).key], lease_s=0.01).result(WAIT_S)
        time.sleep(0.05)
        assert pool.store.release([handle]).result(WAIT_S) == [False]
        assert get(rank, chunk(61).key) == [True]
        rank.close()

    def test_dropped_chunk_is_a_miss(self, pool):
        rank = Rank(pool.store)
        put(rank, chunk(71), chunk(72))
        assert pool.other.drop([chunk(71).key, chunk(79).key]).result(WAIT_S) == 1
        assert get(rank, chunk(71).key, chunk(72).key) == [False, True]
        rank.close()

    def test_chunk_larger_than_the_pool_is_rejected(self, pool):
        grants = pool.store.reserve([chunk(81, pool.nbytes * 4)]).result(WAIT_S)
        assert grants == [PutRefusal.TOO_LARGE]

    def test_empty_requests_have_empty_results(self, pool):
        assert pool.store.probe([]).result(WAIT_S) == []
        assert pool.store.pin([]).result(WAIT_S) == []
        assert pool.store.release([]).result(WAIT_S) == []
        assert pool.store.drop([]).result(WAIT_S) == 0

    def test_putting_more_than_the_capacity_evicts(self, pool):
        writer, reader = self.ranks(pool)
        count = 3 * pool.nbytes // NBYTES
        for number in range(1000, 1000 + count):
            put(writer, chunk(number))
        hits = [get(reader, chunk(n).key)[0] for n in range(1000, 1000 + count)]
        assert 0 < sum(hits) < count
        for rank in (writer, reader):
            rank.close()

    def test_concurrent_clients_get_right_bytes(self, pool):
        errors, hits = [], []

        def run(seed):
            rank, draw = Rank((pool.store, pool.other)[seed % 2]), random.Random(seed)
            try:
                for _ in range(60):
                    number = draw.randrange(2000, 2012)
                    if draw.random() < 0.4:
                        put(rank, chunk(number))
                    elif draw.random() < 0.1:
                        rank.store.drop([chunk(number).key]).result(WAIT_S)
                    else:
                        hits.extend(get(rank, chunk(number).key))
            except BaseException as exc:  # thread top
                errors.append(exc)
            finally:
                rank.close()

        threads = [threading.Thread(target=run, args=(seed,)) for seed in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(WAIT_S)
        assert not errors, errors
        assert any(hits)

    def test_stats_count_puts_hits_and_misses(self, pool):
        rank = Rank(pool.store)
        before = pool.store.stats().result(WAIT_S)
        put(rank, chunk(91))
        get(rank, chunk(91).key, chunk(99).key)
        found = pool.store.stats().result(WAIT_S)
        assert found.num_puts - before.num_puts == 1
        assert found.num_dram_hits - before.num_dram_hits == 1
        assert found.num_misses - before.num_misses == 1
        assert (found.num_pins, found.num_staging) == (0, 0)
        rank.close()

    def test_reservation_of_closed_client_is_aborted(self, pool):
        (grant,) = pool.other.reserve([chunk(101)]).result(WAIT_S)
        assert isinstance(grant, WriteHandle)
        pool.other.close()
        pool.other.close()
        rank = Rank(pool.store)
        assert put(rank, chunk(101)) == [True]
        assert get(rank, chunk(101).key) == [True]
        rank.close()

    def test_read_handle_has_key_size_and_lease(self, pool):
        rank = Rank(pool.store)
        put(rank, chunk(111))
        (handle,) = pool.store.pin([chunk(111).key], lease_s=5).result(WAIT_S)
        assert isinstance(handle, ReadHandle)
        assert (handle.key, handle.nbytes, handle.lease_s) == (chunk(111).key, NBYTES, 5)
        assert handle.offset % 4096 == 0
        pool.store.release([handle]).result(WAIT_S)
        rank.close()
