"""The transport suite over ``cuda_ipc`` on the emulated device; needs TRITON_INTERPRET=1.

Within a process, addresses need no mapping: that part of the suite runs once, the part with two
processes with every kind of memory. After every case the driver must have all memory back.
"""

from __future__ import annotations

import errno
import os
import secrets
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
from support.cuda_emulation import emulated_library

from mooncake_hal.errors import RegionRevoked, TransportUnavailable
from mooncake_hal.testing.transports import (
    MIB,
    ScatteredPieces,
    TransportConformance,
    TransportKit,
    one_span,
    raises,
)
from mooncake_hal.testing.transports_buffers import load_transport
from mooncake_hal.testing.transports_peer import PeerProcess
from mooncake_hal.testing.transports_process import TransportProcessConformance
from mooncake_hal.transport import EndpointOptions
from mooncake_hal_cuda.memory.virtual_memory import Mapped
from mooncake_hal_cuda.transports import ipc_peer, ipc_protocol
from mooncake_hal_cuda.transports.ipc_peer import DescriptorMailbox, PeerMappings
from mooncake_hal_cuda.transports.ipc_protocol import IpcRegionInfo


class Emulated(TransportKit):
    """Endpoints of the emulated device, in this process and in the other one."""

    loader = "support.cuda_emulation:load_ipc"
    allocator = "support.cuda_emulation:allocate"
    registers_4_gib = False  # the device has less
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

    def revoke_when_asked(self, child: PeerProcess, times: int) -> None:
        """The child revokes its region just before the ``times``-th request for a descriptor."""
        ask, asked = PeerMappings._open_descriptor, []

        def revoke_and_ask(mappings: PeerMappings, key: int, name: IpcRegionInfo) -> Mapped:
            asked.append(key)
            if len(asked) == times:
                child.ask(do="revoke")
            return ask(mappings, key, name)

        self.patch.setattr(PeerMappings, "_open_descriptor", revoke_and_ask)

    @pytest.mark.parametrize("times", [1, 2], ids=["in the handshake", "in a transfer"])
    def test_region_is_revoked_while_its_descriptor_is_requested(self, times: int) -> None:
        child = self.child(MIB)
        near, here = self.open(), self.buffer(MIB)
        near.register(here.region)
        self.revoke_when_asked(child, times)
        peer = near.connect(child.address, timeout=self.timeout)
        peer._mappings.close()  # drops the handshake's mappings: the next transfer asks again
        with raises(RegionRevoked):
            self.read(peer, one_span(here.region.address, child.region.address, MIB))

    def test_a_region_beyond_its_allocation_is_rejected(self) -> None:
        """As that of a tensor in torch's expandable segments, which are many allocations in a row:
        a peer would map the first one only."""
        near, here = self.open(), self.buffer(2 * MIB)
        with pytest.raises(TransportUnavailable, match="2097153 bytes at 0 of an allocation of"):
            near.register(replace(here.region, nbytes=2 * MIB + 1))
        near.register(here.region)

    def test_regions_are_unmapped_if_no_descriptor_is_left_for_another_one(self) -> None:
        """The peer's memory is not free before it is unmapped everywhere."""
        self.patch.setattr(ipc_protocol, "process_identity", lambda: secrets.token_bytes(16))
        near, far = self.open(), self.open()
        for _ in range(2):
            far.register(self.buffer(MIB).region)
        mailboxes = iter([DescriptorMailbox])

        def mailbox() -> DescriptorMailbox:
            if (make := next(mailboxes, None)) is None:
                raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
            return make()

        self.patch.setattr(ipc_peer, "DescriptorMailbox", mailbox)
        with pytest.raises(TransportUnavailable, match="Too many open files"):
            near.connect(far.address, timeout=self.timeout)

    def test_a_new_connection_reuses_the_stream_of_a_closed_one(self) -> None:
        """Torch's allocator would keep the copies' tables for each stream."""
        near, far = self.open(), self.open()
        near.connect(far.address, timeout=self.timeout).close()
        created = emulated_library().emulated_streams()
        near.connect(far.address, timeout=self.timeout).close()
        assert emulated_library().emulated_streams() == created

    def test_devices_without_peer_access_are_out_of_reach(self) -> None:
        self.patch.setenv("EMULATED_CUDA_LACKS", "peer")
        first, second = self.open(), self.open(device="cuda:1")
        reason = self.transport.reaches(second.address, first.address)
        assert reason == "cuda:1 has no peer access to cuda:0; see nvidia-smi topo"
        with raises(TransportUnavailable):
            second.connect(first.address, timeout=self.timeout)

    def test_a_part_is_prepared_while_the_previous_one_is_copied(self) -> None:
        self.patch.setattr(ipc_peer, "PIECE_BYTES", MIB // 8)
        self.check_moves(
            self.pair(), ScatteredPieces(*(np.array([n], np.int64) for n in (0, 0, MIB)))
        )


class TestNames(Emulated, TransportProcessConformance):
    kind = "ipc"

    def test_a_device_gets_access_to_the_memory_of_another_one_of_the_process(self) -> None:
        self.patch.setenv("EMULATED_CUDA_LACKS", "atomics")
        first, second = self.open(), self.open(device="cuda:1")
        first.register(self.buffer(MIB).region)
        for _ in range(2):
            second.connect(first.address, timeout=self.timeout)
        accesses = [emulated_library().emulated_access(*pair) for pair in ((1, 0), (0, 1))]
        assert accesses == [1, 0]


class Elsewhere(Emulated):
    """A device in an NVLink domain, with every other process on another host."""

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

    def test_memory_has_its_descriptor_where_the_fabric_fails(
        self, caplog: pytest.LogCaptureFixture
    ) -> None:
        near, here = self.open(), self.buffer(MIB)
        self.patch.setenv("EMULATED_CUDA_LACKS", "daemon")
        near.register(here.region)
        assert "other hosts can't map memory of cuda:0: cuMemExport" in caplog.text

    def test_another_domain_is_out_of_reach(self) -> None:
        near = self.open()
        self.patch.setenv("EMULATED_NVLINK", "3")
        child = self.child(MIB)
        reason = self.transport.reaches(near.address, child.address)
        assert reason is not None
        assert "in different NVLink domains" in reason

    def test_a_peer_of_this_host_needs_no_fabric(self) -> None:
        """Within a host, fabric memory is mapped by descriptor, even without a readable channel."""
        self.patch.delenv("EMULATED_HOST_OF")
        child = self.child(MIB)
        self.patch.setenv("EMULATED_CUDA_LACKS", "imex")
        self.patch.setenv("MOONCAKE_HAL_CUDA_MEMORY", "fd")
        self.transport = load_transport(self.loader)
        near, here = self.open(), self.buffer(MIB)
        near.register(here.region)
        peer = near.connect(child.address, timeout=self.timeout)
        self.read(peer, one_span(here.region.address, child.region.address, MIB))
