"""DeepSeek-V2 and V3: latent attention, and a mixture of experts after the first layers."""

from __future__ import annotations

from dataclasses import replace

from mooncake_engine.errors import CheckpointError
from mooncake_engine.models.decoder import AttentionBlock
from mooncake_engine.models.hf_config import (
    MlaConfig,
    ModelConfig,
    MoeConfig,
    RawConfig,
    read_decoder,
    read_rope,
)
from mooncake_engine.models.layers import ParallelContext
from mooncake_engine.models.mla_attention import LatentAttention
from mooncake_engine.models.mlp import RoutingConfig, Scoring
from mooncake_engine.models.rope import RopeConfig, YarnScaling
from mooncake_engine.models.sparse import SparseDecoder, read_routing


class DeepseekDecoder(SparseDecoder):
    """A ``SparseDecoder`` with latent attention."""

    def build_attention(self, parallel: ParallelContext, layer: int) -> AttentionBlock:
        """Build the latent attention of a layer."""
        if self.config.mla is None:
            raise CheckpointError(f"{self.config.architecture} without latent attention")
        return LatentAttention(self.config, self.config.mla, parallel, layer)

    def is_ignored(self, name: str) -> bool:
        """Ignores also the layers beyond the last, which predict further tokens (MTP), for
        speculative decoding."""
        layer = self.layer_of(name)
        is_beyond = layer is not None and layer >= self.config.num_layers
        return is_beyond or super().is_ignored(name)


def read_deepseek_v2(raw: RawConfig, architecture: str, eos: tuple[int, ...]) -> ModelConfig:
    """DeepseekV2ForCausalLM: softmax scores, ``greedy`` or ``group_limited_greedy``."""
    _only(raw, "scoring_func", ("softmax",))
    _only(raw, "norm_topk_prob", (False,))
    _only(raw, "topk_method", ("greedy", "group_limited_greedy"))
    routing = _read_scaled_routing(raw)
    if raw.get("topk_method", str) == "group_limited_greedy":
        routing = _grouped(raw, routing)
    return _read_deepseek(raw, architecture, eos, replace(routing, is_normalized=False))


def read_deepseek_v3(raw: RawConfig, architecture: str, eos: tuple[int, ...]) -> ModelConfig:
    """DeepseekV3ForCausalLM: sigmoid scores, groups by their two best, a bias on the choice."""
    _only(raw, "scoring_func", ("sigmoid",))
    _only(raw, "topk_method", ("noaux_tc",))
    routing = replace(
        _grouped(raw, _read_scaled_routing(raw)),
        scoring=Scoring.SIGMOID,
        group_scorers=2,
        is_normalized=raw.get("norm_topk_prob", bool, True) is True,
        has_correction_bias=True,
    )
    if routing.groups > 1 and routing.num_experts < 2 * routing.groups:
        raise raw.refuse("n_group", routing.groups, "groups of two experts or more")
    return _read_deepseek(raw, architecture, eos, routing)


def _read_deepseek(
    raw: RawConfig, architecture: str, eos: tuple[int, ...], routing: RoutingConfig
) -> ModelConfig:
    _only(raw, "moe_layer_freq", (1,))
    _only(raw, "mlp_bias", (False,))
    bias, size = raw.flag("attention_bias"), raw.count("moe_intermediate_size")
    moe = MoeConfig(
        routing,
        size,
        shared_size=size * (raw.get("n_shared_experts", int) or 0),
        dense_layers=frozenset(range(raw.get("first_k_dense_replace", int) or 0)),
    )
    options = {"qkv_bias": bias, "output_bias": bias, "moe": moe}
    config = read_decoder(raw, architecture, eos, options)
    rope = read_rope(raw, raw.count("qk_rope_head_dim"))
    mla = _read_mla(raw, rope)
    # for KV planning and sharding, latents are one key/value head that all query heads share
    return replace(config, mla=mla, rope=rope, num_kv_heads=1, head_dim=mla.query_dim)


def _read_mla(raw: RawConfig, rope: RopeConfig) -> MlaConfig:
    nope_dim, rope_dim = raw.count("qk_nope_head_dim"), rope.rotary_dim
    scale = (nope_dim + rope_dim) ** -0.5
    if isinstance(rope.scaling, YarnScaling):
        scale *= rope.scaling.score_factor
    return MlaConfig(
        latent_dim=raw.count("kv_lora_rank"),
        rope_dim=rope_dim,
        nope_dim=nope_dim,
        value_dim=raw.count("v_head_dim"),
        query_rank=raw.get("q_lora_rank", int),
        scale=scale,
        is_interleaved=raw.get("rope_interleave", bool, True) is True,
    )


def _read_scaled_routing(raw: RawConfig) -> RoutingConfig:
    scaling = raw.get("routed_scaling_factor", float, 1.0) or 1.0
    return replace(read_routing(raw, ("n_routed_experts",)), scaling=scaling)


def _grouped(raw: RawConfig, routing: RoutingConfig) -> RoutingConfig:
    groups, chosen = raw.count("n_group"), raw.count("topk_group")
    if routing.num_experts % groups or chosen > groups:
        raise CheckpointError(
            f"{raw.source}: {routing.num_experts} experts in {groups} groups, {chosen} of them "
            "chosen: expected groups of equal size, and at most all of them chosen"
        )
    if routing.experts_per_token > routing.num_experts // groups * chosen:
        raise CheckpointError(
            f"{raw.source}: {routing.experts_per_token} experts per token can't come from "
            f"{chosen} groups of {routing.num_experts // groups}"
        )
    return replace(routing, groups=groups, chosen_groups=chosen)


def _only(raw: RawConfig, name: str, supported: tuple[object, ...]) -> None:
    """Raise CheckpointError if the field is present and has an unsupported value."""
    if (found := raw.fields.get(name)) is not None and found not in supported:
        raise raw.refuse(name, found, ", ".join(str(value) for value in supported))
