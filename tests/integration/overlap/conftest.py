"""What the tests of overlapping steps share: a small model."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.pd import write_model


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama of two layers, with a byte tokenizer."""
    return write_model(tmp_path_factory.mktemp("model"))
