"""Transport negotiation: which transport is chosen, why others are not, and forced transports."""

from __future__ import annotations

import errno
import logging
from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
import pytest
from support.ports import free_range

from mooncake_hal.errors import (
    AccessDenied,
    NoTransportFits,
    PortsExhausted,
    TransportUnavailable,
)
from mooncake_hal.negotiation import Transports, count_ports, reserved_ports
from mooncake_hal.port_range import PortRange, ReservedPorts
from mooncake_hal.registry import Registry
from mooncake_hal.specs import Availability, TransportSpec
from mooncake_hal.testing.transports import one_span
from mooncake_hal.testing.transports_buffers import HostBuffer, anonymous, mappable
from mooncake_hal.transport import EndpointOptions, MemoryRegion, Transport
from mooncake_hal.transports.shm.shm_copying import NumpyCopier
from mooncake_hal.transports.shm.shm_transport import ShmTransport, load as load_shm
from mooncake_hal.transports.tcp.tcp_transport import load as load_tcp

KIB = 1024
OPTIONS = EndpointOptions(secret=b"negotiation")


class ForbiddenCalls(NumpyCopier):
    """A copier under a kernel that forbids process_vm_readv."""

    def call_one(self, pid: int, write: int, local: int, remote: int, nbytes: int) -> int:
        return errno.EPERM


def spec(name: str, priority: int, load: Callable[[], Transport], *, ok: bool) -> TransportSpec:
    return TransportSpec(name, 1, priority, lambda: Availability(ok, "says the test"), load)


def registry(*specs: TransportSpec) -> Registry:
    return Registry(transports={item.name: (item, "test") for item in specs})


SHM = spec("shm", 50, load_shm, ok=True)
TCP = spec("tcp", 10, load_tcp, ok=True)
NO_CALLS = spec("shm", 50, lambda: ShmTransport(ForbiddenCalls()), ok=True)
ABSENT = spec("rdma", 90, load_tcp, ok=False)


@pytest.fixture
def opened() -> Iterator[Callable[..., Transports]]:
    made: list[Transports] = []

    def open_(*specs: TransportSpec, **choices: object) -> Transports:
        options = choices.pop("options", OPTIONS)
        made.append(Transports.open(registry(*specs), options, **choices))  # type: ignore[arg-type]
        return made[-1]

    yield open_
    for transports in made:
        transports.close()


@pytest.fixture
def memory() -> Iterator[Callable[[], HostBuffer]]:
    made: list[HostBuffer] = []

    def allocate(maker: Callable[[int], HostBuffer] = anonymous) -> HostBuffer:
        made.append(maker(64 * KIB))
        made[-1].put(np.full(64 * KIB, len(made), np.uint8))
        return made[-1]

    yield allocate
    for buffer in made:
        buffer.close()


def test_common_transport_of_highest_priority_is_chosen(
    opened: Callable[..., Transports],
    memory: Callable[..., HostBuffer],
    caplog: pytest.LogCaptureFixture,
) -> None:
    ours, theirs = opened(TCP, SHM), opened(SHM, TCP)
    here, there = memory(), memory()
    ours.register(here.region)
    keys = theirs.register(there.region)
    assert ours.names == ["shm", "tcp"]
    assert sorted(keys) == ["shm", "tcp"]
    with caplog.at_level(logging.INFO):
        choice = ours.connect(theirs.addresses, timeout=10)
    assert choice.name == "shm"
    assert "shm is the best one that reaches the peer" in caplog.text
    spans = one_span(here.region.address, there.region.address, 64 * KIB)
    choice.peer.read(spans, timeout=10).wait()
    assert (here.get() == 2).all()


def test_transport_of_negative_priority_must_be_named(opened: Callable[..., Transports]) -> None:
    reluctant = spec("tcp", -10, load_tcp, ok=True)
    assert opened(SHM, reluctant).names == ["shm"]
    assert opened(SHM, reluctant, allowed=["shm", "tcp"]).names == ["shm", "tcp"]
    assert opened(SHM, reluctant, wanted="tcp").names == ["tcp"]


def test_next_transport_is_used_and_the_reason_is_logged(
    opened: Callable[..., Transports], caplog: pytest.LogCaptureFixture
) -> None:
    ours, theirs = opened(SHM, TCP), opened(TCP)
    with caplog.at_level(logging.WARNING):
        choice = ours.connect(theirs.addresses, timeout=10)
    assert choice.name == "tcp"
    assert "shm: the peer does not offer it" in caplog.text


def test_shm_moves_mappable_memory_without_process_vm_calls(
    opened: Callable[..., Transports], memory: Callable[..., HostBuffer]
) -> None:
    ours, theirs = opened(NO_CALLS, TCP), opened(SHM, TCP)
    here, there = memory(mappable), memory(mappable)
    ours.register(here.region)
    theirs.register(there.region)
    choice = ours.connect(theirs.addresses, timeout=10)
    assert choice.name == "shm"
    spans = one_span(here.region.address, there.region.address, 64 * KIB)
    choice.peer.write(spans, timeout=10).wait()
    assert (there.get() == 1).all()


