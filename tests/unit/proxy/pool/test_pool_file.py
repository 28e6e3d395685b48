"""Errors in pool files are reported, and instances may leave the file and come back."""

from __future__ import annotations

import asyncio
from pathlib import Path

import msgspec
import pytest

from mooncake_proxy.errors import ConfigError
from mooncake_proxy.http1.upstream_connection import ClientContext
from mooncake_proxy.pool.instances import InstanceState, Role
from mooncake_proxy.pool.model_pools import ModelPools
from mooncake_proxy.pool.pool_file import PoolFileWatch, parse_pool_file


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"decode: 3", "Expected `array`"),
        (b"decoders: []", "unknown field `decoders`"),
        (b"decode: [{url: 'http://h:1', colour: red}]", "unknown field `colour`"),
        (b"decode: ['ftp://h']", "ftp://h"),
        (b"decode: ['http://.svc:1']", "label empty"),
        (b"decode: ['http://h:0']", "http://h:0"),
        (b"decode: [{url: 'http://h:1', kv_events_port: 99999}]", "_port 99999: wanted 1 to 65535"),
        (b"decode: [2001-99-99]", "month must be in"),
        (b"decode: [!!timestamp soon]", "pools.yaml: "),
        (b"prefill: ['http://h:1']\ndecode: ['http://g:1', 'h:1']", "http://h:1 given twice"),
        (b"both: ['h:1']\nmodels: {m: {both: ['h:1']}}", "http://h:1 given twice"),
    ],
)
def test_invalid_pool_files_are_reported(content: bytes, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_pool_file(content, "pools.yaml")


def test_pool_file_with_invalid_utf_8_is_reported() -> None:
    with pytest.raises(ConfigError, match=r"pools\.json: .*(?i:utf-8)"):
        parse_pool_file(b'{"decode": ["\xff"]}', "pools.json")


@pytest.mark.parametrize("role", [Role.DECODE, Role.PREFILL])
def test_instance_that_comes_back_while_it_drains_stays(tmp_path: Path, role: Role) -> None:
    path, name = tmp_path / "pool.json", "http://h:1"

    async def main() -> None:
        pools = ModelPools(ClientContext())
        watch = PoolFileWatch(str(path), pools)

        def declare(**instances: list[str]) -> None:
            path.write_bytes(msgspec.json.encode(instances))
            watch.poll_once()

        declare(decode=[name])
        instance = pools.get(name)
        instance.num_running = 1
        declare()
        assert instance.state is InstanceState.DRAINING
        declare(**{role.value: [name]})
        instance.num_running = 0
        pools.finish_drains()
        assert (instance.state, instance.spec.role) == (InstanceState.UP, role)
        assert list(pools) == [instance]
        declare()
        assert list(pools) == []

    asyncio.run(main())
