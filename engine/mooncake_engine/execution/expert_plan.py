"""Plans which expert is in which slot, before the model is loaded."""

from __future__ import annotations

from pathlib import Path

import msgspec

from mooncake_engine.config import EngineConfig
from mooncake_engine.errors import ConfigError
from mooncake_engine.messages import ExpertLoad
from mooncake_engine.models.expert_placement import ExpertRanks, place_experts
from mooncake_engine.models.hf_config import ModelConfig, MoeConfig


def plan_experts(config: EngineConfig, model: ModelConfig) -> tuple[tuple[int, ...], ...]:
    """The expert in each slot, by layer; empty if every expert has one slot, in order.

    Raises:
        ConfigError: the model has fewer experts than ``ep_size``, the slots can't be divided over
            the parts evenly, or the load in ``expert_load`` is that of another model.
    """
    experts = model.moe.routing.num_experts if model.moe else 0
    if config.ep_size > max(experts, 1):
        found = f"has {experts} experts" if experts else f"({model.architecture}) has no experts"
        raise ConfigError(
            f"ep_size {config.ep_size} was requested, the model {found}: use at most "
            f"{max(experts, 1)}"
        )
    is_placing = config.redundant_experts or config.expert_load or config.eplb_step_interval
    if model.moe is None or not is_placing:
        return ()
    num_slots = experts + config.redundant_experts
    if num_slots % config.ep_size:
        raise ConfigError(
            f"{experts} experts and {config.redundant_experts} redundant ones can't be divided "
            f"evenly over {config.ep_size} parts: use redundant_experts "
            f"{-experts % config.ep_size}, or that and a multiple of {config.ep_size}"
        )
    over = ExpertRanks(config.ep_size, groups=model.moe.routing.groups)
    load = _read_load(config.expert_load, model.moe, model.num_layers)
    even = (1,) * experts
    return tuple(
        place_experts(load.get(layer, even), num_slots, over) for layer in range(model.num_layers)
    )


def _read_load(path: Path | None, moe: MoeConfig, num_layers: int) -> dict[int, tuple[int, ...]]:
    if path is None:
        return {}
    try:
        tokens = msgspec.json.decode(path.read_bytes(), type=ExpertLoad).tokens
    except (OSError, msgspec.DecodeError) as exc:
        raise ConfigError(
            f"expert_load {path} can't be read: {exc}; wanted a response of GET /expert_load"
        ) from exc
    experts = moe.routing.num_experts
    for layer, counts in tokens.items():
        if not 0 <= layer < num_layers or len(counts) != experts or min(counts) < 0:
            raise ConfigError(
                f"expert_load {path} has {len(counts)} experts in layer {layer}, the model has "
                f"{num_layers} layers of {experts}: it is of another model"
            )
    return tokens
