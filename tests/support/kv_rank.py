"""A rank's memory and messages, for tests of workers without a core."""

from __future__ import annotations

import time
from collections.abc import Callable

from mooncake_hal.kv.geometry import AttentionKind, KVGeometry, shard_of
from mooncake_hal.kv.layout import layout_bytes, make_layout
from mooncake_hal.registry import Registry
from mooncake_kv.config import KVTransferConfig
from mooncake_kv.connector_worker import RankContext, RankMemory

GEOMETRY = KVGeometry(AttentionKind.GQA, 2, 2, (8, 8), "float32", 4)
NUM_BLOCKS, BLOCK_SIZE = 4, 16
TIMEOUT_S = 20.0


class Rank:
    """The context that workers run in, and the messages that they sent to the core."""

    def __init__(self) -> None:
        registry = Registry.discover()
        backend = registry.select_backend("cpu")
        shard = shard_of(GEOMETRY, 1, 0)
        nbytes = layout_bytes(GEOMETRY, shard, NUM_BLOCKS, BLOCK_SIZE)
        self.allocation = backend.memory.allocate(nbytes, 0)
        region = self.allocation.region
        layout = make_layout("BHLPT", GEOMETRY, shard, NUM_BLOCKS, BLOCK_SIZE)
        self.sent: list[bytes] = []
        self.failures: list[BaseException] = []
        self.context = RankContext(
            0,
            KVTransferConfig(transports=("tcp",)),
            RankMemory(GEOMETRY, shard, layout.shifted(region.address), (region,), ()),
            registry,
            make_event=lambda: backend.runtime.event(0),
            bind_thread=lambda: backend.runtime.bind_thread(0),
            emit=self.sent.append,
            fail=self.failures.append,
        )


def wait_for(found: Callable[[], object]) -> None:
    """Wait until the condition holds."""
    deadline = time.monotonic() + TIMEOUT_S
    while not found():
        assert time.monotonic() < deadline
        time.sleep(0.001)
