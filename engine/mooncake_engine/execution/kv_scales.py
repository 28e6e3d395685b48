"""Scales of a quantised KV cache, as checkpoints carry them."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from pathlib import Path

from safetensors import SafetensorError, safe_open

from mooncake_engine.errors import CheckpointError
from mooncake_engine.execution.weights import locate_tensors
from mooncake_engine.models.decoder import KEY_SCALE_ENDS, VALUE_SCALE_ENDS
from mooncake_hal.kv.geometry import AttentionKind, KVGeometry

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
