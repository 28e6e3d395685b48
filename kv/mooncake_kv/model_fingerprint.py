"""A checkpoint's fingerprint: a hash of samples of every tensor, and the settings that its KV
depends on.

Equal tokens get equal KV only from equal weights, computed in the same way. A hash of all weights
would read the checkpoint a second time. Samples of some files would miss whole tensors, and so an
adapter that was merged into ``q_proj`` and ``v_proj``. Therefore every tensor is sampled, by its
entry in the header of its safetensors file: its first, middle and last bytes, and more positions in
large tensors.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import Any

from mooncake_kv.errors import KVConfigError

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
GGUF_INDEX_NAME = "model.gguf.index.json"
"""Index file of a model directory that the engine created from a GGUF file."""
SAMPLE_BYTES = 4096
BYTES_PER_PAIR = 32 << 20
"""A tensor has three samples, plus two for each of these many bytes."""
_MAX_HEADER_BYTES = 100_000_000
"""The limit of the safetensors library."""
_NUM_READERS = 8
_ROPE = ("rope_theta", "rope_scaling", "rope_parameters", "partial_rotary_factor")
_COSMETIC = ("_name_or_path", "transformers_version", "use_cache", "dtype", "torch_dtype")
"""Fields that KV does not depend on; the weights' dtypes are in the headers of their files."""


@dataclass(frozen=True, slots=True)
class ModelFingerprint:
    """A checkpoint's fingerprint, which instances compare.

    Args:
        weights: hash of the samples of every tensor.
        settings: other properties that must be equal, by name, in human-readable form.
    """

    weights: str
    settings: dict[str, str]


@dataclass(frozen=True, slots=True)
class _Tensor:
    """An entry of a safetensors header; ``start`` and ``stop`` are bytes of the file."""

    name: str
    kind: str
    start: int
    stop: int


def model_fingerprint(
    directory: Path, dtype: str, config_directory: Path | None = None
) -> ModelFingerprint:
    """Compute the fingerprint of a Hugging Face model directory. Reads megabytes per thousand
    tensors.

    The distribution of tensors over files, and the names of the files, don't matter.

    Args:
        directory: folder with ``config.json`` and safetensors, or an index of GGUF files.
        dtype: the dtype in which the weights are used.
        config_directory: folder with ``config.json``, if it is not in ``directory``.

    Raises:
        KVConfigError: a file can't be read, or is damaged.
    """
    config = _read_object((config_directory or directory) / "config.json")
    digests: dict[str, bytes] = {}
    layout: dict[str, str] = {}
    with ThreadPoolExecutor(_NUM_READERS, "fingerprint") as readers:
        if (gguf := directory / GGUF_INDEX_NAME).exists():
            sampled = readers.map(_sample_tensors, *_gguf_files(gguf))
        else:
            sampled = readers.map(_sample_file, *_files(directory))
        for found in sampled:
            for tensor, digest in found:
                digests[tensor.name] = digest
                layout[tensor.name] = tensor.kind
    rope = {name: config.pop(name) for name in _ROPE if config.get(name) is not None}
    quantization = config.pop("quantization_config", None)
    rest = {name: value for name, value in config.items() if name not in _COSMETIC}
    settings = {
        "tensors": f"{len(layout)} with layout {_short_hash(layout)}",
        "dtype": dtype,
        "quantization": "none" if quantization is None else _canonical(quantization),
        "rope": _canonical(rope),
        "config.json": _short_hash(rest),
    }
    whole = hashlib.sha256()
    for name in sorted(digests):
        whole.update(f"{name}:{layout[name]};".encode() + digests[name])
    return ModelFingerprint(whole.hexdigest()[:32], settings)


def longrope_settings(longest: int, original: int, max_positions: int) -> dict[str, str]:
    """The setting that tells an instance with LongRoPE's short factors from one with the long ones;
    empty for the long ones, for which config.json is sufficient.

    Args:
        longest: longest sequence that the instance serves, in tokens.
        original: context length of the pre-training, up to which the short factors apply.
        max_positions: context length of the model.
    """
    return {"LongRoPE": "short factors"} if longest <= original < max_positions else {}


