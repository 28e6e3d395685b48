"""Tests that need an RDMA device; without one they are skipped, or fail where it is required."""

from __future__ import annotations

import os

import pytest

from mooncake_hal.transports.rdma import rdma_plugin

REQUIRED = "RDMA_REQUIRED"
"""Environment variable that ci/test-rdma sets, because skipped tests would prove nothing."""


def pytest_runtest_setup() -> None:
    """Skip, or fail, with the transport's reason."""
    found = rdma_plugin.probe()
    if found.ok:
        return
    if os.environ.get(REQUIRED):
        pytest.fail(f"rdma is required here: {found.reason}")
    pytest.skip(f"rdma: {found.reason}")
