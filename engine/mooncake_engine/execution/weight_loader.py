"""Loads safetensors into a rank's weights, reading only the bytes that the rank needs."""

from __future__ import annotations

import json
import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from mooncake_engine.errors import CheckpointError
from mooncake_engine.models.catalog import Model
from mooncake_engine.models.decoder import KEY_SCALE_ENDS, VALUE_SCALE_ENDS
from mooncake_engine.models.layers import WeightShard
from mooncake_hal.kv.geometry import AttentionKind, KVGeometry

INDEX_NAME = "model.safetensors.index.json"
_SHOWN_NAMES = 5


@dataclass(frozen=True, slots=True)
class LoadProgress:
    """How far loading is; in bytes of this rank's share.

    Args:
        loaded_bytes: read so far.
        total_bytes: to read.
    """

    loaded_bytes: int
    total_bytes: int

    @property
    def fraction(self) -> float:
        """From 0 to 1."""
        return self.loaded_bytes / self.total_bytes if self.total_bytes else 1.0


ProgressHandler = Callable[[LoadProgress], None]


def load_weights(
    model: Model, model_dir: Path, progress: ProgressHandler | None = None
) -> LoadProgress:
    """Fill and pack every weight of the model, file by file; returns the final progress.

    Files of which this rank needs nothing are not opened.

    Raises:
        CheckpointError: files or tensors are missing, damaged, of another shape, or unknown to
            the model; the message names them.
    """
    slots: dict[str, list[WeightShard]] = defaultdict(list)
    for slot in model.weight_shards():
        slots[slot.name].append(slot)
    files = locate_tensors(model_dir)
    _check_names(model, slots, files, model_dir)
    total = sum(_target_bytes(slot) for named in slots.values() for slot in named)
    loaded = 0
    for path in sorted({files[name] for name in slots}):
        wanted = {name: slots[name] for name in slots if files[name] == path}
        for nbytes in _fill_from_file(path, wanted):
            loaded += nbytes
            if progress is not None:
                progress(LoadProgress(loaded, total))
    model.process_weights_after_loading()
    return LoadProgress(loaded, total)


def locate_tensors(model_dir: Path) -> dict[str, Path]:
    """Which file of the model directory holds each tensor.

    Raises:
        CheckpointError: no safetensors, or an index that names files that are not there.
    """
    index = model_dir / INDEX_NAME
    if index.exists():
        return _read_index(index)
    paths = sorted(model_dir.glob("*.safetensors"))
    if not paths:
        raise CheckpointError(
            f"{model_dir} holds no *.safetensors; convert the checkpoint with "
            "transformers' save_pretrained, other formats are not read"
        )
    return {name: path for path in paths for name in _tensor_names(path)}


def _read_index(index: Path) -> dict[str, Path]:
    try:
        weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        files = {str(name): index.parent / str(file) for name, file in weight_map.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as exc:
        raise CheckpointError(f"{index} has no readable 'weight_map': {exc!r}") from exc
    missing = sorted({path.name for path in files.values() if not path.is_file()})
    if missing:
        raise CheckpointError(
            f"half a checkpoint: {index.name} names {_some(missing)}, not found in {index.parent}"
        )
    return files


def _tensor_names(path: Path) -> list[str]:
    try:
        with safe_open(path, framework="pt") as handle:
            return list(handle.keys())
    except (SafetensorError, OSError) as exc:
        raise CheckpointError(f"{path} is damaged or not safetensors: {exc}") from exc


def _check_names(
    model: Model, slots: Mapping[str, object], files: Mapping[str, Path], model_dir: Path
) -> None:
    missing = sorted(slots.keys() - files.keys())
    unexpected = sorted(name for name in files.keys() - slots.keys() if not model.is_ignored(name))
    problems = []
    if missing:
        problems.append(f"lacks {_some(missing)}")
    if unexpected:
        problems.append(f"holds tensors that its config does not account for: {_some(unexpected)}")
    if problems:
        raise CheckpointError(f"the checkpoint in {model_dir} {' and '.join(problems)}")


def _some(names: list[str]) -> str:
    shown = ", ".join(names[:_SHOWN_NAMES])
    rest = len(names) - _SHOWN_NAMES
    return f"{shown} and {rest} more" if rest > 0 else shown


def _target_bytes(slot: WeightShard) -> int:
    return slot.target.numel() * slot.target.element_size()


def _fill_from_file(path: Path, wanted: Mapping[str, list[WeightShard]]) -> Iterator[int]:
    """Fill the slots from one file; yields the bytes filled, tensor by tensor."""
    try:
        with safe_open(path, framework="pt") as handle:
            for named in wanted.values():
                for slot in named:
                    yield _fill(handle, slot, path)
    except (SafetensorError, OSError) as exc:
        raise CheckpointError(f"{path} is damaged or not safetensors: {exc}") from exc


def _fill(handle: safe_open, slot: WeightShard, path: Path) -> int:
    source = handle.get_slice(slot.name)  # type: ignore[no-untyped-call]  # a Rust extension
    found = tuple(source.get_shape())
    if found != slot.full_shape:
        raise CheckpointError(
            f"{path}: {slot.name} has shape {list(found)}, config.json asks for "
            f"{list(slot.full_shape)}"
        )
    window = tuple(
        slice(start, start + size)
        for start, size in zip(slot.offset, slot.target.shape, strict=True)
    )
    values = source[window]
    if not values.dtype.is_floating_point or values.dtype.itemsize < torch.float16.itemsize:
        raise CheckpointError(
            f"{path}: {slot.name} is {values.dtype}; only unquantised weights are read"
        )
    slot.target.copy_(values)
    return _target_bytes(slot)


KVScales = tuple[tuple[float, float], ...]
"""Of both planes, layer by layer."""

_LAYER = re.compile(r"\.layers\.(\d+)\.")


def read_kv_scales(model_dir: Path, geometry: KVGeometry) -> KVScales:
    """The checkpoint's scales, 1 where it has none, as vLLM does; of latent attention, whose
    planes are one row there, the first one for both.

    Raises:
        CheckpointError: a scale is not one positive number, or its file is damaged.
    """
    files = locate_tensors(model_dir)
    keys, values = (
        _scales_at(files, ends, geometry.layers) for ends in (KEY_SCALE_ENDS, VALUE_SCALE_ENDS)
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
        raise CheckpointError(f"{path}: {name} must be one positive number, it is {values}")
    return float(values[0])
