"""Queue pairs and memory regions by libibverbs' public ABI, on a device of this host."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing

import numpy as np
import pytest

from mooncake_hal.errors import TransportUnavailable
from mooncake_hal.testing.transports import MIB, TransportKit
from mooncake_hal.testing.transports_buffers import anonymous, random_pieces
from mooncake_hal.transports.rdma import nic as nic_module, verbs
from mooncake_hal.transports.rdma.nic import Nic
from mooncake_hal.transports.rdma.rdma_plugin import active_ports
from mooncake_hal.transports.rdma.rdma_settings import RdmaSettings

pytestmark = [pytest.mark.rdma, pytest.mark.timeout(900)]


class TestPosting(TransportKit):
    """Between two endpoints of one process."""

    loader = "mooncake_hal.transports.rdma.rdma_plugin:load"
    timeout = 60.0

    def test_pieces_of_every_length_arrive(self) -> None:
        pair = self.pair()
        self.check_moves(pair, random_pieces(self.rng, np.arange(1, 400, dtype=np.int64), MIB))


@pytest.fixture
def nic() -> Iterator[Nic]:
    nic = Nic(0, active_ports()[0], RdmaSettings())
    yield nic
    nic.close()


def test_closing_the_port_closes_its_queue_pairs_and_memory() -> None:
    nic = Nic(0, active_ports()[0], RdmaSettings())
    with closing(anonymous(MIB)) as buffer:
        pair, served = nic.queue_pair(), nic.queue_pair(sends=False)
        memory = nic.register(buffer.region)
        assert memory.lkey
        nic.close()
        for left in (pair, served, memory, nic):
            left.close()  # again: nothing is destroyed twice
    with pytest.raises(TransportUnavailable, match="is closed"):
        nic.queue_pair()


def test_closed_queue_pair_rejects_every_call(nic: Nic) -> None:
    pair = nic.queue_pair()
    info = pair.info()
    pair.close()
    for call in (lambda: pair.connect(info), lambda: pair.completions(1), pair.take_event):
        with pytest.raises(TransportUnavailable, match="is closed"):
            call()


def test_error_names_the_call_that_the_device_rejects(nic: Nic) -> None:
    nic.window = 1 << 30
    with pytest.raises(TransportUnavailable, match=r"no queue pair: .*ibv_create_cq: Invalid"):
        nic.queue_pair()


def test_error_names_the_missing_device() -> None:
    with pytest.raises(TransportUnavailable, match=r"no device 'mlx5_99', it lists \['"):
        verbs.open_device("mlx5_99")
    with pytest.raises(TransportUnavailable, match="mlx5_99:1 can't be queried"):
        nic_module.query_port("mlx5_99", 1)
