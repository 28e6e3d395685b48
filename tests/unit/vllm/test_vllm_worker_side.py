"""What a rank has to tell vLLM, as it comes; and orders that wait for their step."""

from __future__ import annotations

import threading
import time

import pytest

from mooncake_vllm.vllm_worker_side import HeldLoads, LoadOrder, Reports, Results

LONG_S = 30.0
NOTHING = Results(set(), set(), set())


def test_what_is_there_is_taken_at_once_and_once() -> None:
    reports = Reports(num_behind=0)
    reports.add_send("a")
    began = time.monotonic()
    assert reports.take(LONG_S) == Results({"a"}, set(), set())
    assert time.monotonic() - began < LONG_S / 2
    assert reports.take() == NOTHING


def test_who_waits_is_told_of_a_load_when_it_ends() -> None:
    reports, taken = Reports(num_behind=0), []
    waiting = threading.Thread(target=lambda: taken.append(reports.take(LONG_S)))
    waiting.start()
    reports.add_load("a", is_failed=True)
    waiting.join(LONG_S / 2)
    assert taken == [Results(set(), {"a"}, {"a"})]


def test_nobody_waits_longer_than_asked() -> None:
    began = time.monotonic()
    assert Reports(num_behind=0).take(0.01) == NOTHING
    assert 0.01 <= time.monotonic() - began < LONG_S


def waits(reports: Reports) -> bool:
    """Whether a step that has nothing to tell would wait."""
    began = time.monotonic()
    assert reports.take(0.1) == NOTHING
    return time.monotonic() - began >= 0.1


def test_steps_that_were_scheduled_before_the_news_do_not_hold_up_what_follows_from_it() -> None:
    reports = Reports(num_behind=2)
    reports.add_load("a", is_failed=False)
    reports.take(LONG_S)
    assert [waits(reports) for _ in range(4)] == [False, False, True, True]


@pytest.mark.parametrize("num_behind", [1, 2])
def test_a_new_request_ends_a_wait_and_those_of_the_steps_behind_it(num_behind: int) -> None:
    reports, taken = Reports(num_behind), []
    waiting = threading.Thread(target=lambda: taken.append(reports.take(LONG_S)))
    waiting.start()
    time.sleep(0.05)  # it most likely waits by now, and need not
    reports.wake_up()
    waiting.join(LONG_S / 2)
    assert taken == [NOTHING]
    assert [waits(reports) for _ in range(num_behind)] == [False] * (num_behind - 1) + [True]


def load_of(order: bytes) -> LoadOrder | None:
    """Of ``load NAME``, ``more NAME`` and anything else."""
    what, _, name = order.decode().partition(" ")
    return LoadOrder(name, begins=what == "load") if what in ("load", "more") else None


def test_what_is_ordered_of_a_load_that_waits_comes_behind_it() -> None:
    taken: list[bytes] = []
    loads = HeldLoads(taken.append, load_of)
    for order in (b"load a", b"load b", b"more a", b"store", b"more b", b"more a"):
        loads.take(order)
    assert taken == [b"store"]
    loads.release(["a"])
    assert taken == [b"store", b"load a", b"more a", b"more a"]
    loads.take(b"more a")
    assert taken[4:] == [b"more a"], "it has begun"
    loads.release(["b"])
    assert taken[5:] == [b"load b", b"more b"]


def test_a_load_whose_step_is_here_before_it_begins_at_once() -> None:
    taken: list[bytes] = []
    loads = HeldLoads(taken.append, load_of)
    loads.release(["a"])
    loads.take(b"load a")
    loads.take(b"more a")
    assert taken == [b"load a", b"more a"]
    loads.take(b"load a")
    assert len(taken) == 2, "another one of that name waits for another step"
