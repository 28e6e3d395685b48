"""The availability check of the Ascend plugin, on described machines."""

from __future__ import annotations

from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

import pytest

from mooncake_hal.errors import BackendUnavailable
from mooncake_hal_ascend import ascend_machine, ascend_plugin

NPU = ascend_machine.AscendMachine(
    ("davinci0",), True, "/opt/cann", True, True, True, "8.5.0", "2.13.0+cpu", "2.13.0"
)


@pytest.mark.parametrize(
    ("machine", "reasons"),
    [
        (replace(NPU, has_driver=False, device_files=()), ["no Ascend driver"]),
        (replace(NPU, device_files=()), ["there is no device (/dev/davinci0)"]),
        (replace(NPU, has_torch_npu=False), ["torch-npu is not installed"]),
        (replace(NPU, has_hccn=False), ["/etc/hccn.conf is missing"]),
        (replace(NPU, cann=None), ["CANN is not found", "TORCH_DEVICE_BACKEND_AUTOLOAD=0"]),
        (
            replace(NPU, torch_npu_version="2.11.0.post3"),
            ["torch-npu 2.11.0.post3 does not match torch 2.13.0+cpu: install torch 2.11, or"],
        ),
        (
            replace(NPU, cann_version="8.0.RC2"),
            ["CANN 8.0.RC2 in /opt/cann is too old: install 8.5 or newer"],
        ),
    ],
)
def test_probe_reports_everything_that_is_missing(
    machine: ascend_machine.AscendMachine, reasons: list[str]
) -> None:
    answer = ascend_machine.check_availability(machine)
    assert not answer.ok
    for reason in reasons:
        assert reason in answer.reason


@pytest.mark.parametrize(
    ("machine", "found"),
    [
        (NPU, "found 1 Ascend device, and CANN 8.5.0 in /opt/cann"),
        (replace(NPU, cann_version=""), "found 1 Ascend device, and CANN in /opt/cann"),
        (
            replace(NPU, device_files=("davinci0", "davinci1"), torch_npu_version="2.13.0.post2"),
            "found 2 Ascend devices, and CANN 8.5.0 in /opt/cann",
        ),
    ],
)
def test_probe_reports_available_devices(machine: ascend_machine.AscendMachine, found: str) -> None:
    answer = ascend_machine.check_availability(machine)
    assert answer.ok
    assert answer.reason == found


def test_machine_is_read_from_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ASCEND_HOME_PATH", raising=False)
    monkeypatch.setenv("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")
    monkeypatch.setenv("MOONCAKE_HAL_ASCEND_ROOT", str(tmp_path))
    toolkit = tmp_path / "usr/local/Ascend/ascend-toolkit/latest"
    for folder in (toolkit, tmp_path / "dev", tmp_path / "etc"):
        folder.mkdir(parents=True)
    for name in ("dev/davinci0", "dev/davinci12", "dev/davinci_manager", "etc/hccn.conf"):
        (tmp_path / name).touch()
    found = ascend_machine.detect_machine()
    assert found.device_files == ("davinci0", "davinci12")
    assert (found.has_driver, found.has_hccn, found.cann) == (True, True, str(toolkit))
    assert found.torch_version == version("torch")
    assert (found.cann_version, found.torch_npu_version) == ("", "")
    assert not found.loads_torch_plugins
    monkeypatch.setenv("ASCEND_HOME_PATH", str(tmp_path / "moved"))
    assert ascend_machine.detect_machine().cann is None


@pytest.mark.parametrize(
    ("name", "text", "version"),
    [
        ("version.cfg", "# version\ntoolkit_running_version=[7.7.T7.0.B528:8.2.RC1]\n", "8.2.RC1"),
        ("version.cfg", "runtime_running_version=[8.5.0:8.5.0]\n", "8.5.0"),
        ("compiler/version.info", "Version=8.3.RC1\n", "8.3.RC1"),
        ("compiler/version.info", "nothing of it\n", ""),
    ],
)
def test_cann_version_is_parsed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, text: str, version: str
) -> None:
    monkeypatch.delenv("ASCEND_HOME_PATH", raising=False)
    file = tmp_path / "usr/local/Ascend/cann" / name
    file.parent.mkdir(parents=True)
    file.write_text(text)
    assert ascend_machine.detect_machine(tmp_path).cann_version == version


@pytest.mark.skipif(ascend_plugin.probe().ok, reason="this machine has an Ascend device")
def test_load_without_a_device_is_unavailable() -> None:
    spec = ascend_plugin.mooncake_hal_backend()
    with pytest.raises(BackendUnavailable) as caught:
        spec.load()
    assert caught.value.reason == spec.probe().reason
