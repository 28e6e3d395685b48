"""The worker link: messages between the worker processes of one proxy.

Every worker knows the load of the whole proxy: its own exactly, that of the others at most
PUBLISH_S old (with power-of-two choice they don't all choose the same idle instance in that time).
Messages are datagrams that the parent relays in order. A worker that reads too slowly loses some,
so loads, counters and reservations are published periodically.
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
import signal
import socket
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec
from msgspec import Raw, Struct
from msgspec.structs import replace

from mooncake_proxy.api.admission_queue import AdmissionQueue
from mooncake_proxy.api.rate_limits import RateLimits, Usage
from mooncake_proxy.errors import ConfigError, Refusal
from mooncake_proxy.http1.http_wire import Origin
from mooncake_proxy.ops.proxy_metrics import MetricsSnapshot, ProxyMetrics
from mooncake_proxy.pool.membership import ChangeOperation, MembershipChange, apply_change
from mooncake_proxy.pool.model_pools import ModelPools
from mooncake_proxy.routing.model_routers import ModelRouters
from mooncake_proxy.routing.retries import SuspectBodies

if TYPE_CHECKING:
    from mooncake_proxy.routing.reservation_sharing import ReservationSharing, WorkerReports

logger = logging.getLogger(__name__)
PUBLISH_S = 0.02
COUNTS_EVERY = 25
SNAPSHOT_EVERY = 100
MAX_MESSAGE_BYTES = 200_000
# Rows of metrics per message; even histograms with long labels fit into MAX_MESSAGE_BYTES.
ROWS_PER_MESSAGE = 200
# Changes per message. All MAX_CHANGED_URLS must fit into the ten messages that a socket buffers.
CHANGES_PER_MESSAGE = 500
MAX_CHANGED_URLS = 1000


class WorkerLoads(Struct, tag="loads"):
    """Work in flight of one worker.

    `loads` maps names of instances and data-parallel ranks to (running requests, prompt tokens).
    `running` and `waiting` are the requests that the worker serves and that wait in its queue.
    """

    worker: int
    loads: dict[str, tuple[int, int]]
    running: int
    waiting: int


class WorkerCounts(Struct, tag="counts"):
    """Counters of one worker since its start, in numbered parts from 0."""

    worker: int
    counts: MetricsSnapshot
    part: int
    is_last: bool


class ChangeMessage(Struct, tag="change"):
    """A change of the instance pool that one worker has made and the others apply too."""

    change: MembershipChange


class ChangeHistory(Struct, tag="changes"):
    """Past changes of the instance pool, for a worker that starts later or missed some."""

    changes: list[MembershipChange]


class InstanceDeclared(Struct, tag="declared"):
    """A watched source declares an instance from now on: what was done with it before is obsolete.

    For the parent only; every worker watches the source itself.
    """

    name: str


class LossMessage(Struct, tag="loss"):
    """An instance was lost while it worked on a body with this hash, or the body was answered."""

    key: bytes
    # Empty: a request with this body was answered.
    instance: str = ""
    # Times in seconds of the monotonic clock, which all workers share.
    began: float = 0.0
    now: float = 0.0


class UsageMessage(Struct, tag="usage"):
    """Requests and tokens that one worker has admitted, by API key name."""

    usage: Usage


class ReservationMessage(Struct, tag="reservations"):
    """A `ReservationReport` of one worker, as JSON."""

    worker: int
    owner: str
    report: Raw


class PeerProxyMessage(Struct, tag="peer"):
    """A reservation message that one worker has received from a proxy on another host."""

    body: Raw


class WorkerExited(Struct, tag="exited"):
    """A worker has ended: its load is dropped, its counters are kept."""

    worker: int


WorkerMessage = (
    WorkerLoads
    | WorkerCounts
    | ChangeMessage
    | ChangeHistory
    | InstanceDeclared
    | LossMessage
    | UsageMessage
    | ReservationMessage
    | PeerProxyMessage
    | WorkerExited
)
decode_message = msgspec.json.Decoder(WorkerMessage).decode
encode_message = msgspec.json.Encoder().encode


def _ignore(message: object) -> None:
    """Default callback: there are no proxies on other hosts, and no instances that register."""


class WorkerLink:
    """One worker's end of the link.

    Args:
        worker: number of the worker, increasing with every start.
        link: datagram socket to the parent.
    """

    def __init__(self, worker: int, link: socket.socket) -> None:
        self.worker = worker
        self._link = link
        self._pools: ModelPools | None = None
        self._metrics: ProxyMetrics | None = None
        self._admission: AdmissionQueue | None = None
        self._limits: RateLimits | None = None
        self._sharing: ReservationSharing | None = None
        self._reports: WorkerReports | None = None
        # Called with messages that other workers received from proxies on other hosts.
        self.on_peer_news: Callable[[bytes], None] = _ignore
        # Called with registrations that other workers received.
        self.on_registration: Callable[[MembershipChange], object] = _ignore
        # Changes of the pool that did not fit into the parent's socket buffer yet, in order.
        self._unsent: deque[ChangeMessage | InstanceDeclared] = deque(maxlen=MAX_CHANGED_URLS)
        # Owners of the other workers' reservations, by worker.
        self._owners: dict[int, str] = {}
        self._suspects: SuspectBodies | None = None
        self._parent = os.getppid()
        self._loads: dict[int, WorkerLoads] = {}
        self._counts: dict[int, MetricsSnapshot] = {}
        # The sum of those of ended workers: every start has a new number.
        self._ended_counts: MetricsSnapshot = {}
        # Counters of which some parts are still missing, and the number of parts received.
        self._partial_counts: dict[int, tuple[MetricsSnapshot, int]] = {}
        self._published = WorkerLoads(worker, {}, 0, 0)

    def open(self, routers: ModelRouters, admission: AdmissionQueue, limits: RateLimits) -> None:
        """Start to receive the other workers' messages."""
        self._pools = routers.pools
        self._pools.on_declared = self._publish_declared
        self._metrics = routers.first.metrics
        self._suspects = routers.first.suspects
        self._admission = admission
        self._limits = limits
        routers.first.suspects.publish = self._publish_loss
        self._sharing = routers.share_reservations()
        if self._sharing is not None:
            self._reports = self._sharing.report_to(self._send_report)
        self._link.setblocking(False)
        asyncio.get_running_loop().add_reader(self._link.fileno(), self._read)
        self._read()  # changes from before this worker started

    def close(self) -> None:
        """Stop receiving."""
        asyncio.get_running_loop().remove_reader(self._link.fileno())
        self._link.close()

    async def run(self) -> None:
        """Publish loads whenever they change, and loads, counters and reservations periodically."""
        for turn in range(2**62):
            await asyncio.sleep(PUBLISH_S)
            self._send_changes()
            self._publish_loads(is_due=turn % COUNTS_EVERY == 0)
            if self._limits is not None and (usage := self._limits.spent()):
                self._send(UsageMessage(usage))
            if turn % COUNTS_EVERY == 0 and self._metrics is not None:
                self._check_parent()
                for number, (part, is_last) in enumerate(split_snapshot(self._metrics.snapshot())):
                    self._send(WorkerCounts(self.worker, part, number, is_last))
            if self._reports is not None:
                if turn % SNAPSHOT_EVERY == 0:
                    self._reports.begin_snapshot()
                self._reports.send_portion()

    def _send_report(self, owner: str, report: bytes) -> None:
        self._send(ReservationMessage(self.worker, owner, Raw(report)))

    def send_peer_news(self, body: bytes) -> None:
        """Forward a message of a proxy on another host to the other workers."""
        self._send(PeerProxyMessage(Raw(body)))

    def _check_parent(self) -> None:
        """Stop this worker if the parent is gone: nothing would restart it or relay messages."""
        if os.getppid() != self._parent:
            logger.error("the parent process is gone: this worker stops")
            self._parent = os.getppid()
            os.kill(os.getpid(), signal.SIGTERM)

    def _publish_loss(self, key: bytes, instance: str, began: float, now: float) -> None:
        self._send(LossMessage(key, instance, began, now))

    def broadcast(self, change: MembershipChange) -> None:
        """Publish a change to the other workers, which apply it too."""
        self._unsent.append(ChangeMessage(change))
        self._send_changes()

    def _publish_declared(self, name: str) -> None:
        if self.leads:
            self._unsent.append(InstanceDeclared(name))
            self._send_changes()

    def _send_changes(self) -> None:
        """Send queued changes. They are kept until sent, because they are published only once."""
        while self._unsent and self._send(self._unsent[0]):
            self._unsent.popleft()

    @property
    def leads(self) -> bool:
        """Whether this worker does what only one must do: the oldest worker leads."""
        return self.worker < min(self._loads, default=self.worker + 1)

    def counts_of_others(self) -> list[MetricsSnapshot]:
        """Counters of the other workers, including those that have ended."""
        ended = [self._ended_counts] if self._ended_counts else []
        return [*self._counts.values(), *ended]

    def running_elsewhere(self) -> int:
        """Requests being served by the other workers."""
        return sum(loads.running for loads in self._loads.values())

    def waiting_elsewhere(self) -> int:
        """Requests in the other workers' queues."""
        return sum(loads.waiting for loads in self._loads.values())

    def _publish_loads(self, *, is_due: bool) -> None:
        assert self._pools is not None
        assert self._admission is not None
        busy = [i for i in self._pools if i.num_running]
        own = {i.name: (i.num_running, i.num_prompt_tokens) for i in busy}
        for rank in (rank for instance in busy for rank in instance.dp_ranks or ()):
            own[rank.name] = (rank.num_running, rank.num_prompt_tokens)
        admission = self._admission
        loads = WorkerLoads(self.worker, own, admission.num_running, admission.num_waiting)
        if is_due or loads != self._published:
            self._published = loads
            self._send(loads)

    def _send(self, message: WorkerMessage) -> bool:
        """Send a message to the parent. Returns False if the socket's buffer is full."""
        data = encode_message(message)
        if len(data) > MAX_MESSAGE_BYTES:
            logger.warning("message of %d bytes to other workers is too long, dropped", len(data))
            return True
        try:
            self._link.send(data)
        except BlockingIOError:
            logger.warning("other workers read too slowly, %s not sent", type(message).__name__)
            return False
        except OSError as exc:
            logger.warning("cannot send to other workers: %s", exc)
        return True

    def _read(self) -> None:
        while True:
            try:
                data = self._link.recv(MAX_MESSAGE_BYTES + 1)
            except BlockingIOError:
                return
            if not data:
                return
            self._process(decode_message(data))

    def _process(self, message: WorkerMessage) -> None:
        """Process a message of another worker or of the parent."""
        if isinstance(message, WorkerCounts):
            self._receive_counts(message)
        elif isinstance(message, ChangeMessage):
            self._apply_change(message.change)
        elif isinstance(message, ChangeHistory):
            for change in message.changes:
                self._apply_change(change)
        elif isinstance(message, WorkerLoads):
            self._loads[message.worker] = message
            self._update_loads()
        elif isinstance(message, WorkerExited):
            self._forget(message.worker)
        elif not isinstance(message, InstanceDeclared):
            self._apply_shared(message)

    def _apply_shared(
        self, message: LossMessage | UsageMessage | ReservationMessage | PeerProxyMessage
    ) -> None:
        """Apply losses, usage and reservations of another worker."""
        if isinstance(message, LossMessage):
            assert self._suspects is not None
            self._suspects.apply(message.key, message.instance, message.began, message.now)
        elif isinstance(message, UsageMessage):
            assert self._limits is not None
            self._limits.spent_elsewhere(message.usage)
        elif isinstance(message, PeerProxyMessage):
            self.on_peer_news(bytes(message.body))
        elif self._sharing is not None:
            self._owners[message.worker] = message.owner
            self._sharing.receive(message.report)

    def _forget(self, worker: int) -> None:
        """Drop the load and the reservations of an ended worker. Its counters are kept."""
        self._loads.pop(worker, None)
        self._update_loads()
        self._partial_counts.pop(worker, None)
        if (counts := self._counts.pop(worker, None)) is not None:
            self._ended_counts = ProxyMetrics.sum_of([self._ended_counts, counts]).snapshot()
        owner = self._owners.pop(worker, None)
        if owner is not None and self._sharing is not None:
            self._sharing.forget(owner)

    def _receive_counts(self, message: WorkerCounts) -> None:
        found, num_parts = self._partial_counts.pop(message.worker, ({}, 0))
        if message.part == 0:
            found = {}
        elif message.part != num_parts:
            return  # a part was lost: wait for the next complete snapshot
        for name, rows in message.counts.items():
            found.setdefault(name, []).extend(rows)
        if message.is_last:
            self._counts[message.worker] = found
        else:
            self._partial_counts[message.worker] = (found, message.part + 1)

    def _apply_change(self, change: MembershipChange) -> None:
        assert self._pools is not None
        try:
            if change.lease_s:
                self.on_registration(change)
            else:
                apply_change(self._pools, change)
        except (Refusal, ConfigError) as exc:
            logger.warning("can't apply another worker's change of the pool: %s", exc)

    def _update_loads(self) -> None:
        assert self._pools is not None
        for instance in self._pools:
            instance.num_elsewhere = self._load_of(instance.name)
            for rank in instance.dp_ranks or ():
                rank.num_elsewhere = self._load_of(rank.name)

    def _load_of(self, name: str) -> tuple[int, int]:
        """The other workers' load on an instance or a data-parallel rank."""
        rows = [one.loads.get(name, (0, 0)) for one in self._loads.values()]
        return sum(row[0] for row in rows), sum(row[1] for row in rows)


