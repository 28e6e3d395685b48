"""Small all-reduces between processes of the emulated device; needs TRITON_INTERPRET=1.

The kernel is the GPU's, interpreted; its atomic operations act on memory that the processes share.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from support import all_reduce_ranks
from support.all_reduce_ranks import on_ranks
from support.emulated_devices import KINDS

from mooncake_hal.testing.backends import run_ranks


@pytest.mark.parametrize("world_size", [2, 3])
def test_sums_are_added_in_rank_order(world_size: int) -> None:
    assert on_ranks(world_size, all_reduce_ranks.sums) == [None] * world_size


def test_only_small_sums_of_whole_words_use_the_kernel() -> None:
    expected = [True, False, True, False, False]
    assert on_ranks(2, all_reduce_ranks.others_sizes) == [expected] * 2


def test_a_lost_rank_ends_the_kernel() -> None:
    error, _ = on_ranks(2, all_reduce_ranks.without_the_last, timeout_s=1e-4)
    assert "all-reduce: a rank is lost, or did not come in time" in error


@pytest.mark.parametrize(
    ("lacks", "reason"),
    [
        (
            "fd",
            "memory can't be shared by descriptor: no fabric: the device exports no descriptors",
        ),
        ("vmm", "the device has no virtual memory management"),
        ("export", "cuMemExportToShareableHandle failed: operation not supported"),
    ],
)
def test_a_rank_that_can_not_share_memory_makes_all_ranks_use_nccl(lacks: str, reason: str) -> None:
    (first, logged), (second, nothing) = on_ranks(2, all_reduce_ranks.refused, "", lacks)
    assert (first, second) == (False, False)
    assert logged.startswith("all-reduces of all sizes run on NCCL: rank 1: ")
    assert reason in logged
    assert nothing == ""  # only the first rank logs the reason


def test_one_rank_that_requests_nccl_makes_all_ranks_use_it() -> None:
    (first, logged), (second, _) = on_ranks(2, all_reduce_ranks.nccl_requested)
    assert (first, second) == (False, False)
    assert logged.endswith("NCCL: rank 1: MOONCAKE_HAL_CUDA_ALL_REDUCE=nccl requests it")


def test_a_failed_exchange_is_undone_on_all_ranks() -> None:
    (first, logged), (second, _) = on_ranks(2, all_reduce_ranks.without_descriptors)
    assert (first, second) == (False, False)
    assert "rank 0: received no descriptor of the peer's memory within 0.2 s" in logged


@pytest.mark.parametrize("world_size", [2, 3])
def test_the_communicator_suite(monkeypatch: pytest.MonkeyPatch, world_size: int) -> None:
    """Including the library's collectives, in two groups at once."""
    path = [str(folder) for folder in KINDS["cuda"].folders]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(path))
    monkeypatch.setenv("MOONCAKE_HAL_BLOCK", "cuda")
    monkeypatch.setenv("EMULATED_CUDA_KERNELS", "interpreted")
    assert Path(path[0]).is_dir()
    for status, output in run_ranks("cuda", "collectives", world_size):
        assert status == 0, output
