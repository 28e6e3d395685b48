"""Ports, queue pairs and registered memory, over emulated verbs."""

from __future__ import annotations

import ctypes
import errno
import os
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import pytest
from support import emulated_verbs

from mooncake_hal.errors import TransferError, TransportUnavailable
from mooncake_hal.native import find_compiler
from mooncake_hal.testing.transports_buffers import anonymous
from mooncake_hal.transport import MemoryRegion
from mooncake_hal.transports.rdma import nic as nic_module, nic_memory, verbs
from mooncake_hal.transports.rdma.nic import Nic
from mooncake_hal.transports.rdma.nic_memory import peer_memory_reason
from mooncake_hal.transports.rdma.progress_thread import is_readable
from mooncake_hal.transports.rdma.rdma_settings import RdmaSettings

pytestmark = pytest.mark.skipif(find_compiler() is None, reason="needs a C compiler")

PAGE = 4096
SECONDS = 30.0
ON_A_GPU = MemoryRegion(0x7F0000000000, 1 << 20, "cuda:0")


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Iterator[ctypes.CDLL]:
    library = emulated_verbs.install(monkeypatch)
    before = library.emulated_objects()
    yield library
    assert library.emulated_objects() == before, "a verbs object was created and not destroyed"


@pytest.fixture
def nic(library: ctypes.CDLL) -> Iterator[Nic]:
    nic = Nic(0, "emu0:1", RdmaSettings())
    yield nic
    nic.close()


@pytest.mark.parametrize("function", ["ibv_open_device", "ibv_alloc_pd", "ibv_create_cq"])
def test_port_that_cannot_be_opened_reports_the_reason(library: ctypes.CDLL, function: str) -> None:
    library.emulated_fail(function.encode(), errno.EPERM)
    with pytest.raises(TransportUnavailable, match=f"emu0:1 can't be opened: .*{function}: Oper"):
        Nic(0, "emu0:1", RdmaSettings())


def test_unknown_device_is_named(library: ctypes.CDLL) -> None:
    with pytest.raises(TransportUnavailable, match=r"no device 'emu7', it lists \['emu0', 'emu1'"):
        Nic(0, "emu7:1", RdmaSettings())


@pytest.mark.usefixtures("library")
def test_closing_a_port_closes_its_objects() -> None:
    nic = Nic(0, "emu0:1", RdmaSettings())
    with closing(anonymous(PAGE)) as buffer:
        pair, served = nic.queue_pair(), nic.queue_pair(sends=False)
        memory = nic.register(buffer.region)
        nic.close()
        for left in (pair, served, memory, nic):
            left.close()  # closed again: nothing is destroyed twice
        with pytest.raises(TransportUnavailable, match="emu0:1 is closed"):
            nic.register(buffer.region)
    with pytest.raises(TransportUnavailable, match="emu0:1 is closed"):
        nic.queue_pair()


@pytest.mark.parametrize(
    "function",
    ["ibv_create_comp_channel", "ibv_create_cq", "ibv_create_qp", "ibv_modify_qp"],
)
def test_failed_queue_pair_reports_the_reason(
    library: ctypes.CDLL, nic: Nic, function: str
) -> None:
    library.emulated_fail(function.encode(), errno.ENOMEM)
    with pytest.raises(TransportUnavailable, match=f"no queue pair: .*{function}: Cannot alloc"):
        nic.queue_pair()


def test_failed_route_names_both_ends(library: ctypes.CDLL, nic: Nic) -> None:
    pair = nic.queue_pair()
    library.emulated_fail(b"ibv_modify_qp", errno.EHOSTUNREACH)
    with pytest.raises(TransportUnavailable, match=r"emu0:1 to ::ffff:10.9.0.1: .*No route"):
        pair.connect(pair.info())


def test_closed_queue_pair_rejects_every_call(nic: Nic) -> None:
    pair = nic.queue_pair()
    info = pair.info()
    pair.close()
    for call in (lambda: pair.connect(info), lambda: pair.completions(1), pair.take_event):
        with pytest.raises(TransportUnavailable, match="a queue pair on emu0:1 is closed"):
            call()


def test_taking_an_absent_event_does_not_block(nic: Nic) -> None:
    pair = nic.queue_pair()
    assert not is_readable(pair.fd)
    pair.take_event()
    assert pair.completions(8) == []


