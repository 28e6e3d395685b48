"""Stores that a request names as prefix sources.

Chunks that they hold are loaded; if anything is wrong with a store, the prompt is computed, with
the same tokens and in bounded time.
"""

import signal
import time

import pytest
from support.checkpoints import random_model, write_checkpoint
from support.core_runs import random_prompt, serve_all
from support.pool_engine import CHUNK, GREEDY, SETTINGS, engine, forget, settle
from support.store_process import SECRET, StoreProcess

from mooncake_engine.messages import EngineRequest
from mooncake_engine.scheduling import pool_loads
from mooncake_kv.config import KVTransferConfig
from mooncake_kv.params import KVTransferParams, PrefixSource
from mooncake_kv.pool.pool_client import PoolClient
from mooncake_kv.pool.pool_stores import PoolStores
from mooncake_kv.store.store_client import StoreClient
from mooncake_kv.store.store_service import StoreAddress

LENGTH = 200
HELD = LENGTH // CHUNK * CHUNK
NETWORK = KVTransferConfig(secret=SECRET)
TIMEOUT_S = 60.0


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_checkpoint(random_model("llama"), tmp_path_factory.mktemp("llama"))


@pytest.fixture(autouse=True)
def ample_timeouts(monkeypatch):
    """Stores may respond late on a busy machine; a test of timeouts sets its own."""

    def with_ample_timeouts(seconds):
        for name in ("MIN_TIMEOUT_S", "MIN_HINT_TIMEOUT_S", "MAX_HINT_TIMEOUT_S"):
            monkeypatch.setattr(pool_loads, name, seconds)

    with_ample_timeouts(TIMEOUT_S)
    return with_ample_timeouts


@pytest.fixture
def store(tmp_path):
    store = StoreProcess(tmp_path, "--dram", "32M")
    yield store
    store.end(signal.SIGKILL)


@pytest.fixture
def core(model):
    """An engine whose own store is empty."""
    with engine(model, f"dram=32M,{SETTINGS}", network=NETWORK) as core:
        yield core


def _ask(core, sources=(), seed=0):
    """The answer to a prompt, and the number of loaded tokens."""
    forget(core)
    params = KVTransferParams(prefix_sources=tuple(sources))
    request = EngineRequest("r", random_prompt(seed, LENGTH), GREEDY, params)
    began = time.monotonic()
    outcome = serve_all(core, [request])
    settle(core)
    assert time.monotonic() - began < 2 * TIMEOUT_S
    return outcome.answers["r"], max(u.num_cached_tokens for u in outcome.updates["r"])


def _filled(model, store):
    """Have another instance save a prompt in that store; returns its answer."""
    pool = f"connect=127.0.0.1:{store.port},{SETTINGS}"
    with engine(model, pool, network=NETWORK) as other:
        return _ask(other)[0]


def _source(store, epoch=None, num_tokens=HELD, port=None):
    if epoch is None:
        client = StoreClient(StoreAddress("127.0.0.1", store.port, SECRET.encode()))
        assert client.await_store(TIMEOUT_S)
        epoch = client.arena.epoch
        client.close()
    return PrefixSource("127.0.0.1", port or store.port, epoch, num_tokens)


def _hints(core):
    return core.report().stats.kv_pool.num_prefix_hints


