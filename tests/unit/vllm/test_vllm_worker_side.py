"""When a rank reports to vLLM, and how orders are held until their step."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import permutations

import pytest

from mooncake_hal.deployment import Hardware
from mooncake_vllm.vllm_worker_side import (
    Device,
    HeldLoads,
    LoadOrder,
    Reports,
    Results,
    StepWait,
)

LONG_S = 30.0
NOTHING = Results(set(), set(), set())


def step(reports: Reports, wait_s: float = LONG_S, held: Sequence[str] = ()) -> Results:
    """Run a step that computes nothing; returns its report."""
    reports.begin_step(held, wait_s)
    return reports.take()


def test_reports_are_taken_immediately_and_once() -> None:
    reports = Reports()
    reports.add_load("a", is_failed=False)
    began = time.monotonic()
    assert step(reports) == Results(set(), {"a"}, set())
    assert time.monotonic() - began < LONG_S / 2
    assert reports.take() == NOTHING


def test_waiting_step_reports_a_load_when_it_ends() -> None:
    reports, taken = Reports(), []
    waiting = threading.Thread(target=lambda: taken.append(step(reports)))
    waiting.start()
    reports.add_load("a", is_failed=True)
    waiting.join(LONG_S / 2)
    assert taken == [Results(set(), {"a"}, {"a"})]


def test_step_waits_at_most_as_long_as_requested() -> None:
    began = time.monotonic()
    assert step(Reports(), wait_s=0.01) == NOTHING
    assert 0.01 <= time.monotonic() - began < LONG_S


def test_blocks_are_free_once_a_step_has_named_their_request() -> None:
    reports = Reports()
    reports.add_send("early")
    assert step(reports, held=["late"]) == NOTHING
    reports.add_send("late")
    assert step(reports, held=["early"]) == Results({"early", "late"}, set(), set())
    assert step(reports, wait_s=0.0) == NOTHING
    reports.add_send("early")
    assert step(reports) == NOTHING, "a later load of this name belongs to another step"
    assert step(reports, held=["early"]) == Results({"early"}, set(), set())


def test_step_does_not_delay_the_one_that_names_a_released_request() -> None:
    reports, taken = Reports(), []
    waiting = threading.Thread(target=lambda: taken.append(step(reports)))
    waiting.start()
    reports.add_send("a")
    waiting.join(LONG_S / 2)
    began = time.monotonic()
    assert step(reports) == NOTHING
    assert step(reports, held=["a"]) == Results({"a"}, set(), set())
    assert time.monotonic() - began < LONG_S / 2
    assert taken == [NOTHING]


def waits(reports: Reports) -> bool:
    """Whether a step with nothing to report would wait."""
    began = time.monotonic()
    assert step(reports, wait_s=0.1) == NOTHING
    return time.monotonic() - began >= 0.1


def test_steps_scheduled_before_a_report_do_not_wait() -> None:
    reports = Reports(StepWait(num_behind=2))
    reports.add_load("a", is_failed=False)
    step(reports)
    assert [waits(reports) for _ in range(4)] == [False, False, True, True]


@pytest.mark.parametrize("num_behind", [0, 1, 2])
def test_new_request_ends_a_wait_and_those_of_the_steps_behind_it(num_behind: int) -> None:
    reports, taken = Reports(StepWait(num_behind)), []
    waiting = threading.Thread(target=lambda: taken.append(step(reports)))
    waiting.start()
    time.sleep(0.05)  # it probably waits by now, and need not
    reports.wake_up()
    waiting.join(LONG_S / 2)
    assert taken == [NOTHING]
    assert [waits(reports) for _ in range(num_behind + 1)] == [False] * num_behind + [True]


def test_step_does_not_wait_if_a_request_can_be_computed() -> None:
    reports = Reports()
    reports.begin_step(wait_s=LONG_S)
    reports.wake_up()
    began = time.monotonic()
    assert reports.take() == NOTHING
    assert time.monotonic() - began < LONG_S / 2


def step_of_both(first: Reports, second: Reports, wait_s: float) -> tuple[Results, Results]:
    """Run a step of two connectors in MultiConnector's order."""
    first.begin_step(wait_s=wait_s)
    second.begin_step(wait_s=wait_s)
    return first.take(), second.take()


def test_connectors_of_one_rank_wait_together_and_once() -> None:
    wait = StepWait()
    first, second = Reports(wait), Reports(wait)
    began = time.monotonic()
    assert step_of_both(first, second, 0.2) == (NOTHING, NOTHING)
    assert 0.2 <= time.monotonic() - began < 0.39


@pytest.mark.parametrize("at", [0, 1])
def test_report_of_any_connector_of_a_rank_ends_the_wait(at: int) -> None:
    wait, taken = StepWait(num_behind=1), []
    both = Reports(wait), Reports(wait)
    waiting = threading.Thread(target=lambda: taken.append(step_of_both(*both, LONG_S)))
    waiting.start()
    both[at].add_load("a", is_failed=False)
    waiting.join(LONG_S / 2)
    assert taken[0][at] == Results(set(), {"a"}, set())
    assert taken[0][1 - at] == NOTHING
    began = time.monotonic()
    assert step_of_both(*both, 0.1) == (NOTHING, NOTHING)
    assert time.monotonic() - began < 0.1, "it was scheduled before the report"
    assert step_of_both(*both, 0.1) == (NOTHING, NOTHING)
    assert time.monotonic() - began >= 0.1


