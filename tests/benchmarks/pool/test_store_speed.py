"""A node store compared with memcpy, the tcp transport and fio, each in the same run and size."""

import json
import secrets
import shutil
import subprocess
import time
from concurrent.futures import Future
from functools import partial
from statistics import median

import numpy as np
import pytest
from support.figures import Figure, record
from support.store_process import Rank, StoreProcess

from mooncake_hal.bench.machine_limits import memcpy_mover
from mooncake_hal.bench.transfer_speed import TransferShape, transport_mover
from mooncake_kv.store.arena_memory import ArenaMemory
from mooncake_kv.store.chunk_store import Chunk, Residence
from mooncake_kv.store.node_store import NodeStore, NodeStoreConfig
from mooncake_kv.store.ssd_config import SsdConfig, SsdDirectoryConfig
from mooncake_kv.store.ssd_reads import ChunkRead
from mooncake_kv.store.ssd_tier import SsdTier

CHUNK = 2 << 20
COUNT = 48
TOTAL = CHUNK * COUNT
ROUNDS = 9
DEPTH = 8
LAYERS = 16
"""Layers of the model whose chunks are read layer by layer."""


class Big(Rank):
    """A rank that moves COUNT chunks at a time."""

    def __init__(self, address, transport):
        super().__init__(address, transport, num_chunks=COUNT, chunk_bytes=CHUNK)
        self.memory[:] = 7
        self.chunks = [Chunk(b"bench-%d" % i, None, 0, CHUNK, 16) for i in range(COUNT)]

    def put_all(self):
        handles = self.client.reserve(self.chunks).result(60)
        arena = self.client.arena
        self.peer(arena).write(self.spans(handles, arena), timeout=60).wait()
        assert all(self.client.commit(handles).result(60))

    def get_all(self):
        handles = self.client.pin([chunk.key for chunk in self.chunks]).result(60)
        arena = self.client.arena
        self.peer(arena).read(self.spans(handles, arena), timeout=60).wait()
        assert all(self.client.release(handles).result(60))


def seconds(call):
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_put_and_get_from_another_process(benchmark, tmp_path, transport):
    store = StoreProcess(tmp_path, "--dram", 2 * TOTAL)
    rank = Big(store.address, transport)
    shape = TransferShape(TOTAL, CHUNK)
    limit_of = (
        memcpy_mover(TOTAL, 2)
        if transport == "shm"
        else transport_mover("tcp", TOTAL, 2, mappable=True)
    )
    gets, puts, limits = [], [], []
    try:
        with limit_of as limit:
            move = limit.prepare(shape, "read")
            for _ in range(ROUNDS):
                puts.append(seconds(rank.put_all))
                gets.append(seconds(rank.get_all))
                limits.append(seconds(move))
                rank.client.drop([chunk.key for chunk in rank.chunks]).result(60)
        benchmark.pedantic(rank.put_all, rounds=1)
    finally:
        rank.close()
        store.end()
    best = median(limits[2:])
    for name, times in (("get", gets), ("put", puts)):
        if transport == "shm" or name == "get":
            found = median(times[2:])
            context = f"{TOTAL / found / 1e9:.2f} against {TOTAL / best / 1e9:.2f} GB/s"
            against = "memcpy" if transport == "shm" else "the transport"
            title = f"store {name} over {transport}/{against}"
            record(benchmark, Figure(title, best / found, 0.9, "x", context=context))


def test_probe_of_64_keys(benchmark):
    store = NodeStore(NodeStoreConfig(64 * 4096))
    user = store.open_user()
    chunks = [Chunk(b"probe-%d" % i, None, 0, 4096, 16) for i in range(64)]
    user.commit(user.reserve(chunks).result())
    keys = [chunk.key for chunk in chunks]
    benchmark(lambda: user.probe(keys).result())
    store.close()
    us = benchmark.stats.stats.median * 1e6
    record(benchmark, Figure("probe of 64 keys, this process", us, 50, "us", at_least=False))


