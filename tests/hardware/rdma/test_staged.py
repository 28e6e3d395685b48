"""``staged`` over real verbs: device memory is transferred through memory that NICs can access.

The whole suite runs over tcp elsewhere; running it here would double the VM's time.
"""

from __future__ import annotations

import pytest
from support.host_device import DEVICE
from support.staged_over_rdma import ALLOCATOR, LOADER, StagedOverRdma

from mooncake_hal.testing.transports import MIB
from mooncake_hal.testing.transports_staged import StagedBetweenKinds

pytestmark = [pytest.mark.rdma, pytest.mark.timeout(900)]

LARGE = 16 * MIB
"""See ``test_conformance``."""


class TestStaged(StagedOverRdma):
    timeout, large = 120.0, LARGE


class TestStagedBetweenKinds(StagedBetweenKinds):
    device = DEVICE
    loader, allocator = LOADER, ALLOCATOR
    timeout, large = 120.0, LARGE
