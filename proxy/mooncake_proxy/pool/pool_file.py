"""The pool file: declares instances in YAML or JSON; changes take effect within a second."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

import msgspec

from mooncake_proxy.errors import DECODE_ERRORS, ConfigError
from mooncake_proxy.pool.instances import InstanceSpec, duplicate_names
from mooncake_proxy.pool.membership import PoolFile, follow_source, specs_of
from mooncake_proxy.pool.model_pools import ModelPools

logger = logging.getLogger(__name__)
SOURCE = "file"
POLL_S = 0.5


def parse_pool_file(data: bytes, path: str) -> list[InstanceSpec]:
    """The instances in the file's content: JSON if its name ends in .json, else YAML."""
    try:
        if path.endswith(".json"):
            specs = specs_of(msgspec.json.decode(data, type=PoolFile), SOURCE)
        else:
            specs = specs_of(msgspec.yaml.decode(data, type=PoolFile), SOURCE)
    except ImportError as exc:
        raise ConfigError(
            f"pool file {path}: YAML needs PyYAML (pip install PyYAML); "
            "a file that ends in .json needs nothing"
        ) from exc
    except (*DECODE_ERRORS, AttributeError) as exc:
        # PyYAML raises AttributeError for a bad `!!timestamp`.
        raise ConfigError(f"pool file {path}: {exc}") from exc
    if twice := duplicate_names(specs):
        raise ConfigError(
            f"pool file {path}: {twice} given twice: an instance has one role "
            "(`both` for one that does both) and one model"
        )
    return specs


class PoolFileWatch:
    """Keeps the pools in sync with the file. A broken file is logged and changes nothing."""

    def __init__(self, path: str, pools: ModelPools) -> None:
        self._path = path
        self._pools = pools
        self._content = b""

    async def run(self) -> None:
        """Poll until cancelled. Compares the content, so that symlink swaps are noticed too."""
        while True:
            await asyncio.sleep(POLL_S)
            self.poll_once()

    def poll_once(self) -> None:
        """Read the file, and apply it if it has changed."""
        try:
            content = Path(self._path).read_bytes()
            if content == self._content:
                return
            self._content = content
            wanted = parse_pool_file(content, self._path)
        except (OSError, ConfigError) as exc:
            logger.warning("cannot use the pool file, instances stay as they are: %s", exc)
            return
        follow_source(self._pools, wanted, SOURCE)

    def load(self) -> None:
        """Read the file at startup, when a broken file is fatal. Raises ConfigError."""
        try:
            self._content = Path(self._path).read_bytes()
        except OSError as exc:
            raise ConfigError(f"pool file {self._path}: {exc.strerror}") from exc
        follow_source(self._pools, parse_pool_file(self._content, self._path), SOURCE)
