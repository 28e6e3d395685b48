"""``quantization_config`` of config.json: supported formats, and rejected ones."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest
from support.fp8_checkpoints import FORMS

from mooncake_engine.errors import CheckpointError
from mooncake_engine.models.quantization_config import Fp8Config, read_quantization

CHANNEL = FORMS["channel"]


def compressed(**changes: Any) -> dict[str, Any]:
    """Return the config of llm-compressor, with changed weights and inputs."""
    made = deepcopy(CHANNEL)
    group = made["config_groups"]["group_0"]
    group["weights"].update(changes.pop("weights", {}))
    if (inputs := changes.pop("inputs", {})) is None:
        group["input_activations"] = None
    else:
        group["input_activations"].update(inputs)
    return {**made, **changes}


BLOCKS = {"strategy": "block", "block_structure": [128, 128]}
READ = {
    "tensor": (FORMS["tensor"], Fp8Config(False, "weight_scale", False, ("lm_head",))),
    "static": (FORMS["static"], Fp8Config(False, "weight_scale", True, ("lm_head",))),
    "blocks": (FORMS["blocks"], Fp8Config(True, "weight_scale_inv", False, ())),
    "channel": (CHANNEL, Fp8Config(False, "weight_scale", False, ("lm_head",))),
    "static inputs": (
        compressed(weights={"strategy": "tensor"}, inputs={"dynamic": False}),
        Fp8Config(False, "weight_scale", True, ("lm_head",)),
    ),
    "compressed blocks": (
        compressed(weights=BLOCKS),
        Fp8Config(True, "weight_scale", False, ("lm_head",)),
    ),
}
MODELOPT = {"quant_method": "modelopt", "quant_algo": "FP8"}
READ["naive"] = compressed(format="naive-quantized"), READ["channel"][1]
READ["modelopt"] = {**MODELOPT, "ignore": ["lm_head"]}, READ["static"][1]
READ["modelopt, older"] = (
    {**MODELOPT, "exclude_modules": ["lm_head"], "kv_cache_quant_algo": "FP8"},
    READ["static"][1],
)
READ["modelopt, nothing ignored"] = (
    {**MODELOPT, "exclude_modules": None},
    Fp8Config(False, "weight_scale", True, ()),
)
READ["no transforms"] = compressed(transform_config={}), READ["channel"][1]
REFUSED = [
    {"quant_method": "gptq"},
    {"quant_method": "fp8", "weight_block_size": [64, 64]},
    {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "static"},
    {"quant_method": "fp8", "activation_scheme": "sometimes"},
    {"quant_method": "fp8", "fmt": "e5m2"},
    {"quant_method": "compressed-tensors"},
    compressed(format="pack-quantized"),
    compressed(format="naive-quantized", weights={"type": "int"}),
    {"quant_method": "modelopt"},
    {"quant_method": "modelopt", "quant_algo": "NVFP4"},
    {"quant_method": "modelopt", "quant_algo": "FP8", "ignore": [1]},
    compressed(weights={"num_bits": 4}),
    compressed(weights={"strategy": "group"}),
    compressed(weights={**BLOCKS, "block_structure": [64, 64]}),
    compressed(inputs=None),
    compressed(ignore=["re:("]),
    compressed(transform_config={"config_groups": {"v": {"type": "hadamard"}}}),
    "fp8",
]


@pytest.mark.parametrize("name", READ)
def test_published_formats_are_read(name: str) -> None:
    fields, wanted = READ[name]
    assert read_quantization(fields, "config.json") == wanted


def test_missing_config_is_none() -> None:
    assert read_quantization(None, "config.json") is None


@pytest.mark.parametrize("fields", REFUSED, ids=str)
def test_other_formats_are_rejected(fields: object) -> None:
    with pytest.raises(CheckpointError, match=r"^config\.json: quantization_config .*: fp8"):
        read_quantization(fields, "config.json")


def test_modelopt_ignores_linears_by_wildcards() -> None:
    ignored = ["lm_head", "model.layers.0.self_attn*", "*.gate"]
    config = read_quantization({**MODELOPT, "ignore": ignored}, "config.json")
    assert config is not None
    assert config.is_ignored("lm_head")
    assert config.is_ignored("model.layers.0.self_attn.q_proj")
    assert config.is_ignored("model.layers.7.mlp.gate")
    assert not config.is_ignored("model.layers.7.mlp.gate_proj")
    assert not config.is_ignored("model.layers.10.self_attn.q_proj")


def test_linears_are_ignored_by_name_suffix_and_expression() -> None:
    config = Fp8Config(False, "weight_scale", False, ("lm_head", "mlp.gate", "re:.*k_proj$"))
    assert config.is_ignored("lm_head")
    assert config.is_ignored("model.layers.3.mlp.gate")
    assert config.is_ignored("model.layers.3.self_attn.k_proj")
    assert not config.is_ignored("model.layers.3.mlp.gate_proj")
    assert not config.is_ignored("model.layers.3.self_attn.q_proj")
