"""The worker side of the connectors, one per rank: executes the scheduler side's orders, and
reports ended loads and released blocks to vLLM."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Protocol

from mooncake_hal.backend import Event
from mooncake_hal.deployment import Hardware
from mooncake_hal.registry import Registry
from mooncake_kv.config import KVTransferConfig
from mooncake_kv.connector import find_connector
from mooncake_kv.connector_worker import (
    ConvertRopeOrder,
    LayerDone,
    PushStep,
    RankContext,
    RankMemory,
    single_thread,
)
from mooncake_kv.ranks import CancelLoad, Load, decode_to_rank
from mooncake_vllm.rank_link import (
    FromWorker,
    RankInfo,
    ReportLoad,
    SchedulerMessage,
    ToWorker,
    WakeUp,
    WorkerDied,
    WorkerLink,
)
from mooncake_vllm.vllm_memory import TRANSPORTS, CacheView, layer_index

logger = logging.getLogger(__name__)

IDLE_WAIT_S = 0.010
"""How long a step that computes nothing waits for something to report, such as the end of a load or
lease, in seconds. Otherwise vLLM would run such steps continuously, with a sleep of a millisecond
in between, while its workers poll for the next step in a busy loop. Ends would be reported a step
later, and on a host with few processors the peers that fetch the KV would get no CPU time. A new
request is delayed by this much at most: the step in flight may wait, but not the ones after it."""


@dataclass(frozen=True, slots=True)
class Device:
    """The device of a rank.

    Args:
        kind: ``"cpu"``, ``"cuda"``, ...; a key of ``TRANSPORTS``.
        hardware: backend and generation, as published to peers.
        make_event: makes a new event on the device; see ``RankContext``.
        bind_thread: makes the device current on the calling thread.
    """

    kind: str
    hardware: Hardware
    make_event: Callable[[], Event]
    bind_thread: Callable[[], None]


@dataclass(frozen=True, slots=True)
class Results:
    """Request ids to report to vLLM with a step, as in its ``KVConnectorTransferResults``. A failed
    load is in ``finished_recving`` and in ``failed_recving``."""

    finished_sending: set[str]
    finished_recving: set[str]
    failed_recving: set[str]


class StepWait:
    """Makes a rank's idle steps wait for something to report. Shared by all connectors of the rank.

    vLLM's MultiConnector begins a step for all of its children, and then asks them for their
    results one after another. The first one waits, for the results of any of them.

    Args:
        num_behind: steps that vLLM may already have scheduled when it processes the results of one.
            These don't wait, nor do the steps that are in flight when a new request arrives,
            because there is something to compute.
    """

    def __init__(self, num_behind: int = 0) -> None:
        self.changed = threading.Condition()
        self._num_behind = num_behind
        self._num_no_wait = 0  # number of coming steps that must not wait
        self._wait_s: float | None = None  # None: this step has waited
        self._members: list[Reports] = []

    def join(self, reports: Reports) -> None:
        """Add the reports of a connector, which end the wait."""
        self._members.append(reports)

    def begin_step(self, wait_s: float) -> None:
        """Start a step, which may wait for a report of any connector, up to ``wait_s``."""
        with self.changed:
            self._wait_s = max(self._wait_s or 0.0, wait_s)

    def skip_wait(self) -> None:
        """End the wait because there is something to compute: neither the current step waits, nor
        the steps that vLLM may have scheduled after it. Any thread."""
        with self.changed:
            self._num_no_wait = self._num_behind + 1
            self.changed.notify()

    def wait(self) -> None:
        """Wait for a report, once per step, unless the step must not wait. Called with ``changed``
        held."""
        wait_s, self._wait_s = self._wait_s, None
        if wait_s is None:
            return
        if wait_s and not self._num_no_wait and not any(each.has_reports for each in self._members):
            self.changed.wait(wait_s)
        self._num_no_wait = max(0, self._num_no_wait - 1)

    def note_report(self) -> None:
        """Record that this step reports something to vLLM. Called with ``changed`` held."""
        self._num_no_wait = self._num_behind


class Reports:
    """One connector's reports for vLLM's next step. Any thread.

    The release of a request's blocks is reported no earlier than with the step whose metadata name
    the request in ``held``. With that step MultiConnector learns how many of its children hold the
    blocks; before, it would take the first report for the only one.

    Args:
        wait: the rank's step wait; None if no other connector shares it.
    """

    def __init__(self, wait: StepWait | None = None) -> None:
        self._wait = wait or StepWait()
        self._wait.join(self)
        self._changed = self._wait.changed
        self._results = Results(set(), set(), set())
        self._held: set[str] = set()  # named by a step, and not released yet
        self._early: set[str] = set()  # released, and not named by a step yet

    @property
    def has_reports(self) -> bool:
        """Whether there is something to report, with this step or with the one that names it."""
        return bool(self._results.finished_sending or self._results.finished_recving or self._early)

    def begin_step(self, held: Iterable[str] = (), wait_s: float = 0.0) -> None:
        """Start a step.

        Args:
            held: requests whose blocks are held, named by the first step after their end.
            wait_s: how long the step may wait for a report, in seconds.
        """
        with self._changed:
            self._held.update(held)
            known = self._early & self._held
            self._results.finished_sending.update(known)
            self._held -= known
            self._early -= known
            self._wait.begin_step(wait_s)

    def add_load(self, request_id: str, is_failed: bool) -> None:
        """Report a load that has ended."""
        with self._changed:
            self._results.finished_recving.add(request_id)
            if is_failed:
                self._results.failed_recving.add(request_id)
            self._changed.notify()

    def add_send(self, request_id: str) -> None:
        """Report that a request's blocks are released."""
        with self._changed:
            if request_id in self._held:
                self._held.discard(request_id)
                self._results.finished_sending.add(request_id)
            else:
                self._early.add(request_id)
            self._changed.notify()

    def wake_up(self) -> None:
        """End the step's wait: a request has arrived, or can continue."""
        self._wait.skip_wait()

    def take(self) -> Results:
        """Return everything that has not been reported yet. If no connector of the rank has
        anything to report, wait first, for as long as the step may."""
        with self._changed:
            self._wait.wait()
            taken, self._results = self._results, Results(set(), set(), set())
            if taken.finished_sending or taken.finished_recving:
                self._wait.note_report()
        return taken


