"""Fixtures of tests with two instances: a small model, and a gated transport."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from support.pd import write_model
from support.pd_transport import GATE, Gate, install


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama of two layers."""
    return write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session")
def plugin_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory that installs the gated transport for processes that have it on their path."""
    return install(tmp_path_factory.mktemp("plugins"))


@pytest.fixture
def gate(plugin_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    """The gate of the gated transport in this process, initially open."""
    monkeypatch.syspath_prepend(str(plugin_path))
    GATE.reset()
    yield GATE
    GATE.reset()
