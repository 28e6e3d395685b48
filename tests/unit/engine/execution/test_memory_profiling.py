"""Memory profiling: the profiled steps are the largest possible, and graphs are counted."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.checkpoints import random_model, write_checkpoint

from mooncake_engine.config import EngineConfig
from mooncake_engine.errors import ConfigError
from mooncake_engine.execution.engine_plan import EnginePlan, make_plan
from mooncake_engine.execution.memory_profiling import (
    largest_steps,
    measure_peak,
    memory_for_kv,
    profiling_kv_cache_size,
)
from mooncake_engine.scheduling.step_plan import StepPlan
from mooncake_engine.speculative_config import SpeculativeConfig, SpeculativeMethod
from mooncake_hal.backend import MemoryInfo
from mooncake_hal.registry import Registry


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(random_model("llama"), tmp_path_factory.mktemp("llama"))


def plan_of(model: Path, **options: Any) -> EnginePlan:
    config = EngineConfig(model, memory_utilization=0.5, **options)
    return make_plan(config, Registry.discover().select_backend("cpu"))


def counts_of(plan: StepPlan) -> list[int]:
    return [sequence.count for sequence in plan.sequences]


@pytest.mark.parametrize(
    ("num_tokens", "num_seqs", "counts"),
    [
        (10, 3, [4, 3, 3]),
        (511, 256, [2] * 255 + [1]),
        (4096, 300, [14] * 196 + [13] * 104),
        (3, 256, [1, 1, 1]),
    ],
)
def test_largest_step_uses_the_whole_token_budget(
    num_tokens: int, num_seqs: int, counts: list[int], model: Path
) -> None:
    plan = plan_of(model, max_num_batched_tokens=num_tokens, max_num_seqs=num_seqs)
    prompts, decodes, _ = largest_steps(plan)
    assert counts_of(prompts) == counts
    assert prompts.num_tokens == num_tokens
    assert counts_of(decodes) == [1] * len(counts)
    capacity = profiling_kv_cache_size(plan).num_blocks * 16
    assert all(sequence.count < capacity for sequence in prompts.sequences)


def test_sequences_of_the_largest_step_fit_max_model_len(model: Path) -> None:
    plan = plan_of(model, max_num_batched_tokens=4096, max_num_seqs=8, max_model_len=128)
    prompts, *_ = largest_steps(plan)
    assert counts_of(prompts) == [127] * 8, "each also generates one token"


def test_one_decode_has_the_longest_possible_context(model: Path) -> None:
    plan = plan_of(model, max_num_batched_tokens=16, max_num_seqs=4, max_model_len=256)
    _, decodes, _ = largest_steps(plan)
    assert [sequence.start for sequence in decodes.sequences] == [254, 4, 4, 4]
    assert len(decodes.new_requests[0].block_ids) == 16, "attention allocates all its splits"
    num_blocks = profiling_kv_cache_size(plan).num_blocks
    assert max(max(request.block_ids) for request in decodes.new_requests) < num_blocks


@pytest.mark.parametrize(("num_tokens", "start", "count"), [(16, 239, 16), (512, 0, 255)])
def test_last_chunk_of_the_longest_prompt_is_profiled(
    num_tokens: int, start: int, count: int, model: Path
) -> None:
    plan = plan_of(model, max_num_batched_tokens=num_tokens, max_num_seqs=4, max_model_len=256)
    *_, chunk = largest_steps(plan)
    assert [(each.start, each.count) for each in chunk.sequences] == [(start, count)]
    num_blocks = profiling_kv_cache_size(plan).num_blocks
    assert max(chunk.new_requests[0].block_ids) < num_blocks


def test_drafts_fill_the_token_budget(model: Path) -> None:
    speculation = SpeculativeConfig(SpeculativeMethod.NGRAM, 4)
    plan = plan_of(model, max_num_batched_tokens=17, max_num_seqs=8)
    config = replace(plan.config, speculative_config=speculation)
    *_, drafted = largest_steps(replace(plan, config=config))
    assert [s.num_draft_tokens for s in drafted.sequences] == [4, 4, 4, 1]
    assert drafted.num_tokens == 17


@dataclass
class Device:
    """A device that tracks the bytes allocated, and their peak."""

    taken: int = 0
    peak: int = 0
    kind: str = "meta"

    def take(self, nbytes: int) -> None:
        self.taken += nbytes
        self.peak = max(self.peak, self.taken)

    def device(self, index: int) -> torch.device:
        return torch.device(self.kind)

    def reset_peak(self, index: int) -> None:
        self.peak = self.taken

    def peak_bytes(self, index: int) -> int:
        return self.peak

    def synchronize(self, index: int) -> None:
        pass

    def memory_info(self, index: int) -> MemoryInfo:
        return MemoryInfo(10_000 - self.taken, 10_000)


@dataclass
class Graphs:
    """Graphs of which the first allocates a step's memory, and each other one a little more."""

    device: Device
    num_sizes: int
    first: int
    other: int
    captured: list[int] = field(default_factory=list)

    def capture(self, max_sizes: int | None = None) -> int:
        for index in range(self.num_sizes)[:max_sizes]:
            if index not in self.captured:
                self.captured.append(index)
                self.device.take(self.other if index else self.first)
        return self.num_sizes - len(self.captured)


