"""The transport suite over real verbs: soft-RoCE in the VM of ``make test-rdma``, or a real NIC."""

from __future__ import annotations

import pytest

from mooncake_hal.testing.transports import MIB, TransportConformance
from mooncake_hal.testing.transports_process import TransportProcessConformance
from mooncake_hal.transports.rdma.rdma_plugin import active_ports

pytestmark = [pytest.mark.rdma, pytest.mark.timeout(900)]

LOADER = "mooncake_hal.transports.rdma.rdma_plugin:load"
LARGE = 16 * MIB
"""Takes a third of a second over soft-RoCE on an emulated processor."""
IS_SOFT = any(port.startswith("rxe") for port in active_ports())
"""Whether the devices are soft-RoCE's."""


class TestRdma(TransportConformance):
    """Between two endpoints of one process."""

    loader = LOADER
    timeout = 120.0
    large = LARGE
    moves_4_gib = not IS_SOFT  # it would take minutes
    registers_4_gib = not IS_SOFT  # all of it is pinned, and the VM has less


class TestRdmaProcesses(TransportProcessConformance):
    """Between two processes."""

    loader = LOADER
    timeout = 120.0
    large = LARGE
    death_seconds = 60.0
    stopped_seconds = 10.0  # never waited for: the NIC works without the stopped process
