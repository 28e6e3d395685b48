"""Our connector against the releases of vLLM-Ascend, by the interface files in this folder.

Neither vLLM-Ascend nor torch-npu is needed; ci/vllm_ascend_interfaces.py writes the files from
vLLM-Ascend's source distributions.
"""

from __future__ import annotations

import ast
import json
from pathlib import Path
from typing import Any

import pytest

import mooncake_vllm
from mooncake_vllm import ascend_memory, vllm_memory

RELEASES = {
    path.stem: json.loads(path.read_text()) for path in sorted(Path(__file__).parent.glob("*.json"))
}
FOLDER = Path(mooncake_vllm.__file__).parent

release = pytest.mark.parametrize("facts", RELEASES.values(), ids=list(RELEASES))


def hooks() -> dict[str, ast.FunctionDef]:
    tree = ast.parse((FOLDER / "vllm_connectors.py").read_text())
    [connector] = [
        node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "HalConnector"
    ]
    return {node.name: node for node in connector.body if isinstance(node, ast.FunctionDef)}


def test_there_is_a_release() -> None:
    assert RELEASES


@release
def test_vllm_ascend_calls_bind(facts: dict[str, Any]) -> None:
    for name, counts in facts["calls"].items():
        assert counts, f"{name} is not called any more"
        for count in counts:
            assert len(hooks()[name].args.args) - 1 == count, name


@release
def test_cache_tensors_have_the_expected_layout(facts: dict[str, Any]) -> None:
    assert facts["splits_keys_from_values"]
    condition, plain = facts["shapes"]["attention_v1"]
    for name in ascend_memory.HEADS_FIRST:
        assert repr(name) in condition
    assert "return (2, num_blocks, num_kv_heads, block_size, head_size)" in condition
    assert plain == "return (2, num_blocks, block_size, num_kv_heads, head_size)"
    assert facts["shapes"]["mla_v1"] == ["return (num_blocks, block_size, num_kv_heads, head_size)"]


@release
def test_names_of_rejected_settings_exist(facts: dict[str, Any]) -> None:
    assert facts["constants"]["ACL_FORMAT_FRACTAL_NZ"] == ascend_memory.NZ_FORMAT
    assert facts["has_enable_kv_nz"]


@release
def test_device_and_latents_are_known(facts: dict[str, Any]) -> None:
    assert facts["constants"]["device_type"] in vllm_memory.TRANSPORTS
    assert facts["bases"] == ["MLAAttentionSpec"]
    assert (
        '"AscendMLAAttentionSpec": AttentionKind.MLA' in (FOLDER / "vllm_instance.py").read_text()
    )
