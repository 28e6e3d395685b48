"""The availability check of the CUDA plugin, on described machines."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from mooncake_hal.errors import BackendUnavailable, TransportUnavailable
from mooncake_hal_cuda import cuda_env, cuda_machine, cuda_plugin

GPU = cuda_machine.CudaMachine(
    True,
    (12, 4),
    (550, 54),
    ("nvidia0", "nvidia1"),
    ("NVIDIA H100",),
    True,
    "12.8",
    True,
    False,
    (),
)


@pytest.mark.parametrize(
    ("machine", "reason"),
    [
        (replace(GPU, has_driver=False, device_files=()), "no NVIDIA driver"),
        (replace(GPU, has_driver=False), "libcuda.so.1 is not found; install"),
        (replace(GPU, device_files=()), "driver is installed, but there is no device"),
        (
            replace(GPU, denied_files=GPU.device_files),
            "but this process may not open /dev/nvidia0: join the group that may",
        ),
        (replace(GPU, has_torch=False), "but torch is not installed"),
        (replace(GPU, torch_cuda=None), "but torch is built without CUDA"),
        (replace(GPU, has_triton=False), "but triton is not installed; torch's CUDA builds bring"),
        (replace(GPU, triton_version=(3, 4)), "but triton 3.4 is too old: 3.5 or newer is needed"),
        (replace(GPU, hides_devices=True), "but CUDA_VISIBLE_DEVICES hides them all"),
        (
            replace(GPU, driver_cuda=(11, 4), driver_version=(470, 82)),
            "driver 470.82 (CUDA 11.4) is too old for torch's CUDA 12.8: install 525.60 or newer",
        ),
        (
            replace(GPU, torch_cuda="13.0"),
            "driver 550.54 (CUDA 12.4) is too old for torch's CUDA 13.0: install 580.65 or newer, "
            "cuda-compat-13-0 on a GPU for data centres, or",
        ),
        (
            replace(GPU, driver_version=None, torch_cuda="14.1"),
            "the driver (CUDA 12.4) is too old for torch's CUDA 14.1: install a newer one, cuda-",
        ),
    ],
)
def test_probe_reports_what_is_missing(machine: cuda_machine.CudaMachine, reason: str) -> None:
    answer = cuda_machine.check_availability(machine)
    assert not answer.ok
    assert reason in answer.reason


@pytest.mark.parametrize(
    ("machine", "found"),
    [
        (GPU, "found 2 NVIDIA devices (NVIDIA H100)"),
        (replace(GPU, triton_version=(3, 5)), "found 2 NVIDIA devices (NVIDIA H100)"),
        (replace(GPU, device_files=("nvidia0",), models=()), "found 1 NVIDIA device"),
        (replace(GPU, driver_version=None), "found 2 NVIDIA devices (NVIDIA H100)"),
        (replace(GPU, driver_cuda=None), "found 2 NVIDIA devices (NVIDIA H100)"),
        (
            # with the forward-compatibility package of CUDA 13.0
            replace(GPU, driver_cuda=(13, 0), driver_version=(535, 183), torch_cuda="13.0"),
            "found 2 NVIDIA devices (NVIDIA H100)",
        ),
        (replace(GPU, denied_files=("nvidia1",)), "found 2 NVIDIA devices (NVIDIA H100)"),
    ],
)
def test_probe_reports_available_devices(machine: cuda_machine.CudaMachine, found: str) -> None:
    answer = cuda_machine.check_availability(machine)
    assert answer.ok
    assert answer.reason == found


@pytest.mark.parametrize(
    ("text", "version"),
    [
        (
            "NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15  Tue Mar  5 22:23:56 UTC\n",
            (550, 54),
        ),
        (
            "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Release Build\n",
            (580, 65),
        ),
        ("", None),
    ],
)
def test_driver_version_is_parsed(text: str, version: tuple[int, int] | None) -> None:
    assert cuda_machine.parse_driver_version(text) == version


@pytest.mark.parametrize(
    ("value", "hides"),
    [
        (None, False),
        ("", True),
        ("-1", True),
        ("0", False),
        ("1,-1", False),
        ("GPU-8932f937-d72c-4106-c12f-20bd9faed9f6", False),
        ("MIG-8932f937-d72c-4106-c12f-20bd9faed9f6/1/0", False),
        ("MIG-2e9ac5a3-1f5e-5c7f-9d70-2b3f4f3c6a11", False),
    ],
)
def test_hidden_devices_are_detected(
    monkeypatch: pytest.MonkeyPatch, value: str | None, hides: bool
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if value is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", value)
    assert cuda_env.hides_all_devices() is hides


def test_machine_is_read_from_files(tmp_path: Path) -> None:
    report = tmp_path / "proc/driver/nvidia/gpus/0000:01:00.0/information"
    report.parent.mkdir(parents=True)
    report.write_text("Model: \t\t NVIDIA H100 80GB HBM3\nIRQ:   \t\t 42\n")
    version = tmp_path / "proc/driver/nvidia/version"
    version.write_text("NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15  Tue Mar 5\n")
    (tmp_path / "dev").mkdir()
    for name in ("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm"):
        (tmp_path / "dev" / name).touch()
    found = cuda_machine.detect_machine(tmp_path)
    assert found.device_files == ("nvidia0", "nvidia1")
    assert found.models == ("NVIDIA H100 80GB HBM3",)
    assert found.driver_version == (550, 54)
    (tmp_path / "wsl/dev").mkdir(parents=True)
    (tmp_path / "wsl/dev/dxg").touch()
    assert cuda_machine.detect_machine(tmp_path / "wsl").device_files == ("dxg",)
    assert cuda_machine.detect_machine(tmp_path / "nothing").driver_version is None
    assert cuda_machine.detect_machine(tmp_path / "nothing").device_files == ()


@pytest.mark.parametrize(
    ("text", "version"),
    [
        ("__version__ = '2.13.0+cpu'\ncuda: Optional[str] = None\n", None),
        ("cuda: Optional[str] = '12.8'\nhip: Optional[str] = None\n", "12.8"),
        ("cuda = '11.8'\n", "11.8"),
        ("", None),
    ],
)
def test_cuda_version_of_torch_is_read_without_importing_it(text: str, version: str | None) -> None:
    assert cuda_machine.parse_torch_cuda(text) == version


@pytest.mark.skipif(cuda_plugin.probe().ok, reason="this machine has a CUDA device")
def test_load_without_a_device_is_unavailable() -> None:
    with pytest.raises(BackendUnavailable, match="torch sees no device"):
        cuda_plugin.mooncake_hal_backend().load()
    with pytest.raises(TransportUnavailable, match=r"libcuda.so.1 can't be loaded"):
        cuda_plugin.mooncake_hal_transport().load()
