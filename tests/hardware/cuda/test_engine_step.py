"""The engine's decode steps on a GPU: graphs, one wait per step, no driver allocations."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
import torch
from support.cuda_waits import watched
from support.decoding import Decoder
from support.pd import prompt_of, write_model

from mooncake_engine.config import EngineConfig
from mooncake_engine.execution.engine_plan import make_plan
from mooncake_engine.execution.executor import InProcessExecutor
from mooncake_engine.speculative_config import SpeculativeConfig, SpeculativeMethod
from mooncake_hal.backend import Backend

pytestmark = pytest.mark.cuda
AN_HOUR = int(os.environ.get("MOONCAKE_SOAK_STEPS", "120000"))
"""An hour of 30 ms steps, unless the environment sets the number of steps."""
HOST_SLACK_BYTES = 16 << 20
"""Allowed growth of the allocators' memory; a leak of 140 bytes per step exceeds it."""


@pytest.fixture(scope="module", params=["llama", "deepseek_v3"])
def executor(
    cuda: Backend, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[InProcessExecutor]:
    model = write_model(tmp_path_factory.mktemp("model"), request.param)
    config = EngineConfig(model, dtype="bfloat16", num_kv_blocks=256, max_num_seqs=4)
    with closing(InProcessExecutor(make_plan(config, cuda), cuda)) as loaded:
        loaded.warm_up()
        yield loaded


@pytest.fixture
def decoder(executor: InProcessExecutor) -> Iterator[Decoder]:
    with closing(Decoder(executor, [prompt_of(40, row) for row in range(4)], 128)) as made:
        for _ in range(3):
            made.step()
        yield made


def test_a_step_waits_once(decoder: Decoder) -> None:
    """A step waits once, for its tokens, which the scheduler needs."""
    steps = 20
    with watched() as waits:
        for _ in range(steps):
            decoder.step()
    assert len(waits) <= steps, waits[0]


def test_draft_model_passes_do_not_wait(cuda: Backend, tmp_path: Path) -> None:
    """All passes are launched before the host reads any of their tokens."""
    model, steps = write_model(tmp_path, "llama"), 10
    drafting = SpeculativeConfig(SpeculativeMethod.DRAFT, 3, model)
    config = EngineConfig(
        model, dtype="bfloat16", num_kv_blocks=256, max_num_seqs=4, speculative_config=drafting
    )
    with closing(InProcessExecutor(make_plan(config, cuda), cuda)) as loaded:
        loaded.warm_up()
        prompts = [prompt_of(40, row) for row in range(4)]
        with closing(Decoder(loaded, prompts, 128, num_draft_tokens=3)) as made:
            for _ in range(3):
                made.step()
            with watched() as waits:
                for _ in range(steps):
                    made.step()
    assert len(waits) <= 2 * steps, waits[0]  # of sampled and of draft tokens


def test_a_step_allocates_no_driver_memory(decoder: Decoder) -> None:
    before = torch.cuda.memory_stats()["num_device_alloc"]
    for _ in range(200):
        decoder.step()
    assert torch.cuda.memory_stats()["num_device_alloc"] == before


@pytest.mark.timeout(900)
def test_memory_is_flat_over_an_hour(decoder: Decoder) -> None:
    for _ in range(1000):
        decoder.step()
    torch.cuda.synchronize()
    free, _ = torch.cuda.mem_get_info()
    held, resident = torch.cuda.memory_allocated(), resident_bytes()
    for _ in range(AN_HOUR):
        decoder.step()
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() == held
    assert torch.cuda.mem_get_info()[0] == free
    assert resident_bytes() < resident + HOST_SLACK_BYTES


def resident_bytes() -> int:
    """The process' resident host memory."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()
