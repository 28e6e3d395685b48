"""The decoder: runs Llama, Qwen2 and Qwen3 as it is, and other architectures as subclasses.

A subclass overrides ``build_attention``, ``build_mlp`` or ``names``; see docs/models.md.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import ClassVar, NamedTuple, Protocol

import torch
from torch import Tensor

from mooncake_engine.models.gqa_attention import Attention, AttentionNames
from mooncake_engine.models.hf_config import ModelConfig
from mooncake_engine.models.layers import Head, Norm, ParallelContext, Span, VocabTable, WeightShard
from mooncake_engine.models.mlp import ExpertCounts, GatedMlp, MlpNames
from mooncake_engine.models.parallel_context import AttentionWidths, ForwardContext, TokenSlots
from mooncake_engine.models.rope import cos_sin_table
from mooncake_engine.scheduling.step_plan import ExpertRound

_SCALES = (".{0}_scale", ".attn.{0}_scale", ".{0}_proj.{0}_scale", ".{0}_proj.output_scale")
KEY_SCALE_SUFFIXES = tuple(f"self_attn{end.format('k')}" for end in _SCALES)
VALUE_SCALE_SUFFIXES = tuple(f"self_attn{end.format('v')}" for end in _SCALES)
"""Name suffixes of the scales of a quantised KV cache. They are no weights, and are read only if
KV is stored in a narrower type."""


class CheckpointNames(NamedTuple):
    """The checkpoint's names of the layers; ``{}`` stands for the layer's number."""

    embedding: str = "model.embed_tokens"
    head: str = "lm_head"
    final_norm: str = "model.norm"
    input_norm: str = "model.layers.{}.input_layernorm"
    mlp_norm: str = "model.layers.{}.post_attention_layernorm"
    attention: AttentionNames = AttentionNames()
    mlp: MlpNames = MlpNames()


class Block(Protocol):
    """A part of a layer with weights of its own."""

    def weight_shards(self) -> Iterator[WeightShard]:
        """The parts of checkpoint tensors to load."""
        ...

    def process_weights_after_loading(self) -> None:
        """Convert the loaded weights to the backend's layout."""
        ...


class AttentionBlock(Block, Protocol):
    """The attention of a layer: maps [tokens, hidden] to [tokens, hidden], in three parts.

    ``prepare`` and ``finish`` treat every token alike, whatever sequence it belongs to.
    """

    @property
    def widths(self) -> AttentionWidths:
        """The widths of the input and output of ``attend``; the same in every layer of a model."""
        ...

    def prepare(self, x: Tensor, tokens: TokenSlots) -> Tensor:
        """Write the tokens' KV; returns their queries, [tokens, heads, query]."""
        ...

    def attend(self, query: Tensor, context: ForwardContext) -> Tensor:
        """Run attention of queries over the KV; returns [tokens, heads, value]."""
        ...

    def finish(self, attended: Tensor) -> Tensor:
        """Project the result of ``attend`` to [tokens, hidden]."""
        ...

    def partial(self, attended: Tensor) -> Tensor:
        """This rank's partial sum of ``finish``, before the all-reduce."""
        ...


class MlpBlock(Block, Protocol):
    """A layer's MLP, dense or a mixture of experts."""

    def __call__(self, x: Tensor) -> Tensor:
        """Map [tokens, hidden] to [tokens, hidden]."""
        ...


