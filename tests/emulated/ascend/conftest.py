"""Every test starts on the first NPU."""

from __future__ import annotations

import pytest
import torch_npu


@pytest.fixture(autouse=True)
def first_device() -> None:
    """Tests of several devices leave another one current."""
    torch_npu.npu.set_device(0)
