"""Errors in pool files are reported."""

from __future__ import annotations

import pytest

from mooncake_proxy.errors import (
    ConfigError,
)
from mooncake_proxy.pool.pool_file import parse_pool_file


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
