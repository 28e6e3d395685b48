"""mooncake_kv can be imported without the engine and without torch."""

from __future__ import annotations

import subprocess
import sys

import pytest

CODE = """
import importlib, pkgutil, sys

class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {"torch", "mooncake_engine", "transformers", "vllm"}:
            raise ImportError(f"{name} is not to be imported")

sys.meta_path.insert(0, Refuse())
import mooncake_kv
for module in pkgutil.walk_packages(mooncake_kv.__path__, "mooncake_kv."):
    importlib.import_module(module.name)
    print(module.name)
"""


def test_every_module_imports_without_torch_and_without_an_engine() -> None:
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    wanted = {f"mooncake_kv.{name}" for name in ("params", "push_worker", "store.node_store")}
    assert wanted <= set(done.stdout.split())


@pytest.mark.parametrize("module", ["params", "errors", "config"])
def test_scheduler_imports_no_socket_modules(module: str) -> None:
    code = f"import mooncake_kv.{module}, sys; assert 'mooncake_kv.side_channel' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
