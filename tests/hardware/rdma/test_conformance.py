"""The transport suite over real verbs: soft-RoCE in the VM of ``make test-rdma``, or a real NIC."""

from __future__ import annotations

import pytest

from mooncake_hal.testing.transports import MIB, TransportConformance
from mooncake_hal.testing.transports_process import TransportProcessConformance

pytestmark = [pytest.mark.rdma, pytest.mark.timeout(900)]

LOADER = "mooncake_hal.transports.rdma.rdma_plugin:load"
LARGE = 16 * MIB
"""Takes a third of a second over soft-RoCE on an emulated processor."""


class TestRdma(TransportConformance):
    """Between two endpoints of one process."""

    loader = LOADER
    timeout = 120.0
    large = LARGE


class TestRdmaProcesses(TransportProcessConformance):
    """Between two processes."""

    loader = LOADER
    timeout = 120.0
    large = LARGE
    death_seconds = 60.0
    stopped_seconds = 10.0  # never waited for: the NIC works without the stopped process
