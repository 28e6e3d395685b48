"""The transport suite over ``cuda_ipc`` on the emulated device; needs TRITON_INTERPRET=1.

Within a process addresses are good as they are: that part of the suite runs once, what takes two
processes over every kind of memory. Whatever the end of a case, the driver has everything back.
"""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from support.cuda_emulation import emulated_library

from mooncake_hal.errors import TransportUnavailable
from mooncake_hal.testing.transports import (
    MIB,
    TransportConformance,
    TransportKit,
    one_span,
    raises,
)
from mooncake_hal.testing.transports_buffers import load_transport
from mooncake_hal.testing.transports_process import TransportProcessConformance
from mooncake_hal.transport import EndpointOptions


class Emulated(TransportKit):
    """Endpoints of the emulated device, here and in the other process."""

    loader = "support.cuda_emulation:load_ipc"
    allocator = "support.cuda_emulation:allocate"
    kind = "auto"

    def setup_method(self) -> None:
        self.patch = pytest.MonkeyPatch()
        self.patch.setenv("MOONCAKE_HAL_CUDA_MEMORY", self.kind)
        super().setup_method()

    def teardown_method(self) -> None:
        super().teardown_method()
        self.patch.undo()
        assert emulated_library().emulated_leftovers() == 0

    def options(self) -> EndpointOptions:
        return replace(super().options(), device="cuda:0")


class TestDescriptors(Emulated, TransportConformance, TransportProcessConformance):
    kind = "fd"


class TestNames(Emulated, TransportProcessConformance):
    kind = "ipc"


class Elsewhere(Emulated):
    """A device in an NVLink domain; every other process is one of another host."""

    kind = "fabric"

    def setup_method(self) -> None:
        self.channels = TemporaryDirectory()
        Path(self.channels.name, "channel0").touch()
        super().setup_method()
        self.patch.setenv("EMULATED_IMEX_CHANNELS", self.channels.name)
        self.patch.setenv("EMULATED_HOST_OF", str(os.getpid()))
        self.transport = load_transport(self.loader)

    def teardown_method(self) -> None:
        super().teardown_method()
        self.channels.cleanup()


class TestFabric(Elsewhere, TransportProcessConformance):
    def test_memory_of_one_host_is_out_of_reach(self) -> None:
        self.patch.setenv("MOONCAKE_HAL_CUDA_MEMORY", "fd")
        child = self.child(MIB)
        with raises(TransportUnavailable):
            self.open().connect(child.address, timeout=self.timeout)

    def test_another_domain_is_out_of_reach(self) -> None:
        near = self.open()
        self.patch.setenv("EMULATED_NVLINK", "3")
        child = self.child(MIB)
        reason = self.transport.reaches(near.address, child.address)
        assert reason is not None
        assert "in different NVLink domains" in reason

    def test_a_peer_of_this_host_needs_no_fabric(self) -> None:
        """Fabric memory is mapped by descriptor there, even where no channel can be read."""
        self.patch.delenv("EMULATED_HOST_OF")
        child = self.child(MIB)
        self.patch.setenv("EMULATED_CUDA_LACKS", "imex")
        self.patch.setenv("MOONCAKE_HAL_CUDA_MEMORY", "fd")
        self.transport = load_transport(self.loader)
        near, here = self.open(), self.buffer(MIB)
        near.register(here.region)
        peer = near.connect(child.address, timeout=self.timeout)
        self.read(peer, one_span(here.region.address, child.region.address, MIB))
