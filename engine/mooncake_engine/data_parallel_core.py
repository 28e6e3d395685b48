"""The core of an instance with data-parallel ranks, each of which has requests, a scheduler and KV
of its own; those that share experts run their steps in rounds, others as each can."""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from multiprocessing.connection import wait

from msgspec.structs import replace

from mooncake_engine.core import EngineCore, new_request
from mooncake_engine.core_messages import (
    AbortRequest,
    AddRequest,
    Command,
    PrepareGrammar,
    ResetPrefixCache,
)
from mooncake_engine.errors import EngineDead
from mooncake_engine.messages import EngineStats, TokenUpdate, total_stats
from mooncake_engine.rank_turns import Inbox, RankTurns
from mooncake_engine.scheduling.dp_placement import RequestPlacement
from mooncake_engine.scheduling.step_plan import ExpertRound
from mooncake_engine.step_watchdog import StepWatch
from mooncake_kv.connector import CompatibilityReport, Topology
from mooncake_kv.kv_events import KVEventEndpoints

Posted = tuple[int | None, Command]
"""A command, and the data-parallel rank that it is for; None if for all, or not decided yet."""


class DataParallelCore:
    """The cores of all data-parallel ranks as one; see ``EngineCore``.

    If they share experts, they step in rounds: each launches a step, and then each takes in what
    came of one; those without a step serve the others' tokens, so that all take part in a round, or
    none. Else each goes on by itself (``RankTurns``).

    Args:
        cores: of the data-parallel ranks, in order; this object steps and closes them.
        dispatch_min_tokens: of a rank's step from which on its tokens are dispatched to experts;
            None if the ranks share no experts.
        seed: see ``EngineCore``.
        watch: told when rounds begin and end.
    """

    def __init__(
        self,
        cores: Sequence[EngineCore],
        *,
        dispatch_min_tokens: int | None,
        seed: int | None = None,
        watch: StepWatch | None = None,
    ) -> None:
        self.watch = watch or StepWatch(0.0)
        self._cores = cores
        self._dispatch_min_tokens = dispatch_min_tokens
        self._seeds = random.Random(seed)
        self._placement = RequestPlacement(len(cores))
        self._inbox: Inbox[Posted] = Inbox()
        self._turns = RankTurns(cores, self._inbox, self._act, self.watch)
        self._thread = 0

    def post(self, command: Command) -> None:
        """As ``EngineCore.post``; a new request goes to one rank, other commands to all."""
        self._inbox.put((None, command))

    def poster(self, dp_rank: int) -> Callable[[Command], None]:
        """Posts to one of the ranks. Any thread."""
        return lambda command: self._inbox.put((dp_rank, command))

    def step(self) -> list[TokenUpdate]:
        """Take in what was posted, have steps run, and tell what happened to whom.

        Raises:
            EngineDead: a rank or a background task died.
        """
        self._thread = threading.get_ident()
        if self._dispatch_min_tokens is None:
            updates = self._turns.run()
        else:
            updates = self._run_round(self._dispatch_min_tokens)
        for update in updates:
            self._placement.note(update)
        return updates

    @property
    def figures_lag(self) -> bool:
        """As ``EngineCore.figures_lag``."""
        return self._cores[0].figures_lag

    @property
    def compiles_grammars(self) -> bool:
        """As ``EngineCore.compiles_grammars``."""
        return self._cores[0].compiles_grammars

    def abandon_step(self) -> EngineDead:
        """As ``EngineCore.abandon_step``."""
        return self._cores[0].abandon(self.watch.why_stuck(), self._thread)

    def reset_prefix_cache(self) -> bool:
        """As ``EngineCore.reset_prefix_cache``, of all ranks that are not in use."""
        return all([core.reset_prefix_cache() for core in self._cores])

    def check_integrity(self) -> None:
        """As ``EngineCore.check_integrity``."""
        for core in self._cores:
            core.check_integrity()

    def stats(self) -> EngineStats:
        """As ``EngineCore.stats``, of all ranks together and of each."""
        return total_stats([core.stats() for core in self._cores])

    def pairing(self) -> CompatibilityReport | None:
        """As ``EngineCore.pairing``: who can't exchange KV with one rank can't with any, and what
        came to all ranks."""
        reports = [report for core in self._cores if (report := core.pairing()) is not None]
        if not reports:
            return None
        refused = dict.fromkeys(instance_id(peer) for r in reports for peer in r.refused_peers)
        received: Counter[str] = Counter()
        for report in reports:
            for peer, nbytes in report.bytes_received.items():
                received[instance_id(peer)] += nbytes
        return CompatibilityReport(reports[0].engine_id, tuple(refused), dict(received))

    def kv_event_endpoints(self) -> KVEventEndpoints | None:
        """As ``EngineCore.kv_event_endpoints``, of each rank."""
        first, *others = [core.kv_event_endpoints() for core in self._cores]
        return first and replace(first, other_dp_ranks=tuple(each for each in others if each))

    def topology(self) -> Topology | None:
        """As ``EngineCore.topology``: of the first rank, and how many there are."""
        topology = self._cores[0].topology()
        return topology and replace(topology, dp_size=len(self._cores))

    def close(self) -> None:
        """As ``EngineCore.close``: all connectors before all ranks, which end together."""
        try:
            for core in self._cores:
                core.disconnect()
        finally:
            for core in self._cores:
                core.close()
            self._inbox.close()

    def _run_round(self, dispatch_min_tokens: int) -> list[TokenUpdate]:
        self.watch.begin()
        try:
            self._take_in()
            plans = [core.plan() for core in self._cores]
            expert_round = ExpertRound.of(plans, dispatch_min_tokens)
            steps = [
                (core, plan, core.launch(plan, expert_round))
                for core, plan in zip(self._cores, plans, strict=True)
            ]
            return [
                update
                for core, plan, is_launched in steps
                for update in core.conclude(plan, is_launched=is_launched)
            ]
        finally:
            self.watch.end()

    def _take_in(self) -> None:
        """Act on everything posted; wait for the first of it if there is nothing to run."""
        wait([self._inbox.fileno()], min(core.patience_s for core in self._cores))
        for posted in self._inbox.take():
            self._act(posted)

    def _act(self, posted: Posted) -> None:
        dp_rank, command = posted
        if dp_rank is not None:
            self._cores[dp_rank].act(command)
        elif isinstance(command, AddRequest):
            self._add(command)
        elif isinstance(command, ResetPrefixCache):
            command.reply(self.reset_prefix_cache())
        elif isinstance(command, PrepareGrammar):
            self._prepare_grammar(command)
        else:
            if isinstance(command, AbortRequest):
                self._placement.remove(command.request_id)
            for core in self._cores:
                core.act(command)

    def _add(self, command: AddRequest) -> None:
        request = new_request(command.request, self._seeds, time.monotonic())
        cached = [core.count_cached(request) for core in self._cores]
        self._cores[self._placement.place(command.request, cached)].add(request)

    def _prepare_grammar(self, command: PrepareGrammar) -> None:
        """On all ranks: which one its requests go to is not known yet."""
        awaited = CountDown(len(self._cores), partial(command.reply, True))
        for core in self._cores:
            core.act(PrepareGrammar(command.grammar, awaited.note))


_DP_MARK = "-dp"


def dp_engine_id(engine_id: str, dp_rank: int) -> str:
    """A data-parallel rank's name among peers; the first one has the instance's."""
    return f"{engine_id}{_DP_MARK}{dp_rank}" if dp_rank else engine_id


def instance_id(engine_id: str) -> str:
    """The instance that a data-parallel rank of this name is of."""
    return engine_id.rpartition(_DP_MARK)[0] or engine_id


class CountDown:
    """Calls once it has been told so often; any thread tells."""

    def __init__(self, times: int, call: Callable[[], None]) -> None:
        self._left = times
        self._call = call
        self._lock = threading.Lock()

    def note(self, _value: bool) -> None:
        """Once more."""
        with self._lock:
            self._left -= 1
            is_last = self._left == 0
        if is_last:
            self._call()
