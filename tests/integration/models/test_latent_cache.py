"""Latents give the same tokens in every layout, block size and batch."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.checkpoints import random_model, write_checkpoint
from support.stepping import RunningRequest, Stepper

from mooncake_engine.config import EngineConfig
from mooncake_engine.execution.engine_plan import make_plan
from mooncake_engine.execution.executor import InProcessExecutor
from mooncake_hal.backend import Backend
from mooncake_hal.kv.layout import KV_LAYOUTS
from mooncake_hal.registry import Registry
from mooncake_hal_cpu.torch_ops import TorchOps

PROMPT = tuple(range(60, 150))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(random_model("deepseek_v3"), tmp_path_factory.mktemp("deepseek_v3"))


@pytest.fixture(scope="module")
def alone(checkpoint: Path, backend: Backend) -> list[int]:
    return answer(EngineConfig(checkpoint, num_kv_blocks=64), backend)


def answer(config: EngineConfig, backend: Backend, *noise: int, chunk: int = 64) -> list[int]:
    """The answer's tokens when the prompt runs in a batch with prompts of these lengths."""
    executor = InProcessExecutor(make_plan(config, backend), backend)
    try:
        executor.warm_up()
        others = [RunningRequest(f"noise{length}", tuple(range(length))) for length in noise]
        requests = [*others[:1], RunningRequest("r", PROMPT), *others[1:]]
        return Stepper(executor, chunk).generate(requests)[1 if noise else 0]
    finally:
        executor.close()


@pytest.mark.parametrize("layout", sorted(KV_LAYOUTS))
@pytest.mark.parametrize("block_size", [4, 32])
def test_same_tokens_in_every_layout_and_block_size(
    layout: str, block_size: int, checkpoint: Path, backend: Backend, alone: list[int]
) -> None:
    config = EngineConfig(checkpoint, num_kv_blocks=64, kv_layout=layout, block_size=block_size)
    assert answer(config, backend) == alone


@pytest.mark.parametrize("chunk", [7, 40])
def test_same_tokens_in_batch_and_alone(
    chunk: int, checkpoint: Path, backend: Backend, alone: list[int]
) -> None:
    config = EngineConfig(checkpoint, num_kv_blocks=64)
    assert answer(config, backend, 1, 7, 70, chunk=chunk) == alone


def test_same_tokens_without_kernel(
    checkpoint: Path, alone: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MOONCAKE_HAL_CPU_NATIVE", "0")
    backend = Registry.discover().select_backend("cpu")
    assert type(backend.ops) is TorchOps
    assert answer(EngineConfig(checkpoint, num_kv_blocks=64), backend) == alone
