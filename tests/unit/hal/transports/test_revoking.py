"""What peers see of a region that is being revoked."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from mooncake_hal.errors import RegionRevoked
from mooncake_hal.testing.transports import one_span
from mooncake_hal.testing.transports_buffers import load_transport, resolve
from mooncake_hal.transport import Endpoint, EndpointOptions

ANONYMOUS = "mooncake_hal.testing.transports_buffers:anonymous"


class Pair:
    """Two endpoints; the far one has two regions, the near one has one."""

    def __init__(self, stack: ExitStack) -> None:
        transport = load_transport("shm")
        options = EndpointOptions(secret=b"a region that goes")
        opened: list[Any] = [transport.open(options) for _ in range(2)]
        self.near, self.far = opened
        self.here, self.there, self.other = (resolve(ANONYMOUS)(4096) for _ in range(3))
        for each in (self.here, self.there, self.other, *opened):
            stack.callback(each.close)
        self.near.register(self.here.region)
        self.key = self.far.register(self.there.region)
        self.far.register(self.other.region)


@pytest.fixture
def pair() -> Iterator[Pair]:
    with ExitStack() as stack:
        yield Pair(stack)


def during_detach(endpoint: Endpoint, action: Callable[[], None], monkeypatch: Any) -> None:
    """Call something while the endpoint deregisters memory."""
    data_path = endpoint._data_path
    real = data_path.detach

    def detach(key: int) -> None:
        action()
        real(key)

    monkeypatch.setattr(data_path, "detach", detach)


def test_a_peer_knows_that_a_region_is_revoked_before_its_memory_is_gone(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise a NIC's refusal would not be explained by the notice that is still to come."""
    peer = pair.near.connect(pair.far.address, timeout=5)
    seen = []

    def look() -> None:
        peer._session.barrier(5)  # after it, all notices have arrived
        with pytest.raises(RegionRevoked) as refused:
            peer._session.regions.table.find(pair.there.region.address, 64)
        seen.append(refused.value)

    during_detach(pair.far, look, monkeypatch)
    pair.far.revoke(pair.key)
    assert len(seen) == 1


def test_a_peer_that_connects_while_a_region_is_revoked_keeps_its_connection(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    peers = []
    during_detach(
        pair.far,
        lambda: peers.append(pair.near.connect(pair.far.address, timeout=5)),
        monkeypatch,
    )
    pair.far.revoke(pair.key)
    spans = one_span(pair.here.region.address, pair.other.region.address, 64)
    peers[0].read(spans, timeout=5).wait()
