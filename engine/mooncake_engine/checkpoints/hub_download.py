"""Downloads models from Hugging Face's hub or ModelScope, into the caches of their libraries.

The libraries resume interrupted connections, and keep complete files. ``HF_ENDPOINT``, ``HF_HOME``,
``HF_TOKEN`` and ``HF_HUB_OFFLINE`` configure Hugging Face's, ``MODELSCOPE_*`` ModelScope's.
"""

from __future__ import annotations

import errno
import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from mooncake_engine.checkpoints.model_source import HubModel, first_parts
from mooncake_engine.errors import ConfigError, DownloadFailed

logger = logging.getLogger(__name__)

_CONFIGS = ("*.json", "*.jinja", "*.txt", "tokenizer.model")
_WEIGHTS = ("*.safetensors",)
_EXCLUDED = ("original/*", "onnx/*", "consolidated*")
"""The same weights in other formats, which are not downloaded."""
_LOCK_POLL_S = 0.2
"""Interval of attempts to take the lock of a model that another process downloads."""


def download(model: HubModel) -> Path:
    """Download a model; returns its directory on this host. Files in the cache are not downloaded
    again. If several processes need the same model, one downloads it and the others wait.

    Raises:
        ConfigError: there is no such model or revision, or it has no such quantisation.
        DownloadFailed: the model is gated, the hub can't be reached, or the disk is full.
    """
    if model.is_modelscope:
        return _from_modelscope(model)
    from huggingface_hub.constants import HF_HUB_CACHE

    with _mapped_errors(model), _exclusive(Path(HF_HUB_CACHE), model):
        directory = _from_hugging_face(model, Path(HF_HUB_CACHE))
    return _with_config(model, directory)


def _from_hugging_face(model: HubModel, cache: Path) -> Path:
    from huggingface_hub import snapshot_download

    wanted, unwanted = _patterns(model)
    found = snapshot_download(
        model.repository,
        revision=model.revision,
        cache_dir=cache,
        allow_patterns=wanted,
        ignore_patterns=unwanted,
    )
    return Path(found)


def _patterns(model: HubModel) -> tuple[list[str], list[str]]:
    """The patterns of files to download, and of those to exclude. Safetensors are in the top
    folder; GGUF files may have a folder per quantisation."""
    if model.quantization is None:
        return [*_CONFIGS, *_WEIGHTS], [*_EXCLUDED, "*/*"]
    return [*_CONFIGS, f"*{model.quantization}*.gguf"], list(_EXCLUDED)


def _with_config(model: HubModel, directory: Path) -> Path:
    """The model directory: the downloaded one, or one made from its GGUF file."""
    if model.quantization is None:
        if any(directory.glob("*.safetensors")) and (directory / "config.json").is_file():
            return directory
        raise ConfigError(
            f"{model.repository} has no config.json with *.safetensors; if it has GGUF files, name "
            f"a quantisation, such as {model.repository}:Q4_K_M"
        )
    ggufs = first_parts(directory)
    exact = [path for path in ggufs if _has_quantization(path, model.quantization)]
    if len(exact) != 1:
        found = ", ".join(path.name for path in ggufs) or "none"
        raise ConfigError(
            f"{model.repository} must have one GGUF file of quantisation {model.quantization}, "
            f"found {found}"
        )
    from mooncake_engine.checkpoints.gguf_directory import gguf_directory

    return gguf_directory(exact[0])


def _has_quantization(path: Path, quantization: str) -> bool:
    """Whether a file name contains a quantisation as a whole word: ``Q4_K`` is not in
    ``Q4_K_M``."""
    return re.search(rf"(?<![A-Za-z0-9_]){quantization}(?![A-Za-z0-9_])", path.stem) is not None


@contextmanager
def _exclusive(cache: Path, model: HubModel) -> Iterator[None]:
    from filelock import FileLock, Timeout

    folder = cache / ".locks"
    folder.mkdir(parents=True, exist_ok=True)
    lock = FileLock(folder / f"mooncake--{model.repository.replace('/', '--')}.lock")
    try:
        lock.acquire(timeout=0)
    except Timeout:
        logger.info("waiting for another process that downloads %s", model.repository)
        lock.acquire(poll_interval=_LOCK_POLL_S)
    try:
        yield
    finally:
        lock.release()


@contextmanager
def _mapped_errors(model: HubModel) -> Iterator[None]:
    """Map the errors of ``huggingface_hub`` to this package's, each with a message of one line."""
    from huggingface_hub import constants, errors

    name, hub = model.repository, constants.ENDPOINT
    try:
        yield
    except errors.GatedRepoError as exc:
        raise DownloadFailed(
            f"{name} is gated: accept its terms at {hub}/{name}, then set HF_TOKEN or run "
            "`hf auth login`"
        ) from exc
    except errors.RevisionNotFoundError as exc:
        raise ConfigError(f"{name} at {hub} has no revision {model.revision!r}") from exc
    except errors.RepositoryNotFoundError as exc:
        raise ConfigError(
            f"no directory {name} here, and no model of that name at {hub}; private models "
            "need HF_TOKEN"
        ) from exc
    except (errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled) as exc:
        why = "HF_HUB_OFFLINE is set" if constants.HF_HUB_OFFLINE else f"{hub} can't be reached"
        raise DownloadFailed(
            f"{name} is not in {constants.HF_HUB_CACHE}, and {why}; download it first, or set "
            "HF_ENDPOINT to a mirror"
        ) from exc
    except errors.HTTPError as exc:  # type: ignore[attr-defined]  # of its own HTTP library
        reason = str(exc).splitlines()[0] if str(exc) else type(exc).__name__
        raise DownloadFailed(
            f"{name} could not be downloaded from {hub}: {reason}; try again, complete files are "
            "kept"
        ) from exc
    except OSError as exc:
        raise _disk_error(name, exc, constants.HF_HUB_CACHE, "HF_HOME") from exc


def _disk_error(name: str, exc: OSError, cache: str, variable: str) -> DownloadFailed:
    if exc.errno == errno.ENOSPC:
        return DownloadFailed(
            f"the disk of {cache} is full, and {name} is incomplete: free some space, or set "
            f"{variable} to a directory on another disk"
        )
    return DownloadFailed(f"{name} could not be downloaded: {exc}")


def _from_modelscope(model: HubModel) -> Path:
    try:
        from modelscope import snapshot_download
        from modelscope.hub.errors import FileDownloadError, NotExistError
    except ModuleNotFoundError as exc:
        raise ConfigError(
            f"modelscope:{model.repository} needs the package modelscope: "
            "pip install 'modelscope>=1.20,<2'"
        ) from exc
    import requests

    wanted, unwanted = _patterns(model)
    try:
        found = snapshot_download(
            model.repository,
            revision=model.revision,
            allow_patterns=wanted,
            ignore_patterns=unwanted,
        )
    except NotExistError as exc:
        raise ConfigError(f"ModelScope has no model {model.repository}: {exc}") from exc
    except (FileDownloadError, requests.RequestException) as exc:
        raise DownloadFailed(
            f"{model.repository} could not be downloaded from ModelScope: {exc}"
        ) from exc
    except OSError as exc:
        raise _disk_error(model.repository, exc, "ModelScope's cache", "MODELSCOPE_CACHE") from exc
    return _with_config(model, Path(found))
