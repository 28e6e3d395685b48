"""What the CUDA, Ascend and CPU plugins say about machines that we describe to them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from mooncake_hal.errors import BackendUnavailable
from mooncake_hal_ascend import machine as ascend, plugin as ascend_plugin
from mooncake_hal_cpu import facts
from mooncake_hal_cuda import machine as cuda, plugin as cuda_plugin

GPU = cuda.Machine(True, ("nvidia0", "nvidia1"), ("NVIDIA H100",), True, "12.8")
NPU = ascend.Machine(("davinci0",), True, "/opt/cann", True, True, True)


@pytest.mark.parametrize(
    ("machine", "reason"),
    [
        (replace(GPU, has_driver=False, device_files=()), "no NVIDIA driver"),
        (replace(GPU, has_driver=False), "libcuda.so.1 is not found; install"),
        (replace(GPU, device_files=()), "driver is installed, but there is no device"),
        (replace(GPU, has_torch=False), "but torch is not installed"),
        (replace(GPU, torch_cuda=None), "but torch is built without CUDA"),
        (GPU, "found 2 NVIDIA devices (NVIDIA H100), but this version"),
        (replace(GPU, device_files=("nvidia0",), models=()), "found 1 NVIDIA device, but"),
    ],
)
def test_cuda_says_what_is_missing(machine: cuda.Machine, reason: str) -> None:
    answer = cuda.diagnose(machine)
    assert not answer.ok
    assert reason in answer.reason


def test_cuda_reads_the_machine(tmp_path: Path) -> None:
    report = tmp_path / "proc/driver/nvidia/gpus/0000:01:00.0/information"
    report.parent.mkdir(parents=True)
    report.write_text("Model: \t\t NVIDIA H100 80GB HBM3\nIRQ:   \t\t 42\n")
    (tmp_path / "dev").mkdir()
    for name in ("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm"):
        (tmp_path / "dev" / name).touch()
    found = cuda.look(tmp_path)
    assert found.device_files == ("nvidia0", "nvidia1")
    assert found.models == ("NVIDIA H100 80GB HBM3",)
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
        (NPU, ["found 1 Ascend device and CANN in /opt/cann, but this version"]),
    ],
)
def test_ascend_says_everything_that_is_missing(
    machine: ascend.Machine, reasons: list[str]
) -> None:
    answer = ascend.diagnose(machine)
    assert not answer.ok
    for reason in reasons:
        assert reason in answer.reason


def test_ascend_reads_the_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ASCEND_HOME_PATH", raising=False)
    monkeypatch.setenv("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")
    toolkit = tmp_path / "usr/local/Ascend/ascend-toolkit/latest"
    for folder in (toolkit, tmp_path / "dev", tmp_path / "etc"):
        folder.mkdir(parents=True)
    for name in ("dev/davinci0", "dev/davinci12", "dev/davinci_manager", "etc/hccn.conf"):
        (tmp_path / name).touch()
    found = ascend.look(tmp_path)
    assert found.device_files == ("davinci0", "davinci12")
    assert (found.has_driver, found.has_hccn, found.cann) == (True, True, str(toolkit))
    assert not found.loads_torch_plugins
    monkeypatch.setenv("ASCEND_HOME_PATH", str(tmp_path / "moved"))
    assert ascend.look(tmp_path).cann is None


@pytest.mark.parametrize("plugin", [cuda_plugin, ascend_plugin])
def test_a_backend_without_kernels_never_loads(plugin: object) -> None:
    spec = plugin.mooncake_hal_backend()  # type: ignore[attr-defined]  # two modules of one form
    answer = spec.probe()
    assert not answer.ok
    with pytest.raises(BackendUnavailable) as caught:
        spec.load()
    assert caught.value.reason == answer.reason


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
