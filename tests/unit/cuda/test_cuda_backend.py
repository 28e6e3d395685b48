"""Without a device: the streams of graph capture, and devices that the backend refuses."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mooncake_hal.backend import DeviceInfo
from mooncake_hal.errors import BackendUnavailable, DeviceError
from mooncake_hal_cuda.cuda_backend import CudaRuntime, _tune


def test_all_graphs_are_captured_on_one_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each stream that runs a matrix product keeps a cuBLAS workspace, which no budget counts."""
    made: list[Any] = []
    captured_on: list[Any] = []

    def new_stream() -> Any:
        made.append(SimpleNamespace(wait_stream=lambda other: None))
        return made[-1]

    def graph(graph: Any, pool: Any, stream: Any, **mode: str) -> Any:
        captured_on.append(stream)
        return nullcontext()

    fakes = {
        "device_count": lambda: 0,
        "current_device": lambda: 0,
        "current_stream": lambda: SimpleNamespace(wait_stream=lambda other: None),
        "Stream": new_stream,
        "stream": lambda stream: nullcontext(),
        "CUDAGraph": SimpleNamespace,
        "graph": graph,
        "graph_pool_handle": lambda: (0, 0),
    }
    for name, fake in fakes.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    runtime, runs = CudaRuntime(), []
    graphs = [runtime.capture(lambda: runs.append(1)) for _ in range(3)]
    assert len(runs) == 2 * len(graphs)  # each once before it is captured
    assert len(made) == 1
    assert captured_on == 3 * made


def test_an_unsupported_first_device_is_named() -> None:
    """For example an old GPU for the display, in front of the one for computing."""
    old = DeviceInfo(0, "NVIDIA T1000", "sm_75", 4 << 30)
    with pytest.raises(BackendUnavailable, match=r"NVIDIA T1000, .* others, name them in CUDA_VIS"):
        _tune(old)


def test_a_device_of_another_generation_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernels and capabilities are those of the first device."""
    found = [SimpleNamespace(name="H100", major=9, minor=0, total_memory=80 << 30)] * 2
    found.insert(1, SimpleNamespace(name="A100", major=8, minor=0, total_memory=80 << 30))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(found))
    monkeypatch.setattr(torch.cuda, "get_device_properties", found.__getitem__)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, 0))
    runtime = CudaRuntime()
    assert [runtime.device(index).index for index in (0, 2)] == [0, 2]
    for use in (runtime.device, runtime.bind_thread):
        with pytest.raises(DeviceError, match=r"device 1 .* sm_80, .* sm_90, .* CUDA_VISIBLE_DEV"):
            use(1)