class DecoderLayer:
    """Attention and an MLP, each after a norm and added to the residual stream."""

    def __init__(self, norms: tuple[Norm, Norm], attention: AttentionBlock, mlp: MlpBlock) -> None:
        self.input_norm, self.mlp_norm = norms
        self.attention = attention
        self.mlp = mlp

    def weight_shards(self) -> Iterator[WeightShard]:
        """The parts of checkpoint tensors to load."""
        for part in (self.input_norm, self.mlp_norm, self.attention, self.mlp):
            yield from part.weight_shards()

    def process_weights_after_loading(self) -> None:
        """Convert the loaded weights to the backend's layout."""
        self.attention.process_weights_after_loading()
        self.mlp.process_weights_after_loading()

    def finish(
        self, attended: Tensor, residual: Tensor, expert_round: ExpertRound | None = None
    ) -> tuple[Tensor, Tensor]:
        """Run the part of the layer after ``attend``; returns the MLP's output and the new
        residual."""
        x, residual = self.mlp_norm.add(self.attention.finish(attended), residual)
        return self.mlp(x), residual


class IntermediateTensors(NamedTuple):
    """The tensors that one segment of a forward pass passes to the next.

    Args:
        rows: queries of the next layer's attention, [tokens, heads, query]; after the last layer,
            the result of ``Decoder.forward``.
        residual: [tokens, hidden].
    """

    rows: Tensor
    residual: Tensor


