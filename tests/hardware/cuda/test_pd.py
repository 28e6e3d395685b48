"""Prefill and decode apart: two processes of one GPU, a GPU beside a CPU, and transformers."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import torch
from support.pd import GREEDY, ask, ask_pair, instance, pair, prompt_of, write_model
from support.pd_processes import serving

pytestmark = pytest.mark.cuda
LENGTHS = (5, 64, 300)
ON_GPU = ("--backend", "cuda", "--dtype", "float32", "--transport")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


async def greedy(model: Path, **options: object) -> list[list[int]]:
    """What one instance says."""
    async with instance(model, dtype="float32", **options) as single:
        return [(await ask(single, prompt_of(length))).tokens for length in LENGTHS]


def test_the_gpu_says_what_the_cpu_says(model: Path) -> None:
    """In float32, where both are the reference's to the last bits that matter."""
    assert asyncio.run(greedy(model, backend="cuda")) == asyncio.run(greedy(model))


def test_the_gpu_says_what_transformers_says(model: Path) -> None:
    from transformers import AutoModelForCausalLM

    theirs = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    theirs.generation_config.eos_token_id = None  # an answer goes on behind it, as ours does
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
def test_two_processes_say_what_one_says(model: Path, transport: str) -> None:
    async def main() -> None:
        expected = await greedy(model, backend="cuda")
        on_gpu = {"backend": "cuda", "dtype": "float32", "transports": (transport,)}
        with serving(model, "prefill", *ON_GPU, transport) as prefill:
            async with pair(model, **on_gpu) as both:
                for length, tokens in zip(LENGTHS, expected, strict=True):
                    params = await prefill.prefill(prompt_of(length))
                    found = await ask(both.decode, prompt_of(length), params=params)
                    assert found.tokens == tokens
                assert both.decode.stat("loads") == len(LENGTHS)
                assert both.decode.stat("load_failures") == 0

    asyncio.run(main())


@pytest.mark.parametrize("kinds", [("cuda", "cpu"), ("cpu", "cuda")], ids="-to-".join)
def test_a_gpu_and_a_cpu_say_what_one_says(model: Path, kinds: tuple[str, str]) -> None:
    async def main() -> None:
        expected = await greedy(model)
        first, second = ({"backend": kind} for kind in kinds)
        options = {"dtype": "float32", "transports": ("staged",)}
        async with pair(model, prefill=first, decode=second, **options) as both:
            for length, tokens in zip(LENGTHS, expected, strict=True):
                assert (await ask_pair(both, prompt_of(length))).tokens == tokens
            assert both.decode.stat("load_failures") == 0

    asyncio.run(main())
