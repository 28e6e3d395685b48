"""The placement of experts, and what is rejected before anything is loaded."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
from support.checkpoints import random_model, write_checkpoint

from mooncake_engine.config import EngineConfig
from mooncake_engine.errors import ConfigError
from mooncake_engine.execution.expert_plan import plan_experts
from mooncake_engine.messages import ExpertLoad
from mooncake_engine.models.catalog import read_model_config
from mooncake_engine.models.hf_config import ModelConfig

CONFIG = EngineConfig(Path("m"), tp_size=4, ep_size=4)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ModelConfig:
    """Eight experts in each of three layers."""
    directory = write_checkpoint(random_model("qwen3_moe"), tmp_path_factory.mktemp("model"))
    return read_model_config(directory)


def written(path: Path, tokens: dict[int, tuple[int, ...]]) -> Path:
    path.write_bytes(msgspec.json.encode(ExpertLoad(tokens, 1.0, 0)))
    return path


def test_experts_are_in_order_unless_placement_is_requested(model: ModelConfig) -> None:
    assert plan_experts(CONFIG, model) == ()


def test_busiest_expert_of_a_layer_gets_the_redundant_slots(
    model: ModelConfig, tmp_path: Path
) -> None:
    load = written(tmp_path / "load.json", {1: (1, 1, 1, 90, 1, 1, 1, 1)})
    slots = plan_experts(replace(CONFIG, redundant_experts=4, expert_load=load), model)
    assert [len(layer) for layer in slots] == [12, 12, 12]
    assert slots[1].count(3) == 5
    assert slots[0].count(3) == 2  # a layer without a recorded load
    assert all(set(layer) == set(range(8)) for layer in slots)


def test_load_places_experts_without_redundant_slots(model: ModelConfig, tmp_path: Path) -> None:
    load = written(tmp_path / "load.json", {0: (9, 9, 1, 1, 1, 1, 1, 1)})
    slots = plan_experts(replace(CONFIG, ep_size=2, expert_load=load), model)
    assert (0 in slots[0][:4]) != (1 in slots[0][:4])


REFUSED: list[tuple[dict[str, Any], str]] = [
    (
        {"redundant_experts": 3},
        "8 experts and 3 redundant ones can't be divided evenly over 4 parts",
    ),
    ({"tp_size": 16, "ep_size": 16}, "ep_size 16 was requested, the model has 8 experts: use at"),
    ({"expert_load": Path("/nowhere")}, "expert_load /nowhere can't be read"),
]


@pytest.mark.parametrize(("options", "message"), REFUSED)
def test_impossible_placements_are_rejected(
    options: dict[str, Any], message: str, model: ModelConfig
) -> None:
    with pytest.raises(ConfigError, match=message):
        plan_experts(replace(CONFIG, **options), model)


@pytest.mark.parametrize("tokens", [{0: (1, 2)}, {3: (1,) * 8}, {0: (-1,) * 8}])
def test_load_of_another_model_is_rejected(
    tokens: dict[int, tuple[int, ...]], model: ModelConfig, tmp_path: Path
) -> None:
    load = written(tmp_path / "load.json", tokens)
    with pytest.raises(ConfigError, match="3 layers of 8: it is of another model"):
        plan_experts(replace(CONFIG, expert_load=load), model)


def test_invalid_load_file_is_rejected(model: ModelConfig, tmp_path: Path) -> None:
    (tmp_path / "load.json").write_text('{"error": {"message": "no expert has got a token"}}')
    with pytest.raises(ConfigError, match="wanted a response of GET /expert_load"):
        plan_experts(replace(CONFIG, expert_load=tmp_path / "load.json"), model)


def test_model_without_experts_is_rejected(model: ModelConfig) -> None:
    with pytest.raises(ConfigError, match="has no experts: use at most 1"):
        plan_experts(CONFIG, replace(model, moe=None))


@pytest.mark.parametrize("options", [{"redundant_experts": 2}, {"expert_load": Path("load.json")}])
def test_placement_without_expert_parallelism_is_rejected(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="they need an ep_size above 1"):
        EngineConfig(Path("m"), **options)
    with pytest.raises(ConfigError, match="redundant_experts must not be negative"):
        EngineConfig(Path("m"), tp_size=2, ep_size=2, redundant_experts=-1)
