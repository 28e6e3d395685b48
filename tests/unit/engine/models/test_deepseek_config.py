"""DeepSeek's config as a ModelConfig, and unsupported values."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from mooncake_engine.errors import CheckpointError
from mooncake_engine.models.catalog import build_model, kv_geometry, read_model_config
from mooncake_engine.models.layers import ParallelContext
from mooncake_hal.kv.geometry import AttentionKind
from mooncake_hal.null.null_backend import NullOps

V2: dict[str, Any] = {
    "architectures": ["DeepseekV2ForCausalLM"],
    "vocab_size": 101,
    "hidden_size": 64,
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "kv_lora_rank": 512,
    "q_lora_rank": None,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 1,
    "topk_method": "greedy",
    "torch_dtype": "bfloat16",
}
V3: dict[str, Any] = {
    **V2,
    "architectures": ["DeepseekV3ForCausalLM"],
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "n_group": 4,
    "topk_group": 2,
    "routed_scaling_factor": 2.5,
    "rope_scaling": {
        "type": "yarn", "factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096, "beta_fast": 32, "beta_slow": 1,
    },
}  # fmt: skip


def write(directory: Path, fields: dict[str, Any], **changes: Any) -> Path:
    (directory / "config.json").write_text(json.dumps({**fields, **changes}))
    return directory


def test_kv_geometry_is_one_head_of_latent_and_rope_planes(tmp_path: Path) -> None:
    geometry = kv_geometry(read_model_config(write(tmp_path, V2)), torch.bfloat16)
    assert (geometry.kind, geometry.kv_heads) == (AttentionKind.MLA, 1)
    assert geometry.plane_dims == (512, 64)


def test_attention_scale_follows_the_extended_context(tmp_path: Path) -> None:
    plain = read_model_config(write(tmp_path, V2)).mla
    stretched = read_model_config(write(tmp_path, V3)).mla
    assert plain is not None
    assert stretched is not None
    assert plain.scale == pytest.approx(192**-0.5)
    assert stretched.scale == pytest.approx(192**-0.5 * 1.3688879454113936**2)


def test_layers_beyond_the_config_are_ignored(tmp_path: Path) -> None:
    config = read_model_config(write(tmp_path, V3))
    model = build_model(config, ParallelContext(NullOps(), torch.device("cpu"), torch.float32), 16)
    assert model.is_ignored("model.layers.3.eh_proj.weight")
    assert not model.is_ignored("model.layers.2.eh_proj.weight")
    assert not model.is_ignored("model.norm.weight")


WRONG: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    (V2, {"topk_method": "noaux_tc"}, "topk_method 'noaux_tc'.*greedy, group_limited_greedy"),
    (V2, {"norm_topk_prob": True}, "norm_topk_prob True is not supported"),
    (V2, {"scoring_func": "sigmoid"}, "scoring_func 'sigmoid' is not supported"),
    (V2, {"kv_lora_rank": None}, "lacks 'kv_lora_rank'"),
    (V2, {"moe_layer_freq": 2}, "moe_layer_freq 2"),
    (V2, {"mlp_bias": True}, "mlp_bias True"),
    (V2, {"num_experts_per_tok": 9}, "num_experts_per_tok 9.*at most the 8"),
    (V3, {"topk_method": "greedy"}, "topk_method 'greedy'"),
    (V3, {"n_group": 3}, "8 experts in 3 groups"),
    (V3, {"topk_group": 5}, "8 experts in 4 groups, 5 of them"),
    (V3, {"n_group": 8}, "n_group 8 is not supported.*two experts"),
    (V3, {"topk_group": 1, "num_experts_per_tok": 3}, "3 experts per token can't come from 1"),
    (V3, {"quantization_config": {"quant_method": "gptq"}}, "gptq.*supported: fp8"),
]


@pytest.mark.parametrize(("base", "changes", "message"), WRONG, ids=lambda value: str(value)[-40:])
def test_invalid_values_are_named(
    base: dict[str, Any], changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(CheckpointError, match=message):
        read_model_config(write(tmp_path, base, **changes))
