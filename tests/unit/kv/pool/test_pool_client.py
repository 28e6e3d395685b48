"""An instance's use of the pool: a store in this process, and ranks played by the test."""

import threading
import time
from concurrent.futures import Future
from dataclasses import replace
from queue import Queue
from types import SimpleNamespace

import pytest

from mooncake_hal.kv.geometry import AttentionKind, KVGeometry
from mooncake_hal.session.processes import this_process
from mooncake_kv.errors import Fatal, KVTransferError
from mooncake_kv.pool import pool_client, rank_orders
from mooncake_kv.pool.pool_client import PoolClient
from mooncake_kv.pool.pool_events import (
    ChunksCopied,
    ChunksFound,
    ChunkSource,
    LoadRequest,
    PoolLoadEnded,
    SaveRequest,
)
from mooncake_kv.pool.pool_messages import (
    LoadRuns,
    PoolRankReady,
    RunsEnded,
    SaveRuns,
    decode_to_rank,
    encode,
)
from mooncake_kv.store.chunk_keys import KVIdentity
from mooncake_kv.store.chunk_store import CopyTerms, PutRefusal, Residence, Tier, WriteHandle
from mooncake_kv.store.node_store import NodeStore, NodeStoreConfig

WAIT_S = 60
KEY = b"k" * 16
FAILED = {"error": "late", "nbytes": 0}
GEOMETRY = KVGeometry(AttentionKind.GQA, 1, 1, (4, 4), "float32", 4)
IDENTITY = KVIdentity("model", "float32", 4)


class RestartedAtWill:
    """A store user whose store seems to restart after it has granted memory."""

    def __init__(self, user):
        self._user = user
        self.restarts = False
        self.is_away = False

    def __getattr__(self, name):
        return getattr(self._user, name)

    @property
    def arena(self):
        arena = None if self.is_away else self._user.arena
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
        self.ordered, self.copied = Queue(), Queue()
        self.loading, self.ends, self.failures = Queue(), Queue(), Queue()
        self.client.start(self._to_rank, self._posted, self.failures.put)

    def _to_rank(self, rank, message):
        order = decode_to_rank(message)
        if isinstance(order, SaveRuns):
            self.ordered.put(order.save_id)
            self.is_writing.set()
        elif isinstance(order, LoadRuns):
            self.loading.put(order.load_id)

    def _posted(self, event):
        if isinstance(event, PoolLoadEnded):
            self.ends.put(event.error)
        if isinstance(event, ChunksCopied):
            self.copied.put(event.save_id)
            (self.has_copied if event.is_complete else self.has_failed).set()

    def save(self):
        """Save a chunk; returns when the rank has been ordered to write it."""
        assert self.client.save(SaveRequest("save", (b"k" * 16,), 0, (0,)))
        assert self.is_writing.wait(WAIT_S)

    def load(self, timeout_s, keys=(KEY,), **report):
        """Load a chunk that the store holds; returns the result that the rank reports."""
        home = [ChunkSource(0, Tier.DRAM)] * len(keys)
        self.client.start_load(LoadRequest("load", "r", keys, home, 0, 1, (0,), timeout_s, 0))
        ended = RunsEnded(self.loading.get(timeout=WAIT_S), **report)
        self.client.on_rank_message(0, encode(ended))
        return self.ends.get(timeout=WAIT_S)

    def estimate(self):
        """Estimated seconds to load the three tokens of the chunk that the device does not hold."""
        nbytes = self.client.chunk_bytes * 3 // 4
        return self.client.load_costs.seconds(ChunkSource(0, Tier.DRAM), nbytes, time.monotonic())

    def await_saves(self):
        self.await_that(lambda: not self.client.stats.saves_in_flight)

    def await_that(self, holds):
        deadline = time.monotonic() + WAIT_S
        while not holds():
            assert time.monotonic() < deadline
            time.sleep(0.001)

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


def test_memory_a_rank_may_be_writing_is_not_freed_at_shutdown(instance):
    """Otherwise the store would grant it to another user, and late bytes would corrupt that
    chunk."""
    instance.save()
    instance.client.stop()
    assert instance.num_staging == 1
    instance.client.on_rank_message(0, encode(RunsEnded("save", None, 0, 0.0)))  # ranks still run
    assert instance.num_staging == 1


def test_memory_of_a_copied_save_is_freed_when_the_instance_stops(instance):
    instance.save()
    instance.client.on_rank_message(0, encode(RunsEnded("save", None, 0, 0.0, 0.0)))
    assert instance.has_copied.wait(WAIT_S)
    instance.client.stop()
    assert instance.num_staging == 0


