"""The engine on the emulated device: CUDA's kernels, memory and transports, CPU's tokens."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest
from support.cuda_emulation import emulated_backend, load_ipc, load_staged
from support.pd import (
    GREEDY,
    Instance,
    Pair,
    ask,
    ask_pair,
    instance,
    pair,
    prompt_of,
    write_model,
)

from mooncake_hal.specs import Availability
from mooncake_hal_cuda import plugin
from mooncake_hal_cuda.staged import plugin as staged_plugin

FEW = replace(GREEDY, max_tokens=4)
DRAWN = replace(FEW, temperature=0.9, top_k=40, top_p=0.95, seed=7)


@pytest.fixture(autouse=True)
def emulated(monkeypatch: pytest.MonkeyPatch) -> None:
    """The plugin finds the emulated device."""
    monkeypatch.setattr(plugin, "probe", lambda: Availability(True, "emulated"))
    monkeypatch.setattr(plugin, "load", emulated_backend)
    monkeypatch.setattr(plugin, "load_ipc", load_ipc)
    monkeypatch.setattr(staged_plugin, "load", load_staged)


async def check_same(single: Instance, both: Pair) -> None:
    """The pair says what the instance says, and its KV went from one to the other."""
    for length, sampling in ((5, FEW), (40, DRAWN)):
        expected = await ask(single, prompt_of(length), sampling)
        found = await ask_pair(both, prompt_of(length), sampling)
        assert found.tokens == expected.tokens
    assert both.decode.stat("loads") == 2
    assert both.decode.stat("load_failures") == 0


@pytest.mark.parametrize("family", ["llama", "deepseek_v3"])
def test_prefill_and_decode_apart_say_what_the_cpu_says(tmp_path: Path, family: str) -> None:
    model = write_model(tmp_path / "model", family)

    async def main() -> None:
        options = {"backend": "cuda", "transports": ("cuda_ipc",), "transfer_timeout_s": 120.0}
        async with instance(model) as single, pair(model, lease_s=60.0, **options) as both:
            await check_same(single, both)

    asyncio.run(main())


@pytest.mark.parametrize("kinds", [("cuda", "cpu"), ("cpu", "cuda")], ids="-to-".join)
@pytest.mark.parametrize("family", ["llama", "deepseek_v3"])
def test_a_gpu_and_a_cpu_say_what_the_cpu_says(
    tmp_path: Path, family: str, kinds: tuple[str, str]
) -> None:
    """Through the planner: their blocks are of different sizes and layouts, and in fp8."""
    model = write_model(tmp_path / "model", family)

    async def main() -> None:
        first, second = ({"backend": kind} for kind in kinds)
        same = {"dtype": "float32", "kv_cache_dtype": "fp8"}
        slow = {"transports": ("staged",), "transfer_timeout_s": 120.0, "lease_s": 60.0}
        other = {"block_size": 32, "kv_layout": "LPBTH"}
        async with (
            instance(model, **same) as single,
            pair(model, prefill=first, decode={**second, **other}, **same, **slow) as both,
        ):
            await check_same(single, both)

    asyncio.run(main())