def test_tcp_moves_other_memory_without_process_vm_calls(
    opened: Callable[..., Transports],
    memory: Callable[..., HostBuffer],
    caplog: pytest.LogCaptureFixture,
) -> None:
    ours, theirs = opened(NO_CALLS, TCP), opened(SHM, TCP)
    here, there = memory(), memory()
    ours.register(here.region)
    theirs.register(there.region)
    with caplog.at_level(logging.WARNING):
        choice = ours.connect(theirs.addresses, timeout=10)
    assert choice.name == "tcp"
    assert "the kernel forbids process_vm_readv" in caplog.text
    spans = one_span(here.region.address, there.region.address, 64 * KIB)
    choice.peer.read(spans, timeout=10).wait()
    assert (here.get() == 2).all()


def test_unavailable_forced_transport_fails_at_start(
    opened: Callable[..., Transports],
) -> None:
    with pytest.raises(TransportUnavailable, match="'rdma' is unavailable: says the test"):
        opened(SHM, ABSENT, wanted="rdma")
    with pytest.raises(TransportUnavailable, match="no plugin offers it"):
        opened(SHM, wanted="warp")


def test_forced_transport_is_the_only_one(opened: Callable[..., Transports]) -> None:
    ours = opened(SHM, TCP, wanted="tcp")
    assert ours.names == ["tcp"]
    assert ours.connect(opened(SHM, TCP).addresses, timeout=10).name == "tcp"


def test_no_common_transport_names_every_reason(opened: Callable[..., Transports]) -> None:
    ours, theirs = opened(SHM, TCP), opened(TCP, wanted="tcp")
    mismatched = {"shm": theirs.addresses["tcp"], "hccs": b"x"}
    with pytest.raises(NoTransportFits) as caught:
        ours.connect(mismatched, timeout=10)
    message = str(caught.value)
    assert "we have shm, tcp, the peer has hccs, shm, and none of them connects the two" in message
    assert "tcp: the peer does not offer it" in message


def test_transport_that_failed_to_connect_may_succeed_later(
    opened: Callable[..., Transports], memory: Callable[..., HostBuffer]
) -> None:
    ours, theirs = opened(NO_CALLS), opened(SHM)
    theirs.register(memory().region)
    with pytest.raises(TransportUnavailable) as caught:
        ours.connect(theirs.addresses, timeout=10)
    assert not isinstance(caught.value, NoTransportFits)


def test_denied_peer_is_not_retried_on_another_transport(
    opened: Callable[..., Transports],
) -> None:
    ours = opened(SHM, TCP)
    theirs = opened(SHM, TCP, options=EndpointOptions(secret=b"another"))
    with pytest.raises(AccessDenied):
        ours.connect(theirs.addresses, timeout=10)


def test_only_transports_allowed_by_the_backend_are_opened(
    opened: Callable[..., Transports],
) -> None:
    assert opened(SHM, TCP, allowed=("tcp",)).names == ["tcp"]
    with pytest.raises(TransportUnavailable, match="shm: the backend can't use it"):
        opened(SHM, allowed=("hccs",))


def test_transport_that_cannot_register_the_memory_is_dropped(
    opened: Callable[..., Transports], caplog: pytest.LogCaptureFixture
) -> None:
    ours = opened(SHM, TCP)
    with pytest.raises(TransportUnavailable, match="no transport can register memory of npu:0"):
        ours.register(MemoryRegion(4096, 4096, device="npu:0"))
    assert "transport shm is not used: it can't reach memory of npu:0" in caplog.text


def test_revoke_covers_every_transport(
    opened: Callable[..., Transports], memory: Callable[..., HostBuffer]
) -> None:
    ours = opened(SHM, TCP)
    region = memory().region
    ours.revoke(ours.register(region))
    ours.register(region)


def test_stops_writes_on_failure_needs_every_transport(
    opened: Callable[..., Transports],
) -> None:
    assert opened(SHM).stops_writes_on_failure
    assert not opened(TCP).stops_writes_on_failure
    assert not opened(SHM, TCP).stops_writes_on_failure


def test_exhausted_port_range_is_an_error() -> None:
    host, ports = "127.0.0.1", free_range(1)
    options = EndpointOptions(host=host, port_range=ports, secret=b"negotiation")
    both = registry(TCP, spec("other", 20, load_tcp, ok=True))
    with pytest.raises(PortsExhausted, match=f"all ports of {ports} are taken on {host}"):
        Transports.open(both, options)
    Transports.open(registry(TCP), options).close()  # what had been opened before is closed


def test_listening_ports_are_counted() -> None:
    silent = replace(SHM, num_ports=0)
    twice = replace(TCP, name="staged", num_ports=2)
    hidden = replace(TCP, name="nixl", priority=-1)
    known = registry(silent, TCP, ABSENT, twice, hidden)
    assert count_ports(known) == 3
    assert count_ports(known, allowed=("shm", "tcp")) == 1
    assert count_ports(known, allowed=("tcp", "nixl", "rdma")) == 2
    assert count_ports(known, wanted="staged") == 2
    assert count_ports(known, wanted="nobody") == 0


def test_reserved_ports_cover_the_opened_transports() -> None:
    engine = ReservedPorts("an engine", PortRange(20_000, 21_000), "ITS_PORT")
    taking = replace(TCP, name="over-it", reserved_ports=lambda: (engine,))
    known = registry(SHM, TCP, ABSENT, taking)
    assert reserved_ports(known) == [engine]
    assert reserved_ports(known, allowed=("shm", "over-it")) == [engine]
    assert reserved_ports(known, wanted="over-it") == [engine]
    assert reserved_ports(known, allowed=("shm", "tcp")) == []