class Runner:
    """A runner that allocates memory while a step runs."""

    def __init__(self, device: Device, step_bytes: int) -> None:
        self.device, self.step_bytes = device, step_bytes

    def run(self, plan: StepPlan) -> None:
        self.device.take(self.step_bytes)
        self.device.taken -= self.step_bytes


@pytest.mark.parametrize("kind", ["meta", "cpu"])
def test_graphs_are_added_to_the_memory_of_steps(kind: str) -> None:
    device = Device(taken=1000, kind=kind)
    kinds = [Graphs(device, 10, first=600, other=5), Graphs(device, 1, first=70, other=0)]
    runner: Any = Runner(device, 200)
    runtime: Any = device
    assert measure_peak(runner, [StepPlan(0)], kinds, runtime, 0) == 1000 + 645 + 70
    assert len(kinds[0].captured) == (10 if kind == "cpu" else 2)


def test_step_larger_than_the_graphs_is_the_peak() -> None:
    device = Device(taken=1000)
    runner: Any = Runner(device, 5000)
    runtime: Any = device
    assert measure_peak(runner, [StepPlan(0)], [], runtime, 0) == 6000


@dataclass
class SharedDevice:
    """A device of 64,000 bytes, of which other processes leave some free."""

    free: int

    def devices(self) -> list[int]:
        return [0]

    def memory_info(self, index: int) -> MemoryInfo:
        return MemoryInfo(self.free, 64_000)


def test_kv_leaves_memory_free_where_other_processes_hold_more_than_expected(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Libraries allocate beyond the measured peak: with the last byte taken, the first step of an
    unusual size ended the instance."""
    config = EngineConfig(Path("model"), memory_utilization=0.5)
    runtime: Any = SharedDevice(free=50_000)
    assert memory_for_kv(config, runtime, 0, peak_bytes=2_000) == 30_000
    assert not caplog.records
    runtime = SharedDevice(free=20_000)
    assert memory_for_kv(config, runtime, 0, peak_bytes=2_000) == 19_000
    [warning] = caplog.records
    assert "other processes hold memory that memory_utilization 0.5 counts on" in warning.message
    runtime = SharedDevice(free=1_000)
    with pytest.raises(ConfigError, match="end what else uses it"):
        memory_for_kv(config, runtime, 0, peak_bytes=2_000)
    with pytest.raises(ConfigError, match=r"memory_utilization 0\.5 allows"):
        memory_for_kv(config, runtime, 0, peak_bytes=32_000)
