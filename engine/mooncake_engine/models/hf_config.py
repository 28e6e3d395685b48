"""Reads a Hugging Face ``config.json`` into a frozen ModelConfig, or says what is wrong with it.

It reads both spellings in use: ``rope_theta`` with ``rope_scaling`` and ``torch_dtype`` (before
transformers 5), and ``rope_parameters`` with ``dtype`` (since).
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from mooncake_engine.checkpoints.model_source import read_json_object
from mooncake_engine.errors import CheckpointError
from mooncake_engine.models.mlp import RoutingConfig
from mooncake_engine.models.quantization_config import Fp8Config, read_quantization
from mooncake_engine.models.rope import (
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    RopeConfig,
    RopeScaling,
    YarnScaling,
    longrope_attention_factor,
    yarn_attention_factor,
    yarn_mscale,
)

logger = logging.getLogger(__name__)

T = TypeVar("T")
_KINDS: dict[type, tuple[type, ...]] = {float: (int, float), int: (int,), bool: (bool,)}
_SCALINGS = ("default", "linear", "dynamic", "llama3", "yarn", "longrope")


@dataclass(frozen=True, slots=True)
class MoeConfig:
    """The mixture of experts of a model.

    Args:
        routing: how many experts there are, and how they are chosen.
        expert_size: inner width of each expert.
        shared_size: inner width of the shared experts together; 0 if there are none.
        dense_layers: layers that have one MLP of ``intermediate_size`` instead of experts.
    """

    routing: RoutingConfig
    expert_size: int
    shared_size: int = 0
    dense_layers: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class MlaConfig:
    """The multi-head latent attention of a model.

    Args:
        latent_dim, rope_dim: elements per token of the two planes of the cache.
        nope_dim: elements of a query head that are not rotated.
        value_dim: elements of a value head.
        query_rank: width of the low-rank projection of queries; None without one.
        scale: factor of the attention scores.
        is_interleaved: whether the checkpoint rotates pairs rather than halves.
    """

    latent_dim: int
    rope_dim: int
    nope_dim: int
    value_dim: int
    query_rank: int | None
    scale: float
    is_interleaved: bool

    @property
    def query_dim(self) -> int:
        """Elements of a query head."""
        return self.nope_dim + self.rope_dim


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The config of a decoder, independent of the checkpoint's names of its fields.

    Args:
        architecture: the name in ``architectures``.
        vocab_size: rows of the embedding.
        hidden_size: width of the residual stream.
        intermediate_size: width of the MLP.
        num_layers: number of decoder layers.
        num_heads, num_kv_heads: number of query heads, and of the key/value heads that they share.
        head_dim: elements per head.
        rms_norm_eps: epsilon of every norm.
        max_positions: longest sequence that the model is run with, in tokens.
        rope: the rotary embedding.
        tie_embeddings: whether the output head is the embedding.
        dtype: type of the checkpoint's weights, such as ``"bfloat16"``: that of config.json, or
            else that of most weights.
        eos_token_ids: tokens that end a request.
        qkv_bias, output_bias, mlp_bias: which linear layers have a bias.
        has_qk_norm: whether queries and keys are normalised per head (Qwen3).
        moe: the mixture of experts; None for dense models.
        mla: the latent attention; None for grouped-query attention.
        quantization: how the weights are quantised; None if they are not.
        sliding_window: tokens of the attention window, if it limits ``max_positions``: the window
            is not computed, and sequences within it don't need it.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    max_positions: int
    rope: RopeConfig
    tie_embeddings: bool
    dtype: str
    eos_token_ids: tuple[int, ...]
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    has_qk_norm: bool = False
    moe: MoeConfig | None = None
    mla: MlaConfig | None = None
    quantization: Fp8Config | None = None
    sliding_window: int | None = None


class RawConfig:
    """A parsed JSON object whose fields are checked as they are read.

    Args:
        fields: the object.
        source: name of the file, for error messages.
    """

    def __init__(self, fields: dict[str, Any], source: str) -> None:
        self.fields = fields
        self.source = source

    def require(self, name: str, kind: type[T]) -> T:
        """The field's value; raises CheckpointError if it is absent, null or of another type."""
        value = self.get(name, kind)
        if value is None:
            raise CheckpointError(f"{self.source} lacks {name!r}; the checkpoint is incomplete")
        return value

    def get(self, name: str, kind: type[T], default: T | None = None) -> T | None:
        """The field's value, or the default if it is absent or null."""
        value = self.fields.get(name)
        if value is None:
            return default
        is_bool_for_number = isinstance(value, bool) and kind is not bool
        if is_bool_for_number or not isinstance(value, _KINDS.get(kind, (kind,))):
            raise CheckpointError(
                f"{self.source}: {name!r} must be {kind.__name__}, found {value!r}"
            )
        return kind(value)  # type: ignore[call-arg]  # int to float where float is wanted

    def flag(self, name: str) -> bool:
        """A boolean field that is false if absent."""
        return self.get(name, bool, False) is True

    def count(self, name: str) -> int:
        """A required integer above zero."""
        value = self.require(name, int)
        if value < 1:
            raise CheckpointError(f"{self.source}: {name!r} must be at least 1, found {value}")
        return value

    def refuse(self, name: str, found: object, supported: str) -> CheckpointError:
        """The error to raise for a field whose value is not supported."""
        return CheckpointError(
            f"{self.source}: {name} {found!r} is not supported; supported: {supported}"
        )


