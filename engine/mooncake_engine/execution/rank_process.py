"""Processes of ranks: ``python -m mooncake_engine.execution.rank_process PIDS ORDERS MESSAGES``.

The arguments are inherited file descriptors: a pipe for the process ids, and two sockets per rank.
Over the first socket the executor sends orders and the rank sends reports, one at a time. Over the
second socket extension messages pass both ways at any time. When the second socket closes, the
parent is gone, and the rank exits at once, whatever it is waiting for.

This process imports what all ranks need, forks them and exits; its parent adopts them. A core in a
process of its own forks its ranks itself.
"""

from __future__ import annotations

import gc
import logging
import os
import pickle
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from multiprocessing.connection import Connection, Pipe
from typing import NamedTuple, cast

import torch

from mooncake_engine.core_messages import LoadProgress
from mooncake_engine.errors import EngineError
from mooncake_engine.execution import executor_messages as wire
from mooncake_engine.execution.engine_plan import EnginePlan
from mooncake_engine.execution.executor import rank_kv_info
from mooncake_engine.execution.model_runner import PendingStep
from mooncake_engine.execution.parallel_state import ParallelGroups, RankInfo
from mooncake_engine.execution.worker import RankHandlers, Worker
from mooncake_engine.process.forked_process import name_process
from mooncake_engine.process.queued_stderr import queued_stderr
from mooncake_hal.backend import Backend
from mooncake_hal.fused_experts import FusedExperts, FusedExpertsBackend
from mooncake_hal.registry import Registry

logger = logging.getLogger(__name__)

_STATS_INTERVAL_S = 1.0
"""Interval at which reports include expert loads and waiting times."""
_WATCH_INTERVAL_MS = 500
_HANGUP = getattr(select, "POLLRDHUP", 0)  # only Linux has it; POLLHUP is always reported

PARENT_GONE = 3
"""Exit status of a rank whose parent is gone."""


class ParentGone(Exception):
    """The executor's end of the connection for orders is closed, or its host has vanished."""


