"""What the engine's core drives: all ranks of an instance as one object."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from queue import SimpleQueue
from typing import Protocol, TypeVar

from mooncake_engine.core_messages import ProgressHandler
from mooncake_engine.errors import ConfigError, EngineDead, EngineStuck
from mooncake_engine.execution.engine_plan import EnginePlan
from mooncake_engine.execution.model_runner import CompletedStep, PendingStep
from mooncake_engine.execution.parallel_state import ParallelGroups
from mooncake_engine.execution.worker import RankHandlers, Worker
from mooncake_engine.execution.worker_extension import MessageHandler
from mooncake_engine.messages import ExpertLoad, WaitedSeconds
from mooncake_engine.models.hf_config import ModelConfig
from mooncake_engine.sampling_params import Grammar
from mooncake_engine.scheduling.step_plan import StepPlan, StepResult
from mooncake_hal.backend import Backend
from mooncake_hal.kv.geometry import KVGeometry, KVShard
from mooncake_hal.kv.layout import KVLayout
from mooncake_hal.registry import Registry
from mooncake_hal.transport import MemoryRegion

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class RankKVInfo:
    """One rank's KV memory.

    Args:
        rank: which.
        shard: the part of the KV that it holds.
        layout: where it lies, in addresses of the rank's process.
        region: all of it.
    """

    rank: int
    shard: KVShard
    layout: KVLayout
    region: MemoryRegion


@dataclass(frozen=True, slots=True)
class ExecutorInfo:
    """What is fixed once an instance is loaded.

    Args:
        model: the model's config.
        geometry: its KV.
        ranks: every rank's memory, in rank order.
        num_blocks, block_size: the KV pool of each rank.
        num_host_blocks: what each rank can swap out to.
        max_model_len: longest sequence, in tokens.
        has_native_latents: whether the KV is in a layout that no peer reads; see
            ``ParallelContext``.
    """

    model: ModelConfig
    geometry: KVGeometry
    ranks: tuple[RankKVInfo, ...]
    num_blocks: int
    block_size: int
    num_host_blocks: int
    max_model_len: int
    has_native_latents: bool = False

    @property
    def vocab_size(self) -> int:
        """Token ids are below this."""
        return self.model.vocab_size

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Tokens that end a request."""
        return self.model.eos_token_ids


@dataclass(frozen=True, slots=True)
class ExecutorOptions:
    """How an executor reports and what it carries beside the model.

    Args:
        extension: name of an ExtensionFactory, ``"package.module:factory"``.
        on_message: takes what the extensions emit; called from any thread.
        progress: told while weights are read (rank 0's share).
        registry: backends and transports, for a rank in this process; other processes, and this one
            without it, discover their own.
    """

    extension: str | None = None
    on_message: MessageHandler | None = None
    progress: ProgressHandler | None = None
    registry: Registry | None = None


class Executor(Protocol):
    """All ranks of an instance. ``submit`` and results belong to one thread, ``send`` to any."""

    @property
    def info(self) -> ExecutorInfo:
        """Fixed since loading."""
        ...

    def warm_up(self) -> None:
        """Run the model once on made-up tokens; before the first plan."""
        ...

    def submit(self, plan: StepPlan) -> PendingStep:
        """Have every rank run a step behind those that were submitted before.

        Their results are asked for in the same order. ``EngineConfig.steps_in_flight`` says how
        many may be under way at once; if it is one, the step may be over when this returns.

        Raises:
            EngineDead: as ``PendingStep.result``.
        """
        ...

    @property
    def answers(self) -> Sequence[Connection]:
        """What becomes readable when the oldest step that was submitted is over on one of the
        ranks, or a rank dies: for ``multiprocessing.connection.wait``. None where the rank is of
        this process."""
        return ()

    def execute(self, plan: StepPlan) -> StepResult:
        """Run one step, with no other under way."""
        return self.submit(plan).result()

    @property
    def expert_load(self) -> ExpertLoad | None:
        """What experts got that are divided over ranks, a second ago or less; None if there are
        none. Any thread."""
        return None

    @property
    def waited_s(self) -> Sequence[WaitedSeconds]:
        """By rank, the seconds that its host has waited in collectives, a second ago or less; empty
        where there is one rank. Any thread."""
        return ()

    @property
    def compiles_grammars(self) -> bool:
        """Whether ranks compile grammars for themselves: those of this process are not theirs."""
        ...

    def prepare_grammar(self, grammar: Grammar, on_ready: Callable[[], None]) -> None:
        """Have the ranks compile a grammar beside their steps, so that a request with it, submitted
        afterwards, holds up no step. Where ``compiles_grammars``; in the thread that submits.

        Args:
            grammar: one that is known to compile.
            on_ready: called once all ranks have it or have refused it; any thread. Not called if a
                rank dies.
        """
        ...

    def send(self, message: bytes, rank: int | None = None) -> None:
        """Hand a message to one rank's extension, or to all ranks'; see ``WorkerExtension``."""
        ...

    def check(self) -> None:
        """Raise EngineDead if a rank or an extension's thread died; never blocks."""
        ...

    def abandon(self, reason: str) -> EngineDead:
        """A step does not return: end whatever it waits for, so that it fails. Any thread.

        Returns:
            The reason, with what is known of who holds the step up; EngineStuck if the step can't
            be made to fail.
        """
        ...

    def close(self) -> None:
        """End all ranks and free everything. Idempotent."""
        ...


