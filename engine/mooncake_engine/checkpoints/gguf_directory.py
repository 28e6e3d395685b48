"""Makes a model directory for a GGUF file: writes config and tokenizer from its header, once."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

from mooncake_engine.checkpoints.gguf_config import GGUFModel
from mooncake_engine.checkpoints.gguf_header import parts_of, read_header
from mooncake_engine.checkpoints.gguf_index import write_index
from mooncake_engine.checkpoints.gguf_tokenizer import GGUFTokenizer
from mooncake_engine.errors import CheckpointError

logger = logging.getLogger(__name__)

_FORMAT_VERSION = 3
"""Version of the directories' format; to be incremented when it changes."""
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")


def gguf_directory(path: Path) -> Path:
    """The model directory of a GGUF file, with ``config.json``, the tokenizer, an index of the
    tensors and links to the files. It is in Hugging Face's cache, and is made when a file is used
    for the first time.

    A tokenizer.json beside the GGUF file takes precedence over the tokenizer inside it.

    Raises:
        CheckpointError: the file is damaged or not supported, or the cache can't be written.
    """
    from huggingface_hub.constants import HF_HOME

    cache = Path(HF_HOME) / "mooncake-gguf"
    made = cache / f"{path.stem}-{_identity(path)}"
    if made.is_dir():
        return made
    logger.info("writing config and tokenizer of %s to %s", path, made)
    try:
        cache.mkdir(parents=True, exist_ok=True)
        unfinished = Path(tempfile.mkdtemp(prefix=f".{path.stem}-", dir=cache))
        try:
            _write(path, unfinished)
            unfinished.chmod(0o755)
            _publish(unfinished, made)
        finally:
            shutil.rmtree(unfinished, ignore_errors=True)
    except OSError as exc:
        raise CheckpointError(f"can't write {made}: {exc}; set HF_HOME to another folder") from exc
    return made


def _identity(path: Path) -> str:
    """A hash of the paths, sizes and modification times of all files that the directory is made
    from, so that a changed file gets a new directory."""
    hashed = [str(_FORMAT_VERSION)]
    beside = (path.with_name(name) for name in _TOKENIZER_FILES)
    for file in (*parts_of(path), *(file for file in beside if file.is_file())):
        stat = file.stat()
        hashed.append(f"{file.resolve()}:{stat.st_size}:{stat.st_mtime_ns}")
    return hashlib.sha256("\n".join(hashed).encode()).hexdigest()[:16]


def _publish(unfinished: Path, made: Path) -> None:
    """Rename the directory to its final path. If another instance was first, keep that one, which
    is equal."""
    try:
        unfinished.rename(made)
    except OSError:
        if not made.is_dir():
            raise


def _write(path: Path, directory: Path) -> None:
    header = read_header(path)
    model = GGUFModel(path, header)
    _write_json(directory / "config.json", model.config())
    _write_json(directory / "generation_config.json", {"eos_token_id": model.eos_token_ids()})
    write_index(directory, model.tensors())
    for part in parts_of(path):
        (directory / part.name).symlink_to(os.path.abspath(part))
    if path.with_name("tokenizer.json").is_file():
        for name in _TOKENIZER_FILES:
            if path.with_name(name).is_file():
                shutil.copyfile(path.with_name(name), directory / name)
        return
    tokenizer = GGUFTokenizer(path, header.metadata)
    tokenizer.backend().save(str(directory / "tokenizer.json"))
    _write_json(directory / "tokenizer_config.json", tokenizer.config())


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
