"""Settings of ``hccs``, the engines' timeouts, and the TCP ports that they use; no I/O."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mooncake_hal.errors import HalError
from mooncake_hal.port_range import PortRange, ReservedPorts

NAME = "hccs"

ENGINES = ("auto", "mooncake", "memfabric")
PROTOCOLS = ("auto", "hccs", "roce")

RETRANSMISSION_UNIT_MS = 4.096e-3
"""Base of the retransmission timeout of a RoCE packet, which is this times
2**HCCL_RDMA_TIMEOUT."""

MARGIN_MS = 3000
"""Time for a transfer apart from retransmissions; equals the mooncake engine's default timeout."""

CONNECT_MS = 10_000
"""Timeout for a link to come up if HCCL_CONNECT_TIMEOUT is not set."""

_RANGES = {
    "HCCL_CONNECT_TIMEOUT": (1, 7200),
    "HCCL_RDMA_TIMEOUT": (5, 24),
    "HCCL_RDMA_RETRY_CNT": (1, 7),
    "ASCEND_CONNECT_TIMEOUT": (1, 86_400_000),
    "ASCEND_TRANSFER_TIMEOUT": (1, 86_400_000),
}
_RDMA_DEFAULTS = {"HCCL_RDMA_TIMEOUT": 20, "HCCL_RDMA_RETRY_CNT": 7}

PORTS_PER_DEVICE = 1000
"""Ports to reserve per NPU: older mooncake engines choose one of a thousand, 0.3.13 one of the
first hundred."""
DEFAULTS = {
    "mooncake": {
        "ASCEND_BASE_PORT": "20000",
        "MC_MIN_RPC_PORT": "15000",
        "MC_MAX_RPC_PORT": "17000",
    },
    "memfabric": {"MF_CONFIG_STORE_PORT_START": "17001", "MF_CONFIG_STORE_PORT_END": "19000"},
}
"""Values of the engines' variables that the operator did not set."""


@dataclass(frozen=True, slots=True)
class HccsSettings:
    """Settings of an endpoint; the fields are the settings' names.

    Args:
        engine: ``mooncake`` (mooncake-transfer-engine-npu), ``memfabric`` (memfabric-hybrid), or
            ``auto``: the first of them that loads.
        protocol: ``hccs`` stays within the A2 server or A3 super-node; ``roce`` always uses the
            NPUs' own NICs; ``auto`` uses HCCS within the server or super-node and RoCE beyond it.
    """

    engine: str = "auto"
    protocol: str = "auto"

    def __post_init__(self) -> None:
        for name, known in (("engine", ENGINES), ("protocol", PROTOCOLS)):
            if getattr(self, name) not in known:
                raise ValueError(
                    f"{NAME} setting {name} must be one of {known}, not {getattr(self, name)!r}"
                )


def settings_of_endpoint(extra: Mapping[str, str], everywhere: str) -> HccsSettings:
    """Settings of an endpoint: its options, which override MOONCAKE_HAL_HCCS.

    Args:
        extra: the endpoint's options, by name.
        everywhere: value of MOONCAKE_HAL_HCCS.

    Raises:
        HalError: the variable is invalid.
        ValueError: the options are invalid.
    """
    try:
        common = dict(word.split("=", 1) for word in everywhere.split())
        _read(common)
    except ValueError as exc:
        raise HalError(f"MOONCAKE_HAL_HCCS={everywhere!r}: {exc}") from exc
    return _read({**common, **extra})


def _read(named: Mapping[str, str]) -> HccsSettings:
    unknown = sorted(set(named) - set(HccsSettings.__slots__))
    if unknown:
        raise ValueError(f"{NAME} has no settings {unknown}; it has {HccsSettings.__slots__}")
    return HccsSettings(**named)


@dataclass(frozen=True, slots=True)
class EngineDeadlines:
    """The engine's timeouts, in milliseconds, and how they were derived.

    Args:
        connect_ms: timeout for a link to come up.
        transfer_ms: timeout of one transfer. It exceeds the time of all retransmissions, so that
            the engine does not give up on a NIC that may still succeed.
        reason: derivation, for the log.
    """

    connect_ms: int
    transfer_ms: int
    reason: str


