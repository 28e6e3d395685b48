"""An instance's use of the pool: a store in this process, and ranks that the test speaks for."""

import threading
from dataclasses import replace
from types import SimpleNamespace

import pytest

from mooncake_hal.kv.geometry import AttentionKind, KVGeometry
from mooncake_hal.session.processes import this_process
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


class RestartedAtWill:
    """A user of a store which says to be another one after it has granted memory."""

    def __init__(self, user):
        self._user = user
        self.restarts = False

    def __getattr__(self, name):
        return getattr(self._user, name)

    @property
    def arena(self):
        arena = self._user.arena
        return replace(arena, epoch="another") if self.restarts else arena

    def reserve(self, chunks, **options):
        granted = self._user.reserve(chunks, **options)
        self.restarts = self.restarts is None
        return granted


class Instance:
    """A pool client of one rank."""

    def __init__(self):
        self.store = NodeStore(NodeStoreConfig(1 << 20))
        user = RestartedAtWill(self.store.open_user())
        self.user, self.writers = user, []
        stores = SimpleNamespace(
            all=[user],
            home=user,
            connect=None,
            hint_rule=None,
            close=user.close,
            name_writers=self.writers.extend,
        )
        self.client = PoolClient(stores, GEOMETRY, IDENTITY, WAIT_S, num_ranks=1)
        self.client.on_rank_message(0, encode(PoolRankReady(this_process())))
        self.is_writing, self.has_copied = threading.Event(), threading.Event()
        self.has_failed = threading.Event()
        self.client.start(self._to_rank, self._posted, fail=lambda exc: None)

    def _to_rank(self, rank, message):
        if isinstance(decode_to_rank(message), SaveRuns):
            self.is_writing.set()

    def _posted(self, event):
        if isinstance(event, ChunksCopied):
            (self.has_copied if event.is_complete else self.has_failed).set()

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


def test_nothing_is_written_to_a_store_that_was_restarted_after_it_granted_memory(instance):
    """What the handles say is of the former one's memory; in this one it is somebody else's."""
    instance.user.restarts = None  # once it has granted
    assert instance.client.save(SaveRequest("save", (b"k" * 16,), 0, (0,)))
    assert instance.has_failed.wait(WAIT_S)
    assert not instance.is_writing.is_set()


def test_stores_are_told_which_processes_write_to_them(instance):
    assert instance.writers == [this_process()]
