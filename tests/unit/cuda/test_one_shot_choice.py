"""Which all-reduces run as a one-shot kernel over shared memory, and between which ranks."""

from __future__ import annotations

from typing import cast

import pytest
import torch

from mooncake_hal.errors import HalError
from mooncake_hal_cuda import cuda_env
from mooncake_hal_cuda.libcuda import CudaDriver
from mooncake_hal_cuda.memory.memory_kinds import DeviceSharing
from mooncake_hal_cuda.one_shot_all_reduce import (
    IMPLEMENTATIONS,
    MAX_BYTES,
    RankDevice,
    max_message_bytes,
    supports,
    unsupported_reason,
)

KIB = 1 << 10
FIRST, SECOND, HIDDEN = (bytes([number] * 16) for number in (1, 2, 3))


class FakeDriver:
    """A driver with two visible devices."""

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


def reason_of(driver: FakeDriver, *devices: RankDevice) -> str:
    return unsupported_reason(DeviceSharing(cast(CudaDriver, driver)), 0, devices)


@pytest.mark.parametrize(
    ("dtype", "elements", "limit", "expected"),
    [
        (torch.bfloat16, 8, MAX_BYTES, True),
        (torch.float16, 8 * 4096, MAX_BYTES, True),
        (torch.float32, 4, MAX_BYTES, True),
        (torch.float32, 512 * KIB // 4, 512 * KIB, True),
        (torch.float32, 512 * KIB // 4 + 4, 512 * KIB, False),  # too large
        (torch.bfloat16, 7, MAX_BYTES, False),  # not a whole number of words
        (torch.bfloat16, 0, MAX_BYTES, False),
        (torch.int64, 8, MAX_BYTES, False),
        (torch.float64, 8, MAX_BYTES, False),
    ],
)
def test_tensors_of_supported_types_and_sizes_are_supported(
    dtype: torch.dtype, elements: int, limit: int, expected: bool
) -> None:
    assert supports(torch.empty(elements, dtype=dtype, device="meta"), limit) is expected


def test_larger_groups_support_smaller_messages() -> None:
    assert [max_message_bytes(ranks) >> 10 for ranks in (2, 3, 8)] == [512, 256, 256]


def test_ranks_with_nvlink_are_supported() -> None:
    assert reason_of(FakeDriver(), RankDevice("here", FIRST), RankDevice("here", SECOND)) == ""


@pytest.mark.parametrize(
    ("driver", "others", "expected"),
    [
        (FakeDriver(), [RankDevice("there", SECOND)], "the ranks are on different hosts"),
        (FakeDriver(), [RankDevice("here", SECOND)] * 8, "the group has 9 ranks, at most 8 are"),
        (FakeDriver(), [RankDevice("here", HIDDEN)], "CUDA_VISIBLE_DEVICES hides a peer's device"),
        (
            FakeDriver(access=False),
            [RankDevice("here", SECOND)],
            "cuda:0 has no peer access to cuda:1",
        ),
        (FakeDriver(atomics=False), [RankDevice("here", SECOND)], "no NVLink connects cuda:0 and"),
    ],
)
def test_unsupported_groups_have_a_reason(
    driver: FakeDriver, others: list[RankDevice], expected: str
) -> None:
    assert reason_of(driver, RankDevice("here", FIRST), *others).startswith(expected)


def test_invalid_implementation_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOONCAKE_HAL_CUDA_ALL_REDUCE", "ring")
    with pytest.raises(HalError, match=r"ALL_REDUCE='ring' must be one of \['auto', 'nccl'\]"):
        cuda_env.all_reduce(IMPLEMENTATIONS)
