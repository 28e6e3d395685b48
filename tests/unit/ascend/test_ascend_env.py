"""Environment variables that the Ascend backend reads."""

from __future__ import annotations

import pytest

from mooncake_hal.errors import HalError
from mooncake_hal_ascend import ascend_env


@pytest.mark.parametrize(("value", "mib"), [("", 200), ("300", 300)])
def test_group_buffer_size(monkeypatch: pytest.MonkeyPatch, value: str, mib: int) -> None:
    monkeypatch.setenv("HCCL_BUFFSIZE", value)
    assert ascend_env.group_buffer_bytes() == mib << 20


@pytest.mark.parametrize("value", ["0", "-1", "2.5", "many"])
def test_invalid_group_buffer_size_is_rejected(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv("HCCL_BUFFSIZE", value)
    with pytest.raises(HalError, match=f"HCCL_BUFFSIZE='{value}' must be a whole number of MiB"):
        ascend_env.group_buffer_bytes()
