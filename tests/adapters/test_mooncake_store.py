"""A real Mooncake Store, its client and its master over tcp: the suite of chunk stores, and engines
that keep their KV there."""

import subprocess
import sys
import time
from pathlib import Path

import pytest
from support.checkpoints import random_model, write_checkpoint
from support.chunk_store_suite import NBYTES, SECRET, ChunkStoreSuite, OpenedPool, chunk
from support.core_runs import random_prompt
from support.pool_engine import CHUNK, SETTINGS, ask, engine, two_turns
from support.ports import free_range

from mooncake_hal.negotiation import Transports
from mooncake_hal.registry import Registry
from mooncake_hal.transport import EndpointOptions
from mooncake_kv.errors import KVConfigError
from mooncake_kv.store.chunk_store import PutRefusal, Residence
from mooncake_kv.store.mooncake_store import MooncakeChunkStore, MooncakeStoreConfig

POOL_BYTES = 32 << 20  # its segments are multiples of 16 MiB


class Master:
    """``mooncake_master`` as a child process."""

    def __init__(self, log):
        self.port, metrics_port = free_range(2)
        program = Path(sys.executable).parent / "mooncake_master"
        command = [program, f"-rpc_port={self.port}", f"-metrics_port={metrics_port}"]
        command += ["-enable_metric_reporting=false", "-default_kv_lease_ttl=50"]
        self.log = log.open("ab")
        self.process = subprocess.Popen(command, stdout=self.log, stderr=self.log)

    def end(self):
        self.process.kill()
        self.process.wait(60)
        self.log.close()


@pytest.fixture
def master(tmp_path):
    master = Master(tmp_path / "master.log")
    yield master
    master.end()


def join(master, segment_bytes):
    """A client, as soon as the master is there."""
    config = MooncakeStoreConfig(
        f"127.0.0.1:{master.port}", segment_bytes=segment_bytes, staging_bytes=4 << 20
    )
    deadline = time.monotonic() + 60
    while True:
        try:
            return MooncakeChunkStore(config)
        except KVConfigError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.2)


class TestMooncakeStore(ChunkStoreSuite):
    @pytest.fixture
    def pool(self, master):
        stores = join(master, POOL_BYTES), join(master, 0)
        opened = []
        for store in stores:
            options = EndpointOptions(secret=SECRET)
            opened.append(Transports.open(Registry.discover(), options, wanted="shm"))
            store.offer(opened[-1])
        yield OpenedPool(*stores, POOL_BYTES)
        for transports in opened:
            transports.close()
        for store in stores:
            store.close()


def test_without_its_master_everything_is_a_miss(master):
    store = join(master, POOL_BYTES)
    master.process.kill()
    assert store.probe([b"key"]).result(60) == [Residence.ABSENT]
    assert store.pin([b"key"]).result(60) == [None]
    assert store.reserve([chunk(1, NBYTES)]).result(60) == [PutRefusal.UNREACHABLE]
    assert store.drop([b"key"]).result(60) == 0
    store.close()


def test_a_master_that_is_not_there_is_said():
    with pytest.raises(KVConfigError, match=r"no `mooncake_master` replies at '127\.0\.0\.1:1'"):
        MooncakeChunkStore(MooncakeStoreConfig("127.0.0.1:1"))


def await_master(master):
    join(master, 0).close()


def test_an_engine_keeps_its_kv_in_a_mooncake_store(master, tmp_path):
    """``--kv-pool mooncake-store=...``: the tokens of an engine without a pool, and those chunks
    loaded that a node store would have had."""
    model = write_checkpoint(random_model("llama"), tmp_path)
    await_master(master)
    pool = f"mooncake-store=127.0.0.1:{master.port},dram=32M,staging=16M,{SETTINGS}"
    with engine(model, None) as core:
        plain, _ = two_turns(core)
    with engine(model, pool) as core:
        pooled, num_cached = two_turns(core)
        stats = core.report().stats.kv_pool
    assert pooled == plain
    assert num_cached == (200 + 39) // CHUNK * CHUNK
    assert (stats.num_loads, stats.num_failed_loads) == (1, 0)


def test_what_one_engine_saved_another_loads_and_a_master_that_dies_is_a_miss(master, tmp_path):
    model, prompt = write_checkpoint(random_model("llama"), tmp_path), random_prompt(3, 200)
    await_master(master)
    address = f"mooncake-store=127.0.0.1:{master.port},staging=16M,{SETTINGS}"
    with engine(model, f"{address},dram=32M") as writer, engine(model, address) as reader:
        first, _ = ask(writer, [prompt])
        second, cached = ask(reader, [prompt])
        assert (second, cached) == (first, [199 // CHUNK * CHUNK])
        assert reader.reset_prefix_cache()
        master.process.kill()
        third, cached = ask(reader, [prompt])
        assert (third, cached) == (first, [0])
