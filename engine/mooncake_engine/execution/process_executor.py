"""One process per rank, on this host or, through Ray, on several."""

from __future__ import annotations

import logging
import pickle
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import count
from multiprocessing.connection import Connection, wait

from mooncake_engine.core_messages import LoadProgress
from mooncake_engine.errors import CheckpointError, ConfigError, EngineDead, EngineError
from mooncake_engine.execution import executor_messages as wire
from mooncake_engine.execution.engine_plan import EnginePlan
from mooncake_engine.execution.executor import (
    Executor,
    ExecutorInfo,
    ExecutorOptions,
    FirstFailure,
    RankKVInfo,
    executor_info,
)
from mooncake_engine.execution.model_runner import PendingStep
from mooncake_engine.execution.parallel_state import RankInfo
from mooncake_engine.execution.rank_launcher import Launcher, LocalLauncher, Rank
from mooncake_engine.messages import ExpertLoad
from mooncake_engine.sampling_params import Grammar
from mooncake_engine.scheduling.step_plan import StepPlan, StepResult
from mooncake_hal.backend import GroupSpec
from mooncake_hal.command_line import LogSettings

_GROUP_TIMEOUT_S = 60.0
_STAGE_TIMEOUT_S = 600.0
"""How long a stage may compute while the next one waits; that one died is known at once."""
_STOP_TIMEOUT_S = 10.0
_CAUSE_TIMEOUT_S = 1.0
"""How long to look for a rank that died without a word, once another one complains."""
_USER_ERRORS = {kind.__name__: kind for kind in (CheckpointError, ConfigError)}


