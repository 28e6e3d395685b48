"""The Llama-like decoder: Llama, Qwen2 (biases) and Qwen3 (query and key norms)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from mooncake_engine.models.heads import HeadShare, share_heads
from mooncake_engine.models.hf_config import ModelConfig
from mooncake_engine.models.layers import (
    ColumnLinear,
    Head,
    LinearSource,
    Norm,
    Placement,
    RowLinear,
    Span,
    VocabTable,
    WeightSlot,
)
from mooncake_engine.models.rope import cos_sin_table
from mooncake_hal.backend import AttentionBatch, Ops


@dataclass(frozen=True, slots=True, eq=False)
class ForwardContext:
    """What a forward pass needs besides its tokens.

    Args:
        batch: which tokens attend to which KV.
        kv: per layer, the pool's planes ``[num_blocks, block_size, kv_heads, head_dim]``.
        layer_done: told of each layer once its KV is written (enqueued on the device).
    """

    batch: AttentionBatch
    kv: Sequence[tuple[Tensor, ...]]
    layer_done: Callable[[int], None] | None = None


class CheckpointNames(NamedTuple):
    """What the checkpoint calls our layers; ``{}`` stands for the layer's number."""

    embedding: str = "model.embed_tokens"
    head: str = "lm_head"
    final_norm: str = "model.norm"
    input_norm: str = "model.layers.{}.input_layernorm"
    mlp_norm: str = "model.layers.{}.post_attention_layernorm"
    qkv: tuple[str, str, str] = (
        "model.layers.{}.self_attn.q_proj",
        "model.layers.{}.self_attn.k_proj",
        "model.layers.{}.self_attn.v_proj",
    )
    qk_norms: tuple[str, str] = (
        "model.layers.{}.self_attn.q_norm",
        "model.layers.{}.self_attn.k_norm",
    )
    attention_output: str = "model.layers.{}.self_attn.o_proj"
    gate_up: tuple[str, str] = ("model.layers.{}.mlp.gate_proj", "model.layers.{}.mlp.up_proj")
    mlp_output: str = "model.layers.{}.mlp.down_proj"


class Attention:
    """Grouped-query attention over paged KV, with this rank's heads."""

    def __init__(
        self, config: ModelConfig, placement: Placement, names: CheckpointNames, layer: int
    ) -> None:
        self._ops = placement.ops
        self._heads = _share(config, placement)
        self._head_dim = dim = config.head_dim
        self._scale = dim**-0.5
        heads = self._heads
        self.qkv = ColumnLinear(
            placement,
            _qkv_sources(config, heads, [name.format(layer) for name in names.qkv]),
            config.hidden_size,
            has_bias=config.qkv_bias,
        )
        self.output = RowLinear(
            placement,
            names.attention_output.format(layer),
            Span(heads.query_start * dim, heads.query_stop * dim),
            (config.hidden_size, config.num_heads * dim),
            has_bias=config.output_bias,
        )
        self.norms = tuple(
            Norm(placement, name.format(layer), dim, config.rms_norm_eps)
            for name in (names.qk_norms if config.has_qk_norm else ())
        )

    def __call__(
        self, x: Tensor, positions: Tensor, cos_sin: Tensor, context: ForwardContext, layer: int
    ) -> Tensor:
        """[tokens, hidden] to [tokens, hidden]; writes the tokens' KV on the way."""
        query, key, value = self._project(x)
        query, key = self._ops.rope(query, key, positions, cos_sin)
        key_cache, value_cache = context.kv[layer]
        batch = context.batch
        self._ops.write_kv(key, value, key_cache, value_cache, batch.slot_mapping)
        if context.layer_done is not None:
            context.layer_done(layer)
        attended = attend(self._ops, query, (key_cache, value_cache), batch, self._scale)
        return self.output(attended.reshape(x.shape[0], -1))

    def _project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values, each ``[tokens, heads, head_dim]``, normed where asked."""
        heads = self._heads
        rows = self.qkv(x).view(x.shape[0], -1, self._head_dim)
        sizes = [heads.query_heads, heads.kv_heads, heads.kv_heads]
        query, key, value = torch.split(rows, sizes, dim=1)
        if self.norms:
            query, key = self.norms[0](query), self.norms[1](key)
        return query, key, value


class DecoderLayer:
    """Attention and a gated MLP, each behind a norm and added to the residual stream."""

    def __init__(
        self, config: ModelConfig, placement: Placement, names: CheckpointNames, layer: int
    ) -> None:
        self._ops = placement.ops
        self._layer = layer
        hidden, inner = config.hidden_size, config.intermediate_size
        share = placement.share(inner)
        eps, has_bias = config.rms_norm_eps, config.mlp_bias
        self.input_norm = Norm(placement, names.input_norm.format(layer), hidden, eps)
        self.attention = Attention(config, placement, names, layer)
        self.mlp_norm = Norm(placement, names.mlp_norm.format(layer), hidden, eps)
        sources = tuple(LinearSource(name.format(layer), inner, share) for name in names.gate_up)
        self.gate_up = ColumnLinear(placement, sources, hidden, has_bias=has_bias)
        self.down = RowLinear(
            placement, names.mlp_output.format(layer), share, (hidden, inner), has_bias=has_bias
        )

    @property
    def linears(self) -> tuple[ColumnLinear | RowLinear, ...]:
        """What is packed after loading."""
        return (self.attention.qkv, self.attention.output, self.gate_up, self.down)

    def slots(self) -> Iterator[WeightSlot]:
        """What to load."""
        for norm in (self.input_norm, self.mlp_norm, *self.attention.norms):
            yield from norm.slots()
        for linear in self.linears:
            yield from linear.slots()

    def __call__(
        self, x: Tensor, residual: Tensor, rotation: tuple[Tensor, Tensor], context: ForwardContext
    ) -> tuple[Tensor, Tensor]:
        """Takes normed ``x`` and the residual; returns the MLP's output and the new residual."""
        x = self.attention(x, *rotation, context, self._layer)
        x, residual = self.mlp_norm.add(x, residual)
        return self.down(self._ops.silu_mul(self.gate_up(x))), residual