def split_snapshot(snapshot: MetricsSnapshot) -> Iterator[tuple[MetricsSnapshot, bool]]:
    """Split a snapshot into parts that fit into messages, with a flag for the last one."""
    rows = [(name, row) for name, rows in snapshot.items() for row in rows]
    for start in range(0, max(len(rows), 1), ROWS_PER_MESSAGE):
        part: MetricsSnapshot = {}
        for name, row in rows[start : start + ROWS_PER_MESSAGE]:
            part.setdefault(name, []).append(row)
        yield part, start + ROWS_PER_MESSAGE >= len(rows)


@dataclass(slots=True)
class _ChangesOfInstance:
    """The changes of one instance; at `ends_at` its lease expires, and they are obsolete."""

    changes: list[MembershipChange]
    ends_at: float

    def effect(self, now: float) -> int:
        """How much a worker that starts at `now` depends on them; 0: not at all."""
        if now >= self.ends_at:
            return 0
        first, last = self.changes[0], self.changes[-1]
        if not last.removes:
            return 3
        # What was added here and is gone; and what a flag or a watched source may still declare.
        return 1 if first.operation is ChangeOperation.ADD else 2


def _is_renewal(change: MembershipChange, earlier: MembershipChange) -> bool:
    lease_s, registered = change.lease_s, change.registered
    return replace(earlier, lease_s=lease_s, registered=registered) == change


