"""GGUF files as llama.cpp's converter writes them, made from Hugging Face checkpoints."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf.quants import quantize
from safetensors.torch import load_file

Array = np.ndarray[Any, Any]
Kind = gguf.GGMLQuantizationType

NAMES = {"LlamaForCausalLM": "llama", "MixtralForCausalLM": "llama"} | {
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "Qwen3MoeForCausalLM": "qwen3moe",
}
_EXPERT = re.compile(r"model\.layers\.(\d+)\.\w+\.experts\.(\d+)\.(\w+)\.weight")
_EXPERT_NAMES = {"w1": "gate", "w2": "down", "w3": "up"}


def write_gguf(directory: Path, path: Path, kind: Kind = Kind.Q8_0) -> Path:
    """Write a checkpoint, and its tokenizer if it has one. Matrices whose rows are whole blocks are
    quantised; everything else is float32."""
    config = json.loads((directory / "config.json").read_text())
    name = NAMES[config["architectures"][0]]
    writer = gguf.GGUFWriter(path, name)
    _add_config(writer, config, name)
    if (directory / "tokenizer.json").exists():
        _add_vocabulary(writer, directory)
    for tensor_name, values in gguf_tensors(directory, config, name).items():
        if values.ndim > 1 and values.shape[-1] % 32 == 0:
            writer.add_tensor(tensor_name, quantize(values, kind), raw_dtype=kind)
        else:
            writer.add_tensor(tensor_name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def gguf_tensors(directory: Path, config: dict[str, Any], name: str) -> dict[str, Array]:
    """The checkpoint's tensors under llama.cpp's names and in its row order."""
    (arch,) = (arch for arch, called in gguf.MODEL_ARCH_NAMES.items() if called == name)
    names = gguf.get_tensor_name_map(arch, config["num_hidden_layers"])
    found: dict[str, Array] = {}
    experts: dict[str, dict[int, Array]] = {}
    for hf_name, tensor in load_file(directory / "model.safetensors").items():
        values = tensor.float().numpy()
        if expert := _EXPERT.fullmatch(hf_name):
            layer, index, part = expert.groups()
            part = _EXPERT_NAMES.get(part, part.removesuffix("_proj"))
            experts.setdefault(f"blk.{layer}.ffn_{part}_exps.weight", {})[int(index)] = values
            continue
        if name == "llama" and re.search(r"\.[qk]_proj\.", hf_name):
            values = as_pairs(values, values.shape[0] // config["head_dim"])
        called = names.get_name(hf_name, try_suffixes=(".weight", ".bias"))
        assert called, hf_name
        found[called] = values
    for called, by_index in experts.items():
        found[called] = np.stack([by_index[i] for i in range(len(by_index))])
    return found


def as_pairs(values: Array, heads: int) -> Array:
    """Rows of a rotated projection in llama.cpp's order: the two halves of a pair side by side."""
    halves = values.reshape(heads, 2, values.shape[0] // heads // 2, *values.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(values.shape))


def _add_config(writer: gguf.GGUFWriter, config: dict[str, Any], name: str) -> None:
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    eos = config["eos_token_id"]
    writer.add_eos_token_id(eos[0] if isinstance(eos, list) else eos)
    if name == "llama":
        writer.add_rope_dimension_count(config["head_dim"])
        writer.add_vocab_size(config["vocab_size"])
    num_experts = config.get("num_experts", config.get("num_local_experts"))
    if num_experts:
        writer.add_expert_count(num_experts)
        writer.add_expert_used_count(config["num_experts_per_tok"])
    if "moe_intermediate_size" in config:
        writer.add_expert_feed_forward_length(config["moe_intermediate_size"])


def _add_vocabulary(writer: gguf.GGUFWriter, directory: Path) -> None:
    tokenizer = json.loads((directory / "tokenizer.json").read_text())
    config = json.loads((directory / "tokenizer_config.json").read_text())
    ids = dict(tokenizer["model"]["vocab"])
    types = dict.fromkeys(ids, gguf.TokenType.NORMAL)
    for added in tokenizer["added_tokens"]:
        token = added["content"]
        ids[token] = added["id"]
        types[token] = gguf.TokenType.CONTROL if added["special"] else gguf.TokenType.USER_DEFINED
    tokens = sorted(ids, key=ids.__getitem__)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types([types[token] for token in tokens])
    writer.add_token_merges([" ".join(pair) for pair in tokenizer["model"]["merges"]])
    writer.add_chat_template(config["chat_template"])
