"""The report of ``collect-env``, on a machine emulated by files."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from mooncake_hal.machine_report import machine_report


@pytest.fixture
def root(tmp_path: Path) -> Path:
    files = {
        "proc/cpuinfo": "processor\t: 0\nmodel name\t: Some CPU\n",
        "proc/meminfo": "MemTotal:  100 kB\nMemAvailable:  50 kB\n",
        "sys/fs/cgroup/memory.max": "max\n",
        "sys/class/net/eth7/operstate": "up\n",
        "sys/class/net/eth7/mtu": "9000\n",
        "sys/class/net/eth7/speed": "100000\n",
        "sys/class/infiniband/mlx5_0/fw_ver": "1.2\n",
        "sys/class/infiniband/mlx5_0/ports/1/state": "4: ACTIVE\n",
        "sys/class/infiniband/mlx5_0/ports/1/link_layer": "Ethernet\n",
        "sys/class/infiniband/mlx5_0/ports/1/rate": "100 Gb/sec\n",
        "sys/class/infiniband/mlx5_0/ports/1/gids/0": "fe80::1\n",
        "sys/class/infiniband/mlx5_0/ports/1/gids/1": ":".join(["0000"] * 8) + "\n",
    }
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path


def test_report_has_the_kernels_values(root: Path) -> None:
    found = machine_report(root).sections
    assert found["System"]["cpu"] == "Some CPU"
    assert sys.executable in found["System"]["python"]
    assert found["Packages"]["mooncake-hal"]
    assert found["Memory and limits"]["memory"] == "100 kB"
    assert found["Memory and limits"]["swap"] == "unknown"
    assert found["Memory and limits"]["cgroup memory.max"] == "max"
    assert "No such file" in found["Memory and limits"]["/dev/shm"]
    assert found["Network interfaces"]["eth7"] == "up, MTU 9000, 100000 Mbit/s"
    assert found["RDMA"] == {
        "mlx5_0 port 1": "4: ACTIVE, 100 Gb/sec, Ethernet, 1 GIDs, firmware 1.2"
    }


def test_secrets_are_omitted(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    monkeypatch.setenv("https_proxy", "http://user:secret@proxy")
    monkeypatch.setenv("MOONCAKE_HAL_BACKEND", "cpu")
    monkeypatch.setenv("OTHER_VARIABLE", "other")
    report = machine_report(root)
    assert report.sections["Environment"].items() >= {
        ("HF_TOKEN", "(set)"),
        ("https_proxy", "(set)"),
        ("MOONCAKE_HAL_BACKEND", "cpu"),
    }
    assert "secret" not in report.text()
    assert "OTHER_VARIABLE" not in report.text()


def test_tool_output_and_failures_are_reported(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, script in (("nvidia-smi", "echo '0, H200'"), ("npu-smi", "echo broken >&2; exit 3")):
        path = tmp_path / "bin" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    report = machine_report(root)
    assert report.sections["Tools"] == {
        "nvidia-smi": "0, H200",
        "npu-smi": "exited with status 3\nbroken",
        "ibv_devinfo": "not installed",
        "g++": "not installed",
    }
    assert "npu-smi: exited with status 3\n    broken\n" in report.text()
