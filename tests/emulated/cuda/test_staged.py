"""The transport suite over ``staged`` on the emulated device; needs TRITON_INTERPRET=1."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from mooncake_hal.testing.transports import MIB, TransportConformance, TransportKit
from mooncake_hal.testing.transports_buffers import anonymous, random_pieces
from mooncake_hal.testing.transports_process import TransportProcessConformance
from mooncake_hal.transport import EndpointOptions


class TestStaged(TransportConformance, TransportProcessConformance):
    loader = "support.cuda_emulation:load_staged"
    allocator = "support.cuda_emulation:allocate"

    def options(self) -> EndpointOptions:
        return replace(super().options(), device="cuda:0")


class TestStagedBetweenHosts(TransportConformance):
    """Host memory at both ends."""

    loader = "support.cuda_emulation:load_staged"


class TestStagedBetweenKinds(TransportKit):
    """A GPU at one end, a host without one at the other."""

    loader = "support.cuda_emulation:load_staged"
    allocator = "support.cuda_emulation:allocate"

    @pytest.mark.parametrize("device", ["cuda:0", "cpu"])
    def test_blocks_in_any_order(self, device: str) -> None:
        gpu, host = self.buffer(4 * MIB), anonymous(4 * MIB)
        self.stack.callback(host.close)
        host.put(self.rng.integers(0, 256, 4 * MIB, np.uint8))
        here, there = (gpu, host) if device == "cuda:0" else (host, gpu)
        near = self.open(device=here.region.device)
        far = self.open(device=there.region.device)
        near.register(here.region)
        far.register(there.region)
        peer = near.connect(far.address, timeout=self.timeout)
        pieces = random_pieces(self.rng, np.full(50, 16 << 10, np.int64), 4 * MIB)
        spans = pieces.spans(here.region, there.region)
        wanted = pieces.after_read(here.get(), there.get())
        self.read(peer, spans)
        assert (here.get() == wanted).all()
        here.put(self.rng.integers(0, 256, 4 * MIB, np.uint8))
        wanted = pieces.after_write(here.get(), there.get())
        self.write(peer, spans)
        assert (there.get() == wanted).all()
