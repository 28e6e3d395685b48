"""An instance's use of the pool: a store in this process, and ranks that the test speaks for."""

import threading
from types import SimpleNamespace

import pytest

from mooncake_hal.kv.geometry import AttentionKind, KVGeometry
from mooncake_kv.pool.pool_client import PoolClient
from mooncake_kv.pool.pool_events import ChunksCopied, SaveRequest
from mooncake_kv.pool.pool_messages import (
    PoolRankReady,
    RunsEnded,
    SaveRuns,
    decode_to_rank,
    encode,
)
from mooncake_kv.store.chunk_keys import KVIdentity
from mooncake_kv.store.node_store import NodeStore, NodeStoreConfig

WAIT_S = 60
GEOMETRY = KVGeometry(AttentionKind.GQA, 1, 1, (4, 4), "float32", 4)
IDENTITY = KVIdentity("model", "float32", 4)


class Instance:
    """A pool client of one rank."""

    def __init__(self):
        self.store = NodeStore(NodeStoreConfig(1 << 20))
        user = self.store.open_user()
        stores = SimpleNamespace(all=[user], home=user, connect=None, close=user.close)
        self.client = PoolClient(stores, GEOMETRY, IDENTITY, WAIT_S, num_ranks=1)
        self.client.on_rank_message(0, encode(PoolRankReady()))
        self.is_writing, self.has_copied = threading.Event(), threading.Event()
        self.client.start(self._to_rank, self._posted, fail=lambda exc: None)

    def _to_rank(self, rank, message):
        if isinstance(decode_to_rank(message), SaveRuns):
            self.is_writing.set()

    def _posted(self, event):
        if isinstance(event, ChunksCopied) and event.is_complete:
            self.has_copied.set()

    def save(self):
        """Save a chunk; returns when the rank is told to write it."""
        assert self.client.save(SaveRequest("save", (b"k" * 16,), 0, (0,)))
        assert self.is_writing.wait(WAIT_S)

    @property
    def num_staging(self):
        return self.store.stats().num_staging


@pytest.fixture
def instance():
    made = Instance()
    yield made
    made.client.close()
    assert made.num_staging == 0
    made.store.check_integrity()
    made.store.close()


def test_memory_that_a_rank_may_be_writing_is_not_given_back_when_the_instance_stops(instance):
    """The store would have another user write there, and late bytes would land in that chunk."""
    instance.save()
    instance.client.stop()
    assert instance.num_staging == 1


def test_what_a_rank_has_written_is_given_back_when_the_instance_stops(instance):
    instance.save()
    instance.client.on_rank_message(0, encode(RunsEnded("save", None, 0, 0.0, 0.0)))
    assert instance.has_copied.wait(WAIT_S)
    instance.client.stop()
    assert instance.num_staging == 0
