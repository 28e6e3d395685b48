"""The proxy's dependencies: its libraries and, of this repository, conductor and request
formats."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

PROXY = Path(__file__).resolve().parents[3] / "proxy"
IMPORT_ALL = """
import pkgutil, sys
import mooncake_proxy
for module in pkgutil.walk_packages(mooncake_proxy.__path__, "mooncake_proxy."):
    if not module.name.endswith("__main__"):
        __import__(module.name)
unwanted = {"torch", "yaml", "mooncake_hal", "mooncake_kv", "mooncake_engine"} & set(sys.modules)
sys.exit(f"imported: {unwanted}" if unwanted else 0)
"""
WITHOUT_THE_CONDUCTOR = """
import sys
from mooncake_proxy.api.application import ProxyApplication
from mooncake_proxy.config_from_options import config_from
from mooncake_proxy.proxy_options import build_parser
arguments = ["--backend-url", "http://127.0.0.1:1", "--policy", "prefix"]
config = config_from(build_parser().parse_args(arguments))
import asyncio
async def main():
    ProxyApplication(config)
asyncio.run(main())
unwanted = {"numpy", "zmq"} & set(sys.modules)
sys.exit(f"imported: {unwanted}" if unwanted else 0)
"""


@pytest.mark.parametrize("code", [IMPORT_ALL, WITHOUT_THE_CONDUCTOR], ids=["all", "default"])
def test_import_loads_no_torch_no_engine_and_numpy_only_if_used(code: str) -> None:
    subprocess.run([sys.executable, "-c", code], check=True, timeout=30, cwd=PROXY)


def test_dependencies_are_http_stack_conductor_and_request_formats() -> None:
    text = (PROXY / "pyproject.toml").read_text("utf-8")
    wanted = text.split("\ndependencies = [")[1].split("]")[0]
    names = set(re.findall(r'"([a-z-]+)', wanted))
    http_stack = {"uvloop", "httptools", "msgspec", "async-timeout"}
    assert names == http_stack | {"mooncake-api", "mooncake-conductor", "pyzmq"}
