"""The supported architectures, one row each. A new model needs a config reader and a row here."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from mooncake_engine.checkpoints.tensor_files import most_common_dtype
from mooncake_engine.models.decoder import Decoder, FusedDecoder, IntermediateTensors
from mooncake_engine.models.deepseek import (
    DeepseekDecoder,
    read_deepseek_v2,
    read_deepseek_v3,
)
from mooncake_engine.models.hf_config import (
    ModelConfig,
    RawConfig,
    read_eos_token_ids,
    read_internlm3,
    read_llama,
    read_mistral,
    read_phi3,
    read_qwen2,
    read_qwen3,
    read_raw,
    read_seed_oss,
)
from mooncake_engine.models.layers import ParallelContext, WeightShard
from mooncake_engine.models.mlp import ExpertCounts
from mooncake_engine.models.parallel_context import AttentionWidths, ForwardContext, TokenSlots
from mooncake_engine.models.sparse import (
    MixtralDecoder,
    SparseDecoder,
    read_mixtral,
    read_qwen3_moe,
)
from mooncake_engine.scheduling.step_plan import ExpertRound
from mooncake_hal.kv.geometry import AttentionKind, KVGeometry

ConfigReader = Callable[[RawConfig, str, tuple[int, ...]], ModelConfig]


class Model(Protocol):
    """A causal language model on one rank: the rank's part of all layers, or of those of its
    pipeline stage."""

    def weight_shards(self) -> Iterator[WeightShard]:
        """The parts of checkpoint tensors that this rank loads."""
        ...

    @property
    def tied_head(self) -> WeightShard | None:
        """This rank's rows of a head that is tied to the embedding, after loading. If the
        checkpoint has a head of its own too, it must be equal. None if this rank has no tied
        head."""
        ...

    def is_ignored(self, name: str) -> bool:
        """Whether this rank need not read a tensor of the checkpoint."""
        ...

    def process_weights_after_loading(self) -> None:
        """Called once, when all weight shards are filled."""
        ...

    def forward(self, entry: Tensor, positions: Tensor, context: ForwardContext) -> Tensor:
        """Map token ids and positions, both [tokens] int64, to hidden rows [tokens, hidden].

        Pipeline stages pass ``[2, tokens, hidden]`` on: the result of one is the next one's entry.
        """
        ...

    @property
    def expert_counts(self) -> Mapping[int, ExpertCounts]:
        """Token counts of the experts, by layer, of layers whose experts are divided over ranks."""
        ...

    def serve_experts(self, expert_round: ExpertRound) -> None:
        """Take part in a forward pass of other data-parallel ranks without tokens of this rank."""
        ...

    def move_experts(self, slots: Mapping[int, Sequence[int]]) -> None:
        """Change the expert in each slot. A collective: every rank calls it between the same two
        forward passes.

        Args:
            slots: by layer, the expert in each slot from now on.
        """
        ...

    def worst_routing(self) -> AbstractContextManager[None]:
        """While the context is entered, every rank's experts get all tokens of all ranks, each with
        as many choices as a rank has experts for: no other routing takes more of a rank's memory.
        The results are meaningless, and are not counted."""
        ...

    @property
    def num_held_layers(self) -> int:
        """The number of layers that this rank holds. The methods below run the segments of
        ``forward`` one by one, for piecewise graphs."""
        ...

    @property
    def attention_widths(self) -> AttentionWidths:
        """The widths of the input and output of ``attend``."""
        ...

    def token_slots(
        self, positions: Tensor, slots: Tensor, kv: Mapping[int, tuple[Tensor, ...]]
    ) -> TokenSlots:
        """The positions of tokens, their KV slots, and this model's rotation table."""
        ...

    def run_to_first_attention(self, entry: Tensor, tokens: TokenSlots) -> IntermediateTensors:
        """Run the segment up to the first layer's attention."""
        ...

    def attend(self, index: int, query: Tensor, context: ForwardContext) -> Tensor:
        """Run the attention of the held layer with the given index."""
        ...

    def run_between_attention(
        self, index: int, attended: Tensor, residual: Tensor, tokens: TokenSlots
    ) -> IntermediateTensors:
        """Run the segment from a held layer's attention to the next layer's, or to the end: the
        same as ``finish_layer`` and ``run_to_next_attention``."""
        ...

    def is_split(self, index: int) -> bool:
        """Whether the segment after a held layer's attention can't be one graph, because the
        layer's experts are divided over ranks: how many tokens go to which rank is known only after
        routing. The part after ``finish_layer`` can be a graph."""
        ...

    def finish_layer(
        self, index: int, attended: Tensor, residual: Tensor, expert_round: ExpertRound | None
    ) -> tuple[Tensor, Tensor]:
        """Run the part of the segment that belongs to the held layer; returns the MLP's output and
        the new residual."""
        ...

    def run_to_next_attention(
        self, index: int, x: Tensor, residual: Tensor, tokens: TokenSlots
    ) -> IntermediateTensors:
        """Run the rest of the segment."""
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """Map [rows, hidden] to [rows, vocab], in the model's type; the result is the same on every
        rank of the last stage."""
        ...


