"""KV of an NPU over the host's memory: to NPUs that hccs can't reach, and to other hardware."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.npu import FEW, ON_NPU, clear_cases, cpu, write_family
from support.push import WAYS

from mooncake_hal.testing.transports import TransportConformance
from mooncake_hal.testing.transports_process import TransportProcessConformance
from mooncake_hal.testing.transports_staged import StagedBetweenKinds
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
    """Peers, which are processes of their own, inherit the variable."""
    monkeypatch.setenv("MOONCAKE_HAL_BACKEND", "ascend")


class TestStagedOfNpus(TransportConformance, TransportProcessConformance):
    loader = "staged"
    allocator = "mooncake_hal.testing.transports_device:first"
    timeout = 60.0
    moves_4_gib = False  # it would take ten seconds
    registers_4_gib = False  # the device has less

    def options(self) -> EndpointOptions:
        return replace(super().options(), device="npu:0")


class TestStagedBetweenKinds(StagedBetweenKinds):
    device = "npu:0"
    timeout = 60.0


PAIRS: list[tuple[str, str, dict[str, Any], dict[str, Any]]] = [
    ("pulled", "llama", NPU, CPU),
    ("pushed", "llama", CPU, NPU),
    ("pushed", "deepseek_v3", NPU, CPU),
    ("pulled", "deepseek_v3", CPU, NPU),
    ("pulled", "llama", NPU, {**NPU, "tp_size": 2}),  # hccs requires a multiple
    ("pushed", "llama", {**NPU, "tp_size": 2}, CPU),
]
"""Direction of the KV transfer, model family, and the options of P and D."""


@pytest.mark.parametrize(("how", "family", "prefill", "decode"), PAIRS, ids=str)
def test_pair_gives_the_tokens_of_one_instance(
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
