"""The transport suite over other people's engines; run by ci/test-adapters, which installs them."""

from __future__ import annotations

import pytest

from mooncake_hal.testing.transports import TransportConformance
from mooncake_hal.testing.transports_process import TransportProcessConformance

pytestmark = pytest.mark.timeout(180)


class TestMooncake(TransportConformance, TransportProcessConformance):
    loader = "mooncake_hal.transports.adapters.mooncake_plugin:load"
    timeout = 60.0


class TestNixl(TransportConformance, TransportProcessConformance):
    """Over what UCX chooses: within a host, shared memory."""

    loader = "mooncake_hal.transports.adapters.nixl_plugin:load"
    timeout = 60.0


class TestNixlTcp(TestNixl):
    """What it does between hosts without RDMA."""

    @pytest.fixture(autouse=True)
    def only_tcp(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("UCX_TLS", "tcp")
