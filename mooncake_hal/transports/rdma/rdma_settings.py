"""The rdma transport's settings, and the default choice of ports and GIDs. Pure, except for reading
the environment.

Settings come from ``EndpointOptions.extra`` and the environment variable MOONCAKE_HAL_RDMA.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping
from dataclasses import dataclass, fields
from enum import IntEnum

from mooncake_hal.errors import HalError, TransportUnavailable
from mooncake_hal.hal_env import transport_settings


@dataclass(frozen=True, slots=True)
class RdmaSettings:
    """The settings, by their names.

    Args:
        devices: comma-separated NICs, each ``name`` or ``name:port``; empty: every port that is up.
        gid_index: index in the GID table to use on every NIC; below zero: see ``choose_gid``.
        window: maximum number of work requests in flight per queue pair.
        window_bytes: maximum number of bytes in flight per queue pair; bounds what a cancelled
            transfer drains.
        piece_bytes: maximum size of a work request; longer spans are cut into pieces, which are
            striped.
        inline_bytes: writes of up to this size are sent inline in their work request.
        traffic_class: RoCE traffic class (DSCP in its upper six bits).
        service_level: InfiniBand service level, RoCE priority.
        timeout: local acknowledgement timeout, 4.096 µs times two to this power.
        retries: retransmissions before a NIC or peer is considered dead. At most 6: some devices
            interpret 7 as "for ever" and then never report a dead peer.
    """

    devices: str = ""
    gid_index: int = -1
    window: int = 1024
    window_bytes: int = 8 << 20
    piece_bytes: int = 1 << 20
    inline_bytes: int = 64
    traffic_class: int = 0
    service_level: int = 0
    timeout: int = 14
    retries: int = 6

    @classmethod
    def of(cls, extra: Mapping[str, str]) -> RdmaSettings:
        """Parse settings.

        Raises:
            ValueError: a name is unknown, or a value is out of range; the message names it.
        """
        known = {field.name: str(field.type) for field in fields(cls)}
        unknown = sorted(set(extra) - set(known))
        if unknown:
            raise ValueError(f"rdma has no setting {unknown}; it has {sorted(known)}")
        settings = cls(**{name: _read(name, known[name], text) for name, text in extra.items()})  # type: ignore[arg-type]  # _read returns the field's type
        for name, (low, high) in _RANGES.items():
            if not low <= getattr(settings, name) <= high:
                raise ValueError(
                    f"rdma setting {name} must be {low} to {high}, it is {getattr(settings, name)}"
                )
        return settings


def settings_of_endpoint(extra: Mapping[str, str]) -> RdmaSettings:
    """Settings of an endpoint: those in its options override those in MOONCAKE_HAL_RDMA.

    Raises:
        HalError: MOONCAKE_HAL_RDMA has an unknown name or a value out of range.
        ValueError: the options have an unknown name or a value out of range.
    """
    everywhere = transport_settings("rdma", [field.name for field in fields(RdmaSettings)])
    try:
        RdmaSettings.of(everywhere)
    except ValueError as exc:
        raise HalError(f"MOONCAKE_HAL_RDMA: {exc}") from exc
    return RdmaSettings.of({**everywhere, **extra})


_RANGES = {
    "gid_index": (-1, 1023),
    "window": (8, 1 << 15),
    "window_bytes": (1 << 16, 1 << 40),
    "piece_bytes": (1 << 12, 1 << 30),
    "inline_bytes": (0, 1024),
    "traffic_class": (0, 255),
    "service_level": (0, 15),
    "timeout": (8, 21),
    "retries": (0, 6),
}


def _read(name: str, kind: str, text: str) -> str | int:
    if kind == "str":
        return text
    try:
        return int(text, 0)
    except ValueError:
        raise ValueError(f"rdma setting {name} must be a whole number, it is {text!r}") from None


def choose_ports(wanted: str, ports: list[str]) -> list[str]:
    """Return the wanted ports, or all ports that are up.

    Args:
        wanted: as in ``RdmaSettings.devices``.
        ports: all ports that are up, as ``device:port``.

    Raises:
        TransportUnavailable: no port is up, or a wanted one is not.
    """
    if not ports:
        raise TransportUnavailable("rdma", "no RDMA port of this host is up")
    if not wanted:
        return ports
    chosen = [name if ":" in name else f"{name}:1" for name in wanted.split(",") if name]
    missing = [name for name in chosen if name not in ports]
    if missing or not chosen:
        raise TransportUnavailable("rdma", f"{missing or wanted!r} is not among the ports {ports}")
    return chosen


class GidKind(IntEnum):
    """The protocol that a GID selects; the values are those of ibv_gid_type."""

    INFINIBAND = 0
    ROCE_V1 = 1
    ROCE_V2 = 2


@dataclass(frozen=True, slots=True)
class Gid:
    """One entry of a port's GID table.

    Args:
        index: its index in the table.
        kind: which protocol it selects.
        text: eight groups of four hexadecimal digits, or any IPv6 notation.
    """

    index: int
    kind: GidKind
    text: str

    @property
    def address(self) -> ipaddress.IPv6Address:
        """The GID as an IPv6 address."""
        return ipaddress.IPv6Address(self.text)


def choose_gid(table: list[Gid], nic: str, wanted_index: int = -1) -> Gid:
    """Choose a port's GID. Preference: RoCE v2 over IPv4, over IPv6, link-local, then others.

    Args:
        table: the port's GID table; empty (all-zero) entries are ignored.
        nic: name of the port, for messages.
        wanted_index: index of the only entry to accept; below zero: any.

    Raises:
        TransportUnavailable: there is no usable entry.
    """
    usable = [gid for gid in table if int(gid.address) & (2**64 - 1)]
    if wanted_index >= 0:
        usable = [gid for gid in usable if gid.index == wanted_index]
    if not usable:
        which = f"GID {wanted_index}" if wanted_index >= 0 else "GID"
        raise TransportUnavailable(
            "rdma", f"{nic} has no usable {which}; has its network device an IP address?"
        )
    return min(usable, key=lambda gid: (_rank(gid), gid.index))


def _rank(gid: Gid) -> int:
    if gid.kind is GidKind.ROCE_V2:
        if gid.address.ipv4_mapped:
            return 0
        return 2 if gid.address.is_link_local else 1
    return 3 if gid.kind is GidKind.INFINIBAND else 4
