"""The published wheels' Python API equals the recorded one, which hccs and its fake match."""

from __future__ import annotations

import importlib
import json
import re
from importlib.metadata import version
from pathlib import Path

import memfabric_hybrid
import pytest
from support import vendor_npu  # noqa: F401  # mooncake's engine loads over the stub
from support.engine_signatures import GOLDEN, USED, surface

from mooncake_hal_ascend.hccs.vendor_engines import MEANINGS

MODULES = {
    "mooncake": ("mooncake.engine", "mooncake-transfer-engine-npu"),
    "memfabric": ("memfabric_hybrid", "memfabric-hybrid"),
}


@pytest.mark.parametrize("engine", sorted(MODULES))
def test_wheel_equals_the_recorded_api(engine: str) -> None:
    name, distribution = MODULES[engine]
    module = importlib.import_module(name)
    recorded = json.loads(GOLDEN.read_text())[engine]
    assert version(distribution) == recorded["version"]
    assert surface(module, USED[engine]) == recorded["surface"]
    if "operations" in recorded:
        assert sorted(module.TransDataOpType.__members__) == recorded["operations"]


def test_every_code_of_memfabric_has_a_meaning() -> None:
    """The codes are in its header; no wheel lists those of mooncake's engine."""
    header = Path(memfabric_hybrid.__file__).parent / "include/smem/host/smem.h"
    codes = re.findall(
        r"#define SMEM_\w+ +\((-\d+)\)", header.read_text().partition("error code")[2]
    )
    assert {int(code) for code in codes} == set(MEANINGS["memfabric"])
