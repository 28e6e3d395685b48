"""Fixtures of benchmarks that need an NVIDIA GPU; without one, each is skipped with the probe's
reason."""

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
    """Free the memory of a benchmark for the next one."""
    yield
    gc.collect()
    torch.cuda.empty_cache()
