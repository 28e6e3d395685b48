"""A Mooncake Store whose master hangs, or whose client fails, frees its staging memory.

The client is a stand-in for Mooncake's; ``tests/adapters`` uses the real one.
"""

import sys
import threading
from types import ModuleType

import pytest

from mooncake_kv.store import mooncake_store
from mooncake_kv.store.chunk_store import Chunk, PutRefusal, Residence, WriteHandle
from mooncake_kv.store.mooncake_store import MooncakeChunkStore, MooncakeStoreConfig

NBYTES = 1 << 20
COUNT = 8
WAIT_S = 60
ABSENT_KEY = bytes(16)


class StandIn:
    """A stand-in for ``MooncakeDistributedStore``: objects without bytes, and a master that may
    hang."""

    def __init__(self):
        self.answers = threading.Event()
        self.answers.set()
        self.leaves = threading.Event()
        self.leaves.set()
        self.error = None
        self.objects = {}

    def setup(self, *_):
        return 0

    register_buffer = unregister_buffer = setup

    def close(self):
        assert self.leaves.wait(WAIT_S)

    def batch_is_exist(self, names):
        assert self.answers.wait(WAIT_S)
        return [int(name in self.objects) for name in names]

    def batch_put_from(self, names, addresses, sizes):
        self._work()
        self.objects.update(zip(names, sizes, strict=True))
        return [0] * len(names)

    def get_size(self, name):
        assert self.answers.wait(WAIT_S)
        return self.objects.get(name, -1)

    def batch_get_into(self, names, addresses, sizes):
        self._work()
        return list(sizes)

    def _work(self):
        assert self.answers.wait(WAIT_S)
        if self.error is not None:
            raise self.error


@pytest.fixture
def store(monkeypatch):
    mooncake, package = ModuleType("mooncake"), ModuleType("mooncake.store")
    package.MooncakeDistributedStore, mooncake.store = StandIn, package
    monkeypatch.setitem(sys.modules, "mooncake", mooncake)
    monkeypatch.setitem(sys.modules, "mooncake.store", package)
    monkeypatch.setattr(mooncake_store, "_require_master", lambda address: None)
    store = MooncakeChunkStore(MooncakeStoreConfig("master:1", staging_bytes=COUNT * NBYTES))
    yield store
    store._client.answers.set()
    store._client.leaves.set()
    store.close()


def chunks(first=0):
    numbers = range(first, first + COUNT)
    return [Chunk(number.to_bytes(16, "big"), None, 0, NBYTES, 16) for number in numbers]


def reserve(store, first=0):
    handles = store.reserve(chunks(first)).result(WAIT_S)
    assert all(isinstance(handle, WriteHandle) for handle in handles), handles
    return handles


def test_commit_rejected_while_master_hangs_frees_its_memory(store, monkeypatch):
    monkeypatch.setattr(mooncake_store, "MAX_WAITING", 16)
    handles = reserve(store)
    store._client.answers.clear()
    waiting = [store.touch([ABSENT_KEY]) for _ in range(16)]
    assert store.commit(handles).result(0) == [False] * COUNT
    store._client.answers.set()
    for future in waiting:
        future.result(WAIT_S)
    assert store.commit(reserve(store, COUNT)).result(WAIT_S) == [True] * COUNT


def test_calls_that_time_out_are_logged_in_one_line(store, monkeypatch, caplog):
    monkeypatch.setattr(mooncake_store, "CALL_TIMEOUT_S", 0.0)
    store._client.answers.clear()
    futures = [store.probe([ABSENT_KEY]) for _ in range(32)]
    assert [future.result(WAIT_S) for future in futures] == [[Residence.ABSENT]] * 32
    assert 1 <= len(caplog.messages) <= 2
    assert "did not reply" in caplog.text


def await_that(is_so):
    for _ in range(int(WAIT_S / 0.02)):
        if is_so():
            return
        threading.Event().wait(0.02)
    raise AssertionError(f"not so after {WAIT_S} s")


