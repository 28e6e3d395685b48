"""The index of a model directory that was made of GGUF files: where each tensor lies.

``model.gguf.index.json`` stands in place of ``model.safetensors.index.json``, with the checkpoint's
names; ``mooncake_kv.model_fingerprint`` reads it, too.
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
    """Where a tensor of the checkpoint lies.

    Args:
        file: name of the file, beside the index.
        kind: GGUF's type, such as ``Q4_1``.
        shape: as the checkpoint has it.
        start, stop: its bytes.
        heads: of queries or keys whose rotated dimensions llama.cpp keeps as pairs, where the
            checkpoint has halves; 0 where rows are in the checkpoint's order.
    """

    file: str
    kind: str
    shape: tuple[int, ...]
    start: int
    stop: int
    heads: int = 0


def read_index(directory: Path) -> dict[str, StoredTensor]:
    """The tensors of a model directory, by name.

    Raises:
        CheckpointError: the index can't be read.
    """
    path = directory / GGUF_INDEX_NAME
    try:
        return msgspec.json.decode(path.read_bytes(), type=dict[str, StoredTensor])
    except (OSError, msgspec.MsgspecError) as exc:
        raise CheckpointError(f"{path} can't be read: {exc}; remove {directory}") from exc


def write_index(directory: Path, tensors: dict[str, StoredTensor]) -> None:
    """Write what ``read_index`` reads."""
    entries: dict[str, Any] = {name: asdict(tensor) for name, tensor in tensors.items()}
    (directory / GGUF_INDEX_NAME).write_bytes(msgspec.json.encode(entries))


def read_floats(path: Path, start: int, stop: int) -> list[float]:
    """A short list of float32."""
    with path.open("rb") as file:
        file.seek(start)
        return [value for (value,) in struct.iter_unpack("<f", file.read(stop - start))]
