"""Loads a checkpoint into a rank's weights, reading only the bytes that the rank needs."""

from __future__ import annotations

import logging
import math
import re
import time
from collections import defaultdict, deque
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from mooncake_engine.checkpoints.fp8_tensors import Fp8Scales
from mooncake_engine.checkpoints.tensor_files import (
    TensorFile,
    format_names,
    locate_tensors,
    open_tensors,
)
from mooncake_engine.core_messages import LoadProgress, ProgressHandler
from mooncake_engine.errors import CheckpointError
from mooncake_engine.models.catalog import Model
from mooncake_engine.models.decoder import KEY_SCALE_SUFFIXES, VALUE_SCALE_SUFFIXES
from mooncake_engine.models.layers import WeightShard
from mooncake_hal.kv.geometry import AttentionKind, KVGeometry

logger = logging.getLogger(__name__)

_NUM_READERS = 4
"""Threads that read and dequantise tensors."""
_READ_AHEAD = 8
"""The most tensors in host memory that are being read or wait to be copied to the device."""


def load_weights(
    model: Model, model_dir: Path, progress: ProgressHandler | None = None
) -> LoadProgress:
    """Load every weight of the model, file by file; returns the final progress.

    Several threads read and dequantise; the calling thread copies to the device. Files that hold
    nothing for this rank are not opened.

    Raises:
        CheckpointError: files or tensors are missing, damaged, of another shape, or unknown to
            the model; the message names them.
    """
    started = time.monotonic()
    shards: dict[str, list[WeightShard]] = defaultdict(list)
    for shard in model.weight_shards():
        shards[shard.name].append(shard)
    files = locate_tensors(model_dir)
    scales = Fp8Scales(files)
    _check_names(model, shards, files, model_dir)
    total = sum(_read_bytes(shard) for named in shards.values() for shard in named)
    loaded = 0
    for path in sorted({files[name] for name in shards}):
        wanted = [shard for name in shards if files[name] == path for shard in shards[name]]
        for shard, values in _read(path, wanted, scales):
            shard.fill(values)
            loaded += _read_bytes(shard)
            if progress is not None:
                progress(LoadProgress(loaded, total))
    _check_tied_head(model, files, scales)
    seconds = max(time.monotonic() - started, 1e-6)
    size = total / 1e9
    logger.info("read %.3g GB of weights in %.3g s: %.3g GB/s", size, seconds, size / seconds)
    model.process_weights_after_loading()
    return LoadProgress(loaded, total)


def _check_names(
    model: Model, shards: Mapping[str, object], files: Mapping[str, Path], model_dir: Path
) -> None:
    missing = sorted(shards.keys() - files.keys())
    unexpected = sorted(name for name in files.keys() - shards.keys() if not model.is_ignored(name))
    problems = []
    if missing:
        problems.append(f"lacks {format_names(missing)}")
    if unexpected:
        problems.append(
            f"holds tensors that its config does not account for: {format_names(unexpected)}"
        )
    if problems:
        raise CheckpointError(f"the checkpoint in {model_dir} {' and '.join(problems)}")


def _check_tied_head(model: Model, files: Mapping[str, Path], scales: Fp8Scales) -> None:
    """Raise CheckpointError if the checkpoint has a head that differs from the embedding, although
    its config says that they are tied. The head was trained to be used, and transformers uses it
    since version 5."""
    head = model.tied_head
    if head is None or head.name not in files:
        return
    path = files[head.name]
    for _, values in _read(path, [head], scales):
        if not torch.equal(values, head.target.cpu()):
            raise CheckpointError(
                f"{path}: {head.name} is not the embedding, and config.json says "
                "tie_word_embeddings: set it to false there to use this head, or remove the tensor"
            )


def _read_bytes(shard: WeightShard) -> int:
    return shard.target.numel() * shard.dtype.itemsize


def _read(
    path: Path, shards: list[WeightShard], scales: Fp8Scales
) -> Iterator[tuple[WeightShard, Tensor]]:
    """Yield each shard with its values from one file, in order, reading up to ``_READ_AHEAD``
    shards ahead."""
    with ExitStack() as cleanup:
        file = cleanup.enter_context(open_tensors(path, scales))
        readers = cleanup.enter_context(ThreadPoolExecutor(_NUM_READERS, "weights"))
        ahead: deque[tuple[WeightShard, Future[Tensor]]] = deque()
        cleanup.callback(readers.shutdown, cancel_futures=True)
        for shard in shards:
            ahead.append((shard, readers.submit(_read_shard, file, shard, path, scales)))
            if len(ahead) == _READ_AHEAD:
                first, values = ahead.popleft()
                yield first, values.result()
        for first, values in ahead:
            yield first, values.result()


def _read_shard(file: TensorFile, shard: WeightShard, path: Path, scales: Fp8Scales) -> Tensor:
    if shard.is_scale_of_rows:
        return _read_row_scales(shard, scales)
    found = file.shape(shard.name)
    if found != shard.full_shape:
        raise CheckpointError(
            f"{path}: {shard.name} has shape {list(found)}, config.json asks for "
            f"{list(shard.full_shape)}"
        )
    window = tuple(
        slice(start, start + size)
        for start, size in zip(shard.offset, shard.target.shape, strict=True)
    )
    return file.read(shard.name, window, shard.dtype)


def _read_row_scales(shard: WeightShard, scales: Fp8Scales) -> Tensor:
    """The scale of each row; the checkpoint may have one scale for all rows."""
    found = scales.read(shard.name).flatten()
    if found.numel() not in (1, *shard.full_shape):
        raise CheckpointError(
            f"{shard.name} holds {found.numel()} scales, config.json asks for one, or "
            f"for one of each of {shard.full_shape[0]} rows"
        )
    (first,), (rows,) = shard.offset, shard.target.shape
    return found.expand(shard.full_shape[0])[first : first + rows]


KVScales = tuple[tuple[float, float], ...]
"""The KV scales of both planes (K, V), layer by layer."""

_LAYER = re.compile(r"\.layers\.(\d+)\.")


def read_kv_scales(model_dir: Path, geometry: KVGeometry) -> KVScales:
    """The KV scales of a checkpoint; 1 for layers without scales, as in vLLM. With latent attention
    both planes get the scale of K: such checkpoints store both planes as one row.

    Raises:
        CheckpointError: a scale is not one positive number, or its file is damaged.
    """
    files = locate_tensors(model_dir)
    keys, values = (
        _scales_at(files, ends, geometry.layers)
        for ends in (KEY_SCALE_SUFFIXES, VALUE_SCALE_SUFFIXES)
    )
    is_latent = geometry.kind is AttentionKind.MLA
    return tuple(zip(keys, keys if is_latent else values, strict=True))


def _scales_at(files: Mapping[str, Path], ends: tuple[str, ...], layers: int) -> list[float]:
    scales = [1.0] * layers
    for name, path in files.items():
        layer = _LAYER.search(name)
        if name.endswith(ends) and layer and int(layer[1]) < layers:
            scales[int(layer[1])] = _read_scale(path, name)
    return scales


def _read_scale(path: Path, name: str) -> float:
    try:
        with safe_open(path, framework="pt") as handle:
            values = handle.get_tensor(name).flatten().tolist()
    except (SafetensorError, OSError) as exc:
        raise CheckpointError(f"{path} is damaged or not safetensors: {exc}") from exc
    if len(values) != 1 or not (math.isfinite(values[0]) and values[0] > 0):
        raise CheckpointError(f"{path}: {name} must be one positive number, found {values}")
    return float(values[0])
