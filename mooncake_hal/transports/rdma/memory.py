"""Registering memory with a NIC: host memory, and accelerator memory without a copy (GPUDirect).

Accelerator memory is tried as a plain address first: with a peer-memory module (nvidia_peermem for
CUDA) the kernel resolves it. Otherwise the driver is asked for a dma-buf of the range. Which
of the two worked is logged. Neither is under test: soft-RoCE supports no dma-buf.
"""

from __future__ import annotations

import ctypes
import logging
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mooncake_hal.errors import TransportUnavailable
from mooncake_hal.transport import MemoryRegion
from mooncake_hal.transports.rdma.compat import register_dmabuf

logger = logging.getLogger(__name__)

ADDRESS_SPACE = 2**64
PEER_MEMORY_MODULES = ("nvidia_peermem", "nv_peer_mem")

_CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD = 1
_CU_ERROR_NAMES = {1: "invalid value", 3: "not initialised", 801: "not supported by this driver"}


@dataclass(slots=True)
class NicMemory:
    """A region as one NIC knows it.

    Args:
        mr: the pyverbs MR; closing it ends all access.
        shift: what to add to an address, modulo 2**64, to get the NIC's address.
    """

    mr: Any
    shift: int = 0

    @property
    def lkey(self) -> int:
        """The NIC's key for our own requests."""
        return int(self.mr.lkey)

    @property
    def rkey(self) -> int:
        """The NIC's key for peers."""
        return int(self.mr.rkey)

    def close(self) -> None:
        """Withdraw it: when this returns the NIC reads and writes it no more."""
        self.mr.close()


def register(pd: Any, region: MemoryRegion, access: int, nic: str) -> NicMemory:
    """Register a region with one NIC.

    Raises:
        TransportUnavailable: the kernel, driver or NIC refuses; says why, for each way tried.
    """
    from pyverbs.mr import MR
    from pyverbs.pyverbs_error import PyverbsError

    try:
        return NicMemory(MR(pd, region.nbytes, access, address=region.address))
    except PyverbsError as exc:
        if region.device == "cpu":
            raise TransportUnavailable("rdma", _host_reason(region, nic, exc)) from exc
        logger.info(
            "%s does not take %s memory by its address (%s); trying dma-buf",
            nic,
            region.device,
            peer_memory_reason(),
        )
    return _register_dmabuf(pd, region, access, nic)


def peer_memory_reason(modules: Path = Path("/sys/module")) -> str:
    """Say whether a peer-memory module is loaded."""
    loaded = [name for name in PEER_MEMORY_MODULES if (modules / name).is_dir()]
    return f"{loaded[0]} is loaded" if loaded else f"none of {PEER_MEMORY_MODULES} is loaded"


def _host_reason(region: MemoryRegion, nic: str, error: Exception) -> str:
    hint = "; is `ulimit -l` high enough to pin it?" if "allocate memory" in str(error) else ""
    return f"{nic} does not register {region.nbytes} bytes at {region.address:#x}: {error}{hint}"


def _register_dmabuf(pd: Any, region: MemoryRegion, access: int, nic: str) -> NicMemory:
    from pyverbs.pyverbs_error import PyverbsError

    start, end = _page_range(region.address, region.nbytes)
    fd = _export_dmabuf(region.device, start, end - start)
    try:
        mr, first = register_dmabuf(pd, region.nbytes, access, fd, region.address - start)
    except PyverbsError as exc:
        raise TransportUnavailable(
            "rdma",
            f"{nic} takes {region.device} memory neither by its address ({peer_memory_reason()}) "
            f"nor as a dma-buf ({exc})",
        ) from exc
    finally:
        os.close(fd)  # the registration holds its own reference
    logger.info("%s: registered %d bytes of %s as dma-buf", nic, region.nbytes, region.device)
    return NicMemory(mr, (first - region.address) % ADDRESS_SPACE)


def _page_range(address: int, nbytes: int) -> tuple[int, int]:
    page = os.sysconf("SC_PAGE_SIZE")
    return address // page * page, -(-(address + nbytes) // page) * page


def _export_dmabuf(device: str, address: int, nbytes: int) -> int:
    """Ask the accelerator's driver for a dma-buf over a page-aligned range; returns its fd."""
    if not device.startswith("cuda"):
        raise TransportUnavailable(
            "rdma", f"{device} memory is not taken by its address, and has no known dma-buf export"
        )
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError as exc:
        raise TransportUnavailable("rdma", f"no CUDA driver to export a dma-buf: {exc}") from exc
    fd = ctypes.c_int(-1)
    code = driver.cuMemGetHandleForAddressRange(
        ctypes.byref(fd),
        ctypes.c_uint64(address),
        ctypes.c_size_t(nbytes),
        ctypes.c_int(_CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD),
        ctypes.c_ulonglong(0),
    )
    if code:
        name = _CU_ERROR_NAMES.get(code, "see CUresult")
        raise TransportUnavailable(
            "rdma", f"the CUDA driver exports no dma-buf of {nbytes} bytes: error {code} ({name})"
        )
    return fd.value
