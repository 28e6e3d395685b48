"""Inverse frequencies against transformers' own functions."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from mooncake_engine.models.hf_config import RawConfig, read_rope
from mooncake_engine.models.rope import cos_sin_table

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
]


@pytest.mark.parametrize("scaling", SCALINGS, ids=str)
@pytest.mark.parametrize("theta", [10000.0, 500000.0])
def test_table_is_that_of_transformers(scaling: dict[str, Any], theta: float) -> None:
    parameters = {"rope_theta": theta, **scaling}
    theirs = LlamaConfig(head_dim=64, rope_parameters=parameters, max_position_embeddings=131072)
    positions = torch.arange(0, 600)[None]
    cos, sin = LlamaRotaryEmbedding(theirs)(torch.zeros(1), positions)
    raw = RawConfig({"max_position_embeddings": 131072, "rope_parameters": parameters}, "config")
    table = cos_sin_table(read_rope(raw, 64), 600)
    expected = torch.cat((cos[0, :, :32], sin[0, :, :32]), dim=-1)
    # angles reach 600, where float32 has a spacing of 6e-5
    torch.testing.assert_close(table, expected, rtol=0, atol=2e-5)


def test_both_spellings_mean_the_same() -> None:
    common = {"max_position_embeddings": 131072}
    old = {"rope_theta": 5e5, "rope_scaling": {**LLAMA3, "type": "llama3"}}
    new = {"rope_parameters": {"rope_theta": 5e5, **LLAMA3}}
    assert read_rope(RawConfig(common | old, "old"), 64) == read_rope(
        RawConfig(common | new, "new"), 64
    )
