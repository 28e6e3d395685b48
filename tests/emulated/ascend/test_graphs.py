"""Steps of the engine as graphs of the emulated NPU, which refuses what a device would."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch_npu
from support.core_runs import run_load
from support.npu import ON_NPU, write_family
from support.pd import prompt_of

from mooncake_engine.messages import EngineRequest
from mooncake_engine.sampling_params import SamplingParams

GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
SEEDED = SamplingParams(temperature=1.0, max_tokens=8, ignore_eos=True, seed=3)


@pytest.fixture
def replays(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often graphs were replayed."""
    counts: Counter[str] = Counter()
    replay = torch_npu.npu.NPUGraph.replay

    def count(graph: Any) -> None:
        counts["replays"] += 1
        replay(graph)

    monkeypatch.setattr(torch_npu.npu.NPUGraph, "replay", count)
    return counts


@pytest.mark.parametrize(
    ("family", "sampling"),
    [("llama", GREEDY), ("llama", SEEDED), ("mixtral", GREEDY), ("deepseek_v3", GREEDY)],
)
def test_replayed_steps_say_what_launched_ones_say(
    tmp_path: Path, replays: Counter[str], family: str, sampling: SamplingParams
) -> None:
    model = write_family(tmp_path, family)
    lengths = (5, 5, 40, 130, 200)  # two of one prompt, so that blocks are copied on write
    requests = [
        EngineRequest(f"r{index}", prompt_of(length), sampling, group=f"g{length}")
        for index, length in enumerate(lengths)
    ]
    options: dict[str, Any] = {**ON_NPU, "dtype": "auto", "max_num_seqs": 6}
    options["piecewise_graph_max_tokens"] = None
    launched = run_load(model, requests, enforce_eager=True, **options)
    assert not replays["replays"]
    decoded = run_load(model, requests, **{**options, "piecewise_graph_max_tokens": 0})
    num_decodes = replays["replays"]
    assert num_decodes >= 7
    replayed = run_load(model, requests, **options)
    assert replays["replays"] > 2 * num_decodes, "prompts were not replayed in pieces"
    fed = run_load(model, requests, async_scheduling=True, **options)
    assert decoded.answers == launched.answers
    assert replayed.answers == launched.answers
    assert fed.answers == launched.answers
