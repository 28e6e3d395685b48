"""Describes an instance from vLLM's configuration, and refuses what the connectors don't
support."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import platform
import uuid
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from mooncake_hal.backend_parts import convert_rope_order
from mooncake_hal.deployment import Hardware
from mooncake_hal.kv.geometry import AttentionKind, KVGroup
from mooncake_kv.connector_worker import ConvertRopeOrder
from mooncake_kv.errors import KVConfigError
from mooncake_kv.model_fingerprint import (
    ModelFingerprint,
    longrope_settings,
    model_fingerprint,
)
from mooncake_vllm.errors import UnsupportedByVllmConnector
from mooncake_vllm.rank_link import socket_paths
from mooncake_vllm.vllm_memory import ModelKV, RankPosition, layer_index
from mooncake_vllm.vllm_scheduler_base import Instance
from mooncake_vllm.vllm_worker_side import Device

logger = logging.getLogger(__name__)

KINDS = {
    "FullAttentionSpec": AttentionKind.GQA,
    "MLAAttentionSpec": AttentionKind.MLA,
    "AscendMLAAttentionSpec": AttentionKind.MLA,
    "SlidingWindowSpec": AttentionKind.GQA,
}
"""Kinds of KV cache that can be transferred, by the name of vLLM's class."""
REPEATING_IDS = "VLLM_DISABLE_REQUEST_ID_RANDOMIZATION"
"""vLLM's setting with which a client that names its requests can name two alike."""
ALLOCATOR_SETTINGS = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
"""Settings of torch's allocator. vLLM itself refuses expandable segments, from 0.32 on, but only in
the second one, which is the older name."""
_LOADER_FIELDS = ("_name_or_path", "transformers_version")
"""Fields of a configuration that record where and by which version it was loaded."""


def describe_instance(vllm_config: Any) -> Instance:
    """The properties of the instance that the scheduler side needs."""
    transfer, parallel = vllm_config.kv_transfer_config, vllm_config.parallel_config
    return Instance(
        f"{transfer.engine_id}-{uuid.uuid4().hex[:8]}",  # users may fix engine_id across restarts
        fingerprint(vllm_config.model_config, vllm_config.load_config.download_dir),
        parallel.pipeline_parallel_size * parallel.tensor_parallel_size,
        vllm_config.model_config.max_model_len,
        sends=transfer.is_kv_producer,
        loads=transfer.is_kv_consumer,
        step_timeout_s=float(os.environ.get("VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS", "300")),
    )


def worker_sockets(vllm_config: Any, connector: str) -> list[Path]:
    """The Unix sockets of the workers, by rank: stage after stage, and by TP rank within a stage.

    Args:
        vllm_config: vLLM's configuration.
        connector: name of the connector's class, as an instance may have several connectors.

    Raises:
        KVConfigError: the folder for them belongs to another user.
    """
    parallel = vllm_config.parallel_config
    names = (vllm_config.kv_transfer_config.engine_id, vllm_config.instance_id, connector)
    return socket_paths(names, parallel.pipeline_parallel_size * parallel.tensor_parallel_size)


def steps_may_wait(vllm_config: Any) -> bool:
    """Whether a step that computes nothing may wait briefly without delaying other steps.

    Not for data-parallel ranks of a model with experts, which run their steps together, and not
    with pipeline stages, where such a step lies between two that compute something.
    """
    parallel, model_config = vllm_config.parallel_config, vllm_config.model_config
    shares_experts = model_config.is_moe and parallel.data_parallel_size > 1
    return parallel.pipeline_parallel_size == 1 and not shares_experts


