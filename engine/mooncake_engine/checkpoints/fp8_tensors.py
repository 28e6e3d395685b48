"""Reads the scales of a checkpoint's fp8 tensors, and dequantises tensors with them.

The scales of ``X.weight`` are in ``X.weight_scale_inv`` (DeepSeek, Qwen: of blocks of 128 by 128)
or ``X.weight_scale`` (of the tensor, of its rows, or of blocks), possibly in another file. Values
are multiplied by either.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from mooncake_engine.errors import CheckpointError
from mooncake_hal.fp8_linear import FP8_BLOCK

E4M3 = torch.float8_e4m3fn
_SCALE_SUFFIXES = ("_scale_inv", "_scale")


class Fp8Scales:
    """The scales of a checkpoint's tensors. Used by several reader threads at once.

    Args:
        files: the file of each tensor of the checkpoint, by name.
    """

    def __init__(self, files: Mapping[str, Path]) -> None:
        self._files = files
        self._handles: dict[Path, safe_open] = {}

    def read(self, name: str) -> Tensor:
        """Read a whole tensor of scales, which is small, as float32 into host memory.

        Raises:
            CheckpointError: the checkpoint lacks the tensor, or its file is damaged.
        """
        path = self._files.get(name)
        if path is None:
            raise CheckpointError(f"the checkpoint lacks {name}")
        try:
            handle = self._handles.get(path)
            if handle is None:  # if several threads open it at once, the last handle is kept
                handle = self._handles[path] = safe_open(path, framework="pt")
            found: Tensor = handle.get_tensor(name)  # type: ignore[no-untyped-call]  # in Rust
        except (SafetensorError, OSError) as exc:
            raise CheckpointError(f"{path} is damaged or not safetensors: {exc}") from exc
        return found.float()

    def dequantise(self, values: Tensor, name: str, window: tuple[slice, ...]) -> Tensor:
        """Multiply a part of a tensor by its scales; returns float32.

        Args:
            values: the part.
            name: name of the tensor.
            window: the part's slice of each dimension of the tensor.

        Raises:
            CheckpointError: the tensor has no scales, or their shape does not match.
        """
        found = next((name + end for end in _SCALE_SUFFIXES if name + end in self._files), None)
        if found is None:
            raise CheckpointError(
                f"{name} is {values.dtype} without a scale; expected {name}_scale or "
                f"{name}_scale_inv"
            )
        return values.float() * _part_scales(self.read(found), found, window)


def _part_scales(scales: Tensor, name: str, window: tuple[slice, ...]) -> Tensor:
    """The scales of a part of a matrix, in a shape that broadcasts to the part."""
    if scales.numel() == 1:
        return scales.reshape(())
    rows, *columns = window
    if (scales.dim() == 2 and scales.shape[1] > 1) or scales.shape[0] < rows.stop:
        return _part_block_scales(scales, name, window)
    if scales.dim() > 2 or scales.numel() != len(scales) or not columns:
        raise CheckpointError(f"{name} has shape {list(scales.shape)}, expected a scale per row")
    return scales.reshape(-1, 1)[rows]


def _part_block_scales(scales: Tensor, name: str, window: tuple[slice, ...]) -> Tensor:
    wide = scales
    for dim, part in enumerate(window):
        first, last = part.start // FP8_BLOCK, -(-part.stop // FP8_BLOCK)
        if scales.dim() != len(window) or last > scales.shape[dim]:
            raise CheckpointError(
                f"{name} has shape {list(scales.shape)}, expected a scale per block of "
                f"{FP8_BLOCK} by {FP8_BLOCK}"
            )
        wide = wide.narrow(dim, first, last - first).repeat_interleave(FP8_BLOCK, dim)
        wide = wide.narrow(dim, part.start - first * FP8_BLOCK, part.stop - part.start)
    return wide