def test_probe_of_64_keys_from_another_process(benchmark, tmp_path):
    store = StoreProcess(tmp_path, "--dram", 64 * 4096)
    rank = Rank(store.address)
    chunks = [Chunk(secrets.token_bytes(16), None, 0, 4096, 16) for _ in range(64)]
    rank.client.commit(rank.client.reserve(chunks).result(60)).result(60)
    keys = [chunk.key for chunk in chunks]
    assert set(rank.client.probe(keys).result(60)) == {Residence.DRAM}
    benchmark(lambda: rank.client.probe(keys).result(60))
    rank.close()
    store.end()
    us = benchmark.stats.stats.median * 1e6
    record(benchmark, Figure("probe of 64 keys, another process", us, 50, "us", at_least=False))


def fio(path, operation, nbytes):
    """GB/s of fio with the same block size and queue depth."""
    command = ["fio", "--name=pool", f"--filename={path}", f"--rw={operation}", "--direct=1"]
    command += [f"--bs={CHUNK}", f"--size={nbytes}", "--ioengine=libaio", f"--iodepth={DEPTH}"]
    done = subprocess.run(
        [*command, "--output-format=json"], capture_output=True, text=True, check=True
    )
    return json.loads(done.stdout)["jobs"][0][operation]["bw_bytes"] / 1e9


@pytest.mark.skipif(shutil.which("fio") is None, reason="fio is not installed: apt-get install fio")
def test_ssds_against_fio(benchmark, tmp_path):
    memory = ArenaMemory(TOTAL)
    np.frombuffer(memory.view(0, TOTAL), np.uint8)[:] = 3
    directory = SsdDirectoryConfig(tmp_path, 4 * TOTAL, TOTAL + (4 << 20), min_free_bytes=0)
    config = SsdConfig((directory,), 0, DEPTH, DEPTH, max_queued_writes=COUNT)
    tier = SsdTier(config, memory.view, time.monotonic, lambda keys: None, lambda chunks: None)
    tier.start()
    file = tmp_path / "fio"
    fio(file, "write", TOTAL)
    found = {"write": [], "read": [], "read, layer by layer": []}
    peers = {"write": [], "read": []}
    chunks = []
    for number in range(8):
        chunks = [Chunk(b"%d-%d" % (number, i), None, 0, CHUNK, 16) for i in range(COUNT)]
        found["write"].append(TOTAL / seconds(partial(write_all, tier, chunks)) / 1e9)
        peers["write"].append(fio(file, "write", TOTAL))
    del found["write"][:3], peers["write"][:3]  # into new segments
    for _ in range(5):
        found["read"].append(TOTAL / seconds(partial(read_all, tier, chunks)) / 1e9)
        by_layer = partial(read_all, tier, chunks, CHUNK // LAYERS)
        found["read, layer by layer"].append(TOTAL / seconds(by_layer) / 1e9)
        peers["read"].append(fio(file, "read", TOTAL))
    tier.close()
    benchmark.pedantic(lambda: None, rounds=1)
    for operation, speeds in found.items():
        ours, theirs = median(speeds), median(peers[operation.partition(",")[0]])
        context = f"{ours:.2f} against {theirs:.2f} GB/s"
        record(benchmark, Figure(f"SSD {operation}/fio", ours / theirs, 0.8, "x", context=context))


def write_all(tier, chunks):
    ended = [Future() for _ in chunks]
    for index, chunk in enumerate(chunks):
        assert tier.admit(chunk)
        tier.write(chunk, index * CHUNK, lambda: True, ended[index].set_result)
    assert all(future.result(120) for future in ended)


def read_all(tier, chunks, first_bytes=None):
    ended = [Future() for _ in chunks]
    tier.read(
        [
            ChunkRead(
                chunk.key,
                index * CHUNK,
                lambda: True,
                lambda nbytes: None,
                ended[index].set_result,
            )
            for index, chunk in enumerate(chunks)
        ],
        first_bytes,
    )
    assert all(future.result(120) for future in ended)