def _is_same_start(change: MembershipChange, earlier: MembershipChange) -> bool:
    starts = [None if one.registered is None else one.registered[0] for one in (change, earlier)]
    return starts[0] == starts[1]


def _superseded_by(change: MembershipChange) -> set[ChangeOperation]:
    if change.operation in (ChangeOperation.ADD, ChangeOperation.REMOVE) or change.lease_s:
        return set(ChangeOperation)
    if change.operation in (ChangeOperation.DRAIN, ChangeOperation.RESUME):
        return {ChangeOperation.DRAIN, ChangeOperation.RESUME}
    return {change.operation}


class ChangeLog:
    """The changes of the instance pool, reduced to those that lead to the same pool."""

    def __init__(self) -> None:
        self._by_name: OrderedDict[str, _ChangesOfInstance] = OrderedDict()

    def note(self, change: MembershipChange, now: float) -> None:
        """Add a change. It replaces earlier changes of its instance that it supersedes.

        `now`: monotonic time in seconds.
        """
        name = str(Origin.parse(change.url))
        known = self._by_name.pop(name, _ChangesOfInstance([], math.inf))
        earlier = known.changes if now < known.ends_at else []
        if earlier and change.lease_s and _is_renewal(change, earlier[0]):
            # What was decided since the registration stays. Only a removal is of this start.
            decided, is_same = earlier[1:], _is_same_start(change, earlier[0])
            changes = [change, *(one for one in decided if is_same or not one.removes)]
        elif change.operation is ChangeOperation.REMOVE and not change.lease_s:
            # After a registration, so that the next renewal does not undo it.
            added = [one for one in earlier[:1] if one.operation is ChangeOperation.ADD]
            changes = [*added, change]
        else:
            replaced = _superseded_by(change)
            changes = [*(one for one in earlier if one.operation not in replaced), change]
        ends_at = now + change.lease_s if change.lease_s else math.inf
        if changes[0] is not change:
            ends_at = known.ends_at
        self._by_name[name] = _ChangesOfInstance(changes, ends_at)
        if len(self._by_name) > MAX_CHANGED_URLS:
            self._drop_one(now)

    def _drop_one(self, now: float) -> None:
        """Drop what matters least: of the same effect, the oldest."""
        name = min(self._by_name, key=lambda name: self._by_name[name].effect(now))
        dropped = self._by_name.pop(name)
        if not dropped.changes[-1].removes and now < dropped.ends_at:
            logger.warning(
                "more than %d instances were changed: workers that start from now on don't know "
                "the changes of %s",
                *(MAX_CHANGED_URLS, name),
            )

    def forget(self, name: str) -> None:
        """Drop the changes of an instance."""
        self._by_name.pop(name, None)

    def messages(self, now: float) -> list[ChangeHistory]:
        """The messages for a worker that starts at `now`."""
        current = [known for known in self._by_name.values() if now < known.ends_at]
        changes = [change for known in current for change in known.changes]
        starts = range(0, len(changes), CHANGES_PER_MESSAGE)
        return [ChangeHistory(changes[start : start + CHANGES_PER_MESSAGE]) for start in starts]
