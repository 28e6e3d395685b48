"""Engine steps as graphs of the emulated NPU, which rejects what a device would."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch_npu
from support.checkpoints import random_model, write_checkpoint
from support.core_runs import run_load
from support.npu import ON_NPU, write_family
from support.pd import prompt_of
from support.pool_engine import engine, two_turns

from mooncake_engine.messages import EngineRequest
from mooncake_engine.sampling_params import SamplingParams

GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
SEEDED = SamplingParams(temperature=1.0, max_tokens=8, ignore_eos=True, seed=3)


@pytest.fixture
def replays(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Number of graph replays."""
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
def test_replayed_steps_give_the_tokens_of_launched_ones(
    tmp_path: Path, replays: Counter[str], family: str, sampling: SamplingParams
) -> None:
    model = write_family(tmp_path, family)
    lengths = (5, 5, 40, 130, 200)  # two with one prompt, so that blocks are copied on write
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
    assert replays["replays"] > 2 * num_decodes, "prompts were not replayed piecewise"
    fed = run_load(model, requests, async_scheduling=True, **options)
    assert decoded.answers == launched.answers
    assert replayed.answers == launched.answers
    assert fed.answers == launched.answers


def test_layers_are_loaded_and_saved_between_piecewise_graphs(
    tmp_path: Path, replays: Counter[str]
) -> None:
    """A step whose layers are loaded from or saved to the pool is replayed piecewise, too."""
    model = write_checkpoint(random_model("llama"), tmp_path / "llama")
    options: dict[str, Any] = {**ON_NPU, "dtype": "auto", "max_num_batched_tokens": 160}
    options["piecewise_graph_max_tokens"] = None
    with engine(model, None, **options) as core:
        plain, _ = two_turns(core)
    replays.clear()
    with engine(model, "dram=64M,chunk=128,load=always", **options) as core:
        pooled, num_cached = two_turns(core)
        stats = core.report().stats.kv_pool
        core.check_integrity()
    assert replays["replays"]
    assert pooled == plain
    assert num_cached >= 128
    assert stats is not None
    assert (stats.num_failed_loads, stats.num_loads > 0) == (0, True)
    assert stats.num_layerwise_saves
    assert stats.hideable_seconds, "no step waited for layers while it ran"