@dataclass(frozen=True, slots=True)
class Architecture:
    """How to read an architecture's config, and how to build its model."""

    read_config: ConfigReader
    build: Callable[[ModelConfig, ParallelContext, int], Model]


ARCHITECTURES: dict[str, Architecture] = {
    "DeepseekV2ForCausalLM": Architecture(read_deepseek_v2, DeepseekDecoder),
    "DeepseekV3ForCausalLM": Architecture(read_deepseek_v3, DeepseekDecoder),
    "InternLM3ForCausalLM": Architecture(read_internlm3, Decoder),
    "LlamaForCausalLM": Architecture(read_llama, Decoder),
    "MistralForCausalLM": Architecture(read_mistral, Decoder),
    "MixtralForCausalLM": Architecture(read_mixtral, MixtralDecoder),
    "Phi3ForCausalLM": Architecture(read_phi3, FusedDecoder),
    "Qwen2ForCausalLM": Architecture(read_qwen2, Decoder),
    "Qwen3ForCausalLM": Architecture(read_qwen3, Decoder),
    "Qwen3MoeForCausalLM": Architecture(read_qwen3_moe, SparseDecoder),
    "SeedOssForCausalLM": Architecture(read_seed_oss, Decoder),
}
"""By the name in ``architectures`` of config.json."""


def read_model_config(model_dir: Path) -> ModelConfig:
    """Read the config of the model in a model directory.

    Raises:
        CheckpointError: the config is missing, incomplete or unsupported; the message says which.
    """
    raw = read_raw(model_dir)
    names = raw.get("architectures", list) or []
    known = [name for name in names if name in ARCHITECTURES]
    if not known:
        raise raw.refuse("architectures", names, ", ".join(sorted(ARCHITECTURES)))
    eos = read_eos_token_ids(model_dir, raw)
    config = ARCHITECTURES[known[0]].read_config(raw, known[0], eos)
    if raw.fields.get("dtype") is None and raw.fields.get("torch_dtype") is None:
        return replace(config, dtype=most_common_dtype(model_dir) or config.dtype)
    return config


def build_model(config: ModelConfig, parallel: ParallelContext, max_positions: int) -> Model:
    """Allocate the rank's part of the model, without loading it.

    Raises:
        ConfigError: the model's heads can't be divided over the ranks.
    """
    return ARCHITECTURES[config.architecture].build(config, parallel, max_positions)


def kv_geometry(config: ModelConfig, dtype: torch.dtype) -> KVGeometry:
    """The KV that the model keeps per token, on all ranks together."""
    mla, head_dim = config.mla, config.head_dim
    return KVGeometry(
        kind=AttentionKind.MLA if mla else AttentionKind.GQA,
        layers=config.num_layers,
        kv_heads=config.num_kv_heads,
        plane_dims=(mla.latent_dim, mla.rope_dim) if mla else (head_dim, head_dim),
        dtype=str(dtype).removeprefix("torch."),
        element_bytes=dtype.itemsize,
    )
