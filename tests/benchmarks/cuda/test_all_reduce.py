"""Small all-reduces over memory shared by GPUs of one host, compared with NCCL; needs several
GPUs."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
from support.cuda_group import on_gpus, require_gpus, seconds_of_sums
from support.figures import Figure, record

from mooncake_hal.backend import Backend

pytestmark = [pytest.mark.cuda, pytest.mark.multi_device, pytest.mark.timeout(600)]


@pytest.mark.parametrize("kib", [8, 64, 256])
@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_small_all_reduce(cuda: Backend, benchmark: Any, ranks: int, kib: int) -> None:
    """1, 8 and 32 rows of 4,096 in bfloat16: the slowest rank's time, in a graph of many calls."""
    require_gpus(cuda, ranks)
    run = partial(seconds_of_sums, kib << 10)
    ours, theirs = (max(on_gpus(ranks, run, way)) for way in ("auto", "nccl"))
    title = f"all-reduce beside NCCL, {ranks} GPUs, {kib} KiB"
    times = f"{ours * 1e6:.1f} against {theirs * 1e6:.1f} us"
    record(benchmark, Figure(title, theirs / ours, 1.0, "times", context=times))
    benchmark(lambda: None)  # the recorded metric decides
