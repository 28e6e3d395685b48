"""The decoder: Llama, Qwen2 and Qwen3 as it stands, others by overriding a part.

A subclass overrides ``build_attention``, ``build_mlp`` or ``names``; see docs/models.md.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar, NamedTuple, Protocol

from torch import Tensor

from mooncake_engine.models.attention import Attention, AttentionNames
from mooncake_engine.models.context import ForwardContext, Rotation
from mooncake_engine.models.hf_config import ModelConfig
from mooncake_engine.models.layers import Head, Norm, Placement, VocabTable, WeightSlot
from mooncake_engine.models.mlp import GatedMlp, MlpNames
from mooncake_engine.models.rope import cos_sin_table


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

    def slots(self) -> Iterator[WeightSlot]:
        """What to load."""
        ...

    def pack(self) -> None:
        """Bring the loaded weights into the backend's form."""
        ...


class AttentionBlock(Block, Protocol):
    """What a layer attends with."""

    def __call__(self, x: Tensor, rotation: Rotation, context: ForwardContext) -> Tensor:
        """[tokens, hidden] to [tokens, hidden]; writes the tokens' KV on the way."""
        ...


class MlpBlock(Block, Protocol):
    """What a layer thinks with."""

    def __call__(self, x: Tensor) -> Tensor:
        """[tokens, hidden] to [tokens, hidden]."""
        ...


class DecoderLayer:
    """Attention and an MLP, each behind a norm and added to the residual stream."""

    def __init__(self, norms: tuple[Norm, Norm], attention: AttentionBlock, mlp: MlpBlock) -> None:
        self.input_norm, self.mlp_norm = norms
        self.attention = attention
        self.mlp = mlp

    def slots(self) -> Iterator[WeightSlot]:
        """What to load."""
        for part in (self.input_norm, self.mlp_norm, self.attention, self.mlp):
            yield from part.slots()

    def pack(self) -> None:
        """Bring the loaded weights into the backend's form."""
        self.attention.pack()
        self.mlp.pack()

    def __call__(
        self, x: Tensor, residual: Tensor, rotation: Rotation, context: ForwardContext
    ) -> tuple[Tensor, Tensor]:
        """Takes normed ``x`` and the residual; returns the MLP's output and the new residual."""
        x = self.attention(x, rotation, context)
        x, residual = self.mlp_norm.add(x, residual)
        return self.mlp(x), residual


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
        self._layers = [self._build_layer(placement, layer) for layer in range(config.num_layers)]
        self._norm = Norm(placement, names.final_norm, config.hidden_size, config.rms_norm_eps)
        # dropped once packed: only an embedding needs the table itself
        self._own_head = (
            None if config.tie_embeddings else VocabTable(placement, names.head, *shape)
        )
        self._head = Head(placement, self._own_head or self._embedding, config.vocab_size)
        self._cos_sin = cos_sin_table(config.rope, max_positions).to(placement.device)

    def build_attention(self, placement: Placement, layer: int) -> AttentionBlock:
        """What the layer attends with."""
        return Attention(self.config, placement, self.names.attention, layer)

    def build_mlp(self, placement: Placement, layer: int) -> MlpBlock:
        """What the layer thinks with."""
        config = self.config
        shape = (config.hidden_size, config.intermediate_size)
        return GatedMlp(placement, self.names.mlp.of(layer), shape, has_bias=config.mlp_bias)

    def _build_layer(self, placement: Placement, layer: int) -> DecoderLayer:
        names, size, eps = self.names, self.config.hidden_size, self.config.rms_norm_eps
        norms = (
            Norm(placement, names.input_norm.format(layer), size, eps),
            Norm(placement, names.mlp_norm.format(layer), size, eps),
        )
        attention = self.build_attention(placement, layer)
        return DecoderLayer(norms, attention, self.build_mlp(placement, layer))

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
            layer.pack()
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
        rotation = Rotation(positions, self._cos_sin)
        next_norms = [layer.input_norm for layer in self._layers[1:]] + [self._norm]
        for layer, norm in zip(self._layers, next_norms, strict=True):
            x, residual = layer(x, residual, rotation, context)
            x, residual = norm.add(x, residual)
        return x

    def logits(self, hidden: Tensor) -> Tensor:
        """[rows, hidden] to [rows, vocab] float32; the same on every rank."""
        return self._head(hidden).float()