def test_chunks_of_other_instances_store_are_loaded(model, core, store):
    answer = _filled(model, store)
    assert _ask(core, [_source(store)]) == (answer, HELD)
    assert _hints(core) == {"found": 1}
    stats = core.report().stats.kv_pool
    assert (stats.num_loads, stats.num_failed_loads) == (1, 0)
    assert stats.num_found_chunks == {"remote_dram": HELD // CHUNK}


def test_own_store_as_source_is_queried_once(core):
    answer, num_cached = _ask(core)
    assert num_cached == 0
    own = core._scheduler._pool.chunk_pool._stores.home.arena
    hint = PrefixSource("127.0.0.1", 9, own.epoch, HELD)
    assert _ask(core, [hint]) == (answer, HELD)
    assert _hints(core) == {"own": 1}


def test_hint_shorter_than_device_prefix_is_ignored(core, store):
    source = _source(store)
    answer, _ = _ask(core)
    params = KVTransferParams(prefix_sources=(source,))
    request = EngineRequest("r", random_prompt(0, LENGTH), GREEDY, params)
    assert serve_all(core, [request]).answers["r"] == answer
    assert not _hints(core)


def test_lost_store_costs_one_timeout(model, core, store, ample_timeouts):
    answer = _filled(model, store)
    source = _source(store)
    store.end(signal.SIGKILL)
    ample_timeouts(0.5)
    assert _ask(core, [source]) == (answer, 0)
    core.reset_prefix_cache()
    assert _ask(core, [source], seed=1)[1] == 0
    assert _hints(core) == {"unreachable": 2}


def test_restarted_store_is_a_miss(model, core, store, tmp_path):
    answer = _filled(model, store)
    source = _source(store)
    store.end(signal.SIGKILL)
    again = StoreProcess(tmp_path, "--dram", "32M", port=store.port)
    try:
        assert _ask(core, [source]) == (answer, 0)
        assert _hints(core) == {"restarted": 1}
    finally:
        again.end(signal.SIGKILL)


def test_store_with_shorter_prefix_than_hinted_is_used(model, core, store):
    answer = _filled(model, store)
    other, num_loaded = _ask(core, [_source(store, num_tokens=10_000)], seed=1)
    assert num_loaded == 0
    assert len(other) == len(answer)
    assert _hints(core) == {"nothing_there": 1}
    assert _ask(core, [_source(store, num_tokens=10_000)]) == (answer, HELD)


def test_store_of_other_deployment_is_not_used(model, core, store, tmp_path, ample_timeouts):
    """The store does not know the secret, so no request is sent to it."""
    answer = _filled(model, store)
    directory = tmp_path / "outsider"
    directory.mkdir()
    outsider = StoreProcess(directory, "--dram", "32M", secret="another deployment's secret")
    try:
        epoch = _source(store).epoch
        ample_timeouts(2.0)
        assert _ask(core, [_source(outsider, epoch=epoch)]) == (answer, 0)
        assert _hints(core) == {"unreachable": 1}
    finally:
        outsider.end(signal.SIGKILL)


@pytest.mark.parametrize(
    ("settings", "network", "host"),
    [
        (SETTINGS, KVTransferConfig(), "192.0.2.1"),
        (f"{SETTINGS},source-allow=192.0.2.1", NETWORK, "127.0.0.1"),
    ],
    ids=["without a secret", "not named by the operator"],
)
def test_disallowed_store_address_is_not_connected_to(
    model, store, settings, network, host, monkeypatch
):
    answer = _filled(model, store)
    source = PrefixSource(host, store.port, _source(store).epoch, HELD)
    with engine(model, f"dram=32M,{settings}", network=network) as core:
        monkeypatch.delattr(PoolStores, "connect")
        assert _ask(core, [source]) == (answer, 0)
        assert _hints(core) == {"not_allowed": 1}


@pytest.mark.parametrize("is_known", [True, False], ids=["connected", "new"])
def test_frozen_store_costs_at_most_the_timeout(model, core, store, is_known, ample_timeouts):
    answer = _filled(model, store)
    source = _source(store)
    if is_known:
        _ask(core, [source], seed=1)
    store.send(signal.SIGSTOP)
    ample_timeouts(0.5)
    try:
        began = time.monotonic()
        assert _ask(core, [source]) == (answer, 0)
        assert time.monotonic() - began < TIMEOUT_S / 2
        if not is_known:
            assert _hints(core) == {"unreachable": 1}
            return
        # The store's index is in memory that this host shares: only the read of its chunks waits.
        assert _hints(core)["found"] == 1
        while not core.report().stats.kv_pool.num_failed_loads:
            core.step()
            assert time.monotonic() - began < TIMEOUT_S
    finally:
        store.send(signal.SIGCONT)


def test_store_lost_before_its_chunks_are_read(model, core, store, monkeypatch):
    answer = _filled(model, store)
    source = _source(store)
    begin = PoolClient.start_load

    def kill_first(client, load):
        store.end(signal.SIGKILL)
        begin(client, load)

    monkeypatch.setattr(PoolClient, "start_load", kill_first)
    pool = core._scheduler._pool.chunk_pool
    monkeypatch.setattr(pool, "start_load", pool._client.start_load)
    assert _ask(core, [source]) == (answer, 0)
    stats = core.report().stats.kv_pool
    assert (stats.num_loads, stats.num_failed_loads) == (1, 1)


def test_unused_source_stores_are_disconnected(model, core, store, monkeypatch):
    _filled(model, store)
    assert _ask(core, [_source(store)])[1] == HELD
    client = core._scheduler._pool.chunk_pool._client
    monkeypatch.setattr("mooncake_kv.pool.hinted_stores.IDLE_S", 0.0)
    client._loop.call("", lambda: client._hinted._sweep(time.monotonic()))
    deadline = time.monotonic() + TIMEOUT_S
    while client._hinted._by_address:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert client.load_costs._models.keys() <= {(0, "dram"), (0, "ssd")}
    assert client._ranks._known_epochs.keys() <= {0}