class RankProcess:
    """One rank's side of both connections: carries out orders, and passes extension messages.

    Args:
        orders: receives the executor's orders, and sends reports.
        messages: receives and sends extension messages.
        on_loaded: called in the rank's main thread when the model is loaded and another thread
            watches for the end of ``messages``.
    """

    def __init__(
        self, orders: Connection, messages: Connection, on_loaded: Callable[[], None] | None = None
    ) -> None:
        self._orders = orders
        self._messages = messages
        self._on_loaded = on_loaded
        self._message_lock = threading.Lock()
        self._report_lock = threading.Lock()
        self._reporter: ThreadPoolExecutor | None = None
        self._stats_due = 0.0
        self._grammars = ThreadPoolExecutor(1, "grammars")

    def run(self) -> None:
        """Carry out orders until Stop."""
        start = self._receive_order()
        assert isinstance(start, wire.Start), f"the first order must be Start, got {start}"
        start.log.apply()
        name_process(f"mooncake-rank{start.info.rank}")
        loaded = threading.Event()
        threading.Thread(target=self._watch_parent, args=(loaded,), daemon=True).start()
        try:
            worker = self._load(start)
        finally:
            loaded.set()
        if worker.steps_in_flight > 1:
            # The rank receives the next order while a step runs. The executor may be sending that
            # order rather than reading reports, so a blocked report must not block the rank.
            bind = worker.bind_thread
            self._reporter = ThreadPoolExecutor(1, "rank-reports", initializer=bind)
        try:
            threading.Thread(target=self._receive, args=(worker,), daemon=True).start()
            if self._on_loaded is not None:
                self._on_loaded()
            self._report(wire.Ready(rank_kv_info(start.info.rank, worker)))
            while self._handle_order(worker, start.info):
                pass
            worker.drain()
        finally:
            worker.close()

    def fail(self, exc: BaseException) -> None:
        """Report to the executor why this rank exits, after all earlier reports."""
        if self._reporter is not None:
            self._reporter.shutdown()
        with suppress(ParentGone):
            self._report(_failure(exc))

    def _load(self, start: wire.Start) -> Worker:
        torch.set_num_threads(start.threads)
        plan: EnginePlan = pickle.loads(start.plan)
        registry = Registry.discover()
        backend = registry.select_backend(plan.backend)
        handlers = RankHandlers(
            self._report_progress if start.info.number == 0 else None,
            lambda message: self._notify(wire.Emitted(message)),
            lambda cause: self._notify(wire.ExtensionFailed(str(cause))),
            self._await_other_ranks,
        )
        stage, pipeline, experts = (  # in this order on every rank
            None if spec is None else backend.communicator(spec)
            for spec in (start.stage, start.pipeline, start.experts)
        )
        fused = _fused_experts(plan, backend, start)
        return Worker(
            plan,
            backend,
            ParallelGroups(start.info, stage, pipeline, experts, fused),
            registry=registry,
            extension=start.extension,
            handlers=handlers,
        )

    def _await_other_ranks(self) -> None:
        """Wait until all ranks have loaded their weights."""
        self._report(wire.OrderDone())
        if isinstance(order := self._receive_order(), wire.Stop):
            sys.exit(0)
        assert isinstance(order, wire.MakeKVCache), f"a rank that has loaded received {order}"

    def _handle_order(self, worker: Worker, info: RankInfo) -> bool:
        """Carry out one order; returns whether to wait for another."""
        order = self._receive_order()
        if isinstance(order, wire.ExecuteModel):
            launched = worker.launch(order.packed.unpack(), order.sampled)
            if self._reporter is None:
                self._report_result(worker, launched, info)
            else:
                self._reporter.submit(self._report_result_later, worker, launched, info)
        elif isinstance(order, wire.WarmUp):
            worker.warm_up()
            self._report(wire.OrderDone())
        elif isinstance(order, wire.PrepareGrammar):
            self._grammars.submit(self._prepare_grammar, worker, order)
        return not isinstance(order, wire.Stop)

    def _report_result(self, worker: Worker, launched: PendingStep, info: RankInfo) -> None:
        result = launched.result()
        expert_load, waited_s, now = None, None, time.monotonic()
        if now >= self._stats_due:
            self._stats_due = now + _STATS_INTERVAL_S
            waited_s = worker.waited_s()
            expert_load = worker.expert_load() if info.tp_rank == 0 else None
        self._report(wire.OrderDone(result if info.is_driver else None, expert_load, waited_s))

    def _report_result_later(self, worker: Worker, launched: PendingStep, info: RankInfo) -> None:
        """Report a step, in the reporting thread. ``_receive`` notices if the parent is gone."""
        try:
            self._report_result(worker, launched, info)
        except ParentGone:
            return
        except Exception as exc:
            logger.exception("rank failed")
            self._report(_failure(exc))

    def _prepare_grammar(self, worker: Worker, order: wire.PrepareGrammar) -> None:
        """Compile a grammar, in the grammar thread. If that fails, so will the requests that use
        it."""
        try:
            worker.prepare_grammar(order.grammar)
        except EngineError as exc:
            logger.info("rejected a grammar: %s", exc)
        except Exception:
            logger.exception("failed to compile a grammar")
        with suppress(OSError):  # _receive notices if the parent is gone
            self._notify(wire.GrammarReady(order.number))

    def _watch_parent(self, loaded: threading.Event) -> None:
        """Exit the process if the parent goes while the model is loaded, which may take minutes and
        the device's memory. Reads nothing: messages are for the extension."""
        ended = select.poll()
        ended.register(self._messages.fileno(), _HANGUP)
        while not loaded.is_set():
            if ended.poll(_WATCH_INTERVAL_MS):
                os._exit(PARENT_GONE)

    def _receive(self, worker: Worker) -> None:
        """Pass messages to the extension; exits the process when the parent is gone."""
        try:
            while True:
                try:
                    message = self._messages.recv_bytes()
                except (EOFError, OSError):
                    os._exit(PARENT_GONE)
                if worker.extension is not None:
                    worker.extension.receive(message)
        except Exception as exc:
            logger.exception("worker extension failed")
            self._notify(wire.ExtensionFailed(f"{type(exc).__name__}: {exc}"))

    def _receive_order(self) -> wire.Order:
        try:
            encoded = self._orders.recv_bytes()
        except (EOFError, OSError) as exc:
            raise ParentGone from exc
        order: wire.Order = wire.decode_order(encoded)
        return order

    def _report(self, report: wire.Report) -> None:
        try:
            with self._report_lock:
                self._orders.send_bytes(wire.encode(report))
        except OSError as exc:
            raise ParentGone from exc

    def _report_progress(self, progress: LoadProgress) -> None:
        self._report(wire.Progress(progress.loaded_bytes, progress.total_bytes))

    def _notify(self, notice: wire.Notice) -> None:
        with self._message_lock:
            self._messages.send_bytes(wire.encode(notice))


