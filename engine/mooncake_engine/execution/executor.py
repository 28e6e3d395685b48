"""The executor: all ranks of an instance as one object, which the engine's core drives.

``InProcessExecutor`` runs a single rank in this process; ``ProcessExecutor`` runs one process per
rank.
"""

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
    """The KV memory of one rank.

    Args:
        rank: number of the rank.
        shard: the part of the model's KV that the rank holds.
        layout: where each block is, in addresses of the rank's process.
        region: the memory as a whole, for registration with transports.
    """

    rank: int
    shard: KVShard
    layout: KVLayout
    region: MemoryRegion


@dataclass(frozen=True, slots=True)
class ExecutorInfo:
    """The properties of an instance that are fixed once it is loaded.

    Args:
        model: the model's config.
        geometry: the model's KV.
        ranks: KV memory of every rank, in rank order.
        num_blocks: blocks in the KV cache of each rank.
        block_size: tokens per block.
        num_host_blocks: blocks of host memory that each rank can swap out to.
        max_model_len: longest sequence, in tokens.
        has_native_latents: whether the KV is in a layout that peers can't read; see
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
    """The callbacks of an executor, and the extension that its ranks load.

    Args:
        extension: name of an ExtensionFactory, ``"package.module:factory"``.
        on_message: called with each message of an extension, from any thread.
        progress: called while rank 0 reads its weights.
        registry: backends and transports for a rank in this process; if None, they are discovered.
            Ranks in other processes always discover their own.
    """

    extension: str | None = None
    on_message: MessageHandler | None = None
    progress: ProgressHandler | None = None
    registry: Registry | None = None


class Executor(Protocol):
    """All ranks of an instance. Steps and their results belong to one thread, ``send`` to any."""

    @property
    def info(self) -> ExecutorInfo:
        """The instance's fixed properties."""
        ...

    def warm_up(self) -> None:
        """Run the model once on made-up tokens. Call before the first ``execute_model``."""
        ...

    def execute_model(self, plan: StepPlan) -> PendingStep:
        """Have every rank run a step after those that were submitted before.

        The caller must request the results in the order of submission, with at most
        ``EngineConfig.steps_in_flight`` steps in flight. If that is one, the step may be complete
        when this returns.

        Raises:
            EngineDead: as ``PendingStep.result``.
        """
        ...

    @property
    def step_connections(self) -> Sequence[Connection]:
        """Connections to pass to ``multiprocessing.connection.wait``: one becomes readable when a
        rank has finished the oldest submitted step, or has died. Empty if the rank runs in this
        process."""
        return ()

    @property
    def expert_load(self) -> ExpertLoad | None:
        """The load of experts that are divided over ranks, at most a second old; None if there are
        no such experts. Any thread."""
        return None

    @property
    def waited_s(self) -> Sequence[WaitedSeconds]:
        """By rank, the seconds that its host has waited in collectives, at most a second old;
        empty if there is a single rank. Any thread."""
        return ()

    @property
    def compiles_grammars(self) -> bool:
        """Whether ranks compile grammars in processes of their own, and so can't use those that
        this process has compiled."""
        ...

    def prepare_grammar(self, grammar: Grammar, on_ready: Callable[[], None]) -> None:
        """Have the ranks compile a grammar while they run steps, so that a request that uses it
        later delays no step. Used if ``compiles_grammars``; call it from the thread that submits.

        Args:
            grammar: one that is known to compile.
            on_ready: called from any thread once all ranks have compiled or rejected it. Not called
                if a rank dies.
        """
        ...

    def send(self, message: bytes, rank: int | None = None) -> None:
        """Send a message to the extension of one rank, or of every rank if ``rank`` is None; see
        ``WorkerExtension``."""
        ...

    def check(self) -> None:
        """Raise EngineDead if a rank or a thread of an extension died. Never blocks."""
        ...

    def abandon(self, reason: str) -> EngineDead:
        """Make a step that does not return fail, by ending whatever it waits for. Any thread.

        Returns:
            An error with ``reason`` and what is known of the rank that holds the step up;
            EngineStuck if the step can't be made to fail.
        """
        ...

    def close(self) -> None:
        """End all ranks and free everything. Idempotent."""
        ...


