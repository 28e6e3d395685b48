"""Executor that runs one process per rank: on this host, on several nodes, or on a Ray cluster."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection

from mooncake_engine.errors import ConfigError, EngineDead
from mooncake_engine.execution import executor_messages as wire
from mooncake_engine.execution.engine_plan import EnginePlan
from mooncake_engine.execution.executor import (
    Executor,
    ExecutorInfo,
    ExecutorOptions,
    executor_info,
)
from mooncake_engine.execution.model_runner import PendingStep
from mooncake_engine.execution.rank_launcher import Launcher
from mooncake_engine.execution.rank_processes import RankProcesses
from mooncake_engine.messages import ExpertLoad, WaitedSeconds
from mooncake_engine.sampling_params import Grammar
from mooncake_engine.scheduling.step_plan import StepPlan, StepResult


class ProcessExecutor(Executor):
    """Runs the ranks of one data-parallel rank, each in a process. If one dies, the whole instance
    ends with its reason.

    Args:
        plan: the instance's plan, with any ``tp_size`` and ``pp_size``.
        options: extension and callbacks.
        launcher: starts the ranks, and is closed with the executor; None to run them as children of
            this process.
        processes: the processes of all ranks, if ``plan`` has several data-parallel ranks; None to
            start them here. Closed with the executor.
        dp_rank: number of the data-parallel rank.

    Raises:
        CheckpointError, ConfigError: the model can't be loaded with this plan.
        EngineDead: a rank died while loading.
    """

    def __init__(
        self,
        plan: EnginePlan,
        options: ExecutorOptions | None = None,
        launcher: Launcher | None = None,
        *,
        processes: RankProcesses | None = None,
        dp_rank: int = 0,
    ) -> None:
        self._options = options or ExecutorOptions()
        self._has_stages = plan.config.pp_size > 1
        # tokens that the last stage sampled and the other stages don't have yet, by request
        self._unsent_tokens: dict[str, tuple[int, ...]] = {}
        self._processes = processes or RankProcesses(plan, [self._options], launcher)
        self._ranks = self._processes.ranks_of(dp_rank)
        self._expert_loads: list[ExpertLoad | None] = [None for _ in self._ranks]
        self._waited_s: list[WaitedSeconds] = [{} for _ in self._ranks]
        self._step_connections = tuple(rank.orders for rank in self._ranks)
        kv_infos = [self._processes.kv_infos[rank.rank] for rank in self._ranks]
        self._info = executor_info(plan, tuple(kv_infos))

    @property
    def info(self) -> ExecutorInfo:
        return self._info

    @property
    def rank_pids(self) -> tuple[int, ...]:
        """Process ids, in rank order."""
        return tuple(rank.pid for rank in self._ranks)

    def warm_up(self) -> None:
        self._processes.send_order(self._ranks, wire.WarmUp())
        self._await_done()

    def execute_model(self, plan: StepPlan) -> PendingStep:
        packed = wire.PackedPlan.of(plan)
        self._processes.send_order(self._ranks, wire.ExecuteModel(packed, self._unsent_tokens))
        self._unsent_tokens = {}
        return _SubmittedStep(plan.step, self._collect)

    @property
    def step_connections(self) -> Sequence[Connection]:
        return self._step_connections

    def _collect(self) -> StepResult:
        """Wait for the oldest submitted step; returns its result."""
        self.check()
        result = self._await_done()
        assert result is not None, "the driver rank reports a step's result"
        if self._has_stages:
            for name in (*result.tokens, *result.plain_tokens):
                unsent, tokens = self._unsent_tokens.get(name, ()), result.tokens_of(name)
                self._unsent_tokens[name] = unsent + tuple(token.token_id for token in tokens)
        return result

    @property
    def expert_load(self) -> ExpertLoad | None:
        return ExpertLoad.of_stages([load for load in self._expert_loads if load is not None])

    @property
    def waited_s(self) -> Sequence[WaitedSeconds]:
        return tuple(self._waited_s)

    @property
    def compiles_grammars(self) -> bool:
        return True

    def prepare_grammar(self, grammar: Grammar, on_ready: Callable[[], None]) -> None:
        self._processes.prepare_grammar(self._ranks, grammar, on_ready)

    def send(self, message: bytes, rank: int | None = None) -> None:
        if self._options.extension is None:
            raise ConfigError("the ranks have no extension to send a message to")
        targets = self._ranks if rank is None else [self._ranks[rank]]
        for target in targets:
            try:
                target.send(message)
            except ConnectionError as exc:
                self._processes.failure.record(f"rank {target.rank} is gone", exc)
                self.check()

    def check(self) -> None:
        self._processes.failure.check()

    def abandon(self, reason: str) -> EngineDead:
        return self._processes.abandon(reason)

    def close(self) -> None:
        self._processes.close()

    def _await_done(self) -> StepResult | None:
        """Wait until all ranks have completed their oldest order; returns the result that the
        driver rank reported, if any."""
        result: StepResult | None = None
        for rank, report in self._processes.reports(self._ranks):
            if not isinstance(report, wire.OrderDone):
                continue
            result = report.result or result
            index = self._ranks.index(rank)
            self._expert_loads[index] = report.expert_load or self._expert_loads[index]
            if report.waited_s is not None:
                self._waited_s[index] = report.waited_s
        return result


@dataclass(frozen=True, slots=True)
class _SubmittedStep:
    """A step that was sent to the ranks; ``collect`` waits for the oldest such step."""

    step: int
    collect: Callable[[], StepResult]

    def result(self) -> StepResult:
        result = self.collect()
        assert result.step == self.step, f"step {self.step} requested, the oldest is {result.step}"
        return result
