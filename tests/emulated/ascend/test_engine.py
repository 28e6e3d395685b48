"""The engine on the emulated NPU, alone and as P and D, generates the same tokens as on the CPU."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.changed_logits import check_changed_logits
from support.npu import FEW, ON_NPU, OVER_HCCS, clear_cases, cpu, write_family
from support.pd import ask, ask_pair, instance, make_config, pair, start, write_model
from support.push import WAYS
from torch import Tensor

from mooncake_engine.config import Role
from mooncake_engine.errors import ConfigError, PortInUse
from mooncake_hal.port_range import PortRange
from mooncake_hal.transports.staging import U64
from mooncake_hal_ascend.hccs.hccs_staging import Scatterer, Wait

TINY_LLAMA = Path(__file__).parents[3] / "examples" / "tiny-llama"
FAMILIES = ("llama", "mixtral", "deepseek_v3")
ALONE: list[dict[str, Any]] = [{}, {"max_num_batched_tokens": 64}]
"""Whole prompts, and prompts in chunks beside other prompts' decodes."""
APART = [
    *((how, family, (1, 1)) for how in ("pulled", "pushed") for family in FAMILIES),
    ("pulled", "deepseek_v3", (2, 2)),
    ("pushed", "mixtral", (2, 1)),
    ("pushed", "deepseek_v3", (2, 1)),
    ("pushed", "llama", (2, 2)),
]
"""Direction of the KV transfer, model family, and ranks of P and D."""


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    made = {family: write_family(folder, family) for family in FAMILIES[1:]}
    return {"llama": TINY_LLAMA, **made}


