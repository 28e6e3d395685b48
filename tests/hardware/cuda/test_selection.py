"""CUDA_VISIBLE_DEVICES selects a process' devices, by number and by UUID."""

from __future__ import annotations

import os
import subprocess
import sys
from uuid import UUID

import pytest

from mooncake_hal_cuda.libcuda import CudaDriver

pytestmark = pytest.mark.cuda
SCRIPT = """
from mooncake_hal.registry import Registry
from mooncake_hal_cuda.libcuda import CudaDriver
backend = Registry.discover().select_backend("cuda")
print(len(backend.runtime.devices()), CudaDriver().uuid(0).hex())
"""


def run(visible: str) -> subprocess.CompletedProcess[str]:
    """The output of a process that sees only these devices."""
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": visible}
    return subprocess.run(
        [sys.executable, "-c", SCRIPT],
        env=environment,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )


def shown() -> str:
    """The name of this process' first device."""
    return os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]


def test_one_device_by_its_visible_name() -> None:
    found = run(shown())
    assert found.returncode == 0, found.stderr
    assert found.stdout.split() == ["1", CudaDriver().uuid(0).hex()]


def test_one_device_by_its_uuid() -> None:
    uuid = CudaDriver().uuid(0)
    if shown().startswith("MIG-"):
        pytest.skip("a part of a GPU (MIG) has a name of its own, which the other test takes")
    found = run(f"GPU-{UUID(bytes=uuid)}")
    assert found.returncode == 0, found.stderr
    assert found.stdout.split() == ["1", uuid.hex()]


@pytest.mark.parametrize(
    ("visible", "reason"),
    [("", "CUDA_VISIBLE_DEVICES hides them all"), ("99", "torch sees no device; see CUDA_VISIBLE")],
)
def test_no_visible_device_is_unavailable_with_a_reason(visible: str, reason: str) -> None:
    found = run(visible)
    assert found.returncode != 0
    assert reason in found.stderr
