"""What the proxy needs: its three libraries and nothing of this repository."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

PROXY = Path(__file__).resolve().parents[3] / "proxy"
IMPORT_ALL = """
import pkgutil, sys
import mooncake_proxy
for module in pkgutil.walk_packages(mooncake_proxy.__path__, "mooncake_proxy."):
    if not module.name.endswith("__main__"):
        __import__(module.name)
unwanted = {"torch", "numpy", "yaml", "mooncake_hal", "mooncake_engine"} & set(sys.modules)
sys.exit(f"imported: {unwanted}" if unwanted else 0)
"""


def test_importing_all_of_it_brings_no_torch_no_numpy_and_no_sibling() -> None:
    subprocess.run([sys.executable, "-c", IMPORT_ALL], check=True, timeout=30, cwd=PROXY)


def test_it_depends_on_its_http_stack_only() -> None:
    text = (PROXY / "pyproject.toml").read_text("utf-8")
    wanted = text.split("\ndependencies = [")[1].split("]")[0]
    names = set(re.findall(r'"([a-z-]+)', wanted))
    assert names == {"uvloop", "httptools", "msgspec", "async-timeout"}
