"""Locates tensors in the files of a checkpoint, and reads parts of them; safetensors and GGUF."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from mooncake_engine.checkpoints.fp8_tensors import E4M3, Fp8Scales
from mooncake_engine.checkpoints.gguf_index import GGUF_INDEX_NAME, read_index
from mooncake_engine.checkpoints.gguf_tensors import GGUFTensors
from mooncake_engine.errors import CheckpointError

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
_SHOWN_NAMES = 5
_FLOATS = {"F16": "float16", "BF16": "bfloat16", "F32": "float32", "F64": "float64"}
"""Types of unquantised weights: safetensors' names to torch's."""


class TensorFile(Protocol):
    """An open file of tensors."""

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a tensor."""
        ...

    def read(self, name: str, window: tuple[slice, ...], dtype: torch.dtype) -> Tensor:
        """Copy a part of a tensor to new host memory. Reads only that part of the file.

        Args:
            name: name of the tensor.
            window: the part's slice of each dimension.
            dtype: type of the result.

        Raises:
            CheckpointError: the type of the tensor is not supported.
        """
        ...


class SafetensorsFile:
    """An open safetensors file; implements ``TensorFile``. It dequantises fp8 tensors unless they
    are read as fp8."""

    def __init__(self, handle: safe_open, path: Path, scales: Fp8Scales) -> None:
        self._handle = handle
        self._path = path
        self._scales = scales

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a tensor."""
        source = self._handle.get_slice(name)  # type: ignore[no-untyped-call]  # in Rust
        return tuple(source.get_shape())

    def read(self, name: str, window: tuple[slice, ...], dtype: torch.dtype) -> Tensor:
        """Copy a part of a tensor from the mapped file."""
        source = self._handle.get_slice(name)  # type: ignore[no-untyped-call]  # in Rust
        values = source[window]
        is_narrow = values.dtype.itemsize < torch.float16.itemsize
        if values.dtype is E4M3 and dtype is not E4M3:
            values = self._scales.dequantise(values, name, window)
        elif not values.dtype.is_floating_point or (is_narrow and values.dtype is not E4M3):
            raise CheckpointError(
                f"{self._path}: {name} is {values.dtype}; only unquantised weights and fp8 (e4m3) "
                "are supported"
            )
        elif dtype is E4M3 and values.dtype is not E4M3:
            raise CheckpointError(
                f"{self._path}: {name} is {values.dtype}, the config's quantization_config says "
                "fp8 (e4m3)"
            )
        return torch.empty(values.shape, dtype=dtype).copy_(values)


@contextmanager
def open_tensors(path: Path, scales: Fp8Scales) -> Iterator[TensorFile]:
    """Open a file that ``locate_tensors`` returned.

    Args:
        path: path of the file.
        scales: the scales of the checkpoint's fp8 tensors.

    Raises:
        CheckpointError: the file is damaged; also raised for read errors inside the context.
    """
    if path.suffix == ".gguf":
        yield GGUFTensors(path)
        return
    with _opened(path) as handle:
        yield SafetensorsFile(handle, path, scales)


@contextmanager
def _opened(path: Path) -> Iterator[safe_open]:
    try:
        with safe_open(path, framework="pt") as handle:
            yield handle
    except (SafetensorError, OSError) as exc:
        raise CheckpointError(f"{path} is damaged or not safetensors: {exc}") from exc


def locate_tensors(model_dir: Path) -> dict[str, Path]:
    """The file of the model directory that holds each tensor, by name. Without an index these are
    the tensors of ``model.safetensors`` alone, as in transformers, or of all safetensors files.

    Raises:
        CheckpointError: there are no weights, the index names missing files, or there is no index
            and several files hold the same tensor.
    """
    index = model_dir / INDEX_NAME
    if index.exists():
        return _read_safetensors_index(index)
    if (single := model_dir / SINGLE_NAME).exists():
        return dict.fromkeys(_tensor_names(single), single)
    if paths := sorted(model_dir.glob("*.safetensors")):
        return _without_index(paths)
    if (model_dir / GGUF_INDEX_NAME).exists():
        files = {name: model_dir / t.file for name, t in read_index(model_dir).items()}
        _require_files(model_dir / GGUF_INDEX_NAME, files.values())
        return files
    raise CheckpointError(
        f"{model_dir} holds no *.safetensors and no *.gguf; convert the checkpoint with "
        "transformers' save_pretrained, other formats are not supported"
    )


def most_common_dtype(model_dir: Path) -> str | None:
    """The type of most elements of the unquantised weights, whatever the type of norms and scales;
    None if there are no unquantised weights. Reads the headers of all safetensors files.

    Raises:
        CheckpointError: see ``locate_tensors``; or a file is damaged.
    """
    num_elements: Counter[str] = Counter()
    for path in sorted(set(locate_tensors(model_dir).values())):
        with _opened(path) as handle:
            for name in _names(handle):
                found = handle.get_slice(name)  # type: ignore[no-untyped-call]  # in Rust
                if (dtype := _FLOATS.get(found.get_dtype())) is not None:
                    num_elements[dtype] += math.prod(found.get_shape())
    return max(num_elements, key=num_elements.__getitem__, default=None)


def _without_index(paths: list[Path]) -> dict[str, Path]:
    files: dict[str, Path] = {}
    for path in paths:
        for name in _tensor_names(path):
            if (other := files.setdefault(name, path)) is not path:
                raise CheckpointError(
                    f"{other} and {path.name} both hold {name}, and no {INDEX_NAME} says which is "
                    "the model's: remove the files of the other format, or download the index"
                )
    return files


def _read_safetensors_index(index: Path) -> dict[str, Path]:
    try:
        weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        files = {str(name): index.parent / str(file) for name, file in weight_map.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as exc:
        raise CheckpointError(f"{index} has no readable 'weight_map': {exc!r}") from exc
    _require_files(index, files.values())
    return files


def _require_files(index: Path, paths: Iterable[Path]) -> None:
    missing = sorted({path.name for path in paths if not path.is_file()})
    if missing:
        raise CheckpointError(
            f"incomplete checkpoint: {index.name} names {format_names(missing)}, not found in "
            f"{index.parent}"
        )


def _tensor_names(path: Path) -> list[str]:
    with _opened(path) as handle:
        return _names(handle)


def _names(handle: safe_open) -> list[str]:
    return list(handle.keys())  # type: ignore[no-untyped-call]  # in Rust


def format_names(names: list[str]) -> str:
    """The first names, and the number of the others, for messages."""
    shown = ", ".join(names[:_SHOWN_NAMES])
    rest = len(names) - _SHOWN_NAMES
    return f"{shown} and {rest} more" if rest > 0 else shown
