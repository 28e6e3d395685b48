"""Hugging Face configs: supported fields and spellings, and errors that name the field."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from support.fp8_checkpoints import FORMS

from mooncake_engine.errors import CheckpointError
from mooncake_engine.models.catalog import read_model_config
from mooncake_engine.models.quantization_config import Fp8Config

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 101,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000,
    "torch_dtype": "bfloat16",
    "eos_token_id": [7, 9],
}

EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}


def write(directory: Path, **changes: Any) -> Path:
    fields = {**LLAMA, **changes}
    kept = {name: value for name, value in fields.items() if value is not ...}
    (directory / "config.json").write_text(json.dumps(kept))
    return directory


def test_config_in_the_older_spelling_is_read(tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": 3}')
    config = read_model_config(write(tmp_path))
    assert (config.head_dim, config.dtype) == (8, "bfloat16")
    assert config.eos_token_ids == (3, 7, 9)
    assert not config.tie_embeddings


@pytest.mark.parametrize("is_object", [False, True])
@pytest.mark.parametrize(
    ("named", "expected"), [("<|im_end|>", (7, 9, 98)), ("</s>", (7, 9)), ("<pad>", (7, 9))]
)
def test_end_token_of_the_tokenizer_counts_too(
    named: str, expected: tuple[int, ...], is_object: bool, tmp_path: Path
) -> None:
    """Fine-tunes for chats may change only the tokenizer. `<pad>` is beyond the model's tokens."""
    token = {"content": named, "special": True} if is_object else named
    added = [{"id": 98, "content": "<|im_end|>"}, {"id": 101, "content": "<pad>", "special": True}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": token}))
    (tmp_path / "tokenizer.json").write_text(json.dumps({"added_tokens": added, "model": {}}))
    assert read_model_config(write(tmp_path)).eos_token_ids == expected


def test_end_tokens_beyond_the_vocabulary_are_left_out_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The vocabulary has 101 tokens. ``min_tokens`` would mask a logit that does not exist."""
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [100, 101]}')
    config = read_model_config(write(tmp_path, eos_token_id=[7, 32000, -1]))
    assert config.eos_token_ids == (7, 100)
    [warning] = caplog.messages
    assert "tokens [-1, 101, 32000] are not in the model's vocabulary of 101 tokens" in warning


def test_quantization_is_found_where_older_tools_put_it(tmp_path: Path) -> None:
    static = Fp8Config(False, "weight_scale", True, ("lm_head",))
    of_modelopt = {"quant_algo": "FP8", "exclude_modules": ["lm_head"]}
    path = tmp_path / "hf_quant_config.json"
    path.write_text(json.dumps({"producer": {"name": "modelopt"}, "quantization": of_modelopt}))
    assert read_model_config(write(tmp_path)).quantization == static
    found = read_model_config(write(tmp_path, compression_config=FORMS["channel"])).quantization
    assert found == replace(static, has_input_scales=False)
    found = read_model_config(write(tmp_path, quantization_config=FORMS["blocks"])).quantization
    assert found is not None
    assert found.is_blockwise
    path.write_text(json.dumps({"quantization": {"quant_algo": "W4A16"}}))
    with pytest.raises(CheckpointError, match=r"quantization_config .*W4A16.* is not supported"):
        read_model_config(write(tmp_path))


@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float16, torch.float32])
def test_missing_dtype_is_that_of_the_weights(stored: torch.dtype, tmp_path: Path) -> None:
    """That of most elements: routers and norms may be wider, and scales of fp8 weights are."""
    directory = write(tmp_path, torch_dtype=...)
    narrow = torch.zeros(1000, dtype=torch.float8_e4m3fn)
    save_file({"a": torch.zeros(30, dtype=stored), "b": narrow}, directory / "1.safetensors")
    save_file({"c": torch.zeros(4, 5), "d": torch.zeros(9).int()}, directory / "2.safetensors")
    assert read_model_config(directory).dtype == str(stored).removeprefix("torch.")
    assert read_model_config(write(tmp_path, torch_dtype="float64")).dtype == "float64"


def test_explicit_head_dim_overrides_the_derived_one(tmp_path: Path) -> None:
    assert read_model_config(write(tmp_path, head_dim=32)).head_dim == 32
    assert read_model_config(write(tmp_path, head_dim=None)).head_dim == 8


@pytest.mark.parametrize(
    ("stated", "original", "longest"), [(40960, 32768, 131072), (163840, 32768, 163840)]
)
def test_yarn_extends_the_stated_context(
    stated: int, original: int, longest: int, tmp_path: Path
) -> None:
    """Qwen3's model card has YaRN added beside ``max_position_embeddings`` of 40,960."""
    scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": original}
    directory = write(tmp_path, max_position_embeddings=stated, rope_scaling=scaling)
    assert read_model_config(directory).max_positions == longest


def test_linear_scaling_extends_the_stated_context(tmp_path: Path) -> None:
    """vicuna-v1.5-16k: 4,096 with a factor of 4."""
    scaling = {"type": "linear", "factor": 4.0}
    directory = write(tmp_path, max_position_embeddings=4096, rope_scaling=scaling)
    assert read_model_config(directory).max_positions == 16384


def test_rotary_embeddings_per_kind_of_layer_are_refused(tmp_path: Path) -> None:
    kinds = {"full_attention": {"rope_theta": 1e6}, "sliding_attention": {"rope_theta": 1e4}}
    with pytest.raises(CheckpointError, match=r"rope_parameters .*full_attention"):
        read_model_config(write(tmp_path, rope_parameters=kinds))


def test_dual_chunk_attention_limits_sequences_to_one_chunk(tmp_path: Path) -> None:
    """Qwen2.5-7B-Instruct-1M: positions in other chunks are not those of plain attention."""
    chunks = {
        "chunk_size": 262144,
        "local_size": 8192,
        "original_max_position_embeddings": 262144,
    }
    fields = {"max_position_embeddings": 1010000, "dual_chunk_attention_config": chunks}
    assert read_model_config(write(tmp_path, **fields)).max_positions == 262144
    with pytest.raises(CheckpointError, match="dual_chunk_attention_config lacks 'chunk_size'"):
        read_model_config(write(tmp_path, dual_chunk_attention_config={"local_size": 8192}))


@pytest.mark.parametrize(
    ("architecture", "fields", "window"),
    [
        ("MistralForCausalLM", {"sliding_window": 64}, 64),
        ("Phi3ForCausalLM", {"sliding_window": 64}, 64),
        ("MixtralForCausalLM", {"sliding_window": 64, **EXPERTS}, 64),
        ("MistralForCausalLM", {"max_position_embeddings": 32768}, 4096),
        ("MistralForCausalLM", {"sliding_window": 256}, None),
        ("MistralForCausalLM", {"sliding_window": None}, None),
        ("Phi3ForCausalLM", {}, None),
    ],
)
def test_sliding_window_limits_the_sequence_length(
    architecture: str, fields: dict[str, Any], window: int | None, tmp_path: Path
) -> None:
    config = read_model_config(write(tmp_path, architectures=[architecture], **fields))
    assert config.sliding_window == window
    assert config.max_positions == (window or LLAMA["max_position_embeddings"])


def test_sliding_window_of_zero_is_rejected(tmp_path: Path) -> None:
    directory = write(tmp_path, architectures=["MistralForCausalLM"], sliding_window=0)
    with pytest.raises(CheckpointError, match="'sliding_window' must be at least 1, found 0"):
        read_model_config(directory)


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"architectures": ["GPT2LMHeadModel"]}, "GPT2LMHeadModel.*supported: .*LlamaForCausalLM"),
    ({"architectures": ...}, "architectures"),
    ({"hidden_size": ...}, "lacks 'hidden_size'"),
    ({"hidden_size": "64"}, "'hidden_size' must be int, found '64'"),
    ({"num_hidden_layers": 0}, "must be at least 1, found 0"),
    ({"num_hidden_layers": True}, "must be int, found True"),
    ({"num_key_value_heads": 3}, "8 query heads can't share 3"),
    ({"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported; supported: silu"),
    ({"rope_scaling": {"rope_type": "proportional"}}, "rope_type 'proportional'.*llama3"),
    ({"rope_scaling": {"rope_type": "llama3", "factor": 2.0}}, "lacks 'low_freq_factor'"),
    ({"quantization_config": {"quant_method": "gptq"}}, "gptq.*supported: fp8"),
    ({"layer_types": ["sliding_attention"]}, "sliding_attention"),
]


@pytest.mark.parametrize(
    "names", [{"qkv_bias": True, "bias": False}, {"attention_bias": True, "mlp_bias": False}]
)
def test_internlm3_is_llama_with_other_bias_fields(names: dict[str, bool], tmp_path: Path) -> None:
    fields = {"architectures": ["InternLM3ForCausalLM"], **names}
    config = read_model_config(write(tmp_path, **fields, rope_scaling={"rope_type": "dynamic"}))
    assert (config.qkv_bias, config.output_bias, config.mlp_bias) == (True, False, False)


@pytest.mark.parametrize(("changes", "message"), WRONG, ids=lambda value: str(value)[:40])
def test_invalid_fields_are_named(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=message):
        read_model_config(write(tmp_path, **changes))


def test_invalid_directories_are_rejected(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="does not exist"):
        read_model_config(tmp_path / "absent")
    with pytest.raises(CheckpointError, match="expected a Hugging Face model directory"):
        read_model_config(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match="can't be read"):
        read_model_config(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(CheckpointError, match="JSON object"):
        read_model_config(tmp_path)
