"""The RDMA side of an endpoint: its rails, its registered memory, the queue pairs it serves."""

from __future__ import annotations

import logging
import threading
import time
from contextlib import ExitStack

from mooncake_hal.errors import HalError, PeerLost, TransferError, TransportUnavailable
from mooncake_hal.transport import EndpointOptions, MemoryRegion
from mooncake_hal.transports.control.session import Session
from mooncake_hal.transports.control.table import AttachedRegions
from mooncake_hal.transports.handshake import decode, encode
from mooncake_hal.transports.rdma.compat import import_enums
from mooncake_hal.transports.rdma.facts import (
    VERSION,
    EndpointFacts,
    LaneFacts,
    LanesOpened,
    OpenLanes,
    RegionKeys,
    decode_call,
    decode_facts,
    pair_rails,
    why_unreachable,
)
from mooncake_hal.transports.rdma.keys import KeyTables
from mooncake_hal.transports.rdma.lane import Lane
from mooncake_hal.transports.rdma.memory import NicMemory
from mooncake_hal.transports.rdma.peer import RdmaPeer
from mooncake_hal.transports.rdma.ports import active_ports
from mooncake_hal.transports.rdma.progress import Progress
from mooncake_hal.transports.rdma.rail import QueuePair, Rail
from mooncake_hal.transports.rdma.settings import settings_of_endpoint

logger = logging.getLogger(__name__)

NAME = "rdma"
MAX_LANES = 256
"""Queue pairs that one peer may ask for."""


