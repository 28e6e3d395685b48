"""How memory is shared: what is decided, who reaches it, and which way is taken."""

from __future__ import annotations

from dataclasses import replace

import pytest

from mooncake_hal.errors import CapabilityError, PeerLost, TransferError, TransportUnavailable
from mooncake_hal.transports.handshake import encode
from mooncake_hal_cuda.ipc.facts import (
    EndpointFacts,
    RegionName,
    decode_call,
    decode_facts,
    decode_name,
    way_to,
    why_unreachable,
)
from mooncake_hal_cuda.sharing.choice import MemoryKind, SharingFacts, decide
from mooncake_hal_cuda.sharing.fabric import Domain

DOMAIN = Domain(b"\1" * 16, 2)
ALL = SharingFacts("", "", DOMAIN, is_rdma=True)
ONE_HOST = replace(ALL, no_fabric="no IMEX channel", domain=None)
OLD = SharingFacts("no virtual memory", "no virtual memory", None, is_rdma=False)
NAME = bytes(64)


@pytest.mark.parametrize(
    ("facts", "kind"),
    [(ALL, MemoryKind.FABRIC), (ONE_HOST, MemoryKind.DESCRIPTOR), (OLD, MemoryKind.IPC)],
)
def test_auto_takes_the_longest_reach(facts: SharingFacts, kind: MemoryKind) -> None:
    found = decide("auto", facts)
    assert found.kind is kind
    assert found.is_rdma == (kind is not MemoryKind.IPC)
    assert facts.no_fabric in found.reason


def test_what_was_asked_for_is_taken_or_refused() -> None:
    assert decide("ipc", ALL).kind is MemoryKind.IPC
    assert decide("fd", ALL).domain is None  # which other hosts would look for
    with pytest.raises(CapabilityError, match=r"'fabric' was asked for .*, but no IMEX channel"):
        decide("fabric", ONE_HOST)


def facts(host: str, domain: Domain | None) -> EndpointFacts:
    return EndpointFacts(host, b"p", b"d", domain)


@pytest.mark.parametrize(
    ("ours", "theirs", "reason"),
    [
        (facts("a", None), facts("a", None), None),
        (facts("a", DOMAIN), facts("a", None), None),
        (facts("a", DOMAIN), facts("b", DOMAIN), None),
        (facts("a", DOMAIN), facts("b", None), "and the peer's is not memory that NVLink reaches"),
        (facts("a", None), facts("b", DOMAIN), "and ours is not memory that NVLink reaches"),
        (facts("a", DOMAIN), facts("b", Domain(b"\1" * 16, 3)), "in different NVLink domains"),
    ],
)
def test_reach(ours: EndpointFacts, theirs: EndpointFacts, reason: str | None) -> None:
    found = why_unreachable(ours, decode_facts(encode(theirs)))
    assert (found is None) == (reason is None)
    assert (reason or "") in (found or "")


@pytest.mark.parametrize(
    ("name", "is_same_host", "way"),
    [
        (RegionName(0, 1, fabric=NAME, has_descriptor=True), True, MemoryKind.DESCRIPTOR),
        (RegionName(0, 1, fabric=NAME, has_descriptor=True), False, MemoryKind.FABRIC),
        (RegionName(0, 1, fabric=NAME), True, MemoryKind.FABRIC),
        (RegionName(0, 1, ipc=NAME), True, MemoryKind.IPC),
    ],
)
def test_the_way_that_needs_least(name: RegionName, is_same_host: bool, way: MemoryKind) -> None:
    assert way_to(decode_name(encode(name)), is_same_host=is_same_host) is way


def test_a_region_that_does_not_reach() -> None:
    with pytest.raises(TransportUnavailable, match="not memory that NVLink reaches"):
        way_to(RegionName(0, 1, ipc=NAME, has_descriptor=True), is_same_host=False)


@pytest.mark.parametrize(
    "nonsense",
    [
        {"offset": 0, "nbytes": 1},
        {"offset": 1, "nbytes": 1, "has_descriptor": True},
        {"offset": -1, "nbytes": 1, "has_descriptor": True},
        {"offset": 0, "nbytes": 1, "ipc": b"short"},
    ],
)
def test_a_name_that_makes_no_sense_is_refused(nonsense: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=r"region|name"):
        RegionName(**nonsense)


def test_bytes_that_are_no_message_are_refused() -> None:
    with pytest.raises(PeerLost):
        decode_name(encode(facts("a", None)))
    with pytest.raises(TransferError, match="a call can't be read"):
        decode_call(b"\xc1")
