"""The doctor's checks of a host for hccs."""

from __future__ import annotations

from pathlib import Path

import pytest

from mooncake_hal.doctor import examine_transport
from mooncake_hal.registry import Registry
from mooncake_hal.specs import Check
from mooncake_hal_ascend.hccs import hccs_checks
from mooncake_hal_ascend.hccs.hccs_checks import examine


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "etc").mkdir()
    (tmp_path / "etc/hccn.conf").write_text("address_0=10.0.0.1\naddress_1=10.0.0.2\n")
    ports = tmp_path / "ip_local_port_range"
    ports.write_text("32768\t60999\n")
    monkeypatch.setattr(hccs_checks, "LOCAL_PORTS", ports)
    monkeypatch.setattr("shutil.which", lambda name: f"/usr/bin/{name}")
    return tmp_path


def problems(checks: list[Check]) -> list[str]:
    return [check.problem for check in checks if check.problem is not None]


def test_valid_host_has_no_problems(root: Path) -> None:
    found = examine([0, 1], {}, "", root)
    assert problems(found) == []
    assert [check.what for check in found] == [
        "addresses of 2 NPUs in /etc/hccn.conf",
        "engine=auto protocol=auto (MOONCAKE_HAL_HCCS)",
        "deadlines: 10000 ms to connect, 33064 ms to transfer (connect: 10000 ms, as "
        "HCCL_CONNECT_TIMEOUT is not set; transfer: 4.096 us * 2^20 (HCCL_RDMA_TIMEOUT) * 7 "
        "(HCCL_RDMA_RETRY_CNT) + 3000 ms)",
        "ports 20000-22000 for the mooncake engine's links; keep --port and --kv-port out",
        "ports 15000-17000 for the mooncake engine's handshakes; keep --port and --kv-port out",
        "ports 17001-19000 for memfabric's store; keep --port and --kv-port out",
        "npu-smi is /usr/bin/npu-smi",
        "hccn_tool is /usr/bin/hccn_tool",
    ]


def test_missing_and_duplicate_addresses_are_reported(root: Path) -> None:
    assert "NPUs [2] have none" in problems(examine([0, 1, 2], {}, "", root))[0]
    (root / "etc/hccn.conf").write_text("address_0=10.0.0.1\naddress_1=10.0.0.1\n")
    assert "['10.0.0.1'] are given twice" in problems(examine([0, 1], {}, "", root))[0]


def test_invalid_settings_are_reported(root: Path) -> None:
    (found,) = problems(examine([0, 1], {"HCCL_RDMA_TIMEOUT": "99"}, "", root))
    assert "HCCL_RDMA_TIMEOUT='99' must be" in found
    (found,) = problems(examine([0, 1], {}, "protocol=ib", root))
    assert "MOONCAKE_HAL_HCCS='protocol=ib'" in found


def test_ports_in_the_kernels_ephemeral_range_are_reported(root: Path) -> None:
    (found,) = problems(examine([0, 1], {"ASCEND_BASE_PORT": "33000"}, "", root))
    assert found.startswith("the kernel gives 32768-60999 to anybody")
    (found,) = problems(examine([0, 1], {"ASCEND_BASE_PORT": "x"}, "", root))
    assert "ASCEND_BASE_PORT='x'" in found


def test_missing_tools_are_reported(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.which", lambda name: None)
    assert len(problems(examine([0, 1], {}, "", root))) == 2


def test_doctor_runs_the_checks_of_the_plugin() -> None:
    first, *rest = examine_transport(Registry.discover(), "hccs")
    assert first.what == "transport hccs"
    assert first.problem is not None
    assert "no Ascend driver" in first.problem
    assert any("hccn_tool" in finding.what for finding in rest)
    (found,) = examine_transport(Registry.discover(), "hcsc")
    assert found.problem is not None
    assert found.problem.startswith("no installed plugin offers it; known are ")
    assert [str(finding) for finding in examine_transport(Registry.discover(), "tcp")] == [
        "ok    transport tcp"
    ]
