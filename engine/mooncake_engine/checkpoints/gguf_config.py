"""Translates a GGUF file's metadata to config.json, and its tensor names to the checkpoint's.

Keys and names are those of llama.cpp (docs/gguf.md, gguf-py's ``TENSOR_NAMES``).
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mooncake_engine.checkpoints.gguf_header import GGUFHeader, GGUFTensor
from mooncake_engine.checkpoints.gguf_index import StoredTensor, read_floats
from mooncake_engine.checkpoints.gguf_tokenizer import TokenType
from mooncake_engine.errors import CheckpointError

_GLOBAL = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_LAYER_NAME = re.compile(r"blk\.(?P<layer>\d+)\.(?P<part>\w+)\.(?P<end>weight|bias)")
_ROPE_FACTORS = "rope_freqs.weight"
_YARN = {
    "original_context_length": "original_max_position_embeddings",
    "attn_factor": "attn_factor",
    "yarn_attn_factor": "attn_factor",
    "yarn_ext_factor": "extrapolation_factor",
    "yarn_beta_fast": "beta_fast",
    "yarn_beta_slow": "beta_slow",
}
"""Fields of ``rope_scaling``, by llama.cpp's keys."""
_ENDS = frozenset({"<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<EOT>"})
_ENDS |= {"<|endoftext|>", "<|end_of_text|>"}
"""Texts of tokens that end an output whatever the metadata say, as in llama.cpp's llama-vocab.cpp
(``special_eog_ids``): for that reason, files name only one of a model's."""


@dataclass(frozen=True, slots=True)
class _Kind:
    """How llama.cpp stores an architecture.

    Args:
        architecture: the name in ``architectures`` of config.json.
        has_pairs: whether the rotated dimensions of queries and keys are stored as pairs.
        router: the checkpoint's name of the router in a layer; empty without experts.
        experts: the checkpoint's names of the experts' linears, by llama.cpp's names.
        config: fields of config.json that GGUF does not have.
    """

    architecture: str
    has_pairs: bool = False
    router: str = ""
    experts: dict[str, str] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)


_MIXTRAL = _Kind(
    "MixtralForCausalLM",
    has_pairs=True,
    router="block_sparse_moe.gate",
    experts={
        "ffn_gate_exps": "block_sparse_moe.experts.{}.w1",
        "ffn_up_exps": "block_sparse_moe.experts.{}.w3",
        "ffn_down_exps": "block_sparse_moe.experts.{}.w2",
    },
)
_KINDS = {
    "llama": _Kind("LlamaForCausalLM", has_pairs=True),
    "qwen2": _Kind("Qwen2ForCausalLM"),
    "qwen3": _Kind("Qwen3ForCausalLM"),
    "qwen3moe": _Kind(
        "Qwen3MoeForCausalLM",
        router="mlp.gate",
        experts={
            "ffn_gate_exps": "mlp.experts.{}.gate_proj",
            "ffn_up_exps": "mlp.experts.{}.up_proj",
            "ffn_down_exps": "mlp.experts.{}.down_proj",
        },
        config={"norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": []},
    ),
}


