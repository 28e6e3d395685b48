"""The transport suite on a device: ``cuda_ipc`` with every kind of memory, and ``staged``."""

from __future__ import annotations

from dataclasses import replace

import pytest

from mooncake_hal.testing.backends import load_backend
from mooncake_hal.testing.transports import TransportConformance, TransportKit
from mooncake_hal.testing.transports_process import TransportProcessConformance
from mooncake_hal.transport import EndpointOptions


class OfKind(TransportKit):
    """Endpoints with one kind of memory, in this process and in the other one."""

    loader = "cuda_ipc"
    allocator = "support.cuda_device:allocate"
    kind = "auto"

    def setup_method(self) -> None:
        self.patch = pytest.MonkeyPatch()
        self.patch.setenv("MOONCAKE_HAL_CUDA_MEMORY", self.kind)
        load_backend.cache_clear()  # the cached backend has another kind of memory
        super().setup_method()

    def teardown_method(self) -> None:
        super().teardown_method()
        self.patch.undo()
        load_backend.cache_clear()

    def options(self) -> EndpointOptions:
        return replace(super().options(), device="cuda:0")


@pytest.mark.cuda
class TestCudaIpc(OfKind, TransportConformance, TransportProcessConformance):
    """The kind of memory that this device selects by itself."""


@pytest.mark.cuda
class TestCudaIpcByName(OfKind, TransportProcessConformance):
    kind = "ipc"


@pytest.mark.cuda
class TestCudaIpcByDescriptor(OfKind, TransportProcessConformance):
    kind = "fd"


@pytest.mark.cuda
class TestStaged(TransportConformance, TransportProcessConformance):
    loader = "staged"
    allocator = "support.cuda_device:allocate"

    def options(self) -> EndpointOptions:
        return replace(super().options(), device="cuda:0")
