"""Decoders with a mixture of experts: Mixtral and Qwen3-MoE."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import ClassVar, NamedTuple

from mooncake_engine.models.decoder import Decoder, DecoderLayer, MlpBlock
from mooncake_engine.models.expert_parallel import ExpertParallelLayer, ExpertParallelMixture
from mooncake_engine.models.hf_config import (
    ModelConfig,
    MoeConfig,
    RawConfig,
    read_decoder,
    read_qwen3,
    within_window,
)
from mooncake_engine.models.layers import ParallelContext
from mooncake_engine.models.mlp import (
    ExpertCounts,
    GatedMlp,
    MixtureOfExperts,
    MlpNames,
    Router,
    RoutingConfig,
    make_expert_weights,
)
from mooncake_engine.scheduling.step_plan import ExpertRound


class MoeNames(NamedTuple):
    """The checkpoint's names of the parts of a mixture of experts.

    The first ``{}`` stands for the layer's number, a second one for the expert's.
    """

    router: str = "model.layers.{}.mlp.gate"
    expert: MlpNames = MlpNames(
        "model.layers.{}.mlp.experts.{}.gate_proj",
        "model.layers.{}.mlp.experts.{}.up_proj",
        "model.layers.{}.mlp.experts.{}.down_proj",
    )
    shared: MlpNames = MlpNames(
        "model.layers.{}.mlp.shared_experts.gate_proj",
        "model.layers.{}.mlp.shared_experts.up_proj",
        "model.layers.{}.mlp.shared_experts.down_proj",
    )


class SparseDecoder(Decoder):
    """A decoder with experts in all layers except ``config.moe.dense_layers`` (Qwen3-MoE)."""

    moe_names: ClassVar[MoeNames] = MoeNames()

    def __init__(self, config: ModelConfig, parallel: ParallelContext, max_positions: int) -> None:
        self._foreign_experts: set[str] = set()
        self._divided: dict[int, ExpertParallelMixture] = {}
        super().__init__(config, parallel, max_positions)

    def build_mlp(self, parallel: ParallelContext, layer: int) -> MlpBlock:
        """Build the experts of a layer, or the MLP of a dense one."""
        moe, hidden, names = self.config.moe, self.config.hidden_size, self.moe_names
        if moe is None or layer in moe.dense_layers:
            return super().build_mlp(parallel, layer)
        experts = [names.expert.of(layer, expert) for expert in range(moe.routing.num_experts)]
        shape = hidden, moe.expert_size
        router = Router(parallel, names.router.format(layer), hidden, moe.routing)
        if parallel.ep_size > 1:
            slots = parallel.expert_slots[layer] if parallel.expert_slots else range(len(experts))
            held = parallel.expert_share(len(slots))
            own = {experts[expert] for expert in slots[held.start : held.stop]}
            foreign = (one for one in experts if one not in own)
            self._foreign_experts |= {f"{linear}.weight" for one in foreign for linear in one}
            shared = (names.shared.of(layer), moe.shared_size) if moe.shared_size else None
            built = ExpertParallelMixture(parallel, router, experts, slots, shape, shared=shared)
            self._divided[layer] = built
            return built
        shared_mlp = None
        if moe.shared_size:
            shared_mlp = GatedMlp(parallel, names.shared.of(layer), (hidden, moe.shared_size))
        own_experts = make_expert_weights(parallel, experts, range(len(experts)), shape)
        return MixtureOfExperts(parallel, router, own_experts, shared_mlp)

    def build_layer(self, parallel: ParallelContext, layer: int) -> DecoderLayer:
        """Build a layer; with expert parallelism, one that dispatches tokens to ranks."""
        built = super().build_layer(parallel, layer)
        if not isinstance(built.mlp, ExpertParallelMixture):
            return built
        norms = built.input_norm, built.mlp_norm
        least = parallel.ep_dispatch_min_tokens
        return ExpertParallelLayer(norms, built.attention, built.mlp, least)

    @property
    def expert_counts(self) -> Mapping[int, ExpertCounts]:
        return {layer: mixture.counts for layer, mixture in self._divided.items()}

    def serve_experts(self, expert_round: ExpertRound) -> None:
        for mixture in self._divided.values():
            mixture.serve(expert_round)

    def move_experts(self, slots: Mapping[int, Sequence[int]]) -> None:
        for layer, of_layer in slots.items():
            self._divided[layer].move_experts(of_layer)

    def is_split(self, index: int) -> bool:
        return self._held.start + index in self._divided

    @contextmanager
    def worst_routing(self) -> Iterator[None]:
        with ExitStack() as routed:
            for mixture in self._divided.values():
                routed.enter_context(mixture.worst_routing())
            yield

    def is_ignored(self, name: str) -> bool:
        """Ignores also the experts of other ranks."""
        return name in self._foreign_experts or super().is_ignored(name)


class MixtralDecoder(SparseDecoder):
    """A ``SparseDecoder`` with the names of Mixtral's checkpoints."""

    moe_names = MoeNames(
        router="model.layers.{}.block_sparse_moe.gate",
        expert=MlpNames(
            "model.layers.{}.block_sparse_moe.experts.{}.w1",
            "model.layers.{}.block_sparse_moe.experts.{}.w3",
            "model.layers.{}.block_sparse_moe.experts.{}.w2",
        ),
    )


def read_mixtral(raw: RawConfig, architecture: str, eos: tuple[int, ...]) -> ModelConfig:
    """MixtralForCausalLM: experts in every layer, weights of the chosen ones sum to one."""
    moe = MoeConfig(read_routing(raw, ("num_local_experts",)), raw.count("intermediate_size"))
    return within_window(raw, read_decoder(raw, architecture, eos, {"moe": moe}))


def read_qwen3_moe(raw: RawConfig, architecture: str, eos: tuple[int, ...]) -> ModelConfig:
    """Qwen3MoeForCausalLM: Qwen3 with experts in all layers that the config does not exclude."""
    step = raw.get("decoder_sparse_step", int, 1) or 1
    dense = set(raw.get("mlp_only_layers", list) or [])
    dense |= {layer for layer in range(raw.count("num_hidden_layers")) if (layer + 1) % step}
    routing = read_routing(raw, ("num_experts", "num_local_experts"))
    routing = replace(routing, is_normalized=raw.flag("norm_topk_prob"))
    size = raw.count("moe_intermediate_size")
    moe = MoeConfig(routing, size, dense_layers=frozenset(dense))
    return replace(read_qwen3(raw, architecture, eos), moe=moe)


def read_routing(raw: RawConfig, spellings: tuple[str, ...]) -> RoutingConfig:
    """Read the number of experts, from the first of the fields that is present, and the number of
    experts per token."""
    present = [name for name in spellings if raw.fields.get(name) is not None]
    experts = raw.count(present[0] if present else spellings[0])
    chosen = raw.count("num_experts_per_tok")
    if chosen > experts:
        raise raw.refuse("num_experts_per_tok", chosen, f"at most the {experts} experts there are")
    return RoutingConfig(experts, chosen)
