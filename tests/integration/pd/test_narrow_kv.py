"""fp8 KV: half the memory, the same tokens from one instance and from a pair, and scales from the
checkpoint."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.pd import ask, ask_pair, instance, pair, prompt_of, write_model

LENGTHS = (5, 64, 130)
NARROW = {"kv_cache_dtype": "fp8", "dtype": "float32"}


async def answers(model: Path, **options: object) -> list[list[int]]:
    async with instance(model, **options) as single:
        return [(await ask(single, prompt_of(length))).tokens for length in LENGTHS]


@pytest.mark.parametrize("family", ["llama", "deepseek_v3"])
def test_pair_gives_tokens_of_single_instance(tmp_path: Path, family: str) -> None:
    model = write_model(tmp_path, family)

    async def main() -> None:
        expected = await answers(model, **NARROW)
        async with pair(model, decode={"block_size": 32}, **NARROW) as both:
            for length, tokens in zip(LENGTHS, expected, strict=True):
                assert (await ask_pair(both, prompt_of(length))).tokens == tokens
            assert both.decode.stat("loads") == len(LENGTHS)
            assert both.decode.stat("load_failures") == 0
            await both.check_clean()

    asyncio.run(main())


def test_checkpoint_scale_preserves_large_keys(tmp_path: Path) -> None:
    """Keys beyond the fp8 range are clipped without the scale in their checkpoint."""
    plain, large, scaled = (write_model(tmp_path / name) for name in ("plain", "large", "scaled"))
    weights = load_file(plain / "model.safetensors")
    for name, weight in weights.items():
        # attention scores stay the same: keys a thousand times as large, queries as much smaller
        factor = {"k_proj.weight": 1024.0, "q_proj.weight": 1 / 1024}
        weights[name] = weight * factor.get(".".join(name.split(".")[-2:]), 1.0)
    save_file(weights, large / "model.safetensors", {"format": "pt"})
    scales = {f"model.layers.{i}.self_attn.k_scale": torch.tensor(1024.0) for i in range(2)}
    save_file(weights | scales, scaled / "model.safetensors", {"format": "pt"})

    async def main() -> None:
        expected = await answers(plain, **NARROW)
        assert await answers(scaled, **NARROW) == expected
        assert await answers(large, **NARROW) != expected
        assert await answers(scaled, dtype="float32") == await answers(plain, dtype="float32")

    asyncio.run(main())
