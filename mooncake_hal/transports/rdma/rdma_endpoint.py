"""The rdma transport: its endpoints, with their NICs, registered memory and served queue pairs."""

from __future__ import annotations

import logging
import threading
import time
from contextlib import ExitStack

from mooncake_hal.errors import HalError, PeerLost, TransferError, TransportUnavailable
from mooncake_hal.session.authentication import decode, encode
from mooncake_hal.session.regions import AttachedRegions
from mooncake_hal.session.session import Session
from mooncake_hal.transport import Endpoint, EndpointOptions, MemoryRegion
from mooncake_hal.transports.rdma import verbs
from mooncake_hal.transports.rdma.nic import Nic, QueuePair, require_pyverbs
from mooncake_hal.transports.rdma.nic_memory import NicMemory
from mooncake_hal.transports.rdma.progress_thread import ProgressThread
from mooncake_hal.transports.rdma.rdma_connection import RdmaConnection
from mooncake_hal.transports.rdma.rdma_messages import (
    VERSION,
    OpenQueuePairs,
    QueuePairInfo,
    QueuePairsOpened,
    RdmaEndpointInfo,
    RegionKeys,
    decode_call,
    decode_endpoint_info,
    pair_nics,
    unreachable_reason,
)
from mooncake_hal.transports.rdma.rdma_peer import RdmaPeer
from mooncake_hal.transports.rdma.rdma_plugin import active_ports
from mooncake_hal.transports.rdma.rdma_settings import choose_ports, settings_of_endpoint
from mooncake_hal.transports.rdma.work_requests import RegionKeyTables
from mooncake_hal.transports.session_endpoint import compare_addresses, open_endpoint

logger = logging.getLogger(__name__)

NAME = "rdma"
MAX_QUEUE_PAIRS = 256
"""Maximum number of queue pairs that one peer may request."""


