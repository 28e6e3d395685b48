"""The engine on the emulated device: CUDA's kernels, memory and transports, the CPU's tokens."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.changed_logits import check_changed_logits
from support.cuda_emulation import emulated_backend, load_ipc, load_staged
from support.fp8_checkpoints import WHOLE_BLOCKS, write_fp8
from support.pd import (
    GREEDY,
    Answer,
    Instance,
    Pair,
    ask,
    ask_pair,
    instance,
    pair,
    prompt_of,
    write_model,
)
from support.push import WAYS, PushPair

from mooncake_hal.specs import Availability
from mooncake_hal.transports.staged import staged_plugin
from mooncake_hal_cuda import cuda_plugin

FEW = replace(GREEDY, max_tokens=4)
DRAWN = replace(FEW, temperature=0.9, top_k=40, top_p=0.95, seed=7)
SLOW = {"transfer_timeout_s": 120.0, "lease_s": 60.0}
HOWS = pytest.mark.parametrize("how", WAYS)
FAMILIES = pytest.mark.parametrize("family", ["llama", "deepseek_v3"])
KINDS = pytest.mark.parametrize("kinds", [("cuda", "cpu"), ("cpu", "cuda")], ids="-to-".join)


@pytest.fixture(autouse=True)
def emulated(monkeypatch: pytest.MonkeyPatch) -> None:
    """The plugin loads the emulated device."""
    monkeypatch.setattr(cuda_plugin, "probe", lambda: Availability(True, "emulated"))
    monkeypatch.setattr(cuda_plugin, "load", emulated_backend)
    monkeypatch.setattr(cuda_plugin, "load_ipc", load_ipc)
    monkeypatch.setattr(staged_plugin, "load", load_staged)


def check_pair(
    model: Path, how: str, sides: tuple[dict[str, Any], dict[str, Any]], **same: Any
) -> None:
    """Check that a pair answers as the CPU alone does, with KV transferred from P to D."""

    async def main() -> None:
        make, send = WAYS[how]
        prefill, decode = sides
        options = {name: same.pop(name) for name in ("transports",)}
        async with (
            instance(model, **same) as single,
            make(model, prefill=prefill, decode=decode, **same, **options, **SLOW) as both,
        ):
            await check_same(single, both, send)

    asyncio.run(main())


async def check_same(
    single: Instance, both: Pair | PushPair, send: Callable[..., Awaitable[Answer]]
) -> None:
    """For a short and a long prompt, greedy and sampled."""
    for length, sampling in ((5, FEW), (40, DRAWN)):
        expected = await ask(single, prompt_of(length), sampling)
        assert (await send(both, prompt_of(length), sampling)).tokens == expected.tokens
    assert both.decode.stat("loads") == 2
    assert both.decode.stat("load_failures") == 0


def test_logits_are_changed_with_async_scheduling(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = write_model(tmp_path / "model")
    check_changed_logits(model, monkeypatch, {"backend": "cuda"}, tolerance=1e-3)


@FAMILIES
@HOWS
def test_pair_of_gpus_gives_the_tokens_of_the_cpu(tmp_path: Path, how: str, family: str) -> None:
    model = write_model(tmp_path / "model", family)
    on_cuda = {"backend": "cuda"}
    check_pair(model, how, (on_cuda, on_cuda), transports=("cuda_ipc",))


@FAMILIES
@HOWS
@KINDS
def test_pair_of_gpu_and_cpu_gives_the_tokens_of_the_cpu(
    tmp_path: Path, kinds: tuple[str, str], how: str, family: str
) -> None:
    """The planner converts between their block sizes and layouts, also in fp8."""
    model = write_model(tmp_path / "model", family)
    prefill, decode = ({"backend": kind} for kind in kinds)
    other = {"block_size": 32, "kv_layout": "LPBTH"}
    same = {"dtype": "float32", "kv_cache_dtype": "fp8", "transports": ("staged",)}
    check_pair(model, how, (prefill, {**decode, **other}), **same)


@HOWS
@KINDS
def test_pair_of_gpu_and_two_ranks_of_a_cpu_gives_the_tokens_of_the_cpu(
    tmp_path: Path, kinds: tuple[str, str], how: str
) -> None:
    """Heads are split or joined in the transfer; the CPU's ranks are processes."""
    model = write_model(tmp_path / "model")
    sizes = {"cpu": {"backend": "cpu", "tp_size": 2}, "cuda": {"backend": "cuda"}}
    prefill, decode = (sizes[kind] for kind in kinds)
    check_pair(model, how, (prefill, decode), dtype="float32", transports=("staged",))


@pytest.mark.parametrize(
    ("family", "form"),
    [("llama", "static"), ("llama", "blocks"), ("qwen3_moe", "channel"), ("qwen3_moe", "blocks")],
)
def test_fp8_weights_are_not_dequantised(
    tmp_path: Path, family: str, form: str, caplog: pytest.LogCaptureFixture
) -> None:
    """On a pair with a common KV format; nothing is dequantised, not even experts."""
    fields = WHOLE_BLOCKS | ({"moe_intermediate_size": 128} if family == "qwen3_moe" else {})
    plain = write_model(tmp_path / "plain", family, **fields, dtype="bfloat16")
    model, _ = write_fp8(plain, tmp_path / "model", form)
    two = replace(FEW, max_tokens=2)

    async def main() -> None:
        options = {"backend": "cuda", "transports": ("cuda_ipc",), **SLOW}
        async with instance(model, backend="cuda") as single, pair(model, **options) as both:
            expected = await ask(single, prompt_of(5), two)
            assert (await ask_pair(both, prompt_of(5), two)).tokens == expected.tokens
            assert both.decode.stat("loads") == 1

    asyncio.run(main())
    assert "dequantised" not in caplog.text
