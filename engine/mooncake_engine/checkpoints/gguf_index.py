"""The index of a model directory that was made from GGUF files: the location of each tensor.

``model.gguf.index.json`` replaces ``model.safetensors.index.json``, and has the checkpoint's names.
``mooncake_kv.model_fingerprint`` reads it too.
"""

from __future__ import annotations

import struct
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import msgspec

from mooncake_engine.errors import CheckpointError

GGUF_INDEX_NAME = "model.gguf.index.json"


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """The location of a tensor of the checkpoint in a GGUF file.

    Args:
        file: name of the file, which is beside the index.
        kind: GGUF's type, such as ``Q4_1``.
        shape: shape in the checkpoint.
        start, stop: range of its bytes in the file.
        heads: the number of heads, if these are queries or keys whose rotated dimensions llama.cpp
            stores as pairs and the checkpoint as halves; 0 if rows are in the checkpoint's order.
    """

    file: str
    kind: str
    shape: tuple[int, ...]
    start: int
    stop: int
    heads: int = 0


def read_index(directory: Path) -> dict[str, StoredTensor]:
    """Read the index of a model directory: its tensors, by name.

    Raises:
        CheckpointError: the index can't be read.
    """
    path = directory / GGUF_INDEX_NAME
    try:
        return msgspec.json.decode(path.read_bytes(), type=dict[str, StoredTensor])
    except (OSError, msgspec.MsgspecError) as exc:
        raise CheckpointError(
            f"{path} can't be read: {exc}; remove {directory}, it is made again"
        ) from exc


def write_index(directory: Path, tensors: dict[str, StoredTensor]) -> None:
    """Write the index of a model directory; see ``read_index``."""
    entries: dict[str, Any] = {name: asdict(tensor) for name, tensor in tensors.items()}
    (directory / GGUF_INDEX_NAME).write_bytes(msgspec.json.encode(entries))


def read_floats(path: Path, start: int, stop: int) -> list[float]:
    """Read a short list of float32 values, from the bytes ``start`` to ``stop`` of a file."""
    with path.open("rb") as file:
        file.seek(start)
        return [value for (value,) in struct.iter_unpack("<f", file.read(stop - start))]
