"""Supported architectures: one row each. A new model is a reader and a row."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from mooncake_engine.checkpoints.tensor_files import prevailing_dtype
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
    """A causal language model of one rank: its share of all layers, or of a pipeline stage's."""

    def weight_shards(self) -> Iterator[WeightShard]:
        """Every checkpoint tensor that this rank wants a part of."""
        ...

    @property
    def tied_head(self) -> WeightShard | None:
        """This rank's rows of a head that is the embedding, loaded: what the checkpoint holds of
        it besides must be the same."""
        ...

    def is_ignored(self, name: str) -> bool:
        """Whether a checkpoint tensor may be left unread."""
        ...

    def process_weights_after_loading(self) -> None:
        """Called once when all slots are filled."""
        ...

    def forward(self, entry: Tensor, positions: Tensor, context: ForwardContext) -> Tensor:
        """Token ids and positions, both [tokens] int64, to hidden rows [tokens, hidden].

        Stages of a pipeline hand ``[2, tokens, hidden]`` on: what one returns is the next's entry.
        """
        ...

    @property
    def expert_counts(self) -> Mapping[int, ExpertCounts]:
        """Of layers whose experts are divided over ranks: what these got."""
        ...

    def serve_experts(self, expert_round: ExpertRound) -> None:
        """Take part in a forward pass of other data-parallel ranks, with no token of this one."""
        ...

    def move_experts(self, slots: Mapping[int, Sequence[int]]) -> None:
        """By layer, the expert in each slot from now on; every rank calls it, between two forward
        passes."""
        ...

    def worst_routing(self) -> AbstractContextManager[None]:
        """Meanwhile the experts of every rank get all tokens of all ranks, with as many of their
        choices as a rank has experts for: no routing takes more memory of a rank. What comes of the
        tokens means nothing, and is not counted."""
        ...

    @property
    def num_held_layers(self) -> int:
        """Layers of this rank; what follows are the segments of ``forward``, for piecewise
        graphs."""
        ...

    @property
    def attention_widths(self) -> AttentionWidths:
        """Of what ``attend`` takes and returns."""
        ...

    def token_slots(
        self, positions: Tensor, slots: Tensor, kv: Mapping[int, tuple[Tensor, ...]]
    ) -> TokenSlots:
        """Positions of tokens in their sequences and in the KV, with this model's rotation."""
        ...

    def run_to_first_attention(self, entry: Tensor, tokens: TokenSlots) -> IntermediateTensors:
        """The segment up to the first layer's attention."""
        ...

    def attend(self, index: int, query: Tensor, context: ForwardContext) -> Tensor:
        """Attention of the held layer with that index."""
        ...

    def run_between_attention(
        self, index: int, attended: Tensor, residual: Tensor, tokens: TokenSlots
    ) -> IntermediateTensors:
        """The segment between that layer's attention and the next one's, or the end: what
        ``finish_layer`` and ``run_to_next_attention`` do."""
        ...

    def is_cut(self, index: int) -> bool:
        """Whether that segment can't be one graph, since the layer's experts are divided over
        ranks: how many tokens go where is known only once they have chosen. What lies behind
        ``finish_layer`` can be."""
        ...

    def finish_layer(
        self, index: int, attended: Tensor, residual: Tensor, expert_round: ExpertRound | None
    ) -> tuple[Tensor, Tensor]:
        """The part of the segment which is that layer's: the MLP's output and the new residual."""
        ...

    def run_to_next_attention(
        self, index: int, x: Tensor, residual: Tensor, tokens: TokenSlots
    ) -> IntermediateTensors:
        """The rest of the segment."""
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """[rows, hidden] to [rows, vocab] float32; the same on every rank of the last stage."""
        ...


@dataclass(frozen=True, slots=True)
class Architecture:
    """How a checkpoint's config is read, and what runs it."""

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
"""Keyed by the name in ``architectures`` of config.json."""


def read_model_config(model_dir: Path) -> ModelConfig:
    """Read what a model directory says about its model.

    Raises:
        CheckpointError: missing, incomplete or unsupported; the message says which.
    """
    raw = read_raw(model_dir)
    names = raw.get("architectures", list) or []
    known = [name for name in names if name in ARCHITECTURES]
    if not known:
        raise raw.refuse("architectures", names, ", ".join(sorted(ARCHITECTURES)))
    eos = read_eos_token_ids(model_dir, raw)
    config = ARCHITECTURES[known[0]].read_config(raw, known[0], eos)
    if raw.fields.get("dtype") is None and raw.fields.get("torch_dtype") is None:
        return replace(config, dtype=prevailing_dtype(model_dir) or config.dtype)
    return config


def build_model(config: ModelConfig, parallel: ParallelContext, max_positions: int) -> Model:
    """Allocate the rank's share of the model, not yet loaded.

    Raises:
        ConfigError: its heads can't be divided over the ranks.
    """
    return ARCHITECTURES[config.architecture].build(config, parallel, max_positions)


def kv_geometry(config: ModelConfig, dtype: torch.dtype) -> KVGeometry:
    """The KV that the model keeps per token, whatever the number of ranks."""
    mla, head_dim = config.mla, config.head_dim
    return KVGeometry(
        kind=AttentionKind.MLA if mla else AttentionKind.GQA,
        layers=config.num_layers,
        kv_heads=config.num_kv_heads,
        plane_dims=(mla.latent_dim, mla.rope_dim) if mla else (head_dim, head_dim),
        dtype=str(dtype).removeprefix("torch."),
        element_bytes=dtype.itemsize,
    )
