"""Reads the tensors of a GGUF file by their names in the Hugging Face checkpoint, and dequantises
them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mooncake_engine.checkpoints.gguf_index import StoredTensor, read_index
from mooncake_engine.errors import CheckpointError

_CHUNK_BYTES = 32 << 20
"""The most bytes of float32 that are dequantised at once."""


class GGUFTensors:
    """An open GGUF file; implements ``TensorFile``.

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
        """The shape of a tensor."""
        return self._tensors[name].shape

    def read(self, name: str, window: tuple[slice, ...], dtype: torch.dtype) -> Tensor:
        """Read a part of a tensor, dequantised in chunks of a bounded number of rows. Reads only
        the quantisation blocks that overlap the window."""
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
        values = torch.from_numpy(dequantize(np.array(taken), kind))  # a copy of the mapped file
        skipped = columns.start - first * block
        return values[:, skipped : skipped + columns.stop - columns.start]


def _source_rows(stored: StoredTensor, rows: slice) -> np.ndarray[Any, Any]:
    """The rows of the file that hold the given rows of the checkpoint. Within each head, the file
    has the two dimensions of a rotated pair side by side; the checkpoint has the first dimensions
    of all pairs, then the second ones."""
    head_dim = stored.shape[0] // stored.heads
    wanted = np.arange(rows.start, rows.stop)
    head, row = np.divmod(wanted, head_dim)
    half, pair = np.divmod(row, head_dim // 2)
    rows_of_file: np.ndarray[Any, Any] = head * head_dim + 2 * pair + half
    return rows_of_file
