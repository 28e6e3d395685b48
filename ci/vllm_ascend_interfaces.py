"""Extracts the interfaces of vLLM-Ascend releases that our connector uses, from their sources.

    python ci/vllm_ascend_interfaces.py            # rewrite tests/contract/vllm_ascend/*.json
    python ci/vllm_ascend_interfaces.py --check    # exit 1 if a release differs from its file

Complements ``ci/vllm_interfaces.py``, which covers vLLM itself: vLLM-Ascend calls the same hooks
and one more from its own attention layers, and has different tensors. Needs no NPU and no
torch-npu.

Exits 77 with "skipped: ..." and the reason if a source distribution can't be downloaded.
"""

from __future__ import annotations

import ast
import json
import sys
from functools import partial
from pathlib import Path
from typing import Any

from vllm_environment import ROOT
from vllm_interfaces import SOURCES, download, unpack, write_or_compare

VERSIONS = ("0.30.0rc2",)
CONTRACTS = ROOT / "tests" / "contract" / "vllm_ascend"
HOOKS = ("wait_for_layer_load", "save_kv_layer", "on_kv_cache_written")
"""Hooks that its attention layers call, in ``attention/utils.py``."""


def main(arguments: list[str]) -> int:
    """Write the files, or with ``--check`` compare them."""
    texts = {version: partial(_text_of, version) for version in VERSIONS}
    return write_or_compare("vLLM-Ascend", CONTRACTS, texts, arguments)


def _text_of(version: str) -> str:
    return json.dumps(describe(fetch(version)), indent=1, sort_keys=True) + "\n"


def fetch(version: str) -> Path:
    """Download a release's source distribution; returns the package's folder."""
    package = SOURCES / f"vllm_ascend-{version}" / "vllm_ascend"
    if not package.exists():
        archive = SOURCES / f"vllm_ascend-{version}.tar.gz"
        if not archive.exists():
            download(
                "vllm-ascend",
                version,
                SOC_VERSION="ascend910b1",
                SETUPTOOLS_SCM_PRETEND_VERSION=version,
            )
        unpack(archive)
    return package


def describe(package: Path) -> dict[str, Any]:
    """The facts about a release that our connector depends on."""
    runner = (package / "worker" / "model_runner_v1.py").read_text()
    return {
        "calls": hook_calls(ast.parse((package / "attention" / "utils.py").read_text())),
        "shapes": {
            name: shapes(ast.parse((package / "attention" / f"{name}.py").read_text()))
            for name in ("attention_v1", "mla_v1")
        },
        "splits_keys_from_values": "(kv_cache[0], kv_cache[1])" in runner,
        "bases": bases(package / "core" / "kv_cache_interface.py", "AscendMLAAttentionSpec"),
        "constants": {
            "ACL_FORMAT_FRACTAL_NZ": constant(package / "utils.py", "ACL_FORMAT_FRACTAL_NZ"),
            "device_type": constant(package / "platform.py", "device_type"),
        },
        "has_enable_kv_nz": "enable_kv_nz" in (package / "ascend_config.py").read_text(),
    }


def hook_calls(tree: ast.Module) -> dict[str, list[int]]:
    """The numbers of arguments with which each hook is called."""
    found: dict[str, set[int]] = {name: set() for name in HOOKS}
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            name = node.func.attr if isinstance(node.func, ast.Attribute) else None
            name = node.func.id if isinstance(node.func, ast.Name) else name
            if name in found:
                found[name].add(len(node.args))
    return {name: sorted(counts) for name, counts in found.items()}


def shapes(tree: ast.Module) -> list[str]:
    """The shapes that ``get_kv_cache_shape`` returns, and their conditions."""
    [function] = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef) and node.name == "get_kv_cache_shape"
    ]
    return [ast.unparse(each) for each in function.body if not isinstance(each, ast.Expr)]


def bases(path: Path, name: str) -> list[str]:
    """Of a class."""
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.ClassDef) and node.name == name:
            return [ast.unparse(base) for base in node.bases]
    return []


def constant(path: Path, name: str) -> Any:
    """The value that a module or one of its classes assigns to a name."""
    for node in ast.walk(ast.parse(path.read_text())):
        targets = node.targets if isinstance(node, ast.Assign) else []
        targets = [node.target] if isinstance(node, ast.AnnAssign) else targets
        if any(isinstance(each, ast.Name) and each.id == name for each in targets):
            value = node.value  # type: ignore[attr-defined]  # an assignment
            if isinstance(value, ast.Constant):
                return value.value
    return None


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