def read_raw(model_dir: Path) -> RawConfig:
    """Parse ``config.json``.

    Raises:
        CheckpointError: there is no such directory or file, or it is not a JSON object.
    """
    if not model_dir.is_dir():
        raise CheckpointError(f"model directory {str(model_dir)!r} does not exist")
    fields = read_json_object(model_dir / "config.json")
    if fields.get("quantization_config") is None:
        fields["quantization_config"] = _older_quantization(model_dir, fields)
    return RawConfig(fields, str(model_dir / "config.json"))


def _older_quantization(model_dir: Path, fields: dict[str, Any]) -> object:
    """The ``quantization_config`` of a checkpoint that has it elsewhere: early ones of
    llm-compressor in a field of another name, those of ModelOpt up to 0.29 in another file."""
    path = model_dir / "hf_quant_config.json"
    if (found := fields.get("compression_config")) is not None or not path.exists():
        return found
    quantization = read_json_object(path).get("quantization")
    if isinstance(quantization, dict):
        return {"quant_method": "modelopt", **quantization}
    return quantization


def read_eos_token_ids(model_dir: Path, raw: RawConfig) -> tuple[int, ...]:
    """The end-of-sequence tokens of ``generation_config.json``, ``config.json`` and the tokenizer
    together. As in vLLM: fine-tunes for chats may name theirs in the tokenizer's files alone.

    Those that the model has no logits for are left out: fine-tunes may name a token that was added
    to the tokenizer only. No output ends with it, and nothing can mask it."""
    path = model_dir / "generation_config.json"
    generation = read_json_object(path) if path.exists() else {}
    found: set[int] = set()
    of_tokenizer, size = _tokenizer_eos(model_dir), raw.count("vocab_size")
    for value in (generation.get("eos_token_id"), raw.fields.get("eos_token_id"), of_tokenizer):
        ids = value if isinstance(value, list) else [value]
        found.update(token for token in ids if isinstance(token, int))
    beyond = sorted(token for token in found if not 0 <= token < size)
    if beyond:
        logger.warning(
            "%s: end-of-sequence tokens %s are not in the model's vocabulary of %d tokens: no "
            "output ends with them",
            model_dir,
            beyond,
            size,
        )
    return tuple(sorted(found.difference(beyond)))


class _AddedToken(msgspec.Struct):
    content: str
    id: int


class _TokenizerFile(msgspec.Struct):
    """What is read here of ``tokenizer.json``."""

    added_tokens: list[_AddedToken] = []


