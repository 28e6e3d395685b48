"""The benchmark's KV transfer on the emulated device: small, and with its result checked."""

from __future__ import annotations

import numpy as np
import pytest
from support.kv_transfer_case import KVTransferCase, Reader, reading

from mooncake_hal.kv.geometry import AttentionKind, KVGeometry
from mooncake_hal.testing.transports_peer import content
from mooncake_hal.transport import EndpointOptions

GEOMETRY = KVGeometry(AttentionKind.GQA, 2, 4, (16, 16), "bfloat16", 2)
OPTIONS = EndpointOptions(secret=b"test", device="cuda:0")
DEVICE = ("support.cuda_emulation:load_ipc", "support.cuda_emulation:allocate")


def expected(case: KVTransferCase, reader: Reader) -> np.ndarray:
    """The expected pool after the read, span by span."""
    base, found = reader.pool.region.address, reader.pool.get()
    for plan in reader.plans:
        region = reader.remotes[plan.peer]
        there = content(1 + plan.peer, region.nbytes)
        spans = plan.spans
        for to, of, size in zip(spans.local, spans.remote, spans.nbytes, strict=True):
            begin, source = int(to) - base, int(of) - region.address
            found[begin : begin + int(size)] = there[source : source + int(size)]
    return found


@pytest.mark.parametrize("layout", ["BHLPT", "LPBHT"])
@pytest.mark.parametrize("ranks", [(2, 1), (1, 2)])
def test_different_numbers_of_ranks(layout: str, ranks: tuple[int, int]) -> None:
    case = KVTransferCase(GEOMETRY, layout, *ranks, tokens=64)
    with reading(case, *DEVICE, OPTIONS) as reader:
        wanted = expected(case, reader)
        assert not np.array_equal(reader.pool.get(), wanted)
        reader.read()
        assert np.array_equal(reader.pool.get(), wanted)
