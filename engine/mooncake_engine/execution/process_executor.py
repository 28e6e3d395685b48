"""One process per rank, on this host or, through Ray, on several."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait

from mooncake_engine.config import EngineConfig
from mooncake_engine.errors import CheckpointError, ConfigError, EngineDead, EngineError
from mooncake_engine.execution import rank_messages as wire
from mooncake_engine.execution.executor import (
    Executor,
    ExecutorFacts,
    ExecutorOptions,
    FirstFailure,
    RankFacts,
    make_facts,
)
from mooncake_engine.execution.pending import PendingStep
from mooncake_engine.execution.rank_place import RankPlace
from mooncake_engine.execution.ranks import Launcher, LocalLauncher, Rank
from mooncake_engine.execution.setup import plan_execution
from mooncake_engine.execution.weights import LoadProgress
from mooncake_engine.models.heads import share_heads
from mooncake_engine.scheduling.plan import StepPlan, StepResult
from mooncake_hal.backend import Backend, GroupSpec

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
        config: any ``tp_size`` and ``pp_size``.
        backend: the ranks load it by name; this process only reads its facts.
        options: extension and handlers.
        launcher: starts the ranks; closed with the executor. None: children of this process.

    Raises:
        CheckpointError, ConfigError: the model can't be loaded so.
        EngineDead: a rank died while loading.
    """

    def __init__(
        self,
        config: EngineConfig,
        backend: Backend,
        options: ExecutorOptions | None = None,
        launcher: Launcher | None = None,
    ) -> None:
        self._options = options or ExecutorOptions()
        self._failure = FirstFailure()
        self._closing = threading.Event()
        self._has_stages = config.pp_size > 1
        self._unsaid: dict[str, tuple[int, ...]] = {}  # sampled; earlier stages don't know it yet
        setup = plan_execution(config, backend)
        for rank in range(config.tp_size):  # refuse before anything is started
            for model in setup.models:
                share_heads(model.num_heads, model.num_kv_heads, config.tp_size, rank)
        self._launcher = launcher or LocalLauncher(config)
        self._ranks: Sequence[Rank] = ()
        self._listener = threading.Thread(target=self._listen, name="rank-messages", daemon=True)
        try:
            self._start(config, backend)
            facts = self._await_ready()
        except BaseException:
            self.close()
            raise
        self._facts = make_facts(config, setup, facts)
        self._listener.start()

    @property
    def facts(self) -> ExecutorFacts:
        """See ``Executor``."""
        return self._facts

    @property
    def rank_pids(self) -> tuple[int, ...]:
        """Process ids, in rank order."""
        return tuple(rank.pid for rank in self._ranks)

    def warm_up(self) -> None:
        """See ``Executor``."""
        self._give(wire.WarmUp())
        self._await_done()

    def submit(self, plan: StepPlan) -> PendingStep:
        """See ``Executor``."""
        self._give(wire.Execute(plan, self._unsaid))
        self._unsaid = {}
        return _SubmittedStep(plan.step, self._collect)

    def _collect(self) -> StepResult:
        """What came of the oldest step that was submitted."""
        self._failure.check()
        result = self._await_done()
        assert result is not None, "the rank that speaks answers a step with its result"
        if self._has_stages:
            for name, tokens in result.tokens.items():
                said = self._unsaid.get(name, ())
                self._unsaid[name] = said + tuple(token.token_id for token in tokens)
        return result

    def send(self, message: bytes, rank: int | None = None) -> None:
        """See ``Executor``."""
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
        """See ``Executor``."""
        self._failure.check()

    def close(self) -> None:
        """See ``Executor``."""
        if self._closing.is_set():
            return
        self._closing.set()
        for rank in self._ranks:
            rank.order(wire.encode(wire.Stop()))
        deadline = time.monotonic() + _STOP_TIMEOUT_S
        for rank in self._ranks:
            self._reap(rank, deadline)
        if self._listener.is_alive() and self._listener is not threading.current_thread():
            self._listener.join(_STOP_TIMEOUT_S)
        for rank in self._ranks:
            rank.close()
        self._launcher.close()

    def _start(self, config: EngineConfig, backend: Backend) -> None:
        extension, threads = self._options.extension, self._launcher.threads
        self._ranks = self._launcher.start()
        for rank in self._ranks:
            place = RankPlace(rank.rank, config.tp_size, config.pp_size)
            stage, pipeline = self._groups(place)
            whose = (rank.adapt(config), backend.name)
            start = wire.Start(*whose, place, stage, pipeline, extension, threads)
            rank.order(wire.encode(start))

    def _groups(self, place: RankPlace) -> tuple[GroupSpec, GroupSpec]:
        """The groups of a rank: its stage's, and that of its like in all stages."""
        where = self._launcher.stage_rendezvous(place.stage)
        stage = GroupSpec(place.tp_rank, place.tp_size, where, _GROUP_TIMEOUT_S)
        where = self._launcher.pipeline_rendezvous(place.tp_rank)
        return stage, GroupSpec(place.stage, place.pp_size, where, _STAGE_TIMEOUT_S)

    def _await_ready(self) -> tuple[RankFacts, ...]:
        facts: dict[int, RankFacts] = {}
        for rank, report in self._reports():
            if isinstance(report, wire.Ready):
                facts[rank.rank] = report.facts
            elif isinstance(report, wire.Progress) and self._options.progress is not None:
                progress = LoadProgress(report.loaded_bytes, report.total_bytes)
                self._options.progress(progress)
        return tuple(facts[rank.rank] for rank in self._ranks)

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
            if isinstance(report, wire.Done) and report.result is not None:
                result = report.result
        return result

    def _reports(self) -> Iterator[tuple[Rank, wire.Report]]:
        """Reports as they come, until every rank is Ready or Done.

        Raises:
            EngineError: a rank failed or died; all the others are ended.
        """
        pending = {rank.orders: rank for rank in self._ranks}
        while pending:
            for connection in wait(list(pending)):
                assert isinstance(connection, Connection)
                rank = pending[connection]
                report = rank.report()
                if report is None or isinstance(report, wire.Failed):
                    raise self._end_all(rank)
                if not isinstance(report, wire.Progress):
                    del pending[connection]
                yield rank, report

    def _end_all(self, noticed: Rank) -> EngineError:
        """End every rank after one failed; returns what to raise, about the true culprit."""
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

    def _reap(self, rank: Rank, deadline: float) -> None:
        rank.wait(max(0.0, deadline - time.monotonic()))
        rank.kill()


@dataclass(frozen=True, slots=True)
class _SubmittedStep:
    """A step that the ranks have been told to run; ``collect`` takes the oldest one's result."""

    step: int
    collect: Callable[[], StepResult]

    def result(self) -> StepResult:
        """See ``PendingStep``."""
        result = self.collect()
        assert result.step == self.step, f"asked for step {self.step} before {result.step}"
        return result