def test_memory_has_keys_until_it_is_closed(nic: Nic) -> None:
    with closing(anonymous(PAGE)) as buffer:
        first, second = nic.register(buffer.region), nic.register(buffer.region)
        assert first.lkey != second.lkey
        first.close()


def test_failed_deregistration_is_an_error(library: ctypes.CDLL, nic: Nic) -> None:
    with closing(anonymous(PAGE)) as buffer:
        memory = nic.register(buffer.region)
        library.emulated_fail(b"ibv_dereg_mr", errno.EBUSY)
        with pytest.raises(TransferError, match=r"emu0:1 does not deregister memory: .*busy"):
            memory.close()
        memory.close()


def test_pinning_memory_blocks_only_the_close_of_the_port(
    library: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch
) -> None:
    nic = Nic(0, "emu0:1", RdmaSettings())
    pinning, pinned = threading.Event(), threading.Event()

    def register(pd: int, region: MemoryRegion, name: str) -> int:
        pinning.set()
        assert pinned.wait(SECONDS)
        return int(library.ibv_reg_mr(pd, region.address, region.nbytes, 0))

    monkeypatch.setattr(nic_module, "register_memory", register)
    with closing(anonymous(PAGE)) as buffer, ThreadPoolExecutor() as pool:
        registered = pool.submit(nic.register, buffer.region)
        assert pinning.wait(SECONDS)
        nic.queue_pair().close()
        closed = pool.submit(nic.close)
        assert not closed.done()
        pinned.set()
        closed.result(SECONDS)
        registered.result(SECONDS).close()


def test_memory_that_cannot_be_pinned_names_the_limit_to_raise(
    library: ctypes.CDLL, nic: Nic
) -> None:
    library.emulated_fail(b"ibv_reg_mr", errno.ENOMEM)
    region = MemoryRegion(PAGE, 2 * PAGE, "cpu")
    with pytest.raises(TransportUnavailable, match=r"emu0:1 does not register 8192 .*`ulimit -l`"):
        nic.register(region)


def test_accelerator_memory_needs_a_library_with_dma_buf_support(
    library: ctypes.CDLL, nic: Nic
) -> None:
    library.emulated_fail(b"ibv_reg_mr", errno.EFAULT)
    with pytest.raises(
        TransportUnavailable, match=r"not support dma-buf; install rdma-core 34 or newer"
    ):
        nic.register(ON_A_GPU)


class DmaBufLibrary:
    """A library that registers no memory by address, but registers dma-bufs."""

    def __init__(self) -> None:
        self.mr = verbs.IbvMr(lkey=7, rkey=9)
        self.arguments: tuple[int, ...] = ()

    def ibv_reg_mr(self, *arguments: int) -> int:
        raise OSError(errno.EFAULT, "ibv_reg_mr: Bad address")

    def ibv_reg_dmabuf_mr(self, *arguments: int) -> int:
        os.fstat(arguments[4])  # still open
        self.arguments = arguments
        return ctypes.addressof(self.mr)


def test_accelerator_memory_keeps_its_addresses_as_a_dma_buf(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    library = DmaBufLibrary()
    exported, other = os.pipe()
    ranges = []

    def export(device: str, address: int, nbytes: int) -> int:
        ranges.append((device, address, nbytes))
        return exported

    monkeypatch.setattr(verbs, "load", lambda: library)
    monkeypatch.setattr(nic_memory, "_export_dmabuf", export)
    region = MemoryRegion(ON_A_GPU.address + 512, PAGE, ON_A_GPU.device)
    assert nic_memory.register_memory(5, region, "emu0:1") == ctypes.addressof(library.mr)
    assert ranges == [("cuda:0", ON_A_GPU.address, 2 * PAGE)], "whole pages that contain the region"
    assert library.arguments == (5, 512, PAGE, region.address, exported, nic_memory.ACCESS)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(exported)
    os.close(other)


def test_peer_memory_module_is_detected(tmp_path: Path) -> None:
    assert peer_memory_reason(tmp_path).startswith("none of")
    (tmp_path / "nvidia_peermem").mkdir()
    assert peer_memory_reason(tmp_path) == "nvidia_peermem is loaded"
