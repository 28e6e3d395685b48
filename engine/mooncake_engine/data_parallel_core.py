"""The core of an instance with several data-parallel ranks, each with its own scheduler and KV.

Ranks that share experts run their steps together, in rounds; other ranks step independently.
"""

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
    CoreReport,
    PrepareGrammar,
    ResetPrefixCache,
)
from mooncake_engine.errors import EngineDead
from mooncake_engine.messages import TokenUpdate, total_stats
from mooncake_engine.rank_turns import Inbox, RankTurns
from mooncake_engine.scheduling.dp_placement import RequestPlacement
from mooncake_engine.scheduling.step_plan import ExpertRound
from mooncake_engine.step_watchdog import StepWatch
from mooncake_kv.connector import CompatibilityReport

Posted = tuple[int | None, Command]
"""A command and its data-parallel rank; None if it is for all, or not placed yet."""


class DataParallelCore:
    """Drives the cores of all data-parallel ranks as one core; see ``EngineCore``.

    Ranks that share experts step in rounds: every core launches a step, then every core processes
    the result of one. Ranks without tokens of their own serve the others' tokens, so either all
    ranks take part in a round, or none. Other ranks step independently (``RankTurns``).

    Args:
        cores: cores of the data-parallel ranks, in order; this object drives and closes them.
        dispatch_min_tokens: tokens in a rank's step from which on tokens are dispatched to experts;
            None if the ranks share no experts.
        seed: see ``EngineCore``.
        watch: watchdog state, updated when rounds begin and end.
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
        self._turns = RankTurns(cores, self._inbox, self._handle_posted, self.watch)
        self._thread = 0

    def post(self, command: Command) -> None:
        """Queue a command. A new request goes to one rank, other commands to all. Any thread."""
        self._inbox.put((None, command))

    def poster(self, dp_rank: int) -> Callable[[Command], None]:
        """Returns a ``post`` for one of the ranks. Any thread."""
        return lambda command: self._inbox.put((dp_rank, command))

    def step(self) -> list[TokenUpdate]:
        """Handle the posted commands, run steps, and return the updates of requests.

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
    def report_lags(self) -> bool:
        return self._cores[0].report_lags

    @property
    def compiles_grammars(self) -> bool:
        return self._cores[0].compiles_grammars

    def abandon_step(self) -> EngineDead:
        return self._cores[0].abandon(self.watch.timeout_message(), self._thread)

    @property
    def has_work(self) -> bool:
        return not self._inbox.is_empty or any(core.has_work for core in self._cores)

    def reset_prefix_cache(self) -> bool:
        """Drop the cached prefixes of each idle rank; True if all ranks were idle."""
        return all([core.reset_prefix_cache() for core in self._cores])

    def check_integrity(self) -> None:
        for core in self._cores:
            core.check_integrity()

    def report(self) -> CoreReport:
        """Returns how all ranks together are, and the statistics of each. Any thread."""
        reports = [core.report() for core in self._cores]
        topology, endpoints = reports[0].topology, [each.kv_event_endpoints for each in reports]
        others = tuple(each for each in endpoints[1:] if each)
        return CoreReport(
            total_stats([each.stats for each in reports]),
            _combined([each.compatibility for each in reports if each.compatibility is not None]),
            topology and replace(topology, dp_size=len(self._cores)),
            endpoints[0] and replace(endpoints[0], other_dp_ranks=others),
        )

    def close(self) -> None:
        """Close the connectors of all cores, then their ranks. Idempotent."""
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
            self._handle_commands()
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

    def _handle_commands(self) -> None:
        """Handle all posted commands; wait for the first one if there is nothing to run."""
        wait([self._inbox.fileno()], min(core.wait_timeout_s for core in self._cores))
        for posted in self._inbox.take():
            self._handle_posted(posted)

    def _handle_posted(self, posted: Posted) -> None:
        dp_rank, command = posted
        if dp_rank is not None:
            self._cores[dp_rank].handle_command(command)
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
                core.handle_command(command)

    def _add(self, command: AddRequest) -> None:
        request = new_request(command.request, self._seeds, time.monotonic())
        if self._placement.has_sibling(command.request):
            cached = [0] * len(self._cores)  # counting hashes the whole prompt
        else:
            cached = [core.count_cached(request) for core in self._cores]
        self._cores[self._placement.place(command.request, cached)].add(request)

    def _prepare_grammar(self, command: PrepareGrammar) -> None:
        """Prepare the grammar on all ranks, since the rank of its requests is not known yet."""
        awaited = CountDown(len(self._cores), partial(command.reply, True))
        for core in self._cores:
            core.handle_command(PrepareGrammar(command.grammar, awaited.note))


def _combined(reports: Sequence[CompatibilityReport]) -> CompatibilityReport | None:
    """Combines the reports of all ranks: a peer that can't exchange KV with one of them can't with
    any; received bytes are summed up."""
    if not reports:
        return None
    refused = dict.fromkeys(instance_id(peer) for r in reports for peer in r.refused_peers)
    received: Counter[str] = Counter()
    for report in reports:
        for peer, nbytes in report.bytes_received.items():
            received[instance_id(peer)] += nbytes
    return CompatibilityReport(reports[0].engine_id, tuple(refused), dict(received))


_DP_MARK = "-dp"


def dp_engine_id(engine_id: str, dp_rank: int) -> str:
    """Returns a data-parallel rank's engine id among peers; rank 0 has the instance's."""
    return f"{engine_id}{_DP_MARK}{dp_rank}" if dp_rank else engine_id


def instance_id(engine_id: str) -> str:
    """Returns the engine id of the instance that a data-parallel rank belongs to."""
    return engine_id.rpartition(_DP_MARK)[0] or engine_id


class CountDown:
    """Calls ``call`` when ``note`` has been called ``times`` times. Any thread."""

    def __init__(self, times: int, call: Callable[[], None]) -> None:
        self._left = times
        self._call = call
        self._lock = threading.Lock()

    def note(self, _value: bool) -> None:
        """Count one call."""
        with self._lock:
            self._left -= 1
            is_last = self._left == 0
        if is_last:
            self._call()
