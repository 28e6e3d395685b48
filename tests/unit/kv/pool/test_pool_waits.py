"""A step waits for the layers of the loads that it reads, and for no other.

The layers of a load arrive when the test says so.
"""

import threading
import time

import pytest

from mooncake_hal.errors import TransferCancelled
from mooncake_kv.pool.pool_messages import LoadRuns
from mooncake_kv.pool.pool_worker import _RunningLoad

TIMEOUT_S = 20.0


@pytest.fixture
def load():
    return _RunningLoad(LoadRuns("load", "request", (), (), TIMEOUT_S), first_layer=4)


def _waiter(load, layer):
    thread = threading.Thread(target=load.wait_for, args=(layer,), daemon=True)
    thread.start()
    return thread


def test_step_does_not_wait_for_a_layer_that_has_arrived(load):
    load.arrived(6)
    load.wait_for(4)
    load.wait_for(5)
    assert load.stalled_s == 0


def test_step_waits_for_its_layer_and_counts_how_long(load):
    load.arrived(5)
    thread = _waiter(load, 5)
    time.sleep(0.02)
    assert thread.is_alive()
    load.arrived(6)
    thread.join(TIMEOUT_S)
    assert not thread.is_alive()
    assert 0.01 < load.stalled_s < TIMEOUT_S


def test_stall_times_are_known_when_the_load_ends_before_steps_wake_up(load):
    threads = [_waiter(load, layer) for layer in (4, 5)]
    deadline = time.monotonic() + TIMEOUT_S
    while len(load._awaited) < 2:
        assert time.monotonic() < deadline
        time.sleep(0.001)
    with load._changed:
        load.arrived(5)
        first = load.stalled_s
        load.end()
        assert 0 < first < load.stalled_s
    for thread in threads:
        thread.join(TIMEOUT_S)
    load.wait_for(5)
    assert load._awaited == {}


def test_completed_load_blocks_no_step(load):
    threads = [_waiter(load, layer) for layer in (4, 5, 6)]
    load.end()
    for thread in threads:
        thread.join(TIMEOUT_S)
        assert not thread.is_alive()
    load.wait_for(7)


def test_step_waits_at_most_for_load_timeout():
    late = _RunningLoad(LoadRuns("load", "request", (), (), 0.02), first_layer=4)
    late.wait_for(4)
    assert late.is_missed
    assert 0.01 < late.stalled_s < TIMEOUT_S
    assert late._awaited == {}


def test_step_does_not_wait_for_a_cancelled_load(load):
    thread = _waiter(load, 4)
    load.stop_waits()
    thread.join(TIMEOUT_S)
    assert not thread.is_alive()
    assert load.is_missed


def test_load_that_all_steps_waited_for_is_not_missed(load):
    assert load.claim()
    assert load.begin_step()
    thread = _waiter(load, 4)
    load.arrived(5)
    thread.join(TIMEOUT_S)
    load.end()
    load.stop_waits()
    assert load.begin_step(), "the step waits for nothing"
    assert not load.is_missed


def _arriving(timeout_s=TIMEOUT_S):
    order = LoadRuns("load", "request", (), (), timeout_s, are_arriving=True)
    return _RunningLoad(order, first_layer=4)


def test_layers_are_moved_as_they_arrive_in_store():
    load = _arriving()
    load.in_store(6)
    parts = load.arriving((4, 9))
    assert next(parts) == (4, 6)
    assert next(parts) == (6, 6), "running transfers are ended before the wait"
    later = threading.Timer(0.02, load.in_store, (9,))
    later.start()
    assert list(parts) == [(6, 9)]
    load.in_store(7)
    assert list(load.arriving((8, 9))) == [(8, 9)], "an older message does not reduce the progress"
    later.join()


def test_load_with_missing_layers_ends_by_deadline_or_cancellation():
    """Neither is a failure of the connection, which other loads use."""
    with pytest.raises(TransferCancelled, match="an SSD did not deliver its chunks in time"):
        list(_arriving(0.02).arriving((4, 5)))
    load = _arriving()
    threading.Timer(0.02, load.cancel).start()
    with pytest.raises(TransferCancelled, match="the load was cancelled"):
        list(load.arriving((4, 5)))


def test_load_of_chunks_in_memory_does_not_wait(load):
    assert list(load.arriving((4, 9))) == [(4, 9)]