class RdmaDataPath:
    """Data path over RDMA: NICs, registered memory and served queue pairs. It is also the
    ``RdmaPeerContext`` of its peers.

    Args:
        options: how to open the endpoint.
        local: the endpoint's own regions.

    Raises:
        TransportUnavailable: there is no usable NIC.
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
            self.nics: list[Nic] = []
            for name in choose_ports(settings.devices, active_ports()):
                nic = Nic(len(self.nics), name, settings)
                undo.callback(nic.close)
                self.nics.append(nic)
            self.progress = ProgressThread(self._tick, self._progress_failed)
            self._undo = undo.pop_all()
        self.local_keys = RegionKeyTables(len(self.nics), self._local_keys)

    def info(self) -> bytes:
        return encode(RdmaEndpointInfo([nic.info() for nic in self.nics]))

    def unreachable_reason(self, info: bytes) -> str | None:
        return unreachable_reason(
            [nic.info() for nic in self.nics], decode_endpoint_info(info).nics
        )

    def attach(self, key: int, region: MemoryRegion) -> bytes:
        with ExitStack() as undo:
            memories = []
            for nic in self.nics:
                memories.append(nic.register(region))
                undo.callback(memories[-1].close)
            undo.pop_all()
        # NICs use the same addresses as this process
        shifts, on_host = [0] * len(memories), region.device == "cpu"
        with self._lock:
            self._memories[key] = memories
            self._keys[key] = RegionKeys([memory.lkey for memory in memories], shifts, on_host)
        return encode(RegionKeys([memory.rkey for memory in memories], shifts, on_host))

    def detach(self, key: int) -> None:
        with self._lock:
            memories = self._memories.pop(key)
            del self._keys[key]
            peers = list(self._peers)
        for peer in peers:
            peer.abort_in_region(key)
        with ExitStack() as withdrawals:  # deregisters from all NICs even if one of them fails
            for memory in memories:
                withdrawals.callback(memory.close)

    def handle_request(self, session: Session, payload: bytes) -> bytes:
        call = decode_call(payload)
        if isinstance(call, OpenQueuePairs):
            return encode(QueuePairsOpened(self._serve(session, call)))
        pairs = self._served.get(session, [])
        if not 0 <= call.number < len(pairs):
            raise TransferError(f"there is no connection {call.number} to reopen")
        old = pairs[call.number]
        old.close()
        pairs[call.number] = self._served_pair(old.nic.number, call.queue_pair)
        return encode(QueuePairsOpened([pairs[call.number].info()]))

    def session_ended(self, session: Session) -> None:
        for pair in self._served.pop(session, []):
            pair.close()

    def connect(self, session: Session, info: bytes, timeout: float) -> RdmaPeer:
        deadline = time.monotonic() + timeout
        remote_nics = decode_endpoint_info(info).nics
        chosen = pair_nics([nic.info() for nic in self.nics], remote_nics, self._connections)
        connections = [
            RdmaConnection(n, self.nics[ours], theirs) for n, (ours, theirs) in enumerate(chosen)
        ]
        with ExitStack() as undo:
            for connection in connections:
                undo.callback(connection.close)
            call = OpenQueuePairs(
                [connection.remote_nic for connection in connections],
                [connection.open() for connection in connections],
            )
            reply = session.request(encode(call), max(0.0, deadline - time.monotonic()))
            opened = decode(reply, QueuePairsOpened).queue_pairs
            if len(opened) != len(connections):
                raise PeerLost(f"the peer opened {len(opened)} of {len(connections)} connections")
            for connection, remote in zip(connections, opened, strict=True):
                connection.connect(remote)
            _probe_connections(connections, deadline)
            peer = RdmaPeer(self, session, connections, len(remote_nics))
            undo.pop_all()
        with self._lock:
            self._peers = [known for known in self._peers if not known.closed] + [peer]
        return peer

    def close(self) -> None:
        self.progress.close()
        self._undo.close()

    def _serve(self, session: Session, call: OpenQueuePairs) -> list[QueuePairInfo]:
        if session in self._served or not 0 < len(call.queue_pairs) <= MAX_QUEUE_PAIRS:
            raise TransferError(
                f"a peer opens its connections once, 1 to {MAX_QUEUE_PAIRS} of them"
            )
        if len(call.nics) != len(call.queue_pairs):
            raise TransferError(
                f"{len(call.queue_pairs)} connections need as many NICs, not {call.nics}"
            )
        pairs: list[QueuePair] = []
        self._served[session] = pairs  # `session_ended` closes them even if this fails half way
        for nic, remote in zip(call.nics, call.queue_pairs, strict=True):
            pairs.append(self._served_pair(nic, remote))
        return [pair.info() for pair in pairs]

    def _served_pair(self, nic: int, remote: QueuePairInfo) -> QueuePair:
        if not 0 <= nic < len(self.nics):
            raise TransferError(f"there is no NIC {nic}; there are {len(self.nics)}")
        pair = self.nics[nic].queue_pair(sends=False)
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


def _probe_connections(connections: list[RdmaConnection], deadline: float) -> None:
    """Test every connection with an empty write; marks the connections down that do not complete
    it.

    Raises:
        TransportUnavailable: no connection completed it.
    """
    for connection in connections:
        connection.probe()
    reasons = []
    for connection in connections:
        reason = connection.wait_for_probe(deadline)
        if reason is not None:
            connection.mark_down(time.monotonic())
            reasons.append(f"{connection.nic.name}: {reason}")
            logger.warning("rdma connection %d does not work: %s", connection.number, reasons[-1])
    if len(reasons) == len(connections):
        raise TransportUnavailable(NAME, f"the peer replies, but no queue pair works: {reasons}")


class RdmaTransport:
    """Moves bytes with RDMA reads and writes between registered regions.

    Raises:
        TransportUnavailable: pyverbs or libibverbs does not load.
    """

    name = NAME
    can_revoke = True
    # packets of a destroyed queue pair may still be in flight to the peer
    stops_writes_on_failure = False

    def __init__(self) -> None:
        require_pyverbs()
        verbs.load()

    def open(self, options: EndpointOptions) -> Endpoint:
        local = AttachedRegions("this side")
        return open_endpoint(RdmaDataPath(options, local), local, options)

    def reaches(self, local: bytes, remote: bytes) -> str | None:
        return compare_addresses(
            (local, remote),
            NAME,
            VERSION,
            decode_endpoint_info,
            lambda ours, theirs: unreachable_reason(ours.nics, theirs.nics),
        )
