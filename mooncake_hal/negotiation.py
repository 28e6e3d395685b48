"""Negotiation of the transport between two instances: the best one that both have and that works.

Each side opens an endpoint for every transport that it has and publishes all their addresses. The
connecting side goes through the common transports by priority, asks each whether it reaches the
peer, and connects over the first that does. It logs every better transport that did not, with the
reason.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace

from mooncake_hal.errors import NoTransportFits, PluginError, TransportUnavailable
from mooncake_hal.port_range import ReservedPorts
from mooncake_hal.registry import PluginStatus, Registry, TableRow
from mooncake_hal.specs import TransportConstraints, TransportSpec
from mooncake_hal.transport import Endpoint, EndpointOptions, MemoryRegion, Peer, Transport

logger = logging.getLogger(__name__)

AUTO = "auto"


@dataclass(frozen=True, slots=True)
class OpenedTransport:
    """A transport that this instance has opened.

    Args:
        transport: the loaded transport.
        endpoint: this instance's endpoint.
        priority: the spec's priority; the reachable transport with the highest one is used.
        constraints: the spec's constraints, which a pair of instances must satisfy.
    """

    transport: Transport
    endpoint: Endpoint
    priority: int
    constraints: TransportConstraints = field(default_factory=TransportConstraints)

    @property
    def name(self) -> str:
        """Name of the transport."""
        return self.transport.name


@dataclass(frozen=True, slots=True)
class NegotiatedPeer:
    """A negotiated connection.

    Args:
        name: the transport that was chosen.
        peer: the connection.
        reason: why it was chosen, and why each better one was not; for logs and status pages.
    """

    name: str
    peer: Peer
    reason: str


class Transports:
    """The open transports of an instance, behind one interface to register memory and to connect.

    Args:
        candidates: at least one opened transport; owned and closed by this object.
    """

    def __init__(self, candidates: Sequence[OpenedTransport]) -> None:
        self._candidates = sorted(candidates, key=lambda item: (-item.priority, item.name))

    @classmethod
    def open(
        cls,
        registry: Registry,
        options: EndpointOptions,
        *,
        wanted: str = AUTO,
        allowed: Sequence[str] | None = None,
    ) -> Transports:
        """Open the transports that are available on this host.

        Args:
            registry: the discovered plugins.
            options: how to open each endpoint; a port other than 0 requires ``wanted`` to name a
                transport.
            wanted: ``"auto"``, or the name of the only transport to open.
            allowed: names that ``auto`` may open, such as a backend's ``capabilities.transports``;
                None allows all whose priority is not below zero.

        Raises:
            TransportUnavailable: the wanted transport, or with ``auto`` every one, is unavailable.
            PluginError: the wanted transport's plugin is broken.
            PortsExhausted: the port range has too few free ports for all of them.
            OSError: the wanted transport can't bind its host or port.
        """
        if wanted != AUTO:
            return cls([_open_one(registry, wanted, options)])
        opened, refusals = [], []
        with ExitStack() as undo:
            for row in _eligible(registry, allowed):
                if allowed is not None and row.name not in allowed:
                    refusals.append(f"{row.name}: the backend can't use it")
                    continue
                try:
                    opened.append(_open_one(registry, row.name, options))
                    undo.callback(opened[-1].endpoint.close)
                except (TransportUnavailable, PluginError, OSError) as exc:
                    refusals.append(str(exc))
                    logger.info("transport %s is not offered: %s", row.name, exc)
            undo.pop_all()
        if not opened:
            raise TransportUnavailable(AUTO, "; ".join(refusals) or "no plugin offers a transport")
        return cls(opened)

    @property
    def names(self) -> list[str]:
        """Names of the open transports, best first."""
        return [candidate.name for candidate in self._candidates]

    @property
    def addresses(self) -> dict[str, bytes]:
        """The endpoints' addresses by transport, for peers to connect to."""
        return {candidate.name: candidate.endpoint.address for candidate in self._candidates}

    @property
    def constraints(self) -> dict[str, TransportConstraints]:
        """Each transport's constraints, with the variants that are open, by name."""
        return {
            candidate.name: replace(
                candidate.constraints, variants=tuple(candidate.endpoint.variants)
            )
            for candidate in self._candidates
        }

    @property
    def stops_writes_on_failure(self) -> bool:
        """Whether peers' writes stop with their writers on every open transport; see
        ``Transport.stops_writes_on_failure``."""
        return all(candidate.transport.stops_writes_on_failure for candidate in self._candidates)

    def register(self, region: MemoryRegion) -> dict[str, int]:
        """Register a region that all peers need, before any connects, with every transport; returns
        its keys by transport.

        A transport that can't register it is closed and no longer offered; this is logged at
        WARNING.

        Raises:
            TransportUnavailable: no transport can register it.
        """
        keys = self.register_where_possible(region)
        for candidate in self._candidates:
            if candidate.name not in keys:
                logger.warning("transport %s is dropped", candidate.name)
                candidate.endpoint.close()
        self._candidates = [each for each in self._candidates if each.name in keys]
        return keys

    def register_where_possible(self, region: MemoryRegion) -> dict[str, int]:
        """Register a region with the transports that can; returns its keys by transport. The others
        stay open, for the peers that don't need it; this is logged at WARNING. Any thread.

        Raises:
            TransportUnavailable: no transport can register it.
        """
        keys = {}
        for candidate in self._candidates:
            try:
                keys[candidate.name] = candidate.endpoint.register(region)
            except TransportUnavailable as exc:
                logger.warning("transport %s is not used: %s", candidate.name, exc.reason)
        if not keys:
            raise TransportUnavailable(AUTO, f"no transport can register memory of {region.device}")
        return keys

    def revoke(self, keys: Mapping[str, int]) -> None:
        """Revoke a region on every transport; see ``Endpoint.revoke``.

        Args:
            keys: the keys that ``register`` returned.
        """
        for candidate in self._candidates:
            if candidate.name in keys:
                candidate.endpoint.revoke(keys[candidate.name])

    def connect(self, addresses: Mapping[str, bytes], *, timeout: float) -> NegotiatedPeer:
        """Connect to the instance that published ``addresses``, over the best common transport.

        Args:
            addresses: the peer's addresses by transport.
            timeout: timeout of each connection attempt, in seconds.

        Raises:
            NoTransportFits: by their addresses, no common transport reaches the peer; the message
                has all reasons.
            TransportUnavailable: as before, but one might have: its connection failed.
            TransferError: the peer is lost or denies access; other transports are not tried then.
        """
        refusals: list[str] = []
        kind: type[TransportUnavailable] = NoTransportFits
        for candidate in self._candidates:
            name, address = candidate.name, addresses.get(candidate.name)
            if address is None:
                refusals.append(f"{name}: the peer does not offer it")
                continue
            refusal = candidate.transport.reaches(candidate.endpoint.address, address)
            if refusal is None:
                try:
                    peer = candidate.endpoint.connect(address, timeout=timeout)
                except TransportUnavailable as exc:
                    refusal, kind = exc.reason, TransportUnavailable
                else:
                    reason = f"{name} is the best one that reaches the peer"
                    if refusals:
                        reason += f" ({'; '.join(refusals)})"
                    logger.log(
                        logging.WARNING if refusals else logging.INFO, "transport: %s", reason
                    )
                    return NegotiatedPeer(name, peer, reason)
            refusals.append(f"{name}: {refusal}")
        ours, theirs = ", ".join(self.names), ", ".join(sorted(addresses)) or "nothing"
        raise kind(
            AUTO if len(self._candidates) > 1 else self.names[0],
            f"we have {ours}, the peer has {theirs}, and none of them connects the two "
            f"({'; '.join(refusals)})",
        )

    def close(self) -> None:
        """Close every endpoint. Idempotent."""
        for candidate in self._candidates:
            candidate.endpoint.close()


