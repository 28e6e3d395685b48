"""The transport suite over real verbs: soft-RoCE in the VM of ``make test-rdma``, or a real NIC."""

from __future__ import annotations

import pytest

from mooncake_hal.testing.transports import TransportConformance
from mooncake_hal.testing.transports_process import TransportProcessConformance

pytestmark = [pytest.mark.rdma, pytest.mark.timeout(900)]

LOADER = "mooncake_hal.transports.rdma.plugin:load"


class TestRdma(TransportConformance):
    """Between two endpoints of one process."""

    loader = LOADER
    timeout = 120.0


class TestRdmaProcesses(TransportProcessConformance):
    """Between two processes."""

    loader = LOADER
    timeout = 120.0
