"""Which all-reduces are one exchange over shared memory, and between which ranks."""

from __future__ import annotations

from typing import cast

import pytest
import torch

from mooncake_hal.errors import HalError
from mooncake_hal_cuda import cuda_env
from mooncake_hal_cuda.libcuda import CudaDriver
from mooncake_hal_cuda.memory.memory_kinds import DeviceSharing
from mooncake_hal_cuda.one_shot_all_reduce import (
    MOST_BYTES,
    WAYS,
    Seat,
    most_bytes,
    takes,
    why_not,
)

KIB = 1 << 10
FIRST, SECOND, HIDDEN = (bytes([number] * 16) for number in (1, 2, 3))


class FakeDriver:
    """Two devices that this process sees."""

    def __init__(self, *, access: bool = True, atomics: bool = True) -> None:
        self._access = access
        self._atomics = atomics

    def count(self) -> int:
        return 2

    def uuid(self, index: int) -> bytes:
        return (FIRST, SECOND)[index]

    def can_access(self, index: int, other: int) -> bool:
        return self._access

    def has_atomics(self, index: int, other: int) -> bool:
        return self._atomics

    def declare(self, signatures: object) -> None:
        pass


def reason_of(driver: FakeDriver, *seats: Seat) -> str:
    return why_not(DeviceSharing(cast(CudaDriver, driver)), 0, seats)


@pytest.mark.parametrize(
    ("dtype", "elements", "limit", "expected"),
    [
        (torch.bfloat16, 8, MOST_BYTES, True),
        (torch.float16, 8 * 4096, MOST_BYTES, True),
        (torch.float32, 4, MOST_BYTES, True),
        (torch.float32, 512 * KIB // 4, 512 * KIB, True),
        (torch.float32, 512 * KIB // 4 + 4, 512 * KIB, False),  # too large
        (torch.bfloat16, 7, MOST_BYTES, False),  # no whole word
        (torch.bfloat16, 0, MOST_BYTES, False),
        (torch.int64, 8, MOST_BYTES, False),
        (torch.float64, 8, MOST_BYTES, False),
    ],
)
def test_what_is_taken(dtype: torch.dtype, elements: int, limit: int, expected: bool) -> None:
    assert takes(torch.empty(elements, dtype=dtype, device="meta"), limit) is expected


def test_more_ranks_take_smaller_messages() -> None:
    assert [most_bytes(ranks) >> 10 for ranks in (2, 3, 8)] == [512, 256, 256]


def test_ranks_of_one_switch_need_no_library() -> None:
    assert reason_of(FakeDriver(), Seat("here", FIRST), Seat("here", SECOND)) == ""


@pytest.mark.parametrize(
    ("driver", "others", "expected"),
    [
        (FakeDriver(), [Seat("there", SECOND)], "the ranks are on different hosts"),
        (FakeDriver(), [Seat("here", SECOND)] * 8, "9 ranks are more than 8"),
        (FakeDriver(), [Seat("here", HIDDEN)], "CUDA_VISIBLE_DEVICES hides a peer's device"),
        (FakeDriver(access=False), [Seat("here", SECOND)], "cuda:0 has no peer access to cuda:1"),
        (FakeDriver(atomics=False), [Seat("here", SECOND)], "no NVLink joins cuda:0 and cuda:1"),
    ],
)
def test_ranks_that_need_it(driver: FakeDriver, others: list[Seat], expected: str) -> None:
    assert reason_of(driver, Seat("here", FIRST), *others).startswith(expected)


def test_the_way_is_one_of_two(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOONCAKE_HAL_CUDA_ALL_REDUCE", "ring")
    with pytest.raises(HalError, match=r"ALL_REDUCE='ring' must be one of \['auto', 'nccl'\]"):
        cuda_env.all_reduce(WAYS)
