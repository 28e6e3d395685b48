"""Tensors of a GGUF file under the names of its Hugging Face checkpoint, dequantised as they are
read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mooncake_engine.checkpoints.gguf_index import StoredTensor, read_index
from mooncake_engine.errors import CheckpointError

_CHUNK_BYTES = 32 << 20
"""Of float32 at once."""


class GGUFTensors:
    """The tensors of one file, open.

    Raises:
        CheckpointError: the file or the index beside it can't be read.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        index = read_index(path.parent)
        self._tensors = {name: t for name, t in index.items() if t.file == path.name}
        try:
            self._data = np.memmap(path, np.uint8, mode="r")
        except (OSError, ValueError) as exc:
            raise CheckpointError(f"{path} can't be read: {exc}") from exc

    def shape(self, name: str) -> tuple[int, ...]:
        """Of a tensor."""
        return self._tensors[name].shape

    def read(self, name: str, window: tuple[slice, ...], dtype: torch.dtype) -> Tensor:
        """A part of a tensor, dequantised a bounded number of rows at once; what is read are the
        blocks that the window touches."""
        stored = self._tensors[name]
        rows, columns = window[0], window[1] if len(window) > 1 else slice(0, 1)
        found = torch.empty([part.stop - part.start for part in window], dtype=dtype)
        flat = found.view(rows.stop - rows.start, -1)
        step = max(1, _CHUNK_BYTES // (4 * max(1, columns.stop - columns.start)))
        for start in range(rows.start, rows.stop, step):
            stop = min(start + step, rows.stop)
            values = self._dequantise(stored, slice(start, stop), columns)
            flat[start - rows.start : stop - rows.start].copy_(values)
        return found

    def _dequantise(self, stored: StoredTensor, rows: slice, columns: slice) -> Tensor:
        from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
        from gguf.quants import dequantize

        kind = GGMLQuantizationType[stored.kind]
        block, block_bytes = GGML_QUANT_SIZES[kind]
        data = self._data[stored.start : stored.stop].reshape(stored.shape[0], -1)
        first, last = columns.start // block, -(-columns.stop // block)
        blocks = slice(first * block_bytes, last * block_bytes)
        taken = data[_source_rows(stored, rows), blocks] if stored.heads else data[rows, blocks]
        values = torch.from_numpy(dequantize(np.array(taken), kind))  # not of the mapped file
        skipped = columns.start - first * block
        return values[:, skipped : skipped + columns.stop - columns.start]


def _source_rows(stored: StoredTensor, rows: slice) -> np.ndarray[Any, Any]:
    """Which rows of the file hold these rows of the checkpoint: of each head, the one keeps pairs
    of rotated dimensions side by side, the other first all first ones, then all second ones."""
    head_dim = stored.shape[0] // stored.heads
    wanted = np.arange(rows.start, rows.stop)
    head, row = np.divmod(wanted, head_dim)
    half, pair = np.divmod(row, head_dim // 2)
    rows_of_file: np.ndarray[Any, Any] = head * head_dim + 2 * pair + half
    return rows_of_file