class RankWorker(Protocol):
    """The worker that moves a rank's KV; see ``ConnectorWorker``."""

    def receive(self, message: bytes) -> None:
        """Process an order of the scheduler side. Any thread."""
        ...

    def begin_step(self, steps: Sequence[PushStep]) -> LayerDone | None:
        """Start a step; returns a callback for each layer's number, or None."""
        ...

    def end_step(self) -> None:
        """All kernels of the step are enqueued."""
        ...

    def close(self) -> None:
        """Stop all transfers. Idempotent."""
        ...


class LoadOrder(NamedTuple):
    """The load that an order concerns, and whether the order begins it."""

    name: str
    begins: bool = False


@dataclass(frozen=True, slots=True)
class WorkerKind:
    """A kind of worker.

    Args:
        make: constructs the worker.
        load_of: returns the load that an order concerns; None if it concerns no load.
    """

    make: Callable[[RankContext], RankWorker]
    load_of: Callable[[bytes], LoadOrder | None]


def connector_worker(connector: str) -> WorkerKind:
    """The worker kind of a connector of ``mooncake_kv``."""

    def load_of(order: bytes) -> LoadOrder | None:
        message = decode_to_rank(order)
        if not isinstance(message, Load | CancelLoad):
            return None
        return LoadOrder(message.request_id, begins=isinstance(message, Load))

    return WorkerKind(find_connector(connector).worker, load_of)


