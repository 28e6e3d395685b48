"""Memory kinds of cuda_ipc: the choice, which peers are reachable, and how a region is mapped."""

from __future__ import annotations

from dataclasses import replace

import pytest

from mooncake_hal.errors import CapabilityError, PeerLost, TransferError, TransportUnavailable
from mooncake_hal.session.authentication import encode
from mooncake_hal_cuda.memory.memory_kinds import MemoryKind, SharingCapabilities, decide_sharing
from mooncake_hal_cuda.memory.nvlink_domain import NvlinkDomain
from mooncake_hal_cuda.transports.ipc_protocol import (
    IpcEndpointInfo,
    IpcRegionInfo,
    decode_call,
    decode_endpoint,
    decode_region,
    mapping_kind,
    unreachable_reason,
)

DOMAIN = NvlinkDomain(b"\1" * 16, 2)
ALL = SharingCapabilities("", "", DOMAIN, is_rdma=True)
ONE_HOST = replace(ALL, no_fabric="no IMEX channel", domain=None)
OLD = SharingCapabilities("no virtual memory", "no virtual memory", None, is_rdma=False)
NAME = bytes(64)


@pytest.mark.parametrize(
    ("facts", "kind"),
    [(ALL, MemoryKind.FABRIC), (ONE_HOST, MemoryKind.DESCRIPTOR), (OLD, MemoryKind.IPC)],
)
def test_auto_selects_the_kind_with_the_longest_reach(
    facts: SharingCapabilities, kind: MemoryKind
) -> None:
    found = decide_sharing("auto", facts)
    assert found.kind is kind
    assert found.is_rdma == (kind is not MemoryKind.IPC)
    assert facts.no_fabric in found.reason


def test_requested_kind_is_selected_or_rejected() -> None:
    assert decide_sharing("ipc", ALL).kind is MemoryKind.IPC
    assert decide_sharing("fd", ALL).domain is None  # other hosts would look for a domain
    with pytest.raises(CapabilityError, match=r"MEMORY=fabric requests .*, but no IMEX channel"):
        decide_sharing("fabric", ONE_HOST)


def facts(host: str, domain: NvlinkDomain | None) -> IpcEndpointInfo:
    return IpcEndpointInfo(host, b"p", b"d", domain)


@pytest.mark.parametrize(
    ("ours", "theirs", "reason"),
    [
        (facts("a", None), facts("a", None), None),
        (facts("a", DOMAIN), facts("a", None), None),
        (facts("a", DOMAIN), facts("b", DOMAIN), None),
        (facts("a", DOMAIN), facts("b", None), "and the peer's is not memory that NVLink reaches"),
        (facts("a", None), facts("b", DOMAIN), "and ours is not memory that NVLink reaches"),
        (
            facts("a", DOMAIN),
            facts("b", NvlinkDomain(b"\1" * 16, 3)),
            "in different NVLink domains",
        ),
    ],
)
def test_endpoints_reach_each_other_on_one_host_or_nvlink_domain(
    ours: IpcEndpointInfo, theirs: IpcEndpointInfo, reason: str | None
) -> None:
    found = unreachable_reason(ours, decode_endpoint(encode(theirs)))
    assert (found is None) == (reason is None)
    assert (reason or "") in (found or "")


@pytest.mark.parametrize(
    ("name", "is_same_host", "way"),
    [
        (IpcRegionInfo(0, 1, fabric=NAME, has_descriptor=True), True, MemoryKind.DESCRIPTOR),
        (IpcRegionInfo(0, 1, fabric=NAME, has_descriptor=True), False, MemoryKind.FABRIC),
        (IpcRegionInfo(0, 1, fabric=NAME), True, MemoryKind.FABRIC),
        (IpcRegionInfo(0, 1, ipc=NAME), True, MemoryKind.IPC),
    ],
)
def test_region_is_mapped_by_the_simplest_kind(
    name: IpcRegionInfo, is_same_host: bool, way: MemoryKind
) -> None:
    assert mapping_kind(decode_region(encode(name)), is_same_host=is_same_host) is way


def test_unreachable_region_is_rejected() -> None:
    with pytest.raises(TransportUnavailable, match="not memory that NVLink reaches"):
        mapping_kind(IpcRegionInfo(0, 1, ipc=NAME, has_descriptor=True), is_same_host=False)


@pytest.mark.parametrize(
    "nonsense",
    [
        {"offset": 0, "nbytes": 1},
        {"offset": 1, "nbytes": 1, "has_descriptor": True},
        {"offset": -1, "nbytes": 1, "has_descriptor": True},
        {"offset": 0, "nbytes": 1, "ipc": b"short"},
    ],
)
def test_invalid_region_info_is_rejected(nonsense: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=r"region|name"):
        IpcRegionInfo(**nonsense)


def test_malformed_messages_are_rejected() -> None:
    with pytest.raises(PeerLost):
        decode_region(encode(facts("a", None)))
    with pytest.raises(TransferError, match="a call can't be read"):
        decode_call(b"\xc1")
