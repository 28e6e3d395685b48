"""The arrival counters by which a decode's programs determine which of them is the last."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch

from mooncake_hal.errors import DeviceError

pytest.importorskip("triton", reason="needs triton: ci/install dev installs it on Linux")

from mooncake_hal_cuda import attention_launch

GPU = torch.device("cuda", 0)


class Streams:
    """A stand-in for torch's stream functions of a GPU."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.current = 1
        self.is_capturing = False
        cuda, zeros = torch.cuda, torch.zeros
        monkeypatch.setattr(
            cuda, "current_stream", lambda device: SimpleNamespace(cuda_stream=self.current)
        )
        monkeypatch.setattr(cuda, "is_current_stream_capturing", lambda: self.is_capturing)
        monkeypatch.setattr(
            torch, "zeros", lambda count, *, dtype, device: zeros(count, dtype=dtype)
        )


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> Iterator[Streams]:
    attention_launch._zeros.cache_clear()
    yield Streams(monkeypatch)
    attention_launch._zeros.cache_clear()


def test_each_stream_has_its_own_counters(streams: Streams) -> None:
    first = attention_launch._arrivals(5000, GPU)
    assert first.shape == (8192,)
    assert attention_launch._arrivals(8000, GPU) is first
    streams.current = 2
    assert attention_launch._arrivals(5000, GPU) is not first


def test_capture_reuses_the_counters_of_the_previous_run(streams: Streams) -> None:
    """It allocates none: zeros that are allocated during a capture are filled only by replays."""
    made = attention_launch._arrivals(64, GPU)
    streams.is_capturing = True
    assert attention_launch._arrivals(4096, GPU) is made
    with pytest.raises(DeviceError, match="run a step on the stream that captures it first"):
        attention_launch._arrivals(4097, GPU)
