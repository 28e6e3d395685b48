"""Conformance tests of the ``staged`` transport with a backend's host copies, in addition to the
cases of every transport.

A plugin whose devices have their own memory runs the whole suite with its host copies::

    class TestStaged(TransportConformance, TransportProcessConformance):
        loader, allocator = "staged", "mooncake_hal.testing.transports_device:first"

        def options(self) -> EndpointOptions:
            return replace(super().options(), device="mychip:0")

    class TestStagedBetweenKinds(StagedBetweenKinds):
        device = "mychip:0"
"""

from __future__ import annotations

from typing import ClassVar

import numpy as np
import pytest

from mooncake_hal.errors import TransferError
from mooncake_hal.testing.transports import MIB, TransportKit
from mooncake_hal.testing.transports_buffers import anonymous, random_pieces


class StagedBetweenKinds(TransportKit):
    """Cases with device memory at one end and host memory at the other.

    Args:
        device: name of the device, such as ``"npu:0"``.
    """

    device: ClassVar[str]
    loader = "staged"
    allocator = "mooncake_hal.testing.transports_device:first"

    @pytest.mark.parametrize("piece", [5, 64, 16 << 10, 512 << 10])
    @pytest.mark.parametrize("connecting", ["device", "host"])
    def test_pieces_in_any_order(self, connecting: str, piece: int) -> None:
        """Either end reads and writes pieces in any order; no bytes around them change."""
        ours, host = self.buffer(4 * MIB), anonymous(4 * MIB)
        assert ours.region.device == self.device
        self.stack.callback(host.close)
        host.put(self.rng.integers(0, 256, 4 * MIB, np.uint8))
        here, there = (ours, host) if connecting == "device" else (host, ours)
        near = self.open(device=here.region.device)
        far = self.open(device=there.region.device)
        near.register(here.region)
        far.register(there.region)
        peer = near.connect(far.address, timeout=self.timeout)
        pieces = random_pieces(self.rng, np.full(6, piece, np.int64), 4 * MIB)
        spans = pieces.spans(here.region, there.region)
        wanted = pieces.after_read(here.get(), there.get())
        self.read(peer, spans)
        assert (here.get() == wanted).all()
        here.put(self.rng.integers(0, 256, 4 * MIB, np.uint8))
        wanted = pieces.after_write(here.get(), there.get())
        self.write(peer, spans)
        assert (there.get() == wanted).all()

    def test_host_memory_is_registered_when_a_peer_connects(self) -> None:
        """Regions registered before and after a peer connects are accessible; a revoked one is
        not."""
        ours = self.buffer(MIB)
        first, second = anonymous(MIB), anonymous(MIB)
        for buffer in (first, second):
            self.stack.callback(buffer.close)
            buffer.put(self.rng.integers(0, 256, MIB, np.uint8))
        near, far = self.open(device=self.device), self.open(device="cpu")
        near.register(ours.region)
        key = far.register(first.region)
        peer = near.connect(far.address, timeout=self.timeout)
        far.register(second.region)
        everything = random_pieces(self.rng, np.array([4096], np.int64), MIB)
        for buffer in (first, second):
            self.read(peer, everything.spans(ours.region, buffer.region))
            begin, at = int(everything.near[0]), int(everything.far[0])
            assert (ours.get()[begin : begin + 4096] == buffer.get()[at : at + 4096]).all()
        far.revoke(key)
        with pytest.raises(TransferError):
            self.read(peer, everything.spans(ours.region, first.region))