def sample_offsets(num_bytes: int) -> list[int]:
    """The offsets of a tensor's samples. A tensor that is no larger than its samples is read
    whole, in pieces."""
    count = 3 + 2 * (num_bytes // BYTES_PER_PAIR)
    if num_bytes <= count * SAMPLE_BYTES:
        return list(range(0, num_bytes, SAMPLE_BYTES))
    return [(num_bytes - SAMPLE_BYTES) * i // (count - 1) for i in range(count)]


def _files(directory: Path) -> tuple[list[Path], list[frozenset[str] | None]]:
    """The files that hold the model's weights, and the tensors of the model in each (None: all)."""
    index = directory / INDEX_NAME
    if not index.exists():
        single = directory / SINGLE_NAME  # if it exists, other files don't belong to the model
        paths = [single] if single.exists() else sorted(directory.glob("*.safetensors"))
        if not paths:
            raise KVConfigError(f"{directory} has no *.safetensors by which to identify the model")
        return paths, [None] * len(paths)
    weight_map = _read_object(index).get("weight_map")
    if not isinstance(weight_map, dict):
        raise KVConfigError(f"{index} has no 'weight_map'; fetch the checkpoint again")
    names: dict[str, set[str]] = {}
    for name, file in weight_map.items():
        names.setdefault(str(file), set()).add(name)
    ordered = sorted(names)
    return [directory / file for file in ordered], [frozenset(names[file]) for file in ordered]


def _gguf_files(index: Path) -> tuple[list[Path], list[list[_Tensor]]]:
    """The files that an index of GGUF tensors names, and the tensors of each."""
    found: dict[str, list[_Tensor]] = {}
    try:
        for name, entry in _read_object(index).items():
            kind = f"{entry['kind']}{entry['shape']}"
            tensor = _Tensor(name, kind, int(entry["start"]), int(entry["stop"]))
            found.setdefault(str(entry["file"]), []).append(tensor)
    except (KeyError, TypeError, ValueError) as exc:
        raise KVConfigError(f"{index} is damaged: {exc!r}; remove its directory") from exc
    return [index.parent / file for file in found], list(found.values())


def _sample_tensors(path: Path, tensors: list[_Tensor]) -> list[tuple[_Tensor, bytes]]:
    try:
        with path.open("rb", buffering=0) as file:
            return [(tensor, _sample(file, tensor)) for tensor in tensors]
    except (OSError, ValueError) as exc:
        raise KVConfigError(f"{path} is damaged: {exc!r}") from exc


def _sample_file(path: Path, wanted: frozenset[str] | None) -> list[tuple[_Tensor, bytes]]:
    try:
        with path.open("rb", buffering=0) as file:
            tensors = [t for t in _read_header(file) if wanted is None or t.name in wanted]
            return [(tensor, _sample(file, tensor)) for tensor in tensors]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as exc:
        raise KVConfigError(f"{path} is damaged or not safetensors: {exc!r}") from exc


def _read_header(file: FileIO) -> Iterator[_Tensor]:
    """The tensors of a safetensors file, in the order of their bytes."""
    num_bytes = int.from_bytes(os.pread(file.fileno(), 8, 0), "little")
    if num_bytes > _MAX_HEADER_BYTES:
        raise ValueError(f"a header of {num_bytes} bytes")
    header: dict[str, Any] = json.loads(os.pread(file.fileno(), num_bytes, 8))
    header.pop("__metadata__", None)
    first = 8 + num_bytes
    for name, entry in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
        start, stop = entry["data_offsets"]
        yield _Tensor(name, f"{entry['dtype']}{entry['shape']}", first + start, first + stop)


def _sample(file: FileIO, tensor: _Tensor) -> bytes:
    digest = hashlib.sha256()
    num_bytes = tensor.stop - tensor.start
    for offset in sample_offsets(num_bytes):
        wanted = min(SAMPLE_BYTES, num_bytes - offset)
        sample = os.pread(file.fileno(), wanted, tensor.start + offset)
        if len(sample) != wanted:
            raise ValueError(f"the file ends within {tensor.name}")
        digest.update(sample)
    return digest.digest()


def _read_object(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as exc:
        raise KVConfigError(f"{path} can't be read: {exc}") from exc
    if not isinstance(value, dict):
        raise KVConfigError(f"{path} must hold a JSON object, found {type(value).__name__}")
    return value


def _canonical(value: Any) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"))


def _short_hash(value: Mapping[str, Any]) -> str:
    return hashlib.sha256(_canonical(value).encode()).hexdigest()[:16]
