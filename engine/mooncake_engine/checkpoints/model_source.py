"""Resolves a model's path or hub name, as given to ``--model``, to a directory on this host, and
reads the directory's JSON files."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mooncake_engine.errors import CheckpointError, ConfigError

_HUB_NAME = re.compile(
    r"(?P<hub>modelscope:)?(?P<repository>[\w.-]+/[\w.-]+?)(:(?P<quantization>\w+))?"
    r"(@(?P<revision>[\w./-]+))?"
)


@dataclass(frozen=True, slots=True)
class LocalModel:
    """A model on this host.

    Args:
        directory: directory with config.json, the tokenizer and the weights.
        name: the name under which it is served by default.
    """

    directory: Path
    name: str


@dataclass(frozen=True, slots=True)
class HubModel:
    """A model on a hub.

    Args:
        repository: ``ORG/NAME``.
        revision: branch, tag or commit; None for the hub's default.
        quantization: quantisation of the GGUF file to use, such as ``Q4_K_M``; None for
            safetensors.
        is_modelscope: whether the hub is ModelScope rather than Hugging Face.
    """

    repository: str
    revision: str | None = None
    quantization: str | None = None
    is_modelscope: bool = False


def find_model(wanted: str | Path, flag: str = "--model") -> LocalModel:
    """Find a model by path or hub name, and download it if necessary.

    Args:
        wanted: a Hugging Face model directory, a GGUF file, a directory with one, or
            ``[modelscope:]ORG/NAME[:QUANTIZATION][@REVISION]``.
        flag: the option that named it, for error messages.

    Raises:
        ConfigError: there is no such path, and no hub has such a model.
        DownloadFailed: the model can't be downloaded now.
        CheckpointError: the GGUF file is damaged or not supported.
    """
    path = Path(wanted)
    if path.is_dir() and not (path / "config.json").is_file():
        ggufs = first_parts(path)
        if len(ggufs) != 1:
            raise ConfigError(
                f"{flag} must be a Hugging Face model directory: no config.json in {path}"
                + (f", and {len(ggufs)} GGUF files: name one of them" if ggufs else "")
            )
        path = ggufs[0]
    if path.is_file() and path.suffix == ".gguf":
        from mooncake_engine.checkpoints.gguf_directory import gguf_directory

        return LocalModel(gguf_directory(path), path.stem)
    if path.is_dir():
        return LocalModel(path, path.resolve().name)
    named = read_hub_name(str(wanted))
    if named is None or path.is_absolute():
        found = (
            f"{wanted} is a file of another kind"
            if path.exists()
            else f"no config.json in {wanted}, which does not exist"
        )
        raise ConfigError(
            f"{flag} must be a Hugging Face model directory, a GGUF file, or ORG/NAME[@REVISION] "
            f"of a hub: {found}"
        )
    from mooncake_engine.checkpoints.hub_download import download

    return LocalModel(download(named), str(wanted))


def read_json_object(path: Path) -> dict[str, Any]:
    """Parse a JSON file of a model directory.

    Raises:
        CheckpointError: there is no such file, or it is not a JSON object.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as exc:
        raise CheckpointError(
            f"{path} does not exist; expected a Hugging Face model directory"
        ) from exc
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as exc:
        raise CheckpointError(f"{path} can't be read: {exc}") from exc
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} must hold a JSON object, found {type(value).__name__}")
    return value


def read_hub_name(text: str) -> HubModel | None:
    """Parse a model name on a hub; None if the text can't be one."""
    found = _HUB_NAME.fullmatch(text)
    if found is None or text.startswith("."):
        return None
    return HubModel(
        found["repository"], found["revision"], found["quantization"], bool(found["hub"])
    )


def first_parts(directory: Path) -> list[Path]:
    """The GGUF files below a directory; of a split model only the first file."""
    parts = sorted(directory.rglob("*.gguf"))
    return [path for path in parts if not re.search(r"-(?!00001)\d{5}-of-\d{5}$", path.stem)]
