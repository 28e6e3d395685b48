"""Test cases of ``staged`` between hosts with NICs, where staging buffers move over rdma."""

from __future__ import annotations

import logging
from dataclasses import replace

import numpy as np
import pytest
from support.host_device import DEVICE

from mooncake_hal.testing.transports import MIB, TransportKit
from mooncake_hal.testing.transports_buffers import random_pieces
from mooncake_hal.transport import EndpointOptions

LOADER = "support.host_device:load_staged"
ALLOCATOR = "support.host_device:allocate"


class StagedOverRdma(TransportKit):
    """A device at both ends."""

    loader, allocator = LOADER, ALLOCATOR

    def options(self) -> EndpointOptions:
        return replace(super().options(), device=DEVICE)

    def test_transfers_use_rdma(self, caplog: pytest.LogCaptureFixture) -> None:
        """Not tcp, which is available as well."""
        caplog.set_level(logging.INFO, "mooncake_hal.negotiation")
        here, there = self.buffer(MIB), self.buffer(MIB)
        there.put(self.rng.integers(0, 256, MIB, np.uint8))
        near, far = self.open(), self.open()
        near.register(here.region)
        far.register(there.region)
        peer = near.connect(far.address, timeout=self.timeout)
        assert "transport: rdma is the best one that reaches the peer" in caplog.text
        pieces = random_pieces(self.rng, np.full(64, 4096, np.int64), MIB)
        wanted = pieces.after_read(here.get(), there.get())
        self.read(peer, pieces.spans(here.region, there.region))
        assert (here.get() == wanted).all()
