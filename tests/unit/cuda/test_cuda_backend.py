"""Graph capture without a device: which streams are created, and which are used."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mooncake_hal_cuda.cuda_backend import CudaRuntime


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