def _tokenizer_eos(model_dir: Path) -> int | None:
    """The token that the tokenizer's config names as the end of a sequence; None if it names none,
    or one that is not among the added tokens."""
    path = model_dir / "tokenizer_config.json"
    token = read_json_object(path).get("eos_token") if path.exists() else None
    text = token.get("content") if isinstance(token, dict) else token
    path = model_dir / "tokenizer.json"
    if text is None or not path.exists():
        return None
    try:
        added = msgspec.json.decode(path.read_bytes(), type=_TokenizerFile).added_tokens
    except (UnicodeDecodeError, msgspec.DecodeError):
        return None  # whoever loads the tokenizer says what is wrong with it
    return next((each.id for each in added if each.content == text), None)


def read_llama(raw: RawConfig, architecture: str, eos: tuple[int, ...]) -> ModelConfig:
    """LlamaForCausalLM: biases by ``attention_bias`` and ``mlp_bias``."""
    attention_bias, mlp_bias = raw.flag("attention_bias"), raw.flag("mlp_bias")
    biases = {"qkv_bias": attention_bias, "output_bias": attention_bias, "mlp_bias": mlp_bias}
    return read_decoder(raw, architecture, eos, biases)


def read_mistral(raw: RawConfig, architecture: str, eos: tuple[int, ...]) -> ModelConfig:
    """MistralForCausalLM: Llama's arithmetic, with a sliding window of 4,096 tokens if the config
    doesn't mention it."""
    raw = RawConfig({"sliding_window": 4096, **raw.fields}, raw.source)
    return within_window(raw, read_decoder(raw, architecture, eos, {}))


def within_window(raw: RawConfig, config: ModelConfig) -> ModelConfig:
    """Limit the model's sequences to its sliding window, if it has one, as every token then attends
    to all tokens before it.

    Raises:
        CheckpointError: the window is less than one token.
    """
    if raw.fields.get("sliding_window") is None:
        return config
    window = raw.count("sliding_window")
    if window >= config.max_positions:
        return config
    return replace(config, max_positions=window, sliding_window=window)


def read_seed_oss(raw: RawConfig, architecture: str, eos: tuple[int, ...]) -> ModelConfig:
    """SeedOssForCausalLM: Llama's arithmetic, with a separate flag for the output's bias."""
    biases = {
        "qkv_bias": raw.get("attention_bias", bool, True),
        "output_bias": raw.flag("attention_out_bias"),
        "mlp_bias": raw.flag("mlp_bias"),
    }
    return read_decoder(raw, architecture, eos, biases)


def read_internlm3(raw: RawConfig, architecture: str, eos: tuple[int, ...]) -> ModelConfig:
    """InternLM3ForCausalLM: Llama's arithmetic. Published configs have the biases in ``qkv_bias``
    and ``bias``."""
    bias = raw.flag("bias") or raw.flag("mlp_bias")
    qkv_bias = raw.flag("qkv_bias") or raw.flag("attention_bias")
    biases = {"qkv_bias": qkv_bias, "output_bias": bias, "mlp_bias": bias}
    return read_decoder(raw, architecture, eos, biases)


def read_phi3(raw: RawConfig, architecture: str, eos: tuple[int, ...]) -> ModelConfig:
    """Phi3ForCausalLM (Phi-3, 3.5, 4): Llama's arithmetic, with a part of each head rotated."""
    return within_window(raw, read_decoder(raw, architecture, eos, {}))


def read_qwen2(raw: RawConfig, architecture: str, eos: tuple[int, ...]) -> ModelConfig:
    """Qwen2ForCausalLM: biases of queries, keys and values only."""
    return read_decoder(raw, architecture, eos, {"qkv_bias": True})


