"""The memory of a store: one shared mapping, which transports register and other processes map."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os

from mooncake_hal.host_memory import memory_bytes
from mooncake_hal.transport import MemoryRegion
from mooncake_kv.errors import KVConfigError
from mooncake_kv.store.arena_allocator import GRANULE

_HUGE_PAGE = 2 << 20


class ArenaMemory:
    """Zeroed host memory in a memfd. The host allocates pages when they are first written.

    Args:
        nbytes: size; rounded up to whole huge pages, so that the kernel may use them.

    Raises:
        KVConfigError: the host, or the control group of this process, lacks the memory.
    """

    def __init__(self, nbytes: int) -> None:
        total = -(-nbytes // _HUGE_PAGE) * _HUGE_PAGE
        available, _ = memory_bytes()
        if nbytes < GRANULE or total > available:
            raise KVConfigError(
                f"a store's memory of {nbytes} bytes was asked for; this host can provide "
                f"{GRANULE} to {available} bytes, within the limit of the process's control group"
            )
        self._fd = os.memfd_create("mooncake-kv", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(self._fd, total)
            self._map = mmap.mmap(self._fd, total)
        except (OSError, ValueError) as exc:
            os.close(self._fd)
            raise KVConfigError(f"{total} bytes of shared memory can't be mapped: {exc}") from exc
        with contextlib.suppress(OSError):  # a kernel without transparent huge pages
            self._map.madvise(mmap.MADV_HUGEPAGE)
        self.nbytes = nbytes
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        self._view = memoryview(self._map)

    @property
    def region(self) -> MemoryRegion:
        """The memory's description, to register it with transports."""
        return MemoryRegion(self.address, self.nbytes, "cpu", self._fd, 0)

    def view(self, offset: int, nbytes: int) -> memoryview:
        """A writable view of a range. The caller must release it before ``close``."""
        return self._view[offset : offset + nbytes]

    def close(self) -> None:
        """Release the memory. Transports must have deregistered it. Idempotent."""
        if self._fd >= 0:
            self._view.release()
            with contextlib.suppress(BufferError):  # a traceback still holds a view:
                self._map.close()  # the memory is unmapped with it
            os.close(self._fd)
            self._fd = -1
