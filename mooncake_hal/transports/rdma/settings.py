"""The transport's settings, read from ``EndpointOptions.extra`` and the environment."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields

from mooncake_hal.env import rdma_settings
from mooncake_hal.errors import HalError


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