def read_qwen3(raw: RawConfig, architecture: str, eos: tuple[int, ...]) -> ModelConfig:
    """Qwen3ForCausalLM: norms of queries and keys, biases by ``attention_bias``."""
    bias = raw.flag("attention_bias")
    options = {"qkv_bias": bias, "output_bias": bias, "has_qk_norm": True}
    return read_decoder(raw, architecture, eos, options)


def read_decoder(
    raw: RawConfig, architecture: str, eos: tuple[int, ...], options: dict[str, Any]
) -> ModelConfig:
    """Read the fields that all decoders have in common.

    Args:
        raw: the parsed config.json.
        architecture, eos: see ModelConfig.
        options: fields of ModelConfig that differ from their defaults.

    Raises:
        CheckpointError: a field is missing or invalid, or its value is not supported.
    """
    _refuse_unsupported(raw)
    num_heads = raw.count("num_attention_heads")
    num_kv_heads = raw.get("num_key_value_heads", int, num_heads) or num_heads
    if num_heads % num_kv_heads:
        raise CheckpointError(
            f"{raw.source}: {num_heads} query heads can't share {num_kv_heads} key/value heads"
        )
    head_dim = raw.get("head_dim", int) or raw.count("hidden_size") // num_heads
    rope = read_rope(raw, head_dim)
    return ModelConfig(
        architecture=architecture,
        vocab_size=raw.count("vocab_size"),
        hidden_size=raw.count("hidden_size"),
        intermediate_size=raw.count("intermediate_size"),
        num_layers=raw.count("num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        rms_norm_eps=raw.require("rms_norm_eps", float),
        max_positions=_longest_sequence(raw, rope),
        rope=rope,
        tie_embeddings=raw.flag("tie_word_embeddings"),
        dtype=raw.get("dtype", str) or raw.get("torch_dtype", str) or "float32",
        eos_token_ids=eos,
        quantization=read_quantization(raw.fields.get("quantization_config"), raw.source),
        **options,
    )


def _longest_sequence(raw: RawConfig, rope: RopeConfig) -> int:
    """``max_position_embeddings`` times the factor of linear scaling, or the original context times
    YaRN's factor if that is longer: users who add YaRN to Qwen's config, as the model cards
    describe, leave that field as it is. vLLM reads both in the same way. Dual chunk attention is
    not computed, so sequences are limited to one of its chunks."""
    longest = raw.count("max_position_embeddings")
    if isinstance(rope.scaling, YarnScaling):
        longest = max(longest, int(rope.scaling.factor * rope.scaling.original_positions))
    elif isinstance(rope.scaling, LinearScaling):
        longest = int(rope.scaling.factor * longest)
    chunks = raw.get("dual_chunk_attention_config", dict)
    if chunks is not None:  # Qwen2.5-1M: within one chunk it equals plain attention
        source = f"{raw.source}: dual_chunk_attention_config"
        longest = min(longest, RawConfig(chunks, source).count("chunk_size"))
    return longest


def _refuse_unsupported(raw: RawConfig) -> None:
    if (activation := raw.get("hidden_act", str, "silu")) != "silu":
        raise raw.refuse("hidden_act", activation, "silu")
    layer_types = set(raw.get("layer_types", list) or [])
    if raw.flag("use_sliding_window") and layer_types != {"full_attention"}:
        raise raw.refuse("use_sliding_window", True, "full attention in every layer")
    if others := layer_types - {"full_attention"}:
        raise raw.refuse("layer_types", sorted(others), "full_attention")


def read_rope(raw: RawConfig, head_dim: int) -> RopeConfig:
    """Read the rotary embedding, from either spelling.

    Raises:
        CheckpointError: the kind of scaling is not supported, or lacks fields.
    """
    merged = {"rope_theta": raw.fields.get("rope_theta")}
    merged |= raw.get("rope_scaling", dict) or {}
    merged |= raw.get("rope_parameters", dict) or {}
    if kinds := sorted(name for name, value in merged.items() if isinstance(value, dict)):
        raise raw.refuse("rope_parameters", kinds, "one rotary embedding for all layers")
    rope = RawConfig(merged, f"{raw.source}: rope")
    partial = rope.get("partial_rotary_factor", float) or raw.get("partial_rotary_factor", float)
    if raw.fields.get("original_max_position_embeddings") is not None:  # at the top, as in Phi-3
        original = raw.count("original_max_position_embeddings")
        merged.setdefault("original_max_position_embeddings", original)
    rotary_dim = int(head_dim * (partial or 1.0))
    return RopeConfig(
        theta=rope.get("rope_theta", float, 10000.0) or 10000.0,
        rotary_dim=rotary_dim,
        scaling=_read_scaling(rope, raw.count("max_position_embeddings"), rotary_dim),
    )


def _read_scaling(rope: RawConfig, max_positions: int, rotary_dim: int) -> RopeScaling | None:
    kind = rope.get("rope_type", str) or rope.get("type", str) or "default"
    if kind in ("default", "dynamic"):
        return None  # dynamic: affects only sequences beyond the context, which are rejected
    if kind == "linear":
        return LinearScaling(rope.require("factor", float))
    if kind == "llama3":
        return Llama3Scaling(
            rope.require("factor", float),
            rope.require("low_freq_factor", float),
            rope.require("high_freq_factor", float),
            rope.require("original_max_position_embeddings", int),
        )
    if kind == "yarn":
        return _read_yarn(rope, max_positions)
    if kind in ("longrope", "su"):
        return _read_longrope(rope, max_positions, rotary_dim)
    raise rope.refuse("rope_type", kind, ", ".join(_SCALINGS))


def _read_yarn(rope: RawConfig, max_positions: int) -> YarnScaling:
    original = rope.get("original_max_position_embeddings", int) or max_positions
    factor = rope.get("factor", float) or max_positions / original
    attention_factor = rope.get("attention_factor", float)
    all_dim = rope.get("mscale_all_dim", float)
    if attention_factor is None:
        attention_factor = yarn_attention_factor(factor, rope.get("mscale", float), all_dim)
        # a factor on the paper's value, as in vLLM; DeepSeek-R1-0528-Qwen3-8B cancels it with this
        attention_factor *= rope.get("attn_factor", float, 1.0) or 1.0
    if (share := rope.get("extrapolation_factor", float, 1.0)) != 1.0:
        raise rope.refuse("extrapolation_factor", share, "1")
    return YarnScaling(
        factor=factor,
        original_positions=original,
        beta_fast=rope.get("beta_fast", float) or 32.0,
        beta_slow=rope.get("beta_slow", float) or 1.0,
        attention_factor=attention_factor,
        truncate=rope.get("truncate", bool, True) is not False,
        score_factor=yarn_mscale(factor, all_dim) ** 2 if all_dim else 1.0,
    )


def _read_longrope(rope: RawConfig, max_positions: int, rotary_dim: int) -> LongRopeScaling:
    """Read LongRoPE, with one set of factors for all lengths, as in vLLM: KV is reused after a
    sequence has grown. It is the long set if the context is longer than that of the pre-training;
    see ``RopeConfig.for_length``."""
    original = rope.require("original_max_position_embeddings", int)
    short = _read_factors(rope, "short_factor", rotary_dim)
    long = _read_factors(rope, "long_factor", rotary_dim)
    factor = rope.get("factor", float) or max_positions / original
    attention_factor = rope.get("attention_factor", float)
    if attention_factor is None:
        attention_factor = longrope_attention_factor(factor, original)
    used = long if max_positions > original else short
    return LongRopeScaling(used, attention_factor, short, original)


def _read_factors(rope: RawConfig, name: str, rotary_dim: int) -> tuple[float, ...]:
    factors = rope.require(name, list)
    if len(factors) != rotary_dim // 2 or not all(isinstance(f, int | float) for f in factors):
        raise CheckpointError(
            f"{rope.source}: {name!r} must have {rotary_dim // 2} numbers, found {len(factors)}"
        )
    return tuple(map(float, factors))