def fingerprint(model_config: Any, download_dir: str | None = None) -> ModelFingerprint:
    """The model's fingerprint: computed as mooncake-engine does if its files are on this host,
    otherwise from its name and configuration.

    Args:
        model_config: vLLM's model configuration.
        download_dir: folder for weights from the hub, if not in the hub's own cache.
    """
    dtype = str(model_config.dtype).removeprefix("torch.")
    changed = _longrope(model_config)
    try:
        folder = _checkpoint_folder(model_config)  # vLLM always keeps the configuration there
        weights = _checkpoint_folder(model_config, download_dir) if download_dir else folder
        found = model_fingerprint(weights, dtype, folder)
        changed["overrides by vLLM"] = _overrides(model_config, folder)
    except (KVConfigError, OSError, ValueError) as exc:  # ValueError: not a valid name for the hub
        logger.warning(
            "the model is identified to peers by its name and configuration only, not by its "
            "weights: %s",
            exc,
        )
        digest = hashlib.sha256(f"{model_config.model}@{model_config.revision}\n".encode())
        digest.update(model_config.hf_config.to_json_string().encode())
        found = ModelFingerprint(digest.hexdigest()[:32], {"dtype": dtype, "told by": "its name"})
    if model_config.quantization is not None:
        changed["quantization by vLLM"] = str(model_config.quantization)
    return ModelFingerprint(
        found.weights, found.settings | {name: value for name, value in changed.items() if value}
    )


def _overrides(model_config: Any, folder: Path) -> str:
    """The fields in which vLLM overrides the checkpoint's config.json, such as another rope; empty
    if there are none."""
    overrides, other_path = model_config.hf_overrides, model_config.hf_config_path
    if callable(overrides) or other_path not in (None, model_config.model):
        whole = json.loads(model_config.hf_config.to_json_string())
        named = {name: value for name, value in whole.items() if name not in _LOADER_FIELDS}
        return f"all, {hashlib.sha256(_canonical(named).encode()).hexdigest()[:12]}"
    written = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    changed = {name: value for name, value in overrides.items() if written.get(name) != value}
    return _canonical(changed) if changed else ""


def _longrope(model_config: Any) -> dict[str, str]:
    """The settings for the LongRoPE factors that vLLM uses, which depend on --max-model-len; by
    default they are the short ones."""
    text = model_config.hf_text_config
    rope = getattr(text, "rope_parameters", None) or {}
    if rope.get("rope_type") != "longrope":
        return {}
    fallback = getattr(text, "original_max_position_embeddings", 0)  # as Phi-3 has it
    original = rope.get("original_max_position_embeddings", fallback)
    return longrope_settings(model_config.max_model_len, original, text.max_position_embeddings)


def _canonical(value: Mapping[str, Any]) -> str:
    return json.dumps(value, sort_keys=True, default=str)


def _checkpoint_folder(model_config: Any, cache_dir: str | None = None) -> Path:
    """The folder of the model's files that vLLM has loaded.

    Args:
        model_config: vLLM's model configuration.
        cache_dir: cache of files from the hub; None is the hub's default.

    Raises:
        OSError: the model is neither a folder nor in the cache.
        ValueError: the name is not valid for the hub, such as a bucket's address.
    """
    folder = Path(model_config.model)
    if folder.is_dir():
        return folder
    from huggingface_hub import snapshot_download

    return Path(
        snapshot_download(
            model_config.model,
            revision=model_config.revision,
            cache_dir=cache_dir,
            local_files_only=True,
        )
    )


def check_supported(vllm_config: Any, kv_cache_config: Any) -> None:
    """Refuse configurations that the connectors don't support yet.

    Args:
        vllm_config: vLLM's configuration.
        kv_cache_config: its KV-cache groups.

    Raises:
        UnsupportedByVllmConnector: names all problems.
    """
    parallel, groups = vllm_config.parallel_config, kv_cache_config.kv_cache_groups
    problems = list(_parallel_problems(parallel))
    problems += dict.fromkeys(
        problem for group in groups for problem in _spec_problems(group.kv_cache_spec)
    )
    specs = [group.kv_cache_spec for group in groups]
    problems += _group_problems(parallel, specs)
    model_config = vllm_config.model_config
    # Of sleep mode, vLLM itself asks the connector from 0.33 on; the allocator suffices to sleep.
    if model_config.enable_sleep_mode or model_config.enable_cumem_allocator:
        problems.append(
            "sleep mode, or its allocator (--enable-cumem-allocator): they move memory whose "
            "addresses peers have"
        )
    problems += _allocator_problems()
    if int(os.environ.get(REPEATING_IDS, "0")):  # a lease of an earlier request could be confirmed
        problems.append(f"{REPEATING_IDS}: leases are named by request ids, which must not repeat")
    if problems:
        raise UnsupportedByVllmConnector(f"KV can't be transferred yet with {'; '.join(problems)}")