def load_of(order: bytes) -> LoadOrder | None:
    """The name of the load in ``load NAME`` and ``more NAME``; None for other orders."""
    what, _, name = order.decode().partition(" ")
    return LoadOrder(name, begins=what == "load") if what in ("load", "more") else None


class Stream:
    """A device stream whose events pass or fail when the test says so."""

    def __init__(self, *, is_done: bool = False) -> None:
        self.is_done = is_done
        self.awaited = threading.Event()
        self.ends = threading.Event()
        self.error: Exception | None = None

    def record(self) -> None:
        pass

    def query(self) -> bool:
        return self.is_done

    def synchronize(self) -> None:
        self.awaited.set()
        assert self.ends.wait(LONG_S)
        if self.error is not None:
            raise self.error


Orders = Callable[[Stream], tuple[list[bytes], HeldLoads]]


@pytest.fixture
def died() -> list[BaseException]:
    """Collect the errors of threads that died."""
    return []


@pytest.fixture
def orders_of(died: list[BaseException]) -> Iterator[Orders]:
    """Loads of a rank whose device has one stream, and the list that receives its orders."""
    made: list[HeldLoads] = []

    def make(stream: Stream) -> tuple[list[bytes], HeldLoads]:
        taken: list[bytes] = []
        device = Device("cpu", Hardware("cpu", "test"), lambda: stream, lambda: None)
        made.append(HeldLoads(taken.append, load_of, device, died.append))
        return taken, made[-1]

    yield make
    for loads in made:
        loads.close()
    assert not died


HOST = Stream(is_done=True)


def test_orders_about_a_held_load_are_held_too(orders_of: Orders) -> None:
    taken, loads = orders_of(HOST)
    for order in (b"load a", b"load b", b"more a", b"store", b"more b", b"more a"):
        loads.take(order)
    assert taken == [b"store"]
    loads.release(["a"])
    assert taken == [b"store", b"load a", b"more a", b"more a"]
    loads.take(b"more a")
    assert taken[4:] == [b"more a"], "it has started"
    loads.release(["b"])
    assert taken[5:] == [b"load b", b"more b"]


def test_load_ordered_after_its_step_starts_immediately(orders_of: Orders) -> None:
    taken, loads = orders_of(HOST)
    loads.release(["a"])
    loads.take(b"load a")
    loads.take(b"more a")
    assert taken == [b"load a", b"more a"]


def test_load_in_several_parts_waits_for_its_step_once(orders_of: Orders) -> None:
    """As an early pull, whose prompt is read in parts while it is computed."""
    taken, loads = orders_of(HOST)
    loads.take(b"load a")
    loads.release(["a"])
    loads.take(b"load a")
    assert taken == [b"load a", b"load a"]
    loads.forget("a")
    loads.take(b"load a")
    assert len(taken) == 2, "a later load of this name waits for another step"


@pytest.mark.parametrize("what_comes", [*permutations(["step", "order", "end"])])
def test_nothing_is_kept_of_completed_load(orders_of: Orders, what_comes: tuple[str, ...]) -> None:
    """Its completion may be reported before its step arrives, and before or without its order."""
    taken, loads = orders_of(HOST)
    do = {
        "step": lambda: loads.release(["a"]),
        "order": lambda: loads.take(b"load a"),
        "end": lambda: loads.forget("a"),
    }
    is_possible = what_comes.index("order") < what_comes.index("end")
    for what in what_comes:
        if is_possible or what != "order":  # no order follows the completion
            do[what]()
    assert taken == [b"load a"] * is_possible
    taken.clear()
    loads.take(b"load a")
    assert taken == [], "a later load of this name waits for another step"
    loads.release(["a"])
    assert taken == [b"load a"]


@pytest.mark.parametrize("what_comes", [*permutations(["step", "order"])])
def test_load_waits_for_device_work_on_its_blocks(
    orders_of: Orders, what_comes: tuple[str, ...]
) -> None:
    """A step in flight may write to the blocks for their previous owner, and vLLM does not wait."""
    taken, loads = orders_of(stream := Stream())
    do = {"step": lambda: loads.release(["a"]), "order": lambda: loads.take(b"load a")}
    for what in what_comes:
        do[what]()
    loads.take(b"more a")
    loads.take(b"store")
    assert stream.awaited.wait(LONG_S)
    assert taken == [b"store"]
    stream.ends.set()
    loads.close()
    assert taken == [b"store", b"load a", b"more a"]


def test_step_without_loads_records_nothing(orders_of: Orders) -> None:
    class Unused(Stream):
        def record(self) -> None:
            raise AssertionError("a step has nobody to order")

    orders_of(Unused())[1].release([])


def test_device_failure_while_loads_wait_ends_instance(
    orders_of: Orders, died: list[BaseException]
) -> None:
    taken, loads = orders_of(stream := Stream())
    stream.error = RuntimeError("an illegal address")
    loads.take(b"load a")
    loads.release(["a"])
    assert stream.awaited.wait(LONG_S)
    stream.ends.set()
    loads.close()
    assert (taken, died) == ([], [stream.error])
    died.clear()


def test_closing_rank_starts_no_load(orders_of: Orders) -> None:
    taken, loads = orders_of(HOST)
    loads.take(b"load a")
    loads.close()
    loads.release(["a"])
    assert taken == []