class RdmaDriver:
    """See ``Driver``; also the ``Neighbourhood`` of its peers.

    Args:
        options: how to open the endpoint.
        local: the endpoint's own regions.

    Raises:
        TransportUnavailable: no usable NIC.
        HalError, ValueError: a setting is unknown or out of range.
    """

    name = NAME
    version = VERSION

    def __init__(self, options: EndpointOptions, local: AttachedRegions) -> None:
        self.local = local
        self._connections = options.connections
        settings = settings_of_endpoint(options.extra)
        self._lock = threading.Lock()
        self._memories: dict[int, list[NicMemory]] = {}
        self._keys: dict[int, RegionKeys] = {}
        self._served: dict[Session, list[QueuePair]] = {}
        self._peers: list[RdmaPeer] = []
        with ExitStack() as undo:
            self.rails: list[Rail] = []
            for name in chosen_ports(settings.devices, active_ports()):
                rail = Rail(len(self.rails), name, settings, import_enums())
                undo.callback(rail.close)
                self.rails.append(rail)
            self.progress = Progress(self._tick, self._progress_failed)
            self._undo = undo.pop_all()
        self.local_keys = KeyTables(len(self.rails), self._local_keys)

    def facts(self) -> bytes:
        """See ``Driver``."""
        return encode(EndpointFacts([rail.facts() for rail in self.rails]))

    def unreachable(self, facts: bytes) -> str | None:
        """See ``Driver``."""
        return why_unreachable([rail.facts() for rail in self.rails], decode_facts(facts).rails)

    def attach(self, key: int, region: MemoryRegion) -> bytes:
        """See ``Driver``: registers with every NIC."""
        with ExitStack() as undo:
            memories = []
            for rail in self.rails:
                memories.append(rail.register(region))
                undo.callback(memories[-1].close)
            undo.pop_all()
        shifts, on_host = [memory.shift for memory in memories], region.device == "cpu"
        with self._lock:
            self._memories[key] = memories
            self._keys[key] = RegionKeys([memory.lkey for memory in memories], shifts, on_host)
        return encode(RegionKeys([memory.rkey for memory in memories], shifts, on_host))

    def detach(self, key: int) -> None:
        """See ``Driver``: when the NICs have let go of it, no peer can touch it."""
        with self._lock:
            memories = self._memories.pop(key)
            del self._keys[key]
            peers = list(self._peers)
        for peer in peers:
            peer.withdraw(key)
        for memory in memories:
            memory.close()

    def answer(self, session: Session, payload: bytes) -> bytes:
        """See ``Driver``: makes queue pairs for a peer that dialled."""
        call = decode_call(payload)
        if isinstance(call, OpenLanes):
            return encode(LanesOpened(self._serve(session, call)))
        pairs = self._served.get(session, [])
        if not 0 <= call.number < len(pairs):
            raise TransferError(f"there is no lane {call.number} to open anew")
        old = pairs[call.number]
        old.close()
        pairs[call.number] = self._served_pair(old.rail.number, call.lane)
        return encode(LanesOpened([pairs[call.number].facts()]))

    def departed(self, session: Session) -> None:
        """See ``Driver``."""
        for pair in self._served.pop(session, []):
            pair.close()

    def dial(self, session: Session, facts: bytes, timeout: float) -> RdmaPeer:
        """See ``Driver``: opens the lanes, and proves that each carries something."""
        deadline = time.monotonic() + timeout
        remote_rails = decode_facts(facts).rails
        chosen = pair_rails([r.facts() for r in self.rails], remote_rails, self._connections)
        lanes = [Lane(n, self.rails[ours], theirs) for n, (ours, theirs) in enumerate(chosen)]
        with ExitStack() as undo:
            for lane in lanes:
                undo.callback(lane.close)
            call = OpenLanes([lane.remote_rail for lane in lanes], [lane.open() for lane in lanes])
            answer = session.call(encode(call), max(0.0, deadline - time.monotonic()))
            opened = decode(answer, LanesOpened).lanes
            if len(opened) != len(lanes):
                raise PeerLost(f"the peer opened {len(opened)} of {len(lanes)} lanes")
            for lane, remote in zip(lanes, opened, strict=True):
                lane.connect(remote)
            _prove(lanes, deadline)
            peer = RdmaPeer(self, session, lanes, len(remote_rails))
            undo.pop_all()
        with self._lock:
            self._peers = [known for known in self._peers if not known.closed] + [peer]
        return peer

    def close(self) -> None:
        """See ``Driver``."""
        self.progress.close()
        self._undo.close()

    def _serve(self, session: Session, call: OpenLanes) -> list[LaneFacts]:
        if session in self._served or not 0 < len(call.lanes) <= MAX_LANES:
            raise TransferError(f"a peer opens its lanes once, 1 to {MAX_LANES} of them")
        if len(call.rails) != len(call.lanes):
            raise TransferError(f"{len(call.lanes)} lanes need as many rails, not {call.rails}")
        pairs: list[QueuePair] = []
        self._served[session] = pairs  # `departed` closes what there is, whatever happens here
        for rail, remote in zip(call.rails, call.lanes, strict=True):
            pairs.append(self._served_pair(rail, remote))
        return [pair.facts() for pair in pairs]

    def _served_pair(self, rail: int, remote: LaneFacts) -> QueuePair:
        if not 0 <= rail < len(self.rails):
            raise TransferError(f"there is no rail {rail}; there are {len(self.rails)}")
        pair = QueuePair(self.rails[rail], sends=False)
        try:
            pair.connect(remote)
        except HalError:
            pair.close()
            raise
        return pair

    def _local_keys(self, regions: list[int]) -> list[RegionKeys | None]:
        with self._lock:
            return [self._keys.get(key) for key in regions]

    def _tick(self, now: float) -> float | None:
        with self._lock:
            peers = [peer for peer in self._peers if not peer.closed]
        moments = [moment for peer in peers if (moment := peer.tick(now)) is not None]
        return min(moments, default=None)

    def _progress_failed(self, error: Exception) -> None:
        with self._lock:
            peers = list(self._peers)
        for peer in peers:
            peer.lost(TransferError(f"rdma progress failed: {error!r}"))


def chosen_ports(wanted: str, ports: list[str]) -> list[str]:
    """Return the ports that were asked for, or all that are up.

    Args:
        wanted: as in ``RdmaSettings.devices``.
        ports: all that are up, as ``device:port``.

    Raises:
        TransportUnavailable: none, or not the ones that were asked for.
    """
    if not ports:
        raise TransportUnavailable(NAME, "no RDMA port of this host is up")
    if not wanted:
        return ports
    chosen = [name if ":" in name else f"{name}:1" for name in wanted.split(",") if name]
    missing = [name for name in chosen if name not in ports]
    if missing or not chosen:
        raise TransportUnavailable(NAME, f"{missing or wanted!r} is not among the ports {ports}")
    return chosen


def _prove(lanes: list[Lane], deadline: float) -> None:
    """Send something over every lane; take those down over which it does not arrive.

    Raises:
        TransportUnavailable: all of them.
    """
    for lane in lanes:
        lane.probe()
    reasons = []
    for lane in lanes:
        reason = lane.await_probe(deadline)
        if reason is not None:
            lane.go_down(time.monotonic())
            reasons.append(f"{lane.rail.name}: {reason}")
            logger.warning("rdma lane %d carries nothing: %s", lane.number, reasons[-1])
    if len(reasons) == len(lanes):
        raise TransportUnavailable(NAME, f"the peer answers, but no lane works: {reasons}")