def test_completed_saves_do_not_block_pending_ones(instance):
    """A core processes replies between two steps, and each step may bring as many saves as it has
    prompts."""
    num_saves = pool_client.SAVES_AT_ONCE + 3
    for number in range(num_saves):
        assert instance.client.save(SaveRequest(f"save{number}", (b"%16d" % number,), 0, (0,)))
    for _ in range(num_saves):
        report = RunsEnded(instance.ordered.get(timeout=WAIT_S), None, 0, 0.0, 0.0)
        instance.client.on_rank_message(0, encode(report))
    for _ in range(num_saves):
        instance.client.end_save(instance.copied.get(timeout=WAIT_S), is_unchanged=True)
    instance.await_saves()
    assert instance.client.stats.num_saved_chunks == num_saves


def test_saving_continues_after_saves_that_a_rank_does_not_report(instance, monkeypatch, caplog):
    """Their memory stays reserved until it does: the rank may still write to it."""
    client, num_silent = instance.client, pool_client.SAVES_AT_ONCE
    monkeypatch.setattr(rank_orders, "REPORT_TIMEOUT_S", 0.5 - WAIT_S)
    for number in range(num_silent):
        assert client.save(SaveRequest(f"save{number}", (b"%16d" % number,), 0, (0,)))
    for _ in range(num_silent):
        instance.ordered.get(timeout=WAIT_S)
        instance.copied.get(timeout=WAIT_S)
    monkeypatch.undo()
    assert client.save(SaveRequest("last", (KEY,), 0, (0,)))
    assert instance.ordered.get(timeout=WAIT_S) == "last"
    client.on_rank_message(0, encode(RunsEnded("last", None, 0, 0.0)))
    assert instance.copied.get(timeout=WAIT_S) == "last"
    client.end_save("last", is_unchanged=True)
    instance.await_saves()
    assert client.stats.num_saved_chunks == 1
    assert client.stats.num_save_refusals == {"failed": num_silent}
    assert "ranks [0] sent no report of save0 within 0.5 s" in caplog.text
    assert instance.num_staging == num_silent
    for number in range(num_silent):
        client.on_rank_message(0, encode(RunsEnded(f"save{number}", None, 0, 0.0)))
    instance.await_that(lambda: instance.num_staging == 0)
    assert client.stats.num_saved_chunks == 1
    assert instance.failures.empty()


@pytest.mark.parametrize("is_late", [False, True])
@pytest.mark.parametrize("may_still_arrive", [False, True])
def test_memory_of_a_failed_save_is_quarantined_if_its_data_may_still_arrive(
    instance, monkeypatch, may_still_arrive, is_late
):
    monkeypatch.setattr(rank_orders, "REPORT_TIMEOUT_S", 0.1 - WAIT_S if is_late else WAIT_S)
    instance.save()
    if is_late:
        assert instance.copied.get(timeout=WAIT_S) == "save"
    failed = RunsEnded("save", "late", 0, 0.0, may_still_arrive=may_still_arrive)
    instance.client.on_rank_message(0, encode(failed))
    instance.await_saves()
    instance.await_that(lambda: instance.num_staging == 0)
    assert (instance.store.stats().quarantine_bytes > 0) == may_still_arrive


def test_load_that_a_rank_does_not_report_ends_the_instance(instance, monkeypatch):
    """The rank may still write to the blocks, so they must not be freed."""
    instance.save()
    instance.client.on_rank_message(0, encode(RunsEnded("save", None, 0, 0.0)))
    instance.copied.get(timeout=WAIT_S)
    instance.client.end_save("save", is_unchanged=True)
    instance.await_saves()
    home = ChunkSource(0, Tier.DRAM)
    monkeypatch.setattr(rank_orders, "REPORT_TIMEOUT_S", 0.5 - WAIT_S)
    load = LoadRequest("load", "r", (KEY,), (home,), 0, 0, (0,), WAIT_S, None)
    instance.client.start_load(load)
    dead = instance.failures.get(timeout=WAIT_S)
    assert dead.fatal is Fatal.MEMORY_MAY_CHANGE
    assert "ranks [0] sent no report of load within 0.5 s" in str(dead)
    assert instance.ends.empty()


def test_rejected_chunk_is_counted_once(instance, monkeypatch):
    monkeypatch.setattr(pool_client, "MAX_SAVES", 1)
    keys = tuple(b"%16d" % number for number in range(4))
    instance.save()
    assert not instance.client.save(SaveRequest("second", keys[:3], 1, (0,)))
    assert not instance.client.save(SaveRequest("again", keys, 1, (0,), num_refused=2))
    assert instance.client.stats.num_save_refusals == {"busy": 3}
    instance.client.on_rank_message(0, encode(RunsEnded("save", "no", 0, 0.0, 0.0)))
    instance.await_saves()
    instance.user.is_away = True
    assert not instance.client.save(SaveRequest("third", keys, 0, (0,)))
    assert instance.client.stats.num_save_refusals == {"busy": 3, "failed": 1, "unreachable": 4}