class FirstFailure:
    """Keeps the first error that ended an executor. Any thread may record, one thread raises."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._cause: BaseException | None = None
        self._what = ""

    def record(self, what: str, cause: BaseException) -> None:
        """Record what failed and why, unless a failure is recorded already."""
        with self._lock:
            if self._cause is None:
                self._what, self._cause = what, cause

    def check(self) -> None:
        """Raise EngineDead from the first failure, if one is recorded."""
        if self._cause is not None:
            raise EngineDead(f"{self._what}: {self._cause}") from self._cause


class InProcessExecutor(Executor):
    """Runs a single rank in the caller's process. Steps are launched in the caller's thread, or, if
    several may be in flight, in a thread of the executor.

    Args:
        plan: the plan of an instance with one rank.
        backend: the backend of the rank's device.
        options: extension and callbacks.

    Raises:
        CheckpointError, ConfigError, OutOfMemory: the model can't be loaded.
    """

    def __init__(
        self, plan: EnginePlan, backend: Backend, options: ExecutorOptions | None = None
    ) -> None:
        num_ranks = plan.config.num_all_ranks
        if num_ranks != 1:
            raise ConfigError(f"the in-process executor runs one rank, {num_ranks} were requested")
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

    def execute_model(self, plan: StepPlan) -> PendingStep:
        self._bind_caller()
        if self._steps is None:
            return CompletedStep(self._attempt(plan.step, self._launch(plan).result))
        return self._steps.submit(plan, partial(self._attempt, plan.step))

    def prepare_grammar(self, grammar: Grammar, on_ready: Callable[[], None]) -> None:
        on_ready()  # the front end compiled it in this process when it checked the request

    def _bind_caller(self) -> None:
        """Bind the calling thread to the device: it is seldom the one that loaded the model."""
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
            raise ConfigError(f"rank {rank or 0} has no extension to send a message to")
        try:
            with self._send_lock:
                self._worker.extension.receive(message)
        except Exception as exc:  # noqa: BLE001  the door to foreign code; check() raises it
            self._failure.record("the worker extension of rank 0 died", exc)

    def check(self) -> None:
        self._failure.check()

    def abandon(self, reason: str) -> EngineDead:
        stuck = EngineStuck(reason)
        self._failure.record("the engine was abandoned", stuck)
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
    """A step that ``_LaunchThread`` launches.

    ``result`` returns only after the next step, if one is submitted by then, is launched too: both
    threads share one interpreter, so the work on a result would delay that launch.

    Args:
        plan: the step's plan.
        attempt: calls the wait for the step's end, and turns its errors into EngineDead.
    """

    __slots__ = ("_attempt", "_is_launched", "_pending", "following", "plan")

    def __init__(
        self, plan: StepPlan, attempt: Callable[[Callable[[], StepResult]], StepResult]
    ) -> None:
        self.plan = plan
        self._attempt = attempt
        self._is_launched = threading.Lock()  # a tenth of the cost of a Future's condition
        self._is_launched.acquire()
        self._pending: PendingStep | BaseException | None = None
        self.following: _LaunchedStep | None = None

    def set_launched(self, pending: PendingStep | BaseException) -> None:
        """Record that the step was launched, or the error that prevented it."""
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
    """Launches steps one after another, while its caller plans the next ones.

    Args:
        launch: launches one step.
        bind: called once in the thread, before the first launch.
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
        """Queue a step for launch; see ``_LaunchedStep``."""
        step = _LaunchedStep(plan, attempt)
        if self._newest is not None:
            self._newest.following = step
        self._newest = step
        self._steps.put(step)
        return step

    def close(self) -> None:
        """Launch the queued steps, then stop the thread. Idempotent."""
        self._steps.put(None)
        self._thread.join()

    def _run(self) -> None:
        """The thread's main loop."""
        broken: BaseException | None = None
        try:
            self._bind()
        except Exception as exc:  # noqa: BLE001  the top of a thread: every step raises it
            broken = exc
        while (step := self._steps.get()) is not None:
            if broken is not None:
                step.set_launched(broken)
                continue
            try:
                step.set_launched(self._launch(step.plan))
            except BaseException as exc:  # noqa: BLE001  the step's result() raises it
                step.set_launched(exc)


def rank_kv_info(rank: int, worker: Worker) -> RankKVInfo:
    """Describe the KV memory of a rank to other processes and instances."""
    return RankKVInfo(rank, worker.pool.shard, worker.pool.layout, worker.pool.region)


def executor_info(plan: EnginePlan, ranks: tuple[RankKVInfo, ...]) -> ExecutorInfo:
    """Collect the fixed properties of a loaded instance. If the ranks measured the size of their
    pools, they agree on it."""
    if plan.kv_cache_size is None:
        plan = plan.with_blocks(ranks[0].layout.num_blocks - plan.num_scratch_blocks)
    assert plan.kv_cache_size is not None, "a plan with blocks has the size of its KV cache"
    return ExecutorInfo(
        model=plan.model,
        geometry=plan.geometry,
        ranks=ranks,
        num_blocks=plan.kv_cache_size.num_blocks,
        block_size=plan.kv_cache_size.block_size,
        num_host_blocks=plan.kv_cache_size.num_host_blocks,
        max_model_len=plan.max_model_len,
        has_native_latents=plan.has_native_latents,
    )
