"""What the CUDA, Ascend and CPU plugins say about machines that we describe to them."""

from __future__ import annotations

from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

import pytest

from mooncake_hal.errors import BackendUnavailable, TransportUnavailable
from mooncake_hal_ascend import machine as ascend, plugin as ascend_plugin
from mooncake_hal_cpu import facts
from mooncake_hal_cuda import env as cuda_env, machine as cuda, plugin as cuda_plugin

GPU = cuda.Machine(
    True, (550, 54), ("nvidia0", "nvidia1"), ("NVIDIA H100",), True, "12.8", True, False, ()
)
NPU = ascend.Machine(
    ("davinci0",), True, "/opt/cann", True, True, True, "8.5.0", "2.13.0+cpu", "2.13.0"
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
        (replace(GPU, hides_devices=True), "but CUDA_VISIBLE_DEVICES hides them all"),
        (
            replace(GPU, driver_version=(470, 82)),
            "driver 470.82 is too old for torch's CUDA 12.8: install 525.60 or newer",
        ),
        (
            replace(GPU, torch_cuda="13.0"),
            "driver 550.54 is too old for torch's CUDA 13.0: install 580.65 or newer",
        ),
    ],
)
def test_cuda_says_what_is_missing(machine: cuda.Machine, reason: str) -> None:
    answer = cuda.diagnose(machine)
    assert not answer.ok
    assert reason in answer.reason


@pytest.mark.parametrize(
    ("machine", "found"),
    [
        (GPU, "found 2 NVIDIA devices (NVIDIA H100)"),
        (replace(GPU, device_files=("nvidia0",), models=()), "found 1 NVIDIA device"),
        (replace(GPU, driver_version=None), "found 2 NVIDIA devices (NVIDIA H100)"),
        (replace(GPU, denied_files=("nvidia1",)), "found 2 NVIDIA devices (NVIDIA H100)"),
    ],
)
def test_cuda_is_available(machine: cuda.Machine, found: str) -> None:
    answer = cuda.diagnose(machine)
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
def test_the_drivers_version_is_read(text: str, version: tuple[int, int] | None) -> None:
    assert cuda.parse_driver_version(text) == version


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
def test_hidden_devices(monkeypatch: pytest.MonkeyPatch, value: str | None, hides: bool) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if value is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", value)
    assert cuda_env.hides_all_devices() is hides


def test_cuda_reads_the_machine(tmp_path: Path) -> None:
    report = tmp_path / "proc/driver/nvidia/gpus/0000:01:00.0/information"
    report.parent.mkdir(parents=True)
    report.write_text("Model: \t\t NVIDIA H100 80GB HBM3\nIRQ:   \t\t 42\n")
    version = tmp_path / "proc/driver/nvidia/version"
    version.write_text("NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15  Tue Mar 5\n")
    (tmp_path / "dev").mkdir()
    for name in ("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm"):
        (tmp_path / "dev" / name).touch()
    found = cuda.look(tmp_path)
    assert found.device_files == ("nvidia0", "nvidia1")
    assert found.models == ("NVIDIA H100 80GB HBM3",)
    assert found.driver_version == (550, 54)
    assert cuda.look(tmp_path / "nothing").driver_version is None
    assert cuda.look(tmp_path / "nothing").device_files == ()


@pytest.mark.parametrize(
    ("text", "version"),
    [
        ("__version__ = '2.13.0+cpu'\ncuda: Optional[str] = None\n", None),
        ("cuda: Optional[str] = '12.8'\nhip: Optional[str] = None\n", "12.8"),
        ("cuda = '11.8'\n", "11.8"),
        ("", None),
    ],
)
def test_torchs_cuda_version_is_read_without_importing_it(text: str, version: str | None) -> None:
    assert cuda.parse_torch_cuda(text) == version


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
            ["torch-npu 2.11.0.post3 does not fit torch 2.13.0+cpu: install torch 2.11, or"],
        ),
        (
            replace(NPU, cann_version="8.0.RC2"),
            ["CANN 8.0.RC2 in /opt/cann is too old: install 8.5 or newer"],
        ),
    ],
)
def test_ascend_says_everything_that_is_missing(
    machine: ascend.Machine, reasons: list[str]
) -> None:
    answer = ascend.diagnose(machine)
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
def test_ascend_is_available(machine: ascend.Machine, found: str) -> None:
    answer = ascend.diagnose(machine)
    assert answer.ok
    assert answer.reason == found


