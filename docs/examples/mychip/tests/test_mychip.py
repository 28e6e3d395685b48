"""All that the chip's owner writes to have every op, the memory and the runtime tested."""

from __future__ import annotations

from dataclasses import replace

import pytest

from mooncake_hal.testing.backends import BackendBasics
from mooncake_hal.testing.backends_host_copies import HostCopiesSuite
from mooncake_hal.testing.backends_ops import OpsSuite
from mooncake_hal.testing.backends_rows import RowsSuite
from mooncake_hal.testing.transports import TransportConformance
from mooncake_hal.testing.transports_staged import StagedBetweenKinds
from mooncake_hal.transport import EndpointOptions


class TestMyChip(BackendBasics, OpsSuite, RowsSuite, HostCopiesSuite):
    """``BackendConformance`` has the collectives too; this chip has none yet."""

    backend_name = "mychip"


@pytest.fixture(autouse=True)
def on_the_chip(monkeypatch: pytest.MonkeyPatch) -> None:
    """The suites' buffers are the backend's that is named here."""
    monkeypatch.setenv("MOONCAKE_HAL_BACKEND", "mychip")


class TestStaged(TransportConformance):
    """KV of the chip through the host's memory; a real chip also has
    ``TransportProcessConformance``, whose peers are processes of their own."""

    loader = "staged"
    allocator = "mooncake_hal.testing.transports_device:first"

    def options(self) -> EndpointOptions:
        return replace(super().options(), device="mychip:0")


class TestStagedBetweenKinds(StagedBetweenKinds):
    device = "mychip:0"