@pytest.mark.parametrize("options", ALONE, ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_one_instance(models: dict[str, Path], family: str, options: dict[str, Any]) -> None:
    async def main() -> None:
        model = models[family]
        async with cpu(model) as on_cpu, instance(model, **ON_NPU, **options) as on_npu:
            cases = await clear_cases(on_cpu)
            asked = [ask(on_npu, case.prompt, FEW) for case in cases]
            found = await asyncio.gather(*asked)  # concurrently: batches of prompts and decodes
            assert [each.tokens for each in found] == [case.tokens for case in cases]
            again = await ask(on_npu, cases[-1].prompt, FEW)
            assert again.tokens == cases[-1].tokens
            assert again.num_cached_tokens >= 128  # a cached prefix is used
            await on_npu.check_clean()

    asyncio.run(main())


def test_kv_gets_the_memory_that_a_profiling_run_leaves() -> None:
    async def main() -> None:
        options = {**ON_NPU, "num_kv_blocks": None, "memory_utilization": 0.08}
        async with cpu(TINY_LLAMA) as on_cpu, instance(TINY_LLAMA, **options) as on_npu:
            [case] = await clear_cases(on_cpu, (129,))
            assert (await ask(on_npu, case.prompt, FEW)).tokens == case.tokens

    asyncio.run(main())


def test_logits_are_changed_with_async_scheduling(monkeypatch: pytest.MonkeyPatch) -> None:
    check_changed_logits(TINY_LLAMA, monkeypatch, ON_NPU, tolerance=0.2)


def test_blocks_are_copied_and_swapped_through_pinned_memory() -> None:
    """Two answers to each of two prompts that nearly fill a block leave no space for second blocks.
    With a prefix cache, equal answers would share theirs. They are so long that they overlap even
    if the first one has begun before the last one is asked for."""

    async def main() -> None:
        cramped = {"num_kv_blocks": 6, "swap_space_bytes": 8 << 20, "prefix_caching": False}
        options, more = {**ON_NPU, **cramped}, replace(FEW, max_tokens=24)
        async with cpu(TINY_LLAMA) as on_cpu, instance(TINY_LLAMA, **options) as on_npu:
            cases = await clear_cases(on_cpu, (125, 126))
            twice = [case for case in cases for _ in range(2)]
            asked = [ask(on_npu, each.prompt, more, group=str(len(each.prompt))) for each in twice]
            found = await asyncio.gather(*asked)
            begun = [each.tokens[: FEW.max_tokens] for each in found]
            assert begun == [case.tokens for case in twice]
            assert on_npu.engine.stats().num_swap_outs > 0
            await on_npu.check_clean()

    asyncio.run(main())


@pytest.mark.parametrize(
    "options", [{}, {"ep_size": 2, "ep_dispatch_min_tokens": 20}], ids=["sliced", "divided"]
)
def test_two_ranks_over_hccl(models: dict[str, Path], options: dict[str, Any]) -> None:
    """With divided experts, expert layers are launched between captured graphs."""

    async def main() -> None:
        model = models["mixtral"]
        options_of_npu = {**ON_NPU, **options}
        async with cpu(model) as on_cpu, instance(model, tp_size=2, **options_of_npu) as on_npu:
            for case in await clear_cases(on_cpu, (17, 200)):
                assert (await ask(on_npu, case.prompt, FEW)).tokens == case.tokens

    asyncio.run(main())


@pytest.mark.parametrize(("how", "family", "sizes"), APART, ids=str)
def test_disaggregated_prefill_and_decode(
    models: dict[str, Path], how: str, family: str, sizes: tuple[int, int]
) -> None:
    """hccs transfers the KV, between processes if there are several ranks."""
    make, send = WAYS[how]
    sides = {"prefill": {"tp_size": sizes[0]}, "decode": {"tp_size": sizes[1]}}

    async def main() -> None:
        model = models[family]
        async with cpu(model) as on_cpu, make(model, **sides, **OVER_HCCS) as both:
            cases = await clear_cases(on_cpu, (17, 300))
            for case in cases:
                found = await send(both, case.prompt, FEW)
                assert found.tokens == case.tokens
            assert both.decode.stat("loads") == len(cases)
            assert both.decode.stat("load_failures") == 0
            await both.check_clean()

    asyncio.run(main())


@pytest.mark.parametrize("how", WAYS)
def test_stripes_are_transferred_as_whole_blocks(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two ranks' heads are joined on one rank: blocks are transferred whole, and the NPU scatters
    all of their tokens."""
    num_tokens: list[int] = []
    scatter = Scatterer.scatter

    def counted(scatterer: Scatterer, buffer: Tensor, targets: U64, sizes: U64, base: int) -> Wait:
        num_tokens.append(len(targets))
        return scatter(scatterer, buffer, targets, sizes, base)

    monkeypatch.setattr(Scatterer, "scatter", counted)
    make, send = WAYS[how]

    async def main() -> None:
        sides = {"prefill": {"tp_size": 2}, "decode": {"tp_size": 1}}
        async with cpu(TINY_LLAMA) as on_cpu, make(TINY_LLAMA, **sides, **OVER_HCCS) as both:
            for case in await clear_cases(on_cpu, (17, 300)):
                assert (await send(both, case.prompt, FEW)).tokens == case.tokens
            assert both.decode.stat("load_failures") == 0
            await both.check_clean()

    asyncio.run(main())
    planes_of_ranks = 2 * 4 * 2
    assert sum(num_tokens) == planes_of_ranks * (17 + 300)


def test_prefill_with_fewer_ranks_is_rejected() -> None:
    """D asks for recomputation because the KV can't be transferred, and names the reason."""

    async def main() -> None:
        sides = {"prefill": {"tp_size": 1}, "decode": {"tp_size": 2, "load_failure": "fail"}}
        async with cpu(TINY_LLAMA) as on_cpu, pair(TINY_LLAMA, **sides, **OVER_HCCS) as both:
            [case] = await clear_cases(on_cpu, (17,))
            found = await ask_pair(both, case.prompt, FEW)
            assert "hccs: it needs a tensor-parallel size of prefill that" in str(found.error)

    asyncio.run(main())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"block_size": 16}, r"block_size 16 was requested, backend 'ascend' supports \[128\]"),
        ({"dtype": "float32"}, "dtype 'float32' was requested"),
        ({"kv_layout": "LPBHT"}, "kernels support \\['LPBTH'\\]"),
    ],
)
def test_options_without_op_support_are_rejected(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        start(make_config(TINY_LLAMA, **{**ON_NPU, **options}))


@pytest.mark.parametrize(
    ("wanted", "name"),
    [
        ({"api_port": 15_100}, r"port 15100, wanted for the API \(--port\), lies in 15000-17000"),
        ({"port": 23_500}, r"port 23500, wanted for the KV side channel \(--kv-port\), lies in 20"),
        (
            {"port_range": PortRange(14_000, 15_000)},
            "ports 14000-15000, wanted for --kv-port-range",
        ),
    ],
)
def test_ports_that_the_transfer_engine_may_use_are_rejected(
    wanted: dict[str, Any], name: str
) -> None:
    with pytest.raises(PortInUse, match=name):
        start(make_config(TINY_LLAMA, Role.DECODE, **{**OVER_HCCS, **wanted}))


def test_latents_of_another_width_are_rejected(tmp_path: Path) -> None:
    model = write_model(tmp_path / "narrow", "deepseek_v3", dtype="bfloat16")
    with pytest.raises(
        ConfigError, match=r"\(48, 16\) wide, backend 'ascend' supports \[\(512, 64\)\]"
    ):
        start(make_config(model, **ON_NPU))
