"""A worker for vLLM's CPU build whose device is pretended, as our backend ``paced`` has it.

    PYTHONPATH=ci VLLM_PACED_STEP_MS=16 vllm serve ... --worker-cls vllm_paced_worker.PacedWorker

Scheduler, API and text are vLLM's own; a step takes as long as it is told to and every request that
is part of it gets a token. Prompts have to fit into one step.
"""

from __future__ import annotations

import os
import time

from vllm.v1.core.sched.output import GrammarOutput, SchedulerOutput
from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT, ModelRunnerOutput
from vllm.v1.worker.cpu_worker import CPUWorker
from vllm.v1.worker.worker_base import CompilationTimes

TOKEN_ID = 70  # any that has a text


class PacedWorker(CPUWorker):
    """Loads the model as ever, and never runs it."""

    _scheduled: list[str]

    def compile_or_warm_up_model(self) -> CompilationTimes:
        self._step_s = float(os.environ["VLLM_PACED_STEP_MS"]) / 1e3
        self._free_at = 0.0
        return super().compile_or_warm_up_model()

    def execute_model(self, scheduler_output: SchedulerOutput) -> ModelRunnerOutput | None:
        self._scheduled = [*scheduler_output.num_scheduled_tokens]
        if not self._scheduled:
            return EMPTY_MODEL_RUNNER_OUTPUT
        self._free_at = max(time.perf_counter(), self._free_at) + self._step_s
        return None

    def sample_tokens(self, grammar_output: GrammarOutput | None) -> ModelRunnerOutput:
        time.sleep(max(0.0, self._free_at - time.perf_counter()))
        return ModelRunnerOutput(
            req_ids=self._scheduled,
            req_id_to_index={name: index for index, name in enumerate(self._scheduled)},
            sampled_token_ids=[[TOKEN_ID]] * len(self._scheduled),
        )
