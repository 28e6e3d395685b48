"""The half of a connector beside a rank's KV memory: takes orders, and tells vLLM what is over."""

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
    LayerDone,
    PushStep,
    RankContext,
    RankMemory,
    TurnRope,
    lone_thread,
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
"""How long a step that computes nothing waits for something to tell: the end of a load, or of a
lease. vLLM steps again and again meanwhile, sleeps for a millisecond in between, and its workers
look for the next step in a busy loop. The end would be told a step later, and on a host with few
processors those who have to come for the KV would get none. A new request waits at most this much
longer: the step that it finds may wait, and those behind that one don't."""


@dataclass(frozen=True, slots=True)
class Device:
    """What a rank runs on.

    Args:
        kind: ``"cpu"``, ``"cuda"``, ...; a key of ``TRANSPORTS``.
        hardware: as peers are told.
        make_event: a new event on it; see ``RankContext``.
        bind_thread: makes it current in the calling thread.
    """

    kind: str
    hardware: Hardware
    make_event: Callable[[], Event]
    bind_thread: Callable[[], None]


@dataclass(frozen=True, slots=True)
class Results:
    """What is over since the last step; a load that failed is in ``received``, too."""

    sent: set[str]
    received: set[str]
    failed: set[str]


class StepWait:
    """The wait of a rank's step that computes nothing, one for all connectors of the rank.

    vLLM's MultiConnector has a step begin for all its children, and then asks one after the other
    what there is to tell: the first one waits, for what any of them has.

    Args:
        num_behind: steps that vLLM may have scheduled by the time that it sees what one tells. They
            don't wait, nor do those that a new request finds: something is to be computed.
    """

    def __init__(self, num_behind: int = 0) -> None:
        self.changed = threading.Condition()
        self._num_behind = num_behind
        self._num_hasty = 0  # of the next steps
        self._wait_s: float | None = None  # None: this step's wait is over
        self._members: list[Reports] = []

    def join(self, reports: Reports) -> None:
        """A connector's, whose news end the wait."""
        self._members.append(reports)

    def begin_step(self, wait_s: float) -> None:
        """A step is here, which may wait so long for what one of the connectors has to tell."""
        with self.changed:
            self._wait_s = max(self._wait_s or 0.0, wait_s)

    def hurry(self) -> None:
        """There is something to compute: neither a step that is about to wait does, nor those that
        vLLM may have scheduled behind it. Any thread."""
        with self.changed:
            self._num_hasty = self._num_behind + 1
            self.changed.notify()

    def wait(self) -> None:
        """For news, once in a step, unless it is not the time to wait. Under ``changed``."""
        wait_s, self._wait_s = self._wait_s, None
        if wait_s is None:
            return
        if wait_s and not self._num_hasty and not any(each.has_news for each in self._members):
            self.changed.wait(wait_s)
        self._num_hasty = max(0, self._num_hasty - 1)

    def news_told(self) -> None:
        """vLLM hears something with this step. Under ``changed``."""
        self._num_hasty = self._num_behind


class Reports:
    """What vLLM is to be told with the next step. Any thread.

    That blocks are free again is told by the step that names their request or a later one, not
    before: with that step MultiConnector learns how many of its children keep the blocks, and
    until then it takes the first report for the only one.

    Args:
        wait: of the rank; None: nobody shares it.
    """

    def __init__(self, wait: StepWait | None = None) -> None:
        self._wait = wait or StepWait()
        self._wait.join(self)
        self._changed = self._wait.changed
        self._results = Results(set(), set(), set())
        self._held: set[str] = set()  # named, and not reported yet
        self._early: set[str] = set()  # reported, and not named yet

    @property
    def has_news(self) -> bool:
        """Whether something is to be told, with this step or with the one that names it."""
        return bool(self._results.sent or self._results.received or self._early)

    def begin_step(self, held: Iterable[str] = (), wait_s: float = 0.0) -> None:
        """A step is here.

        Args:
            held: requests whose blocks are kept, by the first step after their end.
            wait_s: how long it may wait for news.
        """
        with self._changed:
            self._held.update(held)
            known = self._early & self._held
            self._results.sent.update(known)
            self._held -= known
            self._early -= known
            self._wait.begin_step(wait_s)

    def add_load(self, request_id: str, is_failed: bool) -> None:
        """A load is over."""
        with self._changed:
            self._results.received.add(request_id)
            if is_failed:
                self._results.failed.add(request_id)
            self._changed.notify()

    def add_send(self, request_id: str) -> None:
        """Blocks are free again."""
        with self._changed:
            if request_id in self._held:
                self._held.discard(request_id)
                self._results.sent.add(request_id)
            else:
                self._early.add(request_id)
            self._changed.notify()

    def wake_up(self) -> None:
        """A request has come, or can go on."""
        self._wait.hurry()

    def take(self) -> Results:
        """Everything that has not been taken yet; if no connector of the rank has anything, what
        comes first while the step may wait."""
        with self._changed:
            self._wait.wait()
            taken, self._results = self._results, Results(set(), set(), set())
            if taken.sent or taken.received:
                self._wait.news_told()
        return taken


class RankWorker(Protocol):
    """What moves a rank's KV."""

    def receive(self, message: bytes) -> None:
        """Take an order of the scheduler side. Any thread."""
        ...

    def begin_step(self, steps: Sequence[PushStep]) -> LayerDone | None:
        """A step is about to run these requests' tokens; what to call with each layer's number."""
        ...

    def end_step(self) -> None:
        """The step's kernels are all enqueued."""
        ...

    def close(self) -> None:
        """Stop what moves. Idempotent."""
        ...


