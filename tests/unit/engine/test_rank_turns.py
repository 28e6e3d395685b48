"""Data-parallel ranks that share no experts step independently, and each one is watched."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing import Pipe

import pytest
from support.scripted_core import ScriptedExecutor, scripted_engine

from mooncake_engine import core as core_module, rank_turns
from mooncake_engine.core_messages import AddRequest, Wake
from mooncake_engine.data_parallel_core import DataParallelCore
from mooncake_engine.errors import EngineDead
from mooncake_engine.execution.model_runner import PendingStep
from mooncake_engine.messages import EngineRequest
from mooncake_engine.rank_turns import Inbox
from mooncake_engine.sampling_params import SamplingParams
from mooncake_engine.scheduling.step_plan import StepPlan, StepResult
from mooncake_engine.step_watchdog import StepWatch

PROMPT = (97, 98, 99)


class DistantExecutor(ScriptedExecutor):
    """An executor with remote ranks: a step completes once they reply, and they don't while
    ``held`` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.held = False
        reader, self._writer = Pipe(duplex=False)
        self.step_connections = (reader,)

    def execute_model(self, plan: StepPlan) -> PendingStep:  # type: ignore[override]
        """Start a step, which stays in flight until the ranks reply."""
        step = super().execute_model(plan)
        if not self.held:
            self.answer()
        return DistantStep(self._wait, step)

    def answer(self) -> None:
        """Complete the step in flight."""
        self._writer.send_bytes(b"done")

    def die(self) -> None:
        """Close the connection of the ranks, which will never reply."""
        self._writer.close()

    def _wait(self) -> None:
        try:
            self.step_connections[0].recv_bytes()
        except EOFError:
            raise EngineDead("rank 0 of 2 died") from None


@dataclass(frozen=True)
class DistantStep:
    """A pending step whose result is available once ``wait`` has returned."""

    wait: Callable[[], None]
    step: PendingStep

    def result(self) -> StepResult:
        """Block until the step has completed, and return its result."""
        self.wait()
        return self.step.result()


class Instance:
    """Two data-parallel ranks; the id of a request is the number of its rank."""

    def __init__(self) -> None:
        self.executors = (DistantExecutor(), DistantExecutor())
        self.watch = StepWatch(20.0)
        cores = [scripted_engine(executor).core for executor in self.executors]
        self.core = DataParallelCore(cores, dispatch_min_tokens=None, watch=self.watch)
        self.ended: set[str] = set()

    def ask(self, dp_rank: int) -> None:
        """Post a request that generates three tokens and EOS."""
        sampling = SamplingParams(max_tokens=8)
        request = EngineRequest(str(dp_rank), PROMPT, sampling, data_parallel_rank=dp_rank)
        self.core.post(AddRequest(request))

    def step(self) -> None:
        """Run one step and note the requests that finished."""
        updates = self.core.step()
        self.ended |= {update.request_id for update in updates if update.finish is not None}

    def run_until_ended(self, dp_rank: int) -> None:
        """Step until the request of a rank has finished."""
        while str(dp_rank) not in self.ended:
            self.step()


@pytest.fixture
def instance() -> Iterator[Instance]:
    made = Instance()
    yield made
    made.core.close()


@pytest.fixture
def no_idle_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    """Raise the idle wait beyond the test's timeout: a test passes only if the wait is woken."""
    monkeypatch.setattr(core_module, "IDLE_WAIT_S", 1e5)
    monkeypatch.setattr(rank_turns, "IDLE_WAIT_S", 1e5)


def test_a_rank_continues_while_another_ranks_step_is_in_flight(instance: Instance) -> None:
    slow = instance.executors[0]
    slow.held = True
    instance.ask(0)
    instance.ask(1)
    instance.run_until_ended(1)
    assert instance.ended == {"1"}
    slow.held = False
    slow.answer()
    instance.run_until_ended(0)


def test_a_hung_step_is_detected_while_another_rank_continues(instance: Instance) -> None:
    instance.executors[0].held = True
    instance.ask(0)
    instance.step()
    check = instance.watch.check
    for second in range(20):
        instance.ask(1)
        instance.run_until_ended(1)
        instance.ended.clear()
        assert not check(float(second))
    assert check(20.0) or check(21.0)


def test_watchdog_moves_on_when_a_rank_replies(instance: Instance) -> None:
    """It then watches the other rank, whose step is still in flight."""
    first, second = instance.executors
    first.held = second.held = True
    instance.ask(0)
    instance.step()
    instance.ask(1)
    instance.step()
    check = instance.watch.check
    check(0.0)
    for now in range(1, 20):
        check(float(now))
    first.held = False
    first.answer()
    instance.run_until_ended(0)
    assert not check(20.0)
    assert not check(30.0)
    assert instance.watch.watched_s > 0


@pytest.mark.usefixtures("no_idle_timeout")
@pytest.mark.parametrize("is_other_busy", [False, True])
def test_a_posted_request_wakes_an_idle_core(is_other_busy: bool, instance: Instance) -> None:
    if is_other_busy:
        instance.executors[0].held = True
        instance.ask(0)
    threading.Timer(0.05, instance.ask, (1,)).start()
    instance.run_until_ended(1)


@pytest.mark.usefixtures("no_idle_timeout")
def test_death_of_a_rank_wakes_the_core(instance: Instance) -> None:
    instance.executors[0].held = True
    instance.ask(0)
    threading.Timer(0.05, instance.executors[0].die).start()
    with pytest.raises(EngineDead, match="rank 0 of 2 died"):
        instance.run_until_ended(0)


@pytest.mark.usefixtures("no_idle_timeout")
def test_posting_to_a_core_that_does_not_step_never_blocks(instance: Instance) -> None:
    """The messages exceed a socket's buffer, and the last one is still delivered."""
    for _ in range(10_000):
        instance.core.post(Wake())
    instance.ask(0)
    instance.run_until_ended(0)
    instance.core.close()
    instance.core.post(Wake())


def test_inbox_returns_items_in_order() -> None:
    inbox: Inbox[int] = Inbox()
    for number in range(3):
        inbox.put(number)
    assert list(inbox.take()) == [0, 1, 2]
    assert list(inbox.take()) == []
    inbox.close()