def test_master_that_hangs_costs_one_timeout_and_is_used_again_once_it_replies(store, monkeypatch):
    monkeypatch.setattr(mooncake_store, "CALL_TIMEOUT_S", 0.1)
    handles = reserve(store)
    store._client.answers.clear()
    waiting = [store.touch([ABSENT_KEY]) for _ in range(mooncake_store.NUM_THREADS)]
    queued = store.commit(handles)
    await_that(lambda: store.arena is None)
    assert queued.result(WAIT_S) == [False] * COUNT
    assert [future.result(WAIT_S) for future in waiting] == [None] * len(waiting)
    assert store.probe([ABSENT_KEY]).result(0) == [Residence.ABSENT]
    assert store.reserve(chunks()).result(0) == [PutRefusal.UNREACHABLE] * COUNT
    store._client.answers.set()
    await_that(lambda: store.arena is not None)
    await_that(lambda: store.stats().result(0).free_bytes == COUNT * NBYTES)
    assert store._client.objects == {}, "a write was made that had timed out"
    assert store.commit(reserve(store)).result(WAIT_S) == [True] * COUNT


def test_master_that_replies_with_errors_is_asked_again(store, monkeypatch):
    monkeypatch.setattr(mooncake_store, "CALL_TIMEOUT_S", 0.0)
    num_asked = []

    def fail(names):
        num_asked.append(len(names))
        if len(num_asked) == 1:  # the caller's
            assert store._client.answers.wait(WAIT_S)
        if len(num_asked) == 2:
            raise RuntimeError("the client failed")
        return [0] if len(num_asked) > 3 else [-900]

    store._client.answers.clear()
    store._client.batch_is_exist = fail
    store.probe([ABSENT_KEY])
    await_that(lambda: store.arena is None)
    await_that(lambda: store.arena is not None)
    assert num_asked == [1] * 4
    store._client.answers.set()


@pytest.mark.parametrize("call", ["commit", "pin"])
def test_failing_client_frees_staging_memory(store, call):
    store.commit(reserve(store)).result(WAIT_S)
    store._client.error = RuntimeError("the client failed")
    if call == "commit":
        assert store.commit(reserve(store, COUNT)).result(WAIT_S) == [False] * COUNT
    else:
        assert store.pin([c.key for c in chunks()]).result(WAIT_S) == [None] * COUNT
    store._client.error = None
    assert store.stats().result().free_bytes == COUNT * NBYTES
    assert store.reserve(chunks()).result(WAIT_S) == [PutRefusal.PRESENT] * COUNT
    assert None not in store.pin([c.key for c in chunks()]).result(WAIT_S)


def test_close_gives_up_on_calls_of_a_master_that_is_gone(store, monkeypatch, caplog):
    monkeypatch.setattr(mooncake_store, "CLOSE_TIMEOUT_S", 0.2)
    store._client.answers.clear()
    waiting = store.probe([ABSENT_KEY])
    store.close()
    assert waiting.result(0) == [Residence.ABSENT]
    assert "did not return within 0.2 s: its memory stays in use" in caplog.text
    store._memory.view(0, NBYTES).release()


def test_close_gives_up_on_a_client_that_does_not_leave(store, monkeypatch, caplog):
    monkeypatch.setattr(mooncake_store, "CLOSE_TIMEOUT_S", 0.2)
    store._client.leaves.clear()
    store.close()
    assert "did not return within 0.2 s: its memory stays in use" in caplog.text
    store._memory.view(0, NBYTES).release()


def test_closed_store_answers_with_misses(store):
    store.commit(reserve(store)).result(WAIT_S)
    store.close()
    assert store.probe([chunks()[0].key]).result(0) == [Residence.ABSENT]
    with pytest.raises(ValueError, match="released"):
        store._memory.view(0, NBYTES)
