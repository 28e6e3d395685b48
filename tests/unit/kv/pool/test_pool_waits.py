"""A step waits for the layers of a load that it reads, and for no other: with a load whose layers
come when the test says."""

import threading
import time

import pytest

from mooncake_kv.pool.pool_messages import LoadRuns
from mooncake_kv.pool.pool_worker import _RunningLoad

PATIENCE_S = 20.0


@pytest.fixture
def load():
    return _RunningLoad(LoadRuns("load", "request", (), (), PATIENCE_S), first_layer=4)


def _waiter(load, layer):
    thread = threading.Thread(target=load.wait_for, args=(layer,), daemon=True)
    thread.start()
    return thread


def test_a_layer_that_is_there_is_not_waited_for(load):
    load.arrived(6)
    load.wait_for(4)
    load.wait_for(5)
    assert load.stalled_s == 0


def test_a_step_waits_for_its_layer_and_counts_how_long(load):
    load.arrived(5)
    thread = _waiter(load, 5)
    time.sleep(0.02)
    assert thread.is_alive()
    load.arrived(6)
    thread.join(PATIENCE_S)
    assert not thread.is_alive()
    assert 0.01 < load.stalled_s < PATIENCE_S


def test_a_load_that_ends_holds_up_no_step(load):
    threads = [_waiter(load, layer) for layer in (4, 5, 6)]
    load.end()
    for thread in threads:
        thread.join(PATIENCE_S)
        assert not thread.is_alive()
    load.wait_for(7)
