"""RDMA without a device: the transport over a libibverbs that copies within this process."""

from __future__ import annotations

import ctypes
from pathlib import Path

import pytest

from mooncake_hal.native import compile_c
from mooncake_hal.transports.rdma import nic, rdma_endpoint, verbs
from mooncake_hal.transports.rdma.nic import PortAttributes
from mooncake_hal.transports.rdma.rdma_messages import ETHERNET
from mooncake_hal.transports.rdma.rdma_settings import Gid, GidKind

PORTS = ["emu0:1", "emu1:1"]


def install(monkeypatch: pytest.MonkeyPatch) -> ctypes.CDLL:
    """Replace libibverbs and pyverbs; return the emulated library, which has fault switches.

    Switches: ``emulated_fail(function, errno)`` makes a call fail once, ``emulated_set_down(device,
    flag)`` disconnects a device, ``emulated_set_stuck(flag)`` stops the completion of requests,
    ``emulated_objects()`` counts the objects that were created and not destroyed.

    Raises:
        NativeUnavailable: there is no compiler.
    """
    source = Path(__file__).with_suffix(".c").read_text()
    built = compile_c("emulated_verbs", source, ("-O2", "-pthread"))
    library = verbs.load.__wrapped__(built._name)
    monkeypatch.setattr(verbs, "load", lambda: library)
    monkeypatch.setattr(nic, "require_pyverbs", lambda: None)
    monkeypatch.setattr(rdma_endpoint, "require_pyverbs", lambda: None)
    monkeypatch.setattr(nic, "query_port", _attributes)
    monkeypatch.setattr(rdma_endpoint, "active_ports", lambda: list(PORTS))
    return library


def _attributes(device: str, port: int) -> PortAttributes:
    address = f"::ffff:10.9.{device[-1]}.1"
    return PortAttributes(
        link=ETHERNET,
        lid=0,
        mtu=5,
        max_message=1 << 30,
        max_requests=1024,
        served_reads=16,
        own_reads=16,
        gids=[Gid(1, GidKind.ROCE_V2, address)],
    )