class GGUFModel:
    """Presents a GGUF model as a Hugging Face checkpoint.

    Raises:
        CheckpointError: the architecture is not supported, or metadata is missing.
    """

    def __init__(self, path: Path, header: GGUFHeader) -> None:
        self._path = path
        self._header = header
        self._name = str(header.metadata.get("general.architecture", ""))
        if self._name not in _KINDS:
            raise CheckpointError(
                f"{path}: architecture {self._name!r} is not supported in GGUF files; supported: "
                f"{', '.join(sorted(_KINDS))}"
            )
        has_experts = bool(self._get("expert_count", 0))
        is_mixtral = self._name == "llama" and has_experts
        self._kind = _MIXTRAL if is_mixtral else _KINDS[self._name]

    def config(self) -> dict[str, Any]:
        """The content of config.json."""
        heads, width = int(self._need("attention.head_count")), int(self._need("embedding_length"))
        head_dim = int(self._get("attention.key_length", width // heads))
        if (rotated := self._get("rope.dimension_count", head_dim)) != head_dim:
            raise CheckpointError(
                f"{self._path}: {rotated} of {head_dim} dimensions of a head are rotated; in "
                "GGUF files only heads that are rotated as a whole are supported"
            )
        has_bias = "blk.0.attn_q.bias" in self._header.tensors
        metadata = self._header.metadata
        config = {
            "architectures": [self._kind.architecture],
            "vocab_size": self._embedding().shape[0],
            "hidden_size": width,
            "intermediate_size": int(self._need("feed_forward_length")),
            "num_hidden_layers": int(self._need("block_count")),
            "num_attention_heads": heads,
            "num_key_value_heads": int(self._get("attention.head_count_kv", heads)),
            "head_dim": head_dim,
            "rms_norm_eps": float(self._need("attention.layer_norm_rms_epsilon")),
            "max_position_embeddings": int(self._need("context_length")),
            "rope_theta": float(self._get("rope.freq_base", 10000.0)),
            "tie_word_embeddings": "output.weight" not in self._header.tensors,
            "attention_bias": has_bias,
            "hidden_act": "silu",
            "torch_dtype": "float16",
            "bos_token_id": metadata.get("tokenizer.ggml.bos_token_id"),
            "eos_token_id": self.eos_token_ids(),
        }
        if (scaling := self._rope_scaling()) is not None:
            config["rope_scaling"] = scaling
        return config | self._moe_config() | self._kind.config

    def eos_token_ids(self) -> list[int]:
        """Tokens that end an output."""
        metadata = self._header.metadata
        named = (metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom"))
        tokens = metadata.get("tokenizer.ggml.tokens", ())
        types = metadata.get("tokenizer.ggml.token_type", ())
        added = (TokenType.CONTROL, TokenType.USER_DEFINED)
        by_text = (
            i
            for i, (text, kind) in enumerate(zip(tokens, types, strict=False))
            if text in _ENDS and kind in added
        )
        return sorted({int(i) for i in (*named, *by_text) if i is not None})

    def tensors(self) -> dict[str, StoredTensor]:
        """Every tensor, by its name in the checkpoint.

        Raises:
            CheckpointError: a tensor is unknown in this architecture.
        """
        found: dict[str, StoredTensor] = {}
        for name, tensor in self._header.tensors.items():
            if name == _ROPE_FACTORS:  # part of the config, not a weight
                continue
            layer = _LAYER_NAME.fullmatch(name)
            if layer is not None and layer["part"] in self._kind.experts:
                found |= self._experts(layer, tensor)
            else:
                stored = self._stored(tensor, self._paired_heads(layer))
                found[self._checkpoint_name(name, layer)] = stored
        return found

    def _checkpoint_name(self, name: str, layer: re.Match[str] | None) -> str:
        if name in _GLOBAL:
            return _GLOBAL[name]
        parts = _LAYER | ({"ffn_gate_inp": self._kind.router} if self._kind.router else {})
        if layer is None or layer["part"] not in parts:
            raise CheckpointError(f"{self._path}: tensor {name!r} is unknown in {self._name!r}")
        return f"model.layers.{layer['layer']}.{parts[layer['part']]}.{layer['end']}"

    def _paired_heads(self, layer: re.Match[str] | None) -> int:
        heads = int(self._need("attention.head_count"))
        kv_heads = int(self._get("attention.head_count_kv", heads))
        of_part = {"attn_q": heads, "attn_k": kv_heads}
        is_paired = self._kind.has_pairs and layer is not None
        return of_part.get(layer["part"], 0) if is_paired and layer is not None else 0

    def _experts(self, layer: re.Match[str], tensor: GGUFTensor) -> dict[str, StoredTensor]:
        """Split a tensor that holds all experts of a layer, one after another."""
        form = f"model.layers.{layer['layer']}.{self._kind.experts[layer['part']]}.{layer['end']}"
        count, *shape = tensor.shape
        num_bytes = (tensor.stop - tensor.start) // count
        starts = range(tensor.start, tensor.stop, num_bytes)
        return {
            form.format(expert): StoredTensor(
                tensor.file.name, tensor.kind, tuple(shape), start, start + num_bytes
            )
            for expert, start in enumerate(starts)
        }

    def _stored(self, tensor: GGUFTensor, heads: int) -> StoredTensor:
        name, kind, shape = tensor.file.name, tensor.kind, tensor.shape
        return StoredTensor(name, kind, shape, tensor.start, tensor.stop, heads)

    def _moe_config(self) -> dict[str, Any]:
        if not self._kind.experts:
            return {}
        num_experts = int(self._need("expert_count"))
        per_token = int(self._need("expert_used_count"))
        width = self._get("expert_feed_forward_length", self._get("feed_forward_length", 0))
        return {
            "num_local_experts": num_experts,
            "num_experts": num_experts,
            "num_experts_per_tok": per_token,
            "moe_intermediate_size": int(width),
        }

    def _rope_scaling(self) -> dict[str, Any] | None:
        if _ROPE_FACTORS in self._header.tensors:
            return self._llama3_scaling()
        # as in llama.cpp: linear by default, and the factor may have its older name
        kind = self._get("rope.scaling.type", "linear")
        factor = float(self._get("rope.scaling.factor", self._get("rope.scale_linear", 0.0)))
        if kind == "none" or (kind == "linear" and factor in (0.0, 1.0)):
            return None
        if kind not in ("linear", "yarn"):
            raise CheckpointError(
                f"{self._path}: rope scaling {kind!r} is not supported in GGUF files"
            )
        scaling = {"rope_type": kind, "factor": factor or self._need("rope.scaling.factor")}
        for key, name in _YARN.items() if kind == "yarn" else ():
            if (value := self._get(f"rope.scaling.{key}", None)) is not None:
                scaling[name] = value
        return scaling

    def _llama3_scaling(self) -> dict[str, Any]:
        """Recover Llama 3.1's scaling, which GGUF stores as a divisor per frequency.

        Raises:
            CheckpointError: the divisors are not those of Llama 3.1.
        """
        import torch

        from mooncake_engine.models.rope import Llama3Scaling, RopeConfig, inverse_frequencies

        stored = self._header.tensors[_ROPE_FACTORS]
        factors = torch.tensor(read_floats(stored.file, stored.start, stored.stop))
        theta = float(self._get("rope.freq_base", 10000.0))
        plain = RopeConfig(theta, 2 * len(factors))
        factor = float(factors.max())
        scaling = Llama3Scaling(factor, 1.0, 4.0, 8192)
        wanted = inverse_frequencies(RopeConfig(theta, 2 * len(factors), scaling))
        if not torch.allclose(inverse_frequencies(plain) / factors, wanted, rtol=1e-3):
            raise CheckpointError(f"{self._path}: {_ROPE_FACTORS} is not Llama 3.1's scaling")
        return {
            "rope_type": "llama3",
            "factor": factor,
            "low_freq_factor": scaling.low_freq_factor,
            "high_freq_factor": scaling.high_freq_factor,
            "original_max_position_embeddings": scaling.original_positions,
        }

    def _embedding(self) -> GGUFTensor:
        try:
            return self._header.tensors["token_embd.weight"]
        except KeyError as exc:
            raise CheckpointError(
                f"{self._path} lacks token_embd.weight; it is not a model"
            ) from exc

    def _get(self, key: str, default: Any) -> Any:
        return self._header.metadata.get(f"{self._name}.{key}", default)

    def _need(self, key: str) -> Any:
        value = self._get(key, None)
        if value is None:
            raise CheckpointError(f"{self._path} lacks {self._name}.{key}; it is not a model")
        return value