def test_chunks_without_memory_are_reported_and_counted_once(instance, monkeypatch):
    size = instance.client.chunk_bytes
    grants = [WriteHandle(1, b"a" * 16, 0, size, 1, 9.0), *[PutRefusal.NO_SPACE] * 2]
    answer = Future()
    answer.set_result(grants)
    monkeypatch.setattr(instance.user, "reserve", lambda *_, **__: answer, raising=False)
    events = Queue()
    monkeypatch.setattr(instance.client, "_post", events.put)
    keys = tuple(b"%16d" % number for number in range(4))
    assert instance.client.save(SaveRequest("save", keys, 1, (0,)))
    assert instance.is_writing.wait(WAIT_S)
    instance.client.on_rank_message(0, encode(RunsEnded("save", "no", 0, 0.0, 0.0)))
    event = events.get(timeout=WAIT_S)
    assert event == ChunksCopied("save", is_complete=False, refused_chunk=1)
    again = Future()
    again.set_result(grants[1:])
    monkeypatch.setattr(instance.user, "reserve", lambda *_, **__: again, raising=False)
    assert instance.client.save(SaveRequest("again", keys, 2, (0,), num_refused=2))
    event = events.get(timeout=WAIT_S)
    assert event == ChunksCopied("again", is_complete=False, refused_chunk=2)
    instance.await_saves()
    assert instance.client.stats.num_save_refusals == {"no_space": 2, "failed": 1}


def test_nothing_is_written_to_a_store_that_restarted_after_its_grant(instance):
    """The handles refer to the former store's memory; in this one it belongs to another user."""
    instance.user.restarts = None  # once it has granted memory
    assert instance.client.save(SaveRequest("save", (b"k" * 16,), 0, (0,)))
    assert instance.has_failed.wait(WAIT_S)
    assert not instance.is_writing.is_set()


@pytest.mark.parametrize("failure", ["a rank can't write", "no answer", "the store has restarted"])
def test_chunks_of_a_save_that_failed_may_be_offered_again(instance, monkeypatch, failure):
    """Later chunks can't be found without them."""
    events = Queue()
    monkeypatch.setattr(instance.client, "_post", events.put)
    if failure == "the store has restarted":
        instance.user.restarts = None  # once it has granted memory
    elif failure == "no answer":
        refused = Future()
        refused.set_exception(KVTransferError("the connection is lost"))
        monkeypatch.setattr(instance.user, "reserve", lambda *_, **__: refused, raising=False)
    keys = tuple(b"%16d" % number for number in range(4))
    assert instance.client.save(SaveRequest("save", keys, 1, (0,)))
    if failure == "a rank can't write":
        assert instance.is_writing.wait(WAIT_S)
        instance.client.on_rank_message(0, encode(RunsEnded("save", "no", 0, 0.0, 0.0)))
    event = events.get(timeout=WAIT_S)
    assert event == ChunksCopied("save", is_complete=False, refused_chunk=1)
    instance.await_saves()


def test_chunks_that_stores_have_are_not_offered_again(instance, monkeypatch):
    events = Queue()
    monkeypatch.setattr(instance.client, "_post", events.put)
    present = Future()
    present.set_result([PutRefusal.PRESENT, PutRefusal.STAGING])
    monkeypatch.setattr(instance.user, "reserve", lambda *_, **__: present, raising=False)
    assert instance.client.save(SaveRequest("save", (KEY, b"l" * 16), 0, (0,)))
    assert events.get(timeout=WAIT_S) == ChunksCopied("save", is_complete=False)
    instance.await_saves()


def test_saves_go_to_the_next_store_while_the_first_is_away(instance):
    client, first, key = instance.client, instance.user, b"%16d"
    other = NodeStore(NodeStoreConfig(1 << 20))
    user = RestartedAtWill(other.open_user())
    client._stores.all.append(user)

    def save(number, **options):
        name = f"save{number}"
        assert client.save(SaveRequest(name, (key % number,), 0, (0,), **options))
        return name

    def complete(name):
        assert instance.ordered.get(timeout=WAIT_S) == name
        client.on_rank_message(0, encode(RunsEnded(name, None, 0, 0.0)))
        assert instance.copied.get(timeout=WAIT_S) == name
        client.end_save(name, is_unchanged=True)
        instance.await_saves()

    first.is_away = True
    complete(save(1))
    refused = save(2, copy=CopyTerms(1, 1.0, 1.0))
    assert instance.copied.get(timeout=WAIT_S) == refused
    instance.await_saves()
    assert client.stats.num_save_refusals == {"unreachable": 1}
    first.is_away, user.is_away = False, True
    complete(save(3))
    user.is_away = False
    assert [store.stats().num_chunks for store in (instance.store, other)] == [1, 1]
    assert other.probe([key % 1]) == [Residence.DRAM]
    first.is_away = user.is_away = True
    assert not client.save(SaveRequest("save4", (key % 4,), 0, (0,)))
    assert client.stats.num_save_refusals == {"unreachable": 2}
    user.close()
    other.close()


