"""The buffer of each request's newest sampled token on the device, across batches."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from mooncake_engine.execution.async_model_runner import SampledTokenBuffer
from mooncake_engine.execution.request_table import CachedRequest
from mooncake_engine.sampling_params import SamplingParams
from mooncake_engine.scheduling.step_plan import NewRequest


def request(row: int) -> CachedRequest:
    return CachedRequest(NewRequest(f"r{row}", (1,), 1, SamplingParams(), 0, ()), row, None)


A, B, C = (request(row) for row in range(3))


def filled(
    buffer: SampledTokenBuffer, states: Sequence[CachedRequest], at: Sequence[int]
) -> list[int]:
    token_ids = torch.zeros(4, dtype=torch.int64)
    buffer.fill(token_ids, at, states)
    found: list[int] = token_ids.tolist()
    return found


def test_each_request_has_its_newest_token() -> None:
    buffer = SampledTokenBuffer(1, torch.device("cpu"), depth=2)  # the buffer grows
    buffer.store([A, B], torch.tensor([10, 20]))
    assert filled(buffer, [A, B], [0, 1]) == [10, 20, 0, 0]
    buffer.store([A, B], torch.tensor([11, 21]))
    assert filled(buffer, [B, A], [0, 2]) == [21, 0, 11, 0]
    buffer.store([C], torch.tensor([30]))
    assert filled(buffer, [A, B, C], [0, 1, 2]) == [11, 21, 30, 0]
    buffer.store([A, C], torch.tensor([12, 31]))
    assert filled(buffer, [A, B, C], [1, 2, 3]) == [0, 12, 21, 31]


def test_request_in_a_reused_row_has_its_own_token() -> None:
    buffer = SampledTokenBuffer(3, torch.device("cpu"), depth=2)
    buffer.store([A, B], torch.tensor([10, 20]))
    later = request(B.row)
    buffer.store([A, later], torch.tensor([11, 40]))
    assert filled(buffer, [later, A], [0, 1]) == [40, 11, 0, 0]
