"""A file of instances that is watched: YAML or JSON, changes take effect within a second."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

import msgspec

from mooncake_proxy.errors import UNREADABLE, ConfigError
from mooncake_proxy.pool.instances import InstanceSpec, names_given_twice
from mooncake_proxy.pool.membership import PoolFile, apply_plan, plan_membership, specs_of
from mooncake_proxy.pool.model_pools import ModelPools

logger = logging.getLogger(__name__)
SOURCE = "file"
POLL_S = 0.5


def read_pool_file(path: str) -> list[InstanceSpec]:
    """The instances in the file; ConfigError for a bad file."""
    try:
        data = Path(path).read_bytes()
    except OSError as exc:
        raise ConfigError(f"pool file {path}: {exc.strerror}") from exc
    return parse_pool_file(data, path)


def parse_pool_file(data: bytes, path: str) -> list[InstanceSpec]:
    """The same for its content: JSON if the name ends in .json, else YAML."""
    try:
        if path.endswith(".json"):
            specs = specs_of(msgspec.json.decode(data, type=PoolFile), SOURCE)
        else:
            specs = specs_of(msgspec.yaml.decode(data, type=PoolFile), SOURCE)
    except ImportError as exc:
        raise ConfigError(
            f"pool file {path}: YAML needs PyYAML (pip install mooncake-proxy[yaml]); "
            "a file that ends in .json needs nothing"
        ) from exc
    except (*UNREADABLE, AttributeError) as exc:  # of PyYAML, for `!!timestamp` before no time
        raise ConfigError(f"pool file {path}: {exc}") from exc
    if twice := names_given_twice(specs):
        raise ConfigError(
            f"pool file {path}: {twice} given twice: an instance has one role "
            "(`both` for one that does both) and one model"
        )
    return specs


class PoolFileWatch:
    """Keeps the pool as the file declares it. A broken file changes nothing and is logged."""

    def __init__(self, path: str, pools: ModelPools) -> None:
        self._path = path
        self._pools = pools
        self._content = b""

    async def run(self) -> None:
        """Look again and again; content decides, so that symlink swaps are seen too."""
        while True:
            await asyncio.sleep(POLL_S)
            self.poll_once()

    def poll_once(self) -> None:
        """Read the file and follow it if it changed."""
        try:
            content = Path(self._path).read_bytes()
            if content == self._content:
                return
            self._content = content
            wanted = parse_pool_file(content, self._path)
        except (OSError, ConfigError) as exc:
            logger.warning("cannot use the pool file, instances stay as they are: %s", exc)
            return
        self._follow(wanted)

    def load(self) -> None:
        """The first read, at start: here a broken file is fatal."""
        wanted = read_pool_file(self._path)
        self._content = Path(self._path).read_bytes()
        self._follow(wanted)

    def _follow(self, wanted: list[InstanceSpec]) -> None:
        apply_plan(
            self._pools,
            plan_membership(wanted, [i.declared for i in self._pools], SOURCE),
        )
