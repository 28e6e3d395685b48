"""Time between tokens of 32 decodes while prompts of 2,000 tokens are prefilled on the same
instance.

This is the load of a decode instance without prefill instances: with a TBT target, and without. All
of it is measured in one run, next to the same decodes alone.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import pytest
from support.checkpoints import MEDIUM, random_model, write_checkpoint
from support.core_runs import random_prompt
from support.figures import Figure, record

from mooncake_engine.assembly import build_engine
from mooncake_engine.config import EngineConfig
from mooncake_engine.core import EngineCore
from mooncake_engine.core_messages import AddRequest
from mooncake_engine.messages import EngineRequest
from mooncake_engine.sampling_params import SamplingParams

DECODES = 32
PROMPT_TOKENS = 2000
PROMPTS = 2
WARM_UP, ALONE = 5, 40
"""Decode-only steps: for warm-up, and measured."""
ENDLESS = SamplingParams(temperature=0.0, max_tokens=None, ignore_eos=True)
ONE = replace(ENDLESS, max_tokens=1)


class Decodes:
    """A core with 32 endless requests.

    Args:
        config: the engine's.

    Attributes:
        gaps: seconds between consecutive tokens of a request, over all requests.
    """

    def __init__(self, config: EngineConfig) -> None:
        self.core: EngineCore = build_engine(config).core
        self.gaps: list[float] = []
        self._last: dict[str, float] = {}
        for index in range(DECODES):
            self.core.post(AddRequest(EngineRequest(f"d{index}", random_prompt(index), ENDLESS)))
        self.run(lambda: len(self._last) < DECODES)

    def run(self, should_continue: Callable[[], bool]) -> set[str]:
        """Run a step; returns the finished requests."""
        ended: set[str] = set()
        while should_continue():
            updates, now = self.core.step(), time.perf_counter()
            for update in updates:
                if update.request_id.startswith("d") and update.token_ids:
                    if update.request_id in self._last:
                        self.gaps.append(now - self._last[update.request_id])
                    self._last[update.request_id] = now
                elif update.finish is not None:
                    ended.add(update.request_id)
        return ended

    def alone(self, num_steps: int) -> float:
        """The median gap over this many steps."""
        steps = iter(range(num_steps))
        self.gaps.clear()
        self.run(lambda: next(steps, None) is not None)
        return median(self.gaps)

    def under_pressure(self) -> float:
        """The 99th percentile of gaps while prompts run one after another."""
        self.gaps.clear()
        for number in range(PROMPTS):
            name, left = f"p{number}", [True]
            prompt = random_prompt(1000 + number, PROMPT_TOKENS)
            self.core.post(AddRequest(EngineRequest(name, prompt, ONE)))
            while left:
                once = iter([True])
                if name in self.run(lambda once=once: next(once, False)):  # type: ignore[misc]  # bound now
                    left.clear()
        return quantiles(self.gaps, n=100)[98]


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> EngineConfig:
    model = random_model("llama", **{**MEDIUM, "max_position_embeddings": 4096})
    directory: Path = write_checkpoint(model, tmp_path_factory.mktemp("llama"))
    return EngineConfig(directory, num_kv_blocks=2000, prefix_caching=False, min_prefill_chunk=16)


def test_time_between_tokens_while_prompts_run(benchmark: Any, config: EngineConfig) -> None:
    unbounded = Decodes(config)
    unbounded.alone(WARM_UP)
    step_alone = unbounded.alone(ALONE)
    without = unbounded.under_pressure()
    unbounded.core.close()
    bounded = Decodes(replace(config, target_tbt_ms=1.5e3 * step_alone))
    bounded.alone(WARM_UP)
    step_alone = median([step_alone, bounded.alone(ALONE)])
    kept = bounded.under_pressure()
    benchmark.pedantic(bounded.alone, (1,), rounds=2)
    bounded.core.close()
    context = (
        f"P99 {1e3 * kept:.0f} ms with a target of 1.5 steps, {1e3 * without:.0f} ms without; "
        f"{1e3 * step_alone:.1f} ms for a step of {DECODES} decodes alone"
    )
    name = f"engine: TBT of {DECODES} decodes beside prompts of {PROMPT_TOKENS} tokens"
    figure = Figure(name, kept / step_alone, 2.0, "times", at_least=False, context=context)
    record(benchmark, figure)
