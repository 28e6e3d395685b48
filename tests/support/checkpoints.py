"""Small random checkpoints, written by transformers, the models' reference."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import (
    DeepseekV2Config,
    DeepseekV2ForCausalLM,
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    PretrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    SeedOssConfig,
    SeedOssForCausalLM,
)

FAMILIES: dict[str, tuple[type[PretrainedConfig], type[PreTrainedModel]]] = {
    "deepseek_v2": (DeepseekV2Config, DeepseekV2ForCausalLM),
    "deepseek_v3": (DeepseekV3Config, DeepseekV3ForCausalLM),
    "llama": (LlamaConfig, LlamaForCausalLM),
    "mistral": (MistralConfig, MistralForCausalLM),
    "mixtral": (MixtralConfig, MixtralForCausalLM),
    "phi3": (Phi3Config, Phi3ForCausalLM),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
    "qwen3_moe": (Qwen3MoeConfig, Qwen3MoeForCausalLM),
    "seed_oss": (SeedOssConfig, SeedOssForCausalLM),
}

_LATENT: dict[str, Any] = {
    "num_key_value_heads": 8,
    "head_dim": None,
    "kv_lora_rank": 48,
    "q_lora_rank": 40,
    "qk_nope_head_dim": 24,
    "qk_rope_head_dim": 16,
    "v_head_dim": 20,
    "first_k_dense_replace": 1,
    "moe_intermediate_size": 48,
    "n_routed_experts": 12,
    "num_experts_per_tok": 3,
}

OF_FAMILY: dict[str, dict[str, Any]] = {
    "deepseek_v2": {**_LATENT, "n_shared_experts": 2, "routed_scaling_factor": 1.5},
    "deepseek_v3": {**_LATENT, "n_shared_experts": 1, "n_group": 3, "topk_group": 2},
    "mixtral": {"num_local_experts": 6, "num_experts_per_tok": 2},
    "phi3": {"head_dim": None, "pad_token_id": 0, "original_max_position_embeddings": 512},
    "qwen3_moe": {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 48},
}
"""Config fields that a family's models need besides SMALL."""

SMALL: dict[str, Any] = {
    "vocab_size": 307,
    "hidden_size": 64,
    "intermediate_size": 144,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
"""A model that runs in milliseconds; its vocabulary size is odd on purpose."""

MEDIUM: dict[str, Any] = {
    "vocab_size": 32000,
    "hidden_size": 768,
    "intermediate_size": 2048,
    "num_hidden_layers": 10,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "max_position_embeddings": 4096,
    "dtype": "bfloat16",
}
"""About 112 million parameters: the model that speed is measured with."""


def random_model(family: str, *, seed: int = 0, **overrides: Any) -> PreTrainedModel:
    """A transformers model with random weights, in float32 unless ``dtype`` says otherwise.

    Args:
        family: key of FAMILIES.
        seed: random seed of the weights.
        overrides: fields of the family's config that differ from SMALL; None removes a field.
    """
    config_class, model_class = FAMILIES[family]
    fields = {**SMALL, **OF_FAMILY.get(family, {}), **overrides}
    config = config_class(**{name: value for name, value in fields.items() if value is not None})
    generator = torch.Generator().manual_seed(seed)
    model: PreTrainedModel = model_class(config)
    for name, parameter in model.named_parameters():
        # weights so large that greedy choices are far apart; norms and biases off their defaults
        spread = 0.3 if parameter.ndim == 1 else 1.6 / parameter.shape[-1] ** 0.5
        noise = torch.randn(parameter.shape, generator=generator) * spread
        parameter.data = noise + 1.0 if "norm" in name else noise
    for name, buffer in model.named_buffers():
        if name.endswith("correction_bias"):
            buffer.data = torch.randn(buffer.shape, generator=generator) * 0.1
    model.tie_weights()
    torch.nn.Module.to(model, config.dtype or torch.float32)
    return model.eval()


def write_checkpoint(model: PreTrainedModel, directory: Path, *, max_shard: str = "5GB") -> Path:
    """Save the model as it would be published; returns the directory.

    Args:
        model: the model to save.
        directory: the target; created if it does not exist.
        max_shard: largest safetensors file, such as ``"100KB"``; a smaller one gives several files
            and an index.
    """
    directory.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(directory, max_shard_size=max_shard)
    return directory
