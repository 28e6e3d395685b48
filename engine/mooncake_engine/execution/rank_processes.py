"""The rank processes of an instance: starts them, reads their reports, and ends the instance with
the reason when one of them dies."""

from __future__ import annotations

import logging
import pickle
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from multiprocessing.connection import Connection, Pipe, wait

from mooncake_engine.core_messages import LoadProgress
from mooncake_engine.errors import CheckpointError, ConfigError, EngineDead, EngineError
from mooncake_engine.execution import executor_messages as wire
from mooncake_engine.execution.engine_plan import EnginePlan
from mooncake_engine.execution.executor import ExecutorOptions, FirstFailure, RankKVInfo
from mooncake_engine.execution.parallel_state import RankInfo
from mooncake_engine.execution.rank_launcher import Launcher, LocalLauncher, Rank
from mooncake_engine.sampling_params import Grammar
from mooncake_hal.backend import GroupSpec
from mooncake_hal.command_line import LogSettings

_GROUP_TIMEOUT_S = 60.0
"""Least timeout of collectives of the stage and expert groups, which a rank that loads more slowly
than the others may use up."""
_STAGE_TIMEOUT_S = 600.0
"""Least timeout of the pipeline group: how long a stage may compute while the next one waits for
it. A stage that died is noticed at once, without this timeout."""
_WATCH_MARGIN_S = 30.0
"""How much later than the watch over steps collectives time out: the watch names the rank that did
not answer, a collective only the one that waited for it."""
_UNLIMITED_S = 7 * 86400.0
"""Timeout of collectives if steps may take any time."""
_STOP_TIMEOUT_S = 10.0
"""How long ranks may take to exit after Stop before they are killed."""
_CAUSE_TIMEOUT_S = 1.0
"""How long to look for a rank that died without a report, after another one has reported an error.
"""
_USER_ERRORS = {kind.__name__: kind for kind in (CheckpointError, ConfigError)}