class HeldLoads:
    """Holds each load order, and later orders about the same load, until the device has finished
    with the load's blocks.

    The step that allocated the blocks, or an earlier one, may still work on them: it zeroes new
    blocks, copies some, and may write for the request that had them last. All of that is enqueued
    when the step releases the load, so a load begins after an event that is recorded then. Nothing
    else orders a load's writes: vLLM keeps blocks that a step in flight may write to from being
    reallocated only if its own ``kv_role`` makes it a consumer, and in a MultiConnector that is the
    outer connector's role. A load that is read in several parts waits for its step once.

    Args:
        receive: receives each order when it may be executed; in their order.
        load_of: see ``WorkerKind``.
        device: the device whose events are waited for.
        fail: receives the exception that killed the waiting thread.

    Raises:
        KVConfigError: the waiting thread can't be started.
    """

    def __init__(
        self,
        receive: Callable[[bytes], None],
        load_of: Callable[[bytes], LoadOrder | None],
        device: Device,
        fail: Callable[[BaseException], None],
    ) -> None:
        self._receive, self._load_of, self._fail = receive, load_of, fail
        self._make_event = device.make_event
        self._lock = threading.Lock()
        self._held: dict[str, list[bytes]] = {}
        self._released: dict[str, Event] = {}  # released by their step before the order arrived
        self._begun: set[str] = set()
        self._over: set[str] = set()  # ended before their step released them
        self._is_closed = False
        self._waiting = single_thread("load-release", device.bind_thread)

    def take(self, order: bytes) -> None:
        """Process an order of any kind: hold it, or pass it on. Any thread."""
        about = self._load_of(order)
        with self._lock:
            begins = about is not None and about.begins and about.name not in self._begun
            if about is None or not (begins or about.name in self._held):
                self._receive(order)
                return
            if begins:
                self._held.setdefault(about.name, [])
            self._held[about.name].append(order)
            if begins and (event := self._released.pop(about.name, None)) is not None:
                self._begin_behind(event, [about.name])

    def release(self, names: Iterable[str]) -> None:
        """Release loads: the step that allocated their blocks has arrived. The step's thread."""
        if not (names := tuple(names)):
            return
        event = self._make_event()
        event.record()
        with self._lock:
            for name in names:
                if name in self._held:
                    continue
                if name in self._over:
                    self._over.discard(name)
                else:
                    self._released[name] = event
            self._begin_behind(event, [name for name in names if name in self._held])

    def forget(self, name: str) -> None:
        """Forget a load that has ended, whether or not its order and its step have arrived."""
        with self._lock:
            if name in self._begun:
                self._begun.discard(name)
            elif self._released.pop(name, None) is None:
                self._over.add(name)

    def close(self) -> None:
        """Drop all held orders, and stop the waiting thread. Idempotent."""
        with self._lock:
            self._is_closed = True
        self._waiting.shutdown(wait=True, cancel_futures=True)

    def _begin_behind(self, event: Event, names: Sequence[str]) -> None:
        """Pass on the held orders of these loads once an event has completed. The lock is held."""
        if not names or self._is_closed:
            return
        if event.query():
            self._begin(names)
        else:
            self._waiting.submit(self._wait, event, names)

    def _wait(self, event: Event, names: Sequence[str]) -> None:
        """Top of the waiting thread."""
        try:
            event.synchronize()
            with self._lock:
                self._begin(names)
        except Exception as exc:  # an order that is never executed would be waited for forever
            logger.exception("loads can't be released")
            self._fail(exc)

    def _begin(self, names: Iterable[str]) -> None:
        """Pass on the held orders of these loads. The lock is held."""
        for name in names:
            orders = self._held.pop(name)
            if name in self._over:
                self._over.discard(name)
            else:
                self._begun.add(name)
            for order in orders:
                self._receive(order)


