"""Disaggregated prefill and decode: processes on one GPU and on several, and a GPU with a CPU."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.metaserver import metaserver
from support.pd import (
    GREEDY,
    Instance,
    ask,
    instance,
    prompt_of,
    write_model,
)
from support.pd_processes import Served, body_of, serving
from support.push import LAYERWISE, WAYS

from mooncake_engine.config import Role
from mooncake_hal.backend import Backend
from mooncake_kv.params import KVTransferDict

pytestmark = [pytest.mark.cuda, pytest.mark.timeout(600)]
LENGTHS = (5, 64, 300)
EXACT = {"dtype": "float32"}
PULL = "MooncakeConnector"
SIDES = [("2", "1"), ("1", "2"), ("2x1", "1"), ("2x1", "2")]
HOWS = pytest.mark.parametrize("how", WAYS)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


async def greedy(model: Path, **options: Any) -> list[list[int]]:
    """A single instance's answers."""
    async with instance(model, **{**EXACT, **options}) as single:
        return [(await ask(single, prompt_of(length))).tokens for length in LENGTHS]


async def ask_both(
    prefill: Served, decode: Instance, prompt: tuple[int, ...], connector: str
) -> list[int]:
    """The decode instance's answer to a prompt that another process prefills."""
    if connector == PULL:
        return (await ask(decode, prompt, params=await prefill.prefill(prompt))).tokens

    async def dispatch(key: str, params: KVTransferDict) -> None:
        await prefill.complete(body_of(prompt, replace(GREEDY, max_tokens=1), params))

    async with metaserver(dispatch) as server:
        params = {"do_remote_prefill": True, "do_remote_decode": False}
        return (await ask(decode, prompt, params=params | {"metaserver": server.url("k")})).tokens


def test_gpu_and_cpu_give_the_same_tokens(model: Path) -> None:
    """In float32, in which both differ from the reference by rounding only."""
    assert asyncio.run(greedy(model, backend="cuda")) == asyncio.run(greedy(model))


def test_gpu_and_transformers_give_the_same_tokens(model: Path) -> None:
    from transformers import AutoModelForCausalLM

    theirs = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    theirs.generation_config.eos_token_id = None  # generation continues after it, as in our engine
    expected = []
    for length in LENGTHS:
        prompt = torch.tensor([prompt_of(length)])
        found = theirs.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            do_sample=False,
            max_new_tokens=GREEDY.max_tokens,
        )
        expected.append(found[0, length:].tolist())
    assert asyncio.run(greedy(model, backend="cuda")) == expected


@pytest.mark.parametrize("transport", ["cuda_ipc", "staged"])
@pytest.mark.parametrize("connector", [PULL, LAYERWISE])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_two_processes_give_the_tokens_of_one(
    model: Path, monkeypatch: pytest.MonkeyPatch, dtype: str, connector: str, transport: str
) -> None:
    """Token for token, in bfloat16 too, since all of them run the same kernels."""
    monkeypatch.setenv("MOONCAKE_HAL_CUDA_ATTENTION", "triton")
    of_prefill = ("--backend", "cuda", "--dtype", dtype, "--transport", transport)
    on_gpu = {"backend": "cuda", "dtype": dtype}
    of_decode = {**on_gpu, "connector": connector, "transports": (transport,)}

    async def main() -> None:
        expected = await greedy(model, **on_gpu)
        with serving(model, "prefill", "--kv-connector", connector, *of_prefill) as prefill:
            async with instance(model, Role.DECODE, **of_decode) as decode:
                for length, tokens in zip(LENGTHS, expected, strict=True):
                    prompt = prompt_of(length)
                    assert await ask_both(prefill, decode, prompt, connector) == tokens
                assert decode.stat("loads") == len(LENGTHS)
                assert decode.stat("load_failures") == 0

    asyncio.run(main())


@HOWS
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("kinds", [("cuda", "cpu"), ("cpu", "cuda")], ids="-to-".join)
def test_pair_of_gpu_and_cpu_gives_the_tokens_of_one(
    model: Path, kinds: tuple[str, str], ranks: int, how: str
) -> None:
    """The CPU instance may have more ranks than the GPU instance."""
    sizes = {"cpu": {"backend": "cpu", "tp_size": ranks}, "cuda": {"backend": "cuda"}}
    check_pair(model, how, *(sizes[kind] for kind in kinds), transport="staged")


@HOWS
@pytest.mark.multi_device
@pytest.mark.parametrize(
    "sides", [("2", "1"), ("1", "2"), ("2x1", "1"), ("2x1", "2")], ids="-".join
)
def test_ranks_on_several_gpus_give_the_tokens_of_one(
    cuda: Backend, model: Path, sides: tuple[str, str], how: str
) -> None:
    """Tensor-parallel ranks over NCCL, and pipeline stages (as ``stages x ranks``)."""
    count = len(cuda.runtime.devices())
    if count < 2:
        pytest.skip(f"needs two GPUs, this machine shows {count}")
    prefill, decode = ({"backend": "cuda", **ranks_of(side)} for side in sides)
    check_pair(model, how, prefill, decode, transport="cuda_ipc")


def ranks_of(side: str) -> dict[str, int]:
    """The options of ``"2"`` ranks, or of ``"2x1"``: two stages of one rank."""
    stages, _, ranks = side.rpartition("x")
    return {"pp_size": int(stages or 1), "tp_size": int(ranks)}


def check_pair(
    model: Path, how: str, prefill: dict[str, Any], decode: dict[str, Any], transport: str
) -> None:
    """Check that the pair answers as the CPU alone does, and that D computes no prompt."""
    make, send = WAYS[how]

    async def main() -> None:
        expected = await greedy(model)
        options = {**EXACT, "transports": (transport,)}
        async with make(model, prefill=prefill, decode=decode, **options) as both:
            for length, tokens in zip(LENGTHS, expected, strict=True):
                assert (await send(both, prompt_of(length))).tokens == tokens
            assert both.decode.stat("loads") == len(LENGTHS)
            assert both.decode.stat("load_failures") == 0

    asyncio.run(main())
