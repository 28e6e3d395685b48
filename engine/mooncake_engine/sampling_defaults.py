"""A model's default sampling parameters, from ``generation_config.json``.

vLLM uses the same fields (``--generation-config``), so that a model behaves the same on both.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from mooncake_engine.config import EngineConfig
from mooncake_engine.errors import CheckpointError, ConfigError, InvalidRequest
from mooncake_engine.sampling_params import SamplingParams

FILE_NAME = "generation_config.json"
_NAMES = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
_LIMIT = "max_new_tokens"


@dataclass(frozen=True, slots=True)
class SamplingDefaults:
    """Defaults for the sampling parameters that a request leaves out.

    Args:
        values: default values, by field of ``SamplingParams``.
        max_tokens: maximum length of every output, in tokens; None for no limit.
    """

    values: Mapping[str, float] = field(default_factory=dict)
    max_tokens: int | None = None

    def limit(self, wanted: int | None, num_generated: int = 0) -> int | None:
        """Returns the most new tokens of a request that asks for ``wanted``; None if it asks for
        none.

        Args:
            wanted: the request's own limit of new tokens.
            num_generated: tokens that its output has already.
        """
        if self.max_tokens is None:
            return wanted
        left = self.max_tokens
        if num_generated:
            left = max(1, left - num_generated)
        return left if wanted is None else min(left, wanted)

    def params(self) -> SamplingParams:
        """Returns the sampling parameters of a request that sets none."""
        limit = self.limit(SamplingParams().max_tokens)
        return SamplingParams(**self.values, max_tokens=limit)  # type: ignore[arg-type]  # checked

    def __str__(self) -> str:
        shown = dict(self.values) | ({"max_tokens": self.max_tokens} if self.max_tokens else {})
        return ", ".join(f"{name} {value:g}" for name, value in shown.items())


NO_DEFAULTS = SamplingDefaults()


def read_sampling_defaults(config: EngineConfig) -> SamplingDefaults:
    """Reads the configured defaults: the model's, those of another directory, or none.

    Raises:
        ConfigError: the given directory has no such file.
        CheckpointError: the file can't be read, or contains an invalid value.
    """
    if config.generation_config in ("none", "vllm"):
        return NO_DEFAULTS
    is_models = config.generation_config == "auto"
    directory = config.model if is_models else Path(config.generation_config)
    path = directory / FILE_NAME
    if not path.is_file():
        if is_models:
            return NO_DEFAULTS
        raise ConfigError(
            f"--generation-config must be auto, none, or a directory with {FILE_NAME}; there is "
            f"none in {directory}"
        )
    try:
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        given = {name: found[name] for name in (*_NAMES, _LIMIT) if found.get(name) is not None}
    except (OSError, ValueError, AttributeError) as exc:
        raise CheckpointError(f"{path} can't be read: {exc}") from exc
    return _checked(given, path)


def _checked(given: dict[str, Any], path: Path) -> SamplingDefaults:
    kinds = {one.name: one.type for one in fields(SamplingParams)}
    for name, value in given.items():
        is_whole = name == _LIMIT or kinds[name] == "int"
        if isinstance(value, bool) or not isinstance(value, int if is_whole else (int, float)):
            raise CheckpointError(f"{path}: {name} must be a number, found {value!r}")
    limit = given.pop(_LIMIT, None)
    defaults = SamplingDefaults(given, limit)
    try:
        defaults.params()
    except InvalidRequest as exc:
        raise CheckpointError(f"{path}: {exc}") from exc
    return defaults