def _fused_experts(plan: EnginePlan, backend: Backend, start: wire.Start) -> FusedExperts | None:
    """The backend's fused ops for experts that are divided over ranks; None if it has none."""
    group, shape = start.experts or start.stage, plan.whole_experts
    if not backend.capabilities.fused_experts or shape is None or group is None:
        return None
    return cast(FusedExpertsBackend, backend).fused_experts(group, shape)


def _failure(exc: BaseException) -> wire.RankFailed:
    return wire.RankFailed(type(exc).__name__, str(exc))


class RankConnections(NamedTuple):
    """One end of each of a rank's two connections."""

    orders: Connection
    messages: Connection

    @classmethod
    def pipes(cls, count: int) -> tuple[list[RankConnections], list[RankConnections]]:
        """Open connections to ``count`` ranks; returns the executor's ends and the ranks' ends."""
        pipes = [(Pipe(), Pipe()) for _ in range(count)]
        ours = [cls(orders[0], messages[0]) for orders, messages in pipes]
        return ours, [cls(orders[1], messages[1]) for orders, messages in pipes]

    def close(self) -> None:
        """Close both ends in this process."""
        self.orders.close()
        self.messages.close()


def main(arguments: list[str]) -> int:
    """Fork a rank for each pair of file descriptors; returns the exit status."""
    pids_to, *connections = (Connection(int(descriptor)) for descriptor in arguments)
    ends = map(RankConnections, connections[::2], connections[1::2])
    pids = fork_ranks(list(ends), [pids_to])
    pids_to.send_bytes(" ".join(map(str, pids)).encode())
    return 0


def fork_ranks(ends: Sequence[RankConnections], others: Sequence[Connection]) -> list[int]:
    """Fork a process for each rank. This process must have a single thread.

    Args:
        ends: the ranks' ends of their connections.
        others: connections of this process, which the ranks close.

    Returns:
        The ranks' process ids. In the ranks this function does not return: they exit.
    """
    # A terminal's Ctrl-C reaches every process, but the parent decides when a rank ends.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    gc.freeze()  # a collection would write to pages that the ranks share, and so copy them
    pids = []
    for own in ends:
        if (pid := os.fork()) == 0:
            for other in (*others, *(end for pair in ends if pair is not own for end in pair)):
                other.close()
            sys.exit(_run_rank(own))
        pids.append(pid)
    return pids


def _run_rank(ends: RankConnections) -> int:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # until the rank has loaded
    with queued_stderr():
        return serve(*ends, ignore_sigterm)


def ignore_sigterm() -> None:
    """Ignore SIGTERM. A service manager's stop reaches every process, but the parent still has
    requests to finish. A rank calls this only once it watches for the end of its parent: a parent
    that is stopped while it loads exits at once, and its ranks must too."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)


def serve(
    orders: Connection, messages: Connection, on_loaded: Callable[[], None] | None = None
) -> int:
    """Run a rank until it is stopped; returns the exit status. ``on_loaded``: see RankProcess."""
    rank = RankProcess(orders, messages, on_loaded)
    try:
        rank.run()
    except ParentGone:
        return PARENT_GONE
    except EngineError as exc:  # its message says what to do; the parent logs it
        rank.fail(exc)
        return 1
    except Exception as exc:
        logger.exception("rank failed")
        rank.fail(exc)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
