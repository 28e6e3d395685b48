"""Staged transfers between device memory and a store through pinned memory; this process acts as
the device."""

import ctypes
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from threading import Barrier

import numpy as np
import pytest

from mooncake_hal.errors import DeviceError, TransferCancelled
from mooncake_hal.negotiation import Transports
from mooncake_hal.registry import Registry
from mooncake_hal.transport import EndpointOptions, MemoryRegion, Spans
from mooncake_hal.transports.staging import packed_addresses
from mooncake_kv.config import KVTransferConfig
from mooncake_kv.connector_worker import RankContext, RankMemory
from mooncake_kv.pool.device_staging import SLOT_BYTES, DeviceMemory, host_transports
from mooncake_kv.pool.pool_worker import LOAD_THREADS, MAX_MOVES, SAVE_THREADS


class Pinned:
    def __init__(self, nbytes):
        self.memory = np.zeros(nbytes, np.uint8)
        self.address, self.nbytes = self.memory.ctypes.data, nbytes

    def close(self):
        self.memory = None


class Copier:
    def gather(self, addresses, nbytes, host):
        for source, target, size in zip(
            addresses, packed_addresses(host, nbytes), nbytes, strict=True
        ):
            ctypes.memmove(int(target), int(source), int(size))

    def scatter(self, host, addresses, nbytes):
        for target, source, size in zip(
            addresses, packed_addresses(host, nbytes), nbytes, strict=True
        ):
            ctypes.memmove(int(target), int(source), int(size))

    def drain(self):
        pass

    def close(self):
        pass


class Copies:
    def __init__(self):
        self.is_broken = False

    def allocate_pinned(self, nbytes):
        return Pinned(nbytes)

    def copier(self):
        if self.is_broken:
            raise DeviceError("no stream")
        return Copier()


@dataclass
class Store:
    arena: np.ndarray
    endpoints: dict


@pytest.fixture
def store():
    arena = np.zeros(6 * SLOT_BYTES, np.uint8)
    transports = Transports.open(Registry.discover(), EndpointOptions(), wanted="shm")
    transports.register(MemoryRegion(arena.ctypes.data, arena.nbytes))
    yield Store(arena, transports.addresses)
    transports.close()


@pytest.fixture
def copies():
    return Copies()


@pytest.fixture
def device(copies):
    def unused(*_):
        raise AssertionError("not here")

    memory = RankMemory(None, None, None, (MemoryRegion(1, 1, "gpu:0"),), ())
    context = RankContext(
        0, KVTransferConfig(transports=("shm",)), memory, Registry.discover(), *[unused] * 4
    )
    device = DeviceMemory(context, copies, MAX_MOVES)
    yield device
    device.close()


def _spans(memory, arena, sizes):
    """Pieces with gaps, in another order on each side."""
    sizes = np.array(sizes, np.uint64)
    starts = packed_addresses(0, sizes + np.uint64(64))
    local = starts + np.uint64(memory.ctypes.data)
    remote = packed_addresses(arena.ctypes.data, sizes)
    return (
        Spans(local[::-1].copy(), remote, sizes[::-1].copy())
        if len(set(sizes)) == 1
        else Spans(local, remote, sizes)
    )


@pytest.mark.parametrize(
    "sizes",
    [[100], [5, 4096, 77], [3 * SLOT_BYTES + 5, 1000], [300_000] * 40],
    ids=["one piece", "small ones", "larger than a slot", "many slots"],
)
def test_written_chunks_are_read_back(store, device, sizes):
    memory = np.random.default_rng(1).integers(0, 255, sum(sizes) + 64 * len(sizes), np.uint8)
    before = memory.copy()
    peer = device.peer("store", 0, store.endpoints, connection=0, timeout_s=20)
    spans = _spans(memory, store.arena, sizes)
    peer.write(spans, timeout=20).wait()
    assert np.count_nonzero(store.arena) > 0
    for at, size in zip(spans.local, spans.nbytes, strict=True):
        ctypes.memset(int(at), 0, int(size))
    assert not np.array_equal(memory, before)
    peer.read(spans, timeout=20).wait()
    assert np.array_equal(memory, before)


def test_cancelled_or_late_move_transfers_nothing(store, device):
    memory = np.ones(1000, np.uint8)
    peer = device.peer("store", 0, store.endpoints, connection=0, timeout_s=20)
    spans = _spans(memory, store.arena, [900])
    cancelled = peer.write(spans, timeout=20)
    cancelled.cancel()
    with pytest.raises(TransferCancelled):
        cancelled.wait()
    with pytest.raises(TransferCancelled, match="its deadline passed"):
        peer.write(spans, timeout=0).wait()
    assert not store.arena.any()
    peer.write(spans, timeout=20).wait()
    assert store.arena.sum() == 900


def test_transfers_rejected_by_device_free_their_memory(store, device, copies):
    memory = np.ones(1000, np.uint8)
    peer = device.peer("store", 0, store.endpoints, connection=0, timeout_s=20)
    spans = _spans(memory, store.arena, [900])
    copies.is_broken = True
    for move in [peer.read, peer.write] * MAX_MOVES:
        with pytest.raises(DeviceError, match="no stream"):
            move(spans, timeout=20).wait()
    copies.is_broken = False
    peer.write(spans, timeout=20).wait()
    assert store.arena.sum() == 900


def test_threads_for_memory_for_ssds_and_for_saves_move_at_once(store, device, copies, monkeypatch):
    num_threads = 2 * LOAD_THREADS + SAVE_THREADS
    all_copy = Barrier(num_threads)
    monkeypatch.setattr(Copier, "drain", lambda self: all_copy.wait(timeout=20))
    memory = np.ones(1000, np.uint8)
    peer = device.peer("store", 0, store.endpoints, connection=0, timeout_s=20)
    spans = _spans(memory, store.arena, [900])
    with ThreadPoolExecutor(num_threads) as threads:
        for done in [
            threads.submit(peer.write(spans, timeout=20).wait) for _ in range(num_threads)
        ]:
            done.result()


@pytest.mark.parametrize("way", ["read", "write"])
def test_transfer_without_free_memory_times_out(store, device, way):
    memory = np.ones(1000, np.uint8)
    peer = device.peer("store", 0, store.endpoints, connection=0, timeout_s=20)
    taken = [device._free.get() for _ in range(MAX_MOVES)]
    move = getattr(peer, way)(_spans(memory, store.arena, [900]), timeout=0.05)
    with pytest.raises(TransferCancelled, match="other moves held all pinned memory"):
        move.wait()
    for base in taken:
        device._free.put(base)


def test_transports_of_devices_do_not_reach_stores():
    assert host_transports(("cuda_ipc", "tcp", "staged", "mylink")) == ("tcp", "mylink")
