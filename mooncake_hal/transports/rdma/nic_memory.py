"""Registration of memory with a NIC: host memory, and accelerator memory directly (GPUDirect).

Accelerator memory is first registered by its address, which the kernel can resolve with a
peer-memory module (nvidia_peermem for CUDA). If that fails, the driver is asked to export the range
as a dma-buf. The method that worked is logged. Neither method is covered by tests: soft-RoCE does
not support dma-buf.
"""

from __future__ import annotations

import ctypes
import errno
import logging
import os
import threading
from collections.abc import Callable
from pathlib import Path

from mooncake_hal.errors import TransferError, TransportUnavailable
from mooncake_hal.transport import MemoryRegion
from mooncake_hal.transports.rdma import verbs

logger = logging.getLogger(__name__)

PEER_MEMORY_MODULES = ("nvidia_peermem", "nv_peer_mem")

ACCESS = verbs.ACCESS_LOCAL_WRITE | verbs.ACCESS_REMOTE_WRITE | verbs.ACCESS_REMOTE_READ
"""Access flags of all registered memory and of every queue pair."""

_CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD = 1
_CU_ERROR_NAMES = {1: "invalid value", 3: "not initialised", 801: "not supported by this driver"}


class NicMemory:
    """A region's registration with one NIC.

    Args:
        nic: name of the NIC, for messages.
        mr: address of its ``ibv_mr``.
        on_close: called when the NIC has deregistered the memory.
    """

    def __init__(self, nic: str, mr: int, on_close: Callable[[NicMemory], None]) -> None:
        found = verbs.IbvMr.from_address(mr)
        self.lkey, self.rkey = int(found.lkey), int(found.rkey)
        self._nic = nic
        self._mr = mr
        self._on_close = on_close
        self._lock = threading.Lock()

    def close(self) -> None:
        """Deregister the memory: once this returns, the NIC does not access it any more.
        Idempotent.

        Raises:
            TransferError: deregistration failed.
        """
        with self._lock:
            if not self._mr:
                return
            try:
                verbs.load().ibv_dereg_mr(self._mr)
            except OSError as exc:
                raise TransferError(f"{self._nic} does not deregister memory: {exc}") from exc
            self._mr = 0
        self._on_close(self)


def register_memory(pd: int, region: MemoryRegion, nic: str) -> int:
    """Register a region; returns the address of its ``ibv_mr``.

    Args:
        pd: address of the NIC's ``ibv_pd``.
        region: the region to register.
        nic: name of the NIC, for messages.

    Raises:
        TransportUnavailable: the kernel, driver or NIC rejects it; the message has the reason for
            each method that was tried.
    """
    library = verbs.load()
    try:
        mr = int(library.ibv_reg_mr(pd, region.address, region.nbytes, ACCESS))
    except OSError as exc:
        if region.device == "cpu":
            hint = "; is `ulimit -l` high enough to pin it?" if exc.errno == errno.ENOMEM else ""
            raise TransportUnavailable(
                "rdma",
                f"{nic} does not register {region.nbytes} bytes at {region.address:#x}: "
                f"{exc}{hint}",
            ) from exc
        logger.info(
            "%s can't register %s memory by its address (%s); trying dma-buf",
            nic,
            region.device,
            peer_memory_reason(),
        )
        return _register_dmabuf(pd, region, nic)
    found = verbs.IbvMr.from_address(mr)
    verbs.check_layout("ibv_mr", {"pd": (found.pd, pd), "length": (found.length, region.nbytes)})
    return mr


def peer_memory_reason(modules: Path = Path("/sys/module")) -> str:
    """Describe whether a peer-memory module is loaded."""
    loaded = [name for name in PEER_MEMORY_MODULES if (modules / name).is_dir()]
    return f"{loaded[0]} is loaded" if loaded else f"none of {PEER_MEMORY_MODULES} is loaded"


def _register_dmabuf(pd: int, region: MemoryRegion, nic: str) -> int:
    library = verbs.load()
    if not hasattr(library, "ibv_reg_dmabuf_mr"):
        raise TransportUnavailable(
            "rdma",
            f"{nic} can't register {region.device} memory by its address "
            f"({peer_memory_reason()}), and this libibverbs does not support dma-buf; install "
            "rdma-core 34 or newer",
        )
    page = os.sysconf("SC_PAGE_SIZE")
    start = region.address // page * page
    end = -(-(region.address + region.nbytes) // page) * page
    fd = _export_dmabuf(region.device, start, end - start)
    try:
        # the iova is the region's address, so that the NIC uses the accelerator's addresses
        mr = library.ibv_reg_dmabuf_mr(
            pd, region.address - start, region.nbytes, region.address, fd, ACCESS
        )
    except OSError as exc:
        raise TransportUnavailable(
            "rdma",
            f"{nic} can register {region.device} memory neither by its address "
            f"({peer_memory_reason()}) nor as a dma-buf ({exc})",
        ) from exc
    finally:
        os.close(fd)  # the registration holds its own reference
    logger.info("%s: registered %d bytes of %s as dma-buf", nic, region.nbytes, region.device)
    return int(mr)


def _export_dmabuf(device: str, address: int, nbytes: int) -> int:
    """Export a page-aligned range as a dma-buf with the accelerator's driver; returns its fd."""
    if not device.startswith("cuda"):
        raise TransportUnavailable(
            "rdma",
            f"{device} memory can't be registered by its address, and has no known dma-buf export",
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
