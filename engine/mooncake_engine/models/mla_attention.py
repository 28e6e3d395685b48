"""Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434), in its absorbed form.

The cache holds, per token, one latent row and one rotated row, which all heads share. The up
projection of keys is multiplied into the queries, and that of values into the output, so attention
runs on the cached latents as they are, for prompts and decodes alike.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from mooncake_engine.models.gqa_attention import attend, rank_heads
from mooncake_engine.models.hf_config import MlaConfig, ModelConfig
from mooncake_engine.models.layers import (
    ColumnLinear,
    LinearSource,
    Norm,
    ParallelContext,
    RowLinear,
    Span,
    WeightShard,
)
from mooncake_engine.models.parallel_context import AttentionWidths, ForwardContext, TokenSlots
from mooncake_hal.latents import LatentRows

_NORM_EPS = 1e-6
"""Epsilon of the norms inside the attention; ``rms_norm_eps`` of the checkpoint applies to all
others."""


class LatentNames(NamedTuple):
    """The checkpoint's names of the parts; ``{}`` stands for the layer's number."""

    query: str = "model.layers.{}.self_attn.q_proj"
    query_down: str = "model.layers.{}.self_attn.q_a_proj"
    query_norm: str = "model.layers.{}.self_attn.q_a_layernorm"
    query_up: str = "model.layers.{}.self_attn.q_b_proj"
    kv_down: str = "model.layers.{}.self_attn.kv_a_proj_with_mqa"
    kv_norm: str = "model.layers.{}.self_attn.kv_a_layernorm"
    kv_up: str = "model.layers.{}.self_attn.kv_b_proj"
    output: str = "model.layers.{}.self_attn.o_proj"

    def of(self, layer: int) -> LatentNames:
        """The names with the layer's number filled in."""
        return LatentNames(*(name.format(layer) for name in self))


class LatentQuery:
    """Computes the queries of this rank's heads, directly or through a low-rank projection.

    Args:
        config: config of the model.
        mla: the model's latent attention.
        parallel: the parallel context of the rank.
        names: names of the parts, with the layer's number filled in.
    """

    def __init__(
        self, config: ModelConfig, mla: MlaConfig, parallel: ParallelContext, names: LatentNames
    ) -> None:
        heads, self._dim = rank_heads(config, parallel), mla.query_dim
        rows = Span(heads.query_start * self._dim, heads.query_stop * self._dim)
        self._rope_rows = mla.rope_dim if mla.is_interleaved else 0
        name, fan_in, rank = names.query, config.hidden_size, mla.query_rank
        self._down: tuple[ColumnLinear, Norm] | None = None
        if rank is not None:
            down = replicated_linear(parallel, names.query_down, (rank, fan_in), config.qkv_bias)
            self._down = (down, Norm(parallel, names.query_norm, rank, _NORM_EPS))
            name, fan_in = names.query_up, rank
        source = LinearSource(name, config.num_heads * self._dim, rows)
        # rows are reordered, so the rows that share a scale would not stay together
        dense = replace(parallel, quantization=None) if self._rope_rows else parallel
        self._up = ColumnLinear(dense, (source,), fan_in)

    def weight_shards(self) -> Iterator[WeightShard]:
        """The parts of checkpoint tensors to load."""
        for part in self._down or ():
            yield from part.weight_shards()
        yield from self._up.weight_shards()

    def process_weights_after_loading(self) -> None:
        """Convert the loaded weights to the backend's layout."""
        if self._down is not None:
            self._down[0].process_weights_after_loading()
        if self._rope_rows:
            weight = self._up.dense_rows
            pairs_to_halves(weight.view(-1, self._dim, weight.shape[1]), self._rope_rows)
        self._up.process_weights_after_loading()

    def __call__(self, x: Tensor) -> Tensor:
        """Map [tokens, hidden] to [tokens, heads, nope ++ rope]."""
        if self._down is not None:
            down, norm = self._down
            x = norm(down(x))
        return self._up(x).view(x.shape[0], -1, self._dim)


class AbsorbedWeights:
    """The up projections of latents to keys and values, applied to queries and outputs instead.

    Args:
        config: config of the model.
        mla: the model's latent attention.
        parallel: the parallel context of the rank.
        name: name of the checkpoint's linear, with the layer's number filled in.
    """

    def __init__(
        self, config: ModelConfig, mla: MlaConfig, parallel: ParallelContext, name: str
    ) -> None:
        heads, rows = rank_heads(config, parallel), mla.nope_dim + mla.value_dim
        weight = parallel.empty(heads.query_heads, rows, mla.latent_dim)
        shape = (config.num_heads * rows, mla.latent_dim)
        offset = (heads.query_start * rows, 0)
        self._slot = WeightShard(f"{name}.weight", weight.flatten(0, 1), shape, offset)
        self._key_up, value_up = torch.split(weight, [mla.nope_dim, mla.value_dim], dim=1)
        self._value_up = value_up.transpose(1, 2)

    def weight_shards(self) -> Iterator[WeightShard]:
        """The parts of checkpoint tensors to load."""
        yield self._slot

    def into_latents(self, query: Tensor) -> Tensor:
        """Map queries, [tokens, heads, nope], to [tokens, heads, latent]."""
        return torch.bmm(query.transpose(0, 1), self._key_up).transpose(0, 1)

    def from_latents(self, attended: Tensor) -> Tensor:
        """Map outputs, [tokens, heads, latent], to [tokens, heads, value]."""
        return torch.bmm(attended.transpose(0, 1), self._value_up).transpose(0, 1)


