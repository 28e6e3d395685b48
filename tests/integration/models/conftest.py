"""Fixtures of the model tests: a compute thread, the CPU backend, a small random Llama."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.checkpoints import random_model, write_checkpoint
from support.threads import single_thread

from mooncake_hal.backend import Backend
from mooncake_hal.registry import Registry

__all__ = ["single_thread"]


@pytest.fixture(scope="module")
def backend() -> Backend:
    return Registry.discover().select_backend("cpu")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(random_model("llama"), tmp_path_factory.mktemp("llama"))
