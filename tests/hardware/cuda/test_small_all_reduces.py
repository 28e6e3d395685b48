"""All-reduces between GPUs: each rank's results, eagerly and in graphs, over memory and by NCCL."""

from __future__ import annotations

import pytest
import torch
from support.cuda_group import on_gpus, require_gpus, small_sums

from mooncake_hal.backend import Backend

pytestmark = [pytest.mark.cuda, pytest.mark.multi_device, pytest.mark.timeout(600)]


@pytest.mark.parametrize("way", ["auto", "nccl"])
@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_every_rank_has_the_same_right_sum(cuda: Backend, ranks: int, way: str) -> None:
    require_gpus(cuda, ranks)
    first, *others = on_gpus(ranks, small_sums, way)
    for other in others:
        for (mine, _), (theirs, _) in zip(first, other, strict=True):
            assert torch.equal(mine, theirs)
    for found, expected in first:
        tolerance = 4 * torch.finfo(found.dtype).eps
        torch.testing.assert_close(found.double(), expected, rtol=tolerance, atol=8 * tolerance)
