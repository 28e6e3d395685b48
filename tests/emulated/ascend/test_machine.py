"""The output of ``mooncake-hal devices`` on machines with NPUs, each in a process of its own."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

MACHINE = Path(os.environ["MOONCAKE_HAL_ASCEND_ROOT"])


def devices(**variables: str) -> str:
    """The command's output with these environment variables, with runs of spaces collapsed."""
    command = [sys.executable, "-m", "mooncake_hal", "devices"]
    done = subprocess.run(
        command, env=os.environ | variables, capture_output=True, text=True, timeout=100, check=True
    )
    return "\n".join(" ".join(line.split()) for line in done.stdout.splitlines())


def test_an_a2() -> None:
    shown = devices()
    assert "ascend available 90 found 4 Ascend devices, and CANN 8.5.0 in" in shown
    assert "ascend 3 Ascend910B3 A2 4.0 GiB" in shown


def test_an_a3() -> None:
    assert "ascend 0 Ascend910_9392 A3 4.0 GiB" in devices(NPU_EMULATION_GENERATION="A3")


def test_unsupported_family_is_named() -> None:
    shown = devices(NPU_EMULATION_GENERATION="310P")
    assert "device 'Ascend310P3' has SoC version 202 (310P); this backend runs A2" in shown
    assert "cpu available" in shown


def test_without_network_addresses_nothing_is_loaded(tmp_path: Path) -> None:
    machine = shutil.copytree(MACHINE, tmp_path / "machine")
    (machine / "etc/hccn.conf").unlink()
    shown = devices(MOONCAKE_HAL_ASCEND_ROOT=str(machine))
    assert "ascend unavailable 90 /etc/hccn.conf is missing: mount it" in shown
