"""Threads take the items of several calls in turn."""

import threading
import time

from mooncake_kv.store.daemon_threads import DaemonThreads

WAIT_S = 60


def test_threads_process_items_of_calls_round_robin():
    gate, taken = threading.Event(), []

    def run(item):
        assert gate.wait(WAIT_S)
        taken.append(item)

    threads = DaemonThreads("test", 1, run)
    threads.add(["a1", "a2", "a3"])
    threads.add(["b1"])
    threads.add(["c1", "c2"])
    gate.set()
    threads.close()
    assert threads.join(time.monotonic() + WAIT_S)
    assert sorted(taken[:3]) == ["a1", "b1", "c1"]
    assert taken[3:] == ["a2", "c2", "a3"]
