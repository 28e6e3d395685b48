"""Both ways of posting to a queue pair of the installed pyverbs."""

from __future__ import annotations

import numpy as np
import pytest

from mooncake_hal.testing.transports import MIB, TransportKit
from mooncake_hal.testing.transports_buffers import random_pieces
from mooncake_hal.transports.rdma import compat

pytestmark = [pytest.mark.rdma, pytest.mark.timeout(900)]

SLOW = "posting through pyverbs objects"


class TestPosting(TransportKit):
    """Between two endpoints of one process."""

    loader = "mooncake_hal.transports.rdma.plugin:load"
    timeout = 60.0

    def test_the_fast_way_works_with_this_pyverbs(self, caplog: pytest.LogCaptureFixture) -> None:
        self.pair()
        assert SLOW not in caplog.text

    def test_the_slow_way_moves_the_same_bytes(
        self, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        monkeypatch.setattr(compat, "_find_struct", lambda pair: None)
        pair = self.pair()
        assert SLOW in caplog.text
        self.check_moves(pair, random_pieces(self.rng, np.arange(1, 400, dtype=np.int64), MIB))
