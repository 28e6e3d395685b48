"""KV of an NPU through the host's memory: to NPUs that hccs refuses, and to other hardware."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.npu import FEW, ON_NPU, clear_cases, cpu, write_family
from support.push import WAYS

from mooncake_hal.testing.transports import MIB, TransportConformance, TransportKit
from mooncake_hal.testing.transports_buffers import anonymous, random_pieces
from mooncake_hal.testing.transports_process import TransportProcessConformance
from mooncake_hal.transport import EndpointOptions

TINY_LLAMA = Path(__file__).parents[3] / "examples" / "tiny-llama"
STAGED: dict[str, Any] = {
    "transports": ("staged",),
    "lease_s": 60.0,
    "transfer_timeout_s": 120.0,
}
NPU: dict[str, Any] = {**ON_NPU, **STAGED}
CPU: dict[str, Any] = {**STAGED, "block_size": 16, "num_kv_blocks": 128}


@pytest.fixture(autouse=True)
def on_the_npu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Peers, which are processes of their own, take the backend from here, too."""
    monkeypatch.setenv("MOONCAKE_HAL_BACKEND", "ascend")


class TestStagedOfNpus(TransportConformance, TransportProcessConformance):
    loader = "staged"
    allocator = "mooncake_hal.testing.transports_device:first"
    timeout = 60.0

    def options(self) -> EndpointOptions:
        return replace(super().options(), device="npu:0")


class TestStagedBetweenKinds(TransportKit):
    """An NPU at one end, a host without one at the other."""

    loader = "staged"
    allocator = "mooncake_hal.testing.transports_device:first"

    @pytest.mark.parametrize("piece", [5, 64, 16 << 10, 512 << 10])
    @pytest.mark.parametrize("device", ["npu:0", "cpu"])
    def test_pieces_in_any_order(self, device: str, piece: int) -> None:
        npu, host = self.buffer(4 * MIB), anonymous(4 * MIB)
        self.stack.callback(host.close)
        host.put(self.rng.integers(0, 256, 4 * MIB, np.uint8))
        here, there = (npu, host) if device == "npu:0" else (host, npu)
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


PAIRS: list[tuple[str, str, dict[str, Any], dict[str, Any]]] = [
    ("pulled", "llama", NPU, CPU),
    ("pushed", "llama", CPU, NPU),
    ("pushed", "deepseek_v3", NPU, CPU),
    ("pulled", "deepseek_v3", CPU, NPU),
    ("pulled", "llama", NPU, {**NPU, "tp_size": 2}),  # hccs wants a multiple
    ("pushed", "llama", {**NPU, "tp_size": 2}, CPU),
]
"""How KV crosses, of which model, from what to what."""


@pytest.mark.parametrize(("how", "family", "prefill", "decode"), PAIRS, ids=str)
def test_tokens_are_those_of_one_instance(
    tmp_path: Path, how: str, family: str, prefill: dict[str, Any], decode: dict[str, Any]
) -> None:
    make, send = WAYS[how]

    async def main() -> None:
        model = TINY_LLAMA if family == "llama" else write_family(tmp_path, family)
        sides = {"prefill": prefill, "decode": decode}
        async with cpu(model) as on_cpu, make(model, **sides) as both:
            cases = await clear_cases(on_cpu, (17, 300))
            for case in cases:
                found = await send(both, case.prompt, FEW)
                assert found.tokens == case.tokens
            assert both.decode.stat("loads") == len(cases)
            assert both.decode.stat("load_failures") == 0
            await both.check_clean()

    asyncio.run(main())
