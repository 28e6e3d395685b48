"""hccs, and the fake engines of its tests, match the API of the vendors' published wheels.

``engines.json`` is read from the wheels by ci/test-ascend-contract, which fails if it differs.
"""

from __future__ import annotations

import inspect
import json
from pathlib import Path

import pytest
from support import fake_hccs
from support.engine_signatures import GOLDEN, OPERATIONS, Signature, check_calls

from mooncake_hal_ascend.hccs import vendor_engines

ENGINES = json.loads(GOLDEN.read_text())
SOURCE = Path(vendor_engines.__file__).read_text()
CASES = [
    ("mooncake", "MooncakeVendor", fake_hccs.HixlEngine),
    ("memfabric", "MemfabricVendor", fake_hccs.MemfabricEngine),
]


@pytest.mark.parametrize(("engine", "owner", "fake"), CASES)
def test_calls_match_api(engine: str, owner: str, fake: type) -> None:
    assert check_calls(SOURCE, owner, ENGINES[engine]["surface"]) == []


@pytest.mark.parametrize(("engine", "owner", "fake"), CASES)
def test_fake_has_the_same_parameters(engine: str, owner: str, fake: type) -> None:
    members = inspect.getmembers(fake, inspect.isfunction)
    methods = [name for name, _ in members if not name.startswith("_")]
    assert len(methods) >= 6
    for name in methods:
        wanted = Signature.of(ENGINES[engine]["surface"][f"TransferEngine.{name}"]).names
        found = tuple(inspect.signature(getattr(fake, name)).parameters)[1:]
        is_named = not any(parameter.startswith("arg") for parameter in wanted)
        assert len(found) <= len(wanted), name
        assert not is_named or found == wanted[: len(found)], name


def test_memfabric_has_the_requested_operations() -> None:
    assert set(OPERATIONS) <= set(ENGINES["memfabric"]["operations"])
    assert all(f"operation.{name}" in SOURCE for name in OPERATIONS)


@pytest.mark.parametrize(
    ("call", "problem"),
    [
        ("engine.start()", "TransferEngine.start does not exist"),
        ("engine.register_memory(1)", "TransferEngine.register_memory lacks ['capacity']"),
        ("engine.register_memory(1, size=2)", "has no parameters ['size'] left"),
        ("self._engine.destroy(1)", "TransferEngine.destroy takes 0 arguments, not 1"),
    ],
)
def test_mismatching_call_is_reported(call: str, problem: str) -> None:
    source = f"class Vendor:\n    def run(self):\n        {call}\n"
    (found,) = check_calls(source, "Vendor", ENGINES["memfabric"]["surface"])
    assert problem in found