def check_outer_role(vllm_config: Any, outer: Any) -> None:
    """Refuse a ``kv_role`` of MultiConnector with which vLLM gives a load blocks that a step in
    flight still writes. For a connector whose loads don't wait for such steps.

    Args:
        vllm_config: the configuration that the connector was given, with its own ``kv_role``.
        outer: vLLM's configuration; None if it is unknown.

    Raises:
        UnsupportedByVllmConnector: the two roles contradict each other.
    """
    transfer = vllm_config.kv_transfer_config
    transfer_of_vllm = None if outer is None else outer.kv_transfer_config
    if transfer_of_vllm is None or vllm_config.max_concurrent_batches == 1:
        return
    if transfer.is_kv_consumer and not transfer_of_vllm.is_kv_consumer:
        raise UnsupportedByVllmConnector(
            f"a child of MultiConnector has the kv_role {transfer.kv_role}, MultiConnector itself "
            f"{transfer_of_vllm.kv_role}: vLLM would let it load into blocks that a step in flight "
            "still writes for another request; use kv_both for MultiConnector"
        )


def check_siblings(outer: Any, connector: str) -> None:
    """Refuse two children of MultiConnector of the same class: their workers would have the same
    sockets, and their metrics the same names.

    Args:
        outer: vLLM's configuration; None if it is unknown.
        connector: name of the class.

    Raises:
        UnsupportedByVllmConnector: there are two.
    """
    transfer_of_vllm = None if outer is None else outer.kv_transfer_config
    if transfer_of_vllm is None:
        return
    children = transfer_of_vllm.kv_connector_extra_config.get("connectors", ())
    count = sum(child.get("kv_connector") == connector for child in children)
    if count > 1:
        raise UnsupportedByVllmConnector(
            f"MultiConnector has {count} children that are {connector}: configure one of them "
            "(a pool can have several stores: connect=HOST:PORT,connect=HOST:PORT)"
        )


def _allocator_problems() -> Iterator[str]:
    for name in ALLOCATOR_SETTINGS:
        if "expandable_segments:true" in os.environ.get(name, "").replace(" ", "").lower():
            yield (
                f"expandable_segments in {name}: a KV cache of many small allocations, which peers "
                "can't map as one and torch may move"
            )


def _parallel_problems(parallel: Any) -> Iterator[str]:
    for name in ("decode_context_parallel_size", "prefill_context_parallel_size"):
        if (size := getattr(parallel, name, 1)) > 1:
            yield f"{name} {size}"
    if parallel.nnodes_within_dp > 1:
        yield "the ranks of one instance on several hosts"


def _group_problems(parallel: Any, specs: Sequence[Any]) -> Iterator[str]:
    advice = "start vLLM with --disable-hybrid-kv-cache-manager where the model allows it"
    if parallel.pipeline_parallel_size > 1 and (len(specs) > 1 or any(map(_window, specs))):
        yield f"KV-cache groups or sliding windows on several pipeline stages; {advice}"
    shapes = {
        (spec.block_size, spec.num_kv_heads, spec.head_size, spec.head_size_v, str(spec.dtype))
        for spec in specs
        if type(spec).__name__ in KINDS
    }
    if len(shapes) > 1:
        yield (
            "KV-cache groups that differ in (block size, heads, sizes of K and V, type): "
            f"{sorted(shapes)}; {advice}"
        )


def _spec_problems(spec: Any) -> Iterator[str]:
    if type(spec).__name__ not in KINDS:
        yield f"a KV cache of {type(spec).__name__} (supported: {', '.join(KINDS)})"
        return
    for name, expected in (
        ("tokens_per_state", 1),
        ("kv_quant_mode", 0),
        ("page_size_padded", None),
        ("num_head_slots", None),
        ("state_content_bytes", None),
    ):
        if (found := getattr(spec, name)) != expected:
            yield f"a KV cache whose {name} is {found} (supported: {expected})"


