"""Reads the header of a GGUF file: its metadata, and the location of its tensors.

Format: ggml-org/ggml, docs/gguf.md, versions 2 and 3. ``gguf.GGUFReader`` makes an array of every
string of a vocabulary, which takes seconds; this parser takes a tenth of a second.
"""

from __future__ import annotations

import math
import mmap
import re
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mooncake_engine.errors import CheckpointError

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_STRING, _ARRAY = 8, 9
_SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?"} | {
    10: "<Q",
    11: "<q",
    12: "<d",
}
_ALIGNMENT = 32
_PART = re.compile(r"-(\d{5})-of-(\d{5})\.gguf$")


@dataclass(frozen=True, slots=True)
class GGUFTensor:
    """One tensor of a GGUF file.

    Args:
        file: the file that holds it.
        kind: GGUF's type, such as ``Q4_1``.
        shape: rows first, as in torch.
        start, stop: range of its bytes in the file.
    """

    file: Path
    kind: str
    shape: tuple[int, ...]
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class GGUFHeader:
    """A model's metadata, by GGUF's keys, and its tensors, by GGUF's names."""

    metadata: dict[str, Any]
    tensors: dict[str, GGUFTensor]


def read_header(path: Path) -> GGUFHeader:
    """Read the header of a file, or of all files of a split model (``-00001-of-00003``).

    Raises:
        CheckpointError: a file is missing, damaged, or of an unsupported version.
    """
    first, *others = [_read_file(part) for part in parts_of(path)]
    tensors = dict(first.tensors)
    for other in others:
        tensors |= other.tensors
    return GGUFHeader(first.metadata, tensors)


def parts_of(path: Path) -> list[Path]:
    """All files of the model that a file belongs to.

    Raises:
        CheckpointError: one of the files is missing.
    """
    split = _PART.search(path.name)
    if split is None:
        return [path]
    stem, count = path.name[: split.start()], int(split[2])
    parts = [path.with_name(f"{stem}-{i:05}-of-{count:05}.gguf") for i in range(1, count + 1)]
    if missing := [part.name for part in parts if not part.is_file()]:
        raise CheckpointError(
            f"incomplete checkpoint: {', '.join(missing)} not found in {path.parent}"
        )
    return parts


def _read_file(path: Path) -> GGUFHeader:
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _Parser(data, path).header()
    except (OSError, ValueError, struct.error, UnicodeDecodeError, KeyError) as exc:
        raise CheckpointError(f"{path} is damaged or not a GGUF file: {exc!r}") from exc


class _Parser:
    """Reads the values of a header one after another."""

    def __init__(self, data: mmap.mmap, path: Path) -> None:
        self._data = data
        self._path = path
        self._at = 0

    def header(self) -> GGUFHeader:
        if self._take(4) != _MAGIC:
            raise ValueError("it does not start with GGUF")
        version = self._scalar("<I")
        if version not in _VERSIONS:
            raise ValueError(f"version {version}, wanted one of {_VERSIONS}, little-endian")
        num_tensors, num_fields = self._scalar("<Q"), self._scalar("<Q")
        metadata = {}
        for _ in range(num_fields):
            key = self._string()
            metadata[key] = self._value(self._scalar("<I"))
        entries = [(self._string(), self._entry()) for _ in range(num_tensors)]
        alignment = int(metadata.get("general.alignment", _ALIGNMENT))
        data_start = -(-self._at // alignment) * alignment
        tensors = {name: self._tensor(data_start, *entry) for name, entry in entries}
        return GGUFHeader(metadata, tensors)

    def _entry(self) -> tuple[tuple[int, ...], int, int]:
        shape = tuple(self._scalar("<Q") for _ in range(self._scalar("<I")))
        return shape[::-1], self._scalar("<I"), self._scalar("<Q")

    def _tensor(
        self, data_start: int, shape: tuple[int, ...], kind: int, offset: int
    ) -> GGUFTensor:
        from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

        known = GGMLQuantizationType(kind)
        block, block_bytes = GGML_QUANT_SIZES[known]
        start = data_start + offset
        stop = start + math.prod(shape) // block * block_bytes
        if shape[-1] % block or stop > len(self._data):
            raise ValueError(f"a tensor of {list(shape)} as {known.name} ends at byte {stop}")
        return GGUFTensor(self._path, known.name, shape, start, stop)

    def _value(self, kind: int) -> Any:
        if kind == _STRING:
            return self._string()
        if kind != _ARRAY:
            return self._scalar(_SCALARS[kind])
        item, count = self._scalar("<I"), self._scalar("<Q")
        if item in _SCALARS:
            fmt = _SCALARS[item]
            values = self._take(count * struct.calcsize(fmt))
            return [value for (value,) in struct.iter_unpack(fmt, values)]
        read: Callable[[], Any] = self._string if item == _STRING else lambda: self._value(item)
        return [read() for _ in range(self._checked(count))]

    def _string(self) -> str:
        return self._take(self._scalar("<Q")).decode()

    def _scalar(self, fmt: str) -> Any:
        return struct.unpack(fmt, self._take(struct.calcsize(fmt)))[0]

    def _checked(self, count: int) -> int:
        if count > len(self._data) - self._at:
            raise ValueError(f"{count} items exceed the rest of {len(self._data)} bytes")
        return count

    def _take(self, num_bytes: int) -> bytes:
        start = self._at
        self._at += self._checked(num_bytes)
        return self._data[start : self._at]