class Decoder:
    """A causal language model on one rank: the whole model, or the layers of a pipeline stage.

    The first stage has the embedding, the last one has the final norm and the head. A forward pass
    consists of segments separated by the layers' attention. The kernels of attention depend on the
    sequences of the batch, those of a segment only on the number of tokens, so that segments can be
    captured as graphs (piecewise graphs).

    Args:
        config: config of the model.
        parallel: the parallel context of the rank.
        max_positions: longest sequence, in tokens, for which the rotation table is made.
    """

    names: ClassVar[CheckpointNames] = CheckpointNames()
    ignored: ClassVar[tuple[str, ...]] = (
        "rotary_emb.inv_freq",
        *KEY_SCALE_SUFFIXES,
        *VALUE_SCALE_SUFFIXES,
    )
    """Suffixes of the names of checkpoint tensors that are not needed."""

    def __init__(self, config: ModelConfig, parallel: ParallelContext, max_positions: int) -> None:
        self.config = config
        names, held = self.names, parallel.layers or Span(0, config.num_layers)
        self._held = held
        numbers = range(held.start, held.stop)
        self._layers = [self.build_layer(parallel, layer) for layer in numbers]
        self._embedding = self._table(parallel, names.embedding) if held.start == 0 else None
        self._own_head: VocabTable | None = None
        self._norm_and_head: tuple[Norm, Head] | None = None
        if held.stop == config.num_layers:
            self._norm_and_head = self._build_norm_and_head(parallel)
        self._cos_sin = cos_sin_table(config.rope, max_positions).to(parallel.device)

    def _build_norm_and_head(self, parallel: ParallelContext) -> tuple[Norm, Head]:
        config, names = self.config, self.names
        table = self._embedding if config.tie_embeddings else None
        if table is None:
            # dropped once the head is packed: only an embedding needs the unpacked table
            name = names.embedding if config.tie_embeddings else names.head
            table = self._own_head = self._table(parallel, name)
        norm = Norm(parallel, names.final_norm, config.hidden_size, config.rms_norm_eps)
        return norm, Head(parallel, table, config.vocab_size)

    def _table(self, parallel: ParallelContext, name: str) -> VocabTable:
        return VocabTable(parallel, name, self.config.vocab_size, self.config.hidden_size)

    def build_attention(self, parallel: ParallelContext, layer: int) -> AttentionBlock:
        """Build the attention of a layer."""
        return Attention(self.config, parallel, self.names.attention, layer)

    def build_mlp(self, parallel: ParallelContext, layer: int) -> MlpBlock:
        """Build the MLP of a layer."""
        config = self.config
        shape = (config.hidden_size, config.intermediate_size)
        return GatedMlp(parallel, self.names.mlp.of(layer), shape, has_bias=config.mlp_bias)

    def build_layer(self, parallel: ParallelContext, layer: int) -> DecoderLayer:
        """Build a layer."""
        names, size, eps = self.names, self.config.hidden_size, self.config.rms_norm_eps
        norms = (
            Norm(parallel, names.input_norm.format(layer), size, eps),
            Norm(parallel, names.mlp_norm.format(layer), size, eps),
        )
        attention = self.build_attention(parallel, layer)
        return DecoderLayer(norms, attention, self.build_mlp(parallel, layer))

    def weight_shards(self) -> Iterator[WeightShard]:
        """The parts of checkpoint tensors that this rank loads."""
        with_weights = self._norm_and_head[:1] if self._norm_and_head else ()
        for part in (self._embedding, *self._layers, *with_weights, self._own_head):
            if part is not None:
                yield from part.weight_shards()

    @property
    def tied_head(self) -> WeightShard | None:
        """See ``Model``. Valid until ``process_weights_after_loading``."""
        table = self._embedding or self._own_head
        if self._norm_and_head is None or table is None or not self.config.tie_embeddings:
            return None
        return table.shard_of(self.names.head)

    def is_ignored(self, name: str) -> bool:
        """Whether this rank need not read a tensor of the checkpoint, because another stage holds
        it, or no stage needs it.

        Each tensor that the model needs belongs to some stage, which does not ignore it.
        """
        names, layer = self.names, self.layer_of(name)
        if layer is not None and layer < self.config.num_layers:
            is_foreign = not self._held.start <= layer < self._held.stop
        elif name == f"{names.embedding}.weight":
            is_foreign = self._embedding is None
        elif name == f"{names.head}.weight":
            is_foreign = self._norm_and_head is None or self.config.tie_embeddings
        else:
            is_foreign = self._norm_and_head is None and name == f"{names.final_norm}.weight"
        quantization = self.config.quantization
        is_scale = quantization is not None and quantization.is_scale(name)
        return is_foreign or is_scale or name.endswith(self.ignored)

    def layer_of(self, name: str) -> int | None:
        """The number of the layer that has a checkpoint tensor; None if it is in no layer."""
        prefix, number = self.names.input_norm.split("{}")[0], ""
        if name.startswith(prefix):
            number = name.removeprefix(prefix).split(".", 1)[0]
        return int(number) if number.isdecimal() else None

    def process_weights_after_loading(self) -> None:
        """Convert all loaded weights to the backend's layout, one at a time."""
        for layer in self._layers:
            layer.process_weights_after_loading()
        if self._norm_and_head is not None:
            self._norm_and_head[1].process_weights_after_loading()
        self._own_head = None

    def forward(self, entry: Tensor, positions: Tensor, context: ForwardContext) -> Tensor:
        """Run the tokens through this rank's layers.

        Args:
            entry: on the first stage the token ids, [tokens] int64; on the others the previous
                stage's result, whose memory may be overwritten.
            positions: [tokens] int64.
            context: the attention batch, the KV and hooks of the step.

        Returns:
            On the last stage [tokens, hidden], after the final norm; on the others
            [2, tokens, hidden], the last MLP's output and the residual to add it to.
        """
        slots = context.batch.slot_mapping
        tokens = self.token_slots(positions, slots, context.kv, context.expert_round)
        between = self.run_to_first_attention(entry, tokens)
        for index in range(self.num_held_layers):
            attended = self.attend(index, between.rows, context)
            between = self.run_between_attention(index, attended, between.residual, tokens)
        return between.rows

    @property
    def expert_counts(self) -> Mapping[int, ExpertCounts]:
        """See ``Model``. Empty: no expert of this model is divided over ranks."""
        return {}

    def serve_experts(self, expert_round: ExpertRound) -> None:
        raise AssertionError("no expert of this model is divided over ranks")

    def move_experts(self, slots: Mapping[int, Sequence[int]]) -> None:
        raise AssertionError("no expert of this model is divided over ranks")

    def worst_routing(self) -> AbstractContextManager[None]:
        return nullcontext()  # no expert of this model is divided over ranks

    @property
    def num_held_layers(self) -> int:
        """The number of layers that this rank holds: one less than a forward pass has segments."""
        return len(self._held)

    @property
    def attention_widths(self) -> AttentionWidths:
        return self._layers[0].attention.widths

    def token_slots(
        self,
        positions: Tensor,
        slots: Tensor,
        kv: Mapping[int, tuple[Tensor, ...]],
        expert_round: ExpertRound | None = None,
    ) -> TokenSlots:
        """The positions of tokens, their KV slots, and this model's rotation table."""
        return TokenSlots(positions, self._cos_sin, slots, kv, expert_round)

    def run_to_first_attention(self, entry: Tensor, tokens: TokenSlots) -> IntermediateTensors:
        """Run the first segment, up to the first layer's attention. ``entry``: see ``forward``."""
        x, residual = self._start_stage(entry)
        return IntermediateTensors(self._layers[0].attention.prepare(x, tokens), residual)

    def attend(self, index: int, query: Tensor, context: ForwardContext) -> Tensor:
        """Run the attention of the held layer with the given index."""
        # The layer's KV was written by prepare, in the previous segment. That may be a replayed
        # graph, and a graph can't call Python. Attention is launched outside of graphs, so this is
        # the first point after the write at which the host can record an event for the connector.
        if context.layer_done is not None:
            context.layer_done(self._held.start + index)
        return self._layers[index].attention.attend(query, context)

    def run_between_attention(
        self, index: int, attended: Tensor, residual: Tensor, tokens: TokenSlots
    ) -> IntermediateTensors:
        """Run the segment from a held layer's attention to the next layer's, or to the end."""
        x, residual = self.finish_layer(index, attended, residual, tokens.expert_round)
        return self.run_to_next_attention(index, x, residual, tokens)

    def is_split(self, index: int) -> bool:
        """Whether the segment after a layer's attention can't be one graph; see ``Model``."""
        return False

    def finish_layer(
        self, index: int, attended: Tensor, residual: Tensor, expert_round: ExpertRound | None
    ) -> tuple[Tensor, Tensor]:
        """Run the part of the segment that belongs to the held layer."""
        return self._layers[index].finish(attended, residual, expert_round)

    def run_to_next_attention(
        self, index: int, x: Tensor, residual: Tensor, tokens: TokenSlots
    ) -> IntermediateTensors:
        """Run the rest of the segment: up to the next layer's attention, or to the end."""
        if index + 1 == self.num_held_layers:
            return IntermediateTensors(self._finish_stage(x, residual), residual)
        following = self._layers[index + 1]
        x, residual = following.input_norm.add(x, residual)
        return IntermediateTensors(following.attention.prepare(x, tokens), residual)

    def _finish_stage(self, x: Tensor, residual: Tensor) -> Tensor:
        """The result of ``forward``."""
        if self._norm_and_head is None:
            return torch.stack((x, residual))
        return self._norm_and_head[0].add(x, residual)[0]

    def _start_stage(self, entry: Tensor) -> tuple[Tensor, Tensor]:
        """The first layer's normalised input, and the residual."""
        norm = self._layers[0].input_norm
        if self._embedding is None:
            x, residual = entry
            return norm.add(x, residual)
        residual = self._embedding.embed(entry)
        return norm(residual), residual

    def logits(self, hidden: Tensor) -> Tensor:
        """Map [rows, hidden] to [rows, vocab], the same on every rank of the last stage."""
        assert self._norm_and_head is not None, "only the last stage has a head"
        return self._norm_and_head[1](hidden)


class FusedDecoder(Decoder):
    """A decoder for checkpoints that store queries, keys and values in one tensor, and gate and up
    in another, as Phi-3 does."""

    names = CheckpointNames(
        attention=AttentionNames(qkv=("model.layers.{}.self_attn.qkv_proj",) * 3),
        mlp=MlpNames(*("model.layers.{}.mlp.gate_up_proj",) * 2),
    )
