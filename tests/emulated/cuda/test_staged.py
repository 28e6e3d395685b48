"""The transport suite over ``staged`` on the emulated device; needs TRITON_INTERPRET=1."""

from __future__ import annotations

from dataclasses import replace

import pytest
from support.cuda_emulation import emulated_backend, emulated_host_copies

from mooncake_hal.backend import Backend
from mooncake_hal.host_copies import HostCopies
from mooncake_hal.testing.backends_host_copies import HostCopiesSuite
from mooncake_hal.testing.transports import TransportConformance
from mooncake_hal.testing.transports_process import TransportProcessConformance
from mooncake_hal.testing.transports_staged import StagedBetweenKinds
from mooncake_hal.transport import EndpointOptions


class TestHostCopies(HostCopiesSuite):
    @pytest.fixture
    def backend(self) -> Backend:
        return emulated_backend()

    @pytest.fixture
    def host_copies(self) -> HostCopies:
        return emulated_host_copies(0)


class TestStaged(TransportConformance, TransportProcessConformance):
    loader = "support.cuda_emulation:load_staged"
    allocator = "support.cuda_emulation:allocate"
    moves_4_gib = False  # it would take ten seconds
    registers_4_gib = False  # the device has less

    def options(self) -> EndpointOptions:
        return replace(super().options(), device="cuda:0")


class TestStagedBetweenHosts(TransportConformance):
    """Host memory at both ends."""

    loader = "support.cuda_emulation:load_staged"


class TestStagedBetweenKinds(StagedBetweenKinds):
    device = "cuda:0"
    loader = "support.cuda_emulation:load_staged"
    allocator = "support.cuda_emulation:allocate"
