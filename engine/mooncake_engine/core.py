"""The engine core: plans and runs one step after another, and handles commands between steps.

One thread owns a core; other threads send it commands through ``post``. The core does no I/O
itself: KV and control messages travel on the connector's threads, HTTP on the server's.
"""

from __future__ import annotations

import logging
import random
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from multiprocessing.connection import Connection
from queue import Empty, SimpleQueue

from mooncake_engine.core_messages import (
    AbortRequest,
    AddRequest,
    Command,
    CoreReport,
    PrepareGrammar,
    ResetPrefixCache,
)
from mooncake_engine.errors import EngineDead
from mooncake_engine.execution.executor import Executor
from mooncake_engine.execution.model_runner import PendingStep
from mooncake_engine.kv_connector import EngineConnector
from mooncake_engine.messages import EngineRequest, EngineStats, StepSizes, TokenUpdate
from mooncake_engine.scheduling.kv_residency import KVResidency
from mooncake_engine.scheduling.request import Request
from mooncake_engine.scheduling.scheduler import Scheduler
from mooncake_engine.scheduling.step_plan import ExpertRound, StepPlan
from mooncake_engine.step_watchdog import StepWatch
from mooncake_kv.connector import (
    ConnectorFailed,
    LeaseEnded,
    LoadEnded,
    SendRefused,
)
from mooncake_kv.pool.pool_events import PoolEvent

logger = logging.getLogger(__name__)

IDLE_WAIT_S = 0.5
"""Seconds that an idle core waits for commands before it checks deadlines again."""

BLOCKED_WAIT_S = 0.02
"""The same while requests wait, but none can run: for example, until a peer releases blocks."""


