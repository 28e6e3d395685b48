"""The engine plan: everything that config, checkpoint and backend decide before the model is
loaded."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from mooncake_engine.checkpoints.gguf_index import GGUF_INDEX_NAME
from mooncake_engine.config import KV_CACHE_DTYPES, EngineConfig, Role
from mooncake_engine.errors import ConfigError
from mooncake_engine.execution.expert_plan import plan_experts
from mooncake_engine.execution.graph_plan import NO_GRAPHS, GraphPlan, plan_graphs
from mooncake_engine.execution.weight_loader import KVScales, read_kv_scales
from mooncake_engine.kv_cache.kv_cache_memory import (
    KVCacheSize,
    choose_layout,
    choose_num_blocks,
    torch_dtype,
)
from mooncake_engine.models.catalog import kv_geometry, read_model_config
from mooncake_engine.models.hf_config import ModelConfig
from mooncake_engine.models.parallel_context import share_heads
from mooncake_engine.models.quantization_config import FP8_ON_LOAD
from mooncake_hal.backend import Backend, Capabilities, DeviceInfo
from mooncake_hal.deployment import BlockSize, default_block_size
from mooncake_hal.fused_experts import ExpertShape
from mooncake_hal.host_memory import memory_bytes
from mooncake_hal.kv.geometry import AttentionKind, KVGeometry, KVShard, shards_of
from mooncake_hal.kv.layout import layout_bytes
from mooncake_hal.latents import HALVES
from mooncake_kv.numerics import ROPE_ORDER

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class DraftPlan:
    """The draft model in an engine plan.

    Args:
        model: config of the draft model.
        geometry: KV of the draft model, in blocks of the same ids and size as the model's.
        max_positions: longest sequence that the draft model takes, in tokens.
    """

    model: ModelConfig
    geometry: KVGeometry
    max_positions: int


@dataclass(frozen=True, slots=True)
class EnginePlan:
    """The decisions that are made before the model is loaded. ``make_plan`` makes a plan once, and
    the executor sends it to every rank.

    Args:
        config: config of the instance.
        backend: name of the backend, never ``auto``.
        model: config of the model.
        dtype: type of weights and activations.
        geometry: the model's KV and its type.
        block_size: tokens per KV block, and the reason for the number.
        layout_name: key of ``KV_LAYOUTS``.
        max_model_len: longest sequence, in tokens; a pool that is measured later may lower it.
        kv_cache_size: size of each rank's KV cache; None if it gets the memory that the loaded
            model leaves free, which each rank measures: see ``with_blocks``.
        draft: the draft model; None if there is none.
        swap_space_bytes: host memory per rank to which preempted groups are swapped.
        kv_scales, has_native_latents: see ``ParallelContext``.
        graphs: the graphs to capture.
        expert_slots: see ``ParallelContext``.
        has_fp8_linears, has_fp8_experts: whether the backend multiplies fp8 weights of linear
            layers, and of experts; if not, they are dequantised while they are loaded.
    """

    config: EngineConfig
    backend: str
    model: ModelConfig
    dtype: torch.dtype
    geometry: KVGeometry
    block_size: BlockSize
    layout_name: str
    max_model_len: int
    kv_cache_size: KVCacheSize | None = None
    draft: DraftPlan | None = None
    swap_space_bytes: int = 0
    kv_scales: KVScales = ()
    has_native_latents: bool = False
    graphs: GraphPlan = NO_GRAPHS
    expert_slots: tuple[tuple[int, ...], ...] = ()
    has_fp8_linears: bool = False
    has_fp8_experts: bool = False

    def keeps_fp8_experts(self, model: ModelConfig) -> bool:
        """Whether the experts of one of the models stay in fp8, on ranks that hold whole blocks of
        them. Experts with input scales don't: each expert of a layer has its own scale."""
        quantization = model.quantization
        is_dynamic = quantization is not None and not quantization.has_input_scales
        return model.moe is not None and is_dynamic and self.has_fp8_experts

    @property
    def models(self) -> tuple[ModelConfig, ...]:
        """The model, and the draft model if there is one."""
        return (self.model,) if self.draft is None else (self.model, self.draft.model)

    @property
    def geometries(self) -> tuple[KVGeometry, ...]:
        """The KV of all models; their blocks are allocated and freed together."""
        return (self.geometry,) if self.draft is None else (self.geometry, self.draft.geometry)

    @property
    def kv_meaning(self) -> dict[str, str]:
        """How the values of this instance's KV are to be interpreted, for ``mooncake_kv.numerics``.
        The RoPE order is always halves: checkpoints that rotate pairs are converted while they are
        loaded."""
        mla = self.model.mla
        scale = self.model.head_dim**-0.5 if mla is None else mla.scale
        meaning = {ROPE_ORDER: HALVES, "softmax scale": f"{scale:.6g}, on the scores"}
        if self.kv_scales:
            digest = hashlib.sha256(repr(self.kv_scales).encode()).hexdigest()[:12]
            meaning["scales of narrow types"] = f"one per layer and plane, {digest}"
        return meaning

    @property
    def whole_experts(self) -> ExpertShape | None:
        """The shape of the experts that are divided over ranks, if each expert is whole on one rank
        and none is in fp8; else None."""
        config, moe = self.config, self.model.moe
        if self.keeps_fp8_experts(self.model):
            return None
        if moe is None or config.ep_size == 1 or config.ep_size < config.dp_size * config.tp_size:
            return None
        routing = moe.routing
        num_slots = len(self.expert_slots[0]) if self.expert_slots else routing.num_experts
        return ExpertShape(num_slots, routing.experts_per_token, self.model.hidden_size)

    @property
    def num_scratch_blocks(self) -> int:
        """Blocks for the padding of captured graphs, at the end of the pool."""
        return self.graphs.scratch_blocks(self.block_size.tokens)

    @property
    def max_blocks(self) -> int:
        """Blocks of the longest sequence."""
        return -(-self.max_model_len // self.block_size.tokens)

    def with_blocks(self, num_blocks: int) -> EnginePlan:
        """The plan for a pool of ``num_blocks`` blocks.

        Host memory gets at most as many blocks: preempted requests resume before new ones start, so
        more are hardly ever swapped out at once.

        Raises:
            ConfigError: the longest sequence that the config asks for does not fit into the pool.
        """
        block_size = self.block_size.tokens
        host_block_bytes = largest_block(self.config, (self.geometry,), block_size)
        num_host_blocks = min(self.swap_space_bytes // host_block_bytes, num_blocks)
        return replace(
            self,
            kv_cache_size=KVCacheSize(
                num_blocks, block_size, num_host_blocks, self.num_scratch_blocks
            ),
            max_model_len=_choose_length(self.config, self.model, num_blocks * block_size),
        )


def make_plan(config: EngineConfig, backend: Backend) -> EnginePlan:
    """Read the checkpoint's config and decide what the engine config leaves open.

    Raises:
        CheckpointError: the checkpoint's config is missing, incomplete or unsupported.
        ConfigError: the config asks for something that the model or the backend does not have.
    """
    capabilities = backend.capabilities
    config = _choose_scheduling(config, backend)
    block_size = choose_block_size(config, backend)
    model = _quantise(config, read_model_config(config.model), backend)
    dtype = _choose_dtype(config, model, backend)
    kv_dtype = _choose_kv_dtype(config, backend)
    max_model_len = _choose_length(config, model, model.max_positions)
    model = replace(model, rope=model.rope.for_length(max_model_len))
    geometry = kv_geometry(model, kv_dtype or dtype)
    _require_widths(geometry, backend)
    plan = EnginePlan(
        config=config,
        backend=backend.name,
        model=model,
        dtype=dtype,
        geometry=geometry,
        block_size=block_size,
        layout_name=choose_layout(config, capabilities.kv_layouts),
        max_model_len=max_model_len,
        draft=_plan_draft(config, model, dtype),
        swap_space_bytes=choose_swap_space(config, memory_bytes()[0]),
        kv_scales=read_kv_scales(config.model, geometry) if kv_dtype else (),
        has_native_latents=kv_dtype is None
        and _keeps_native_latents(config, geometry, capabilities),
        graphs=plan_graphs(config, backend, geometry.layers, has_experts=model.moe is not None),
        expert_slots=plan_experts(config, model),
        has_fp8_linears="fp8" in capabilities.quantization,
        has_fp8_experts={"fp8", "fp8_experts"} <= {*capabilities.quantization},
    )
    _warn_of_dequantised(plan)
    _warn_of_window(plan)
    for rank in range(config.tp_size):  # refuse more ranks than heads before anything is started
        for shared in plan.models:
            share_heads(shared.num_heads, shared.num_kv_heads, config.tp_size, rank)
    if plan.has_native_latents:
        logger.info(
            "latents are kept in the native layout of backend %r; set --kv-layout to keep them as "
            "rows",
            backend.name,
        )
    largest = largest_block(config, plan.geometries, block_size.tokens)
    if is_profiled(config, backend):
        return plan
    return plan.with_blocks(choose_num_blocks(config, largest))


def _choose_scheduling(config: EngineConfig, backend: Backend) -> EngineConfig:
    """If the config leaves it open, use async scheduling if the device computes while the host
    plans. A CPU does both itself, so that they can't overlap."""
    if config.async_scheduling is not None:
        return config
    overlaps = is_accelerator(config, backend) and config.allows_async_scheduling
    return replace(config, async_scheduling=overlaps)


def is_accelerator(config: EngineConfig, backend: Backend) -> bool:
    """Whether the device is not the host."""
    return backend.runtime.device(config.device).type != "cpu"


def choose_block_size(config: EngineConfig, backend: Backend) -> BlockSize:
    """Tokens per KV block: the config's choice, or the backend's default.

    Raises:
        ConfigError: the backend does not support the config's block size.
    """
    capabilities = backend.capabilities
    if config.block_size is None:
        return default_block_size(capabilities)
    possible = sorted(capabilities.block_sizes)
    if config.block_size not in possible:
        raise ConfigError(
            f"block_size {config.block_size} was requested, backend {backend.name!r} supports "
            f"{possible}; leave it out, or use one of these"
        )
    return BlockSize(config.block_size, "as configured")


def choose_swap_space(config: EngineConfig, free_bytes: int) -> int:
    """Bytes of host memory per rank to which preempted groups are swapped.

    Args:
        config: config of the instance, which may set the swap space.
        free_bytes: free memory of the host, which all its ranks share; weights pass through it too
            while they are loaded.
    """
    if config.swap_space_bytes is not None:
        return config.swap_space_bytes
    per_rank_bytes = int(_SWAP_SHARE * free_bytes) // config.num_ranks_per_node
    if per_rank_bytes < DEFAULT_SWAP_BYTES:
        logger.warning(
            "swap space is %.1f GiB per rank instead of %d GiB: a quarter of the %.1f GiB of free "
            "host memory, divided over %d ranks; set --swap-space to use more",
            per_rank_bytes / _GIB,
            DEFAULT_SWAP_BYTES // _GIB,
            free_bytes / _GIB,
            config.num_ranks_per_node,
        )
    return min(per_rank_bytes, DEFAULT_SWAP_BYTES)


_GIB = 1 << 30
DEFAULT_SWAP_BYTES = 4 * _GIB
"""The most swap space per rank by default; the same as vLLM's former default."""
_SWAP_SHARE = 0.25
"""The share of the host's free memory that all its ranks take for swap space by default."""


def largest_block(config: EngineConfig, geometries: Sequence[KVGeometry], block_size: int) -> int:
    """Bytes of one block of all these models' KV, on the rank that holds the largest shards."""
    ranks = zip(*(all_shards(config, geometry) for geometry in geometries), strict=True)
    return max(block_bytes(geometries, shards, block_size) for shards in ranks)


def block_bytes(
    geometries: Sequence[KVGeometry], shards: Sequence[KVShard], block_size: int
) -> int:
    """Bytes of one block of all these models' KV, on the rank that holds these shards."""
    pairs = zip(geometries, shards, strict=True)
    return sum(layout_bytes(geometry, shard, 1, block_size) for geometry, shard in pairs)


def all_shards(config: EngineConfig, geometry: KVGeometry) -> list[KVShard]:
    """The KV shard of each rank, in rank order.

    Raises:
        ConfigError: there are more pipeline stages than layers.
    """
    if config.pp_size > geometry.layers:
        raise ConfigError(
            f"pp_size {config.pp_size} was requested, the model has {geometry.layers} layers, and "
            "each stage needs at least one; lower it"
        )
    return shards_of(geometry, config.tp_size, config.pp_size)


def is_profiled(config: EngineConfig, backend: Backend) -> bool:
    """Whether the KV cache gets the device memory that a profiling run leaves free.

    By default only if the device is not the host, whose memory is shared with other processes.
    """
    if config.num_kv_blocks is not None or config.kv_cache_bytes is not None:
        return False
    if config.memory_utilization is not None:
        return True
    return is_accelerator(config, backend)


def _plan_draft(config: EngineConfig, model: ModelConfig, dtype: torch.dtype) -> DraftPlan | None:
    if config.speculation is None or config.speculation.model is None:
        return None
    draft = read_model_config(config.speculation.model)
    if draft.vocab_size != model.vocab_size:
        raise ConfigError(
            f"the draft model in {config.speculation.model} has {draft.vocab_size} tokens in its "
            f"vocabulary, the model has {model.vocab_size}: use a draft model of the same family"
        )
    if draft.max_positions < model.max_positions:
        logger.info(
            "the draft model supports sequences of %d tokens, the model of %d: longer ones run "
            "without drafts",
            draft.max_positions,
            model.max_positions,
        )
    return DraftPlan(draft, kv_geometry(draft, dtype), draft.max_positions)


def rank_device(config: EngineConfig, devices: list[DeviceInfo], rank: int) -> int:
    """The device index of a rank. If the host has a single device (a CPU), its ranks share it.

    Raises:
        ConfigError: the rank has no device.
    """
    if len(devices) == 1 and config.device == devices[0].index:
        return config.device
    wanted = config.device + rank % config.num_ranks_per_node
    if wanted not in {device.index for device in devices}:
        raise ConfigError(
            f"rank {rank} of {config.num_all_ranks} needs device {wanted}, "
            f"found {[device.index for device in devices]}; use fewer ranks or another device"
        )
    return wanted


def _require_widths(geometry: KVGeometry, backend: Backend) -> None:
    """Raise ConfigError if the backend's kernels don't support the size of the model's heads, or
    the width of its latents."""
    sizes = backend.capabilities.head_dims
    if geometry.kind is AttentionKind.GQA and sizes and not {*geometry.plane_dims} <= {*sizes}:
        raise ConfigError(
            f"the model's heads are of {geometry.plane_dims[0]} elements, backend "
            f"{backend.name!r} supports {list(sizes)}; use another backend"
        )
    possible = backend.capabilities.latent_dims
    if geometry.kind is AttentionKind.MLA and possible and geometry.plane_dims not in possible:
        raise ConfigError(
            f"the model's latents and rotated rows are {geometry.plane_dims} wide, backend "
            f"{backend.name!r} supports {list(possible)}; use another backend"
        )


def _quantise(config: EngineConfig, model: ModelConfig, backend: Backend) -> ModelConfig:
    """The model config, with weights to be quantised while they are loaded if the engine config
    asks for that. A checkpoint that is in fp8 already stays as it is."""
    if config.quantization is None:
        return model
    wanted = f"quantization {config.quantization!r} was requested, "
    if (config.model / GGUF_INDEX_NAME).exists():
        raise ConfigError(
            f"{wanted}{config.model} is GGUF, which has its own quantisation: leave it "
            "out, or use the model's safetensors"
        )
    if model.quantization is not None:
        return model
    needs = {"fp8": "linear layers"} | ({"fp8_experts": "experts"} if model.moe else {})
    possible = backend.capabilities.quantization
    if lacking := [what for name, what in needs.items() if name not in possible]:
        raise ConfigError(
            f"{wanted}backend {backend.name!r} does not support {' and '.join(lacking)} in fp8 on "
            "this device: leave it out, or use another backend or device"
        )
    return replace(model, quantization=FP8_ON_LOAD)


def _warn_of_dequantised(plan: EnginePlan) -> None:
    """Warn if fp8 weights are dequantised, and so take more memory than in the checkpoint."""
    dtype = str(plan.dtype).removeprefix("torch.")
    for model in plan.models:
        if model.quantization is None:
            continue
        if not plan.has_fp8_linears:
            logger.warning(
                "the fp8 weights of %s are dequantised to %s while they are loaded: backend %r "
                "does not support fp8 on this device",
                model.architecture,
                dtype,
                plan.backend,
            )
        elif model.moe is not None and not plan.keeps_fp8_experts(model):
            why = f"backend {plan.backend!r} supports only linear layers in fp8"
            if plan.has_fp8_experts:
                why = "input scales are supported only for linear layers"
            logger.warning(
                "the fp8 weights of the experts of %s are dequantised to %s while they are "
                "loaded: %s",
                model.architecture,
                dtype,
                why,
            )


def _warn_of_window(plan: EnginePlan) -> None:
    """Warn if a sliding window limits the context and the config did not set a length."""
    window = plan.model.sliding_window
    if window is not None and plan.config.max_model_len is None:
        logger.warning(
            "prompt and output together are limited to the %d tokens of the model's sliding "
            "window: windowed attention is not computed, and within the window it is the same",
            window,
        )


def _keeps_native_latents(
    config: EngineConfig, geometry: KVGeometry, capabilities: Capabilities
) -> bool:
    """Whether latents are kept in the backend's native layout rather than as rows.

    Instances exchange rows. So only a decode instance uses the native layout: it converts the KV
    that it receives, and sends none, neither to a peer nor to a KVCache pool. If the config names a
    layout, that layout is used.
    """
    is_latent = geometry.kind is AttentionKind.MLA
    is_free = config.role is Role.DECODE and config.kv_layout == "auto" and config.kv_pool is None
    return is_latent and is_free and capabilities.native_latents


def _choose_dtype(config: EngineConfig, model: ModelConfig, backend: Backend) -> torch.dtype:
    possible = backend.capabilities.dtypes
    if config.dtype != "auto":
        if config.dtype not in possible:
            raise ConfigError(
                f"dtype {config.dtype!r} was requested, the backend supports {list(possible)}"
            )
        return torch_dtype(config.dtype)
    best = possible[0]
    if model.dtype not in possible:
        logger.warning(
            "checkpoint is %s, which the backend does not support: running in %s", model.dtype, best
        )
        return torch_dtype(best)
    if model.dtype == "float32" and is_accelerator(config, backend) and best != "float32":
        logger.warning(
            "checkpoint is float32: running in %s, as vLLM does; --dtype float32 keeps it", best
        )
        return torch_dtype(best)
    return torch_dtype(model.dtype)


def _choose_kv_dtype(config: EngineConfig, backend: Backend) -> torch.dtype | None:
    """The narrower type in which KV is stored; None to store it in the model's type."""
    if config.kv_cache_dtype == "auto":
        return None
    name = KV_CACHE_DTYPES[config.kv_cache_dtype]
    possible = backend.capabilities.kv_dtypes
    if name not in possible:
        raise ConfigError(
            f"kv_cache_dtype {config.kv_cache_dtype!r} was requested, which is {name}; backend "
            f"{backend.name!r} supports the model's own type and {list(possible)} on this device: "
            "use 'auto', or another device"
        )
    return torch_dtype(name)


def _choose_length(config: EngineConfig, model: ModelConfig, pool_tokens: int) -> int:
    """The longest sequence, in tokens: the config's choice, or what the model and the pool
    allow."""
    wanted = config.max_model_len
    if wanted is None:
        return min(model.max_positions, pool_tokens)
    if model.sliding_window is not None and wanted > model.sliding_window:
        raise ConfigError(
            f"max_model_len {wanted} was requested, the model has a sliding window of "
            f"{model.sliding_window} tokens, beyond which attention is not computed: use "
            f"--max-model-len {model.sliding_window} or less"
        )
    for limit, owner in ((model.max_positions, "model supports"), (pool_tokens, "pool holds")):
        if wanted > limit:
            raise ConfigError(
                f"max_model_len {wanted} was requested, the {owner} {limit} tokens; lower it"
            )
    return wanted