class LoadOrder(NamedTuple):
    """Which load an order is about, and whether it begins it."""

    name: str
    begins: bool = False


@dataclass(frozen=True, slots=True)
class WorkerKind:
    """What runs beside a rank's memory.

    Args:
        make: makes it.
        load_of: what an order has to do with a load; None: nothing.
    """

    make: Callable[[RankContext], RankWorker]
    load_of: Callable[[bytes], LoadOrder | None]


def connector_worker(connector: str) -> WorkerKind:
    """The worker of a connector of ``mooncake_kv``."""

    def load_of(order: bytes) -> LoadOrder | None:
        message = decode_to_rank(order)
        if not isinstance(message, Load | CancelLoad):
            return None
        return LoadOrder(message.request_id, begins=isinstance(message, Load))

    return WorkerKind(find_connector(connector).worker, load_of)


class HeldLoads:
    """Orders to load wait for the step that gave them their blocks, and behind them all that is
    ordered of the same loads.

    What that step or an earlier one still does to those blocks, it has enqueued before: it zeroes
    new ones, copies some, and may write for whoever had them last. An event that is recorded behind
    that is waited for, because nothing else orders a load's writes: vLLM keeps blocks that a step
    in flight may write to from others only where its own ``kv_role`` makes it a consumer, which in
    a MultiConnector is the outer one's.

    Args:
        receive: takes each order, once its time has come; in their order.
        load_of: see ``WorkerKind``.
        device: whose events are waited for.
        fail: the thread that waits died of this.

    Raises:
        KVConfigError: that thread can't be started.
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
        self._released: dict[str, Event] = {}  # their step was here before an order
        self._begun: set[str] = set()
        self._over: set[str] = set()  # they ended before their step was here
        self._is_closed = False
        self._waiting = lone_thread("load-release", device.bind_thread)

    def take(self, order: bytes) -> None:
        """An order has come: any one. Any thread."""
        about = self._load_of(order)
        with self._lock:
            if about is None or not (about.begins or about.name in self._held):
                self._receive(order)
                return
            if about.begins:
                self._held[about.name] = []
            self._held[about.name].append(order)
            if about.begins and (event := self._released.pop(about.name, None)) is not None:
                self._begin_behind(event, [about.name])

    def release(self, names: Iterable[str]) -> None:
        """The step that gave these loads their blocks is here. The step's thread."""
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
        """That load has ended, wherever its order and its step are."""
        with self._lock:
            if name in self._begun:
                self._begun.discard(name)
            elif self._released.pop(name, None) is None:
                self._over.add(name)

    def close(self) -> None:
        """What is held is never ordered. Idempotent."""
        with self._lock:
            self._is_closed = True
        self._waiting.shutdown(wait=True, cancel_futures=True)

    def _begin_behind(self, event: Event, names: Sequence[str]) -> None:
        """Pass on what is held of these loads, once an event has passed. Under the lock."""
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
        except Exception as exc:  # whoever waits for what was not obeyed would wait for ever
            logger.exception("loads can't be released")
            self._fail(exc)

    def _begin(self, names: Iterable[str]) -> None:
        """Under the lock."""
        for name in names:
            orders = self._held.pop(name)
            if name in self._over:
                self._over.discard(name)
            else:
                self._begun.add(name)
            for order in orders:
                self._receive(order)


class WorkerSide:
    """Moves the KV of one rank.

    Args:
        config: of the connector.
        rank: which of the instance.
        path: where to listen for the scheduler side.
        view: the rank's memory.
        device: what it is on.
        kind: what moves it; None: the worker of the connector that the configuration names.
        wait: of the rank's steps, for all its connectors; None: there is no other one.
        turn_rope: see ``RankMemory``.

    Raises:
        KVConfigError: the memory can't be moved as asked, or a thread can't be started.
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
        turn_rope: TurnRope | None = None,
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
            turn_rope,
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
        self._link.listen(self._obey, self.report_death)

    def report_death(self, cause: BaseException) -> None:
        """A thread of the worker died: the instance ends with it. Any thread."""
        self._link.send(WorkerDied(repr(cause)))

    def release_loads(self, names: Iterable[str]) -> None:
        """Loads that may begin: see ``HeldLoads``. The step's thread."""
        try:
            self._loads.release(names)
        except Exception as exc:  # whoever waits for what was not obeyed would wait for ever
            self.report_death(exc)
            raise

    def begin_step(
        self, steps: Sequence[PushStep], held: Iterable[str] = (), wait_s: float = 0.0
    ) -> None:
        """A step is about to run. The step's thread.

        Args:
            steps: what it computes of prompts that are sent.
            held: see ``Reports``.
            wait_s: how long it may wait for something to tell.
        """
        self._reports.begin_step(held, wait_s)
        self._layers_done.clear()
        self._layer_done = self._worker.begin_step(steps)

    def layer_done(self, layer_name: str) -> None:
        """The step's KV of that layer is written, or enqueued. The step's thread."""
        if self._layer_done is None:
            return
        index = layer_index(layer_name)
        if index not in self._layers_done:  # vLLM-Ascend has two hooks for it
            self._layers_done.add(index)
            self._layer_done(index)

    def end_step(self) -> None:
        """The step's kernels are all enqueued. The step's thread."""
        self._layer_done = None
        self._worker.end_step()

    def take_results(self) -> Results:
        """What vLLM is to be told, waited for if there is nothing. The step's thread."""
        return self._reports.take()

    def close(self) -> None:
        """Stop what moves, and let the memory go. Idempotent."""
        self._loads.close()
        self._worker.close()
        self._link.close()

    def _obey(self, message: SchedulerMessage) -> None:
        """An order of the scheduler side. The link's thread."""
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