class FirstFailure:
    """Keeps the first thing that killed an executor; any thread may record, one raises."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._cause: BaseException | None = None
        self._what = ""

    def record(self, what: str, cause: BaseException) -> None:
        """Remember what died of what, unless something died before."""
        with self._lock:
            if self._cause is None:
                self._what, self._cause = what, cause

    def check(self) -> None:
        """Raise EngineDead from the first cause, if there is one."""
        if self._cause is not None:
            raise EngineDead(f"{self._what}: {self._cause}") from self._cause


class InProcessExecutor(Executor):
    """A single rank in the caller's process; its steps run in the caller's thread, unless there may
    be several in flight.

    Args:
        plan: of one rank.
        backend: its hardware.
        options: extension and handlers.

    Raises:
        CheckpointError, ConfigError, OutOfMemory: the model can't be loaded.
    """

    def __init__(
        self, plan: EnginePlan, backend: Backend, options: ExecutorOptions | None = None
    ) -> None:
        num_ranks = plan.config.num_all_ranks
        if num_ranks != 1:
            raise ConfigError(f"one process holds one rank, {num_ranks} were asked for")
        options = options or ExecutorOptions()
        self._failure = FirstFailure()
        self._send_lock = threading.Lock()
        self._on_message = options.on_message
        self._worker = Worker(
            plan,
            backend,
            ParallelGroups(),
            registry=options.registry or Registry.discover(),
            extension=options.extension,
            handlers=RankHandlers(options.progress, self._emit, self._extension_died),
        )
        self._info = executor_info(plan, (rank_kv_info(0, self._worker),))
        self._steps: _LaunchThread | None = None
        self._caller = threading.local()
        if plan.config.steps_in_flight > 1:
            self._steps = _LaunchThread(self._launch, self._worker.bind_thread)

    @property
    def info(self) -> ExecutorInfo:
        return self._info

    @property
    def compiles_grammars(self) -> bool:
        return False

    def warm_up(self) -> None:
        self._bind_caller()
        self._worker.warm_up()

    def submit(self, plan: StepPlan) -> PendingStep:
        self._bind_caller()
        if self._steps is None:
            return CompletedStep(self._attempt(plan.step, self._launch(plan).result))
        return self._steps.submit(plan, partial(self._attempt, plan.step))

    def prepare_grammar(self, grammar: Grammar, on_ready: Callable[[], None]) -> None:
        on_ready()  # whoever checked it has compiled it, in this process

    def _bind_caller(self) -> None:
        """Steps are seldom run by the thread that loaded the model."""
        if not hasattr(self._caller, "is_bound"):
            self._worker.bind_thread()
            self._caller.is_bound = True

    def _launch(self, plan: StepPlan) -> PendingStep:
        self._failure.check()
        return self._attempt(plan.step, partial(self._worker.launch, plan))

    def _attempt(self, step: int, work: Callable[[], T]) -> T:
        try:
            return work()
        except Exception as exc:
            self._failure.record("rank 0 failed", exc)
            raise EngineDead(f"rank 0 failed in step {step}: {exc}") from exc

    def send(self, message: bytes, rank: int | None = None) -> None:
        if self._worker.extension is None or rank not in (None, 0):
            raise ConfigError(f"there is no extension on rank {rank or 0} to send to")
        try:
            with self._send_lock:
                self._worker.extension.receive(message)
        except Exception as exc:  # noqa: BLE001  the door to foreign code; check() raises it
            self._failure.record("the worker extension of rank 0 died", exc)

    def check(self) -> None:
        self._failure.check()

    def abandon(self, reason: str) -> EngineDead:
        stuck = EngineStuck(reason)
        self._failure.record("the engine was given up", stuck)
        return stuck

    def close(self) -> None:
        if self._steps is not None:
            self._steps.close()
        self._worker.close()

    def _emit(self, message: bytes) -> None:
        if self._on_message is not None:
            self._on_message(0, message)

    def _extension_died(self, cause: BaseException) -> None:
        self._failure.record("the worker extension of rank 0 died", cause)


class _LaunchedStep:
    """A step that the executor's own thread launches.

    Its result is told when the step behind it, if there is one by then, is launched: what is done
    with it would hold up that launch, as one interpreter does both.

    Args:
        plan: of it.
        attempt: guards the wait for its end.
    """

    __slots__ = ("_attempt", "_is_launched", "_pending", "following", "plan")

    def __init__(
        self, plan: StepPlan, attempt: Callable[[Callable[[], StepResult]], StepResult]
    ) -> None:
        self.plan = plan
        self._attempt = attempt
        self._is_launched = threading.Lock()  # at a tenth of what a Future's condition costs
        self._is_launched.acquire()
        self._pending: PendingStep | BaseException | None = None
        self.following: _LaunchedStep | None = None

    def launched(self, pending: PendingStep | BaseException) -> None:
        """It was launched, or could not be."""
        self._pending = pending
        self._is_launched.release()

    def result(self) -> StepResult:
        with self._is_launched:
            pending = self._pending
        assert pending is not None, "a step is launched before it can end"
        if isinstance(pending, BaseException):
            raise pending
        if self.following is not None:
            with self.following._is_launched:
                pass
        return self._attempt(pending.result)


class _LaunchThread:
    """Launches steps one behind the other, while its caller plans the next ones.

    Args:
        launch: does it.
        bind: called first.
    """

    def __init__(self, launch: Callable[[StepPlan], PendingStep], bind: Callable[[], None]) -> None:
        self._launch = launch
        self._bind = bind
        self._steps: SimpleQueue[_LaunchedStep | None] = SimpleQueue()
        self._newest: _LaunchedStep | None = None
        self._thread = threading.Thread(target=self._run, name="engine-steps", daemon=True)
        self._thread.start()

    def submit(
        self, plan: StepPlan, attempt: Callable[[Callable[[], StepResult]], StepResult]
    ) -> _LaunchedStep:
        """Have it launch a step behind those before; see ``_LaunchedStep``."""
        step = _LaunchedStep(plan, attempt)
        if self._newest is not None:
            self._newest.following = step
        self._newest = step
        self._steps.put(step)
        return step

    def close(self) -> None:
        """End the thread, after the steps that it has. Idempotent."""
        self._steps.put(None)
        self._thread.join()

    def _run(self) -> None:
        """Top of a thread."""
        broken: BaseException | None = None
        try:
            self._bind()
        except Exception as exc:  # noqa: BLE001  the top of a thread: every step says so
            broken = exc
        while (step := self._steps.get()) is not None:
            if broken is not None:
                step.launched(broken)
                continue
            try:
                step.launched(self._launch(step.plan))
            except BaseException as exc:  # noqa: BLE001  whoever waits for the step raises it
                step.launched(exc)


def rank_kv_info(rank: int, worker: Worker) -> RankKVInfo:
    """What others may know of a rank's memory."""
    return RankKVInfo(rank, worker.pool.shard, worker.pool.layout, worker.pool.region)


def executor_info(plan: EnginePlan, ranks: tuple[RankKVInfo, ...]) -> ExecutorInfo:
    """Put together what is fixed since loading; ranks that measured agree on their pool's size."""
    if plan.pool_size is None:
        plan = plan.with_blocks(ranks[0].layout.num_blocks - plan.num_scratch_blocks)
    assert plan.pool_size is not None, "a plan with blocks has a pool size"
    return ExecutorInfo(
        model=plan.model,
        geometry=plan.geometry,
        ranks=ranks,
        num_blocks=plan.pool_size.num_blocks,
        block_size=plan.pool_size.block_size,
        num_host_blocks=plan.pool_size.num_host_blocks,
        max_model_len=plan.max_model_len,
        has_native_latents=plan.has_native_latents,
    )