class WorkerSide:
    """The worker side of one rank: moves its KV, and reports to vLLM.

    Args:
        config: the connector's configuration.
        rank: index of the rank in the instance.
        path: Unix socket on which to listen for the scheduler side.
        view: the rank's KV memory.
        device: the device of that memory.
        kind: the kind of worker; None: that of the connector that the configuration names.
        wait: the rank's step wait; None if no other connector shares it.
        convert_rope_order: see ``RankMemory``.

    Raises:
        KVConfigError: the memory can't be moved as configured, or a thread can't be started.
    """

    def __init__(
        self,
        config: KVTransferConfig,
        rank: int,
        path: Path,
        view: CacheView,
        device: Device,
        kind: WorkerKind | None = None,
        wait: StepWait | None = None,
        convert_rope_order: ConvertRopeOrder | None = None,
    ) -> None:
        kind = kind or connector_worker(config.connector)
        self._reports = Reports(wait)
        self._layer_done: LayerDone | None = None
        self._layers_done: set[int] = set()
        self._link = WorkerLink(path)
        self._link.send(
            RankInfo(view.geometry, view.layout.block_size, view.blocks_per_page, device.hardware)
        )
        memory = RankMemory(
            view.geometry,
            view.shard,
            view.layout,
            view.regions,
            TRANSPORTS.get(device.kind, ()),
            convert_rope_order,
        )
        with ExitStack() as opened:
            opened.callback(self._link.close)
            self._worker = kind.make(
                RankContext(
                    rank,
                    config,
                    memory,
                    Registry.discover(),
                    make_event=device.make_event,
                    bind_thread=device.bind_thread,
                    emit=lambda message: self._link.send(FromWorker(message)),
                    fail=self.report_death,
                )
            )
            opened.callback(self._worker.close)
            self._loads = HeldLoads(self._worker.receive, kind.load_of, device, self.report_death)
            opened.pop_all()
        self._link.listen(self._on_message, self.report_death)

    def report_death(self, cause: BaseException) -> None:
        """Report that a thread of the worker died, which ends the instance. Any thread."""
        self._link.send(WorkerDied(repr(cause)))

    def release_loads(self, names: Iterable[str]) -> None:
        """Let loads begin: see ``HeldLoads``. The step's thread."""
        try:
            self._loads.release(names)
        except Exception as exc:  # an order that is never executed would be waited for forever
            self.report_death(exc)
            raise

    def begin_step(
        self, steps: Sequence[PushStep], held: Iterable[str] = (), wait_s: float = 0.0
    ) -> None:
        """Prepare for a step. The step's thread.

        Args:
            steps: the parts of pushed prompts that the step computes.
            held: see ``Reports``.
            wait_s: how long the step may wait for something to report, in seconds.
        """
        self._reports.begin_step(held, wait_s)
        self._layers_done.clear()
        self._layer_done = self._worker.begin_step(steps)

    def layer_done(self, layer_name: str) -> None:
        """The writes of the step's KV of a layer are done, or enqueued. The step's thread."""
        if self._layer_done is None:
            return
        index = layer_index(layer_name)
        if index not in self._layers_done:  # vLLM-Ascend calls two hooks per layer
            self._layers_done.add(index)
            self._layer_done(index)

    def end_step(self) -> None:
        """All kernels of the step are enqueued. The step's thread."""
        self._layer_done = None
        self._worker.end_step()

    def take_results(self) -> Results:
        """Return the reports for vLLM, waiting if there are none. The step's thread."""
        return self._reports.take()

    def close(self) -> None:
        """Stop all transfers, and release the memory. Idempotent."""
        self._loads.close()
        self._worker.close()
        self._link.close()

    def _on_message(self, message: SchedulerMessage) -> None:
        """Process a message of the scheduler side. The link's thread."""
        if isinstance(message, ToWorker):
            self._loads.take(message.payload)
        elif isinstance(message, ReportLoad):
            if message.load:
                self._loads.forget(message.load)
            self._reports.add_load(message.request_id, message.is_failed)
        elif isinstance(message, WakeUp):
            self._reports.wake_up()
        else:
            self._reports.add_send(message.request_id)
