"""Grouped-query attention of Llama, optionally with the biases of Qwen2 and the norms of Qwen3."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from mooncake_engine.models.hf_config import ModelConfig
from mooncake_engine.models.layers import (
    ColumnLinear,
    LinearSource,
    Norm,
    ParallelContext,
    RowLinear,
    Span,
    WeightShard,
    linear_sources,
)
from mooncake_engine.models.parallel_context import (
    AttentionWidths,
    ForwardContext,
    HeadShare,
    TokenSlots,
    share_heads,
)
from mooncake_hal.backend import AttentionBatch
from mooncake_hal.rope_writes import KVRows, QKNorms

AttentionKernel = Callable[[Tensor, Tensor, Tensor, AttentionBatch, float], Tensor]
"""An attention kernel of ``Ops``: takes queries, both planes of the cache, batch and scale."""


class AttentionNames(NamedTuple):
    """The checkpoint's names of the linears; ``{}`` stands for the layer's number."""

    qkv: tuple[str, str, str] = (
        "model.layers.{}.self_attn.q_proj",
        "model.layers.{}.self_attn.k_proj",
        "model.layers.{}.self_attn.v_proj",
    )
    qk_norms: tuple[str, str] = (
        "model.layers.{}.self_attn.q_norm",
        "model.layers.{}.self_attn.k_norm",
    )
    output: str = "model.layers.{}.self_attn.o_proj"


class Attention:
    """Grouped-query attention over paged KV, with this rank's heads."""

    def __init__(
        self, config: ModelConfig, parallel: ParallelContext, names: AttentionNames, layer: int
    ) -> None:
        self._ops = parallel.attention_ops(layer)
        self._rope_writes = parallel.rope_write_ops(layer)
        self._layer = layer
        self._heads = heads = rank_heads(config, parallel)
        self._head_dim = dim = config.head_dim
        self._scale = dim**-0.5
        self._qkv = ColumnLinear(
            parallel,
            _qkv_sources(config, heads, [name.format(layer) for name in names.qkv]),
            config.hidden_size,
            has_bias=config.qkv_bias,
        )
        self._output = RowLinear(
            parallel,
            names.output.format(layer),
            Span(heads.query_start * dim, heads.query_stop * dim),
            (config.hidden_size, config.num_heads * dim),
            has_bias=config.output_bias,
        )
        self._norms = tuple(
            Norm(parallel, name.format(layer), dim, config.rms_norm_eps)
            for name in (names.qk_norms if config.has_qk_norm else ())
        )

    def weight_shards(self) -> Iterator[WeightShard]:
        """The parts of checkpoint tensors to load."""
        yield from self._qkv.weight_shards()
        yield from self._output.weight_shards()
        for norm in self._norms:
            yield from norm.weight_shards()

    def process_weights_after_loading(self) -> None:
        """Convert the loaded weights to the backend's layout."""
        self._qkv.process_weights_after_loading()
        self._output.process_weights_after_loading()

    @property
    def widths(self) -> AttentionWidths:
        return AttentionWidths(self._heads.query_heads, self._head_dim, self._head_dim)

    def prepare(self, x: Tensor, tokens: TokenSlots) -> Tensor:
        heads = self._heads
        projected = self._qkv(x).view(x.shape[0], -1, self._head_dim)
        sizes = [heads.query_heads, heads.kv_heads, heads.kv_heads]
        query, key, value = torch.split(projected, sizes, dim=1)
        rows = KVRows(key, value, tokens.positions, tokens.cos_sin, self._qk_norms())
        key_cache, value_cache = tokens.kv[self._layer]
        return self._rope_writes.rope_and_write_kv(
            query, rows, key_cache, value_cache, tokens.slot_mapping
        )

    def attend(self, query: Tensor, context: ForwardContext) -> Tensor:
        kernels = (self._ops.decode_attention, self._ops.prefill_attention)
        return attend(kernels, query, context.kv[self._layer], context.batch, self._scale)

    def finish(self, attended: Tensor) -> Tensor:
        return self._output.reduce(self.partial(attended))

    def partial(self, attended: Tensor) -> Tensor:
        return self._output.partial(attended.reshape(attended.shape[0], -1))

    def _qk_norms(self) -> QKNorms | None:
        if not self._norms:
            return None
        query, key = self._norms
        return QKNorms(query.weight, key.weight, query.eps)


def attend(
    kernels: tuple[AttentionKernel, AttentionKernel],
    query: Tensor,
    caches: tuple[Tensor, ...],
    batch: AttentionBatch,
    scale: float,
) -> Tensor:
    """Run attention of a batch: the first kernel runs the decodes, the second one the prompts."""
    (decode, prefill), (first, second), num_decodes = kernels, caches, batch.num_decodes
    if num_decodes == query.shape[0]:
        return decode(query, first, second, batch, scale)
    if num_decodes == 0:
        return prefill(query, first, second, batch, scale)
    decoded = decode(query[:num_decodes], first, second, batch, scale)
    prefilled = prefill(query[num_decodes:], first, second, batch, scale)
    return torch.cat((decoded, prefilled))


def rank_heads(config: ModelConfig, parallel: ParallelContext) -> HeadShare:
    """The heads that a rank computes; see ``share_heads``."""
    return share_heads(config.num_heads, config.num_kv_heads, parallel.tp_size, parallel.tp_rank)


def _qkv_sources(
    config: ModelConfig, heads: HeadShare, names: list[str]
) -> tuple[LinearSource, ...]:
    dim = config.head_dim
    query = Span(heads.query_start * dim, heads.query_stop * dim)
    kv = Span(heads.kv_start * dim, heads.kv_stop * dim)
    totals = (config.num_heads * dim, config.num_kv_heads * dim, config.num_kv_heads * dim)
    return linear_sources(names, totals, (query, kv, kv))
