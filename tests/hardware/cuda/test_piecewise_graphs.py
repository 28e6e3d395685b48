"""Steps with prompts, replayed in pieces on a GPU, say what launched ones say.

All graphs share one pool of memory: what one leaves for the next must outlive those between.
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
def test_replayed_prompts_say_what_launched_ones_say(tmp_path: Path, family: str) -> None:
    model = write_model(tmp_path, family)
    requests = [
        EngineRequest(f"r{index}", prompt_of(length, index), GREEDY)
        for index, length in enumerate(LENGTHS)
    ]
    options: dict[str, Any] = {
        "backend": "cuda",
        "dtype": "float32",  # exact, so that no rounding depends on how many tokens there are
        "max_num_seqs": 6,
        "max_num_batched_tokens": 256,
        "num_kv_blocks": 128,
    }
    launched = run_load(model, requests, enforce_eager=True, **options)
    replayed = run_load(model, requests, **options)
    assert replayed.answers == launched.answers
