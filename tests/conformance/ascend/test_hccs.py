"""The transport suite over hccs, with fake engines that enforce the rules of Ascend's."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from unittest.mock import patch

import pytest
from support.fake_hccs import DEVICE

from mooncake_hal.testing.transports import TransportConformance
from mooncake_hal.transport import EndpointOptions


@pytest.fixture(autouse=True)
def environment() -> Iterator[None]:
    """Environment variables that the transport sets for the engines are restored after the test."""
    with patch.dict(os.environ):
        yield


class OverHccs(TransportConformance):
    allocator = "support.fake_hccs:NpuBuffer"
    any_region_address = False

    def options(self) -> EndpointOptions:
        return replace(super().options(), device=DEVICE)


class TestMooncake(OverHccs):
    loader = "support.fake_hccs:load_mooncake"


class TestMemfabric(OverHccs):
    loader = "support.fake_hccs:load_memfabric"
