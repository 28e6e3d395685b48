"""``--quantization fp8`` on interpreted kernels is bit-identical to the same model quantised
beforehand, on one rank and on two. Two ranks are threads."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from support.cuda_emulation import emulated_backend, load_ipc
from support.forward_steps import run
from support.fp8_checkpoints import even_halves, write_fp8
from support.pd import GREEDY, ask, ask_pair, instance, pair, prompt_of, write_model
from support.thread_ranks import on_ranks
from torch import Tensor

from mooncake_engine.models.catalog import read_model_config
from mooncake_engine.models.fp8_weights import Fp8Linears
from mooncake_engine.models.layers import ParallelContext
from mooncake_engine.models.quantization_config import FP8_ON_LOAD, Fp8Config
from mooncake_hal.backend import Communicator
from mooncake_hal.specs import Availability
from mooncake_hal_cuda import cuda_plugin

SHAPE = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 1}
SHAPE |= {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 128}
FIELDS: dict[str, dict[str, Any]] = {
    "llama": SHAPE,
    "qwen3_moe": {
        **SHAPE,
        "moe_intermediate_size": 256,
        "num_experts": 4,
        "num_experts_per_tok": 2,
    },
}
FEW = replace(GREEDY, max_tokens=3, logprobs=2)


@pytest.fixture(autouse=True)
def emulated(monkeypatch: pytest.MonkeyPatch) -> None:
    """The plugin loads the emulated device."""
    monkeypatch.setattr(cuda_plugin, "probe", lambda: Availability(True, "emulated"))
    monkeypatch.setattr(cuda_plugin, "load", emulated_backend)
    monkeypatch.setattr(cuda_plugin, "load_ipc", load_ipc)


@pytest.fixture(scope="module", params=FIELDS)
def models(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Path]:
    """A model, and the same model quantised beforehand with scales that two ranks also compute."""
    folder, family = tmp_path_factory.mktemp(request.param), request.param
    plain = write_model(folder / "plain", family, **FIELDS[family], dtype="bfloat16")
    return plain, write_fp8(even_halves(plain), folder / "model", "channel")[0]


def test_tokens_equal_those_of_the_model_quantised_beforehand(
    models: tuple[Path, Path], caplog: pytest.LogCaptureFixture
) -> None:
    """Including log probabilities, which differ without quantisation."""

    async def tokens(model: Path, **options: Any) -> tuple[list[int], list[Any]]:
        async with instance(model, backend="cuda", **options) as single:
            answer = await ask(single, prompt_of(5), FEW)
            return answer.tokens, answer.logprobs

    plain, quantised = models
    found = asyncio.run(tokens(plain, quantization="fp8"))
    assert found == asyncio.run(tokens(quantised))
    assert found == asyncio.run(tokens(quantised, quantization="fp8"))  # no effect here
    assert found[1] != asyncio.run(tokens(plain))[1]
    assert "quantised" not in caplog.text


def test_peers_with_different_quantization_are_reported(
    models: tuple[Path, Path], caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        options = {"backend": "cuda", "transports": ("cuda_ipc",), "transfer_timeout_s": 120.0}
        quantising = {"quantization": "fp8"}
        async with pair(models[0], prefill=quantising, lease_s=60.0, **options) as both:
            assert (await ask_pair(both, prompt_of(5), FEW)).error is None
            assert both.decode.stat("loads") == 1

    with caplog.at_level(logging.INFO):
        asyncio.run(main())
    assert "linear layers: on unquantised weights here, in fp8, quantised on load there" in (
        caplog.text
    )


def test_logits_of_two_ranks_equal_those_of_the_model_quantised_beforehand(
    models: tuple[Path, Path],
) -> None:
    """Rows whose columns are divided have scales per rank, which are equal here."""

    def logits(model: Path, config: Fp8Config, group: Communicator) -> list[Tensor]:
        kept = Fp8Linears(config, keeps_experts=True)
        alone = ParallelContext(
            emulated_backend().ops, torch.device("cpu"), torch.float32, quantization=kept
        )
        return run(model, replace(alone, communicator=group))[0]

    plain, quantised = models
    config = read_model_config(quantised).quantization
    assert config is not None
    ranks = ((plain, FP8_ON_LOAD), (quantised, config))
    on_load, beforehand = (on_ranks(2, partial(logits, *each)) for each in ranks)
    for found, wanted in zip(on_load, beforehand, strict=True):
        assert all(torch.equal(*both) for both in zip(found, wanted, strict=True))
