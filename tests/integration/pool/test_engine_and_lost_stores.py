"""Stores that die, freeze and recover under a running engine: right tokens, and no long waits."""

import signal
import time

import pytest
from support.checkpoints import random_model, write_checkpoint
from support.core_runs import random_prompt
from support.pool_engine import CHUNK, SETTINGS, ask, engine, forget
from support.store_process import SECRET, StoreProcess

from mooncake_kv.config import KVTransferConfig

LENGTH = 200
TIMEOUT_S = 60.0
"""Timeout of an answer on a busy machine; users of a frozen store lose at most 2 s."""


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_checkpoint(random_model("llama"), tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def plain(model):
    with engine(model, None) as core:
        return [ask(core, [random_prompt(seed, LENGTH)])[0][0] for seed in range(3)]


def _ask(core, seed, plain):
    """Check the answer's tokens; returns how many were loaded."""
    forget(core)
    began = time.monotonic()
    (answer,), (num_cached,) = ask(core, [random_prompt(seed, LENGTH)])
    assert time.monotonic() - began < TIMEOUT_S
    assert answer == plain[seed]
    return num_cached


def _until_back(core, plain, seed):
    deadline = time.monotonic() + TIMEOUT_S
    while not _ask(core, seed, plain):
        assert time.monotonic() < deadline, core.report().stats.kv_pool


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM], ids=lambda n: n.name)
def test_stopped_store_is_a_miss_and_restarted_store_is_used(model, plain, tmp_path, number):
    store = StoreProcess(tmp_path, "--dram", "32M")
    pool = f"connect=127.0.0.1:{store.port},{SETTINGS}"
    network = KVTransferConfig(secret=SECRET)
    try:
        with engine(model, pool, network=network) as core:
            assert _ask(core, 0, plain) == 0
            assert _ask(core, 0, plain) == LENGTH // CHUNK * CHUNK
            port = store.port
            store.end(number)
            assert _ask(core, 0, plain) == 0
            assert _ask(core, 1, plain) == 0
            store = StoreProcess(tmp_path, "--dram", "32M", port=port)
            _until_back(core, plain, 1)
    finally:
        store.end()


def test_frozen_store_is_a_miss(model, plain, tmp_path):
    store = StoreProcess(tmp_path, "--dram", "32M")
    pool = f"connect=127.0.0.1:{store.port},{SETTINGS}"
    try:
        with engine(model, pool, network=KVTransferConfig(secret=SECRET)) as core:
            _ask(core, 0, plain)
            assert _ask(core, 0, plain) > 0
            store.send(signal.SIGSTOP)
            assert _ask(core, 0, plain) == 0
            assert _ask(core, 2, plain) == 0
            store.send(signal.SIGCONT)
            _until_back(core, plain, 0)
    finally:
        store.end(signal.SIGKILL)
