"""KV between two processes of one GPU over ``cuda_ipc``, beside a copy inside the device."""

from __future__ import annotations

import time
from contextlib import closing
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from support.cuda_device import allocate
from support.figures import Figure, record

from mooncake_hal.errors import BackendUnavailable
from mooncake_hal.registry import Registry
from mooncake_hal.testing.backends import load_backend
from mooncake_hal.testing.transports_peer import PeerProcess
from mooncake_hal.transport import EndpointOptions, Spans

pytestmark = pytest.mark.cuda
NBYTES = 1 << 30
ROUNDS = 10
OPTIONS = EndpointOptions(secret=b"bench", device="cuda:0")
PIECES = {"whole blocks of BHLPT": 2 << 20, "half of the heads": 1 << 20, "layerwise": 32 << 10}


@pytest.mark.parametrize("name", PIECES)
def test_handover(benchmark: Any, name: str) -> None:
    """Blocks in any order on both sides."""
    try:
        load_backend("cuda").runtime.bind_thread(0)
    except BackendUnavailable as exc:
        pytest.skip(str(exc))
    size = PIECES[name]
    endpoint = Registry.discover().load_transport("cuda_ipc").open(OPTIONS)
    child = PeerProcess("cuda_ipc", "support.cuda_device:allocate", OPTIONS, NBYTES)
    with closing(endpoint), closing(child), closing(allocate(NBYTES)) as here:
        endpoint.register(here.region)
        peer = endpoint.connect(child.address, timeout=60)
        rng, count = np.random.default_rng(1), NBYTES // size
        near, far = (rng.permutation(count).astype(np.uint64) * np.uint64(size) for _ in range(2))
        spans = Spans(
            near + np.uint64(here.region.address),
            far + np.uint64(child.region.address),
            np.full(count, size, np.uint64),
        )
        taken = best_of(lambda: peer.read(spans, timeout=60).wait())
    source = torch.empty(NBYTES, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)

    def copy() -> None:
        target.copy_(source)
        torch.cuda.synchronize()

    plain = best_of(copy)
    figure = Figure(f"cuda_ipc, {name}", plain / taken, 0.85, "of copy")
    record(benchmark, replace(figure, context=f"{NBYTES / taken / 1e9:.0f} GB/s"))
    benchmark(lambda: None)  # the figure is what counts


def best_of(run: Any) -> float:
    """Seconds of the fastest round, after one that does not count."""
    run()
    times = []
    for _ in range(ROUNDS):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return min(times)
