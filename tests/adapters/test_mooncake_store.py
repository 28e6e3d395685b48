"""The suite of chunk stores over a real Mooncake Store: its client, and its master over tcp."""

import subprocess
import sys
import time
from pathlib import Path

import pytest
from support.chunk_store_suite import NBYTES, SECRET, ChunkStoreSuite, OpenedPool, chunk
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
