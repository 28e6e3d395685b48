"""The checks before an instance loads its model."""

from __future__ import annotations

from pathlib import Path

import pytest

from mooncake_engine.config import EngineConfig, Role
from mooncake_engine.errors import ConfigError
from mooncake_engine.server.api_server import serve
from mooncake_kv.config import KVTransferConfig

TINY_LLAMA = Path(__file__).parents[4] / "examples" / "tiny-llama"


def test_the_engine_knows_the_port_of_its_api() -> None:
    """The engine needs it to keep transports from using that port."""
    told: list[EngineConfig] = []

    def start(config: EngineConfig) -> None:
        told.append(config)
        raise ConfigError("it was told")

    config = EngineConfig(TINY_LLAMA, role=Role.DECODE, kv_transfer=KVTransferConfig())
    with pytest.raises(ConfigError, match="it was told"):
        serve(config, "127.0.0.1", 0, start)  # type: ignore[arg-type]  # it does not come back
    [found] = told
    assert found.kv_transfer is not None
    assert found.kv_transfer.api_port > 0