def model_kv(model_config: Any, groups: Sequence[Any]) -> ModelKV:
    """The model's KV per token.

    Args:
        model_config: vLLM's model configuration.
        groups: vLLM's KV-cache groups.
    """
    spec = groups[0].kv_cache_spec
    kind = KINDS[type(spec).__name__]
    if kind is AttentionKind.MLA:
        text = model_config.hf_text_config
        heads, dims = 1, (text.kv_lora_rank, text.qk_rope_head_dim)
    else:
        heads, dims = model_config.get_total_num_kv_heads(), (spec.head_size, spec.head_size_v)
    dtype = str(spec.dtype).removeprefix("torch.")
    found = tuple(map(_kv_group, groups))
    is_plain = len(found) == 1 and not found[0].window
    num_layers = model_config.get_total_num_hidden_layers()
    return ModelKV(kind, num_layers, heads, dims, dtype, () if is_plain else found)


def _kv_group(group: Any) -> KVGroup:
    layers = tuple(sorted(layer_index(name) for name in group.layer_names))
    return KVGroup(layers, _window(group.kv_cache_spec))


def _window(spec: Any) -> int:
    """The sliding window beyond which vLLM drops blocks, in tokens; 0 if it keeps all blocks. With
    the hybrid manager off, full attention may have a window, too, and vLLM keeps all blocks."""
    sliding = spec if type(spec).__name__ == "SlidingWindowSpec" else None
    return 0 if sliding is None else int(sliding.sliding_window)


def rope_order_converter(
    caches: Mapping[str, torch.Tensor | Sequence[torch.Tensor]], kv: ModelKV
) -> ConvertRopeOrder | None:
    """Return the function that converts the rope rows of latents in a rank's caches; None if the
    model has no latents.

    Args:
        caches: as in ``view_caches``, or in ``view_ascend_caches``, where latents and rope rows are
            tensors of their own with tokens before heads.
        kv: the model's KV.
    """
    if kv.kind is not AttentionKind.MLA:
        return None
    latent_dim = kv.plane_dims[0]
    rows = [
        cache.transpose(1, 2)[..., latent_dim:] if isinstance(cache, torch.Tensor) else cache[1]
        for cache in caches.values()
    ]
    return partial(convert_rope_order, rows)


def npu_formats(caches: Mapping[str, Sequence[torch.Tensor]]) -> set[int]:
    """The NPU's formats of these tensors; empty without torch_npu."""
    try:
        import torch_npu
    except ModuleNotFoundError:
        return set()
    return {torch_npu.get_npu_format(tensor) for layer in caches.values() for tensor in layer}


class _CompletedEvent:
    """An event for devices on which work is complete when the call returns."""

    def record(self) -> None:
        pass

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass


def describe_device(platform_of_vllm: Any, index: int | None) -> Device:
    """Describe the device of a rank.

    Args:
        platform_of_vllm: ``vllm.platforms.current_platform``.
        index: index of the device; None for host memory.
    """
    kind = platform_of_vllm.device_type
    if index is None:
        return Device(kind, Hardware(kind, platform.machine()), _CompletedEvent, _bind_nothing)
    capability = platform_of_vllm.get_device_capability()
    generation = f"sm_{capability.major}{capability.minor}" if capability else ""
    return Device(
        kind,
        Hardware(kind, generation),
        partial(torch.Event, device=f"{kind}:{index}"),
        partial(torch.accelerator.set_device_index, index),
    )


def rank_position(tp_rank: int, tp_size: int, device: Device, index: int | None) -> RankPosition:
    """The position of a rank, and the device of its memory."""
    return RankPosition(
        tp_rank, tp_size, device.kind if index is None else f"{device.kind}:{index}"
    )


def _bind_nothing() -> None:
    """Nothing to bind: the host is current on every thread."""