def test_stores_learn_which_processes_write_to_them(instance):
    assert instance.writers == [this_process()]


def test_look_up_that_fails_finds_nothing(instance, monkeypatch, caplog):
    """Whoever asked waits for its event."""
    probe, found = Future(), Queue()
    monkeypatch.setattr(instance.user._user, "probe", lambda keys: probe)
    monkeypatch.setattr(instance.client, "_post", found.put)
    assert instance.client.lookup("a look-up", [KEY]) is None
    probe.set_exception(RuntimeError("a defect"))
    assert found.get(timeout=WAIT_S) == ChunksFound("a look-up", ())
    instance.await_that(lambda: "failed in a look-up: RuntimeError('a defect')" in caplog.text)


@pytest.fixture
def stored(instance):
    """An instance whose store holds a chunk."""
    instance.save()
    instance.client.on_rank_message(0, encode(RunsEnded("save", None, 0, 0.0)))
    assert instance.has_copied.wait(WAIT_S)
    instance.client.end_save("save", is_unchanged=True)
    instance.await_saves()
    return instance


def test_loads_duration_is_learnt_for_the_bytes_requested(stored):
    """Regardless of how many bytes ranks with the same data have moved for it."""
    assert stored.load(WAIT_S, error=None, nbytes=1 << 30, seconds=0.0) is None
    learnt = stored.client.load_costs._models[ChunkSource(0, Tier.DRAM)]
    assert learnt.has_learnt
    [[_, nbytes], _] = learnt._learnt[0] / learnt._learnt[0][0, 0]
    assert nbytes == pytest.approx(stored.client.chunk_bytes * 3 // 4)


def test_load_that_timed_out_is_learnt_with_a_lower_bound(stored):
    """A fifth of its layers had started to move in 40 s: all would have taken 200 s, the others 160
    s."""
    assert stored.load(0.0, **FAILED, seconds=40.0, begun_share=0.2) == "late"
    assert stored.estimate() == pytest.approx(160.0, rel=0.1)


def test_timed_out_load_without_transfers_is_learnt_with_its_timeout(stored):
    before = stored.estimate()
    assert stored.load(0.0, **FAILED, seconds=0.0) == "late"
    assert stored.client.load_costs._models[ChunkSource(0, Tier.DRAM)].has_learnt
    assert stored.estimate() != before


@pytest.mark.parametrize(("gone", "num_failed"), [((), 0), ((b"g" * 16,), 1)])
def test_load_without_all_requested_chunks_counts_as_failed(stored, gone, num_failed):
    """The store has lost some since the look-up."""
    assert stored.load(WAIT_S, (KEY, *gone), error=None, nbytes=1, seconds=0.0) is None
    stats = stored.client.stats
    assert (stats.num_loads, stats.num_failed_loads, stats.num_loaded_chunks) == (1, num_failed, 1)


@pytest.mark.parametrize("is_late", [False, True])
def test_cancelled_load_has_failed_only_if_it_took_too_long(stored, is_late):
    """Not if its client has left."""
    home = [ChunkSource(0, Tier.DRAM)]
    stored.client.start_load(LoadRequest("load", "r", (KEY,), home, 0, 1, (0,), WAIT_S, 0))
    assert stored.loading.get(timeout=WAIT_S) == "load"
    stored.client.cancel_load("load", is_late=is_late)
    stored.client.cancel_load("load")  # its request ends before the load is drained
    stored.client.on_rank_message(0, encode(RunsEnded("load", **FAILED, seconds=0.0)))
    assert stored.ends.get(timeout=WAIT_S) == "late"
    assert stored.client.stats.num_failed_loads == is_late


@pytest.mark.parametrize("timeout_s", [WAIT_S, 1e-6])
def test_cancelled_or_queued_load_is_not_learnt(stored, timeout_s):
    before = stored.estimate()
    assert stored.load(timeout_s, **FAILED, seconds=0.0) == "late"
    assert stored.estimate() == before