def deadlines(vendor: Mapping[str, str], protocol: str) -> EngineDeadlines:
    """Derive the engine's timeouts from HCCL's settings, unless the engine's own variables are set.

    Args:
        vendor: the variables that are set.
        protocol: the endpoint's protocol; HCCS alone never retransmits.

    Raises:
        HalError: a variable is not a number, or out of range.
    """
    connect, connect_why = _connect_ms(vendor)
    transfer, transfer_why = _transfer_ms(vendor, protocol)
    return EngineDeadlines(connect, transfer, f"connect: {connect_why}; transfer: {transfer_why}")


def _connect_ms(vendor: Mapping[str, str]) -> tuple[int, str]:
    own = _number(vendor, "ASCEND_CONNECT_TIMEOUT")
    if own is not None:
        return own, f"ASCEND_CONNECT_TIMEOUT={own}"
    hccl = _number(vendor, "HCCL_CONNECT_TIMEOUT")
    if hccl is not None:
        return hccl * 1000, f"HCCL_CONNECT_TIMEOUT={hccl} s"
    return CONNECT_MS, f"{CONNECT_MS} ms, as HCCL_CONNECT_TIMEOUT is not set"


def _transfer_ms(vendor: Mapping[str, str], protocol: str) -> tuple[int, str]:
    own = _number(vendor, "ASCEND_TRANSFER_TIMEOUT")
    if own is not None:
        return own, f"ASCEND_TRANSFER_TIMEOUT={own}"
    if protocol == "hccs":
        return MARGIN_MS, f"{MARGIN_MS} ms, as HCCS retransmits nothing"
    exponent, count = (_number(vendor, name) or _RDMA_DEFAULTS[name] for name in _RDMA_DEFAULTS)
    retransmission = RETRANSMISSION_UNIT_MS * 2**exponent * count
    why = (
        f"4.096 us * 2^{exponent} (HCCL_RDMA_TIMEOUT) * {count} (HCCL_RDMA_RETRY_CNT) "
        f"+ {MARGIN_MS} ms"
    )
    return int(retransmission) + MARGIN_MS, why


def _number(vendor: Mapping[str, str], name: str) -> int | None:
    text = vendor.get(name)
    if text is None:
        return None
    low, high = _RANGES[name]
    if not re.fullmatch(r"\d+", text) or not low <= int(text) <= high:
        raise HalError(f"{name}={text!r} must be a whole number from {low} to {high}")
    return int(text)


def engine_ports(
    engine: str, vendor: Mapping[str, str], devices: Sequence[int]
) -> tuple[ReservedPorts, ...]:
    """The ports that an engine may use on this host.

    Args:
        engine: ``mooncake`` or ``memfabric``.
        vendor: the variables that are set.
        devices: physical numbers of the NPUs.

    Raises:
        HalError: a variable is not a port, or a range exceeds port 65535.
    """
    named = {name: _port(name, vendor.get(name, text)) for name, text in DEFAULTS[engine].items()}
    if engine == "memfabric":
        return (_range("memfabric's store", named),)
    base = named["ASCEND_BASE_PORT"]
    last = base + (max(devices) + 1) * PORTS_PER_DEVICE
    if last > 65535:
        raise HalError(
            f"ASCEND_BASE_PORT={base} with NPU {max(devices)} leads to port {last}; choose a base "
            f"of at most {65535 - (max(devices) + 1) * PORTS_PER_DEVICE}"
        )
    first = base + min(devices) * PORTS_PER_DEVICE
    links = PortRange(first, last)
    del named["ASCEND_BASE_PORT"]
    return (
        ReservedPorts("the mooncake engine's links", links, "ASCEND_BASE_PORT"),
        _range("the mooncake engine's handshakes", named),
    )


def _range(what: str, named: Mapping[str, int]) -> ReservedPorts:
    """The range given by two variables, the first and the last port."""
    first, last = named.values()
    setting = " and ".join(named)
    try:
        return ReservedPorts(what, PortRange(first, last), setting)
    except ValueError as exc:
        raise HalError(f"{setting}: {exc}") from exc


def _port(name: str, text: str) -> int:
    if not re.fullmatch(r"\d+", text) or not 1024 <= int(text) <= 65535:
        raise HalError(f"{name}={text!r} must be a port from 1024 to 65535")
    return int(text)
