"""The decoder: Llama, Qwen2 and Qwen3 as it stands, others by overriding a part.

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
KEY_SCALE_ENDS = tuple(f"self_attn{end.format('k')}" for end in _SCALES)
VALUE_SCALE_ENDS = tuple(f"self_attn{end.format('v')}" for end in _SCALES)
"""Ends of the names of a quantised KV cache's scales; no weights, read only where KV is kept so."""


class CheckpointNames(NamedTuple):
    """What the checkpoint calls our layers; ``{}`` stands for the layer's number."""

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
        """What to load."""
        ...

    def process_weights_after_loading(self) -> None:
        """Bring the loaded weights into the backend's form."""
        ...


class AttentionBlock(Block, Protocol):
    """What a layer attends with: [tokens, hidden] to [tokens, hidden], in three parts.

    The first and the last do the same for every token, whatever sequence it belongs to.
    """

    @property
    def widths(self) -> AttentionWidths:
        """Of what ``attend`` takes and returns; the same in every layer of a model."""
        ...

    def prepare(self, x: Tensor, tokens: TokenSlots) -> Tensor:
        """Write the tokens' KV; returns their queries, [tokens, heads, query]."""
        ...

    def attend(self, query: Tensor, context: ForwardContext) -> Tensor:
        """Of queries, over the KV: [tokens, heads, value]."""
        ...

    def finish(self, attended: Tensor) -> Tensor:
        """From what was attended to, [tokens, hidden]."""
        ...

    def partial(self, attended: Tensor) -> Tensor:
        """This rank's part of the sum that ``finish`` returns."""
        ...


class MlpBlock(Block, Protocol):
    """A layer's MLP, dense or a mixture of experts."""

    def __call__(self, x: Tensor) -> Tensor:
        """[tokens, hidden] to [tokens, hidden]."""
        ...


class DecoderLayer:
    """Attention and an MLP, each behind a norm and added to the residual stream."""

    def __init__(self, norms: tuple[Norm, Norm], attention: AttentionBlock, mlp: MlpBlock) -> None:
        self.input_norm, self.mlp_norm = norms
        self.attention = attention
        self.mlp = mlp

    def weight_shards(self) -> Iterator[WeightShard]:
        """What to load."""
        for part in (self.input_norm, self.mlp_norm, self.attention, self.mlp):
            yield from part.weight_shards()

    def process_weights_after_loading(self) -> None:
        """Bring the loaded weights into the backend's form."""
        self.attention.process_weights_after_loading()
        self.mlp.process_weights_after_loading()

    def finish(
        self, attended: Tensor, residual: Tensor, expert_round: ExpertRound | None = None
    ) -> tuple[Tensor, Tensor]:
        """Whatever follows attention; returns the MLP's output and the new residual."""
        x, residual = self.mlp_norm.add(self.attention.finish(attended), residual)
        return self.mlp(x), residual


class IntermediateTensors(NamedTuple):
    """What is handed from one segment of a forward pass to the next.

    Args:
        rows: queries of the layer that attends next, [tokens, heads, query]; behind the last layer
            what ``Decoder.forward`` returns.
        residual: [tokens, hidden].
    """

    rows: Tensor
    residual: Tensor