class LatentAttention:
    """Attention over paged latents. Heads are split over ranks, latents are replicated.

    Raises:
        ConfigError: there are more ranks than heads.
    """

    def __init__(
        self, config: ModelConfig, mla: MlaConfig, parallel: ParallelContext, layer: int
    ) -> None:
        self._ops = parallel.latent_ops(layer)
        self._layer = layer
        self._mla = mla
        names, hidden = LatentNames().of(layer), config.hidden_size
        self._query = LatentQuery(config, mla, parallel, names)
        rows = mla.latent_dim + mla.rope_dim
        dense = replace(parallel, quantization=None)  # its rows may be reordered
        self._kv_down = replicated_linear(dense, names.kv_down, (rows, hidden), config.qkv_bias)
        self._kv_norm = Norm(parallel, names.kv_norm, mla.latent_dim, _NORM_EPS)
        self._kv_up = AbsorbedWeights(config, mla, parallel, names.kv_up)
        heads, dim = rank_heads(config, parallel), mla.value_dim
        self._num_heads = heads.query_heads
        columns = Span(heads.query_start * dim, heads.query_stop * dim)
        shape = (hidden, config.num_heads * dim)
        bias = config.output_bias
        self._output = RowLinear(parallel, names.output, columns, shape, has_bias=bias)

    def weight_shards(self) -> Iterator[WeightShard]:
        """The parts of checkpoint tensors to load."""
        yield from self._query.weight_shards()
        yield from self._kv_down.weight_shards()
        yield from self._kv_norm.weight_shards()
        yield from self._kv_up.weight_shards()
        yield from self._output.weight_shards()

    def process_weights_after_loading(self) -> None:
        """Convert the loaded weights to the backend's layout."""
        down, rope_dim = self._kv_down, self._mla.rope_dim
        for rows in (down.dense_rows,) if down.bias is None else (down.dense_rows, down.bias):
            if self._mla.is_interleaved:
                pairs_to_halves(rows.view(1, len(rows), -1), rope_dim)
            rotated = rows[len(rows) - rope_dim :]
            rotated.copy_(self._ops.pack_rope(rotated))
        for linear in (self._query, down, self._output):
            linear.process_weights_after_loading()

    @property
    def widths(self) -> AttentionWidths:
        mla = self._mla
        return AttentionWidths(self._num_heads, mla.latent_dim + mla.rope_dim, mla.latent_dim)

    def prepare(self, x: Tensor, tokens: TokenSlots) -> Tensor:
        mla, norm = self._mla, self._kv_norm
        plain, rotated = torch.split(self._query(x), [mla.nope_dim, mla.rope_dim], dim=-1)
        rows = LatentRows(self._kv_down(x), norm.weight, norm.eps, tokens.positions, tokens.cos_sin)
        latent_cache, rope_cache = tokens.kv[self._layer]
        rotated = self._ops.write_latents(
            rotated, rows, latent_cache, rope_cache, tokens.slot_mapping
        )
        return torch.cat((self._kv_up.into_latents(plain), rotated), dim=-1)

    def attend(self, query: Tensor, context: ForwardContext) -> Tensor:
        kernels = (self._ops.mla_decode_attention, self._ops.mla_prefill_attention)
        return attend(kernels, query, context.kv[self._layer], context.batch, self._mla.scale)

    def finish(self, attended: Tensor) -> Tensor:
        return self._output.reduce(self.partial(attended))

    def partial(self, attended: Tensor) -> Tensor:
        rows = self._kv_up.from_latents(attended).reshape(attended.shape[0], -1)
        return self._output.partial(rows)


def replicated_linear(
    parallel: ParallelContext, name: str, shape: tuple[int, int], has_bias: bool
) -> ColumnLinear:
    """A linear of shape (out, in) that every rank holds whole."""
    out_features, in_features = shape
    source = LinearSource(name, out_features, Span(0, out_features))
    return ColumnLinear(parallel, (source,), in_features, has_bias=has_bias)


def pairs_to_halves(
    weight: Tensor,  # [heads, rows, in]
    rope_rows: int,
) -> None:
    """Reorder each head's last rows, in place, for a rotation of halves instead of pairs.

    The checkpoint rotates elements 0 and 1, 2 and 3, and so on. Scores are sums over all elements,
    so they don't change if queries and keys are reordered alike.
    """
    rope = weight[:, weight.shape[1] - rope_rows :]
    rope.copy_(torch.cat((rope[:, 0::2], rope[:, 1::2]), dim=1))
