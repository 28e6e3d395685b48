"""Steps with prompts, replayed as piecewise graphs on a GPU, give the launched steps' results.

All graphs share one memory pool: a graph's outputs for the next one must survive those in between.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.core_runs import run_load
from support.pd import prompt_of, write_model

from mooncake_engine.messages import EngineRequest
from mooncake_engine.sampling_params import SamplingParams

pytestmark = pytest.mark.cuda
GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
LENGTHS = (5, 5, 40, 130, 200, 260)


@pytest.mark.parametrize("family", ["llama", "mixtral", "deepseek_v3"])
def test_replayed_prompts_give_the_tokens_of_launched_ones(tmp_path: Path, family: str) -> None:
    model = write_model(tmp_path, family)
    requests = [
        EngineRequest(f"r{index}", prompt_of(length, index), GREEDY)
        for index, length in enumerate(LENGTHS)
    ]
    options: dict[str, Any] = {
        "backend": "cuda",
        "dtype": "float32",  # exact, so that no rounding depends on the number of tokens
        "max_num_seqs": 6,
        "max_num_batched_tokens": 256,
        "num_kv_blocks": 128,
    }
    launched = run_load(model, requests, enforce_eager=True, **options)
    replayed = run_load(model, requests, **options)
    assert replayed.answers == launched.answers