class ProcessExecutor(Executor):
    """Ranks in processes of their own; a dead rank ends the instance with its reason.

    Args:
        plan: any ``tp_size`` and ``pp_size``; the ranks load its backend by name.
        options: extension and handlers.
        launcher: starts the ranks; closed with the executor. None: children of this process.

    Raises:
        CheckpointError, ConfigError: the model can't be loaded so.
        EngineDead: a rank died while loading.
    """

    def __init__(
        self,
        plan: EnginePlan,
        options: ExecutorOptions | None = None,
        launcher: Launcher | None = None,
    ) -> None:
        self._options = options or ExecutorOptions()
        self._failure = FirstFailure()
        self._closing = threading.Event()
        self._has_stages = plan.config.pp_size > 1
        self._unsaid: dict[str, tuple[int, ...]] = {}  # sampled; earlier stages don't know it yet
        self._launcher = launcher or LocalLauncher(plan.config)
        self._ranks: Sequence[Rank] = ()
        self._awaited: dict[Connection, Rank] = {}  # have yet to carry out their oldest order
        self._abandoned: EngineDead | None = None
        self._expert_load: ExpertLoad | None = None
        self._grammar_numbers = count()
        self._preparing: dict[int, _GrammarOrder] = {}
        self._listener = threading.Thread(target=self._listen, name="rank-messages", daemon=True)
        try:
            self._start(plan)
            infos = self._await_ready()
        except BaseException:
            self.close()
            raise
        self._info = executor_info(plan, infos)
        self._listener.start()

    @property
    def info(self) -> ExecutorInfo:
        return self._info

    @property
    def rank_pids(self) -> tuple[int, ...]:
        """Process ids, in rank order."""
        return tuple(rank.pid for rank in self._ranks)

    def warm_up(self) -> None:
        self._give(wire.WarmUp())
        self._await_done()

    def submit(self, plan: StepPlan) -> PendingStep:
        self._give(wire.Execute(plan, self._unsaid))
        self._unsaid = {}
        return _SubmittedStep(plan.step, self._collect)

    def _collect(self) -> StepResult:
        """What came of the oldest step that was submitted."""
        self._failure.check()
        result = self._await_done()
        assert result is not None, "the driver rank reports a step's result"
        if self._has_stages:
            for name, tokens in result.tokens.items():
                said = self._unsaid.get(name, ())
                self._unsaid[name] = said + tuple(token.token_id for token in tokens)
        return result

    @property
    def expert_load(self) -> ExpertLoad | None:
        return self._expert_load

    @property
    def compiles_grammars(self) -> bool:
        return True

    def prepare_grammar(self, grammar: Grammar, on_ready: Callable[[], None]) -> None:
        number = next(self._grammar_numbers)
        self._preparing[number] = _GrammarOrder({rank.rank for rank in self._ranks}, on_ready)
        self._give(wire.PrepareGrammar(number, grammar))

    def send(self, message: bytes, rank: int | None = None) -> None:
        if self._options.extension is None:
            raise ConfigError("there is no extension to send to")
        targets = self._ranks if rank is None else [self._ranks[rank]]
        for target in targets:
            try:
                target.send(message)
            except ConnectionError as exc:
                self._failure.record(f"rank {target.rank} is gone", exc)
                self._failure.check()

    def check(self) -> None:
        self._failure.check()

    def abandon(self, reason: str) -> EngineDead:
        silent = ", ".join(str(rank.rank) for rank in list(self._awaited.values()))
        who = f"; no answer of rank {silent} of {len(self._ranks)}" if silent else ""
        self._abandoned = EngineDead(reason + who)
        self._failure.record("the instance was given up", self._abandoned)
        for rank in self._ranks:  # their connections end, which is what the step waits for
            rank.kill()
        return self._abandoned

    def close(self) -> None:
        if self._closing.is_set():
            return
        self._closing.set()
        for rank in self._ranks:
            rank.order(wire.encode(wire.Stop()))
        deadline = time.monotonic() + _STOP_TIMEOUT_S
        for rank in self._ranks:
            rank.wait(max(0.0, deadline - time.monotonic()))
            rank.kill()
        if self._listener.is_alive() and self._listener is not threading.current_thread():
            self._listener.join(_STOP_TIMEOUT_S)
        for rank in self._ranks:
            rank.close()
        self._launcher.close()

    def _start(self, plan: EnginePlan) -> None:
        self._ranks = self._launcher.start()
        tp_size, pp_size = plan.config.tp_size, plan.config.pp_size
        log = LogSettings.current()
        log = replace(log, level=max(log.level, logging.WARNING))  # not all from every rank
        for rank in self._ranks:
            info = RankInfo(rank.rank, tp_size, pp_size)
            rank_plan = replace(plan, config=rank.adapt(plan.config))
            start = wire.Start(
                plan=pickle.dumps(rank_plan),
                info=info,
                stage=GroupSpec(
                    info.tp_rank,
                    tp_size,
                    self._launcher.stage_rendezvous(info.stage),
                    _GROUP_TIMEOUT_S,
                ),
                pipeline=GroupSpec(
                    info.stage,
                    pp_size,
                    self._launcher.pipeline_rendezvous(info.tp_rank),
                    _STAGE_TIMEOUT_S,
                ),
                extension=self._options.extension,
                threads=self._launcher.threads,
                log=log,
            )
            rank.order(wire.encode(start))

    def _await_ready(self) -> tuple[RankKVInfo, ...]:
        infos: dict[int, RankKVInfo] = {}
        for rank, report in self._reports():
            if isinstance(report, wire.Ready):
                infos[rank.rank] = report.info
            elif isinstance(report, wire.Progress) and self._options.progress is not None:
                progress = LoadProgress(report.loaded_bytes, report.total_bytes)
                self._options.progress(progress)
        return tuple(infos[rank.rank] for rank in self._ranks)

    def _give(self, order: wire.Order) -> None:
        """Give all ranks an order."""
        self._failure.check()
        encoded = wire.encode(order)
        for rank in self._ranks:
            rank.order(encoded)

    def _await_done(self) -> StepResult | None:
        """Wait until all ranks have carried out their oldest order; returns the result of the one
        that speaks."""
        result: StepResult | None = None
        for _, report in self._reports():
            if isinstance(report, wire.OrderDone) and report.result is not None:
                result = report.result
                self._expert_load = report.expert_load or self._expert_load
        return result

    def _reports(self) -> Iterator[tuple[Rank, wire.Report]]:
        """Reports as they come, until every rank is Ready or OrderDone.

        Raises:
            EngineError: a rank failed or died; all the others are ended.
        """
        self._awaited = pending = {rank.orders: rank for rank in self._ranks}
        while pending:
            for connection in wait(list(pending)):
                assert isinstance(connection, Connection)
                rank = pending[connection]
                report = rank.report()
                if report is None or isinstance(report, wire.RankFailed):
                    raise self._end_all(rank)
                if not isinstance(report, wire.Progress):
                    del pending[connection]
                yield rank, report

    def _end_all(self, noticed: Rank) -> EngineError:
        """End every rank after one failed; returns what to raise, about the true culprit."""
        if self._abandoned is not None:
            return self._abandoned
        culprit = self._find_culprit(noticed)
        what = f"rank {culprit.rank} of {len(self._ranks)} died: {culprit.describe_end()}"
        kind = _USER_ERRORS.get(culprit.failed.kind) if culprit.failed else None
        error = kind(culprit.failed.reason) if kind and culprit.failed else EngineDead(what)
        # before the others are killed: their ends are consequences, and must not come first
        self._failure.record("the instance ended", error)
        for rank in self._ranks:
            rank.kill()
        return error

    def _find_culprit(self, noticed: Rank) -> Rank:
        """A rank that vanished makes others complain about the group; it is the one to name."""
        deadline = time.monotonic() + _CAUSE_TIMEOUT_S
        while time.monotonic() < deadline:
            for rank in self._ranks:
                if rank.has_vanished():
                    return rank
            if noticed.failed is not None and noticed.failed.kind in _USER_ERRORS:
                return noticed
            time.sleep(0.01)
        return noticed

    def _listen(self) -> None:
        try:
            self._pass_messages()
        except Exception as exc:  # noqa: BLE001  the thread's top; check() raises it
            self._failure.record("the thread that passes the ranks' messages on died", exc)

    def _pass_messages(self) -> None:
        """Pass the extensions' messages on; notice ranks that die while nothing runs."""
        open_ends = {rank.messages: rank for rank in self._ranks}
        while open_ends:
            for connection in wait(list(open_ends)):
                assert isinstance(connection, Connection)
                rank = open_ends[connection]
                if not self._pass_on(rank):
                    del open_ends[connection]

    def _pass_on(self, rank: Rank) -> bool:
        """Handle one notice of a rank; returns whether more may come."""
        try:
            notice = wire.decode_notice(rank.messages.recv_bytes())
        except (EOFError, ConnectionError):
            self._record_end(rank)
            return False
        if isinstance(notice, wire.ExtensionFailed):
            reason = EngineDead(notice.reason)
            self._failure.record(f"the worker extension of rank {rank.rank} died", reason)
        elif isinstance(notice, wire.GrammarReady):
            order = self._preparing[notice.number]
            order.awaited.remove(rank.rank)
            if not order.awaited:
                del self._preparing[notice.number]
                order.on_ready()
        elif self._options.on_message is not None:
            self._options.on_message(rank.rank, notice.message)
        return True

    def _record_end(self, rank: Rank) -> None:
        if self._closing.is_set():
            return
        if not rank.wait(_CAUSE_TIMEOUT_S):
            rank.kill()
        cause = EngineDead(rank.describe_end())
        self._failure.record(f"rank {rank.rank} of {len(self._ranks)} died", cause)


@dataclass(frozen=True, slots=True)
class _GrammarOrder:
    """A grammar that ranks compile, and whom to tell when ``awaited`` is empty."""

    awaited: set[int]
    on_ready: Callable[[], None]


@dataclass(frozen=True, slots=True)
class _SubmittedStep:
    """A step that the ranks have been told to run; ``collect`` takes the oldest one's result."""

    step: int
    collect: Callable[[], StepResult]

    def result(self) -> StepResult:
        result = self.collect()
        assert result.step == self.step, f"asked for step {self.step} before {result.step}"
        return result