class Decoder:
    """A causal language model of one rank.

    Args:
        config: the model's facts.
        placement: the rank's device and group.
        max_positions: longest sequence to prepare the rotation for.
    """

    names: ClassVar[CheckpointNames] = CheckpointNames()
    ignored: ClassVar[tuple[str, ...]] = ("rotary_emb.inv_freq",)
    """Ends of checkpoint names that hold nothing we need."""

    def __init__(self, config: ModelConfig, placement: Placement, max_positions: int) -> None:
        self.config = config
        names, shape = self.names, (config.vocab_size, config.hidden_size)
        self._embedding = VocabTable(placement, names.embedding, *shape)
        self._layers = [
            DecoderLayer(config, placement, names, layer) for layer in range(config.num_layers)
        ]
        self._norm = Norm(placement, names.final_norm, config.hidden_size, config.rms_norm_eps)
        # dropped once packed: only an embedding needs the table itself
        self._own_head = (
            None if config.tie_embeddings else VocabTable(placement, names.head, *shape)
        )
        self._head = Head(placement, self._own_head or self._embedding, config.vocab_size)
        self._cos_sin = cos_sin_table(config.rope, max_positions).to(placement.device)

    def slots(self) -> Iterator[WeightSlot]:
        """Every checkpoint tensor that this rank wants a part of."""
        yield from self._embedding.slots()
        for layer in self._layers:
            yield from layer.slots()
        yield from self._norm.slots()
        if self._own_head is not None:
            yield from self._own_head.slots()

    def is_ignored(self, name: str) -> bool:
        """Whether a checkpoint tensor may be left unread."""
        is_tied_head = self.config.tie_embeddings and name == f"{self.names.head}.weight"
        return is_tied_head or name.endswith(self.ignored)

    def pack(self) -> None:
        """Bring all loaded weights into the backend's form, one at a time."""
        for layer in self._layers:
            for linear in layer.linears:
                linear.pack()
        self._head.pack()
        self._own_head = None

    def forward(self, token_ids: Tensor, positions: Tensor, context: ForwardContext) -> Tensor:
        """Run the tokens through all layers.

        Args:
            token_ids, positions: [tokens] int64.
            context: where their KV is.

        Returns:
            [tokens, hidden], after the final norm.
        """
        residual = self._embedding.embed(token_ids)
        x = self._layers[0].input_norm(residual)
        rotation = (positions, self._cos_sin)
        next_norms = [layer.input_norm for layer in self._layers[1:]] + [self._norm]
        for layer, norm in zip(self._layers, next_norms, strict=True):
            x, residual = layer(x, residual, rotation, context)
            x, residual = norm.add(x, residual)
        return x

    def logits(self, hidden: Tensor) -> Tensor:
        """[rows, hidden] to [rows, vocab] float32; the same on every rank."""
        return self._head(hidden).float()


def attend(
    ops: Ops, query: Tensor, caches: tuple[Tensor, Tensor], batch: AttentionBatch, scale: float
) -> Tensor:
    """Attention of a mixed batch: decodes through one kernel, the rest through the other."""
    num_decodes = batch.num_decodes
    if num_decodes == query.shape[0]:
        return ops.decode_attention(query, *caches, batch, scale)
    if num_decodes == 0:
        return ops.prefill_attention(query, *caches, batch, scale)
    decoded = ops.decode_attention(query[:num_decodes], *caches, batch, scale)
    prefilled = ops.prefill_attention(query[num_decodes:], *caches, batch, scale)
    return torch.cat((decoded, prefilled))


def _share(config: ModelConfig, placement: Placement) -> HeadShare:
    return share_heads(config.num_heads, config.num_kv_heads, placement.tp_size, placement.tp_rank)


def _qkv_sources(
    config: ModelConfig, heads: HeadShare, names: list[str]
) -> tuple[LinearSource, ...]:
    dim = config.head_dim
    query = Span(heads.query_start * dim, heads.query_stop * dim)
    kv = Span(heads.kv_start * dim, heads.kv_stop * dim)
    totals = (config.num_heads * dim, config.num_kv_heads * dim, config.num_kv_heads * dim)
    return tuple(
        LinearSource(name, total, rows)
        for name, total, rows in zip(names, totals, (query, kv, kv), strict=True)
    )
