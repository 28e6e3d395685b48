"""Rope tables and inverse frequencies, checked against transformers' own functions."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from mooncake_engine.errors import CheckpointError
from mooncake_engine.models.hf_config import RawConfig, read_rope
from mooncake_engine.models.rope import LongRopeScaling, YarnScaling, cos_sin_table

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
YARN = {"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096}
SCALINGS: list[dict[str, Any]] = [
    {"rope_type": "default"},
    {"rope_type": "linear", "factor": 2.5},
    LLAMA3,
    YARN,
    {**YARN, "mscale": 0.707, "mscale_all_dim": 1.0, "beta_fast": 16, "beta_slow": 2},
    {**YARN, "attention_factor": 0.5, "truncate": False},
    {"rope_type": "dynamic", "factor": 4.0},
]
LONGROPE: dict[str, Any] = {
    "rope_type": "longrope",
    "short_factor": [1.0 + 0.01 * i for i in range(32)],
    "long_factor": [2.0 + 0.5 * i for i in range(32)],
}


@pytest.mark.parametrize("scaling", SCALINGS, ids=str)
@pytest.mark.parametrize("theta", [10000.0, 500000.0])
def test_table_equals_that_of_transformers(scaling: dict[str, Any], theta: float) -> None:
    parameters = {"rope_theta": theta, **scaling}
    theirs = LlamaConfig(head_dim=64, rope_parameters=parameters, max_position_embeddings=131072)
    positions = torch.arange(0, 600)[None]
    cos, sin = LlamaRotaryEmbedding(theirs)(torch.zeros(1), positions)
    raw = RawConfig({"max_position_embeddings": 131072, "rope_parameters": parameters}, "config")
    table = cos_sin_table(read_rope(raw, 64), 600)
    expected = torch.cat((cos[0, :, :32], sin[0, :, :32]), dim=-1)
    # angles reach 600, where float32 has a spacing of 6e-5
    torch.testing.assert_close(table, expected, rtol=0, atol=2e-5)


def test_both_spellings_are_equivalent() -> None:
    common = {"max_position_embeddings": 131072}
    old = {"rope_theta": 5e5, "rope_scaling": {**LLAMA3, "type": "llama3"}}
    new = {"rope_parameters": {"rope_theta": 5e5, **LLAMA3}}
    assert read_rope(RawConfig(common | old, "old"), 64) == read_rope(
        RawConfig(common | new, "new"), 64
    )


@pytest.mark.parametrize(
    ("original", "changes"),
    [(4096, {}), (4096, {"factor": 8.0}), (4096, {"attention_factor": 1.3}), (131072, {})],
)
def test_longrope_table_equals_that_of_transformers(original: int, changes: dict[str, Any]) -> None:
    """The long factors are used for all lengths if the context exceeds the original one."""
    scaling = {**LONGROPE, "rope_theta": 1e4, "original_max_position_embeddings": original}
    parameters = {**scaling, **changes}
    theirs = LlamaConfig(head_dim=64, rope_parameters=parameters, max_position_embeddings=131072)
    is_long = original < 131072
    function = ROPE_INIT_FUNCTIONS["longrope"]
    frequencies, factor = function(theirs, seq_len=original + 1 if is_long else None)
    angles = torch.outer(torch.arange(600.0), frequencies)
    expected = torch.cat((angles.cos(), angles.sin()), dim=-1) * factor
    raw = RawConfig({"max_position_embeddings": 131072, "rope_parameters": parameters}, "config")
    table = cos_sin_table(read_rope(raw, 64), 600)
    torch.testing.assert_close(table, expected, rtol=0, atol=2e-5)


def test_phi3_has_its_original_context_outside_the_scaling() -> None:
    published: dict[str, Any] = {
        "max_position_embeddings": 131072,
        "original_max_position_embeddings": 4096,
        "rope_theta": 10000.0,
        "rope_scaling": {**LONGROPE, "type": "su"},
    }
    del published["rope_scaling"]["rope_type"]
    scaling = read_rope(RawConfig(published, "config"), 64).scaling
    assert isinstance(scaling, LongRopeScaling)
    assert scaling.factors == tuple(LONGROPE["long_factor"])
    assert scaling.attention_factor == pytest.approx(1.1902, abs=1e-4)


def test_longrope_uses_short_factors_within_the_original_context() -> None:
    parameters = {**LONGROPE, "rope_theta": 1e4, "original_max_position_embeddings": 4096}
    theirs = LlamaConfig(head_dim=64, rope_parameters=parameters, max_position_embeddings=131072)
    frequencies, factor = ROPE_INIT_FUNCTIONS["longrope"](theirs, seq_len=4096)
    angles = torch.outer(torch.arange(600.0), frequencies)
    expected = torch.cat((angles.cos(), angles.sin()), dim=-1) * factor
    raw = RawConfig({"max_position_embeddings": 131072, "rope_parameters": parameters}, "config")
    rope = read_rope(raw, 64)
    table = cos_sin_table(rope.for_length(4096), 600)
    torch.testing.assert_close(table, expected, rtol=0, atol=2e-5)
    assert rope.for_length(4097) == rope


@pytest.mark.parametrize("name", ["short_factor", "long_factor"])
def test_factors_of_another_width_are_rejected(name: str) -> None:
    scaling = {**LONGROPE, "original_max_position_embeddings": 4096, name: [1.0] * 33}
    raw = RawConfig({"max_position_embeddings": 131072, "rope_parameters": scaling}, "config")
    with pytest.raises(CheckpointError, match=f"'{name}' must have 32 numbers, found 33"):
        read_rope(raw, 64)


def test_attn_factor_multiplies_the_papers_value() -> None:
    """DeepSeek-R1-0528-Qwen3-8B: the paper's 0.1 ln(4) + 1 times this is one."""
    published = {**YARN, "factor": 4.0, "attn_factor": 0.8782488562869419}
    raw = RawConfig({"max_position_embeddings": 131072, "rope_scaling": published}, "config")
    scaling = read_rope(raw, 128).scaling
    assert isinstance(scaling, YarnScaling)
    assert scaling.attention_factor == pytest.approx(1.0, abs=1e-6)


def test_partial_extrapolation_factor_is_rejected() -> None:
    published = {**YARN, "extrapolation_factor": 0.5}
    raw = RawConfig({"max_position_embeddings": 131072, "rope_scaling": published}, "config")
    with pytest.raises(CheckpointError, match=r"extrapolation_factor 0\.5 is not supported"):
        read_rope(raw, 128)
