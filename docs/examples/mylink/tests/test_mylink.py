"""Everything that a transport's author has to write to test it."""

from __future__ import annotations

import pytest

from mooncake_hal.testing.transports import TransportConformance
from mooncake_hal.testing.transports_process import TransportProcessConformance

pytestmark = pytest.mark.timeout(180)


class TestMyLink(TransportConformance, TransportProcessConformance):
    loader = "mylink.mylink_plugin:load"
    timeout = 120.0  # a request per piece
    moves_4_gib = False  # it would take minutes
