"""What worker processes of one proxy tell each other: loads, counts and changes of the fleet.

Each worker holds the whole view: its own numbers exactly, those of the others at most PUBLISH_S old
(power-of-two choice keeps them from running after the same idle instance meanwhile). Messages go
through the parent, one datagram each, in order.
"""

from __future__ import annotations

import asyncio
import logging
import socket

import msgspec
from msgspec import Struct

from mooncake_proxy.admission import Admission
from mooncake_proxy.errors import ConfigError, Refusal
from mooncake_proxy.instances import Fleet
from mooncake_proxy.membership import Change, apply
from mooncake_proxy.metrics import Metrics, Snapshot

logger = logging.getLogger(__name__)
PUBLISH_S = 0.02
COUNTS_EVERY = 25
MAX_MESSAGE_BYTES = 200_000


class Loads(Struct, tag="loads"):
    """In-flight work of one worker: name -> (running, prompt tokens), and how many requests it
    serves and lets wait."""

    worker: int
    loads: dict[str, tuple[int, int]]
    running: int
    waiting: int


class Counts(Struct, tag="counts"):
    """All counters of one worker since its start."""

    worker: int
    counts: Snapshot


class Fleeting(Struct, tag="change"):
    """A change of the fleet that one worker has made and the others make too."""

    change: Change


class Gone(Struct, tag="gone"):
    """A worker ended; what it had in flight is no load any more, what it counted stays."""

    worker: int


Message = Loads | Counts | Fleeting | Gone
_decoder = msgspec.json.Decoder(Message)
encode_message = msgspec.json.Encoder().encode


class Share:
    """One worker's end."""

    def __init__(self, worker: int, link: socket.socket) -> None:
        self.worker = worker
        self._link = link
        self._fleet: Fleet | None = None
        self._metrics: Metrics | None = None
        self._admission: Admission | None = None
        self._loads: dict[int, Loads] = {}
        self._counts: dict[int, Snapshot] = {}
        self._published = Loads(worker, {}, 0, 0)

    def open(self, fleet: Fleet, metrics: Metrics, admission: Admission) -> None:
        """Begin to listen to the others."""
        self._fleet = fleet
        self._metrics = metrics
        self._admission = admission
        self._link.setblocking(False)
        asyncio.get_running_loop().add_reader(self._link.fileno(), self._read)

    def close(self) -> None:
        """Stop listening."""
        asyncio.get_running_loop().remove_reader(self._link.fileno())
        self._link.close()

    async def run(self) -> None:
        """Publish loads when they change, counts now and then."""
        for turn in range(2**62):
            await asyncio.sleep(PUBLISH_S)
            self._publish_loads()
            if turn % COUNTS_EVERY == 0 and self._metrics is not None:
                self._send(Counts(self.worker, self._metrics.snapshot()))

    def tell(self, change: Change) -> None:
        """The others make this change too."""
        self._send(Fleeting(change))

    def counts_of_others(self) -> list[Snapshot]:
        """What the other workers have counted, living or gone."""
        return list(self._counts.values())

    def running_elsewhere(self) -> int:
        """Requests that the other workers serve."""
        return sum(loads.running for loads in self._loads.values())

    def waiting_elsewhere(self) -> int:
        """Requests in the other workers' queues."""
        return sum(loads.waiting for loads in self._loads.values())

    def _publish_loads(self) -> None:
        assert self._fleet is not None
        assert self._admission is not None
        own = {i.name: (i.num_running, i.num_prompt_tokens) for i in self._fleet if i.num_running}
        admission = self._admission
        loads = Loads(self.worker, own, admission.num_running, admission.num_waiting)
        if loads != self._published:
            self._published = loads
            self._send(loads)

    def _send(self, message: Message) -> None:
        data = encode_message(message)
        if len(data) > MAX_MESSAGE_BYTES:
            logger.warning("message of %d bytes to other workers is too long, dropped", len(data))
            return
        try:
            self._link.send(data)
        except BlockingIOError:
            logger.warning("other workers don't keep up, %s dropped", type(message).__name__)
        except OSError as exc:
            logger.warning("other workers not reached: %s", exc)

    def _read(self) -> None:
        while True:
            try:
                data = self._link.recv(MAX_MESSAGE_BYTES + 1)
            except BlockingIOError:
                return
            if not data:
                return
            self._take(_decoder.decode(data))

    def _take(self, message: Message) -> None:
        if isinstance(message, Counts):
            self._counts[message.worker] = message.counts
        elif isinstance(message, Fleeting):
            self._follow(message.change)
        elif isinstance(message, Loads):
            self._loads[message.worker] = message
            self._sum_up()
        else:
            self._loads.pop(message.worker, None)
            self._sum_up()

    def _follow(self, change: Change) -> None:
        assert self._fleet is not None
        try:
            apply(self._fleet, change)
        except (Refusal, ConfigError) as exc:
            logger.warning("change of another worker not followed: %s", exc)

    def _sum_up(self) -> None:
        assert self._fleet is not None
        for instance in self._fleet:
            rows = [one.loads.get(instance.name, (0, 0)) for one in self._loads.values()]
            instance.num_elsewhere = (sum(row[0] for row in rows), sum(row[1] for row in rows))