class Decoder:
    """A causal language model of one rank: all of it, or the layers of a pipeline stage.

    The first stage has the embedding, the last one the final norm and the head. A forward pass is
    made of segments, with a layer's attention between each two: what attention launches depends on
    the batch's sequences, everything else on the number of tokens alone, so that the segments can
    be captured as graphs (piecewise graphs).

    Args:
        config: the model's.
        parallel: the rank's device, group and layers.
        max_positions: longest sequence to prepare the rotation for.
    """

    names: ClassVar[CheckpointNames] = CheckpointNames()
    ignored: ClassVar[tuple[str, ...]] = (
        "rotary_emb.inv_freq",
        *KEY_SCALE_ENDS,
        *VALUE_SCALE_ENDS,
    )
    """Ends of checkpoint names that hold nothing we need."""

    def __init__(self, config: ModelConfig, parallel: ParallelContext, max_positions: int) -> None:
        self.config = config
        names, held = self.names, parallel.layers or Span(0, config.num_layers)
        self._held = held
        numbers = range(held.start, held.stop)
        self._layers = [self.build_layer(parallel, layer) for layer in numbers]
        self._embedding = self._table(parallel, names.embedding) if held.start == 0 else None
        self._own_head: VocabTable | None = None
        self._ending: tuple[Norm, Head] | None = None
        if held.stop == config.num_layers:
            self._ending = self._build_ending(parallel)
        self._cos_sin = cos_sin_table(config.rope, max_positions).to(parallel.device)

    def _build_ending(self, parallel: ParallelContext) -> tuple[Norm, Head]:
        config, names = self.config, self.names
        table = self._embedding if config.tie_embeddings else None
        if table is None:
            # dropped once packed: only an embedding needs the table itself
            name = names.embedding if config.tie_embeddings else names.head
            table = self._own_head = self._table(parallel, name)
        norm = Norm(parallel, names.final_norm, config.hidden_size, config.rms_norm_eps)
        return norm, Head(parallel, table, config.vocab_size)

    def _table(self, parallel: ParallelContext, name: str) -> VocabTable:
        return VocabTable(parallel, name, self.config.vocab_size, self.config.hidden_size)

    def build_attention(self, parallel: ParallelContext, layer: int) -> AttentionBlock:
        """What the layer attends with."""
        return Attention(self.config, parallel, self.names.attention, layer)

    def build_mlp(self, parallel: ParallelContext, layer: int) -> MlpBlock:
        """The layer's MLP."""
        config = self.config
        shape = (config.hidden_size, config.intermediate_size)
        return GatedMlp(parallel, self.names.mlp.of(layer), shape, has_bias=config.mlp_bias)

    def build_layer(self, parallel: ParallelContext, layer: int) -> DecoderLayer:
        """A whole layer."""
        names, size, eps = self.names, self.config.hidden_size, self.config.rms_norm_eps
        norms = (
            Norm(parallel, names.input_norm.format(layer), size, eps),
            Norm(parallel, names.mlp_norm.format(layer), size, eps),
        )
        attention = self.build_attention(parallel, layer)
        return DecoderLayer(norms, attention, self.build_mlp(parallel, layer))

    def weight_shards(self) -> Iterator[WeightShard]:
        """Every checkpoint tensor that this rank wants a part of."""
        ending = self._ending[:1] if self._ending else ()
        for part in (self._embedding, *self._layers, *ending, self._own_head):
            if part is not None:
                yield from part.weight_shards()

    @property
    def tied_head(self) -> WeightShard | None:
        """The head as the checkpoint may hold it beside the embedding, whose rows it must be;
        until weights are in the backend's form."""
        table = self._embedding or self._own_head
        if self._ending is None or table is None or not self.config.tie_embeddings:
            return None
        return table.shard_of(self.names.head)

    def is_ignored(self, name: str) -> bool:
        """Whether a checkpoint tensor may be left unread: another stage has it, or no stage needs
        it.

        Every tensor is some stage's, which does not ignore it.
        """
        names, layer = self.names, self.layer_of(name)
        if layer is not None and layer < self.config.num_layers:
            is_foreign = not self._held.start <= layer < self._held.stop
        elif name == f"{names.embedding}.weight":
            is_foreign = self._embedding is None
        elif name == f"{names.head}.weight":
            is_foreign = self._ending is None or self.config.tie_embeddings
        else:
            is_foreign = self._ending is None and name == f"{names.final_norm}.weight"
        quantization = self.config.quantization
        is_scale = quantization is not None and quantization.is_scale(name)
        return is_foreign or is_scale or name.endswith(self.ignored)

    def layer_of(self, name: str) -> int | None:
        """The number of the layer that a checkpoint tensor belongs to, if it belongs to one."""
        prefix, number = self.names.input_norm.split("{}")[0], ""
        if name.startswith(prefix):
            number = name.removeprefix(prefix).split(".", 1)[0]
        return int(number) if number.isdecimal() else None

    def process_weights_after_loading(self) -> None:
        """Bring all loaded weights into the backend's form, one at a time."""
        for layer in self._layers:
            layer.process_weights_after_loading()
        if self._ending is not None:
            self._ending[1].process_weights_after_loading()
        self._own_head = None

    def forward(self, entry: Tensor, positions: Tensor, context: ForwardContext) -> Tensor:
        """Run the tokens through this rank's layers.

        Args:
            entry: [tokens] int64, their ids, on the first stage; what the stage before returned
                on the others. Its memory may be reused.
            positions: [tokens] int64.
            context: where their KV is.

        Returns:
            [tokens, hidden], after the final norm, on the last stage; on the others
            [2, tokens, hidden], the last MLP's output and the residual that it belongs to.
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
        """Of layers whose experts are divided over ranks: what these got."""
        return {}

    def serve_experts(self, expert_round: ExpertRound) -> None:
        """Take part in a forward pass of other data-parallel ranks, with no token of this one."""
        raise AssertionError("no expert of this model is divided over ranks")

    def move_experts(self, slots: Mapping[int, Sequence[int]]) -> None:
        """By layer, the expert in each slot from now on; every rank calls it, between two forward
        passes."""
        raise AssertionError("no expert of this model is divided over ranks")

    def worst_routing(self) -> AbstractContextManager[None]:
        return nullcontext()  # no expert of this model is divided over ranks

    @property
    def num_held_layers(self) -> int:
        """Layers of this rank: one less than segments of a forward pass."""
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
        """Positions of tokens in their sequences and in the KV, with this model's rotation."""
        return TokenSlots(positions, self._cos_sin, slots, kv, expert_round)

    def run_to_first_attention(self, entry: Tensor, tokens: TokenSlots) -> IntermediateTensors:
        """The first segment: up to the first layer's attention; arguments as of ``forward``."""
        x, residual = self._enter(entry)
        return IntermediateTensors(self._layers[0].attention.prepare(x, tokens), residual)

    def attend(self, index: int, query: Tensor, context: ForwardContext) -> Tensor:
        """Attention of the held layer with that index."""
        # The layer's KV was written by prepare, in the segment before, which may be a replayed
        # graph, and a graph can't call Python. Attention is launched outside of graphs: so here is
        # the first point after the write at which the host can record an event for the connector.
        if context.layer_done is not None:
            context.layer_done(self._held.start + index)
        return self._layers[index].attention.attend(query, context)

    def run_between_attention(
        self, index: int, attended: Tensor, residual: Tensor, tokens: TokenSlots
    ) -> IntermediateTensors:
        """The segment between that held layer's attention and the next one's, or the end."""
        x, residual = self.finish_layer(index, attended, residual, tokens.expert_round)
        return self.run_to_next_attention(index, x, residual, tokens)

    def is_cut(self, index: int) -> bool:
        """Whether that segment can't be one graph; see ``Model``."""
        return False

    def finish_layer(
        self, index: int, attended: Tensor, residual: Tensor, expert_round: ExpertRound | None
    ) -> tuple[Tensor, Tensor]:
        """The part of that segment which is the held layer's."""
        return self._layers[index].finish(attended, residual, expert_round)

    def run_to_next_attention(
        self, index: int, x: Tensor, residual: Tensor, tokens: TokenSlots
    ) -> IntermediateTensors:
        """The rest of it: the next layer's, or the end."""
        if index + 1 == self.num_held_layers:
            return IntermediateTensors(self._leave(x, residual), residual)
        following = self._layers[index + 1]
        x, residual = following.input_norm.add(x, residual)
        return IntermediateTensors(following.attention.prepare(x, tokens), residual)

    def _leave(self, x: Tensor, residual: Tensor) -> Tensor:
        """What ``forward`` returns."""
        if self._ending is None:
            return torch.stack((x, residual))
        return self._ending[0].add(x, residual)[0]

    def _enter(self, entry: Tensor) -> tuple[Tensor, Tensor]:
        """The first layer's normed input, and the residual."""
        norm = self._layers[0].input_norm
        if self._embedding is None:
            x, residual = entry
            return norm.add(x, residual)
        residual = self._embedding.embed(entry)
        return norm(residual), residual

    def logits(self, hidden: Tensor) -> Tensor:
        """[rows, hidden] to [rows, vocab] float32; the same on every rank of the last stage."""
        assert self._ending is not None, "only the last stage has a head"
        return self._ending[1](hidden).float()


class FusedDecoder(Decoder):
    """Checkpoints that have queries, keys and values in one tensor, and gate and up in one, as
    Phi-3's."""

    names = CheckpointNames(
        attention=AttentionNames(qkv=("model.layers.{}.self_attn.qkv_proj",) * 3),
        mlp=MlpNames(*("model.layers.{}.mlp.gate_up_proj",) * 2),
    )
