"""Ranks on several GPUs of this machine: one process each, with a communicator of the backend."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from support.cuda_timing import seconds_of
from support.rank_processes import at_once

from mooncake_hal.backend import Backend, Communicator, GroupSpec
from mooncake_hal.testing.backends import free_port, load_backend

OnRank = Callable[[Backend, Communicator], Any]
REPLAYS = 5
IN_GRAPH = 32


def require_gpus(cuda: Backend, count: int) -> None:
    """Skip unless the machine has that many GPUs."""
    there = len(cuda.runtime.devices())
    if there < count:
        pytest.skip(f"needs {count} GPUs, this machine shows {there}")


def on_gpus(ranks: int, run: OnRank, way: str = "auto") -> list[Any]:
    """Run a function on each rank, with that kind of small all-reduces; return the results."""
    meeting = f"tcp://127.0.0.1:{free_port()}"
    groups = (GroupSpec(rank, ranks, meeting) for rank in range(ranks))
    return at_once([partial(_one, run, group, way) for group in groups], 300.0)


def _one(run: OnRank, group: GroupSpec, way: str) -> Any:
    os.environ["MOONCAKE_HAL_CUDA_ALL_REDUCE"] = way
    cuda = load_backend("cuda")
    cuda.runtime.bind_thread(group.rank)
    torch.set_default_device(cuda.runtime.device(group.rank))
    communicator = cuda.communicator(group)
    try:
        return run(cuda, communicator)
    finally:
        torch.cuda.synchronize()
        communicator.close()


def small_sums(cuda: Backend, group: Communicator) -> list[list[torch.Tensor]]:
    """Sums of changing sizes and types, then replays of a graph of sums: (found, float64) pairs."""
    pairs = []
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        for nbytes in (16, 200 << 10, 8 << 10, 1 << 20, 24 << 10, 12):
            parts = _addends(group.world_size, dtype, nbytes)
            found = group.all_reduce(parts[group.rank].clone())
            pairs.append([found.cpu(), parts.double().sum(0).cpu()])
    parts = _addends(group.world_size, torch.bfloat16, 64 << 10)
    given, small = torch.empty_like(parts[0]), torch.empty(8, dtype=torch.bfloat16)

    def twice() -> None:
        group.all_reduce(given)
        group.all_reduce(small.zero_())

    graph = cuda.runtime.capture(twice)
    for times in range(1, REPLAYS + 1):
        given.copy_(parts[group.rank] * times)
        graph.replay()
        pairs.append([given.cpu(), (parts * times).double().sum(0).cpu()])
    return pairs


def seconds_of_sums(nbytes: int, cuda: Backend, group: Communicator) -> float:
    """Seconds of one all-reduce in bfloat16: the median over replays of a graph of many."""
    x = torch.zeros(nbytes // 2, dtype=torch.bfloat16)

    def many() -> None:
        for _ in range(IN_GRAPH):
            group.all_reduce(x)

    return seconds_of(cuda, many) / IN_GRAPH


def _addends(ranks: int, dtype: torch.dtype, nbytes: int) -> torch.Tensor:
    """Each rank's input, [ranks, elements]; every rank computes the same values."""
    chance = torch.Generator("cpu").manual_seed(nbytes)
    shape = (ranks, nbytes // dtype.itemsize)
    return torch.randn(shape, generator=chance, device="cpu").to(dtype).cuda()