class EngineCore:
    """Drives the scheduler, the executor and the connector of one data-parallel rank.

    ``AsyncEngine`` or a core process owns it; with several data-parallel ranks a
    ``DataParallelCore`` does.

    Args:
        scheduler: plans the steps.
        executor: runs the model on the ranks.
        connector: moves KV between instances; None without disaggregation.
        clock: monotonic clock, in seconds.
        steps_in_flight: maximum number of steps in flight: while one runs, the next ones are
            scheduled.
        seed: seed from which requests without a seed of their own get theirs; None uses system
            entropy.
        watch: watchdog state, updated when steps begin and end.
        block_bytes: bytes of one KV block, on all ranks together.
    """

    report_lags = False

    def __init__(
        self,
        scheduler: Scheduler,
        executor: Executor,
        connector: EngineConnector | None = None,
        clock: Callable[[], float] = time.monotonic,
        *,
        steps_in_flight: int = 1,
        seed: int | None = None,
        watch: StepWatch | None = None,
        block_bytes: int = 0,
    ) -> None:
        self.watch = watch or StepWatch(0.0)
        self._scheduler = scheduler
        self._executor = executor
        self._connector = connector
        self._clock = clock
        self._steps_in_flight = steps_in_flight
        self._seeds = random.Random(seed)
        self._in_flight: deque[tuple[StepPlan, PendingStep]] = deque()
        self._inbox: SimpleQueue[Command] = SimpleQueue()
        self._num_generated = 0
        self._step_sizes = StepSizes()
        self._kv_residency = KVResidency(block_bytes)
        self._is_blocked = False
        self._thread = 0

    @property
    def post(self) -> Callable[[Command], None]:
        """Queues a command for the core to handle before its next step. Any thread."""
        return self._inbox.put

    def step(self) -> list[TokenUpdate]:
        """Handle the posted commands, launch the next step, and return the updates of requests.

        If several steps may be in flight, the updates may stem from an earlier step. Blocks for at
        most ``IDLE_WAIT_S`` if there is nothing to run.

        Raises:
            EngineDead: a rank or a background task died.
        """
        self._thread = threading.get_ident()
        self.watch.begin()
        try:
            return self._step()
        finally:
            self.watch.end()

    @property
    def compiles_grammars(self) -> bool:
        """Whether ``PrepareGrammar`` must precede a request with a grammar. Any thread."""
        return self._executor.compiles_grammars

    def abandon_step(self) -> EngineDead:
        """Give up the current step, which has timed out: log where it hangs, and make it fail if
        the executor can. Any thread.

        Returns:
            The error to report to all requests.
        """
        return self.abandon(self.watch.timeout_message(), self._thread)

    def abandon(self, reason: str, thread: int) -> EngineDead:
        """Give up a step for ``reason``, and log the stack of the thread in which it hangs."""
        frame = sys._current_frames().get(thread)
        where = "".join(traceback.format_stack(frame)) if frame else "its thread is gone"
        dead = self._executor.abandon(reason)
        logger.critical("%s; the core's thread is here:\n%s", dead, where)
        return dead

    def _step(self) -> list[TokenUpdate]:
        self._handle_commands()
        plan = self.plan()
        return self.conclude(plan, is_launched=self.launch(plan))

    def plan(self) -> StepPlan:
        """Plan the next step; an empty plan need not be launched."""
        self._executor.check()
        now = self._clock()
        self._scheduler.expire(now)
        if self._kv_residency.is_due(now):
            self._kv_residency.note(self._scheduler.held_blocks(), now)
        return self._scheduler.schedule()

    def launch(self, plan: StepPlan, expert_round: ExpertRound | None = None) -> bool:
        """Have the ranks run a step, unless its plan is empty and it is part of no expert round.
        Returns whether they run it."""
        if plan.is_empty and expert_round is None:
            return False
        sent = plan if expert_round is None else replace(plan, expert_round=expert_round)
        self._in_flight.append((plan, self._executor.execute_model(sent)))
        if plan.sequences:
            self._step_sizes.note(plan.num_tokens)
        return True

    def must_wait(self, *, is_launched: bool) -> bool:
        """Whether to wait for the oldest step next: the maximum number of steps is in flight, or
        the last plan was not launched."""
        is_full = len(self._in_flight) == self._steps_in_flight
        return bool(self._in_flight) and (is_full or not is_launched)

    @property
    def step_connections(self) -> Sequence[Connection]:
        """The executor's connections that become readable when its ranks report a step."""
        return self._executor.step_connections

    def conclude(self, plan: StepPlan, *, is_launched: bool) -> list[TokenUpdate]:
        """Finish the iteration that planned ``plan``: wait for the oldest step if necessary, and
        return the updates of requests."""
        if self.must_wait(is_launched=is_launched):
            oldest, pending = self._in_flight.popleft()
            updates = self._scheduler.update(oldest, pending.result(), self._clock())
        else:
            updates = self._scheduler.take_updates()
        if (events := self._scheduler.blocks.events) is not None:
            events.flush()
        self._is_blocked = not self._in_flight and not plan.sequences and not updates
        self._num_generated += sum([len(update.token_ids) for update in updates])
        return updates

    @property
    def has_work(self) -> bool:
        """Whether a step has anything to do. The core's thread only."""
        return not self._inbox.empty() or self._scheduler.has_work

    def reset_prefix_cache(self) -> bool:
        """Drop all cached prefixes. Returns False, and drops nothing, while any block is in use.
        The core's thread only; other threads post ``ResetPrefixCache``."""
        return self._scheduler.reset_prefix_cache()

    def check_integrity(self) -> None:
        """Prove that no block is lost or owned twice. The core's thread only."""
        self._scheduler.check_integrity()

    def report(self) -> CoreReport:
        """Returns how the core is now. Any thread."""
        connector, events = self._connector, self._scheduler.blocks.events
        return CoreReport(
            self._stats(),
            None if connector is None else connector.compatibility(),
            None if connector is None else connector.topology(),
            None if events is None else events.endpoints,
        )

    def _stats(self) -> EngineStats:
        blocks, pool = self._scheduler.blocks, self._scheduler.chunk_pool
        by_source = self._scheduler.prompt_tokens_by_source
        return EngineStats(
            num_running=self._scheduler.num_running,
            num_waiting=self._scheduler.num_waiting,
            num_swapped=self._scheduler.num_swapped,
            num_loading=self._scheduler.num_loading,
            kv_cache_usage=blocks.pool.usage,
            num_preemptions=self._scheduler.num_preemptions,
            num_swap_outs=self._scheduler.num_swap_outs,
            num_shared_blocks=blocks.num_shared_blocks,
            prefix_cache_queries=blocks.num_queried_tokens,
            prefix_cache_hits=blocks.num_hit_tokens,
            prompt_tokens=sum(by_source.values()),
            generation_tokens=self._num_generated,
            prompt_tokens_by_source=by_source,
            step_sizes=self._step_sizes,
            kv_byte_seconds=dict(self._kv_residency.byte_seconds),
            speculation=self._scheduler.speculation.stats(),
            kv_transfer={} if self._connector is None else self._connector.stats(),
            kv_pool=None if pool is None else pool.read_stats(),
            experts=self._executor.expert_load,
            waited_s=tuple(self._executor.waited_s),
            pool_store=None if pool is None else pool.store_stats,
            pool_stores=() if pool is None else pool.store_reports,
        )

    def close(self) -> None:
        """Close the connector, then the ranks, whose memory the connector uses. Idempotent."""
        try:
            self.disconnect()
        finally:
            self._executor.close()
            if (pool := self._scheduler.chunk_pool) is not None:
                pool.close()

    def disconnect(self) -> None:
        """Close the connections to other instances; the ranks stay open. Idempotent."""
        if self._connector is not None:
            self._connector.close()
        if (pool := self._scheduler.chunk_pool) is not None:
            pool.stop()
        if (events := self._scheduler.blocks.events) is not None:
            events.close()

    def _handle_commands(self) -> None:
        """Handle all posted commands; wait for the first one if there is nothing to run."""
        try:
            self.handle_command(self._inbox.get(timeout=self.wait_timeout_s))
            while True:
                self.handle_command(self._inbox.get_nowait())
        except Empty:
            return

    @property
    def wait_timeout_s(self) -> float:
        """Seconds to wait for a command before the next step."""
        if self._in_flight:
            return 0.0
        if not self._scheduler.has_work:
            return IDLE_WAIT_S
        return BLOCKED_WAIT_S if self._is_blocked else 0.0

    def handle_command(self, command: Command) -> None:
        """Handle a command. The core's thread only."""
        now = self._clock()
        self._scheduler.set_time(now)
        if isinstance(command, AddRequest):
            self.add(new_request(command.request, self._seeds, now))
        elif isinstance(command, AbortRequest):
            self._scheduler.abort(command.request_id)
        elif isinstance(command, ResetPrefixCache):
            command.reply(self.reset_prefix_cache())
        elif isinstance(command, PrepareGrammar):
            self._executor.prepare_grammar(command.grammar, partial(command.reply, True))
        elif isinstance(command, LoadEnded):
            self._scheduler.handle_load_ended(
                command.request_id,
                command.error,
                first_token=command.first_token,
                is_drained=command.is_drained,
            )
        elif isinstance(command, LeaseEnded):
            self._scheduler.release(command.request_id)
        elif isinstance(command, SendRefused):
            self._scheduler.fail(command.request_id, command.error)
        elif isinstance(command, ConnectorFailed):
            raise EngineDead(f"the KV connector died: {command.cause!r}") from command.cause
        elif isinstance(command, PoolEvent):
            self._scheduler.handle_pool_event(command)

    def count_cached(self, request: Request) -> int:
        """Returns how many tokens of a new request's prompt are in this core's prefix cache."""
        return self._scheduler.blocks.count_cached(request, request.num_prompt_tokens - 1)

    def add(self, request: Request) -> None:
        """Add a request to the scheduler. The core's thread only."""
        self._scheduler.add(request)


def new_request(spec: EngineRequest, seeds: random.Random, now: float) -> Request:
    """Returns a request for the scheduler; ``seeds`` provides its seed if the spec has none."""
    seed = spec.sampling.seed
    return Request(spec, seeds.getrandbits(64) if seed is None else seed, now)
