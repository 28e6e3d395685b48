"""Benchmarks that need an NVIDIA GPU; without one each is a skip with the probe's reason."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import torch
from support.cuda_device import require_cuda

from mooncake_hal.backend import Backend


@pytest.fixture(scope="session")
def cuda() -> Backend:
    return require_cuda()


@pytest.fixture(autouse=True)
def emptied(cuda: Backend) -> Iterator[None]:
    """What a benchmark took is the next one's."""
    yield
    gc.collect()
    torch.cuda.empty_cache()