def test_ascend_reads_the_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ASCEND_HOME_PATH", raising=False)
    monkeypatch.setenv("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")
    monkeypatch.setenv("MOONCAKE_HAL_ASCEND_ROOT", str(tmp_path))
    toolkit = tmp_path / "usr/local/Ascend/ascend-toolkit/latest"
    for folder in (toolkit, tmp_path / "dev", tmp_path / "etc"):
        folder.mkdir(parents=True)
    for name in ("dev/davinci0", "dev/davinci12", "dev/davinci_manager", "etc/hccn.conf"):
        (tmp_path / name).touch()
    found = ascend.look()
    assert found.device_files == ("davinci0", "davinci12")
    assert (found.has_driver, found.has_hccn, found.cann) == (True, True, str(toolkit))
    assert found.torch_version == version("torch")
    assert (found.cann_version, found.torch_npu_version) == ("", "")
    assert not found.loads_torch_plugins
    monkeypatch.setenv("ASCEND_HOME_PATH", str(tmp_path / "moved"))
    assert ascend.look().cann is None


@pytest.mark.parametrize(
    ("name", "text", "version"),
    [
        ("version.cfg", "# version\ntoolkit_running_version=[7.7.T7.0.B528:8.2.RC1]\n", "8.2.RC1"),
        ("version.cfg", "runtime_running_version=[8.5.0:8.5.0]\n", "8.5.0"),
        ("compiler/version.info", "Version=8.3.RC1\n", "8.3.RC1"),
        ("compiler/version.info", "nothing of it\n", ""),
    ],
)
def test_canns_version_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, text: str, version: str
) -> None:
    monkeypatch.delenv("ASCEND_HOME_PATH", raising=False)
    file = tmp_path / "usr/local/Ascend/cann" / name
    file.parent.mkdir(parents=True)
    file.write_text(text)
    assert ascend.look(tmp_path).cann_version == version


@pytest.mark.skipif(ascend_plugin.probe().ok, reason="this machine has an Ascend device")
def test_ascend_does_not_load_without_a_device() -> None:
    spec = ascend_plugin.mooncake_hal_backend()
    with pytest.raises(BackendUnavailable) as caught:
        spec.load()
    assert caught.value.reason == spec.probe().reason


@pytest.mark.skipif(cuda_plugin.probe().ok, reason="this machine has a CUDA device")
def test_cuda_does_not_load_without_a_device() -> None:
    with pytest.raises(BackendUnavailable, match="torch sees no device"):
        cuda_plugin.mooncake_hal_backend().load()
    with pytest.raises(TransportUnavailable, match=r"libcuda.so.1 can't be loaded"):
        cuda_plugin.mooncake_hal_transport().load()


@pytest.mark.parametrize(
    ("machine", "flags", "generation"),
    [
        ("x86_64", "fpu sse2", "x86_64"),
        ("x86_64", "sse2 avx2", "x86_64+avx2"),
        ("x86_64", "avx2 avx512f avx512_bf16", "x86_64+avx512_bf16"),
        ("x86_64", "avx2 avx512f avx512_bf16 amx_bf16", "x86_64+avx512_bf16+amx_bf16"),
        ("aarch64", "fp asimd bf16", "aarch64+asimd+bf16"),
    ],
)
def test_a_cpus_generation(machine: str, flags: str, generation: str) -> None:
    assert facts.generation(machine, flags) == generation