def count_ports(
    registry: Registry, *, wanted: str = AUTO, allowed: Sequence[str] | None = None
) -> int:
    """Number of TCP ports that ``Transports.open`` listens on for the same arguments, provided that
    every available transport opens."""
    return sum(spec.num_ports for spec in _specs(registry, wanted, allowed))


def reserved_ports(
    registry: Registry, *, wanted: str = AUTO, allowed: Sequence[str] | None = None
) -> list[ReservedPorts]:
    """TCP ports that libraries below the transports may take, if ``Transports.open`` is called with
    the same arguments.

    Raises:
        HalError: a transport's settings are invalid.
    """
    return [each for spec in _specs(registry, wanted, allowed) for each in spec.reserved_ports()]


def offered_transports(
    registry: Registry, *, wanted: str = AUTO, allowed: Sequence[str] | None = None
) -> dict[str, TransportConstraints]:
    """The transports that ``Transports.open`` opens for the same arguments, with their constraints,
    provided that every available transport opens."""
    return {spec.name: spec.constraints for spec in _specs(registry, wanted, allowed)}


def _specs(registry: Registry, wanted: str, allowed: Sequence[str] | None) -> list[TransportSpec]:
    """Specs of the transports that ``Transports.open`` opens."""
    if wanted != AUTO:
        names = [wanted] if wanted in registry.transports else []
    else:
        rows = (row for row in _eligible(registry, allowed) if row.name in (allowed or (row.name,)))
        names = [row.name for row in rows if row.status is PluginStatus.AVAILABLE]
    return [registry.transports[name][0] for name in names]


def _eligible(registry: Registry, allowed: Sequence[str] | None) -> list[TableRow]:
    """The transports that ``auto`` considers; one with a priority below zero only if ``allowed``
    names it."""
    return [
        row
        for row in registry.transport_table()
        if row.priority is not None and (row.priority >= 0 or row.name in (allowed or ()))
    ]


def _open_one(registry: Registry, name: str, options: EndpointOptions) -> OpenedTransport:
    transport = registry.load_transport(name)
    spec, _ = registry.transports[name]
    return OpenedTransport(transport, transport.open(options), spec.priority, spec.constraints)
