"""The transport's settings, and which ports and GIDs are taken where they say nothing. Pure.

Settings are read from ``EndpointOptions.extra`` and the environment.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping
from dataclasses import dataclass, fields
from enum import IntEnum

from mooncake_hal.errors import HalError, TransportUnavailable
from mooncake_hal.hal_env import rdma_settings


@dataclass(frozen=True, slots=True)
class RdmaSettings:
    """Everything that can be set, by these names.

    Args:
        devices: comma-separated NICs, each ``name`` or ``name:port``; empty takes every port
            that is up.
        gid_index: entry of the GID table to use on every NIC; below zero chooses.
        window: work requests in flight per queue pair.
        window_bytes: bytes in flight per queue pair; bounds what a cancelled transfer drains.
        piece_bytes: longest single work request; longer spans are cut, to be striped.
        inline_bytes: writes up to this size travel inside their work request.
        traffic_class: RoCE traffic class (DSCP in its upper six bits).
        service_level: InfiniBand service level, RoCE priority.
        timeout: local acknowledgement timeout, 4.096 µs times two to this power.
        retries: retransmissions until a NIC or peer counts as dead. At most 6: some devices take
            7 for "for ever", and then a dead peer is never reported.
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
        """Read settings.

        Raises:
            ValueError: an unknown name, or a value out of range; says which.
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
    """Settings of an endpoint: what its options say, else what MOONCAKE_HAL_RDMA says.

    Raises:
        HalError: the variable holds an unknown name, or a value out of range.
        ValueError: the options do.
    """
    everywhere = rdma_settings()
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
    """Return the ports that were asked for, or all that are up.

    Args:
        wanted: as in ``RdmaSettings.devices``.
        ports: all that are up, as ``device:port``.

    Raises:
        TransportUnavailable: none, or not the ones that were asked for.
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
    """What a GID is good for; the values are those of ibv_gid_type."""

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
    """Choose a port's GID: RoCE v2 over IPv4, then IPv6, then link-local, then others.

    Args:
        table: entries of one port; empty (all zero) ones are passed over.
        nic: names the port in messages.
        wanted_index: take this entry and no other; below zero chooses.

    Raises:
        TransportUnavailable: no usable entry.
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