class RankProcesses:
    """The processes of all ranks of an instance, in order. If one dies, all are ended.

    Args:
        plan: the instance's plan, with any ``dp_size``, ``tp_size`` and ``pp_size``; the ranks load
            its backend by name.
        options: extension and callbacks of each data-parallel rank. Only the first one's
            ``progress`` is called.
        launcher: starts the ranks, and is closed with this object; None to run them as children of
            this process.

    Raises:
        CheckpointError, ConfigError: the model can't be loaded with this plan.
        EngineDead: a rank died while loading.
    """

    def __init__(
        self,
        plan: EnginePlan,
        options: Sequence[ExecutorOptions],
        launcher: Launcher | None = None,
    ) -> None:
        self.failure = FirstFailure()
        self.ranks: Sequence[Rank] = ()
        self.infos: list[RankInfo] = RankInfo.all_of(plan.config)
        self._options = options
        self._closing = threading.Event()
        self._launcher = launcher or LocalLauncher(plan.config)
        self._open_orders: Counter[int] = Counter()  # orders without a report, by rank
        self._abandoned: EngineDead | None = None
        self._grammar_numbers = count()
        self._preparing: dict[int, _GrammarOrder] = {}
        self._ended, self._ended_to = Pipe(duplex=False)  # numbers of ranks that have ended
        self._listener = threading.Thread(target=self._listen, name="rank-messages", daemon=True)
        try:
            self._start(plan)
            self.kv_infos = self._await_ready(options[0])
        except BaseException:
            self.close()
            raise
        self._listener.start()

    def ranks_of(self, dp_rank: int) -> Sequence[Rank]:
        """The ranks of a data-parallel rank."""
        per = len(self.ranks) // len(self._options)
        return self.ranks[dp_rank * per : (dp_rank + 1) * per]

    def send_order(self, ranks: Sequence[Rank], order: wire.Order) -> None:
        """Send ranks an order; each of them will send a report for it.

        Raises:
            EngineDead: a rank has died.
        """
        self.failure.check()
        encoded = wire.encode(order)
        for rank in ranks:
            self._open_orders[rank.rank] += 1
            rank.send_order(encoded)

    def prepare_grammar(
        self, ranks: Sequence[Rank], grammar: Grammar, on_ready: Callable[[], None]
    ) -> None:
        """Have ranks compile a grammar; they answer with GrammarReady, not with a report. See
        ``Executor``."""
        self.failure.check()
        number = next(self._grammar_numbers)
        self._preparing[number] = _GrammarOrder({rank.rank for rank in ranks}, on_ready)
        encoded = wire.encode(wire.PrepareGrammar(number, grammar))
        for rank in ranks:
            rank.send_order(encoded)

    def reports(self, ranks: Sequence[Rank]) -> Iterator[tuple[Rank, wire.Report]]:
        """Yield reports as they arrive, until each of these ranks has sent Ready or OrderDone.

        Raises:
            EngineError: a rank failed or died, one of these or another, without which these may
                hang in a collective; all others were ended.
        """
        pending = {rank.orders: rank for rank in ranks}
        while pending:
            for connection in wait([*pending, self._ended]):
                assert isinstance(connection, Connection)
                if connection is self._ended:
                    raise self._kill_all(self.ranks[int(self._ended.recv_bytes())])
                rank = pending[connection]
                report = rank.receive_report()
                if report is None or isinstance(report, wire.RankFailed):
                    raise self._kill_all(rank)
                if not isinstance(report, wire.Progress):
                    del pending[connection]
                    self._open_orders[rank.rank] -= 1
                yield rank, report

    def abandon(self, reason: str) -> EngineDead:
        """Kill all ranks, because a report is overdue; returns an error that names the ranks whose
        reports are missing."""
        silent = [
            str(rank.rank)
            for rank in self.ranks
            if self._open_orders[rank.rank] > 0 and not rank.orders.poll()
        ]
        who = f"; no answer from rank {', '.join(silent)} of {len(self.ranks)}" if silent else ""
        for rank in self.ranks:
            if rank.is_frozen():
                who += f"; rank {rank.rank} is stopped (SIGSTOP, or a debugger)"
        self._abandoned = EngineDead(reason + who)
        self.failure.record("the instance was abandoned", self._abandoned)
        for rank in self.ranks:  # closes their connections, which ends the wait for the step
            rank.kill()
        return self._abandoned

    def close(self) -> None:
        """Stop all ranks, kill those that don't exit in time, and free everything. Idempotent."""
        if self._closing.is_set():
            return
        self._closing.set()
        for rank in self.ranks:
            rank.send_order(wire.encode(wire.Stop()))
        deadline = time.monotonic() + _STOP_TIMEOUT_S
        for rank in self.ranks:
            rank.wait(max(0.0, deadline - time.monotonic()))
            rank.kill()
        if self._listener.is_alive() and self._listener is not threading.current_thread():
            self._listener.join(_STOP_TIMEOUT_S)
        for rank in self.ranks:
            rank.close()
        self._ended.close()
        self._ended_to.close()
        self._launcher.close()

    def _start(self, plan: EnginePlan) -> None:
        self.ranks = self._launcher.start()
        log = LogSettings.current()
        log = replace(log, level=max(log.level, logging.WARNING))  # or each rank would log it all
        timeout_s = partial(_collective_timeout_s, plan.config.step_timeout_s)
        for rank, info in zip(self.ranks, self.infos, strict=True):
            rank_plan = replace(plan, config=rank.adapt(plan.config))
            num_expert_ranks = info.dp_size * info.tp_size if plan.config.has_expert_rounds else 1
            start = wire.Start(
                plan=pickle.dumps(rank_plan),
                info=info,
                stage=self._group(
                    info.stage_name, info.tp_rank, info.tp_size, timeout_s(_GROUP_TIMEOUT_S)
                ),
                pipeline=self._group(
                    info.pipeline_name, info.stage, info.pp_size, timeout_s(_STAGE_TIMEOUT_S)
                ),
                experts=self._group(
                    info.experts_name,
                    info.expert_rank,
                    num_expert_ranks,
                    timeout_s(_GROUP_TIMEOUT_S),
                ),
                extension=self._options[info.dp_rank].extension,
                threads=self._launcher.threads,
                log=log,
            )
            self._open_orders[rank.rank] += 1
            rank.send_order(wire.encode(start))

    def _group(self, name: str, rank: int, world_size: int, timeout_s: float) -> GroupSpec | None:
        if world_size == 1:
            return None
        return GroupSpec(rank, world_size, self._launcher.rendezvous(name), timeout_s)

    def _await_ready(self, options: ExecutorOptions) -> tuple[RankKVInfo, ...]:
        for _, report in self.reports(self.ranks):
            if isinstance(report, wire.Progress) and options.progress is not None:
                options.progress(LoadProgress(report.loaded_bytes, report.total_bytes))
        self.send_order(self.ranks, wire.MakeKVCache())
        infos: dict[int, RankKVInfo] = {}
        for rank, report in self.reports(self.ranks):
            assert isinstance(report, wire.Ready), f"a rank answered MakeKVCache with {report}"
            infos[rank.rank] = report.info
        return tuple(infos[rank.rank] for rank in self.ranks)

    def _kill_all(self, noticed: Rank) -> EngineError:
        """Kill every rank after one failed; returns the error to raise, which names the rank that
        failed first."""
        if self._abandoned is not None:
            return self._abandoned
        culprit = self._find_culprit(noticed)
        what = f"rank {culprit.rank} of {len(self.ranks)} died: {culprit.describe_end()}"
        kind = _USER_ERRORS.get(culprit.failed.kind) if culprit.failed else None
        error = kind(culprit.failed.reason) if kind and culprit.failed else EngineDead(what)
        # recorded before the others are killed, as their ends must not be taken for the cause
        self.failure.record("the instance ended", error)
        for rank in self.ranks:
            rank.kill()
        return error

    def _find_culprit(self, noticed: Rank) -> Rank:
        """The rank to name in the error. If a rank vanishes, others report a failed collective; the
        vanished rank is the cause."""
        deadline = time.monotonic() + _CAUSE_TIMEOUT_S
        while time.monotonic() < deadline:
            for rank in (noticed, *self.ranks):
                if rank.has_vanished():
                    return rank
            if noticed.failed is not None and noticed.failed.kind in _USER_ERRORS:
                return noticed
            time.sleep(0.01)
        return noticed

    def _listen(self) -> None:
        try:
            self._receive_notices()
        except Exception as exc:  # noqa: BLE001  the thread's top; check() raises it
            self.failure.record("the thread that passes the ranks' messages on died", exc)

    def _receive_notices(self) -> None:
        """Pass the extensions' messages on, and notice ranks that die while no step runs."""
        open_ends = {rank.messages: rank for rank in self.ranks}
        while open_ends:
            for connection in wait(list(open_ends)):
                assert isinstance(connection, Connection)
                rank = open_ends[connection]
                if not self._handle_notice(rank):
                    del open_ends[connection]

    def _handle_notice(self, rank: Rank) -> bool:
        """Handle one notice of a rank; returns whether more may come."""
        try:
            notice = wire.decode_notice(rank.messages.recv_bytes())
        except (EOFError, OSError):  # a host that has vanished: ETIMEDOUT or EHOSTUNREACH
            self._record_end(rank)
            return False
        if isinstance(notice, wire.ExtensionFailed):
            reason = EngineDead(notice.reason)
            self.failure.record(f"the worker extension of rank {rank.rank} died", reason)
        elif isinstance(notice, wire.GrammarReady):
            order = self._preparing[notice.number]
            order.awaited.remove(rank.rank)
            if not order.awaited:
                del self._preparing[notice.number]
                order.on_ready()
        else:
            info = self.infos[rank.rank]
            on_message = self._options[info.dp_rank].on_message
            if on_message is not None:
                on_message(info.rank, notice.message)
        return True

    def _record_end(self, rank: Rank) -> None:
        if self._closing.is_set():
            return
        if not rank.wait(_CAUSE_TIMEOUT_S):
            rank.kill()
        cause = EngineDead(rank.describe_end())
        self.failure.record(f"rank {rank.rank} of {len(self.ranks)} died", cause)
        self._ended_to.send_bytes(str(rank.rank).encode())


@dataclass(frozen=True, slots=True)
class _GrammarOrder:
    """A grammar that ranks are compiling.

    Args:
        awaited: the ranks that have not answered yet.
        on_ready: called when ``awaited`` is empty.
    """

    awaited: set[int]
    on_ready: Callable[[], None]


def _collective_timeout_s(step_timeout_s: float, least_s: float) -> float:
    """The timeout of a group's collectives: longer than a step may take, as far as it is limited.

    Args:
        step_timeout_s: how long a step may take; 0 is no limit.
        least_s: the least timeout of the group.
    """
    return max(least_s, step_timeout_s + _WATCH_MARGIN_S) if step_timeout_s else _UNLIMITED_S
