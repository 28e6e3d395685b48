"""A first short step launches only kernels that the warm-up steps have already launched."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.cuda_emulation import emulated_backend
from support.pd import write_model
from support.stepping import RunningRequest, Stepper
from triton.runtime.interpreter import GridExecutor

from mooncake_engine.config import EngineConfig
from mooncake_engine.execution.engine_plan import make_plan
from mooncake_engine.execution.executor import InProcessExecutor
from mooncake_engine.execution.model_runner import CompletedStep
from mooncake_engine.execution.warm_up import WARM_UP, warm_up_requests
from mooncake_engine.sampling_params import SamplingParams
from mooncake_engine.scheduling.step_plan import StepPlan
from mooncake_hal_cuda.cuda_ops import CudaOps

Launch = tuple[object, ...]
"""A kernel, its tensors' dtypes and its compile-time arguments: a compilation's key."""
FEW = SamplingParams(temperature=0.0, max_tokens=3)


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> set[Launch]:
    """All launches so far; the test clears it."""
    found: set[Launch] = set()
    launch = GridExecutor.__call__

    def record(self: GridExecutor, *args: Any, **options: Any) -> None:
        types = tuple(arg.dtype for arg in args if isinstance(arg, torch.Tensor))
        found.add((self.fn.__name__, types, tuple(sorted(options.items(), key=str))))
        launch(self, *args, **options)

    monkeypatch.setattr(GridExecutor, "__call__", record)
    return found


@pytest.fixture
def replays(monkeypatch: pytest.MonkeyPatch, launches: set[Launch]) -> None:
    """Steps with decodes only are not counted, as if they were replayed from graphs."""

    def forgetting(execute_model: Callable[..., Any]) -> Callable[..., Any]:
        def run(self: InProcessExecutor, plan: StepPlan) -> Any:
            before = set(launches)
            result = execute_model(self, plan).result()
            if all(sequence.count == 1 for sequence in plan.sequences):
                launches.intersection_update(before)
            return CompletedStep(result)

        return run

    replaying = forgetting(InProcessExecutor.execute_model)
    monkeypatch.setattr(InProcessExecutor, "execute_model", replaying)


@pytest.mark.usefixtures("replays")
@pytest.mark.parametrize("family", ["llama", "deepseek_v3"])
def test_a_short_decode_beside_a_prompt_compiles_nothing(
    tmp_path: Path, launches: set[Launch], family: str
) -> None:
    backend = emulated_backend()
    config = EngineConfig(write_model(tmp_path / "model", family), num_kv_blocks=32)
    plan = make_plan(config, backend)
    assert isinstance(backend.ops, CudaOps)
    executor = InProcessExecutor(plan, backend)
    try:
        launches.clear()
        for steps in warm_up_requests(plan, executor.info.num_blocks, compiles=True):
            if steps[0].num_tokens > 64:  # longer prompts take long in the interpreter
                break
            for step in steps:
                executor.execute_model(step).result()
            begun = [new.request_id for step in steps for new in step.new_requests]
            executor.execute_model(StepPlan(0, removed=tuple(begun))).result()
        assert WARM_UP in begun
        warm = set(launches)
        launches.clear()
        first = RunningRequest("first", tuple(range(20)), FEW)
        second = RunningRequest("second", tuple(range(37)), FEW)
        Stepper(executor, chunk=24).generate([first, second])
        assert launches
        assert launches <= warm, {launch[0] for launch in launches - warm}
    finally:
        executor.close()
