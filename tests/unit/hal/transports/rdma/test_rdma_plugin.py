"""The rdma plugin's probe of a host, from files laid out like the kernel's."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from mooncake_hal.transports.rdma.rdma_plugin import (
    RdmaHost,
    active_ports,
    mooncake_hal_transport,
    probe,
)


def make_port(devices: Path, name: str, port: int, state: str) -> None:
    folder = devices / name / "ports" / str(port)
    folder.mkdir(parents=True)
    (folder / "state").write_text(f"{state}\n")


@pytest.fixture
def host(tmp_path: Path) -> RdmaHost:
    host = RdmaHost(tmp_path / "class", tmp_path / "dev")
    make_port(host.devices, "mlx5_0", 1, "4: ACTIVE")
    make_port(host.devices, "mlx5_1", 1, "1: DOWN")
    make_port(host.devices, "mlx5_1", 2, "4: ACTIVE")
    host.nodes.mkdir()
    (host.nodes / "uverbs0").touch()
    return host


def test_active_ports_are_listed(host: RdmaHost) -> None:
    assert active_ports(host) == ["mlx5_0:1", "mlx5_1:2"]


def test_probe_reports_a_host_without_devices(tmp_path: Path) -> None:
    found = probe(RdmaHost(tmp_path / "nothing", tmp_path))
    assert not found.ok
    assert found.reason == f"no RDMA device: {tmp_path / 'nothing'} is missing or empty"


def test_probe_reports_ports_that_are_down(host: RdmaHost) -> None:
    for state in host.devices.glob("*/ports/*/state"):
        state.write_text("1: DOWN\n")
    assert "no port under" in probe(host).reason


def test_probe_reports_missing_device_nodes(host: RdmaHost) -> None:
    (host.nodes / "uverbs0").unlink()
    assert "pass them to the container" in probe(host).reason


def test_usable_host_lists_its_ports_or_needs_pyverbs(host: RdmaHost) -> None:
    found = probe(host)
    assert found.reason == "mlx5_0:1, mlx5_1:2" if found.ok else "python3-pyverbs" in found.reason


def test_probe_imports_no_verbs() -> None:
    program = (
        "import sys; from mooncake_hal.transports.rdma import rdma_plugin; rdma_plugin.probe(); "
        "rdma_plugin.mooncake_hal_transport(); "
        "print([name for name in ('pyverbs', 'numpy', 'msgspec') if name in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.strip() == "[]"
    assert mooncake_hal_transport().name == "rdma"
